"""Norms that wait for what follows them: the norm's kernel also adds a shortcut and applies ReLU, if these come next.

A model computes relu(norm(x) + shortcut) in three operations, each of which would read and write all images. Here a
norm only promises its output, and a tensor without values stands for it (on PyTorch's "meta" device). If other images
are added next, or ReLU is applied, that becomes a part of the promise, or of the kernel. Any other use gets the output.

`LazyNorms` sees all functions and methods that the model calls, and layers with rules ask it for their inputs (`use`).
Code that neither sees, such as an `autograd.Function` of the user's own, ends in an error of PyTorch, because no
operation takes meta tensors beside others. The model then has another engine.

What happens between a norm's call and its use changes nothing: it is computed before anything is changed in place,
before its running statistics are read or the norm is called again, and with the settings that it was called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ... import kernels
from ..own_code import is_hooked
from .slots import GradientSink, Maybe

# `norm(shortcut, relu, counted)`: norm(x), relu(norm(x)) or relu(norm(x) + shortcut), twice, for two uses (see `use`).
# A norm that is computed again is not `counted`: its running statistics have this batch already.
Norm = Callable[[Maybe, bool, bool], tuple[Tensor, Tensor]]

_RELU_IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_}
_RELU = {F.relu, torch.relu, Tensor.relu, *_RELU_IN_PLACE}
_ADD_IN_PLACE = {Tensor.add_, Tensor.__iadd__}
_ADD = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, *_ADD_IN_PLACE}
# Methods that write: those of assignments such as x += y, for every operator that tensors have.
_WRITING = {"__setitem__", *(f"__i{name[2:]}" for name in dir(Tensor) if hasattr(Tensor, f"__i{name[2:]}"))}
_HARMLESS = {F.batch_norm, Tensor.requires_grad_}  # which look as if they wrote to what they are given
# What is known before, and what changes nothing: attributes reach Python as the `__get__` of their descriptors.
_FACTS = {
    *(torch._C._set_grad_enabled, Tensor.size, Tensor.dim),
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "ndim")),
}


def may_wait(model: nn.Module) -> bool:
    """Whether the model has norms, and no hook that would see a tensor without values."""
    parts = list(model.modules())
    hooked = torch_modules._has_any_global_hook() or any(map(is_hooked, parts))
    return not hooked and any(isinstance(part, nn.modules.batchnorm._BatchNorm | nn.GroupNorm) for part in parts)


@contextmanager
def waiting(sink: GradientSink) -> Iterator[None]:
    """A context in which norms wait for what follows them, if they may and there are kernels for them."""
    if not sink.waits or not kernels.usable(sink.x):
        yield
        return
    try:
        with LazyNorms() as sink.lazy:
            yield
            sink.lazy.settle()
    finally:
        sink.lazy = None


class _Waiting:
    """A norm that has not been computed, and whether its statistics are up to date."""

    def __init__(self, norm: Norm, statistics: Sequence[Tensor]) -> None:
        self._norm, self.statistics, self.counted = norm, statistics, False

    def __call__(self, shortcut: Maybe, relu: bool) -> tuple[Tensor, Tensor]:
        counted, self.counted = not self.counted, True
        with torch.enable_grad():  # as where the norm was called
            return self._norm(shortcut, relu, counted)


@dataclass
class _Promise:
    """What a tensor without values stands for: the norm's output plus a shortcut, and its value once it is known."""

    norm: _Waiting
    shortcut: Maybe = None
    value: Maybe = None


