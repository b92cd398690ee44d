"""What kills at the N-th operation on the disk leave of a run, taken to its end in forked processes.

As a program, for every STEP-th N: ``python -m tests.training.private.killing FOLDER NOISE ROUNDS STEP``. One run, in
FOLDER/0, copies its folder before each of these operations: a kill there leaves the same files, because what a process
has not handed to the operating system is lost with it and is not in the copy either. The copy of instant N, taken to
its end, is in FOLDER/N; beside it, N.draws has a line for every draw of noise that cannot be repeated. An instant that
finds the files of the one before is left out. Every fifth copy is compared with what a real kill leaves, if the noise
can be repeated.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from normec import Logging, NormEC, Privacy, Problem, Rotation, Storage, train
from normec.privacy.noise import SecureNoise

from ...support.runs import snapshot

UNTIMED = ("metrics.jsonl", "ledger.jsonl", "config.toml", "checkpoint/releases.jsonl")


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


def before_operations(act: Callable[[int], None]) -> None:
    """Call `act` with the number of each flush, rename, removal or append of this process, before it is done."""
    count, acting = 0, False

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, acting
            if not acting:
                count += 1
                acting = True
                act(count)
                acting = False
            return call(*args, **kwargs)

        return wrapped

    os.fsync, os.replace, os.write = counted(os.fsync), counted(os.replace), counted(os.write)
    os.fdopen, os.ftruncate = counted(os.fdopen), counted(os.ftruncate)
    Path.replace, Path.unlink = counted(Path.replace), counted(Path.unlink)  # type: ignore[method-assign]


def copying(folder: Path, step: int) -> Callable[[int], None]:
    """Copy the run in FOLDER/0 and its draws at every `step`-th instant at which they have changed."""
    seen: dict[str, bytes] = {}

    def copy(nth: int) -> None:
        nonlocal seen
        if (nth - 1) % step:
            return
        now = {**snapshot(folder / "0"), "draws": read(folder / "0.draws")}
        if now != seen:
            seen = now
            if (folder / "0").exists():
                shutil.copytree(folder / "0", folder / str(nth))
            (folder / f"{nth}.draws").write_bytes(now["draws"])

    return copy


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def die_at(nth: int) -> Callable[[int], None]:
    def die(count: int) -> None:
        if count == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


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


def same_files(killed: Path, copied: Path) -> bool:
    """Whether two folders have the same files, with the same bytes if no wall-clock times are in them."""
    here, there = (
        {re.sub(r"\.\d+\.part", ".part", name): data for name, data in snapshot(of).items()}  # without process numbers
        for of in (killed, copied)
    )
    return here.keys() == there.keys() and all(here[name] == there[name] for name in here if name in UNTIMED)


def main(folder: Path, noise: str, rounds: int, step: int) -> None:
    private_run(folder.parent / "first", noise, 1)  # what a run imports is then there before the forks
    gc.collect()
    gc.freeze()  # else a collection in a child copies the pages of all objects

    def run(out: Path, act: Callable[[int], None] | None = None) -> None:
        note_draws(out.parent / f"{out.name}.draws")
        if act is not None:
            before_operations(act)
        private_run(out, noise, rounds)

    if forked(lambda: run(folder / "0", copying(folder, step))):
        sys.exit("the run that is copied failed")
    instants = sorted(int(path.stem) for path in folder.glob("[1-9]*.draws"))
    for nth in instants[1::5] if noise.startswith("seeded") else ():
        killed = folder.parent / f"killed-{nth}" / "run"
        killed.parent.mkdir()
        status = forked(lambda killed=killed, nth=nth: run(killed, die_at(nth)))  # type: ignore[misc]
        if not os.WIFSIGNALED(status) or not same_files(killed, folder / str(nth)):
            sys.exit(f"the copy of instant {nth} is not what a kill leaves")
    for nth in (0, *instants):  # the whole run reaches its end twice
        if forked(lambda nth=nth: run(folder / str(nth))):  # type: ignore[misc]
            sys.exit(f"could not go on after a kill at instant {nth}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
