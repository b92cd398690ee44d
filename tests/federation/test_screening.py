"""What the server lets through: honest messages practically always, and lies only up to limits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from normec import DPSGD, GD, Clip, Method, NormEC, Privacy
from normec.algorithms.method import Steps
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.screening import CHANCE, LARGEST_LOSS, Limits
from normec.federation.protocol.server_state import TOKENS, ServerState
from normec.federation.protocol.wire import Refusal, Reply, chained, to_fields

from .in_process import plan

METHOD = NormEC(0.1, 0.5, server_norm=False)
TIGHT = [(1, 1.0), (10, 0.5), (650, 7.3), (650, 0.01), (100_000, 2.0), (10_000_000, 20.0)]


def coordinator(sigma: float, dimension: int = 650, method: Method = METHOD, **more: Any) -> Coordinator:
    privacy = Privacy(sigma=sigma, memory="noisy", trust="local") if sigma else None
    return Coordinator(method, torch.zeros(dimension), ["a", "b"], plan(100), run="screen", privacy=privacy, **more)


def reply(server: Coordinator, message: np.ndarray[Any, Any], node: str = "a", **changes: Any) -> dict[str, Any]:
    party, step = server.state.parties[node], server.state.parties[node].accepted + 1
    message = message.astype(np.float32)
    sent = Reply(server.run, node, server.round, step, chained(party.digest, step, message), message)
    return {**to_fields(sent), **changes}


@pytest.mark.parametrize(("dimension", "sigma"), TIGHT)
def test_the_norm_that_is_let_through_is_near_the_exact_quantile(dimension: int, sigma: float) -> None:
    """Against SciPy's noncentral χ², for the longest honest mean: never below its quantile, and little above."""
    limit = Limits.of(METHOD, sigma, dimension).norm
    exact = sigma * math.sqrt(stats.ncx2.isf(CHANCE / 3, dimension, 1 / sigma**2))
    assert exact <= limit <= 1.12 * exact


@pytest.mark.parametrize(("dimension", "sigma"), TIGHT)
def test_the_other_two_limits_are_gaussian_tails(dimension: int, sigma: float) -> None:
    limits = Limits.of(METHOD, sigma, dimension)
    for limit, tests in ((limits.coordinate, dimension), (limits.along, 1)):
        exact = 1 + sigma * stats.norm.isf(CHANCE / 3 / (2 * tests))
        assert exact <= limit <= 1.12 * exact


@pytest.mark.parametrize(("dimension", "sigma"), [(3, 0.5), (650, 7.3), (5000, 0.05)])
def test_honest_messages_pass(dimension: int, sigma: float) -> None:
    """A thousand messages of full length along the worst direction for the tests: along the row, or one coordinate."""
    rng, limits = np.random.default_rng(8), Limits.of(METHOD, sigma, dimension)
    for _ in range(500):
        row = rng.normal(size=dimension)
        for mean in (row / np.linalg.norm(row), np.eye(1, dimension)[0]):
            assert limits.broken_by(mean + sigma * rng.normal(size=dimension), row) is None


def test_a_message_without_noise_keeps_to_its_bound() -> None:
    limits = Limits.of(METHOD, 0.0, 4)
    unit = np.full(4, 0.5)
    assert limits.broken_by(unit, unit) is None
    assert "norm" in str(limits.broken_by(1.001 * unit, None))


@pytest.mark.parametrize(
    ("lie", "word"),
    [("twice the noise", "norm"), ("all in one coordinate", "largest coordinate"), ("nan", "finite")],
)
def test_lies_of_a_first_message_are_dropped_by_name(lie: str, word: str, tmp_path: Path) -> None:
    server = coordinator(5.0, folder=tmp_path)
    length = 5.0 * math.sqrt(650)  # of honest noise
    message = {
        "twice the noise": np.full(650, 2 * length / math.sqrt(650)),
        "all in one coordinate": np.eye(1, 650)[0] * length,
        "nan": np.full(650, np.nan),
    }[lie]
    assert server.receive("a", reply(server, message)) == "dropped"
    assert word in read_journal(tmp_path / "events.jsonl")[-1]["why"]
    assert not server.state.run.x.any()
    server.close()


