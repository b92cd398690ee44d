"""The history of a run: rows of measurements, in memory and optionally in a JSON-lines file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest
from ..system.files import append, flush, parse_json, read_if_present, writing

STARTED_BY = "started_by"  # the key in config.toml of a run that was started from Python
Row = dict[str, Any]
Extent = dict[str, Any]  # how many bytes of the file, and their sha256

# Columns that are functions of the clients' data without any noise. No guarantee covers them: the rows of a private
# run have them only where `Logging(diagnostics=True)` asked for them.
UNNOISED = ("loss", "grad_norm", "memory_error", "message_norm", "message_norm_max", "disagreement")
COLUMNS = (
    *("round", "messages", "bytes"),
    *UNNOISED,
    *("test_loss", "accuracy", "accuracy_mean_over_clients"),
    *("validation_loss", "validation_accuracy", "validation_accuracy_mean_over_clients", "epsilon"),
)
NOT_COVERED = "not covered by the guarantee"


def uncovered(row: Row) -> list[str]:
    """Return the columns of a private run's row (one with an ε) that the guarantee does not cover."""
    return [name for name in UNNOISED if row.get(name) is not None] if row.get("epsilon") is not None else []


class History:
    """Rows in the order of their rounds; row k describes x^k, before the step of round k.

    ``history["loss"]`` lists the values of a column, and ``history.rounds("loss")`` the rounds of these values. The
    list of a column that the run does not measure is empty, and a misspelt one is refused; ``history.columns`` names
    those that it has.

    In a private run, ``epsilon`` of row k covers the releases of the rounds 0 to k. It includes the release of round k,
    which is paid for before the row is written and which x^k does not depend on yet. The last row describes the final
    model and counts every release of the run.

    Args:
        path: The JSON-lines file of the rows; None keeps them in memory.
        private: Whether only the owner can read the file.

    Example:
        >>> history = History()
        >>> history.append({"round": 0, "loss": 2.0})
        >>> history.append({"round": 5, "loss": 1.5})
        >>> history["loss"], history.rounds("loss")
        ([2.0, 1.5], [0, 5])
        >>> history
        History(2 rows of round, loss)
    """

    def __init__(self, path: Path | None = None, *, private: bool = False) -> None:
        """`private`: if the file is created, only the owner can read it."""
        self.rows: list[Row] = []
        self._path, self._private = path, private
        self._seen, self._length = hashlib.sha256(), 0
        self._pending: list[bytes] = []

    def append(self, row: Row) -> None:
        """Add a row; the next `write` adds it to the file."""
        self.rows.append(row)
        if self._path is not None:
            self._pending.append(json.dumps(row).encode() + b"\n")

    def write(self) -> None:
        """Append the rows that are not in the file yet."""
        if self._path is not None and self._pending:
            data = b"".join(self._pending)
            append(self._path, data, private=self._private)
            self._pending = []
            self._seen.update(data)
            self._length += len(data)

    def flush(self) -> Extent:
        """Sync all rows to the disk; returns their length and checksum, for the checkpoint."""
        self.write()
        if self._path is not None and self._path.exists():
            with writing(self._path):
                flush(self._path)
        return {"bytes": self._length, "sha256": self._seen.hexdigest()}

    def reread(self, limit: int | None = None) -> None:
        """Read the rows from the file, of at most `limit` bytes, without an incomplete last line."""
        held = self._held(limit)
        self._take(held[: held.rfind(b"\n") + 1])

    def rewind(self, extent: Extent | None) -> None:
        """Go back to the rows of a checkpoint (None: no rows), and cut off the rest of the file."""
        if self._path is None:
            return
        held = self._held()
        length = extent["bytes"] if extent is not None else 0
        vouched = held[:length]
        if extent is not None and hashlib.sha256(vouched).hexdigest() != extent["sha256"]:
            raise UsageError(
                f"{self._path} does not match its checkpoint: it was removed, edited or damaged; "
                "restore it from a backup, or start again in another folder"
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
        """Return the rounds in which a column has a value."""
        return [row["round"] for row in self.rows if row.get(column) is not None]

    @property
    def columns(self) -> list[str]:
        """The columns that have a value in some row."""
        return list(dict.fromkeys(name for row in self.rows for name, value in row.items() if value is not None))

    def __repr__(self) -> str:
        return f"History({len(self.rows)} rows of {', '.join(self.columns)})" if self.rows else "History(no rows)"

    def __getitem__(self, column: str) -> list[Any]:
        if self.rows and column not in COLUMNS and not any(column in row for row in self.rows):
            meant = nearest(column, dict.fromkeys((*self.columns, *COLUMNS)))
            if meant:  # else a metric of the run's own that never had a value
                raise UsageError(f"the history has no column {column!r}{meant}; it has {', '.join(self.columns)}")
        return [row[column] for row in self.rows if row.get(column) is not None]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def in_a_line(made: str, history: History, epsilon: str | None, stopped: str | None, folder: Path | None) -> str:
    """Return the result of a run in a line, for its `repr`; `made` names the method and the rounds."""
    column = next((name for name in ("accuracy", "test_loss", "loss") if history[name]), None)
    result = None if column is None else f"{column.replace('_', ' ')} {history[column][-1]:.4g}"
    if column in UNNOISED and epsilon is not None:
        result = f"{result} ({NOT_COVERED})"
    parts = [made, result]
    parts += [f"epsilon {epsilon}" if epsilon is not None else None]
    parts += [f"stopped: {stopped}" if stopped is not None else None]
    parts += [f"in {folder}" if folder is not None else None]
    return ", ".join(part for part in parts if part is not None)
