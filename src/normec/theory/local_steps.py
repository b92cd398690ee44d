"""NormEC with local steps and with sampled clients, which is Fed-α-NormEC: bounds of our own.

Client i makes K steps y ← y − η ∇f_i(y) from x, with all of its records, and w_i(x), the mean gradient on its path,
takes the place of ∇f_i(x). The theorems need only that w_i is Lipschitz and close to ∇f_i. A client that is not drawn
keeps its memory. The proofs are in docs/concepts/theory.md.
"""

from __future__ import annotations

import numpy as np

from ..errors import UsageError
from .argument_checks import Array, Numbers, Value, below, non_negative, plain, positive, whole
from .private import noise_term, theorem2


def local_smoothness(*, L_max: Numbers, steps: Numbers, local_lr: Numbers, convex: bool = False) -> Value:
    """Λ = ((1 + ηL_max)^K − 1)/(Kη): the Lipschitz constant of every w_i; L_max if all f_i are convex and η ≤ 2/L_max.

    With one step it is L_max, whatever η is.

    Args:
        L_max: The largest smoothness of the f_i.
        steps: The number of local steps K.
        local_lr: The step size η of a local step.
        convex: Whether all f_i are convex.

    Returns:
        Λ, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is out of range, or η of several steps exceeds 2/L_max where the f_i are convex.

    Example:
        >>> local_smoothness(L_max=1.0, steps=2, local_lr=0.5)
        1.25
    """
    positive(L_max=L_max, local_lr=local_lr)
    whole(1, steps=steps)
    if convex:
        limit = np.where(np.asarray(steps) > 1, 2 / np.asarray(L_max, dtype=np.float64), np.inf)
        below(limit, "2/L_max", local_lr=local_lr)
        return plain(np.broadcast_arrays(np.asarray(L_max, dtype=np.float64), steps, local_lr)[0])
    path = np.asarray(local_lr, dtype=np.float64) * steps
    return plain(np.expm1(np.asarray(steps) * np.log1p(np.asarray(local_lr) * L_max)) / path)


def local_drift(*, L_max: Numbers, steps: Numbers, local_lr: Numbers, B: Numbers, convex: bool = False) -> Value:
    """(Λ/L_max − 1)B, or ηL_max(K−1)B/2 if all f_i are convex: how far w_i may be from ∇f_i where ‖∇f_i‖ ≤ B.

    Args:
        L_max: The largest smoothness of the f_i.
        steps: The number of local steps K.
        local_lr: The step size η of a local step.
        B: A bound on the norms of the clients' gradients at the server's points, such as `gradient_bound`.
        convex: Whether all f_i are convex.

    Returns:
        The distance, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is out of range, or η of several steps exceeds 2/L_max where the f_i are convex.

    Example:
        >>> local_drift(L_max=1.0, steps=2, local_lr=0.5, B=4.0)
        1.0
    """
    non_negative(B=B)
    smoothness = local_smoothness(L_max=L_max, steps=steps, local_lr=local_lr, convex=convex)
    if convex:
        return plain(np.asarray(local_lr) * L_max * (np.asarray(steps) - 1) * B / 2)
    return plain((smoothness / np.asarray(L_max) - 1) * B)


def local_steps(
    *,
    L: Numbers,
    L_max: Numbers,
    R: Numbers,
    alpha: Numbers,
    beta: Numbers,
    gamma: Numbers,
    rounds: Numbers,
    F0: Numbers,
    steps: Numbers,
    local_lr: Numbers,
    B: Numbers,
    convex: bool = False,
    sigma: Numbers = 0.0,
    dim: Numbers = 1,
    clients: Numbers = 1,
    start_gap: Numbers = 0.0,
    warmup: Numbers = 0,
    form: str = "sharper",
) -> Value:
    """`theorem2` with Λ in place of L_max and w_i in place of ∇f_i, plus twice the drift of the local steps.

    That is F0/(γ·rounds) + 2W + Lγ/2 + noise + 2·`local_drift`, for R ≥ max_i ‖w_i(x⁰) − g_i⁰‖ and, except in the form
    "tracked", β < α + R and γ ≤ βR/((α+R)Λ). With one local step it is Theorem 2.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        R: A bound on max_i ‖w_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        gamma: The server's step size γ.
        rounds: The number of messages of a client.
        F0: f(x⁰) − f_inf.
        steps: The number of local steps.
        local_lr: The step size η of a local step.
        B: A bound on the norms of the clients' gradients at the server's points, such as `gradient_bound`.
        convex: Whether all f_i are convex.
        sigma: The standard deviation of one client's noise, per coordinate.
        dim: The dimension d of x.
        clients: The number of clients n.
        start_gap: ‖ĝ⁰ − mean g_i⁰‖.
        warmup: T0, the number of rounds with γ = 0 before the others.
        form: "corrected", "sharper" or "tracked".

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> numbers = dict(L=1.0, L_max=1.0, R=0.1, alpha=1.0, beta=1.0, gamma=0.05, rounds=1000, F0=1.0, B=2.0)
        >>> round(local_steps(**numbers, steps=5, local_lr=0.01, form="corrected"), 3)
        0.326
    """
    smoothness = local_smoothness(L_max=L_max, steps=steps, local_lr=local_lr, convex=convex)
    drift = local_drift(L_max=L_max, steps=steps, local_lr=local_lr, B=B, convex=convex)
    bound = theorem2(
        L=L,
        L_max=smoothness,
        R=R,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        rounds=rounds,
        F0=F0,
        sigma=sigma,
        dim=dim,
        clients=clients,
        start_gap=start_gap,
        warmup=warmup,
        form=form,
    )
    return plain(bound + 2 * np.asarray(drift))


