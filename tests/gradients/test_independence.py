"""Clients that are coupled have no epsilon: a private run finds them before anything leaves, in every engine."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset

from normec import DPSGD, GD, Clip, Compute, NormEC, Privacy, Problem, UsageError, models, train
from normec.gradients.batched import BatchedEngine
from normec.gradients.choice import choose_engine
from normec.gradients.record_clip import RecordClip
from normec.gradients.shared.engine import SharedEngine
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import PoissonBatches
from normec.training import independence

FEATURES, CLASSES = 5, 3
CLIENT = Privacy(epsilon=8, trust="secure-sum")
RECORD = Privacy(epsilon=8, unit="record", record_clip=0.5, trust="local")
MANY = [6, 9, 3, 6]


def parts(sizes: list[int] = MANY, seed: int = 0) -> list[TensorDataset]:
    draw = torch.Generator().manual_seed(seed)
    return [
        TensorDataset(torch.randn(n, FEATURES, generator=draw), torch.randint(0, CLASSES, (n,), generator=draw))
        for n in sizes
    ]


def linear(**options: Any) -> Problem:
    return Problem(models.Softmax(FEATURES, CLASSES), F.cross_entropy, parts(), **options)


def standardised(batch: Tensor) -> Tensor:
    """Statistics of whatever goes through together."""
    return (batch - batch.mean(0)) / (1 + batch.std(0, unbiased=False))


# The linear engine


@pytest.mark.parametrize("engine", ["linear", "shared", "batched", "loop"])
def test_a_transform_sees_one_client_at_a_time(engine: str) -> None:
    """One client's records change; nobody else's gradient does, and all are those of single clients."""
    usual, other = linear(transform=standardised), linear(transform=standardised)
    assert isinstance(other.records, ResidentRecords)
    other.records.inputs[other.records.rows[1]] *= 40
    found = []
    for of in (usual, other):
        blocks = choose_engine(engine, of, None, 0).blocks(of.x0, {}, 0)
        grads, clients = zip(*((block.grads.clone(), block.clients) for block in blocks), strict=True)
        found.append(torch.cat(grads)[torch.cat(clients).argsort()])
    for client in (0, 2, 3):
        torch.testing.assert_close(found[0][client], found[1][client], rtol=1e-6, atol=1e-7)
    inputs, targets = usual.records.batch(2, None)
    point = torch.zeros(CLASSES, FEATURES, requires_grad=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(standardised(inputs) @ point.T, targets), point)
    torch.testing.assert_close(found[0][2][: CLASSES * FEATURES], expected.flatten(), rtol=1e-5, atol=1e-6)


def test_engines_by_themselves_apply_a_transform_client_by_client() -> None:
    """Without the guard, which would hide a mistake behind the loop."""
    of = Problem(network(), F.cross_entropy, parts(), transform=standardised)
    loop = torch.cat([block.grads for block in choose_engine("loop", of, None, 0).blocks(of.x0, {}, 0)])
    assert isinstance(of.records, ResidentRecords)
    for kind in (SharedEngine, BatchedEngine):
        for block in kind(of, of.records, None, 0).blocks(of.x0, {}, 0):
            torch.testing.assert_close(block.grads, loop[block.clients], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [None, 0.3])
def test_with_clipped_records_a_transform_sees_one_record(rate: float | None) -> None:
    def scaled(batch: Tensor) -> Tensor:
        return batch / (1 + batch.abs().amax(0))  # of one record: its own numbers

    of = linear(transform=scaled)
    assert of.sizes is not None
    drawn = PoissonBatches(of.sizes, rate, 0) if rate is not None else None
    found, expected = (
        torch.cat(
            [block.grads for block in choose_engine(engine, of, drawn, 0, RecordClip(0.5)).blocks(of.x0 + 0.1, {}, 3)]
        )
        for engine in ("linear", "loop")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_neighbour_s_huge_record_does_not_break_a_shorter_client() -> None:
    """Tables are filled up with the first record of all; what is not finite in it must not reach others."""
    data = parts()
    data[0].tensors[0][0] = 3e38
    of = Problem(models.Softmax(FEATURES, CLASSES), F.cross_entropy, data)
    (block,) = choose_engine("linear", of, None, 0).blocks(of.x0 + 1, {}, 0)
    assert bool(torch.isfinite(block.grads[1:]).all())
    assert bool(torch.isfinite(block.losses[1:]).all())


def test_the_linear_engine_is_held_against_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """A model that computes something else under the same type is found out."""
    model = models.Softmax(FEATURES, CLASSES)
    plain = type(model).forward
    model.forward = types.MethodType(lambda self, batch: 2 * plain(self, batch), model)  # type: ignore[method-assign]
    of = Problem(model, F.cross_entropy, parts())
    runs = [train(of, GD(), lr=0.1, rounds=3, compute=Compute(engine=engine)) for engine in ("linear", "loop")]
    assert torch.equal(runs[0].x, runs[1].x)
    assert "engine linear is not used" in caplog.text


# What couples clients


class Averages(nn.Module):
    """Running statistics in a plain attribute, where no buffer shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean = nn.Linear(FEATURES, CLASSES), torch.zeros(FEATURES)

    def forward(self, batch: Tensor) -> Tensor:
        self.mean = (0.9 * self.mean + 0.1 * batch.detach().mean(0)).detach()
        found: Tensor = self.inner(batch - self.mean)
        return found


