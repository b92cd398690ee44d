"""What happened, a line each: the party's own log, and the server's list of what it dropped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

MOST = 10_000  # of one process: whoever floods a server with bad messages shall not fill its disk


class Journal:
    """A file of JSON lines; without a path the lines are kept in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        self.written = 0

    def note(self, event: str, **facts: Any) -> None:
        self.written += 1
        if self.written > MOST:
            return
        if self.written == MOST:
            event, facts = "full", {"note": f"no more than {MOST} lines are written by one process"}
        line = {"event": event, **facts}
        if self._path is None:
            self.lines.append(line)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = json.dumps({"time": round(time.time(), 3), **line}) + "\n"
        with self._path.open("ab") as file:
            file.write(whole.encode())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; one that a kill cut short is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            found.append(parsed)
    return found
