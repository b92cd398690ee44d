"""What a reply must be before it may touch x: next in its party's chain, of the right size, and of a possible norm."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..methods import Method
from .digests import chained
from .server_state import Seat
from .wire import Reply

CHANCE = 1e-12  # with which an honest party's noise passes the limit
_ROUNDING = 1e-4  # relative: messages are float32 at the least


class Fault(NamedTuple):
    """Why a reply is dropped. `known`: the party's chain is right, so it must be told, or it would send it for ever."""

    reason: str
    known: bool = False


def longest(method: Method, sigma: float, dimension: int) -> float:
    """The norm that a message does not pass: its bound, and under noise P[‖z‖ > σ(√d + t)] <= exp(−t²/2)."""
    reach = sigma * (math.sqrt(dimension) + math.sqrt(-2 * math.log(CHANCE)))
    return (method.operator.bound + reach) * (1 + _ROUNDING)


def screened(reply: Reply, seat: Seat, like: np.ndarray[Any, Any], limit: float) -> Fault | None:
    """A reply that is next in its party's chain; what is wrong with it, or None."""
    message = reply.message
    if message.shape != like.shape:
        return Fault(f"the message has {message.size} numbers, the model {like.size}")
    if message.dtype != like.dtype:
        return Fault(f"the message is {message.dtype}, the model {like.dtype}")
    if reply.step != seat.accepted + 1:
        return Fault(f"it is step {reply.step}, {seat.accepted + 1} is next")
    if reply.digest != chained(seat.digest, reply.step, message):
        return Fault("its digest does not continue the chain of what was accepted")
    norm = float(np.linalg.norm(message.astype(np.float64)))
    if not norm <= limit:
        return Fault(f"its norm is {norm:.6g}, more than {limit:.6g}", known=True)
    return None
