"""Client momentum, against loops in NumPy written from the formulas, and against the methods it reduces to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import normec
from normec import EF21, EF21SGDM, Clip21, Clip21SGD2M, FixedSize, Method, MomentumNormEC, NormEC, Privacy, TopK, train
from normec.algorithms.registry import build, name_of, works_by_rows
from normec.errors import UsageError
from normec.privacy.mechanism import facts_of
from normec.problems.functions import FunctionProblem

from ..support.problems import shifted
from ..support.reference import Vector, clip, largest, norm, unit
from ..support.runs import InterruptAt

N, D, ROUNDS = 5, 7, 60
LR, P = 0.01, 0.8
CASES: dict[str, tuple[Method, dict[str, Any]]] = {
    "normec": (MomentumNormEC(0.1, 0.3, P), {"psi": lambda v: v / (0.1 + norm(v)), "beta": 0.3, "sn": True}),
    "normec, decay": (
        MomentumNormEC(0.1, 0.3, P, server_norm=False, decay=0.1),
        {"psi": lambda v: v / (0.1 + norm(v)), "beta": 0.3, "decay": 0.1},
    ),
    "clip21-sgd2m": (Clip21SGD2M(0.05, 0.4, P), {"psi": lambda v: clip(v, 0.05), "beta": 0.4}),
    "ef21-sgdm": (EF21SGDM(TopK(2), P), {"psi": lambda v: largest(v, 2)}),
    "ef21-sgdm, normalised": (EF21SGDM(TopK(2), P, server_norm=True), {"psi": lambda v: largest(v, 2), "sn": True}),
}


def problem() -> FunctionProblem:
    return shifted()[1]


def by_hand(
    psi: Any, drawn: FixedSize | None, beta: float = 1.0, sn: bool = False, decay: float = 0.0, start: str = "zero"
) -> tuple[Vector, Vector, Vector]:
    """x, the averages v_i and the memories g_i after all rounds."""
    f, x = shifted()[0], np.zeros(D)
    v, g = np.zeros((N, D)), np.zeros((N, D))
    if start == "gradient":
        v = np.array([f.grad(i, x) for i in range(N)])
        g = v.copy()
    estimate = g.mean(0)
    for k in range(ROUNDS):
        chosen = range(N) if drawn is None else drawn.draw(N, k, 1).tolist()  # type: ignore[union-attr]
        total, gradients = np.zeros(D), [f.grad(i, x) for i in range(N)]
        for i in range(N):
            message = np.zeros(D)
            if i in chosen:
                v[i] = P * v[i] + (1 - P) * gradients[i]
                message = psi(v[i] - g[i])
            g[i] = (1 - decay) * g[i] + beta * message
            total += message
        estimate = (1 - decay) * estimate + beta * total / N
        x = x - LR * (unit(estimate) if sn else estimate)
    return x, v, g


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("privacy", [None, Privacy(sigma=1e-13, trust="secure-sum")], ids=["plain", "private"])
@pytest.mark.parametrize("drawn", [pytest.param(None, marks=pytest.mark.slow), FixedSize(2)], ids=["all", "drawn"])
@pytest.mark.parametrize("name", CASES)
def test_it_follows_the_formula(name: str, drawn: FixedSize | None, privacy: Privacy | None) -> None:
    method, formula = CASES[name]
    if privacy is not None and name.startswith("ef21"):
        with pytest.raises(UsageError, match="without a bound"):
            train(problem(), method, lr=LR, rounds=2, privacy=privacy)
        return
    run = train(problem(), method, lr=LR, rounds=ROUNDS, seed=1, participation=drawn, privacy=privacy)
    x, v, g = by_hand(drawn=drawn, **formula)
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.state.clients["momentum"].numpy(), v, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.state.memory.numpy(), g, rtol=0, atol=1e-10)
    assert torch.allclose(run.state.estimate, run.state.memory.mean(0), rtol=0, atol=1e-11)


def test_averages_and_memories_start_from_the_first_gradients() -> None:
    method, formula = CASES["clip21-sgd2m"]
    run = train(problem(), method, lr=LR, rounds=ROUNDS, seed=1, memory=normec.Memory(initial="gradient"))
    x, v, _ = by_hand(drawn=None, start="gradient", **formula)
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.state.clients["momentum"].numpy(), v, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (MomentumNormEC(0.1, 0.3, 0.0, decay=0.1), NormEC(0.1, 0.3, decay=0.1)),
        (Clip21SGD2M(0.05, client_momentum=0.0), Clip21(0.05)),
        (EF21SGDM(TopK(2), 0.0), EF21(TopK(2))),
    ],
)
def test_without_momentum_it_is_the_plain_method(method: Method, plain: Method) -> None:
    options: dict[str, Any] = {"lr": LR, "rounds": 50, "seed": 1, "participation": FixedSize(3)}
    assert torch.allclose(
        train(problem(), method, **options).x, train(problem(), plain, **options).x, rtol=0, atol=1e-12
    )


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": LR, "rounds": 15, "seed": 1, "participation": FixedSize(2)}
    options |= {"storage": normec.Storage(checkpoint_seconds=0.0), "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        train(problem(), CASES[name][0], callbacks=[InterruptAt(7)], **options)
    run = train(problem(), CASES[name][0], **options)
    whole = train(problem(), CASES[name][0], **{**options, "out": None})
    assert torch.equal(run.x, whole.x)
    assert all(torch.equal(table, whole.state.clients[key]) for key, table in run.state.clients.items())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", CASES)
def test_its_account_is_that_of_its_bound(name: str) -> None:
    method, _ = CASES[name]
    facts = facts_of(method, D)
    assert facts.bound == method.bound
    assert not np.isfinite(facts.lipschitz)  # no gain for records: the average remembers them too
    assert not facts.made_of_messages
    assert works_by_rows(method) or name.startswith("ef21")
    assert build(name_of(method), method.spec()) == method
    if np.isfinite(method.bound):
        privacy = Privacy(epsilon=4, trust="secure-sum")
        plain = Clip21(0.05) if "clip" in name else NormEC(0.1, 0.3)
        spent = [train(problem(), one, lr=LR, rounds=9, seed=1, privacy=privacy).privacy for one in (method, plain)]
        assert spent[0] is not None
        assert spent[1] is not None
        assert spent[0].epsilon == spent[1].epsilon
        private = Privacy(epsilon=4, unit="record", record_clip=1.0, memory="noisy", trust="local")
        with pytest.raises(UsageError, match="no gain"):
            train(records(), method, lr=LR, rounds=9, seed=1, batch_rate=0.5, privacy=private)


def records() -> Any:
    f, _ = shifted()
    clients = [TensorDataset(torch.from_numpy(f.a[i]), (torch.from_numpy(f.y[i]) > 0).double()) for i in range(N)]
    model = torch.nn.Sequential(torch.nn.Linear(D, 1, dtype=torch.float64), torch.nn.Flatten(0))
    return normec.Problem(model, torch.nn.BCEWithLogitsLoss(), clients)


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_momentum_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match=r"client_momentum must lie in \[0, 1\)"):
        MomentumNormEC(0.1, 0.3, value)
