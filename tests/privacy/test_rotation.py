"""Groups of clients that take turns: the account of a client's own turns, and the ledger that charges for cycles."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from normec.errors import BudgetSpent, UsageError
from normec.privacy import Event, Facts, Ledger, Privacy, Setting, gaussian, release
from normec.privacy.facts import Refused, Sampling
from normec.privacy.ledger import Payments
from normec.privacy.ledger_verification import verified

CLIP = Facts("dpsgd", bound=2.0, feedback=False, lipschitz=1.0)
CENTRAL = Privacy(epsilon=8, trust="central")


@pytest.mark.parametrize(("rounds", "groups", "turns"), [(12, 4, 3), (13, 4, 4), (3, 5, 1), (7, 1, 7)])
@pytest.mark.parametrize("trust", ["central", "secure-sum", "local"])
def test_a_run_costs_the_most_turns_of_a_client(rounds: int, groups: int, turns: int, trust: str) -> None:
    privacy = replace(CENTRAL, trust=trust, relation="replace")
    found = release(CLIP, privacy, Setting(clients=9, rounds=rounds, groups=groups))
    gain = 1.0 if trust == "local" else 3.0
    assert found.turns == turns
    assert found.epsilon(sigma=5.0, delta=1e-5) == pytest.approx(
        gaussian.epsilon(math.sqrt(turns) * 4.0 / (5.0 * gain), 1e-5), rel=1e-12
    )
    sigma = found.sigma(8.0, 1e-5)
    assert sigma == pytest.approx(math.sqrt(turns) * 4.0 / gain / gaussian.mu_for(8.0, 1e-5), rel=1e-6)


def test_a_hidden_memory_drifts_only_in_the_turns_of_its_client() -> None:
    """Two memories that differ by a record, by hand: they move apart in turns and forget in all other rounds."""
    method = Facts("normec", bound=1.0, feedback=True, lipschitz=10.0, beta=0.1, decay=0.02)
    privacy = Privacy(epsilon=8, trust="central", unit="record", record_clip=1.0)
    setting = Setting(clients=4, rounds=11, groups=3, records=100.0, dimension=5)
    multipliers = release(method, privacy, setting).multipliers(sigma=1.0, rounds=11)
    for group in range(3):
        apart = 0.0
        for k in range(11):
            if k % 3 == group:
                assert 2.0 / multipliers[k] >= 10.0 * (0.01 + apart) * (1 - 1e-12)
                apart += 0.1 * 10.0 * 0.01
            apart *= 1 - 0.02
    assert 2.0 / multipliers[10] <= 10.0 * (0.01 + 3 * 0.01) * (1 + 1e-12)


def test_coins_inside_a_group_amplify_as_elsewhere() -> None:
    turns, every = Setting(9, 12, Sampling(0.3), groups=4), Setting(9, 3, Sampling(0.3))
    sampled = replace(CENTRAL, sampling=0.3)
    one, other = release(CLIP, sampled, turns), release(CLIP, sampled, every)
    assert (
        one.epsilon(3.0, 1e-5) == other.epsilon(3.0, 1e-5) < release(CLIP, CENTRAL, turns).epsilon(3.0, 1e-5) * 1.0001
    )
    assert one.rate == 0.3
    with pytest.raises(Refused, match="gains nothing under trust='local'"):
        release(CLIP, replace(sampled, trust="local"), turns)


@pytest.mark.parametrize(
    ("change", "setting", "why"),
    [
        ({"noise_bands": 3}, {"groups": 2}, "noise_bands = 3 is more than the 2 rounds between two turns"),
        ({"noise_bands": "best"}, {}, "gains nothing where a client may take part in every round"),
        ({"noise_bands": 2, "trust": "secure-sum"}, {"groups": 2}, "needs one holder of all noise"),
        ({"noise_bands": 2, "trust": "local"}, {"groups": 2}, "needs one holder of all noise"),
        ({"noise_schedule": "linear:2"}, {"groups": 2}, "noise_schedule has no rule with 2 groups"),
    ],
)
def test_what_no_rule_covers_is_refused(change: dict, setting: dict, why: str) -> None:
    with pytest.raises(Refused, match=why):
        release(CLIP, replace(CENTRAL, **change), Setting(9, 12, **setting))


def test_growing_sensitivity_under_correlated_noise_is_refused() -> None:
    method = Facts("normec", bound=1.0, feedback=True, lipschitz=10.0, beta=0.1)
    privacy = Privacy(epsilon=8, trust="central", unit="record", record_clip=1.0, noise_bands=2)
    with pytest.raises(Refused, match="sensitivity that grows by round"):
        release(method, privacy, Setting(4, 8, groups=2, records=100.0, dimension=5))


def test_statements_that_contradict_themselves() -> None:
    with pytest.raises(UsageError, match="leave out noise_schedule"):
        Privacy(epsilon=8, trust="central", noise_bands=2, noise_schedule="linear:2")
    with pytest.raises(UsageError, match="got memory='noisy'"):
        Privacy(epsilon=8, trust="central", noise_bands=2, memory="noisy")
    with pytest.raises(UsageError, match="noise_bands must be a whole number >= 1, got 0"):
        Privacy(epsilon=8, noise_bands=0)
    with pytest.raises(UsageError, match="unknown noise_bands 'most'"):
        Privacy(epsilon=8, noise_bands="most")  # type: ignore[arg-type]
    assert "noise_bands" not in Privacy(epsilon=8, noise_bands=1).to_dict()


def charges(path: Path) -> float:
    """How many releases a ledger charges, from the ε of its last line."""
    last = json.loads(path.read_text().splitlines()[-1])
    return (gaussian.mu_for(last["epsilon"], 1e-5) * last["multiplier"]) ** 2


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", range(6))
def test_every_group_is_charged_for_its_turns_wherever_a_run_goes_back(tmp_path: Path, seed: int) -> None:
    draw, groups, path = random.Random(seed), 4, tmp_path / "ledger.jsonl"
    made, round, furthest = [0] * groups, 0, 0
    while round < 30:
        with Ledger(path, Privacy(epsilon=50, noise="secure"), horizon=8, groups=groups) as ledger:
            for _ in range(draw.randint(1, 9)):
                ledger.spend(round, Event(10.0), 10.0)
                made[round % groups] += 1
                round += 1
            total = ledger.releases
        furthest = max(furthest, round)
        assert total == sum(made)
        assert charges(path) >= max(made) - 1e-6
        round = max(0, round - draw.randint(0, 4))
    repeated = sum(made) - furthest
    assert charges(path) == pytest.approx(math.ceil(furthest / groups) + repeated, rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_release_that_costs_more_than_that_of_its_cycle_is_charged(tmp_path: Path, chunk: int) -> None:
    path, privacy = tmp_path / "ledger.jsonl", Privacy(epsilon=50, noise="secure")
    with Ledger(path, privacy, horizon=8, groups=4) as ledger:
        ledger.spend(0, Event(10.0), 10.0)
        ledger.reserve(1, Event(2.0, count=chunk), 2.0)
    with Ledger(path, privacy, horizon=8, groups=4) as ledger:  # opened again, it still knows what was paid
        ledger.spend(3, Event(2.0), 2.0)
        assert ledger.exact_epsilon() == pytest.approx(gaussian.epsilon(math.hypot(1 / 10, 1 / 2), 1e-5), rel=1e-9)
        with pytest.raises(BudgetSpent):
            ledger.spend(3, Event(0.1), 0.1)
    assert verified(tmp_path, None) is not None


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_reserved_rounds_are_charged_once_for_a_cycle(tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, Privacy(epsilon=50, noise="seeded"), horizon=6, groups=4) as ledger:
        for first in range(0, 21, chunk):
            ledger.reserve(first, Event(10.0, count=min(chunk, 21 - first)), 10.0, key="a")
        for round in range(21):
            assert not ledger.spend(round, Event(10.0), 10.0, key="a").fresh
        assert ledger.releases == 21
    assert charges(path) == pytest.approx(6, rel=1e-6)
    assert verified(tmp_path, None) is not None
    with Ledger(path, Privacy(epsilon=50, noise="seeded"), horizon=6, groups=4) as ledger:
        assert (ledger.releases, ledger.account().releases) == (21, 6)


def test_a_budget_is_spent_by_cycles_and_their_other_rounds_are_free(tmp_path: Path) -> None:
    one = gaussian.epsilon(1 / 2.0, 1e-5)
    with Ledger(tmp_path / "ledger.jsonl", Privacy(epsilon=one, noise="secure"), horizon=2, groups=3) as ledger:
        for round in range(3):
            ledger.spend(round, Event(2.0), 2.0)
        for again in (0, 1, 2, 3):
            with pytest.raises(BudgetSpent):
                ledger.spend(again, Event(2.0), 2.0)


def test_a_ledger_belongs_to_its_number_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path, CENTRAL, horizon=3, groups=4).close()
    with pytest.raises(UsageError, match="was opened for 4 groups of clients, got 2"):
        Ledger(path, CENTRAL, horizon=3, groups=2)
    with pytest.raises(UsageError, match="was opened for 4 groups of clients, got 1"):
        Ledger(path, CENTRAL, horizon=3)


def test_payments_without_a_ledger_are_written_as_they_were_made(tmp_path: Path) -> None:
    rounds = [*range(6), 4, 5, 6, 7, 8]
    made = tuple((round, Event(10.0), 10.0) for round in rounds)
    Payments(replace(CENTRAL, noise="seeded"), 3, (), made, groups=4).write(tmp_path / "ledger.jsonl")
    assert charges(tmp_path / "ledger.jsonl") == pytest.approx(3 + 2, rel=1e-6)


def test_multipliers_are_alike_in_a_cycle() -> None:
    method = Facts("normec", bound=1.0, feedback=True, lipschitz=10.0, beta=0.1)
    privacy = Privacy(epsilon=8, trust="central", unit="record", record_clip=1.0)
    found = release(method, privacy, Setting(4, 10, groups=3, records=100.0, dimension=5))
    by_cycle = found.multipliers(1.0, 10)
    assert np.array_equal(by_cycle, np.repeat(by_cycle[::3], 3)[:10])
    assert found.account(1.0, 1e-5).mu == pytest.approx(math.sqrt(np.sum(by_cycle[::3] ** -2.0)), rel=1e-12)
    with pytest.raises(UsageError, match="growing sensitivity are no single event"):
        found.event(1.0, 0, 2)
