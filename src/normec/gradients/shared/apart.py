"""Models that the shared pass may run under a privacy guarantee: all their code treats the records of a batch alone.

The shared pass shows the records of all clients to a model at once. A model of the caller's own may mix them for some
values only (a scale by the largest value, if that is above 1), which no comparison on other values can notice. So a
private run takes the shared pass only where every module is of a type listed here. Types are compared exactly, because
a subclass may override anything.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from ...models import MLP, GroupNormCNN, ResNet20, SmallCNN, resnet
from ...problems.problem import Problem
from .rules import RULED, NoRule, hooked

# They call their children, which are looked at one by one.
_CONTAINERS = {nn.Sequential, nn.ModuleList, nn.ModuleDict}

# The models of this library, whose forward code is known to treat every record alone.
_MODELS = {MLP, SmallCNN, GroupNormCNN, ResNet20, resnet.Block, resnet.Shortcut}

_ELEMENTWISE = {
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU),
    *(nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink),
    *(nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),  # with p > 0 they have no rule
}

# They work over the last dimensions and take the first one for records or channels, which they do not mix.
_POOLS = {
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
}

_KNOWN = {*_CONTAINERS, *_MODELS, *_ELEMENTWISE, *_POOLS, *RULED}

# Where the dimension that a module works over is stored; dimension 0 holds the records.
_DIMENSIONS: dict[type[nn.Module], str] = {
    nn.Flatten: "start_dim",
    nn.Unflatten: "dim",
    nn.Softmax: "dim",
    nn.LogSoftmax: "dim",
}


def refuse_foreign_code(problem: Problem) -> None:
    """Raise `NoRule` if code of the caller's own would see the records of several clients together.

    The loss is evaluated client by client unless it is one of ours (`Shared`), and so are transforms.
    """
    if torch_modules._has_any_global_hook():
        raise NoRule("a hook for all modules would see the records of several clients together")
    for module in problem.model.modules():
        name = type(module).__name__
        if not _treats_records_alone(module):
            raise NoRule(f"{name} is not known to treat every record of a batch alone")
        if hooked(module) or any(callable(value) for value in vars(module).values()):
            raise NoRule(f"a hook of {name} would see the records of several clients together")
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(type(tensor) not in (nn.Parameter, nn.Buffer, Tensor) for tensor in own):
            raise NoRule(f"{name} holds a tensor of another type")


def _treats_records_alone(module: nn.Module) -> bool:
    kind = type(module)
    if kind in _DIMENSIONS:
        dimension = getattr(module, _DIMENSIONS[kind])
        return isinstance(dimension, int) and dimension >= 1
    return kind in _KNOWN
