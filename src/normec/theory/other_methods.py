"""The bounds of Clip21, EF21 and gradient descent, for comparison; on min over k of ‖∇f(x^k)‖, `rounds` = K + 1."""

from __future__ import annotations

import numpy as np

from .argument_checks import Numbers, Value, below, non_negative, plain, positive, root, whole


def clip21(*, L: Numbers, L_max: Numbers, F0: Numbers, tau: Numbers, grad_max: Numbers, rounds: Numbers) -> Value:
    """[L_max F0/τ + √((1 + C1/τ) C2)]/√(K+1), C1 = max‖∇f_i(x⁰)‖, C2 = max(max(L, L_max)F0, C1²).

    As the paper quotes Theorem 5.6 of Khirirat et al. (2023) in its appendix; the step size is not quoted there.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        F0: f(x⁰) − f_inf.
        tau: The clipping threshold τ.
        grad_max: max_i ‖∇f_i(x⁰)‖.
        rounds: K + 1, the number of messages of a client.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> clip21(L=1.0, L_max=1.0, F0=1.0, tau=1.0, grad_max=3.0, rounds=10_000)
        0.07
    """
    positive(L=L, L_max=L_max, tau=tau)
    non_negative(F0=F0, grad_max=grad_max)
    whole(1, rounds=rounds)
    first = np.asarray(grad_max)
    second = np.maximum(np.maximum(L, L_max) * F0, first**2)
    return plain((np.asarray(L_max) * F0 / tau + root((1 + first / tau) * second)) / root(rounds))


def clip21_tau(*, L: Numbers, L_max: Numbers, F0: Numbers) -> Value:
    """τ = L_max √(F0/(2L)), the paper's choice: makes the first term √(2LF0/(K+1)), gradient descent's.

    Args:
        L: The smoothness of f.
        L_max: The largest smoothness of the f_i.
        F0: f(x⁰) − f_inf.

    Returns:
        τ, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> clip21_tau(L=2.0, L_max=3.0, F0=1.0)
        1.5
    """
    positive(L=L, L_max=L_max, F0=F0)
    return plain(np.asarray(L_max) * root(np.asarray(F0) / (2 * np.asarray(L))))


def ef21_gamma(*, L: Numbers, L_tilde: Numbers, contraction: Numbers) -> Value:
    """γ = 1/(L + L̃√(b/θ)), θ = 1 − √(1−a), b = (1−a)/θ, L̃² = mean L_i² (Richtárik et al. 2021, Theorem 1).

    Args:
        L: The smoothness of f.
        L_tilde: √(mean L_i²).
        contraction: a, with E‖C(v) − v‖² ≤ (1−a)‖v‖².

    Returns:
        The step size, or an array of them if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> ef21_gamma(L=1.0, L_tilde=1.0, contraction=0.75)
        0.5
    """
    positive(L=L, L_tilde=L_tilde, contraction=contraction)
    below(1.0, "1", contraction=contraction)
    theta = 1 - root(1 - np.asarray(contraction))
    return plain(1 / (np.asarray(L) + np.asarray(L_tilde) * root(1 - np.asarray(contraction)) / theta))


def ef21(*, F0: Numbers, gamma: Numbers, rounds: Numbers, contraction: Numbers, start_error: Numbers = 0.0) -> Value:
    """√(2F0/(γ(K+1)) + G⁰/(θ(K+1))), G⁰ = mean‖∇f_i(x⁰) − g_i⁰‖², for γ ≤ `ef21_gamma`.

    The original theorem starts after a first update of the memories, which can only lower G⁰.

    Args:
        F0: f(x⁰) − f_inf.
        gamma: The step size γ.
        rounds: K + 1, the number of messages of a client.
        contraction: a, with E‖C(v) − v‖² ≤ (1−a)‖v‖².
        start_error: √G⁰.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is out of range, or a condition of the statement does not hold.

    Example:
        >>> ef21(F0=1.0, gamma=0.5, rounds=400, contraction=0.75)
        0.1
    """
    positive(gamma=gamma, contraction=contraction)
    below(1.0, "1", contraction=contraction)
    non_negative(F0=F0, start_error=start_error)
    whole(1, rounds=rounds)
    theta = 1 - root(1 - np.asarray(contraction))
    squares = 2 * np.asarray(F0) / gamma + np.asarray(start_error) ** 2 / theta
    return plain(root(squares / rounds))


def gradient_descent(*, L: Numbers, F0: Numbers, rounds: Numbers) -> Value:
    """√(2LF0/(K+1)): gradient descent with γ = 1/L, or with normalised steps of length √(2F0/(L(K+1))).

    Args:
        L: The smoothness of f.
        F0: f(x⁰) − f_inf.
        rounds: K + 1, the number of messages of a client.

    Returns:
        The bound, or an array of bounds if an argument is an array.

    Raises:
        UsageError: A value is negative, not finite, or, where it must not be, zero.

    Example:
        >>> gradient_descent(L=2.0, F0=1.0, rounds=400)
        0.1
    """
    positive(L=L)
    non_negative(F0=F0)
    whole(1, rounds=rounds)
    return plain(root(2 * np.asarray(L) * F0 / np.asarray(rounds)))
