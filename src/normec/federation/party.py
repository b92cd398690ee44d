"""A party: answers the server's requests under its own policy, with its memory and its account on its own disk.

A round, in order: read the request → the policy → what the server has of this party (`reconciling`) → the gradient →
the message → pay in the account, synced to the disk → the new state with the noisy message in one atomic step → send.

- A message that was made is sent again, bit for bit, until the server says that it was accepted or dropped: no second
  payment, no second noise. Only then the memory takes it. So memory and server agree whatever is lost in between.
- Killed after paying and before the state is written: the payment is lost, the message never left. Over-, never
  under-counted.
- A party without a state says hello with a fresh token, and goes on when the server answers to that token with its
  record: the memory is then the server's row, and the account is charged for what earlier lives may have sent.
  The row is made of what the server has already seen, so taking it shows nobody anything new; and a message keeps its
  bound whatever the memory is.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from ..methods import Method
from ..privacy.accounting import Event
from ..privacy.mechanism import facts_of
from ..privacy.noise import noise_source, privatise
from ..privacy.rules import release as released
from ..privacy.setting import Setting
from ..streams import Key, Stream
from . import party_state
from .account import PartyAccount
from .digests import chained
from .journal import Journal
from .party_state import PartyState, Pending
from .policy import Policy, Verdict
from .reconciling import agree, forgotten, grant
from .wire import Refusal, Reply, Request, WireError, from_fields
from .work import Work

JOURNAL = "events.jsonl"


class _Refused(Exception):  # noqa: N818  (a verdict on its way to the answer)
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.exact)
        self.verdict = verdict


class Party:
    """One party at work in `folder`. `node` is its name in the federation; a request for another name is refused."""

    def __init__(self, folder: str | Path, policy: Policy, work: Work, node: str | None = None) -> None:
        self.folder, self.policy, self.work, self.node = Path(folder), policy, work, node
        self.journal = Journal(self.folder / JOURNAL)

    def answer(self, request: Request | Mapping[str, Any]) -> Reply | Refusal:
        """The party's message, or a refusal; nothing in it says more than `wire` allows."""
        run = node = "unknown"
        round = 0
        try:
            asked = request if isinstance(request, Request) else self._read(request)
            run, node, round = asked.run, asked.node, asked.round
            self._check_policy(asked)
            with party_state.taken(self.folder):
                return self._answer(asked)
        except (_Refused, UsageError, OSError) as error:  # a full disk, a damaged ledger: the server hears no details
            verdict = error.verdict if isinstance(error, _Refused) else Verdict("failed", str(error))
            logging.getLogger("normec").warning("refused (%s): %s", verdict.reason, verdict.exact)
            self.journal.note("refused", run=run, node=node, round=round, reason=verdict.reason, exact=verdict.exact)
            return Refusal(run, node, round, verdict.reason)

    def _read(self, table: Mapping[str, Any]) -> Request:
        try:
            found = from_fields(table, self.policy.largest_model)
        except WireError as error:
            raise _Refused(Verdict("malformed", str(error))) from None
        if not isinstance(found, Request):
            raise _Refused(Verdict("malformed", "not a request"))
        return found

    def _check_policy(self, request: Request) -> None:
        if self.node is not None and request.node != self.node:
            raise _Refused(Verdict("terms", f"the request is for {request.node}, this party is {self.node}"))
        verdict = self.policy.check(request)
        if verdict is not None:
            raise _Refused(verdict)

    def _answer(self, request: Request) -> Reply | Refusal:
        try:
            method = request.method.build()
            price = self._price(request, method)
        except UsageError as error:
            raise _Refused(Verdict("terms", str(error))) from None
        path = party_state.path_of(self.folder, request.run, request.node)
        state = self._reconciled(path, request, method)
        if isinstance(state, Refusal):
            return state
        if price is None:
            return self._reply(request, state) if state.pending else self._message(path, request, method, state, None)
        with closing(PartyAccount(self.folder, self.policy.unit, self.policy.relation)) as account:
            due = max(state.paid, request.record.accepted + request.record.lost - state.clean)
            sigma = request.privacy.sigma
            charged = account.recover(request.run, request.node, due, price, sigma)
            if charged:
                self.journal.note("recovered", run=request.run, node=request.node, releases=charged)
            if state.pending is not None:
                return self._reply(request, state)
            if not account.affords(price, self.policy.budget, self.policy.delta):
                raise _Refused(Verdict("budget", f"one more message would pass epsilon = {self.policy.budget:g}"))
            return self._message(path, request, method, state, (account, price))

    def _price(self, request: Request, method: Method) -> Event | None:
        """What one message costs by the party's own account; None where the run has no noise."""
        privacy = request.privacy.build(self.policy.delta)
        if privacy is None:
            return None
        if request.privacy.bound != method.operator.bound:
            raise UsageError(
                f"the request claims a bound of {request.privacy.bound:g}, it is {method.operator.bound:g}"
            )
        setting = Setting(clients=request.parties, rounds=request.plan.rounds, dimension=len(request.x))
        release = released(facts_of(method), privacy, setting)
        verdict = self.policy.check_noise(request, release)
        if verdict is not None:
            raise _Refused(verdict)
        return release.event(request.privacy.sigma)

    def _reconciled(self, path: Path, request: Request, method: Method) -> PartyState | Refusal:
        """The state as the server's record leaves it, or a hello."""
        try:
            state = party_state.load(path)
        except UsageError as error:
            self.journal.note("damaged", run=request.run, node=request.node, exact=str(error))
            state = None
        record = request.record
        if state is not None and state.memory is None and record.token == state.token:
            granted = grant(state, request, method)
            if granted is not None:
                return granted
        if state is not None and state.memory is not None:
            if request.round < state.newest:
                raise _Refused(Verdict("late", f"a request of round {request.round} after one of {state.newest}"))
            agreed = agree(state, request, method)
            if agreed is not None:
                if state.pending is not None and agreed.pending is None and agreed.accepted == state.accepted:
                    self.journal.note("dropped", run=request.run, node=request.node, step=state.accepted + 1)
                return agreed
            self.journal.note(
                "disagreed", run=request.run, node=request.node, ours=state.accepted, theirs=record.accepted
            )
        if state is None or state.memory is not None:
            paid, clean = (state.paid, state.clean) if state is not None else (0, 0)
            state = PartyState(secrets.token_hex(16), paid=paid, clean=clean)
            party_state.save(path, state)
            self.journal.note("hello", run=request.run, node=request.node, round=request.round)
        return Refusal(request.run, request.node, request.round, "state", state.token)

    def _message(
        self,
        path: Path,
        request: Request,
        method: Method,
        state: PartyState,
        paying: tuple[PartyAccount, Event] | None,
    ) -> Reply:
        """Compute, pay, write down; then the message may leave."""
        x, terms, step = torch.tensor(request.x), request.privacy, state.accepted + 1
        try:
            grad, loss = self.work.gradient(x, request.index, request.round, request.plan)
        except Exception as error:  # whatever the party's own code says in its errors, it stays here
            raise _Refused(Verdict("failed", f"{type(error).__name__}: {error}")) from error
        if grad.shape != x.shape or not bool(torch.isfinite(grad).all()):
            raise _Refused(Verdict("failed", "the gradient is not finite, or not of the model's size"))
        memory = forgotten(method, state, request.round)
        key = Key(Stream(request.plan.seed, "operator"), request.round, torch.tensor([request.index]))
        message = method.message(grad.to(x.dtype)[None], memory[None], key)[0]
        sent = message
        if paying is not None:
            account, price = paying
            account.pay(request.run, request.node, step, price, terms.sigma)
            if terms.trust == "local":
                source = noise_source(terms.noise, request.plan.seed if terms.noise == "seeded" else None)
                attempt = account.releases.count(request.run, request.node)  # a payment names its noise once
                named = ("federation", request.run, request.node, attempt)
                sent = privatise(message, terms.sigma, source, *named, bound=method.operator.bound)
        state = dataclasses.replace(
            state,
            memory=memory,
            since=request.round,
            paid=paying[0].releases.count(request.run, request.node) if paying is not None else state.paid,
            clean=state.clean + (paying is None),
            pending=Pending(
                round=request.round,
                terms=terms.cover,
                digest=chained(state.digest, step, sent.numpy()),
                sent=sent,
                taken=sent if terms.memory == "noisy" else message,
                loss=loss if self.policy.report_loss and np.isfinite(loss) else None,
            ),
        )
        party_state.save(path, state)
        return self._reply(request, state)

    def _reply(self, request: Request, state: PartyState) -> Reply:
        pending = state.pending
        if pending is None:
            raise TypeError("there is no message to send")
        return Reply(
            run=request.run,
            node=request.node,
            round=pending.round,
            step=state.accepted + 1,
            digest=pending.digest,
            message=pending.sent.numpy(),
            loss=pending.loss,
        )
