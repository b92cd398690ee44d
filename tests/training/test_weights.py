"""Clients' weights: f = Σ w_i f_i, against loops by hand, and against runs that must come out the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, TensorDataset

from normec import (
    DPSGD,
    EF21,
    GD,
    AdaptiveClip,
    Clip,
    Clip21,
    Compute,
    LocalSteps,
    Logging,
    Memory,
    Method,
    NormEC,
    Privacy,
    Problem,
    Scaffold,
    SmoothedNorm,
    Storage,
    TopK,
    train,
)
from normec.errors import UsageError

from ..support import reference
from ..support.problems import logistic, quadratics
from ..support.runs import StopAt, data, problem, same, snapshot

ROUNDS = 60
FIVE = (0.35, 0.3, 0.2, 0.1, 0.05)
FOUR = (0.4, 0.3, 0.2, 0.1)
Vector = reference.Vector


@dataclass(frozen=True)
class Turns:
    """Two of three clients take part in a round, in turns; nobody does in every seventh."""

    def takes_part(self, client: int, round: int) -> bool:
        return round % 7 != 3 and (client + round) % 3 > 0

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:  # noqa: ARG002
        return torch.tensor([i for i in range(clients) if self.takes_part(i, round)], dtype=torch.int64)


def by_hand(  # type: ignore[no-untyped-def]
    f, x: Vector, lr: float, w, psi: Callable[[Vector], Vector], *, feedback, beta, decay, server_norm, sampled
) -> tuple[list[Vector], Vector, Vector]:
    """x⁰ … x^K, the memories and the estimate."""
    n, d = len(f), len(x)
    g, estimate, path = np.zeros((n, d)), np.zeros(d), [x]
    for k in range(ROUNDS):
        total = np.zeros(d)
        for i in range(n):
            takes_part = not sampled or Turns().takes_part(i, k)
            message = psi(f.grad(i, x) - g[i] if feedback else f.grad(i, x)) if takes_part else np.zeros(d)
            if feedback:
                g[i] = (1 - decay) * g[i] + beta * message
            total = total + w[i] * message
        estimate = (1 - decay) * estimate + beta * total if feedback else beta * total
        step = reference.unit(estimate) if server_norm else estimate
        x = x - lr * step
        path.append(x)
    return path, g, estimate


def smoothed(alpha: float) -> Callable[[Vector], Vector]:
    return lambda v: v / (alpha + reference.norm(v))


METHODS: dict[str, tuple[Method, float, Callable[[Vector], Vector], dict[str, Any]]] = {
    "normec": (NormEC(0.5, 0.4), 0.005, smoothed(0.5), {"beta": 0.4, "server_norm": True}),
    "normec, forgetting": (
        NormEC(1.0, 0.5, server_norm=False, decay=0.02),
        0.1,
        smoothed(1.0),
        {"beta": 0.5, "decay": 0.02},
    ),
    "clip21": (Clip21(0.3), 0.1, lambda v: reference.clip(v, 0.3), {}),
    "ef21": (EF21(TopK(2)), 0.05, lambda v: reference.largest(v, 2), {}),
    "dpsgd-clip": (DPSGD(Clip(0.8)), 0.1, lambda v: reference.clip(v, 0.8), {"feedback": False}),
    "dpsgd-norm": (
        DPSGD(SmoothedNorm(0.1), beta=0.7),
        0.1,
        smoothed(0.1),
        {"feedback": False, "beta": 0.7},
    ),
    "gd": (GD(), 0.1, lambda v: v, {"feedback": False}),
}


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("sampled", [False, True], ids=["everyone", "sampled"])
@pytest.mark.parametrize("kind", ["quadratics", "logistic"])
@pytest.mark.parametrize("name", METHODS)
def test_the_path_is_the_loop_s(name: str, kind: str, sampled: bool) -> None:
    method, lr, psi, own = METHODS[name]
    f, objective = quadratics(0) if kind == "quadratics" else logistic(0)
    w = FIVE if kind == "quadratics" else FOUR
    participation = Turns() if sampled else None
    run = train(
        objective,
        method,
        lr=lr,
        rounds=ROUNDS,
        weights=w,
        participation=participation,
        logging=Logging(every=20, full_gradient=True),
    )
    settings = {"feedback": True, "beta": 1.0, "decay": 0.0, "server_norm": False, **own, "sampled": sampled}
    path, memory, estimate = by_hand(f, objective.x0.numpy().copy(), lr, w, psi, **settings)
    assert reference.norm(path[-1] - path[0]) > 0.1  # it went somewhere
    assert np.abs(run.x.numpy() - path[-1]).max() <= 1e-10
    if settings["feedback"]:
        assert np.abs(run.state.memory.numpy() - memory).max() <= 1e-10
        assert np.abs(run.state.estimate.numpy() - estimate).max() <= 1e-10
    for row in run.history.rows:
        x = path[row["round"]]
        assert row["loss"] == pytest.approx(sum(w[i] * f.loss(i, x) for i in range(len(f))), abs=1e-10)
        gradient = sum(w[i] * f.grad(i, x) for i in range(len(f)))
        assert row["grad_norm"] == pytest.approx(reference.norm(gradient), abs=1e-10)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("how", [{}, {"privacy": Privacy(epsilon=8, trust="secure-sum")}], ids=["open", "private"])
def test_equal_weights_are_those_of_a_run_without_weights(how: dict[str, Any]) -> None:
    plain = train(problem(), NormEC(0.1, 0.3), lr=0.2, rounds=9, seed=0, **how)
    for weights in ("equal", [0.25] * 4, torch.full((4,), 0.25)):
        same(plain, train(problem(), NormEC(0.1, 0.3), lr=0.2, rounds=9, seed=0, weights=weights, **how))


def test_equal_sizes_make_weights_by_records_equal() -> None:
    made = Problem(nn.Linear(4, 3), F.cross_entropy, [data(9, i) for i in range(3)])
    plain = train(made, NormEC(0.1, 0.3), lr=0.2, rounds=9)
    same(plain, train(made, NormEC(0.1, 0.3), lr=0.2, rounds=9, weights="records"))


LOCAL = LocalSteps(steps=3, lr=0.2)
REPEATED: dict[str, tuple[Method, float, dict[str, Any]]] = {
    **{name: (*case[:2], {}) for name, case in METHODS.items()},
    "fed-normec": (NormEC(0.5, 0.4), 0.1, {"local": LOCAL}),
    # Their messages are longer than the model, and clients read what the server makes of the sum.
    "scaffold": (Scaffold(0.1), 0.1, {"local": LOCAL}),
    "clip21-adaptive": (AdaptiveClip(Clip21(0.02)), 0.1, {}),
    "dpsgd-adaptive, adam": (AdaptiveClip(DPSGD(Clip(0.02))), 0.01, {"server_optimizer": "adam"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATED)
def test_a_weight_of_two_thirds_is_two_clients_of_three(name: str) -> None:
    """A client that is there twice counts twice: the two keep the same memory, for ever."""
    method, lr, more = REPEATED[name]
    first, second = data(9, 0), data(11, 1)

    def of(clients: list[TensorDataset]) -> Problem:
        torch.manual_seed(0)
        return Problem(nn.Linear(4, 3).double(), F.cross_entropy, clients)

    weighted = train(of([first, second]), method, lr=lr, rounds=ROUNDS, weights=(2 / 3, 1 / 3), **more)
    repeated = train(of([first, first, second]), method, lr=lr, rounds=ROUNDS, **more)
    # Sums in another order differ by rounding, which the rounds amplify, on some processors above 1e-11.
    torch.testing.assert_close(weighted.x, repeated.x, rtol=0, atol=1e-9)
    for ours, theirs in zip(weighted.history.rows, repeated.history.rows, strict=True):
        for column in {"loss", "grad_norm", "disagreement", "memory_error"} & theirs.keys():
            assert ours[column] == pytest.approx(theirs[column], abs=1e-7), column  # roots of differences of squares


@pytest.mark.slow
def test_gradient_descent_weighted_by_records_is_that_of_all_records_together() -> None:
    clients = [data(9 + 4 * i, i) for i in range(4)]

    def of(parts: list[Any]) -> Problem:
        torch.manual_seed(0)
        return Problem(nn.Linear(4, 3).double(), F.cross_entropy, parts)

    weighted = train(of(clients), GD(), lr=0.3, rounds=ROUNDS, weights="records")
    together = train(of([ConcatDataset(clients)]), GD(), lr=0.3, rounds=ROUNDS)
    torch.testing.assert_close(weighted.x, together.x, rtol=0, atol=1e-12)
    assert weighted.history["loss"] == pytest.approx(together.history["loss"], abs=1e-12)


def test_the_first_estimate_is_the_weighted_mean_of_the_memories() -> None:
    f, objective = quadratics(0)
    run = train(objective, NormEC(0.5, 0.4), lr=0.0, rounds=1, weights=FIVE, memory=Memory(initial="gradient"))
    expected = sum(w * f.grad(i, objective.x0.numpy()) for i, w in enumerate(FIVE))
    np.testing.assert_allclose(run.state.estimate.numpy(), expected, atol=1e-12)  # messages are zero


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("method", [NormEC(0.1, 0.3), Clip21(0.5), EF21(TopK(3))], ids=["normec", "clip21", "ef21"])
def test_the_estimate_follows_memories_of_bfloat16(method: Method) -> None:
    """What the memory took is what counts, so that ĝ stays Σ w_i g_i."""
    run = train(problem(), method, lr=0.1, rounds=20, weights=FOUR, memory=Memory(dtype=torch.bfloat16))
    expected = (torch.tensor(FOUR)[:, None] * run.state.memory.float()).sum(0)
    torch.testing.assert_close(run.state.estimate, expected, rtol=1e-4, atol=1e-5)


def nothing(x: Tensor) -> Tensor:
    return 0 * x.sum()


FLAT = Problem.from_functions([nothing] * 4, torch.zeros(40_000, dtype=torch.float64))


@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize(
    ("trust", "memory"), [("local", "clean"), ("local", "noisy"), ("secure-sum", "clean"), ("central", "clean")]
)
def test_the_mean_has_the_noise_of_the_weighted_messages(trust: Any, memory: Any, noise: Any) -> None:
    """Local trust: Σ w_i z_i. A sum: the noise of all clients, unweighted, over n. One round with lr = 1 shows it."""
    privacy = Privacy(sigma=0.5, trust=trust, memory=memory, noise=noise)
    run = train(FLAT, NormEC(0.1, 1.0, server_norm=False), lr=1.0, rounds=1, weights=FOUR, privacy=privacy)
    expected = 0.5 * (math.sqrt(sum(w * w for w in FOUR)) if trust == "local" else math.sqrt(4) / 4)
    assert float(run.x.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * 40_000))


def test_the_noise_of_a_sum_covers_the_heaviest_client() -> None:
    """In a sum, σ grows by max n·w_i; under local trust every message has its own noise, whatever its weight."""
    for trust, factor in (("secure-sum", 1.6), ("central", 1.6), ("local", 1.0)):
        privacy = Privacy(epsilon=2, trust=trust)  # type: ignore[arg-type]
        plain, weighted = (
            train(problem(), NormEC(0.1, 0.3), lr=0.1, rounds=5, seed=0, privacy=privacy, weights=weights).privacy
            for weights in ("equal", FOUR)
        )
        assert plain is not None
        assert weighted is not None
        assert weighted.sigma == pytest.approx(factor * plain.sigma, rel=1e-6)
        assert weighted.epsilon == pytest.approx(plain.epsilon, rel=1e-6)
        assert any("weights are assumed to be public" in note for note in weighted.notes)


def test_a_record_moves_a_sum_weighted_by_records_alike_at_every_client() -> None:
    """Clip(1) of sums of clipped records over n_i: Δ = n·C/N, where equal weights have C/min n_i."""
    sizes = [9, 11, 13, 15]  # of `problem`
    sigmas = {}
    for weights in ("equal", "records"):
        privacy = Privacy(epsilon=2, trust="secure-sum", unit="record", record_clip=1.0)
        run = train(problem(), DPSGD(Clip(1.0)), lr=0.1, rounds=5, seed=0, privacy=privacy, weights=weights)
        assert run.privacy is not None
        sigmas[weights] = run.privacy.sigma
    assert sigmas["records"] / sigmas["equal"] == pytest.approx((4 / sum(sizes)) / (1 / min(sizes)), rel=1e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_the_weighted_mean_has_each_client_s_own_noise(noise: Any) -> None:
    """Local trust, records: σ_i = σ n_min/n_i, and the mean has variance Σ w_i² σ_i²; one step with lr = 1 shows it.

    Seeded noise is drawn for the mean, secure noise for each message.
    """
    sizes, wide = (5, 10, 20, 40), 20_000

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, wide))

        def forward(self, inputs: Tensor) -> Tensor:
            return 0 * inputs @ self.weight.T

    clients = [TensorDataset(torch.ones(size, wide), torch.zeros(size, 1)) for size in sizes]
    flat = Problem(Flat(), F.mse_loss, clients)
    privacy = Privacy(sigma=0.5, unit="record", record_clip=1.0, noise=noise, trust="local")
    run = train(flat, DPSGD(Clip(1.0)), lr=1.0, rounds=1, seed=0, weights="records", privacy=privacy)
    assert run.privacy is not None
    expected = 0.5 * math.sqrt(sum((size / 75 * 5 / size) ** 2 for size in sizes))
    assert float(run.x.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * wide))
    assert any("its own records need: between 0.125 sigma" in note for note in run.privacy.notes)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.parametrize("trust", [None, "local", "secure-sum"])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, at: int, trust: Any) -> None:
    privacy = Privacy(epsilon=4, trust=trust) if trust else None
    how: dict[str, Any] = {"lr": 0.2, "rounds": 9, "seed": 1, "weights": FOUR, "privacy": privacy}
    how["storage"] = Storage(checkpoint_seconds=0.0)
    whole = train(problem(), NormEC(0.1, 0.3), out=tmp_path / "whole", **how)
    first = train(problem(), NormEC(0.1, 0.3), out=tmp_path / "stopped", callbacks=[StopAt(at)], **how)
    assert not first.finished
    same(whole, train(problem(), NormEC(0.1, 0.3), out=tmp_path / "stopped", **how))


def test_a_folder_belongs_to_its_weights(tmp_path: Path) -> None:
    how: dict[str, Any] = {"lr": 0.2, "rounds": 3, "out": tmp_path}
    train(problem(), NormEC(0.1, 0.3), weights=FOUR, **how)
    held = snapshot(tmp_path)
    assert b'"weights" = "0.4,0.3,0.2,0.1"' in held["config.toml"]
    for other in ("equal", "records", (0.1, 0.2, 0.3, 0.4)):
        with pytest.raises(UsageError, match="weights"):
            train(problem(), NormEC(0.1, 0.3), weights=other, **how)  # type: ignore[arg-type]
    assert snapshot(tmp_path) == held


def test_runs_with_other_weights_share_no_noise() -> None:
    found = []
    for weights in ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)):
        privacy = Privacy(sigma=1.0, trust="secure-sum")
        found.append(train(FLAT, DPSGD(Clip(1.0)), lr=1.0, rounds=1, seed=0, weights=weights, privacy=privacy).x)
    assert abs(float(torch.corrcoef(torch.stack(found))[0, 1])) < 5 / math.sqrt(40_000)


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ((0.5, 0.5), "one number for each of the 4 clients"),
        ((0.5, 0.5, 0.0, 0.0), "positive"),
        ((0.5, 0.7, -0.1, -0.1), "positive"),
        ((math.nan, 0.5, 0.3, 0.2), "positive"),
        ((1.0, 1.0, 1.0, 1.0), "sum 1, got 4"),
        ("sizes", "choose from equal, records"),
        ([[0.25] * 4], "one number for each"),
        (["a"], "'equal', 'records' or 4 numbers"),
    ],
)
def test_values_that_are_no_weights_are_refused(weights: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        train(problem(), NormEC(0.1, 0.3), lr=0.1, rounds=2, weights=weights)


def test_plain_functions_have_no_records_to_weight_by() -> None:
    with pytest.raises(UsageError, match="plain functions have none"):
        train(FLAT, GD(), lr=0.1, rounds=1, weights="records")


def test_the_theory_s_step_size_is_for_equal_weights() -> None:
    with pytest.raises(UsageError, match="equal weights"):
        train(logistic(0)[1], NormEC(0.1, 0.3), lr="theory", rounds=5, weights=FOUR)


def test_a_private_count_is_no_weight() -> None:
    """Neither by name nor as numbers; declared public, or where single records are protected, it may be."""
    shares = [size / 48 for size in (9, 11, 13, 15)]
    how: dict[str, Any] = {"lr": 0.1, "rounds": 2}
    for weights in ("records", shares):
        with pytest.raises(UsageError, match="public_sizes"):
            train(problem(), NormEC(0.1, 0.3), weights=weights, privacy=Privacy(epsilon=4, trust="local"), **how)  # type: ignore[arg-type]
        declared = train(
            problem(),
            NormEC(0.1, 0.3),
            weights=weights,  # type: ignore[arg-type]
            privacy=Privacy(epsilon=4, trust="local"),
            public_sizes=True,
            **how,
        )
        assert declared.finished
    record = Privacy(epsilon=4, unit="record", record_clip=1.0, trust="local")
    assert train(problem(), DPSGD(Clip(1.0)), weights="records", privacy=record, **how).finished


@pytest.mark.slow
def test_weights_do_not_depend_on_the_engine() -> None:
    found = [
        train(
            problem(),
            NormEC(0.1, 0.3),
            lr=0.1,
            rounds=9,
            weights="records",
            compute=Compute(dtype=torch.float64, engine=engine),
        )
        for engine in ("loop", "shared", "batched")
    ]
    for other in found[1:]:
        torch.testing.assert_close(other.x, found[0].x, rtol=0, atol=1e-12)
