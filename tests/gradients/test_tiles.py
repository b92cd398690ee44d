"""A convolution cut into tiles is the same convolution: the tables of `tiles` as plain products, on any machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normec.gradients.shared.slots import PackedWeights
from normec.kernels import tiles
from normec.kernels.tiles import Tiles

# channels in and out, stride, height, width
SHAPES = [
    *((3, 16, 1, 5, 6), (16, 16, 1, 6, 8), (16, 16, 1, 5, 7), (16, 32, 2, 6, 8), (32, 32, 1, 4, 5)),
    *((32, 64, 2, 7, 5), (64, 64, 1, 3, 4), (5, 7, 2, 6, 5), (64, 48, 2, 4, 4), (1, 1, 1, 1, 1)),
]
START = 11


def made(inputs: int, outputs: int, stride: int, height: int, width: int) -> tuple[Tensor, ...]:
    """The flat x, images, what the convolution makes of them, its slope, and the slopes of images and weights."""
    torch.manual_seed(0)
    flat = torch.randn(START + 9 * inputs * outputs + 5, dtype=torch.float64)
    weight = flat[START:-5].view(outputs, inputs, 3, 3).clone().requires_grad_()
    images = torch.randn(2, inputs, height, width, dtype=torch.float64, requires_grad=True)
    made = F.conv2d(images, weight, None, stride, 1)
    slope = torch.randn_like(made)
    return flat, images.detach(), made.detach(), slope, *torch.autograd.grad(made, [images, weight], slope)


def seen(images: Tensor, way: Tiles, size: tuple[int, ...]) -> Tensor:
    """What every tile sees ``[tiles, rows, columns, lanes]``, read pixel by pixel."""
    down, right = way.grid(size[0], size[1])
    found = images.new_zeros(len(images), down, right, way.rows, way.chunks * way.chunk, way.padded_reads)
    for r in range(down):
        for s in range(right):
            for row in range(found.shape[3]):
                for column in range(found.shape[4]):
                    y, z = r * way.step[0] + way.offset + row, s * way.step[1] + way.offset + column
                    if 0 <= y < images.shape[2] and 0 <= z < images.shape[3]:
                        found[:, r, s, row, column, : way.reads] = images[:, :, y, z]
    return found.flatten(3).flatten(0, 2)


def untiled(product: Tensor, way: Tiles, images: int, size: tuple[int, ...]) -> Tensor:
    down, right = way.grid(size[0], size[1])
    split = product.view(images, down, right, way.tall, way.wide, way.padded_writes).permute(0, 5, 1, 3, 2, 4)
    whole = split.reshape(images, way.padded_writes, down * way.tall, right * way.wide)
    return whole[:, : way.writes, : size[0], : size[1]]


def packed(flat: Tensor, way: Tiles) -> Tensor:
    table = way.table(START).long()
    return torch.where(table >= 0, flat[table.clamp(min=0)], 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_are_a_product_with_the_packed_weights(shape: tuple[int, int, int, int, int]) -> None:
    flat, images, out, slope, by_images, _ = made(*shape)
    assert tiles.size(images.shape[2:], shape[2]) == out.shape[2:]
    for way, source, expected in (
        (tiles.forward(*shape[:3]), images, out),
        (tiles.backward(*shape[:3]), slope, by_images),
        (tiles.gathering(*shape[:3], tiles.FEW), images, out),
        (tiles.gathering(*shape[:3], 1), images, out),
    ):
        size = tuple(expected.shape[2:])
        found = untiled(seen(source, way, size) @ packed(flat, way), way, 2, size)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_powers_of_two_and_deep_enough(shape: tuple[int, int, int, int, int]) -> None:
    ways = [make(*shape[:3]) for make in (tiles.forward, tiles.backward)]
    for way in (*ways, *(tiles.gathering(*shape[:3], pixels) for pixels in (1, tiles.FEW))):
        for length in (way.padded_reads, way.padded_writes, way.chunk * way.padded_reads, way.breadth):
            assert length & (length - 1) == 0
        assert way.chunk * way.padded_reads >= 16
        assert way.depth == way.rows * way.chunks * way.chunk * way.padded_reads


def test_a_parameter_in_several_uses_has_a_place_for_each() -> None:
    packing, ranges = PackedWeights(), []
    for start, way in (
        (0, tiles.forward(3, 4, 1)),
        (0, tiles.forward(3, 4, 2)),
        (0, tiles.forward(3, 4, 1)),
        (9, tiles.forward(3, 4, 1)),
    ):
        packing.add(start, way)
        ranges.append(packing._wanted[start, way])
    assert ranges[0] == ranges[2]
    taken = sorted(set(ranges))
    assert len(taken) == 3
    assert [begin for begin, _ in taken[1:]] == [begin + size for begin, size in taken[:-1]]
    assert packing._size == sum(size for _, size in taken)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"stride": 2}, True),
        ({"stride": 3}, False),
        ({"stride": (1, 2)}, False),
        ({"padding": 0}, False),
        ({"padding": "same"}, False),
        ({"dilation": 2}, False),
        ({"kernel_size": 5}, False),
    ],
)
def test_which_layers_suit(options: dict[str, Any], expected: bool) -> None:
    layer = nn.Conv2d(4, 4, **{"kernel_size": 3, "padding": 1} | options)
    assert tiles.suits(layer.kernel_size, layer.stride, layer.padding, layer.dilation) == expected
