"""A data set in memory: what training needs to know about it, checked once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..errors import UsageError, at_least
from .augment import Augment, Transform


@dataclass(frozen=True)
class Dataset:
    """Inputs and class indices, and what to do with a batch before the model sees it.

    `train` and `test` hold (inputs, targets). Tabular inputs are float32 and ready to use; images stay uint8,
    a quarter of the memory and of the transfer, and `transform` makes floats of them on the device, batch by
    batch. `augment` is for training only and comes before `transform`. Targets are int64 in 0 … classes − 1.
    `fitted`: inputs were scaled by statistics of the training records, which no noise covers in a private run.
    `groups` names the natural owner of each training record, for the split by column.
    """

    name: str
    train: TensorDataset
    test: TensorDataset | None
    classes: int
    shape: tuple[int, ...]
    transform: Transform | None = None
    augment: Augment | None = None
    groups: Tensor | None = None
    fitted: bool = False

    def __post_init__(self) -> None:
        at_least(1, classes=self.classes)
        for part, data in (("train", self.train), ("test", self.test)):
            if data is not None:
                self._check(part, data)
        if self.groups is not None and self.groups.shape != (len(self.train),):
            raise UsageError(
                f"groups of {self.name} must have one value a training record, {len(self.train)}, "
                f"got shape {tuple(self.groups.shape)}"
            )

    def _check(self, part: str, data: TensorDataset) -> None:
        if len(data.tensors) != 2:
            raise UsageError(f"{part} of {self.name} must hold inputs and targets, got {len(data.tensors)} tensors")
        inputs, targets = data.tensors
        if not len(targets):
            raise UsageError(f"{part} of {self.name} has no records")
        if tuple(inputs.shape[1:]) != self.shape:
            raise UsageError(
                f"{part} inputs of {self.name} must have shape {self.shape} a record, got {tuple(inputs.shape[1:])}"
            )
        if targets.dtype != torch.int64 or targets.ndim != 1:
            raise UsageError(
                f"{part} targets of {self.name} must be int64 class indices, one a record, "
                f"got {targets.dtype} of shape {tuple(targets.shape)}"
            )
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= self.classes:
            raise UsageError(f"{part} targets of {self.name} must lie in 0 … {self.classes - 1}, got {low} … {high}")
