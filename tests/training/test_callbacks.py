"""Callbacks see the run and may stop it; early stopping decides from the history; ε is that of the rounds made."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import normec as n
from normec.privacy.accounting import Event, epsilon_of
from normec.storage.history import Row

from ..support.runs import EndAt, InterruptAt, releases


def problem(noisy: bool = False, **more: Any) -> n.Problem:
    """Clients of a linear model; `noisy` validation labels get worse the longer one trains."""
    draw = torch.Generator().manual_seed(0)
    sets = []
    for _ in range(6):
        inputs = torch.randn(10, 4, generator=draw)
        sets.append(TensorDataset(inputs, (inputs[:, 0] > 0).long()))
    torch.manual_seed(0)
    held = sets[5]
    if noisy:
        held = TensorDataset(held.tensors[0], 1 - held.tensors[1])
    return n.Problem(nn.Linear(4, 2), nn.functional.cross_entropy, sets[:4], test=sets[4], validation=held, **more)


OPTIONS: dict[str, Any] = {"lr": 0.1, "rounds": 40, "seed": 0, "logging": n.Logging(every=2, evaluate_every=2)}
METHOD = n.NormEC(alpha=0.1, beta=0.3)


class Watcher(n.Callback):
    """Compares what a run shows with the run itself."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.models: dict[int, Tensor] = {}
        self.results: dict[int, dict[str, float]] = {}

    def round(self, round: int) -> None:
        assert self.run.round == round
        self.models[round] = self.run.x
        self.results[round] = self.run.evaluate()
        model = self.run.model
        assert model is not None
        assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), self.run.x)
        if round == self.stop_at:
            self.run.stop("that is enough")


def test_a_callback_sees_the_model_and_its_results_and_changes_nothing() -> None:
    watcher = Watcher()
    run = n.train(problem(), METHOD, callbacks=[watcher], **OPTIONS)
    alone = n.train(problem(), METHOD, **OPTIONS)
    assert torch.equal(run.x, alone.x)
    assert run.history.rows == alone.history.rows
    assert torch.equal(watcher.models[40], run.x)
    for row in run.history.rows[1:]:
        assert watcher.results[row["round"]]["accuracy"] == row["accuracy"]
        assert watcher.results[row["round"]]["test_loss"] == row["test_loss"]
    short = n.train(problem(), METHOD, **{**OPTIONS, "rounds": 7})
    assert torch.equal(watcher.models[7], short.x)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("privacy", [None, n.Privacy(epsilon=5.0, trust="central")])
def test_a_callback_stops_a_run_with_a_last_row_and_a_summary(tmp_path: Path, privacy: n.Privacy | None) -> None:
    run = n.train(problem(), METHOD, callbacks=[Watcher(stop_at=7)], out=tmp_path, privacy=privacy, **OPTIONS)
    assert (run.finished, run.stopped, run.state.round) == (False, "that is enough", 7)
    assert run.history.rows[-1]["round"] == 7
    assert "accuracy" in run.history.rows[-1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["stopped"], summary["round"]) == ("stopped", "that is enough", 7)
    whole = n.train(problem(), METHOD, out=tmp_path, privacy=privacy, **OPTIONS)
    assert whole.finished
    straight = n.train(problem(), METHOD, privacy=privacy, **OPTIONS)
    assert torch.equal(whole.x, straight.x)
    assert [row for row in whole.history.rows if row["round"] % 2 == 0] == straight.history.rows


