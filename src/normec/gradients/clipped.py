"""Gradients of which every record's share is clipped: (1/B) Σ Clip_C(∇ℓ_r(x)), with a fixed, public B."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..algorithms.operators import Clip
from ..problems.problem import Problem

_CHUNK_FLOATS = 2**24


def clipped_gradient(
    problem: Problem, x: Tensor, client: int, rows: Tensor | None, clip: float, divisor: float
) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of a client on its records `rows` (None: all), each clipped to `clip`, summed, over `divisor`.

    The penalty depends on no record: its gradient is added whole. The loss is for the history; no guarantee covers it.
    """
    some = rows is None or len(rows) > 0
    inputs, targets = problem.records.batch(client, rows) if some else (x.new_empty(0), x.new_empty(0))
    total, losses = torch.zeros_like(x), x.new_zeros(())
    for start in range(0, len(inputs), size := max(1, _CHUNK_FLOATS // len(x))):
        grads, values = record_gradients(problem, x, inputs[start : start + size], targets[start : start + size])
        total += Clip(clip)(grads).sum(0)
        losses += values.sum()
    total /= divisor
    loss = losses / divisor
    base, slope = problem.penalised(x)
    return loss + base, total if slope is None else total + slope


def record_gradients(problem: Problem, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Every record's gradient ``[B, d]`` and loss ``[B]``; the model and the transform see one record at a time."""
    problem.model.train()

    def one(point: Tensor, item: Tensor, target: Tensor) -> Tensor:
        return problem.loss(problem.outputs(point, item[None]), target[None])

    each = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness="different")
    grads, values = each(x, inputs, targets)
    return grads, values
