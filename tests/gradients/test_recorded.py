"""The loop with copies of the model gives the loop's numbers; `test_gpu` checks its recordings."""

from __future__ import annotations

import copy
import functools
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.data import TensorDataset

from normec import Compute, NormEC, Problem, train
from normec.gradients.cuda_graphs import CudaGraphs
from normec.gradients.own_code import has_own_code
from normec.gradients.recorded import RecordedEngine, _attributes, _host_generators, may_run_side_by_side
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches

from .cases import BATCH, CASES, CLASSES, apart, engines, everything, problem
from .test_verified_engine import MODELS, by_the_loop, lines, made, of, trained


def recorded(name: str, seed: int = 1) -> RecordedEngine:
    case = problem(name)
    assert isinstance(case.records, ResidentRecords)
    assert case.sizes is not None
    return RecordedEngine(case, case.records, Batches(case.sizes, BATCH, 1), seed)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_buffers_are_the_loop_s(name: str) -> None:
    case = problem(name)
    loop, *_ = engines(case, BATCH)
    mine = recorded(name)
    for round, clients in ((0, None), (3, torch.tensor([0, 3, 4]))):
        assert apart(everything(mine, case, round, clients), everything(loop, case, round, clients)) < 1e-10
    assert apart(everything(mine, case, 6, full=True), everything(loop, case, 6, full=True)) < 1e-10


def test_blocks_are_made_smaller_down_to_one_record() -> None:
    mine, case = recorded("small"), problem("small")
    whole = everything(mine, case, 2)
    while mine.shrink():
        assert apart(everything(mine, case, 2), whole) == 0


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", MODELS)
def test_no_model_is_wrong(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each client has a pass of its own: what the other engines get wrong is right here, dropout included."""
    run = trained(made(name), "recorded")
    assert run.engine == "recorded"
    assert lines(caplog) == []
    torch.testing.assert_close(run.x, by_the_loop(name).x, rtol=1e-9, atol=1e-9)


class Writes(nn.Module):
    """Its weights shrink with every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.last.weight.data.mul_(0.5)
        found: Tensor = self.last(x)
        return found


def test_a_model_that_changes_its_parameters_is_left_to_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    run = train(of(Writes()), NormEC(0.1, 0.3), lr=0.3, rounds=2, batch_size=BATCH, compute=Compute(engine="recorded"))
    assert run.engine == "loop"
    (line,) = lines(caplog)
    assert "changes its own parameters" in line


def test_what_python_does_otherwise_next_time_is_seen() -> None:
    """A recording repeats what Python did once: plain attributes that change and numbers drawn on the host tell."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = _attributes([model])
    model.train()
    assert _attributes([model]) == before
    model[0].calls = 1  # type: ignore[assignment]
    counted = _attributes([model])
    model[0].calls = 2  # type: ignore[assignment]
    assert _attributes([model]) != counted
    model[0].kept = torch.zeros(2)
    held = _attributes([model])
    model[0].kept.add_(1)  # type: ignore[operator]
    assert _attributes([model]) != held
    for draw in (random.random, np.random.rand):
        drawn = _host_generators()
        assert _host_generators() == drawn
        draw()
        assert _host_generators() != drawn


def test_once_given_up_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    graphs = CudaGraphs("a round")
    graphs.give_up("it counts")
    assert graphs.off
    assert caplog.messages == ["no CUDA graph for a round: it counts"]
    assert graphs.run(lambda x: 2 * x, [torch.ones(2)], [], "twice").tolist() == [2, 2]


class WritesForSome(nn.Module):
    """Its weights are reset where an output is large, which no other client may notice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x)
        self.last.weight.data.mul_(torch.where(found.detach().abs().max() > 100, 0.0, 1.0))
        return found


def test_what_one_client_writes_to_the_parameters_does_not_reach_another() -> None:
    case = of(WritesForSome())
    assert isinstance(case.records, ResidentRecords)
    assert case.sizes is not None
    mine = RecordedEngine(case, case.records, Batches(case.sizes, BATCH, 1), 1)
    before = everything(mine, case, 0)
    case.records.inputs[case.records.rows[0]] *= 1e4
    after = everything(mine, case, 1)
    case.records.inputs[case.records.rows[0]] /= 1e4
    loop, *_ = engines(case, BATCH)
    assert apart(before, everything(loop, case, 0)) < 1e-6
    torch.testing.assert_close(after.grads[1:], everything(loop, case, 1).grads[1:], rtol=1e-5, atol=1e-6)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(6)), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.scale * x)
        return found


def test_code_that_may_write_to_the_same_memory_sees_one_client_at_a_time() -> None:
    """All clients share the loss and the transform, and copies of a model share what is no attribute."""

    def together(model: nn.Module, private: bool, loss: Any = F.cross_entropy, **more: Any) -> bool:
        clients = [TensorDataset(torch.randn(4, 6), torch.arange(4)) for _ in range(2)]
        return may_run_side_by_side(Problem(model, loss, clients, **more), private)

    def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def hook(module: nn.Module, given: Any, found: Tensor) -> Tensor:  # noqa: ARG001
        return found

    known = nn.Sequential(nn.Linear(6, CLASSES), nn.Dropout(0.5))
    for private in (False, True):
        for loss in (F.cross_entropy, nn.CrossEntropyLoss(), partial(F.cross_entropy, label_smoothing=0.1)):
            assert together(known, private, loss)
        renamed = functools.wraps(F.cross_entropy)(lambda *given: own_loss(*given))  # its module is one of PyTorch
        made = torch.fx.symbolic_trace(Own()), torch.jit.trace(Own(), torch.zeros(1, 6))  # type: ignore[no-untyped-call]
        for own in (own_loss, partial(own_loss, targets=torch.arange(4)), renamed, torch.no_grad()(own_loss), *made):
            assert has_own_code(own)
        assert not together(known, private, own_loss)
        assert not together(known, private, transform=lambda inputs: inputs)
    parametrize.register_parametrization(weighted := Own(), "scale", nn.Softplus())  # its class is one of PyTorch
    (hooked := copy.deepcopy(known)).register_forward_hook(hook)
    for model in (Own(), weighted, hooked):
        assert together(model, private=False)
        assert not together(model, private=True)
