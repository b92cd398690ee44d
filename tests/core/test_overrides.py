"""Subclasses of methods and operators: what they override is what runs, in every path, or the run is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normec import Clip, Diverged, FixedSize, Method, NormEC, Privacy, Problem, SmoothedNorm, UsageError, train
from normec.closing import _replayable
from normec.cluster.optimizer import ClientOptimizer
from normec.federation.terms import MethodTerms
from normec.lab.methods import TensorNorm
from normec.operators import Scaling
from normec.privacy.mechanism import facts_of
from normec.streams import Key

N, D = 4, 6
SUM: dict[str, Any] = {"epsilon": 8, "trust": "secure-sum"}
QUIET = Privacy(sigma=1e-9, trust="secure-sum")


def bowls(n: int = N) -> Any:
    centres = 3 * torch.randn(n, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return Problem.from_functions(
        [lambda x, c=c: ((x - c) ** 2).sum() for c in centres], torch.zeros(D, dtype=torch.float64)
    )


class Doubled(Method):
    """Sends twice the operator's message: twice as long as the noise is made for."""

    def message(self, grad: Tensor, memory: Tensor, key: Key | None = None) -> Tensor:
        return 2 * super().message(grad, memory, key)


class Signs(Method):
    """Sends ±1/√d in every coordinate: within the bound, and no multiple of the gradient."""

    def message(self, grad: Tensor, memory: Tensor, key: Key | None = None) -> Tensor:  # noqa: ARG002
        return (grad - memory).sign() / grad.shape[-1] ** 0.5


class Forgetful(Method):
    """Clients that are not drawn forget everything, though decay is 0."""

    def idle_step(self, memory: Tensor) -> Tensor:
        return 0 * memory


class Stubborn(Method):
    """Memories never move."""

    def remember(self, memory: Tensor, message: Tensor) -> Tensor:  # noqa: ARG002
        return memory


