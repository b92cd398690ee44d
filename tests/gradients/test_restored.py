"""What code of the user's own saw in some clipped records never reaches the gradient of another, however late."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Privacy, Problem, train
from normec.gradients.loop import LoopEngine
from normec.gradients.record_clip import RecordClip
from normec.gradients.restored import restored
from normec.gradients.shared.engine import SharedEngine
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches, BatchSource

LATE = 12  # calls after which a part uses what it kept
CLIP, CLIENTS, RECORDS, BATCH, ROUNDS = RecordClip(1.0), 3, 8, 4, 20


class Kept:
    """A running mean of what was seen, from which nothing is taken before many calls."""

    def __init__(self) -> None:
        self.mean: Any = torch.zeros(())
        self.calls = 0

    def late(self, seen: Tensor) -> Tensor:
        before, self.calls = self.mean, self.calls + 1
        self.mean = 0.5 * before + 0.5 * seen.detach().mean(0)
        return before if self.calls > LATE else torch.zeros(())


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


def all_rows(engine: Any, of: Problem, round: int) -> Tensor:
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
    model, loss = InAttributes(), Loss()

    def assign() -> None:
        with restored(model, partial(loss.late)):
            setattr(model, "new", 1)  # noqa: B010
            model.calls = 7
            model.kept.append(torch.ones(4))
            model.register_buffer("late", torch.ones(1))
            loss.mean = 3
            raise RuntimeError

    with pytest.raises(RuntimeError):
        assign()
    assert not hasattr(model, "new")
    assert (model.calls, float(loss.mean)) == (0, 0)
    assert float(model.kept[0].sum()) == 0
    assert not dict(model.named_buffers())
