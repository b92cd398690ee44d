"""Models that a fast engine gets wrong, or cannot do, train by the loop to the loop's bits, and one line says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import GD, FixedSize, NormEC, Problem, Run, UsageError, train
from normec.gradients import choose
from normec.gradients.shared import Shared

from ..core.runs import same
from .cases import BATCH, CLASSES, problem


class Head(nn.Module):
    """A part of one's own before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def part(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.part(torch.tanh(self.first(x))))
        return found


class Drops(Head):
    """Draws in a function, where no module shows it."""

    def part(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Branches(Head):
    """The branch is another one for other clients and rounds, but not for the first clients in the first round."""

    def part(self, x: Tensor) -> Tensor:
        return x if x.mean() > -0.2 else 3 * x


class Looks(Head):
    def part(self, x: Tensor) -> Tensor:
        return x * (1 + abs(x.sum().item()))


class Mixes(Head):
    def part(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Passes(Head):
    """A layer's weight is used past the layer."""

    def part(self, x: Tensor) -> Tensor:
        return x @ self.first.weight


class Reads(Head):
    """The same with no gradient of its own: right at the start, where the copy's weights are x."""

    def part(self, x: Tensor) -> Tensor:
        return x @ self.first.weight.detach()


class Gated(Head):
    """The same behind a factor that starts at zero: no gradient at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.LayerNorm(6)
        nn.init.zeros_(self.gate.weight)

    def part(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.gate(x @ self.first.weight)
        return found


class Counts(Head):
    """A buffer that the forward pass assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(6))

    def part(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean(0)
        return x


class Own(Head):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.7))

    def part(self, x: Tensor) -> Tensor:
        return x * self.scale


def drops() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a dropout layer": (drops, "Dropout draws random numbers"),
    "dropout in a function": (Drops, "differ from the reference"),
    "a branch on data": (Branches, "looks at values"),
    "item": (Looks, "looks at values"),
    "mixed records": (Mixes, "differ from the reference"),
    "a weight used past its layer": (Passes, "differ from the reference"),
    "a weight read past its layer": (Reads, "differ from the reference"),
    "a weight behind a zero": (Gated, "differ from the reference"),
    "an assigned buffer": (Counts, "buffers differ"),
    "a parameter without a rule": (Own, "no rule for Own"),
}
# vmap gives each client its own pass: what mixes records or takes a weight by its name is right there.
BATCHED = {
    "a dropout layer": "randomness",
    "dropout in a function": "randomness",
    "a branch on data": "control flow",
    "item": "item()",
    "an assigned buffer": "buffers differ",
}


def of(model: nn.Module, sizes: tuple[int, ...] = (8, 8, 8, 8, 3, 8)) -> Problem:
    generator = torch.Generator().manual_seed(3)
    clients = []
    for i, size in enumerate(sizes):
        inputs = torch.randn(size, 6, generator=generator) + (1 if i < 3 else -1)
        clients.append(TensorDataset(inputs, torch.randint(0, CLASSES, (size,), generator=generator)))
    return Problem(model, F.cross_entropy, clients).to(torch.device("cpu"), torch.float64)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def trained(model: nn.Module, engine: str, **options: Any) -> Run:
    options = {"lr": 0.3, "rounds": 12, "batch_size": BATCH, "seed": 2} | options
    return train(of(model), NormEC(0.1, 0.3), engine=engine, **options)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "normec"]


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "normec")


@pytest.mark.parametrize("name", MODELS)
def test_the_shared_pass_gives_way_with_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(made(name), "shared")
    (line,) = lines(caplog)
    assert line.startswith("engine shared is not used, the loop is: ")
    assert MODELS[name][1] in line
    assert "\n" not in line
    assert run.engine == "loop"
    same(run, trained(made(name), "loop"))


