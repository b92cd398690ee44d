"""Refuses code of the user's own that vmap would show several clients, or several records, together.

vmap shows a model one client or record at a time, with a few exceptions: the `vmap` method of an `autograd.Function`,
the rule of an operator of `torch.library` (`register_vmap`), a `TorchDispatchMode`, a class of tensors with a
`__torch_dispatch__` of its own, and hooks for saved tensors. They are called with all clients, and may mix them for
some values only, which no comparison on a few records notices.

A rule can be called from anywhere: from a function that has no such rule itself, from a backward pass, from a hook. So
it is refused where PyTorch is about to call it, and not where the model calls the function.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, vmap
from torch._functorch import autograd_function as functions
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch

_OF_TORCH = ("aten", "prim", "prims", "torchvision")
_HOOKS = "hooks for saved tensors would see several clients or records together under vmap; leave them out"
_MODES = "a TorchDispatchMode would see several clients or records together; leave it out"
_UNKNOWN = "this version of PyTorch does not show which vmap rules it calls; use a version that normec was tested with"


class RefuseOwnVmapRules(TorchFunctionMode):
    """Raises an error where code of the user's own would see several clients or records together.

    It must be active during the call of vmap and, if that comes later, during the backward pass. Other threads are
    included, because a GPU's backward pass runs in threads of its own.

    Args:
        error: The type of the error.
        allowed: Functions of this library with vmap rules.
        modes: Dispatch modes and classes of tensors of PyTorch that may be at work, such as those of a tracer.
            Subclasses may not.
    """

    def __init__(self, error: type[Exception], allowed: Collection[type] = (), modes: Collection[type] = ()) -> None:
        super().__init__()
        self._error, self._allowed, self._modes = error, allowed, modes
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for mode in dispatch._get_current_dispatch_mode_stack():
            self.check_mode(mode)
        with ExitStack() as stack:
            try:
                stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(_HOOKS))
            except RuntimeError:  # some are active
                raise self._error(_HOOKS) from None
            if self._error is not _Noticed and not _rules_are_noticed():
                raise self._error(_UNKNOWN)
            _begin(self)
            stack.callback(_end, self)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = _own_kernel(func), kwargs or {}
        if name is not None:
            raise self._error(_reason(name))
        for tensor in _tensors((*args, *kwargs.values())):
            if _has_own_dispatch(tensor) and type(tensor) not in self._modes:
                raise self._error(_dispatch_reason(tensor))
        return func(*args, **kwargs)

    def check_rule(self, function: Any) -> None:
        """Raise the error if this function's own vmap rule must not be called."""
        of_torch = isinstance(function, OpOverload) and function.namespace in _OF_TORCH
        if not of_torch and function not in self._allowed:
            name = function.name() if isinstance(function, OpOverload) else getattr(function, "__name__", "a function")
            raise self._error(_reason(name))

    def check_mode(self, mode: object) -> None:
        """Raise the error if this dispatch mode must not be active."""
        if type(mode) not in self._modes:
            raise self._error(_MODES)


def _has_own_dispatch(tensor: Tensor) -> bool:
    """Whether operations on a tensor call the `__torch_dispatch__` of its class, under vmap with all clients."""
    kind = type(tensor)
    return kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _dispatch_reason(tensor: Tensor) -> str:
    """Return why a tensor with a `__torch_dispatch__` of its own is not used, and what to do."""
    return (
        f"the __torch_dispatch__ of {type(tensor).__name__} would see several clients or records together; use plain "
        "tensors"
    )


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a function, also those in lists."""
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _own_kernel(func: Any) -> str | None:
    """Return the name of an operator that is not one of PyTorch and has a kernel of its own for several clients."""
    if isinstance(func, OpOverloadPacket):
        several = [getattr(func, name) for name in func.overloads()]
    else:
        several = [func] if isinstance(func, OpOverload) else []
    for one in several:
        if one.namespace not in _OF_TORCH and torch._C._dispatch_has_kernel_for_dispatch_key(
            one.name(), "FuncTorchBatched"
        ):
            return str(one.name())
    return None


def _reason(name: str) -> str:
    """Return why the function of that name is not called, and what to do."""
    return (
        f"the vmap rule of {name} would see several clients or records together; leave it out, and set "
        "generate_vmap_rule = True in an autograd.Function"
    )


# ---- where PyTorch calls a rule, or begins a mode -----------------------------------------------------------------

_lock = threading.Lock()
_active: list[RefuseOwnVmapRules] = []
_vmap_info, _push_mode = functions.VmapInfo, dispatch._push_mode


def _begin(guard: RefuseOwnVmapRules) -> None:
    with _lock:
        _active.append(guard)
        setattr(functions, "VmapInfo", _checked_info)  # noqa: B010  (made for every rule, and for nothing else)
        setattr(dispatch, "_push_mode", _checked_mode)  # noqa: B010


def _end(guard: RefuseOwnVmapRules) -> None:
    with _lock:
        _active.remove(guard)
        if not _active:
            setattr(functions, "VmapInfo", _vmap_info)  # noqa: B010
            setattr(dispatch, "_push_mode", _push_mode)  # noqa: B010


def _checked_info(*given: Any, **named: Any) -> Any:
    """Return the first argument of a vmap rule; the function that has the rule is `op` in the frame of the caller."""
    for guard in _active[-1:]:
        guard.check_rule(sys._getframe(1).f_locals.get("op"))
    return _vmap_info(*given, **named)


def _checked_mode(mode: Any) -> None:
    for guard in _active[-1:]:
        guard.check_mode(mode)
    _push_mode(mode)


class _Noticed(Exception):  # noqa: N818  (a result, not an error)
    pass


class _Probe(torch.autograd.Function):
    """A function with a vmap rule of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, Any]:  # noqa: ARG004
        return x, in_dims[0]


@cache
def _rules_are_noticed() -> bool:
    """Whether this version of PyTorch lets a rule be noticed before it is called."""
    try:
        with RefuseOwnVmapRules(_Noticed):
            vmap(_Probe.apply)(torch.zeros(1))
    except _Noticed:
        return True
    return False
