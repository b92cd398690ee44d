"""Bring a party's state into agreement with the server's record, by pure functions of the two.

Arrays from the wire are copied (`torch.tensor`), so received data is never modified.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...algorithms.method import MEMORY, Steps, Tables
from .method_checks import as_kept, as_used, first_state, keeps_rows
from .party_state import PartyState
from .wire import Record, Request


def resume(state: PartyState, request: Request, steps: Steps) -> PartyState | None:
    """The state after a handshake, which continues from the server's record; None while the row is missing.

    If no message of the party was accepted, the state is that of a client that was absent since round 0. A party that
    lost its state gets its memory back if the method is `restorable`; all other state starts from its initial values.
    The row consists of messages as the server received them: with noise under local trust.
    """
    record, client = request.record, first_state(steps)
    if not record.accepted:
        return dataclasses.replace(state, client=client, accepted=0, since=0, digest=record.digest, released=True)
    if keeps_rows(steps):
        if record.row is None:
            return None
        client = as_kept({**client, MEMORY: torch.tensor(record.row)[None]}, steps)
    return dataclasses.replace(
        state,
        client=client,
        accepted=record.accepted,
        since=request.round,
        digest=record.digest,
        released=request.privacy.noise != "none" and request.privacy.trust == "local",
    )


def reconcile(state: PartyState, request: Request, steps: Steps) -> PartyState | None:
    """The state after the messages in the server's record; None if state and record contradict each other."""
    record, pending = request.record, state.pending
    if state.client is None or not _fits(state.client, steps):
        return None
    if (record.accepted, record.digest) == (state.accepted, state.digest) and state.since <= request.round:
        if pending is not None and pending.digest == record.dropped:
            return dataclasses.replace(state, pending=None)
        if pending is not None and pending.terms != request.cover:
            return None  # made under other terms, which the policy may no longer allow, so it is not sent again
        return state
    if pending is None or (record.accepted, record.digest) != (state.accepted + 1, pending.digest):
        return None
    if not state.since < record.since <= request.round:
        return None
    waited = record.since - 1 - state.since  # rounds between the message and the step that used it
    draft = as_used(pending.draft, pending.taken)
    draft = steps.absent(draft, waited) if waited else draft
    return dataclasses.replace(
        state,
        client=as_kept(steps.commit(draft, pending.taken[None]), steps),
        accepted=record.accepted,
        since=record.since,
        digest=record.digest,
        released=state.released and pending.released,
        pending=None,
    )


def _fits(client: Tables, steps: Steps) -> bool:
    """Whether tables are those of this method and model."""
    wanted = {name: (start[None].shape, start.dtype) for name, start in steps.initial_client_state.items()}
    return {name: (rows.shape, rows.dtype) for name, rows in client.items()} == wanted


def overtaken(state: PartyState, record: Record) -> bool:
    """Whether a record of an older round may be an outdated one, and not the record of another chain of messages."""
    if record.accepted == state.accepted:
        return record.digest == state.digest
    return record.accepted < state.accepted


def after_absence(steps: Steps, state: PartyState, round: int, like: Tensor) -> Tables:
    """The client state at the beginning of `round`, after the rounds in which the party was absent; `like` is x."""
    if state.client is None:
        raise TypeError("a party that waits for the server's record has no state")
    rounds = round - state.since
    if rounds < 0:
        raise ValueError(f"the state is that of round {state.since}, not of round {round}")
    return as_kept(steps.absent(as_used(state.client, like), rounds), steps) if rounds else state.client
