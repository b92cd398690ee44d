"""How fine the grids of messages are, and what rounding the noise of a secure sum to its grid costs in the account.

Claim. With k honest parties in every opened sum, the sums of a run with T rounds and d coordinates are (ε, δ(ε) + τ)
private, where δ(ε) is that of T Gaussian releases with standard deviation σ√k and `delta_surcharge` is τ. On the grids
of `secure_sum` τ is smaller than the smallest positive double. The proof is in docs/concepts/secure-sum-account.md.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import UsageError, at_least, non_negative, positive

GRID_BITS = 30  # the step of a message's own grid is at most 2^-30 of its noise
SUM_GRID_BITS = 24  # the step of a sum's grid is at most 2^-24 of the noise of the whole sum


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
