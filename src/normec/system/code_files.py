"""Objects in a user's Python file, which are named as FILE.py:NAME."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UsageError


def in_a_file(name: str) -> bool:
    """Whether a name has the form FILE.py:NAME."""
    return re.fullmatch(r".+\.py:\w+", name) is not None


def object_in_file(name: str, what: str) -> Any:
    """Return the object that FILE.py:NAME names; the file is loaded once per process.

    Args:
        name: The path of the file, a colon, and the name in it.
        what: What the object is, with the form of its name, such as "method of your own as FILE.py:CLASS".

    Raises:
        UsageError: There is no such file or name, or the file raises an error.
    """
    path, _, wanted = name.rpartition(":")
    found = getattr(_module(str(Path(path).resolve()), path, what), wanted, None)
    if found is None:
        kind = "class" if what.endswith("CLASS") else "name"
        raise UsageError(f"{path} has no {kind} {wanted}")
    return found


@cache
def _module(path: str, given: str, what: str) -> Any:
    """Load the module in a file."""
    name = f"normec_file_{hashlib.sha256(path.encode()).hexdigest()[:12]}_{Path(path).stem}"
    if name in sys.modules:  # it was loaded for something else
        return sys.modules[name]
    if not Path(path).is_file():
        raise UsageError(f"there is no file {given}; name a {what}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{given} is not a Python file; name a {what}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # an error in a user's file becomes one line
        del sys.modules[name]
        raise UsageError(f"{given} cannot be read: {type(error).__name__}: {error}") from error
    return module
