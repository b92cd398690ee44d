"""Publications and benchmarks use normec, and neither imports the other; normec imports neither of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "src/normec": ("benchmarks", "publications", "tests"),
    "benchmarks": ("publications", "tests"),
    "publications": ("benchmarks", "tests"),
}


def imported(path: Path) -> Iterator[str]:
    """The absolute names of everything that a module imports."""
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        left += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))  # has no statements
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
