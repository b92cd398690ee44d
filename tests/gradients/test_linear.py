"""The closed form gives the loop's gradients, to rounding, on every kind of batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Compute, NormEC, train
from normec.errors import UsageError
from normec.experiments import build
from normec.gradients.choice import choose_engine
from normec.gradients.record_clip import RecordClip
from normec.models import Logistic, Softmax, binary_loss
from normec.problems.problem import Problem
from normec.sampling.batches import Batches, BatchSource, PoissonBatches
from normec.settings import make

PROBLEMS = {
    "softmax, uneven clients, penalty": {"clients": 13, "split": "dirichlet", "penalty": 0.01},
    "logistic": {"clients": 7, "data": "breast_cancer", "model": "logistic"},
}


def problem(name: str) -> Problem:
    return build.problem(make(PROBLEMS[name])).to(torch.device("cpu"), torch.float64)


def batches(kind: str, of: Problem) -> BatchSource | None:
    assert of.sizes is not None
    return {"all": None, "shuffled": Batches(of.sizes, 6, 0), "poisson": PoissonBatches(of.sizes, 0.3, 0)}[kind]


def everything(engine: str, of: Problem, kind: str, clip: RecordClip | None, **options: object) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn_like(of.x0)
    found = list(choose_engine(engine, of, batches(kind, of), 0, clip).blocks(x, {}, 5, **options))  # type: ignore[arg-type]
    return [torch.cat([getattr(block, name) for block in found]) for name in ("clients", "grads", "losses")]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("clip", [None, RecordClip(0.5), RecordClip("auto"), RecordClip(0.5, by_layer=True)])
@pytest.mark.parametrize("kind", ["all", "shuffled", "poisson"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_and_losses_are_the_loop_s(name: str, kind: str, clip: RecordClip | None) -> None:
    of = problem(name)
    for options in ({}, {"clients": torch.tensor([1, 4, 5])}):
        for found, expected in zip(
            everything("linear", of, kind, clip, **options), everything("loop", of, kind, clip, **options), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_every_record_s_share_is_clipped() -> None:
    """By hand: the mean of clipped single-record gradients."""
    of = problem("softmax, uneven clients, penalty")
    of.penalty = None
    torch.manual_seed(0)
    x = torch.randn_like(of.x0)
    (block,) = choose_engine("linear", of, None, 0, RecordClip(0.3)).blocks(x, {}, 0)
    inputs, targets = of.records.batch(2, None)
    total = torch.zeros_like(x)
    for item, target in zip(inputs, targets, strict=True):
        point = x.clone().requires_grad_()
        weight, bias = point[:640].view(10, 64), point[640:]
        logits = weight @ item.double() + bias
        (grad,) = torch.autograd.grad(torch.logsumexp(logits, 0) - logits[target], point)
        total += grad * min(1.0, 0.3 / float(grad.norm()))
    torch.testing.assert_close(block.grads[2], total / len(inputs))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("method", [NormEC(0.01, 0.1), DPSGD(Clip(0.2))], ids=["normec", "dpsgd"])
def test_the_same_run(method: object) -> None:
    of = problem("softmax, uneven clients, penalty")
    runs = [
        train(of, method, lr=0.1, rounds=15, batch_size=5, compute=Compute(engine=name)) for name in ("loop", "linear")
    ]  # type: ignore[arg-type]
    torch.testing.assert_close(runs[0].x, runs[1].x, rtol=1e-9, atol=1e-9)
    assert [run.engine for run in runs] == ["loop", "linear"]


def test_auto_takes_it_where_it_fits_and_says_so_where_it_does_not() -> None:
    assert choose_engine("auto", problem("logistic"), None, 0).name == "linear"
    network = build.problem(make({"model": "mlp"}))
    assert choose_engine("auto", network, None, 0).name == "shared"
    with pytest.raises(UsageError, match="softmax and logistic"):
        choose_engine("linear", network, None, 0)


@pytest.mark.parametrize("engine", ["linear", "loop"])
def test_a_record_of_huge_inputs_and_a_tiny_slope_is_clipped(engine: str) -> None:
    """The square of its slope is 0 in float32, and its gradient is twenty times as long as the clip."""
    clip, data = 1e-6, TensorDataset(torch.tensor([[1.8e19, 0.0]]), torch.tensor([0.0]))
    of = Problem(Logistic(2), binary_loss, [data])
    (block,) = choose_engine(engine, of, None, 0, RecordClip(clip)).blocks(torch.tensor([-55 / 1.8e19, 0.0]), {}, 0)
    assert float(block.grads.double().norm()) <= clip * (1 + 1e-5)


@pytest.mark.parametrize("engine", ["linear", "loop"])
def test_a_layer_of_huge_inputs_and_a_tiny_slope_is_clipped(engine: str) -> None:
    """The same with two classes, whose weights are bounded apart from the biases, by 1/√2 of the clip."""
    clip, data = 1e-6, TensorDataset(torch.tensor([[1.8e19, 0.0]]), torch.tensor([0]))
    of = Problem(Softmax(2, 2), nn.functional.cross_entropy, [data])
    x = torch.tensor([55 / 1.8e19, 0.0, 0.0, 0.0, 0.0, 0.0])
    (block,) = choose_engine(engine, of, None, 0, RecordClip(clip, by_layer=True)).blocks(x, {}, 0)
    length = float(block.grads[0, :4].double().norm())
    assert 0 < length <= clip / 2**0.5 * (1 + 1e-5)
