"""Noise that is correlated over rounds, by a banded matrix: its coefficients, and the noise of a round.

With rule M1 (`rules`) the sum of round t is released with the noise

    w_t = (z_t − c_1 w_{t−1} − … − c_{B−1} w_{t−B+1}) / c_0,      z_t independent Gaussians,  ‖c‖ <= 1,

that is w = C⁻¹z for the lower-triangular Toeplitz matrix C with the first column c. With positive c_i, each round takes
back part of the noise before it, so that less noise adds up in the iterates. ε does not depend on c, as long as no
client takes part twice within B rounds.

**The best coefficients.** Let a_j be how much of a message is in the iterate j rounds after it (`workload`), and A the
lower-triangular Toeplitz matrix with the first column a. The noise in the iterates is A C⁻¹ z. With b = C⁻¹a, which is
a recursion like that of w, its variance per coordinate, averaged over T iterates and in units of the variance of z, is

    E(c) = (1/T) Σ_t ‖row t of A C⁻¹‖² = (1/T) Σ_j (T − j) b_j².

`best_coefficients` minimises E(c)‖c‖², which does not change if c is scaled, and then scales c to ‖c‖ = 1 (McKenna,
"Scaling up the Banded Matrix Factorization Mechanism", 2024). It starts from the first B coefficients of (1 −
x)^{−1/2}, the square root of the prefix sums, and follows L-BFGS in double precision; the gradient is that of the two
recursions. E counts the noise that the run adds to its iterates. How later gradients respond to it is not part of it.

Coefficients are fractions κ_i/2^14 with integers κ_i, rounded towards zero, so that ‖c‖ <= 1 holds exactly. Noise on a
grid uses the same ones: there c_i S is ⌊κ_i S/2^14⌋ for an integer S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, at_least, needed

COEFFICIENT_BITS = 14  # coefficients are multiples of 2^-14
ONE = 2**COEFFICIENT_BITS
HISTORY, SUMS = "history", "sums"  # the tables of past rounds: noise or noisy sums, and sums without noise on a grid

_Floats = np.ndarray[Any, np.dtype[np.float64]]


class BandedNoise:
    """The coefficients of a run's correlated noise, and the sums over past rounds that they define.

    Tables of past rounds have a row for each of the last B − 1 rounds: that of round k is row k modulo B − 1.

    Args:
        coefficients: κ_0 … κ_{B−1}, in units of 2^-14.

    Raises:
        UsageError: κ_0 is not positive, or the length of the coefficients exceeds 1.

    Example:
        >>> noise = BandedNoise([9830, 13106])
        >>> noise.bands, round(float(noise.fractions @ noise.fractions), 3)
        (2, 1.0)
        >>> BandedNoise([ONE, 1])
        Traceback (most recent call last):
        ...
        normec.errors.UsageError: coefficients of correlated noise must have a length of at most 1, got 1 + 1.86e-09
    """

    def __init__(self, coefficients: Sequence[int]) -> None:
        self.coefficients = tuple(int(one) for one in coefficients)
        at_least(1, bands=len(self.coefficients))
        if self.coefficients[0] < 1:
            raise UsageError(f"the first coefficient of correlated noise must be > 0, got {self.coefficients[0]}")
        square = sum(one * one for one in self.coefficients)
        if square > ONE * ONE:
            excess = math.sqrt(square / ONE**2) - 1
            raise UsageError(f"coefficients of correlated noise must have a length of at most 1, got 1 + {excess:.3g}")

    @property
    def bands(self) -> int:
        return len(self.coefficients)

    @property
    def fractions(self) -> _Floats:
        """c_0 … c_{B−1}."""
        return np.asarray(np.array(self.coefficients, dtype=np.float64) / ONE)

    def empty_table(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The table before round 0: all rows are zero."""
        return torch.zeros(self.bands - 1, length, dtype=dtype, device=device)

    def keep(self, table: Tensor, round: int, row: Tensor) -> None:
        """Put the row of `round` into a table, in place of the oldest."""
        if self.bands > 1:
            table[round % (self.bands - 1)] = row.to(table)

    def of_past(self, table: Tensor, round: int) -> Tensor:
        """Σ_{i>=1} c_i row_{round−i} of a table; each term of a table of integers is rounded down."""
        past = self.bands - 1
        order = [(round - i) % past for i in range(1, self.bands)]
        if not table.is_floating_point():
            return self._floors(self.coefficients[1:], table[order]).sum(0)
        held = torch.empty(past, dtype=torch.float64)
        held[order] = torch.from_numpy(self.fractions[1:])
        return held.to(table) @ table

    def of_round(self, row: Tensor) -> Tensor:
        """⌊c_0 row⌋ of integers."""
        return self._floors(self.coefficients[:1], row[None])[0]

    @staticmethod
    def _floors(kappa: Sequence[int], rows: Tensor) -> Tensor:
        """⌊κ_i row_i/2^14⌋ of rows of integers."""
        scales = torch.tensor(kappa, dtype=torch.int64, device=rows.device)
        return (scales[:, None] * rows) >> COEFFICIENT_BITS

    def noise(self, independent: Tensor, table: Tensor, round: int) -> Tensor:
        """w_t from the independent noise z_t of a round and a table with w of the rounds before."""
        return (independent - self.of_past(table, round)) / float(self.fractions[0])


