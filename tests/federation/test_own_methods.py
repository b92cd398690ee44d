"""Other people's methods in a federation, against loops written by hand in NumPy and against `normec.train`."""

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

from normec import FixedSize, Method, NormEC, Privacy, UsageError, train
from normec.algorithms import registry
from normec.algorithms.method import Steps
from normec.federation.protocol import party_state
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.client_work import Work
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy, load_policy
from normec.federation.protocol.reconciling import agree, idled
from normec.federation.protocol.spending import spending
from normec.federation.protocol.terms import MethodTerms, PlanTerms
from normec.federation.protocol.wire import Refusal, Reply
from normec.privacy import gaussian

from . import village
from .hostile import HostileServer, zeros
from .stories import DIMENSION, NODES, POLICY, Quadratic, Story
from .village import Village, convolution, plan, softmax, whole

FILES = Path(__file__).with_name("methods")
MINE, WRONG = FILES / "my_method.py", FILES / "wrong_methods.py"
OWN = ("Clip21SGDM", "Averaging", "ServerMomentum", "Unbounded", "Biased")
PLAIN = POLICY.model_copy(update={"methods": ["normec", "clip21", "dpsgd"]})
RULES = PLAIN.model_copy(update={"methods": [*PLAIN.methods, *(f"{MINE}:{name}" for name in OWN)]})
OPEN = village.OPEN.model_copy(update={"methods": RULES.methods})
SECURE = Privacy(sigma=0.5, noise="secure", memory="noisy")
TAU, ETA, LR = 0.5, 0.3, 0.1  # the stories' lr


def own(name: str, **settings: Any) -> Method:
    return registry.build(f"{MINE}:{name}", settings)


def wrong(name: str) -> Method:
    return registry.build(f"{WRONG}:{name}", {})


class ByHand:
    """Clip21SGDM on the quadratics of the stories, without a line of normec."""

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
def story(tmp_path: Path) -> Story:
    return Story(tmp_path, own("Clip21SGDM", tau=TAU, eta=ETA), policy=RULES)


def play(story: Story, who: Sequence[int] = range(len(NODES))) -> None:
    for i in who:
        story.answer(NODES[i])
    story.close()


def compare(story: Story, hand: ByHand, tolerance: float = 1e-10) -> None:
    state = story.server.state.run
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(state.x.numpy(), hand.x, **close)
    np.testing.assert_allclose(state.memory.numpy(), hand.memory, **close)
    np.testing.assert_allclose(state.estimate.numpy(), hand.estimate, **close)
    for i, node in enumerate(NODES):
        np.testing.assert_allclose(state_of(story, node)["momentum"], hand.momentum[i], **close)


def state_of(story: Story, node: str) -> dict[str, np.ndarray[Any, Any]]:
    """A party's state once it has heard what the server accepted."""
    kept = party_state.load(party_state.path_of(story.home(node), story.server.run, node))
    request = story.server.requests()[node]
    assert kept is not None
    x = torch.tensor(request.x)
    steps = Steps(story.method, torch.zeros_like(x))
    agreed = agree(kept, request, steps)
    assert agreed is not None
    return {name: rows[0].numpy() for name, rows in idled(steps, agreed, request.round, x).items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["Clip21SGDM", "Averaging", "ServerMomentum", "Biased"])