class LazyNorms(TorchFunctionMode):
    """The context in which a model runs whose norms are promised; it keeps what it has handed out until it ends."""

    def __init__(self) -> None:
        super().__init__()
        self._promises = WeakIdKeyDictionary()  # by what stands for them, as long as anybody has it
        self._uncounted: list[_Waiting] = []  # norms whose running statistics lack this batch
        self._again: dict[int, tuple[Tensor, Tensor, bool]] = {}  # outputs by id, their second copies, and if used once

    def __enter__(self) -> Self:
        self._forget()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._forget()

    def _forget(self) -> None:
        self._promises.clear()
        self._uncounted.clear()
        self._again.clear()

    def promise(self, like: Tensor, norm: Norm, statistics: Sequence[Tensor] = ()) -> Tensor:
        """Return what stands for the output of a norm, which has the shape and the precision of `like`.

        `statistics` are the running ones, which it will update. Without gradients nothing is gained, and the output
        itself is returned.
        """
        self._count(statistics)
        if not torch.is_grad_enabled():
            return norm(None, False, True)[0]
        waiting = _Waiting(norm, statistics)
        self._uncounted.append(waiting)
        return self._stand_in(like, waiting)

    def use(self, x: Any) -> Any:
        """Return the input of a layer with a rule, or a shortcut: what the layer does not change in place.

        The second use of an output gets its second copy, so that the gradients of both arrive separately, and the
        kernel adds them while it reads them. A change of the output in place would not be known of this copy.
        """
        x = self._kept(x)
        if (known := self._again.get(id(x))) is None:
            return x
        output, again, used = known
        self._again[id(x)] = output, again, True
        return again if used and not output._version and not output._backward_hooks else output

    def settle(self) -> None:
        """Compute the norms whose outputs nobody used, because they count the batch as well."""
        for waiting in self._uncounted:
            if not waiting.counted:
                waiting(None, False)

    def _count(self, tensors: Sequence[Tensor]) -> None:
        """Compute the norms that have not updated running statistics which are among the tensors."""
        self._uncounted = [waiting for waiting in self._uncounted if not waiting.counted]
        asked = set(map(id, tensors))
        for waiting in self._uncounted:
            if any(id(one) in asked for one in waiting.statistics):
                self._keep(lambda promise, norm=waiting: promise.norm is norm)  # type: ignore[misc]
                if not waiting.counted:
                    waiting(None, False)

    def _keep(self, chosen: Callable[[_Promise], bool]) -> None:
        """Compute what is still promised to somebody, as far as it is chosen."""
        for stand_in, promise in list(self._promises.items()):
            if promise.value is None and chosen(promise):
                self._kept(stand_in)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return func(*args, **kwargs)
        if self._uncounted:
            self._count([one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)])
        found: Maybe = None
        if not torch.is_grad_enabled():
            pass  # what is computed now has no gradient
        elif func in _RELU and len(args) <= 2 and kwargs.keys() <= {"inplace"}:
            found = self._relu(func, *args, **kwargs)
        elif func in _ADD and len(args) == 2 and not kwargs:
            found = self._add(func in _ADD_IN_PLACE, *args)
        if found is not None:
            return found
        if _writes(func, args, kwargs):
            self._keep(lambda _: True)
            self._again.clear()
        args, kwargs = tree_map_only(Tensor, self._kept, (args, kwargs))
        return func(*args, **kwargs)

    def _relu(self, func: Any, x: Any, inplace: bool = False) -> Maybe:
        if (promise := self._open(x)) is None:
            return None
        value = self._computed(promise, relu=True)
        if inplace or func in _RELU_IN_PLACE:
            promise.value = value
        return value

    def _add(self, in_place: bool, left: Any, right: Any) -> Maybe:
        """Return what stands for the sum, if one of the two is a norm without a shortcut and the other is alike."""
        for one, other in ((left, right),) if in_place else ((left, right), (right, left)):
            promise = self._open(one)
            if promise is None or promise.shortcut is not None or not isinstance(other, Tensor) or other is one:
                continue
            if other.shape != one.shape or other.dtype != one.dtype:
                continue
            shortcut = self.use(other)
            if not in_place:
                return self._stand_in(one, promise.norm, shortcut)
            promise.shortcut = shortcut
            found: Tensor = one
            return found
        return None

    def _kept(self, x: Any) -> Any:
        """Return x, or the value of the promise that x stands for."""
        promise = self._promises.get(x) if isinstance(x, Tensor) else None
        if promise is None:
            return x
        if promise.value is None:
            promise.value = self._computed(promise, relu=False)
        return promise.value

    def _open(self, x: Any) -> _Promise | None:
        """Return the promise that x stands for, if it has not been kept yet."""
        promise = self._promises.get(x) if isinstance(x, Tensor) else None
        return promise if promise is not None and promise.value is None else None

    def _stand_in(self, like: Tensor, norm: _Waiting, shortcut: Maybe = None) -> Tensor:
        # It requires a gradient, so that a backward pass through it fails instead of ending here.
        with torch._C.DisableTorchFunction():
            stand_in = torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=True)
        self._promises[stand_in] = _Promise(norm, shortcut)
        return stand_in

    def _computed(self, promise: _Promise, relu: bool) -> Tensor:
        if promise.shortcut is not None and not relu:  # for which there is no kernel
            with torch.enable_grad():
                return promise.norm(None, False)[0] + promise.shortcut
        output, again = promise.norm(promise.shortcut, relu)
        self._again[id(output)] = output, again, False
        return output


def _writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function may change a tensor in place; some say so by an argument that is True."""
    name = getattr(func, "__name__", "")
    counts = bool(args) and isinstance(args[0], Tensor) and not args[0].is_floating_point()
    if func in _HARMLESS or counts:  # a norm computes with floating-point numbers
        return False
    every = func.overloads() if isinstance(func, OpOverloadPacket) else []
    schemas = [getattr(func, one)._schema for one in every if "out" not in one]
    schemas += [func._schema] if isinstance(func, OpOverload) else []
    if any(schema.is_mutable for schema in schemas):
        return True
    assigned = name == "__set__" and getattr(func.__self__, "__name__", "") in ("data", "real", "imag")
    named = (name.endswith("_") and not name.endswith("__")) or name in _WRITING
    in_place = assigned or named or kwargs.get("out") is not None
    return in_place or any(one is True for one in (*args, *kwargs.values()))
