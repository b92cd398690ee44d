"""Which code of a model or a loss is the user's own, and belongs neither to PyTorch nor to this library."""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_leaves


def has_own_code(part: Any) -> bool:
    """Whether a model or a loss calls code that belongs neither to PyTorch nor to this library."""
    if type(part) is partial:
        return any(map(has_own_code, _called(part)))
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


_KNOWN = ("torch", __package__.partition(".")[0], "typing", "abc")  # the last two have bases of PyTorch's classes


def _outside(module: object) -> bool:
    return str(module).partition(".")[0] not in _KNOWN


def own_classes(thing: object) -> list[type]:
    """The classes of an object that are neither PyTorch's nor this library's, and whose attributes can be assigned."""
    return own_bases(type(thing))


def own_bases(kind: type) -> list[type]:
    """A class and its bases, as far as they are neither PyTorch's nor this library's and can be assigned to."""
    return [one for one in kind.__mro__[:-1] if _outside(one.__module__) and one.__flags__ & _MADE_AT_RUN_TIME]


def own_names(part: Any) -> list[str]:
    """The names of the classes and functions of the user's own that a model, a loss or another part consists of."""
    if part is None or not has_own_code(part):
        return []
    if type(part) is partial:
        return [name for one in _called(part) for name in own_names(one)]
    if isinstance(part, nn.Module):
        return [name for one in part.modules() for name in _names_in(one)] or ["a hook of all modules"]
    return [getattr(part, "__qualname__", type(part).__name__).rpartition("<locals>.")[2].rpartition(">.")[2]]


def _names_in(module: nn.Module) -> list[str]:
    """The names of the user's own code in a module, apart from those inside it."""
    kind = type(module).__name__
    if _is_foreign(module):
        return [str(getattr(module, "original_name", kind))]  # of a class that was compiled to TorchScript
    held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    names = [
        name for value in vars(module).values() if callable(value) and _is_foreign(value) for name in own_names(value)
    ]
    names += [type(one).__name__ for one in held if _is_foreign(one)]
    return names + [f"a hook of {kind}"] * is_hooked(module)


def _called(part: partial[Any]) -> list[Any]:
    """The function of a partial one, and what it is given that it may call."""
    return [part.func, *filter(callable, tree_leaves((part.args, part.keywords)))]


def is_hooked(module: Any) -> bool:
    """Whether a module has hooks, which expect its own output."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
