"""What was measured along a run: rows of numbers, in memory and, if asked, in a JSON-lines file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UsageError

Row = dict[str, Any]


class History:
    """Rows in the order of their rounds; row k describes x^k, before the step of round k.

    ``history["loss"]`` is the list of a column's values where it was measured, ``history.rounds("loss")``
    the rounds they belong to.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.rows: list[Row] = []
        self._path = path

    def append(self, row: Row) -> None:
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def flush(self) -> int:
        """Bring the file to the disk; returns its length in bytes."""
        if self._path is None or not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def reread(self) -> None:
        """Take the rows from the file; a last line that a kill cut short is left out."""
        held = self._path.read_bytes() if self._path is not None and self._path.exists() else b""
        self.rows = [json.loads(line) for line in held.splitlines(keepends=True) if line.endswith(b"\n")]

    def rewind(self, length: int) -> None:
        """Go back to the first `length` bytes of the file: what a checkpoint vouches for."""
        if self._path is None:
            return
        held = self._path.read_bytes() if self._path.exists() else b""
        if len(held) < length or (length and held[length - 1 : length] != b"\n"):
            raise UsageError(f"{self._path} is shorter than its checkpoint says: it was changed by hand")
        self.rows = [json.loads(line) for line in held[:length].splitlines()]
        if len(held) > length:
            os.truncate(self._path, length)

    def rounds(self, column: str) -> list[int]:
        return [row["round"] for row in self.rows if row.get(column) is not None]

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows if row.get(column) is not None]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
