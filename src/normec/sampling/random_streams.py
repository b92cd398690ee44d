"""Random numbers as a pure function of (seed, purpose, client, step, position).

Nothing here has a state: whoever asks the same question gets the same numbers, on any device, in any
order, in any process. So a resumed run needs no generator in its checkpoint, evaluation cannot disturb
training, and a client draws the same batches whether it lives in one process, on a rank or at a party.

The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in
tensor arithmetic. It is for simulation only: keys are predictable, so privacy noise that protects anyone
must come from `normec.privacy`'s secure source.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def derive_seed(seed: int, *path: object) -> int:
    """A 63-bit seed for the thing named by `path`, independent of every other path's."""
    name = "/".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's global generators, for code that draws from them; `torch.manual_seed` takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox 4x32 on int64 tensors that hold 32-bit words; `key` is 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # The 64-bit products wrap around as two's complement; shift and mask bring the words back.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Stream:
    """All random numbers of one purpose in one run, as ``[clients, count]`` tables."""

    seed: int
    purpose: str

    def bits(self, clients: Tensor, step: int | Tensor, count: int) -> Tensor:
        """int64 in [0, 2^63), row i for client ``clients[i]`` at its `step` (one, or one a client)."""
        device = clients.device
        position = torch.arange((count + 1) // 2, device=device)
        steps = torch.as_tensor(step, device=device).expand(clients.shape)
        shape = (len(clients), len(position))
        words = philox(
            (
                position.expand(shape),
                clients[:, None].expand(shape),
                (steps & _MASK)[:, None].expand(shape),
                (steps >> 32)[:, None].expand(shape),
            ),
            derive_seed(self.seed, self.purpose),
        )
        pairs = torch.stack(((words[0] << 31) ^ words[1], (words[2] << 31) ^ words[3]), dim=-1)
        return pairs.flatten(1)[:, :count] & 0x7FFFFFFFFFFFFFFF

    def of_all(self, step: int, count: int) -> Tensor:
        """int64 in [0, 2^63) for clients 0 … count−1 at once, on the host: what a round draws of everyone.

        By NumPy's Philox 4x64, whose raw words are the same in every version; ten times the speed of `bits`.
        """
        source = np.random.Philox(key=derive_seed(self.seed, self.purpose), counter=[0, step, 0, 0])
        return torch.from_numpy((source.random_raw(count) >> np.uint64(1)).view(np.int64))

    def uniform(self, clients: Tensor, step: int | Tensor, count: int) -> Tensor:
        """float64 in [0, 1) with 53 random bits, ``[len(clients), count]``."""
        return (self.bits(clients, step, count) >> 10).double() * 2.0**-53


@dataclass(frozen=True)
class Key:
    """The randomness of one round's operators: a stream, the round, and whose rows they are."""

    stream: Stream
    step: int
    clients: Tensor

    def uniform(self, like: Tensor) -> Tensor:
        """One uniform for each entry of `like`: ``[clients, d]``, or ``[d]`` of a single client."""
        return self.stream.uniform(self.clients.to(like.device), self.step, like.shape[-1]).reshape(like.shape)
