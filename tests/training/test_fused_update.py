"""The fused update is `client_step` with its sums in another order; bfloat16 memories are rounded without a bias."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normec import DPSGD, EF21, GD, Clip, Clip21, ErrorFeedback, Identity, Method, NormEC, SmoothedNorm, TopK
from normec.algorithms.method import fused_form
from normec.gradients.engine import Block
from normec.training import fused_update as update
from normec.training.memory_table import rounded

from ..support.forms import form

N, D = 9, 13
METHODS = {
    "normec": NormEC(0.5, 0.4),
    "normec-alpha-0": NormEC(0.0, 0.3),
    "normec-decay": NormEC(0.5, 0.4, decay=0.1),
    "clip21": Clip21(2.0),
    "clip21-decay": Clip21(2.0, decay=0.25),
    "identity": ErrorFeedback(Identity(), beta=0.7),
    "identity-decay": ErrorFeedback(Identity(), beta=0.7, decay=0.5),
    "dpsgd-norm": DPSGD(SmoothedNorm(0.1), beta=0.7),
    "dpsgd-clip": DPSGD(Clip(2.0)),
    "gd": GD(),
}
WHERE = {"all": list(range(N)), "neighbours": [2, 3, 4, 5], "scattered": [0, 3, 4, 8], "one": [6]}
CLOSE = {torch.float64: 1e-13, torch.float32: 1e-5}


def numbers(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gradients of norms from 0.01 to 100, and memories."""
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(N, D, generator=generator, dtype=torch.float64) * torch.logspace(-2, 2, N).double()[:, None]
    return grads.to(dtype), torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)


