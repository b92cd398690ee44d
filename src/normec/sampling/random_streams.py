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
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from numpy.typing import NDArray
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS, _INCREMENTS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_FACTORS, _KEY_STEPS = np.array(_MULTIPLIERS, np.uint64)[:, None], np.array(_INCREMENTS, np.uint32)[:, None]
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
    """Seed torch's global generators, for code that draws from them; `torch.manual_seed` would take a millisecond.

    Every GPU has one, and that of `device` need not be the current one.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


@contextmanager
def own_numbers(seed: int, *, often: bool = False) -> Iterator[None]:
    """Give code of the user's own the numbers of a seed from the global generators of Python, NumPy and torch.

    So what it draws says nothing of what was drawn before it. Afterwards the generators are as they were.

    Args:
        seed: The seed.
        often: For calls that a run makes in every round, or for every client: NumPy's generator is exchanged instead of
            copied, which takes a fraction of the time. Of the two Gaussians that `np.random.randn` draws at once, the
            second one is lost if it was not used yet. Two threads must not be in such a call at the same time.
    """
    generators = Generators()
    try:
        generators.seed(seed, often=often)
        yield
    finally:
        try:
            generators.restore()
        except BaseException:  # Ctrl-C
            generators.restore()
            raise


class Generators:
    """The states of the global generators of Python, NumPy and torch, as they are when it is made."""

    def __init__(self) -> None:
        self._python, self._host = random.getstate(), torch.get_rng_state()
        self._gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
        self._on_gpus = [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]
        self._shared = get_bit_generator()
        self._numpy: Any = None

    def seed(self, seed: int, *, often: bool = False) -> None:
        """Seed all generators. NumPy's is copied before or, with `often`, exchanged for another one."""
        random.seed(seed)
        seed_generators(seed, torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
        if often or type(self._shared) is not np.random.MT19937:  # of other kinds NumPy seeds none
            known = self._shared is _of_thread.twister
            set_bit_generator(np.random.MT19937(0) if known else _of_thread.twister)
        else:
            self._numpy = np.random.get_state()
        np.random.seed(seed & _MASK)

    def restore(self) -> None:
        """Set all generators back."""
        random.setstate(self._python)
        torch.set_rng_state(self._host)
        for gpu, state in zip(self._gpus, self._on_gpus, strict=True):
            torch.cuda.set_rng_state(state, gpu)
        if get_bit_generator() is not self._shared:
            set_bit_generator(self._shared)
        if self._numpy is not None:
            np.random.set_state(self._numpy)


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


def philox_in_numpy(counter: Sequence[NDArray[np.uint64]], key: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The same on the host, in NumPy, which takes a fraction of the time.

    The words of the counter may be of any shapes that fit together.

    Returns:
        Words 0 and 2, and words 1 and 3, as two tables ``[2, …]``.
    """
    shape = np.broadcast_shapes(*(word.shape for word in counter))
    even, odd = np.empty((2, 2, *shape), np.uint32)
    even[0], even[1], odd[0], odd[1] = counter[0], counter[2], counter[1], counter[3]
    key_words = np.array([[key & _MASK], [(key >> 32) & _MASK]], np.uint32)
    flat_even, flat_odd = even.reshape(2, -1), odd.reshape(2, -1)
    for start in range(0, flat_even.shape[1], _AT_ONCE):
        _ten_rounds(flat_even[:, start : start + _AT_ONCE], flat_odd[:, start : start + _AT_ONCE], key_words)
    return even, odd


def _ten_rounds(even: NDArray[np.uint32], odd: NDArray[np.uint32], key: NDArray[np.uint32]) -> None:
    """Apply ten rounds of Philox in place to words 0 and 2, and words 1 and 3, of counters: ``[2, count]``."""
    low = 0 if sys.byteorder == "little" else 1
    products, spare = np.empty((2, *even.shape), np.uint64)
    words, current = even, odd
    for _ in range(10):
        np.multiply(words, _FACTORS, out=products)
        halves = products.view(np.uint32).reshape(2, -1, 2)[::-1]
        words = np.bitwise_xor(halves[..., 1 - low], current, out=even)
        words ^= key
        key = key + _KEY_STEPS  # wraps around
        current = halves[..., low]
        products, spare = spare, products  # `current` lies in the other one
    odd[...] = current


class _OfThread(threading.local):
    """Generators of NumPy, one of each kind per thread; a new one would ask the system for random bits first."""

    def __init__(self) -> None:
        self.philox, self.twister = np.random.Philox(), np.random.MT19937(0)


_of_thread = _OfThread()


def _raw_words(key: int, step: int, count: int) -> NDArray[np.uint64]:
    """Return the first words of NumPy's Philox 4x64 with this key, counted from ``step * 2^64``."""
    _of_thread.philox.state = {
        "bit_generator": "Philox",
        "state": {"key": np.array([key, 0], np.uint64), "counter": np.array([0, step, 0, 0], np.uint64)},
        "buffer": np.zeros(4, np.uint64),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return _of_thread.philox.random_raw(count)


@lru_cache(maxsize=256)
def _key_of(seed: int, purpose: str) -> int:
    return derive_seed(seed, purpose)


@dataclass(frozen=True)
class Stream:
    """All random numbers for one purpose in one run, as tables ``[clients, count]``."""

    seed: int
    purpose: str

    @property
    def _key(self) -> int:
        return _key_of(self.seed, self.purpose)

    def bits(self, clients: Tensor, step: int | Tensor, count: int) -> Tensor:
        """Return int64 in [0, 2^63); row i is for client ``clients[i]`` at its `step` (one step, or one per client)."""
        on_host = clients.device.type == "cpu"
        return self._bits_on_host(clients, step, count) if on_host else self.bits_in_tensors(clients, step, count)

    def bits_in_tensors(self, clients: Tensor, step: int | Tensor, count: int) -> Tensor:
        """Return `bits`, on any device."""
        device = clients.device
        position = torch.arange((count + 1) // 2, device=device)
        steps = torch.as_tensor(step, device=device).expand(clients.shape)
        shape = (len(clients), len(position))
        counters = (
            position.expand(shape),
            clients[:, None].expand(shape),
            (steps & _MASK)[:, None].expand(shape),
            (steps >> 32)[:, None].expand(shape),
        )
        words = philox_in_tensors(counters, self._key)
        pairs = torch.stack(((words[0] << 31) ^ words[1], (words[2] << 31) ^ words[3]), dim=-1)
        return pairs.flatten(1)[:, :count]

    def _bits_on_host(self, clients: Tensor, step: int | Tensor, count: int) -> Tensor:
        """`bits` in NumPy."""
        positions, own = np.arange((count + 1) // 2, dtype=np.uint64), clients.numpy().astype(np.uint64)
        steps = np.asarray(step).astype(np.uint64)[..., None]
        counter = positions, own[:, None], steps & np.uint64(_MASK), steps >> np.uint64(32)
        even, odd = philox_in_numpy(counter, self._key)
        drawn = np.empty((*even.shape[1:], 2), np.int64)
        for half in range(2):  # both parts of a number have 32 bits, so that it has 63
            number = drawn[..., half].view(np.uint64)
            np.left_shift(even[half], np.uint64(31), out=number)
            number ^= odd[half]
        return torch.from_numpy(drawn).flatten(1)[:, :count]

    def of_all(self, step: int, count: int) -> Tensor:
        """Return int64 in [0, 2^63) for clients 0 … count−1 at once, on the host.

        Uses NumPy's Philox 4x64, whose raw words are the same in every version; it is ten times as fast as `bits`.
        """
        return torch.from_numpy((_raw_words(self._key, step, count) >> np.uint64(1)).view(np.int64))

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
