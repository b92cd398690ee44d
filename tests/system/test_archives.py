"""Archives that somebody else may have packed: one line for each that is refused, and no file outside of the folder."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from normec.errors import UsageError
from normec.system.files import unpacked


def packed(path: Path, name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Path:
    """An archive with one entry of one byte."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, link, int(kind == tarfile.REGTYPE)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(entry, io.BytesIO(b"x"))
    return path


def test_an_archive_is_unpacked_and_removed(tmp_path: Path) -> None:
    with unpacked(packed(tmp_path / "whole.tgz", "party/ledger.jsonl")) as folder:
        assert (folder / "party" / "ledger.jsonl").read_bytes() == b"x"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../outside", tarfile.REGTYPE, ""),
        ("link", tarfile.SYMTYPE, "/etc/passwd"),
        ("link", tarfile.SYMTYPE, "../outside"),
        ("pipe", tarfile.FIFOTYPE, ""),
    ],
)
def test_entries_that_leave_the_folder_or_are_no_files(tmp_path: Path, name: str, kind: bytes, link: str) -> None:
    with (
        pytest.raises(UsageError, match="cannot be unpacked") as caught,
        unpacked(packed(tmp_path / "evil.tgz", name, kind, link)),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["evil.tgz"]


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("ledger.jsonl", "x")
    whole = packed(tmp_path / "whole.tgz", "ledger.jsonl").read_bytes()
    (tmp_path / "cut.tgz").write_bytes(whole[:60])
    (tmp_path / "wrong.tgz").write_bytes(b"no archive")
    for name in ("other.zip", "cut.tgz", "wrong.tgz"):
        with pytest.raises(UsageError, match="give an archive of the folder") as caught, unpacked(tmp_path / name):
            pass
        assert "\n" not in str(caught.value)
