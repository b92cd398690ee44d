"""Local steps, against loops in NumPy written from the formulas, against torch.optim, and in their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import normec
from normec import DPSGD, GD, Clip, FixedSize, LocalSteps, Method, NormEC, Privacy, SmoothedNorm, train
from normec.errors import UsageError
from normec.models import Softmax

from ..support.problems import shifted
from ..support.reference import Logistic, Vector, clip, norm, unit

N, D, ROUNDS = 5, 7, 60
K, LOCAL_LR = 4, 0.05


def difference(f: Logistic, i: int, x: Vector, prox: float = 0.0) -> Vector:
    """x − y^K after K local steps of client i."""
    y = x.copy()
    for _ in range(K):
        y = y - LOCAL_LR * (f.grad(i, y) + prox * (y - x))
    return x - y


def drawn_in(rule: FixedSize | None, k: int) -> list[int]:
    return list(range(N)) if rule is None else rule.draw(N, k, 1).tolist()  # type: ignore[union-attr]


def averaging(tau: float, prox: float, drawn: FixedSize | None) -> Vector:
    """DP-FedAvg and FedProx without noise: x ← x − (1/n) Σ clip_τ(x − y_i^K)."""
    f, x = shifted()[0], np.zeros(D)
    for k in range(ROUNDS):
        x = x - sum((clip(difference(f, i, x, prox), tau) for i in drawn_in(drawn, k)), np.zeros(D)) / N
    return x


def fed_normec(alpha: float, beta: float, gamma: float, drawn: FixedSize | None) -> tuple[Vector, Vector]:
    """Fed-α-NormEC (arXiv 2512.21521): Δ_i = (x − y^K)/η, η = K · lr; x and the memories after all rounds."""
    f, x, g, estimate = shifted()[0], np.zeros(D), np.zeros((N, D)), np.zeros(D)
    for k in range(ROUNDS):
        total = np.zeros(D)
        for i in drawn_in(drawn, k):
            v = difference(f, i, x) / (K * LOCAL_LR) - g[i]
            message = v / (alpha + norm(v))
            g[i] = g[i] + beta * message
            total = total + message
        estimate = estimate + beta / N * total
        x = x - gamma * unit(estimate)
    return x, g


def trained(method: Method, local: LocalSteps | None, alike: bool = False, **how: Any) -> normec.Run:
    rare = normec.Logging(every=ROUNDS, evaluate_every=ROUNDS)
    return train(
        shifted(alike)[1], method, local=local, **{"rounds": ROUNDS, "seed": 1, "lr": 1.0, "logging": rare, **how}
    )


DRAWN = pytest.mark.parametrize(
    "drawn", [pytest.param(None, marks=pytest.mark.slow), FixedSize(2)], ids=["all", "drawn"]
)
PRIVACY = pytest.mark.parametrize("privacy", [None, Privacy(sigma=1e-13, trust="secure-sum")], ids=["plain", "private"])


@pytest.mark.quick_cases(5)
@PRIVACY
@DRAWN
@pytest.mark.parametrize("prox", [0.0, 0.7], ids=["fedavg", "fedprox"])
def test_federated_averaging_follows_the_formula(prox: float, drawn: FixedSize | None, privacy: Privacy | None) -> None:
    local = LocalSteps(steps=K, lr=LOCAL_LR, prox=prox, scale="difference")
    run = trained(DPSGD(Clip(0.1)), local, participation=drawn, privacy=privacy)
    np.testing.assert_allclose(run.x.numpy(), averaging(0.1, prox, drawn), rtol=0, atol=1e-10)


@pytest.mark.quick_cases(3)
@PRIVACY
@DRAWN
def test_fed_normec_follows_the_formula(drawn: FixedSize | None, privacy: Privacy | None) -> None:
    local = LocalSteps(steps=K, lr=LOCAL_LR)
    run = trained(NormEC(0.1, 0.3), local, lr=0.01, participation=drawn, privacy=privacy)
    x, memory = fed_normec(0.1, 0.3, 0.01, drawn)
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.state.memory.numpy(), memory, rtol=0, atol=1e-10)


@pytest.mark.quick_cases(4)
@DRAWN
@pytest.mark.parametrize("local", [LocalSteps(steps=1, lr=0.3), LocalSteps(epochs=1, lr=0.3)], ids=["step", "epoch"])
def test_one_local_step_is_the_gradient_method(local: LocalSteps, drawn: FixedSize | None) -> None:
    for method in (NormEC(0.1, 0.3, server_norm=False), DPSGD(SmoothedNorm(0.1))):
        one, plain = (trained(method, work, lr=0.01, participation=drawn, rounds=50) for work in (local, None))
        torch.testing.assert_close(one.x, plain.x, rtol=1e-12, atol=1e-12)
        assert one.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-12)


def test_the_batch_size_of_local_steps_is_that_of_the_run() -> None:
    draw = torch.Generator().manual_seed(0)
    data = [
        TensorDataset(torch.randn(size, 3, generator=draw), torch.randint(0, 2, (size,), generator=draw))
        for size in (9, 12, 7)
    ]
    problem = normec.Problem(Softmax(3, 2), torch.nn.functional.cross_entropy, data)

    def found(own: int | None, of_run: int | None) -> torch.Tensor:
        local = LocalSteps(steps=3, lr=0.2, batch_size=own)
        return train(problem, DPSGD(Clip(0.5)), local=local, batch_size=of_run, lr=1.0, rounds=4, seed=2).x

    assert torch.equal(found(4, None), found(None, 4))
    assert torch.equal(found(4, 4), found(None, 4))
    assert not torch.equal(found(4, None), found(None, None))
    with pytest.raises(UsageError, match="batch_size is 5 and 4 for local steps"):
        found(4, 5)


@pytest.mark.slow
def test_a_proximal_term_of_weight_zero_changes_nothing() -> None:
    plain, zero = (LocalSteps(steps=K, lr=LOCAL_LR, **more) for more in ({}, {"prox": 0.0}))
    assert torch.equal(trained(NormEC(0.1, 0.3), plain, rounds=5).x, trained(NormEC(0.1, 0.3), zero, rounds=5).x)
    strong = trained(GD(), LocalSteps(steps=K, lr=LOCAL_LR, prox=2.0, scale="difference"), rounds=1)
    weak = trained(GD(), LocalSteps(steps=K, lr=LOCAL_LR, scale="difference"), rounds=1)
    assert strong.x.norm() < weak.x.norm()


@pytest.mark.slow
def test_clients_that_are_alike_make_the_steps_of_one_client() -> None:
    """With identical clients federated averaging is gradient descent with K times as many steps."""
    averaged = trained(GD(), LocalSteps(steps=K, lr=LOCAL_LR, scale="difference"), alike=True, rounds=20)
    alone = trained(GD(), None, alike=True, rounds=20 * K, lr=LOCAL_LR)
    torch.testing.assert_close(averaged.x, alone.x, rtol=1e-12, atol=1e-12)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("local", "make"),
    [
        ({}, lambda y: torch.optim.SGD([y], lr=LOCAL_LR)),
        ({"momentum": 0.8}, lambda y: torch.optim.SGD([y], lr=LOCAL_LR, momentum=0.8)),
        ({"optimizer": "adam"}, lambda y: torch.optim.Adam([y], lr=LOCAL_LR)),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_local_optimizers_are_those_of_torch_and_fresh_in_every_round(local: dict[str, Any], make: Any) -> None:
    f, x = shifted()[1], torch.zeros(D, dtype=torch.float64)
    for _ in range(5):
        total = torch.zeros(D, dtype=torch.float64)
        for function in f.functions:
            y = x.clone().requires_grad_()
            optimizer = make(y)
            for _ in range(K):
                optimizer.zero_grad()
                (function(y) + 0.35 * (y - x).square().sum()).backward()
                optimizer.step()
            total += (x - y.detach()) / N
        x = x - total
    run = trained(GD(), LocalSteps(steps=K, lr=LOCAL_LR, prox=0.7, scale="difference", **local), rounds=5)
    torch.testing.assert_close(run.x, x, rtol=1e-11, atol=1e-11)


def test_the_history_measures_losses_and_gradients_at_x() -> None:
    f, _ = shifted()
    run = trained(NormEC(0.1, 0.3), LocalSteps(steps=K, lr=LOCAL_LR), rounds=3, logging=normec.Logging(every=1))
    x = np.zeros(D)
    gradients = np.array([f.grad(i, x) for i in range(N)])
    row = run.history.rows[0]
    assert row["loss"] == pytest.approx(np.mean([f.loss(i, x) for i in range(N)]))
    assert row["grad_norm"] == pytest.approx(norm(gradients.mean(0)))
    updates = [difference(f, i, x) / (K * LOCAL_LR) for i in range(N)]
    assert row["memory_error"] == pytest.approx(np.mean([norm(u) for u in updates]))
    last = run.x.numpy()
    assert run.clients["gradient norm"] == pytest.approx([norm(f.grad(i, last)) for i in range(N)])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("trust", ["local", "secure-sum"])
def test_epsilon_is_that_of_the_gradient_method(trust: Any) -> None:
    privacy = Privacy(epsilon=3.0, trust=trust)
    plain, local = (
        trained(NormEC(0.1, 0.3), work, rounds=10, lr=0.01, privacy=privacy)
        for work in (None, LocalSteps(epochs=3, lr=0.1))
    )
    assert plain.privacy is not None
    assert local.privacy is not None
    assert (local.privacy.epsilon, local.privacy.sigma) == (plain.privacy.epsilon, plain.privacy.sigma)
    assert local.privacy.epsilon == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"privacy": Privacy(epsilon=1, unit="record", trust="local")}, "local steps have no rule at record level"),
        ({"rounds": None, "epochs": 2}, "with local steps give rounds"),
        ({"lr": "theory"}, "full gradients"),
        ({"local": {"steps": 3}}, "local must be a normec.LocalSteps"),
    ],
)
def test_what_local_steps_cannot_do_is_refused(how: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        trained(NormEC(0.1, 0.3), **{"local": LocalSteps(steps=2, lr=0.1), **how})


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"lr": 0.1}, "give local steps or epochs"),
        ({"lr": 0.1, "steps": 1, "epochs": 1}, "give local steps or epochs"),
        ({"lr": 0.0, "steps": 1}, "local_lr must be > 0"),
        ({"lr": 0.1, "steps": 0}, "local_steps must be a whole number >= 1"),
        ({"lr": 0.1, "steps": 1, "prox": -1.0}, "prox must be >= 0"),
        ({"lr": 0.1, "steps": 1, "momentum": 1.0}, "local_momentum must lie in"),
        ({"lr": 0.1, "steps": 1, "momentum": 0.5, "optimizer": "adam"}, "local_momentum is for sgd"),
        ({"lr": 0.1, "steps": 1, "optimizer": "adm"}, "did you mean 'adam'"),
        ({"lr": 0.1, "steps": 1, "scale": "sum"}, "unknown local_scale"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        LocalSteps(**settings)