def test_a_lie_cannot_be_repeated_in_the_direction_of_the_last(tmp_path: Path) -> None:
    """A dense lie as long as noise passes for noise once; along what the party sent before it does not."""
    server = coordinator(5.0, folder=tmp_path)
    lie = 5.0 * np.random.default_rng(1).choice([-1.0, 1.0], 650)
    assert server.receive("a", reply(server, lie)) == "taken"
    server.close_round()
    assert server.receive("a", reply(server, lie)) == "dropped"
    assert "earlier messages" in read_journal(tmp_path / "events.jsonl")[-1]["why"]
    server.close()


def test_a_steady_push_adds_up_to_root_k_lengths_and_k_parts_along_the_row() -> None:
    """A party sends the strongest push in one direction that all limits allow, for K rounds."""
    sigma, rounds, dimension = 5.0, 40, 650
    server = coordinator(sigma)
    limits, goal = server.collector.limits, np.full(dimension, dimension**-0.5)
    rng = np.random.default_rng(2)
    row = np.zeros(dimension)
    for _ in range(rounds):
        push = goal.copy()
        if row.any():
            unit = row / np.linalg.norm(row)
            across = goal - (goal @ unit) * unit
            across = rng.normal(size=dimension) if np.linalg.norm(across) < 1e-6 else across
            across -= (across @ unit) * unit
            along = 0.999 * limits.along
            push = along * unit + math.sqrt(limits.norm**2 - limits.along**2) * 0.999 * across / np.linalg.norm(across)
        else:
            push *= 0.999 * limits.norm
        if limits.broken_by(push, row) is None:
            row = row + push
    reached = float(row @ goal)
    assert reached <= limits.norm * math.sqrt(rounds) + limits.along * rounds < reached / 0.8
    assert reached < 0.5 * limits.norm * rounds  # what length alone would have let through
    server.close()


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, 1.01 * LARGEST_LOSS])
def test_huge_losses_are_dropped_and_the_run_goes_on(loss: float, tmp_path: Path) -> None:
    server = coordinator(0.0, dimension=4, folder=tmp_path)
    for node in ("a", "b"):
        assert server.receive(node, reply(server, np.zeros(4), node, loss=loss)) == "dropped"
    for node in ("a", "b"):
        assert server.receive(node, reply(server, np.zeros(4), node, loss=LARGEST_LOSS)) == "taken"
    server.close_round()
    assert server.storage.history.rows[0]["loss"] == pytest.approx(LARGEST_LOSS)
    server.close()


@pytest.mark.parametrize("change", [{"loss": math.nan}, {"loss": math.inf}, {"loss": "1"}, {"loss": 1}, {"loss": True}])
def test_a_loss_must_be_a_finite_float(change: dict[str, Any]) -> None:
    server = coordinator(0.0, dimension=4)
    assert server.receive("a", reply(server, np.zeros(4), **change)) == "dropped"
    server.close()


def test_one_party_cannot_end_a_run_of_a_method_without_a_bound() -> None:
    server = coordinator(0.0, dimension=4, method=GD())
    assert server.receive("a", reply(server, np.full(4, 3e38))) == "dropped"
    assert server.receive("a", reply(server, np.full(4, 1e17))) == "taken"
    server.close_round()
    assert torch.isfinite(server.state.run.x).all()
    server.close()


@pytest.mark.parametrize("spec", ['{"alpha": {"method": []}}', '{"alpha": {"operator": {"method": {}}}}'])
def test_a_request_in_place_of_an_answer_does_not_end_the_run(spec: str) -> None:
    server = coordinator(5.0, dimension=4)
    asked = {**to_fields(server.requests()["a"]), "method.spec": spec}
    assert server.receive("a", asked) == "dropped"
    assert server.receive("a", reply(server, np.zeros(4))) == "taken"
    server.close()


def test_answers_to_rounds_that_have_not_begun_are_dropped() -> None:
    server = coordinator(0.0, dimension=4)
    assert server.receive("a", reply(server, np.zeros(4), round=1)) == "dropped"
    assert server.receive("a", reply(server, np.zeros(4), round=2**63 - 1)) == "dropped"
    assert server.receive("a", Refusal(server.run, "a", 7, "terms")) == "dropped"
    assert server.waiting == {"a", "b"}
    server.close()


