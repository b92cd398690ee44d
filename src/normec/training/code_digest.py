"""A digest of everything that a user's object computes with: its code, its constants and its tensors.

Two objects with the same digest compute the same, as far as Python can tell. Functions are identified by their
bytecode, defaults, closures, attributes and the globals that they name, objects by their class and attributes, and
tensors by their bytes. Of a user's module that a function names, the attributes that the function's code may access
count. Objects of torch, NumPy, Python and this library are identified by their names; the versions of these libraries
are part of `repeatability.machine_facts`.

What Python cannot look into is unknown: objects that keep more than their attributes (a generator of random numbers, an
open file), functions of compiled modules, and operators in `torch.ops`, which anybody may define. What a function reads
from files while it runs is not noticed.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_LIBRARIES = {"torch", "numpy", "normec"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_PYTHON = Path(os.__file__).resolve().parent
_OPERATORS = "torch.ops"  # the name of the module of operators, and the beginning of the names of its parts

Seen = dict[int, tuple[int, Any]]  # by id: the object's number, and the object itself, so that its id is not reused


class _Plain:
    """A class whose objects have their attributes and nothing else."""


class UnknownObject(TypeError):  # noqa: N818
    """An object whose contents cannot be read."""


def code_digest(*objects: Any) -> str:
    """Return sixteen hexadecimal digits that change if any of `objects` computes something else.

    Raises:
        UnknownObject: An object, or something that it refers to, cannot be inspected.
    """
    seen: Seen = {}
    digest = hashlib.sha256()
    try:
        for one in objects:
            _add(digest, one, seen)
    except RecursionError:
        raise UnknownObject("its chain of references is too long") from None
    return digest.hexdigest()[:16]


def _add(digest: Any, thing: Any, seen: Seen) -> None:
    kind = type(thing)
    plain: Any = next((base for base in _PLAIN if isinstance(thing, base)), None)
    if plain is not None:
        _note(digest, kind.__name__, plain.__repr__(thing))  # a subclass may override __repr__
        if kind is not plain:
            _add_own_class(digest, thing, seen)
        return
    if id(thing) in seen:
        _note(digest, "again", seen[id(thing)][0])
        return
    seen[id(thing)] = len(seen), thing
    _note(digest, kind.__module__, kind.__qualname__)
    if isinstance(thing, torch.Tensor):
        held = thing.detach().cpu().contiguous()
        _note(digest, str(held.dtype), tuple(held.shape))
        digest.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
        _add_own_class(digest, thing, seen)
    elif isinstance(thing, np.ndarray) and thing.dtype != object:
        _note(digest, str(thing.dtype), thing.shape)
        digest.update(np.ascontiguousarray(thing).tobytes())
        _add_own_class(digest, thing, seen)
    elif isinstance(thing, types.FunctionType):
        _add_function(digest, thing, seen)
    elif isinstance(thing, types.CodeType):
        names = (thing.co_names, thing.co_varnames, thing.co_freevars, thing.co_cellvars)
        for part in (thing.co_code, thing.co_exceptiontable, *names, thing.co_consts):
            _add(digest, part, seen)
    elif isinstance(thing, types.MethodType):
        _add(digest, thing.__func__, seen)
        _add(digest, thing.__self__, seen)
    elif isinstance(thing, types.BuiltinFunctionType):
        _note(digest, "named", thing.__module__, thing.__qualname__)
        owner = thing.__self__
        if not isinstance(owner, types.ModuleType):
            _add(digest, owner, seen)
        elif not _of_a_library(owner.__name__):
            raise UnknownObject(f"{thing.__qualname__} is compiled")
    elif isinstance(thing, types.ModuleType):
        if not _of_a_library(thing.__name__) or thing.__name__.startswith(_OPERATORS):
            raise UnknownObject(f"the module {thing.__name__} is used as an object")
        _note(digest, "named", thing.__name__)
    elif isinstance(thing, type):
        _add_class(digest, thing, seen)
    elif isinstance(thing, functools.partial):
        _add(digest, (thing.func, thing.args, thing.keywords), seen)
        _add_own_class(digest, thing, seen)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            _add(digest, key, seen)
            _add(digest, value, seen)
        _add_own_class(digest, thing, seen)
    elif isinstance(thing, set | frozenset):
        if not all(type(one) in _PLAIN for one in thing):
            raise UnknownObject("a set of objects has no fixed order")
        for text in sorted(map(repr, thing)):
            _note(digest, text)
        _add_own_class(digest, thing, seen)
    elif isinstance(thing, tuple | list):
        _note(digest, len(thing))
        for one in thing:
            _add(digest, one, seen)
        _add_own_class(digest, thing, seen)
    elif hasattr(thing, "__dict__") and _library(kind) != "numpy" and not _keeps_more(kind):
        _add_class(digest, kind, seen)
        _add(digest, _attributes(thing), seen)
    else:
        raise UnknownObject(f"{kind.__qualname__} cannot be inspected")


def _keeps_more(kind: type) -> bool:
    """Whether objects of a class have room for more than their attributes, which a compiled base class may use."""
    return kind.__basicsize__ > _Plain.__basicsize__ and kind is not functools._lru_cache_wrapper


def _add_own_class(digest: Any, thing: Any, seen: Seen) -> None:
    """Add the methods and attributes that a user's subclass adds to a known class."""
    if _library(type(thing)) is None:
        _add_class(digest, type(thing), seen)
    if getattr(thing, "__dict__", None):
        _add(digest, vars(thing), seen)


