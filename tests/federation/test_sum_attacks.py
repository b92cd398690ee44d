"""Lies of a server about a secure sum, and of parties: each is refused by name, and nothing is opened or paid for."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from normec import DPSGD, Clip, NormEC, Privacy
from normec.errors import UsageError
from normec.federation.flower import sum_loop
from normec.federation.flower.mailbox import Incoming
from normec.federation.flower.presence import Timeouts
from normec.federation.flower.run_parties import OnlineParty
from normec.federation.flower.sum_loop import introductions, run_sums
from normec.federation.protocol import party_state, server_state
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.departure import leave
from normec.federation.protocol.introduction import agreed, introduce, introduced
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.party import Party
from normec.federation.protocol.sum_terms import Agreement
from normec.federation.protocol.wire import (
    Refusal,
    Reply,
    SumReply,
    SumRequest,
    WireError,
    from_fields,
    octets,
    run_name,
    to_fields,
)
from normec.federation.secure_sum.keys import Identity
from normec.federation.secure_sum.roster import Member, Roster
from normec.federation.secure_sum.shares import split
from normec.federation.secure_sum.terms import Terms
from normec.federation.secure_sum.wire import (
    Advert,
    Answer,
    Invitation,
    KeyList,
    Request,
    Reveal,
    SealedShares,
    Survivors,
    Task,
    decode_answers,
    decode_requests,
    encode,
)
from normec.federation.secure_sum.wire import Refusal as SumRefusal
from normec.privacy.secure_sum import SumGrid

from .hostile import HostileServer
from .summing_hospitals import NODES, OPEN, SummingHospitals

CLIENT = Privacy(sigma=0.2, trust="secure-sum", delta=1e-4)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[SummingHospitals]:
    opened = SummingHospitals(tmp_path, DPSGD(Clip(0.5)), 3, CLIENT)
    yield opened
    opened.close()


def send(federation: SummingHospitals, node: str, *requests: Request, run: str | None = None) -> tuple[Answer, ...]:
    """What a party answers to messages that the attacker made."""
    request = SumRequest(run or federation.server.run, node, 0, "exchange", octets(encode(requests)))
    reply = from_fields(to_fields(federation.parties[node].answer(to_fields(request))))
    assert isinstance(reply, SumReply)
    return decode_answers(reply.content.tobytes())


def due(federation: SummingHospitals, node: str) -> Any:
    """What the honest server would send to a party now."""
    request = federation.server.request(node)
    payload = request.payload.tobytes() if request.payload is not None else b""
    return decode_requests(request.content.tobytes(), payload)[0]


def refused(answers: tuple[Answer, ...]) -> str:
    (answer,) = answers
    assert isinstance(answer, SumRefusal), answer
    return answer.reason


def exact(federation: SummingHospitals, node: str) -> str:
    """What the party's journal says about its newest refusal."""
    lines = [line for line in read_journal(federation.home(node) / "events.jsonl") if line["event"] == "refused"]
    return str(lines[-1]["exact"])


def paid(federation: SummingHospitals) -> list[int]:
    return [read_releases(federation.home(node)).count() for node in NODES]


# ---- terms ---------------------------------------------------------------------------------------------------------


def consistent(terms: Terms, **changes: Any) -> Terms:
    """Terms with other numbers, and with the grid that follows from them."""
    changed = {**dataclasses.asdict(terms), **changes}
    weights = tuple(changed["weights"])
    grid = SumGrid(terms.parties, 0.5, changed["sigma"], weights if set(weights) != {1.0} else ())
    return Terms(**(changed | {"weights": weights, "step": grid.step, "modulus_bits": grid.bits}))


