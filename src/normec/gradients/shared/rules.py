"""The rules for layers that compute gradients of many clients at once, and how a model is made to use them.

The shared pass shows the records of all clients to a model at once. A model of the user's own may mix them for some
values only (it may scale by the largest value if that is above 1, for example), and no comparison on other values
notices this. Therefore a private run uses these rules only if every module is of a type that is listed at the end of
this file (`refuse_foreign_code`); rules by operation serve other models. Types are compared exactly, because a subclass
may override anything.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (autograd's Function.apply is untyped)

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, vmap
from torch._C import _are_functorch_transforms_active as under_vmap
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...models import MLP, GroupNormCNN, ResNet20, SmallCNN, binary_loss, resnet
from ...models.resnet import Shortcut
from ...problems.problem import Problem
from ..own_code import is_hooked
from ..own_vmap_rules import RefuseOwnVmapRules
from .convolution import ConvRows, Geometry, TiledConvRows
from .layers import AffineRows, EmbeddingRows, GroupNormOnHost, LayerNormRows, LinearRows
from .lazy_norms import Norm, may_wait, waiting
from .norms import BatchNormRows, GroupNormPoolRows, GroupNormRows
from .pooling import AdaptiveMaxPoolByKernel, MaxPoolByKernel, ShortcutByKernel
from .recurrent import RECURRENT, Recurrence, run_module
from .slots import GradientSink, Maybe, NoRule, ParameterSlot, parameter_slots

Slots = dict[str, ParameterSlot | None]
Rule = Callable[[Any, Slots, GradientSink, str, Tensor], Any]

LEFT_OUT = -100  # the target of records that cross entropy ignores

# Functions by which a tensor's values reach Python.
_READS = {
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"),
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
}


class RefuseValueAccess(TorchFunctionMode):
    """Refuses code that reads values: `if x.sum() > 0` would decide once for all clients, not for each.

    Under vmap it is known which tensors differ between clients, and others may be read.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = getattr(func, "__name__", "") in _READS
        if reads and (not under_vmap() or any(isinstance(arg, Tensor) and is_batchedtensor(arg) for arg in args)):
            raise NoRule("the model or its loss reads values (if, item), which differ from client to client")
        return func(*args, **(kwargs or {}))


class ModuleModel:
    """A copy of the model whose layers take the records of many clients at once and fill the sink."""

    def __init__(self, problem: Problem) -> None:
        """Raises `NoRule` if a layer has no rule."""
        self._problem, self.model, self.sink = problem, copy.deepcopy(problem.model), GradientSink()
        slots = parameter_slots(self.model, self.sink)
        for name, module in self.model.named_modules():
            _use_rule(module, f"{name}." if name else "", slots, self.sink)
            if isinstance(module, nn.modules.batchnorm._NormBase):
                _hide_statistics(module)
        self.sink.waits = may_wait(self.model)
        self._plain = problem.loss in (F.cross_entropy, binary_loss)
        self.loss_alone = problem.loss  # of one client's outputs
        self.leaves_out = True  # whether targets may be those that cross entropy ignores

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each client, from inputs ``[c · B, ...]`` and targets ``[c, B, ...]``."""
        clients, loss = len(targets), self._problem.loss
        outputs = self.outputs(inputs)
        if self._plain:
            flat = targets.flatten(0, 1)
            each = (
                F.cross_entropy(outputs, flat, reduction="none")
                if loss is F.cross_entropy
                else F.binary_cross_entropy_with_logits(outputs, flat.to(outputs), reduction="none")
            )
            each = each.reshape(clients, -1)
            if loss is F.cross_entropy and self.leaves_out and not targets.is_floating_point():
                return each.sum(1) / (targets != LEFT_OUT).flatten(1).sum(1)
            return each.mean(1)
        split = outputs.view(clients, -1, *outputs.shape[1:])
        if self.sink.by_record:
            return vmap(loss)(split, targets)
        return torch.stack([self.loss_alone(own, target) for own, target in zip(split, targets, strict=True)])

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the model makes of the records of all clients; on a GPU with lazy norms."""
        self.model.train()
        with waiting(self.sink):
            found: Tensor = tree_map(self.sink.used, self.model(inputs))
        return found

    def guard(self, modes: Collection[type] = ()) -> AbstractContextManager[object]:
        """Return the context of the forward and backward pass, in which no code of the user sees several records."""
        by_vmap = self.sink.by_record and not self._plain
        return RefuseOwnVmapRules(NoRule, (), modes) if by_vmap else nullcontext()

    def collect(self) -> None:
        """After the backward pass: every use of a parameter has a rule, which has written its gradient."""


