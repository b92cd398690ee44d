"""A second computation of ε for combinations of settings: from the noise that runs draw and from Δ worked out by hand.

No rule, sensitivity or account of the library is used here: noise is recorded where it is drawn, Δ follows from the
definition of a message, and ε from the Gaussian trade-off function or, with sampling, from privacy loss distributions
of single rounds that bound it from below and from above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import (
    DPSGD,
    AdaptiveClip,
    Clip,
    Clip21,
    FixedSize,
    LocalSteps,
    Method,
    NormEC,
    Privacy,
    Problem,
    Scaffold,
    SmoothedNorm,
    train,
)
from normec.algorithms.client_momentum import Clip21SGD2M, MomentumNormEC
from normec.models import Softmax
from normec.privacy.noise import SeededNoise

from ...support.gaussian_mechanism import gaussian_epsilon
from ...support.runs import EndAt

ROUNDS, DELTA = 6, 1e-5
SIZES = (20, 8, 4, 8)
BY_RECORDS = [size / sum(SIZES) for size in SIZES]
LOCAL = LocalSteps(steps=2, lr=0.1)
ONE_BY_ONE = [5.0, 1.0, 2.0, 4.0, 0.5, 3.0]


def clients() -> Problem:
    """Four clients with records of three features and two classes; a softmax regression has 8 parameters."""
    draw = torch.Generator().manual_seed(0)
    data = [
        TensorDataset(torch.randn(size, 3, generator=draw), torch.randint(0, 2, (size,), generator=draw))
        for size in SIZES
    ]
    return Problem(Softmax(3, 2), F.cross_entropy, data)


@dataclass
class Drawn:
    """The standard deviation of the noise of every round as it was drawn: of the sum, or of each message."""

    of_sum: dict[int, float] = field(default_factory=dict)
    of_message: dict[int, dict[int, float]] = field(default_factory=dict)  # by round and client


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    seen, real = Drawn(), SeededNoise.draw

    def recorded(self: SeededNoise, shape: Any, sigma: float, *path: Any, **how: Any) -> Tensor:
        round = path[path.index("round") + 1]
        if "client" in path:
            seen.of_message.setdefault(round, {})[path[path.index("client") + 1]] = sigma
        else:
            assert round not in seen.of_sum, "noise of one round was drawn twice"
            seen.of_sum[round] = sigma
        return real(self, shape, sigma, *path, **how)

    monkeypatch.setattr(SeededNoise, "draw", recorded)
    return seen


def noise_faced(seen: Drawn, privacy: Privacy, weights: Sequence[float]) -> list[float]:
    """σ of every round for the observer of the statement, from what was drawn."""
    if seen.of_message:  # under local trust, one draw for each message
        assert all(len(set(sigmas.values())) == 1 for sigmas in seen.of_message.values())
        return [seen.of_message[k][0] for k in range(ROUNDS)]
    sums = [seen.of_sum[k] for k in range(ROUNDS)]
    if privacy.trust == "local":  # one draw stands for those of all messages, which the server has weighted
        return [sigma / math.sqrt(sum((4 * weight) ** 2 for weight in weights)) for sigma in sums]
    return [sigma * math.sqrt((privacy.honest or 4) / 4) for sigma in sums]


def epsilon_of_gaussians(shifts: Sequence[float]) -> float:
    """ε at δ of Gaussian releases whose means move by these multiples of their standard deviations."""
    return gaussian_epsilon(math.sqrt(sum(shift**2 for shift in shifts)), DELTA)


def epsilon_of_sampled(shifts: Sequence[float], rate: float, pessimistic: bool) -> float:
    """A bound of ε at δ of sampled Gaussian releases, round after round, from below or from above."""
    composed = None
    for shift in shifts:
        one = pld.from_gaussian_mechanism(
            1 / shift, sampling_prob=rate, value_discretization_interval=1e-3, pessimistic_estimate=pessimistic
        )
        composed = one if composed is None else composed.compose(one)
    assert composed is not None
    return float(composed.get_epsilon_for_delta(DELTA))


# method, its bound, local steps
METHODS: dict[str, tuple[Method, float, LocalSteps | None]] = {
    "normec": (NormEC(0.1, 0.1, server_norm=False, decay=0.1), 1.0, None),
    "clip21": (Clip21(0.3), 0.3, None),
    "dpsgd": (DPSGD(Clip(0.5), momentum=0.5), 0.5, None),
    "momentum": (MomentumNormEC(0.1, 0.1), 1.0, None),
    "sgd2m": (Clip21SGD2M(0.3), 0.3, None),
    "adaptive": (AdaptiveClip(DPSGD(Clip(0.5))), 1.0, None),
    "adaptive-sgd2m": (AdaptiveClip(Clip21SGD2M(0.5)), 1.0, None),
    "adaptive-clip21": (AdaptiveClip(Clip21(0.5)), 1.0, None),
    "fedavg": (DPSGD(Clip(0.4)), 0.4, LocalSteps(steps=2, lr=0.1, scale="difference")),
    "fedprox": (DPSGD(Clip(0.4)), 0.4, LocalSteps(steps=2, lr=0.1, prox=0.5, scale="difference")),
    "fed-normec": (NormEC(0.1, 0.1), 1.0, LOCAL),
    "scaffold": (Scaffold(0.7), 0.7, LOCAL),
}


SCHEDULES: dict[str, Any] = {"constant": "constant", "linear": "linear:0.2", "given": ONE_BY_ONE}
TRUSTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "local": ("local", "zero-out", {}),
    "local, noisy memory": ("local", "replace", {"memory": "noisy"}),
    "sum": ("secure-sum", "replace", {}),
    "sum of honest": ("secure-sum", "zero-out", {"honest": 3}),
    "central": ("central", "zero-out", {}),
}
# Every method; and every trust with every schedule, and with and without weights.
CLIENTS = [
    ("normec", "local", "equal", "constant"),
    ("clip21", "local", "weighted", "linear"),
    ("dpsgd", "local", "weighted", "given"),
    ("momentum", "local, noisy memory", "weighted", "constant"),
    ("sgd2m", "local, noisy memory", "equal", "linear"),
    ("scaffold", "local, noisy memory", "weighted", "given"),
    ("adaptive", "sum", "weighted", "constant"),
    ("fed-normec", "sum", "equal", "linear"),
    ("scaffold", "sum", "weighted", "given"),
    ("adaptive-sgd2m", "sum of honest", "weighted", "constant"),
    ("normec", "sum of honest", "weighted", "linear"),
    ("dpsgd", "sum of honest", "equal", "given"),
    ("scaffold", "central", "equal", "constant"),
    ("momentum", "central", "weighted", "linear"),
    ("adaptive", "central", "weighted", "given"),
    ("fedavg", "sum", "weighted", "linear"),
    ("fedprox", "local", "equal", "given"),
    ("adaptive-clip21", "sum of honest", "weighted", "constant"),
]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("name", "trusted", "weighting", "schedule"), CLIENTS)
def test_clients(name: str, trusted: str, weighting: str, schedule: str, drawn: Drawn) -> None:
    trust, relation, more = TRUSTS[trusted]
    weights: Any = BY_RECORDS if weighting == "weighted" else "equal"
    method, bound, local = METHODS[name]
    privacy = Privacy(
        epsilon=4, delta=DELTA, trust=trust, relation=relation, noise_schedule=SCHEDULES[schedule], **more
    )
    drawing = {} if trust == "local" else {"participation": FixedSize(2)}  # where noise of one draw stands for all
    how: dict[str, Any] = {"lr": 0.1, "rounds": ROUNDS, "local": local, "seed": 3, "public_sizes": True, **drawing}
    run = train(clients(), method, privacy=privacy, weights=weights, **how)
    used = BY_RECORDS if weights != "equal" else [0.25] * 4
    heaviest = 1.0 if trust == "local" else 4 * max(used)
    shift = bound * heaviest * (1 if relation == "zero-out" else 2)
    noise = noise_faced(drawn, privacy, used)
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(epsilon_of_gaussians([shift / sigma for sigma in noise]), rel=1e-7)
    assert run.privacy.epsilon <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weights", "schedule"),
    [
        ("normec", BY_RECORDS, ONE_BY_ONE),
        ("adaptive", BY_RECORDS, "constant"),
        ("scaffold", "equal", [1, 1, 2, 2, 1, 1]),
    ],
    ids=["normec", "adaptive", "scaffold"],
)
def test_sampled_clients(name: str, weights: Any, schedule: Any, drawn: Drawn) -> None:
    method, bound, local = METHODS[name]
    privacy = Privacy(sigma=0.6, delta=DELTA, trust="central", sampling=0.3, noise_schedule=schedule)
    how: dict[str, Any] = {"lr": 0.1, "rounds": ROUNDS, "local": local, "seed": 3, "public_sizes": True}
    run = train(clients(), method, privacy=privacy, weights=weights, **how)
    used = BY_RECORDS if weights != "equal" else [0.25] * 4
    shifts = [bound * 4 * max(used) / sigma for sigma in noise_faced(drawn, privacy, used)]
    low, high = (epsilon_of_sampled(shifts, 0.3, pessimistic) for pessimistic in (False, True))
    assert run.privacy is not None
    assert low <= run.privacy.epsilon <= 1.01 * high


def shifts_of_records(
    method: Any, clip: float, relation: str, hidden: bool, batch_size: int = max(SIZES)
) -> np.ndarray[Any, Any]:
    """How far one record of each client moves its message in each round, ``[clients, rounds]``."""
    operator = method.operator
    slope, bound = (1 / operator.alpha, 1.0) if isinstance(operator, SmoothedNorm) else (1.0, operator.tau)
    beta, keep = (method.beta, 1 - method.decay) if hidden else (0.0, 1.0)
    shifts = np.zeros((len(SIZES), ROUNDS))
    for i, size in enumerate(SIZES):
        moved, apart = clip / min(size, batch_size) * (1 if relation == "zero-out" else 2), 0.0
        for k in range(ROUNDS):
            shifts[i, k] = min(2 * bound, slope * (moved + apart))
            apart = keep * apart + beta * min(slope * moved, 2 * bound)
    return shifts


NORMEC = NormEC(2.0, 0.2, decay=0.1)
# method, trust, whether memories are hidden, clip, its parts, relation, weights, schedule
RECORDS: list[tuple[Any, Any, bool, Any, Any, Any, Any, Any]] = [
    (NORMEC, "local", False, 0.4, "record", "zero-out", "equal", "constant"),  # memories take the noise
    (NORMEC, "local", False, "auto", "layer", "replace", "records", "given"),
    (NORMEC, "secure-sum", True, 0.4, "layer", "zero-out", "records", "linear"),
    (NORMEC, "secure-sum", True, "auto", "record", "replace", "equal", "given"),
    (NORMEC, "central", True, 0.4, "record", "replace", "records", "constant"),
    (DPSGD(Clip(0.3)), "central", False, "auto", "layer", "zero-out", "records", "constant"),
    (DPSGD(Clip(0.3)), "secure-sum", False, 0.4, "record", "replace", "equal", "linear"),
    (DPSGD(Clip(0.05)), "central", False, 9.0, "layer", "replace", "records", "given"),  # Δ is capped at 2b
    (DPSGD(SmoothedNorm(2.0)), "local", False, "auto", "record", "zero-out", "records", "linear"),
    (DPSGD(SmoothedNorm(2.0)), "secure-sum", False, 0.4, "layer", "replace", "records", "given"),
]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("method", "trust", "hidden", "clip", "by", "relation", "weights", "schedule"), RECORDS)
def test_records(
    method: Any, trust: Any, hidden: bool, clip: Any, by: Any, relation: Any, weights: Any, schedule: str, drawn: Drawn
) -> None:
    privacy = Privacy(
        epsilon=4,
        delta=DELTA,
        unit="record",
        trust=trust,
        relation=relation,
        record_clip=clip,
        record_clip_by=by,
        noise_schedule=SCHEDULES[schedule],
    )
    run = train(clients(), method, lr=0.1, rounds=ROUNDS, seed=3, privacy=privacy, weights=weights)
    used = BY_RECORDS if weights == "records" else [0.25] * 4
    shifts = shifts_of_records(method, 1.0 if clip == "auto" else clip, relation, hidden)
    if trust == "local":  # the server sees each message, with the noise of its own client
        each = [[shifts[i, k] / drawn.of_message[k][i] for k in range(ROUNDS)] for i in range(4)]
        expected = max(map(epsilon_of_gaussians, each))
    else:
        worst = (4 * np.array(used)[:, None] * shifts).max(0)
        noise = noise_faced(drawn, privacy, used)
        # Messages of a secure sum are rounded to a grid, which adds a step of at most 2^-24 σ in each of 8 coordinates.
        grid = 2.0**-24 * math.sqrt(8) if trust == "secure-sum" else 0.0
        expected = epsilon_of_gaussians([shift / sigma + grid for shift, sigma in zip(worst, noise, strict=True)])
    assert run.privacy is not None
    # Where clients differ, the rule takes each part of Δ at its largest over the clients.
    assert run.privacy.epsilon >= expected * (1 - 1e-7)
    assert run.privacy.epsilon <= expected * (1.05 if hidden and weights == "records" else 1 + 1e-7)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("relation", ["zero-out", "replace"])
@pytest.mark.parametrize(("method", "hidden"), [(NORMEC, True), (DPSGD(Clip(0.3)), False)], ids=["memory", "none"])
def test_batches_of_a_fixed_size(method: Any, hidden: bool, relation: Any, drawn: Drawn) -> None:
    """A record counts in every round as if it were in the batch; no clip was asked for, and all are normalised."""
    privacy = Privacy(epsilon=4, delta=DELTA, unit="record", trust="central", relation=relation)
    run = train(clients(), method, lr=0.1, rounds=ROUNDS, seed=3, batch_size=6, privacy=privacy)
    worst = shifts_of_records(method, 1.0, relation, hidden, batch_size=6).max(0)
    shifts = [shift / sigma for shift, sigma in zip(worst, noise_faced(drawn, privacy, [0.25] * 4), strict=True)]
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(epsilon_of_gaussians(shifts), rel=1e-7)


@pytest.mark.parametrize("schedule", ["constant", "given"])
def test_a_run_that_a_rule_stops(schedule: str, drawn: Drawn) -> None:
    """ε is that of all planned rounds, whose noise follows from that of the first and from the schedule."""
    privacy = Privacy(epsilon=4, delta=DELTA, trust="central", noise_schedule=SCHEDULES[schedule])
    how: dict[str, Any] = {"lr": 0.1, "rounds": ROUNDS, "seed": 3, "callbacks": [EndAt(3)]}
    run = train(clients(), Clip21(0.3), privacy=privacy, **how)
    assert sorted(drawn.of_sum) == [0, 1, 2]
    relative = ONE_BY_ONE if schedule == "given" else [1.0] * ROUNDS
    noise = [drawn.of_sum[0] * relative[k] / relative[0] for k in range(ROUNDS)]
    assert [drawn.of_sum[k] for k in range(3)] == pytest.approx(noise[:3])
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(epsilon_of_gaussians([0.3 / sigma for sigma in noise]), rel=1e-7)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("unit", "clip"), [("client", None), ("record", 0.4)])
def test_a_run_that_is_continued(unit: Any, clip: float | None, drawn: Drawn, tmp_path: Path) -> None:
    """The rounds of both parts are one composition, each at the noise that it had."""
    method = NormEC(2.0, 0.2, decay=0.1)
    stated: dict[str, Any] = {"delta": DELTA, "unit": unit, "trust": "central", "record_clip": clip}
    how: dict[str, Any] = {"lr": 0.1, "seed": 3, "out": tmp_path / "run"}
    train(clients(), method, rounds=4, privacy=Privacy(epsilon=4, **stated), **how)
    run = train(clients(), method, rounds=ROUNDS, privacy=Privacy(epsilon=8, **stated), **how)
    noise = [drawn.of_sum[k] for k in range(ROUNDS)]
    assert len(set(noise)) == 1
    shifts = shifts_of_records(method, clip, "zero-out", hidden=True).max(0) if clip is not None else [1.0] * ROUNDS
    expected = epsilon_of_gaussians([shift / sigma for shift, sigma in zip(shifts, noise, strict=True)])
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(expected, rel=1e-7)
    assert 4 < run.privacy.epsilon < 8


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["local", "central"])
def test_records_of_drawn_batches(trust: Any, drawn: Drawn) -> None:
    rate, bound, clip = 0.3, 0.3, 0.2
    privacy = Privacy(sigma=0.3, delta=DELTA, unit="record", trust=trust, record_clip=clip)
    run = train(clients(), DPSGD(Clip(bound)), lr=0.1, rounds=ROUNDS, seed=3, privacy=privacy, batch_rate=rate)
    moved = [min(2 * bound, clip / (rate * size)) for size in SIZES]  # the divisor is the expected size of a batch
    if trust == "local":  # the server sees each message, with the noise of its own client
        each = [[moved[i] / drawn.of_message[k][i] for k in range(ROUNDS)] for i in range(4)]
    else:
        each = [[max(moved) / drawn.of_sum[k] for k in range(ROUNDS)]]
    low, high = (max(epsilon_of_sampled(one, rate, pessimistic) for one in each) for pessimistic in (False, True))
    assert run.privacy is not None
    assert low <= run.privacy.epsilon <= 1.01 * high
