"""Small runs that stop and go on: their problems, a callback that stops them, and what must then be equal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Callback, Problem, Run


def data(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator) + 0.3 * seed
    return TensorDataset(x, torch.randint(0, 3, (rows,), generator=generator))


def problem(kind: str = "linear") -> Problem:
    torch.manual_seed(0)
    models = {
        "linear": lambda: nn.Linear(4, 3),
        "batchnorm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
        "dropout": lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.4), nn.Linear(5, 3)),
    }
    return Problem(models[kind](), F.cross_entropy, [data(9 + 2 * i, i) for i in range(4)], data(15, 9))


class StopAt(Callback):
    """Send this process a real SIGINT, `times` times, when so many rounds are done."""

    def __init__(self, round: int, times: int = 1) -> None:
        self.at, self.times = round, times

    def round(self, round: int) -> None:
        if round == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


class InterruptAt(Callback):
    """Raises KeyboardInterrupt when so many rounds are done: the run ends where it is, without a result."""

    def __init__(self, round: int) -> None:
        self.at = round

    def round(self, round: int) -> None:
        if round == self.at:
            raise KeyboardInterrupt


class EndAt(Callback):
    """A rule that ends the run when so many rounds are done."""

    def __init__(self, round: int) -> None:
        self.at = round

    def round(self, round: int) -> None:
        if round == self.at:
            self.run.stop("that is enough")


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def results(folder: Path) -> dict[str, Any]:
    """Every file of a run but its page, without wall-clock times and without the checksum that covers them."""
    found: dict[str, Any] = {name: data for name, data in snapshot(folder).items() if name != "report.html"}
    for name in found.keys() & {"summary.json", "checkpoint/latest.json"}:
        held = json.loads(found[name])
        found[name] = {key: value for key, value in held.items() if key not in ("timings", "checksum")}
    return found


def releases(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ledger that pay for releases."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "release"]


def alike(a: Run, b: Run) -> None:
    """Equal but for the last bits of float64: the order of a sum may depend on where its numbers lie in memory."""
    close = {"rtol": 1e-11, "atol": 1e-13}
    torch.testing.assert_close(states(a), states(b), **close)
    torch.testing.assert_close(a.state.buffers, b.state.buffers, **close)
    assert [row.keys() for row in a.history.rows] == [row.keys() for row in b.history.rows]
    for mine, theirs in zip(a.history.rows, b.history.rows, strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    assert (a.state.round, a.state.messages) == (b.state.round, b.state.messages)


def states(run: Run) -> dict[str, torch.Tensor]:
    """x, and the states of clients, server and the server's optimizer by name; those of both may have one name."""
    optimizer = {f"optimizer.{name}": value for name, value in run.state.optimizer.items()}
    server = {f"server.{name}": value for name, value in run.state.server.items()}
    return {"x": run.x, "last x": run.state.x, **run.state.clients, **server, **optimizer}


def same(a: Run, b: Run) -> None:
    """Equal to the bit: iterate, states, buffers, history, counters, model."""
    assert states(a).keys() == states(b).keys()
    for name, value in states(a).items():
        assert torch.equal(value, states(b)[name]), name
    assert a.state.buffers.keys() == b.state.buffers.keys()
    for name, rows in a.state.buffers.items():
        assert torch.equal(rows, b.state.buffers[name]), name
    assert a.history.rows == b.history.rows
    assert (a.state.round, a.state.messages) == (b.state.round, b.state.messages)
    if a.model is not None and b.model is not None:
        there: dict[str, Any] = b.model.state_dict()
        assert all(torch.equal(value, there[name]) for name, value in a.model.state_dict().items())
