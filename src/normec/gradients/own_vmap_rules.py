"""Functions of the user's own whose vmap rules would see several clients, or several records, together.

vmap shows a model one client or record at a time, except in an `autograd.Function` with a `vmap` method: that method is
called with all of them, and may mix them for some values only, which no comparison on a few records notices.
"""

from __future__ import annotations

from typing import Any

from torch._functorch.autograd_function import custom_function_call
from torch.overrides import TorchFunctionMode


def with_own_rule(func: Any, args: Any) -> str | None:
    """Return the name of the `autograd.Function` if a call is one of a function that has its own vmap rule."""
    if func is not custom_function_call or args[0].generate_vmap_rule:
        return None
    return str(args[0].__name__)


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
        f"the vmap rule of {name} would see several clients or records together; set generate_vmap_rule = True in it "
        "instead"
    )