CHANGES: list[dict[str, Any]] = [
    {"sigma": 0.1},
    {"minimum": 4},
    {"colluding": 0},
    {"rounds": 4},
    {"weights": (2.0, 0.5, 0.5, 1.0)},
    {"threshold": 4, "minimum": 4},
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("changes", CHANGES)
def test_terms_that_change_during_the_run(
    federation: SummingHospitals, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    federation.round()
    other = consistent(federation.server.terms, **changes)
    assert refused(send(federation, "a", Invitation(other.canonical, 500))) == "terms"
    assert f"differ from the agreed ones in {next(iter(changes))}" in caplog.text


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("changes", CHANGES)
def test_other_terms_for_one_party(federation: SummingHospitals, changes: dict[str, Any]) -> None:
    """Party d agrees to terms that its policy allows. The others see that they are not theirs, and nobody sends."""
    federation.policy("d", least_colluding=0)
    other = consistent(federation.server.terms, **changes)
    adverts = []
    for node in NODES:
        terms = other if node == "d" else federation.server.terms
        (advert,) = send(federation, node, Invitation(terms.canonical, 0))
        assert isinstance(advert, Advert)
        adverts.append(advert)
    for node in NODES:
        assert refused(send(federation, node, KeyList(0, tuple(adverts)))) == "terms"
    assert paid(federation) == [0, 0, 0, 0]


def test_a_grid_that_does_not_follow(federation: SummingHospitals) -> None:
    terms = federation.server.terms
    for changes in ({"step": 2 * terms.step}, {"modulus_bits": 64}, {"sigma": 1e-3 * terms.sigma}):
        other = dataclasses.replace(terms, **changes)
        assert refused(send(federation, "a", Invitation(other.canonical, 0))) == "terms"
    assert "follows from them" in exact(federation, "a")


def test_a_bound_that_the_method_does_not_have(federation: SummingHospitals) -> None:
    """The server states a method with longer messages than the grid and the noise were made for."""
    terms = federation.server.terms
    other = dataclasses.replace(terms, method=terms.method.replace("0.5", "50.0"))
    assert other.method != terms.method
    assert refused(send(federation, "a", Invitation(other.canonical, 0))) == "terms"


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"noise": "secure"', '"noise": "none"'),
        ('"noise": "secure"', '"noise": "exact"'),
        ('"memory": "clean"', '"memory": "secret"'),
        ('"dtype": "float64"', '"dtype": "object"'),
        ('"parameters": 4', '"parameters": 5'),
        ('"broadcast": 0', '"broadcast": -1'),
        ('"seed": 7', '"seed": "x"'),
        ('"seed": 7', '"speed": 7'),
        ("{", "["),
    ],
)
def test_a_plan_that_does_not_fit(federation: SummingHospitals, before: str, after: str) -> None:
    terms = federation.server.terms
    assert before in terms.plan
    other = dataclasses.replace(terms, plan=terms.plan.replace(before, after, 1))
    assert refused(send(federation, "a", Invitation(other.canonical, 0))) == "terms"


def test_the_roster_of_another_federation(federation: SummingHospitals) -> None:
    keys = [Identity.generate() for _ in NODES]
    stranger = Roster(tuple(Member(f"hospital-{node}", key.public) for node, key in zip(NODES, keys, strict=True)))
    other = dataclasses.replace(federation.server.terms, roster=stranger.digest.hex())
    assert refused(send(federation, "a", Invitation(other.canonical, 0))) == "terms"
    assert "another roster" in exact(federation, "a")


def test_the_terms_of_one_run_under_the_name_of_another(federation: SummingHospitals) -> None:
    run = "other~0123456789abcdef"
    assert refused(send(federation, "a", Invitation(federation.server.terms.canonical, 0), run=run)) == "terms"


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("rules", "reason", "word"),
    [
        ({"trusts": ["local"]}, "terms", "trust secure-sum is not among"),
        ({"least_colluding": 2}, "terms", "least_colluding = 2"),
        ({"least_sigma": 100.0}, "terms", "below least_sigma"),
        ({"methods": ["normec"]}, "terms", "dpsgd is not among"),
        ({"units": ["record"]}, "terms", "unit client is not among units"),
        ({"relation": "replace"}, "terms", "zero-out"),
        ({"runs": ["study"]}, "terms", "run trial is not among"),
        ({"largest_model": 3}, "terms", "largest_model = 3"),
        ({"epsilon": None}, "budget", "no epsilon"),
    ],
)
def test_a_policy_that_does_not_allow_the_terms(
    federation: SummingHospitals, rules: dict[str, Any], reason: str, word: str
) -> None:
    federation.policy("a", **rules)
    assert refused(send(federation, "a", due(federation, "a"))) == reason
    assert word in exact(federation, "a")
    assert not (federation.home("a") / "sums").exists()


def test_no_room_is_made_for_a_model_that_the_policy_does_not_allow(federation: SummingHospitals) -> None:
    """A few hundred bytes of terms may name a model of 128 MiB."""
    federation.policy("a", largest_model=100)
    terms = federation.server.terms
    plan = json.dumps({**json.loads(terms.plan), "parameters": 2**24})
    large = dataclasses.replace(terms, dimension=2**24, plan=plan)
    tracemalloc.start()
    try:
        assert refused(send(federation, "a", Invitation(large.canonical, 0))) == "terms"
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert "largest_model = 100" in exact(federation, "a")


