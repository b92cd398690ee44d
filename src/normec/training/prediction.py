"""The outputs of a trained model for new inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import UsageError, at_least

PREDICTED = 1000  # inputs that are predicted at once


def predicted(model: nn.Module, inputs: Any, transform: Callable[[Any], Any] | None, batch_size: int) -> Any:
    """Return the model's outputs for `inputs`, in batches and without gradients, on the host.

    Args:
        model: The trained model; it is put into evaluation mode.
        inputs: A tensor or a NumPy array ``[N, ...]``, or a dict, list or tuple of them, as one batch of a client's
            data.
        transform: Applied to every batch first, as in training.
        batch_size: Inputs at a time.

    Raises:
        UsageError: The inputs are empty, or are not tensors of one length.
    """
    at_least(1, batch_size=batch_size)
    held = tree_map(_as_tensor, inputs)
    leaves = tree_flatten(held)[0]
    if any(isinstance(leaf, int | float) for leaf in leaves):
        raise UsageError(
            f"inputs must be tensors or arrays, got a {type(inputs).__name__} with numbers in it; give "
            "torch.tensor(inputs)"
        )
    lengths = {len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise UsageError(
            f"inputs must be tensors or arrays of one length above 0, got {type(inputs).__name__} of lengths "
            f"{sorted(lengths)}"
        )
    like = next(model.parameters())
    model.eval()
    parts = []
    with torch.no_grad():
        for start in range(0, lengths.pop(), batch_size):
            part = tree_map(lambda leaf, start=start: leaf[start : start + batch_size].to(like.device), held)
            part = part if transform is None else transform(part)
            part = tree_map(lambda leaf: leaf.to(like.dtype) if leaf.is_floating_point() else leaf, part)
            outputs = (
                model(**part) if isinstance(part, dict) else model(part) if isinstance(part, Tensor) else model(*part)
            )
            parts.append(tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, outputs))
    flat, form = tree_flatten(parts[0])
    columns = zip(*(tree_flatten(part)[0] for part in parts), strict=True)
    joined = [
        torch.cat(column) if isinstance(column[0], Tensor) and column[0].ndim else column[0] for column in columns
    ]
    return form.unflatten(joined) if flat else parts[0]


def _as_tensor(leaf: Any) -> Any:
    return torch.as_tensor(leaf) if hasattr(leaf, "__array__") or isinstance(leaf, Tensor) else leaf
