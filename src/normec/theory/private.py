"""Theorem 2 and Corollary 2: DP-α-NormEC.

σ is the standard deviation of one client's noise on its message, per coordinate: z_i ~ N(0, σ² I_d). Bounds are on
min over k = 0 … K of E‖∇f(x^k)‖; `rounds` is K + 1, and `warmup` counts the rounds with γ = 0 before them.
"""

from __future__ import annotations

import numpy as np

from ..errors import UsageError, one_of, open_unit
from . import memory
from .argument_checks import Numbers, Value, below, non_negative, plain, positive, root, whole
from .nonprivate import FORMS, theorem1


def theorem2(
    *,
    L: Numbers,
    L_max: Numbers,
    R: Numbers,
    alpha: Numbers,
    beta: Numbers,
    gamma: Numbers,
    rounds: Numbers,
    F0: Numbers,
    sigma: Numbers,
    dim: Numbers,
    clients: Numbers,
    start_gap: Numbers = 0.0,
    warmup: Numbers = 0,
    form: str = "corrected",
) -> Value:
    """Theorem 1's bound plus the noise in ĝ (Theorem 2).

    | form | added to Theorem 1 of the same form |
    | --- | --- |
    | "paper" | 2βσ√(K+1) |
    | "corrected" | 2βσ√((T0+K+1)d/n) + 2‖ĝ⁰ − mean g_i⁰‖ |
    | "sharper", "tracked" | the same with the mean of √(T0+k+1) over k, for T0 = 0 about 2/3 of the largest |

    Why corrected: ĝ − mean g_i is a random walk, e^{k+1} = e^k + (β/n)Σz_i, so E‖e^{k+1}‖² = ‖e⁰‖² + β²(k+1)σ²d/n.
    The paper's lemma sets E‖z‖² = σ²/n, which lacks d for noise of σ per coordinate, the σ that its privacy formula
    speaks of; its theorem drops the lemma's 1/n as well. It is too small whenever d > n.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        gamma: The step size γ.
        rounds: K + 1, the number of messages of a client.
        F0: f(x⁰) − f_inf.
        sigma: The standard deviation of one client's noise, per coordinate.
        dim: The dimension d of x.
        clients: The number of clients n.
        start_gap: ‖ĝ⁰ − mean g_i⁰‖.
        warmup: T0, the number of rounds with γ = 0 before the others.
        form: One of the forms in the table.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> numbers = dict(L=1.0, L_max=1.0, R=0.1, alpha=1.0, beta=1.0, gamma=0.05, rounds=1000, F0=1.0)
        >>> round(theorem2(**numbers, sigma=0.01, dim=10, clients=1000), 4)
        0.3082
    """
    one_of(FORMS, form=form)
    non_negative(sigma=sigma, start_gap=start_gap)
    whole(1, dim=dim, clients=clients, rounds=rounds)
    whole(0, warmup=warmup)
    base = theorem1(L=L, L_max=L_max, R=R, alpha=alpha, beta=beta, gamma=gamma, rounds=rounds, F0=F0, form=form)
    if form == "paper":
        return plain(base + 2 * np.asarray(beta) * sigma * root(rounds))
    walk = _mean_root(rounds, warmup) if form in ("sharper", "tracked") else root(np.asarray(rounds) + warmup)
    return plain(base + _noise(beta, sigma, dim, clients, walk) + 2 * np.asarray(start_gap))


def noise_term(*, beta: Numbers, sigma: Numbers, dim: Numbers, clients: Numbers, rounds: Numbers) -> Value:
    """The term of the noise in the form "sharper": 2βσ√(d/n) times the mean of √(k+1) over the rounds, from above."""
    return _noise(beta, sigma, dim, clients, _mean_root(rounds))


def _noise(beta: Numbers, sigma: Numbers, dim: Numbers, clients: Numbers, walk: Numbers) -> Value:
    return plain(2 * np.asarray(beta) * sigma * root(np.asarray(dim) / clients) * walk)


