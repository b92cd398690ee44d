"""What code of the user's own saw of some clients or clipped records never reaches the gradient of another."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from normec import DPSGD, Compute, LocalSteps, Logging, Method, NormEC, Privacy, Problem, SmoothedNorm, models, train
from normec.data.augment import Normalize
from normec.errors import UsageError
from normec.gradients.batched import BatchedEngine
from normec.gradients.choice import choose_engine
from normec.gradients.compiled import CompiledEngine
from normec.gradients.engine import Engine
from normec.gradients.linear import LinearEngine
from normec.gradients.local_steps import LocalEngine, steps_of
from normec.gradients.loop import LoopEngine
from normec.gradients.record_clip import RecordClip
from normec.gradients.recorded import RecordedEngine
from normec.gradients.restored import UserState, forgetful_part
from normec.gradients.shared.compiled import Compilation
from normec.gradients.shared.engine import SharedEngine
from normec.gradients.shared.slots import NoRule
from normec.problems.client_data import ResidentRecords
from normec.problems.functions import FunctionProblem
from normec.sampling.batches import Batches, BatchSource
from normec.theory.problem_constants import constants_of

LATE = 5  # calls after which a part uses what it kept
CLIP, CLIENTS, RECORDS, BATCH, ROUNDS = RecordClip(1.0), 3, 8, 4, 7


class Kept:
    """A running mean of what was seen, from which nothing is taken before many calls."""

    def __init__(self) -> None:
        self.mean: Any = torch.zeros(())
        self.calls = 0

    def late(self, seen: Tensor) -> Tensor:
        before, self.calls = self.mean, self.calls + 1
        self.mean = 0.5 * before + 0.5 * seen.detach().mean(0)
        return before if self.calls > LATE else torch.zeros(())

    def bowl(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x * self.calls).square().sum()


class InBuffers(nn.Linear):
    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        before = torch.where(self.calls >= LATE, self.mean, 0)
        self.calls, self.mean = self.calls + 1, 0.5 * self.mean + 0.5 * input.detach().mean(0)
        return super().forward(input - before)


class InAttributes(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.kept = deque([torch.zeros(4)], maxlen=1)
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:
        before, self.calls = self.kept[0], self.calls + 1
        self.kept.append(input.detach().mean(0))
        return super().forward(input - before if self.calls > LATE else input)


class Loss(Kept):
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs - self.late(outputs), targets)


class Transform(Kept):
    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs - self.late(inputs)


class Augmentation(Kept):
    draws = 1

    def __call__(self, inputs: Tensor, uniforms: Tensor) -> Tensor:
        return inputs - self.late(inputs) + uniforms


def problem(part: str, change: bool) -> Problem:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS, RECORDS, 4, generator=draw)
    targets = torch.randint(0, 3, (CLIENTS, RECORDS), generator=draw)
    if change:
        inputs[0, 3] = 1e4
    torch.manual_seed(0)
    model = {"buffers": InBuffers, "attributes": InAttributes}.get(part, partial(nn.Linear, 4, 3))()
    return Problem(
        model,
        Loss() if part == "loss" else F.cross_entropy,
        [TensorDataset(*pair) for pair in zip(inputs, targets, strict=True)],
        transform=Transform() if part == "transform" else None,
        augment=Augmentation() if part == "augmentation" else None,
    )


def gradients(engine: str, of: Problem) -> Tensor:
    """The gradients of all clients in some rounds, ``[rounds, c, d]``."""
    assert of.sizes is not None
    assert isinstance(of.records, ResidentRecords)
    batches: BatchSource = Batches(of.sizes, BATCH, 1)
    made: Any = (
        LoopEngine(of, batches, 1, CLIP)
        if engine == "loop"
        else SharedEngine(of, of.records, batches, 1, private=True, record_clip=CLIP)
    )
    return torch.stack([all_rows(made, of, round) for round in range(ROUNDS)])


def all_rows(engine: Any, of: Any, round: int) -> Tensor:
    return torch.cat([block.grads.clone() for block in engine.blocks(of.x0, of.initial_buffers(), round)]).double()


@pytest.mark.parametrize("part", ["buffers", "attributes", "loss", "transform", "augmentation"])
@pytest.mark.parametrize("engine", ["loop", "shared"])
def test_what_a_record_leaves_behind_reaches_no_other_record(engine: str, part: str) -> None:
    """A record is exchanged for an extreme one; in later rounds it is not drawn, and nothing has changed then."""
    if (engine, part) == ("shared", "attributes"):
        pytest.skip("rules by operation refuse a model that keeps what it saw")
    usual, other = problem(part, False), problem(part, True)
    moved = gradients(engine, usual) - gradients(engine, other)
    assert float(moved[:, 1:].abs().max()) == 0
    assert usual.sizes is not None
    for round, lengths in enumerate(moved[:, 0].norm(dim=1).tolist()):
        (drawn,) = Batches(usual.sizes, BATCH, 1).draw(torch.tensor([0]), round)
        assert lengths * BATCH <= (2 * CLIP.bound * (1 + 1e-5) if 3 in drawn else 0)


def test_a_private_run_with_real_noise_trains_with_buffers_as_they_were_given() -> None:
    of = problem("buffers", False)
    privacy = Privacy(epsilon=8, unit="record", record_clip=1.0, trust="central", noise="secure")
    run = train(of, "normec", rounds=LATE, lr=0.1, privacy=privacy)
    assert run.finished
    assert run.model is not None
    assert float(run.model.get_buffer("calls")) == float(of.model.get_buffer("calls")) == 0


def test_everything_that_was_assigned_is_undone() -> None:
    model: Any = InAttributes()
    loss = Loss()
    held = model.table = torch.zeros(2)
    steps = model.steps = [Loss()]
    hidden = model.lists = {"seen": [torch.zeros(1)]}
    state = UserState(model, partial(loss.late), counting)

    def assign() -> None:
        with state.restored():
            setattr(model, "new", 1)  # noqa: B010
            model.calls = 7
            model.kept.append(torch.ones(4))
            model.register_buffer("late", torch.ones(1))
            model.table += 1
            model.steps[0].calls = 3
            hidden["seen"][0].add_(1)
            hidden["seen"].append(torch.ones(1))
            loss.mean = 3
            counting()
            raise RuntimeError

    for _ in range(2):
        with pytest.raises(RuntimeError):
            assign()
        assert not hasattr(model, "new")
        assert (model.calls, float(loss.mean), steps[0].calls, counting()) == (0, 0, 0, 1)
        assert float(model.kept[0].sum()) == float(held.sum()) == float(hidden["seen"][0]) == 0
        assert model.table is held
        assert len(hidden["seen"]) == 1
        assert not dict(model.named_buffers())
        reset()


def counter() -> tuple[Callable[[], int], Callable[[], None]]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    def reset() -> None:
        nonlocal calls
        calls = 0

    return count, reset


counting, reset = counter()


def test_tensors_are_undone_whatever_was_done_to_them() -> None:
    """Kernels of running statistics and of fused optimizers do not count the changes that they make."""
    bowl = Kept()
    base, trained = torch.zeros(1), nn.Parameter(torch.zeros(2))
    held = {
        "statistics": torch.zeros(3),
        "data": torch.zeros(2),
        "unknown": torch.tensor([torch.nan, 1.0]),
        "expanded": base.expand(4),
        "resized": torch.zeros(2),
        "trained": trained,
    }
    bowl.mean = held
    state, values = UserState(bowl.bowl), {name: tensor.detach().clone() for name, tensor in held.items()}
    for _ in range(2):
        with state.restored():
            F.batch_norm(torch.rand(4, 3), held["statistics"], torch.ones(3), training=True)
            held["data"].data += 1
            held["unknown"].data[1] = 2
            base.add_(1)
            held["resized"].resize_(5)
            trained.grad = torch.ones(2)
            torch.optim.SGD([trained], lr=1.0, fused=True).step()
        for name, tensor in held.items():
            assert torch.equal(tensor.nan_to_num(), values[name].nan_to_num()), name
        held["data"].data += 1  # between two rounds, it is the caller's
        values["data"] += 1


@pytest.mark.parametrize("layer", [nn.LazyBatchNorm1d, partial(nn.LazyLinear, 3)])
def test_parts_that_the_first_client_would_make_are_refused(layer: Callable[[], nn.Module]) -> None:
    """They would begin with what the first client has."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = layer()

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.made(outputs), targets)

    with pytest.raises(UsageError, match="call it once"):
        train(shared_by_clients(False, loss=Made), NormEC(1.0, 1.0), lr=0.1, rounds=2, privacy=Privacy(8, 1e-5))


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.CrossEntropyLoss()
        self.steps: list[list[Any]] = [[]]

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        for step in self.steps[0]:
            outputs = outputs - step(outputs)
        found: Tensor = self.inner(outputs, targets)
        return found