def test_a_stopped_private_run_pays_for_its_rounds_and_states_the_planned_epsilon() -> None:
    privacy = n.Privacy(epsilon=5.0, trust="central")
    run = n.train(problem(), METHOD, callbacks=[Watcher(stop_at=10)], privacy=privacy, **OPTIONS)
    whole = n.train(problem(), METHOD, privacy=privacy, **OPTIONS)
    assert run.privacy is not None
    assert whole.privacy is not None
    assert run.privacy.releases == 10
    # 40 rounds have the multiplier z with ε(40/z²) = 5; 10 of them are the same Gaussian with a quarter of μ².
    multiplier = run.payments.made[0][1].multiplier  # type: ignore[union-attr]
    made = epsilon_of([Event(multiplier, count=10)], privacy.delta)
    assert made < run.privacy.epsilon == pytest.approx(whole.privacy.epsilon, rel=1e-9)
    shown = f"amount to {math.ceil(1000 * made) / 1000:g}"  # 4 digits, rounded up
    assert any("40 planned rounds, because it must hold" in note and shown in note for note in run.privacy.notes)
    assert any("validation" in note for note in run.privacy.notes)
    assert not any("planned" in note for note in whole.privacy.notes)


def test_the_epsilon_of_a_stopped_run_counts_rounds_that_were_released_twice(tmp_path: Path) -> None:
    """Rounds after the only checkpoint are made again by other code, so they are other releases."""
    how = {**OPTIONS, "privacy": n.Privacy(sigma=2.0, trust="central"), "out": tmp_path}
    how["storage"] = n.Storage(checkpoint_seconds=1e9)

    def bowls(shift: float) -> n.problems.FunctionProblem:
        found = [lambda x, c=c: ((x - c) ** 2).sum() / 2 + shift for c in (1.0, 2.0, 6.0)]
        return n.Problem.from_functions(found, torch.zeros(2))

    with pytest.raises(KeyboardInterrupt):
        n.train(bowls(0.0), METHOD, callbacks=[InterruptAt(15)], **how)
    run = n.train(bowls(1.0), METHOD, callbacks=[EndAt(18)], **how)
    assert run.privacy is not None
    paid = releases(tmp_path)
    assert run.privacy.releases == sum(line["count"] for line in paid) > 18 + 5
    multiplier = paid[0]["multiplier"]
    whole = epsilon_of([Event(multiplier, count=run.privacy.releases + 40 - 18)], how["privacy"].delta)
    assert run.privacy.epsilon == pytest.approx(whole, rel=1e-9)
    assert n.load(tmp_path).privacy.epsilon == run.privacy.epsilon  # type: ignore[union-attr]


def test_a_stopped_run_whose_budget_would_not_last_states_the_budget(tmp_path: Path) -> None:
    """Rounds whose sums were lost are paid for again, so that not all planned ones fit the target, a whole number."""
    how = {**OPTIONS, "privacy": n.Privacy(epsilon=5, trust="central", noise="secure"), "out": tmp_path}
    functions = [lambda x, c=c: ((x - c) ** 2).sum() / 2 for c in (1.0, 2.0, 6.0)]
    with pytest.raises(KeyboardInterrupt):
        n.train(n.Problem.from_functions(functions, torch.zeros(2)), METHOD, callbacks=[InterruptAt(15)], **how)
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    (tmp_path / "checkpoint" / "releases.jsonl").unlink(missing_ok=True)
    run = n.train(n.Problem.from_functions(functions, torch.zeros(2)), METHOD, callbacks=[EndAt(len(lines) + 2)], **how)
    assert run.privacy is not None
    assert run.privacy.stopped_by_rule
    assert run.privacy.epsilon == 5.0
    assert n.load(tmp_path).privacy.epsilon == 5.0  # type: ignore[union-attr]


@pytest.mark.parametrize("sampling", [None, pytest.param(0.05, marks=pytest.mark.slow)])
def test_the_epsilon_of_a_stopped_run_counts_reserved_rounds_once(sampling: float | None, tmp_path: Path) -> None:
    """A simulation in a folder pays for several rounds at a time; the run is stopped between two payments."""
    privacy = n.Privacy(sigma=3.0, trust="central", sampling=sampling)
    how: dict[str, Any] = {"lr": 0.1, "rounds": 1000, "seed": 0, "privacy": privacy}
    functions = [lambda x, c=c: ((x - c) ** 2).sum() / 2 for c in (1.0, 2.0, 6.0)]
    bowls = n.Problem.from_functions(functions, torch.zeros(2))
    whole = epsilon_of([Event(3.0 * 3**0.5, sampling or 1.0, 1000)], privacy.delta)
    for rounds in (55, 57):  # the second time the run goes on inside its reservation
        run = n.train(bowls, METHOD, callbacks=[EndAt(rounds)], out=tmp_path / "run", **how)
        assert run.privacy is not None
        assert (run.state.round, run.privacy.releases) == (rounds, 60)
        assert run.privacy.epsilon == pytest.approx(whole, rel=1e-9)


