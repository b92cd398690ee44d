"""The checks of a reply before it may change x: its place in the party's chain, its shape, and its size.

An honest message is m + z with ‖m‖ <= b, the operator's bound, and z ~ N(0, σ²I_d), independent of everything that the
server has seen before. Each of these tests fails with probability at most p for any such message (`CHANCE` = 3p):

- length: ‖m + z‖² / σ² is a noncentral χ² with d degrees of freedom and λ <= b²/σ², so
  P[‖m + z‖² > σ²(d + λ + 2√((d + 2λ)t) + 2t)] <= exp(−t) (Birgé 2001, Lemma 8.1), with t = ln(1/p);
- coordinates: P[max |z_j| > σ√(2 ln(2d/p))] <= p, so no coordinate of the message exceeds b + σ√(2 ln(2d/p));
- direction: along any unit vector u that was fixed before z was drawn, P[|⟨z, u⟩| > σ√(2 ln(2/p))] <= p. The server
  chooses u along the party's row, which is made of the messages that it accepted before (`server_state`).

The length alone would allow a party to send L ≈ σ√d in the same direction in every round. With the third test (limit a)
the sum over K rounds has a norm of at most √K·L + K·a if the memory does not decay. With decay λ the row forgets old
messages, and so does the test: the norm of the sum is then at most (1/λ + K)·r, with
r = [(1−λ)a + √((1−λ)²a² + λ(2−λ)L²)] / (2−λ), and that of the row at most βr/λ. Proof:
‖g'‖² <= (1−λ)²‖g‖² + 2(1−λ)βa‖g‖ + β²L² has the fixed point βr/λ, and β Σ m_k = g_K + λ Σ g_k.

Without noise, only the bound is tested.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...algorithms.method import Method
from .server_state import PartyRecord
from .wire import Array, Reply, chained

CHANCE = 1e-9  # the probability that an honest message fails one of the three tests
LARGEST_LOSS = 1e38  # float32 losses are smaller, and the mean over any number of parties stays finite
LARGEST_NORM = 1e18  # of a message without a bound; its square is still a float32
_ROUNDING = 1e-4  # relative; messages are at least float32


class Fault(NamedTuple):
    """Why a reply is dropped. If `known`, it continues the party's chain, and the party must learn of the drop."""

    reason: str
    known: bool = False


@dataclass(frozen=True)
class Limits:
    """The limits of an honest message: its norm, its largest coordinate, its component along the earlier messages."""

    norm: float
    coordinate: float
    along: float

    @staticmethod
    def of(method: Method, sigma: float, dimension: int) -> Limits:
        """The limits of a method's messages under noise of standard deviation `sigma` (0: without noise)."""
        return Limits.within(method.bound, sigma, dimension)

    @staticmethod
    def within(bound: float, sigma: float, dimension: int) -> Limits:
        """The limits of vectors of a norm up to `bound` under noise of standard deviation `sigma`."""
        if not math.isfinite(bound):
            return Limits(LARGEST_NORM, LARGEST_NORM, LARGEST_NORM)
        if not sigma:
            reach = bound * (1 + _ROUNDING)
            return Limits(reach, reach, reach)
        shift, exponent = (bound / sigma) ** 2, math.log(3 / CHANCE)
        square = dimension + shift + 2 * math.sqrt((dimension + 2 * shift) * exponent) + 2 * exponent
        limits = (
            sigma * math.sqrt(square),
            bound + sigma * math.sqrt(2 * (exponent + math.log(2 * dimension))),
            bound + sigma * math.sqrt(2 * (exponent + math.log(2))),
        )
        return Limits(*(limit * (1 + _ROUNDING) for limit in limits))

    def broken_by(self, message: Array, row: Array | None) -> str | None:
        """The limit that a message exceeds, in words; `row` is that of the party, None for none."""
        values = message.astype(np.float64)
        norm, largest = float(np.linalg.norm(values)), float(np.abs(values).max())
        if not norm <= self.norm:
            return f"its norm is {norm:.6g}, more than {self.norm:.6g}"
        if not largest <= self.coordinate:
            return f"its largest coordinate is {largest:.6g}, more than {self.coordinate:.6g}"
        along = _along(values, row)
        if not along <= self.along:
            return f"its component along the party's earlier messages is {along:.6g}, more than {self.along:.6g}"
        return None


def screened(
    reply: Reply, party: PartyRecord, like: np.ndarray[Any, Any], row: Array | None, limits: Limits
) -> Fault | None:
    """The fault of a reply, which must be the next one in its party's chain; None if it is valid."""
    message = reply.message
    if message.shape != like.shape:
        return Fault(f"the message has {message.size} numbers instead of {like.size}")
    if message.dtype != like.dtype:
        return Fault(f"the message is {message.dtype}, but the model is {like.dtype}")
    if reply.step != party.accepted + 1:
        return Fault(f"it is step {reply.step}, but {party.accepted + 1} is next")
    if reply.digest != chained(party.digest, reply.step, message):
        return Fault("its digest does not continue the chain of accepted messages")
    if reply.loss is not None and not abs(reply.loss) <= LARGEST_LOSS:
        return Fault(f"its loss is beyond {LARGEST_LOSS:g}", known=True)
    broken = limits.broken_by(message, row)
    return Fault(broken, known=True) if broken is not None else None


def _along(message: Array, row: Array | None) -> float:
    """|⟨message, row/‖row‖⟩|, or 0 without a row."""
    if row is None:
        return 0.0
    direction = row.astype(np.float64)
    length = float(np.linalg.norm(direction))
    return abs(float(message @ (direction / length))) if length > 0 and math.isfinite(length) else 0.0
