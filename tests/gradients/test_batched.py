"""All clients at once by vmap: the numbers are the loop's, also for layers that the shared pass has no rule for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Problem
from normec.gradients.batched import BatchedEngine
from normec.gradients.loop import LoopEngine
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches

from .cases import BATCH, CASES, CLASSES, SIZES, apart, engines, everything, problem

CLOSE = 1e-10


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_buffers_are_the_loop_s(name: str) -> None:
    of = problem(name)
    loop, _, batched = engines(of, BATCH)
    for round, clients in ((0, None), (3, torch.tensor([0, 3, 4])), (4, torch.tensor([1, 2]))):
        assert apart(everything(batched, of, round, clients), everything(loop, of, round, clients)) < CLOSE
    batched._block = 2 * BATCH
    assert apart(everything(batched, of, 5), everything(loop, of, 5)) < CLOSE
    assert apart(everything(batched, of, 6, full=True), everything(loop, of, 6, full=True)) < CLOSE


class Gated(nn.Module):
    """A parameter of its own, and a layer passed by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.rand(6) + 0.5), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) @ self.inner.weight


class Centred(nn.Module):
    """Mixes the records of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(6, 6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.form(x, x)
        return found


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.view(-1, 2, 3)
        found: Tensor = self.attention(parts, parts, parts, need_weights=False)[0]
        return found.flatten(1)


LAYERS = {
    "own parameters": Gated,
    "mixed records": Centred,
    "PReLU": nn.PReLU,
    "Bilinear": Square,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "attention": Attends,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_without_a_rule_are_the_loop_s(layer: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(LAYERS[layer](), nn.Linear(6, CLASSES)).double()
    clients = [TensorDataset(torch.randn(size, 6).double(), torch.randint(0, CLASSES, (size,))) for size in SIZES]
    of = Problem(model, F.cross_entropy, clients)
    assert isinstance(of.records, ResidentRecords)
    assert of.sizes is not None
    batches = Batches(of.sizes, BATCH, 0)
    loop, batched = LoopEngine(of, batches, 0), BatchedEngine(of, of.records, batches, 0)
    for clients_drawn in (None, torch.tensor([0, 2, 3])):
        assert apart(everything(batched, of, 2, clients_drawn), everything(loop, of, 2, clients_drawn)) < CLOSE


def test_who_is_not_drawn_keeps_its_buffers_to_the_bit() -> None:
    of = problem("batch norms")
    _, _, batched = engines(of, BATCH)
    before, after = of.initial_buffers(), everything(batched, of, 0, torch.tensor([0, 2, 3])).buffers
    for key, rows in after.items():
        assert torch.equal(rows[[1, 4]], before[key][[1, 4]])
        assert not torch.equal(rows[0], before[key][0])