@pytest.mark.parametrize("exchanged", ["the loss", "a part of it", "a step in a list"])
@pytest.mark.parametrize("engine", ["loop", "local loop", "recorded", "compiled", "batched", "shared"])
def test_what_a_caller_exchanges_between_rounds_keeps_nothing_either(engine: str, exchanged: str) -> None:
    """A callback may give the loss another form after some rounds."""
    of, new = shared_by_clients(False, loss=Calls), Loss()
    made = engine_of(engine, of)
    all_rows(made, of, 0)
    if exchanged == "the loss":
        of.loss = new
    elif exchanged == "a part of it":
        of.loss.inner = Calls()  # type: ignore[attr-defined]
        of.loss.inner.steps[0].append(new.late)  # type: ignore[attr-defined]
    else:
        of.loss.steps[0].append(new.late)  # type: ignore[attr-defined]
    for round in (1, 2):
        all_rows(made, of, round)
    assert new.calls == 0
    assert torch.equal(new.mean, torch.zeros(()))


def test_a_context_within_another_leaves_it_what_it_undoes() -> None:
    bowl = Kept()
    state = UserState(bowl.bowl)
    with state.restored():
        bowl.mean.add_(1)
        with state.restored():
            bowl.mean.add_(1)
        assert bowl.mean == 1
    assert bowl.mean == 0
    with state.restored():
        bowl.mean.data += 1
        with state.restored():
            bowl.mean.data += 1
        assert bowl.mean == 1
    assert bowl.mean == 0


