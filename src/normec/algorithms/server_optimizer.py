"""The optimizer with which the server moves x along the direction of a round.

Without one, x ← x − lr · direction. A `ServerOptimizer` makes a step of a `torch.optim` optimizer instead, with the
direction in the place of the gradient. It acts on x alone: memories, messages and the estimate ĝ are the method's, and
with error feedback ĝ stays the mean of the memories. It sees nothing but x and the direction, which is a function of
released sums, so it costs no privacy (post-processing).

x is one flat parameter for the optimizer. Its state is kept as named tensors, so that a checkpoint can hold it.

This module imports torch only when an optimizer is made: the command line needs the names without it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, nearest, one_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from .method import Tables

OptimizerFactory = Callable[[list["nn.Parameter"]], "Optimizer"]
VARIANCE = "noise_variance"  # of a parameter group: the variance of the noise in a coordinate of the direction
_SET_HERE = ("params", "lr", VARIANCE)  # entries of a parameter group that training sets


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that has a short name.

    Attributes:
        kind: The class in `torch.optim`, or MODULE:CLASS below this package.
        settings: The settings that differ from the defaults of the class.
        usual_lr: The usual step size; None where it is the method's own, shortened by the momentum.
    """

    kind: str
    settings: Mapping[str, Any]
    usual_lr: float | None = None


# Adaptive optimizers move every coordinate by about lr in a round, whatever the length of the direction; their usual
# step size suits the digits.
OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "sgd": NamedOptimizer("SGD", {}),
    "momentum": NamedOptimizer("SGD", {"momentum": 0.9}),
    "nesterov": NamedOptimizer("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": NamedOptimizer("Adam", {}, 0.003),
    "adamw": NamedOptimizer("AdamW", {}, 0.003),
    "rmsprop": NamedOptimizer("RMSprop", {}, 0.003),
    "adambc": NamedOptimizer("adam_bc:AdamBC", {}, 0.003),
}


