"""The list of runs below a folder, with the changes since the last query."""

from __future__ import annotations

import os
import re
import secrets
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import UsageError
from ..privacy.display import shown_epsilon
from ..storage.history import STARTED_BY
from ..storage.tags import FILE as TAGS
from .charts import thinned
from .html import plain
from .page import kind_of
from .run_page import NOT_SHOWN
from .run_view import PARTS, RunView, being_written, read_run

SPARK_POINTS = 60
# An entry depends on these files: its epsilon is shown only while the ledger bears it out.
READ = (*PARTS, TAGS, "ledger.jsonl", "ledger.jsonl.head", "checkpoint/latest.json")
OF_PAGES = ("comparison.json", "sweep.toml", "theory.json")
OF_THE_MACHINE = (*NOT_SHOWN, STARTED_BY, "witness", "device", "engine", "log_every", "evaluate_every")
Signature = tuple[Any, ...]


class Listing:
    """Runs and pages by their path below `root`; `changes` gives what is new since a token."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._name = secrets.token_hex(4)  # a token of an earlier server means nothing here
        self._version = 0
        self._held: dict[str, tuple[Signature, int, dict[str, Any]]] = {}
        self._gone: dict[str, int] = {}

    def folder(self, path: str) -> Path | None:
        """The run, comparison or sweep at `path`: only what a walk below the root finds, so nothing outside it."""
        with self._lock:
            known = dict(self._folders())
        return known.get(path)

    def changes(self, token: str | None) -> dict[str, Any]:
        """Entries that are new or changed since `token`, and the paths that are gone."""
        name, number = _parsed(token) if token else ("", -1)
        since = number if name == self._name else -1
        with self._lock:
            self._refresh()
            return {
                "token": f"{self._name}-{self._version}",
                "whole": since < 0,
                "changed": [entry for _, version, entry in self._held.values() if version > since],
                "gone": [path for path, version in self._gone.items() if version > since >= 0],
            }

    def _refresh(self) -> None:
        found = dict(self._folders())
        self._version += 1
        changed = False
        for path in [path for path in self._held if path not in found]:
            del self._held[path]
            self._gone[path] = self._version
            changed = True
        for path, folder in found.items():
            signature = _signature(folder)
            if path in self._held and self._held[path][0] == signature:
                continue
            entry = _entry(path, folder)
            if entry is not None:
                self._held[path] = (signature, self._version, entry)
                self._gone.pop(path, None)
                changed = True
        if not changed:
            self._version -= 1

    def _folders(self) -> list[tuple[str, Path]]:
        """The folders below the root; links are not followed, and a run is not searched for more runs."""
        found = []
        for place, folders, _ in os.walk(self.root):
            folder = Path(place)
            kind = kind_of(folder)
            if kind:
                found.append((folder.relative_to(self.root).as_posix(), folder))
            folders[:] = [] if kind == "run" else sorted(name for name in folders if not name.startswith("."))
        return found


def _parsed(token: str) -> tuple[str, int]:
    """The server's name and the version in a token."""
    found = re.fullmatch(r"([a-z0-9]{1,32})-([0-9]{1,18})", token)
    if found is None:
        raise UsageError(f"since must be a token that the list gave, got {token[:60]!r}")
    return found[1], int(found[2])


def _signature(folder: Path) -> Signature:
    """Changes whenever an entry would."""
    marks: list[Any] = [being_written(folder)]
    for part in (*READ, *OF_PAGES):
        try:
            state = (folder / part).stat()
            marks.append((state.st_mtime_ns, state.st_size))
        except OSError:
            marks.append(None)
    return tuple(marks)


def _entry(path: str, folder: Path) -> dict[str, Any] | None:
    """One line of the list; None if the folder has disappeared."""
    kind = kind_of(folder)
    if kind is None:
        return None
    entry: dict[str, Any] = {"path": path, "address": address(path), "name": folder.name, "kind": kind}
    if kind != "run":
        return entry
    try:
        return entry | _facts(read_run(folder))
    except Exception as error:  # the border between one folder and the list of all
        said = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        return entry | {"status": "unreadable", "private": False, "round": 0, "error": said}


def address(path: str) -> str:
    """A path as a part of a URL; names of files need not be UTF-8."""
    return quote(os.fsencode(path))


def _facts(view: RunView) -> dict[str, Any]:
    return {
        "status": view.status,
        "method": view.method,
        "data": view.settings.get("data"),
        "tags": view.tags,
        "started": _started(view.folder),
        "own": list(view.method_settings),
        "settings": _settings(view),
        "round": view.round,
        "rounds": view.rounds,
        "epsilon": view.epsilon if view.private else None,
        "shown_epsilon": shown_epsilon(view.epsilon) if view.private else "∞",
        "private": view.private,
        "simulation": view.simulation,
        "accuracy": view.final.get("accuracy"),
        "loss": None if view.private else view.final.get("loss"),  # of a private run it is not covered
        "test_loss": view.final.get("test_loss"),
        "error": view.summary.get("error") if view.status != "training" else None,
        "spark": _spark(view),
    }


def _settings(view: RunView) -> dict[str, Any]:
    """The settings by which runs are told apart, without those of this machine."""
    known = {name: value for name, value in view.settings.items() if name not in {*OF_THE_MACHINE, "method_settings"}}
    return known | view.method_settings | ({"lr": view.lr} if view.lr is not None else {})


def _started(folder: Path) -> int | None:
    """When the settings of a run, or else its rows or its summary, were written, in milliseconds since 1970."""
    for part in PARTS:
        try:
            return (folder / part).stat().st_mtime_ns // 10**6
        except OSError:
            continue
    return None


def _spark(view: RunView) -> dict[str, Any] | None:
    """A few points of the accuracy, or of the loss; of a private run, of the test loss."""
    for column in ("accuracy", "test_loss" if view.private else "loss"):
        rows = [row for row in view.history if row.get(column) is not None]
        if len(rows) > 1:
            few = thinned(rows, SPARK_POINTS)
            return {"column": column, "x": [row["round"] for row in few], "y": plain([row[column] for row in few])}
    return None