def test_memory_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.array([np.nan, 1.0]))
    bowl = Kept()
    with warnings.catch_warnings(action="ignore"):
        bowl.mean = torch.from_numpy(np.load(tmp_path / "table.npy", mmap_mode="r"))
    with UserState(bowl.bowl).restored():
        pass  # to write there would end the process
    assert bowl.mean[1] == 1


def test_what_a_caller_changes_between_rounds_stays() -> None:
    model: Any = InAttributes()
    state = UserState(model)
    model.table = torch.zeros(2)
    for expected in (1.0, 2.0):
        model.table += 1
        model.calls = int(expected)
        with state.restored():
            model.table += 5
            model.calls += 5
        assert model.table.tolist() == [expected, expected]
        assert model.calls == expected


@pytest.mark.parametrize("part", [models.ResNet20(), F.cross_entropy, nn.CrossEntropyLoss(), Normalize((0.5,), (0.5,))])
def test_code_of_this_library_and_pytorch_costs_nothing(part: Any) -> None:
    assert not UserState(part)
    assert forgetful_part(part) is part


# ---- clients ------------------------------------------------------------------------------------------------------


class Mean(nn.Linear):
    """Subtracts an exponential mean of what it saw, from the call number LATE on."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.calls, self.mean = 0, torch.zeros(4)

    def forward(self, input: Tensor) -> Tensor:
        before, self.calls = self.mean, self.calls + 1
        self.mean = 0.5 * before + 0.5 * input.detach().mean(0)
        return super().forward(input - before if self.calls > LATE else input)


class InPlace(Mean):
    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        found = nn.Linear.forward(self, input - self.mean if self.calls > LATE else input)
        self.mean.mul_(0.5).add_(0.5 * input.detach().mean(0))
        return found


class InList(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append(input.detach().mean(0))
        return nn.Linear.forward(self, input - self.seen[-2] if len(self.seen) > LATE else input)


class Counter(Mean):
    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return nn.Linear.forward(self, input * (1 + max(0, self.calls - LATE)))


class OwnLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


def closure() -> Callable[[Tensor, Tensor], Tensor]:
    calls, mean = 0, torch.zeros(3)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls, mean
        before, calls = mean, calls + 1
        mean = 0.5 * before + 0.5 * outputs.detach().mean(0)
        return F.cross_entropy(outputs - before if calls > LATE else outputs, targets)

    return loss


class LossInPlace(Loss):
    def late(self, seen: Tensor) -> Tensor:
        self.calls += 1
        before = self.mean.clone() if self.calls > LATE else torch.zeros(())
        self.mean = self.mean if self.mean.ndim else torch.zeros(seen.shape[1])
        self.mean.mul_(0.5).add_(0.5 * seen.detach().mean(0))
        return before


def late_loss(seen: list[Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """Subtracts what it saw in the call before, from the call number LATE on."""
    seen.append(outputs.detach().mean(0))
    return F.cross_entropy(outputs - seen[-2] if len(seen) > LATE else outputs, targets)


class InSlots:
    __slots__ = ("calls", "mean")

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(3)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        before, self.calls, self.mean = self.mean, self.calls + 1, outputs.detach().mean(0)
        return F.cross_entropy(outputs - before if self.calls > LATE else outputs, targets)


def bound_in_closure() -> Callable[[Tensor, Tensor], Tensor]:
    late = Kept().late
    return lambda outputs, targets: F.cross_entropy(outputs - late(outputs), targets)


class BoundInDeque:
    def __init__(self) -> None:
        self.steps = deque([Kept().late])

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs - self.steps[0](outputs), targets)


def with_class_list() -> Callable[[Tensor, Tensor], Tensor]:
    class InClass:
        seen: list[Tensor] = []  # noqa: RUF012

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return late_loss(self.seen, outputs, targets)

    return InClass()


def with_class_attributes() -> Callable[[Tensor, Tensor], Tensor]:
    class InClass(Kept):
        calls, mean = 0, torch.zeros(3)

        def __init__(self) -> None:
            pass

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs - Kept.late(type(self), outputs), targets)  # type: ignore[arg-type]

    return InClass()


def with_default_of_a_method() -> Callable[[Tensor, Tensor], Tensor]:
    class InDefault:
        def __call__(self, outputs: Tensor, targets: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
            return late_loss(seen, outputs, targets)

    return InDefault()


def with_methods_that_close_over_a_list() -> Callable[[Tensor, Tensor], Tensor]:
    seen: list[Tensor] = []

    class InMethod:
        @staticmethod
        def late(outputs: Tensor, targets: Tensor) -> Tensor:
            return late_loss(seen, outputs, targets)

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return self.late(outputs, targets)

    return InMethod()


def with_a_class_method() -> Callable[[Tensor, Tensor], Tensor]:
    class InClass(Kept):
        calls, mean = 0, torch.zeros(3)

        @classmethod
        def loss(cls, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs - Kept.late(cls, outputs), targets)  # type: ignore[arg-type]

    return InClass.loss


def with_a_static_method() -> Callable[[Tensor, Tensor], Tensor]:
    class InClass(Kept):
        calls, mean = 0, torch.zeros(3)

        @staticmethod
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs - Kept.late(InClass, outputs), targets)  # type: ignore[arg-type]

    return InClass.loss


def with_parameters_in_a_closure() -> Callable[[Tensor, Tensor], Tensor]:
    mean, calls = (nn.Parameter(torch.zeros(size), requires_grad=False) for size in (3, ()))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        before = mean.clone()
        calls.add_(1)
        mean.copy_(outputs.detach().mean(0))
        return F.cross_entropy(outputs - before if calls > LATE else outputs, targets)

    return loss


class ParametersInAList(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Parameter(torch.zeros(size), requires_grad=False) for size in (4, ())]

    def forward(self, input: Tensor) -> Tensor:
        mean, calls = self.held
        before = mean.clone()
        calls.add_(1)
        mean.copy_(input.detach().mean(0))
        return nn.Linear.forward(self, input - before if calls > LATE else input)


class InInferenceMode(Loss):
    def __init__(self) -> None:
        with torch.inference_mode():
            self.mean, self.seen = torch.zeros(3), torch.zeros(())

    def late(self, seen: Tensor) -> Tensor:
        before = self.mean.clone()
        with torch.inference_mode():
            self.seen += 1
            self.mean.copy_(seen.mean(0))
        return before if self.seen > LATE else torch.zeros(())


def in_a_function_of_pytorch() -> Callable[[Tensor, Tensor], Tensor]:
    return partial(checkpoint, Loss(), use_reentrant=False)


class InEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 3, _weight=torch.zeros(2, 3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, calls = self.table.weight.detach().clone()
        with torch.no_grad():
            self.table.weight[0] = outputs.mean(0)
            self.table.weight[1] += 1
        return F.cross_entropy(outputs - mean if calls[0] >= LATE else outputs, targets)


class HoldsEmbedding:
    def __init__(self) -> None:
        self.inner = InEmbedding().table

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return InEmbedding.forward(SimpleNamespace(table=self.inner), outputs, targets)  # type: ignore[arg-type]


class ModuleWithSlots(nn.Module):
    __slots__ = ("calls", "mean")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = 0, torch.zeros(3)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return InSlots.__call__(self, outputs, targets)  # type: ignore[arg-type]


def with_a_method_of_a_module() -> nn.Module:
    model, late = nn.Linear(4, 3), Kept().late

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        return nn.Linear.forward(self, input - late(input))

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    return model


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        before = self.mean.clone()
        self.calls.add_(1)
        self.mean.copy_(outputs.detach().mean(0))
        return F.cross_entropy(outputs - before if self.calls > LATE else outputs, targets)


class Statistics:
    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(3)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        running, calls = self.norm.running_mean, self.norm.num_batches_tracked
        assert running is not None
        assert calls is not None
        before = running.clone()
        self.norm(outputs.detach())
        return F.cross_entropy(outputs - before if calls > LATE else outputs, targets)


class UncountedStatistics(Statistics):
    """The same, where the running means themselves tell how many batches there were."""

    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        running = self.norm.running_mean
        assert running is not None
        before = running.clone()
        self.norm(torch.cat((outputs.detach(), torch.ones(len(outputs), 1)), 1))
        return F.cross_entropy(outputs - before[:3] if before[3] > 1 - 0.9**LATE else outputs, targets)


class InAClass(nn.Module):
    """The class is in an attribute alone."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = type("Own", (), {"mean": torch.zeros(3), "calls": 0})

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return InSlots.__call__(self.kept, outputs, targets)  # type: ignore[arg-type]


