"""A party answers the server's requests under its own policy, with its memory and its account on its own disk.

The steps of a round are: read the request, check the policy, compare with the server's record of this party
(`reconciliation`), pay in the account and sync it to the disk, compute the gradient and the message, write the new
state together with the noisy message in one atomic step, and send the message.

- A private message is paid for before its gradient is computed, and nothing that the server can observe depends on the
  data except the noisy message. If the computation fails, or a value is not finite, the message is zero: only noise is
  sent, in the form of any other message. The reason stays in the party's journal.
- A message is sent again, bit for bit, until the server confirms that it was accepted or dropped, without a second
  payment and without new noise. Only then does the memory change. So memory and server agree whatever is lost between
  them.
- If a party is killed after paying and before the state is written, the payment is lost and the message was never sent.
  The account is then too high, never too low. The payment is not used again, because the reason why a computation
  killed the process may depend on the data.
- A party without a state starts a handshake with a fresh token. It continues when the server answers with that token
  and its record: the memory is then the server's row, and the account is charged for the messages that may have been
  sent before. The row is computed from messages that the server has already seen, so using it reveals nothing new; and
  a message keeps its bound for any memory.
- Where a run bounds the effect of single records, the party clips their gradients with its own code, and divides by the
  public number of the terms. Its state must then consist of messages that left it with noise (`PartyState.released`).
  So a run that began otherwise is refused if its terms change to these: with a clean memory, or with a method whose
  state holds more than messages.
- Numbers that the method broadcasts beside x come from the server. The party gives them the names and shapes that its
  own copy of the method has, and the bound of a message holds whatever they are.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.method import Method, Steps, Tables
from ...errors import UsageError, WireError
from ...privacy.mechanism import made_of_messages
from ...privacy.noise import noise_source, privatise
from . import party_state
from .account import Events, PartyAccount
from .agreed_terms import AgreedTerms
from .client_message import client_message, in_words
from .departure import check_departure
from .gradient_oracle import GradientOracle
from .journal import JOURNAL, Journal
from .method_checks import check_client_functions, public_tables, restorable
from .party_state import PartyState, Pending
from .policy import Policy, Verdict
from .price import Price, priced
from .reconciliation import after_absence, overtaken, reconcile, resume
from .wire import Refusal, Reply, Request, addressed, chained, from_fields, run_name, to_fields


class _Refused(Exception):  # noqa: N818  (carries a verdict to `answer`)
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.exact)
        self.verdict = verdict


class Party:
    """A party that answers requests for single messages.

    Args:
        folder: The party's folder, which all its runs share.
        policy: The party's policy.
        oracle: The gradients of the party's data.
        node: The name of the party; a request for another name is refused. None accepts any name.
        agreed: The terms that the party signed, by the names of the runs. With them, a request of another run or with
            other terms is refused; without them, the policy alone decides.
    """

    def __init__(
        self,
        folder: str | Path,
        policy: Policy,
        oracle: GradientOracle,
        node: str | None = None,
        agreed: Mapping[str, AgreedTerms] | None = None,
    ) -> None:
        self.folder, self.policy, self.oracle, self.node = Path(folder), policy, oracle, node
        self.agreed = agreed
        self.journal = Journal(self.folder / JOURNAL)

    def answer(self, request: Request | Mapping[str, Any]) -> Reply | Refusal:
        """The party's message or a refusal, which contains no more than `wire` allows."""
        run, node, round = "unknown", "unknown", 0
        try:
            with suppress(WireError):
                run, node, round = addressed(to_fields(request) if isinstance(request, Request) else request)
            asked = self._read(request)
            self._check_policy(asked)
            with party_state.locked(self.folder):
                return self._answer(asked)
        except Exception as error:  # a full disk, a damaged ledger: the server gets no details, and the party continues
            verdict = error.verdict if isinstance(error, _Refused) else Verdict("failed", in_words(error))
            logging.getLogger("normec").warning("refused (%s): %s", verdict.reason, verdict.exact)
            self.journal.note("refused", run=run, node=node, round=round, reason=verdict.reason, exact=verdict.exact)
            return Refusal(run, node, round, verdict.reason)

    def _read(self, given: Request | Mapping[str, Any]) -> Request:
        try:
            table = to_fields(given) if isinstance(given, Request) else given
            found = from_fields(table, self.policy.largest_model)
        except WireError as error:
            raise _Refused(Verdict("malformed", str(error))) from None
        if not isinstance(found, Request):
            raise _Refused(Verdict("malformed", "not a request"))
        return found

    def _check_policy(self, request: Request) -> None:
        if self.node is not None and request.node != self.node:
            raise _Refused(Verdict("terms", f"the request is for {request.node}, this party is {self.node}"))
        if request.privacy.trust == "secure-sum":
            raise _Refused(
                Verdict("terms", "a request for a single message has trust = secure-sum, under which none is sent")
            )
        departed = check_departure(self.folder, request.run)
        verdict = departed or self._check_agreement(request) or self.policy.check(request)
        if verdict is not None:
            raise _Refused(verdict)

    def _check_agreement(self, request: Request) -> Verdict | None:
        if self.agreed is None:
            return None
        agreed = self.agreed.get(run_name(request.run))
        if agreed is None:
            return Verdict("terms", f"this party signed no terms of run {run_name(request.run)}")
        return agreed.check(request)

    def _answer(self, request: Request) -> Reply | Refusal:
        try:
            method = request.method.build(self.policy.classes)
            if request.plan.local is not None:
                request.plan.local.build()
            price = self._price(request, method)
            steps = Steps(method, torch.zeros_like(torch.tensor(request.x)), one_by_one=True)
            public_tables(request.public, steps)
            if steps.corrects and request.plan.local is None:
                raise UsageError(f"{method.name} corrects local steps, and the plan has none")
        except UsageError as error:
            raise _Refused(Verdict("terms", str(error))) from None
        self.oracle.check(torch.tensor(request.x))
        if request.plan.records is not None:
            self.oracle.check_records()
        with closing(PartyAccount(self.folder, self.policy.relation, self.policy.witness)) as account:
            state = self._reconciled(request, steps, account, price)
            if isinstance(state, Refusal):
                return state
            relies = request.plan.records is not None and steps.stateful and made_of_messages(method)
            if state.pending is None and relies and not state.released:
                raise _Refused(Verdict("terms", "the run began with a state that no noise covers; start a new run"))
            if state.pending is None and price is None:
                state = self._without_noise(request, steps, state, account)
            elif state.pending is None and price is not None:
                if not account.affords(price.now, self.policy.budgets, self.policy.delta):
                    stated = self.policy.stated_budgets
                    raise _Refused(Verdict("budget", f"one more message would exceed epsilon = {stated}"))
                state = self._with_noise(request, steps, state, account, price.now)
            return self._reply(request, state)

    def _price(self, request: Request, method: Method) -> Price | None:
        """The privacy cost of one message by the party's own account; None if the run has no noise."""
        found = priced(request, method, self.policy.delta)
        if found is None:
            return None
        price, release = found
        verdict = self.policy.check_noise(request, release)
        if verdict is not None:
            raise _Refused(verdict)
        return price

    def _reconciled(
        self, request: Request, steps: Steps, account: PartyAccount, price: Price | None
    ) -> PartyState | Refusal:
        """The state after comparison with the server's record, or a refusal that starts a handshake."""
        path = party_state.path_of(self.folder, request.run, request.node)
        state, record = self._loaded(path, request), request.record
        if state is not None and state.client is None and record.token == state.token:
            if price is not None:  # even if the party cannot continue, because these messages were sent
                self._recover(request, account, price.most)
            resumed = self._resumed(state, request, steps)
            if resumed is not None:
                return resumed
        if state is not None and state.client is not None:
            if request.round < state.newest and overtaken(state, record):
                raise _Refused(Verdict("late", f"a request of round {request.round} after one of {state.newest}"))
            agreed = reconcile(state, request, steps)
            if agreed is not None:
                if state.pending is not None and agreed.pending is None and agreed.accepted == state.accepted:
                    self.journal.note("dropped", run=request.run, node=request.node, step=state.accepted + 1)
                return agreed
            self.journal.note(
                "disagreed", run=request.run, node=request.node, ours=state.accepted, theirs=record.accepted
            )
        if state is None or state.client is not None:
            if not path.exists():
                party_state.make_room(self.folder)
            state = PartyState(secrets.token_hex(16), ledger=account.head)
            party_state.save(path, state)
            self.journal.note("handshake", run=request.run, node=request.node, round=request.round)
        return Refusal(request.run, request.node, request.round, "state", state.token)

    def _resumed(self, state: PartyState, request: Request, steps: Steps) -> PartyState | None:
        """The state that continues from the server's record; None while the row is missing.

        A method that fails, or that cannot restore a lost state, is refused.
        """
        if request.record.accepted and not restorable(steps):
            name = request.method.name
            raise _Refused(Verdict("lost", f"this party lost its state of the run, and {name} cannot restore it"))
        try:
            check_client_functions(steps, torch.tensor(request.x))
        except UsageError as error:
            raise _Refused(Verdict("terms", str(error))) from None
        return resume(state, request, steps)

    def _loaded(self, path: Path, request: Request) -> PartyState | None:
        try:
            return party_state.load(path)
        except UsageError as error:
            self.journal.note("damaged", run=request.run, node=request.node, exact=str(error))
            return None

    def _recover(self, request: Request, account: PartyAccount, price: Events) -> None:
        """Charge the messages that may have been sent before the state was lost, each at the smallest noise of the run.

        Only here, after a handshake, does the account rely on a claim of the server.
        """
        due = request.record.accepted + request.record.lost
        charged = account.recover(request, due, price, self.policy.budgets, self.policy.delta)
        if charged:
            self.journal.note("recovered", run=request.run, node=request.node, releases=charged, claimed=due)

    def _with_noise(
        self, request: Request, steps: Steps, state: PartyState, account: PartyAccount, price: Events
    ) -> PartyState:
        """Pay, compute, add noise and write the state. Only the noisy message depends on the data."""
        terms = request.privacy
        source = noise_source(terms.noise, request.plan.seed if terms.noise == "seeded" else None)
        account.pay(request, state.accepted + 1, price)
        client = state.client or {}
        try:
            client = after_absence(steps, state, request.round, torch.tensor(request.x))
            message, draft, loss = client_message(self.oracle, request, steps, client)
        except (Exception, SystemExit) as error:  # anything that the party's own code raises
            exact = in_words(error)
            logging.getLogger("normec").warning("only noise is sent, because the computation failed: %s", exact)
            self.journal.note("failed", run=request.run, node=request.node, round=request.round, exact=exact)
            nothing = torch.tensor(request.x).new_zeros(steps.message_length)
            message, draft, loss = nothing, client, math.nan
        sent = message
        if terms.trust == "local":
            run = run_name(request.run)  # seeded noise depends on the seed, not on the random number of the run
            attempt = account.releases.count(run, request.node)  # each payment has noise of its own
            named = ("federation", run, request.node, attempt)
            sent = privatise(message, terms.sigma, source, *named, bound=request.privacy.bound)
        message, sent = (part.to(torch.tensor(request.x).dtype) for part in (message, sent))
        state = dataclasses.replace(state, client=client, ledger=account.head)
        return self._written(request, steps, state, draft, message, sent, loss)

    def _without_noise(self, request: Request, steps: Steps, state: PartyState, account: PartyAccount) -> PartyState:
        """A message of a run that the policy allows without noise; a failure is reported as a refusal."""
        try:
            client = after_absence(steps, state, request.round, torch.tensor(request.x))
            message, draft, loss = client_message(self.oracle, request, steps, client)
        except Exception as error:  # the text of the error stays at the party
            raise _Refused(Verdict("failed", in_words(error))) from error
        account.note_without_noise(request, state.accepted + 1)
        state = dataclasses.replace(state, client=client, ledger=account.head)
        return self._written(request, steps, state, draft, message, message, loss)

    def _written(
        self,
        request: Request,
        steps: Steps,
        state: PartyState,
        draft: Tables,
        message: Tensor,
        sent: Tensor,
        loss: float,
    ) -> PartyState:
        """Write the state with its pending message to the disk."""
        noisy = request.privacy.memory == "noisy"
        released = noisy and request.privacy.noise != "none" and request.privacy.trust == "local"
        state = dataclasses.replace(
            state,
            since=request.round,
            pending=Pending(
                round=request.round,
                terms=request.cover,
                digest=chained(state.digest, state.accepted + 1, sent.numpy()),
                sent=sent,
                taken=sent if noisy else message,
                draft=draft,
                released=released and made_of_messages(steps.method),
                loss=loss if self.policy.report_loss and math.isfinite(loss) else None,
            ),
        )
        party_state.save(party_state.path_of(self.folder, request.run, request.node), state)
        return state

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
            loss=pending.loss if self.policy.report_loss else None,
        )
