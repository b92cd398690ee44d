"""On a GPU: every engine against the loop in float64 on the CPU, graphs, syncs, bits, memory.

Without pytest, from the root of the repository, all checks or those that are named:

    PYTHONPATH=src python -m tests.gradients.test_gpu [check_graphs …]
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import (
    AdaptiveClip,
    Callback,
    Clip21,
    Compute,
    ErrorFeedback,
    FixedSize,
    Logging,
    Memory,
    MomentumNormEC,
    NormEC,
    Privacy,
    Problem,
    Run,
    SmoothedNorm,
    UsageError,
    models,
    train,
)
from normec.data.augment import CropFlip, Normalize
from normec.gradients.choice import choose_engine
from normec.gradients.engine import Block
from normec.gradients.loop import LoopEngine
from normec.gradients.precision import Precision, products
from normec.gradients.record_clip import RecordClip
from normec.gradients.recorded import RecordedEngine
from normec.sampling.batches import Batches, PoissonBatches
from normec.training import fused_update as update
from normec.training.options import Options
from normec.training.train import prepare, ready

from ..support import own_methods
from ..support.forms import form
from ..support.runs import StopAt, same
from ..training import graphed_round_checks
from . import engine_checks, kernel_checks
from .cases import BATCH, METHODS, engines, everything, problem
from .nearness import near

DEVICE = "cuda"
EQUAL_SIZES = (9,) * 6
QUIET: dict[str, Any] = {"logging": Logging(every=10**6, evaluate_every=10**6)}


@contextmanager
def lines() -> Iterator[list[str]]:
    """What the logger "normec" says meanwhile."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("normec")
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)


def images(model: str, clients: int, records: int) -> Problem:
    """Coloured pixels, cropped and flipped."""
    generator = torch.Generator().manual_seed(0)
    made = models.build(model, (3, 32, 32), 10)
    parts = []
    for _ in range(clients):
        pixels = torch.randint(0, 256, (records, 3, 32, 32), dtype=torch.uint8, generator=generator)
        parts.append(TensorDataset(pixels, torch.randint(0, 10, (records,), generator=generator)))
    normalise = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    return Problem(made.model, made.loss, parts, augment=CropFlip(), transform=normalise).to(torch.device(DEVICE))


def replay(name: str, sampled: bool) -> None:
    """Ten rounds replayed are ten rounds launched one by one, to the bit."""
    drawn = [torch.tensor(who) for who in ([0, 2, 5], [1, 3, 4], [0, 1, 5], [2, 4, 5], [0, 3, 5])]
    of = problem(name, DEVICE, torch.float32, EQUAL_SIZES)
    with products("tf32"):
        (_, replayed, _), (_, eager, _) = engines(of, BATCH, "tf32"), engines(of, BATCH, "tf32")
        eager._graphs = None
        x, buffers, others = of.x0.clone(), of.initial_buffers(), of.initial_buffers()
        for round in range(10):
            clients = drawn[round % 5] if sampled else None
            (one,), (other,) = replayed.blocks(x, buffers, round, clients), eager.blocks(x, others, round, clients)
            assert torch.equal(one.grads, other.grads), (name, sampled, round)
            assert torch.equal(one.losses, other.losses), (name, sampled, round)
            for key, rows in buffers.items():
                assert torch.equal(rows, others[key]), (name, sampled, round, key)
            x -= 0.01 * other.grads.mean(0)
        assert replayed._graphs is not None
        assert replayed._graphs._kept, f"{name}: nothing was recorded"


def check_graphs() -> None:
    for name in ("resnet20", "resnet20-gn", "augmented pixels", "text", "penalty"):
        for sampled in (False, True):
            replay(name, sampled)


def check_graphed_rounds() -> None:
    """Replayed rounds have the bits of rounds step by step; an operator of the user's own is not recorded."""
    for name in graphed_round_checks.CASES:
        graphed_round_checks.compare(name, DEVICE)
    graphed_round_checks.compare("normec", DEVICE, "batchnorm")
    graphed_round_checks.check_blame(DEVICE)
    graphed_round_checks.check_gradients_that_move(DEVICE)

    class Waits(SmoothedNorm):
        def scale(self, norm: Tensor) -> Tensor:
            return super().scale(norm) * (1.0 if float(norm.max()) < 1e30 else 0.5)

    of = problem("norms", DEVICE, torch.float32, EQUAL_SIZES)
    options: dict[str, Any] = {
        "lr": 0.1,
        "rounds": 12,
        "batch_size": BATCH,
        "compute": Compute(engine="shared"),
        **QUIET,
    }
    under_way = prepare(of, ErrorFeedback(Waits(0.1), 0.3), Options(**options))
    assert not under_way.graphed.able
    under_way.graphed.able = True  # one that waits would not be recorded even so
    with lines() as said, ready("tf32"):
        waiting = under_way.run()
    assert said == ["no CUDA graph for the update: it waits for the device"], said
    assert torch.equal(waiting.x, train(of, ErrorFeedback(SmoothedNorm(0.1), 0.3), **options).x)