class ServerOptimizer:
    """An optimizer of the server: a name with settings, or a function that makes a torch optimizer.

    Args:
        optimizer: "sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adambc", the name of another class of
            `torch.optim`, or a function that takes a list with one parameter and returns an optimizer of it.
        settings: The optimizer's own settings, such as `betas`. The step size is not one of them: it is the `lr` of
            `train`, which also replaces the one that a function sets.

    Raises:
        UsageError: There is no such optimizer or setting, the optimizer cannot step along a given direction, or its
            state cannot be saved.

    Example:
        >>> ServerOptimizer("adam", betas=(0.9, 0.99)).settings["betas"]
        [0.9, 0.99]
        >>> ServerOptimizer("adam", beta=0.9)
        Traceback (most recent call last):
        ...
        normec.errors.UsageError: adam has no setting 'beta', did you mean 'betas'?
    """

    def __init__(self, optimizer: str | OptimizerFactory, **settings: Any) -> None:
        if isinstance(optimizer, str):
            kind, given = _found(optimizer, settings)
            self._make: OptimizerFactory = lambda params: kind(params, **given)
            self.name = optimizer.lower()
        elif callable(optimizer):
            if settings:
                raise UsageError(
                    f"settings go with the name of an optimizer, got {', '.join(settings)} with a function; "
                    "put them into the function"
                )
            self._make, self.name = optimizer, ""
        else:
            raise UsageError(
                "server_optimizer must be a name such as 'adam', a normec.ServerOptimizer, or a function from "
                f"parameters to a torch optimizer, got {type(optimizer).__name__}"
            )
        self.known = False  # until it was tried
        made = self._checked()
        self._kind = type(made)
        self.name = self.name or self._kind.__name__.lower()
        self._group = {name: value for name, value in made.param_groups[0].items() if name not in _SET_HERE}
        self.needs_noise_variance = VARIANCE in made.param_groups[0]
        hooks = made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks
        package = __package__.partition(".")[0]
        own = type(self) is not ServerOptimizer  # a subclass may do more than its optimizer
        self.known = not (hooks or own) and self._kind.__module__.partition(".")[0] in ("torch", package)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are in force, as plain values; those that are false or hold None are left out."""
        held = self._values()
        return {name: value for name, value in held.items() if not (isinstance(value, list) and None in value)}

    def _values(self) -> dict[str, Any]:
        """The settings without those that are None or false, which other versions of torch may add to or lack."""
        held = {name: value for name, value in self._group.items() if value is not None and value is not False}
        return {name: _plain(self._kind.__name__, name, value) for name, value in held.items()}

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the `settings` that the class takes as arguments."""
        taken = inspect.signature(self._kind).parameters
        return {name: value for name, value in self.settings.items() if name in taken}

    @property
    def is_plain_step(self) -> bool:
        """Whether a step is x ← x − lr · direction, which needs no optimizer."""
        from torch.optim import SGD

        acts = any(value for name, value in self._group.items() if name not in ("dampening", "foreach", "fused"))
        return self._kind is SGD and self.known and not acts

    def usual_lr(self, plain: float) -> float:
        """The usual step size where that of the plain step is `plain`: momentum p makes it 1 − p times as long."""
        entry = OPTIMIZERS.get(self.name)
        if entry is not None and entry.usual_lr is not None:
            return entry.usual_lr
        if entry is None:
            raise UsageError(f"lr must be given: the server optimizer {self.name} has no usual step size here")
        return plain * (1 - float(self._group["momentum"]))

    def spec(self) -> str:
        """What checkpoints and noise know the optimizer by: its class, its settings, and unknown code."""
        from .registry import source_digest

        kind = self._kind
        name = kind.__qualname__ if self.known else f"{kind.__module__}.{kind.__qualname__}"
        code = "" if self.known else f" with code {source_digest(kind)}"
        return f"{name}({json.dumps(self._values(), sort_keys=True)}){code}"

    def build(self, parameter: nn.Parameter) -> Optimizer:
        """The optimizer of one parameter.

        Raises:
            UsageError: The function of the caller's own returns something else.
        """
        from torch.optim import Optimizer

        made: Any = self._make([parameter])
        if not isinstance(made, Optimizer):  # a function of the caller's own may return anything
            found = type(made).__name__
            raise UsageError(f"the function given as server_optimizer must return a torch optimizer, got a {found}")
        if len(made.param_groups) != 1 or [id(one) for one in made.param_groups[0]["params"]] != [id(parameter)]:
            raise UsageError("the function given as server_optimizer must use the one parameter that it is given")
        return made

    def _checked(self) -> Optimizer:
        """Make the optimizer, and see that a state that was saved and restored goes on to the same bits."""
        import torch
        from torch import nn

        said = self.name or "the optimizer given as server_optimizer"
        try:
            start = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64)
            directions = torch.stack([start.cos(), start.square(), start - 0.3])
            x, y = start.clone(), start.clone()
            whole = OptimizerSteps(self, x)
            tables = whole.initial_tables()
            for direction in directions:
                tables = whole.step(x, direction, tables, 0.1, 0.01)
            tables = OptimizerSteps(self, y).initial_tables()
            for direction in directions:
                tables = {name: value.clone() for name, value in tables.items()}
                tables = OptimizerSteps(self, start.clone()).step(y, direction, tables, 0.1, 0.01)
            made = self.build(nn.Parameter(start.clone()))
        except UsageError:
            raise
        except Exception as error:  # whatever an optimizer of any kind says to a vector and a direction
            raise UsageError(
                f"{said} cannot step along a direction: {type(error).__name__}: {error}; "
                "correct its settings, or choose another optimizer"
            ) from None
        if not torch.equal(x, y):
            raise UsageError(
                f"{said} does not repeat its steps from a saved state: it draws at random or keeps something outside "
                "its state; choose another optimizer"
            )
        return made


