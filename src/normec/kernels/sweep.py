"""A 3×3 convolution of every pixel, from top to bottom: a row of pixels is read once for the three rows it is seen by.

For what `tiles` cuts into tiles one pixel tall whose pixels in a row are one product deep: up to 16 channels read. The
other kernel of `convolution`, which does them all, reads every pixel six times.
"""

# mypy: ignore-errors
# (Triton's kernels are a language of their own inside Python)

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import Tiles

_TILES = 64  # a program: as many images as they fill rows of
_STRIP = 4  # rows at most
_DEEP = 64  # numbers in a row that a tile sees: of more, the weights leave too little room to run side by side
_FILLED = 150  # programs that are enough for a device


@triton.jit
def sweep(
    source, weights, bias, out, moments, images,
    H: tl.constexpr, W: tl.constexpr, ACROSS: tl.constexpr, READS: tl.constexpr, LANES: tl.constexpr,
    WRITES: tl.constexpr, PLACES: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    TILES: tl.constexpr, STRIP: tl.constexpr, BIAS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """`STRIP` rows of `TILES / ACROSS` images; `upper` and `lower` are rows that have not seen all they will."""
    m = tl.arange(0, TILES)
    image, s = tl.program_id(0) * (TILES // ACROSS) + m // ACROSS, m % ACROSS
    k = tl.arange(0, CHUNK * LANES)  # a seen pixel of a row, and channel
    u, i = k // LANES, k % LANES
    n = tl.arange(0, WIDE * PLACES)  # a pixel of the tile and channel
    first = tl.program_id(1) * STRIP
    z = (s * WIDE - 1)[:, None] + u[None, :]
    seen = (image < images)[:, None] & (z >= 0) & (z < W)
    if READS < LANES:
        seen = seen & (i < READS)[None, :]
    corner = (image * H * W)[:, None] * READS + z * READS + i[None, :]
    at = ((image * H * W + s * WIDE)[:, None] + (n // PLACES)[None, :]) * WRITES + (n % PLACES)[None, :]
    own = (image < images)[:, None] & (n % PLACES < WRITES)[None, :]
    weight = weights + k[:, None] * (WIDE * PLACES) + n[None, :]
    above, level, below = (
        tl.load(weight),
        tl.load(weight + CHUNK * LANES * WIDE * PLACES),
        tl.load(weight + 2 * CHUNK * LANES * WIDE * PLACES),
    )
    added = tl.zeros((WIDE * PLACES,), tl.float32)
    if BIAS:
        added = tl.load(bias + n % PLACES, mask=n % PLACES < WRITES, other=0.0).to(tl.float32)
    upper = tl.zeros((TILES, WIDE * PLACES), tl.float32)
    lower = tl.zeros((TILES, WIDE * PLACES), tl.float32)
    total = tl.zeros((TILES, WIDE * PLACES), tl.float32)
    square = tl.zeros((TILES, WIDE * PLACES), tl.float32)
    for step in range(STRIP + 2):
        y = first + step - 1
        value = tl.load(source + corner + y * (W * READS), mask=seen & (y >= 0) & (y < H), other=0.0)
        done = tl.dot(value, below, upper)
        upper = tl.dot(value, level, lower)
        lower = tl.dot(value, above)
        rounded = (done + added[None, :]).to(out.dtype.element_ty)
        tl.store(out + at + (y - 1) * (W * WRITES), rounded, mask=own & (step >= 2) & (y <= H))
        if MOMENTS:
            kept = tl.where(step >= 2, rounded.to(tl.float32), 0.0)
            total += kept
            square += kept * kept
    if MOMENTS:
        total = total / STRIP
        square -= STRIP * total * total
        mean = tl.sum(total, 0) / TILES
        total -= mean[None, :]
        to = moments + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (2 * WIDE * PLACES) + n
        tl.store(to, mean)
        tl.store(to + WIDE * PLACES, tl.sum(square + STRIP * total * total, 0))


def settings(
    tiles: Tiles, images: int, seen: tuple[int, ...], size: tuple[int, int]
) -> tuple[dict[str, int], tuple[int, int], dict[str, int]] | None:
    """The kernel's constants, its grid and its options, from sizes alone; None where it does not suit."""
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
    while strip > 2 and groups * triton.cdiv(size[0], strip) < _FILLED:
        strip //= 2
    meta = {
        "H": size[0], "W": size[1], "ACROSS": across, "READS": tiles.pitch, "LANES": tiles.padded_reads,
        "WRITES": tiles.writes, "PLACES": tiles.padded_writes, "WIDE": tiles.wide, "CHUNK": tiles.chunk,
        "TILES": _TILES, "STRIP": strip,
    }  # fmt: skip
    return meta, (groups, triton.cdiv(size[0], strip)), {"num_warps": 4, "num_stages": 3}
