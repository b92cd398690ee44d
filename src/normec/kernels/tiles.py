"""3×3 convolutions as matrix products whose shapes suit a GPU's matrix units: a row is a tile of output pixels.

With few channels, a product for a single pixel is thin, and every input pixel is read nine times. Here, a row of the
product is a tile of `tall` × `wide` output pixels. The left matrix has columns for the `rows` × `columns` input pixels
that affect a tile, times their channels; the result has columns for the pixels of the tile, times their channels. The
matrix of weights repeats the weights of the layer along the tile, with zeros where an input pixel does not affect an
output pixel. Images have channels last, and the padding is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MOST = 64  # the most input or output channels; with more, cuDNN is fast
FEW = 2048  # pixels per client; below, writing the sums takes longer than computing them, as measured
LEAST = 4  # the least numbers per input pixel; fewer channels are padded, so that a pixel is one load


def power(number: int) -> int:
    """Return the next power of two, because Triton's blocks have such sizes."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Tiles:
    """One convolution, forward or the gradient of its input, divided into tiles."""

    reads: int  # input channels
    writes: int  # output channels
    tall: int
    wide: int
    step: tuple[int, int]  # input pixels from a tile to the next one below, and to the next one on the right
    offset: int  # of the first input pixel of a tile
    rows: int  # of input pixels of a tile
    columns: int
    chunk: int  # columns of a row in one product
    tap: tuple[int, int, int]  # (t, by, per): tap t + by·r + per·w connects input row r and output row w
    pitch: int  # numbers from an input pixel to the next: channels, with zero padding

    @property
    def padded_reads(self) -> int:
        """Input channels with padding; a product has an inner dimension of at least 16."""
        return max(16 // self.chunk, power(self.reads))

    @property
    def padded_writes(self) -> int:
        """Output channels with padding."""
        return max(16, power(self.writes))

    @property
    def chunks(self) -> int:
        return -(-self.columns // self.chunk)

    @property
    def depth(self) -> int:
        """The rows of the weights, one for each input pixel and channel."""
        return self.rows * self.chunks * self.chunk * self.padded_reads

    @property
    def breadth(self) -> int:
        """The columns of the weights, one for each output pixel of the tile and channel."""
        return self.tall * self.wide * self.padded_writes

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of tiles down and across an output image."""
        return -(-height // self.tall), -(-width // self.wide)

    def table(self, start: int) -> Tensor:
        """Return the index in the flat x of each weight ``[depth, breadth]``; −1 means that the weight is zero.

        The layer's parameter ``[out, in, 3, 3]`` begins at `start`.
        """
        shape = (self.rows, self.chunks * self.chunk, self.padded_reads, self.tall, self.wide, self.padded_writes)
        row, column, read, down, right, write = (
            torch.arange(size).view([-1 if i == at else 1 for i in range(6)]) for at, size in enumerate(shape)
        )
        base, by, per = self.tap
        upper, left = base + by * row + per * down, base + by * column + per * right
        # The strides of input and output channels: forward, the first index of the parameter is the output channel.
        own = (9, 9 * self.reads) if by == 1 else (9 * self.writes, 9)
        at = start + read * own[0] + write * own[1] + 3 * upper + left
        real = (read < self.reads) & (write < self.writes)
        for tap in (upper, left):
            real = real & (tap >= 0) & (tap < 3)
        return torch.where(real, at, -1).to(torch.int32).reshape(self.depth, self.breadth)


def forward(inputs: int, outputs: int, stride: int, tall: int = 1, most: int = 2) -> Tiles:
    """Return the tiles from x, padded to `LEAST`, to y; with few channels, tiles are `most` wide."""
    wide = most if stride == 1 and inputs <= MOST // 2 else 1
    chunk = 4 if inputs <= MOST // 2 else 1
    rows, columns = (stride * (count - 1) + 3 for count in (tall, wide))
    step, pitch = (stride * tall, stride * wide), max(LEAST, inputs)
    return Tiles(inputs, outputs, tall, wide, step, -1, rows, columns, chunk, (0, 1, -stride), pitch)


def backward(inputs: int, outputs: int, stride: int) -> Tiles:
    """Return the tiles from the gradient of y to that of x, for a layer from `inputs` to `outputs` channels."""
    if stride == 2:  # a square of four pixels of x depends on a square of four of y
        return Tiles(outputs, inputs, 2, 2, (1, 1), 0, 2, 2, 2, (1, -2, 1), outputs)
    there = forward(outputs, inputs, 1)
    return replace(there, tap=(2, -1, 1), pitch=outputs)


def gathering(inputs: int, outputs: int, stride: int, pixels: int) -> Tiles:
    """Return the tiles from x and the gradient of y to that of the weights, for clients with `pixels` pixels of y.

    With few channels, a tile is a square of four pixels. Each pixel of a tile has its own sums, which are written and
    then added. If there are few pixels, or enough output channels for a product, tiles are smaller.
    """
    tall = 2 if stride == 1 and inputs <= MOST // 4 and pixels >= FEW else 1
    return forward(inputs, outputs, stride, tall, most=1 if outputs >= MOST else 2)


def suits(kernel: tuple[int, ...], stride: tuple[int, ...], padding: object, dilation: tuple[int, ...]) -> bool:
    """Whether a layer has a supported geometry: 3×3, padding 1, stride 1 or 2."""
    return kernel == (3, 3) and stride in ((1, 1), (2, 2)) and padding == (1, 1) and dilation == (1, 1)


def size(seen: tuple[int, ...], stride: int) -> tuple[int, int]:
    """Return the height and width of the output of such a convolution."""
    return (seen[0] - 1) // stride + 1, (seen[1] - 1) // stride + 1
