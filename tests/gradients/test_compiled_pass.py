"""The compiled pass gives the numbers of the shared pass: traced on every problem, compiled on one of each kind."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Problem
from normec.gradients.record_clip import RecordClip
from normec.gradients.shared import record_sums
from normec.gradients.shared.compiled import Compilation
from normec.gradients.shared.engine import SharedEngine
from normec.gradients.shared.operations import OperationModel
from normec.gradients.shared.rules import ModuleModel
from normec.gradients.shared.slots import NoRule
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches

from .cases import BATCH, CASES, CLASSES, apart, everything, problem
from .structures import STRUCTURES

MANY = {"resnet20", "resnet20-gn"}  # the same operations as in other cases, many times
DRAWN = torch.tensor([0, 1, 4])


def passes(
    of: Problem,
    compiling: bool = False,
    batch: int | None = BATCH,
    drawn: int | None = None,
    private: bool = False,
    rules: type[OperationModel] | None = None,
    every: bool = False,
) -> tuple[SharedEngine, SharedEngine]:
    assert isinstance(of.records, ResidentRecords)
    assert of.sizes is not None
    batches = Batches(of.sizes, batch, 1) if batch is not None else None
    given = of, of.records, batches, 1, "float32", rules
    shared = SharedEngine(*given, private=private)  # type: ignore[arg-type]
    compilation = Compilation(drawn, compiling, every)
    return shared, SharedEngine(*given, private=private, compilation=compilation)  # type: ignore[arg-type]


def traced_shapes(engine: SharedEngine) -> set[tuple[int, ...]]:
    assert engine._compiled is not None
    return engine._compiled.traced


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize("name", [*(name for name in CASES if name not in MANY), *STRUCTURES])
def test_the_traced_pass_has_the_bits_of_the_shared_pass(name: str) -> None:
    of = problem(name if name in CASES else STRUCTURES[name])
    shared, traced = passes(of, rules=None if name in CASES else OperationModel)
    for round, clients in ((0, None), (3, None), (4, torch.tensor([0, 3, 4]))):
        found, expected = everything(traced, of, round, clients), everything(shared, of, round, clients)
        assert torch.equal(found.grads, expected.grads)
        assert torch.equal(found.losses, expected.losses)
        assert all(torch.equal(found.buffers[key], rows) for key, rows in expected.buffers.items())
    assert traced_shapes(traced)


@pytest.mark.slow
def test_a_graph_follows_x() -> None:
    of = problem("small")
    shared, traced = passes(of)
    for round in range(3):
        assert apart(everything(traced, of, round), everything(shared, of, round)) == 0
        of.x0 += 0.1


@pytest.mark.slow
def test_rounds_of_usual_shapes_alone_are_traced() -> None:
    """Clients 0, 1, 2 and 4 have a whole batch; client 3 has three records."""
    of = problem("small", sizes=(9, 9, 9, 9, 9))
    _, traced = passes(of, drawn=3, every=True)
    everything(traced, of)
    assert traced_shapes(traced) == {(5, BATCH)}
    for drawn, expected in ((None, {(5, BATCH)}), (3, {(3, BATCH)}), (0, set())):
        _, traced = passes(of, drawn=drawn)
        everything(traced, of)
        everything(traced, of, 1, DRAWN)
        everything(traced, of, 2, torch.tensor([1, 2]))
        everything(traced, of, full=True)
        assert traced_shapes(traced) == expected


def test_where_clients_differ_in_size_drawn_ones_are_not_compiled() -> None:
    of = problem("small")
    _, traced = passes(of, drawn=3)
    everything(traced, of, 1, DRAWN)
    assert not traced_shapes(traced)


@pytest.mark.slow
def test_smaller_blocks_after_a_lack_of_memory_are_traced_again() -> None:
    of = problem("small", sizes=(8,) * 4)
    shared, traced = passes(of, batch=None)
    traced._block = 64
    assert traced.shrink()
    everything(traced, of)
    assert traced_shapes(traced) == {(4, 8)}
    assert traced.shrink()
    assert apart(everything(traced, of), everything(shared, of)) < 1e-12
    assert traced_shapes(traced) == {(2, 8)}


class Branches(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        return found if float(self.weight.abs().max()) > 0 else -found


class Stores(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.seen = input
        return super().forward(input)


class LastTargets(nn.Module):
    """A loss that shows what it saw last."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.seen = targets
        return F.cross_entropy(outputs, targets)


def test_a_loss_that_shows_what_it_saw_is_not_traced() -> None:
    """The graph would not show it what later rounds see."""
    clients = [TensorDataset(torch.randn(6, 6), torch.arange(6) % CLASSES) for _ in range(3)]
    _, traced = passes(of := Problem(nn.Linear(6, CLASSES), LastTargets(), clients))
    with pytest.raises(NoRule):
        everything(traced, of)


@pytest.mark.parametrize("make", [Branches, Stores])
def test_what_cannot_be_traced_is_refused(make: Callable[[int, int], nn.Module]) -> None:
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(6, 6), torch.arange(6) % CLASSES) for _ in range(3)]
    of = Problem(make(6, CLASSES), F.cross_entropy, clients)
    _, traced = passes(of)
    with pytest.raises(NoRule):
        everything(traced, of)


LENGTHS: list[int] = []  # a global variable, because what code of the user's own keeps elsewhere is undone


class Looks(nn.Linear):
    """Counts the records of every call."""

    def forward(self, input: Tensor) -> Tensor:
        LENGTHS.append(len(input))
        return super().forward(input)


