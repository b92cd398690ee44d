"""The compiled loop gives the loop's numbers: uncompiled on every problem, compiled on one that draws and counts."""

from __future__ import annotations

import random
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Compute, Logging, NormEC, Problem, train
from normec.gradients.compiled import CompiledEngine, pays_back
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches

from .cases import BATCH, CASES, CLASSES, apart, engines, everything, problem
from .test_engines import close
from .test_verified_engine import lines, of


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_buffers_are_the_loop_s(name: str) -> None:
    case = problem(name)
    assert isinstance(case.records, ResidentRecords)
    assert case.sizes is not None
    loop, *_ = engines(case, BATCH)
    compiled = CompiledEngine(case, case.records, Batches(case.sizes, BATCH, 1), 1, compiling=False)
    for round, clients in ((0, None), (3, torch.tensor([0, 3, 4]))):
        assert apart(everything(compiled, case, round, clients), everything(loop, case, round, clients)) < 1e-10
    assert apart(everything(compiled, case, 6, full=True), everything(loop, case, 6, full=True)) < 1e-10


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="there is no compiler here")
@pytest.mark.slow
def test_a_compiled_run_ends_as_the_loop_s_dropout_and_statistics_too() -> None:
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(9, 6).double(), torch.arange(9) % CLASSES) for _ in range(3)]
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.Linear(5, CLASSES)).double()
    drops = Problem(model, F.cross_entropy, clients)
    options: dict[str, Any] = {"lr": 0.2, "rounds": 6, "batch_size": BATCH, "logging": Logging(every=2)}
    compiled = train(drops, NormEC(0.1, 0.3), compute=Compute(engine="compiled"), **options)
    assert compiled.engine == "compiled"
    close(compiled, train(drops, NormEC(0.1, 0.3), compute=Compute(engine="loop"), **options))


class Dice(nn.Module):
    """Draws from Python's generator, which nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x) * (1 + random.random())
        return found


@pytest.mark.slow
def test_what_differs_is_done_by_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    run = train(
        of(Dice()),
        NormEC(0.1, 0.3),
        lr=0.3,
        rounds=2,
        batch_size=BATCH,
        compute=Compute(engine="compiled"),
    )
    assert run.engine == "loop"
    assert lines(caplog) == [
        "engine compiled is not used; the loop runs instead: its gradients differ from the reference on this model"
    ]


def test_compiling_pays_back_in_long_runs_of_large_models_only() -> None:
    assert not pays_back(problem("resnet20"), 32, 10)
    assert pays_back(problem("resnet20"), 32, 10**7)
    assert not pays_back(problem("small"), 32, 10**5)