def test_an_answer_under_anothers_name_or_token_changes_nothing_for_the_other() -> None:
    server = coordinator(0.0, dimension=4)
    assert server.receive("a", Refusal(server.run, "a", 0, "state", "0" * 32)) == "handshake"
    assert server.receive("b", Refusal(server.run, "a", 0, "state", "0" * 32)) == "dropped"
    assert server.receive("b", Refusal(server.run, "b", 0, "state", "0" * 32)) == "handshake"
    assert server.state.parties["a"].handshakes == 1
    assert server.receive("b", reply(server, np.zeros(4), "a")) == "dropped"
    assert server.answered == 0
    server.close()


def test_tokens_do_not_pile_up_and_every_handshake_is_counted() -> None:
    server = coordinator(0.0, dimension=4)
    for number in range(1000):
        assert server.receive("a", Refusal(server.run, "a", 0, "state", f"{number:032x}")) == "handshake"
    party = server.state.parties["a"]
    assert (len(party.tokens), party.handshakes, party.to_wire(None).lost) == (TOKENS, 1000, 999)
    assert party.to_wire(None).token == f"{999:032x}"
    server.receive("a", Refusal(server.run, "a", 0, "state", f"{998:032x}"))  # known: no new handshake
    assert (party.handshakes, party.tokens[-1]) == (1000, f"{998:032x}")
    server.close()


def test_a_restored_server_knows_the_handshakes_of_its_parties() -> None:
    method, x = DPSGD(Clip(1.0)), torch.zeros(4)
    state = ServerState.fresh(Steps(method, x), x, ["a", "b"])
    state.parties["a"].note_handshake("0" * 32)
    state.parties["a"].note_handshake("1" * 32)
    facts = {"round": 0, **json.loads(json.dumps(state.facts()))}
    restored = ServerState.restored(Steps(method, x), {"x": x, "server.estimate": x}, facts)
    assert restored.number == state.number
    assert [restored.parties[name].to_wire(None).lost for name in ("a", "b")] == [1, 0]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("decay", [0.0, 0.05, 0.3])
def test_aimed_messages_add_up_to_no_more_than_stated(decay: float) -> None:
    """A party puts as much of each message along u as passes, and the rest across, against the row's own part there."""
    dimension, rounds, beta = 650, 2000, 0.011
    method = NormEC(0.01, beta, decay=decay)
    limits = Limits.of(method, 5.0, dimension)
    longest, along = limits.norm, limits.along
    axes = np.random.default_rng(0).choice([-1.0, 1.0], (dimension, 2))
    u, w = np.linalg.qr(axes)[0].T
    row, total, largest = np.zeros(dimension), 0.0, 0.0
    for k in range(rounds):
        own, across, length = row @ u, row @ w, np.linalg.norm(row)
        low, high = 0.0, 1.0
        for _ in range(50):  # the largest part along u that passes
            part = (low + high) / 2
            passes = part * own - math.sqrt(1 - part**2) * abs(across) <= 0.99 * along * length / longest
            low, high = (part, high) if passes else (low, part)
        part = low if k else 0.0
        message = 0.999 * longest * (part * u - math.copysign(math.sqrt(1 - part**2), across) * w)
        assert limits.broken_by(message, row if k else None) is None
        total += float(message @ u)
        row = method.follow(torch.from_numpy(row), torch.from_numpy(message)).numpy()
        largest = max(largest, float(np.linalg.norm(row)))
    kept, without = 1 - decay, math.sqrt(rounds) * longest + rounds * along
    if decay:
        root = math.sqrt((kept * along) ** 2 + decay * (2 - decay) * longest**2)
        per_round = (kept * along + root) / (2 - decay)
        assert largest <= beta * per_round / decay
        assert without < total <= (1 / decay + rounds) * per_round  # forgetting lets more pass
        assert total > 0.9 * rounds * per_round  # the statement is not idle
    else:
        assert total <= without
