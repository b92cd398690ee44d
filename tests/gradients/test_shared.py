"""One pass for all clients: gradients, losses and buffers are the loop's, whatever layers, batches and blocks are."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import GD, Compute, Problem, train
from normec.data.augment import CropFlip, Normalize
from normec.gradients.shared import engine as passes
from normec.gradients.shared import inputs as preparing
from normec.gradients.shared.rules import ModuleModel
from normec.gradients.shared.slots import NoRule

from .cases import BATCH, CASES, CLASSES, apart, engines, everything, problem

CLOSE = 1e-10


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_buffers_are_the_loop_s_on_batches(name: str) -> None:
    of = problem(name)
    loop, shared, _ = engines(of, BATCH)
    for round, clients in ((0, None), (3, None), (4, torch.tensor([0, 3, 4])), (5, torch.tensor([1, 2]))):
        assert apart(everything(shared, of, round, clients), everything(loop, of, round, clients)) < CLOSE
    assert apart(everything(shared, of, 6, full=True), everything(loop, of, 6, full=True)) < CLOSE


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_buffers_are_the_loop_s_in_small_blocks(name: str) -> None:
    of = problem(name)
    loop, shared, _ = engines(of, None)
    expected = everything(loop, of)
    for records in (18, 1):  # two clients of nine records together; one by one
        shared._block = records
        assert apart(everything(shared, of), expected) < CLOSE


def test_blocks_hold_at_most_the_given_number_of_records() -> None:
    of = problem("small")
    _, shared, _ = engines(of, BATCH)
    shared._block = 2 * BATCH
    blocks = [(block.clients.tolist(), block.rows) for block in shared.blocks(of.x0, of.initial_buffers(), 0)]
    assert [clients for clients, _ in blocks] == [[3], [0, 1], [2, 4]]
    assert blocks[1][1] == slice(0, 2)
    assert isinstance(blocks[2][1], Tensor)


def test_nobody_drawn_gives_no_block() -> None:
    of = problem("small")
    for engine in engines(of, BATCH):
        assert list(engine.blocks(of.x0, of.initial_buffers(), 0, torch.empty(0, dtype=torch.int64))) == []


def test_a_taker_may_use_up_the_gradients_and_x_may_move() -> None:
    of = problem("tied")
    loop, shared, _ = engines(of, BATCH)
    buffers = of.initial_buffers()
    for round in range(3):
        for block in shared.blocks(of.x0, buffers, round):
            block.grads.fill_(torch.nan)
        of.x0 += 0.01
    assert apart(everything(shared, of, 3), everything(loop, of, 3)) < CLOSE


@pytest.mark.parametrize("name", ["small", "batch norms", "text"])
def test_who_is_not_drawn_keeps_its_buffers_to_the_bit(name: str) -> None:
    of = problem(name)
    _, shared, _ = engines(of, BATCH)
    before, after = of.initial_buffers(), everything(shared, of, 0, torch.tensor([0, 2, 3])).buffers
    for key, rows in after.items():
        assert torch.equal(rows[[1, 4]], before[key][[1, 4]])
        assert not torch.equal(rows[0], before[key][0])


@pytest.mark.parametrize("name", ["small", "convolutions", "norms", "text"])
def test_bfloat16_passes_are_the_loop_s_to_its_precision(name: str) -> None:
    of = problem(name, dtype=torch.float32)
    loop, shared, _ = engines(of, BATCH, "bf16")
    found, expected = everything(shared, of), everything(loop, of)
    assert found.grads.dtype == torch.float32
    assert float((found.grads - expected.grads).norm() / expected.grads.norm()) < 0.05
    exact = everything(engines(of, BATCH)[0], of)
    assert float((expected.grads - exact.grads).norm()) > 0  # the loop did round


def test_targets_of_another_precision_do_not_change_that_of_the_losses() -> None:
    clients = [TensorDataset(torch.randn(5, 6), torch.randn(5, 2).double()) for _ in range(3)]
    of = Problem(nn.Linear(6, 2), F.mse_loss, clients)
    for engine in engines(of, BATCH):
        for block in engine.blocks(of.x0, {}, 0):
            assert (block.grads.dtype, block.losses.dtype) == (torch.float32, torch.float32)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def twice() -> nn.Module:
    """One parameter under two names."""
    norm = nn.LayerNorm(6)
    norm.bias = norm.weight
    return norm


# Layers without a rule of their own: their operations have rules, or vmap computes them.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Own": Own,
    "Scaled": lambda: Scaled(6, 6),
    "PReLU": nn.PReLU,
    "ParametrizationList": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "one parameter under two names": twice,
}


def layered(layer: nn.Module) -> Problem:
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(6, 6), torch.arange(6) % CLASSES) for _ in range(3)]
    model = nn.Sequential(layer, nn.Linear(6, CLASSES)).double()
    return Problem(model, F.cross_entropy, clients)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_without_a_rule_is_computed_by_operation(layer: str) -> None:
    of = layered(LAYERS[layer]())
    with pytest.raises(NoRule, match=layer):
        ModuleModel(of)
    loop, shared, _ = engines(of, BATCH)
    assert apart(everything(shared, of), everything(loop, of)) < CLOSE


class Kept(nn.Linear):
    """A layer that uses its weight by a list of its own."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.kept = [self.weight]

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.kept[0]


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "Dropout draws random numbers": lambda: nn.Dropout(0.1),
    "LSTM draws random numbers": lambda: nn.LSTM(6, 6, num_layers=2, dropout=0.1),
    "LSTM with proj_size": lambda: nn.LSTM(6, 6, proj_size=2),
    "Kept keeps its parameters in a list": Kept,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_rule_computes_is_named(reason: str) -> None:
    with pytest.raises(NoRule, match=reason):
        engines(layered(REFUSED[reason]()), BATCH)


