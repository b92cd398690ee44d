"""Recurrent layers by rule: all clients take the steps together, and have the loop's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

from normec import Problem
from normec.errors import UsageError
from normec.gradients.choice import choose_engine
from normec.gradients.loop import LoopEngine, record_gradients
from normec.gradients.record_clip import RecordClip
from normec.gradients.shared.engine import SharedEngine
from normec.gradients.shared.operations import OperationModel
from normec.gradients.shared.rules import ModuleModel
from normec.gradients.shared.slots import NoRule
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches

from .cases import BATCH, CLASSES, Case, apart, engines, everything, problem
from .structures import RECURRENT

CLOSE = 1e-10


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_are_the_loop_s_by_module(name: str) -> None:
    of = problem(RECURRENT[name])
    assert isinstance(of.records, ResidentRecords)
    assert of.sizes is not None
    batches = Batches(of.sizes, BATCH, 1)
    loop, shared = LoopEngine(of, batches, 1), SharedEngine(of, of.records, batches, 1, "float32", ModuleModel)
    for round, clients in ((0, None), (4, torch.tensor([0, 3, 4]))):
        assert apart(everything(shared, of, round, clients), everything(loop, of, round, clients)) < CLOSE


def test_weights_under_vmap_are_not_joined_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no memory of their own; on a GPU a layer that notices other weights joins them."""
    of = problem(RECURRENT["lstm"])
    assert isinstance(of.records, ResidentRecords)
    loop, shared = LoopEngine(of, None, 1), SharedEngine(of, of.records, None, 1, rules=OperationModel)
    expected = everything(loop, of)

    def join(_: nn.RNNBase) -> None:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", join)
    for _ in range(2):
        assert apart(everything(shared, of), expected) < CLOSE


def test_neither_are_they_where_records_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    of, clip = problem(RECURRENT["lstm"], sizes=(3, 2)), RecordClip(0.3)
    expected = everything(LoopEngine(of, None, 0, clip), of)
    joined: list[nn.RNNBase] = []

    def join(layer: nn.RNNBase) -> None:
        joined.append(layer)
        for weight in layer._flat_weights:
            weight.data_ptr()  # an error under vmap, and on a GPU this happens in every forward pass

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", join)
    found = everything(LoopEngine(of, None, 0, clip), of)
    assert apart(found, expected) < CLOSE
    assert joined == []
    assert not any("flatten_parameters" in vars(module) for module in of.model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm, two layers, both ways", "gru, sequence first"])
def test_clipped_records_are_the_loop_s(name: str) -> None:
    of, clip = problem(RECURRENT[name]), RecordClip(0.3)
    assert isinstance(of.records, ResidentRecords)
    loop = LoopEngine(of, None, 0, clip)
    shared = SharedEngine(of, of.records, None, 0, record_clip=clip)
    assert apart(everything(shared, of), everything(loop, of)) < CLOSE


def test_in_a_private_run_a_layer_with_the_sequence_first_is_not_given_all_records() -> None:
    """Its first dimension holds steps, so the records of several clients would be steps of one record."""
    records = [TensorDataset(torch.randn(6, 4, 3), torch.arange(6) % CLASSES) for _ in range(3)]

    for first, suits in ((True, True), (False, False)):
        of = Problem(nn.Sequential(nn.GRU(3, CLASSES, batch_first=first)), F.cross_entropy, records)
        assert isinstance(of.records, ResidentRecords)
        engine = SharedEngine(of, of.records, None, 0, private=True)
        assert isinstance(engine._model, ModuleModel) is suits


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        found: torch.Tensor = self.head(self.layer(packed)[1][0])
        return found


def test_packed_sequences_are_left_to_the_loop() -> None:
    records = [TensorDataset(torch.randn(6, 4, 3), torch.arange(6) % CLASSES) for _ in range(3)]
    of = Problem(Packed(), F.cross_entropy, records).to(torch.device("cpu"), torch.float64)
    loop, shared, _ = engines(of, BATCH)
    with pytest.raises(NoRule, match="packed sequences"):
        everything(shared, of)
    chosen = choose_engine("auto", of, Batches(of.sizes, BATCH, 1), 1)
    assert apart(everything(chosen, of), everything(loop, of)) < CLOSE
    with pytest.raises(UsageError, match="record at a time"):
        everything(LoopEngine(of, None, 0, RecordClip(0.3)), of)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", [*RECURRENT, "dropout of all"])
def test_the_loop_clips_the_records_of_a_recurrent_model(name: str) -> None:
    """One record after the other by plain autograd, with PyTorch's own layers."""
    case = RECURRENT[name] if name in RECURRENT else Case(WithDropout, (4, 3))
    of, clip = problem(case, sizes=(5, 4)), RecordClip(0.3)
    found = everything(LoopEngine(of, None, 0, clip), of)
    assert isinstance(of.records, ResidentRecords)
    parameters = [part for part in of.model.parameters() if part.requires_grad]
    inputs = of.prepared(of.records.inputs, torch.float64)
    for client, rows in enumerate(of.records.rows):
        total = torch.zeros_like(of.x0)
        for row in rows:
            loss = F.cross_entropy(of.model(inputs[row][None]), of.records.targets[row][None])
            grad = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
            total += grad * min(1.0, 0.3 / float(grad.norm()))
        assert float((found.grads[client] - total / len(rows)).norm()) < CLOSE


class WithDropout(nn.Module):
    """Its second layer sees zeros, which needs no random numbers."""

    def __init__(self, dropout: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.LSTM(3, 5, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(x)[0][:, -1])
        return found


def test_records_have_masks_of_their_own_between_layers() -> None:
    """Equal records, with the same state of the generator, have other gradients only because of their masks."""
    records = [TensorDataset(torch.ones(6, 4, 3), torch.zeros(6, dtype=torch.int64))]
    for dropout, alike in ((0.0, True), (0.5, False)):
        of = Problem(WithDropout(dropout), F.cross_entropy, records)
        grads, _ = record_gradients(of, of.x0, torch.ones(6, 4, 3), torch.zeros(6, dtype=torch.int64))
        assert bool((grads - grads[0]).norm() < 1e-6) is alike


def test_an_lstm_with_projections_is_refused_where_records_are_clipped() -> None:
    records = [TensorDataset(torch.randn(6, 4, 3), torch.arange(6) % CLASSES) for _ in range(2)]
    of = Problem(Last(nn.LSTM(3, CLASSES + 1, proj_size=CLASSES, batch_first=True)), F.cross_entropy, records)
    with pytest.raises(UsageError, match="proj_size"):
        everything(LoopEngine(of, None, 0, RecordClip(0.3)), of)


class Last(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)[0][:, -1]
        return found