def block(clients: list[int], grads: Tensor) -> Block:
    return Block.of(torch.tensor(clients), grads[clients].clone(), torch.zeros(len(clients), dtype=grads.dtype))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("tile", [1, 3 * D, 2**17])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_it_is_the_client_s_step(
    method: Method, where: str, dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "_TILE", tile)
    clients = WHERE[where]
    grads, memory = numbers(dtype)
    before = memory.clone()
    sent = update.apply_fused(form(method), block(clients, grads), memory, seed=0)
    messages, after = method.client_step(grads[clients], before[clients])
    close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    torch.testing.assert_close(sent.total, messages.sum(0), **close)
    torch.testing.assert_close(sent.lengths, messages.norm(dim=1, keepdim=True), **close)
    if form(method).memory:
        torch.testing.assert_close(memory[clients], after, **close)
        torch.testing.assert_close(sent.distances, (grads - before)[clients].norm(dim=1, keepdim=True), **close)
    else:
        assert torch.equal(memory[clients], before[clients])
    others = [i for i in range(N) if i not in clients]
    assert torch.equal(memory[others], before[others])


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_zeros_send_zero(method: Method) -> None:
    memory = numbers()[1]
    if not form(method).memory:
        memory.zero_()
    before = memory.clone()
    sent = update.apply_fused(form(method), Block.of(torch.arange(N), memory.clone(), torch.zeros(N)), memory, 0)
    assert not sent.total.any()
    assert not sent.lengths.any()
    torch.testing.assert_close(memory, form(method).keep * before)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_norms_beyond_float32_s_squares_are_the_client_s_step_s(method: Method, size: float) -> None:
    grads = torch.full((2, D), size)
    memory, before = torch.zeros(2, D), torch.zeros(2, D)
    sent = update.apply_fused(form(method), Block.of(torch.arange(2), grads.clone(), torch.zeros(2)), memory, 0)
    messages, after = method.client_step(grads, before)
    torch.testing.assert_close(sent.total, messages.sum(0), equal_nan=True)
    if form(method).memory:
        torch.testing.assert_close(memory, after, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_what_is_broken_stays_visible_and_breaks_nobody_else(method: Method, bad: float, dtype: torch.dtype) -> None:
    grads, memory = numbers(torch.float32)
    grads[4, 7] = bad
    memory = memory.to(dtype)
    sent = update.apply_fused(form(method), block(list(range(N)), grads), memory, 0)
    assert not torch.isfinite(sent.total).all()
    if form(method).memory:
        finite = torch.isfinite(memory).all(1)
        assert finite.tolist() == [i != 4 for i in range(N)]


def test_an_operator_that_does_more_than_scale_has_no_fused_form() -> None:
    assert fused_form(EF21(TopK(2))) is None


def test_a_memory_of_less_precision_takes_rounded_rows() -> None:
    grads, memory = numbers()
    held = memory.float()
    _, after = Clip21(2.0).client_step(grads, held.double())
    update.apply_fused(form(Clip21(2.0)), block(list(range(N)), grads), held, 0)
    assert torch.equal(held, after.float())


# bfloat16


def neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers towards zero and away from it."""
    bits = values.view(torch.int32) & -65536
    return bits.view(torch.float32), (bits + 65536).view(torch.float32)


def test_rounding_keeps_the_mean_over_seeds() -> None:
    torch.manual_seed(0)
    values = torch.cat((torch.randn(200), torch.tensor([1 + 1 / 512, -1 - 1 / 512, 1e-30, -3e20])))
    near, far = neighbours(values)
    draws = torch.stack([rounded(values, torch.bfloat16, seed).float() for seed in range(3000)])
    assert torch.equal((draws == near) | (draws == far), torch.ones_like(draws, dtype=torch.bool))
    chance = (values.double() - near.double()) / (far.double() - near.double())
    error = (draws == far).double().mean(0) - chance
    assert float((error / (chance * (1 - chance) / 3000).sqrt().clamp(min=1e-4)).abs().max()) < 5
    # entries are rounded each by its own draw
    spread = (draws == far).double().sum(1).std()
    assert float(spread) == pytest.approx(float((chance * (1 - chance)).sum().sqrt()), rel=0.1)


def test_rounding_leaves_what_needs_none() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-130, torch.inf, -torch.inf])
    for seed in range(50):
        assert torch.equal(rounded(exact, torch.bfloat16, seed).float(), exact)
    # Every kind of NaN, also the one whose bits would wrap around to a number.
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -4194304], dtype=torch.int32)
    for seed in range(50):
        assert rounded(bits.view(torch.float32), torch.bfloat16, seed).isnan().all()
    assert torch.equal(rounded(torch.tensor([1.23]).double(), torch.float32, 0), torch.tensor([1.23]))


def test_the_same_seed_rounds_alike_and_another_does_not() -> None:
    values = torch.randn(50)
    first = rounded(values, torch.bfloat16, 1)
    assert torch.equal(first, rounded(values, torch.bfloat16, 1))
    assert not torch.equal(first, rounded(values, torch.bfloat16, 2))


@pytest.mark.parametrize("where", WHERE)
def test_a_bfloat16_memory_is_the_float32_one_within_a_rounding(where: str) -> None:
    clients = WHERE[where]
    grads, memory = numbers(torch.float32)
    held = memory.bfloat16()
    messages, after = NormEC(0.5, 0.4, decay=0.1).client_step(grads[clients], held[clients].float())
    before = held.clone()
    sent = update.apply_fused(form(NormEC(0.5, 0.4, decay=0.1)), block(clients, grads), held, 3)
    taken = (held[clients].float() - 0.9 * before[clients].float()) / 0.4  # what the memories took is what was sent
    torch.testing.assert_close(sent.total, taken.sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(taken, messages, rtol=0, atol=2**-7 * float(after.abs().max()) / 0.4)
    torch.testing.assert_close(held[clients].float(), after, rtol=2**-7, atol=1e-6)
    others = [i for i in range(N) if i not in clients]
    assert torch.equal(held[others], before[others])


def test_small_steps_are_not_lost() -> None:
    """Steps of 1/1000 of a memory: to the nearest they would all vanish; here they arrive on average."""
    memory, method = torch.ones(1, 2000, dtype=torch.bfloat16), ErrorFeedback(Identity(), beta=1.0)
    for round in range(20):
        grads = memory.float() + 1e-3
        update.apply_fused(form(method), Block.of(torch.arange(1), grads, torch.zeros(1)), memory, round)
    assert float(memory.float().mean()) == pytest.approx(1.02, abs=1e-3)
