"""A log of events with one JSON line for each, such as a party's refusals, and messages that the server dropped."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from ...system.files import PRIVATE_FILE, private_folder

JOURNAL = "events.jsonl"
FULL = "full"  # the last event of a journal that has reached its limit
MOST_BYTES = 4 * 2**20  # of the whole file, so that floods of messages cannot fill the disk
MOST_LINES = 10_000  # of a journal in memory
_LONGEST_TEXT = 500


class Journal:
    """A file of JSON lines that stops growing at `MOST_BYTES`; without a path, the lines are kept in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []

    def note(self, event: str, **facts: Any) -> None:
        """Add a line. A failed write is logged and otherwise ignored."""
        line = {"event": event, **{name: _short(value) for name, value in facts.items()}}
        if self._path is None:
            if len(self.lines) < MOST_LINES:
                self.lines.append(line)
            return
        try:
            _append(self._path, line)
        except OSError as error:
            logging.getLogger("normec").warning("cannot write to %s: %s", self._path, error.strerror)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a journal; a line that a kill cut off is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            found.append(parsed)
    return found


def _append(path: Path, line: dict[str, Any]) -> None:
    private_folder(path.parent)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE)
    with os.fdopen(handle, "ab") as file:
        size = os.fstat(handle).st_size
        if size >= MOST_BYTES:
            return
        text = _line(line)
        if size + len(text) >= MOST_BYTES:
            text += _line({"event": FULL, "note": f"{path.name} holds {MOST_BYTES} bytes; move it away to go on"})
        file.write(text)


def _line(facts: dict[str, Any]) -> bytes:
    return (json.dumps({"time": round(time.time(), 3), **facts}) + "\n").encode()


def _short(value: Any) -> Any:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value
