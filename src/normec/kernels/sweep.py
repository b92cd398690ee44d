"""A 3×3 convolution with stride 1 that goes from top to bottom, and reads a row of pixels once for three output rows.

It is for convolutions that `tiles` divides into tiles of height one whose row fits into one product, which means up to
16 input channels. The general kernel in `convolution` reads every pixel six times.
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import Tiles

_TILES = 64  # tiles per program
_STRIP = 4  # the most rows per program
_DEEP = 64  # the most input numbers per row of a tile; with more, the weights leave too few registers
_FILLED = 150  # programs below which strips are made shorter, to fill the device


@triton.jit
def sweep(
    source, weights, bias, out, moments, each, parts,
    H: tl.constexpr, W: tl.constexpr, ACROSS: tl.constexpr, READS: tl.constexpr, LANES: tl.constexpr,
    WRITES: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    TILES: tl.constexpr, STRIP: tl.constexpr, BIAS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Compute `STRIP` rows of `TILES / ACROSS` images; `upper` and `lower` are output rows with incomplete sums.

    Every set of weights is for `each` images, which `parts` programs share.
    """
    own, m = tl.program_id(0) // parts, tl.arange(0, TILES)
    image, s = tl.program_id(0) % parts * (TILES // ACROSS) + m // ACROSS, m % ACROSS
    real = image < each
    image += own * each
    k = tl.arange(0, CHUNK * LANES)  # an input pixel of a row, and a channel
    u, i = k // LANES, k % LANES
    n = tl.arange(0, WIDE * PADDED)  # an output pixel of the tile, and a channel
    first = tl.program_id(1) * STRIP
    z = (s * WIDE - 1)[:, None] + u[None, :]
    seen = real[:, None] & (z >= 0) & (z < W)
    if READS < LANES:
        seen = seen & (i < READS)[None, :]
    corner = (image * H * W)[:, None] * READS + z * READS + i[None, :]
    at = ((image * H * W + s * WIDE)[:, None] + (n // PADDED)[None, :]) * WRITES + (n % PADDED)[None, :]
    written = real[:, None] & (n % PADDED < WRITES)[None, :]
    weight = (
        weights + own.to(tl.int64) * (3 * CHUNK * LANES * WIDE * PADDED) + k[:, None] * (WIDE * PADDED) + n[None, :]
    )
    above, level, below = (
        tl.load(weight),
        tl.load(weight + CHUNK * LANES * WIDE * PADDED),
        tl.load(weight + 2 * CHUNK * LANES * WIDE * PADDED),
    )
    added = tl.zeros((WIDE * PADDED,), tl.float32)
    if BIAS:
        added = tl.load(bias + own * WRITES + n % PADDED, mask=n % PADDED < WRITES, other=0.0).to(tl.float32)
    upper = tl.zeros((TILES, WIDE * PADDED), tl.float32)
    lower = tl.zeros((TILES, WIDE * PADDED), tl.float32)
    total = tl.zeros((TILES, WIDE * PADDED), tl.float32)
    square = tl.zeros((TILES, WIDE * PADDED), tl.float32)
    for step in range(STRIP + 2):
        y = first + step - 1
        value = tl.load(source + corner + y * (W * READS), mask=seen & (y >= 0) & (y < H), other=0.0)
        done = tl.dot(value, below, upper)
        upper = tl.dot(value, level, lower)
        lower = tl.dot(value, above)
        rounded = (done + added[None, :]).to(out.dtype.element_ty)
        tl.store(out + at + (y - 1) * (W * WRITES), rounded, mask=written & (step >= 2) & (y <= H))
        if MOMENTS:
            kept = tl.where(step >= 2, rounded.to(tl.float32), 0.0)
            total += kept
            square += kept * kept
    if MOMENTS:
        total = total / STRIP
        square -= STRIP * total * total
        mean = tl.sum(total, 0) / TILES
        total -= mean[None, :]
        to = moments + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (2 * WIDE * PADDED) + n
        tl.store(to, mean)
        tl.store(to + WIDE * PADDED, tl.sum(square + STRIP * total * total, 0))


def settings(
    tiles: Tiles, images: int, seen: tuple[int, ...], size: tuple[int, int], clients: int = 1
) -> tuple[dict[str, int], tuple[int, int], dict[str, int]] | None:
    """Return the kernel's constants, its grid for one set of weights, and its options, from sizes alone.

    Each of `clients` sets of weights is for so many images. None if the kernel does not apply.
    """
    across = size[1] // tiles.wide
    every = tiles.tall == 1 and tiles.step == (1, tiles.wide) and tuple(seen) == tuple(size)
    if (
        not every
        or tiles.chunks > 1
        or tiles.chunk * tiles.padded_reads > _DEEP
        or size[1] % tiles.wide
        or _TILES % across
    ):
        return None
    groups, strip = triton.cdiv(images * across, _TILES), _STRIP
    while strip > 2 and clients * groups * triton.cdiv(size[0], strip) < _FILLED:
        strip //= 2
    meta = {
        "H": size[0], "W": size[1], "ACROSS": across, "READS": tiles.pitch, "LANES": tiles.padded_reads,
        "WRITES": tiles.writes, "PADDED": tiles.padded_writes, "WIDE": tiles.wide, "CHUNK": tiles.chunk,
        "TILES": _TILES, "STRIP": strip,
    }  # fmt: skip
    return meta, (groups, triton.cdiv(size[0], strip)), {"num_warps": 4, "num_stages": 3}
