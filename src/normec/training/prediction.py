"""The outputs of a trained model for new inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import UsageError, at_least
from ..gradients.restored import UserState
from ..problems.batch_form import joined
from ..problems.losses import described

PREDICTED = 1000  # inputs that are predicted at once
_MISFITS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)  # of PyTorch, where shapes do not fit


def predicted(model: nn.Module, inputs: Any, transform: Callable[[Any], Any] | None, batch_size: int) -> Any:
    """Return the model's outputs for `inputs`, in batches and without gradients, on the host.

    Args:
        model: The trained model; it is put into evaluation mode.
        inputs: A tensor or a NumPy array ``[N, ...]``, or a dict, list or tuple of them, as one batch of a client's
            data; the output of a Hugging Face tokenizer is taken as a dict.
        transform: Applied to every batch first, as in training.
        batch_size: Inputs at a time.

    Raises:
        UsageError: The inputs are empty, are not tensors of one length, or do not fit the model.
    """
    at_least(1, batch_size=batch_size)
    held = tree_map(_as_tensor, dict(inputs) if isinstance(inputs, Mapping) else inputs)
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
    model.eval()
    parts = []
    # Both share closures with those of the problem, of which a later private run may be made.
    with torch.no_grad(), UserState(transform, model).restored():
        for start in range(0, lengths.pop(), batch_size):
            part = _rows(held, start, batch_size, model, transform)
            try:
                outputs = _outputs(model, part)
            except _MISFITS:
                _refuse_misfit(model, held, _rows(held, start, 1, model, transform))
                raise
            parts.append(tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, outputs))
    return joined(parts)


def _rows(held: Any, start: int, count: int, model: nn.Module, transform: Callable[[Any], Any] | None) -> Any:
    """Return some of the inputs as the model takes them."""
    like = next(model.parameters())
    part = tree_map(lambda leaf: leaf[start : start + count].to(like.device), held)
    part = part if transform is None else transform(part)
    return tree_map(lambda leaf: leaf.to(like.dtype) if leaf.is_floating_point() else leaf, part)


def _outputs(model: nn.Module, part: Any) -> Any:
    return model(**part) if isinstance(part, dict) else model(part) if isinstance(part, Tensor) else model(*part)


def _refuse_misfit(model: nn.Module, inputs: Any, first: Any) -> None:
    """Refuse `inputs` if the model cannot even take the `first` of them, and name the layer that fails."""
    entered: list[str] = []  # the layers that were called and have not returned

    def leave(*_: Any) -> None:
        entered.pop()

    hooks = []
    for name, module in model.named_modules():
        kind = f"{type(module).__name__}({module.extra_repr()})"
        called = f"its layer {name}, {kind}," if name else kind
        hooks.append(module.register_forward_pre_hook(lambda _module, _given, called=called: entered.append(called)))
        hooks.append(module.register_forward_hook(leave))
    try:
        _outputs(model, first)
    except _MISFITS as error:
        where, text = entered[-1] if entered else "the call", " ".join(str(error).split()).rstrip(".")
        raise UsageError(
            f"{described('inputs', inputs)}, and the model cannot take them: {where} fails with {text!r}; give "
            "inputs with the columns and the type of the training records"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _as_tensor(leaf: Any) -> Any:
    return torch.as_tensor(leaf) if hasattr(leaf, "__array__") or isinstance(leaf, Tensor) else leaf