def with_a_class_as_default() -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor, kept: Any = InAClass().kept) -> Tensor:  # noqa: B008
        return InSlots.__call__(kept, outputs, targets)

    return loss


class InAGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        before = torch.zeros(3) if self.mean.grad is None else self.mean.grad.clone()
        (self.mean * outputs.detach().mean(0)).sum().backward()
        return F.cross_entropy(outputs - before if before.norm() > 1 else outputs, targets)


class NewParameters(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, input: Tensor) -> Tensor:
        before, calls = (self._parameters.get(name) for name in ("mean", "calls"))
        self.mean = nn.Parameter(input.detach().mean(0), requires_grad=False)
        self.calls = nn.Parameter(torch.ones(()) if calls is None else calls + 1, requires_grad=False)
        return super().forward(input - before if before is not None and self.calls > LATE else input)


def shared_by_clients(change: bool, model: Any = None, loss: Any = None, **parts: Any) -> Problem:
    """A problem in which the records of client 0 may be others."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS, RECORDS, 4, generator=draw)
    targets = torch.randint(0, 3, (CLIENTS, RECORDS), generator=draw)
    if change:
        inputs[0], targets[0] = 3 - 2 * inputs[0], 0
    torch.manual_seed(0)
    sets = [TensorDataset(*pair) for pair in zip(inputs, targets, strict=True)]
    made = {name: part() for name, part in parts.items()}
    return Problem((model or partial(nn.Linear, 4, 3))(), loss() if loss else F.cross_entropy, sets, **made)


def engine_of(name: str, of: Problem) -> Engine:
    """The engine of a private run, without the comparison that chooses it."""
    assert of.sizes is not None
    records, batches = of.records, Batches(of.sizes, BATCH, 1)
    assert isinstance(records, ResidentRecords)
    local = LocalSteps(lr=0.1, steps=2)
    match name:
        case "loop" | "local loop":
            return choose_engine("loop", of, batches, 1, private=True, local=local if "local" in name else None)
        case "compiled":
            return CompiledEngine(of, records, batches, 1, compiling=False, private=True)
        case "recorded":
            return RecordedEngine(of, records, batches, 1, private=True)
        case "batched":
            return BatchedEngine(of, records, batches, 1, private=True)
        case "local batched":
            steps = steps_of(local, of, batches)
            return LocalEngine(BatchedEngine(of, records, batches, 1, local=True, private=True), local, steps)
        case "linear":
            return LinearEngine(of, records, batches, None, private=True)
        case "traced":
            how = Compilation(compiling=False, every=True)
            return SharedEngine(of, records, batches, 1, private=True, compilation=how)
        case _:
            return SharedEngine(of, records, batches, 1, private=True)


MODELS: dict[str, dict[str, Any]] = {
    "mean": {"model": Mean},
    "list": {"model": InList},
    "counter": {"model": Counter},
    "in place": {"model": InPlace},
}
LOSSES: dict[str, dict[str, Any]] = {"loss": {"loss": Loss}, "closure": {"loss": closure}}
INPUTS: dict[str, dict[str, Any]] = {"transform": {"transform": Transform}, "augmentation": {"augment": Augmentation}}
OBJECTS: dict[str, dict[str, Any]] = {
    "slots": {"loss": InSlots},
    "method in a closure": {"loss": bound_in_closure},
    "method in a deque": {"loss": BoundInDeque},
    "class list": {"loss": with_class_list},
    "class attributes": {"loss": with_class_attributes},
    "default of a method": {"loss": with_default_of_a_method},
    "closure of a method": {"loss": with_methods_that_close_over_a_list},
}
READING: dict[str, dict[str, Any]] = {
    "centre": {"loss": Centre},
    "statistics": {"loss": Statistics},
    "uncounted statistics": {"loss": UncountedStatistics},
    "class": {"loss": InAClass},
    "class as default": {"loss": with_a_class_as_default},
    "gradient": {"loss": InAGradient},
    "parameters": {"model": NewParameters},
    "embedding": {"loss": InEmbedding},
    "embedding in an object": {"loss": HoldsEmbedding},
    "slots of a module": {"loss": ModuleWithSlots},
    "method of a module": {"model": with_a_method_of_a_module},
    "class method": {"loss": with_a_class_method},
    "static method": {"loss": with_a_static_method},
    "parameters in a closure": {"loss": with_parameters_in_a_closure},
    "parameters in a list": {"model": ParametersInAList},
    "inference mode": {"loss": InInferenceMode},
    "function of PyTorch": {"loss": in_a_function_of_pytorch},
}
ONE_BY_ONE = MODELS | LOSSES | INPUTS | OBJECTS | READING | {"loss in place": {"loss": LossInPlace}}
BY_VMAP = {"counter": MODELS["counter"]} | LOSSES | INPUTS
SUITABLE: dict[str, dict[str, dict[str, Any]]] = {
    "linear": {"transform": {"model": partial(models.Softmax, 4, 3), "transform": Transform}},
    "loop": ONE_BY_ONE,
    "local loop": ONE_BY_ONE,
    "compiled": ONE_BY_ONE,
    "recorded": ONE_BY_ONE,
    "batched": BY_VMAP | OBJECTS | {"mean": MODELS["mean"], "list": MODELS["list"]},
    "local batched": BY_VMAP | {"mean": MODELS["mean"]},
    "operations": {name: given | {"model": given.get("model", OwnLinear)} for name, given in BY_VMAP.items()},
    "shared": LOSSES | INPUTS | OBJECTS | {"loss in place": {"loss": LossInPlace}},
    "traced": LOSSES | INPUTS,
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("engine", "kind"), [(engine, kind) for engine, kinds in SUITABLE.items() for kind in kinds])
def test_what_a_client_leaves_behind_reaches_no_other_client(engine: str, kind: str) -> None:
    """The gradients of the others have the same bits whatever the data of client 0 are; and they are the loop's."""
    found = []
    for change in (False, True):
        of = shared_by_clients(change, **SUITABLE[engine][kind])
        made, reference = engine_of(engine, of), engine_of("local loop" if "local" in engine else "loop", of)
        rounds = [all_rows(made, of, round) for round in range(ROUNDS)]
        found.append(torch.stack(rounds))
        assert torch.allclose(rounds[-1], all_rows(reference, of, ROUNDS - 1), atol=1e-6)
    assert torch.equal(found[0][:, 1:], found[1][:, 1:])
    assert not torch.equal(found[0][:, 0], found[1][:, 0])