def test_the_least_noise_of_a_policy_holds_in_every_round(tmp_path: Path) -> None:
    """A clean memory adds up what a record did before: Δ = 0.05, 0.09, 0.13, and the sum has the noise 0.2√2."""
    privacy = Privacy(sigma=0.2, trust="secure-sum", delta=1e-4, unit="record", record_clip="auto")
    federation = SummingHospitals(tmp_path, NormEC(0.5, 0.4), 3, privacy, records=[40.0] * len(NODES))
    federation.policy("a", least_sigma=2.2)
    assert refused(send(federation, "a", due(federation, "a"))) == "terms"
    assert "sigma over what a record can change is 2.17" in exact(federation, "a")
    federation.policy("a", least_sigma=2.1)
    assert isinstance(send(federation, "a", due(federation, "a"))[0], Advert)
    federation.close()


def test_a_policy_that_changes_during_the_run(federation: SummingHospitals) -> None:
    federation.round()
    federation.policy("d", trusts=["local"])
    federation.round()
    assert federation.server.refusals == {"d": "terms"}
    assert paid(federation) == [2, 2, 2, 1]


def test_a_roster_that_changes_while_a_party_runs(federation: SummingHospitals) -> None:
    """A new run needs the roster that the file holds now; one that has begun goes on with its own."""
    federation.round()
    other = Roster((*federation.roster.members[:3], Member("hospital-e", Identity.generate().public)))
    other.save(federation.home("a") / "roster.toml")
    run = f"another~{'0' * 16}"
    shown = federation.parties["a"].answer(to_fields(SumRequest(run, "a", 0, "roster", octets(b"?"))))
    assert isinstance(shown, SumReply)
    assert introduced(shown.content.tobytes(), run, "a") == (other, 0)
    terms = dataclasses.replace(federation.server.terms, run=run)
    assert refused(send(federation, "a", Invitation(terms.canonical, 0), run=run)) == "terms"
    assert "another roster" in exact(federation, "a")
    federation.run()
    assert paid(federation) == [3, 3, 3, 3]


def test_a_run_keeps_its_roster_when_its_party_is_started_again(federation: SummingHospitals) -> None:
    federation.round()
    other = Roster((*federation.roster.members[:3], Member("hospital-e", Identity.generate().public)))
    other.save(federation.home("a") / "roster.toml")
    federation.restart("a")
    federation.run()
    assert paid(federation) == [2, 3, 3, 3]  # the keys that it had sent for round 1 are lost with its process


def test_a_roster_with_another_key_of_the_party_ends_its_runs(federation: SummingHospitals) -> None:
    federation.round()
    fresh, home = Identity.generate(), federation.home("a")
    (home / "identity.pem").unlink()
    fresh.save(home / "identity.pem")
    Roster((Member("hospital-a", fresh.public), *federation.roster.members[1:])).save(home / "roster.toml")
    federation.restart("a")
    federation.run()
    assert federation.server.refusals == {"a": "terms"}
    assert "this party's key is not in the roster" in exact(federation, "a")
    assert paid(federation) == [1, 3, 3, 3]


def test_a_loss_is_accepted_while_a_party_runs(tmp_path: Path) -> None:
    federation = SummingHospitals(tmp_path, DPSGD(Clip(0.5)), 5, CLIENT)
    federation.round()
    federation.parties["d"].close()
    shutil.rmtree(federation.home("d") / "sums")
    federation.restart("d")
    while not federation.server.refusals:
        federation.round()
    assert federation.server.refusals == {"d": "restored"}
    federation.policy("d", accept_loss=True)
    federation.run()
    assert federation.server.refusals == {}
    assert read_releases(federation.home("d")).recovered() == 1
    federation.close()


def test_a_budget_that_is_spent(federation: SummingHospitals) -> None:
    federation.policy("d", epsilon=10.0)  # enough for one vector
    federation.run()
    assert federation.server.round == 3
    assert federation.server.refusals == {"d": "budget"}
    assert paid(federation) == [3, 3, 3, 1]


# ---- keys, tasks and replays ---------------------------------------------------------------------------------------


def adverts_of(federation: SummingHospitals) -> list[Advert]:
    found = []
    for node in NODES:
        (advert,) = send(federation, node, due(federation, node))
        assert isinstance(advert, Advert)
        found.append(advert)
    return found


def test_keys_that_the_server_made_itself(federation: SummingHospitals) -> None:
    """The server plays party d, with keys that it can read."""
    adverts = adverts_of(federation)
    forged = msgspec.structs.replace(adverts[3], mask_key=bytes(reversed(adverts[3].mask_key)))
    signed = msgspec.structs.replace(forged, signature=Identity.generate().sign("advert", forged.signed_bytes))
    for fourth in (forged, signed):
        for node in ("a", "b", "c"):
            assert refused(send(federation, node, KeyList(0, (*adverts[:3], fourth)))) == "signature"
    assert paid(federation) == [0, 0, 0, 0]


def until(federation: SummingHospitals, stage: str) -> None:
    while federation.server.stage != stage:
        federation.exchange()


def test_another_model_for_one_party(federation: SummingHospitals) -> None:
    """Party d computes from a model that the others do not know, and signs no statement about theirs."""
    until(federation, "vectors")
    task: Task = due(federation, "d")
    other = bytes(task.payload[:-8]) + b"\0" * 8
    send(federation, "d", msgspec.structs.replace(task, payload=other))
    federation.exchange(lambda node, _: node != "d")
    statement: Survivors = due(federation, "a")
    named = msgspec.structs.replace(statement.statement, survivors=(0, 1, 2, 3))
    assert refused(send(federation, "d", Survivors(named))) == "survivors"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("payload", [b"", b"\0" * 31, b"\0" * 40, b"\xff" * 32])
def test_a_payload_that_is_no_model(federation: SummingHospitals, payload: bytes) -> None:
    until(federation, "vectors")
    task: Task = due(federation, "a")
    assert refused(send(federation, "a", msgspec.structs.replace(task, payload=payload))) == "malformed"
    assert paid(federation) == [0, 0, 0, 0]


def test_a_payload_that_belongs_to_no_task(federation: SummingHospitals) -> None:
    """A payload travels apart from its exchange, and is that of one task which has none."""

    def answered(*requests: Request) -> tuple[Answer, ...]:
        exchange = SumRequest(federation.server.run, "a", 0, "exchange", octets(encode(requests)), octets(bytes(32)))
        reply = from_fields(to_fields(federation.parties["a"].answer(to_fields(exchange))))
        assert isinstance(reply, SumReply)
        return decode_answers(reply.content.tobytes())

    assert refused(answered(due(federation, "a"))) == "malformed"
    until(federation, "vectors")
    task: Task = due(federation, "a")
    bare = msgspec.structs.replace(task, payload=b"")
    assert refused(answered(task)) == refused(answered(bare, bare)) == "malformed"
    assert paid(federation) == [0, 0, 0, 0]
    federation.round()
    assert paid(federation) == [1, 1, 1, 1]


def test_another_payload_apart_from_the_exchange(federation: SummingHospitals) -> None:
    """A party that was sent another payload than the others gives a receipt that fits no statement of theirs."""
    until(federation, "vectors")
    for node, request in federation.server.requests().items():
        assert request.payload is not None
        other = octets(bytes(request.payload.size)) if node == "d" else request.payload
        federation.ask(node, dataclasses.replace(request, payload=other))
    assert "d" in federation.server.waiting  # its vector was not taken
    federation.server.close_exchange()
    assert federation.server.attempt == 0
    federation.round()
    assert federation.server.summed == 3


def test_a_task_is_answered_once_and_paid_for_once(federation: SummingHospitals) -> None:
    until(federation, "vectors")
    task: Task = due(federation, "a")
    first = send(federation, "a", task)
    assert send(federation, "a", task) == first
    other = msgspec.structs.replace(task, payload=bytes(len(task.payload)))
    assert refused(send(federation, "a", other)) == "repeated"
    assert paid(federation) == [1, 0, 0, 0]


def test_old_exchanges_after_a_round_and_after_a_restart(federation: SummingHospitals) -> None:
    until(federation, "vectors")
    old: list[Request] = [due(federation, "a")]
    federation.exchange()
    old.append(due(federation, "a"))
    federation.exchange()
    old.append(due(federation, "a"))
    federation.round()
    federation.round()
    for request in old:
        assert refused(send(federation, "a", request)) == "late"
    federation.restart("a")
    for request in old:
        assert refused(send(federation, "a", request)) in ("late", "forgotten")
    assert paid(federation) == [2, 2, 2, 2]


def test_a_request_for_a_single_message(federation: SummingHospitals) -> None:
    """Noise that suffices in a sum does not suffice in a message of its own."""
    agreement = Agreement.read(federation.server.terms, 0, "a", ["dpsgd"], 100)
    x = federation.server.state.run.x.numpy()
    party = Party(federation.home("a"), federation.policies["a"], federation.oracles["a"])
    answer = party.answer(to_fields(agreement.request(0, x, None)))
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"
    assert "under which none is sent" in exact(federation, "a")
    assert paid(federation) == [0, 0, 0, 0]


