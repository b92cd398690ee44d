"""Theorem 1 and Corollary 1: α-NormEC without noise.

`rounds` is the paper's K + 1: the number of messages of a client. F0 = f(x⁰) − f_inf, R ≥ max_i ‖∇f_i(x⁰) − g_i⁰‖.
All bounds are on min over k = 0 … K of ‖∇f(x^k)‖.
"""

from __future__ import annotations

import numpy as np

from ..errors import one_of
from . import memory
from .argument_checks import Numbers, Value, below, non_negative, plain, positive, root, whole

FORMS = ("paper", "corrected", "sharper", "tracked")


def theorem1(
    *,
    L: Numbers,
    L_max: Numbers,
    R: Numbers,
    alpha: Numbers,
    beta: Numbers,
    gamma: Numbers,
    rounds: Numbers,
    F0: Numbers,
    form: str = "paper",
) -> Value:
    """F0/(γ(K+1)) + 2R + Lγ/2, for β < α + R and γ ≤ γ_max (Theorem 1).

    | form | middle term |
    | --- | --- |
    | "paper" | 2R |
    | "corrected" | 2R: the statement is true; only its proof's induction fails for β > α (see `memory.invariant`) |
    | "sharper" | 2W with W = max(R − βR/(α+R), ((√β−√α)₊)²) ≤ R: the proof's bound before it is rounded up to R |
    | "tracked" | twice the mean over k of the recursion `memory.memory_errors`; needs neither condition |

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        gamma: The step size γ.
        rounds: K + 1, the number of messages of a client.
        F0: f(x⁰) − f_inf.
        form: One of the forms in the table.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> theorem1(L=1.0, L_max=1.0, R=0.1, alpha=1.0, beta=1.0, gamma=0.05, rounds=1000, F0=1.0)
        0.245
    """
    one_of(FORMS, form=form)
    positive(L=L, L_max=L_max, gamma=gamma, alpha=alpha, beta=beta)
    non_negative(F0=F0, R=R)
    whole(1, rounds=rounds)
    start_and_step = np.asarray(F0) / (np.asarray(gamma) * rounds) + np.asarray(L) * gamma / 2
    if form == "tracked":
        drift = np.asarray(gamma) * L_max
        return plain(start_and_step + 2 * _mean_error(R, alpha, beta, drift, rounds))
    memory.invariant(R=R, alpha=alpha, beta=beta, gamma=gamma, L_max=L_max)  # the conditions of the theorem
    middle = memory.W(R=R, alpha=alpha, beta=beta) if form == "sharper" else R
    return plain(start_and_step + 2 * np.asarray(middle))


def _mean_error(R: Numbers, alpha: Numbers, beta: Numbers, drift: Numbers, rounds: Numbers) -> Value:
    horizon = np.asarray(rounds)
    if horizon.ndim == 0:
        return memory.mean_error(R0=R, alpha=alpha, beta=beta, drift=drift, rounds=int(horizon))
    errors = memory.memory_errors(R0=R, alpha=alpha, beta=beta, drift=drift, rounds=int(horizon.max()))
    sums = np.cumsum(errors, axis=-1)
    last = np.broadcast_to(horizon.astype(np.int64) - 1, np.broadcast_shapes(sums.shape[:-1], horizon.shape))
    sums = np.broadcast_to(sums, (*last.shape, sums.shape[-1]))
    return plain(np.take_along_axis(sums, last[..., None], -1)[..., 0] / horizon)


def best_R(*, L_max: Numbers, alpha: Numbers, beta: Numbers, rounds: Numbers, F0: Numbers) -> Value:  # noqa: N802
    """R* = √(L_max α F0/(2β(K+1))): the R that minimises the first two terms of Theorem 1 at γ = γ_max.

    They are L_max(α+R)F0/(βR(K+1)) + 2R. R is a choice: any number ≥ the actual start error is a valid R.

    Args:
        L_max: The largest smoothness of the f_i.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        rounds: K + 1, the number of messages of a client.
        F0: f(x⁰) − f_inf.

    Returns:
        R*, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> best_R(L_max=1.0, alpha=2.0, beta=1.0, rounds=100, F0=1.0)
        0.1
    """
    positive(L_max=L_max, alpha=alpha, beta=beta)
    non_negative(F0=F0)
    whole(1, rounds=rounds)
    return plain(root(np.asarray(L_max) * alpha * F0 / (2 * np.asarray(beta) * rounds)))