def test_without_privacy_state_is_the_users_business() -> None:
    of = shared_by_clients(False, loss=Loss)
    assert of.sizes is not None
    engine = choose_engine("loop", of, Batches(of.sizes, BATCH, 1), 1)
    all_rows(engine, of, 0)
    assert of.loss.calls == CLIENTS  # type: ignore[attr-defined]


def test_a_graph_does_not_write_to_a_tensor_in_an_attribute() -> None:
    of = shared_by_clients(False, loss=LossInPlace)
    of.loss.mean = torch.zeros(3)  # type: ignore[attr-defined]
    with pytest.raises(NoRule):
        all_rows(engine_of("traced", of), of, 0)


class Cached(nn.Module):
    """Makes a table at its first call, as rotary embeddings do."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.table: Tensor | None = torch.arange(4.0).cos() if early else None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0).cos()
        found: Tensor = self.fc(x * self.table)
        return found


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_cache_that_is_made_at_the_first_call_trains_to_the_same_numbers(engine: str) -> None:
    privacy, ends = Privacy(epsilon=8, unit="client", trust="central"), []
    for early in (False, True):
        of = shared_by_clients(False, model=partial(Cached, early))
        run = train(of, "normec", rounds=4, lr=0.1, privacy=privacy, seed=0, compute=Compute(engine=engine))
        ends.append(run.x)
    assert torch.equal(*ends)


def test_functions_and_objectives_keep_nothing_of_a_client() -> None:
    kept = Kept()

    class Own(Problem):
        calls = 0

        def client_loss(self, *given: Any) -> Tensor:
            self.calls += 1
            return self.calls * super().client_loss(*given)

    own = Own(nn.Linear(4, 3), F.cross_entropy, [TensorDataset(torch.ones(2, 4), torch.arange(2))] * 2)
    functions = Problem.from_functions([kept.bowl, kept.bowl], torch.ones(2))
    for objective in (own, functions):
        engine = choose_engine("loop", objective, None, 0, private=True)
        once, again = (all_rows(engine, objective, round) for round in range(2))
        assert torch.equal(once, again)
        assert torch.equal(once[0], once[1])


def first_seen() -> Callable[[Tensor, Tensor], Tensor]:
    first: Tensor | None = None

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal first
        first = outputs.detach().abs().mean(0) if first is None else first
        return F.cross_entropy(outputs / first, targets)

    return loss


def test_what_is_tried_before_a_run_leaves_nothing_behind() -> None:
    """A copy of a function shares its closure, so the first records that anything is tried on could stay there."""
    found = []
    for change in (False, True):
        of = shared_by_clients(change, loss=first_seen)
        train(of, "normec", rounds=1, lr=0.1, privacy=Privacy(epsilon=8, unit="client", trust="central"), seed=0)
        found.append(all_rows(engine_of("loop", of), of, 0))
    assert torch.equal(found[0][1:], found[1][1:])
    assert not torch.equal(found[0][0], found[1][0])


class FirstBatch(nn.Linear):
    """Standardises by the first batch that it sees."""

    scale: Tensor | None = None

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, input: Tensor) -> Tensor:
        self.scale = input.detach().std(0) if self.scale is None else self.scale
        return super().forward(input / self.scale)


def without_privacy(of: Problem) -> None:
    train(of, "normec", rounds=2, lr=0.1, seed=0)


@pytest.mark.parametrize("part", [{"model": FirstBatch}, {"loss": first_seen}])
@pytest.mark.parametrize("before", [without_privacy, partial(constants_of, lower=0.0, iterations=2)])
def test_a_private_run_finds_nothing_that_was_seen_without_noise(
    before: Callable[[Problem], object], part: dict[str, Any]
) -> None:
    """What was kept of the first batch would stay the same, so no comparison before the private run would notice it."""
    found = []
    for change in (False, True):
        of = shared_by_clients(change, **part)
        before(of)
        found.append(all_rows(engine_of("loop", of), of, 0))
    assert torch.equal(found[0][1:], found[1][1:])
    assert not torch.equal(found[0][0], found[1][0])


class FirstClient:
    """An objective of the caller's own, which is scaled by the first client that it computes."""

    sizes = augment = None
    statistics = False

    def __init__(self, at: Tensor) -> None:
        self.at, self.clients, self.x0 = at, len(at), torch.ones(2)
        self.scale: Tensor | None = None

    def client_loss(self, x: Tensor, client: int, *_: object) -> Tensor:
        self.scale = self.at[client] if self.scale is None else self.scale
        return ((x - self.at[client]) / self.scale).square().sum()

    def initial_buffers(self) -> dict[str, Tensor]:
        return {}

    def evaluate(self, *_: object) -> dict[str, float]:
        self.scale = torch.full((2,), 2.0) if self.scale is None else self.scale + 1
        return {}

    def model_at(self, *_: object) -> None:
        return None

    def to(self, *_: object) -> FirstClient:
        return self


