"""Weight gradients of a 2D convolution, one per client: dW[o, i, tap] = Σ g[pixel, o] x[pixel at tap, i].

Pixels are divided into spans, and a second kernel adds the sums of the spans in a fixed order, so the bits repeat.
`of_tiles` is for 3×3 convolutions of few channels in half precision, `weight_gradients` for all others.

Where TF32 is allowed, float32 inputs are first rounded to float16, which keeps as many bits as TF32 does: half as many
bytes are read, and matrix units need not transpose. A power of two for each client makes its largest number about 2¹⁵,
so that numbers down to 2⁻²⁹ of the largest keep all their bits.
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import pointer
from .convolution import geometry
from .tiles import Tiles, gathering, power

COLLECTED = ("LANES", "WRITES", "PADDED", "TALL", "WIDE", "CHUNKS", "CHUNK", "SPLITS")  # constants of both kernels
_HELD = 128 * 128  # sums that four warps can hold
_PROGRAMS = 2 * 132  # that run at once on the GPU for which sizes were chosen; the sizes are the same on every GPU


@triton.jit
def _weights(
    x, g, part, B, H, W, HO, WO, CI, CO, SH, SW, PH, PW, DH, DW, span, KW, TAPS,
    SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute gᵀ · patches over a span of one client's output pixels, [CO, TAPS · CI]; x and g are channels last."""
    client, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # a column: (tap, input channel)
    tap, i = n // CI, n % CI
    down, right = tap // KW * DH - PH, tap % KW * DW - PW
    column = (down * W + right) * CI + i
    own_g = g + client.to(tl.int64) * B * HO * WO * CO
    own_x = x + client.to(tl.int64) * B * H * W * CI
    found = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    end = tl.minimum((split + 1) * span, B * HO * WO)
    for start in range(split * span, end, BLOCK_K):
        p = start + tl.arange(0, BLOCK_K)
        q = p % (HO * WO)
        h, w = q // WO * SH, q % WO * SW
        row = (p // (HO * WO) * H * W + h * W + w) * CI
        y, z = h[:, None] + down[None, :], w[:, None] + right[None, :]
        inside = (y >= 0) & (y < H) & (z >= 0) & (z < W) & (p < end)[:, None] & (n < TAPS * CI)[None, :]
        slope = tl.load(own_g + p[:, None] * CO + o[None, :], mask=(p < end)[:, None] & (o < CO)[None, :], other=0.0)
        value = tl.load(own_x + row[:, None] + column[None, :], mask=inside, other=0.0)
        found = tl.dot(tl.trans(slope), value, found, input_precision="ieee")
    at = (tl.program_id(0).to(tl.int64) * CO + o[:, None]) * TAPS * CI + n[None, :]
    tl.store(part + at, found, mask=(o < CO)[:, None] & (n < TAPS * CI)[None, :])


@triton.jit
def _gather(
    part, rows, exponents, stride, CI, size, TAPS, SPLITS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the spans and put taps last, as the parameter has them; reads far apart are cheaper than such writes."""
    client = tl.program_id(0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (o, i, tap), where the spans have (o, tap, i)
    o, i, tap = e // (TAPS * CI), e // TAPS % CI, e % TAPS
    spans = (client * SPLITS + tl.arange(0, SPLITS)).to(tl.int64)
    at = spans[:, None] * size + ((o * TAPS + tap) * CI + i)[None, :]
    total = tl.sum(tl.load(part + at, mask=(e < size)[None, :], other=0.0), 0)
    if SCALED:  # in two steps, because the power of both together may not be a float32
        first, second = tl.load(exponents + 2 * client), tl.load(exponents + 2 * client + 1)
        total = total * tl.exp2(first) * tl.exp2(second)
    tl.store(rows + client.to(tl.int64) * stride + e, total, mask=e < size)


@triton.jit
def _round(x, out, exponents, each, parts, BLOCK: tl.constexpr):
    """Write x, multiplied by a power of two for each client, in half precision."""
    client = tl.program_id(0) // parts
    e = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    at = client.to(tl.int64) * each + e
    value = tl.load(x + at, mask=e < each, other=0.0) * tl.exp2(-tl.load(exponents + 2 * client))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=e < each)


def rounded(x: Tensor, exponents: Tensor) -> Tensor:
    """Return images in float16, those of each client multiplied by a power of two; write its exponent to `exponents`.

    The exponents ``[clients]``, every second number of a table, are those of the powers that undo it.
    """
    clients, each = len(exponents), x.numel() // len(exponents)
    most = torch.linalg.vector_norm(x.permute(0, 2, 3, 1).reshape(clients, each), torch.inf, dim=1)
    exponents.copy_(torch.frexp(most).exponent.clamp(-100, 128) - 15)
    out, parts = torch.empty_like(x, dtype=torch.float16), triton.cdiv(each, 2048)
    _round[(clients * parts,)](x, out, exponents, each, parts, BLOCK=2048)
    return out


def weight_gradients(
    x: Tensor, g: Tensor, rows: Tensor, stride: list[int], padding: list[int], dilation: list[int], exact: bool
) -> None:
    """Fill rows ``[clients, CO, CI, KH, KW]`` (rows contiguous, any distance apart) from channels-last x and g.

    `exact`: float32 inputs are not rounded.
    """
    clients, CO, CI, KH, KW = rows.shape
    exponents = None
    if x.dtype == rows.dtype and not exact:
        exponents = rows.new_empty(clients, 2)
        x, g = rounded(x, exponents[:, 0]), rounded(g, exponents[:, 1])
    images, _, H, W = x.shape
    _, _, HO, WO = g.shape
    pixels = images // clients * HO * WO
    taps, size = KH * KW, CO * CI * KH * KW
    sizes, options = blocks(CO, CI * taps, x.dtype != rows.dtype)
    block_o, block_n, block_k = (sizes[name] for name in ("BLOCK_O", "BLOCK_N", "BLOCK_K"))
    tiles = triton.cdiv(CI * taps, block_n) * triton.cdiv(CO, block_o)
    splits, wanted = 1, _PROGRAMS if block_o > block_n else 1024
    while splits < 64 and clients * tiles * splits < wanted and pixels > 4 * splits * block_k:
        splits *= 2
    span = triton.cdiv(triton.cdiv(pixels, splits), block_k) * block_k
    part = rows.new_empty(clients * splits, CO, taps * CI)
    _weights[(clients * splits, triton.cdiv(CI * taps, block_n), triton.cdiv(CO, block_o))](
        x, g, part, images // clients, H, W, HO, WO, CI, CO, *stride, *padding, *dilation, span, KW, taps,
        SPLITS=splits, **sizes, **options,
    )  # fmt: skip
    block = max(32, 2048 // splits)
    _gather[(clients, triton.cdiv(size, block))](
        part, rows, pointer(exponents, rows), rows.stride(0), CI, size, taps,
        SPLITS=splits, SCALED=exponents is not None, BLOCK=block,
    )  # fmt: skip


def blocks(outputs: int, columns: int, half: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first kernel's blocks and options, from the sizes of a weight gradient and the inputs' precision."""
    block_o, block_n = (min(64, max(16, triton.next_power_of_2(size))) for size in (outputs, columns))
    if half and outputs >= 128:  # larger blocks read every number less often, which takes most of the time
        return {"BLOCK_K": 64, "BLOCK_O": 128, "BLOCK_N": block_n}, {"num_warps": 4, "num_stages": 3}
    sizes = {"BLOCK_K": 128 if half else 64, "BLOCK_O": block_o, "BLOCK_N": block_n}
    return sizes, {"num_warps": 4, "num_stages": 2 if half else 3}


@triton.jit
def _tiles(
    x, g, part, count, span,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, GH: tl.constexpr, GW: tl.constexpr,
    READS: tl.constexpr, LANES: tl.constexpr, WRITES: tl.constexpr, PADDED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, TAKEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute seenᵀ · g over a span of a client's tiles: `TAKEN` chunks of seen pixels and channels, by the tile's."""
    client, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    k = tl.program_id(1) * TAKEN * CHUNK * LANES + tl.arange(0, TAKEN * CHUNK * LANES)
    chunk, i = k // (CHUNK * LANES), k % LANES
    row, column = chunk // CHUNKS, chunk % CHUNKS * CHUNK + k // LANES % CHUNK
    ahead = (row * W + column) * READS + i
    real = (chunk < ROWS * CHUNKS) & (i < READS)
    n = tl.arange(0, TALL * WIDE * PADDED)
    down, right, o = n // (WIDE * PADDED), n // PADDED % WIDE, n % PADDED
    own_x = x + client.to(tl.int64) * (count // (GH * GW)) * H * W * READS
    own_g = g + client.to(tl.int64) * (count // (GH * GW)) * OH * OW * WRITES
    found = tl.zeros((TAKEN * CHUNK * LANES, TALL * WIDE * PADDED), tl.float32)
    end = tl.minimum((split + 1) * span, count)
    for start in range(split * span, end, BLOCK_K):
        t = start + tl.arange(0, BLOCK_K)
        image, r, s = t // (GH * GW), t // GW % GH, t % GW
        top, left = r * DOWN + OFFSET, s * RIGHT + OFFSET
        y, z = top[:, None] + row[None, :], left[:, None] + column[None, :]
        inside = (t < end)[:, None] & real[None, :] & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        corner = ((image * H + top) * W + left) * READS
        seen = tl.load(own_x + corner[:, None] + ahead[None, :], mask=inside, other=0.0)
        y, z = r[:, None] * TALL + down[None, :], s[:, None] * WIDE + right[None, :]
        inside = (t < end)[:, None] & (y < OH) & (z < OW) & (o < WRITES)[None, :]
        slope = tl.load(own_g + ((image[:, None] * OH + y) * OW + z) * WRITES + o[None, :], mask=inside, other=0.0)
        found = tl.dot(tl.trans(seen), slope, found)
    groups = (ROWS * CHUNKS + TAKEN - 1) // TAKEN
    at = tl.program_id(0).to(tl.int64) * groups * TAKEN * CHUNK * LANES + k
    upper = row[:, None] - down[None, :] * (DOWN // TALL)
    left_tap = column[:, None] - right[None, :] * (RIGHT // WIDE)
    needed = real[:, None] & (upper >= 0) & (upper < 3) & (left_tap >= 0) & (left_tap < 3)
    tl.store(part + at[:, None] * (TALL * WIDE * PADDED) + n[None, :], found, mask=needed)


@triton.jit
def _collect(
    part, rows, row_stride, depth,
    READS: tl.constexpr, LANES: tl.constexpr, WRITES: tl.constexpr, PADDED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, FILLED: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Sum the spans and the tile's pixels, each of which has all taps; taps last, as the parameter has them."""
    client = tl.program_id(0)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)  # (i, tap), side by side where they are written
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)  # side by side where they are read
    i, tap = j // 9, j % 9
    split = tl.arange(0, FILLED)
    spans = (client * SPLITS + split) * depth
    real = (j < 9 * READS)[:, None] & (o < WRITES)[None, :]
    total = tl.zeros((FILLED, BLOCK_J, BLOCK_O), tl.float32)
    for pixel in tl.static_range(TALL * WIDE):
        row, column = tap // 3 + pixel // WIDE * STRIDE, tap % 3 + pixel % WIDE * STRIDE
        k = ((row * CHUNKS + column // CHUNK) * CHUNK + column % CHUNK) * LANES + i
        at = (spans[:, None] + k[None, :]).to(tl.int64) * (TALL * WIDE * PADDED) + pixel * PADDED
        total += tl.load(
            part + at[:, :, None] + o[None, None, :], mask=(split < SPLITS)[:, None, None] & real[None, :, :], other=0.0
        )
    at = client.to(tl.int64) * row_stride + o[None, :] * (9 * READS) + j[:, None]
    tl.store(rows + at, tl.sum(total, 0), mask=real)


def of_tiles(x: Tensor, g: Tensor, rows: Tensor, stride: int) -> None:
    """Fill rows ``[clients, CO, CI, 3, 3]`` as `weight_gradients` does, for a convolution that `tiles` suits.

    x is `convolution.widened`.
    """
    clients, outputs, inputs = rows.shape[:3]
    tiles = gathering(inputs, outputs, stride, g[:, 0].numel() // clients)
    meta, grid, options = settings(tiles, clients, len(x) // clients, x.shape[2:], g.shape[2:])
    count, splits = len(x) // clients * meta["GH"] * meta["GW"], meta["SPLITS"]
    span = triton.cdiv(triton.cdiv(count, splits), meta["BLOCK_K"]) * meta["BLOCK_K"]
    depth = grid[1] * meta["TAKEN"] * tiles.chunk * tiles.padded_reads
    part = rows.new_empty(clients * splits, depth, tiles.breadth)
    _tiles[grid](x, g, part, count, span, **meta, **options)
    blocks = collecting(splits, tiles.padded_writes)
    _collect[(clients, triton.cdiv(9 * inputs, blocks["BLOCK_J"]), triton.cdiv(outputs, blocks["BLOCK_O"]))](
        part,
        rows,
        rows.stride(0),
        depth,
        **{key: meta[key] for key in COLLECTED},
        READS=inputs,
        STRIDE=stride,
        **blocks,
    )


def collecting(splits: int, padded_writes: int) -> dict[str, int]:
    """Return the second kernel's blocks: about a thousand numbers, at least eight adjacent ones."""
    filled = power(splits)
    wide = max(8, min(padded_writes, 32 // filled))
    return {"FILLED": filled, "BLOCK_J": max(4, 1024 // (filled * wide)), "BLOCK_O": wide}


def settings(
    tiles: Tiles, clients: int, images: int, seen: tuple[int, int], size: tuple[int, int]
) -> tuple[dict[str, int], tuple[int, int], dict[str, int]]:
    """Return the first kernel's constants, grid and options, from sizes alone."""
    meta = geometry(tiles, seen, size)
    parts, deep = tiles.rows * tiles.chunks, tiles.chunk * tiles.padded_reads
    taken = 4 if 4 * deep <= 256 and tiles.chunks == 1 else 1  # all rows that a tile sees, or one
    large = taken * deep * tiles.breadth > 8192  # then smaller steps, so that two programs fit on a multiprocessor
    groups, block = triton.cdiv(parts, taken), 32 if large else 64
    steps = triton.cdiv(images * meta["GH"] * meta["GW"], block)
    splits = max(1, min(64, steps // 2, _PROGRAMS // (clients * groups)))  # so that all programs run at once
    meta |= {"SPLITS": splits, "TAKEN": taken, "BLOCK_K": block}
    warps = 8 if taken * deep * tiles.breadth > _HELD else 4
    return meta, (clients * splits, groups), {"num_warps": warps, "num_stages": 3}
