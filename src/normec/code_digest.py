"""A digest of everything that a caller's object computes with: its code, its constants, its tensors.

Two objects with one digest compute the same, as far as Python can tell: functions are known by their bytecode,
defaults, closures and the globals they name, objects by their class and attributes, tensors by their bytes; of a
caller's module counts what a function names of it. What belongs to torch, NumPy, Python or this library is known by its
name alone; their versions are the machine's (see `repeating.machine`).
"""

from __future__ import annotations

import dis
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


# What was met, by its id: the how-manieth it was, and the thing itself, for the id of one that is gone is given again.
Seen = dict[int, tuple[int, Any]]


class UnknownObject(TypeError):  # noqa: N818
    """An object whose contents cannot be read."""


def code_digest(*objects: Any) -> str:
    """Sixteen hexadecimal digits that change when any of `objects` would compute something else.

    Raises:
        UnknownObject: An object, or something it refers to, cannot be looked into.
    """
    seen: Seen = {}
    digest = hashlib.sha256()
    for one in objects:
        _add(digest, one, seen)
    return digest.hexdigest()[:16]


def _add(digest: Any, thing: Any, seen: Seen) -> None:
    if isinstance(thing, _PLAIN) and not hasattr(thing, "__dict__"):
        _note(digest, type(thing).__name__, thing)
        return
    if id(thing) in seen:
        _note(digest, "again", seen[id(thing)][0])
        return
    seen[id(thing)] = len(seen), thing
    kind = type(thing)
    _note(digest, kind.__module__, kind.__qualname__)
    if isinstance(thing, torch.Tensor):
        held = thing.detach().cpu().contiguous()
        _note(digest, str(held.dtype), tuple(held.shape))
        digest.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
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
    elif isinstance(thing, types.ModuleType) and thing.__name__.partition(".")[0] not in _LIBRARIES:
        raise UnknownObject(f"of the module {thing.__name__} it is not known what is used")
    elif isinstance(thing, types.ModuleType | types.BuiltinFunctionType):
        _note(digest, "named", getattr(thing, "__module__", None), thing.__name__)
    elif isinstance(thing, type):
        _add_class(digest, thing, seen)
    elif isinstance(thing, functools.partial):
        _add(digest, (thing.func, thing.args, thing.keywords), seen)
    elif isinstance(thing, (Mapping, set, frozenset, tuple, list, *_PLAIN)) and getattr(thing, "__dict__", None):
        raise UnknownObject(f"{kind.__qualname__} holds more than its entries")
    elif isinstance(thing, _PLAIN):
        _note(digest, repr(thing))
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            _add(digest, key, seen)
            _add(digest, value, seen)
    elif isinstance(thing, set | frozenset):
        if not all(isinstance(one, _PLAIN) for one in thing):
            raise UnknownObject("a set of objects has no order")
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


def _add_function(digest: Any, function: types.FunctionType, seen: Seen) -> None:
    if _library(function) is not None:
        _note(digest, function.__module__, function.__qualname__)
        return
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for part in (function.__code__, function.__defaults__, function.__kwdefaults__, cells):
        _add(digest, part, seen)
    names = _names(function.__code__)
    for name in names:
        if name in function.__globals__:
            _add_named(digest, function.__globals__[name], names, seen)


def _add_named(digest: Any, thing: Any, names: list[str], seen: Seen) -> None:
    """What a function with these `names` in its code reaches as one of them; of a caller's module, what it names."""
    if not isinstance(thing, types.ModuleType) or thing.__name__.partition(".")[0] in _LIBRARIES:
        _add(digest, thing, seen)
        return
    asked = hash((id(thing), *names))
    _note(digest, "module", thing.__name__, asked in seen)
    if asked not in seen:
        seen[asked] = len(seen), thing
        for name in names:
            if name in vars(thing):
                _note(digest, name)
                _add_named(digest, vars(thing)[name], names, seen)


def _names(code: types.CodeType) -> list[str]:
    """The global names that a function's code, and the functions inside it, may look up.

    Raises:
        UnknownObject: The code imports a caller's module when it runs.
    """
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME" and str(step.argval).partition(".")[0] not in _LIBRARIES:
            raise UnknownObject(f"the module {step.argval} is imported when the code runs")
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return sorted({*code.co_names, *inner})


def _add_class(digest: Any, kind: type, seen: Seen) -> None:
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