@pytest.mark.parametrize("content", [b"\0", b"\x90", b"\xc1" * 100, encode((SumRefusal(0, "late"),))])
def test_bytes_that_are_no_exchange(federation: SummingHospitals, content: bytes) -> None:
    request = SumRequest(federation.server.run, "a", 0, "exchange", octets(content))
    reply = from_fields(to_fields(federation.parties["a"].answer(to_fields(request))))
    assert isinstance(reply, SumReply)
    assert refused(decode_answers(reply.content.tobytes())) == "malformed"
    assert federation.server.receive("b", SumReply(federation.server.run, "b", 0, octets(b"\xc1"))) == "dropped"


def test_an_answer_for_another_party(federation: SummingHospitals) -> None:
    """The carrier knows who sent an answer; keys of another party in it are not taken."""
    (advert,) = send(federation, "a", due(federation, "a"))
    federation.server.receive("b", SumReply(federation.server.run, "b", 0, octets(encode((advert,)))))
    assert "b" in federation.server.waiting
    assert federation.server.receive("b", SumReply(federation.server.run, "a", 0, octets(b"\0"))) == "dropped"


def with_useless_shares(fields: Any) -> Any:
    """A party's answer in which its shares are bytes that nobody can decrypt."""
    reply = from_fields(fields)
    assert isinstance(reply, SumReply)
    parts: list[Any] = list(decode_answers(reply.content.tobytes()))
    for i, part in enumerate(parts):
        if isinstance(part, SealedShares):
            parts[i] = msgspec.structs.replace(part, shares=tuple((to, bytes(48)) for to, _ in part.shares))
    return to_fields(dataclasses.replace(reply, content=octets(encode(tuple(parts)))))


@pytest.mark.slow
@pytest.mark.parametrize("silent_in", ["vectors", "reveals"])
@pytest.mark.parametrize("decrypts", [True, False])
def test_a_party_that_deals_useless_shares_costs_the_others_one_attempt(
    federation: SummingHospitals, monkeypatch: pytest.MonkeyPatch, silent_in: str, decrypts: bool
) -> None:
    """Without its seeds the sum cannot be opened, and all others have paid. It could repeat that in every attempt."""
    server = federation.server
    for _ in range(20):
        if server.round:
            break
        stage = server.stage
        for node, request in server.requests().items():
            if (node, stage) == ("d", silent_in):
                continue
            with monkeypatch.context() as changed:
                if node == "d" and decrypts:
                    changed.setattr("normec.federation.secure_sum.party.split", lambda _, t, n: split(bytes(16), t, n))
                fields = to_fields(federation.parties[node].answer(to_fields(request)))
            server.receive(node, with_useless_shares(fields) if node == "d" and not decrypts else fields)
        server.close_exchange()
        if stage == server.stage == "reveals":  # as after some time limits
            server.repeat_round()
    assert server.round == 1
    assert paid(federation)[:3] == [2, 2, 2]
    federation.round()
    assert paid(federation) == [3, 3, 3, 0 if silent_in == "vectors" else 1]
    said = [line for line in read_journal(federation.folder / "server" / "events.jsonl") if line["event"] == "report"]
    assert {line["party"] for line in said if "dealt shares that do not fit" in line["what"]} == {"d"}


def accusing(fields: Any, of: int) -> Any:
    """A party's answer that says that the shares of another participant cannot be decrypted."""
    reply = from_fields(fields)
    assert isinstance(reply, SumReply)
    parts: list[Any] = list(decode_answers(reply.content.tobytes()))
    for i, part in enumerate(parts):
        if isinstance(part, Reveal) and of in dict(part.self_shares + part.key_shares):
            kinds = {"self_shares": part.self_shares, "key_shares": part.key_shares}
            others = {kind: tuple(one for one in shares if one[0] != of) for kind, shares in kinds.items()}
            parts[i] = msgspec.structs.replace(part, invalid=(of,), **others)
    return to_fields(dataclasses.replace(reply, content=octets(encode(tuple(parts)))))


