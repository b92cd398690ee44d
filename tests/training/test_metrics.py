"""What a round measures, summed block by block, against a direct computation; where something broke."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normec import Diverged
from normec.gradients.engine import Block
from normec.training.metrics import Faults, Meter

N, D = 7, 4


def nobody(round: int) -> list[int]:  # noqa: ARG001
    return []


def numbers() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    grads, memory = (torch.randn(N, D, dtype=torch.float64, generator=generator) for _ in range(2))
    return grads, memory, torch.rand(N, dtype=torch.float64, generator=generator)


def blocks(size: int) -> list[tuple[Block, Tensor]]:
    grads, memory, losses = numbers()
    return [(Block.of(ids, grads[ids], losses[ids]), memory[ids]) for ids in torch.arange(N).split(size)]


@pytest.mark.parametrize("size", [1, 3, N])
def test_a_meter_reads_means_over_all_blocks(size: int) -> None:
    grads, memory, losses = numbers()
    meter = Meter(grads[0])
    for block, own in blocks(size):
        meter.add(block)
        meter.add_distances(block, (block.grads - own).norm(dim=1, keepdim=True))
        meter.add_messages(0.5 * block.grads.norm(dim=1, keepdim=True))
    found = meter.read(exact=True, feedback=True)
    assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-14)
    assert found["grad_norm"] == pytest.approx(float(grads.mean(0).norm()), rel=1e-14)
    assert found["memory_error"] == pytest.approx(float((grads - memory).norm(dim=1).mean()), rel=1e-14)
    away = (grads - grads.mean(0)).square().sum(1).mean().sqrt()
    assert found["disagreement"] == pytest.approx(float(away), rel=1e-12)
    assert found["message_norm"] == pytest.approx(float(grads.norm(dim=1).mean()) / 2, rel=1e-14)
    assert found["message_norm_max"] == pytest.approx(float(grads.norm(dim=1).max()) / 2, rel=1e-14)
    always = {"loss", "disagreement", "message_norm", "message_norm_max"}
    assert set(meter.read(exact=False, feedback=True)) == {*always, "memory_error"}
    assert set(meter.read(exact=True, feedback=False)) == {*always, "grad_norm"}


@pytest.mark.parametrize("size", [1, 3, N])
def test_a_meter_with_weights_reads_weighted_means(size: int) -> None:
    grads, memory, losses = numbers()
    shares = torch.arange(1, N + 1, dtype=torch.float64) / (N * (N + 1) / 2)
    meter = Meter(grads[0], N * shares)
    for block, own in blocks(size):
        meter.add(block)
        meter.add_distances(block, (block.grads - own).norm(dim=1, keepdim=True))
        meter.add_messages(0.5 * block.grads.norm(dim=1, keepdim=True))
    found = meter.read(exact=True, feedback=True)
    mean = sum(share * own for share, own in zip(shares, grads, strict=True))
    assert found["loss"] == pytest.approx(float((shares * losses).sum()), rel=1e-13)
    assert found["grad_norm"] == pytest.approx(float(torch.linalg.norm(mean)), rel=1e-13)
    assert found["memory_error"] == pytest.approx(float((shares * (grads - memory).norm(dim=1)).sum()), rel=1e-13)
    away = (shares * (grads - mean).square().sum(1)).sum().sqrt()
    assert found["disagreement"] == pytest.approx(float(away), rel=1e-12)
    assert found["message_norm"] == pytest.approx(float(grads.norm(dim=1).mean()) / 2, rel=1e-14)


def test_a_meter_that_saw_nobody_reads_nothing() -> None:
    meter = Meter(torch.zeros(D))
    assert meter.read(exact=True, feedback=True) == {}


def losses_block(values: list[float], clients: list[int]) -> Block:
    return Block.of(torch.tensor(clients), torch.zeros(len(values), D), torch.tensor(values))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_round_and_its_clients_are_named(bad: float) -> None:
    faults = Faults(range(6), torch.device("cpu"))
    faults.note_losses(losses_block([1.0, 2.0], [0, 1]), 3)
    faults.check(nobody)
    faults.note_losses(losses_block([bad, 2.0, bad], [2, 3, 5]), 4)
    faults.note_losses(losses_block([bad, bad], [1, 2]), 5)
    with pytest.raises(Diverged, match="the loss of clients 2, 5 is not finite in round 4") as error:
        faults.check(nobody)
    assert error.value.round == 4
    assert error.value.clients == [2, 5]
    assert "\n" not in str(error.value)


def test_a_loss_is_named_before_the_sum_it_spoils() -> None:
    faults = Faults(range(3), torch.device("cpu"))
    faults.note_losses(losses_block([math.nan], [1]), 2)
    faults.note_sum(torch.tensor([math.nan, 0.0]), 2)
    with pytest.raises(Diverged, match="the loss of client 1 is not finite in round 2"):
        faults.check(nobody)


def test_a_broken_gradient_is_blamed_on_whom_the_caller_finds() -> None:
    faults = Faults(range(3), torch.device("cpu"))
    faults.note_sum(torch.ones(D), 6)
    faults.check(nobody)
    faults.note_sum(torch.tensor([0.0, math.inf, 0.0]), 7)
    with pytest.raises(Diverged, match="the gradient of client 2 is not finite in round 7") as error:
        faults.check(lambda round: [2] if round == 7 else [])
    assert error.value.clients == [2]


def test_a_sum_of_opposite_infinities_is_a_fault() -> None:
    faults = Faults(range(1), torch.device("cpu"))
    faults.note_sum(torch.tensor([math.inf, -math.inf]), 1)
    with pytest.raises(Diverged, match="round 1"):
        faults.check(nobody)


def test_long_lists_of_clients_are_cut() -> None:
    assert "clients 0, 1, 2, 3, 4 … is" in str(Diverged(3, list(range(40)), "the loss"))
    assert "the loss of client 7 is not finite in round 3" in str(Diverged(3, [7], "the loss"))