class NoWaiting(Callback):
    """From round 10 to 40 every wait for the device is an error."""

    def round(self, round: int) -> None:
        if round in (10, 40):
            torch.cuda.set_sync_debug_mode("error" if round == 10 else "default")


def unwaiting(of: Problem, method: Any, engine: str, precision: Precision = "tf32", **options: Any) -> None:
    options = {"lr": 0.05, "rounds": 45, "batch_size": BATCH, "callbacks": [NoWaiting()], **QUIET} | options
    try:
        run = train(of, method, compute=Compute(engine=engine, precision=precision), **options)
        assert run.engine == engine
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_hidden_sync() -> None:
    privacy = Privacy(epsilon=8, delta=1e-5, unit="client", relation="zero-out", trust="secure-sum", noise="seeded")
    batch, group = (problem(name, DEVICE, torch.float32, EQUAL_SIZES) for name in ("resnet20", "resnet20-gn"))
    unwaiting(batch, NormEC(0.1, 0.3), "shared")
    unwaiting(batch, Clip21(0.3, decay=0.1), "shared", precision="bf16", memory=Memory(dtype=torch.bfloat16))
    unwaiting(batch, NormEC(0.1, 0.3), "shared", participation=FixedSize(3))
    unwaiting(group, NormEC(0.1, 0.3), "shared", privacy=privacy)
    unwaiting(group, METHODS["dpsgd-clip"], "shared", privacy=privacy, precision="bf16")
    unwaiting(images("resnet20-gn", 4, 40), NormEC(0.1, 0.3), "shared", batch_size=8)  # augmented


def check_no_hidden_sync_in_the_batched_engine() -> None:
    unwaiting(problem("small", DEVICE, torch.float32, EQUAL_SIZES), NormEC(0.1, 0.3), "batched")


def check_reruns() -> None:
    """Thirty rounds of ResNet20 twice: the same bits."""
    kinds = (("resnet20", "bf16", None), ("resnet20", "bf16", torch.bfloat16), ("resnet20-gn", "tf32", None))
    for model, precision, dtype in kinds:
        options: dict[str, Any] = {
            "compute": Compute(precision=precision, engine="shared"),
            "memory": Memory(dtype=dtype),
            "logging": Logging(every=10),
        }
        runs = [
            train(images(model, 10, 64), NormEC(0.01, 0.1), lr=0.1, rounds=30, batch_size=32, **options)
            for _ in range(2)
        ]
        assert runs[0].engine == "shared"
        same(*runs)


def check_resume() -> None:
    """Stopped under one engine, gone on under another: in float64 to its rounding; under the same one to the bit."""
    options: dict[str, Any] = {"lr": 0.2, "rounds": 20, "batch_size": BATCH, "seed": 3, "logging": Logging(every=1)}

    def run(engine: str, dtype: torch.dtype, **more: Any) -> Run:
        return train(
            problem("small", DEVICE, dtype), NormEC(0.1, 0.3), compute=Compute(engine=engine), **options, **more
        )

    with tempfile.TemporaryDirectory() as folder:
        alone = run("loop", torch.float64)
        for number, (before, after) in enumerate(permutations(("loop", "batched", "shared"), 2)):
            out = Path(folder) / str(number)
            assert run(before, torch.float64, out=out, callbacks=[StopAt(7)]).state.round == 7
            on = run(after, torch.float64, out=out)
            assert on.engine == after
            near(on.x, alone.x, 1e-9, (before, after, "x"))
            near(on.state.memory, alone.state.memory, 1e-9, (before, after, "memory"))
            for key, rows in alone.state.buffers.items():
                near(on.state.buffers[key], rows, 1e-9, (before, after, key))
        run("shared", torch.float32, out=Path(folder) / "same", callbacks=[StopAt(7)])
        same(run("shared", torch.float32, out=Path(folder) / "same"), run("shared", torch.float32))


def check_homes() -> None:
    """Memories on the host or on disk: the bits of those on the device, whoever is drawn."""
    for dtype in (torch.float32, torch.bfloat16):
        for participation in (None, FixedSize(3)):
            options = {"lr": 0.1, "rounds": 12, "batch_size": BATCH, "participation": participation, **QUIET}
            runs = [
                train(
                    problem("norms", DEVICE, torch.float32, EQUAL_SIZES),
                    NormEC(0.1, 0.3),
                    compute=Compute(engine="shared"),
                    memory=Memory(dtype=dtype, home=home),  # type: ignore[arg-type]
                    **options,  # type: ignore[arg-type]
                )
                for home in ("device", "host", "disk")
            ]
            for run in runs[1:]:
                assert run.state.memory.device.type == "cpu"
                assert torch.equal(run.x, runs[0].x), (dtype, participation)
                assert torch.equal(run.state.memory, runs[0].state.memory.cpu()), (dtype, participation)


class Looks(nn.Module):
    """`item` in the forward pass, or a wait inside a function: neither can be recorded."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(6, 8), nn.Linear(8, 4), how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.how == "item":
            x = x * (1 + abs(x.mean().item()))
        else:
            rows, columns = (x > 0).nonzero(as_tuple=True)
            x = torch.zeros_like(x).index_put((rows, columns), x[rows, columns])
        found: Tensor = self.last(x)
        return found


def check_models_that_wait() -> None:
    """They train, with one line, to the loop's numbers; and what follows in the process is not hurt by it."""
    for how, words in (("item", "reads values"), ("nonzero", "no CUDA graph")):
        torch.manual_seed(0)
        clients = [TensorDataset(torch.randn(9, 6), torch.arange(9) % 4) for _ in range(5)]
        of = Problem(Looks(how), F.cross_entropy, clients)
        options: dict[str, Any] = {"lr": 0.1, "rounds": 12, "batch_size": 4, "device": DEVICE}
        loop, shared = (Compute(engine=engine, precision="float32") for engine in ("loop", "shared"))
        with lines() as said:
            run = train(of, NormEC(0.1, 0.3), compute=shared, **options, **QUIET)
        assert len(said) == 1, said
        assert words in said[0], said
        assert run.engine == ("loop" if how == "item" else "shared")
        near(run.x, train(of, NormEC(0.1, 0.3), compute=loop, **options, **QUIET).x, 1e-4, how)
    dropping = Problem(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4)), F.cross_entropy, clients)
    train(dropping, NormEC(0.1, 0.3), compute=loop, **options)
    replay("small", sampled=False)


def check_records_on_the_device() -> None:
    """Records may be on the device before the model: what is wrong with a loss is found there too."""
    records = TensorDataset(torch.randn(9, 6, device=DEVICE), torch.arange(9, device=DEVICE) % 4)
    said = ""
    try:
        Problem(nn.Linear(6, 4), partial(F.cross_entropy, reduction="sum"), [records])
    except UsageError as error:
        said = str(error)
    assert "mean" in said, said
    of = Problem(nn.Linear(6, 4), F.cross_entropy, [records])
    of.refuse_misfit("the model or its loss")
    train(of, NormEC(0.1, 0.3), lr=0.1, rounds=2, device=DEVICE, **QUIET)


class Drops(nn.Module):
    """Dropout, statistics, and a parameter without a rule; `how` it does something else from one call to the next."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.norm(self.first(x))) * self.scale, 0.3, self.training)
        if self.how == "counts":
            self.calls += 1
        if self.how == "draws":
            x = x * (1 + random.random())
        if self.how == "waits":
            x = x * (1 + float(x.sum() > 0))
        found: Tensor = self.last(x)
        return found


def check_recorded() -> None:
    """Recorded rounds are the loop's to the bit, random numbers and statistics too, whoever takes part."""
    sizes = (9,) * 40  # two blocks
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        clients = [TensorDataset(torch.randn(size, 6), torch.arange(size) % 4) for size in sizes]
        of = Problem(Drops(), F.cross_entropy, clients).to(torch.device(DEVICE), dtype)
        assert of.sizes is not None
        batches = Batches(of.sizes, 4, 1)
        with products("float32"):
            mine, loop = RecordedEngine(of, of.records, batches, 3), LoopEngine(of, batches, 3)  # type: ignore[arg-type]
            x, buffers, others = of.x0.clone(), of.initial_buffers(), of.initial_buffers()
            for round in range(12):
                who = None if round < 7 else torch.arange(round, 40, 5)
                found, expected = torch.zeros(2, 40, len(x), device=DEVICE, dtype=dtype)
                for table, engine, kept in ((found, mine, buffers), (expected, loop, others)):
                    for block in engine.blocks(x, kept, round, who):  # type: ignore[attr-defined]
                        table[block.rows] = block.grads
                assert torch.equal(found, expected), (dtype, round)
                assert all(torch.equal(rows, others[name]) for name, rows in buffers.items()), (dtype, round)
                x -= 0.1 * expected.mean(0)
            assert mine._graphs is not None
            assert len(mine._graphs._kept) == 2