def by_hand(values: list[float], patience: int, least: float, larger: bool) -> int | None:
    """The position of the evaluation after which a run stops."""
    best, since = values[0], 0
    for position, value in enumerate(values[1:], 1):
        better = value > best + least if larger else value < best - least
        best, since = (value, 0) if better else (best, since + 1)
        if since == patience:
            return position
    return None


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("column", ["validation_loss", "validation_accuracy"])
@pytest.mark.parametrize("noisy", [True, False])
def test_early_stopping_stops_where_a_hand_written_rule_stops(column: str, noisy: bool) -> None:
    values = n.train(problem(noisy), METHOD, **OPTIONS).history[column]
    rule = n.EarlyStopping(column, patience=3, min_delta=0.001)
    run = n.train(problem(noisy), METHOD, callbacks=[rule], **OPTIONS)
    position = by_hand(values, 3, 0.001, column.endswith("accuracy"))
    if position is None:
        assert run.finished
    else:
        assert run.state.round == 2 * position + 1  # the round in which row 2·position was written
        assert run.stopped is not None
        assert run.stopped.startswith(column)


def test_the_dense_evaluations_of_the_first_rounds_try_no_patience() -> None:
    """By default 200 rounds are evaluated in rounds 0, 1, 2, 4, 8, and then in every tenth; only these count."""
    rule = n.EarlyStopping("validation_loss", patience=2, min_delta=1e9)  # nothing is an improvement
    options = {name: value for name, value in OPTIONS.items() if name != "logging"}
    run = n.train(problem(), METHOD, callbacks=[rule], **{**options, "rounds": 200})
    assert run.history.rounds("validation_loss")[:7] == [0, 1, 2, 4, 8, 10, 20]
    assert run.state.round == 21


def test_a_run_that_was_stopped_early_stays_so_when_it_is_started_again(tmp_path: Path) -> None:
    how = {**OPTIONS, "out": tmp_path, "callbacks": [n.EarlyStopping(patience=2)]}
    first = n.train(problem(noisy=True), METHOD, **how)
    again = n.train(problem(noisy=True), METHOD, **{**how, "callbacks": [n.EarlyStopping(patience=2)]})
    assert (again.state.round, again.stopped) == (first.state.round, first.stopped)
    assert again.history.rows == first.history.rows


def test_early_stopping_refuses_what_it_cannot_follow() -> None:
    with pytest.raises(n.UsageError, match="mode must be"):
        n.EarlyStopping("f1")
    with pytest.raises(n.UsageError, match="patience"):
        n.EarlyStopping(patience=0)
    bowl = n.Problem.from_functions([lambda x: (x**2).sum()], torch.ones(2))
    with pytest.raises(n.UsageError, match="does not measure 'validation_loss'"):
        n.train(bowl, n.GD(), lr=0.1, rounds=3, callbacks=[n.EarlyStopping()])
    private: dict[str, Any] = {"privacy": n.Privacy(epsilon=5.0, trust="local"), "logging": n.Logging(diagnostics=True)}
    with pytest.raises(n.UsageError, match="without noise"):
        n.train(problem(), METHOD, callbacks=[n.EarlyStopping("loss")], **{**OPTIONS, **private})


def test_a_callback_that_stops_at_a_row_ends_the_run_after_that_round() -> None:
    class AtRow(n.Callback):
        def row(self, row: Row) -> None:
            if row["round"] == 4:
                self.run.stop("a row")

    run = n.train(problem(), METHOD, callbacks=[AtRow()], **OPTIONS)
    assert (run.state.round, run.stopped) == (5, "a row")
