"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from normec.system.files import write_atomic

from ..support.runs import snapshot


def test_an_atomic_write_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "first")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"

    def fails(aside: Path) -> None:
        aside.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fails)
    assert snapshot(tmp_path) == {"file": b"second"}


def test_a_reader_of_the_old_file_sees_all_of_the_old(tmp_path: Path) -> None:
    """The new contents come by a rename: nobody ever sees half of each."""
    path = tmp_path / "file"
    write_atomic(path, "first")
    with path.open() as reader:
        write_atomic(path, "second, and longer")
        assert reader.read() == "first"
    assert path.read_text() == "second, and longer"
