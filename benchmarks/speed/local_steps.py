"""Local steps: the time of K steps of all clients, batched and one by one, beside K rounds of gradients alone.

    python -m benchmarks.speed.local_steps --device cuda --precision tf32
    OMP_NUM_THREADS=1 python -m benchmarks.speed.local_steps --models mlp,cnn --clients 20 --processor-time

The target on a GPU: ten local steps of 100 clients of the CNN take at most 1.3 times ten rounds of gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import TensorDataset

from normec import LocalSteps, Problem
from normec.gradients.choice import choose_engine
from normec.gradients.engine import Engine
from normec.gradients.precision import PRECISIONS, Precision, products
from normec.models import build
from normec.sampling.batches import Batches

# Model, shape of a record, records per client.
MODELS = {
    "softmax": ("softmax", (64,), 64),
    "mlp": ("mlp", (64,), 64),
    "cnn": ("cnn", (1, 28, 28), 64),
    "cnn-gn": ("cnn-gn", (3, 32, 32), 64),
    "small cnn": ("cnn", (1, 8, 8), 64),
}
ENGINES = ("auto", "batched", "loop")


def problem(name: str, clients: int, device: str) -> Problem:
    """Random records; every client has its own."""
    model, shape, records = MODELS[name]
    draw = torch.Generator().manual_seed(0)
    made = build(model, shape, 10, hidden=64)
    sets = [
        TensorDataset(torch.randn(records, *shape, generator=draw), torch.randint(10, (records,), generator=draw))
        for _ in range(clients)
    ]
    return Problem(made.model, made.loss, sets).to(torch.device(device))


def engine_of(of: Problem, batch: int, precision: Precision, name: str, local: LocalSteps | None) -> Engine:
    """An engine by name, of gradients or of local steps."""
    if of.sizes is None:
        raise TypeError("the problem has records")
    return choose_engine(name, of, Batches(of.sizes, batch, 0), 0, precision=precision, local=local)


def seconds(
    engine: Engine, of: Problem, rounds: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The median time of so many rounds of an engine, after a few that record and compile."""
    buffers = of.initial_buffers()

    def once(first: int) -> None:
        for round in range(first, first + rounds):
            for _ in engine.blocks(of.x0, buffers, round):
                pass
        if of.x0.is_cuda:
            torch.cuda.synchronize()

    for warm in range(4 if of.x0.is_cuda else 1):
        once(warm * rounds)
    times = []
    for repeat in range(repeats):
        begun = clock()
        once((4 + repeat) * rounds)
        times.append(clock() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=PRECISIONS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processor-time", action="store_true", help="for a CPU that others use: engines in turns")
    given = parser.parse_args()
    if given.processor_time and given.device != "cpu":
        parser.error("--processor-time does not count the time of a GPU; leave it out")
    clock = time.process_time if given.processor_time else time.perf_counter
    turns, repeats = (given.repeats, 1) if given.processor_time else (1, given.repeats)
    work = LocalSteps(steps=given.steps, lr=0.01)
    with products(given.precision):
        for name in given.models.split(","):
            of = problem(name, given.clients, given.device)
            make = partial(engine_of, of, given.batch, given.precision)
            bases: list[float] = []
            times: dict[str, list[float]] = {}
            for _ in range(turns):
                bases.append(seconds(make("auto", None), of, given.steps, repeats, clock))
                for engine in given.engines.split(","):
                    made = make(engine, work)
                    took = seconds(made, of, 1, repeats, clock)
                    times.setdefault(f"{engine} ({made.name})", []).append(took)
            base = statistics.median(bases)
            print(f"{name}: {given.steps} rounds of gradients take {1e3 * base:.1f} ms", flush=True)
            for title, several in times.items():
                took = statistics.median(several)
                print(f"  {title}: {1e3 * took:.1f} ms, {took / base:.2f} times as long", flush=True)


if __name__ == "__main__":
    main()