AS_SET = {
    "max_norm": (nn.Embedding(9, 4, max_norm=1.0), "tokens"),
    "scale_grad_by_freq": (nn.Embedding(9, 4, scale_grad_by_freq=True), "tokens"),
    "running statistics": (nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True)), "x"),
    "momentum=None": (nn.BatchNorm1d(6, momentum=None), "x"),
}


@pytest.mark.parametrize("setting", AS_SET)
def test_a_setting_without_a_rule_is_named(setting: str) -> None:
    layer, kind = AS_SET[setting]
    inputs = torch.randint(0, 9, (5, 2)) if kind == "tokens" else torch.randn(5, 6)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(CLASSES))
    model(inputs)
    of = Problem(model, F.cross_entropy, [TensorDataset(inputs, torch.zeros(5, dtype=torch.int64))])
    _, shared, _ = engines(of, BATCH)
    with pytest.raises(NoRule, match=setting):
        everything(shared, of)


def test_dropout_that_drops_nothing_is_no_hindrance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, CLASSES)).double()
    clients = [TensorDataset(torch.randn(6, 6), torch.arange(6) % CLASSES) for _ in range(3)]
    of = Problem(model, F.cross_entropy, clients)
    loop, shared, _ = engines(of, BATCH)
    assert apart(everything(shared, of), everything(loop, of)) < CLOSE


class Changing(nn.Module):
    """Its first layer works in place on what it is given."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(math.prod(shape), CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


@pytest.mark.parametrize(
    ("kind", "each"),
    [("known", 1), ("none", 1), ("tokens", 1), ("unknown", 4), ("augmented", 4), ("in place", 4), ("drawn", 4)],
)
def test_whole_batches_are_prepared_once_where_nothing_changes_them(kind: str, each: int) -> None:
    """`each`: how often in four rounds; a layer that works in place is found out in the first."""
    torch.manual_seed(0)
    shape = (2, 6, 6)
    model = Changing(shape) if kind == "in place" else nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), CLASSES))
    if kind == "tokens":
        model = nn.Sequential(nn.Embedding(256, 2), nn.Flatten(), nn.Linear(2 * math.prod(shape), CLASSES))
    kept = {"none": torch.float64, "tokens": torch.int64}.get(kind, torch.uint8)
    parts = [TensorDataset(torch.randint(0, 256, (7, *shape)).to(kept), torch.arange(7) % 3) for _ in range(3)]
    usual = Normalize((0.4, 0.5), (0.2, 0.3))
    transform = {"none": None, "tokens": None, "unknown": lambda x: usual(x) + 1}.get(kind, usual)
    of = Problem(
        model, F.cross_entropy, parts, transform=transform, augment=CropFlip(2) if kind == "augmented" else None
    ).to(torch.device("cpu"), torch.float64)
    loop, shared, _ = engines(of, None)
    clients = torch.arange(3) if kind == "drawn" else None
    with mock.patch.object(passes, "prepare_inputs", wraps=passes.prepare_inputs) as prepared:
        for round in range(4):
            assert apart(everything(shared, of, round, clients), everything(loop, of, round, clients)) < CLOSE
            of.x0 += 0.01
    assert prepared.call_count == each


def test_what_would_take_too_much_memory_or_too_many_graphs_is_prepared_anew() -> None:
    of = problem("small")
    with mock.patch.object(preparing, "_BYTES", 100):
        _, shared, _ = engines(of, None)
    everything(shared, of)
    assert not shared._kept._held
    _, shared, _ = engines(of, None)
    with mock.patch.object(passes, "MOST", 1):
        everything(shared, of)
    assert not shared._kept._held
    everything(shared, of)
    assert shared._kept._held
    shared.shrink()
    everything(shared, of)
    assert not shared._kept._held


class ReadsStatistics(nn.Module):
    """Subtracts the mean that its norm has seen so far, which is zero at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        known = None if self.norm.running_mean is None else self.norm.running_mean.clone()  # before this batch
        assert known is not None
        found: Tensor = self.scores(torch.tanh(self.norm(x) - known))
        return found


def test_a_model_that_reads_the_statistics_of_its_norms_has_another_engine() -> None:
    """They lie elsewhere in the pass by modules; at the start they have the values that the model has."""
    torch.manual_seed(0)
    clients = [TensorDataset(3 + torch.randn(9, 6), torch.arange(9) % 3) for _ in range(4)]
    of = Problem(ReadsStatistics(), F.cross_entropy, clients)
    runs = [
        train(of, GD(), lr=0.3, rounds=6, compute=Compute(engine=engine, dtype=torch.float64))  # type: ignore[arg-type]
        for engine in ("loop", "shared")
    ]
    assert runs[1].engine == "shared"
    assert torch.allclose(runs[0].x, runs[1].x, rtol=0, atol=1e-9)
