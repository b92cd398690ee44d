"""Clip21-SGD2M with full gradients and without noise: a bound of our own.

A client averages its gradients, v_i ← p v_i + (1−p)∇f_i(x), and its memory follows the average,
g_i ← g_i + β Clip_τ(v_i − g_i); the server steps x ← x − γ mean g_i. The bound follows the largest errors of averages
and memories round by round while messages are clipped, and sums up those of all later rounds in closed form. The proof
is in docs/concepts/theory.md.
"""

from __future__ import annotations

import numpy as np

from .argument_checks import Array, Numbers, Value, below, non_negative, plain, positive, root, whole

LARGEST = np.finfo(np.float64).max


def clip21_sgd2m_gamma(*, L: Numbers, L_max: Numbers, beta: Numbers, client_momentum: Numbers) -> Value:
    """γ = 2/(L + √(L² + 8κ²L_max²)), κ = p/(1−p) + (1−β)/β: a step size at which unclipped errors sum up.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        beta: β, the step of the memories.
        client_momentum: p, the share of the old average that a client keeps.

    Returns:
        The step size, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> clip21_sgd2m_gamma(L=1.0, L_max=1.0, beta=1.0, client_momentum=0.5)
        0.5
    """
    positive(L=L, L_max=L_max, beta=beta)
    below(1.0, "1", beta=beta)
    non_negative(client_momentum=client_momentum)
    below(1.0, "1", strict=True, client_momentum=client_momentum)
    smooth = np.asarray(L, dtype=np.float64)
    return plain(2 / (smooth + root(smooth**2 + 8 * (_lag(beta, client_momentum) * L_max) ** 2)))


def clip21_sgd2m(
    *,
    L: Numbers,
    L_max: Numbers,
    F0: Numbers,
    tau: Numbers,
    beta: Numbers,
    client_momentum: Numbers,
    gamma: Numbers,
    rounds: int,
    average_error: Numbers,
    memory_gap: Numbers = 0.0,
) -> Value:
    """√((2F0/γ + Σ)/(K+1)) for γ ≤ 1/L, where Σ is what the errors ‖∇f(x^k) − ĝ^{k+1}‖² of all rounds cost at most.

    It also bounds the root of the mean of ‖∇f(x^k)‖². If no message is clipped after the first round, Σ = (1 + 1/ρ)S²,
    ρ = (1−γL)/(γκL_max)² − 1, S = M(1 + (1−β)(1−p)/β)/√(1−p²) + P/√(β(2−β)), where M and P bound the errors of
    averages and memories after the first round, and κ is that of `clip21_sgd2m_gamma`. With p = 0, β = 1 and τ large
    this is the bound of gradient descent.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        F0: f(x⁰) − f_inf.
        tau: The clipping threshold τ.
        beta: β, the step of the memories.
        client_momentum: p, the share of the old average that a client keeps.
        gamma: The server's step size γ.
        rounds: K + 1, the number of messages of a client.
        average_error: A bound on max_i ‖∇f_i(x⁰) − v_i⁰‖; max_i ‖∇f_i(x⁰)‖ if averages start at zero.
        memory_gap: A bound on max_i ‖v_i⁰ − g_i⁰‖.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or γ exceeds 1/L.

    Example:
        >>> numbers = dict(L=1.0, L_max=1.0, F0=1.0, beta=1.0, rounds=10_000, average_error=1.0)
        >>> clip21_sgd2m(**numbers, tau=1.0, client_momentum=0.0, gamma=0.5)
        0.02
        >>> round(clip21_sgd2m(**numbers, tau=0.1, client_momentum=0.5, gamma=0.02), 3)
        0.102
    """
    positive(L=L, L_max=L_max, tau=tau, beta=beta, gamma=gamma)
    non_negative(F0=F0, client_momentum=client_momentum, average_error=average_error, memory_gap=memory_gap)
    below(1.0, "1", beta=beta)
    below(1.0, "1", strict=True, client_momentum=client_momentum)
    below(1 / np.asarray(L, dtype=np.float64), "1/L", gamma=gamma)
    whole(1, rounds=rounds)
    given = (L, L_max, F0, tau, beta, client_momentum, gamma, average_error, memory_gap)
    L, L_max, F0, tau, beta, p, gamma, away, gap = np.broadcast_arrays(*(np.asarray(one, float) for one in given))
    step = (gamma * _lag(beta, p) * L_max) ** 2
    left = 1 - gamma * L - step  # ρ times step
    growth = np.where(step > 0, np.where(left > 0, 1 + step / np.where(left > 0, left, 1), np.inf), 1)

    def later(average: Array, memory: Array) -> Array:
        """What the squared errors of this and all later rounds cost at most, if no later message is clipped."""
        start = average * (1 + (1 - beta) / beta * (1 - p)) / root(1 - p**2) + memory / root(beta * (2 - beta))
        return np.where(np.isfinite(growth), np.where(np.isfinite(growth), growth, 1) * start**2, np.inf)

    before = np.zeros_like(F0)  # Σ up to the last round with a clipped message
    since = np.zeros_like(F0)  # Σ from that round on
    average, memory = p * away, _after_update(gap + (1 - p) * away, tau, beta)
    with np.errstate(over="ignore"):  # errors that outgrow the numbers make the bound infinite
        rest = later(average, memory)
        for left_rounds in range(int(rounds) - 1, -1, -1):
            error = average + memory
            slope = root(2 * L * (F0 + gamma / 2 * (before + np.minimum(since, rest))))
            since = since + error**2
            if left_rounds:
                moved = np.minimum(average + L_max * gamma * (slope + error), LARGEST)  # p = 0 times it is 0
                difference = memory + (1 - p) * moved
                average, memory = p * moved, _after_update(difference, tau, beta)
                clipped = difference > tau
                before = np.where(clipped, before + np.minimum(since, rest), before)
                since = np.where(clipped, 0.0, since)
                rest = np.where(clipped, later(average, memory), rest)
    return plain(root((2 * F0 / gamma + before + np.minimum(since, rest)) / rounds))


def _lag(beta: Numbers, client_momentum: Numbers) -> Array:
    """κ: how many rounds averages and memories together are behind."""
    p, step = np.asarray(client_momentum, dtype=np.float64), np.asarray(beta, dtype=np.float64)
    found: Array = p / (1 - p) + (1 - step) / step
    return found


def _after_update(difference: Array, tau: Array, beta: Array) -> Array:
    """u − β min(u, τ): the error of a memory after its message."""
    found: Array = difference - beta * np.minimum(difference, tau)
    return found
