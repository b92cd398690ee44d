"""Implementations do the work that they claim to do."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import normec
from benchmarks.speed import floor, hand_written, workloads
from benchmarks.speed.clock import Clock
from benchmarks.speed.implementations import Implementation, implementations_of
from benchmarks.speed.workloads import ALPHA, BETA, LR, WORKLOADS, Case, Workload, WorkloadData
from normec.gradients.choice import ENGINES

TINY = Workload("mlp", (6,), 3, clients=(4,), records=8, pool=100, batch=8)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Case:
    """Clients that use all their records in every round, so that the order of the records does not matter."""
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", TINY)
    return Case("tiny", 4)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_hand_written_loop_is_the_method(tiny: Case) -> None:
    data, clock = WorkloadData(tiny), Clock(5, 1e9)
    problem = data.problem()
    hand_written.run(data, clock)
    run = normec.train(problem, normec.NormEC(ALPHA, BETA), lr=LR, rounds=clock.max_rounds, batch_size=8)
    assert not torch.equal(run.x, problem.x0)
    torch.testing.assert_close(flat(data.built.model), run.x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", ["eager", "kept", "one-thread"])
def test_the_floor_is_a_step_of_sgd_on_all_records(tiny: Case, variant: str) -> None:
    data, clock = WorkloadData(tiny), Clock(1, 1e9)
    threads = torch.get_num_threads()
    inputs, targets = data.batch()
    assert len(inputs) == tiny.drawn * TINY.batch
    reference = copy.deepcopy(data.built.model)
    for _ in range(clock.max_rounds):
        reference.zero_grad()
        data.built.loss(reference(inputs), targets).backward()
        with torch.no_grad():
            for p in reference.parameters():
                p -= LR * p.grad
    floor.step(data, clock, variant)
    torch.set_num_threads(threads)
    torch.testing.assert_close(flat(data.built.model), flat(reference))


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_our_engine_is_measured_in_whole_rounds(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is that of the benchmark, on batches of four records: their number does not change what runs."""
    if workload == "bert":
        pytest.importorskip("transformers")
    monkeypatch.setitem(workloads.WORKLOADS, workload, replace(WORKLOADS[workload], records=8, batch=4))
    data, clock = Implementation("engine", "loop").data(Case(workload, 3)), Clock(2, 1e9)
    Implementation("engine", "loop").run(data, clock)
    assert len(clock.times) == 2
    assert clock.first_round_end is not None


def test_clipping_by_record_is_measured_on_records_that_occur_once(tiny: Case) -> None:
    data, clock = Implementation("record").data(tiny), Clock(2, 1e9)
    Implementation("record").run(data, clock)
    assert len(clock.times) == 2


def test_records_are_the_same_in_every_process() -> None:
    first, second = WorkloadData(Case("logistic", 7)), WorkloadData(Case("logistic", 7))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.rows, second.rows)
    assert torch.equal(flat(first.built.model), flat(second.built.model))


def test_every_engine_is_in_the_table_and_the_per_record_case_stands_apart() -> None:
    found = implementations_of(Case("mlp", 3), peers=["pfl", "opacus"])
    names = [implementation.name for implementation in found]
    assert len(set(names)) == len(names)
    ours = {name.removeprefix("normec, ") for name in names if name.startswith("normec, ")} - {"per record"}
    assert ours == set(ENGINES) - {"auto", "batched", "linear"}
    assert "normec, linear" in [one.name for one in implementations_of(Case("logistic", 3))]
    assert "normec, auto" in [one.name for one in implementations_of(Case("mlp", 3), engines=["auto"])]
    assert [c.name for c in found if c.per_record] == ["normec, per record", "opacus, per record"]


def test_on_a_gpu_the_floors_are_graphs_unless_others_are_asked_for() -> None:
    def floors(asked: list[str] | None, device: str) -> list[str]:
        found = implementations_of(Case("resnet20", 2, device), [], [], asked)
        return [one.choice for one in found if one.kind == "floor"]

    assert floors(None, "cuda") == ["graphed", "compiled-graphed"]
    assert floors(["eager", "autotuned-graphed"], "cuda") == ["eager", "autotuned-graphed"]
    assert floors(None, "cpu") == ["eager", "kept", "channels-last", "compiled"]


def test_what_cannot_be_measured_is_known_before_a_process_is_started() -> None:
    half, whole = (Case("mlp", 2, precision=precision) for precision in ("bf16", "float32"))  # type: ignore[arg-type]
    for name in ("jax", "opacus"):
        peer = next(one for one in implementations_of(half, [], [name], []) if one.kind == "peer")
        assert peer.misfit(half)
        assert peer.misfit(whole) is None
    many = Case("logistic", 10_000)
    records = next(one for one in implementations_of(many, [], ["opacus"], []) if one.kind == "record")
    assert "not enough records" in str(records.misfit(many))
    assert records.misfit(whole) is None


def test_jax_computes_the_same_gradients() -> None:
    jax = pytest.importorskip("jax")
    from benchmarks.speed.peers import jax as peer

    jax.config.update("jax_default_matmul_precision", "highest")
    for workload in (name for name, spec in WORKLOADS.items() if "jax" in spec.peers):
        data = WorkloadData(Case(workload, 2))
        inputs, targets = data.client_batch(0)
        model = data.built.model.train()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn(p.shape))
        data.built.loss(model(inputs), targets).backward()
        wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        arguments = inputs.numpy(), targets.numpy(), data.case, peer.shapes(data)
        found = jax.grad(peer.loss)(flat(model).numpy(), *arguments)
        assert float((torch.tensor(found.tolist()) - wanted).norm() / wanted.norm()) < 1e-2
