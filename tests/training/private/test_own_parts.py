"""Problems, participation rules and memories of the caller's own that would void a guarantee."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, Dataset, StackDataset, TensorDataset

from normec import (
    DPSGD,
    Averaging,
    Callback,
    Clip,
    Compute,
    LocalSteps,
    Logging,
    Memory,
    NormEC,
    Poisson,
    Privacy,
    Problem,
    Rotation,
    ServerOptimizer,
    SmoothedNorm,
    UsageError,
    train,
)
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.gradients.loop import LoopEngine
from normec.privacy import gaussian
from normec.problems.functions import FunctionProblem

from ...support.datasets import Fetched

PRIVATE = Privacy(epsilon=1.0, trust="secure-sum")
METHOD = DPSGD(SmoothedNorm(0.0))


class Centred(Problem):
    """Centres inputs by the mean of all clients' records."""

    def outputs(self, x: Tensor, inputs: Tensor, buffers: Any = None) -> Tensor:
        everyone = torch.cat([self.records.batch(client, None)[0] for client in range(self.clients)])
        return super().outputs(x, inputs - everyone.mean(0), buffers)


class Doubled(Problem):
    """Overrides what the engines compute, client by client."""

    def outputs(self, x: Tensor, inputs: Tensor, buffers: Any = None) -> Tensor:
        return 2 * super().outputs(x, inputs, buffers)


def built(kind: type[Problem], sets: type[TensorDataset], clients: int) -> Problem:
    draw = torch.Generator().manual_seed(1)
    held = [sets(torch.rand(10, 4, generator=draw), torch.randint(0, 3, (10,), generator=draw)) for _ in range(clients)]
    torch.manual_seed(0)
    return kind(nn.Linear(4, 3), F.cross_entropy, held)


@pytest.mark.parametrize("sets", [TensorDataset, Fetched])
@pytest.mark.parametrize("clients", [2, 3, 20])
def test_a_subclass_of_a_problem_that_looks_at_all_clients_is_refused(sets: type[TensorDataset], clients: int) -> None:
    with pytest.raises(UsageError, match="the gradient of client 0 changes"):
        train(built(Centred, sets, clients), METHOD, lr=0.1, rounds=1, privacy=PRIVATE, seed=3)


@pytest.mark.parametrize("sets", [TensorDataset, Fetched])
def test_a_subclass_that_parts_its_clients_is_computed_by_the_loop_with_a_note(sets: type[TensorDataset]) -> None:
    run = train(built(Doubled, sets, 4), METHOD, lr=0.1, rounds=2, privacy=PRIVATE, seed=3)
    assert run.engine == "loop"
    assert run.privacy is not None
    assert any("the user's own class Doubled" in note for note in run.privacy.notes)


