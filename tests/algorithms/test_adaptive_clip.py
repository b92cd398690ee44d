"""Adaptive clipping, against a loop in NumPy written from the formula, and its account against the published one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normec
from normec import (
    DPSGD,
    EF21,
    AdaptiveClip,
    Clip,
    Clip21,
    Clip21SGD2M,
    FixedSize,
    Method,
    NormEC,
    Privacy,
    Problem,
    Scaffold,
    SmoothedNorm,
    train,
)
from normec.algorithms.registry import build, name_of, works_by_rows
from normec.distributed.optimizer import ClientOptimizer
from normec.errors import UsageError
from normec.experiments import methods
from normec.experiments.audit import audit_method
from normec.settings import make

from ..support.reference import Vector, clip, norm
from ..support.runs import InterruptAt

N, D, ROUNDS, LR, TAU = 6, 5, 60, 0.02, 3.0
CENTRES = 3 * np.random.default_rng(7).normal(size=(N, D)) * np.arange(1, N + 1)[:, None]
INNER: dict[str, Method] = {
    "dpsgd": DPSGD(Clip(TAU), beta=0.5, momentum=0.3),
    "clip21": Clip21(TAU, decay=0.1),
    "clip21-sgd2m": Clip21SGD2M(TAU, 0.4, 0.6),
}
QUIET = Privacy(sigma=1e-13, trust="secure-sum")


def problem() -> Any:
    losses = [lambda x, c=c: ((x - torch.from_numpy(c)) ** 2).sum() / 2 for c in CENTRES]
    return normec.Problem.from_functions(losses, torch.zeros(D, dtype=torch.float64))


def by_hand(
    name: str, drawn: FixedSize | None, q: float, eta: float, rounds: int = ROUNDS
) -> tuple[Vector, list[float]]:
    """x after all rounds, and every round's threshold."""
    x, estimate, threshold = np.zeros(D), np.zeros(D), TAU
    g, v = np.zeros((N, D)), np.zeros((N, D))
    thresholds = []
    for k in range(rounds):
        thresholds.append(threshold)
        chosen = list(range(N)) if drawn is None else drawn.draw(N, k, 1).tolist()  # type: ignore[union-attr]
        total, short = np.zeros(D), 0
        for i in range(N):
            kept = 0.9 * g[i] if name == "clip21" else g[i]
            if i in chosen:
                gradient = x - CENTRES[i]
                v[i] = 0.6 * v[i] + 0.4 * gradient if name == "clip21-sgd2m" else gradient
                difference = v[i] - g[i]
                short += norm(difference) <= threshold
                message = clip(difference, threshold)
                total += message
                if name != "dpsgd":
                    kept = kept + (0.4 if name == "clip21-sgd2m" else 1.0) * message
            g[i] = kept
        if name == "dpsgd":
            estimate = 0.3 * estimate + 0.5 * total / N
        elif name == "clip21":
            estimate = 0.9 * estimate + total / N
        else:
            estimate = estimate + 0.4 * total / N
        x = x - LR * estimate
        threshold *= math.exp(-eta * (short / len(chosen) - q))
    return x, thresholds


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("privacy", [None, QUIET, Privacy(sigma=1e-13, trust="local")], ids=["plain", "sum", "local"])
@pytest.mark.parametrize("drawn", [pytest.param(None, marks=pytest.mark.slow), FixedSize(3)], ids=["all", "drawn"])
@pytest.mark.parametrize("name", INNER)
def test_it_follows_the_formula(name: str, drawn: FixedSize | None, privacy: Privacy | None) -> None:
    share = 1.0 if drawn is None else 3 / N
    method = AdaptiveClip(INNER[name], quantile=0.7, threshold_lr=0.05, participation=share)
    run = train(problem(), method, lr=LR, rounds=ROUNDS, seed=1, participation=drawn, privacy=privacy)
    x, thresholds = by_hand(name, drawn, 0.7, 0.05)
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    assert float(run.state.server["threshold"]) == pytest.approx(by_hand(name, drawn, 0.7, 0.05, ROUNDS + 1)[1][-1])
    assert len({round(one, 6) for one in thresholds}) > 20


@pytest.mark.slow
def test_the_threshold_finds_the_quantile_under_noise() -> None:
    """Lengths stay as they are, because x does not move; the 4th of 6 lengths is where 0.6 of them lie below."""
    lengths = sorted(norm(c) for c in CENTRES)
    method = AdaptiveClip(DPSGD(Clip(0.01)), quantile=0.6, threshold_lr=0.1, bit_weight=0.5)
    privacy = Privacy(sigma=0.05, trust="secure-sum")
    run = train(problem(), method, lr=0.0, rounds=200, seed=3, privacy=privacy)
    assert lengths[2] < float(run.state.server["threshold"]) < lengths[4]


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_the_split_of_the_noise_is_the_published_one(weight: float) -> None:
    """Andrew et al.: z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2), with noise σ_b on the sum of the bits and z_Δ C on the updates."""
    z, threshold = 1.7, 3.0
    method = AdaptiveClip(DPSGD(Clip(threshold)), bit_weight=weight)
    noise_of_bits = z / (2 * weight)  # the bit is (1 + message/w)/2
    expected = (z**-2 - (2 * noise_of_bits) ** -2) ** -0.5
    state = method.server_init(torch.zeros(1, dtype=torch.float64))
    direction, _ = method.server_step(torch.tensor([z, 0.0], dtype=torch.float64), state)
    assert float(direction[0]) == pytest.approx(expected * threshold)