@pytest.mark.slow
def test_a_party_that_is_accused_falsely_takes_part_again(tmp_path: Path) -> None:
    """Party a sends no vector in round 0, and party d says that the shares of a cannot be decrypted."""
    federation = SummingHospitals(tmp_path, DPSGD(Clip(0.5)), 20, CLIENT)
    server, summed = federation.server, list[int]()
    for _ in range(200):
        if server.finished:
            break
        stage, k = server.stage, server.round
        for node, request in server.requests().items():
            if (node, stage, k) != ("a", "vectors", 0) or summed:
                fields = to_fields(federation.parties[node].answer(to_fields(request)))
                server.receive(node, accusing(fields, 0) if node == "d" else fields)
        server.close_exchange()
        if server.round > k:
            summed.append(server.summed)
    assert summed[0] == 3
    assert summed[-1] == 4
    federation.close()


class Play:
    """The mailbox, the roster and the clock of a server whose parties answer at once, while they are online."""

    def __init__(self, federation: SummingHospitals) -> None:
        self.federation, self.now, self.answers = federation, 0.0, deque[Incoming]()
        self.gone: set[str] = set()

    def online(self) -> dict[str, OnlineParty]:
        return {node: OnlineParty(i, "0") for i, node in enumerate(NODES) if node not in self.gone}

    def name(self, number: int) -> str:
        return NODES[number]

    def post(self, due: dict[int, SumRequest], ttl: float) -> None:  # noqa: ARG002
        server = self.federation.server
        for number, request in due.items():
            node = NODES[number]
            if node in self.gone or (node, server.stage, server.round) == ("a", "vectors", 0):
                continue
            fields = to_fields(self.federation.parties[node].answer(to_fields(request)))
            self.answers.append(Incoming(number, request.round, accusing(fields, 0) if node == "d" else fields))

    def next(self, seconds: float) -> Incoming | None:
        if self.answers:
            return self.answers.popleft()
        self.now += max(seconds, 0.1)
        return None

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def say(self, line: str) -> None:
        if line.startswith("round 0: a sum of 3"):
            self.gone.add("b")


def test_a_party_that_is_left_out_is_asked_when_too_few_others_are_online(tmp_path: Path) -> None:
    """After a false accusation of party a, party b disappears: the run needs a, and goes on with it."""
    federation = SummingHospitals(tmp_path, DPSGD(Clip(0.5)), 3, CLIENT)
    play: Any = Play(federation)
    run_sums(federation.server, play, play, Timeouts(60.0, 600.0), play.say, lambda: play.now)
    assert play.gone == {"b"}
    assert federation.server.round == 3
    federation.close()


class Refusing(Play):
    """Party d deals its shares and answers every task with a refusal that another attempt could cure."""

    def post(self, due: dict[int, SumRequest], ttl: float) -> None:  # noqa: ARG002
        for number, request in due.items():
            node = NODES[number]
            if node == "d" and self.federation.server.stage == "vectors":
                refusal = SumRefusal(self.federation.server.attempt, "failed")
                answer: Any = SumReply(request.run, node, request.round, octets(encode((refusal,))))
            else:
                answer = self.federation.parties[node].answer(to_fields(request))
            self.answers.append(Incoming(number, request.round, to_fields(answer)))


def test_a_party_that_is_needed_and_refuses_every_task_does_not_spend_the_budgets_of_the_others(
    tmp_path: Path,
) -> None:
    federation = SummingHospitals(tmp_path, DPSGD(Clip(0.5)), 40, CLIENT, minimum=len(NODES))
    play: Any = Refusing(federation)
    run_sums(federation.server, play, play, Timeouts(600.0, 86_400.0), play.say, lambda: play.now)
    assert federation.server.round == 0
    assert "could not be recovered, were d (9 times)" in str(federation.server.stopped)
    assert paid(federation) == [9, 9, 9, 0]
    federation.close()


class FalseSeeds(Refusing):
    """Party d deals useless shares, and reveals another seed than it committed to."""

    def post(self, due: dict[int, SumRequest], ttl: float) -> None:  # noqa: ARG002
        for number, request in due.items():
            node = NODES[number]
            fields = to_fields(self.federation.parties[node].answer(to_fields(request)))
            if node == "d":
                reply = from_fields(with_useless_shares(fields))
                assert isinstance(reply, SumReply)
                parts = decode_answers(reply.content.tobytes())
                false = [msgspec.structs.replace(p, seed=bytes(32)) if isinstance(p, Reveal) else p for p in parts]
                fields = to_fields(dataclasses.replace(reply, content=octets(encode(tuple(false)))))
            self.answers.append(Incoming(number, request.round, fields))


@pytest.mark.slow
def test_a_party_that_spoils_openings_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_loop, "FAILURES", 1)  # each opening searches long among useless shares
    federation = SummingHospitals(tmp_path, DPSGD(Clip(0.5)), 40, CLIENT, minimum=len(NODES))
    play: Any = FalseSeeds(federation)
    run_sums(federation.server, play, play, Timeouts(600.0, 86_400.0), play.say, lambda: play.now)
    assert "could not be recovered, were d (2 times)" in str(federation.server.stopped)
    assert max(paid(federation)) <= 3
    federation.close()