def _mean_root(rounds: Numbers, warmup: Numbers = 0) -> Value:
    """(1/(K+1)) Σ √(T0+k+1) from above: the integral and half of both ends, because √ is concave (trapezoid rule)."""
    count = np.asarray(rounds, dtype=np.float64)
    first = np.asarray(warmup, dtype=np.float64) + 1
    last = first + count - 1
    return plain((2 / 3 * (last**1.5 - first**1.5) + (root(first) + root(last)) / 2) / count)


def signal(*, dim: Numbers, clients: Numbers, noise: Numbers, trust: str = "local") -> Value:
    """S = s√(d/n): the noise of a private run in the utility bounds; `noise` is s = σ/√(number of messages).

    For (ε, δ) the exact s is Δ/μ(ε, δ) (`noise_per_message`); the paper writes it O(√ln(1/δ)/ε). Under "local" trust
    each client's noise hides its own message. Under "secure-sum" the noise of all clients hides each message, so s and
    with it S fall by a factor of √n.

    Args:
        dim: The dimension d of x.
        clients: The number of clients n.
        noise: s = σ/√(number of messages); see `noise_per_message`.
        trust: Who sees single messages: the server ("local") or nobody ("secure-sum").

    Returns:
        S, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> signal(dim=400, clients=100, noise=0.5)
        1.0
        >>> signal(dim=400, clients=100, noise=0.5, trust="secure-sum")
        0.1
    """
    one_of(("local", "secure-sum"), trust=trust)
    positive(noise=noise)
    whole(1, dim=dim, clients=clients)
    each = np.asarray(noise) / (root(clients) if trust == "secure-sum" else 1)
    return plain(each * root(np.asarray(dim) / clients))


