"""Code in a user's own files runs as its source says, whatever compiled copies lie beside it."""

from __future__ import annotations

import importlib
import py_compile
import sys
from pathlib import Path

import pytest

from normec.system.code_files import import_from_source, object_in_file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A module that says "read", beside a compiled copy of it that says "run" and claims to need no comparison."""
    (tmp_path / "own_code").mkdir()
    (tmp_path / "own_code" / "__init__.py").write_text("")
    found = tmp_path / "own_code" / "task.py"
    found.write_text('WORD = "run"\n')
    py_compile.compile(str(found), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    found.write_text('WORD = "read"\n')
    return found


def test_modules_of_a_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("path", [*sys.path]), ("path_hooks", [*sys.path_hooks])):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.syspath_prepend(str(source.parent.parent))
    assert importlib.import_module("own_code.task").WORD == "run", "Python uses the copy"
    for name in ("own_code", "own_code.task"):
        del sys.modules[name]
    import_from_source(source.parent.parent)
    assert importlib.import_module("own_code.task").WORD == "read"


@pytest.mark.parametrize(("folder", "word"), [("site-packages", "read"), (".hidden", None), ("__pycache__", None)])
def test_folders_that_an_app_adds_itself(
    folder: str, word: str | None, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled copies, and the files of hidden folders, do not belong to the digest of an app."""
    for name, value in (("path", [*sys.path]), ("path_hooks", [*sys.path_hooks])):
        monkeypatch.setattr(sys, name, value)
    app = source.parent.parent
    inner = app / "app" / folder
    inner.mkdir(parents=True)
    source.parent.rename(inner / f"added_{len(folder)}")
    import_from_source(app / "app")
    monkeypatch.syspath_prepend(str(inner))
    if word is None:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"added_{len(folder)}.task")
    else:
        assert word == importlib.import_module(f"added_{len(folder)}.task").WORD


def test_a_name_in_a_file(source: Path) -> None:
    assert object_in_file(f"{source}:WORD", "word as FILE.py:NAME") == "read"
