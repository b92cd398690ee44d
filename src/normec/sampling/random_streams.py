"""Random numbers as a pure function of (seed, purpose, client, step, position).

Nothing here has a state. The same arguments give the same numbers on any device, in any order and in any process. So a
resumed run needs no generator in its checkpoint, evaluation cannot disturb training, and a client draws the same
batches in a single process, on a rank and at a party.

The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in tensor
arithmetic. It is for simulation only: its keys are predictable, so noise that protects anyone must come from the secure
source of `normec.privacy`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS, _INCREMENTS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORDS, _FIRST_WORD = 624, 24  # of the Mersenne twister; the byte at which they begin in the state of torch's generator
_AT_ONCE = 2**13  # counters that NumPy computes at once, so that its arrays stay in the cache


def derive_seed(seed: int, *path: object) -> int:
    """Return a 63-bit seed for `path`, independent of the seeds of all other paths."""
    name = "/".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def coins_below(rate: float) -> int:
    """Return how many of the 2^53 faces of a coin mean yes, so that its probability is `rate` or slightly less.

    An account that counts coins at their rate would understate ε if the probability were rounded up.
    """
    return math.floor(rate * 2**53)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's global generators, for code that draws from them; `torch.manual_seed` would take a millisecond."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_in_secret(secret: int, device: torch.device, *path: object) -> None:
    """Seed torch's global generators for `path` with all bits of a secret.

    torch's CPU generator keeps 32 bits of a seed, and so many masks of dropout can be tried out. Here every word of its
    state follows from the secret.
    """
    seed_generators(derive_seed(secret, *path), device)
    state = torch.default_generator.get_state()
    name = "/".join(map(str, (secret, *path))).encode()
    words = np.frombuffer(hashlib.shake_256(name).digest(4 * _WORDS), np.uint32)
    state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS] = torch.from_numpy(words.astype(np.uint64).view(np.uint8))
    torch.default_generator.set_state(state)


def philox_in_tensors(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply ten rounds of Philox 4x32 to int64 tensors that hold 32-bit words; `key` has 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # The 64-bit products wrap around as two's complement; shift and mask recover the words.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _INCREMENTS[0]) & _MASK, (k1 + _INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def philox_in_place(words: NDArray[np.uint64], key: int) -> None:
    """The same for counters ``[4, count]`` on the host, in NumPy, which takes a fraction of the time."""
    multipliers = np.array(_MULTIPLIERS, np.uint64)[:, None]
    keys = np.array([[key & _MASK], [(key >> 32) & _MASK]], np.uint64)
    keys = (keys + np.arange(10, dtype=np.uint64) * np.array(_INCREMENTS, np.uint64)[:, None]) & np.uint64(_MASK)
    for start in range(0, words.shape[1], _AT_ONCE):
        part = words[:, start : start + _AT_ONCE]
        even, odd = part[::2].copy(), part[1::2].copy()  # words 0 and 2, and words 1 and 3
        products = np.empty_like(even)
        for step in range(10):
            np.multiply(even, multipliers, out=products)
            np.right_shift(products[::-1], np.uint64(32), out=even)
            even ^= odd
            even ^= keys[:, step : step + 1]
            np.bitwise_and(products[::-1], np.uint64(_MASK), out=odd)
        part[::2], part[1::2] = even, odd


@dataclass(frozen=True)
class Stream:
    """All random numbers for one purpose in one run, as tables ``[clients, count]``."""

    seed: int
    purpose: str

    def bits(self, clients: Tensor, step: int | Tensor, count: int) -> Tensor:
        """Return int64 in [0, 2^63); row i is for client ``clients[i]`` at its `step` (one step, or one per client)."""
        device, key = clients.device, derive_seed(self.seed, self.purpose)
        if device.type == "cpu":
            return self._bits_on_host(clients, step, count, key)
        position = torch.arange((count + 1) // 2, device=device)
        steps = torch.as_tensor(step, device=device).expand(clients.shape)
        shape = (len(clients), len(position))
        counters = (
            position.expand(shape),
            clients[:, None].expand(shape),
            (steps & _MASK)[:, None].expand(shape),
            (steps >> 32)[:, None].expand(shape),
        )
        words = philox_in_tensors(counters, key)
        pairs = torch.stack(((words[0] << 31) ^ words[1], (words[2] << 31) ^ words[3]), dim=-1)
        return pairs.flatten(1)[:, :count]

    @staticmethod
    def _bits_on_host(clients: Tensor, step: int | Tensor, count: int, key: int) -> Tensor:
        """`bits` with counters that are written where NumPy needs them."""
        steps = np.asarray(step)[..., None]
        words = np.empty((4, len(clients), (count + 1) // 2), np.uint64)
        words[0], words[1] = np.arange(words.shape[2]), clients.numpy()[:, None]
        words[2], words[3] = steps & _MASK, steps >> 32
        philox_in_place(words.reshape(4, -1), key)
        pairs = np.empty((*words.shape[1:], 2), np.int64)
        for half in range(2):  # both halves have 32 bits, so that their numbers have 63
            np.bitwise_xor(words[2 * half] << np.uint64(31), words[2 * half + 1], out=pairs[..., half].view(np.uint64))
        return torch.from_numpy(pairs).flatten(1)[:, :count]

    def of_all(self, step: int, count: int) -> Tensor:
        """Return int64 in [0, 2^63) for clients 0 … count−1 at once, on the host.

        Uses NumPy's Philox 4x64, whose raw words are the same in every version; it is ten times as fast as `bits`.
        """
        source = np.random.Philox(key=derive_seed(self.seed, self.purpose), counter=[0, step, 0, 0])
        return torch.from_numpy((source.random_raw(count) >> np.uint64(1)).view(np.int64))

    def uniform(self, clients: Tensor, step: int | Tensor, count: int) -> Tensor:
        """Return float64 in [0, 1) with 53 random bits, ``[len(clients), count]``."""
        return (self.bits(clients, step, count) >> 10).double() * 2.0**-53


@dataclass(frozen=True)
class Key:
    """The random numbers of one round's operators: a stream, the round, and the clients of the rows."""

    stream: Stream
    step: int
    clients: Tensor

    def uniform(self, like: Tensor) -> Tensor:
        """Return one uniform number for each entry of `like`: ``[clients, d]``, or ``[d]`` for a single client."""
        return self.stream.uniform(self.clients.to(like.device), self.step, like.shape[-1]).reshape(like.shape)