def _attributes(thing: Any) -> dict[str, Any]:
    held = dict(vars(thing))
    if isinstance(thing, nn.Module):
        held.pop("training", None)  # it changes in every round
    return held


def _add_function(digest: Any, function: types.FunctionType, seen: Seen) -> None:
    if _library(function) is not None:
        _note(digest, function.__module__, function.__qualname__)
        return
    code = function.__code__
    _refuse_imports(code)
    names = _names(code)
    for part in (code, function.__defaults__, function.__kwdefaults__, vars(function)):
        _add(digest, part, seen)
    for cell in function.__closure__ or ():
        _add_reached(digest, cell.cell_contents, names, seen)
    for name in names:
        if name in function.__globals__:
            _add_reached(digest, function.__globals__[name], names, seen)


def _add_reached(digest: Any, thing: Any, names: list[str], seen: Seen) -> None:
    """Add what a function's code reaches; of a user's module, everything that the code has a name for."""
    if thing is torch and "ops" in names:
        raise UnknownObject("torch.ops may hold operators of the user's own")
    if not isinstance(thing, types.ModuleType) or _of_a_library(thing.__name__):
        _add(digest, thing, seen)
        return
    _note(digest, "of module", thing.__name__)
    for name in names:
        if name in vars(thing) and vars(thing)[name] is not thing:
            _note(digest, name)
            inner = vars(thing)[name]
            _add_reached(digest, inner, [other for other in names if other != name], seen)


def _refuse_imports(code: types.CodeType) -> None:
    """Refuse imports inside functions, because what they import is not known before the call."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME" and not _of_a_library(str(step.argval)):
            raise UnknownObject(f"{code.co_name} imports {step.argval or 'a part of its package'} when it is called")
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            _refuse_imports(const)


def _names(code: types.CodeType) -> list[str]:
    """Return the names of globals and attributes that a function's code, and functions inside it, may look up."""
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
    """Return the library that defines an object; None for a user's object."""
    module = str(getattr(thing, "__module__", None) or "")
    return module.partition(".")[0] if _of_a_library(module) else None


@functools.cache
def _of_a_library(module: str) -> bool:
    """Whether a module belongs to torch, NumPy, this library or Python, by its full name."""
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names or root == "__main__":
        return root in _LIBRARIES
    home = getattr(sys.modules.get(root), "__file__", None)
    return home is None or Path(home).resolve().is_relative_to(_PYTHON)


def _note(digest: Any, *facts: object) -> None:
    digest.update(repr(facts).encode())
