"""Federations with secure sums in one process: trajectories by hand, ε, dropouts, restarts, and lost folders."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import normec
from normec import DPSGD, GD, Clip, Clip21, Method, NormEC, Privacy
from normec.errors import UsageError
from normec.federation.protocol import party_state
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import GradientOracle
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.wire import SumReply, from_fields, to_fields
from normec.federation.secure_sum.wire import MaskedVector, decode_answers
from normec.privacy.hash_chain import read_chain
from normec.privacy.noise import SecureNoise
from normec.sampling.participation import FixedSize

from .summing_hospitals import NODES, OPEN, SIZES, ByHand, SummingHospitals, clipped, gradient, problem, without

SLOW = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("keys", "shares", "signatures")]
STAGES = ["vectors", "reveals", *SLOW]
ALL = (0, 1, 2, 3)
CLIP21 = Clip21(tau=0.4)
CLIENT = Privacy(sigma=0.2, trust="secure-sum", delta=1e-4)
RECORD = Privacy(sigma=0.2, trust="secure-sum", delta=1e-4, unit="record", record_clip="auto")
WEIGHTS = torch.tensor(SIZES, dtype=torch.float64) * 4 / sum(SIZES)


@pytest.fixture
def hospitals(tmp_path: Path) -> Any:
    opened: list[SummingHospitals] = []

    def build(*given: Any, **named: Any) -> SummingHospitals:
        opened.append(SummingHospitals(tmp_path / str(len(opened)), *given, **named))
        return opened[-1]

    yield build
    for one in opened:
        one.close()


Build = Callable[..., SummingHospitals]


def hand(federation: SummingHospitals, **given: Any) -> ByHand:
    return ByHand(step=federation.server.terms.step, sigma=federation.server.terms.sigma, **given)


def close_to(x: Tensor, expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=1e-11)


# ---- trajectories --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", [None, CLIENT])
def test_a_sum_of_messages_moves_x(hospitals: Build, privacy: Privacy | None) -> None:
    federation = hospitals(DPSGD(Clip(0.5)), 3, privacy)
    close_to(federation.run(), hand(federation, psi=clipped(0.5)).run([ALL] * 3))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("privacy", [None, CLIENT])
def test_a_sum_of_messages_with_memories_moves_x(hospitals: Build, privacy: Privacy | None) -> None:
    federation = hospitals(CLIP21, 4, privacy)
    close_to(federation.run(), hand(federation, psi=clipped(0.4), memory=True).run([ALL] * 4))


@pytest.mark.slow
def test_weighted_messages_of_clipped_records(hospitals: Build) -> None:
    changes = {"weights": WEIGHTS}
    federation = hospitals(DPSGD(Clip(1.0)), 3, RECORD, records=SIZES, plan_changes=changes)
    by_hand = hand(
        federation, psi=clipped(1.0), weights=WEIGHTS.tolist(), gradient=lambda i, x: gradient(i, x, clip=True)
    )
    close_to(federation.run(), by_hand.run([ALL] * 3))


# ---- ε -------------------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("method", "privacy", "weights"),
    [
        (NormEC(alpha=1.0, beta=0.5), CLIENT, None),
        (DPSGD(Clip(1.0)), RECORD, WEIGHTS),
        (CLIP21, RECORD, None),  # a memory that no noise covers, so that ε grows faster
    ],
)
def test_epsilon_is_that_of_a_simulation(
    hospitals: Build, method: Method, privacy: Privacy, weights: Tensor | None
) -> None:
    records = SIZES if privacy.unit == "record" else None
    federation = hospitals(method, 3, privacy, records=records, plan_changes={"weights": weights})
    federation.run()
    spent = federation.server.finish().privacy
    simulated = normec.train(
        problem(),
        method,
        lr=0.3,
        rounds=3,
        privacy=normec.Privacy(**{**privacy.to_dict(), "honest": 2, "memory": "clean"}),
        weights=(weights / 4).tolist() if weights is not None else "equal",
        public_sizes=True,
        seed=7,
    ).privacy
    assert spent is not None
    assert simulated is not None
    assert spent.epsilon == simulated.epsilon
    for node in NODES:
        own = read_releases(federation.home(node))
        assert own.count() == 3
        assert own.epsilon(privacy.unit, privacy.delta) == pytest.approx(spent.epsilon, rel=1e-9)


# ---- dropouts and restarts -----------------------------------------------------------------------------------------


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_party_that_drops_out(hospitals: Build, stage: str) -> None:
    """Party d falls silent in one exchange of round 1, and takes part again afterwards."""
    federation = hospitals(CLIP21, 4)
    federation.round()
    silent = without("d", stage)
    if stage in ("keys", "shares"):  # which belong to round 0: only a new attempt has exchanges of its own for them
        federation.server.repeat_round()
    federation.round(silent)
    x = federation.run()
    counted = stage in ("signatures", "reveals")  # its vector is part of the sum
    rounds = [ALL, ALL if counted else (0, 1, 2), ALL, ALL]
    if stage in ("signatures", "reveals", "vectors"):  # it has no keys for round 2, which were exchanged meanwhile
        rounds[2] = ALL if stage == "vectors" else (0, 1, 2)
    close_to(x, hand(federation, psi=clipped(0.4), memory=True).run(rounds))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_party_that_is_killed(hospitals: Build, stage: str) -> None:
    """Party d is killed after its answer in one exchange of round 1; its successor knows the folder alone."""
    federation = hospitals(CLIP21, 5)
    federation.round()
    if stage in ("keys", "shares"):
        federation.server.repeat_round()
    while federation.server.stage != stage:
        federation.exchange()
    federation.exchange()
    federation.restart("d")
    x = federation.run()
    assert federation.server.round == 5
    counted = stage in ("vectors", "signatures", "reveals")
    rounds = [ALL, ALL if counted else (0, 1, 2), ALL, ALL, ALL]
    if stage in ("signatures", "reveals"):  # the secrets of round 2 were lost with the process
        rounds[2] = (0, 1, 2)
    close_to(x, hand(federation, psi=clipped(0.4), memory=True).run(rounds))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_is_killed(hospitals: Build, stage: str) -> None:
    """The server is killed in each exchange of round 1. Every sum is paid for and applied once."""
    federation = hospitals(CLIP21, 3, CLIENT)
    federation.round()
    if stage in ("keys", "shares"):
        federation.server.repeat_round()
    while federation.server.stage != stage:
        federation.exchange()
    for node, request in federation.server.requests().items():
        federation.ask(node, request)
    federation.restart_server()
    federation.run()
    chain = read_chain(federation.folder / "server" / "secure-sum" / "secure-sum.jsonl").lines
    assert sum(line["event"] == "certified" for line in chain) == 3
    assert federation.server.mechanism is not None
    assert federation.server.mechanism.releases == 3
    paid = [read_releases(federation.home(node)).count() for node in NODES]
    assert paid == [4 if stage in ("vectors", "signatures") else 3] * 4  # vectors that no sum contains are paid for


def test_a_server_that_is_killed_after_the_opening_applies_the_sum_once(hospitals: Build) -> None:
    federation = hospitals(DPSGD(Clip(0.5)), 3, CLIENT)
    federation.round()
    while federation.server.stage != "reveals":
        federation.exchange()
    for node, request in federation.server.requests().items():
        federation.ask(node, request)
    federation.server.server.advance()  # the sum is opened and on the disk; the checkpoint is not written
    federation.restart_server()
    assert federation.server.round == 2
    close_to(federation.run(), hand(federation, psi=clipped(0.5)).run([ALL] * 3))


def test_too_few_parties_make_another_attempt(hospitals: Build) -> None:
    """Two of four vectors are missing: the attempt is paid for by those who sent one, and the next one counts."""
    federation = hospitals(DPSGD(Clip(0.5)), 1, CLIENT)
    while federation.server.stage != "vectors":
        federation.exchange()
    federation.exchange(lambda node, _: node in "ab")
    assert federation.server.stage == "keys"
    x = federation.run()
    close_to(x, hand(federation, psi=clipped(0.5)).run([(), ALL], made=[(0, 1), ALL]))  # the noise is not used again
    assert [read_releases(federation.home(node)).count() for node in NODES] == [2, 2, 1, 1]
    assert federation.server.mechanism is not None
    assert federation.server.mechanism.releases == 1


def test_a_vector_that_is_lost_is_not_summed_later(hospitals: Build) -> None:
    """Party d paid for its vector and drew its noise, but the server never received it."""
    federation = hospitals(CLIP21, 3, CLIENT)
    federation.round()
    federation.parties["d"].answer(to_fields(federation.server.request("d")))
    federation.round(without("d", "vectors"))
    x = federation.run()
    by_hand = hand(federation, psi=clipped(0.4), memory=True)
    close_to(x, by_hand.run([ALL, (0, 1, 2), ALL], made=[ALL, ALL, ALL]))
    assert [read_releases(federation.home(node)).count() for node in NODES] == [3, 3, 3, 3]


def test_a_sum_that_too_few_open_is_attempted_again(hospitals: Build) -> None:
    federation = hospitals(DPSGD(Clip(0.5)), 1, CLIENT)
    while federation.server.stage != "reveals":
        federation.exchange()
    federation.exchange(lambda node, _: node in "ab")
    assert federation.server.stage == "reveals", "the other shares may still come"
    federation.server.repeat_round()
    federation.run()
    assert federation.server.mechanism is not None
    assert federation.server.mechanism.releases == 2  # the first sum may have been opened


# ---- lost folders --------------------------------------------------------------------------------------------------


def lose(federation: SummingHospitals, node: str) -> None:
    """Delete what a party keeps, except for its key, its roster and its policy."""
    federation.parties[node].close()
    for path in federation.home(node).iterdir():
        if path.suffix not in (".pem", ".toml"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    del federation.parties[node]
    federation.restart(node)


def test_a_state_that_others_change_is_read_again(hospitals: Build) -> None:
    """A running party keeps its state in memory only as long as nobody else has written the file."""
    federation = hospitals(CLIP21, 4)
    federation.round()
    state = party_state.sum_path_of(federation.home("d"), federation.server.run, "d")
    known = party_state.load(state)
    assert known is not None
    assert known.pending is not None
    assert known.client is not None
    false = {name: torch.full_like(rows, 7.0) for name, rows in known.client.items()}
    party_state.save(state, dataclasses.replace(known, client=false, pending=None))
    federation.round()
    found = party_state.load(state)
    assert found is not None
    assert found.client is not None
    assert all(bool((rows == 7.0).all()) for rows in found.client.values())
    state.write_bytes(b"?")
    federation.round()
    assert "damaged" in {line["event"] for line in read_journal(federation.home("d") / "events.jsonl")}


def test_a_lost_folder_is_noticed(hospitals: Build) -> None:
    federation = hospitals(CLIP21, 5)
    federation.round()
    federation.round()
    lose(federation, "d")
    federation.run()
    assert federation.server.refusals == {"d": "restored"}
    assert "restored" in {line.get("reason") for line in read_journal(federation.home("d") / "events.jsonl")}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("privacy", [None, CLIENT])
def test_a_party_whose_owner_accepts_the_loss_gets_its_memory_back(hospitals: Build, privacy: Privacy | None) -> None:
    federation = hospitals(CLIP21, 5, privacy)
    federation.round()
    federation.round()
    federation.policies["d"] = federation.policies["d"].model_copy(update={"accept_loss": True})
    lose(federation, "d")
    x = federation.run()
    rounds = [ALL, ALL, (0, 1, 2), ALL, ALL]
    if privacy is None:  # the noise of a new process begins anew, so only the run without it is computed by hand
        close_to(x, hand(federation, psi=clipped(0.4), memory=True).run(rounds))
        return
    assert read_releases(federation.home("d")).recovered() == 2
    assert read_releases(federation.home("d")).count() == 4


# ---- failures at a party -------------------------------------------------------------------------------------------


class Failing(GradientOracle):
    """Works as far as it can be tried before a payment, and fails afterwards."""

    def check(self, x: Tensor) -> None: ...

    def gradient(self, *_: Any) -> tuple[Tensor, float]:
        raise RuntimeError("patient 17 cannot be read")


class Recorder:
    """The sizes of the masked vectors and deposits that a party sends."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def look(self, federation: SummingHospitals, node: str) -> None:
        request = federation.server.request(node)
        fields = to_fields(federation.parties[node].answer(to_fields(request)))
        reply = from_fields(fields)
        assert isinstance(reply, SumReply)
        for part in decode_answers(reply.content.tobytes()):
            if isinstance(part, MaskedVector):
                self.sizes.append((len(part.vector), len(part.deposit)))


