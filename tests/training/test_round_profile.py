"""The profile of a run: a trace that tools can open, and a table that adds up to the rounds in it."""

from __future__ import annotations

import gzip
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import profile
from torch.utils.data import TensorDataset

from normec import (
    DPSGD,
    Callback,
    Clip,
    Logging,
    NormEC,
    Privacy,
    Problem,
    UsageError,
    models,
    train,
)
from normec.experiments import runs
from normec.report.page import write
from normec.settings import make


def problem() -> Problem:
    draw = torch.Generator().manual_seed(0)
    built = models.build("softmax", (6,), 3)
    clients = [
        TensorDataset(torch.randn(8, 6, generator=draw), torch.randint(3, (8,), generator=draw)) for _ in range(4)
    ]
    return Problem(built.model, built.loss, clients)


def trace_of(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace.json.gz") as file:
        return list(json.load(file)["traceEvents"])


def lengths(events: list[dict[str, Any]], name: str) -> list[float]:
    return [event["dur"] for event in events if event.get("ph") == "X" and event["name"] == f"normec: {name}"]


@pytest.mark.slow
def test_parts_add_up_to_the_rounds_of_the_trace(tmp_path: Path) -> None:
    how: dict[str, Any] = {"lr": 0.1, "rounds": 40}
    run = train(problem(), NormEC(0.1, 0.2), out=tmp_path / "run", logging=Logging(profile=True), **how)
    plain = train(problem(), NormEC(0.1, 0.2), **how)
    assert torch.equal(run.x, plain.x)
    table, events = json.loads((tmp_path / "run/profile.json").read_text()), trace_of(tmp_path / "run")
    assert table["first_round"] == 10
    assert 1 <= table["rounds"] <= 20
    rounds = lengths(events, "round")
    assert len(rounds) == table["rounds"]
    assert table["ms_per_round"] == pytest.approx(sum(rounds) / 1e3 / len(rounds), rel=1e-3)
    parts = {part["name"]: part["ms"] for part in table["parts"]}
    assert sum(parts.values()) == pytest.approx(table["ms_per_round"], rel=1e-6)
    assert parts["gradients"] == pytest.approx(sum(lengths(events, "gradients")) / 1e3 / len(rounds), rel=1e-3)
    assert {"gradients", "update", "server step", "participation"} <= parts.keys()
    assert any(line["name"].startswith("aten::") and line["calls"] > 0 for line in table["operations"])
    page = (tmp_path / "run/report.html").read_text()
    assert 'href="trace.json.gz"' in page
    assert "server step" in page


def test_only_a_run_without_privacy_shows_shapes(tmp_path: Path) -> None:
    how: dict[str, Any] = {"lr": 0.1, "rounds": 6, "logging": Logging(profile=True)}
    train(problem(), NormEC(0.1, 0.2), out=tmp_path / "open", **how)
    assert any("Input Dims" in event.get("args", {}) for event in trace_of(tmp_path / "open"))
    run = train(problem(), DPSGD(Clip(1.0)), privacy=Privacy(epsilon=8, trust="local"), out=tmp_path / "private", **how)
    events = trace_of(tmp_path / "private")
    assert not [
        event for event in events if {"Input Dims", "Concrete Inputs", "Input type"} & event.get("args", {}).keys()
    ]
    assert lengths(events, "noise")
    assert lengths(events, "payment")
    for name in ("trace.json.gz", "profile.json"):
        assert stat.S_IMODE((tmp_path / "private" / name).stat().st_mode) == 0o600
    assert run.privacy is not None
    assert any("profile" in note for note in run.privacy.notes)
    assert "aten::" in (tmp_path / "open/report.html").read_text()
    assert "aten::" not in (tmp_path / "private/report.html").read_text()


def test_the_shortest_run_has_a_profile(tmp_path: Path) -> None:
    train(problem(), NormEC(0.1, 0.2), lr=0.1, rounds=1, out=tmp_path / "run", logging=Logging(profile=True))
    assert json.loads((tmp_path / "run/profile.json").read_text())["rounds"] == 1


@pytest.mark.parametrize("held", ['{"parts": 3}', "[]", "{", '{"first_round": 1, "rounds": 1, "ms_per_round": 1e999}'])
def test_a_damaged_table_is_left_out_of_the_page(tmp_path: Path, held: str) -> None:
    train(problem(), NormEC(0.1, 0.2), lr=0.1, rounds=1, out=tmp_path / "run")
    (tmp_path / "run/profile.json").write_text(held)
    page = write(tmp_path / "run").read_text()
    assert "profile.json is" in page
    assert "part of a round" not in page


def test_a_setting_asks_for_a_profile(tmp_path: Path) -> None:
    config = make({"data": "digits", "clients": 5, "rounds": 4, "private": False, "profile": True})
    result = runs.execute(config, tmp_path / "run")
    assert lengths(trace_of(result.folder), "gradients")


def test_a_run_that_fails_leaves_no_profiler_behind(tmp_path: Path) -> None:
    class Breaks(Callback):
        def round(self, k: int) -> None:
            if k == 11:  # the first profiled round is over
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(
            problem(),
            NormEC(0.1, 0.2),
            lr=0.1,
            rounds=100,
            out=tmp_path / "run",
            callbacks=[Breaks()],
            logging=Logging(profile=True),
        )
    assert not (tmp_path / "run/profile.json").exists()
    assert not _profiler_enabled()
    train(problem(), NormEC(0.1, 0.2), lr=0.1, rounds=2, out=tmp_path / "next", logging=Logging(profile=True))
    assert (tmp_path / "next/trace.json.gz").exists()


def test_another_profiler_goes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with profile() as other:
        train(problem(), NormEC(0.1, 0.2), lr=0.1, rounds=2, out=tmp_path / "run", logging=Logging(profile=True))
    assert "another profiler is active" in caplog.text
    assert not (tmp_path / "run/profile.json").exists()
    assert other.key_averages()


def test_a_profile_needs_a_folder() -> None:
    with pytest.raises(UsageError, match="give out as well"):
        train(problem(), NormEC(0.1, 0.2), lr=0.1, rounds=2, logging=Logging(profile=True))
