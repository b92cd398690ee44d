"""Transforms and augmentations of image batches, as pure functions of tensors.

An augmentation draws no random numbers itself: the training loop, which owns the seeds, passes uniforms to it, and a
resumed run sees the same crops. `draws` is the number of uniforms per image. There is no Python loop over images and no
synchronisation with the device, so that the same call works on a CPU, on a GPU, under ``torch.vmap`` and inside a CUDA
graph. Leading dimensions are free: [B, C, H, W] or [clients, B, C, H, W].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..errors import UsageError, at_least, positive


class Transform(Protocol):
    """A deterministic function of a batch; applied to every batch, in training and in testing."""

    def __call__(self, inputs: Tensor, /) -> Tensor: ...


class Augment(Protocol):
    """A function of a batch that is random through `uniforms` only; applied in training, before the transform."""

    @property
    def draws(self) -> int:
        """Uniforms needed for each image."""
        ...

    def __call__(self, inputs: Tensor, uniforms: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class CropFlip:
    """Random crop after zero padding, then a horizontal flip with probability ½.

    This is the usual augmentation of CIFAR. The zeros are black pixels, because the crop comes before `Normalize`. The
    first two uniforms of an image choose the crop's top and left among 0 … 2·padding; the third flips it if it is < ½.

    Args:
        padding: The number of zero pixels on each side.

    Raises:
        UsageError: `padding` is negative.

    Example:
        >>> images = torch.ones(2, 3, 8, 8)
        >>> CropFlip(padding=2)(images, torch.tensor([[0.0, 0.0, 0.9], [0.5, 0.5, 0.9]])).sum((1, 2, 3)).tolist()
        [108.0, 192.0]
    """

    padding: int = 4
    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        at_least(0, padding=self.padding)

    def __call__(self, inputs: Tensor, uniforms: Tensor) -> Tensor:
        _check(inputs, uniforms, self.draws, "CropFlip")
        height, width = inputs.shape[-2:]
        # If a uniform is rounded up to 1 in float32, the offset would be one too large; the clamp prevents this.
        offset = (uniforms[..., :2] * (2 * self.padding + 1)).long().clamp(max=2 * self.padding) - self.padding
        rows = torch.arange(height, device=inputs.device) + offset[..., 0, None]
        columns = torch.arange(width, device=inputs.device)
        columns = torch.where(uniforms[..., 2, None] < 0.5, columns.flip(0), columns) + offset[..., 1, None]
        # Padding is never built: pixels outside are read from the border and then blanked.
        source = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
        inside = ((rows >= 0) & (rows < height))[..., :, None] & ((columns >= 0) & (columns < width))[..., None, :]
        flat = inputs.flatten(-2)
        crop = flat.gather(-1, source.flatten(-2).unsqueeze(-2).expand(flat.shape)).view(inputs.shape)
        return crop.masked_fill(~inside.unsqueeze(-3), 0)


@dataclass(frozen=True)
class Flip:
    """A horizontal flip where an image's one uniform is < ½.

    Example:
        >>> Flip()(torch.arange(3.0).view(1, 1, 1, 3), torch.tensor([[0.2]])).flatten().tolist()
        [2.0, 1.0, 0.0]
    """

    draws: ClassVar[int] = 1

    def __call__(self, inputs: Tensor, uniforms: Tensor) -> Tensor:
        _check(inputs, uniforms, self.draws, "Flip")
        return torch.where(uniforms[..., 0, None, None, None] < 0.5, inputs.flip(-1), inputs)


@dataclass(frozen=True)
class Normalize:
    """Scale images channel by channel: (x/255 − mean)/std for uint8, as float32; (x − mean)/std for floats in 0 … 1.

    Args:
        mean: The mean of each channel.
        std: The standard deviation of each channel.

    Raises:
        UsageError: The numbers of means and deviations differ, or a deviation is not positive.

    Example:
        >>> Normalize((0.5,), (0.25,))(torch.full((1, 1, 1, 2), 255, dtype=torch.uint8)).flatten().tolist()
        [2.0, 2.0]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise UsageError(f"mean and std need one value per channel, got {len(self.mean)} and {len(self.std)}")
        for value in self.std:
            positive(std=value)

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.ndim < 3 or inputs.shape[-3] != len(self.mean):
            raise UsageError(
                f"Normalize has {len(self.mean)} channels, got images of shape {tuple(inputs.shape)}; "
                "give [..., C, H, W]"
            )
        pixels = inputs
        if not inputs.is_floating_point():
            # Divide by a tensor, because a GPU would multiply by the rounded inverse of a number.
            pixels = inputs.to(torch.float32) / _constant((255.0,), torch.float32, inputs.device)
        mean, std = self.constants(pixels.dtype, pixels.device)
        return (pixels - mean) / std

    def constants(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and std, ``[C, 1, 1]``."""
        return _constant(tuple(self.mean), dtype, device), _constant(tuple(self.std), dtype, device)


@dataclass(frozen=True)
class Scale(Normalize):
    """`Normalize` with the one mean and std of MNIST's training pixels.

    Args:
        mean: The mean of each channel.
        std: The standard deviation of each channel.

    Raises:
        UsageError: The numbers of means and deviations differ, or a deviation is not positive.

    Example:
        >>> Scale().mean, Scale().std
        ((0.1307,), (0.3081,))
    """

    mean: tuple[float, ...] = (0.1307,)
    std: tuple[float, ...] = (0.3081,)


def treats_records_alone(part: Transform | Augment | None) -> bool:
    """Whether the result of a record is known to depend on that record alone, in any batch.

    Only exact types are known: a subclass or a custom function may use statistics of the whole batch.
    """
    return part is None or type(part) in (CropFlip, Flip, Normalize, Scale)


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept, because a copy from the host in every batch costs a synchronisation and may not be captured in a
    # CUDA graph; an ordinary tensor even when first met in inference mode, so that autograd can use it later.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


def _check(images: Tensor, uniforms: Tensor, draws: int, name: str) -> None:
    if images.ndim < 3 or uniforms.shape != (*images.shape[:-3], draws):
        raise UsageError(
            f"{name} needs images [..., C, H, W] and uniforms [..., {draws}], got {tuple(images.shape)} and "
            f"{tuple(uniforms.shape)}"
        )
