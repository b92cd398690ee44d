"""A finished run goes on to more rounds: with the bits of one long run, and with one account for all rounds."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import normec as n
from normec.privacy.accounting import Event, epsilon_of
from normec.privacy.ledger import Ledger
from normec.privacy.ledger_verification import verified
from normec.privacy.mechanism import Mechanism

from ..support.runs import StopAt, releases, snapshot


def problem(seed: int = 0) -> n.Problem:
    draw = torch.Generator().manual_seed(seed)
    sets = [TensorDataset(torch.randn(8, 4, generator=draw), torch.arange(8) % 3) for _ in range(5)]
    torch.manual_seed(0)
    return n.Problem(nn.Linear(4, 3), nn.functional.cross_entropy, sets[:4], test=sets[4])


METHOD = n.NormEC(alpha=0.1, beta=0.3)


def trained(out: Path | None, rounds: int, **more: Any) -> n.Run:
    how: dict[str, Any] = {"lr": 0.1, "seed": 0, "logging": n.Logging(every=3, evaluate_every=5), **more}
    return n.train(how.pop("problem", None) or problem(), METHOD, rounds=rounds, out=out, **how)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"batch_size": 3},
        {"participation": n.FixedSize(2)},
        pytest.param({"server_optimizer": "adam"}, marks=pytest.mark.slow),
    ],
)
def test_more_rounds_have_the_bits_of_one_long_run(tmp_path: Path, more: dict[str, Any]) -> None:
    trained(tmp_path, 10, **more)
    longer = trained(tmp_path, 25, **more)
    straight = trained(None, 25, **more)
    assert longer.finished
    assert torch.equal(longer.x, straight.x)
    rows = {row["round"]: row for row in straight.history.rows}
    assert [row for row in longer.history.rows if row["round"] != 10] == [rows[k] for k in sorted(rows) if k != 10]
    assert [row["round"] for row in longer.history.rows].count(10) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["round"], summary["rounds"]) == ("finished", 25, 25)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["rounds"] == 25
    assert torch.equal(n.load(tmp_path, model=nn.Linear(4, 3)).x, straight.x)
    again = trained(tmp_path, 25, **more)
    assert torch.equal(again.x, straight.x)
    with pytest.raises(n.UsageError, match="rounds is 25 there, 10 here"):
        trained(tmp_path, 10, **more)


def test_rows_keep_their_distance_if_nobody_says_otherwise(tmp_path: Path) -> None:
    trained(tmp_path, 20, logging=n.Logging())
    run = trained(tmp_path, 60, logging=n.Logging())
    assert run.history.rounds("accuracy") == list(range(61))  # every round, as in 20 rounds


def test_an_extended_run_that_is_interrupted_goes_on(tmp_path: Path) -> None:
    trained(tmp_path, 10)
    stopped = trained(tmp_path, 25, callbacks=[StopAt(17)])
    assert (stopped.state.round, stopped.finished) == (17, False)
    assert torch.equal(trained(tmp_path, 25).x, trained(None, 25).x)
    trained(tmp_path, 30)
    assert torch.equal(trained(tmp_path, 30).x, trained(None, 30).x)


PRIVATE = n.Privacy(epsilon=3.0, trust="central")


def test_a_target_must_be_raised_and_the_noise_stays_as_it_was(tmp_path: Path) -> None:
    first = trained(tmp_path, 10, privacy=PRIVATE)
    assert first.privacy is not None
    multiplier = releases(tmp_path)[0]["multiplier"]
    needed = epsilon_of([Event(multiplier, count=25)], PRIVATE.delta)
    before = snapshot(tmp_path)
    with pytest.raises(n.UsageError, match=r"amount to epsilon = .* above 3; to accept that") as refusal:
        trained(tmp_path, 25, privacy=PRIVATE)
    with pytest.raises(n.UsageError, match="to accept that"):
        trained(tmp_path, 25, privacy=n.Privacy(epsilon=needed * 0.99, trust="central"))
    assert snapshot(tmp_path) == before
    offered = float(str(refusal.value).split("ask for epsilon = ")[1].split(",")[0])
    assert offered == pytest.approx(needed, abs=1e-3)
    assert offered >= needed
    accepted = n.Privacy(epsilon=offered, trust="central")
    stopped = trained(tmp_path, 25, privacy=accepted, callbacks=[StopAt(14)])
    assert stopped.state.round == 14
    longer = trained(tmp_path, 25, privacy=accepted)
    assert longer.privacy is not None
    assert {line["sigma"] for line in releases(tmp_path)} == {first.privacy.sigma}
    assert longer.privacy.sigma == first.privacy.sigma
    assert longer.privacy.releases == 25
    assert longer.privacy.epsilon == pytest.approx(needed, rel=1e-9)
    paid = verified(tmp_path, json.loads((tmp_path / "summary.json").read_text()))
    assert paid is not None
    assert (paid.releases, paid.epsilon) == (25, pytest.approx(needed, rel=1e-9))
    assert n.load(tmp_path, model=nn.Linear(4, 3)).privacy == longer.privacy
    with pytest.raises(n.UsageError, match="another configuration"):
        trained(tmp_path, 25, privacy=n.Privacy(epsilon=offered + 1, trust="central"))


def test_a_given_noise_needs_no_consent(tmp_path: Path) -> None:
    privacy = n.Privacy(sigma=0.4, trust="central")
    first, longer = trained(tmp_path, 10, privacy=privacy), trained(tmp_path, 25, privacy=privacy)
    straight = trained(None, 25, privacy=privacy)
    assert first.privacy is not None
    assert longer.privacy is not None
    assert straight.privacy is not None
    assert first.privacy.epsilon < longer.privacy.epsilon == pytest.approx(straight.privacy.epsilon, rel=1e-9)


def test_a_continued_run_shares_no_noise_with_a_run_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, torch.Tensor]] = []
    plain = Mechanism.noise_of_sum

    def noted(self: Mechanism, like: torch.Tensor, variance: float) -> torch.Tensor:
        found = plain(self, like, variance)
        drawn.append((self._paid or 0, found.clone()))
        return found

    monkeypatch.setattr(Mechanism, "noise_of_sum", noted)
    privacy = n.Privacy(sigma=0.4, trust="central")
    trained(tmp_path, 3, privacy=privacy)
    trained(tmp_path, 6, privacy=privacy)
    before = len(drawn)
    trained(None, 6, privacy=privacy)
    assert [round for round, _ in drawn] == [*range(6), *range(6)]
    for (_, one), (_, other) in zip(drawn[:before], drawn[before:], strict=True):
        assert not torch.isclose(one, other).any()


def test_secure_noise_goes_on_too(tmp_path: Path) -> None:
    privacy = n.Privacy(sigma=0.4, trust="central", noise="secure")
    trained(tmp_path, 4, privacy=privacy)
    longer = trained(tmp_path, 9, privacy=privacy)
    assert longer.privacy is not None
    assert [line["round"] for line in releases(tmp_path)] == list(range(9))


def test_what_is_another_run_is_not_continued(tmp_path: Path) -> None:
    trained(tmp_path, 10, privacy=PRIVATE)
    for more, message in (
        ({"lr": 0.2}, "other step sizes"),
        ({"seed": 1}, "another configuration: seed is 0 there, 1 here"),
        ({"problem": problem(1)}, "another configuration: data"),
        ({"lr_schedule": "cosine"}, "other step sizes"),
        ({"privacy": None}, "another configuration"),
        ({"privacy": n.Privacy(epsilon=30.0, trust="local")}, "another configuration: trust is 'central' there"),
        ({"privacy": n.Privacy(epsilon=30.0, delta=1e-4, trust="central")}, "another configuration"),
    ):
        with pytest.raises(n.UsageError, match=message):
            trained(tmp_path, 25, **{"privacy": n.Privacy(epsilon=30.0, trust="central"), **more})
    assert trained(tmp_path, 10, privacy=PRIVATE).finished


def test_what_differs_besides_the_rounds_is_named(tmp_path: Path) -> None:
    trained(tmp_path, 10)
    other = problem()
    with torch.no_grad():
        other.x0.add_(1)
    with pytest.raises(n.UsageError, match="another configuration: start is"):
        trained(tmp_path, 25, problem=other)
    with pytest.raises(n.UsageError, match="another configuration: rounds is 10 there, 5 here"):
        trained(tmp_path, 5, logging=n.Logging())


def test_a_schedule_that_begins_alike_goes_on(tmp_path: Path) -> None:
    def steps(k: int) -> float:
        return 0.1 / (1 + k)

    trained(tmp_path, 10, lr=steps)
    assert torch.equal(trained(tmp_path, 25, lr=steps).x, trained(None, 25, lr=steps).x)


def test_a_run_is_finished_before_it_gets_more_rounds(tmp_path: Path) -> None:
    trained(tmp_path, 10, callbacks=[StopAt(4)])
    with pytest.raises(n.UsageError, match="of which 4 are done"):
        trained(tmp_path, 25)


def test_a_ledger_of_another_epsilon_is_refused_outside_a_continued_run(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", PRIVATE, 10) as ledger:
        ledger.spend(0, Event(4.0), 1.0)
    larger = n.Privacy(epsilon=4.0, trust="central")
    with pytest.raises(n.UsageError, match="opened for epsilon"):
        Ledger(tmp_path / "ledger.jsonl", larger, 10)
    with Ledger(tmp_path / "ledger.jsonl", larger, 10, amend=True) as ledger:
        assert ledger.releases == 1
    with Ledger(tmp_path / "ledger.jsonl", larger, 10) as ledger:
        assert ledger.releases == 1
    with pytest.raises(n.UsageError, match="opened for epsilon"):
        Ledger(tmp_path / "ledger.jsonl", PRIVATE, 10, amend=True)


@pytest.mark.parametrize("change", [{"delta": 0.1}, {"unit": "record"}, {"relation": "replace"}, {"trust": "local"}])
def test_a_larger_epsilon_does_not_hide_another_change_of_a_ledger(change: Any, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", PRIVATE, 10) as ledger:
        ledger.spend(0, Event(4.0), 1.0)
    other = dataclasses.replace(PRIVATE, epsilon=4.0, **change)
    with pytest.raises(n.UsageError, match=f"opened for {next(iter(change))} = "):
        Ledger(tmp_path / "ledger.jsonl", other, 10, amend=True)