class OptimizerSteps:
    """The steps of a server optimizer on one vector, with its state in named tensors.

    A state is "state.NAME" for a tensor of the optimizer, and "number.NAME" or "group.NAME" for a number in its state
    or in its parameter group.
    """

    def __init__(self, declared: ServerOptimizer, x: Tensor) -> None:
        from torch import nn

        self._parameter = nn.Parameter(x.detach().clone())
        self._known = declared.known  # another one may keep its state where code of the clients writes
        self._optimizer = declared.build(self._parameter)
        self._group = self._optimizer.param_groups[0]
        self._start = dict(self._group)

    def initial_tables(self) -> Tables:
        """The state before the first step."""
        return self._packed()

    def step(self, x: Tensor, direction: Tensor, tables: Tables, lr: float, noise_variance: float = 0.0) -> Tables:
        """Move x along the direction, in place, and return the new state; the tensors of `tables` may change too."""
        import torch

        self._unpack(tables)
        self._group["lr"] = lr
        if VARIANCE in self._group:
            self._group[VARIANCE] = noise_variance
        self._parameter.data = x
        self._parameter.grad = direction.to(x.dtype, copy=True)  # which an optimizer may change
        with torch.no_grad():
            self._optimizer.step()
        self._parameter.grad = None
        return self._packed()

    def _packed(self) -> Tables:
        from torch import Tensor

        tables: Tables = {}
        for name, value in self._optimizer.state[self._parameter].items():
            if isinstance(value, Tensor):
                tables[f"state.{name}"] = value.detach() if self._known else value.detach().clone()
            elif type(value) in (int, float):
                tables[f"number.{name}"] = _number(value)
            elif value is not None:
                raise UsageError(
                    f"{type(self._optimizer).__name__} keeps {name} as a {type(value).__name__}, which no checkpoint "
                    "can hold; choose another optimizer"
                )
        for name, value in self._group.items():
            if name not in _SET_HERE and type(value) in (int, float) and value != self._start[name]:
                tables[f"group.{name}"] = _number(value)
        return tables

    def _unpack(self, tables: Tables) -> None:
        state: dict[str, Any] = {}
        self._group.update(self._start)
        for name, value in tables.items():
            where, _, own = name.partition(".")
            if where == "state":
                state[own] = value
            elif where == "number":
                state[own] = value.item()
            elif where == "group":
                self._group[own] = value.item()
        self._optimizer.state[self._parameter] = state


def _number(value: float) -> Tensor:
    """A number as a tensor that holds all of its bits."""
    import torch

    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def server_optimizer_of(given: str | ServerOptimizer | OptimizerFactory | None) -> ServerOptimizer | None:
    """The optimizer that `train` was given; None where x ← x − lr · direction.

    Raises:
        UsageError: `given` is no optimizer.
    """
    if given is None:
        return None
    declared = given if isinstance(given, ServerOptimizer) else ServerOptimizer(given)
    return None if declared.is_plain_step else declared


def _found(name: str, settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class that a name stands for, and the settings to make it with."""
    from importlib import import_module

    import torch
    from torch.optim import Optimizer

    classes = {
        title.lower(): kind
        for title, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    one_of((*OPTIMIZERS, *(title for title in classes if title not in OPTIMIZERS)), server_optimizer=name.lower())
    entry = OPTIMIZERS.get(name.lower(), NamedOptimizer(name, {}))
    module, colon, title = entry.kind.partition(":")
    kind = getattr(import_module(f".{module}", __package__), title) if colon else classes[entry.kind.lower()]
    taken = [one for one in inspect.signature(kind).parameters if one not in _SET_HERE]
    for setting in settings:
        if setting == "lr":
            raise UsageError(f"lr is not a setting of {name}: give it to train, or as the setting lr of the run")
        if setting not in taken:
            raise UsageError(f"{name} has no setting {setting!r}{nearest(setting, taken)}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    return kind, {**entry.settings, **given}


def _plain(owner: str, name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(owner, name, one) for one in value]
    raise UsageError(
        f"the setting {name} of {owner} is a {type(value).__name__}, which cannot be written to a file; give a plain "
        "number or text"
    )
