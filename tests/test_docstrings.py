"""Every public name has a docstring that says what its arguments are, and examples that run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import normec

MODULES = ("normec", *(f"normec.{name}" for name in normec._PACKAGES))
PUBLIC = {
    f"{module}.{name}": getattr(found, name)
    for module in MODULES
    for found in [importlib.import_module(module)]
    for name in getattr(found, "__all__", ())
}
DESCRIBED = {name: thing for name, thing in PUBLIC.items() if inspect.isroutine(thing) or isinstance(thing, type)}
SOURCES = Path(normec.__file__).parent
WITH_EXAMPLES = [
    ".".join(("normec", *path.relative_to(SOURCES).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(SOURCES.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]
VALUES = sorted(PUBLIC.keys() - DESCRIBED.keys())
CALLED = {
    name: thing
    for name, thing in DESCRIBED.items()
    if not getattr(thing, "_is_protocol", False) and not (isinstance(thing, type) and issubclass(thing, Exception))
}


def section(thing: Any, name: str) -> str | None:
    """The lines of a section of a docstring; None if there is no such section."""
    found = re.search(rf"^{name}:\n((?:    .*\n|\n)+)", inspect.cleandoc(thing.__doc__ or "") + "\n", re.MULTILINE)
    return found[1] if found else None


def test_every_package_says_what_is_public() -> None:
    assert len(DESCRIBED) > 100
    assert VALUES == ["normec.data.SCHEMES", "normec.models.MODELS", "normec.privacy.FULL"]


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_public_name_has_a_summary_of_its_own(name: str) -> None:
    summary = (DESCRIBED[name].__doc__ or "").strip().split("\n")[0]
    assert summary, f"{name} has no docstring"
    assert not summary.startswith(f"{name.rpartition('.')[2]}("), f"{name} has a docstring that was made for it"


@pytest.mark.parametrize("name", CALLED)
def test_arguments_are_described_in_order(name: str) -> None:
    described = re.findall(r"^    (\w+): ", section(CALLED[name], "Args") or "", re.MULTILINE)
    assert described == list(inspect.signature(CALLED[name]).parameters)


@pytest.mark.parametrize("name", [name for name, thing in CALLED.items() if inspect.isfunction(thing)])
def test_what_is_returned_is_described(name: str) -> None:
    returned = inspect.signature(CALLED[name]).return_annotation
    described = section(CALLED[name], "Returns") or section(CALLED[name], "Yields")
    assert (described is not None) == (returned not in (None, "None", inspect.Signature.empty))


def raised(thing: Any) -> set[str]:
    """The names of the errors that a function raises itself, or a class while it is made."""
    made = [thing] if inspect.isfunction(thing) else [vars(thing).get(name) for name in ("__init__", "__post_init__")]
    written = [one for one in made if one is not None and one.__code__.co_filename != "<string>"]  # no dataclass's own
    known = {"UsageError", "RuntimeError", "FileNotFoundError", "LedgerDamaged"}
    return known & set(re.findall(r"raise (\w+)\(", "\n".join(map(inspect.getsource, written))))


@pytest.mark.parametrize("name", CALLED)
def test_errors_are_described(name: str) -> None:
    described = section(CALLED[name], "Raises") or ""
    assert all(f"{error}: " in described for error in raised(CALLED[name])), raised(CALLED[name])


@pytest.mark.parametrize("name", CALLED)
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (section(CALLED[name], "Example") or "")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_run(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed
