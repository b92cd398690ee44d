"""Engines in the precisions of a GPU against the loop in float64 on the CPU; the device is an argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normec import Compute, Logging, Problem, train
from normec.gradients.loop import LoopEngine
from normec.gradients.precision import Precision, products
from normec.gradients.record_clip import RecordClip
from normec.gradients.shared.compiled import Compilation
from normec.gradients.shared.engine import SharedEngine
from normec.gradients.shared.operations import OperationModel
from normec.gradients.shared.rules import ModuleModel
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches

from .cases import BATCH, CASES, METHODS, Found, engines, everything, problem
from .nearness import near
from .structures import RECURRENT, STRUCTURES


def alike(found: Found, expected: Found, clients: Tensor | None, close: float, kinks: bool, what: object) -> None:
    rows = torch.arange(len(expected.losses)) if clients is None else clients
    errors = (found.grads.cpu().double() - expected.grads)[rows].norm(dim=1) / expected.grads[rows].norm(dim=1)
    error = float(errors.median() if kinks else errors.max())
    assert error < close, f"{what}: gradients off by {error:.1e} of their norm"
    near(found.losses.cpu(), expected.losses, close, what)
    for key, values in expected.buffers.items():
        near(found.buffers[key].cpu(), values, close, (what, key))


def check_every_model(device: str) -> None:
    """Gradients, losses and buffers of all engines in float32."""
    for name, case in CASES.items():
        of, fine = problem(name, device, torch.float32), problem(name)
        reference, *_ = engines(fine, BATCH)
        close = 5e-3 if name.startswith("resnet") else 1e-4
        with products("float32"):
            for engine in engines(of, BATCH):
                for round, clients in ((3, None), (4, torch.tensor([0, 3, 4]))):
                    found, expected = (
                        everything(engine, of, round, clients),
                        everything(reference, fine, round, clients),
                    )
                    alike(found, expected, clients, close, case.kinks, (name, engine.name, round))


def check_precisions(device: str) -> None:
    """In tf32 and bf16 the shared pass is about as near to float64 as the loop."""
    for name in ("resnet20", "resnet20-gn", "convolutions", "norms"):
        fine = problem(name)
        expected = everything(engines(fine, BATCH)[0], fine).grads
        for precision in ("tf32", "bf16"):
            of = problem(name, device, torch.float32)
            with products(precision):  # type: ignore[arg-type]
                loop, shared, _ = engines(of, BATCH, precision)  # type: ignore[arg-type]
                away = [
                    (everything(engine, of).grads.cpu().double() - expected).norm(dim=1).median()
                    for engine in (shared, loop)
                ]
            size = expected.norm(dim=1).median()
            # Small batches may leave the loop in full precision; a rounding that moves a ReLU over its kink shows here.
            most = {"tf32": 0.1, "bf16": 0.5}[precision]
            assert away[0] < 3 * away[1] + most * size, (name, precision, [float(error / size) for error in away])


def check_structures(device: str) -> None:
    """Rules by operation in float32, with the kernels of a GPU, recurrent layers too."""
    for name, case in STRUCTURES.items():
        of, fine = problem(case, device, torch.float32), problem(case)
        expected = everything(engines(fine, BATCH)[0], fine, 3)
        with products("float32"):
            for rules in (OperationModel, ModuleModel) if name in RECURRENT else (OperationModel,):
                alike(everything(shared(of, rules), of, 3), expected, None, 1e-4, False, (name, rules.__name__))


def shared(
    of: Problem, rules: type[OperationModel | ModuleModel], precision: Precision = "float32", compiled: bool = False
) -> SharedEngine:
    assert isinstance(of.records, ResidentRecords)
    assert of.sizes is not None
    compilation = Compilation() if compiled else None
    batches = Batches(of.sizes, BATCH, 1)
    return SharedEngine(of, of.records, batches, 1, precision, rules, compilation=compilation)


def check_compiled_pass(device: str) -> None:
    """A compiled pass is as near to float64 as the loop, replayed or not, and has the same bits in a second engine."""
    for name in ("gpt", "vit"):
        fine = problem(STRUCTURES[name], sizes=(9,) * 5)
        reference, *_ = engines(fine, BATCH)
        for precision, close in (("float32", 1e-4), ("bf16", 0.1)):
            of = problem(STRUCTURES[name], device, torch.float32, sizes=(9,) * 5)
            with products(precision):  # type: ignore[arg-type]
                first, second = (shared(of, OperationModel, precision, True) for _ in range(2))  # type: ignore[arg-type]
                for round in range(6):
                    found, again = everything(first, of, round), everything(second, of, round)
                    assert first.name == "compiled"
                    assert torch.equal(found.grads, again.grads), (name, precision, round)
                    alike(found, everything(reference, fine, round), None, close, False, (name, precision, round))


def check_compiled_clips(device: str) -> None:
    """The compiled pass clips every record as the loop does in float64, with the same bits in a second engine."""
    clip = RecordClip(0.3)
    for name in ("gpt", "vit"):
        fine = problem(STRUCTURES[name], sizes=(16,) * 3)
        expected = everything(LoopEngine(fine, None, 1, clip, "float32"), fine)
        for precision, close in (("float32", 1e-4), ("tf32", 1e-2), ("bf16", 0.1)):
            of = problem(STRUCTURES[name], device, torch.float32, sizes=(16,) * 3)
            assert isinstance(of.records, ResidentRecords)
            with products(precision):  # type: ignore[arg-type]
                first, second = (
                    SharedEngine(
                        of,
                        of.records,
                        None,
                        1,
                        precision,
                        record_clip=clip,
                        compilation=Compilation(),  # type: ignore[arg-type]
                    )
                    for _ in range(2)
                )
                for _ in range(4):
                    found = everything(first, of)
                    assert first.name == "compiled"
                    assert torch.equal(found.grads, everything(second, of).grads), (name, precision)
                alike(found, expected, None, close, False, (name, precision))


def check_every_method(device: str) -> None:
    """Twenty rounds of every method under every engine."""
    options: dict[str, Any] = {"lr": 0.2, "rounds": 20, "batch_size": BATCH, "seed": 3, "logging": Logging(every=10**6)}
    for name, method in METHODS.items():
        expected = train(problem("small"), method, compute=Compute(engine="loop"), **options)
        moved = float((expected.x - problem("small").x0).norm())
        for engine in ("loop", "batched", "shared", "recorded"):
            of = problem("small", device, torch.float32)
            run = train(of, method, compute=Compute(engine=engine, precision="float32"), **options)
            assert run.engine == engine
            error = float((run.x.cpu().double() - expected.x).norm()) / moved
            # Top-k takes another one of two coordinates of almost equal size.
            assert error < (5e-2 if name == "ef21-top-k" else 1e-3), (name, engine, error)
            for key, rows in expected.state.buffers.items():
                near(run.state.buffers[key].cpu(), rows, 1e-2, (name, engine, key))


CHECKS = (
    check_every_model,
    check_precisions,
    check_structures,
    check_compiled_pass,
    check_compiled_clips,
    check_every_method,
)
