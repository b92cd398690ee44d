"""Runs of groups that take turns under correlated noise: dense matrices, a second ε, stops and repeated rounds."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from safetensors.torch import load_file
from torch import Tensor

import normec.privacy.mechanism
from normec import (
    DPSGD,
    Clip,
    Compute,
    LocalSteps,
    Logging,
    Method,
    NormEC,
    Privacy,
    Problem,
    Rotation,
    Run,
    Storage,
    UsageError,
    train,
)
from normec.experiments.audit import audit_method
from normec.privacy import rules
from normec.privacy.correlated_noise import ONE, BandedNoise
from normec.privacy.ledger_verification import verified
from normec.privacy.mechanism import Mechanism
from normec.privacy.noise import SecureNoise
from normec.sampling.participation import drawn_clients
from normec.training.communicator import SingleProcess
from normec.training.options import Options
from normec.training.train import prepare

from ...support.gaussian_mechanism import gaussian_epsilon
from ...support.reference import seeded_noise
from ...support.runs import EndAt, InterruptAt, StopAt, releases

N, D, ROUNDS, GROUPS, LR, SIGMA = 7, 6, 200, 3, 0.05, 0.4
CENTRES = np.random.default_rng(0).normal(size=(N, D))
CENTRAL = Privacy(sigma=SIGMA, trust="central", noise_bands="best")


def bowls() -> Any:
    centres = torch.tensor(CENTRES)
    return Problem.from_functions(
        [lambda x, c=c: 0.5 * ((x - c) ** 2).sum() for c in centres], torch.zeros(D, dtype=torch.float64)
    )


def run(method: Method, privacy: Privacy = CENTRAL, rounds: int = ROUNDS, **more: Any) -> Run:
    given = {"lr": LR, "participation": Rotation(GROUPS), "seed": 1, "logging": Logging(every=50), **more}
    return train(bowls(), method, rounds=rounds, privacy=privacy, **given)


def mechanism_of(method: Method, privacy: Privacy = CENTRAL, rounds: int = ROUNDS, **more: Any) -> Mechanism:
    given = {"lr": LR, "participation": Rotation(GROUPS), "seed": 1, **more}
    found = prepare(bowls(), method, Options(rounds=rounds, privacy=privacy, **given)).mechanism
    assert found is not None
    return found


def independent_noise(name: str, rounds: int = ROUNDS) -> Any:
    """z of every round."""
    return np.array([SIGMA * math.sqrt(N) * seeded_noise(1, name, t, D) for t in range(rounds)])


def matrix(mechanism: Mechanism, rounds: int = ROUNDS) -> Any:
    """C, dense; the identity for independent noise."""
    coefficients = mechanism.banded.fractions if mechanism.banded is not None else [1.0]
    return sum(one * np.eye(rounds, k=-back) for back, one in enumerate(coefficients[:rounds]))


def clipped(v: Any) -> Any:
    return v * min(1.0, 1.0 / np.linalg.norm(v))


class ByHand:
    """The three methods in NumPy: `sum` is Σ m_i over the drawn clients, `move` the server's step."""

    def __init__(self, kind: str) -> None:
        self.kind, self.x, self.server, self.memory = kind, np.zeros(D), np.zeros(D), np.zeros((N, D))

    def sum(self, drawn: list[int]) -> Any:
        total = np.zeros(D)
        kept = 0.9 * self.memory
        for i in drawn:
            if self.kind == "normec":
                v = (self.x - CENTRES[i]) - self.memory[i]
                message = v / (1.0 + np.linalg.norm(v))
                kept[i] += 0.2 * message
            elif self.kind == "fedavg":
                y = self.x.copy()
                for _ in range(3):
                    y = y - 0.1 * (y - CENTRES[i])
                message = clipped(self.x - y)
            else:
                message = clipped(self.x - CENTRES[i])
            total = total + message
        self.memory = kept
        return total

    def move(self, noisy: Any) -> None:
        mean = noisy / N
        if self.kind == "momentum":
            self.server = 0.8 * self.server + mean
        elif self.kind == "normec":
            self.server = 0.9 * self.server + 0.2 * mean
        else:
            self.server = mean
        self.x = self.x - LR * self.server


