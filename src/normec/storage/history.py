"""What was measured along a run: rows of numbers, in memory and, if asked, in a JSON-lines file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..system.files import append, flush, parse_json, read_if_present, writing

STARTED_BY = "started_by"  # in a config.toml: what started a run that no command can repeat
Row = dict[str, Any]
Extent = dict[str, Any]  # how many bytes of the file, and their sha256

# Columns that are functions of the clients' data without any noise. No guarantee covers them: the rows of a private
# run have them only where `Logging(diagnostics=True)` asked for them.
UNNOISED = ("loss", "grad_norm", "memory_error", "message_norm", "message_norm_max", "disagreement")
NOT_COVERED = "not covered by the guarantee"


def uncovered(row: Row) -> list[str]:
    """The columns of a private run's row (it has an ε) that the guarantee does not cover."""
    return [name for name in UNNOISED if row.get(name) is not None] if row.get("epsilon") is not None else []


class History:
    """Rows in the order of their rounds; row k describes x^k, before the step of round k.

    ``history["loss"]`` is the list of a column's values where it was measured, ``history.rounds("loss")``
    the rounds they belong to.

    Args:
        path: The file of JSON lines that keeps the rows; None keeps them in memory.
        private: Whether only the owner may read the file.

    Example:
        >>> history = History()
        >>> history.append({"round": 0, "loss": 2.0})
        >>> history.append({"round": 5, "loss": 1.5})
        >>> history["loss"], history.rounds("loss")
        ([2.0, 1.5], [0, 5])
    """

    def __init__(self, path: Path | None = None, *, private: bool = False) -> None:
        """`private`: only the owner may read the file, should it be created."""
        self.rows: list[Row] = []
        self._path, self._private = path, private
        self._seen, self._length = hashlib.sha256(), 0
        self._pending: list[bytes] = []

    def append(self, row: Row) -> None:
        """Add a row; it goes to the file with the next `write`."""
        self.rows.append(row)
        if self._path is not None:
            self._pending.append(json.dumps(row).encode() + b"\n")

    def write(self) -> None:
        if self._path is not None and self._pending:
            data = b"".join(self._pending)
            append(self._path, data, private=self._private)
            self._pending = []
            self._seen.update(data)
            self._length += len(data)

    def flush(self) -> Extent:
        """Bring all rows to the disk; returns what a checkpoint needs to vouch for them."""
        self.write()
        if self._path is not None and self._path.exists():
            with writing(self._path):
                flush(self._path)
        return {"bytes": self._length, "sha256": self._seen.hexdigest()}

    def reread(self, limit: int | None = None) -> None:
        """Take the rows from the file, of at most `limit` bytes; a last line that a kill cut short is left out."""
        held = self._held(limit)
        self._take(held[: held.rfind(b"\n") + 1])

    def rewind(self, extent: Extent | None) -> None:
        """Go back to what a checkpoint vouches for (None: to nothing); the rest of the file is cut off."""
        if self._path is None:
            return
        held = self._held()
        length = extent["bytes"] if extent is not None else 0
        vouched = held[:length]
        if extent is not None and hashlib.sha256(vouched).hexdigest() != extent["sha256"]:
            raise UsageError(
                f"{self._path} is not what its checkpoint says: it was removed, changed by hand or damaged; "
                "restore it from a backup, or start anew in another folder"
            )
        self._take(vouched)
        self._seen, self._length, self._pending = hashlib.sha256(vouched), length, []
        if len(held) > length:
            with writing(self._path):
                os.truncate(self._path, length)

    def _held(self, limit: int | None = None) -> bytes:
        return (read_if_present(self._path, limit) if self._path is not None else None) or b""

    def _take(self, data: bytes) -> None:
        rows = [parse_json(line, str(self._path)) for line in data.splitlines()]
        if not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"{self._path} is damaged: a line is not a row of numbers")
        self.rows = rows

    def rounds(self, column: str) -> list[int]:
        return [row["round"] for row in self.rows if row.get(column) is not None]

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows if row.get(column) is not None]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
