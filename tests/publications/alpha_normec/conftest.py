"""Protocols, records that are made up, and all figures at smoke scale, drawn once per test session by the command."""

from __future__ import annotations

import fcntl
import json
import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from publications.alpha_normec import protocol
from publications.alpha_normec.plan import Cell
from publications.alpha_normec.protocol import Protocol
from publications.alpha_normec.runner import Folders

from ...support.forks import Fork
from ...support.waiting import LIMIT

Row = dict[str, Any]
Make = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[3]
METHODS = {  # the names of methods in figures, as settings of a run
    "NormEC without SN": ("normec", False, False),
    "NormEC with SN": ("normec", True, False),
    "DP-SGD, no noise": ("dpsgd-norm", None, False),
    "Clip21": ("clip21", None, False),
    "DP-NormEC without SN": ("normec", False, True),
    "DP-NormEC with SN": ("normec", True, True),
    "DP-Clip21": ("clip21", None, True),
}
STEPS = 4  # messages per round: 1438 records, a tenth held out, ten clients, batches of 32
ROUNDS, SHORT_ROUNDS = 6, 3


@dataclass(frozen=True)
class RunFiles:
    """A run, read from its own files."""

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
        """The mean over the logged steps of a round."""
        first = (communication_round - 1) * STEPS
        held = [row["loss"] for row in self.rows if first <= row["round"] < first + STEPS]
        assert len(held) == STEPS // self.config["log_every"]
        return math.fsum(held) / len(held)


@dataclass(frozen=True)
class SmokeFigures:
    """The folder of the figures, the output of the command, and the runs."""

    folder: Path
    printed: Row
    cells: list[RunFiles]

    def content(self, name: str) -> Row:
        found: Row = json.loads((self.folder / f"{name}.json").read_text())
        return found

    def find(self, method: str, beta: float, lr: float, alpha: float = 0.01, epochs: int = ROUNDS) -> RunFiles:
        name, server_norm, private = METHODS[method]
        wanted = {"method": name, "private": private, "lr": lr, "epochs": epochs}
        wanted |= {"tau": beta} if name == "clip21" else {"beta": beta, "alpha": alpha}
        if server_norm is not None:
            wanted["server_norm"] = server_norm
        (found,) = (cell for cell in self.cells if all(cell.config.get(key) == wanted[key] for key in wanted))
        return found

    def tuned(self, method: str, beta: float, alpha: float = 0.01, epochs: int = ROUNDS) -> RunFiles:
        """The step size whose run ends best on the records held out; the smallest of several."""
        tried = [self.find(method, beta, lr, alpha, epochs) for lr in (0.01, 0.1, 1.0)]
        return max(tried, key=lambda cell: float(cell.final["validation_accuracy"]))


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> SmokeFigures:
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one for all test processes
    with (base / "figures.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        printed = base / "figures.json"
        if not printed.exists():
            words = ["figures", "all", "--runs", str(base / "smoke"), "--jobs", "2", "--json", "--quiet"]
            process = Fork(["-m", "publications.alpha_normec", *words], ROOT)
            found, said = process.communicate(10 * LIMIT)
            assert process.returncode == 0, said
            printed.write_text(found)
    folder = base / "smoke"
    cells = [
        RunFiles(
            path,
            tomllib.loads((path / "config.toml").read_text()),
            json.loads((path / "summary.json").read_text()),
            [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()],
        )
        for path in sorted((folder / "cells").iterdir())
    ]
    return SmokeFigures(folder / "figures", json.loads(printed.read_text()), cells)


@pytest.fixture(scope="session")
def smoke() -> Protocol:
    return protocol.make("smoke")


@pytest.fixture(scope="session")
def paper() -> Protocol:
    return protocol.make("paper")


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "runs", tmp_path / "results")


@pytest.fixture(scope="session")
def make() -> Make:
    """A function that makes up a record from test accuracies by epoch; held-out accuracies are one less."""

    def record(cell: Cell, *test: float, epsilon: float | None = None, status: str = "finished") -> dict[str, Any]:
        held_out = [value - 1 for value in test]
        ended = status == "finished"
        return {
            "name": cell.name,
            "part": cell.part,
            "reading": cell.reading,
            "status": status,
            "error": None,
            "seed": cell.seed,
            "final": {"test": test[-1], "held_out": held_out[-1], "loss": 1.0}
            if ended
            else {"test": None, "held_out": None, "loss": None},
            "best": {"test": max(test), "test_epoch": 1, "held_out": max(held_out), "held_out_epoch": 1},
            "privacy": None if epsilon is None else {"epsilon": epsilon, "delta": 1e-5},
            "command": f"python -m publications.alpha_normec run {cell.name}",
            "device": "made up",
            "engine": "made up",
            "seconds": 60.0,
            "together": 1,
            "messages": 10,
            "versions": {"normec": "0"},
            "config": cell.config.identity_settings(),
            "curve": {
                "epoch": [*range(len(test))],
                "test": list(test),
                "held_out": held_out,
                "loss": [1.0] * len(test),
            },
        }

    return record
