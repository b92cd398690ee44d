"""Users' own methods in a federation, against loops written by hand in NumPy and against `normec.train`."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normec import Compute, FixedSize, Logging, Method, NormEC, Privacy, UsageError, train
from normec.algorithms import registry
from normec.algorithms.method import Steps
from normec.federation.protocol import party_state
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.gradient_oracle import GradientOracle
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy, load_policy
from normec.federation.protocol.reconciliation import after_absence, reconcile
from normec.federation.protocol.spending import spending
from normec.federation.protocol.terms import MethodTerms, PlanTerms
from normec.federation.protocol.wire import Refusal, Reply
from normec.privacy import gaussian

from . import in_process
from .faulty_network import DIMENSION, NODES, POLICY, FaultyFederation, Quadratic
from .hostile import HostileServer, zeros
from .in_process import InProcessFederation, convolution, plan, softmax, whole
from .oracles import Untouched

FILES = Path(__file__).with_name("methods")
MINE, WRONG = FILES / "my_method.py", FILES / "wrong_methods.py"
OVERRIDING = FILES.parents[1] / "support" / "overriding_methods.py"
OWN = ("Clip21SGDM", "Averaging", "ServerMomentum", "Unbounded", "Biased")
PLAIN = POLICY.model_copy(update={"methods": ["normec", "clip21", "dpsgd"]})
RULES = PLAIN.model_copy(update={"methods": [*PLAIN.methods, *(f"{MINE}:{name}" for name in OWN)]})
OPEN = in_process.OPEN.model_copy(update={"methods": RULES.methods})
SECURE = Privacy(sigma=0.5, noise="secure", memory="noisy", trust="local")
TAU, ETA, LR = 0.5, 0.3, 0.1  # lr as in `faulty_network`


def own(name: str, **settings: Any) -> Method:
    return registry.build(f"{MINE}:{name}", settings)


def wrong(name: str) -> Method:
    return registry.build(f"{WRONG}:{name}", {})


class ByHand:
    """Clip21SGDM on the quadratics of `faulty_network`, without a line of normec."""

    def __init__(self, start: float = 0.0) -> None:
        self.targets = np.linspace(-3, 3, DIMENSION) * np.arange(1, len(NODES) + 1)[:, None]
        self.x = np.zeros(DIMENSION)
        self.momentum = np.zeros((len(NODES), DIMENSION))
        self.memory = np.full((len(NODES), DIMENSION), start)
        self.estimate = np.full(DIMENSION, start)

    def message(self, i: int) -> np.ndarray[Any, Any]:
        self.momentum[i] = (1 - ETA) * self.momentum[i] + ETA * (self.x - self.targets[i])
        difference = self.momentum[i] - self.memory[i]
        return difference * min(1.0, TAU / float(np.linalg.norm(difference)))

    def close(self, messages: dict[int, np.ndarray[Any, Any]]) -> None:
        for i, message in messages.items():
            self.memory[i] += message
            self.estimate = self.estimate + message / len(NODES)
        self.x = self.x - LR * self.estimate

    def round(self, who: Sequence[int] = range(len(NODES))) -> None:
        self.close({i: self.message(i) for i in who})


@pytest.fixture
def federation(tmp_path: Path) -> FaultyFederation:
    return FaultyFederation(tmp_path, own("Clip21SGDM", tau=TAU, eta=ETA), policy=RULES)


def play(federation: FaultyFederation, who: Sequence[int] = range(len(NODES))) -> None:
    for i in who:
        federation.answer(NODES[i])
    federation.close()


def compare(federation: FaultyFederation, hand: ByHand, tolerance: float = 1e-10) -> None:
    state = federation.server.state.run
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(state.x.numpy(), hand.x, **close)
    np.testing.assert_allclose(state.memory.numpy(), hand.memory, **close)
    np.testing.assert_allclose(state.estimate.numpy(), hand.estimate, **close)
    for i, node in enumerate(NODES):
        np.testing.assert_allclose(state_of(federation, node)["momentum"], hand.momentum[i], **close)


def state_of(federation: FaultyFederation, node: str) -> dict[str, np.ndarray[Any, Any]]:
    """A party's state once it has heard what the server accepted."""
    kept = party_state.load(party_state.path_of(federation.home(node), federation.server.run, node))
    request = federation.server.requests()[node]
    assert kept is not None
    x = torch.tensor(request.x)
    steps = Steps(federation.method, torch.zeros_like(x))
    agreed = reconcile(kept, request, steps)
    assert agreed is not None
    return {name: rows[0].numpy() for name, rows in after_absence(steps, agreed, request.round, x).items()}


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("how", [{}, {"participation": FixedSize(2)}], ids=["all", "two"])
@pytest.mark.parametrize("name", ["Signs", "Counting", "Stubborn", "Forgetful", "Started", "Still", "Rotated"])
def test_every_override_is_what_parties_and_server_run(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    method = registry.build(
        f"{OVERRIDING}:{name}", {} if name in ("Signs", "Counting") else {"alpha": 0.1, "beta": 0.3}
    )
    policy = OPEN.model_copy(update={"methods": [f"{OVERRIDING}:{name}"]})
    federation = InProcessFederation(tmp_path, method, plan(4, **how), model=softmax, policy=policy)
    x = federation.run()
    compute = Compute(dtype=torch.float64, engine="loop")
    reference = train(whole(softmax), method, lr=0.5, rounds=4, seed=7, compute=compute, **how)
    torch.testing.assert_close(x, reference.x, rtol=1e-10, atol=1e-10)
    for part, value in federation.server.state.run.server.items():
        torch.testing.assert_close(value, reference.state.server[part], rtol=1e-10, atol=1e-10)
    federation.server.close()


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["Clip21SGDM", "Averaging", "ServerMomentum", "Biased"])
@pytest.mark.parametrize("how", [{}, {"participation": FixedSize(2)}, {"batch_size": 8}], ids=["all", "two", "batches"])
def test_the_same_trajectory_as_in_one_process(
    name: str, how: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    method = own(name, alpha=0.1, beta=0.3) if name == "ServerMomentum" else own(name, tau=0.2)
    model = convolution if "batch_size" in how else softmax
    federation = InProcessFederation(tmp_path, method, plan(4, **how), model=model, policy=OPEN, dtype=dtype)
    x = federation.run()
    reference = train(
        whole(model),
        method,
        lr=0.5,
        rounds=4,
        seed=7,
        compute=Compute(dtype=dtype, engine="loop"),
        logging=Logging(every=1),
        **how,
    )
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(x, reference.x, **close)
    state = federation.server.state.run
    for part, value in state.server.items():
        torch.testing.assert_close(value, reference.state.server[part], **close)
    for part, rows in state.clients.items():
        torch.testing.assert_close(rows, reference.state.clients[part].to(rows), **close)
    assert bool(state.clients) == (name != "Averaging")
    federation.server.close()


def test_the_same_trajectory_as_by_hand_with_parties_that_come_and_go(federation: FaultyFederation) -> None:
    hand = ByHand()
    for who in ([0, 1, 2], [0], [0, 2], [1], [2], [0, 1, 2], [1, 2]):
        play(federation, who)
        hand.round(who)
    for i in range(len(NODES)):
        federation.answer(NODES[i])
    hand_next = {i: hand.message(i) for i in range(len(NODES))}
    federation.close()
    hand.close(hand_next)
    compare(federation, hand)
    federation.server.close()


def test_a_message_that_comes_late_takes_its_own_momentum_along(federation: FaultyFederation) -> None:
    hand = ByHand()
    play(federation)
    hand.round()
    federation.ask("c")
    late = {2: hand.message(2)}
    for _ in range(2):
        for node in ("a", "b"):
            before = len(federation.flying)
            federation.ask(node)
            federation.deliver(before)
        federation.close()
        hand.round([0, 1])
    federation.deliver(0)
    federation.close()
    hand.close(late)
    compare(federation, hand)
    play(federation)
    hand.round()
    compare(federation, hand)
    federation.server.close()


def test_kills_at_every_write_change_nothing(federation: FaultyFederation) -> None:
    hand = ByHand()
    for point in range(0, 36, 2):
        federation.ask(NODES[point // 2 % 3], point)
        federation.flying.clear()
        for node in NODES:
            federation.answer(node)
        rounds = federation.server.round
        federation.close(point + 1)
        if federation.server.round == rounds:  # the server died before its checkpoint: the same messages come again
            for node in NODES:
                federation.answer(node)
            federation.close()
        hand.round()
    assert federation.server.round == 18
    compare(federation, hand)
    federation.server.close()


def test_a_message_that_was_dropped_leaves_no_momentum_behind(federation: FaultyFederation) -> None:
    hand = ByHand()
    play(federation)
    hand.round()
    usual = federation.server.collector.limits
    federation.server.collector.limits = dataclasses.replace(usual, norm=1e-9)
    federation.ask("a")
    federation.deliver(0)
    assert federation.server.state.parties["a"].drops == 1
    federation.server.collector.limits = usual
    for _ in range(2):
        play(federation)
        hand.round()
    compare(federation, hand)
    federation.server.close()


def test_after_a_lost_disk_the_momentum_begins_anew_and_the_memory_is_the_servers_row(
    federation: FaultyFederation,
) -> None:
    hand = ByHand()
    for _ in range(4):
        play(federation)
        hand.round()
    federation.wipe("b")
    hand.momentum[1] = 0
    for _ in range(3):
        play(federation)  # checks that ĝ is the mean of the rows
        hand.round()
    compare(federation, hand)
    federation.server.close()


def test_a_memory_that_starts_elsewhere(tmp_path: Path) -> None:
    federation, hand = FaultyFederation(tmp_path, own("Biased", tau=TAU, eta=ETA), policy=RULES), ByHand(start=0.25)
    for who in ([0, 1], [0], [0, 1, 2]):
        play(federation, who)
        hand.round(who)
    federation.wipe("a")
    hand.momentum[0] = 0
    for _ in range(2):
        play(federation)
        hand.round()
    compare(federation, hand)
    federation.server.close()


@pytest.mark.slow
def test_noise_is_added_to_what_the_method_makes(tmp_path: Path) -> None:
    federation = FaultyFederation(tmp_path, own("Clip21SGDM", tau=TAU, eta=ETA), SECURE, policy=RULES)
    hand, noises = ByHand(), []
    for _ in range(40):
        messages = {}
        for i, node in enumerate(NODES):
            for _ in range(2):
                before = len(federation.flying)
                federation.ask(node)
                sent = federation.flying[before][1].get("message") if len(federation.flying) > before else None
                federation.deliver(before)
                if sent is not None:
                    clean = hand.message(i)
                    assert np.linalg.norm(clean) <= TAU * (1 + 1e-12)
                    noises.append(sent - clean)
                    messages[i] = sent
        federation.close()
        hand.close(messages)
    compare(federation, hand, 1e-9)
    noise = np.concatenate(noises) / 0.5
    assert len(noises) == 40 * len(NODES)
    assert abs(noise.mean()) < 7 / math.sqrt(noise.size)
    assert abs(noise.var() - 1) < 7 * math.sqrt(2 / noise.size)
    federation.server.close()


def test_the_exact_epsilon_on_both_sides(tmp_path: Path) -> None:
    rounds, sigma = 5, 1.2
    policy = OPEN.model_copy(update={"epsilon": 100.0, "least_sigma": 1e-3})
    method, privacy = own("Clip21SGDM", tau=TAU), Privacy(sigma=sigma, noise="secure", memory="noisy", trust="local")
    federation = InProcessFederation(tmp_path, method, plan(rounds, lr=0.1), policy=policy, privacy=privacy)
    while not federation.server.finished:
        federation.round()
    epsilon = gaussian.epsilon(math.sqrt(rounds) * TAU / sigma, 1e-5)
    run = federation.server.finish()
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(epsilon, rel=1e-9)
    for node in federation.arguments["parties"]:
        spent = spending(federation.home(node), policy)
        assert spent["epsilon"] == pytest.approx(epsilon, rel=1e-9)
        assert (spent["releases"], spent["failed"]) == (rounds, 0)
    federation.server.close()


def refused(folder: Path, policy: Policy, method: Method, oracle: GradientOracle | None = None) -> tuple[str, str]:
    """What a server hears from a party that refuses a method, and what the party writes down."""
    party = Party(folder, policy, oracle if oracle is not None else Quadratic(), node="a")
    answer = HostileServer(party, zeros(DIMENSION), method=method, privacy=SECURE, sigma=0.5).ask()
    assert isinstance(answer, Refusal)
    assert read_releases(folder).count() == 0
    return answer.reason, read_journal(folder / "events.jsonl")[-1]["exact"]


def test_a_party_that_does_not_have_the_method(tmp_path: Path) -> None:
    reason, exact = refused(tmp_path, PLAIN, own("Clip21SGDM"))
    assert reason == "terms"
    assert "method Clip21SGDM is not among methods = ['normec', 'clip21', 'dpsgd']" in exact


def test_a_party_that_has_other_code(tmp_path: Path) -> None:
    other = tmp_path / "my_method.py"
    other.write_text(MINE.read_text().replace("(1 - self.eta)", "(2 - self.eta)"))
    policy = PLAIN.model_copy(update={"methods": [f"{other}:Clip21SGDM"]})
    reason, exact = refused(tmp_path / "party", policy, own("Clip21SGDM"))
    assert reason == "terms"
    assert "code of Clip21SGDM differs from the server's" in exact
    other.unlink()
    shutil.copy(MINE, tmp_path / "copy.py")  # the same code elsewhere is the same code
    policy = PLAIN.model_copy(update={"methods": [f"{tmp_path / 'copy.py'}:Clip21SGDM"]})
    party = Party(tmp_path / "other", policy, Quadratic(), node="a")
    asking = HostileServer(party, zeros(DIMENSION), method=own("Clip21SGDM"), privacy=SECURE, sigma=0.5)
    assert isinstance(asking.ask(), Reply)


def test_a_file_that_changes_under_a_running_party_changes_nothing(tmp_path: Path) -> None:
    """The party runs the code that it loaded, and is known by the digest of that code."""
    file = tmp_path / "my_method.py"
    shutil.copy(MINE, file)
    policy = PLAIN.model_copy(update={"methods": [f"{file}:Clip21SGDM"]})
    terms = MethodTerms.of(own("Clip21SGDM"))
    before = terms.build(policy.methods)
    file.write_text(MINE.read_text().replace("(1 - self.eta)", "(2 - self.eta)"))
    assert type(terms.build(policy.methods)) is type(before)


def test_a_method_without_a_bound_is_not_private(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="messages without a bound"):
        Coordinator(own("Unbounded"), torch.zeros(5), NODES, plan(3), run="no", privacy=SECURE)
    reason, _ = refused(tmp_path, RULES, own("Unbounded"))
    assert reason == "terms"
    federation = FaultyFederation(tmp_path / "open", own("Unbounded", tau=TAU, eta=ETA), policy=RULES)
    hand = ByHand()
    play(federation)
    hand.round()
    compare(federation, hand)  # without noise it works
    federation.server.close()


def test_a_class_that_no_party_can_have() -> None:
    class Local(NormEC):
        pass

    with pytest.raises(UsageError, match="is not defined at the top of a file"):
        MethodTerms.of(Local(0.1, 0.5))
    changed = NormEC(0.1, 0.5)
    object.__setattr__(changed, "commit", changed.follow)
    with pytest.raises(UsageError, match="has its own commit"):
        MethodTerms.of(changed)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("PastItsBound", "above its bound 1"),
        ("Failing", "KeyError: 'no such thing'"),
        ("Shapeless", "must return messages"),
        ("FailingServer", "must return a direction of 5 numbers"),
        ("StartsFromX", "must not depend on the values of x"),
        ("FollowsElsewhere", "follow does not give the memory"),
    ],
)
def test_methods_that_cannot_work_are_refused_before_anybody_is_asked(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Coordinator(wrong(name), torch.ones(5), NODES, plan(3), run="no")


@pytest.mark.parametrize(("name", "says"), [("PastItsBound", "above its bound 1"), ("Failing", "KeyError")])
def test_a_party_refuses_such_methods_before_it_pays_or_touches_its_data(name: str, says: str, tmp_path: Path) -> None:
    policy = PLAIN.model_copy(update={"methods": [f"{WRONG}:{name}"]})
    reason, exact = refused(tmp_path, policy, wrong(name), Untouched())
    assert reason == "terms"
    assert says in exact


def test_a_method_that_fails_on_the_data_looks_like_any_other(tmp_path: Path) -> None:
    policy = PLAIN.model_copy(update={"methods": [f"{WRONG}:Picky"]})
    for name, target in (("working", -10.0), ("failing", 10.0)):

        class Pushed(GradientOracle):
            def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
                return target * torch.eye(len(x), dtype=x.dtype)[0], 0.0  # noqa: B023

        party = Party(tmp_path / name, policy, Pushed(), node="a")
        asking = HostileServer(party, zeros(DIMENSION), method=wrong("Picky"), privacy=SECURE, sigma=2.0)
        assert isinstance(asking.ask(), Reply)
        found = spending(tmp_path / name, policy)
        assert (found["releases"], found["failed"]) == (1, int(name == "failing"))


@pytest.mark.parametrize("tau", ["1", None, [1.0], {"operator": "Clip", "tau": 1.0}, -1.0, 0.0, True])
def test_a_method_that_checks_no_settings_is_refused_by_its_bound(tau: Any, tmp_path: Path) -> None:
    policy = PLAIN.model_copy(update={"methods": [f"{WRONG}:AnySetting"], "least_sigma": 1.0})
    party = Party(tmp_path, policy, Quadratic(), node="a")
    asking = HostileServer(party, zeros(DIMENSION), method=wrong("AnySetting"), privacy=SECURE, sigma=2.0)
    answer = asking.ask(method__spec=json.dumps({"tau": tau}))
    assert isinstance(answer, Reply if tau is True else Refusal)  # True is 1, which is the bound that was stated
    assert read_releases(tmp_path).count() == int(tau is True)


def test_a_method_that_nobody_can_follow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The method has two states of its own. All goes well until a disk is lost after a message was accepted."""
    with caplog.at_level(logging.WARNING, "normec"):
        federation = FaultyFederation(tmp_path, own("Averaging"), SECURE, policy=RULES)
    assert "does not define follow" in caplog.text
    assert federation.server.state.run.clients == {}
    federation.ask("a")
    federation.wipe("a")  # before any message of its was accepted
    federation.flying.clear()
    for _ in range(3):
        play(federation)
    for node in NODES:
        federation.answer(node)
        assert int(state_of_pending(federation, node)["seen"]) == 4
    federation.close()
    federation.wipe("b")
    federation.answer("b")
    assert federation.server.refusals == {"b": "lost"}
    (line,) = {
        line["exact"] for line in read_journal(federation.home("b") / "events.jsonl") if line["event"] == "refused"
    }
    assert "lost its state of the run, and Averaging cannot restore it" in line
    # Its four messages are out, and perhaps one more: they count in other runs too.
    assert read_releases(federation.home("b")).recovered() == 5
    play(federation, [0, 2])  # the others go on
    assert federation.server.round == 5
    federation.server.close()


def state_of_pending(federation: FaultyFederation, node: str) -> dict[str, Tensor]:
    kept = party_state.load(party_state.path_of(federation.home(node), federation.server.run, node))
    assert kept is not None
    assert kept.pending is not None
    return kept.pending.draft


def test_the_servers_step_runs_at_the_server_alone(tmp_path: Path) -> None:
    method = own("ServerMomentum", alpha=0.1, beta=0.5, server_norm=False)
    federation = FaultyFederation(tmp_path, method, policy=RULES)
    kind: Any = type(method)
    before = kind.steps
    for _ in range(3):
        play(federation)
    assert kind.steps == before + 3
    federation.restart()
    assert float(federation.server.state.run.server["rounds"]) == 3
    memory, estimate, velocity, x = np.zeros((3, DIMENSION)), 0.0, 0.0, np.zeros(DIMENSION)
    targets = ByHand().targets
    for _ in range(4):
        difference = x - targets - memory
        messages = difference / (0.1 + np.linalg.norm(difference, axis=1, keepdims=True))
        memory = memory + 0.5 * messages
        estimate = estimate + 0.5 * messages.mean(0)
        velocity = 0.9 * velocity + estimate
        x = x - LR * velocity
    play(federation)
    np.testing.assert_allclose(federation.server.state.run.x.numpy(), x, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(federation.server.state.run.memory.numpy(), memory, rtol=1e-10, atol=1e-10)
    federation.server.close()


def test_a_policy_names_a_file_beside_it(tmp_path: Path) -> None:
    shutil.copy(MINE, tmp_path / "my_method.py")
    path = tmp_path / "policy.toml"
    path.write_text('epsilon = 4.0\nmethods = ["normec", "my_method.py:Clip21SGDM"]\n')
    policy = load_policy(path)
    assert policy.methods == ["normec", f"{tmp_path / 'my_method.py'}:Clip21SGDM"]
    terms = MethodTerms.of(own("Clip21SGDM", tau=0.25))
    assert (terms.name, terms.spec) == ("Clip21SGDM", '{"eta": 0.3, "tau": 0.25}')
    assert terms.build(policy.methods).spec() == {"tau": 0.25, "eta": 0.3}
    with pytest.raises(UsageError, match="eta must lie in"):
        dataclasses.replace(terms, spec='{"eta": 0}').build(policy.methods)
    shutil.copy(MINE, tmp_path / "again.py")
    for methods, says in (
        (["other.py:Clip21SGDM"], "there is no file"),
        (["my_method.py:Clip21"], "must be a subclass|has no class"),
        (["my_method.py:Clip"], "must be a subclass"),
        (["my_method.py:Clip21SGDM", "again.py:Clip21SGDM"], "two have the name Clip21SGDM"),
    ):
        path.write_text(f"epsilon = 4.0\nmethods = {json.dumps(methods)}\n")
        with pytest.raises(UsageError, match=says):
            load_policy(path)
