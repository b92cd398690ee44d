"""All figures at smoke scale, made once in a test session by the real command."""

from __future__ import annotations

import fcntl
import json
import math
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ...cli.command import normec

Row = dict[str, Any]
ARMS = {  # the figures' names of methods, as settings of a run
    "NormEC without SN": ("normec", False, False),
    "NormEC with SN": ("normec", True, False),
    "DP-SGD, no noise": ("dpsgd-norm", None, False),
    "Clip21": ("clip21", None, False),
    "DP-NormEC without SN": ("normec", False, True),
    "DP-NormEC with SN": ("normec", True, True),
    "DP-Clip21": ("clip21", None, True),
}
STEPS = 4  # messages a round: 1438 records, a tenth held out, ten clients, batches of 32
ROUNDS, SHORT_ROUNDS = 6, 3


@dataclass(frozen=True)
class Cell:
    """A run as its own files tell it."""

    folder: Path
    config: Row
    summary: Row
    rows: list[Row]

    @property
    def final(self) -> Row:
        return self.rows[-1]

    def accuracy(self, k: int) -> float:
        (value,) = (100 * row["accuracy"] for row in self.rows if row["round"] == k and "accuracy" in row)
        return float(value)

    def highest(self) -> float:
        return 100 * max(row["accuracy"] for row in self.rows if "accuracy" in row)

    def loss(self, communication_round: int) -> float:
        """The mean over the steps of a round."""
        first = (communication_round - 1) * STEPS
        held = [row["loss"] for row in self.rows if first <= row["round"] < first + STEPS]
        assert len(held) == STEPS
        return math.fsum(held) / STEPS


@dataclass(frozen=True)
class Smoke:
    """The folder of figures, and what the command printed."""

    folder: Path
    printed: Row
    cells: list[Cell]

    def told(self, name: str) -> Row:
        found: Row = json.loads((self.folder / f"{name}.json").read_text())
        return found

    def find(self, method: str, beta: float, lr: float, alpha: float = 0.01, epochs: int = ROUNDS) -> Cell:
        name, server_norm, private = ARMS[method.removesuffix(", short")]
        wanted = {"method": name, "private": private, "lr": lr, "epochs": epochs}
        wanted |= {"tau": beta} if name == "clip21" else {"beta": beta, "alpha": alpha}
        if server_norm is not None:
            wanted["server_norm"] = server_norm
        (found,) = (cell for cell in self.cells if all(cell.config.get(key) == wanted[key] for key in wanted))
        return found

    def tuned(self, method: str, beta: float, alpha: float = 0.01, epochs: int = ROUNDS) -> Cell:
        """The step size whose run ends best on the records held out; the smallest of several."""
        tried = [self.find(method, beta, lr, alpha, epochs) for lr in (0.01, 0.1, 1.0)]
        return max(tried, key=lambda cell: float(cell.final["validation_accuracy"]))


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one for all test processes
    with (base / "paper.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        printed = base / "paper.json"
        if not printed.exists():
            done = normec("reproduce", "all", "--out", "paper", "--jobs", "2", "--json", cwd=base)
            assert done.returncode == 0, done.stderr
            printed.write_text(done.stdout)
    folder = base / "paper" / "smoke"
    cells = [
        Cell(
            path,
            tomllib.loads((path / "config.toml").read_text()),
            json.loads((path / "summary.json").read_text()),
            [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()],
        )
        for path in sorted((folder / "cells").iterdir())
    ]
    return Smoke(folder, json.loads(printed.read_text()), cells)
