"""How a party's state and the server's record come together; pure functions of the two.

Arrays from the wire are copied (`torch.tensor`): what came in is never written to.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...algorithms.methods import Method
from .party_state import PartyState
from .wire import Record, Request


def grant(state: PartyState, request: Request, method: Method) -> PartyState | None:
    """The server answered to our token: the state goes on from its record. None while the memory's row is missing."""
    record = request.record
    memory = torch.zeros_like(torch.tensor(request.x))
    if method.feedback and record.accepted:
        if record.row is None:
            return None
        memory = torch.tensor(record.row)
    return dataclasses.replace(
        state, memory=memory, accepted=record.accepted, since=request.round, digest=record.digest
    )


def agree(state: PartyState, request: Request, method: Method) -> PartyState | None:
    """The state once the server's record is taken into account; None where the two do not fit together."""
    record, pending, memory = request.record, state.pending, state.memory
    if memory is None or memory.dtype != torch.tensor(request.x).dtype or len(memory) != len(request.x):
        return None
    if (record.accepted, record.digest) == (state.accepted, state.digest) and state.since <= request.round:
        if pending is not None and pending.digest == record.dropped:
            return dataclasses.replace(state, pending=None)
        if pending is not None and pending.terms != request.cover:
            return None  # made on other terms, which the policy may no longer allow: it is not sent again
        return state
    if pending is None or (record.accepted, record.digest) != (state.accepted + 1, pending.digest):
        return None
    if not state.since < record.since <= request.round:
        return None
    memory = method.remember(forgotten(method, state, record.since - 1), pending.taken)
    return dataclasses.replace(
        state, memory=memory, accepted=record.accepted, since=record.since, digest=record.digest, pending=None
    )


def overtaken(state: PartyState, record: Record) -> bool:
    """Whether a record of an older round may be one that the server had before; another chain was never ours."""
    if record.accepted == state.accepted:
        return record.digest == state.digest
    return record.accepted < state.accepted


def forgotten(method: Method, state: PartyState, round: int) -> Tensor:
    """g_i at the beginning of `round`: all forget alike, also those who were away."""
    if state.memory is None:
        raise TypeError("a party that waits for the server's record has no memory")
    rounds = round - state.since
    return state.memory * (1 - method.decay) ** rounds if method.decay and rounds else state.memory
