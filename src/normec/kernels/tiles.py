"""3×3 convolutions as products of matrices that a GPU's matrix units like: a row is a tile of output pixels.

With few channels a single pixel makes a thin product, and every input pixel is read nine times. A row of the product
here is a tile of `tall` × `wide` output pixels. Its columns on the left are the `rows` × `columns` input pixels that a
tile sees, times their channels; on the right the tile's pixels, times their channels. The weights between them are the
layer's, repeated along the tile, with zeros where a pixel does not see another. Channels last, padding 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MOST = 64  # channels, in and out: above them cuDNN does well
FEW = 2048  # pixels a client: below them writing its sums takes longer than making them, as was timed
LEAST = 4  # numbers of a pixel that is read: fewer channels are filled up, so that pixels are loaded as a whole


def power(number: int) -> int:
    """The next power of two, as Triton's blocks are."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Tiles:
    """One convolution, forward or the gradient of its input, cut into tiles."""

    reads: int  # channels
    writes: int
    tall: int
    wide: int
    step: tuple[int, int]  # seen pixels from a tile to the one below, and to the one on the right
    offset: int  # of the first pixel that a tile sees
    rows: int  # of pixels that a tile sees
    columns: int
    chunk: int  # columns of a row that one product takes
    tap: tuple[int, int, int]  # (t, by, per): seen row r and written row w are joined by tap t + by·r + per·w
    pitch: int  # numbers from a seen pixel to the next: channels, or more where they are filled up with zeros

    @property
    def padded_reads(self) -> int:
        """Channels read, filled up: a product is at least 16 deep."""
        return max(16 // self.chunk, power(self.reads))

    @property
    def padded_writes(self) -> int:
        """Channels written, filled up."""
        return max(16, power(self.writes))

    @property
    def chunks(self) -> int:
        return -(-self.columns // self.chunk)

    @property
    def depth(self) -> int:
        """The weights' rows: one for each seen pixel and channel."""
        return self.rows * self.chunks * self.chunk * self.padded_reads

    @property
    def breadth(self) -> int:
        """The weights' columns: one for each pixel of the tile and channel."""
        return self.tall * self.wide * self.padded_writes

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Tiles down and across an image to be written."""
        return -(-height // self.tall), -(-width // self.wide)

    def table(self, start: int) -> Tensor:
        """Which number of the flat x is each weight ``[depth, breadth]``; −1: none, it is zero.

        The layer's parameter ``[out, in, 3, 3]`` begins at `start`.
        """
        shape = (self.rows, self.chunks * self.chunk, self.padded_reads, self.tall, self.wide, self.padded_writes)
        row, column, read, down, right, write = (
            torch.arange(size).view([-1 if i == at else 1 for i in range(6)]) for at, size in enumerate(shape)
        )
        base, by, per = self.tap
        upper, left = base + by * row + per * down, base + by * column + per * right
        own = (9, 9 * self.reads) if by == 1 else (9 * self.writes, 9)  # forward the parameter's first index is written
        at = start + read * own[0] + write * own[1] + 3 * upper + left
        real = (read < self.reads) & (write < self.writes)
        for tap in (upper, left):
            real = real & (tap >= 0) & (tap < 3)
        return torch.where(real, at, -1).to(torch.int32).reshape(self.depth, self.breadth)


def forward(inputs: int, outputs: int, stride: int, tall: int = 1, most: int = 2) -> Tiles:
    """From x, filled up to `LEAST`, to y. Few channels: tiles `most` wide; four neighbours' lie side by side."""
    wide = most if stride == 1 and inputs <= MOST // 2 else 1
    chunk = 4 if inputs <= MOST // 2 else 1
    rows, columns = (stride * (count - 1) + 3 for count in (tall, wide))
    step, pitch = (stride * tall, stride * wide), max(LEAST, inputs)
    return Tiles(inputs, outputs, tall, wide, step, -1, rows, columns, chunk, (0, 1, -stride), pitch)


def backward(inputs: int, outputs: int, stride: int) -> Tiles:
    """From the slope of y to that of x, for a layer from `inputs` to `outputs` channels."""
    if stride == 2:  # a square of four pixels of x touches a square of four of y
        return Tiles(outputs, inputs, 2, 2, (1, 1), 0, 2, 2, 2, (1, -2, 1), outputs)
    there = forward(outputs, inputs, 1)
    return replace(there, tap=(2, -1, 1), pitch=outputs)


def gathering(inputs: int, outputs: int, stride: int, pixels: int) -> Tiles:
    """From x and the slope of y to that of the weights, of clients with so many pixels of y.

    Few channels fill up squares of four pixels. Each pixel of a tile has sums of its own, which are written and added
    up: where pixels are few, or outputs are enough for a product, tiles are smaller.
    """
    tall = 2 if stride == 1 and inputs <= MOST // 4 and pixels >= FEW else 1
    return forward(inputs, outputs, stride, tall, most=1 if outputs >= MOST else 2)


def suits(kernel: tuple[int, ...], stride: tuple[int, ...], padding: object, dilation: tuple[int, ...]) -> bool:
    """Whether a layer is one of these, whatever its channels: 3×3, padding 1, every pixel or every second one."""
    return kernel == (3, 3) and stride in ((1, 1), (2, 2)) and padding == (1, 1) and dilation == (1, 1)


def size(seen: tuple[int, ...], stride: int) -> tuple[int, int]:
    """Height and width of what such a convolution makes of an image."""
    return (seen[0] - 1) // stride + 1, (seen[1] - 1) // stride + 1
