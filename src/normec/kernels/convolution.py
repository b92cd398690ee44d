"""3×3 convolutions of few channels in half precision: forward, and the gradient of the input, by one of two kernels.

All images have the same weights, or every client has weights of its own. `tiles` describes the matrix product. cuDNN,
which computes all other convolutions, is the definition. If a BatchNorm follows, the kernel also computes the moments
that it needs, before it writes the images (see `Moments`).
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blank, pointer, sweep
from .tiles import LEAST, Tiles

_MANY = 512  # programs that are assumed to fill any device


@triton.jit
def _pack(x, table, packed, size, row, parts, BLOCK: tl.constexpr):
    """Copy the numbers of x to which the table points, for every client; −1 stands for zero."""
    client = (tl.program_id(0) // parts).to(tl.int64)
    e = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(table + e, mask=e < size, other=-1)
    value = tl.load(x + client * row + at, mask=at >= 0, other=0.0)
    tl.store(packed + client * size + e, value.to(packed.dtype.element_ty), mask=e < size)


@triton.jit
def _convolve(
    source, weights, bias, out, moments, count, each, parts,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, GH: tl.constexpr, GW: tl.constexpr,
    READS: tl.constexpr, LANES: tl.constexpr, WRITES: tl.constexpr, PADDED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Multiply the seen pixels of `BLOCK_M` tiles by `BLOCK_N` columns of the weights.

    Every set of weights is for `each` images of `count` tiles, which `parts` programs share.
    """
    own, m = (
        tl.program_id(0) // parts,
        tl.program_id(0) % parts * BLOCK_M + tl.arange(0, BLOCK_M),
    )  # weights, and a tile
    image, r, s = own * each + m // (GH * GW), m // GW % GH, m % GW
    weights += own.to(tl.int64) * (ROWS * CHUNKS * CHUNK * LANES * TALL * WIDE * PADDED)
    k = tl.arange(0, CHUNK * LANES)  # a seen pixel and channel
    u, i = k // LANES, k % LANES
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # a pixel of the tile and channel
    top, left = r * DOWN + OFFSET, s * RIGHT + OFFSET
    corner = ((image * H + top) * W + left) * READS
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Unrolled, because a loop would be pipelined, and its copies bypass the cache that holds the neighbours' pixels.
    for step in tl.static_range(ROWS * CHUNKS):
        y, z = top + step // CHUNKS, left[:, None] + step % CHUNKS * CHUNK + u[None, :]
        inside = ((m < count) & (y >= 0) & (y < H))[:, None] & (z >= 0) & (z < W)
        if READS < LANES:
            inside = inside & (i < READS)[None, :]
        away = (step // CHUNKS * W + step % CHUNKS * CHUNK + u) * READS + i
        value = tl.load(source + corner[:, None] + away[None, :], mask=inside, other=0.0)
        weight = tl.load(weights + (step * CHUNK * LANES + k)[:, None] * (TALL * WIDE * PADDED) + n[None, :])
        found = tl.dot(value, weight, found)
    y, z = r[:, None] * TALL + (n // (WIDE * PADDED))[None, :], s[:, None] * WIDE + (n // PADDED % WIDE)[None, :]
    inside = (m < count)[:, None] & (y < OH) & (z < OW) & (n % PADDED < WRITES)[None, :]
    at = ((image[:, None] * OH + y) * OW + z) * WRITES + (n % PADDED)[None, :]
    if BIAS:
        added = tl.load(bias + own * WRITES + n % PADDED, mask=n % PADDED < WRITES, other=0.0)
        found += added.to(tl.float32)[None, :]
    rounded = found.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if MOMENTS:
        found = rounded.to(tl.float32)
        mean = tl.sum(found, 0) / BLOCK_M
        found -= mean[None, :]
        to = moments + tl.program_id(0) * (2 * TALL * WIDE * PADDED) + n
        tl.store(to, mean)
        tl.store(to + TALL * WIDE * PADDED, tl.sum(found * found, 0))


@triton.jit
def _widen(x, wide, pixels, C: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr):
    p, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PITCH)
    real = (p < pixels)[:, None]
    value = tl.load(x + p[:, None] * C + c[None, :], mask=real & (c < C)[None, :], other=0.0)
    tl.store(wide + p[:, None] * PITCH + c[None, :], value.to(wide.dtype.element_ty), mask=real)


@dataclass(frozen=True)
class Moments:
    """Means over a program's tiles, and sums of squares around them, ``[clients · parts, 2, pixels, channels]``.

    They are kept for each pixel of a tile and each channel; a program has `each` tiles.
    """

    values: Tensor
    parts: int  # programs per client
    each: int


def pack(x: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x at the indices in `table`, and zero where the index is −1; x is flat, or has a row for every client."""
    packed, parts = x.new_empty(*x.shape[:-1], len(table), dtype=dtype), triton.cdiv(len(table), 1024)
    clients, row = (len(x), x.stride(0)) if x.ndim == 2 else (1, 0)
    _pack[(clients * parts,)](x, table, packed, len(table), row, parts, BLOCK=1024)
    return packed


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images for `tiles.forward` and `gathering`: in this dtype, channels last, at least `LEAST` channels."""
    images, C, H, W = x.shape
    if C >= LEAST:
        return x.to(dtype, memory_format=torch.channels_last)
    wide = blank((images, LEAST, H, W), x, dtype)
    pixels = images * H * W
    x = x.contiguous(memory_format=torch.channels_last)
    _widen[(triton.cdiv(pixels, 1024),)](x, wide, pixels, C=C, PITCH=LEAST, BLOCK=1024)
    return wide


def moments_of(source: Tensor, tiles: Tiles, size: tuple[int, int], clients: int) -> Moments | None:
    """Return storage for the moments of a convolution; None if a program has partial tiles or several clients."""
    whole = size[0] % tiles.tall == 0 and size[1] % tiles.wide == 0
    down, across = tiles.grid(*size)
    count = len(source) // clients * down * across
    swept = sweep.settings(tiles, len(source), source.shape[2:], size)
    if swept is not None:
        each = swept[0]["TILES"] * swept[0]["STRIP"]
        whole = size[0] % swept[0]["STRIP"] == 0 and len(source) // clients * across % swept[0]["TILES"] == 0
    else:
        each = _each(tiles, clients * count)
    if not whole or count % each:
        return None
    shape = (clients * count // each, 2, tiles.tall * tiles.wide, tiles.padded_writes)
    return Moments(torch.empty(shape, device=source.device), count // each, each)


def convolve(
    source: Tensor,
    weights: Tensor,
    tiles: Tiles,
    size: tuple[int, int],
    moments: Moments | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the output images of this size, with channels last, and fill `moments`.

    `source` must be `widened`, and the weights in the order of `Tiles.table`. If they have a row for every client, and
    a bias as well, each row is for as many images, and no moments are computed.
    """
    images, seen = len(source), (source.shape[2], source.shape[3])
    clients = len(weights) if weights.ndim == 2 else 1
    each = images // clients
    out = blank((images, tiles.writes, *size), source)
    given = (source, weights, pointer(bias, source), out, out if moments is None else moments.values)
    asked = {"BIAS": bias is not None, "MOMENTS": moments is not None}
    swept = sweep.settings(tiles, each, seen, size, clients)
    if swept is not None:
        meta, (parts, strips), options = swept
        sweep.sweep[clients * parts, strips](*given, each, parts, **asked, **meta, **options)
        return out
    meta, (parts, columns), options = settings(tiles, each, seen, size, clients)
    count = each * meta["GH"] * meta["GW"]
    _convolve[clients * parts, columns](*given, count, each, parts, **asked, **meta, **options)
    return out


def settings(
    tiles: Tiles, images: int, seen: tuple[int, int], size: tuple[int, int], clients: int = 1
) -> tuple[dict[str, int], tuple[int, int], dict[str, int]]:
    """Return the kernel's constants, its grid for one set of weights, and its options, from sizes alone.

    Each of `clients` sets of weights is for so many images.
    """
    meta = geometry(tiles, seen, size)
    count = images * meta["GH"] * meta["GW"]
    each, wide = _each(tiles, clients * count), min(128, tiles.breadth)
    meta |= {"BLOCK_M": each, "BLOCK_N": wide}
    return meta, (triton.cdiv(count, each), triton.cdiv(tiles.breadth, wide)), {"num_warps": 4}


def _each(tiles: Tiles, count: int) -> int:
    """Return the number of tiles per program."""
    return 128 if count >= 128 * _MANY and tiles.chunk * tiles.padded_reads <= 64 else 64


def geometry(tiles: Tiles, seen: tuple[int, int], size: tuple[int, int]) -> dict[str, int]:
    """Return the constants that describe tiles to a kernel, with the images that they read and write."""
    across = tiles.grid(*size)
    return {
        "H": seen[0], "W": seen[1], "OH": size[0], "OW": size[1], "GH": across[0], "GW": across[1],
        "READS": tiles.pitch, "LANES": tiles.padded_reads, "WRITES": tiles.writes, "PADDED": tiles.padded_writes,
        "TALL": tiles.tall, "WIDE": tiles.wide, "DOWN": tiles.step[0], "RIGHT": tiles.step[1],
        "OFFSET": tiles.offset, "ROWS": tiles.rows, "CHUNKS": tiles.chunks, "CHUNK": tiles.chunk,
    }  # fmt: skip
