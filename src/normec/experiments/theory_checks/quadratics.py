"""The checks on random quadratics, and instances on which statements of the paper are false."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import theory
from ...algorithms.client_momentum import Clip21SGD2M
from ...algorithms.error_feedback import NormEC
from .instances import PseudoHuber, Quadratics, draw, gradient_norms, memories_at_distance

if TYPE_CHECKING:
    from .checks import Scale, Series, Verification

WIDTH, STEP, SIGMA = 1.0, 0.02, 0.5
LOCAL_STEPS, SAMPLE_RATE = 5, 0.5
MOST_SAMPLED = 5  # instances whose clients are drawn, over many seeds


def without_noise(size: Scale, found: Verification) -> Series:
    """Check the schedule of Corollary 1, then Theorem 1 with α < β < α + R, over growing horizons (medians)."""
    problem = draw(size.instances, 5, 10, seed=1)
    constants = _columns(problem.constants())
    grads = problem.gradients(problem.x0)
    lines: dict[str, list[float]] = {name: [] for name in ("measured", "Theorem 1", "sharper", "tracked")}
    alpha, beta, D = 10.0, 9.0, 10.0
    for rounds in size.horizons:
        R = D / rounds**0.5
        gamma = theory.corollary1_gamma(L_max=constants["L_max"], D=D, alpha=alpha, beta=beta, rounds=rounds)
        norms = gradient_norms(
            problem, NormEC(alpha, beta), torch.from_numpy(gamma), rounds, memories_at_distance(grads, R, 1)
        )
        measured = norms.min(1).values.numpy()
        common = {**constants, "R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds}
        lines["measured"].append(float(np.median(measured)))
        for name, form in (("Theorem 1", "paper"), ("sharper", "sharper"), ("tracked", "tracked")):
            value = theory.theorem1(**common, form=form)
            lines[name].append(float(np.median(value)))
            found.add("quadratics", f"Theorem 1, {form}", rounds, measured, value)
        value = theory.corollary1(**constants, D=D, alpha=alpha, beta=beta, rounds=rounds)
        found.add("quadratics", "Corollary 1", rounds, measured, value)
    _large_beta(size, found)
    from .checks import slope

    horizons = [float(rounds) for rounds in size.horizons]
    for name, values in lines.items():
        found.slopes[f"{name} (Corollary 1's schedule)"] = slope(horizons, values)
    return {name: (horizons, values) for name, values in lines.items()}


def _large_beta(size: Scale, found: Verification) -> None:
    problem = draw(size.instances, 5, 10, seed=2)
    constants = _columns(problem.constants())
    alpha, beta, R, rounds = 0.1, 0.9, 1.0, size.horizons[-1]
    gamma = theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=constants["L_max"])
    memory = memories_at_distance(problem.gradients(problem.x0), R, 2)
    measured = (
        gradient_norms(problem, NormEC(alpha, beta), torch.from_numpy(gamma), rounds, memory).min(1).values.numpy()
    )
    for form in ("paper", "sharper", "tracked"):
        value = theory.theorem1(**constants, R=R, alpha=alpha, beta=beta, gamma=gamma, rounds=rounds, form=form)
        found.add("quadratics, α < β < α + R", f"Theorem 1, {form}", rounds, measured, value)


def with_noise(size: Scale, found: Verification) -> Series:
    """Check pseudo-Huber losses with a fixed step and noise, without and with forgetting, over growing horizons.

    The measured value is the mean of ‖∇f(x^k)‖ over k and seeds, which the proofs bound before they pass to the
    smallest.
    """
    random = np.random.default_rng(3)
    problem = PseudoHuber(
        torch.from_numpy(random.normal(size=(1, 20, 50))), torch.from_numpy(2 * random.normal(size=(1, 50))), WIDTH
    )
    grads = problem.gradients(problem.x0)
    horizons = [float(rounds) for rounds in size.horizons]
    names = ("measured", "Theorem 2", "corrected", "sharper", "measured, forgetting", "forgetting")
    lines: dict[str, list[float]] = {name: [] for name in names}
    decay = float(theory.best_decay(gamma=STEP, L_max=1.0, B=WIDTH))
    beta = 4 * STEP
    alpha = beta / (1 - decay)
    memory = memories_at_distance(grads, alpha, 3)
    runs = {}
    for lam, name in ((0.0, "measured"), (decay, "measured, forgetting")):
        method = NormEC(alpha, beta, decay=lam)
        runs[name] = gradient_norms(problem, method, STEP, size.horizons[-1], memory, SIGMA, size.seeds).mean(0)
    for rounds in size.horizons:
        common: dict[str, Any] = {
            "L": 1.0, "L_max": 1.0, "F0": problem.gap(), "gamma": STEP, "rounds": rounds, "sigma": SIGMA, "dim": 50,
            "clients": 20, "R": alpha, "alpha": alpha, "beta": beta,
        }  # fmt: skip
        for name, run in runs.items():
            lines[name].append(float(run[:rounds].mean()))
        for name, form in (("Theorem 2", "paper"), ("corrected", "corrected"), ("sharper", "sharper")):
            value = theory.theorem2(**common, form=form)
            lines[name].append(value)
            right = form != "paper"
            found.add("pseudo-Huber, noise", f"Theorem 2, {form}", rounds, lines["measured"][-1], value, expected=right)
        value = theory.forgetting(**common, decay=decay, B=WIDTH)
        lines["forgetting"].append(value)
        found.add("pseudo-Huber, noise", "forgetting", rounds, lines["measured, forgetting"][-1], value)
    return {name: (horizons, values) for name, values in lines.items()}


def local_steps(size: Scale, found: Verification) -> None:
    """Check local steps of all clients, and of clients that are drawn, over growing horizons.

    Local step sizes fall like 1/rounds, so that the drift falls with the other terms. Where clients are drawn, the mean
    of ‖∇f(x^k)‖ over seeds is taken before the smallest over k.
    """
    problem = draw(size.instances, 5, 10, seed=5)
    few = Quadratics(*(part[:MOST_SAMPLED] for part in (problem.H, problem.c, problem.x0)))
    for rounds in size.horizons:
        common, start = _local(problem, rounds, LOCAL_STEPS, alpha=10.0, beta=9.0, R=10 / rounds**0.5)
        norms = _run_locally(problem, common, start)
        for form in ("corrected", "sharper", "tracked"):
            value = theory.local_steps(**common, form=form)
            found.add(
                f"quadratics, {LOCAL_STEPS} local steps", f"local steps, {form}", rounds, norms.min(1).values, value
            )
        for steps in (1, LOCAL_STEPS):
            alpha = 10 * rounds**0.5  # large beside R + KγΛ, which keeps memories close although clients are absent
            common, start = _local(few, rounds, steps, alpha=alpha, beta=alpha / 2, R=2 / rounds**0.5)
            norms = _run_locally(few, common, start, seeds=size.seeds, sample_rate=SAMPLE_RATE)
            measured = norms.reshape(-1, size.seeds, rounds).mean(1).min(1).values
            name = f"quadratics, {steps} local step{'s' * (steps > 1)}, clients drawn"
            value = theory.sampled_clients(**common, sample_rate=SAMPLE_RATE)
            found.add(name, f"sampled clients, q = {SAMPLE_RATE}", rounds, measured, value)


def _local(
    problem: Quadratics, rounds: int, steps: int, *, alpha: float, beta: float, R: float
) -> tuple[dict[str, Any], torch.Tensor]:
    """The numbers of the bounds for NormEC with local steps and the largest γ, and memories at the distance R."""
    constants = _columns(problem.constants())
    eta = 1 / (constants["L_max"] * rounds)
    smoothness = theory.local_smoothness(L_max=constants["L_max"], steps=steps, local_lr=eta)
    gamma = theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=smoothness)
    grad_max = problem.gradients(problem.x0).norm(dim=-1).amax(1).numpy()
    B = theory.gradient_bound(grad_max=grad_max, L_max=constants["L_max"], gamma=gamma, rounds=rounds)
    start = memories_at_distance(problem.updates(problem.x0, steps, torch.from_numpy(eta)), R, 5)
    known = {"R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds}
    return {**constants, **known, "steps": steps, "local_lr": eta, "B": B}, start


def _run_locally(problem: Quadratics, common: dict[str, Any], start: torch.Tensor, **how: Any) -> torch.Tensor:
    gamma, eta = (torch.from_numpy(common[name]) for name in ("gamma", "local_lr"))
    method = NormEC(common["alpha"], common["beta"])
    return gradient_norms(problem, method, gamma, common["rounds"], start, local=(common["steps"], eta), **how)


def client_momentum(size: Scale, found: Verification) -> None:
    """Check Clip21-SGD2M from averages and memories of zero; τ clips the messages of the first rounds.

    The measured value is the root of the mean of ‖∇f(x^k)‖² over k, which is bounded as well.
    """
    problem = draw(size.instances, 5, 10, seed=6)
    constants = _columns(problem.constants())
    grads = problem.gradients(problem.x0)
    grad_max = grads.norm(dim=-1).amax(1).numpy()
    beta, p = 0.8, 0.5
    tau = float(np.median(grad_max)) / 4
    method = Clip21SGD2M(tau, beta, p)
    gamma = 0.1 * theory.clip21_sgd2m_gamma(**_smoothness(constants), beta=beta, client_momentum=p)
    rounds = size.horizons[-1]
    norms = gradient_norms(
        problem, method, torch.from_numpy(gamma), rounds, method.client_init(torch.zeros_like(grads))
    )
    for rounds in size.horizons:
        value = theory.clip21_sgd2m(
            **constants, tau=tau, beta=beta, client_momentum=p, gamma=gamma, rounds=rounds, average_error=grad_max
        )
        measured = norms[:, :rounds].square().mean(1).sqrt()
        found.add("quadratics, client momentum", "Clip21-SGD2M", rounds, measured, value)


def _smoothness(constants: dict[str, Any]) -> dict[str, Any]:
    return {name: constants[name] for name in ("L", "L_max")}


def counterexamples(size: Scale, found: Verification) -> None:
    """Check instances on which a statement of the paper is false, and its correction."""
    dim, alpha, beta, R, sigma, rounds = 20_000, 0.1, 0.1, 0.1, 0.1, 100
    x0 = torch.zeros(1, dim, dtype=torch.float64)
    x0[0, 0] = 1.41
    problem = PseudoHuber(torch.zeros(1, 1, dim, dtype=torch.float64), x0)
    gamma = theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=1.0)
    memory = memories_at_distance(problem.gradients(problem.x0), R, 0)
    measured = (
        gradient_norms(problem, NormEC(alpha, beta), gamma, rounds, memory, sigma, min(size.seeds, 20)).mean(0).min()
    )
    common: dict[str, Any] = {
        "L": 1.0, "L_max": 1.0, "R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds,
        "F0": 1.41**2 / 2, "sigma": sigma, "dim": dim, "clients": 1,
    }  # fmt: skip
    name = "½‖x‖², d = 20,000, n = 1"
    found.add(name, "Theorem 2, paper", rounds, measured, theory.theorem2(**common, form="paper"), expected=False)
    found.add(name, "Theorem 2, corrected", rounds, measured, theory.theorem2(**common))
    name, gamma = "induction lemma, α = 0.01, β = R = 1", 1 / 1.01
    x = torch.tensor([10.0], dtype=torch.float64)  # two clients ½x², with memory errors 0.09 and 1
    method, memory = NormEC(0.01, 1.0), torch.stack([x - 0.09, x - 1])
    message, moved = method.client_step(x.expand(2, 1), memory)
    direction, _ = method.server_step(message.mean(0), memory.mean(0))
    reached = float((x - gamma * direction - moved).abs().max())
    found.add(name, "paper: R", 1, reached, 1.0, expected=False)
    kept = theory.invariant(R=1.0, alpha=0.01, beta=1.0, gamma=gamma, L_max=1.0)
    found.add(name, "corrected: R'", 1, reached, kept)


def _columns(constants: list[theory.Constants]) -> dict[str, Any]:
    return {name: np.array([getattr(c, name) for c in constants]) for name in ("L", "L_max", "F0")}
