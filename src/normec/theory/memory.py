"""The distance of a client's memory from its gradient: the deterministic part of every guarantee.

Write r = ‖∇f_i(x) − g_i‖ before an update of the memory. By Lemma 1 the update turns it into

    φ(r) = |1 − λ − β/(α+r)| r  (+ λB with forgetting λ, where B ≥ ‖∇f_i(x)‖),

and the server's step, of length γ, then moves the gradient by at most γ L_max. The un-noised memory does not
depend on the noise, so all of this holds for every realisation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UsageError
from .argument_checks import Numbers, Value, below, non_negative, plain, positive, root, whole

LONGEST_WARMUP = 10_000_000


def overshoot(alpha: Numbers, beta: Numbers, decay: Numbers = 0.0) -> Value:
    """((√β − √((1−λ)α))₊)²: the largest error after a step that overshoots a small distance.

    For β > (1−λ)α the update passes its target when r < β/(1−λ) − α; the worst such r is √(αβ/(1−λ)) − α.

    Args:
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        decay: The forgetting λ of the memories.

    Returns:
        The error, or an array of errors if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> overshoot(1.0, 4.0)
        1.0
    """
    non_negative(alpha=alpha, decay=decay)
    positive(beta=beta)
    return plain(np.maximum(root(beta) - root((1 - np.asarray(decay)) * alpha), 0) ** 2)


def error_after_update(r: Numbers, alpha: Numbers, beta: Numbers, decay: Numbers = 0.0, B: Numbers = 0.0) -> Value:
    """sup of ‖∇f_i(x^k) − g_i^{k+1}‖ over all errors up to r before the update.

    λ = 0: max(r − βr/(α+r), ((√β−√α)₊)²) for r ≥ √(αβ) − α. The paper's Step 2, inequality (*), uses the first
    term alone, which is right for β ≤ α only: |1 − β/(α+r)| r is not monotone for β > α.

    Args:
        r: The largest error before the update.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        decay: The forgetting λ of the memories.
        B: A bound on the norms of the clients' gradients.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> error_after_update(2.0, alpha=1.0, beta=0.9)
        1.4
    """
    non_negative(r=r, alpha=alpha, decay=decay, B=B)
    positive(beta=beta)
    return plain(_after(np.asarray(r, dtype=np.float64), alpha, beta, np.asarray(decay, dtype=np.float64), B))


def _after(r: Any, alpha: Any, beta: Any, forget: Any, B: Any) -> Any:
    keep = 1 - forget
    with np.errstate(divide="ignore", invalid="ignore"):
        length = np.where(alpha + r > 0, r / (alpha + r), 0.0)  # 0/0 = 0
    straight = keep * r - beta * length
    worst = root(alpha * beta / keep) - alpha  # where an overshoot is largest
    over = np.maximum(root(beta) - root(keep * alpha), 0) ** 2
    beyond = np.where(worst > 0, np.where(r >= worst, over, np.maximum(-straight, 0)), 0.0)
    return np.maximum(straight, beyond) + forget * B


def W(*, R: Numbers, alpha: Numbers, beta: Numbers) -> Value:  # noqa: N802
    """max(R − βR/(α+R), ((√β−√α)₊)²) ≤ R: an upper bound of every memory error after an update (under Theorem 1).

    Reason. Before an update errors stay under R' of `invariant`. If R' = R, this is φ's maximum over [0, R]. If not,
    R' > R, hence R' − βR'/(α+R') ≤ R' − γL_max = ((√β−√α)₊)². Last, ((√β−√α)₊)² ≤ (√(α+R) − √α)² ≤ R.

    Args:
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> W(R=2.0, alpha=1.0, beta=0.9)
        1.4
    """
    positive(R=R)
    below(np.asarray(alpha) + R, "alpha + R", strict=True, beta=beta)
    return error_after_update(R, alpha, beta)


def gamma_max(*, beta: Numbers, R: Numbers, alpha: Numbers, L_max: Numbers) -> Value:
    """γ_max = βR/((α+R) L_max), the largest step size of Theorems 1 and 2.

    Args:
        beta: β, the step of the memories.
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        L_max: The largest smoothness of the f_i.

    Returns:
        The step size, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> gamma_max(beta=0.9, R=2.0, alpha=1.0, L_max=3.0)
        0.2
    """
    positive(beta=beta, R=R, L_max=L_max)
    non_negative(alpha=alpha)
    return plain(np.asarray(beta) * R / ((np.asarray(alpha) + R) * L_max))


def invariant(*, R: Numbers, alpha: Numbers, beta: Numbers, gamma: Numbers, L_max: Numbers) -> Value:
    """R' = max(R, ((√β−√α)₊)² + γL_max): ‖∇f_i(x^k) − g_i^k‖ ≤ R' for all k.

    The paper's induction lemma has R itself, which is false for α < β < α + R: at α = 0.01, β = R = 1 and γ = γ_max
    an error of 0.09 becomes 0.81 by the update and 1.80 > R by the step. Proof of R': let r ≤ R'. Where the update
    falls short it leaves r − βr/(α+r), increasing in r; βr/(α+r) ≥ γL_max for r ≥ R, so adding γL_max gives at most
    max(R, r) ≤ R'. Where it passes its target it leaves at most ((√β−√α)₊)². For β ≤ α, R' = R.

    Args:
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        gamma: The step size γ.
        L_max: The largest smoothness of the f_i.

    Returns:
        R', or an array of them if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> invariant(R=1.0, alpha=0.01, beta=1.0, gamma=0.99, L_max=1.0)
        1.8
    """
    below(np.asarray(alpha) + R, "alpha + R", strict=True, beta=beta)
    below(gamma_max(beta=beta, R=R, alpha=alpha, L_max=L_max), "gamma_max = beta R/((alpha+R) L_max)", gamma=gamma)
    return plain(np.maximum(R, overshoot(alpha, beta) + np.asarray(gamma) * L_max))


def resting_error(alpha: Numbers, beta: Numbers) -> Value:
    """(β/2 − α)₊: the limit of the error of a memory while x does not move.

    φ'(0) = |1 − β/α|, so the error dies out for β ≤ 2α; for a larger β the memory jumps back and forth over its target.

    Args:
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.

    Returns:
        The error, or an array of errors if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> resting_error(alpha=0.01, beta=0.1)
        0.04
    """
    non_negative(alpha=alpha)
    positive(beta=beta)
    return plain(np.maximum(np.asarray(beta) / 2 - alpha, 0))


def warmup_rounds(R0: float, R: float, alpha: float, beta: float, decay: float = 0.0, B: float = 0.0) -> int:
    """Rounds with γ = 0 until every memory error is at most R, from at most R0; about (R0−R)/β + (α/β) ln(R0/R).

    Counted by the recursion of `error_after_update`, so that it holds for every starting error up to R0.

    Args:
        R0: A bound on the memory's error at the start.
        R: The error to reach.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        decay: The forgetting λ of the memories.
        B: A bound on the norms of the clients' gradients.

    Returns:
        The number of rounds.

    Raises:
        UsageError: A value is out of range, or no number of rounds reaches R.

    Example:
        >>> warmup_rounds(R0=5.0, R=1.0, alpha=0.1, beta=0.1)
        42
    """
    positive(R=R, beta=beta)
    non_negative(R0=R0, alpha=alpha, decay=decay, B=B)
    error = np.asarray(R0, dtype=np.float64)
    forget = np.asarray(decay, dtype=np.float64)
    for rounds in range(LONGEST_WARMUP):
        if error <= R:
            return rounds
        after = _after(error, alpha, beta, forget, B)
        if not after < error * (1 - 1e-12):
            raise UsageError(
                f"no warm-up reaches R = {R:.6g}: errors stay near {float(error):.6g}; lower beta or decay"
            )
        error = after
    raise UsageError(f"a warm-up to R = {R:.6g} takes over {LONGEST_WARMUP:,} rounds; raise beta or R")


def memory_errors(
    *, R0: Numbers, alpha: Numbers, beta: Numbers, drift: Numbers, rounds: int, decay: Numbers = 0.0, B: Numbers = 0.0
) -> Value:
    """Bounds on ‖∇f_i(x^k) − g_i^{k+1}‖ for k = 0 … rounds − 1, along the last axis; any parameters.

    The recursion r_0 = R0, w_k = sup φ over [0, r_k], r_{k+1} = w_k + `drift`, with drift = γL_max.

    Args:
        R0: A bound on the memory's error at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        drift: γL_max, how far a step moves a gradient at most.
        rounds: K + 1, the number of messages of a client.
        decay: The forgetting λ of the memories.
        B: A bound on the norms of the clients' gradients.

    Returns:
        An array whose last axis has one bound per round.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> memory_errors(R0=1.0, alpha=0.5, beta=0.5, drift=0.0, rounds=3).round(3)
        array([0.667, 0.381, 0.165])
    """
    error, a, b, step, forget, bound = _inputs(R0, alpha, beta, drift, rounds, decay, B)
    found = np.empty((*error.shape, rounds))
    for k in range(rounds):
        found[..., k] = after = _after(error, a, b, forget, bound)
        error = after + step
    return found


def mean_error(
    *, R0: Numbers, alpha: Numbers, beta: Numbers, drift: Numbers, rounds: int, decay: Numbers = 0.0, B: Numbers = 0.0
) -> Value:
    """The mean of `memory_errors` over the rounds, without storing them.

    The recursion's map is monotone, so the errors approach a fixed point monotonically, and all later ones equal it.

    Args:
        R0: A bound on the memory's error at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        drift: γL_max, how far a step moves a gradient at most.
        rounds: K + 1, the number of messages of a client.
        decay: The forgetting λ of the memories.
        B: A bound on the norms of the clients' gradients.

    Returns:
        The mean, or an array of means if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> round(mean_error(R0=1.0, alpha=0.5, beta=0.5, drift=0.0, rounds=3), 3)
        0.404
    """
    error, a, b, step, forget, bound = _inputs(R0, alpha, beta, drift, rounds, decay, B)
    total = np.zeros_like(error)
    for k in range(rounds):
        after = _after(error, a, b, forget, bound)
        if np.all(np.abs(after + step - error) <= 1e-13 * error):
            return plain((total + (rounds - k) * after * (1 + 1e-9)) / rounds)
        total += after
        error = after + step
    return plain(total / rounds)


def _inputs(R0: Any, alpha: Any, beta: Any, drift: Any, rounds: int, decay: Any, B: Any) -> list[Any]:
    whole(1, rounds=rounds)
    non_negative(R0=R0, alpha=alpha, drift=drift, decay=decay, B=B)
    positive(beta=beta)
    return list(np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (R0, alpha, beta, drift, decay, B))))