# ---- introductions -------------------------------------------------------------------------------------------------


def test_introductions_name_every_party() -> None:
    keys = [Identity.generate() for _ in range(3)]
    roster = Roster(tuple(Member(f"h{i}", key.public) for i, key in enumerate(keys)))
    run = "trial~0123456789abcdef"

    def shown(key: Identity, node: str, own: Roster = roster) -> bytes:
        return msgspec.msgpack.encode(introduce(key, own, run, node))

    found = {f"n{2 - i}": introduced(shown(key, f"n{2 - i}"), run, f"n{2 - i}") for i, key in enumerate(keys)}
    assert agreed(found) == (roster, ["n2", "n1", "n0"])
    with pytest.raises(WireError, match="not signed"):
        introduced(shown(keys[0], "n0"), run, "n1")
    with pytest.raises(WireError, match="not signed"):
        introduced(shown(keys[0], "n0"), "other~0123456789abcdef", "n0")
    with pytest.raises(WireError, match="no roster"):
        introduced(b"\xc1", run, "n0")
    reordered = Roster(roster.members[::-1])
    with pytest.raises(UsageError, match="n0 has another roster"):
        agreed({**found, "n0": introduced(shown(keys[2], "n0", reordered), run, "n0")})
    with pytest.raises(UsageError, match="the same key"):
        agreed({**found, "n0": introduced(shown(keys[0], "n0"), run, "n0")})
    with pytest.raises(UsageError, match="missing: h0"):
        agreed({node: one for node, one in found.items() if node != "n2"})


def test_introductions_of_an_earlier_process_are_read_or_named(tmp_path: Path) -> None:
    roster = Roster(tuple(Member(f"h{i}", Identity.generate().public) for i in range(3)))
    kept = tmp_path / "secure-sum"
    kept.mkdir()
    roster.save(kept / "roster.toml")
    nowhere: Any = None
    for held, damaged in (('{"nodes": ["n2", "n0", "n1"]}', False), ("{}", True), ('{"nodes": [1]}', True), ("", True)):
        (kept / "nodes.json").write_text(held)
        if damaged:
            with pytest.raises(UsageError, match=r"nodes\.json is damaged"):
                introductions(nowhere, nowhere, tmp_path, "trial", 1.0, print)
        else:
            assert introductions(nowhere, nowhere, tmp_path, "trial", 1.0, print) == (roster, ["n2", "n0", "n1"])