def test_its_epsilon_is_that_of_one_release_of_length_one() -> None:
    privacy = Privacy(epsilon=3, trust="secure-sum")
    spent = [
        train(problem(), method, lr=LR, rounds=20, seed=1, privacy=privacy).privacy
        for method in (AdaptiveClip(DPSGD(Clip(7.0))), DPSGD(SmoothedNorm(0.1)))
    ]
    assert spent[0] is not None
    assert spent[1] is not None
    assert (spent[0].epsilon, spent[0].sigma) == (spent[1].epsilon, spent[1].sigma)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", INNER)
def test_a_run_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": LR, "rounds": 15, "seed": 1, "participation": FixedSize(2)}
    options |= {"storage": normec.Storage(checkpoint_seconds=0.0), "privacy": Privacy(epsilon=5, trust="secure-sum")}
    method = AdaptiveClip(INNER[name])
    with pytest.raises(KeyboardInterrupt):
        train(problem(), method, callbacks=[InterruptAt(7)], out=tmp_path / "run", **options)
    run, whole = (train(problem(), method, out=out, **options) for out in (tmp_path / "run", tmp_path / "whole"))
    assert torch.equal(run.x, whole.x)
    assert torch.equal(run.state.server["threshold"], whole.state.server["threshold"])


def test_the_optimizer_sends_the_threshold_along() -> None:
    x = torch.nn.Parameter(torch.zeros(D, dtype=torch.float64))
    method = AdaptiveClip(INNER["clip21"], quantile=0.7, threshold_lr=0.05)
    optimizer = ClientOptimizer([x], method, LR, clients=N)
    for _ in range(ROUNDS):
        for client, centre in enumerate(CENTRES):
            with optimizer.client(client):
                x.grad = x.detach() - torch.from_numpy(centre)
        optimizer.step()
    np.testing.assert_allclose(x.detach().numpy(), by_hand("clip21", None, 0.7, 0.05)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("dpsgd-adaptive", DPSGD(Clip(0.2), beta=1.0, momentum=0.0)),
        ("clip21-adaptive", Clip21(0.2, decay=0.1)),
        ("clip21-sgd2m-adaptive", Clip21SGD2M(0.2, 0.4, 0.6, 0.1)),
    ],
)
def test_it_can_be_asked_for_by_name(name: str, inner: Method) -> None:
    own = {"beta": 0.4, "client_momentum": 0.6, "decay": 0.1, "momentum": 0.0}
    given = {key: value for key, value in own.items() if methods.applies(name, key)}
    if name == "dpsgd-adaptive":
        given["beta"] = 1.0
    config = make({"method": name, "tau": 0.2, "quantile": 0.7, "sample_rate": 0.5, **given})
    assert methods.build(config, D) == AdaptiveClip(inner, quantile=0.7, participation=0.5)


def test_it_is_known_by_its_settings() -> None:
    method = AdaptiveClip(INNER["clip21"], quantile=0.7)
    assert build(name_of(method), method.spec()) == method
    assert works_by_rows(method)


@pytest.mark.parametrize(("slope", "sigma"), [(0.0, 0.01), (1e9, 100.0)], ids=["vanishing", "noise alone"])
def test_the_threshold_stays_within_the_range_of_its_precision(slope: float, sigma: float) -> None:
    """Updates that vanish, or noise that outweighs the bit, carry it ever further in one direction."""
    planes = Problem.from_functions([lambda x: slope * x.sum()] * 4, torch.ones(2))
    method = AdaptiveClip(DPSGD(Clip(1.0)), threshold_lr=5.0)
    run = train(planes, method, lr=0.0, rounds=60, privacy=Privacy(sigma=sigma, trust="central"), seed=0)
    assert run.finished
    assert 1e-16 < float(run.state.server["threshold"]) < 1e16


class HeavyBit(AdaptiveClip):
    """A planted bug: the bit goes out with a thousand times the weight that was accounted for."""

    def message(self, *given: Any, **named: Any) -> Any:
        message, draft = super().message(*given, **named)
        message[:, -1] *= 1000
        return message, draft


@pytest.mark.slow
def test_the_audit_does_not_refute_it() -> None:
    found = audit_method(AdaptiveClip(DPSGD(Clip(1.0))), Privacy(epsilon=4, trust="secure-sum"), rounds=2, trials=400)
    assert not found.violated


def test_a_bit_that_is_not_covered_stops_the_run() -> None:
    with pytest.raises(normec.Diverged, match="above its bound in round 0"):
        train(
            problem(),
            HeavyBit(DPSGD(Clip(1.0))),
            lr=LR,
            rounds=3,
            privacy=Privacy(epsilon=4, trust="local"),
        )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: AdaptiveClip(NormEC(0.1, 0.1)), "methods whose operator is Clip"),
        (lambda: AdaptiveClip(Scaffold(1.0)), "an update and the change of a control variate together"),
        (lambda: AdaptiveClip(EF21(Clip(1.0))), "cannot replace the clipping of ef21"),
        (lambda: AdaptiveClip(DPSGD(Clip(1.0)), quantile=1.0), "quantile must lie in"),
        (lambda: AdaptiveClip(DPSGD(Clip(1.0)), bit_weight=0.0), "bit_weight must lie in"),
        (lambda: AdaptiveClip(DPSGD(Clip(1.0)), participation=2.0), "participation must lie in"),
    ],
)
def test_wrong_settings_are_refused(make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()
