"""Finished measurements in a file, one per line, from which a benchmark goes on where it was stopped.

The first line says on which machine, with which versions and with which code they were made; others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normec import UsageError
from normec.system.files import write_atomic

from .implementations import Implementation
from .measurement import Measured, Outcome, Task
from .workloads import Case

_FINAL = "measured", "does not apply"  # what failed, was stopped or was not installed is tried again


class Kept:
    """The file `measured.jsonl` of a folder; a line that was cut off by a kill counts as not written."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._path = folder / "measured.jsonl"
        self._facts = json.loads(json.dumps(facts))
        self._lines = self._read()
        for name, value in self._facts.items():
            if self._lines and self._lines[0].get(name) != value:
                raise UsageError(
                    f"{self._path} has measurements with {name} {_brief(self._lines[0].get(name))}, and this benchmark "
                    f"has {_brief(value)}; choose another folder"
                )

    def fill(self, wanted: Sequence[Measured]) -> None:
        """Add the outcomes that are kept to those that are wanted."""
        of = {found.case: found.outcomes for found in wanted}
        for line in self._lines[1:]:
            case, implementation = Case(**line["case"]), Implementation(**line["implementation"])
            if implementation in of.get(case, {}) and line["outcome"]["status"] in _FINAL:
                of[case][implementation].append(line["outcome"])

    def begin(self) -> None:
        """Write the lines that are whole, and the first one."""
        write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in self._lines or [self._facts]))

    def add(self, task: Task, outcome: Outcome) -> None:
        line = {"case": task.case.to_dict(), "implementation": task.implementation.to_dict(), "outcome": outcome}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    break
        return lines


def _brief(value: Any) -> str:
    return json.dumps(value) if value is not None else "none"