class Scaled(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / 4


def halved(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) / 2


def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


def fetched_in_two_parts(inputs: Tensor, targets: Tensor) -> Dataset[Any]:
    return ConcatDataset([Fetched(inputs[:4], targets[:4]), Fetched(inputs[4:], targets[4:])])


def of_two_sets(inputs: Tensor, targets: Tensor) -> Dataset[Any]:
    return ConcatDataset([StackDataset(inputs, targets), TensorDataset(inputs, targets)])


@dataclass(frozen=True)
class Own(NormEC):
    def message(self, update: Tensor, state: Any, key: Any = None) -> Any:
        return super().message(update, state, key)


def note_on_own_code(
    loss: Any, layer: nn.Module, method: Any = METHOD, sets: Any = TensorDataset, **settings: Any
) -> str:
    clients = [sets(torch.ones(10, 4), torch.zeros(10, dtype=torch.long)) for _ in range(2)]
    problem = Problem(nn.Sequential(layer, nn.Linear(4, 3)), loss, clients)
    run = train(problem, method, lr=0.1, rounds=1, privacy=PRIVATE, seed=3, **settings)
    assert run.privacy is not None
    found = [note for note in run.privacy.notes if "of neither PyTorch nor normec" in note]
    assert len(found) < 2
    return found[0] if found else ""


def test_code_of_the_users_own_that_computes_clients_is_named_beside_epsilon() -> None:
    assert not note_on_own_code(F.cross_entropy, nn.Identity())
    assert not note_on_own_code(nn.CrossEntropyLoss(), nn.Flatten(), NormEC(0.1, 0.1))
    assert not note_on_own_code(F.cross_entropy, nn.Identity(), sets=of_two_sets)
    assert "if halved, of" in note_on_own_code(halved, nn.Identity())
    assert "if halved, of" in note_on_own_code(partial(halved), nn.Identity())
    assert "if Scaled and halved, of" in note_on_own_code(halved, nn.Sequential(Scaled(), Scaled()))
    assert "if Own, of" in note_on_own_code(F.cross_entropy, nn.Identity(), Own(0.1, 0.1))
    assert "if Fetched, of" in note_on_own_code(F.cross_entropy, nn.Identity(), sets=Fetched)
    assert "if Fetched, of" in note_on_own_code(F.cross_entropy, nn.Identity(), sets=fetched_in_two_parts)
    twice = partial(checkpoint, halved, use_reentrant=False)  # a function of PyTorch that calls it
    assert "if halved, of" in note_on_own_code(twice, nn.Identity())
    hooked = nn.Identity()
    hooked.register_forward_hook(lambda _, given, found: found + given[0])
    assert "if a hook of Identity, of" in note_on_own_code(F.cross_entropy, hooked)
    squared = nn.TransformerEncoderLayer(4, 2, 8, activation=squared_relu, dropout=0.0, batch_first=True)
    assert "if squared_relu, of" in note_on_own_code(F.cross_entropy, squared)
    problem = FunctionProblem([lambda x: (x**2).sum(), lambda x: x.sum()], torch.zeros(3))
    run = train(problem, METHOD, lr=0.1, rounds=1, privacy=PRIVATE)
    assert run.privacy is not None
    assert any("if <lambda>, of neither" in note for note in run.privacy.notes)


class Sums:
    """An objective of the user's own, with records that nothing but its own code sees."""

    augment, statistics = None, False

    def __init__(self) -> None:
        self.x0, self.clients, self.sizes = torch.zeros(3), 2, torch.tensor([50, 50])

    def client_loss(self, x: Tensor, *_: Any) -> Tensor:
        return x.sum()

    def initial_buffers(self) -> dict[str, Tensor]:
        return {}


class Normalised(Problem):
    """Divides the inputs by the largest one of the client's records, which one record can change for all others."""

    def outputs(self, x: Tensor, inputs: Tensor, buffers: Any = None) -> Tensor:
        return super().outputs(x, inputs / self.records.batch(0, None)[0].abs().max(), buffers)


def test_records_of_classes_with_code_of_their_own_are_not_clipped() -> None:
    """The engines would leave the first one's records unclipped, and no check sees what the second one reads."""
    clipped = Privacy(epsilon=1.0, unit="record", record_clip=1.0)
    for problem in (Sums(), built(Normalised, TensorDataset, 1)):
        with pytest.raises(UsageError, match=f"record_clip needs the records .* and {type(problem).__name__} has code"):
            train(problem, DPSGD(Clip(1.0)), lr=0.1, rounds=1, privacy=clipped, seed=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Normalised has code of its own"):
        ProblemOracle(built(Normalised, TensorDataset, 1)).check_records()
    run = train(
        built(Normalised, TensorDataset, 1),
        DPSGD(Clip(1.0)),
        lr=0.1,
        rounds=1,
        privacy=replace(clipped, record_clip=None),
    )
    assert run.privacy is not None
    assert any("a record is protected no better than a whole client" in note for note in run.privacy.notes)
    mu = 2.0 / run.privacy.sigma  # the whole message counts
    assert run.privacy.epsilon == pytest.approx(gaussian.epsilon(mu, 1e-5), rel=1e-6)


class Whole:
    """An engine of the user's own, which computes what it likes: all records of these clients (None: those asked)."""

    name, threads = "whole", 1

    def __init__(self, problem: Any, clients: Tensor | None = None) -> None:
        self._loop, self._clients = LoopEngine(problem, None, 0), clients

    def blocks(self, x: Tensor, buffers: Any, round: int, clients: Tensor | None = None, *, full: bool = False) -> Any:
        chosen = clients if self._clients is None else self._clients
        for part in chosen.split(1) if chosen is not None else (None,):
            yield from self._loop.blocks(x, buffers, round, part, full=full)


@pytest.mark.parametrize("kind", ["a subclass", "an engine"])
def test_batches_that_other_code_need_not_keep_to_gain_nothing(kind: str) -> None:
    """The engine never sees which records are drawn, and the subclass reads all of them."""
    of = built(Normalised if kind == "a subclass" else Problem, TensorDataset, 1)
    how: dict[str, Any] = {} if kind == "a subclass" else {"compute": Compute(engine=Whole(of))}
    privacy = Privacy(sigma=3.0, unit="record")
    run = train(of, DPSGD(Clip(1.0)), lr=0.1, rounds=4, privacy=privacy, batch_rate=0.3, seed=3, **how)
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(gaussian.epsilon(2.0 * 2.0 / 3.0, 1e-5), rel=1e-9)
    assert any("counted without any gain" in note for note in run.privacy.notes)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("clients", [torch.arange(4), torch.tensor([0, 0]), torch.tensor([1])])
@pytest.mark.parametrize("taking_part", [Rotation(2), Poisson(0.4)])
def test_an_engine_that_computes_other_clients_than_those_that_take_part_is_stopped(
    clients: Tensor, taking_part: Any
) -> None:
    of = built(Problem, TensorDataset, 4)
    privacy = Privacy(sigma=2.0, trust="central", sampling=None if isinstance(taking_part, Rotation) else 0.4)
    how: dict[str, Any] = {"lr": 0.1, "rounds": 6, "seed": 3, "participation": taking_part}
    with pytest.raises(UsageError, match="which does not take part in this round or was computed before"):
        train(of, METHOD, privacy=privacy, compute=Compute(engine=Whole(of, clients)), **how)
    run = train(of, METHOD, privacy=privacy, compute=Compute(engine=Whole(of)), **how)
    torch.testing.assert_close(run.x, train(of, METHOD, privacy=privacy, compute=Compute(engine="loop"), **how).x)


class Draws:
    """Draws the given clients in every round from the second on, and everyone before."""

    def __init__(self, drawn: Any) -> None:
        self._drawn = drawn

    def __repr__(self) -> str:
        return f"Draws({self._drawn})"

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:  # noqa: ARG002
        return torch.arange(clients) if round < 2 else self._drawn


def functions(clients: int = 4) -> FunctionProblem:
    return Problem.from_functions([lambda x, c=c: (x - c).square().sum() for c in range(clients)], torch.zeros(3))


@pytest.mark.parametrize("privacy", [PRIVATE, None])
@pytest.mark.parametrize(
    "drawn",
    [
        torch.tensor([0, 0, 1]),
        torch.tensor([2, 1]),
        torch.tensor([-1, 2]),
        torch.tensor([1, 4]),
        torch.tensor([[0], [1]]),
        torch.tensor([True, False, True, True]),
        torch.tensor([0.0, 1.0]),
        [0, 1],
    ],
)
def test_a_draw_that_is_not_increasing_is_refused_in_every_round(drawn: Any, privacy: Privacy | None) -> None:
    with pytest.raises(UsageError, match="each at most once, as a tensor of int64; in round 2 it drew"):
        train(functions(), METHOD, lr=0.1, rounds=5, privacy=privacy, participation=Draws(drawn), seed=3)


@pytest.mark.parametrize("drawn", [torch.tensor([0, 3]), torch.tensor([], dtype=torch.int64), None])
def test_a_participation_rule_of_the_users_own_is_noted(drawn: Tensor | None) -> None:
    run = train(functions(), METHOD, lr=0.1, rounds=4, privacy=PRIVATE, participation=Draws(drawn), seed=3)
    assert run.privacy is not None
    assert any("the user's own rule Draws decides which clients take part" in note for note in run.privacy.notes)
    usual = train(functions(), METHOD, lr=0.1, rounds=4, privacy=PRIVATE, participation=Poisson(0.5), seed=3)
    assert usual.privacy is not None
    assert not any("decides which clients take part" in note for note in usual.privacy.notes)


@pytest.mark.parametrize(
    ("x", "memory"), [(torch.float64, torch.float32), (torch.float32, torch.float64), (torch.float32, torch.bfloat16)]
)
def test_memories_of_another_precision_than_the_model_are_refused(x: torch.dtype, memory: torch.dtype) -> None:
    problem = Problem.from_functions([lambda v: v.sum()], torch.zeros(5, dtype=x))
    with pytest.raises(UsageError, match=f"private runs keep their memories in the model's {x}"):
        train(problem, NormEC(0.1, 0.1), lr=0.1, rounds=2, privacy=PRIVATE, memory=Memory(dtype=memory))
    assert train(problem, NormEC(0.1, 0.1), lr=0.1, rounds=2, privacy=PRIVATE, memory=Memory(dtype=x)).finished


WHOLE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "seed": lambda whole: {"seed": whole(3)},
    "log_every": lambda whole: {"logging": Logging(every=whole(2))},
    "evaluate_every": lambda whole: {"logging": Logging(evaluate_every=whole(2))},
    "warmup": lambda whole: {"warmup": whole(1)},
    "rounds": lambda whole: {"rounds": whole(5)},
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("given", WHOLE.values(), ids=WHOLE)
def test_whole_numbers_of_numpy_are_taken(given: Callable[[Any], dict[str, Any]], tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 5, "seed": 3, "lr": 0.1, "privacy": PRIVATE}
    found = train(functions(), METHOD, **options | given(np.int64), out=tmp_path / "run")
    expected = train(functions(), METHOD, **options | given(int))
    assert torch.equal(found.x, expected.x)


def test_a_schedule_cannot_look_at_what_the_loss_has_seen() -> None:
    """Step sizes by the training loss would carry it into x without noise."""
    seen: list[float] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, targets)
        seen.append(float(value.detach()))
        return value

    def plateau(round: int) -> float:  # noqa: ARG001
        return min(seen, default=0.1)

    of = built(Problem, TensorDataset, 3)
    of.loss = loss
    quiet = Privacy(sigma=1e-12, trust="secure-sum")
    by_schedule = train(of, METHOD, lr=plateau, rounds=3, privacy=quiet, seed=3, compute=Compute(engine="loop")).x
    assert not seen  # what the loss keeps is undone
    by_number = train(of, METHOD, lr=0.1, rounds=3, privacy=quiet, seed=3, compute=Compute(engine="loop")).x
    torch.testing.assert_close(by_schedule, by_number)


class MixingSteps(LocalSteps):
    """Local steps along the mean gradient of all clients that are computed together."""

    def step(self, moved: Tensor, grads: Tensor, state: dict[str, Tensor], number: int | Tensor) -> None:
        super().step(moved, grads.mean(0, keepdim=True).expand_as(grads).clone(), state, number)


def test_local_steps_that_mix_clients_are_refused() -> None:
    """They would move the sum by more than the message of one client."""
    of, local = built(Problem, TensorDataset, 4), MixingSteps(steps=2, lr=0.1)
    with pytest.raises(UsageError, match="local is a MixingSteps"):
        train(of, METHOD, lr=0.1, rounds=1, local=local, privacy=PRIVATE, seed=3)
    assert train(of, METHOD, lr=0.1, rounds=1, local=local).finished


class Smaller(Privacy):
    """States another bound for a record than the one to which records are clipped."""

    @property
    def record_bound(self) -> float | None:
        return 1e-4


def test_a_statement_with_code_of_its_own_is_refused() -> None:
    """Its noise would be that of records which are clipped to a ten-thousandth."""
    stated = Smaller(sigma=1.0, trust="central", unit="record", record_clip=1.0)
    with pytest.raises(UsageError, match="privacy is a Smaller"):
        train(built(Problem, TensorDataset, 4), METHOD, lr=0.1, rounds=1, privacy=stated, seed=3)


class Watching(Averaging):
    """Weights iterates by whatever it has seen."""

    def weight(self, k: int) -> float:
        return 1 / (1 + k)


def test_an_average_with_code_of_its_own_is_refused() -> None:
    with pytest.raises(UsageError, match="averaging is a Watching"):
        train(functions(), METHOD, lr=0.1, rounds=1, averaging=Watching("ema"), privacy=PRIVATE, seed=3)
    assert train(functions(), METHOD, lr=0.1, rounds=1, averaging=Watching("ema")).finished


class Reading(ServerOptimizer):
    """An optimizer of torch, made by code of the caller's own."""


def test_a_subclass_of_the_servers_optimizer_is_noted() -> None:
    run = train(functions(), METHOD, lr=0.1, rounds=1, server_optimizer=Reading("adam"), privacy=PRIVATE, seed=3)
    assert run.privacy is not None
    assert any("the caller's own optimizer" in note for note in run.privacy.notes)


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_fork_does_not_release_beside_an_account_in_memory(noise: Any) -> None:
    """A child that goes on with a run has noise of its own, unless it is seeded, and neither account knows of both."""
    outcomes: list[bytes] = []

    class Forking(Callback):
        def round(self, round: int) -> None:
            if round == 1:
                self.receive, send = os.pipe()
                self.child = os.fork()
                self.tell = send if self.child == 0 else os.close(send)

    forking = Forking()
    privacy = Privacy(epsilon=1.0, trust="secure-sum", noise=noise)
    try:
        train(built(Problem, TensorDataset, 3), METHOD, lr=0.1, rounds=3, privacy=privacy, seed=3, callbacks=[forking])
        said = b"released"
    except UsageError as error:
        said = str(error).encode()
    if forking.child == 0:
        os.write(forking.tell, said)  # type: ignore[arg-type]
        os._exit(0)
    with os.fdopen(forking.receive, "rb") as pipe:
        outcomes.append(pipe.read())
    os.waitpid(forking.child, 0)
    assert said == b"released"
    assert (b"a fork of it" in outcomes[0]) == (noise == "secure")
