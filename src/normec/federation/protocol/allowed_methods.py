"""What the names of methods in a party's policy allow.

A request states the class of its method, such as "dpsgd". A policy may name classes, and it may name a method of the
catalogue that is a class with more to it: "fedavg" is the class "dpsgd" with clipping, after local steps. Such a name
allows the class with these operators alone, and local steps, or a proximal term in them, only where the catalogue's
method has them. All other settings are the server's, as with a class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...algorithms import registry
from ...algorithms.catalogue import CATALOGUE, installed
from ...errors import UsageError
from .terms import LocalTerms, MethodTerms, read_spec, short_name

Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Allowed:
    """What one name allows; `parts` is None for a class, which may have any settings.

    Args:
        kind: The class, as the registry finds it.
        parts: The classes of the method's parts, such as its operator.
        local: Whether clients make local steps.
        prox: Whether their local steps have a proximal term.
    """

    kind: str
    parts: Parts | None = None
    local: bool = False
    prox: bool = False

    def covers(self, method: MethodTerms, local: LocalTerms | None) -> bool:
        """Whether a request with these terms is allowed."""
        if method.name != short_name(self.kind):
            return False
        if self.parts is None:
            return True
        try:
            parts = _parts(read_spec(method.spec))
        except UsageError:
            return False
        stated = local is not None, local is not None and local.prox != 0
        return parts == self.parts and stated == (self.local, self.prox)


def allowed(name: str) -> Allowed:
    """What a name in a policy allows: a class, or a method of the catalogue that is no class of its own."""
    if name not in CATALOGUE or name in registry.BUILT_IN or name in installed():
        return Allowed(name)
    return _of_catalogue(name)


def classes(names: Iterable[str]) -> list[str]:
    """The classes that a policy's names allow, as the registry finds them, each once."""
    return list(dict.fromkeys(allowed(name).kind for name in names))


@lru_cache
def _of_catalogue(name: str) -> Allowed:
    entry = CATALOGUE[name]
    method = entry.build(entry.defaults(private=True), sizes=(1,))
    usual = entry.local or {}
    return Allowed(registry.name_of(method), _parts(method.spec()), entry.local is not None, "prox" in usual)


def _parts(spec: Mapping[str, Any]) -> Parts:
    """The classes of the operators and methods in a spec, by the names of the settings that hold them.

    In the spec of a part, "operator" is the name of an operator's class, and "method" that of a method's.
    """
    return {
        key: {word: _kind(value.get(word)) for word in ("operator", "method")} | {"parts": _parts(value)}
        for key, value in spec.items()
        if isinstance(value, Mapping)
    }


def _kind(named: Any) -> str | None:
    """The name of a class; None for a part, whose own names are compared."""
    return named if isinstance(named, str) else None
