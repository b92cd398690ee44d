"""Every method, round by round, against the NumPy reference: quadratics and logistic regression, 100 rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from normec import (
    DPSGD,
    EF21,
    GD,
    Clip,
    Clip21,
    ErrorFeedback,
    Identity,
    Logging,
    NormEC,
    RandK,
    Run,
    SmoothedNorm,
    TopK,
    train,
)

from ..support import reference
from ..support.problems import PROBLEMS, quadratics
from ..support.reference import Logistic, Quadratics, Seen

ROUNDS = 50
SEED = 11


def rand_k(v: np.ndarray, client: int, round: int) -> np.ndarray:
    scores = reference.uniforms(SEED, "operator", client, round, len(v))
    kept = sorted(range(len(v)), key=lambda j: -scores[j])[:2]
    return np.array([v[j] if j in kept else 0.0 for j in range(len(v))])


def feedback(psi, **options):  # type: ignore[no-untyped-def]
    return lambda f, x, lr: reference.error_feedback(f, x, lr, ROUNDS, psi, **options)


def direct(psi, **options):  # type: ignore[no-untyped-def]
    return lambda f, x, lr: reference.dpsgd(f, x, lr, ROUNDS, psi, **options)


def normec(*options):  # type: ignore[no-untyped-def]
    return lambda f, x, lr: reference.normec(f, x, lr, ROUNDS, *options)


METHODS = {
    "normec": (NormEC(0.5, 0.4), 0.02, normec(0.5, 0.4, True)),
    "normec-alpha-0": (NormEC(0.0, 0.05), 0.02, normec(0.0, 0.05, True)),
    "normec-no-server-norm": (NormEC(0.1, 0.3, server_norm=False), 0.1, normec(0.1, 0.3, False)),
    "normec-decay": (NormEC(1.0, 0.5, decay=0.1), 0.02, normec(1.0, 0.5, True, 0.1)),
    "normec-decay-no-server-norm": (NormEC(1.0, 0.5, False, 0.02), 0.1, normec(1.0, 0.5, False, 0.02)),
    "clip21": (Clip21(0.3), 0.1, feedback(lambda v, *_: reference.clip(v, 0.3))),
    "clip21-decay": (Clip21(0.6, decay=0.05), 0.1, feedback(lambda v, *_: reference.clip(v, 0.6), decay=0.05)),
    "ef21-top-k": (EF21(TopK(2)), 0.05, feedback(lambda v, *_: reference.largest(v, 2))),
    "ef21-rand-k": (EF21(RandK(2)), 0.05, feedback(rand_k)),
    "dpsgd-clip": (DPSGD(Clip(0.8)), 0.1, direct(lambda v: reference.clip(v, 0.8))),
    "dpsgd-norm": (DPSGD(SmoothedNorm(0.1), beta=0.7), 0.1, direct(lambda v: 0.7 * v / (0.1 + reference.norm(v)))),
    "dpsgd-momentum": (DPSGD(Clip(0.8), momentum=0.9), 0.02, direct(lambda v: reference.clip(v, 0.8), momentum=0.9)),
    "gd": (GD(), 0.1, direct(lambda v: v)),
}


def compare(run: Run, f: Quadratics | Logistic, seen: Seen) -> None:
    """Every row of history against the path, and the last state against the reference's."""
    n = len(f)
    rows = list(run.history)
    assert [row["round"] for row in rows] == list(range(ROUNDS + 1))
    for row, x in zip(rows, seen.path, strict=True):
        gradient = sum(f.grad(i, x) for i in range(n)) / n
        assert row["loss"] == pytest.approx(sum(f.loss(i, x) for i in range(n)) / n, abs=1e-10)
        assert row["grad_norm"] == pytest.approx(reference.norm(gradient), abs=1e-10)
    close(run.x, seen.path[-1])
    if seen.memory is None:
        assert run.history["memory_error"] == []
        return
    assert seen.estimate is not None
    close(run.state.memory, seen.memory)
    close(run.state.estimate, seen.estimate)
    assert run.history["memory_error"][:-1] == pytest.approx(seen.errors, abs=1e-10)


def close(here: Tensor, there: np.ndarray) -> None:
    assert here.dtype == torch.float64
    assert float(np.abs(here.numpy() - there).max()) <= 1e-10


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize(
    ("problem", "seed"), [("quadratics", 0), ("quadratics", 1), pytest.param("logistic", 0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", METHODS)
def test_the_path_is_the_reference_s(name: str, problem: str, seed: int) -> None:
    method, lr, run_reference = METHODS[name]
    f, objective = PROBLEMS[problem](seed)
    run = train(objective, method, lr=lr, rounds=ROUNDS, seed=SEED, logging=Logging(every=1))
    seen = run_reference(f, objective.x0.numpy().copy(), lr)
    assert np.linalg.norm(seen.path[-1] - seen.path[0]) > 0.1  # it went somewhere
    compare(run, f, seen)


def test_a_method_built_by_hand_is_the_same_point_of_the_scheme() -> None:
    _, problem = quadratics(0)
    by_hand = ErrorFeedback(SmoothedNorm(0.5), 0.4, server_norm=True, decay=0.1)
    here = train(problem, by_hand, lr=0.02, rounds=30).x
    assert torch.equal(here, train(problem, NormEC(0.5, 0.4, decay=0.1), lr=0.02, rounds=30).x)
    assert not torch.equal(here, train(problem, NormEC(0.5, 0.4), lr=0.02, rounds=30).x)


def test_momentum_is_pytorch_s() -> None:
    """With step sizes that change: they are no part of what is carried on. None in the first three rounds."""
    f, problem = PROBLEMS["logistic"](0)
    method = DPSGD(Identity(), momentum=0.9)
    run = train(problem, method, lr=lambda k: 0.1 / (1 + k), rounds=40, warmup=3)
    x = problem.x0.clone()
    optimizer = torch.optim.SGD([x], lr=0.0, momentum=0.9)
    for k in range(40):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + k) if k >= 3 else 0.0
        x.grad = torch.from_numpy(sum(f.grad(i, x.numpy()) for i in range(len(f))) / len(f))
        optimizer.step()
    assert torch.allclose(run.x, x, rtol=0, atol=1e-12)
