"""A server of secure sums that goes back to rounds that are over, and one that makes a lost folder look complete.

Two federations differ in one record of party a and have the same noise. So the difference of two opened sums is what
the record has moved, and the ledger of the party says what it was charged for.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from normec import Clip21, Method, NormEC, Problem
from normec.federation.protocol import party_state
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.federation.protocol.sum_contributor import SumContributor
from normec.federation.protocol.sum_party import SumParty
from normec.federation.protocol.sum_terms import SumPlan, grid_of, made_terms
from normec.federation.protocol.wire import SumReply, SumRequest, octets, to_fields
from normec.federation.secure_sum.history import Position, statement_of
from normec.federation.secure_sum.keys import Identity
from normec.federation.secure_sum.masks import add_mask, self_key
from normec.federation.secure_sum.roster import Member, Roster
from normec.federation.secure_sum.wire import (
    Advert,
    Answer,
    Certificate,
    Endorsement,
    Invitation,
    KeyList,
    MaskedVector,
    Quorum,
    Refusal,
    Request,
    Reveal,
    SealedShares,
    Survivors,
    Task,
    decode_answers,
    encode,
)

from .summing_hospitals import NODES, OPEN, RepeatableNoise

ROUNDS, SIGMA, CLIP, DIVISOR = 12, 0.05, 1.0, 1000.0
NO_MODEL = bytes(8)
EVERYONE = tuple(range(len(NODES)))
METHODS = [NormEC(0.1, 0.2), NormEC(0.1, 0.1, decay=0.2), Clip21(1.0, decay=0.5)]


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.w


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2 / 2).mean()


def patients(*, protected: bool) -> ProblemOracle:
    """Records whose gradients vanish where w_1 = 1; that of the protected one is its clip along the sign of w_0."""
    sizes = 1 + np.arange(20) / 7
    inputs = np.stack([np.zeros(20), sizes, np.zeros(20)], axis=1)
    if protected:
        inputs, sizes = np.vstack([inputs, [[5.0, 0.0, 0.0]]]), np.append(sizes, 0.0)
    return ProblemOracle(
        Problem(Slope(), half_square, [TensorDataset(torch.from_numpy(inputs), torch.from_numpy(sizes))])
    )


class HostileSums:
    """A server of secure sums that follows no rules, with four honest parties."""

    def __init__(self, folder: Path, method: Method, *, protected: bool) -> None:
        self.folder, keys = folder, {node: Identity.generate() for node in NODES}
        roster = Roster(tuple(Member(f"hospital-{node}", keys[node].public) for node in NODES))
        self.oracles = {node: patients(protected=protected and node == "a") for node in NODES}
        self.policies, self.parties = {}, dict[str, SumParty]()
        for node, key in keys.items():
            (folder / node).mkdir(parents=True)
            key.save(folder / node / "identity.pem")
            roster.save(folder / node / "roster.toml")
            paths = {"identity": str(folder / node / "identity.pem"), "roster": str(folder / node / "roster.toml")}
            self.policies[node] = OPEN.model_copy(update={"unit": "record", **paths})
            self.restart(node)
        plan = SumPlan(
            parameters=3,
            broadcast=0,
            dtype="float64",
            seed=7,
            batch_size=0,
            noise="secure",
            delta=1e-5,
            unit="record",
            relation="zero-out",
            memory="clean",
            divisors=(DIVISOR,) * len(NODES),
            clip=CLIP,
        )
        self.run = f"trial~{'0' * 16}"
        weights = (1.0,) * len(NODES)
        self.terms = made_terms(
            self.run, roster, method, plan, sigma=SIGMA, rounds=ROUNDS, minimum=3, colluding=1, weights=weights
        )
        self.grid = grid_of(method, self.terms)
        self.attempt, self.position, self.history = -1, Position(), list[Certificate]()
        self.adverts, self.deposits = dict[int, list[Advert]](), dict[int, bytes]()  # by attempt; those of party a

    def restart(self, node: str) -> None:
        if node in self.parties:
            self.parties[node].close()
        noise = RepeatableNoise(NODES.index(node))
        self.parties[node] = SumParty(self.folder / node, self.policies[node], self.oracles[node], noise)

    def send(self, node: str, request: Request) -> Answer:
        fields = to_fields(SumRequest(self.run, node, 0, "exchange", octets(encode((request,)))))
        reply = self.parties[node].answer(fields)
        assert isinstance(reply, SumReply)
        return decode_answers(reply.content.tobytes())[0]

    def task(self, round: int, payload: bytes) -> list[Answer]:
        """What the parties answer to a task of a new attempt."""
        self.attempt += 1
        adverts = [self.send(node, Invitation(self.terms.canonical, self.attempt)) for node in NODES]
        known = [advert for advert in adverts if isinstance(advert, Advert)]
        self.adverts[self.attempt] = known
        dealt = [self.send(node, KeyList(self.attempt, tuple(known))) for node in NODES]
        sealed = [dict(answer.shares) for answer in dealt if isinstance(answer, SealedShares)]
        answers = []
        for i, node in enumerate(NODES):
            shares = tuple((other, sealed[other][i]) for other in EVERYONE if other != i)
            fresh = tuple(self.history[known[i].count :])
            answers.append(self.send(node, Task(self.attempt, round, payload, EVERYONE, shares, fresh)))
        return answers

    def sum(self, round: int, x: Sequence[float]) -> np.ndarray[Any, Any] | str:
        """The sum of a round, certified and opened; the reason if the parties refuse to make vectors."""
        payload = np.asarray(x, np.float64).tobytes()
        vectors = self.task(round, payload)
        made = [vector for vector in vectors if isinstance(vector, MaskedVector)]
        if isinstance(vectors[0], MaskedVector):
            self.deposits[self.attempt] = bytes(vectors[0].deposit)
        if len(made) < len(NODES):
            return {answer.reason for answer in vectors if isinstance(answer, Refusal)}.pop()
        stated = statement_of(self.terms.digest, self.attempt, round, payload, EVERYONE, self.position)
        stated = msgspec.structs.replace(stated, survivors=EVERYONE)
        signed = [self.send(node, Survivors(stated, tuple(vector.receipt for vector in made))) for node in NODES]
        signatures = [(i, answer.signature) for i, answer in enumerate(signed) if isinstance(answer, Endorsement)]
        certificate = Certificate(stated, tuple(signatures))
        reveals = [self.send(node, Quorum(certificate)) for node in NODES]
        self.history.append(certificate)
        self.position = self.position.after(stated)
        total = np.zeros(self.terms.dimension, self.terms.dtype)
        for i, (vector, reveal) in enumerate(zip(made, reveals, strict=True)):
            assert isinstance(reveal, Reveal)
            total += np.frombuffer(vector.vector, self.terms.dtype)
            add_mask(total, self_key(reveal.seed, self.terms.digest, round, self.attempt, i), negative=True)
        return self.grid.decode(total).numpy()

    def old_task(self, attempt: int, payload: bytes = NO_MODEL) -> Answer:
        """What party a answers to a task of an attempt that it has forgotten, with the others' keys from that time."""
        advert = self.send("a", Invitation(self.terms.canonical, attempt))
        assert isinstance(advert, Advert)
        dealt = self.send("a", KeyList(attempt, (advert, *self.adverts[attempt][1:])))
        assert isinstance(dealt, SealedShares)
        shares = tuple((other, dict(dealt.shares)[other]) for other in EVERYONE[1:])
        return self.send("a", Task(attempt, self.parties_round("a"), payload, EVERYONE, shares, ()))

    def parties_round(self, node: str) -> int:
        """The round that follows those that a party knows."""
        return self.parties[node]._open[self.run]._position.round + 1

    def exchange_folder(self, copy: Path | None) -> None:
        """Put an old copy of party a's folder in its place, or one that holds nothing but its keys."""
        home = self.folder / "a"
        kept = {name: (home / name).read_bytes() for name in ("identity.pem", "roster.toml")}
        self.parties["a"].close()
        shutil.rmtree(home)
        shutil.copytree(copy, home) if copy is not None else home.mkdir()
        for name, content in kept.items():
            (home / name).write_bytes(content)
        self.restart("a")

    def charged(self) -> float:
        """What the newest line of the ledger of party a allows its record to move a sum."""
        releases = [json.loads(line) for line in (self.folder / "a" / "ledger.jsonl").read_text().splitlines()]
        newest = [line for line in releases if line.get("kind") == "release"][-1]
        return SIGMA * math.sqrt(self.terms.minimum - self.terms.colluding) / float(newest["record"])

    def close(self) -> None:
        for party in self.parties.values():
            party.close()


