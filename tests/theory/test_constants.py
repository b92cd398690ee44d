"""L_i, L and B against Hessians and gradients computed by autograd at random points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import EF21, GD, Clip21, Logging, Memory, NormEC, Problem, TopK, UsageError, models, theory, train


def linear(name: str, penalty: float, clients: int = 3, records: int = 30, features: int = 4) -> Problem:
    draw = torch.Generator().manual_seed(1)
    classes = 2 if name == "logistic" else 3
    built = models.build(name, (features,), classes)
    sets = [
        TensorDataset(
            torch.randn(records, features, generator=draw) * (i + 1),
            torch.randint(classes, (records,), generator=draw),
        )
        for i in range(clients)
    ]
    return Problem(built.model, built.loss, sets, penalty=models.NonconvexPenalty(penalty) if penalty else None)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["logistic", "softmax"])
@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("records", [30, 2])
def test_closed_forms_bound_every_hessian_and_are_not_far_above(name: str, penalty: float, records: int) -> None:
    problem = linear(name, penalty, records=records)
    found = theory.constants_of(problem)
    assert not found.estimated
    assert found.L_i.mean() * (1 + 1e-9) >= found.L
    double = problem.to(torch.device("cpu"), torch.float64)
    largest = np.zeros(4)
    for point in range(6):
        x = (
            torch.zeros_like(double.x0)
            if point == 0
            else torch.randn(len(double.x0), dtype=torch.float64) * 0.3 * point
        )
        hessians, grads = [], []
        for client in range(3):

            def loss(v: torch.Tensor, client: int = client) -> torch.Tensor:
                return double.client_loss(v, client, None, {}, None)

            hessians.append(torch.autograd.functional.hessian(loss, x))
            grads.append(torch.autograd.functional.jacobian(loss, x))
        sizes = [float(torch.linalg.eigvalsh(h).abs().max()) for h in (*hessians, sum(hessians) / 3)]
        largest = np.maximum(largest, sizes)
        assert (np.array(sizes) <= np.array([*found.L_i, found.L]) * (1 + 1e-9)).all()
        assert max(float(g.norm()) for g in grads) <= found.grad_bound
        if point == 0:
            assert found.grad_max == pytest.approx(max(float(g.norm()) for g in grads), rel=1e-6)
            assert found.grad0 == pytest.approx(float((sum(grads) / 3).norm()), rel=1e-6)
    if name == "logistic":  # at x = 0 every slope of the sigmoid is 1/4: tight
        assert largest == pytest.approx([*found.L_i, found.L], rel=1e-6)
    else:
        assert (np.array([*found.L_i, found.L]) < 2 * largest).all()


def test_quadratics_are_exact() -> None:
    rng = np.random.default_rng(0)
    half = rng.normal(size=(4, 5, 5))
    H, c, x0 = half @ half.transpose(0, 2, 1), rng.normal(size=(4, 5)), rng.normal(size=5)
    found = theory.quadratic_constants(H, c, x0)

    def f(x: np.ndarray) -> float:  # type: ignore[type-arg]
        return float(np.mean([0.5 * (x - c[i]) @ H[i] @ (x - c[i]) for i in range(4)]))

    best = np.linalg.solve(H.mean(0), np.mean([H[i] @ c[i] for i in range(4)], axis=0))
    assert pytest.approx(f(x0) - f(best)) == found.F0
    assert found.L_max == pytest.approx(max(np.linalg.norm(h, 2) for h in H))
    assert pytest.approx(np.linalg.norm(H.mean(0), 2)) == found.L
    with pytest.raises(UsageError, match="mean H must be positive definite"):
        theory.quadratic_constants(-H, c, x0)
    with pytest.raises(UsageError, match=r"H must be \[n, d, d\]"):
        theory.quadratic_constants(H[0], c, x0)


def test_networks_are_estimated_and_say_so() -> None:
    draw = torch.Generator().manual_seed(0)
    built = models.build("mlp", (3,), 2, hidden=4)
    sets = [
        TensorDataset(torch.randn(20, 3, generator=draw), torch.randint(2, (20,), generator=draw)) for _ in range(2)
    ]
    problem = Problem(built.model, built.loss, sets)
    found = theory.constants_of(problem, iterations=300)
    assert found.estimated
    double = problem.to(torch.device("cpu"), torch.float64)
    for client in range(2):
        hessian = torch.autograd.functional.hessian(
            lambda v, client=client: double.client_loss(v, client, None, {}, None), double.x0
        )
        assert found.L_i[client] == pytest.approx(float(torch.linalg.eigvalsh(hessian).abs().max()), rel=1e-2)
    assert "estimate, no guarantee" in theory.propose(found, 100_000).verdict()


def test_functions_need_a_lower_bound() -> None:
    problem = Problem.from_functions([lambda x: (x**2).sum(), lambda x: 3 * ((x - 1) ** 2).sum()], torch.ones(3))
    with pytest.raises(UsageError, match="lower must be given"):
        theory.constants_of(problem)
    found = theory.constants_of(problem, lower=0.0)
    assert found.L_i.tolist() == pytest.approx([2, 6])
    assert pytest.approx(4) == found.L
    with pytest.raises(UsageError, match="lower must be at most"):
        theory.constants_of(problem, lower=100.0)


def test_another_loss_or_penalty_is_not_taken_for_a_known_one() -> None:
    problem = linear("softmax", 0.0)
    problem.penalty = lambda x: 100 * (x**2).sum()
    assert theory.constants_of(problem).estimated
    assert theory.constants_of(problem).L_max > 199
    problem.loss = lambda a, b: F.cross_entropy(a, b) - 5
    with pytest.raises(UsageError, match="lower must be given"):
        theory.constants_of(problem)


@pytest.mark.slow
def test_a_plan_keeps_its_promise_in_training() -> None:
    problem = linear("logistic", 0.1).to(torch.device("cpu"), torch.float64)
    c = theory.constants_of(problem)
    plan = theory.propose(c, 1000)
    assert plan.useful
    assert plan.promise < 1.1 * theory.gradient_descent(L=c.L, F0=c.F0, rounds=1000)
    run = train(
        problem,
        NormEC(plan.alpha, plan.beta),
        lr=plan.gamma,
        rounds=1000,
        memory=Memory(initial="gradient"),
        logging=Logging(every=1),
    )
    assert min(run.history["grad_norm"][:-1]) <= plan.promise


def test_a_private_plan_says_when_it_is_empty_and_when_not() -> None:
    c = theory.constants_of(linear("logistic", 0.1))
    empty = theory.propose(c, 100, 5.0)
    assert not empty.useful
    assert "The promise is empty" in empty.verdict()
    quiet = theory.propose(c, 1000, 1e-4)
    assert quiet.useful
    assert "Guaranteed" in quiet.verdict()
    fixed = theory.propose(c, 1000, 1e-4, alpha=0.5, beta=0.25, decay=0.0)
    assert (fixed.alpha, fixed.beta, fixed.decay) == (0.5, 0.25, 0.0)
    assert quiet.promise <= fixed.promise * 1.05


def test_step_sizes_by_theory() -> None:
    problem = linear("logistic", 0.1)
    c = theory.constants_of(problem)
    assert theory.step_size(problem, GD(), 10) == pytest.approx(1 / c.L)
    assert theory.step_size(problem, EF21(TopK(2)), 10) == pytest.approx(
        theory.ef21_gamma(L=c.L, L_tilde=c.L_tilde, contraction=0.5)
    )
    gamma = theory.step_size(problem, NormEC(1.0, 1.0), 500, start="gradient")
    run = train(
        problem, NormEC(1.0, 1.0), lr=gamma, rounds=500, memory=Memory(initial="gradient"), logging=Logging(every=1)
    )
    bound = theory.theorem1(
        L=c.L, L_max=c.L_max, R=0.0, alpha=1.0, beta=1.0, gamma=gamma, rounds=500, F0=c.F0, form="tracked"
    )
    assert min(run.history["grad_norm"][:-1]) <= bound < c.grad0
    for method in (Clip21(0.1), NormEC(0.1, 0.1, server_norm=False)):
        with pytest.raises(UsageError, match="no theorem gives a step size"):
            theory.step_size(problem, method, 10)
    with pytest.raises(UsageError, match="warmup must be below the 10 rounds, got 10"):
        theory.step_size(problem, GD(), 10, warmup=10)


def test_ef21s_bound_holds() -> None:
    problem = linear("logistic", 0.1).to(torch.device("cpu"), torch.float64)
    c = theory.constants_of(problem)
    gamma = theory.ef21_gamma(L=c.L, L_tilde=c.L_tilde, contraction=0.5)
    run = train(problem, EF21(TopK(2)), lr=gamma, rounds=200, logging=Logging(every=1))
    bound = theory.ef21(F0=c.F0, gamma=gamma, rounds=200, contraction=0.5, start_error=c.grad_max)
    assert (
        min(run.history["grad_norm"][:-1])
        <= bound
        < theory.ef21(F0=c.F0, gamma=gamma, rounds=100, contraction=0.5, start_error=c.grad_max)
    )
    tau = theory.clip21_tau(L=c.L, L_max=c.L_max, F0=c.F0)
    quoted = theory.clip21(L=c.L, L_max=c.L_max, F0=c.F0, tau=tau, grad_max=c.grad_max, rounds=100)
    assert quoted > theory.gradient_descent(L=c.L, F0=c.F0, rounds=100)
