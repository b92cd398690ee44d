"""Masks: ChaCha20 key streams as vectors modulo 2^32 or 2^64, which hide a vector and cancel in the sum.

Party i adds +PRG(k_ij) for every j > i and −PRG(k_ij) for every j < i, and PRG(b_i), its self mask. In a sum over all
parties the pairwise masks cancel to the last bit; the self masks are subtracted when their seeds are revealed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from .keys import derive

Vector = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
_BLOCK = 1 << 16  # numbers at a time, so that they stay in the cache
_ZEROS = bytes(8 * _BLOCK)


def pair_key(secret: bytes, terms: bytes, round: int, attempt: int, one: int, other: int) -> bytes:
    """The key of the mask between two parties, from the secret that they share; the same from either side."""
    return derive(secret, terms, "pair mask", round, attempt, min(one, other), max(one, other))


def self_key(seed: bytes, terms: bytes, round: int, attempt: int, party: int) -> bytes:
    """The key of a party's self mask."""
    return derive(seed, terms, "self mask", round, attempt, party)


def add_mask(vector: Vector, key: bytes, *, negative: bool = False) -> None:
    """Add the mask of a key to a vector in place, or subtract it. A key is used for one mask only."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    little_endian = vector.dtype.newbyteorder("<")
    for start in range(0, len(vector), _BLOCK):
        part = vector[start : start + _BLOCK]
        mask = np.frombuffer(stream.update(_ZEROS[: part.nbytes]), dtype=little_endian)
        (np.subtract if negative else np.add)(part, mask, out=part)


def add_pair_mask(vector: Vector, key: bytes, owner: int, other: int, *, remove: bool = False) -> None:
    """Add to the vector of party `owner` its mask with party `other`, or remove it."""
    add_mask(vector, key, negative=(owner > other) != remove)
