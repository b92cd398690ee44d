"""Training loops of users under torchrun: `python -m tests.distributed.optimizer_job FOLDER`, two ranks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from normec import Privacy, SmoothedNorm
from normec import distributed as cluster
from normec.algorithms.error_feedback import ErrorFeedback
from normec.distributed import ClientOptimizer
from normec.errors import BudgetSpent, Diverged, UsageError
from normec.privacy.hash_chain import LedgerDamaged

from ..support.runs import data
from ..support.waiting import LIMIT
from .optimizers import HOSTED, METHODS, RANKS, RESUMED, ROUNDS, SEED, model


def gradients(net: nn.Module, optimizer: ClientOptimizer, first: int) -> None:
    """Compute the full gradient of every hosted client on its own records."""
    for client in range(first, first + HOSTED):
        inputs, targets = data(9 + 2 * client, client).tensors
        with optimizer.client(client - first):
            F.cross_entropy(net(inputs.double()), targets).backward()


def trained(make: Callable[[nn.Module], ClientOptimizer], rounds: int, first: int) -> tuple[nn.Module, ClientOptimizer]:
    net = model()
    optimizer = make(net)
    for _ in range(rounds):
        gradients(net, optimizer, first)
        optimizer.step()
    return net, optimizer


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Note every collective call of this process, with the bytes that it sends."""
    calls: list[tuple[str, int]] = []
    names = ("all_reduce", "broadcast", "all_gather", "send", "recv", "reduce", "barrier")
    before = {name: getattr(dist, name) for name in names}

    def noting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[0] if args and isinstance(args[0], torch.Tensor) else torch.empty(0)
            calls.append((name, sent.numel() * sent.element_size()))
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, noting(name))
    try:
        yield calls
    finally:
        for name, call in before.items():
            setattr(dist, name, call)


def said(call: Callable[[], Any]) -> str:
    """The error that a call ends with, in words; "nothing" if it ends well."""
    try:
        call()
    except (UsageError, Diverged, BudgetSpent, LedgerDamaged) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run(rank: int, folder: Path) -> None:
    first = rank * HOSTED
    facts: dict[str, Any] = {}

    # Every method, against the round loop.
    for name, make in METHODS.items():
        net, optimizer = trained(lambda net, make=make: make(net, clients=HOSTED, seed=SEED), ROUNDS, first)
        if rank == 0:
            save_file({"x": flat(net)}, folder / f"{name}.safetensors")

    # Half, saved and read back, and the other half; a compiled model gives the same.
    kept = {name: partial(METHODS[name], clients=HOSTED, seed=SEED) for name in RESUMED}
    for name, make in kept.items():
        net, optimizer = trained(make, ROUNDS // 2, first)
        torch.save({"optimizer": optimizer.state_dict(), "model": net.state_dict()}, folder / f"{name}-{rank}.pt")
        held = torch.load(folder / f"{name}-{rank}.pt", weights_only=True)
        again = model()
        again.load_state_dict(held["model"])
        later = make(again)
        later.load_state_dict(held["optimizer"])
        compiled = torch.compile(again, backend="aot_eager")
        for _ in range(ROUNDS - ROUNDS // 2):
            gradients(compiled, later, first)
            later.step()
        if rank == 0:
            save_file({"x": flat(again)}, folder / f"resumed-{name}.safetensors")

    # What a step sends.
    net32 = nn.Linear(40, 10)
    plain = cluster.NormEC(net32.parameters(), lr=0.1, alpha=0.1, beta=0.1)
    net32(torch.ones(1, 40)).sum().backward()
    with counted() as calls:
        plain.step()
    facts["calls"] = calls

    # Groups, schedules.
    two = model()
    grouped = cluster.GD([{"params": [two[0].weight], "lr": 0.5}, {"params": [two[0].bias]}], lr=0.0)
    start = [p.detach().clone() for p in two.parameters()]
    two(torch.ones(1, 4).double()).sum().backward()
    grouped.step()
    facts["moved"] = [bool((p != q).any()) for p, q in zip(two.parameters(), start, strict=True)]
    schedule = torch.optim.lr_scheduler.StepLR(grouped, 1, 0.1)
    schedule.step()
    facts["lrs"] = [group["lr"] for group in grouped.param_groups]

    # Mistakes, on every rank.
    facts["said"] = {
        "closure": said(lambda: plain.step(lambda: 1.0)),
        "late group": said(lambda: plain.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})),
        "odd group": said(lambda: cluster.GD([{"params": net32.parameters(), "momentum": 0.9}], lr=0.1)),
        "half": said(lambda: cluster.GD(nn.Linear(2, 2).bfloat16().parameters(), lr=0.1)),
        "method": said(lambda: cluster.GD(nn.Linear(2, 2).parameters(), lr=0.1, seed=rank)),
        "swapped": said(lambda: kept["normec"](model()).load_state_dict(_swapped(folder, rank))),
        "no data": said(lambda: _one_step(1.0 if rank == 0 else None)),
        "nan": said(lambda: _one_step(math.nan if rank else 1.0)),
        "long": said(lambda: _one_step(1.0, TooLong(0.1))),
    }
    facts["private"] = _private(folder)
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))


class TooLong(SmoothedNorm):
    def __call__(self, v: torch.Tensor, key: Any = None) -> torch.Tensor:  # noqa: ARG002
        return 3 * v


def _swapped(folder: Path, rank: int) -> dict[str, Any]:
    return dict(torch.load(folder / f"normec-{1 - rank}.pt", weights_only=True)["optimizer"])


def _one_step(factor: float | None, operator: SmoothedNorm | None = None) -> None:
    """A step on a loss times `factor`; None: without a gradient."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    before = flat(net)
    optimizer = ClientOptimizer(net.parameters(), ErrorFeedback(operator or SmoothedNorm(0.1), 0.1), 0.1)
    if factor is not None:
        (factor * net(torch.ones(1, 4)).sum()).backward()
    try:
        optimizer.step()
    finally:
        assert torch.equal(flat(net), before), "x has moved before the run was stopped"


def _private(folder: Path) -> dict[str, Any]:
    """Make steps with noise of each kind on gradients of zero, so that x moves by the noise alone."""
    found: dict[str, Any] = {}
    wide = 20_000
    for noise in ("seeded", "secure"):
        for trust in ("local", "secure-sum", "central"):
            privacy = Privacy(sigma=0.5, delta=1e-5, unit="client", relation="zero-out", trust=trust, noise=noise)
            x = nn.Parameter(torch.zeros(wide))
            optimizer = cluster.DPSGD(
                [x], lr=1.0, operator=SmoothedNorm(0.1), privacy=privacy, rounds=2, ledger=folder / f"{noise}-{trust}"
            )
            x.grad = torch.zeros(wide)
            optimizer.step()
            found[f"{noise} {trust}"] = float(x.detach().std()), float(x.detach().sum())
            optimizer.step()
            found[f"{noise} {trust} over"] = said(optimizer.step)
    tight = Privacy(epsilon=1, delta=1e-5, unit="client", relation="zero-out", trust="secure-sum")
    found["no rounds"] = said(lambda: cluster.NormEC([nn.Parameter(torch.zeros(2))], 0.1, 0.1, 0.1, privacy=tight))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with cluster.join(timeout=LIMIT) as communicator:
        assert communicator.size == RANKS
        run(communicator.rank, Path(sys.argv[1]))