def iterate_noise(coefficients: Sequence[float], workload: Sequence[float]) -> float:
    """E(c): the variance of the noise in an iterate, averaged over the rounds, in units of the variance of z_t.

    Args:
        coefficients: c_0 … c_{B−1}; the length counts as it is.
        workload: a_0 … a_{T−1}, how much of a message is in the iterate of its round and in each later one.

    Returns:
        The mean over T iterates.

    Example:
        >>> iterate_noise([1.0], [1.0, 1.0, 1.0])  # sums of one, two and three independent numbers
        2.0
    """
    first = float(coefficients[0])
    found = _filtered(np.asarray(workload, dtype=np.float64), np.asarray(coefficients, dtype=np.float64)[1:] / first)
    return float(np.mean(_counts(len(found)) * (found / first) ** 2))


def best_coefficients(bands: int, workload: Sequence[float]) -> tuple[int, ...]:
    """The coefficients κ_i with the least noise in the iterates of a run.

    The result is the best of independent noise, the square-root coefficients and what the optimiser finds, so that it
    is never worse than independent noise.

    Args:
        bands: The number B of coefficients.
        workload: How much of a message is in the iterate of its round and in each later one, one number for each round.

    Returns:
        The coefficients, in units of 2^-14.

    Raises:
        UsageError: `bands` is not at least 1, or the workload is empty, not finite, or zero.

    Example:
        >>> best_coefficients(1, [1.0] * 100)
        (16384,)
        >>> found = [kappa / ONE for kappa in best_coefficients(3, [1.0] * 100)]
        >>> round(iterate_noise(found, [1.0] * 100), 1), iterate_noise([1.0], [1.0] * 100)
        (19.1, 50.5)
    """
    at_least(1, bands=bands)
    used = np.asarray(workload, dtype=np.float64)
    size = float(np.abs(used).max()) if len(used) else 0.0
    if not (math.isfinite(size) and size > 0):
        raise UsageError("noise_bands needs finite weights of messages in the iterates, at least one of them not 0")
    used = used / size
    start = _square_root(min(bands, len(used)))
    starts = [np.array([1.0]), start]
    if len(start) > 1:
        minimize = needed("scipy.optimize", "privacy").minimize
        bounds = dict.fromkeys(("maxiter", "maxfun"), 2000)
        found = minimize(_loss, start[1:], (used,), "L-BFGS-B", jac=True, options={**bounds, "ftol": 1e-13})
        starts.append(np.concatenate([[1.0], found.x]))
    candidates = [_in_units(one, bands) for one in starts]
    return min(candidates, key=lambda one: iterate_noise([kappa / ONE for kappa in one], used.tolist()))


def _square_root(count: int) -> _Floats:
    """The first coefficients of (1 − x)^{−1/2}: 1, 1/2, 3/8, …"""
    ratios = 1 - 0.5 / np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod(ratios)])


def _in_units(coefficients: _Floats, bands: int) -> tuple[int, ...]:
    """Coefficients of length at most 1 as integers, rounded towards zero."""
    scaled = np.trunc(coefficients / (np.linalg.norm(coefficients) * (1 + 1e-12)) * ONE).astype(int)
    if len(scaled) == 1:
        scaled = np.array([ONE])
    return (*map(int, scaled), *[0] * (bands - len(scaled)))


def _filtered(values: _Floats, rest: _Floats) -> _Floats:
    """The b with b_t + Σ_{i>=1} rest_i b_{t−i} = values_t."""
    lfilter = needed("scipy.signal", "privacy").lfilter
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(lfilter([1.0], np.concatenate([[1.0], rest]), values), dtype=np.float64)


def _counts(rounds: int) -> _Floats:
    """T − j: in how many iterates b_j occurs."""
    return np.arange(rounds, 0, -1, dtype=np.float64)


def _loss(rest: _Floats, workload: _Floats) -> tuple[float, _Floats]:
    """log(E(c) ‖c‖²) for c = (1, rest), and its gradient."""
    b = _filtered(workload, rest)
    counts, square = _counts(len(b)), 1 + float(rest @ rest)
    with np.errstate(over="ignore", invalid="ignore"):
        error = float(np.mean(counts * b**2))
    if not math.isfinite(error) or error > 1e200:  # an unstable recursion, which the line search leaves again
        return 1e6, np.zeros_like(rest)
    # With λ = C⁻ᵀ ∂E/∂b, ∂E/∂c_i = −Σ_t λ_t b_{t−i}.
    adjoint = _filtered((2 * counts * b / len(b))[::-1], rest)[::-1]
    slopes = np.array([-(adjoint[i:] @ b[: len(b) - i]) for i in range(1, len(rest) + 1)])
    return math.log(error) + math.log(square), slopes / error + 2 * rest / square