def noise_per_message(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """s = Δ/μ with μ the exact Gaussian-DP parameter of (ε, δ): σ = s√T hides T messages of sensitivity Δ.

    s = cΔ√ln(1/δ)/ε with c = 1.10 at ε = 1 and 1.42 at ε = 8 (δ = 1e-5); Δ = 1 (zero-out) or 2 (replace).

    Args:
        epsilon: The target ε.
        delta: The target δ.
        sensitivity: Δ, how far one unit moves a message.

    Returns:
        The number s.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> round(noise_per_message(epsilon=8.0, delta=1e-5), 3)
        0.6
    """
    from ..privacy.gaussian import mu_for

    positive(epsilon=epsilon, sensitivity=sensitivity)
    open_unit(delta=delta)
    return sensitivity / mu_for(epsilon, delta)


def best_beta0(*, L_max: Numbers, alpha: Numbers, R: Numbers, F0: Numbers, S: Numbers) -> Value:
    """β_0* = √(L_max(α+R)F0/(2RS)): makes A/β_0 + 2β_0S smallest, A = L_max(α+R)F0/R; then β = β_0*/(K+1).

    Args:
        L_max: The largest smoothness of the f_i.
        alpha: α of the smoothed normalisation.
        R: A bound on the memories' errors.
        F0: f(x⁰) − f_inf.
        S: The noise s√(d/n); see `signal`.

    Returns:
        β_0*, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> best_beta0(L_max=1.0, alpha=1.0, R=1.0, F0=1.0, S=0.25)
        2.0
    """
    positive(L_max=L_max, alpha=alpha, R=R, S=S)
    non_negative(F0=F0)
    return plain(root(np.asarray(L_max) * (np.asarray(alpha) + R) * F0 / (2 * np.asarray(R) * S)))


def corollary2(
    *,
    L: Numbers,
    L_max: Numbers,
    R: Numbers,
    alpha: Numbers,
    F0: Numbers,
    S: Numbers,
    rounds: Numbers,
    beta0: Numbers | None = None,
    form: str = "corrected",
) -> Value:
    """A/β_0 + 2R + 2β_0S + Lβ_0R/(2(α+R)L_max(K+1)), A = L_max(α+R)F0/R, σ = s√(K+1), β = β_0/(K+1) (Corollary 2).

    At γ = γ_max. `beta0` defaults to `best_beta0`, where the first and third terms make 2√(2AS).

    "paper" also requires α > β_0. Then γ(K+1)L_max < R, so A/β_0 > L_max F0/R ≥ ‖∇f(x⁰)‖²/(2R), and with 2R this
    is at least 2‖∇f(x⁰)‖: never better than x⁰ itself. "corrected" requires β = β_0/(K+1) ≤ α.
    Correction of the statement: it allows every β_0 up to a limit, but A/β_0 grows as β_0 falls; its bound is that of
    β_0 equal to the limit.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        F0: f(x⁰) − f_inf.
        S: The noise s√(d/n); see `signal`.
        rounds: K + 1, the number of messages of a client.
        beta0: β_0 (default: `best_beta0`).
        form: "paper" or "corrected".

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> round(corollary2(L=1.0, L_max=1.0, R=0.1, alpha=0.1, F0=1.0, S=1e-4, rounds=10_000), 3)
        0.242
    """
    one_of(("paper", "corrected"), form=form)
    positive(L=L, L_max=L_max, R=R, alpha=alpha, S=S)
    non_negative(F0=F0)
    whole(1, rounds=rounds)
    chosen = best_beta0(L_max=L_max, alpha=alpha, R=R, F0=F0, S=S) if beta0 is None else beta0
    positive(beta0=chosen)
    if form == "paper":
        below(alpha, "alpha", strict=True, beta0=chosen)
    else:
        below(alpha, "alpha", beta=np.asarray(chosen) / rounds)
    cost = np.asarray(L_max) * (np.asarray(alpha) + R) * F0 / R
    step = memory.gamma_max(beta=np.asarray(chosen) / rounds, R=R, alpha=alpha, L_max=L_max)
    return plain(cost / chosen + 2 * np.asarray(R) + 2 * np.asarray(chosen) * S + np.asarray(L) * step / 2)


def largest_signal(*, alpha: Numbers, R: Numbers, grad0: Numbers) -> Value:
    """S must be under (R/(4(α+R)))(1 − 2R/G)², G = ‖∇f(x⁰)‖, or the corrected Corollary 2 guarantees G at best.

    By F0 ≥ G²/(2L) and L ≤ L_max its value is at least 2G√(S(α+R)/R) + 2R. Zero for 2R ≥ G.

    Args:
        alpha: α of the smoothed normalisation.
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        grad0: ‖∇f(x⁰)‖.

    Returns:
        The limit, or an array of limits if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> largest_signal(alpha=1.0, R=1.0, grad0=4.0)
        0.03125
    """
    positive(alpha=alpha, R=R, grad0=grad0)
    room = np.maximum(1 - 2 * np.asarray(R) / grad0, 0)
    return plain(np.asarray(R) / (4 * (np.asarray(alpha) + R)) * room**2)


def smallest_clients(
    *, dim: int, noise: float, trust: str = "local", alpha: float = 0.0, R: float = 1.0, grad0: float = np.inf
) -> int:
    """The number of clients below which the corrected Corollary 2 is vacuous for every problem.

    S = s√(d/n) < (R/(4(α+R)))(1 − 2R/G)². The defaults are the most generous case, α ≪ R ≪ G: n > 16 s² d under
    "local" trust, n > 4 s √d under "secure-sum". 1.6 million and 1,247 for ResNet20 (d = 269,722) at (8, 1e-5).

    Args:
        dim: The dimension d of x.
        noise: s = σ/√(number of messages); see `noise_per_message`.
        trust: Who sees single messages: the server ("local") or nobody ("secure-sum").
        alpha: α of the smoothed normalisation.
        R: A bound on max_i ‖∇f_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        grad0: ‖∇f(x⁰)‖.

    Returns:
        The number of clients.

    Raises:
        UsageError: A value is out of range, or 2R is not below G, so that no number of clients helps.

    Example:
        >>> smallest_clients(dim=269_722, noise=noise_per_message(8.0, 1e-5), trust="secure-sum")
        1247
    """
    one_of(("local", "secure-sum"), trust=trust)
    positive(noise=noise, R=R)
    whole(1, dim=dim)
    non_negative(alpha=alpha)
    limit = R / (4 * (alpha + R)) * max(1 - 2 * R / grad0, 0.0) ** 2
    if limit == 0:
        raise UsageError(f"2 R = {2 * R:.6g} is not below ‖∇f(x⁰)‖ = {grad0:.6g}: no number of clients helps; lower R")
    ratio = noise / limit
    return int(np.floor(ratio**2 * dim if trust == "local" else ratio * np.sqrt(dim))) + 1
