"""Which code of a model or a loss is the user's own, and belongs neither to PyTorch nor to this library."""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules


def has_own_code(part: Any) -> bool:
    """Whether a model or a loss calls code that belongs neither to PyTorch nor to this library."""
    if type(part) is partial:
        return has_own_code(part.func)
    if not isinstance(part, nn.Module):
        return _is_foreign(part)
    return torch_modules._has_any_global_hook() or any(map(module_has_own_code, part.modules()))


def module_has_own_code(module: nn.Module) -> bool:
    """Whether a module, apart from those inside it, has code or hooks of neither PyTorch nor this library."""
    return (
        _is_foreign(module)
        or is_hooked(module)
        or any(callable(value) and _is_foreign(value) for value in vars(module).values())
        or any(_is_foreign(one) for one in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    )


def _is_foreign(thing: Any) -> bool:
    """Whether a function, or a class of an object, belongs neither to PyTorch nor to this library."""
    if isinstance(thing, _MADE_OF_OWN_CODE):
        return True
    if isinstance(thing, FunctionType):  # decorators copy the name of a module from one function to another
        return any(map(_outside, (thing.__module__, thing.__globals__.get("__name__"))))
    # A parametrization gives a module a class of PyTorch's below its own class.
    named = [thing] if isinstance(thing, BuiltinFunctionType) else type(thing).__mro__[:-1]
    return any(_outside(one.__module__) for one in named)


# Classes of PyTorch whose objects are made of a function or a module of the user's own.
_MADE_OF_OWN_CODE = (torch.jit.ScriptFunction, torch.jit.ScriptModule, torch.fx.GraphModule)


_MADE_AT_RUN_TIME = 1 << 9  # the flag of such classes, Py_TPFLAGS_HEAPTYPE


def _outside(module: object) -> bool:
    return str(module).partition(".")[0] not in ("torch", __package__.partition(".")[0])


def own_classes(thing: object) -> list[type]:
    """The classes of an object that are neither PyTorch's nor this library's, and whose attributes can be assigned."""
    return [
        kind for kind in type(thing).__mro__[:-1] if _outside(kind.__module__) and kind.__flags__ & _MADE_AT_RUN_TIME
    ]


def own_names(part: Any) -> list[str]:
    """The names of the classes and functions of the user's own that a model, a loss or another part consists of."""
    if part is None or not has_own_code(part):
        return []
    if isinstance(part, partial):
        return own_names(part.func)
    if isinstance(part, nn.Module):
        return [type(one).__name__ for one in part.modules() if module_has_own_code(one)] or ["a hook of all modules"]
    return [getattr(part, "__qualname__", type(part).__name__).rpartition("<locals>.")[2]]


def is_hooked(module: Any) -> bool:
    """Whether a module has hooks, which expect its own output."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