def sampled_clients(
    *,
    L: Numbers,
    L_max: Numbers,
    R: Numbers,
    alpha: Numbers,
    beta: Numbers,
    gamma: Numbers,
    rounds: int,
    F0: Numbers,
    sample_rate: Numbers,
    steps: Numbers = 1,
    local_lr: Numbers = 1.0,
    B: Numbers | None = None,
    convex: bool = False,
    sigma: Numbers = 0.0,
    dim: Numbers = 1,
    clients: Numbers = 1,
    start_gap: Numbers = 0.0,
) -> Value:
    """`local_steps` if each client takes part in a round with probability q, for β ≤ α; a bound on min E‖∇f(x^k)‖.

    That is F0/(γ·rounds) + 2 mean_k w_k + Lγ/2 + noise + 2·`local_drift`, where w_k = r_k(1 − qβ/(α + R + kγΛ)) bounds
    the expected errors of the memories after round k, with r_0 = R and r_{k+1} = w_k + γΛ.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        R: A bound on max_i ‖w_i(x⁰) − g_i⁰‖, the memories' errors at the start.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        gamma: The server's step size γ.
        rounds: The number of rounds.
        F0: f(x⁰) − f_inf.
        sample_rate: The probability q with which each client takes part in a round, independently.
        steps: The number of local steps; without local steps it is 1.
        local_lr: The step size η of a local step.
        B: A bound on the norms of the clients' gradients at the server's points, such as `gradient_bound`; with one
            local step there is no drift, and none is needed.
        convex: Whether all f_i are convex.
        sigma: The standard deviation of one client's noise, per coordinate, as if all clients sent noise.
        dim: The dimension d of x.
        clients: The number of clients n.
        start_gap: ‖ĝ⁰ − mean g_i⁰‖.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, β exceeds α, or several local steps come without B.

    Example:
        >>> numbers = dict(L=1.0, L_max=1.0, R=0.1, alpha=1.0, beta=1.0, gamma=0.01, rounds=1000, F0=1.0)
        >>> round(sampled_clients(**numbers, sample_rate=0.5), 3)
        0.325
    """
    positive(L=L, alpha=alpha, beta=beta, gamma=gamma, sample_rate=sample_rate)
    non_negative(R=R, F0=F0, sigma=sigma, start_gap=start_gap)
    below(1.0, "1", sample_rate=sample_rate)
    below(alpha, "alpha", beta=beta)
    whole(1, dim=dim, clients=clients, rounds=rounds)
    if B is None and (np.asarray(steps) > 1).any():
        raise UsageError(
            f"the drift of {np.max(steps):.6g} local steps is a multiple of B, which is missing; "
            "give B, such as theory.gradient_bound(...), or steps=1"
        )
    move = np.asarray(gamma) * local_smoothness(L_max=L_max, steps=steps, local_lr=local_lr, convex=convex)
    bounded = 0.0 if B is None else B
    drift = np.asarray(local_drift(L_max=L_max, steps=steps, local_lr=local_lr, B=bounded, convex=convex))
    error = largest = np.asarray(R, dtype=np.float64)
    total: Array = np.zeros_like(error)
    for _ in range(int(rounds)):
        after = error * (1 - np.asarray(sample_rate) * beta / (alpha + largest))
        total = total + after
        error, largest = after + move, largest + move
    noise = noise_term(beta=beta, sigma=sigma, dim=dim, clients=clients, rounds=rounds)
    gap = 2 * total / rounds + np.asarray(L) * gamma / 2 + noise + 2 * np.asarray(start_gap) + 2 * drift
    return plain(np.asarray(F0) / (np.asarray(gamma) * rounds) + gap)