_GATES: dict[torch.dtype, Tensor] = {}


class GatesInOneTable(nn.Module):
    """A network that writes its gates to memory outside of itself, which all copies of it share."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(64, 4096), nn.Linear(4096, 64), kept

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        gates = _GATES[x.dtype] if self.kept else torch.empty_like(hidden.detach())
        with torch.no_grad():
            gates[: len(x)].copy_(hidden > 0)
        found: Tensor = self.last(hidden * gates[: len(x)])
        return found


class KeptTargets:
    """Cross entropy with a table of targets that every call fills anew."""

    def __init__(self, records: int, classes: int) -> None:
        self._table = torch.empty(records, classes, device=DEVICE)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        table = self._table[: len(targets)]
        table.zero_().scatter_(1, targets[:, None], 1.0)
        return -(table * F.log_softmax(outputs, 1)).sum(1).mean()


def check_memory_that_clients_share() -> None:
    """What a loss or a model of the user's own writes for one client does not reach another."""
    records, device = 4096, torch.device(DEVICE)
    for dtype in (torch.float32, torch.float64):
        _GATES[dtype] = torch.empty(records, 4096, device=device, dtype=dtype)
    for loss, kept in ((KeptTargets(records, 64), False), (F.cross_entropy, True)):
        torch.manual_seed(0)
        parts = [(torch.randn(records, 64), torch.randint(64, (records,))) for _ in range(12)]
        clients = [TensorDataset(inputs.to(device), targets.to(device)) for inputs, targets in parts]
        of = Problem(GatesInOneTable(kept).to(device), loss, clients)
        with products("float32"):
            fast, loop = (choose_engine(name, of, None, 0, None, "float32", private=True) for name in ("auto", "loop"))
            expected = torch.cat([block.grads.clone() for block in loop.blocks(of.x0, {}, 0)])
            for round in range(6):
                found = torch.cat([block.grads.clone() for block in fast.blocks(of.x0, {}, round)])
                near(found, expected, 1e-4, (kept, round))
        assert fast.name == "recorded"
    _GATES.clear()


def check_models_that_are_not_recorded() -> None:
    """They train by the engine's plain loop, with one line, to the loop's numbers."""
    for how, words in (("counts", "plain attributes"), ("draws", "on the host"), ("waits", "no CUDA graph")):
        torch.manual_seed(0)
        clients = [TensorDataset(torch.randn(9, 6), torch.arange(9) % 4) for _ in range(5)]
        of = Problem(Drops(how), F.cross_entropy, clients)
        options: dict[str, Any] = {"lr": 0.1, "rounds": 8, "batch_size": 4, "device": DEVICE}
        recorded, loop = (Compute(engine=engine, precision="float32") for engine in ("recorded", "loop"))
        with lines() as said:
            run = train(of, NormEC(0.1, 0.3), compute=recorded, **options, **QUIET)
        assert len(said) == 1, said
        assert words in said[0] or how == "draws", said  # what nobody seeds differs from the loop at once
        if how != "draws":
            assert run.engine == "recorded"
            near(run.x, train(of, NormEC(0.1, 0.3), compute=loop, **options, **QUIET).x, 1e-4, how)


def check_clipped_batches_of_many_records() -> None:
    """In a private run engines are compared on some of a client's records, in batches of these."""
    made = models.build("cnn", (1, 8, 8), 4)
    records = TensorDataset(torch.randn(6000, 1, 8, 8), torch.randint(4, (6000,)))
    of = Problem(made.model, made.loss, [records]).to(torch.device(DEVICE))
    assert of.sizes is not None
    for batches in (PoissonBatches(of.sizes, 0.1, 0), Batches(of.sizes, 600, 0)):
        with products("tf32"):
            engine = choose_engine("shared", of, batches, 0, RecordClip(0.3), "tf32", private=True)
            assert torch.isfinite(everything(engine, of).grads).all()
        assert engine.name == "shared"