METHODS: dict[str, tuple[Method, dict[str, Any]]] = {
    "momentum": (DPSGD(Clip(1.0), momentum=0.8), {}),
    "fedavg": (DPSGD(Clip(1.0)), {"local": LocalSteps(steps=3, lr=0.1, scale="difference")}),
    "normec": (NormEC(1.0, 0.2, server_norm=False, decay=0.1), {}),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", METHODS)
def test_the_trajectory_is_that_of_dense_matrices(kind: str) -> None:
    method, more = METHODS[kind]
    mechanism = mechanism_of(method, **more)
    assert mechanism.banded is not None
    assert mechanism.banded.bands == GROUPS
    noise = np.linalg.solve(matrix(mechanism), independent_noise(mechanism.name))
    by_hand = ByHand(kind)
    for t in range(ROUNDS):
        by_hand.move(by_hand.sum([i for i in range(N) if i % GROUPS == t % GROUPS]) + noise[t])
    found = run(method, **more)
    assert np.abs(found.x.numpy() - by_hand.x).max() < 1e-10
    correlated = float(np.abs(by_hand.x).max())
    assert correlated > 0.1  # the noise and the messages did something


def test_one_band_is_independent_noise_to_the_bit() -> None:
    one, none = (run(DPSGD(Clip(1.0)), Privacy(sigma=SIGMA, trust="central", noise_bands=b), 20) for b in (1, None))
    assert torch.equal(one.x, none.x)
    assert not one.state.noise
    assert not torch.equal(one.x, run(DPSGD(Clip(1.0)), CENTRAL, 20).x)


def epsilon_by_matrices(mechanism: Mechanism, participation: Rotation, rounds: int, rows: int = 0) -> float:
    """ε from C and the turns of each client, with messages of length 1 and any signs: the largest ‖C u‖.

    `rows` after the last round count as if they were released too.
    """
    c, largest = matrix(mechanism, rounds + rows), 0.0
    for client in range(N):
        turns = [k for k in range(rounds) if client in drawn_clients(participation, N, k, 0).tolist()]  # type: ignore[union-attr]
        for signs in itertools.product((1.0, -1.0), repeat=max(0, len(turns) - 1)):
            u = np.zeros(rounds + rows)
            u[turns] = [1.0, *signs][: len(turns)]
            largest = max(largest, float(np.linalg.norm(c @ u)))
    return gaussian_epsilon(largest / (SIGMA * math.sqrt(N)), 1e-5)


@pytest.mark.parametrize(("rounds", "groups", "bands"), [(10, 3, 3), (12, 3, 2), (13, 4, 4), (9, 2, 1), (5, 7, 7)])
def test_epsilon_is_that_of_the_largest_change_of_the_rows(rounds: int, groups: int, bands: int) -> None:
    privacy = Privacy(sigma=SIGMA, trust="central", noise_bands=bands)
    found = run(DPSGD(Clip(1.0)), privacy, rounds, participation=Rotation(groups))
    mechanism = mechanism_of(DPSGD(Clip(1.0)), privacy, rounds, participation=Rotation(groups))
    assert found.privacy is not None
    assert epsilon_by_matrices(mechanism, Rotation(groups), rounds) <= found.privacy.epsilon * (1 + 1e-9)
    # The account counts the last turns in full, and coefficients are rounded down.
    second = epsilon_by_matrices(mechanism, Rotation(groups), rounds, rows=bands)
    assert second == pytest.approx(found.privacy.epsilon, rel=5e-4)
    assert found.privacy.releases == rounds


def test_bands_that_are_wider_than_the_groups_would_break_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_refuse_correlation", lambda *_: None)
    privacy = Privacy(sigma=SIGMA, trust="central", noise_bands=4)
    mechanism = mechanism_of(DPSGD(Clip(1.0)), privacy, 10, participation=Rotation(2))
    claimed = mechanism.release.epsilon(SIGMA, 1e-5)
    assert epsilon_by_matrices(mechanism, Rotation(2), 10) > 1.2 * claimed


def test_coefficients_that_are_not_normalised_would_break_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = mechanism_of(DPSGD(Clip(1.0)), rounds=10)
    claimed = mechanism.release.epsilon(SIGMA, 1e-5)
    assert epsilon_by_matrices(mechanism, Rotation(GROUPS), 10) <= claimed
    with pytest.raises(UsageError, match="length of at most 1"):
        mechanism.correlate({}, [ONE, ONE // 2, 3 * ONE // 8])
    monkeypatch.setattr(BandedNoise, "__init__", lambda self, given: setattr(self, "coefficients", tuple(given)))
    mechanism.correlate({}, [ONE, ONE // 2, 3 * ONE // 8])
    assert epsilon_by_matrices(mechanism, Rotation(GROUPS), 10) > 1.1 * claimed


def test_coefficients_of_another_number_of_bands_are_refused() -> None:
    mechanism = mechanism_of(DPSGD(Clip(1.0)), rounds=10)
    with pytest.raises(UsageError, match="has 2 coefficients of correlated noise, and the run has 3"):
        mechanism.correlate({}, [ONE // 2, ONE // 2])


def test_noise_that_is_far_too_small_does_not_fit_on_the_grid() -> None:
    tiny = Privacy(sigma=1e-7, trust="central", noise_bands="best", noise="secure")
    with pytest.raises(UsageError, match="do not fit into the 64 bits"):
        mechanism_of(DPSGD(Clip(1.0)), tiny, rounds=10)


@pytest.mark.slow
def test_coins_in_a_group_are_counted_by_privacy_loss_distributions() -> None:
    rate, rounds = 0.4, 9
    privacy = Privacy(sigma=SIGMA, trust="central", noise_bands="best", sampling=rate)
    found = run(DPSGD(Clip(1.0)), privacy, rounds, participation=Rotation(GROUPS, rate))
    one = [
        pld.from_gaussian_mechanism(
            SIGMA * math.sqrt(N),
            sampling_prob=rate,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-4,
        )
        for pessimistic in (False, True)
    ]
    low, high = (each.self_compose(3).get_epsilon_for_delta(1e-5) for each in one)
    assert found.privacy is not None
    assert low * (1 - 1e-6) <= found.privacy.epsilon <= high * (1 + 1e-3)
    assert found.privacy.epsilon < run(DPSGD(Clip(1.0)), CENTRAL, rounds).privacy.epsilon  # type: ignore[union-attr]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", ["momentum", "normec"])
def test_a_run_that_stops_goes_on_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    method, _ = METHODS[kind]
    whole = run(method, rounds=30, out=tmp_path / "whole", participation=Rotation(5))
    for at in (1, 7, 20):
        run(method, rounds=30, out=tmp_path / "part", participation=Rotation(5), callbacks=[StopAt(at)])
    part = run(method, rounds=30, out=tmp_path / "part", participation=Rotation(5))
    assert part.finished
    assert torch.equal(part.x, whole.x)
    assert torch.equal(part.state.noise["history"], whole.state.noise["history"])
    assert releases(tmp_path / "part") == releases(tmp_path / "whole")
    assert sum(line["charged"] for line in releases(tmp_path / "part")) == 6
    summary = json.loads((tmp_path / "part" / "summary.json").read_text())
    assert verified(tmp_path / "part", summary) is not None
    assert summary["privacy"]["epsilon"] == pytest.approx(
        gaussian_epsilon(math.sqrt(6) / (SIGMA * math.sqrt(N)), 1e-5), rel=1e-6
    )
    latest = json.loads((tmp_path / "part" / "checkpoint" / "latest.json").read_text())
    assert sum(one**2 for one in latest["noise_coefficients"]) <= ONE**2


def test_a_stopped_run_keeps_the_coefficients_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = DPSGD(Clip(1.0))
    whole = run(method, rounds=20)
    run(method, rounds=20, out=tmp_path / "run", callbacks=[StopAt(8)])
    other = (ONE // 2, ONE // 2, ONE // 2)
    monkeypatch.setattr(normec.privacy.mechanism, "best_coefficients", lambda *_: other)  # another version of SciPy
    assert torch.equal(run(method, rounds=20, out=tmp_path / "run").x, whole.x)


def test_past_noise_that_is_lost_at_a_restart_is_noticed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, real = DPSGD(Clip(1.0)), Mechanism.correlate
    whole = run(method, rounds=20)
    run(method, rounds=20, out=tmp_path / "run", callbacks=[StopAt(8)])

    def lost(self: Mechanism, past: Any, coefficients: Any = None) -> None:
        real(self, {name: torch.zeros_like(table) for name, table in past.items()}, coefficients)

    monkeypatch.setattr(Mechanism, "correlate", lost)
    assert not torch.equal(run(method, rounds=20, out=tmp_path / "run").x, whole.x)


def test_a_killed_simulation_repeats_its_rounds_at_no_cost(tmp_path: Path) -> None:
    method, folder = DPSGD(Clip(1.0)), tmp_path / "run"
    run(method, rounds=12, out=folder, callbacks=[StopAt(5)])
    ahead = tmp_path / "ahead"
    shutil.copytree(folder, ahead)
    run(method, rounds=12, out=ahead, callbacks=[StopAt(9)])
    for name in ("ledger.jsonl", "ledger.jsonl.head"):  # the ledger of a process that was killed before it could save
        shutil.copy(ahead / name, folder / name)
    found = run(method, rounds=12, out=folder)
    assert found.finished
    assert sum(line["charged"] for line in releases(folder)) == 4
    assert torch.equal(found.x, run(method, rounds=12).x)


def test_a_round_that_is_repeated_with_other_coefficients_is_paid_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s + z/c_0 and s + z/c_0' would show s: another version of SciPy may find another c_0."""
    method, folder = DPSGD(Clip(1.0)), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(method, rounds=2, out=folder, callbacks=[InterruptAt(1)])
    monkeypatch.setattr(normec.privacy.mechanism, "best_coefficients", lambda *_: (9000, 7000, 2000))
    run(method, rounds=2, out=folder)
    first = [line for line in releases(folder) if line["round"] == 0]
    assert [(line["attempt"], line["charged"]) for line in first] == [(0, 1), (1, 1)]


def fixed_integers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace secure noise by known integers of the same scale, and return the list of what was drawn."""
    drawn: list[Any] = []

    def integers(self: SecureNoise, count: int, scale: float) -> Any:  # noqa: ARG001
        drawn.append(np.rint(scale * np.random.default_rng(len(drawn)).standard_normal(count)).astype(np.int64))
        return drawn[-1]

    monkeypatch.setattr(SecureNoise, "integers", integers)
    return drawn


SECURE = Privacy(sigma=SIGMA, trust="central", noise_bands="best", noise="secure")


def test_noise_on_a_grid_gives_integer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run by hand in Python's integers: rows Σ ⌊κ_i S_{t−i}/2^14⌋ + z_t, and the sums that follow from them."""
    drawn = fixed_integers(monkeypatch)
    method, rounds = DPSGD(Clip(1.0), momentum=0.8), 30
    found = run(method, SECURE, rounds, out=tmp_path / "run")
    kappa = json.loads((tmp_path / "run" / "checkpoint" / "latest.json").read_text())["noise_coefficients"]
    noise = SIGMA * math.sqrt(N)
    fine = 2.0 ** (math.frexp(noise)[1] - 31)
    by_hand, sums, released = ByHand("momentum"), [], []
    for t in range(rounds):
        members = [i for i in range(N) if i % GROUPS == t % GROUPS]
        messages = [clipped(by_hand.x - CENTRES[i]) * (1 - (D + 8) * 2.0**-52) for i in members]
        sums.append(sum(np.trunc(one / fine).astype(np.int64) for one in messages))
        row = drawn[t] + sum(one * sums[t - back] // ONE for back, one in enumerate(kappa) if back <= t)
        past = sum(one * released[t - back] for back, one in enumerate(kappa) if 1 <= back <= t)
        released.append((row * fine * ONE - past) / kappa[0])
        by_hand.move(released[t])
    assert len(drawn) == rounds
    assert np.abs(found.x.numpy() - by_hand.x).max() < 1e-7  # messages may round to a neighbouring integer
    kept = load_file(next((tmp_path / "run" / "checkpoint").glob("round-*.safetensors")))
    assert kept["noise.sums"].dtype == torch.int64
    assert np.abs(kept["noise.sums"][(rounds - 1) % 2].numpy() - sums[-1]).max() <= 2**7
    assert found.privacy is not None
    assert not found.privacy.simulation
    moved = 1 + 2.0**-30 * math.sqrt(3 * D) * noise  # the most that a turn moves its rows, with their rounding
    assert found.privacy.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(10) * moved / noise, 1e-5), rel=1e-7)
    assert found.privacy.epsilon > gaussian_epsilon(math.sqrt(10) / noise, 1e-5)


def test_the_discrete_gaussian_has_the_same_rows() -> None:
    pytest.importorskip("opendp")
    exact = Privacy(sigma=1e-3, trust="central", noise_bands="best", noise="exact")
    found, without = run(DPSGD(Clip(1.0)), exact, 12), run(DPSGD(Clip(1.0)), replace(exact, noise="seeded"), 12)
    assert found.state.noise["sums"].dtype == torch.int64
    assert 0 < float((found.x - without.x).abs().max()) < 1e-3


def test_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    privacy = Privacy(sigma=SIGMA, trust="central", noise_bands=np.int64(2))  # type: ignore[arg-type]
    given = {"participation": Rotation(np.int64(3))}  # type: ignore[arg-type]
    found = run(DPSGD(Clip(1.0)), privacy, 6, out=tmp_path / "run", **given)
    assert torch.equal(found.x, run(DPSGD(Clip(1.0)), replace(privacy, noise_bands=2), 6).x)


def test_real_noise_is_drawn_again_only_for_a_round_that_is_paid_again(tmp_path: Path) -> None:
    method, folder = DPSGD(Clip(1.0)), tmp_path / "run"
    run(method, SECURE, 12, out=folder, callbacks=[StopAt(7)], storage=Storage(checkpoint_seconds=1000))
    assert json.loads((folder / "checkpoint" / "latest.json").read_text())["round"] == 7
    assert [line["charged"] for line in releases(folder)] == [1, 0, 0, 1, 0, 0, 1]
    # A kill between the payment of round 7 and its checkpoint: the ledger is one line ahead.
    ahead = tmp_path / "ahead"
    shutil.copytree(folder, ahead)
    run(method, SECURE, 12, out=ahead, callbacks=[StopAt(8)])
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        shutil.copy(ahead / name, folder / name)
    found = run(method, SECURE, 12, out=folder)
    assert found.finished
    assert [(line["round"], line["attempt"], line["charged"]) for line in releases(folder)][6:10] == [
        (6, 0, 1),
        (7, 0, 0),
        (7, 1, 1),
        (8, 0, 0),
    ]
    assert sum(line["charged"] for line in releases(folder)) == 5
    assert found.privacy is not None
    assert found.privacy.epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(5) / (SIGMA * math.sqrt(N)), 1e-5), rel=1e-6
    )


def test_a_stopped_rule_states_the_epsilon_of_all_turns() -> None:
    found = run(DPSGD(Clip(1.0)), rounds=12, callbacks=[EndAt(5)])
    assert found.privacy is not None
    assert found.privacy.epsilon == pytest.approx(run(DPSGD(Clip(1.0)), rounds=12).privacy.epsilon)  # type: ignore[union-attr]


class Everybody(Rotation):
    """A subclass that claims turns and keeps none."""

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:  # noqa: ARG002
        return None


def test_a_subclass_of_turns_counts_in_full() -> None:
    privacy = Privacy(sigma=SIGMA, trust="central")
    found = run(DPSGD(Clip(1.0)), privacy, 12, participation=Everybody(GROUPS))
    assert found.privacy is not None
    assert found.privacy.epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(12) / (SIGMA * math.sqrt(N)), 1e-5), rel=1e-6
    )
    with pytest.raises(UsageError, match="gains nothing where a client may take part in every round"):
        run(DPSGD(Clip(1.0)), CENTRAL, 12, participation=Everybody(GROUPS))
    with pytest.raises(UsageError, match="but participation is Everybody"):
        run(DPSGD(Clip(1.0)), replace(privacy, sampling=0.5), 12, participation=Everybody(GROUPS, 0.5))


def test_a_saved_run_has_a_ledger_of_its_turns(tmp_path: Path) -> None:
    found = run(DPSGD(Clip(1.0)), rounds=11)
    folder = found.save(tmp_path / "saved")
    summary = json.loads((folder / "summary.json").read_text())
    paid = verified(folder, summary)
    assert found.privacy is not None
    assert paid is not None
    assert paid.releases == 11
    assert paid.epsilon == pytest.approx(found.privacy.epsilon)
    assert any("public groups" in note for note in found.privacy.notes)
    assert any("correlated over 3 rounds" in note for note in found.privacy.notes)


def test_turns_of_a_run_that_goes_on_to_more_rounds(tmp_path: Path) -> None:
    privacy = Privacy(sigma=SIGMA, trust="central")
    run(DPSGD(Clip(1.0)), privacy, 10, out=tmp_path / "run")
    found = run(DPSGD(Clip(1.0)), privacy, 14, out=tmp_path / "run")
    assert found.privacy is not None
    assert found.privacy.epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(5) / (SIGMA * math.sqrt(N)), 1e-5), rel=1e-6
    )
    run(DPSGD(Clip(1.0)), CENTRAL, 10, out=tmp_path / "correlated")
    with pytest.raises(UsageError, match="the coefficients of noise_bands are made for a number of rounds"):
        run(DPSGD(Clip(1.0)), CENTRAL, 14, out=tmp_path / "correlated")


@pytest.mark.parametrize(
    ("privacy", "more", "why"),
    [
        ({"noise_bands": 4}, {}, "more than the 3 rounds between two turns of a client; give at most 3"),
        ({"noise_bands": 2, "trust": "secure-sum"}, {}, "needs one holder of all noise"),
        ({"noise_bands": 2}, {"participation": None}, "let groups of clients take turns"),
        ({"noise_bands": 2}, {"server_optimizer": "adambc"}, "noise_bands correlates the noise of several rounds"),
        ({"sampling": 0.5}, {"participation": Rotation(3, 0.4)}, "but participation is Rotation"),
        ({"sampling": 0.5, "noise": "secure"}, {"participation": Rotation(3, 0.5)}, "no gain from sampling is claimed"),
    ],
)
def test_runs_that_no_rule_covers(privacy: dict[str, Any], more: dict[str, Any], why: str) -> None:
    stated: dict[str, Any] = {"sigma": SIGMA, "trust": "central", **privacy}
    with pytest.raises(UsageError, match=why):
        run(DPSGD(Clip(1.0)), Privacy(**stated), 10, **more)


def test_real_noise_over_several_ranks_is_refused() -> None:
    class TwoRanks(SingleProcess):
        size = 2

    with pytest.raises(UsageError, match="needs the sums of past rounds in one place, and there are 2 ranks"):
        run(DPSGD(Clip(1.0)), SECURE, 10, compute=Compute(communicator=TwoRanks()))


def shrunk(bands: int, workload: Any) -> tuple[int, ...]:  # noqa: ARG001
    return (4 * ONE, *[0] * (bands - 1))


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "violated"), [(None, False), (shrunk, True)], ids=["true", "a quarter of it"])
def test_the_audit_covers_correlated_noise(
    monkeypatch: pytest.MonkeyPatch, planted: Callable[..., Any] | None, violated: bool
) -> None:
    if planted is not None:
        monkeypatch.setattr(normec.privacy.mechanism, "best_coefficients", planted)
        monkeypatch.setattr(BandedNoise, "__init__", lambda self, given: setattr(self, "coefficients", tuple(given)))
    found = audit_method(
        DPSGD(Clip(1.0)),
        Privacy(epsilon=2, trust="central", noise_bands=2),
        clients=6,
        rounds=4,
        groups=2,
        dimension=3,
        trials=192,
    )
    assert found.violated is violated, str(found)
