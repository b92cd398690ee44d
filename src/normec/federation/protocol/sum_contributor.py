"""A party's vector in a secure sum: its message with noise on the grid, its payment, and the new memory.

The steps for one vector are: check the policy again, pay in the account and sync it to the disk, compute the message,
draw the noise, write the state with the pending message, and only then hand the vector to `secure_sum.Party`, which
masks it.

- If the computation fails, or a value is not finite, the message is zero: only noise is sent. The reason stays in the
  party's journal. The vector, the deposit and the answer have the same length as always.
- The vector of an attempt exists once, in memory. The state on the disk holds the message without its noise, with which
  the memory is updated once the party knows that a sum with this vector was opened (`settle`).
- The deposit is the state with the pending message, so a party that lost its folder continues from the newest one,
  whether its last vector was counted or not.
- At record level the memory may hold what no noise covers. The rule for that (R4 of `privacy.rules`) needs the same
  terms in all rounds, and here they are signed once for all rounds. An attempt of round k is paid for with the memory
  that k messages can have made. So a memory that holds a message of round k makes no vector of round k or of an earlier
  one again: it changes at most once in a round, whatever the server says about attempts and rounds.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...algorithms.error_feedback import ErrorFeedbackScheme
from ...algorithms.method import CLIENT_FUNCTIONS, Steps, Tables, has_functions_of
from ...errors import UsageError, WireError
from ...privacy.hash_chain import Head
from ...privacy.noise import SecureNoise
from ..secure_sum.party import Assignment, Contribution, Contributor
from ..secure_sum.refusals import Refused
from ..secure_sum.wire import largest_content
from . import party_state
from .account import PartyAccount
from .client_message import client_message, in_words
from .gradient_oracle import GradientOracle
from .journal import Journal
from .method_checks import as_kept, as_used, check_client_functions, first_state, public_tables
from .party_state import PartyState, Pending
from .policy import Policy
from .price import Price
from .reconciliation import after_absence
from .sum_terms import Agreement
from .wire import Request

_FACTS = 512  # characters to which the facts in a deposit are padded, so that its length does not depend on them


class SumContributor(Contributor):
    """The part of a party with the data, the memory and the ledger, for one run.

    Args:
        folder: The party's folder, which all its runs share.
        agreement: The terms of the run.
        oracle: The gradients of the party's data.
        policy: Returns the party's policy as it is now.
        journal: The party's journal.
        noise: The source of the noise.
    """

    def __init__(
        self,
        folder: Path,
        agreement: Agreement,
        oracle: GradientOracle,
        policy: Callable[[], Policy],
        journal: Journal,
        noise: SecureNoise,
    ) -> None:
        self._folder, self._agreement, self._oracle = folder, agreement, oracle
        self._policy, self._journal, self._noise = policy, journal, noise
        plan = agreement.plan
        self._like = torch.zeros(plan.parameters, dtype=getattr(torch, plan.dtype))
        self._steps = Steps(agreement.method, self._like, one_by_one=True)
        # Whether the draft of a new state is always the state itself, so that a deposit need not hold both.
        self._plain_draft = has_functions_of(agreement.method, ErrorFeedbackScheme, *CLIENT_FUNCTIONS)
        self._path = party_state.sum_path_of(folder, agreement.terms.run, agreement.node)
        self._ledger: Head | None = None  # the head of the ledger after the newest payment
        public = self._like.new_zeros(plan.broadcast).numpy() if plan.broadcast else None
        self._terms_alone = agreement.request(0, self._like.numpy(), public)  # a request with the model zero
        self._asked: tuple[Assignment, Request] | None = None
        # The identity of the file that was written last, and the state in it.
        self._held: tuple[tuple[int, ...] | None, PartyState] | None = None

    def check(self) -> None:
        """Check the terms against the policy, the method and the data. Raises `Refused`."""
        agreement, plan = self._agreement, self._agreement.plan
        _ = self._price(0)
        try:
            check_client_functions(self._steps, self._like)
            if self._steps.corrects and plan.local is None:
                raise UsageError(f"{agreement.method.name} corrects local steps, and the plan has none")
            self._oracle.check(self._like)
            if plan.divisors is not None:
                self._oracle.check_records()
        except UsageError as error:
            raise Refused("terms", str(error)) from None

    def begin(self) -> None:
        """Begin with a fresh memory. If the record of the run was removed, the states of an earlier one may be left.

        The server chooses the name of a run and may use it again, under other terms and other names of the party. The
        rule for memories that no noise covers counts from the first round on, so a memory from before it would be
        charged too little.
        """
        with party_state.locked(self._folder):
            for other in party_state.sum_paths_of(self._folder, self._agreement.terms.run):
                if other != self._path:
                    other.unlink()
            if self._path.exists():
                self._save(dataclasses.replace(self._fresh(), ledger=self._state().ledger))

    def pay(self, assignment: Assignment) -> None:
        request, price = self._request(assignment), self._price(assignment.round)
        policy, attempt = self._policy(), assignment.attempt
        with self._account(policy) as account:
            if self._since() > assignment.round:
                raise Refused("round", f"the memory holds a message of round {self._since() - 1} already")
            self._make_room()
            if price is None:
                account.note_without_noise(request, attempt)
                self._ledger = account.head
                return
            if not account.affords(price.now, policy.budgets, policy.delta):
                raise Refused("budget", f"one more vector would exceed epsilon = {policy.stated_budgets}")
            account.pay(request, attempt, price.now)
            self._ledger = account.head

    def contribute(self, assignment: Assignment) -> Contribution:
        request, agreement = self._request(assignment), self._agreement
        private = agreement.plan.noise != "none"
        with party_state.locked(self._folder):
            state = self._state()
            client = state.client or {}
            try:
                client = after_absence(self._steps, state, assignment.round, self._like)
                message, draft, _ = client_message(self._oracle, request, self._steps, client)
            except (Exception, SystemExit) as error:  # anything that the party's own code raises
                if not private:
                    raise Refused("failed", in_words(error)) from error
                message, draft = self._failed(assignment, in_words(error)), client
            vector = agreement.grid.encode(
                message, self._noise if private else None, agreement.terms.weights[agreement.number]
            )
            message = message.to(self._like.dtype)
            pending = Pending(
                round=assignment.round,
                terms=_attempt_name(assignment.attempt),
                digest="",
                sent=message,
                taken=message,
                draft=draft,
                loss=None,
            )
            state = self._save(dataclasses.replace(state, client=client, since=assignment.round, pending=pending))
            deposit = self._deposit(state)
        return Contribution(vector, deposit)

    def settle(self, attempt: int, counted: bool) -> None:
        if not self._steps.stateful:
            return
        with party_state.locked(self._folder):
            state = self._state()
            pending = state.pending
            if pending is None or pending.terms != _attempt_name(attempt):
                return
            if counted:
                draft = as_used(pending.draft, pending.taken)
                state = dataclasses.replace(
                    state,
                    client=as_kept(self._steps.commit(draft, pending.taken[None]), self._steps),
                    accepted=state.accepted + 1,
                    since=pending.round + 1,
                )
            self._save(dataclasses.replace(state, pending=None))

    def recover(self, attempts: Sequence[int], deposited: tuple[int, bytes] | None) -> None:
        policy, price = self._policy(), self._price(0)
        restored = self._restored(*deposited) if deposited is not None else None
        with self._account(policy) as account:
            self._make_room()
            if price is not None:
                account.charge(self._terms_alone, attempts[-1], price.most, len(attempts))
            self._ledger = account.head
            self._save(restored if restored is not None else self._fresh())
        run, node = self._agreement.terms.run, self._agreement.node
        self._journal.note("recovered", run=run, node=node, releases=len(attempts), memory=restored is not None)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _request(self, assignment: Assignment) -> Request:
        """What an assignment asks for. Raises `Refused` if its payload is no model."""
        if self._asked is not None and self._asked[0] is assignment:
            return self._asked[1]
        try:
            request = self._agreement.payload_request(assignment.round, assignment.payload)
            public_tables(request.public, self._steps)
            self._asked = assignment, request
            return request
        except WireError as error:
            raise Refused("malformed", str(error)) from None
        except UsageError as error:
            raise Refused("terms", str(error)) from None

    def _price(self, round: int) -> Price | None:
        """The cost of a vector by the party's own account, if its policy allows the terms. Raises `Refused`."""
        policy, agreement, request = self._policy(), self._agreement, self._terms_alone
        verdict = policy.check(request) or policy.check_collusion(agreement.terms.colluding)
        if verdict is not None:
            raise Refused("budget" if verdict.reason == "budget" else "terms", verdict.exact)
        try:
            found = agreement.priced(round, policy.delta)
        except UsageError as error:
            raise Refused("terms", str(error)) from None
        if found is None:
            return None
        price, release = found
        verdict = policy.check_noise(request, release)
        if verdict is not None:
            raise Refused("terms", verdict.exact)
        return price

    def _failed(self, assignment: Assignment, exact: str) -> Tensor:
        """The message of a computation that failed: zero, under the usual noise."""
        logging.getLogger("normec").warning("only noise is sent, because the computation failed: %s", exact)
        run, node = self._agreement.terms.run, self._agreement.node
        self._journal.note("failed", run=run, node=node, round=assignment.round, exact=exact)
        return self._like.new_zeros(self._steps.message_length)

    @contextmanager
    def _account(self, policy: Policy) -> Iterator[PartyAccount]:
        """The party's account, which no other request uses at the same time."""
        with (
            party_state.locked(self._folder),
            closing(PartyAccount(self._folder, policy.relation, policy.witness)) as account,
        ):
            yield account

    # ---- the state -------------------------------------------------------------------------------------------------

    def _state(self) -> PartyState:
        """The state on the disk; that of a client that never sent anything if there is none, or if it is damaged.

        It is read only if this process was not the last to write it. A state that is handed out is forgotten until it
        is saved, because methods may have changed its tensors by then.
        """
        held, self._held = self._held, None
        if held is not None and held[0] == party_state.identity(self._path):
            return held[1]
        try:
            found = party_state.load(self._path)
        except UsageError as error:
            run, node = self._agreement.terms.run, self._agreement.node
            self._journal.note("damaged", run=run, node=node, exact=str(error))
            found = None
        return found if found is not None else self._fresh()

    def _make_room(self) -> None:
        """Refuse, before anything is paid, if the folder has no room for the state of this run."""
        if not self._path.exists():
            try:
                party_state.make_room(self._folder)
            except UsageError as error:
                raise Refused("terms", str(error)) from None

    def _since(self) -> int:
        """The first round for which the memory on the disk may be used."""
        state = self._state()
        self._held = party_state.identity(self._path), state
        return state.since

    def _fresh(self) -> PartyState:
        return PartyState("", client=first_state(self._steps))

    def _save(self, state: PartyState) -> PartyState:
        """Write the state. Returns what is on the disk now."""
        if not self._path.exists():
            party_state.make_room(self._folder)
        saved = party_state.save(self._path, dataclasses.replace(state, ledger=self._ledger or state.ledger))
        self._held = party_state.identity(self._path), saved
        return saved

    def _deposit(self, state: PartyState) -> bytes:
        """A state that was saved, in bytes whose number depends on the method and the model alone."""
        from safetensors.torch import save as packed

        pending = state.pending
        if not self._steps.stateful or pending is None:
            return b""
        facts = json.dumps({"accepted": state.accepted, "round": pending.round}).ljust(_FACTS)
        tensors = {f"client.{name}": rows for name, rows in (state.client or {}).items()}
        if not self._plain_draft:
            draft = as_used(pending.draft, pending.taken)  # a table that is shared with the client state may be shorter
            tensors |= {f"draft.{name}": rows for name, rows in draft.items()}
        tensors["message"] = pending.taken
        whole = packed(tensors, {"facts": facts})
        return whole if len(whole) + 64 <= largest_content(self._agreement.terms.dimension) else b""

    def _restored(self, attempt: int, content: bytes) -> PartyState | None:
        """The state in a deposit; None if it cannot be read, which only this party's own mistake could cause."""
        from safetensors import SafetensorError
        from safetensors.torch import load as unpacked

        try:
            tensors = unpacked(content)
            length = int.from_bytes(content[:8], "little")
            facts = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["facts"])
            client = {name: tensors[f"client.{name}"] for name in self._steps.initial_client_state}
            draft: Tables = client if self._plain_draft else {name: tensors[f"draft.{name}"] for name in client}
            message, round = tensors["message"], int(facts["round"])
            pending = Pending(round, _attempt_name(attempt), "", message, message, draft, None)
            return PartyState("", client, int(facts["accepted"]), round, pending=pending)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            logging.getLogger("normec").warning("the deposit cannot be read, so the memory begins anew: %s", error)
            return None


def _attempt_name(attempt: int) -> str:
    return f"secure-sum/{attempt}"