class Still(Method):
    """The server never moves."""

    def server_step(self, mean_message: Tensor, estimate: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return torch.zeros_like(estimate), estimate


class WholeStep(Method):
    def client_step(self, grad: Tensor, memory: Tensor, key: Key | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return 5 * grad, memory


class Centred(Method):
    """Subtracts the mean over the clients of a block: one client's message depends on the others'."""

    def message(self, grad: Tensor, memory: Tensor, key: Key | None = None) -> Tensor:
        return super().message(grad - grad.mean(0), memory, key)


@dataclass(frozen=True)
class LongCall(SmoothedNorm):
    """Inherits `scale` and `bound`, and calls neither."""

    def __call__(self, v: Tensor, key: Key | None = None) -> Tensor:  # noqa: ARG002
        return 7 * v


@dataclass(frozen=True)
class LongScale(SmoothedNorm):
    def scale(self, norm: Tensor) -> Tensor:
        return 3 * super().scale(norm)


@dataclass(frozen=True)
class HalfCall(Clip):
    """Keeps its bound, and is not what its inherited `scale` says."""

    def __call__(self, v: Tensor, key: Key | None = None) -> Tensor:
        return 0.5 * super().__call__(v, key)


class Growing(SmoothedNorm):
    """States a bound of 1 when it is asked for the first time, and a larger one later."""

    asked = 0

    @property
    def bound(self) -> float:
        Growing.asked += 1
        return 1.0 if Growing.asked == 1 else 100.0

    def scale(self, norm: Tensor) -> Tensor:
        return 50 * super().scale(norm)


@dataclass(frozen=True)
class ByTheLongest(Scaling):
    """Shortens all rows that it sees by the same factor, once the longest of them is past the bound."""

    bound: float = 1000.0
    lipschitz: float = math.inf

    def scale(self, norm: Tensor) -> Tensor:
        return (self.bound / norm.max().clamp_min(self.bound)).expand_as(norm)

    def contraction(self, norm: float, dim: int) -> float:  # noqa: ARG002
        return 1.0


@dataclass(frozen=True)
class Backwards(ByTheLongest):
    """Sends messages far past its bound, in the opposite direction."""

    def scale(self, norm: Tensor) -> Tensor:
        return -1e6 / norm.clamp_min(1e-9)


class Telling(Method):
    """Its server's step uses the clients' gradient norms, which no message carries."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seen", {})

    def message(self, grad: Tensor, memory: Tensor, key: Key | None = None) -> Tensor:
        self.seen["norm"] = grad.norm()  # type: ignore[attr-defined]
        return super().message(grad, memory, key)

    def server_step(self, mean_message: Tensor, estimate: Tensor) -> tuple[Tensor, Tensor]:
        direction, estimate = super().server_step(mean_message, estimate)
        return direction * self.seen["norm"], estimate  # type: ignore[attr-defined]


class Counting(Signs):
    """A server with a state of its own, made of what it was given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "steps", [])

    def server_step(self, mean_message: Tensor, estimate: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.append(mean_message.norm())  # type: ignore[attr-defined]
        direction, estimate = super().server_step(mean_message, estimate)
        return direction / sum(self.steps), estimate  # type: ignore[attr-defined]


def like(kind: type[Method], **changes: Any) -> Method:
    settings = {"name": "normec", "operator": SmoothedNorm(0.1), "beta": 0.3, **changes}
    return kind(**settings)


@pytest.mark.parametrize("trust", ["local", "secure-sum", "central"])
@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize(
    "method",
    [like(Doubled), like(Method, operator=LongCall(0.1)), like(Method, operator=LongScale(0.1))],
    ids=["method", "operator's call", "operator's scale"],
)
def test_a_message_past_its_bound_stops_a_private_run(method: Method, noise: str, trust: str) -> None:
    privacy = Privacy(epsilon=8, trust=trust, noise=noise)  # type: ignore[arg-type]
    with pytest.raises(Diverged, match="longer than its bound in round 0"):
        train(bowls(), method, lr=0.1, rounds=3, privacy=privacy)


def test_the_bound_that_counts_is_the_one_the_noise_is_made_for() -> None:
    Growing.asked = 0
    with pytest.raises(Diverged, match="longer than its bound"):
        train(bowls(), like(Method, operator=Growing(0.1)), lr=0.1, rounds=3, privacy=Privacy(**SUM))


@pytest.mark.parametrize("privacy", [None, QUIET, Privacy(sigma=1e-9, memory="noisy")], ids=["plain", "sum", "noisy"])
@pytest.mark.parametrize("drawn", [None, FixedSize(2)], ids=["all", "drawn"])
@pytest.mark.parametrize("kind", [Signs, Forgetful, Stubborn, Still])
def test_an_override_is_what_runs(kind: type[Method], drawn: FixedSize | None, privacy: Privacy | None) -> None:
    """Against the five steps written out, one client at a time."""
    problem, method = bowls(), like(kind)
    run = train(problem, method, lr=0.1, rounds=5, privacy=privacy, participation=drawn, seed=1)
    x, memory, estimate = torch.zeros(D).double(), torch.zeros(N, D).double(), torch.zeros(D).double()
    for k in range(5):
        chosen = range(N) if drawn is None else drawn.draw(N, k, 1).tolist()  # type: ignore[union-attr]
        total = torch.zeros(D).double()
        for i in range(N):
            if i not in chosen:
                memory[i] = method.idle_step(memory[i])
                continue
            point = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(problem.functions[i](point), point)
            message = method.message(grad, memory[i])
            memory[i] = method.remember(memory[i], message)
            total += message
        direction, estimate = method.server_step(total / N, estimate)
        x = x - 0.1 * direction
    torch.testing.assert_close(run.x, x, rtol=0, atol=1e-6)
    torch.testing.assert_close(run.state.memory, memory, rtol=0, atol=1e-6)


def test_an_operator_s_own_call_is_what_runs() -> None:
    halved = train(bowls(), Method("clip", HalfCall(0.5)), lr=0.1, rounds=3)
    expected = train(bowls(), Method("clip", Clip(0.25)), lr=0.1, rounds=3)
    torch.testing.assert_close(halved.x, expected.x)


@pytest.mark.parametrize("method", [like(Centred), like(Method, operator=SmoothedNorm(0.1))], ids=["mixes", "does not"])
def test_a_method_that_mixes_clients_has_no_epsilon(method: Method) -> None:
    if isinstance(method, Centred):
        with pytest.raises(UsageError, match="changes with the gradients of others"):
            train(bowls(), method, lr=0.1, rounds=3, privacy=Privacy(**SUM))
        model = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="changes with the gradients of others"):
            ClientOptimizer(model.parameters(), method, 0.1, privacy=Privacy(epsilon=8), rounds=3)
    assert train(bowls(), method, lr=0.1, rounds=3).finished


def slopes(last: float) -> Any:
    """Clients with gradients of norm 900, and one more."""
    return Problem.from_functions([lambda x, c=c: c * x[0] for c in (900.0, 900.0, last)], torch.zeros(3).double())


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_rows_that_are_mixed_for_some_values_only_are_never_seen_together(noise: Any) -> None:
    """No comparison on made-up gradients shows that the other clients' messages shrink once one is long."""
    privacy = Privacy(sigma=1e-3, noise=noise, trust="central")
    method = Method("longest", ByTheLongest(), feedback=False)
    sums = [3 * train(slopes(c), method, lr=1.0, rounds=1, privacy=privacy).state.estimate[0] for c in (0.0, 1e6)]
    assert float(sums[0]) == pytest.approx(1800, abs=0.1)
    assert float(sums[1]) == pytest.approx(2800, abs=0.1)  # one message of the bound more


def test_the_clients_of_a_rank_are_not_seen_together_either() -> None:
    x = nn.Parameter(torch.zeros(3))
    method = Method("longest", ByTheLongest(), feedback=False)
    privacy = Privacy(sigma=1e-3, noise="seeded", trust="central")
    optimizer = ClientOptimizer([x], method, 1.0, clients=2, privacy=privacy, rounds=1)
    for gradient in (900.0, 1e6):
        x.grad = torch.tensor([gradient, 0.0, 0.0])
        optimizer.add_client()
    optimizer.step()
    assert float(-2 * x[0]) == pytest.approx(1900, abs=0.1)


def test_a_long_message_in_the_opposite_direction_stops_a_private_run() -> None:
    with pytest.raises(Diverged, match="longer than its bound"):
        train(bowls(), Method("back", Backwards(), feedback=False), lr=0.1, rounds=1, privacy=Privacy(sigma=1.0))


def test_a_server_that_was_told_of_gradients_has_no_epsilon() -> None:
    with pytest.raises(UsageError, match="the server's step of normec changes with gradients"):
        train(bowls(), like(Telling), lr=0.1, rounds=3, privacy=Privacy(**SUM))


def test_a_server_with_a_state_of_its_own_is_taken() -> None:
    method = like(Counting)
    assert train(bowls(), method, lr=0.1, rounds=3, privacy=Privacy(**SUM)).finished
    assert len(method.steps) == 3  # type: ignore[attr-defined]


def test_a_client_step_of_one_s_own_is_refused_because_nobody_calls_it(tmp_path: Path) -> None:
    for call in (
        lambda: train(bowls(), like(WholeStep), lr=0.1, rounds=3, out=tmp_path / "run"),
        lambda: ClientOptimizer(nn.Linear(2, 2).parameters(), like(WholeStep), 0.1),
        lambda: MethodTerms.of(like(WholeStep)),
    ):
        with pytest.raises(UsageError, match="overrides client_step"):
            call()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [Signs, Forgetful, Stubborn, Doubled])