def first_function(at: Tensor) -> Any:
    """The same with plain functions."""
    scale: Tensor | None = None

    def loss(own: Tensor, x: Tensor) -> Tensor:
        nonlocal scale
        scale = own if scale is None else scale
        return ((x - own) / scale).square().sum()

    return Problem.from_functions([partial(loss, own) for own in at], torch.ones(2))


def private_run(of: Any, method: Any = "normec") -> None:
    train(of, method, rounds=1, lr=0.1, privacy=Privacy(epsilon=8, unit="client", trust="central"), seed=0)


@pytest.mark.parametrize("make", [FirstClient, first_function])
@pytest.mark.parametrize("before", [without_privacy, private_run, partial(constants_of, lower=0.0, iterations=2)])
def test_other_objectives_find_nothing_that_was_seen_without_noise(
    make: Callable[[Tensor], Any], before: Callable[[Any], object]
) -> None:
    """The comparisons before a private run compute client 0 first as well."""
    found = []
    for first in (1.0, 5.0):
        of = make(torch.tensor([[first, 9.0], [2.0, 3.0], [4.0, 1.0]]))
        before(of)
        found.append(all_rows(choose_engine("loop", of, None, 0, private=True), of, 0))
    assert torch.equal(found[0][1:], found[1][1:])
    assert not torch.equal(found[0][0], found[1][0])


