"""Runs that are killed at the N-th operation on the disk and then taken to their end, in forked processes.

As a program, for each N in turn: ``python -m tests.training.private.killing FOLDER NOISE ROUNDS STEP``. The run that is
killed at instant N is in FOLDER/N; beside it, N.draws has a line for every draw of noise that cannot be repeated.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from normec import Logging, NormEC, Privacy, Problem, Rotation, Storage, train
from normec.privacy.noise import SecureNoise


def problem() -> Any:
    """Three clients that pull in different directions, six parameters."""
    centres = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Problem.from_functions(
        [lambda x, c=c: ((x - c) ** 2).sum() for c in centres], torch.zeros(6, dtype=torch.float64)
    )


def private_run(out: Path, noise: str, rounds: int, **options: Any) -> Any:
    """A run whose only checkpoints are those of its first and its last round; NOISE may be "seeded correlated"."""
    kind, _, correlated = noise.partition(" ")
    privacy = Privacy(epsilon=5, trust="secure-sum", noise=kind)  # type: ignore[arg-type]
    if correlated:
        privacy = Privacy(sigma=1.0, trust="central", noise=kind, noise_bands="best")  # type: ignore[arg-type]
    given = {
        "participation": Rotation(3) if correlated else None,
        "lr": 0.05,
        "rounds": rounds,
        "seed": 0,
        "logging": Logging(every=1),
        "storage": Storage(checkpoint_seconds=1000.0),
    } | options
    return train(problem(), NormEC(0.1, 0.1), out=out, privacy=privacy, **given)


def die_at(nth: int) -> None:
    """Kill this process at the nth flush, rename, removal or append."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    os.fsync, os.replace, os.write = counted(os.fsync), counted(os.replace), counted(os.write)
    os.fdopen, os.ftruncate = counted(os.fdopen), counted(os.ftruncate)
    Path.replace, Path.unlink = counted(Path.replace), counted(Path.unlink)  # type: ignore[method-assign]


def note_draws(path: Path) -> None:
    """Write down the digest of all noise that is drawn afresh."""
    draw = SecureNoise.integers

    def noted(self: SecureNoise, count: int, scale: float) -> Any:
        found = draw(self, count, scale)
        with path.open("a") as file:
            file.write(hashlib.sha256(found.tobytes()).hexdigest() + "\n")
        return found

    SecureNoise.integers = noted  # type: ignore[method-assign]


def forked(action: Callable[[], Any]) -> int:
    """The status with which a forked process ended that did `action`."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitpid(child, 0)[1]


def main(folder: Path, noise: str, rounds: int, step: int) -> None:
    private_run(folder.parent / "first", noise, 1)  # what a run imports is then there before the forks
    gc.collect()
    gc.freeze()  # else a collection in a child copies the pages of all objects
    nth = 1
    while True:
        out, draws = folder / str(nth), folder / f"{nth}.draws"

        def run(nth: int | None, out: Path = out, draws: Path = draws) -> None:
            note_draws(draws)
            if nth is not None:
                die_at(nth)
            private_run(out, noise, rounds)

        status = forked(functools.partial(run, nth))
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))  # it came to its end before the nth operation
        if forked(functools.partial(run, None)) != 0:
            sys.exit(f"could not go on after a kill at instant {nth}")
        nth += step


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
