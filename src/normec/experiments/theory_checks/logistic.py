"""The checks on logistic regression with the non-convex penalty, with `train`, for 20 clients sorted by label."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ... import theory
from ...algorithms.error_feedback import EF21, Clip21, NormEC
from ...algorithms.method import Method
from ...algorithms.operators import TopK
from ...errors import Diverged, UsageError
from ...privacy import Privacy
from ...problems.problem import Problem
from ...settings.validation import make
from ...training.options import Logging, Memory
from ...training.train import train
from .. import build

if TYPE_CHECKING:
    from .checks import Scale, Series, Verification

CLIENTS, PENALTY, SIGMA = 20, 0.1, 0.02


def available(sets: Sequence[str], data_dir: str | None, found: Verification) -> list[str]:
    """Return the data sets whose files are available; the others are listed at the end of the table."""
    there = []
    for name in sets:
        try:
            _load(name, data_dir)
            there.append(name)
        except UsageError as error:
            found.notes.append(f"Left out: {name} ({error}).")
    return there


@cache
def _load(name: str, data_dir: str | None) -> tuple[Problem, theory.Constants]:
    settings: dict[str, Any] = {
        "data": name,
        "model": "logistic",
        "clients": CLIENTS,
        "split": "label",
        "penalty": PENALTY,
    }
    if data_dir is not None:
        settings["data_dir"] = data_dir
    problem = build.problem(make(settings))
    problem.test = None
    return problem, theory.constants_of(problem)


def bounds(name: str, data_dir: str | None, size: Scale, found: Verification) -> Series:
    """Compare measurements with bounds over horizons: as planned, with γ_max and R* of Theorem 1, and with noise."""
    problem, c = _load(name, data_dir)
    horizons = [float(rounds) for rounds in size.real_horizons]
    keys = (
        "start",
        "planned, measured",
        "planned, promised",
        "Theorem 1, measured",
        "Theorem 1",
        "noise, measured",
        "noise, promised",
    )
    lines: dict[str, list[float]] = {key: [] for key in keys}
    for rounds in size.real_horizons:
        lines["start"].append(c.grad0)
        plan = theory.propose(c, rounds)
        run = _smallest(problem, NormEC(plan.alpha, plan.beta), plan.gamma, rounds)
        lines["planned, measured"].append(run)
        lines["planned, promised"].append(plan.promise)
        found.add(name, "planned", rounds, run, plan.promise)
        alpha = beta = 1.0
        R = max(theory.best_R(L_max=c.L_max, alpha=alpha, beta=beta, rounds=rounds, F0=c.F0), 1e-3)
        gamma = theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=c.L_max)
        run = _smallest(problem, NormEC(alpha, beta), gamma, rounds)
        value = theory.theorem1(L=c.L, L_max=c.L_max, R=R, alpha=alpha, beta=beta, gamma=gamma, rounds=rounds, F0=c.F0)
        lines["Theorem 1, measured"].append(run)
        lines["Theorem 1"].append(value)
        found.add(name, "Theorem 1, γ_max, R*", rounds, run, value)
        kept = max(1, c.dim // 10)
        gamma = theory.ef21_gamma(L=c.L, L_tilde=c.L_tilde, contraction=kept / c.dim)
        run = _smallest(problem, EF21(TopK(kept)), gamma, rounds)
        value = theory.ef21(F0=c.F0, gamma=gamma, rounds=rounds, contraction=kept / c.dim)
        found.add(name, "EF21, Top-10 %", rounds, run, value)
        plan = theory.propose(c, rounds, SIGMA)
        curves = [_noisy(problem, plan, seed) for seed in range(size.real_seeds)]
        mean = float(torch.tensor(curves).mean(0).min())
        lines["noise, measured"].append(mean)
        lines["noise, promised"].append(plan.promise)
        found.add(name, f"planned, σ = {SIGMA}", rounds, mean, plan.promise)
    return {key: (horizons, values) for key, values in lines.items()}


def compare_with_clip21(name: str, data_dir: str | None, rounds: int, found: Verification) -> Series:
    """Compare Clip21 and NormEC from zero memories and with as many messages, each with the best of six step sizes.

    α = 0.01 and β = 0.1 are the paper's values. As β > 2α, the memory errors converge to β/2 − α = 0.04, not to zero.
    """
    problem, c = _load(name, data_dir)
    series: Series = {}
    reach = (2 * c.F0 / c.L) ** 0.5
    entries: dict[str, tuple[Method, list[float]]] = {
        "NormEC": (NormEC(0.01, 0.1), [reach * s / rounds**0.5 for s in (0.1, 0.2, 0.5, 1, 2, 5)]),
        "NormEC, no server norm": (NormEC(0.01, 0.1, server_norm=False), [s / c.L for s in (0.1, 0.2, 0.5, 1, 2, 5)]),
        "NormEC, no server norm, α = β": (
            NormEC(0.1, 0.1, server_norm=False),
            [s / c.L for s in (0.1, 0.2, 0.5, 1, 2, 5)],
        ),
        "Clip21": (Clip21(0.1), [s / c.L for s in (0.1, 0.2, 0.5, 1, 2, 5)]),
    }
    for label, (method, sizes) in entries.items():
        best: tuple[float, list[float]] | None = None
        for lr in sizes:
            try:
                history = train(problem, method, lr=lr, rounds=rounds, logging=Logging(every=1)).history
            except Diverged:
                continue
            norms = history["grad_norm"]
            if best is None or min(norms) < min(best[1]):
                best = (lr, norms)
        if best is not None:
            marks = [float(k) for k in history.rounds("grad_norm")]
            series[label] = (marks, list(itertools.accumulate(best[1], min)))
            reached = f"{min(best[1]):.3g} (lr {best[0]:.3g}; start {c.grad0:.3g})"
            found.notes.append(f"{name}, {rounds} messages: {label} reaches {reached}.")
    return series


def _smallest(problem: Problem, method: Method, gamma: float, rounds: int) -> float:
    run = train(problem, method, lr=gamma, rounds=rounds, memory=Memory(initial="gradient"), logging=Logging(every=1))
    return float(min(run.history["grad_norm"][:-1]))  # the last row is x^{K+1}, of which no theorem speaks


def _noisy(problem: Problem, plan: theory.Proposal, seed: int) -> list[float]:
    method = NormEC(plan.alpha, plan.beta, decay=plan.decay)
    statement = Privacy(sigma=SIGMA, trust="secure-sum")
    run = train(
        problem,
        method,
        lr=plan.gamma,
        rounds=plan.rounds,
        warmup=plan.warmup,
        privacy=statement,
        seed=seed,
        logging=Logging(every=1, diagnostics=True),
    )
    norms: list[float] = run.history["grad_norm"][:-1]
    return norms