def check_too_little_memory() -> None:
    """A real shortage: blocks shrink, and x, memories and every client's statistics are those of a run with room."""
    # Two rounds: in the third one a graph would be recorded, and say that it has no room.
    options: dict[str, Any] = {
        "lr": 0.1,
        "rounds": 2,
        "batch_size": 32,
        "compute": Compute(precision="float32", engine="shared"),
    }
    with lines() as said:
        roomy = train(images("resnet20", 64, 32), NormEC(0.01, 0.1), **options, **QUIET)
        short = images("resnet20", 64, 32)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        allowed = torch.cuda.memory_reserved() + 1.5 * 2**30
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            run = train(short, NormEC(0.01, 0.1), **options, **QUIET)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert run.engine == roomy.engine == "shared"
        assert torch.cuda.memory_stats()["num_ooms"] > 0, "the memory was enough after all"
        assert said == []
    for key, rows in roomy.state.buffers.items():
        near(run.state.buffers[key], rows, 1e-2, key)
    near(run.x, roomy.x, 1e-2, "x")


def check_the_update_s_memory() -> None:
    """In place: what it takes beside gradients and memories is a few vectors."""
    count, dim = 64, 1_000_000
    grads, memory = torch.randn(count, dim, device=DEVICE), torch.zeros(count, dim, device=DEVICE)
    for clients in (torch.arange(count), torch.arange(0, count, 2)):
        block = Block.of(clients, grads[: len(clients)], grads.new_zeros(len(clients)))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        update.apply_fused(form(NormEC(0.1, 0.3, decay=0.1)), block, memory, 0)
        extra = torch.cuda.max_memory_allocated() - before
        assert extra < 8 * dim * 4, f"{extra / dim / 4:.0f} vectors"


def check_own_methods() -> None:
    """What a class defines is what runs: the same as on the CPU, whatever its states, wherever they are kept."""
    # Not the signs of gradients: one that is zero but for rounding has another sign on another device.
    methods = {name: method for name, method in own_methods.ALL.items() if name != "no state"}
    methods |= {"adaptive": AdaptiveClip(Clip21(0.1)), "momentum": MomentumNormEC(0.1, 0.3, 0.5)}
    for name, method in methods.items():
        for participation in (None, FixedSize(2)):
            for privacy in (None, Privacy(sigma=1e-9, trust="secure-sum")):
                of = problem("small" if privacy is None else "norms")  # without statistics, which no noise covers
                options: dict[str, Any] = {"lr": 0.1, "rounds": 12, "seed": 1, "participation": participation}
                options |= {"privacy": privacy, "compute": Compute(dtype=torch.float64), "logging": Logging(every=5)}
                here = train(of, method, device="cpu", **options)
                for home in ("device", "host"):
                    there = train(of, method, device="cuda", memory=Memory(home=home), **options)
                    near(there.x.cpu(), here.x, 1e-6, (name, home, "x"))


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: partial(check, DEVICE) for check in (*kernel_checks.CHECKS, *engine_checks.CHECKS)
} | {
    check.__name__: check
    for check in (
        check_graphs,
        check_recorded,
        check_memory_that_clients_share,
        check_models_that_are_not_recorded,
        check_graphed_rounds,
        check_no_hidden_sync,
        check_no_hidden_sync_in_the_batched_engine,
        check_reruns,
        check_resume,
        check_homes,
        check_own_methods,
        check_the_update_s_memory,
        check_clipped_batches_of_many_records,
        check_too_little_memory,
        check_models_that_wait,
        check_records_on_the_device,
    )
}

try:
    import pytest
except ImportError:  # the checks run without it
    pass
else:

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
    @pytest.mark.parametrize("check", CHECKS)
    def test_on_a_gpu(check: str) -> None:
        CHECKS[check]()


def main(names: list[str]) -> int:
    failed = 0
    for name in names or CHECKS:
        begun, word, trace = time.perf_counter(), "ok", ""
        try:
            CHECKS[name]()
        except Exception as error:
            failed, word = 1, f"FAILED {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            trace = traceback.format_exc(limit=-4)
        print(f"{name} {time.perf_counter() - begun:.1f} s: {word}", flush=True)
        if trace:
            print(trace, file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
