"""A record's share has the same bits with and without any other record, also at extreme parameters.

Two data sets that differ in one record may then differ by that record's share alone. Kernels round in an order that
depends on the shape of a batch, and at an x of 1e10 another order gives another gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import Problem
from normec.errors import UsageError
from normec.gradients.linear import LinearEngine
from normec.gradients.loop import RECORD_BLOCKS, clipped_gradient, record_blocks, record_shares
from normec.gradients.record_clip import RecordClip
from normec.models import Logistic, Softmax, binary_loss, build
from normec.problems.client_data import ResidentRecords

SCALES = (1.0, 1e10, 1e30)
CLIP = RecordClip(1.0)


def images(channels: int) -> nn.Module:
    first = [nn.Conv2d(channels, 6, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))


def groups() -> nn.Module:
    norms = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)]
    return nn.Sequential(*norms, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "softmax": (lambda: nn.Linear(37, 4), (37,)),
    "wide softmax": (lambda: nn.Linear(784, 4), (784,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 4)), (20,)),
    "grey images": (lambda: images(1), (1, 10, 10)),
    "colour images": (lambda: images(3), (3, 10, 10)),
    "group norm": (groups, (3, 8, 8)),
}


def problem(name: str, records: int, dtype: torch.dtype = torch.float32) -> Problem:
    model, shape = MODELS[name]
    torch.manual_seed(0)
    inputs, targets = torch.randn(records, *shape, dtype=dtype), torch.randint(4, (records,))
    return Problem(model().to(dtype), F.cross_entropy, [TensorDataset(inputs, targets)])


def point(of: Problem, scale: float) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return scale * torch.randn(len(of.x0), generator=draw, dtype=torch.float64).to(of.x0.dtype)


def bits(of: Problem, x: Tensor, rows: list[int], blocks: tuple[int, ...]) -> dict[int, bytes]:
    """The bytes of every record's share, by its number."""
    seen: list[Tensor] = []

    def noted(*given: Any) -> tuple[Tensor, Tensor]:
        found = record_shares(*given)
        seen.append(found[0])
        return found

    clipped_gradient(of, x, 0, torch.tensor(rows), CLIP, float(len(rows)), blocks, noted)
    shares = torch.cat(seen)
    assert len(shares) == len(rows)
    return {row: share.numpy().tobytes() for row, share in zip(rows, shares, strict=True)}


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_share_keeps_its_bits_whichever_records_stand_beside_it(name: str, dtype: torch.dtype) -> None:
    given = problem(name, 90, dtype)
    blocks = record_blocks(given)
    assert blocks[-1] == RECORD_BLOCKS[-1]  # these models need not be computed one by one
    for scale in SCALES:
        x = point(given, scale)
        everyone = bits(given, x, list(range(90)), blocks)
        for count in (2, 9, 40):
            for left_out in (0, count - 1):
                others = [row for row in range(count) if row != left_out]
                found = bits(given, x, others, blocks)
                assert found == {row: everyone[row] for row in others}, (scale, count, left_out)


@pytest.mark.slow
def test_every_count_and_every_record_left_out() -> None:
    for name in ("mlp", "grey images"):
        given = problem(name, 40)
        blocks = record_blocks(given)
        x = point(given, 1e10)
        everyone = bits(given, x, list(range(40)), blocks)
        for count in range(2, 41, 3):
            for left_out in range(0, count, 2):
                others = [row for row in range(count) if row != left_out]
                assert bits(given, x, others, blocks) == {row: everyone[row] for row in others}


@pytest.mark.slow
def test_a_residual_network() -> None:
    torch.manual_seed(0)
    built = build("resnet20-gn", (3, 32, 32), 4)
    inputs = torch.randn(18, 3, 32, 32)
    given = Problem(built.model, built.loss, [TensorDataset(inputs, torch.arange(18) % 4)])
    blocks = record_blocks(given)
    for x in (given.x0, point(given, 1e3)):
        everyone = bits(given, x, list(range(18)), blocks)
        for left_out in (0, 17):
            others = [row for row in range(18) if row != left_out]
            assert bits(given, x, others, blocks) == {row: everyone[row] for row in others}


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e10])
@pytest.mark.parametrize("binary", [True, False])
def test_the_closed_form_moves_by_the_share_of_a_record(binary: bool, scale: float) -> None:
    """Also of the largest client, whose records decide about the shape of the padded table."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(140, 61), torch.arange(140) % 2
    model, loss = (Logistic(61), binary_loss) if binary else (Softmax(61, 2), F.cross_entropy)
    base = Problem(model, loss, [TensorDataset(inputs, targets)])
    x = point(base, scale)
    for left_out in (0, 33, 99):
        found = []
        for missing in (None, left_out):
            own = torch.tensor([row for row in range(100) if row != missing])
            rows = [own, torch.arange(100, 140)]
            engine = LinearEngine(base, ResidentRecords(inputs, targets, rows), None, CLIP)
            engine._problem.clients = 2
            sums = [
                block.grads.double() * engine._sizes[block.clients, None] for block in engine.blocks(x, {}, 0)
            ]  # undo the divisor, which is the count of records here
            found.append(torch.cat(sums))
        assert torch.equal(found[0][1], found[1][1])
        assert float((found[0][0] - found[1][0]).norm()) <= 1 + 1e-4


class Placed(torch.autograd.Function):
    """Adds a little that depends on a record's place among those that are computed together."""

    @staticmethod
    def forward(inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return grad

    @staticmethod
    def vmap(info: Any, dims: Any, inputs: Tensor) -> tuple[Tensor, int]:
        positions = torch.arange(info.batch_size, dtype=inputs.dtype) * 1e-3
        return inputs.movedim(dims[0], 0) + positions.view(-1, *[1] * (inputs.ndim - 1)), 0


class Place(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = Placed.apply(inputs)  # type: ignore[no-untyped-call]
        return found


def test_a_function_that_sees_the_positions_of_records_is_refused() -> None:
    inputs, targets = torch.randn(20, 5), torch.arange(20) % 4
    given = Problem(nn.Sequential(nn.Linear(5, 4), Place()), F.cross_entropy, [TensorDataset(inputs, targets)])
    with pytest.raises(UsageError, match="the vmap rule of Placed would see several"):
        bits(given, given.x0, list(range(20)), (1,))


def test_a_model_with_dropout_is_compared_with_equal_masks() -> None:
    inputs, targets = torch.randn(20, 5), torch.arange(20) % 4
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    given = Problem(model, F.cross_entropy, [TensorDataset(inputs, targets)])
    assert record_blocks(given) == RECORD_BLOCKS
