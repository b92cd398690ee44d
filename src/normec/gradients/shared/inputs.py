"""The records of a block as the model takes them: images of bytes on a GPU by one kernel, all others step by step."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ... import kernels
from ...data.augment import CropFlip, Normalize, Scale
from ...problem import Problem


def inputs(problem: Problem, records: Tensor, numbers: Tensor, uniforms: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Records of these numbers, one after another; `uniforms` ``[len(numbers), draws]`` for the augmentation."""
    if dtype == torch.float32 and _known(problem, uniforms) and _bytes(records, problem):
        from ...kernels.images import prepare

        mean, std = cast(Normalize, problem.transform).constants(torch.float32, records.device)
        padding = cast(CropFlip, problem.augment).padding if uniforms is not None else 0
        return prepare(records, numbers, mean, std, uniforms, padding)
    found = records.index_select(0, numbers)
    if uniforms is not None and problem.augment is not None:
        found = problem.augment(found, uniforms)
    return problem.prepared(found, dtype)


def steady(problem: Problem) -> bool:
    """Whether the same records are the same inputs, as far as is known."""
    return problem.augment is None and (problem.transform is None or type(problem.transform) in (Normalize, Scale))


def _known(problem: Problem, uniforms: Tensor | None) -> bool:
    return (uniforms is None or type(problem.augment) is CropFlip) and type(problem.transform) in (Normalize, Scale)


def _bytes(records: Tensor, problem: Problem) -> bool:
    whole = records.ndim == 4 and records.dtype == torch.uint8 and records.is_contiguous()
    return whole and records.shape[1] == len(cast(Normalize, problem.transform).mean) and kernels.usable(problem.x0)
