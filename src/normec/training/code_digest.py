"""A digest of everything that a caller's object computes with: its code, its constants, its tensors.

Two objects with one digest compute the same, as far as Python can tell: functions are known by their bytecode,
defaults, closures and the globals they name, objects by their class and attributes, tensors by their bytes. What
belongs to torch, NumPy, Python or this library is known by its name alone; their versions are the machine's (see
`repeating.machine`).
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_LIBRARIES = {"torch", "numpy", "normec", *sys.stdlib_module_names}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class UnknownObject(TypeError):  # noqa: N818
    """An object whose contents cannot be read."""


def code_digest(*objects: Any) -> str:
    """Sixteen hexadecimal digits that change when any of `objects` would compute something else.

    Raises:
        UnknownObject: An object, or something it refers to, cannot be looked into.
    """
    seen: dict[int, int] = {}
    digest = hashlib.sha256()
    for one in objects:
        _add(digest, one, seen)
    return digest.hexdigest()[:16]


def _add(digest: Any, thing: Any, seen: dict[int, int]) -> None:
    if isinstance(thing, _PLAIN):
        _note(digest, type(thing).__name__, thing)
        return
    if id(thing) in seen:
        _note(digest, "again", seen[id(thing)])
        return
    seen[id(thing)] = len(seen)
    kind = type(thing)
    _note(digest, kind.__module__, kind.__qualname__)
    if isinstance(thing, torch.Tensor):
        held = thing.detach().cpu().contiguous()
        _note(digest, str(held.dtype), tuple(held.shape))
        digest.update(held.view(torch.uint8).numpy().tobytes() if held.numel() and held.dim() else repr(held).encode())
    elif isinstance(thing, np.ndarray) and thing.dtype != object:
        _note(digest, str(thing.dtype), thing.shape)
        digest.update(np.ascontiguousarray(thing).tobytes())
    elif isinstance(thing, types.FunctionType):
        _add_function(digest, thing, seen)
    elif isinstance(thing, types.CodeType):
        for part in (thing.co_code, thing.co_names, thing.co_varnames, thing.co_consts):
            _add(digest, part, seen)
    elif isinstance(thing, types.MethodType):
        _add(digest, thing.__func__, seen)
        _add(digest, thing.__self__, seen)
    elif isinstance(thing, types.ModuleType | types.BuiltinFunctionType):
        _note(digest, "named", getattr(thing, "__module__", None), thing.__name__)
    elif isinstance(thing, type):
        _add_class(digest, thing, seen)
    elif isinstance(thing, functools.partial):
        _add(digest, (thing.func, thing.args, thing.keywords), seen)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            _add(digest, key, seen)
            _add(digest, value, seen)
    elif isinstance(thing, set | frozenset):
        for text in sorted(map(repr, thing)):
            _note(digest, text)
    elif isinstance(thing, tuple | list):
        for one in thing:
            _add(digest, one, seen)
    elif hasattr(thing, "__dict__") and _library(kind) != "numpy":
        _add_class(digest, kind, seen)
        _add(digest, _attributes(thing), seen)
    else:
        raise UnknownObject(f"{kind.__qualname__} cannot be looked into")


def _attributes(thing: Any) -> dict[str, Any]:
    held = dict(vars(thing))
    if isinstance(thing, nn.Module):
        held.pop("training", None)  # changes in every round
    return held


def _add_function(digest: Any, function: types.FunctionType, seen: dict[int, int]) -> None:
    if _library(function) is not None:
        _note(digest, function.__module__, function.__qualname__)
        return
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for part in (function.__code__, function.__defaults__, function.__kwdefaults__, cells):
        _add(digest, part, seen)
    for name in _names(function.__code__):
        if name in function.__globals__:
            _add(digest, function.__globals__[name], seen)


def _names(code: types.CodeType) -> list[str]:
    """The global names that a function's code, and the functions inside it, may look up."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return sorted({*code.co_names, *inner})


def _add_class(digest: Any, kind: type, seen: dict[int, int]) -> None:
    for base in kind.__mro__:
        _note(digest, base.__module__, base.__qualname__)
        if _library(base) is None:
            for name, member in sorted(vars(base).items()):
                if isinstance(member, property):
                    member = member.fget
                if isinstance(member, staticmethod | classmethod):
                    member = member.__func__
                if isinstance(member, types.FunctionType) or not name.startswith("__"):
                    _note(digest, name)
                    _add(digest, member, seen)


def _library(thing: Any) -> str | None:
    """The library that defines it, None for a caller's own."""
    root = str(getattr(thing, "__module__", None) or "").partition(".")[0]
    return root if root in _LIBRARIES and root != "__main__" else None


def _note(digest: Any, *facts: object) -> None:
    digest.update(repr(facts).encode())