@pytest.fixture(params=METHODS, ids=lambda method: f"{method.name}-{method.decay}")
def worlds(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    both = [HostileSums(tmp_path / str(protected), request.param, protected=protected) for protected in (False, True)]
    yield both
    for one in both:
        one.close()


def moved(worlds: list[HostileSums], round: int, sign: float) -> float | str:
    """How far the protected record moves the sum of a round; the reason if it is refused."""
    sums = [one.sum(round, (sign, 1.0, 0.0)) for one in worlds]
    if isinstance(sums[0], str) or isinstance(sums[1], str):
        assert sums[0] == sums[1], "what is refused does not depend on the record"
        return str(sums[0])
    return float(np.linalg.norm(sums[0] - sums[1]))


@pytest.mark.parametrize("payload", [NO_MODEL, np.array([-1.0, 1.0, 0.0]).tobytes()], ids=["no model", "a model"])
def test_a_memory_that_moved_on_makes_no_vector_of_an_earlier_round(worlds: list[HostileSums], payload: bytes) -> None:
    """A task of round 1 makes the message of round 0 part of the memory. Round 0 is then asked for again."""
    first = moved(worlds, 0, 1.0)
    assert isinstance(first, float)
    assert 0 < first <= worlds[1].charged() * (1 + 1e-6)
    for one in worlds:
        one.task(1, payload)
    assert moved(worlds, 0, -1.0) == "round"
    for one in worlds:
        one.restart("a")
    assert moved(worlds, 0, -1.0) == "round"
    after = moved(worlds, 1, -1.0)
    assert isinstance(after, float)
    assert after <= worlds[1].charged() * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_order_of_rounds_moves_a_sum_by_more_than_is_charged(worlds: list[HostileSums], seed: int) -> None:
    drawn, opened = np.random.default_rng(seed), 0
    for _ in range(40):
        newest = max(worlds[0].position.round, 0)
        round = int(drawn.integers(max(0, newest - 1), min(newest + 3, ROUNDS + 1)))
        action = drawn.choice(["sum", "sum", "no model", "vectors", "restart"])
        if action == "restart":
            for one in worlds:
                one.restart("a")
        elif action == "sum":
            distance = moved(worlds, round, float(drawn.choice([-1.0, 1.0])))
            if isinstance(distance, float):
                opened += 1
                assert distance <= worlds[1].charged() * (1 + 1e-6), (round, opened)
        else:
            payload = NO_MODEL if action == "no model" else np.array([1.0, 1.0, 0.0]).tobytes()
            for one in worlds:
                one.task(round, payload)
    assert opened >= 3


ROUNDS_BEFORE = 5


def lossy(folder: Path, *, accept_loss: bool) -> HostileSums:
    server = HostileSums(folder, METHODS[0], protected=True)
    for node, rules in server.policies.items():
        server.policies[node] = rules.model_copy(update={"accept_loss": accept_loss})
        server.restart(node)
    return server


def refused_or_charged(server: HostileSums, accept_loss: bool) -> None:
    """The next sum is refused, or the ledger of party a has all vectors, those that its folder forgot included."""
    opened = server.sum(ROUNDS_BEFORE, (1.0, 1.0, 0.0))
    if accept_loss:
        assert not isinstance(opened, str)
        assert read_releases(server.folder / "a").count() == ROUNDS_BEFORE + 1
    else:
        assert opened == "restored"
    server.close()


@pytest.mark.parametrize("accept_loss", [False, True])
@pytest.mark.parametrize("lost", [False, True])
def test_tasks_that_nobody_pays_for_do_not_make_forgotten_vectors_known(
    tmp_path: Path, lost: bool, accept_loss: bool
) -> None:
    """The folder of party a is set back or lost, and its server gives the numbers of forgotten attempts to tasks."""
    server = lossy(tmp_path / "run", accept_loss=accept_loss)
    for round in range(ROUNDS_BEFORE):
        if round == 2:
            shutil.copytree(server.folder / "a", tmp_path / "copy")
        assert not isinstance(server.sum(round, (1.0, 1.0, 0.0)), str)
    server.exchange_folder(None if lost else tmp_path / "copy")
    for attempt in range(0 if lost else 2, ROUNDS_BEFORE):
        answer = server.old_task(attempt)
        assert isinstance(answer, Refusal)
        assert answer.reason == "malformed"
    refused_or_charged(server, accept_loss)


@pytest.mark.parametrize("accept_loss", [False, True])
def test_a_vector_is_known_only_once_it_is_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept_loss: bool
) -> None:
    """The last vector is forgotten, the same task comes again, and the party is killed as it pays."""
    server, x = lossy(tmp_path / "run", accept_loss=accept_loss), (1.0, 1.0, 0.0)
    for round in range(ROUNDS_BEFORE):
        if round == ROUNDS_BEFORE - 1:
            server.task(round, NO_MODEL)  # so that all parties know the last certificate
            shutil.copytree(server.folder / "a", tmp_path / "copy")
        server.sum(round, x)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    server.exchange_folder(tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(SumContributor, "pay", killed)
        with pytest.raises(KeyboardInterrupt):
            server.old_task(server.attempt, np.asarray(x).tobytes())
    server.restart("a")
    refused_or_charged(server, accept_loss)


def test_no_vector_is_free_because_its_deposit_came_back(tmp_path: Path) -> None:
    """The server shows certificates one by one, each with the deposit of the attempt after it."""
    server = lossy(tmp_path / "run", accept_loss=True)
    for round in range(ROUNDS_BEFORE):
        server.sum(round, (1.0, 1.0, 0.0))
    server.exchange_folder(None)
    for count in range(0, ROUNDS_BEFORE - 1, 2):
        server.attempt += 1
        adverts = [server.send(node, Invitation(server.terms.canonical, server.attempt)) for node in NODES]
        known = tuple(advert for advert in adverts if isinstance(advert, Advert))
        dealt = [server.send(node, KeyList(server.attempt, known)) for node in NODES]
        shares = tuple((i, dict(one.shares)[0]) for i, one in enumerate(dealt) if i and isinstance(one, SealedShares))
        shown = tuple(server.history[known[0].count : count + 1])
        task = Task(server.attempt, ROUNDS - 1, NO_MODEL, EVERYONE, shares, shown, server.deposits[count + 1])
        assert isinstance(server.send("a", task), Refusal)
    assert not isinstance(server.sum(ROUNDS_BEFORE, (1.0, 1.0, 0.0)), str)
    assert read_releases(server.folder / "a").count() == ROUNDS_BEFORE + 1
    server.close()


def test_no_memory_of_a_removed_record_is_left_under_another_name(tmp_path: Path) -> None:
    server = lossy(tmp_path / "run", accept_loss=False)
    server.sum(0, (1.0, 1.0, 0.0))
    server.task(1, NO_MODEL)  # the message of round 0 is part of the memory
    old = party_state.sum_path_of(server.folder / "a", server.run, "a")
    assert old.exists()
    server.parties["a"].close()
    shutil.rmtree(server.folder / "a" / "sums")
    server.restart("a")
    fields = SumRequest(server.run, "other", 0, "exchange", octets(encode((Invitation(server.terms.canonical, 9),))))
    assert isinstance(server.parties["a"].answer(to_fields(fields)), SumReply)
    assert not old.exists()
    server.close()


def test_a_party_without_room_for_a_state_pays_for_no_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = lossy(tmp_path / "run", accept_loss=False)
    monkeypatch.setattr(party_state, "MOST_RUNS", 0)
    assert server.sum(0, (1.0, 1.0, 0.0)) == "terms"
    assert not (server.folder / "a" / "ledger.jsonl").exists() or not read_releases(server.folder / "a").count()
    server.close()


def test_a_lost_folder_without_room_for_a_state_is_charged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, x = lossy(tmp_path / "run", accept_loss=True), (1.0, 1.0, 0.0)
    for round in range(ROUNDS_BEFORE):
        server.sum(round, x)
    server.exchange_folder(None)
    with monkeypatch.context() as patch:
        patch.setattr(party_state, "MOST_RUNS", 0)
        for _ in range(3):
            assert server.sum(ROUNDS_BEFORE, x) == "terms"
    assert not isinstance(server.sum(ROUNDS_BEFORE, x), str)
    assert read_releases(server.folder / "a").count() == ROUNDS_BEFORE + 1
    server.close()