def corollary1(
    *,
    L: Numbers,
    L_max: Numbers,
    D: Numbers,
    alpha: Numbers,
    beta: Numbers,
    rounds: Numbers,
    F0: Numbers,
) -> Value:
    """C/√(K+1) with C = L_max(α+D)F0/(βD) + 2D + LβD/(2L_max(α+D)), for R = D/√(K+1) and α > β (Corollary 1).

    Correction: the statement allows every γ ≤ `corollary1_gamma`, but C is the bound for γ equal to it; the first
    term, F0/(γ(K+1)), grows without limit as γ falls. `corollary1_gamma` is the γ to take.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        D: R = D/√(K+1).
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        rounds: K + 1, the number of messages of a client.
        F0: f(x⁰) − f_inf.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> corollary1(L=1.0, L_max=1.0, D=1.0, alpha=3.0, beta=2.0, rounds=10_000, F0=1.0)
        0.0425
    """
    positive(L=L, L_max=L_max, D=D, alpha=alpha, beta=beta)
    non_negative(F0=F0)
    whole(1, rounds=rounds)
    below(alpha, "alpha", strict=True, beta=beta)
    reach = np.asarray(beta) * D / (np.asarray(L_max) * (np.asarray(alpha) + D))
    return plain((F0 / reach + 2 * np.asarray(D) + np.asarray(L) * reach / 2) / root(rounds))


def corollary1_gamma(*, L_max: Numbers, D: Numbers, alpha: Numbers, beta: Numbers, rounds: Numbers) -> Value:
    """γ = (β/L_max) · D/(α+D) / √(K+1): Corollary 1's step size.

    Args:
        L_max: The largest smoothness of the f_i.
        D: R = D/√(K+1).
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        rounds: K + 1, the number of messages of a client.

    Returns:
        The step size, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> corollary1_gamma(L_max=1.0, D=1.0, alpha=3.0, beta=2.0, rounds=10_000)
        0.005
    """
    positive(L_max=L_max, D=D, alpha=alpha, beta=beta)
    whole(1, rounds=rounds)
    return plain(np.asarray(beta) * D / (np.asarray(L_max) * (np.asarray(alpha) + D)) / root(rounds))


def optimal_beta(*, L: Numbers, L_max: Numbers, D: Numbers, alpha: Numbers, F0: Numbers) -> Value:
    """β* = (L_max(α+D)/D) √(2F0/L): makes C = √(2LF0) + 2D, after Corollary 1. See `optimal_beta_is_feasible`.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        D: R = D/√(K+1).
        alpha: α of the smoothed normalisation.
        F0: f(x⁰) − f_inf.

    Returns:
        β*, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> optimal_beta(L=1.0, L_max=1.0, D=1.0, alpha=3.0, F0=2.0)
        8.0
    """
    positive(L=L, L_max=L_max, D=D, alpha=alpha)
    non_negative(F0=F0)
    return plain(np.asarray(L_max) * (np.asarray(alpha) + D) / D * root(2 * np.asarray(F0) / L))


def optimal_beta_is_feasible(*, L: Numbers, L_max: Numbers, D: Numbers, alpha: Numbers, F0: Numbers) -> Value:
    """Whether β* < α, as Corollary 1 requires: α > s and D > αs/(α − s), with s = L_max √(2F0/L).

    So D > s always, hence √(2LF0) + 2D > √(2LF0)(1 + 2L_max/L) ≥ 3√(2LF0). The text after the corollary lets D → 0 to
    approach the bound of gradient descent, which is therefore not possible.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        D: R = D/√(K+1).
        alpha: α of the smoothed normalisation.
        F0: f(x⁰) − f_inf.

    Returns:
        A bool, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> optimal_beta_is_feasible(L=1.0, L_max=1.0, D=1.0, alpha=3.0, F0=2.0)
        False
    """
    found = np.asarray(optimal_beta(L=L, L_max=L_max, D=D, alpha=alpha, F0=F0)) < np.asarray(alpha)
    return bool(found) if found.ndim == 0 else found


def smallest_D(*, L: Numbers, L_max: Numbers, alpha: Numbers, F0: Numbers) -> Value:  # noqa: N802
    """αs/(α − s) with s = L_max √(2F0/L), infinite for α ≤ s: D must be larger for β* to be feasible.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        alpha: α of the smoothed normalisation.
        F0: f(x⁰) − f_inf.

    Returns:
        The limit, or an array of limits if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> smallest_D(L=1.0, L_max=1.0, alpha=3.0, F0=2.0)
        6.0
    """
    positive(L=L, L_max=L_max, alpha=alpha)
    s = np.asarray(L_max) * root(2 * np.asarray(F0) / L)
    with np.errstate(divide="ignore"):
        return plain(np.where(alpha > s, alpha * s / np.maximum(alpha - s, 0), np.inf))