@pytest.mark.parametrize("name", MODELS)
def test_the_batched_engine_gives_way_or_is_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run, loop = trained(made(name), "batched"), trained(made(name), "loop")
    if name in BATCHED:
        (line,) = lines(caplog)
        assert line.startswith("engine batched is not used, the loop is: ")
        assert BATCHED[name] in line
        same(run, loop)
    else:
        assert run.engine == "batched"
        assert lines(caplog) == []
        torch.testing.assert_close(run.x, loop.x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_auto_is_right_and_says_at_most_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run, loop = trained(made(name), "auto"), trained(made(name), "loop")
    assert len(lines(caplog)) == (run.engine == "loop")
    torch.testing.assert_close(run.x, loop.x, rtol=1e-9, atol=1e-9)
    assert trained(made("a parameter without a rule"), "auto").engine == "batched"


def test_mixed_records_are_found_where_the_first_clients_differ_in_size(caplog: pytest.LogCaptureFixture) -> None:
    """Clients 0, 1, 2 go through the model one by one; 3, 4, 5 together."""
    runs = [
        train(of(made("mixed records"), (3, 4, 6, 7, 7, 7)), GD(), lr=0.3, rounds=4, engine=engine)
        for engine in ("shared", "loop")
    ]
    assert len(lines(caplog)) == 1
    same(*runs)


def test_a_model_that_fits_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    for engine in ("shared", "batched", "auto"):
        trained(Head(), engine)
    assert lines(caplog) == []


def test_a_start_that_is_not_finite_is_not_blamed_on_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    from normec import Diverged

    model = Head()
    with torch.no_grad():
        model.last.bias[0] = torch.inf
    with pytest.raises(Diverged, match="round 0"):
        trained(model, "shared")
    assert lines(caplog) == []


def test_a_mistake_of_the_user_is_told_as_such() -> None:
    def detached(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.detach(), targets)

    for loss, words in ((detached, "does not depend"), (lambda o, t: F.cross_entropy(o, t, reduction="none"), "scalar")):
        wrong = Problem(Head(), loss, [TensorDataset(torch.randn(5, 6), torch.arange(5) % CLASSES)] * 2)
        with pytest.raises(UsageError, match=words):
            train(wrong, GD(), lr=0.1, rounds=1, engine="shared")


def test_one_value_a_channel_is_refused_as_torch_refuses_it() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    for engine in ("loop", "shared"):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            train(of(model, (8, 8, 8, 1)), GD(), lr=0.1, rounds=1, engine=engine)


# Running out of memory: the pass raises when all its work is done, so that the buffers have been touched.


def narrow(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """A device with room for `most` clients at a time; returns the sizes that were asked for."""
    asked: list[int] = []
    whole = Shared._pass

    def passed(self: Shared, *args: Any) -> Tensor:
        losses = whole(self, *args)
        asked.append(len(losses))
        if len(losses) > most:
            raise torch.OutOfMemoryError("no room")
        return losses

    monkeypatch.setattr(Shared, "_pass", passed)
    return asked


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("most", [1, 2])
def test_blocks_shrink_until_they_fit(
    most: int, sampled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"lr": 0.3, "rounds": 8, "batch_size": BATCH, "seed": 2}
    if sampled:
        options["participation"] = FixedSize(4)
    loop = train(problem("batch norms"), NormEC(0.1, 0.3), engine="loop", **options)
    asked = narrow(monkeypatch, most)
    run = train(problem("batch norms"), NormEC(0.1, 0.3), engine="shared", **options)
    assert max(asked) > most
    assert max(asked[-5:]) <= most
    assert run.engine == "shared"
    assert lines(caplog) == []
    close(run, loop)


def test_without_room_for_one_client_the_loop_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = train(problem("batch norms"), GD(), lr=0.3, rounds=4, batch_size=BATCH, engine="loop")
    narrow(monkeypatch, 0)
    run = train(problem("batch norms"), GD(), lr=0.3, rounds=4, batch_size=BATCH, engine="shared")
    assert lines(caplog) == ["engine shared is not used, the loop is: the device has too little memory for it"]
    same(run, loop)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("cannot\nbe done")])
def test_what_fails_in_the_midst_of_the_first_round_is_done_by_the_loop(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The block of the short client is done, and taken; the next one fails for good."""
    whole = Shared._pass

    def passed(self: Shared, x: Tensor, buffers: Any, rows: Any, grads: Tensor, numbers: Tensor, *more: Any) -> Tensor:
        losses = whole(self, x, buffers, rows, grads, numbers, *more)
        if self._problem is whole_problem and numbers.shape[1] == BATCH:
            raise error
        return losses

    whole_problem = problem("batch norms")
    monkeypatch.setattr(Shared, "_pass", passed)
    engine = choose("shared", whole_problem, problem_batches(whole_problem), 1)
    buffers, loop_buffers = whole_problem.initial_buffers(), whole_problem.initial_buffers()
    found = torch.zeros(5, len(whole_problem.x0), dtype=torch.float64)
    expected = found.clone()
    for block in engine.blocks(whole_problem.x0, buffers, 0):
        found[block.rows] = block.grads
    for block in choose("loop", whole_problem, problem_batches(whole_problem), 1).blocks(whole_problem.x0, loop_buffers, 0):
        expected[block.rows] = block.grads
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for name, rows in loop_buffers.items():
        torch.testing.assert_close(buffers[name], rows, rtol=1e-10, atol=1e-10)
    assert engine.name == "loop"
    assert len(lines(caplog)) == 1
    assert "\n" not in lines(caplog)[0]


def problem_batches(of: Problem) -> Any:
    from normec.sampling import Batches

    assert of.sizes is not None
    return Batches(of.sizes, BATCH, 1)


def close(run: Run, other: Run) -> None:
    torch.testing.assert_close(run.x, other.x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(run.state.memory, other.state.memory, rtol=1e-9, atol=1e-9)
    for name, rows in other.state.buffers.items():
        torch.testing.assert_close(run.state.buffers[name], rows, rtol=1e-9, atol=1e-9)
