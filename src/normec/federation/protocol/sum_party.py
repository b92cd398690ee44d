"""A party of runs with secure sums: it shows its roster, agrees to terms once, and answers each exchange.

A run begins with two questions. The server asks for the party's roster, which it needs to know who is who; the answer
is signed, and every party must have the same one. Then it proposes terms with its first invitation. The party compares
them with its policy, computes what they amount to, and keeps them in its folder. From then on they cannot change: an
invitation with other terms is refused, and the party's log names the first setting that differs. The keys of all
parties are signed together with the digest of the terms, so no party takes part before all agree.

    FOLDER/sums/RUN/terms.json  roster.toml             what the party agreed to, and with whom
    FOLDER/sums/RUN/secure-sum.jsonl                    what it did (`secure_sum.Party`)
    FOLDER/runs/RUN/…  ledger.jsonl  events.jsonl       memory, account and journal, as in any run

The secrets of an attempt live in this process. A process that is started again answers as a dropout until the next
exchange of keys.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ...errors import UsageError, WireError
from ...privacy.noise import SecureNoise
from ..secure_sum import party as secure_sum
from ..secure_sum.keys import Identity
from ..secure_sum.refusals import Refused
from ..secure_sum.roster import Roster
from ..secure_sum.terms import Terms
from ..secure_sum.wire import Invitation, attempt_of, decode_requests, encode
from ..secure_sum.wire import Refusal as SumRefusal
from .client_message import in_words
from .departure import check_departure
from .gradient_oracle import GradientOracle
from .introduction import Introduction, introduce
from .journal import JOURNAL, Journal
from .party_state import MOST_RUNS
from .policy import Policy
from .sum_contributor import SumContributor
from .sum_terms import Agreement
from .wire import Refusal, SumReply, SumRequest, addressed, from_fields, octets, run_name

FOLDER, TERMS, ROSTER = "sums", "terms.json", "roster.toml"
MOST_OPEN = 8  # runs at a time; the secrets of the oldest are forgotten for a new one


class SumParty:
    """A party that keeps its files in `folder`. Its policy may change between two requests.

    Args:
        folder: The party's folder, which all its runs share.
        policy: The party's policy, with the paths of its roster and of its key.
        oracle: The gradients of the party's data.
        noise: The source of the noise (default: the operating system's generator).
    """

    def __init__(
        self, folder: str | Path, policy: Policy, oracle: GradientOracle, noise: SecureNoise | None = None
    ) -> None:
        self.folder, self.policy, self.oracle = Path(folder), policy, oracle
        self.journal = Journal(self.folder / JOURNAL)
        self._noise = noise if noise is not None else SecureNoise()
        self._open: dict[str, secure_sum.Party] = {}
        self._read_roster()

    def _read_roster(self) -> None:
        """Read the party's key and its roster, which the policy or the files may have changed. Runs keep theirs."""
        identity, roster = Identity.load(Path(self.policy.identity)), Roster.load(Path(self.policy.roster))
        roster.number(identity.public)
        self._identity, self._roster = identity, roster

    def close(self) -> None:
        """Forget all secrets and release the folders of all runs."""
        while self._open:
            self._open.popitem()[1].close()

    def answer(self, fields: Mapping[str, Any]) -> SumReply | Refusal:
        """The party's part of an exchange, or a refusal if the request cannot be read or carries no exchange."""
        run, node, round = "unknown", "unknown", 0
        try:
            run, node, round = addressed(fields)
            request = from_fields(fields, self.policy.largest_model)
            if not isinstance(request, SumRequest):
                raise WireError("not a request of a secure sum")
        except WireError as error:
            return self._refusal(Refusal(run, node, round, "malformed"), str(error))
        try:
            departed = check_departure(self.folder, run)
            if departed is not None:
                raise Refused("terms", departed.exact)
            if request.purpose == "roster":
                content = msgspec.msgpack.encode(self._introduce(request))
            else:
                content = self._exchanged(request)
        except Refused as refused:
            return self._refusal(Refusal(run, node, round, "terms"), refused.exact)
        except Exception as error:  # a full disk: the server gets no details, and the party continues
            return self._refusal(Refusal(run, node, round, "failed"), in_words(error))
        return SumReply(run, node, round, octets(content))

    def _refusal(self, refusal: Refusal, exact: str) -> Refusal:
        self._note(refusal, refusal.reason, exact)
        return refusal

    def _introduce(self, request: SumRequest) -> Introduction:
        if "any" not in self.policy.runs and run_name(request.run) not in self.policy.runs:
            raise Refused("terms", f"run {run_name(request.run)} is not among runs = {self.policy.runs}")
        if "secure-sum" not in self.policy.trusts and not self.policy.allow_without_noise:
            raise Refused("terms", f"trust secure-sum is not among trusts = {self.policy.trusts}")
        try:
            self._read_roster()
        except UsageError as error:
            raise Refused("terms", str(error)) from None
        return introduce(self._identity, self._roster, request.run, request.node)

    def _exchanged(self, request: SumRequest) -> bytes:
        """The bytes of an answer, which may be a refusal of the secure sum."""
        attempt = 0
        try:
            payload = request.payload.tobytes() if request.payload is not None else b""
            requests = decode_requests(request.content.data, payload)
            attempt = attempt_of(requests[0])
            party = self._party(request, requests[0])
        except Refused as refused:
            self._note(request, refused.reason, refused.exact)
            return encode((SumRefusal(attempt, refused.reason),))
        answers = party.answers(requests)
        if not party.usable:  # a full disk: the next request begins with what is on the disk, as after a restart
            self._open.pop(request.run).close()
        for part in answers:
            if isinstance(part, SumRefusal):
                self._note(request, part.reason, f"attempt {part.attempt}; see the party's log")
        return encode(answers)

    def _note(self, about: Refusal | SumRequest, reason: str, exact: str) -> None:
        """Note the exact reason of a refusal, which the server does not learn."""
        logging.getLogger("normec").warning("refused (%s): %s", reason, exact)
        self.journal.note("refused", run=about.run, node=about.node, round=about.round, reason=reason, exact=exact)

    def _party(self, request: SumRequest, first: Any) -> secure_sum.Party:
        """The party of a run: open already, from its folder, or new if this is an invitation to acceptable terms."""
        if request.run in self._open:
            known = self._open[request.run]
            known.accept_loss = self.policy.accept_loss
            return known
        folder = self.folder / FOLDER / request.run
        if (folder / TERMS).exists():
            terms, roster = Terms.load(folder / TERMS), self._roster
            if (folder / ROSTER).exists():
                roster = Roster.load(folder / ROSTER)
        elif isinstance(first, Invitation):
            try:
                self._read_roster()
                terms, roster = Terms.read(first.terms), self._roster
                terms.check_roster(roster)
            except (UsageError, TypeError) as error:
                raise Refused("terms", f"the server's terms are not valid: {error}") from None
        else:
            raise Refused("order", "this party has not agreed to terms of this run")
        if terms.run != request.run:
            raise Refused("terms", f"the terms are those of {terms.run}, the request belongs to {request.run}")
        policy = self.policy
        try:
            terms.check_roster(roster)
            number = roster.number(self._identity.public)
        except UsageError as error:  # another key, or a folder of an older version, which holds no roster
            raise Refused("terms", str(error)) from None
        agreement = Agreement.read(terms, number, request.node, policy.classes, policy.largest_model)
        try:
            contributor = SumContributor(
                self.folder, agreement, self.oracle, lambda: self.policy, self.journal, self._noise
            )
        except UsageError as error:  # a method of the party's own that cannot be copied, for example
            raise Refused("terms", str(error)) from None
        contributor.check()
        if len(self._open) >= MOST_OPEN:
            oldest = next(iter(self._open))
            self._open.pop(oldest).close()
        if not folder.exists():
            self._make_room(folder.parent)
        if not (folder / secure_sum.FILE).exists():
            contributor.begin()
        opened = secure_sum.Party(
            folder, self._identity, roster, terms, contributor, accept_loss=self.policy.accept_loss
        )
        if not (folder / TERMS).exists():
            roster.save(folder / ROSTER)
            terms.save(folder / TERMS)
            self.journal.note("agreed", run=request.run, node=request.node, terms=terms.digest.hex())
        self._open[request.run] = opened
        return opened

    def _make_room(self, runs: Path) -> None:
        """Make sure that there is room for one more run. Raises `Refused` if there is none.

        A server can invite a party to any number of runs at no cost. So runs for which the party has made no vector are
        forgotten, the oldest first: nothing of them has left the party but public keys that nobody uses any more.
        """
        held = sorted(runs.glob("*"), key=lambda folder: folder.stat().st_mtime_ns)
        surplus = max(0, len(held) - MOST_RUNS + 1)
        idle = (folder for folder in held if folder.name not in self._open and not secure_sum.made_vectors(folder))
        forgotten = list(islice(idle, surplus))
        for folder in forgotten:
            shutil.rmtree(folder)
        if len(forgotten) < surplus:
            raise Refused("failed", f"{runs} holds {MOST_RUNS} runs; remove those that are over")
