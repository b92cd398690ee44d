"""How much each round's message weighs in the last model, for methods whose server step is linear.

If the server's step is a linear function of the mean messages so far, the same in every round and for every coordinate,
an impulse shows it: a mean message of 1 in one round and 0 in all others moves x by γ h_0 in that round, by γ h_1 in
the next, and so on. With step sizes γ_k, the message of round t enters the last model with the weight

    a_t = Σ_{k >= t} γ_k h_{k−t}.

| method | h_j | a_t with a constant γ |
| --- | --- | --- |
| error feedback without server normalisation and decay | β | γβ (T − t) |
| the same with decay λ | β (1−λ)^j | γβ (1 − (1−λ)^{T−t}) / λ |
| DP-SGD | β, then 0 | γβ |
| DP-SGD with momentum p | β p^j | γβ (1 − p^{T−t}) / (1−p) |

With a constant γ, the iterate j rounds after a message's own contains it with the weight γ Σ_{i<=j} h_i
(`iterate_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import UsageError
from .method import SERVER_FUNCTIONS, Method, Steps, unknown_noise
from .operators import claim_covers


def message_weights(method: Method, step_sizes: Sequence[float]) -> tuple[float, ...]:
    """The weight of each round's mean message in the last model.

    Args:
        method: A method with a linear server step (`Method.linear_server`).
        step_sizes: The step size of every round.

    Returns:
        One weight for each round.

    Raises:
        UsageError: The method does not state that its server step is linear.

    Example:
        >>> from normec import NormEC
        >>> message_weights(NormEC(alpha=0.1, beta=0.5, server_norm=False), [1.0, 1.0, 1.0])
        (1.5, 1.0, 0.5)
    """
    if not _is_linear(method):
        raise UsageError(
            f"noise_schedule='best' needs the weight of each round's message in the last model, which is not known for "
            f"{method.name}: {unknown_noise(method, 'another noise_schedule')}"
        )
    response = _impulse_response(method, len(step_sizes))
    weights = np.convolve(np.asarray(step_sizes, dtype=np.float64)[::-1], response)[: len(response)][::-1]
    return tuple(map(float, weights))


def iterate_weights(method: Method, rounds: int) -> tuple[float, ...]:
    """How much of a mean message is in the iterate of its round and in each later one, at a constant step size of 1.

    For a server step that is not linear they are 1: such a step is taken as a sum of the messages.

    Args:
        method: The method.
        rounds: The number of rounds.

    Returns:
        One weight for each round.

    Example:
        >>> from normec import DPSGD, Clip, NormEC
        >>> iterate_weights(NormEC(alpha=0.1, beta=0.5, server_norm=False), 3), iterate_weights(DPSGD(Clip(1.0)), 3)
        ((0.5, 1.0, 1.5), (1.0, 1.0, 1.0))
    """
    if not _is_linear(method):
        return (1.0,) * rounds
    return tuple(map(float, np.cumsum(_impulse_response(method, rounds))))


def _is_linear(method: Method) -> bool:
    """Whether the method states that its server step, as it is, is linear."""
    return method.linear_server and claim_covers(method, "linear_server", *SERVER_FUNCTIONS)


def _impulse_response(method: Method, rounds: int) -> list[float]:
    """h_0, h_1, …: the directions of the rounds from that of a mean message of 1 on."""
    steps = Steps(method, torch.zeros(1, dtype=torch.float64))
    state, message, response = dict(steps.initial_server_state), torch.ones(1, dtype=torch.float64), []
    for _ in range(rounds):
        direction, state = steps.server_step(message, state)
        response.append(float(direction))
        message = torch.zeros_like(message)
    return response
