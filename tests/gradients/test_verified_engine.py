"""Models that a fast engine gets wrong, or cannot do, train by the loop to its numbers, and one line says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import GD, Compute, Diverged, NormEC, Problem, Run, UsageError, train
from normec.gradients import verified_engine
from normec.gradients.verified_engine import too_rough

from ..support.runs import alike
from .cases import BATCH, CLASSES


def test_an_engine_may_round_otherwise_but_not_be_wrong_in_a_precision() -> None:
    """What is asked of a GPU's kernels, on numbers: errors like the loop's pass, a wrong client does not."""
    draw = torch.Generator().manual_seed(0)
    exact = torch.randn(3, 1000, generator=draw, dtype=torch.float64)
    loop = (exact * (1 + 0.01 * torch.randn(3, 1000, generator=draw, dtype=torch.float64))).float()
    assert too_rough(exact.bfloat16(), [loop], exact) is None
    assert too_rough(loop, [loop], exact) is None
    wrong = loop.clone()
    wrong[1] *= 1.2
    assert "its gradients are off by 20 %" in str(too_rough(wrong, [loop], exact))
    assert too_rough(wrong, [loop, exact * 1.1], exact) is None
    sensitive = loop.clone()
    sensitive[0] *= 1.5
    assert too_rough(wrong, [loop, sensitive], exact) is not None  # one client is no excuse for another
    assert too_rough(loop.roll(1, 0), [loop], exact) is not None
    assert too_rough(torch.full_like(loop, torch.nan), [loop], exact) is not None


@pytest.mark.parametrize("bits", [10, 7])
def test_points_as_near_as_a_precision_are_so(bits: int) -> None:
    x = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    points = list(verified_engine.nudged(x, bits))
    for point in points:
        off = (point / x - 1).abs()
        assert 0.9 * 2**-bits < float(off.max()) <= 2**-bits * (1 + 1e-9)
    assert not torch.equal(points[0], points[1])
    assert all(torch.equal(one, other) for one, other in zip(points, verified_engine.nudged(x, bits), strict=True))


class Head(nn.Module):
    """Two linear layers, with code of the user's own between them in subclasses."""

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


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (3, 2)), Last(), nn.Linear(4, CLASSES))


class Last(nn.LSTM):
    """The last output of an LSTM."""

    def __init__(self) -> None:
        super().__init__(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = super().forward(x)[0][:, -1]
        return found


# The model, and why the shared pass does not compute it; None: rules by operation do, where rules by module are wrong.
MODELS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "a dropout layer": (drops, "Dropout draws random numbers"),
    "dropout in a function": (Drops, "draws random numbers"),
    "a branch on data": (Branches, "reads values"),
    "item": (Looks, "reads values"),
    "an LSTM": (recurrent, None),
    "mixed records": (Mixes, None),
    "a weight used past its layer": (Passes, None),
    "a weight read past its layer": (Reads, None),
    "a weight behind a zero": (Gated, None),
    "an assigned buffer": (Counts, None),
    "a parameter without a rule": (Own, None),
}
# vmap gives each client its own pass: what mixes records or takes a weight by its name is right there.
BATCHED = {
    "a dropout layer": "randomness",
    "dropout in a function": "randomness",
    "a branch on data": "control flow",
    "item": "item()",
    "an LSTM": "",
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
    options = {"lr": 0.3, "rounds": 8, "batch_size": BATCH, "seed": 2} | options
    return train(of(model), NormEC(0.1, 0.3), compute=Compute(engine=engine), **options)


@cache
def by_the_loop(name: str) -> Run:
    return trained(made(name), "loop")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "normec"]


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "normec")


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", MODELS)
def test_the_shared_pass_is_right_or_gives_way_with_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run, reason = trained(made(name), "shared"), MODELS[name][1]
    if reason is None:
        assert run.engine == "shared"
        assert lines(caplog) == []
        torch.testing.assert_close(run.x, by_the_loop(name).x, rtol=1e-9, atol=1e-9)
        return
    (line,) = lines(caplog)
    assert line.startswith("engine shared is not used; the loop runs instead: ")
    assert reason in line
    assert "\n" not in line
    assert run.engine == "loop"
    alike(run, by_the_loop(name))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", MODELS)
