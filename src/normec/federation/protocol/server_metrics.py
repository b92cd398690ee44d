"""The rows in the history of a federated run: metrics of x^k that need no party's data."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from ...algorithms.method import Method
from ...storage.history import Row
from ...training.run import State
from .wire import Reply


def observed(
    method: Method, state: State, taken: Collection[Reply], weights: Mapping[str, float], *, noisy: bool
) -> Row:
    """Row k, before the step of round k. It has a loss only if parties report theirs, which needs their permission.

    `weights`: n·w_i by the party's name.
    """
    parties = len(weights)
    payload = method.payload(method.message_length(len(state.x)), state.x.element_size())
    row: Row = {"round": state.round, "messages": state.messages, "bytes": payload * state.messages / parties}
    losses = [(weights[reply.node], reply.loss) for reply in taken if reply.loss is not None]
    if losses:
        row["loss"] = math.fsum(w * loss for w, loss in losses) / math.fsum(w for w, _ in losses)
    if taken and not noisy:  # the norm of a noisy message is uninformative
        norms = [float(np.linalg.norm(reply.message)) for reply in taken]
        row |= {"message_norm": math.fsum(norms) / len(norms), "message_norm_max": max(norms)}
    if taken:
        row["parties"] = len(taken)
    return row
