"""Sums that nobody can open before all noise is in them: the grid of their messages, and what their account rests on.

A party sends integers modulo 2^bits: its weighted message on a grid of step γ, plus a Gaussian rounded to that grid.
The secure sum adds them up, and the server sees the total alone. `SumGrid` chooses γ and `bits` from public numbers, so
that every party and every simulation has the same grid.

Claim. With k honest parties in every opened sum, the sums of a run with T rounds and d coordinates are (ε, δ(ε) + τ)
private, where δ(ε) is that of T Gaussian releases with standard deviation σ√k and `delta_surcharge` is τ. On the grids
of this module τ is smaller than the smallest positive double. The proof is in docs/concepts/secure-sum-account.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, at_least, non_negative, positive
from .noise import SecureNoise
from .rounding_grid import grid_step, snap

SUM_GRID_BITS = 24  # the step is at most 2^-24 of the noise of the whole sum
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


def honest_parties(smallest: int, colluding: int) -> int:
    """`Privacy.honest` for sums between real parties: how many honest ones are in every sum that is opened.

    Args:
        smallest: The smallest number of parties in a sum that is opened; with fewer the round is given up.
        colluding: How many of them may tell the server their noise.

    Returns:
        The number of parties whose noise is counted, the protected one included.

    Raises:
        UsageError: No party would be left.

    Example:
        >>> honest_parties(smallest=8, colluding=2)
        6
    """
    at_least(0, colluding=colluding)
    if smallest <= colluding:
        raise UsageError(f"with {colluding} colluding parties a sum of {smallest} has no honest one; open larger sums")
    return smallest - colluding


def aliasing(ratio: float, parties: int) -> float:
    """How far a sum of rounded Gaussians is from a random function of one Gaussian: ρ of the proof, per coordinate.

    Every probability of the sum lies between 1 − ρ and 1 + ρ times that of the random function, with
    ρ = (1 + η)^parties − 1 and η = 2 Σ_{m>=1} exp(−π² m² ratio²). A single rounded Gaussian has ρ = 0.

    Args:
        ratio: σ/γ, the noise of one party in steps of the grid.
        parties: The number of parties whose noise is counted.

    Returns:
        An upper bound of ρ.

    Raises:
        UsageError: `ratio` is not positive, or `parties` is not at least 1.

    Example:
        >>> f"{aliasing(2.0, parties=3):.1e}"
        '4.3e-17'
    """
    at_least(1, parties=parties)
    return math.expm1(parties * math.exp(_log_eta(ratio))) if parties > 1 else 0.0


def delta_surcharge(epsilon: float, ratio: float, parties: int, coordinates: float) -> float:
    """What rounding the parties' noise to the grid adds to δ at `epsilon`: (1 + e^ε)/2 · ((1 + ρ)^coordinates − 1).

    Args:
        epsilon: The ε of the guarantee.
        ratio: σ/γ, the noise of one party in steps of the grid.
        parties: The number of parties whose noise is counted.
        coordinates: The numbers that are released in all rounds together, d·T.

    Returns:
        An upper bound of the surcharge; 0 if it is smaller than the smallest positive double.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> f"{delta_surcharge(1.0, ratio=2.0, parties=3, coordinates=1e6):.1e}"
        '8.0e-11'
        >>> delta_surcharge(8.0, ratio=2.0**20, parties=100, coordinates=1e12)
        0.0
    """
    non_negative(epsilon=epsilon)
    positive(coordinates=coordinates)
    at_least(1, parties=parties)
    if parties == 1:
        return 0.0
    log_exponent = _log_eta(ratio) + math.log(parties) + math.log(coordinates)  # (1 + ρ)^coordinates <= exp(exponent)
    log_growth = log_exponent  # below exp(−40), expm1 is the identity to the last digit
    if log_exponent > -40:
        log_growth = math.log(math.expm1(math.exp(min(log_exponent, 6.0))))
    return math.exp(min(0.0, float(np.logaddexp(0.0, epsilon)) - math.log(2) + log_growth))


def _log_eta(ratio: float) -> float:
    """ln η, with the series bounded by a geometric one."""
    positive(ratio=ratio)
    first = (math.pi * ratio) ** 2
    return math.log(2) - first - math.log(-math.expm1(-3 * first))


def _power_above(number: float) -> float:
    """The smallest power of two above `number`, up to the rounding of `number`."""
    return math.ldexp(1.0, math.frexp(number * (1 + 2.0**-50))[1])
