"""What training leaves in a model's attributes never leaves the run: not by `run.model`, not by the test loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Compute, NormEC, Privacy, Problem, Run, UsageError, train
from normec.gradients import compiled
from normec.gradients import loop as loop_engine
from normec.training.communicator import Communicator, SingleProcess


class Centres(nn.Module):
    """Subtracts the batch's mean in training and a running mean elsewhere, kept outside of buffers."""

    def __init__(self, home: str) -> None:
        super().__init__()
        zeros = torch.zeros(4)
        self.mean: Any = nn.Parameter(zeros, requires_grad=False) if home == "parameter" else zeros

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        with torch.no_grad():
            after = 0.9 * self.mean + 0.1 * x.mean(0)
            if isinstance(self.mean, nn.Parameter):
                self.mean.copy_(after)
            else:
                self.mean = after
        return x - x.mean(0)


class Keeps(nn.Linear):
    """Keeps the last batch."""

    def __init__(self, detached: bool) -> None:
        super().__init__(4, 3)
        self.detached = detached

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        self.features = input.detach() if self.detached else found
        return found


class CentredLoss:
    """A loss that remembers the outputs of training, and shows them only where no gradient is asked for."""

    def __init__(self) -> None:
        self.seen = torch.zeros(())

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, targets)
        if not torch.is_grad_enabled():
            return value + self.seen
        self.seen = self.seen + outputs.detach().abs().sum()
        return value


class Writes(nn.Module):
    """Keeps the mean of the last batch in a trainable parameter, which is part of x."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.data.copy_(x.mean(0))
        return x - self.mean.detach() + 0 * self.mean


class FirstSeen(nn.Module):
    """Subtracts the mean of the first batch that it ever saw, as layers with a start from the data do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("known", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.known:
            self.mean.copy_(x.mean(0))  # type: ignore[operator]
            self.known.fill_(True)  # type: ignore[operator]
        return x - self.mean


def problem(model: nn.Module, secret: float, loss: Any = F.cross_entropy) -> Problem:
    draw = torch.Generator().manual_seed(1)
    sets = [
        TensorDataset(torch.rand(10, 4, generator=draw), torch.randint(0, 3, (10,), generator=draw)) for _ in range(5)
    ]
    test = TensorDataset(*(part.clone() for part in sets[0].tensors))
    sets[4].tensors[0][:] += secret
    return Problem(model, loss, sets, test=test)


def trained(of: Problem, **options: Any) -> Run:
    privacy = Privacy(epsilon=0.1, trust="secure-sum")
    return train(of, NormEC(0.1, 0.1), lr=0.0, rounds=5, seed=0, privacy=privacy, **options)


def centring(home: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Centres(home), nn.Linear(4, 3))


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_running_means_in_an_attribute_stay_in_the_run(engine: str) -> None:
    one, other = (
        trained(problem(centring("attribute"), secret), compute=Compute(engine=engine)) for secret in (0.0, 100.0)
    )
    for run in (one, other):
        assert isinstance(run.model, nn.Sequential)
        assert torch.equal(run.model[0].mean, torch.zeros(4))  # type: ignore[arg-type]
    assert one.history["test_loss"] == other.history["test_loss"]  # x stands still


@pytest.mark.parametrize("engine", ["auto", "loop", "batched", "recorded"])
def test_running_means_in_a_frozen_parameter_are_refused(engine: str) -> None:
    with pytest.raises(UsageError, match=r"the frozen parameter 0\.mean changes with the data"):
        trained(problem(centring("parameter"), 0.0), compute=Compute(engine=engine))


class Flips(nn.Module):
    """Outputs that have once been large make a frozen sign negative, for all later clients."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.sign = nn.Linear(4, 3), nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x) * self.sign.clone()
        with torch.no_grad():
            self.sign.copy_(torch.where(found.abs().max() > 30, -1.0, self.sign))
        return found


class FirstOfTwo(SingleProcess):
    """Rank 0 of two; the other one has no clients."""

    size = 2


COMPILED = pytest.param("compiled", marks=pytest.mark.slow)


@pytest.mark.parametrize("engine", ["loop", "recorded", COMPILED])
@pytest.mark.parametrize("communicator", [None, FirstOfTwo()], ids=["one process", "two ranks"])
def test_a_sign_that_one_client_changes_for_others_stops_the_run_before_their_sum(
    engine: str, communicator: Communicator | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the model are looked at as well, and blocks after the one that was paid for first."""
    for module in (loop_engine, compiled):
        monkeypatch.setattr(module, "_BLOCK_FLOATS", 1)  # a block for each client
    torch.manual_seed(0)
    sets = [TensorDataset(torch.rand(10, 4), torch.randint(3, (10,))) for _ in range(12)]
    sets[3].tensors[0].mul_(1e3)  # the check of a few clients before the run sees clients 0, 1, 6 and 11
    of, compute = Problem(Flips(), F.cross_entropy, sets), Compute(engine=engine, communicator=communicator)
    with pytest.raises(UsageError, match=r"the frozen parameter sign changes with the data"):
        train(of, DPSGD(Clip(0.1)), lr=1.0, rounds=1, seed=0, privacy=Privacy(epsilon=1), compute=compute)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("engine", ["auto", "loop", "batched"])
def test_the_model_of_a_run_holds_no_activations(engine: str, detached: bool) -> None:
    of = problem(Keeps(detached), 0.0)
    run = trained(of, compute=Compute(engine=engine))
    assert run.finished
    assert not hasattr(run.model, "features")
    again = of.to(torch.device("cpu"), torch.float64).model_at(of.x0.double(), {})
    assert not hasattr(again, "features")


def test_a_loss_with_a_memory_is_evaluated_without_it() -> None:
    losses = trained(problem(nn.Linear(4, 3), 0.0, CentredLoss()), compute=Compute(engine="loop")).history["test_loss"]
    assert len(losses) > 1
    assert losses[0] == losses[-1]  # x stands still


def test_frozen_parameters_that_rest_are_taken() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 3))
    run = trained(problem(model, 0.0))
    assert run.engine == "shared"
    assert isinstance(run.model, nn.Sequential)
    assert torch.equal(run.model[0].weight, model[0].weight)  # type: ignore[arg-type]
    assert torch.equal(run.model[2].weight, run.x[:12].view(3, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["auto", "loop", "batched", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_a_model_writes_to_its_parameters_does_not_move_x(engine: str) -> None:
    torch.manual_seed(0)
    of = problem(nn.Sequential(Writes(), nn.Linear(4, 3)), 100.0)
    run = trained(of, compute=Compute(engine=engine))  # x stands still
    assert torch.equal(of.x0[:4], torch.zeros(4))
    assert torch.equal(run.x, of.x0)
    assert isinstance(run.model, nn.Sequential)
    assert torch.equal(run.model[0].mean, torch.zeros(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [True, False])
def test_a_layer_that_starts_from_the_data_is_refused_with_and_without_a_folder(tmp_path: Path, kept: bool) -> None:
    """A folder makes the run look at its first records, to be known again."""
    torch.manual_seed(0)
    of = problem(nn.Sequential(FirstSeen(), nn.Linear(4, 3)), 0.0)
    with pytest.raises(UsageError, match=r"the buffer 0\.mean changes with the data"):
        trained(of, out=tmp_path / "run" if kept else None)
    assert not any(bool(buffer.any()) for buffer in of.initial_buffers().values())