def _hide_statistics(norm: nn.Module) -> None:
    """Overwrite a norm's statistics, which the rules keep elsewhere: code that reads them here fails the comparison."""
    for buffer in norm.buffers(recurse=False):
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)


def _use_rule(module: Any, name: str, known: Mapping[nn.Parameter, ParameterSlot], sink: GradientSink) -> None:
    """Let a module of the given name compute by its rule, if it needs one; raises `NoRule`."""
    own = dict(module.named_parameters(recurse=False))
    if len(own) < sum(p is not None for p in module._parameters.values()):
        raise NoRule(f"{type(module).__name__} holds one parameter under two names")
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise NoRule(f"{type(module).__name__} draws random numbers client by client")
    if isinstance(module, nn.modules.batchnorm._NormBase) or any(p.requires_grad for p in own.values()):
        rule = _rule(module)
        if rule is _recurrent:
            Recurrence.of(module)  # raises `NoRule`
        sink.normed |= rule is _batch_norm
        slots = {key: known.get(parameter) for key, parameter in own.items()}
        if rule is _conv and TiledConvRows.prepare(module, slots.get("weight")):
            rule = _tiled_conv
        # The `forward` of an instance takes precedence over that of its class; all else stays the same.
        module.forward = partial(_forward, sink, partial(rule, module, slots, sink, name))
        if rule is _group_norm:
            module.then_pool = partial(_then_pool, module, slots, sink)
    elif type(module) in _BARE:
        module.forward = partial(_forward, sink, partial(_BARE[type(module)], module))


def _forward(sink: GradientSink, rule: Callable[..., Any], x: Tensor, *others: Any) -> Any:
    return rule(sink.used(x), *others)


def _rule(module: nn.Module) -> Rule:
    for kinds, rule in _RULES:
        for kind in kinds:
            # A subclass may compute something else.
            if isinstance(module, kind) and type(module).forward is kind.forward:
                return rule
    raise NoRule(f"there is no rule for {type(module).__name__}")


def _values(module: nn.Module, slots: Slots, *names: str) -> list[Tensor | None]:
    """Return parameters for the forward pass: from x, or the module's own if they are frozen."""
    found = []
    for name in names:
        slot = slots.get(name)
        found.append(slot.value if slot is not None else getattr(module, name, None))
    return found


