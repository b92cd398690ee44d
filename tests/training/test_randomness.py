"""Dropout, random transforms and augmentation: the run's seed, the client and the round decide, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from normec import GD, Clip21, Logging, Poisson, Problem, train
from normec.gradients.choice import choose_engine
from normec.problems.objective import Objective
from normec.sampling.batches import Batches

from ..support import reference
from ..support.runs import states


class Jitter(Dataset[Any]):
    """Items are made when asked for, through a transform that draws from torch's global generator."""

    def __init__(self, rows: int, seed: int) -> None:
        self.x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + 0.3 * torch.randn(4), index % 3

    def __len__(self) -> int:
        return len(self.x)


def table(rows: int, seed: int) -> TensorDataset:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.arange(rows) % 3)


class Flip:
    """Changes the sign of an input where its uniform is over one half, and adds its second uniform."""

    draws = 2

    def __call__(self, inputs: Tensor, uniforms: Tensor) -> Tensor:
        assert uniforms.shape == (len(inputs), 2)
        sign = torch.where(uniforms[:, :1] > 0.5, -1.0, 1.0)
        return (inputs * sign + uniforms[:, 1:]).to(inputs.dtype)


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3))


def problem(kind: str, clients: int = 3) -> Problem:
    return given(kind, [(7 + i, i) for i in range(clients)])


def given(kind: str, clients: list[tuple[int, int]]) -> Problem:
    """One client for each (rows, seed of its records)."""
    make = Jitter if kind == "transform" else table
    datasets: list[Dataset[Any]] = [make(*client) for client in clients]
    model = network(0.5 if kind == "dropout" else 0.0)
    return Problem(model, F.cross_entropy, datasets, table(9, 50), augment=Flip() if kind == "augment" else None)


KINDS = ["transform", "dropout", "augment"]


def gradient(of: Objective, client: int, round: int, seed: int = 0, batch_size: int | None = 4) -> Tensor:
    assert of.sizes is not None
    engine = choose_engine("loop", of, Batches(of.sizes, batch_size, seed) if batch_size else None, seed)
    (block,) = engine.blocks(of.x0, of.initial_buffers(), round, torch.tensor([client]))
    return block.grads[0]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_same_seed_gives_the_same_bits_whatever_went_before(kind: str, batch_size: int | None) -> None:
    options: dict[str, Any] = {"lr": 0.1, "rounds": 8, "batch_size": batch_size}
    torch.manual_seed(1)
    first = train(problem(kind), Clip21(0.5), **options)
    torch.manual_seed(2)
    torch.rand(17)
    again = train(problem(kind), Clip21(0.5), logging=Logging(every=3, evaluate_every=2, full_gradient=True), **options)
    assert torch.equal(first.x, again.x)
    for name, value in states(first).items():
        assert torch.equal(value, states(again)[name]), name
    assert not torch.equal(first.x, train(problem(kind), Clip21(0.5), seed=1, **options).x)


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_torch_s_generator_back_as_it_was(kind: str) -> None:
    of = problem(kind)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    train(of, GD(), lr=0.1, rounds=2)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_s_chance_is_its_own_and_the_round_s(kind: str) -> None:
    few, many = problem(kind, clients=2), problem(kind, clients=5)
    for client in range(2):
        for round in (0, 3):
            alone, among = gradient(few, client, round), gradient(many, client, round)
            assert torch.equal(alone, among)
    same = given(kind, [(4, 0), (4, 0)])  # the same records in the same order: the chance alone differs
    first = gradient(same, 0, 0, batch_size=None)
    assert torch.equal(gradient(same, 0, 0, batch_size=None), first)
    for client, round, seed in ((0, 1, 0), (1, 0, 0), (0, 0, 1)):
        assert not torch.equal(gradient(same, client, round, seed, batch_size=None), first)


def test_dropout_is_off_in_evaluation() -> None:
    of = problem("dropout")
    model = network(0.5).eval()
    test = table(9, 50)
    expected = float(F.cross_entropy(model(test.tensors[0]), test.tensors[1]).detach())
    assert of.evaluate(of.x0, {})["test_loss"] == pytest.approx(expected, rel=1e-6)
    gradient(of, 0, 0)  # leaves the model in training mode
    assert of.evaluate(of.x0, {})["test_loss"] == pytest.approx(expected, rel=1e-6)


def test_augmentation_uses_the_stream_s_uniforms_record_by_record() -> None:
    """Against a plain gradient on inputs augmented here, with uniforms from the reference's own Philox."""
    of, data = problem("augment"), table(8, 1)
    engine = choose_engine("loop", of, None, 6)
    (block,) = engine.blocks(of.x0, {}, 5, torch.tensor([1]))
    drawn = torch.tensor(reference.uniforms(6, "augment", 1, 5, 16)).view(8, 2)
    x = data.tensors[0] * torch.where(drawn[:, :1] > 0.5, -1.0, 1.0) + drawn[:, 1:].float()
    model = network()
    F.cross_entropy(model(x), data.tensors[1]).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.allclose(block.grads[0], expected, atol=1e-6)


def test_augmentation_is_for_training_alone() -> None:
    of = problem("augment")
    test = table(9, 50)
    expected = float(F.cross_entropy(network()(test.tensors[0]), test.tensors[1]).detach())
    assert of.evaluate(of.x0, {})["test_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_clients_does_not_change_what_a_drawn_one_computes(kind: str) -> None:
    """A client drawn in round k computes what it would compute in round k among all."""
    of = problem(kind)
    run = train(of, GD(), lr=0.1, rounds=1, participation=Poisson(0.5), seed=1)
    drawn = Poisson(0.5).draw(3, 0, 1)
    assert drawn is not None
    assert 0 < len(drawn) < 3
    engine = choose_engine("loop", of, None, 1)
    (block,) = engine.blocks(of.x0, of.initial_buffers(), 0)
    assert torch.allclose(run.x, of.x0 - 0.1 * block.grads[drawn].sum(0) / 3, atol=1e-7)


def test_a_test_set_with_a_random_transform_is_reproducible() -> None:
    """As when one data set with a random transform is split into training and test."""

    def losses(before: int) -> list[float]:
        of = Problem(network(), F.cross_entropy, [table(7, 0), table(7, 1)], Jitter(9, 2))
        torch.manual_seed(before)
        return train(of, GD(), lr=0.1, rounds=4, logging=Logging(evaluate_every=1)).history["test_loss"]

    assert losses(1) == losses(2)
