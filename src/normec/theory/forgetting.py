"""Memory decay ("forgetting"): a bound whose noise does not grow with the number of rounds; the paper has λ = 0.

    g_i ← (1−λ) g_i + β m_i,    ĝ ← (1−λ) ĝ + (β/n) Σ (m_i + z_i),    x ← x − γ ĝ/‖ĝ‖.

The proof is in docs/concepts/theory.md. In short, ĝ − mean g_i is an AR(1) process instead of a random walk, and the
memory has a bias of λB, where B bounds the clients' gradients along the trajectory. By Lemma 1

    ∇f_i(x^k) − g_i^{k+1} = (1 − λ − β/(α+r)) (∇f_i(x^k) − g_i^k) + λ ∇f_i(x^k).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import UsageError, one_of
from . import memory
from .argument_checks import Numbers, Value, below, non_negative, plain, positive, root, whole


def gradient_bound(*, grad_max: Numbers, L_max: Numbers, gamma: Numbers, rounds: Numbers) -> Value:
    """B = max_i ‖∇f_i(x⁰)‖ + L_max γ K: always valid, for x^k lies within γk of x⁰.

    Args:
        grad_max: max_i ‖∇f_i(x⁰)‖.
        L_max: The largest smoothness of the f_i.
        gamma: The step size γ.
        rounds: K + 1, the number of messages of a client.

    Returns:
        B, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> gradient_bound(grad_max=2.0, L_max=1.0, gamma=0.5, rounds=11)
        7.0
    """
    non_negative(grad_max=grad_max, gamma=gamma)
    positive(L_max=L_max)
    whole(1, rounds=rounds)
    return plain(np.asarray(grad_max) + np.asarray(L_max) * gamma * (np.asarray(rounds) - 1))


def gamma_max(*, beta: Numbers, R: Numbers, alpha: Numbers, L_max: Numbers, decay: Numbers, B: Numbers) -> Value:
    """(βR/(α+R) − λ(B − R))/L_max: the largest step size; not positive if λB is too large for β."""
    positive(beta=beta, R=R, L_max=L_max)
    non_negative(alpha=alpha, decay=decay, B=B)
    pull = np.asarray(beta) * R / (np.asarray(alpha) + R)
    return plain((pull - np.asarray(decay) * (np.asarray(B) - R)) / L_max)


def noise_factor(decay: Numbers, rounds: Numbers, warmup: Numbers = 0) -> Value:
    """√((1 − (1−λ)^{2T})/(λ(2−λ))), T = T0 + K + 1, in place of Theorem 2's √T; at most 1/√(λ(2−λ)) for ever.

    Args:
        decay: The forgetting λ of the memories.
        rounds: K + 1, the number of messages of a client.
        warmup: T0, the number of rounds with γ = 0 before the others.

    Returns:
        The factor, or an array of factors if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> noise_factor(decay=0.0, rounds=100), round(noise_factor(decay=0.1, rounds=100), 3)
        (10.0, 2.294)
    """
    non_negative(decay=decay)
    below(1.0, "1", strict=True, decay=decay)
    total = np.asarray(rounds, dtype=np.float64) + warmup
    rate = np.asarray(decay, dtype=np.float64)
    square = np.where(
        rate > 0, -np.expm1(2 * total * np.log1p(-rate)) / np.where(rate > 0, rate * (2 - rate), 1), total
    )
    return plain(root(square))


def forgetting(
    *,
    L: Numbers,
    L_max: Numbers,
    R: Numbers,
    alpha: Numbers,
    beta: Numbers,
    gamma: Numbers,
    rounds: Numbers,
    F0: Numbers,
    decay: Numbers,
    B: Numbers,
    sigma: Numbers = 0.0,
    dim: Numbers = 1,
    clients: Numbers = 1,
    start_gap: Numbers = 0.0,
    warmup: Numbers = 0,
    form: str = "closed",
) -> Value:
    """F0/(γ(K+1)) + 2W_λ + Lγ/2 + 2βσ√(d/n)·√((1−(1−λ)^{2(T0+K+1)})/(λ(2−λ))) + 2‖ĝ⁰−mean g_i⁰‖ min(1, 1/(λ(K+1))).

    W_λ = R − βR/(α+R) + λ(B−R), for β ≤ (1−λ)α, γ ≤ `gamma_max`, R ≥ max‖∇f_i(x⁰) − g_i⁰‖ and B ≥ ‖∇f_i(x^k)‖ for
    all i and k ≤ K (a bound on gradients, or `gradient_bound`). It bounds min_k E‖∇f(x^k)‖; λ = 0 is Theorem 2 with the
    W of its form "sharper". The form "tracked" takes the recursion of `memory.memory_errors` with constant B for W_λ;
    it needs neither β ≤ (1−λ)α nor γ ≤ `gamma_max`, and takes one number of `rounds`.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        gamma: The step size γ.
        rounds: K + 1, the number of messages of a client.
        F0: f(x⁰) − f_inf.
        decay: The forgetting λ of the memories.
        B: A bound on the norms of the clients' gradients.
        sigma: The standard deviation of one client's noise, per coordinate.
        dim: The dimension d of x.
        clients: The number of clients n.
        start_gap: ‖ĝ⁰ − mean g_i⁰‖.
        warmup: T0, the number of rounds with γ = 0 before the others.
        form: "closed" or "tracked".

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> numbers = dict(L=1.0, L_max=1.0, R=1.0, alpha=1.0, beta=0.5, gamma=0.01, rounds=1000, F0=1.0)
        >>> round(forgetting(**numbers, decay=0.01, B=2.0), 3)
        1.625
    """
    one_of(("closed", "tracked"), form=form)
    positive(L=L, L_max=L_max, alpha=alpha, beta=beta, gamma=gamma)
    non_negative(F0=F0, sigma=sigma, start_gap=start_gap, B=B, decay=decay, R=R)
    below(1.0, "1", strict=True, decay=decay)
    whole(1, rounds=rounds, dim=dim, clients=clients)
    whole(0, warmup=warmup)
    if form == "tracked":
        if np.ndim(rounds):
            raise UsageError(f"the form 'tracked' takes one number of rounds, got {np.size(rounds)}; call it for each")
        drift = np.asarray(gamma) * L_max
        horizon = int(np.asarray(rounds))
        middle = memory.mean_error(R0=R, alpha=alpha, beta=beta, drift=drift, rounds=horizon, decay=decay, B=B)
    else:
        below((1 - np.asarray(decay)) * alpha, "(1 − decay) alpha", beta=beta)
        limit = np.asarray(gamma_max(beta=beta, R=R, alpha=alpha, L_max=L_max, decay=decay, B=B))
        if np.any(limit <= 0):
            raise UsageError("no step size is covered: decay·(B − R) is not below beta R/(alpha+R); lower decay")
        below(limit, "gamma_max = (beta R/(alpha+R) − decay (B−R))/L_max", gamma=gamma)
        pull = np.asarray(beta) * R / (np.asarray(alpha) + R)
        middle = R - pull + np.asarray(decay) * (np.asarray(B) - R)
    noise = np.asarray(beta) * sigma * root(np.asarray(dim) / clients) * noise_factor(decay, rounds, warmup)
    with np.errstate(divide="ignore"):
        gap = np.asarray(start_gap) * np.minimum(1, 1 / (np.asarray(decay, dtype=np.float64) * rounds))
    step = np.asarray(F0) / (np.asarray(gamma) * rounds) + np.asarray(L) * gamma / 2
    return plain(step + 2 * middle + 2 * noise + 2 * gap)


class Balanced(NamedTuple):
    """The parameters of `balanced`, and their bound."""

    alpha: float
    beta: float
    gamma: float
    decay: float
    R: float
    bound: float


def best_decay(*, gamma: Numbers, L_max: Numbers, B: Numbers) -> Value:
    """λ* = γL_max/B: minimises the noise of the smallest admissible β, ∝ (λB + γL_max)/√λ.

    In a round, forgetting moves a memory by at most λB, and the model's step moves a gradient by at most γL_max: λ*
    makes the two equal.

    Args:
        gamma: The step size γ.
        L_max: The largest smoothness of the f_i.
        B: A bound on the norms of the clients' gradients.

    Returns:
        λ*, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> best_decay(gamma=0.01, L_max=2.0, B=4.0)
        0.005
    """
    positive(gamma=gamma, L_max=L_max, B=B)
    return plain(np.asarray(gamma) * L_max / B)


def balanced(*, L: float, L_max: float, F0: float, B: float, gamma: float, rounds: int, noise: float) -> Balanced:
    """λ = γL_max/B, β = 4γL_max, α = R = β/(1−λ): F0/(γ(K+1)) + (6L_max + L/2)γ + 8σ√(γ L_max B d/n) at most.

    This is the closed form of `forgetting` with W_λ = 3γL_max. It needs γ < B/L_max and memories whose errors at the
    start are at most R.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        F0: f(x⁰) − f_inf.
        B: A bound on the norms of the clients' gradients.
        gamma: The step size γ.
        rounds: K + 1, the number of messages of a client.
        noise: σ√(d/n).

    Returns:
        The parameters and their bound.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> found = balanced(L=1.0, L_max=1.0, F0=1.0, B=2.0, gamma=0.01, rounds=10_000, noise=0.0)
        >>> found.decay, found.beta, round(found.bound, 4)
        (0.005, 0.04, 0.075)
    """
    decay = best_decay(gamma=gamma, L_max=L_max, B=B)
    below(1.0, "1, or gamma must fall under B/L_max", strict=True, decay=decay)
    beta = 4 * gamma * L_max
    alpha = beta / (1 - decay)
    bound = forgetting(
        L=L,
        L_max=L_max,
        R=alpha,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        rounds=rounds,
        F0=F0,
        decay=decay,
        B=B,
        sigma=noise,
    )
    return Balanced(alpha, beta, gamma, decay, alpha, bound)


def utility(*, L_max: Numbers, F0: Numbers, B: Numbers, S: Numbers) -> Value:
    """3(2 F0 L_max B S²)^{1/3}: the limit of the bound as K → ∞ with σ = s√(K+1), S = s√(d/n).

    γ(K+1) = Γ = (F0/(√2 S√(L_max B)))^{2/3}, λ = γL_max/B, β = κ(λB + γL_max) with κ → 1; α = β/(1−λ) → 0 and
    every other term falls like 1/K. The start error must be under R → 0. Compare 2√(2L_max F0 S) of Corollary 2,
    corrected: S^{2/3} against S^{1/2}, where gradients are bounded by a B that does not depend on Γ. Without such a
    bound B = max‖∇f_i(x⁰)‖ + L_maxΓ grows as S falls, and the rate is S^{1/2} again: nothing is gained.

    Args:
        L_max: The largest smoothness of the f_i.
        F0: f(x⁰) − f_inf.
        B: A bound on the norms of the clients' gradients.
        S: The noise s√(d/n); see `signal`.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> utility(L_max=1.0, F0=0.5, B=1.0, S=0.001)
        0.03
    """
    positive(L_max=L_max, B=B, S=S)
    non_negative(F0=F0)
    return plain(3 * np.cbrt(2 * np.asarray(F0) * L_max * B * np.asarray(S) ** 2))
