"""Code in a user's own files: objects named as FILE.py:NAME, and folders whose modules are loaded from their sources.

Python runs a compiled copy of a module (`__pycache__`) in place of its source, if the copy says that it belongs to it.
A digest of sources then says nothing about the code that runs, so these files are always compiled from their sources.
Hidden folders, such as a virtual environment, do not belong to such a digest, and nothing is imported from them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import sysconfig
from functools import cache
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest

CODE_SUFFIXES = (*SOURCE_SUFFIXES, *BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)  # of files that Python imports
_folders: set[Path] = set()  # whose modules are loaded from their sources


class _FromSource(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:  # noqa: ARG002
        return self.source_to_code(self.get_data(self.path), self.path)


def import_from_source(folder: Path) -> None:
    """Put a folder first among those that modules are imported from, and load its modules from their sources."""
    folder = folder.resolve()
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)
    _folders.add(folder)
    for known in [path for path in sys.path_importer_cache if Path(path).is_relative_to(folder)]:
        del sys.path_importer_cache[known]
    sys.path.insert(0, str(folder))


def _finder(path: str) -> FileFinder:
    where = Path(path).resolve()
    around = [folder for folder in _folders if where.is_relative_to(folder)]
    if not around or any(map(where.is_relative_to, _of_python())):
        raise ImportError(f"{path} is not loaded from its sources")  # another finder takes it
    if all(any(map(is_hidden, where.relative_to(folder).parts)) for folder in around):
        return FileFinder(path)  # finds nothing
    return FileFinder(
        path,
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (_FromSource, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name does not belong to the code of a folder: hidden, or compiled copies."""
    return name.startswith(".") or name == "__pycache__"


@cache
def _of_python() -> tuple[Path, ...]:
    """The folders of Python itself and of installed packages, which may lie below a folder of code."""
    return tuple({Path(path).resolve() for name, path in sysconfig.get_paths().items() if name.endswith("lib")})


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
    module = _module(str(Path(path).resolve()), path, what)
    found = getattr(module, wanted, None)
    if found is None:
        kind = "class" if what.endswith("CLASS") else "name"
        raise UsageError(f"{path} has no {kind} {wanted}{nearest(wanted, vars(module))}")
    return found


@cache
def _module(path: str, given: str, what: str) -> Any:
    """Load the module in a file."""
    name = f"normec_file_{hashlib.sha256(path.encode()).hexdigest()[:12]}_{Path(path).stem}"
    if name in sys.modules:  # it was loaded for something else
        return sys.modules[name]
    if not Path(path).is_file():
        raise UsageError(f"there is no file {given}; name a {what}")
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, path))
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
