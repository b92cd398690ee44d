"""Checks that a loss is the mean over the records of a batch, and the cross-entropy loss with class weights.

The parts of the messages about a model, a loss and records that do not fit together are made here too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UsageError


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """The mean over a batch of w_y times the cross-entropy loss, with a weight for each class.

    `F.cross_entropy(..., weight=w)` divides by the sum of the weights in the batch, so that a record's share depends on
    the others.
    """

    weights: tuple[float, ...]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = outputs.new_tensor(self.weights)
        return F.cross_entropy(outputs, targets, weight=weights, reduction="none").mean()


def refuse_other_reductions(loss: Any) -> None:
    """Refuse losses whose settings say that they are not the mean over a batch."""
    bound = loss.keywords if isinstance(loss, functools.partial) else {}
    reduction = bound.get("reduction", getattr(loss, "reduction", "mean"))
    if reduction != "mean":
        raise UsageError(
            f"a client's loss is the mean over its records, got reduction={reduction!r}; leave reduction out"
        )
    weight = bound.get(
        "weight", getattr(loss, "weight", None) if isinstance(loss, nn.modules.loss._WeightedLoss) else None
    )
    if weight is not None and not isinstance(loss, nn.BCELoss):
        raise UsageError(
            "a loss with weight=… divides by the weights in the batch, so that a record's share depends on the others; "
            "give class_weights=… to the problem instead"
        )


def weighted(loss: Any, weights: Sequence[float] | Tensor) -> WeightedCrossEntropy:
    """Return the weighted form of a cross-entropy loss."""
    plain = type(loss) is nn.CrossEntropyLoss and loss.ignore_index == -100 and not loss.label_smoothing
    if loss is not F.cross_entropy and not plain:
        raise UsageError("class_weights are for torch.nn.functional.cross_entropy; weight another loss in its own code")
    held = tuple(float(weight) for weight in weights)
    if not held or not all(0 <= weight < float("inf") for weight in held) or not any(held):
        raise UsageError(f"class_weights must be numbers >= 0, one per class and not all 0, got {held}")
    return WeightedCrossEntropy(held)


def refuse_wrong_mean(loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any) -> None:
    """Refuse a loss that two frequent mistakes keep from being the mean over the records of a batch.

    A sum over the batch doubles if every record occurs twice. Outputs and targets of unlike shapes, such as [n, 1] and
    [n], are broadcast by losses such as `mse_loss`, which then compare every output with every target.

    Args:
        loss: The loss.
        outputs: The model's outputs for a few records.
        targets: Their targets.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or len(outputs) != len(targets):
        return
    sums = crossed = False
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's remark on shapes that differ, which is no refusal
        once, twice = loss(outputs, targets), loss(torch.cat([outputs, outputs]), torch.cat([targets, targets]))
        sums = bool(torch.isclose(twice, 2 * once, rtol=1e-3) & (once.abs() > 1e-6) & once.isfinite())
        if outputs.shape != targets.shape and outputs.numel() == targets.numel():
            alone = [loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(outputs))]
            crossed = not torch.isclose(once, torch.stack(alone).mean(), rtol=1e-3, atol=1e-6)
    if sums:
        raise UsageError(
            "the loss is the sum over a batch: it doubles if every record occurs twice; a client's loss is the "
            "mean over its records, so leave out reduction='sum'"
        )
    if crossed:
        raise UsageError(
            "the loss compares the outputs of every record with the targets of all: outputs have the shape "
            f"{list(outputs.shape)}, and targets {list(targets.shape)}; give targets.reshape(outputs.shape) or "
            "outputs of the targets' shape"
        )


def described(name: str, value: Any) -> str:
    """Return the type and shape of a batch, for a message."""
    if isinstance(value, Mapping):
        return f"{name} are a dict of {', '.join(map(repr, value))}"
    if not isinstance(value, Tensor):
        return f"{name} are a {type(value).__name__}"
    return f"{name} are {str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"


def cure(loss: Any, seen: Mapping[str, Any]) -> str:
    """Return the end of a message that says how to correct a usual mistake with targets, or an empty text."""
    targets, outputs = seen.get("targets"), seen.get("outputs")
    if isinstance(seen.get("inputs"), Mapping) and outputs is None:
        return "; the model is called with these names as keyword arguments"
    if isinstance(outputs, Mapping) and str(getattr(loss, "__module__", "")).startswith("torch.nn."):
        entry = "logits" if "logits" in outputs else next(iter(outputs), "")
        return (
            "; the loss gets the whole dict: give a loss of one entry, such as lambda outputs, targets: "
            f"torch.nn.functional.cross_entropy(outputs[{entry!r}], targets)"
        )
    if not isinstance(targets, Tensor) or not isinstance(outputs, Tensor):
        return ""
    by_class = loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss | WeightedCrossEntropy)
    if by_class and targets.is_floating_point():
        return "; class numbers are integers: give targets.long()"
    if by_class and targets.ndim == outputs.ndim and targets.shape[-1] == 1:
        return "; give one class number for each record: targets.squeeze(1)"
    if by_class and targets.dtype not in (torch.int64, torch.uint8):
        return "; class numbers are of the type int64: give targets.long()"
    if by_class and outputs.ndim > 1 and bool(((targets < 0) | (targets >= outputs.shape[1])).any()):
        return (
            f"; the model tells {outputs.shape[1]} classes apart, which have the numbers 0 to {outputs.shape[1] - 1}: "
            "number the classes from 0 (targets - 1 if they begin at 1), or give the model more outputs"
        )
    if not by_class and not targets.is_floating_point() and targets.shape == outputs.shape:
        return "; if the loss compares numbers, give targets.float()"
    if not by_class and [*targets.shape, 1] == list(outputs.shape):
        return "; give targets.unsqueeze(1), or let the model return outputs.squeeze(1)"
    return ""