class InContainers(FirstClient):
    """The same, in a container or a tensor."""

    def __init__(self, at: Tensor, kind: type) -> None:
        super().__init__(at)
        self.kept: Any = {dict: {}, list: [], Tensor: [{"in": torch.zeros(2)}]}[kind]

    def client_loss(self, x: Tensor, client: int, *_: object) -> Tensor:
        own = self.at[client]
        if isinstance(self.kept, dict):
            scale = self.kept.setdefault("scale", own)
        elif not self.kept or isinstance(self.kept[0], Tensor):
            self.kept += [own]
            scale = self.kept[0]
        else:
            kept = self.kept[0]["in"]
            scale = kept.copy_(own if not kept.any() else kept).clone()
        return ((x - own) / scale).square().sum()


class ByFunctions(FunctionProblem):
    """The same, of functions that are called by a class of the caller's own."""

    def __init__(self, at: Tensor) -> None:
        self.scale: Tensor | None = None
        super().__init__([lambda x, own=own: ((x - own) / own).square().sum() for own in at], torch.ones(2))

    def client_loss(self, x: Tensor, client: int, *given: Any) -> Tensor:
        value = super().client_loss(x, client, *given)
        self.scale = value.detach() if self.scale is None else self.scale
        return value / self.scale


@pytest.mark.parametrize("make", [*(partial(InContainers, kind=kind) for kind in (dict, list, Tensor)), ByFunctions])
@pytest.mark.parametrize("before", [None, without_privacy, private_run])
def test_another_objective_keeps_nothing_of_a_client_in_its_attributes(
    make: Callable[[Tensor], Any], before: Callable[[Any], object] | None
) -> None:
    """One client moved the messages of all others, already in the first private run."""
    found = []
    for first in (1.5, 5.0):
        of = make(torch.tensor([[first, 9.0], [2.0, 3.0], [4.0, 1.5]]))
        if before is not None:
            before(of)
        found.append(all_rows(choose_engine("loop", of, None, 0, private=True), of, 0))
    assert torch.equal(found[0][1:], found[1][1:])