def test_a_failed_computation_sends_noise_and_looks_like_any_other(hospitals: Build) -> None:
    federation = hospitals(CLIP21, 3, CLIENT, oracles={"d": Failing()})
    seen = Recorder()
    while not federation.server.finished:
        if federation.server.stage == "vectors":
            for node in ("a", "d"):
                seen.look(federation, node)
        federation.exchange()
    assert len(seen.sizes) == 6
    assert len(set(seen.sizes)) == 1
    failures = [line for line in read_journal(federation.home("d") / "events.jsonl") if line["event"] == "failed"]
    assert len(failures) == 3
    assert "patient 17" in failures[0]["exact"]
    assert read_releases(federation.home("d")).count() == 3


def test_a_failed_computation_without_noise_is_a_refusal(hospitals: Build) -> None:
    federation = hospitals(DPSGD(Clip(0.5)), 2, oracles={"d": Failing()})
    close_to(federation.run(), hand(federation, psi=clipped(0.5)).run([(0, 1, 2)] * 2))


class Loud(SecureNoise):
    def integers(self, count: int, _: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.full(count, 2**30)


def test_a_sum_that_no_honest_parties_could_have_made_stops_the_run(hospitals: Build) -> None:
    federation = hospitals(DPSGD(Clip(0.5)), 2, CLIENT)
    federation.parties["d"]._noise = Loud()
    federation.run()
    assert "a party sent an invalid vector" in (federation.server.stopped or "")
    assert federation.server.round == 0


# ---- what a server refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "privacy", "changes", "word"),
    [
        (GD(), None, {}, "gd sends messages without a bound"),
        (DPSGD(Clip(1.0)), Privacy(sigma=1.0, trust="local"), {}, "needs trust='secure-sum'"),
        (DPSGD(Clip(1.0)), Privacy(sigma=1.0, trust="secure-sum", noise="seeded"), {}, "has noise='secure'"),
        (DPSGD(Clip(1.0)), Privacy(sigma=1.0, trust="secure-sum", honest=4), {}, "honest follows from"),
        (DPSGD(Clip(1.0)), Privacy(sigma=1.0, trust="secure-sum", noise_schedule="linear:2"), {}, "noise_schedule"),
        (DPSGD(Clip(1.0)), None, {"participation": FixedSize(2)}, "all parties take part"),
        (NormEC(alpha=1.0), Privacy(sigma=1.0, trust="secure-sum", memory="noisy"), {}, "memory='noisy'"),
    ],
)
def test_what_no_secure_sum_can_do(
    hospitals: Build, method: Method, privacy: Privacy | None, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        hospitals(method, 2, privacy, plan_changes=changes)


@pytest.mark.parametrize(("minimum", "colluding", "word"), [(2, 0, "minimum"), (3, 2, "minimum"), (4, 2, "collude")])
def test_numbers_of_parties_that_protect_nobody(hospitals: Build, minimum: int, colluding: int, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        hospitals(DPSGD(Clip(1.0)), 2, CLIENT, minimum=minimum, colluding=colluding)


def test_a_run_without_noise_needs_the_partys_permission(hospitals: Build) -> None:
    federation = hospitals(DPSGD(Clip(1.0)), 2, policy=OPEN.model_copy(update={"allow_without_noise": False}))
    federation.exchange()
    assert set(federation.server.refusals.values()) == {"terms"}
