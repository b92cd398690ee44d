"""The package's structure: what may import what, how deep imports go, and that the documentation knows every package.

Imports are read from the source. How deep they go is counted for those that run when a module is loaded. Imports inside
functions, which run later, must not go in circles either; only those under ``TYPE_CHECKING`` may.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import normec

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "normec"
LEVELS = 12  # the longest chain of imports that is allowed

Graph = dict[str, set[str]]


def sources(folder: Path) -> dict[str, Path]:
    """Every module below a package's folder; templates, which are copied and not imported, are left out."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        if "template" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def run_by(node: ast.AST, *, later: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that run when a module is loaded; with `later`, also those inside its functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and _is_for_types(child.test):
            for other in child.orelse:
                yield from run_by(other, later=later)
        elif isinstance(child, ast.expr):
            continue  # holds no statements
        elif later or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from run_by(child, later=later)


def _is_for_types(condition: ast.expr) -> bool:
    return any("TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in ast.walk(condition))


def targets(statement: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> list[str]:
    """The dotted names that a statement may import, each as long as it is written."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    base = statement.module or ""
    if statement.level:
        parents = module.split(".") if is_package else module.split(".")[:-1]
        parents = parents[: len(parents) - statement.level + 1]
        base = ".".join([*parents, base] if base else parents)
    return [f"{base}.{alias.name}" for alias in statement.names]


@cache
def statements(text: str) -> tuple[list[ast.Import | ast.ImportFrom], list[ast.Import | ast.ImportFrom]]:
    """The import statements of a module that run when it is loaded, and with those inside its functions."""
    tree = ast.parse(text)
    return list(run_by(tree, later=False)), list(run_by(tree, later=True))


def imports(folder: Path, *, later: bool = False) -> Graph:
    """Which modules of a package each of its modules imports when it is loaded, or `later` as well."""
    modules = sources(folder)
    graph: Graph = {}
    for module, path in modules.items():
        graph[module] = set()
        for statement in statements(path.read_text())[later]:
            for name in targets(statement, module, path.name == "__init__.py"):
                known = name
                while known and known not in modules:  # from .module import name: the module
                    known = known.rpartition(".")[0]
                if known and known != module:
                    graph[module].add(known)
    return graph


@pytest.fixture(scope="module")
def package() -> Graph:
    """The imports of the library."""
    return imports(PACKAGE)


def longest_chain(graph: Graph) -> list[str]:
    """The longest path through a graph without cycles."""

    @cache
    def below(module: str) -> tuple[str, ...]:
        return (module, *max((below(other) for other in sorted(graph[module])), key=len, default=()))

    return list(max(map(below, sorted(graph)), key=len))


def by_package(graph: Graph) -> Graph:
    """The same graph between the folders of the package, and the modules at its top."""
    units: Graph = {}
    for module, others in graph.items():
        parts = module.split(".")
        if len(parts) == 1:
            continue  # the package itself loads its names when they are first used
        own = units.setdefault(parts[1], set())
        own |= {name.split(".")[1] for name in others if "." in name} - {parts[1]}
    return units


def refuse_cycles(graph: Graph) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports go round in a circle: " + " → ".join(reversed(error.args[1])))


def test_modules_do_not_import_one_another_in_circles(package: Graph) -> None:
    refuse_cycles(package)


def test_functions_do_not_import_one_another_s_modules_in_circles() -> None:
    graph = imports(PACKAGE, later=True)
    refuse_cycles({module: others - {"normec"} for module, others in graph.items()})  # it loads its names when asked


def test_packages_do_not_import_one_another_in_circles(package: Graph) -> None:
    refuse_cycles(by_package(package))


def test_imports_are_not_deep(package: Graph) -> None:
    modules, packages = longest_chain(package), longest_chain(by_package(package))
    print(f"{len(modules)} levels of modules: {' → '.join(modules)}")
    print(f"{len(packages)} levels of packages: {' → '.join(packages)}")
    assert len(modules) <= LEVELS, " → ".join(modules)


def test_the_top_of_the_package_holds_packages() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "errors"}


def test_the_documentation_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in sources(PACKAGE).values() if path.name == "__init__.py"} - {"normec"}
    packages |= {path.parent.name for path in ROOT.glob("benchmarks/*/__init__.py")}
    packages |= {path.parent.name for path in ROOT.glob("publications/*/__init__.py")}
    assert {name for name in packages if not re.search(rf"\b{name}/", text)} == set()


def test_packages_import_only_from_the_levels_below_them_in_the_documentation(package: Graph) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = re.findall(r"(?m)^ {4,5}(\d+)  (.+)$", text)
    level = {name: int(number) for number, names in lines for name in names.split(", ")}

    def unit(module: str) -> str | None:
        """The documented package that a module belongs to; the package itself and `__main__` belong to none."""
        parts = module.split(".")[1:]
        known = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((name for name in known if name in level), None)

    assert {module for module in package if unit(module) is None} <= {"normec", "normec.__main__", "normec.federation"}
    wrong = {
        f"{module} imports {other}"
        for module, others in package.items()
        for other in others
        if (a := unit(module)) and (b := unit(other)) and a != b and level[a] <= level[b]
    }
    assert wrong == set()


def test_the_documentation_names_only_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text))
    assert named
    assert {name for name in named if not list(PACKAGE.rglob(name)) and not (ROOT / name).exists()} == set()


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"(?m)^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text())
    assert headings[:2] == ["Unreleased", normec.__version__]


def test_only_imports_that_run_are_counted(tmp_path: Path) -> None:
    """On a package made up for this: a cycle is found, and what is inside functions or for types alone is not."""
    package = tmp_path / "made"
    (package / "deep").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "top.py": "from .deep import middle\nfrom .deep.middle import thing",
        "deep/__init__.py": "",
        "deep/middle.py": "try:\n    from ..low import value\nexcept ImportError:\n    pass\nthing = 1",
        "low.py": (
            "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import top\n"
            "def later():\n    from .top import thing\nvalue = 1"
        ),
    }.items():
        (package / name).write_text(text)
    graph = imports(package)
    assert graph["made.top"] == {"made.deep.middle"}
    assert longest_chain(graph) == ["made.top", "made.deep.middle", "made.low"]
    refuse_cycles(graph)
    (package / "low.py").write_text("import made.top")
    with pytest.raises(pytest.fail.Exception, match=r"made\.low|made\.top"):
        refuse_cycles(imports(package))


WITHOUT_EXTRAS = """
import importlib.abc, sys

EXTRAS = {extras!r}

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import torch, normec
clients = [torch.utils.data.TensorDataset(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(3)]
problem = normec.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, clients=clients)
for method in (normec.NormEC(), "normec"):
    normec.train(problem, method, lr=0.1, rounds=2, seed=0)
"""
EXTRAS = (
    *("sklearn", "PIL", "matplotlib", "dp_accounting", "scipy", "cryptography", "opendp", "typer", "click", "rich"),
    *("pydantic", "tomli_w", "pyarrow", "tensorboard", "mlflow", "ray", "flwr", "msgspec", "transformers", "peft"),
)


@pytest.mark.slow
def test_training_without_privacy_needs_no_extra(tmp_path: Path) -> None:
    code = WITHOUT_EXTRAS.format(extras=EXTRAS)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