def test_an_evaluation_by_another_objective_changes_no_later_round() -> None:
    """A simulation that goes on without it would make its rounds again with other sums under the same noise."""
    privacy, ends = Privacy(epsilon=8, unit="client", trust="central"), []
    for every in (1, 4):
        of: Any = FirstClient(torch.tensor([[1.0, 9.0], [2.0, 3.0], [4.0, 1.0]]))
        logging = Logging(every=1, evaluate_every=every)
        ends.append(train(of, "normec", rounds=4, lr=0.1, privacy=privacy, seed=0, logging=logging).x)
    assert torch.equal(*ends)


class FirstGradient(Method):
    """Divides by the first gradient that it sees."""

    bound = 1.0

    def __init__(self) -> None:
        self._scale: Tensor | None = None

    def message(self, update: Tensor, state: Any, key: Any = None) -> Any:  # noqa: ARG002
        self._scale = update[0].abs() + 1 if self._scale is None else self._scale
        scaled = update / self._scale
        return scaled / (1 + scaled.norm(dim=1, keepdim=True)), state


class FirstNorm(SmoothedNorm):
    """An operator that does the same."""

    def scale(self, norm: Tensor) -> Tensor:
        vars(self).setdefault("_first", float(norm[0]) + 1)
        return super().scale(norm * vars(self)["_first"])


@pytest.mark.parametrize("make", [FirstGradient, lambda: DPSGD(FirstNorm(0.1))])
def test_a_method_keeps_nothing_of_a_run_without_privacy(make: Callable[[], Any]) -> None:
    """A private run calls copies of a method, which would all have what an earlier run has left in it."""
    method = make()
    part = getattr(method, "operator", method)
    before = dict(vars(part))
    train(shared_by_clients(False), method, rounds=2, lr=0.1, seed=0)
    assert vars(part) == before


def test_a_prediction_leaves_nothing_behind_in_a_transform() -> None:
    """A function and its copy share a closure; what the first records fix there is refused in a private run."""
    first: dict[str, Tensor] = {}

    def transform(inputs: Tensor) -> Tensor:
        return inputs - first.setdefault("mean", inputs.mean(0))

    draw = torch.Generator().manual_seed(0)
    data = [TensorDataset(torch.randn(8, 4, generator=draw), torch.arange(8) % 3) for _ in range(4)]
    of = Problem(nn.Linear(4, 3), F.cross_entropy, data, transform=transform)
    found = train(of, "normec", rounds=1, lr=0.1, seed=0)
    assert found.predict(data[0].tensors[0]).shape == (8, 3)
    assert not first


class RunningMean:
    """Divides by a running mean of what it saw."""

    def __init__(self) -> None:
        self.mean = torch.ones(())

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = F.cross_entropy(outputs, targets)
        self.mean = 0.9 * self.mean + 0.1 * found.detach()
        return found / self.mean


def test_without_privacy_a_running_mean_trains_as_in_the_loop() -> None:
    """The comparison of engines by vmap would leave a tensor in the loss that nothing else can use."""
    ends: list[Tensor] = []
    of = shared_by_clients(False, loss=RunningMean)
    for engine in ("auto", "auto", "loop"):
        ends.append(train(of, "normec", rounds=3, lr=0.1, seed=0, compute=Compute(engine=engine)).x)
    assert torch.equal(ends[0], ends[1])  # a run finds nothing of the one before
    assert torch.equal(ends[0], ends[2])
