"""Methods by name: those of this package, of installed packages, and of a user's own file.

    "normec"                         a method of this package
    "my_method.py:Clip21SGDM"        a class in a file
    "some_name"                      a class that an installed package offers as an entry point of `normec.methods`

A class is identified by its name, and a method by its class and its `spec()`; `build` makes the method from both. A
class in a file is identified by the path as it was given and by a digest of its source, so that a run or a party
notices when the code has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import UsageError, one_of
from ..system.code_files import object_in_file
from .catalogue import CATALOGUE, GROUP, installed
from .method import CLIENT_FUNCTIONS, SERVER_FUNCTIONS, Method, build_operator, text_of
from .operators import Identity, supports_cuda_graphs


def _classes() -> Iterator[type[Method]]:
    """The methods in the modules that the catalogue names."""
    for name in dict.fromkeys(entry.factory.partition(":")[0] for entry in CATALOGUE.values()):
        module = importlib.import_module(f".{name}", __package__)
        for kind in vars(module).values():
            concrete = isinstance(kind, type) and issubclass(kind, Method) and dataclasses.is_dataclass(kind)
            if concrete and kind.__module__ == module.__name__:
                yield kind


BUILT_IN: dict[str, type[Method]] = {kind.name: kind for kind in _classes()}
_DIGESTS: dict[type, str] = {}  # of classes that were found


def find(name: str) -> type[Method]:
    """Return the class of that name; raises `UsageError` if there is none."""
    if ":" in name:
        return _checked(object_in_file(name, "method of your own as FILE.py:CLASS"), name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    offered = installed()
    if name in offered:
        return _checked(offered[name].load(), name)
    one_of((*BUILT_IN, *offered), method=name)
    raise AssertionError("unreachable")


def name_of(method: Method) -> str:
    """Return the name under which `find` finds the method's class."""
    kind = type(method)
    for name, known in BUILT_IN.items():
        if known is kind:
            return name
    for point in installed().values():
        if point.value == f"{kind.__module__}:{kind.__qualname__}":
            return point.name
    source = inspect.getsourcefile(kind)
    if source is None or "<locals>" in kind.__qualname__:
        raise UsageError(
            f"{kind.__qualname__} is not defined at the top of a file; put it into a module of its own, or into an "
            f"installed package with the entry point {GROUP}"
        )
    return f"{source}:{kind.__qualname__}"


def build(name: str, spec: Mapping[str, Any]) -> Method:
    """Build the method `name` with the settings in `spec`; raises `UsageError` if they do not fit."""
    return build_class(find(name), spec, name)


def build_class(kind: type[Method], spec: Mapping[str, Any], name: str) -> Method:
    """The method of a class with the settings of a `spec`; `name` is what errors call the class."""
    settings = {key: _part(value) for key, value in spec.items()}
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    try:
        return kind(**settings)
    except TypeError as error:
        raise UsageError(f"{name} cannot be built with {', '.join(settings) or 'no settings'}: {error}") from None


def _part(value: Any) -> Any:
    """An operator or a method out of its spec; anything else as it is."""
    if isinstance(value, Mapping) and "method" in value:
        return build(str(value["method"]), {key: one for key, one in value.items() if key != "method"})
    return build_operator(value)


def works_by_rows(method: Method) -> bool:
    """Whether all of a client's functions are this package's, which treat every row of a table alone."""
    parts = [value for value in vars(method).values() if isinstance(value, Method)]
    if not all(map(works_by_rows, parts)):
        return False
    known = type(method) in BUILT_IN.values() and supports_cuda_graphs(getattr(method, "operator", Identity()))
    return known and not vars(method).keys() & {*CLIENT_FUNCTIONS, *SERVER_FUNCTIONS}


def settings_of(kind: type[Method]) -> dict[str, inspect.Parameter]:
    """Return the settings that a class takes, by name."""
    found = inspect.signature(kind).parameters
    return {name: one for name, one in found.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def identity_of(method: Method) -> str:
    """Return the text by which runs, checkpoints and noise identify a method; it covers a user's source."""
    digest = source_digest(type(method))
    return text_of(method) + (f" with code {digest}" if digest else "")


def source_digest(kind: type) -> str:
    """Return a digest of the source of a user's class and its bases; empty for classes of this package.

    It is computed once, when the class is found, because a file that changes later does not change what this process
    runs.
    """
    if kind not in _DIGESTS:
        _DIGESTS[kind] = _digest_of(kind)
    return _DIGESTS[kind]


def _digest_of(kind: type) -> str:
    texts = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in (__package__.partition(".")[0], "builtins"):
            continue
        try:
            texts.append(inspect.getsource(base))
        except (OSError, TypeError):
            texts.append(f"{base.__module__}.{base.__qualname__}")
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] if texts else ""


def _checked(kind: Any, name: str) -> type[Method]:
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UsageError(f"{name} must be a subclass of normec.Method, got {kind!r}")
    source_digest(kind)
    return kind
