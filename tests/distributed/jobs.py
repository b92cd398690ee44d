"""What ranks do in the tests: `python -m tests.distributed.jobs FOLDER NAME…`, started by torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import normec
from normec import distributed as cluster
from normec.algorithms.error_feedback import ErrorFeedback, NormEC
from normec.algorithms.operators import Clip
from normec.errors import Diverged, UsageError
from normec.privacy import Privacy
from normec.training.communicator import Communicator
from normec.training.run import Run

from ..support.runs import data
from ..support.waiting import LIMIT
from .cases import CASES, CLIENTS, SEEDED, Case, cases_of

SECURE = Privacy(sigma=1e-3, delta=1e-5, unit="client", relation="zero-out", trust="secure-sum", noise="secure")


def tensors(run: Run, communicator: Communicator) -> dict[str, torch.Tensor]:
    """x, the server's states and its optimizer's, and on rank 0 the states of all clients."""
    tables = {name: communicator.gather_rows(rows, CLIENTS) for name, rows in run.state.clients.items()}
    optimizer = {f"optimizer.{name}": value for name, value in run.state.optimizer.items()}
    server = {f"server.{name}": value for name, value in run.state.server.items()}
    held = {name: rows for name, rows in tables.items() if rows is not None}
    return {"x": run.x, "last x": run.state.x, **held, **server, **optimizer}


def trajectories(communicator: Communicator, folder: Path) -> None:
    """Train the cases of as many ranks; rank 0 writes what came out."""
    for name in cases_of(communicator.size):
        run = CASES[name].train(communicator)
        held = tensors(run, communicator)
        assert len(run.history)
        assert run.n == CLIENTS
        if communicator.rank == 0:
            save_file({key: value.clone().contiguous() for key, value in held.items()}, folder / f"{name}.safetensors")
            facts = {"rows": run.history.rows, "clients": run.clients, "messages": run.state.messages}
            facts["privacy"] = run.privacy.to_dict() if run.privacy else None
            (folder / f"{name}.json").write_text(json.dumps(facts))


def secure(communicator: Communicator, folder: Path) -> None:
    """Train with secure noise, which is small enough to compare x with that of a run without noise."""
    run = Case(NormEC(0.1, 0.3), how={"privacy": SECURE}).train(communicator)
    if communicator.rank == 0:
        save_file({"x": run.x}, folder / "secure.safetensors")


class TooLong(Clip):
    """An operator whose results are longer than its bound."""

    def __call__(self, v: torch.Tensor, key: Any = None) -> torch.Tensor:  # noqa: ARG002
        return 3 * v / v.norm(dim=-1, keepdim=True)

    def scale(self, norm: torch.Tensor) -> None:  # type: ignore[override]  # noqa: ARG002
        return None


def mistakes(communicator: Communicator, folder: Path) -> None:
    """Make every mistake; each rank writes the error that it gets."""
    said = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            said[name] = "nothing"
        except (UsageError, Diverged) as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("seeds", lambda: Case(NormEC(0.1, 0.3), how={"seed": communicator.rank}).train(communicator))
    attempt("few", lambda: _train_few(communicator))
    attempt("nan", lambda: _train_nan(communicator))
    attempt("nan, private", lambda: _train_nan(communicator, privacy=SEEDED))
    attempt("long", lambda: Case(ErrorFeedback(TooLong(1.0))).train(communicator))
    attempt("file", lambda: Case(NormEC(0.1, 0.3)).train(communicator, out=folder / "a file"))
    attempt("method", lambda: cluster.NormEC(nn.Linear(2, 2).parameters(), 0.1, 0.1, 0.1 + communicator.rank))
    (folder / f"said-{communicator.rank}.json").write_text(json.dumps(said))


def _train_few(communicator: Communicator) -> None:
    one = normec.Problem(nn.Linear(4, 3), nn.functional.cross_entropy, [data(9, 0)])
    normec.train(one, NormEC(0.1, 0.3), lr=0.1, rounds=2, compute=normec.Compute(communicator=communicator))


def _train_nan(communicator: Communicator, **how: Any) -> None:
    def function(client: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def value(x: torch.Tensor) -> torch.Tensor:
            far = (x - client).square().sum()
            return far + torch.where(x.sum() > 1.0, torch.nan, 0.0) if client == 4 else far

        return value

    functions = normec.Problem.from_functions([function(i) for i in range(CLIENTS)], torch.zeros(2))
    compute = normec.Compute(engine="loop", communicator=communicator)
    normec.train(functions, NormEC(0.1, 0.5), lr=0.2, rounds=50, seed=1, compute=compute, **how)


def main(folder: str, *names: str) -> None:
    jobs = {"trajectories": trajectories, "secure": secure, "mistakes": mistakes}
    with cluster.join(timeout=LIMIT) as communicator:
        for name in names:
            jobs[name](communicator, Path(folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
