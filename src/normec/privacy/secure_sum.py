"""Sums that nobody can open before all noise is in them: the grid of their messages.

A party sends integers modulo 2^bits: its weighted message on a grid of step γ, plus a Gaussian rounded to that grid.
The secure sum adds them up, and the server sees the total alone. `SumGrid` chooses γ and `bits` from public numbers, so
that every party and every simulation has the same grid.

What the grid costs in the account is in `grid_account`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, at_least, non_negative, positive
from .grid_account import SUM_GRID_BITS
from .noise import SecureNoise
from .rounding_grid import grid_step, snap

TAIL = 12.0  # the noise of a sum exceeds 12 standard deviations with probability below 1e-30
_MESSAGE_BITS = 40  # without noise: the step is about 2^-40 of the longest message

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Words = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


@dataclass(frozen=True)
class SumGrid:
    """The grid on which the messages of a secure sum are added up, as a function of public numbers.

    The modulus is 2^32 if a step of at most 2^-24·σ·√parties then leaves room for all messages and for `TAIL` standard
    deviations of all noise, and otherwise 2^64. A sum without noise, and one whose messages have no bound, is taken
    modulo 2^64. A total outside of (−2^(bits−1), 2^(bits−1)) steps wraps around, which makes the sum wrong and reveals
    nothing.

    Args:
        parties: The number of parties of the sum.
        bound: The largest norm of a message before it is multiplied by its weight.
        sigma: The standard deviation of one party's noise, per coordinate; 0 for a sum that is only masked.
        weights: The public numbers ω_i by which messages are multiplied; empty if all are 1.

    Attributes:
        bits: The sum is taken modulo 2^bits, 32 or 64.
        step: The step γ of the grid, a power of two.

    Raises:
        UsageError: A number is out of range, or no modulus leaves room for the sum.

    Example:
        >>> grid = SumGrid(parties=3, bound=1.0, sigma=0.5)
        >>> grid.bits, math.log2(grid.step)
        (32, -27.0)
        >>> total = sum(grid.encode(torch.tensor([0.1, -0.2]), SecureNoise()) for _ in range(3))
        >>> grid.decode(total).shape
        torch.Size([2])
    """

    parties: int
    bound: float
    sigma: float = 0.0
    weights: tuple[float, ...] = ()
    bits: int = field(init=False)
    step: float = field(init=False)

    def __post_init__(self) -> None:
        at_least(1, parties=self.parties)
        non_negative(sigma=self.sigma)
        if not self.bound > 0:
            raise UsageError(f"bound must be > 0, got {self.bound}")
        if len(self.weights) not in (0, self.parties):
            raise UsageError(f"weights must be one number for each of {self.parties} parties, got {len(self.weights)}")
        for weight in self.weights:
            positive(weights=weight)
        bits, step = self._chosen()
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "step", step)

    @property
    def sum_sigma(self) -> float:
        """The standard deviation per coordinate of the noise of all parties."""
        return self.sigma * math.sqrt(self.parties)

    @property
    def reach(self) -> float:
        """The largest coordinate that a sum can have, up to `TAIL` standard deviations of its noise."""
        return (math.fsum(self.weights) or self.parties) * self.bound + TAIL * self.sum_sigma

    def _chosen(self) -> tuple[int, float]:
        """The modulus and the step."""
        if not self.sigma:
            if math.isinf(self.bound):
                raise UsageError("a sum without noise needs a bound for its messages, from which its range follows")
            finest = _power_above(self.bound * max(self.weights, default=1.0)) * 2.0**-_MESSAGE_BITS
            return 64, max(finest, self._least_step(64))
        finest, coarsest = grid_step(self.sum_sigma), self.sum_sigma * 2.0**-SUM_GRID_BITS
        if math.isinf(self.bound):
            return 64, finest
        for bits in (32, 64):
            step = max(finest, self._least_step(bits))
            if step <= coarsest:
                return bits, step
        raise UsageError(
            f"sigma = {self.sigma:g} is too small for a sum of {self.parties} messages of norm {self.bound:g} on one "
            "grid: no meaningful privacy; raise sigma"
        )

    def _least_step(self, bits: int) -> float:
        """The smallest power of two γ with 2^bits·γ > 2·reach."""
        return math.ldexp(_power_above(2 * self.reach), -bits)

    def encode(self, message: Tensor | Floats, noise: SecureNoise | None = None, weight: float = 1.0) -> Words:
        """The integers modulo 2^bits that a party gives to the sum; add them up in their own type, which wraps around.

        Args:
            message: The message, a tensor or an array ``[d]``. Where the grid has noise, a message longer than `bound`
                is scaled down to it.
            noise: The source of the noise, unless `sigma` is 0.
            weight: The weight ω_i of this party.

        Returns:
            An array of d numbers, of type uint32 or uint64.

        Raises:
            UsageError: The message is not finite, the weight is not one of the grid's, noise is missing or not
                expected, or a message without noise is longer than `bound`.
        """
        if weight not in (self.weights or (1.0,)):
            raise UsageError(f"weight = {weight:g} is not among the weights of this sum")
        if (noise is None) != (self.sigma == 0):
            raise UsageError(f"a sum with sigma = {self.sigma:g} {'needs noise' if self.sigma else 'takes no noise'}")
        weighted = torch.as_tensor(message).detach().to("cpu", torch.float64) * weight
        if not self.sigma and float(torch.linalg.vector_norm(weighted)) > self.bound * weight * (1 + 1e-5):
            raise UsageError(f"a message is longer than the bound {self.bound:g} of this sum; state a larger one")
        integers = snap(weighted, self.step, self.bound * weight).numpy()
        if noise is not None:
            integers = integers + noise.integers(len(integers), self.sigma / self.step)
        return np.asarray(integers.astype(self.dtype))  # int64 to unsigned: modulo 2^bits

    def decode(self, total: Words) -> Tensor:
        """The sum in units of the messages, ``[d]`` in float64, from the integers that all parties gave together."""
        if total.dtype != self.dtype:
            raise UsageError(f"a sum modulo 2^{self.bits} has type {self.dtype}, got {total.dtype}")
        signed = total.view(np.dtype(f"i{self.bits // 8}"))
        return torch.from_numpy(signed.astype(np.float64) * self.step)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The type of encoded messages and of their sum."""
        return np.dtype(f"u{self.bits // 8}")


def _power_above(number: float) -> float:
    """The smallest power of two above `number`, up to the rounding of `number`."""
    return math.ldexp(1.0, math.frexp(number * (1 + 2.0**-50))[1])
