"""The records of a block as the model expects them: one kernel prepares byte images on a GPU, PyTorch all others.

Inputs that are the same in every round are prepared once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ... import kernels
from ...data.augment import CropFlip, Normalize, Scale
from ...problems.client_data import ResidentRecords
from ...problems.problem import Problem

_BYTES, _PART = 2**28, 16  # the most bytes that are cached, or this fraction (1/16) of a GPU's memory


def prepare_inputs(
    problem: Problem, records: Tensor, numbers: Tensor, uniforms: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the records `numbers` ``[c, B]``, flattened; `uniforms` ``[c, B, draws]`` are for the augmentation."""
    if dtype == torch.float32 and _known_steps(problem, uniforms) and _byte_images(records, problem):
        from ...kernels.images import prepare

        mean, std = cast(Normalize, problem.transform).constants(torch.float32, records.device)
        padding = cast(CropFlip, problem.augment).padding if uniforms is not None else 0
        drawn = uniforms.flatten(0, 1) if uniforms is not None else None
        return prepare(records, numbers.flatten(), mean, std, drawn, padding)
    found = records.index_select(0, numbers.flatten()).view(*numbers.shape, *records.shape[1:])
    return problem.prepared_by_client(found, uniforms, dtype)


class InputCache:
    """A cache of inputs that are the same in every round."""

    def __init__(self, problem: Problem, records: ResidentRecords, whole: bool) -> None:
        """`whole`: clients use all their records in every round."""
        device, transform = problem.x0.device, problem.transform
        steady = problem.augment is None and (transform is None or type(transform) in (Normalize, Scale))
        size = problem.x0.element_size() * records.inputs[0].numel() * int(records.sizes.sum())
        share = torch.cuda.get_device_properties(device).total_memory // _PART if device.type == "cuda" else 0
        self._on = whole and steady and size <= max(_BYTES, share)
        self._held: dict[int, tuple[Tensor, int]] = {}  # by the group's first client: the inputs and their version

    def of(self, group: Tensor, count: int, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor | None:
        """Return the inputs of a group of clients, `count` records; None if they are not cached."""
        held, version = self._held.get(int(group[0]), (None, 0))
        if held is not None and held._version != version:  # a layer has changed it in place
            self.forget()
        if not self._on:
            return None
        other = held is not None and held.is_floating_point() and held.dtype != dtype
        if held is None or other or len(held) != count:
            held = make()
            self._held[int(group[0])] = (held, held._version)
        return held

    def forget(self) -> None:
        """Empty the cache and switch it off."""
        self._on = False
        self._held.clear()


def _known_steps(problem: Problem, uniforms: Tensor | None) -> bool:
    """Whether the kernel computes the problem's augmentation and transform."""
    return (uniforms is None or type(problem.augment) is CropFlip) and type(problem.transform) in (Normalize, Scale)


def _byte_images(records: Tensor, problem: Problem) -> bool:
    """Whether the records are byte images with the channels of the transform, where a kernel can run."""
    whole = records.ndim == 4 and records.dtype == torch.uint8 and records.is_contiguous()
    return whole and records.shape[1] == len(cast(Normalize, problem.transform).mean) and kernels.usable(problem.x0)
