"""Functions of the user's own whose vmap rules would see several clients, or several records, together.

vmap shows a model one client or record at a time, except in an `autograd.Function` with a `vmap` method, and in an
operator of `torch.library` with a rule from `register_vmap`: the rule is called with all of them, and may mix them for
some values only, which no comparison on a few records notices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

_OF_TORCH = ("aten", "prims", "torchvision")


def with_own_rule(func: Any, args: Any) -> str | None:
    """Return the name of the function or operator if a call is one of somebody who wrote a vmap rule for it."""
    if func is custom_function_call:
        return None if args[0].generate_vmap_rule else str(args[0].__name__)
    if isinstance(func, OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if not isinstance(func, OpOverload) or func.namespace in _OF_TORCH:
        return None
    own = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "FuncTorchBatched")
    return func.name() if own else None


class RefuseOwnVmapRules(TorchFunctionMode):
    """Raises an error where a function with its own vmap rule is called."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self._error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = with_own_rule(func, args)
        if name is not None:
            raise self._error(reason(name))
        return func(*args, **(kwargs or {}))


def reason(name: str) -> str:
    """Return why the function of that name is not called, and what to do."""
    return (
        f"the vmap rule of {name} would see several clients or records together; leave it out, and set "
        "generate_vmap_rule = True in an autograd.Function"
    )