def test_the_batched_engine_gives_way_or_is_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run, loop = trained(made(name), "batched"), by_the_loop(name)
    if name in BATCHED:
        (line,) = lines(caplog)
        assert line.startswith("engine batched is not used; the loop runs instead: ")
        assert BATCHED[name] in line
        alike(run, loop)
    else:
        assert run.engine == "batched"
        assert lines(caplog) == []
        torch.testing.assert_close(run.x, loop.x, rtol=1e-9, atol=1e-9)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", MODELS)
def test_auto_is_right_and_says_at_most_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(made(name), "auto")
    assert len(lines(caplog)) == (run.engine == "loop")
    torch.testing.assert_close(run.x, by_the_loop(name).x, rtol=1e-9, atol=1e-9)
    assert MODELS[name][1] is not None or run.engine == "shared"


@pytest.mark.parametrize(("name", "engine"), [("dropout in a function", "loop"), (None, "shared")])
def test_a_problem_s_engine_is_compared_once(
    name: str | None, engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other runs of the same problem take the verdict, and say it again; other batches are another engine.

    Where rules by module fail, rules by operation are compared as well.
    """
    compared = []
    difference = verified_engine.VerifiedEngine._difference

    def counted(self: verified_engine.VerifiedEngine, *given: Any) -> str | None:
        compared.append(self)
        return difference(self, *given)

    monkeypatch.setattr(verified_engine.VerifiedEngine, "_difference", counted)
    problem = of(made(name) if name is not None else Head())
    for lr in (0.1, 0.2):
        assert (
            train(problem, GD(), lr=lr, rounds=3, batch_size=BATCH, compute=Compute(engine="shared")).engine == engine
        )
    each = 1 if name is None else 2
    assert (len(compared), len(lines(caplog))) == (each, 0 if name is None else 2)
    train(problem, GD(), lr=0.1, rounds=3, batch_size=BATCH - 1, compute=Compute(engine="shared"))
    assert len(compared) == 2 * each


def test_mixed_records_are_found_where_the_first_clients_differ_in_size() -> None:
    """Clients 0, 1, 2 go through the model one by one; 3, 4, 5 together, which is wrong by the rules for modules."""
    shared, loop = (
        train(of(made("mixed records"), (3, 4, 6, 7, 7, 7)), GD(), lr=0.3, rounds=4, compute=Compute(engine=engine))
        for engine in ("shared", "loop")
    )
    torch.testing.assert_close(shared.x, loop.x, rtol=1e-9, atol=1e-9)


def test_a_model_that_fits_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    for engine in ("shared", "batched", "auto"):
        trained(Head(), engine)
    assert lines(caplog) == []


def test_a_start_that_is_not_finite_is_not_blamed_on_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    model = Head()
    with torch.no_grad():
        model.last.bias[0] = torch.inf
    with pytest.raises(Diverged, match="round 0"):
        trained(model, "shared")
    assert lines(caplog) == []


def test_a_mistake_in_the_loss_is_not_blamed_on_the_engine() -> None:
    def detached(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.detach(), targets)

    for loss, words in (
        (detached, "does not depend"),
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), "scalar"),
    ):
        wrong = Problem(Head(), loss, [TensorDataset(torch.randn(5, 6), torch.arange(5) % CLASSES)] * 2)
        with pytest.raises(UsageError, match=words):
            train(wrong, GD(), lr=0.1, rounds=1, compute=Compute(engine="shared"))


def test_one_value_a_channel_is_refused_as_torch_refuses_it() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    for engine in ("loop", "shared"):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            train(of(model, (8, 8, 8, 1)), GD(), lr=0.1, rounds=1, compute=Compute(engine=engine))


@pytest.mark.parametrize("engine", ["auto", "batched"])
def test_no_line_about_engines_precedes_the_error_of_a_model_that_does_not_fit(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    held = [TensorDataset(torch.zeros(5, 4), torch.full((5,), 3)) for _ in range(3)]
    problem = Problem(nn.Linear(4, 3), nn.functional.cross_entropy, held)
    with pytest.raises(UsageError, match="fails on the first records"):
        train(problem, NormEC(0.1, 0.3), lr=0.1, rounds=2, compute=Compute(engine=engine))
    assert lines(caplog) == []