@pytest.mark.parametrize("how", [{}, {"participation": FixedSize(2)}, {"batch_size": 8}], ids=["all", "two", "batches"])
def test_the_same_trajectory_as_in_one_process(
    name: str, how: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    method = own(name, alpha=0.1, beta=0.3) if name == "ServerMomentum" else own(name, tau=0.2)
    model = convolution if "batch_size" in how else softmax
    village = Village(tmp_path, method, plan(7, **how), model=model, policy=OPEN, dtype=dtype)
    x = village.run()
    reference = train(whole(model), method, lr=0.5, rounds=7, seed=7, dtype=dtype, engine="loop", log_every=1, **how)
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(x, reference.x, **close)
    state = village.server.state.run
    for part, value in state.server.items():
        torch.testing.assert_close(value, reference.state.server[part], **close)
    for part, rows in state.clients.items():
        torch.testing.assert_close(rows, reference.state.clients[part].to(rows), **close)
    assert bool(state.clients) == (name != "Averaging")
    village.server.close()


def test_the_same_trajectory_as_by_hand_with_parties_that_come_and_go(story: Story) -> None:
    hand = ByHand()
    for who in ([0, 1, 2], [0], [0, 2], [1], [2], [0, 1, 2], [1, 2]):
        play(story, who)
        hand.round(who)
    for i in range(len(NODES)):
        story.answer(NODES[i])
    hand_next = {i: hand.message(i) for i in range(len(NODES))}
    story.close()
    hand.close(hand_next)
    compare(story, hand)
    story.server.close()


def test_a_message_that_comes_late_takes_its_own_momentum_along(story: Story) -> None:
    hand = ByHand()
    play(story)
    hand.round()
    story.ask("c")
    late = {2: hand.message(2)}
    for _ in range(2):
        for node in ("a", "b"):
            before = len(story.flying)
            story.ask(node)
            story.deliver(before)
        story.close()
        hand.round([0, 1])
    story.deliver(0)
    story.close()
    hand.close(late)
    compare(story, hand)
    play(story)
    hand.round()
    compare(story, hand)
    story.server.close()


def test_kills_at_every_write_change_nothing(story: Story) -> None:
    hand = ByHand()
    for point in range(0, 36, 2):
        story.ask(NODES[point // 2 % 3], point)
        story.flying.clear()
        for node in NODES:
            story.answer(node)
        rounds = story.server.round
        story.close(point + 1)
        if story.server.round == rounds:  # the server died before its checkpoint: the same messages come again
            for node in NODES:
                story.answer(node)
            story.close()
        hand.round()
    assert story.server.round == 18
    compare(story, hand)
    story.server.close()


def test_a_message_that_was_dropped_leaves_no_momentum_behind(story: Story) -> None:
    hand = ByHand()
    play(story)
    hand.round()
    honest = story.server.intake.limits
    story.server.intake.limits = dataclasses.replace(honest, norm=1e-9)
    story.ask("a")
    story.deliver(0)
    assert story.server.state.seats["a"].drops == 1
    story.server.intake.limits = honest
    for _ in range(2):
        play(story)
        hand.round()
    compare(story, hand)
    story.server.close()


def test_after_a_lost_disk_the_momentum_begins_anew_and_the_memory_is_the_servers_row(story: Story) -> None:
    hand = ByHand()
    for _ in range(4):
        play(story)
        hand.round()
    story.wipe("b")
    hand.momentum[1] = 0
    for _ in range(3):
        play(story)  # checks that ĝ is the mean of the rows
        hand.round()
    compare(story, hand)
    story.server.close()


def test_a_memory_that_starts_elsewhere(tmp_path: Path) -> None:
    story, hand = Story(tmp_path, own("Biased", tau=TAU, eta=ETA), policy=RULES), ByHand(start=0.25)
    for who in ([0, 1], [0], [0, 1, 2]):
        play(story, who)
        hand.round(who)
    story.wipe("a")
    hand.momentum[0] = 0
    for _ in range(2):
        play(story)
        hand.round()
    compare(story, hand)
    story.server.close()


def test_noise_is_added_to_what_the_method_makes(tmp_path: Path) -> None:
    story = Story(tmp_path, own("Clip21SGDM", tau=TAU, eta=ETA), SECURE, policy=RULES)
    hand, noises = ByHand(), []
    for _ in range(40):
        messages = {}
        for i, node in enumerate(NODES):
            for _ in range(2):
                before = len(story.flying)
                story.ask(node)
                sent = story.flying[before][1].get("message") if len(story.flying) > before else None
                story.deliver(before)
                if sent is not None:
                    clean = hand.message(i)
                    assert np.linalg.norm(clean) <= TAU * (1 + 1e-12)
                    noises.append(sent - clean)
                    messages[i] = sent
        story.close()
        hand.close(messages)
    compare(story, hand, 1e-9)
    noise = np.concatenate(noises) / 0.5
    assert len(noises) == 40 * len(NODES)
    assert abs(noise.mean()) < 7 / math.sqrt(noise.size)
    assert abs(noise.var() - 1) < 7 * math.sqrt(2 / noise.size)
    story.server.close()


def test_the_exact_epsilon_on_both_sides(tmp_path: Path) -> None:
    rounds, sigma = 5, 1.2
    policy = OPEN.model_copy(update={"epsilon": 100.0, "least_sigma": 1e-3})
    method, privacy = own("Clip21SGDM", tau=TAU), Privacy(sigma=sigma, noise="secure", memory="noisy")
    village = Village(tmp_path, method, plan(rounds, lr=0.1), policy=policy, privacy=privacy)
    while not village.server.finished:
        village.round()
    epsilon = gaussian.epsilon(math.sqrt(rounds) * TAU / sigma, 1e-5)
    run = village.server.finish()
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(epsilon, rel=1e-9)
    for node in village.arguments["parties"]:
        spent = spending(village.home(node), policy)
        assert spent["epsilon"] == pytest.approx(epsilon, rel=1e-9)
        assert (spent["releases"], spent["failed"]) == (rounds, 0)
    village.server.close()


def refused(folder: Path, policy: Policy, method: Method, work: Work | None = None) -> tuple[str, str]:
    """What a server hears from a party that refuses a method, and what the party writes down."""
    party = Party(folder, policy, work if work is not None else Quadratic(), node="a")
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
    assert "code of Clip21SGDM is not the server's" in exact
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
    story = Story(tmp_path / "open", own("Unbounded", tau=TAU, eta=ETA), policy=RULES)
    hand = ByHand()
    play(story)
    hand.round()
    compare(story, hand)  # without noise it works
    story.server.close()


def test_a_class_that_no_party_can_have() -> None:
    class Local(NormEC):
        pass

    with pytest.raises(UsageError, match="is not defined at the top of a file"):
        MethodTerms.of(Local(0.1, 0.5))
    changed = NormEC(0.1, 0.5)
    object.__setattr__(changed, "commit", changed.follow)
    with pytest.raises(UsageError, match="has a commit of its own"):
        MethodTerms.of(changed)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("PastItsBound", "past its bound 1"),
        ("Failing", "KeyError: 'no such thing'"),
        ("Shapeless", "must return messages"),
        ("FailingServer", "must return a direction of 5 numbers"),
        ("StartsFromX", "must not depend on the numbers in x"),
        ("FollowsElsewhere", "follow does not come to the memory"),
    ],
)
def test_methods_that_cannot_work_are_refused_before_anybody_is_asked(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Coordinator(wrong(name), torch.ones(5), NODES, plan(3), run="no")


@pytest.mark.parametrize(("name", "says"), [("PastItsBound", "past its bound 1"), ("Failing", "KeyError")])
def test_and_by_the_party_before_it_pays_or_looks_at_its_data(name: str, says: str, tmp_path: Path) -> None:
    class Untouched(Work):
        def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
            raise AssertionError("the data were touched")

    policy = PLAIN.model_copy(update={"methods": [f"{WRONG}:{name}"]})
    reason, exact = refused(tmp_path, policy, wrong(name), Untouched())
    assert reason == "terms"
    assert says in exact


def test_a_method_that_fails_on_the_data_looks_like_any_other(tmp_path: Path) -> None:
    policy = PLAIN.model_copy(update={"methods": [f"{WRONG}:Picky"]})
    for name, target in (("working", -10.0), ("failing", 10.0)):

        class Pushed(Work):
            def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
                return target * torch.eye(len(x), dtype=x.dtype)[0], 0.0  # noqa: B023

        party = Party(tmp_path / name, policy, Pushed(), node="a")
        asking = HostileServer(party, zeros(DIMENSION), method=wrong("Picky"), privacy=SECURE, sigma=2.0)
        assert isinstance(asking.ask(), Reply)
        found = spending(tmp_path / name, policy)
        assert (found["releases"], found["failed"]) == (1, int(name == "failing"))


@pytest.mark.parametrize("tau", ["1", None, [1.0], {"operator": "Clip", "tau": 1.0}, -1.0, 0.0, True])
def test_settings_that_a_method_does_not_check_are_held_against_its_bound(tau: Any, tmp_path: Path) -> None:
    policy = PLAIN.model_copy(update={"methods": [f"{WRONG}:AnySetting"], "least_sigma": 1.0})
    party = Party(tmp_path, policy, Quadratic(), node="a")
    asking = HostileServer(party, zeros(DIMENSION), method=wrong("AnySetting"), privacy=SECURE, sigma=2.0)
    answer = asking.ask(method__spec=json.dumps({"tau": tau}))
    assert isinstance(answer, Reply if tau is True else Refusal)  # True is 1, which is the bound that was stated
    assert read_releases(tmp_path).count() == int(tau is True)


def test_a_method_that_nobody_can_follow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two states of its own: all goes well until a disk is lost after a message was accepted."""
    with caplog.at_level(logging.WARNING, "normec"):
        story = Story(tmp_path, own("Averaging"), SECURE, policy=RULES)
    assert "does not define follow" in caplog.text
    assert story.server.state.run.clients == {}
    story.ask("a")
    story.wipe("a")  # before any message of its was accepted
    story.flying.clear()
    for _ in range(3):
        play(story)
    for node in NODES:
        story.answer(node)
        assert int(state_of_pending(story, node)["seen"]) == 4
    story.close()
    story.wipe("b")
    story.answer("b")
    assert story.server.refusals == {"b": "lost"}
    (line,) = {line["exact"] for line in read_journal(story.home("b") / "events.jsonl") if line["event"] == "refused"}
    assert "lost its state of the run, and Averaging cannot restore it" in line
    # Its four messages are out, and perhaps one more: they count in other runs too.
    assert read_releases(story.home("b")).recovered() == 5
    play(story, [0, 2])  # the others go on
    assert story.server.round == 5
    story.server.close()


def state_of_pending(story: Story, node: str) -> dict[str, Tensor]:
    kept = party_state.load(party_state.path_of(story.home(node), story.server.run, node))
    assert kept is not None
    assert kept.pending is not None
    return kept.pending.draft


def test_the_servers_step_runs_at_the_server_alone(tmp_path: Path) -> None:
    method = own("ServerMomentum", alpha=0.1, beta=0.5, server_norm=False)
    story = Story(tmp_path, method, policy=RULES)
    kind: Any = type(method)
    before = kind.steps
    for _ in range(3):
        play(story)
    assert kind.steps == before + 3
    story.restart()
    assert float(story.server.state.run.server["rounds"]) == 3
    memory, estimate, velocity, x = np.zeros((3, DIMENSION)), 0.0, 0.0, np.zeros(DIMENSION)
    targets = ByHand().targets
    for _ in range(4):
        difference = x - targets - memory
        messages = difference / (0.1 + np.linalg.norm(difference, axis=1, keepdims=True))
        memory = memory + 0.5 * messages
        estimate = estimate + 0.5 * messages.mean(0)
        velocity = 0.9 * velocity + estimate
        x = x - LR * velocity
    play(story)
    np.testing.assert_allclose(story.server.state.run.x.numpy(), x, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(story.server.state.run.memory.numpy(), memory, rtol=1e-10, atol=1e-10)
    story.server.close()


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
        (["my_method.py:Clip21SGDM", "again.py:Clip21SGDM"], "two are known as Clip21SGDM"),
    ):
        path.write_text(f"epsilon = 4.0\nmethods = {json.dumps(methods)}\n")
        with pytest.raises(UsageError, match=says):
            load_policy(path)