def test_invented_runs_neither_fill_the_disk_nor_keep_later_runs_out(
    federation: SummingHospitals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invitations cost a server nothing. The run in which the party has made a vector stays."""
    monkeypatch.setattr("normec.federation.protocol.sum_party.MOST_RUNS", 3)
    monkeypatch.setattr("normec.federation.protocol.sum_party.MOST_OPEN", 2)
    federation.round()
    for i in range(6):
        run = f"trial~{i:016x}"
        terms = dataclasses.replace(federation.server.terms, run=run)
        (answer,) = send(federation, "a", Invitation(terms.canonical, 0), run=run)
        assert isinstance(answer, Advert)
        kept = {path.name for path in (federation.home("a") / "sums").iterdir()}
        assert federation.server.run in kept
        assert len(kept) <= 3
    federation.restart("a")
    monkeypatch.setattr("normec.federation.protocol.sum_party.MOST_RUNS", 1)
    run = "trial~ffffffffffffffff"
    terms = dataclasses.replace(federation.server.terms, run=run)
    assert refused(send(federation, "a", Invitation(terms.canonical, 0), run=run)) == "failed"
    assert "holds 1 runs" in exact(federation, "a")
    assert {path.name for path in (federation.home("a") / "sums").iterdir()} == {federation.server.run}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("refusal", ["malformed", "budget"])
def test_tasks_that_nobody_pays_for_do_not_keep_later_runs_out(
    federation: SummingHospitals, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """A task with a payload that is no model, or whose cost no budget covers, makes no vector."""
    monkeypatch.setattr("normec.federation.protocol.sum_party.MOST_RUNS", 3)
    monkeypatch.setattr("normec.federation.protocol.sum_party.MOST_OPEN", 1)
    payload = b"" if refusal == "malformed" else due_payload(federation)
    for node in NODES:
        federation.policy(node, epsilon=0.01 if refusal == "budget" else 1e6)
    for i in range(6):
        run = f"trial~{i:016x}"
        terms = dataclasses.replace(federation.server.terms, run=run)
        adverts = [send(federation, node, Invitation(terms.canonical, 0), run=run)[0] for node in NODES]
        assert all(isinstance(advert, Advert) for advert in adverts)
        keys = KeyList(0, tuple(advert for advert in adverts if isinstance(advert, Advert)))
        dealt = [send(federation, node, keys, run=run)[0] for node in NODES]
        sealed = [dict(one.shares) for one in dealt if isinstance(one, SealedShares)]
        for number, node in enumerate(NODES):
            shares = tuple((other, sealed[other][number]) for other in range(len(NODES)) if other != number)
            task = Task(0, 0, payload, tuple(range(len(NODES))), shares)
            assert refused(send(federation, node, task, run=run)) == refusal
    assert paid(federation) == [0] * len(NODES)
    for node in NODES:
        federation.policy(node, epsilon=1e6)
        federation.restart(node)
    federation.round()
    assert federation.server.round == 1


def due_payload(federation: SummingHospitals) -> bytes:
    return federation.server.state.run.x.numpy().tobytes()


def test_a_party_that_left_a_run_answers_none_of_its_exchanges(federation: SummingHospitals) -> None:
    node, run = NODES[0], federation.server.run
    leave(federation.home(node), run_name(run))
    for purpose in ("roster", "exchange"):
        request = SumRequest(run, node, 0, purpose, octets(encode((due(federation, node),))))
        answer = federation.parties[node].answer(to_fields(request))
        assert isinstance(answer, Refusal)
        assert answer.reason == "terms"
        assert f"this party left run {run_name(run)}" in exact(federation, node)
    assert paid(federation) == [0] * len(NODES)


@pytest.mark.slow
def test_a_memory_of_sums_is_never_used_for_single_messages(tmp_path: Path) -> None:
    """The server asks for single messages under the name of a run with secure sums, before and after its rounds."""
    method, sizes = NormEC(0.5, 0.4), [40.0] * len(NODES)
    privacy = Privacy(sigma=0.2, trust="secure-sum", delta=1e-4, unit="record", record_clip="auto")
    federation = SummingHospitals(tmp_path, method, 3, privacy, records=sizes)
    home, run = federation.home("a"), federation.server.run
    allowed = federation.policies["a"].model_copy(update={"trusts": ["local", "secure-sum"], "epsilon": 1e6})
    name, number = run.split("~")
    alone = Privacy(
        sigma=1.0, noise="secure", unit="record", memory="noisy", record_clip="auto", delta=1e-4, trust="local"
    )
    party = Party(home, allowed, federation.oracles["a"])
    x = federation.server.state.run.x.numpy()
    server = HostileServer(party, x, run=name, number=number, method=method, privacy=alone, sigma=1.0)
    records = {"plan.records.divisor": 40.0, "plan.records.by_layer": False}
    assert isinstance(server.ask(**records), Reply)
    path = party_state.path_of(home, run, "a")
    before = path.read_bytes()
    for _ in range(2):
        federation.round()
    assert path.read_bytes() == before
    kept = party_state.load(party_state.sum_path_of(home, run, "a"))
    assert kept is not None
    assert kept.accepted >= 1
    assert not kept.released
    federation.close()


@pytest.mark.slow
def test_a_memory_does_not_outlive_the_record_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parties remove the record of a run that is over, and the server begins another one under its name."""
    stated = Privacy(sigma=0.2, trust="secure-sum", unit="record", record_clip=1.0, delta=1e-4)
    rules = OPEN.model_copy(update={"unit": "record"})
    federation = SummingHospitals(tmp_path, NormEC(1.0, 0.5), 3, stated, rules, records=[40])
    federation.run()
    run, first = federation.server.run, paid(federation)
    for node in NODES:
        federation.parties[node].close()
        shutil.rmtree(federation.home(node) / "sums")
    monkeypatch.setattr(server_state.secrets, "token_hex", lambda _: run.partition("~")[2])
    federation._given["folder"] = tmp_path / "again"
    federation.restart_server()
    assert federation.server.run == run
    for node in NODES:
        federation.restart(node)
    until(federation, "signatures")
    for node in NODES:
        state = party_state.load(party_state.sum_path_of(federation.home(node), run, node))
        assert state is not None
        assert state.client is not None
        assert not state.client["memory"].any(), "what earlier rounds left is not in the price of the first"
    assert paid(federation) == [count + 1 for count in first]
    federation.close()