class Initialised(nn.Module):
    """Takes its scale from the first batch that it ever sees, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(FEATURES, CLASSES), None

    def forward(self, batch: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = batch.detach().std()  # type: ignore[assignment]
        found: Tensor = self.inner(batch / self.scale)
        return found


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(FEATURES, CLASSES), 0

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.inner(batch) / self.calls
        return found


class MovesItself(nn.Module):
    """A parameter that takes no part in training, moved by the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)
        self.shift = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def forward(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            self.shift += 0.1 * batch.mean(0)
        found: Tensor = self.inner(batch - self.shift)
        return found


class SmoothedLoss:
    """Divides by a moving average of the losses."""

    def __init__(self) -> None:
        self.average = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets)
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        return loss / self.average


class Remembers:
    """A transform that subtracts the mean of the batch before."""

    def __init__(self) -> None:
        self.last: Tensor | float = 0.0

    def __call__(self, batch: Tensor) -> Tensor:
        shifted, self.last = batch - self.last, batch.mean(0)
        return shifted


def jittered(batch: Tensor) -> Tensor:
    return batch + torch.from_numpy(np.random.default_rng().normal(size=batch.shape)).float()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))


COUPLED: dict[str, Callable[[], Problem]] = {
    "running statistics": lambda: Problem(Averages(), F.cross_entropy, parts()),
    "scale of the first batch": lambda: Problem(Initialised(), F.cross_entropy, parts()),
    "a counter": lambda: Problem(Counts(), F.cross_entropy, parts()),
    "a frozen parameter that moves": lambda: Problem(MovesItself(), F.cross_entropy, parts()),
    "a moving average in the loss": lambda: Problem(network(), SmoothedLoss(), parts()),
    "a transform that remembers": lambda: Problem(network(), F.cross_entropy, parts(), transform=Remembers()),
    "a linear model's transform that remembers": lambda: linear(transform=Remembers()),
    "numbers from another generator": lambda: Problem(network(), F.cross_entropy, parts(), transform=jittered),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", COUPLED)
def test_clients_coupled_through_state_are_refused(name: str, engine: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no epsilon covers this run") as error:
        train(
            COUPLED[name](),
            NormEC(0.1, 0.1),
            lr=0.1,
            rounds=3,
            privacy=CLIENT,
            compute=Compute(engine=engine),
            out=tmp_path / "run",
        )
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", COUPLED)
def test_without_privacy_they_train(name: str) -> None:
    assert train(COUPLED[name](), GD(), lr=0.01, rounds=2, compute=Compute(engine="loop")).finished


class SharesATensor(Dataset[Any]):
    """Reading a record changes a tensor that another client's records are made of."""

    def __init__(self, data: TensorDataset, shared: Tensor) -> None:
        self.data, self.shared = data, shared

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[i]
        self.shared += 0.1 * x
        return x - self.shared, y


class Draws(Dataset[Any]):
    """Augments with torch's global generator, which the run seeds for every client and round."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[i]
        return x + 0.1 * torch.randn(FEATURES), y


def test_data_sets_that_share_a_tensor_are_refused() -> None:
    shared = torch.zeros(FEATURES)
    of = Problem(network(), F.cross_entropy, [SharesATensor(data, shared) for data in parts()])
    with pytest.raises(UsageError, match="no epsilon covers this run"):
        train(of, NormEC(0.1, 0.1), lr=0.1, rounds=3, privacy=CLIENT)


def test_functions_that_share_state_are_refused() -> None:
    seen = torch.zeros(2)

    def client(x: Tensor) -> Tensor:
        seen.add_(1.0)
        return ((x - seen) ** 2).sum()

    of = Problem.from_functions([client] * 3, torch.ones(2))
    with pytest.raises(UsageError, match="no epsilon covers this run"):
        train(of, NormEC(0.1, 0.1), lr=0.1, rounds=3, privacy=CLIENT)


ALONE: dict[str, Callable[[], Problem]] = {
    "network": lambda: Problem(network(), F.cross_entropy, parts()),
    "dropout": lambda: Problem(
        nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.5), nn.Linear(4, CLASSES)), F.cross_entropy, parts()
    ),
    "statistics of a client's own batch": lambda: Problem(network(), F.cross_entropy, parts(), transform=standardised),
    "linear, own batch": lambda: linear(transform=standardised),
    "drawn by torch": lambda: Problem(network(), F.cross_entropy, [Draws(data) for data in parts()]),
    "one client": lambda: Problem(network(), F.cross_entropy, parts([7])),
    "two clients": lambda: Problem(network(), F.cross_entropy, parts([7, 2])),
    "batches of one size": lambda: Problem(
        nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Flatten(0), nn.Unflatten(0, (12, CLASSES))),
        F.cross_entropy,
        parts([12, 12, 12]),
    ),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ALONE)
def test_clients_that_are_not_coupled_train(name: str) -> None:
    assert train(
        ALONE[name](), NormEC(0.1, 0.1), lr=0.1, rounds=2, privacy=CLIENT, compute=Compute(engine="loop")
    ).finished


def test_the_check_leaves_the_problem_and_the_generators_as_they_were() -> None:
    of = Problem(Averages(), F.cross_entropy, parts())
    state = torch.random.get_rng_state()
    with pytest.raises(UsageError):
        train(of, NormEC(0.1, 0.1), lr=0.1, rounds=3, privacy=CLIENT)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not of.model.mean.any()  # type: ignore[union-attr, operator]


class OutOfMemory(nn.Linear):
    """Stands for a large model on a GPU, which cannot take all records of a client at once in float64."""

    def forward(self, batch: Tensor) -> Tensor:
        if batch.dtype == torch.float64 and len(batch) > 8:
            raise torch.OutOfMemoryError
        return super().forward(batch)


class FixedBatch(nn.Linear):
    def forward(self, batch: Tensor) -> Tensor:
        if len(batch) != 20:
            raise ValueError("it takes 20 records")
        return super().forward(batch)


@pytest.mark.parametrize("model", [OutOfMemory, FixedBatch])
def test_a_few_records_show_whether_a_model_runs_in_float64(model: type[nn.Linear]) -> None:
    of = Problem(model(FEATURES, CLASSES), F.cross_entropy, parts([20]))
    assert independence._precise(of).x0.dtype == torch.float64


def test_a_model_that_does_not_run_in_float64_is_compared_as_it_is() -> None:
    class Single(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            return super().forward(batch.float())

    of = Problem(Single(FEATURES, CLASSES), F.cross_entropy, parts([20]))
    assert independence._precise(of) is of


def test_an_engine_of_the_caller_s_own_is_noted() -> None:
    of = ALONE["network"]()
    engine: Any = choose_engine("loop", of, None, 0)
    notes = [
        train(of, NormEC(0.1, 0.1), lr=0.1, rounds=2, privacy=CLIENT, compute=Compute(engine=used)).privacy.notes  # type: ignore[union-attr]
        for used in (engine, "loop")
    ]
    assert [any("the user's own engine" in note for note in said) for said in notes] == [True, False]


# Records of one client


class MixesRecords(torch.autograd.Function):
    """Passes records through, and adds the mean of all that are computed together: vmap alone does not part them."""

    @staticmethod
    def forward(batch: Tensor) -> Tensor:  # type: ignore[override]
        return batch.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return slope

    @staticmethod
    def vmap(info: Any, dims: Any, batch: Tensor) -> tuple[Tensor, int]:  # noqa: ARG004
        return batch + batch.mean(0), 0


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.inner(MixesRecords.apply(batch))  # type: ignore[no-untyped-call]
        return found


def test_records_that_are_mixed_are_refused_where_records_are_clipped() -> None:
    of = Problem(Mixing(), F.cross_entropy, parts())
    with pytest.raises(UsageError, match="the vmap rule of MixesRecords would see several"):
        train(of, DPSGD(Clip(1.0)), lr=0.1, rounds=3, privacy=RECORD)


def test_a_linear_model_with_a_transform_over_the_batch_clips_single_records() -> None:
    """The transform sees one record: no statistic of the batch is left in it."""
    run = train(linear(transform=standardised), DPSGD(Clip(1.0)), lr=0.1, rounds=2, privacy=RECORD)
    assert run.finished


class Mixes(TorchFunctionMode):
    """Divides every product by its largest value, which is that of all clients where they are computed together."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found / found.abs().amax().clamp(min=1.0) if func is torch.Tensor.matmul else found


class MixesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("active", "name"),
    [
        (Mixes, "Mixes"),
        (MixesBelow, "a TorchDispatchMode"),
        (lambda: torch.autograd.graph.save_on_cpu(), "a pair of hooks for saved tensors"),
    ],
)
def test_a_mode_that_sees_all_operations_of_a_private_run_is_refused(active: Callable[[], Any], name: str) -> None:
    how: dict[str, Any] = {"lr": 0.1, "rounds": 1}
    with active():
        with pytest.raises(UsageError, match=f"{name} is active and would see the clients of a private run together"):
            train(linear(), NormEC(0.1, 0.1), privacy=CLIENT, **how)
        assert train(linear(), NormEC(0.1, 0.1), **how).finished
    with torch.device("cpu"):  # a mode of torch's own
        assert train(linear(), NormEC(0.1, 0.1), privacy=CLIENT, **how).finished


def test_an_autocast_around_a_private_run_is_refused() -> None:
    """It would round the products by which clipped records are measured."""
    how: dict[str, Any] = {"lr": 0.1, "rounds": 1}
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UsageError, match="autocast is active"):
            train(linear(), NormEC(0.1, 0.1), privacy=CLIENT, **how)
        assert train(linear(), NormEC(0.1, 0.1), **how).finished
    rounded = Compute(precision="bf16")
    assert train(linear(), NormEC(0.1, 0.1), privacy=CLIENT, compute=rounded, **how).finished
