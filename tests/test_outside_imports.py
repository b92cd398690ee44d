"""Publications and benchmarks use normec, and neither imports the other; normec imports neither of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "src/normec": ("benchmarks", "publications", "tests"),
    "benchmarks": ("publications", "tests"),
    "publications": ("benchmarks", "tests"),
}


@cache
def imported(path: Path) -> list[str]:
    """The absolute names of everything that a module imports."""
    return list(names(ast.parse(path.read_text(encoding="utf-8"))))


def names(node: ast.AST) -> Iterator[str]:
    """The absolute names that the statements of a node import, also those inside its functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module is not None:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif not isinstance(child, ast.expr):  # an expression holds no statements
            yield from names(child)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_packages_do_not_import_each_other(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for name in imported(path):
            assert name.partition(".")[0] not in FORBIDDEN[folder], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("folder", ["benchmarks", "publications"])
def test_no_private_name_of_normec_is_imported(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            private = [part for part in parts if part.startswith("_") and not part.endswith("__")]
            assert parts[0] != "normec" or not private, f"{path.relative_to(ROOT)} imports {name}"
