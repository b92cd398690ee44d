"""The notebooks are the tutorials, and run in a real kernel as a reader runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat")

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_notebooks", DOCS / "make_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_every_notebook_is_its_tutorial_as_it_is_now(maker: ModuleType) -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(maker.TUTORIALS)
    for path in NOTEBOOKS:
        page = DOCS / "tutorials" / f"{path.stem}.md"
        assert path.read_text(encoding="utf-8") == maker.written(page), "run: python docs/make_notebooks.py"
        assert f"](../notebooks/{path.name})" in page.read_text(encoding="utf-8")


def test_blocks_become_cells(maker: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\nThis page is also a [notebook](../notebooks/page.ipynb).\n\n"
        "See [it](other.md), [that](../a/b.md).\n\n"
        '```python title="a.py"\nx = 1\n```\n\n```py\nshown\n```\n\n```python\nimport a\n```\n\n'
        "```console\n$ normec train\n$ normec results runs\n```\n"
    )
    cells = [(cell.cell_type, cell.source) for cell in maker.notebook(page).cells]
    assert cells == [
        ("markdown", "# Title\n\nSee [it](../tutorials/other.md), [that](../a/b.md)."),
        ("code", "%%writefile a.py\nx = 1"),
        ("markdown", "```py\nshown\n```"),
        ("code", "import a"),
        ("code", "%%bash -e\nnormec train\nnormec results runs"),
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_to_a_file(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    found = [link for link in re.findall(r"\]\(([^()\s#]+)", text) if not re.match(r"[a-z]+:", link)]
    assert found
    assert [link for link in found if not (path.parent / link).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient")
    pytest.importorskip("ipykernel", reason="notebooks are run by ipykernel")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(path)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises at the first cell that fails
    printed = "".join(out.text for cell in notebook.cells for out in cell.get("outputs", []) if "text" in out)
    reached = [float(value) for value in re.findall(r"(?:privacy: |test accuracy )([\d.]+)%", printed)]
    assert len(reached) >= 2
    assert min(reached) > 60
    assert (tmp_path / "runs").is_dir()
