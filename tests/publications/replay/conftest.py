"""The plan at a scale of seconds, and records as they would come of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from publications.alpha_normec.figures import protocol
from publications.alpha_normec.figures.protocol import Protocol
from publications.alpha_normec.replay import plan
from publications.alpha_normec.replay.plan import Planned
from publications.alpha_normec.replay.running import Where

Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def smoke() -> Protocol:
    return protocol.make("smoke", {"precision": plan.PRECISION})


@pytest.fixture(scope="session")
def paper() -> Protocol:
    return plan.paper_protocol()


@pytest.fixture
def where(tmp_path: Path) -> Where:
    return Where(tmp_path / "runs", tmp_path / "replay")


@pytest.fixture(scope="session")
def make() -> Make:
    """A record of a cell whose test accuracies by epoch are given; those on the records held out are one less."""

    def record(cell: Planned, *test: float, epsilon: float | None = None, status: str = "finished") -> dict[str, Any]:
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
            "command": f"normec replay run {cell.name}",
            "device": "made up",
            "engine": "made up",
            "seconds": 60.0,
            "together": 1,
            "messages": 10,
            "versions": {"normec": "0"},
            "config": cell.config.known_by(),
            "curve": {
                "epoch": [*range(len(test))],
                "test": list(test),
                "held_out": held_out,
                "loss": [1.0] * len(test),
            },
        }

    return record
