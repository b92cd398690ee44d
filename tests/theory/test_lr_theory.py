"""lr="theory": the step size the theory would take, used by `train`, kept by its promise, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normec import DPSGD, Clip, Clip21SGD2M, Logging, Memory, NormEC, Poisson, Privacy, train
from normec import theory as th
from normec.errors import UsageError
from normec.experiments import build
from normec.problems.problem import Problem
from normec.settings import make


def problem() -> Problem:
    settings = make({"clients": 8, "split": "label", "penalty": 0.001, "private": False})
    return build.problem(settings).to(torch.device("cpu"), torch.float64)


def test_train_takes_the_step_size_of_the_theory_and_the_theorem_holds() -> None:
    method, rounds = NormEC(2.0, 2.0), 60
    run = train(
        problem(), method, lr="theory", rounds=rounds, memory=Memory(initial="gradient"), logging=Logging(every=1)
    )
    gamma = th.step_size(problem(), method, rounds, warmup=0, start="gradient")
    same = train(
        problem(), method, lr=gamma, rounds=rounds, memory=Memory(initial="gradient"), logging=Logging(every=1)
    )
    assert torch.equal(run.x, same.x)
    constants = th.constants_of(problem())
    # With the first gradients as memories any R > 0 will do; take the one for which γ is the largest allowed.
    R = gamma * constants.L_max * method.alpha / (method.beta - gamma * constants.L_max)  # type: ignore[attr-defined]
    bound = th.theorem1(
        L=constants.L,
        L_max=constants.L_max,
        R=R * (1 + 1e-9),
        alpha=2.0,
        beta=2.0,
        gamma=gamma,
        rounds=rounds,
        F0=constants.F0,
    )
    assert min(run.history["grad_norm"]) <= bound


def test_clip21_sgd2m_takes_the_step_size_with_the_best_bound_and_keeps_it() -> None:
    method, rounds = Clip21SGD2M(tau=1.0, beta=0.8, client_momentum=0.5), 60
    run = train(problem(), method, lr="theory", rounds=rounds, logging=Logging(every=1))
    gamma = th.step_size(problem(), method, rounds)
    assert torch.equal(run.x, train(problem(), method, lr=gamma, rounds=rounds).x)
    constants = th.constants_of(problem())

    def bound(size: float) -> float:
        return float(
            th.clip21_sgd2m(
                L=constants.L,
                L_max=constants.L_max,
                F0=constants.F0,
                tau=1.0,
                beta=0.8,
                client_momentum=0.5,
                gamma=size,
                rounds=rounds,
                average_error=constants.grad_max,
            )
        )

    assert min(run.history["grad_norm"]) <= bound(gamma) < min(bound(gamma / 2), bound(2 * gamma))


@pytest.mark.parametrize("p", [0.0, 1e-6])
def test_clip21_sgd2m_over_many_rounds_takes_no_step_size_without_a_bound(p: float) -> None:
    """Larger step sizes have a bound that outgrows all numbers; without momentum, too."""
    clients = [lambda x: (x**2).sum(), lambda x: 3 * ((x - 2) ** 2).sum()]
    steep = Problem.from_functions(clients, torch.ones(3, dtype=torch.float64))
    sizes = [th.step_size(steep, Clip21SGD2M(0.01, 0.3, p), rounds, lower=0.0) for rounds in (50, 500)]
    assert sizes[1] < sizes[0] < 0.002


def saddle(L_max: float) -> Problem:
    """Two clients that nearly cancel: f = ½x² with L = 1."""
    clients = [lambda x: L_max / 2 * (x**2).sum(), lambda x: (2 - L_max) / 2 * (x**2).sum()]
    return Problem.from_functions(clients, torch.ones(1, dtype=torch.float64))


@pytest.mark.slow
def test_clip21_sgd2m_is_refused_where_no_step_size_has_a_finite_bound() -> None:
    message = (
        r"no step size from 7.86e-06 to 1/L = 1 has a finite bound for clip21-sgd2m with tau = 0.001, beta = 1 and "
        r"client_momentum = 0.9 over 5000 rounds.*take a larger tau or fewer rounds, or give lr as a number"
    )
    with pytest.raises(UsageError, match=message):
        th.step_size(saddle(1e4), Clip21SGD2M(1e-3, 1.0, 0.9), 5000, lower=0.0)
    for tau, rounds in ((1e5, 5000), (1e-3, 50)):
        assert 1e-6 < th.step_size(saddle(1e4), Clip21SGD2M(tau, 1.0, 0.9), rounds, lower=0.0) < 1e-4


def test_clip21_sgd2m_finds_step_sizes_far_below_the_limit() -> None:
    gamma = th.clip21_sgd2m_gamma(L=1.0, L_max=1e7, beta=1.0, client_momentum=0.9)
    assert gamma < 1e-8
    assert th.step_size(saddle(1e7), Clip21SGD2M(1e8, 1.0, 0.9), 5000, lower=0.0) == pytest.approx(gamma, rel=0.5)


@pytest.mark.parametrize("setting", [{"decay": 0.1}, {"beta": 1.5}])
def test_clip21_sgd2m_is_refused_where_the_theorem_does_not_hold(setting: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="clip21-sgd2m with beta at most 1 and without decay, noise and warm-up"):
        th.step_size(problem(), Clip21SGD2M(tau=1.0, **setting), 10)
    with pytest.raises(UsageError, match="without decay, noise and warm-up"):
        th.step_size(problem(), Clip21SGD2M(tau=1.0), 10, warmup=2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batches": ({"batch_size": 8}, "full gradients"),
    "sampling": ({"participation": Poisson(0.5)}, "full gradients"),
    "privacy": ({"privacy": Privacy(epsilon=8, trust="local")}, "without noise"),
    "given memory": ({"memory": Memory(initial=torch.zeros(650))}, "initial_memory"),
    "another word": ({"lr": "fast"}, "lr must be a number.*got the text 'fast'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_no_theorem_covers_are_refused(case: str) -> None:
    options, reason = REFUSED[case]
    with pytest.raises(UsageError, match=reason):
        train(problem(), NormEC(1.0, 1.0), **{"lr": "theory", "rounds": 5, **options})


def test_methods_without_a_theorem_are_refused() -> None:
    with pytest.raises(UsageError, match="dpsgd"):
        train(problem(), DPSGD(Clip(1.0)), lr="theory", rounds=5)