def _linear(module: nn.Linear, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:  # noqa: ARG001
    weight, bias = _values(module, slots, "weight", "bias")
    return LinearRows.apply(x, weight, bias, (slots.get("weight"), slots.get("bias")))


def _conv(module: Any, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:  # noqa: ARG001
    padding = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, module._reversed_padding_repeated_twice, mode)
        padding = [0] * len(module.stride)
    geometry = Geometry(tuple(module.stride), tuple(padding), tuple(module.dilation), module.groups)
    weight, bias = _values(module, slots, "weight", "bias")
    return ConvRows.apply(x, weight, bias, (slots.get("weight"), slots.get("bias")), geometry)


def _transposed_conv(module: Any, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:  # noqa: ARG001
    stride, padding, dilation = (tuple(part) for part in (module.stride, module.padding, module.dilation))
    geometry = Geometry(stride, padding, dilation, module.groups, True, tuple(module.output_padding))
    weight, bias = _values(module, slots, "weight", "bias")
    return ConvRows.apply(x, weight, bias, (slots.get("weight"), slots.get("bias")), geometry)


def _tiled_conv(module: nn.Conv2d, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:
    slot = slots["weight"]
    if slot is None or not TiledConvRows.fits(x, sink, module.out_channels):
        return _conv(module, slots, sink, name, x)
    moments = TiledConvRows.moments(x, slot, module.stride[0])
    (bias,) = _values(module, slots, "bias")
    found = TiledConvRows.apply(x, slot.value, bias, (slot, slots.get("bias")), module.stride[0], moments)
    sink.record_moments(found, moments)
    return found


def _embedding(module: nn.Embedding, slots: Slots, sink: GradientSink, name: str, numbers: Tensor) -> Tensor:  # noqa: ARG001
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise NoRule("there is no rule for an Embedding with max_norm or scale_grad_by_freq")
    (weight,) = _values(module, slots, "weight")
    padding = -1 if module.padding_idx is None else module.padding_idx
    return EmbeddingRows.apply(numbers, weight, slots["weight"], padding)


def _group_norm(module: nn.GroupNorm, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:  # noqa: ARG001
    weight, bias = _values(module, slots, "weight", "bias")
    where = (slots.get("weight"), slots.get("bias"))
    groups, eps = module.num_groups, module.eps
    if GroupNormRows.fits(x, groups):

        def norm(shortcut: Maybe, relu: bool, counted: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
            return GroupNormRows.apply(x, shortcut, weight, bias, where, groups, eps, relu)

        return _promised(sink, x, norm)
    if GroupNormOnHost.fits(x, weight):
        return GroupNormOnHost.apply(x, weight, bias, where, groups, eps)
    normed = F.group_norm(x, groups, None, None, eps)
    return _affine(module, slots, normed, first=True)


def _promised(sink: GradientSink, x: Tensor, norm: Norm, statistics: Sequence[Tensor] = ()) -> Tensor:
    """Return the output of a norm with a kernel, or what stands for it until it is used."""
    return norm(None, False, True)[0] if sink.lazy is None else sink.lazy.promise(x, norm, statistics)


def _then_pool(module: nn.GroupNorm, slots: Slots, sink: GradientSink, x: Tensor, pool: nn.Module) -> Tensor | None:
    """Return `models.norm_relu_pool` computed by one kernel, or None if the kernel does not apply."""
    x = sink.used(x)
    if is_hooked(module) or is_hooked(pool) or not GroupNormPoolRows.fits(x, module, pool):
        return None
    weight, bias = _values(module, slots, "weight", "bias")
    return GroupNormPoolRows.apply(x, weight, bias, (slots.get("weight"), slots.get("bias")), module)


def _shortcut(module: Shortcut, x: Tensor) -> Tensor:
    return ShortcutByKernel.apply(x, module) if ShortcutByKernel.fits(x, module) else Shortcut.forward(module, x)


def _max_pool(module: nn.MaxPool2d, x: Tensor) -> Tensor:
    return MaxPoolByKernel.apply(x) if MaxPoolByKernel.fits(x, module) else nn.MaxPool2d.forward(module, x)


def _adaptive_max_pool(module: nn.AdaptiveMaxPool2d, x: Tensor) -> Tensor:
    if AdaptiveMaxPoolByKernel.fits(x, module):
        return AdaptiveMaxPoolByKernel.apply(x, module)
    return nn.AdaptiveMaxPool2d.forward(module, x)


# Layers without parameters, for which kernels are faster.
_BARE: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    Shortcut: _shortcut,
    nn.MaxPool2d: _max_pool,
    nn.AdaptiveMaxPool2d: _adaptive_max_pool,
}


def _instance_norm(module: Any, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:  # noqa: ARG001
    if module.track_running_stats:
        raise NoRule("there is no rule for an InstanceNorm with running statistics")
    normed = F.instance_norm(x, eps=module.eps)
    return _affine(module, slots, normed, first=True) if module.affine else normed


def _layer_norm(module: nn.LayerNorm, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:  # noqa: ARG001
    weight, bias = _values(module, slots, "weight", "bias")
    if weight is None:
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)
    return LayerNormRows.apply(x, weight, bias, (slots.get("weight"), slots.get("bias")), module.eps)


def _rms_norm(module: nn.RMSNorm, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:  # noqa: ARG001
    normed = F.rms_norm(x, list(module.normalized_shape), None, module.eps)
    return _affine(module, slots, normed, first=False)


def _affine(module: nn.Module, slots: Slots, normed: Tensor, first: bool) -> Tensor:
    if getattr(module, "weight", None) is None:
        return normed
    weight, bias = _values(module, slots, "weight", "bias")
    where = (slots.get("weight"), slots.get("bias"))
    return AffineRows.apply(normed, weight, bias, where, first)


def _batch_norm(module: Any, slots: Slots, sink: GradientSink, name: str, x: Tensor) -> Tensor:
    if sink.by_record:
        raise NoRule("BatchNorm mixes the records of a batch, so no record has a gradient of its own")
    if not module.training:
        raise NoRule("there is no rule for a BatchNorm that stays in evaluation mode")
    if module.track_running_stats and module.momentum is None:
        raise NoRule("there is no rule for a BatchNorm with momentum=None")
    if x.numel() < 2 * sink.clients * x.shape[1]:
        raise NoRule("BatchNorm needs more than one value per channel for a variance")
    running = None
    if module.track_running_stats:
        running = (sink.buffers[name + "running_mean"], sink.buffers[name + "running_var"])
        sink.count_batch(name + "num_batches_tracked")
    weight, bias = _values(module, slots, "weight", "bias")
    where = (slots.get("weight"), slots.get("bias"))
    clients, known, momentum, eps = sink.clients, sink.moments_of(x), module.momentum, module.eps

    def norm(shortcut: Maybe, relu: bool, counted: bool) -> tuple[Tensor, Tensor]:
        kept, weighed = (running, momentum) if running is not None and counted else (None, 0.0)
        return BatchNormRows.apply(x, shortcut, weight, bias, where, kept, clients, weighed, eps, relu, known)

    return _promised(sink, x, norm, running or ()) if BatchNormRows.fits(x, clients) else norm(None, False, True)[0]


def _recurrent(
    module: nn.RNNBase,
    slots: Slots,
    sink: GradientSink,  # noqa: ARG001
    name: str,  # noqa: ARG001
    x: Tensor,
    states: Any = None,
) -> Any:
    names = module._flat_weights_names
    return run_module(
        module,
        [(value, slots.get(key)) for key, value in zip(names, _values(module, slots, *names), strict=True)],
        x,
        states,
    )


_RULES: tuple[tuple[tuple[type[nn.Module], ...], Rule], ...] = (
    ((nn.Linear,), _linear),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed_conv),
    ((nn.Embedding,), _embedding),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    ((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    ((nn.GroupNorm,), _group_norm),
    ((nn.LayerNorm,), _layer_norm),
    ((nn.RMSNorm,), _rms_norm),
    (RECURRENT, _recurrent),
)

# Containers call their children, which are checked one by one.
_CONTAINERS = {nn.Sequential, nn.ModuleList, nn.ModuleDict}

# The models of this library, whose forward code is known to treat records independently.
_MODELS = {MLP, SmallCNN, GroupNormCNN, ResNet20, resnet.Block, resnet.Shortcut}

_ELEMENTWISE = {
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU),
    *(nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink),
    *(nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),  # there is no rule for them with p > 0
}

# They work on the last dimensions, and do not mix the first one, which holds records or channels.
_POOLS = {
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
}

_KNOWN = {*_CONTAINERS, *_MODELS, *_ELEMENTWISE, *_POOLS, *(kind for kinds, _ in _RULES for kind in kinds)}

# The attribute with the dimension that a module works on; dimension 0 holds the records.
_DIMENSIONS: dict[type[nn.Module], str] = {
    nn.Flatten: "start_dim",
    nn.Unflatten: "dim",
    nn.Softmax: "dim",
    nn.LogSoftmax: "dim",
}


def refuse_foreign_code(problem: Problem) -> None:
    """Raise `NoRule` if the user's own code would see the records of several clients together.

    A loss or a transform of the user is called client by client (`SharedEngine`).
    """
    if torch_modules._has_any_global_hook():
        raise NoRule("a global module hook would see the records of several clients together")
    for module in problem.model.modules():
        name = type(module).__name__
        if not _treats_records_independently(module):
            raise NoRule(f"{name} is not known to treat the records of a batch independently")
        if is_hooked(module) or any(callable(value) for value in vars(module).values()):
            raise NoRule(f"a hook of {name} would see the records of several clients together")
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(type(tensor) not in (nn.Parameter, nn.Buffer, Tensor) for tensor in own):
            raise NoRule(f"{name} holds a tensor of an unknown type")


def _treats_records_independently(module: Any) -> bool:
    kind = type(module)
    if kind in RECURRENT:
        return bool(module.batch_first)
    if kind in _DIMENSIONS:
        dimension = getattr(module, _DIMENSIONS[kind])
        return isinstance(dimension, int) and dimension >= 1
    return kind in _KNOWN