def test_in_a_private_run_code_of_the_user_sees_one_client_at_a_time() -> None:
    clients = [TensorDataset(torch.randn(6, 6), torch.arange(6) % CLASSES) for _ in range(3)]
    of = Problem(Looks(6, CLASSES), F.cross_entropy, clients)
    shared, traced = passes(of, private=True)
    assert isinstance(traced._model, OperationModel)
    LENGTHS.clear()
    assert apart(everything(traced, of), everything(shared, of)) == 0
    assert set(LENGTHS) == {BATCH}


def _mean_of_known(outputs: Tensor, targets: Tensor) -> Tensor:
    """Its backward pass divides by the number of known targets."""
    return F.cross_entropy(outputs, targets.clamp_min(0), reduction="none")[targets >= 0].mean()


def _by_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets.clamp_min(0)) / len(torch.unique(targets))


def _by_parts(outputs: Tensor, targets: Tensor) -> Tensor:
    """The code behind `tensor_split` reads where to split, without asking for an item."""
    first, last = torch.tensor_split(outputs, (targets >= 0).sum()[None])
    return (first.square().sum() + 3 * last.square().sum()) / outputs.numel()


@pytest.mark.parametrize(("loss", "suits"), [(_mean_of_known, True), (_by_classes, False), (_by_parts, False)])
def test_a_graph_keeps_no_number_that_was_read_in_the_data(loss: Callable[..., Tensor], suits: bool) -> None:
    """The graph is made in a round in which two clients have one target that is known, and used for other clients."""
    torch.manual_seed(0)
    targets = [torch.arange(6) % CLASSES - 4 * (torch.arange(6) >= known) for known in (1, 1, 4, 5)]
    clients = [TensorDataset(torch.randn(6, 6), target) for target in targets]
    of = Problem(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)), loss, clients)
    shared, traced = passes(of, batch=None, drawn=2, private=True)
    if not suits:
        with pytest.raises(NoRule, match="traced"):
            everything(traced, of, 0, torch.tensor([0, 1]))
        return
    for drawn in ([0, 1], [2, 3], [0, 3]):
        found, expected = (everything(engine, of, 0, torch.tensor(drawn)) for engine in (traced, shared))
        assert apart(found, expected) == 0
    assert traced_shapes(traced) == {(2, 6)}


needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="there is no compiler here"
)


@needs_compiler
@pytest.mark.slow
def test_a_compiled_pass_has_the_numbers_of_the_shared_pass_and_the_same_bits_again() -> None:
    of = problem("text", sizes=(9, 9))  # all batches have one shape: each takes half a minute to compile
    shared, compiled = passes(of, compiling=True)
    assert isinstance(compiled._model, ModuleModel)
    found = everything(compiled, of)
    assert compiled.name == "compiled"
    assert apart(found, everything(shared, of)) < 1e-12
    again = everything(passes(of, compiling=True)[1], of)
    assert torch.equal(found.grads, again.grads)
    shared, compiled = clipped_passes(problem("mlp", sizes=(16, 16)), RecordClip(0.3), compiling=True)
    found = everything(compiled, compiled._problem)
    assert compiled.name == "compiled"
    assert apart(found, everything(shared, shared._problem)) < 1e-12
    assert not torch.are_deterministic_algorithms_enabled()


def test_where_the_compiler_fails_the_pass_runs_without_it(caplog: pytest.LogCaptureFixture) -> None:
    of = problem("small")
    shared, compiled = passes(of, compiling=True)
    with (
        mock.patch("torch._inductor.compile", side_effect=RuntimeError("no compiler")),
        caplog.at_level(logging.WARNING, "normec"),
    ):
        assert apart(everything(compiled, of), everything(shared, of)) == 0
    assert "not compiled" in caplog.text
    assert "no compiler" not in caplog.text
    assert compiled.name == "shared"
    assert compiled.variant != shared.variant


def clipped_passes(of: Problem, clip: RecordClip, compiling: bool = False) -> tuple[SharedEngine, SharedEngine]:
    assert isinstance(of.records, ResidentRecords)
    given = of, of.records, None, 1, "float32"
    shared = SharedEngine(*given, private=True, record_clip=clip)  # type: ignore[arg-type]
    compilation = Compilation(None, compiling)
    return shared, SharedEngine(*given, private=True, record_clip=clip, compilation=compilation)  # type: ignore[arg-type]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("held", [2**24, 5000])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt with tied weights", "lora"])
def test_the_traced_pass_clips_records_with_the_bits_of_the_shared_pass(
    name: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tables of all gradients, and with little memory for them."""
    monkeypatch.setitem(record_sums._HELD, "cpu", held)
    of = problem(CASES[name] if name in CASES else STRUCTURES[name], sizes=(16, 16, 16))
    shared, traced = clipped_passes(of, RecordClip(0.3) if held < 2**24 else RecordClip("auto", by_layer=True))
    for round in range(2):
        found, expected = everything(traced, of, round), everything(shared, of, round)
        assert torch.equal(found.grads, expected.grads)
        assert torch.equal(found.losses, expected.losses)
        of.x0 += 0.1
    smaller = name == "convolutions" and held < 2**24  # a block has at most as many clients as fit into the memory
    assert traced_shapes(traced) == ({(1, 16), (2, 16)} if smaller else {(3, 16)})


def test_batches_that_are_filled_up_are_clipped_without_a_trace() -> None:
    of = problem("mlp", sizes=(16, 16, 15))
    shared, traced = clipped_passes(of, RecordClip(0.3))
    assert apart(everything(traced, of), everything(shared, of)) == 0
    assert traced_shapes(traced) == {(2, 16)}