def test_a_federation_refuses_what_its_parties_would_not_run(kind: type[Method]) -> None:
    with pytest.raises(UsageError, match="cannot describe"):
        MethodTerms.of(like(kind))


def test_a_federation_refuses_an_operator_that_only_looks_like_ours() -> None:
    fake = type("Clip", (HalfCall,), {})
    with pytest.raises(UsageError, match="cannot describe the operator"):
        MethodTerms.of(Method("clip21", fake(0.5)))
    assert MethodTerms.of(like(Still)).build() == like(Method)  # the server's step is the server's own


def test_the_optimizer_calls_what_a_subclass_overrides() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = ClientOptimizer(model.parameters(), like(Signs), 0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    expected = torch.full((6,), 0.3 / 6**0.5)
    torch.testing.assert_close(optimizer.state[model.weight]["estimate"].flatten(), expected)


def test_only_steps_of_ours_are_recorded() -> None:
    """A CUDA graph repeats kernels: Python code of a subclass would run once and never again."""
    assert _replayable(NormEC(0.1, 0.3))
    assert _replayable(TensorNorm.of(NormEC(0.1, 0.3), (D,)))
    assert not _replayable(like(Still))
    assert not _replayable(like(Method, operator=LongScale(0.1)))


def test_a_checkpoint_of_the_base_is_not_the_subclass_s(tmp_path: Path) -> None:
    fake = type("Method", (Signs,), {})
    train(bowls(), like(Method), lr=0.1, rounds=3, out=tmp_path / "run")
    with pytest.raises(UsageError, match="method is"):
        train(bowls(), like(fake), lr=0.1, rounds=3, out=tmp_path / "run")


def test_a_subclass_shares_no_noise_with_its_base() -> None:
    """If it did, the difference of two runs would be the difference of their messages, without noise."""
    fake = type("Method", (Method,), {"message": lambda self, grad, memory, key=None: 0 * grad})  # noqa: ARG005
    zeros = Problem.from_functions([lambda x: 0 * x.sum()] * 2, torch.zeros(3000, dtype=torch.float64))
    settings: dict[str, Any] = {"operator": Clip(1.0), "feedback": False}
    one, other = (
        train(zeros, kind("dpsgd", **settings), lr=0.1, rounds=1, seed=3, privacy=Privacy(sigma=1.0)).state.estimate
        for kind in (Method, fake)
    )
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / 3000**0.5


@pytest.mark.parametrize(
    ("method", "known"),
    [
        (like(Method), True),
        (like(Signs), False),
        (like(Stubborn), False),
        (like(Method, operator=HalfCall(1.0)), False),
        (like(Method, operator=LongScale(0.1)), False),
    ],
    ids=["ours", "message", "remember", "call", "scale"],
)
def test_the_record_rule_takes_no_constant_that_was_stated_for_another_map(method: Method, known: bool) -> None:
    assert (facts_of(method).lipschitz < float("inf")) == known


def test_no_theorem_is_about_a_subclass() -> None:
    with pytest.raises(UsageError, match="overrides message"):
        train(bowls(), like(Signs, server_norm=True), lr="theory", rounds=3)
