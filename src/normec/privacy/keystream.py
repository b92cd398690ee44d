"""Gaussians rounded to integers with exact probabilities, from a cryptographic keystream, in bulk.

Formal guarantee. `rounded_gaussians(n, scale)` are independent and distributed as round(scale·Z), Z ~ N(0, 1), if
the keystream is uniform (ChaCha20, keyed by the operating system) up to a total variation of 2^-100 per draw.

Algorithm. Each draw uses 64 bits: a sign and the first 63 bits of an infinitely long uniform U in (0, 1/2); |Z| = Φ⁻¹(1
− U). In double precision |Z| is known within `tolerance` (the rounding of Φ⁻¹, which scipy keeps under
4e-16(1+|Z|), and the bits of U not yet drawn). Where scale·|Z| is farther than that from a half-integer the
rounding is certain. Elsewhere, about one draw in 30,000, 128 more bits of U are drawn and U is compared with the
tail 1 − Φ at the half-integer in 240-bit arithmetic. So the output does not have the gaps and uneven
spacing of floating-point Gaussians, on which attacks are based.

There is no seed: two sources never share a key, a forked process draws a new one, and a source cannot be copied or
saved. No process can detect a copy of the whole machine: a virtual machine that is resumed twice from one snapshot of
its memory draws the same noise twice. Restart the process after restoring a snapshot.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import numpy as np

from ..errors import needed
from ..system.processes import process_identity

Integers = np.ndarray[Any, np.dtype[np.int64]]
_CHUNK = 1 << 16  # draws at a time, so that all arrays stay in the cache
_TAIL = 2.0**-34
_PRECISION = 240


class Keystream:
    """Uniform bits from ChaCha20 under a key that exists nowhere else."""

    def __init__(self) -> None:
        self._rekey()

    def _rekey(self) -> None:
        ciphers = needed("cryptography.hazmat.primitives.ciphers", "privacy")
        nonce = bytes(16)  # a zero nonce will do, because the key is used once
        algorithm = ciphers.algorithms.ChaCha20(os.urandom(32), nonce)
        self._stream: Any = ciphers.Cipher(algorithm, mode=None).encryptor()
        self._owner, self._used = process_identity(), 0

    def words(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """`count` uniform 64-bit words, each used once."""
        # A fork would repeat the words of its parent, and the counter of the cipher ends after 2^38 bytes.
        if self._owner != process_identity() or self._used > 1 << 36:
            self._rekey()
        self._used += 8 * count
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")

    def __reduce__(self) -> NoReturn:
        raise TypeError("secure noise cannot be copied or saved: a copy would draw the same noise twice")


def rounded_gaussians(stream: Keystream, count: int, scale: float) -> Integers:
    """`count` independent draws of round(scale·Z), Z ~ N(0, 1), with exact probabilities; 1 <= scale <= 2^32."""
    out = np.empty(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        out[start : start + size] = _chunk(stream, size, scale)
    return out


def _chunk(stream: Keystream, count: int, scale: float) -> Integers:
    ndtri = needed("scipy.special", "privacy").ndtri
    words = stream.words(count)
    bits = (words >> np.uint64(1)).astype(np.int64)
    tail = (bits + 0.5) * 2.0**-64
    scaled = ndtri(tail)
    scaled *= -scale
    below = np.floor(scaled)
    remainder = scaled - below - 0.5
    magnitude: Integers = below.astype(np.int64) + (remainder >= 0)
    tolerance = (8e-15 + 7e-20 / tail) * scale
    for i in np.flatnonzero((np.abs(remainder) <= tolerance) | (tail < _TAIL)):
        magnitude[i] = _resolve(stream, int(bits[i]), scale, int(below[i]) if tail[i] >= _TAIL else None)
    negative = (words & np.uint64(1)).astype(bool)
    np.negative(magnitude, out=magnitude, where=negative)
    return magnitude


def _resolve(stream: Keystream, bits: int, scale: float, below: int | None) -> int:
    """round(scale·Φ⁻¹(1−U)) with 128 more bits of U: one of below, below + 1, or anything in the far tail (None)."""
    mpmath = needed("mpmath", "privacy")
    more = stream.words(2)
    with mpmath.workprec(_PRECISION):
        uniform = mpmath.ldexp((bits << 128) + (int(more[0]) << 64) + int(more[1]), -192)
        if below is None:
            return int(mpmath.floor(mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * uniform) * scale + 0.5))
        half = (mpmath.mpf(below) + 0.5) / scale
        return below + int(uniform <= mpmath.erfc(half / mpmath.sqrt(2)) / 2)
