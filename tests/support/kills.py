"""What kills at the N-th operation on the disk leave of a run, taken to its end in forked processes.

One run, in FOLDER/0, copies its folder before each of these operations: a kill there leaves the same files, because
what a process has not handed to the operating system is lost with it and is not in the copy either. The copy of instant
N, taken to its end, is in FOLDER/N; beside it, N.draws is a copy of the file 0.draws, if the run writes one there. An
instant that finds the files of the one before is left out. Every fifth copy is compared with what a real kill leaves.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .runs import snapshot

UNTIMED = ("metrics.jsonl", "ledger.jsonl", "config.toml", "checkpoint/releases.jsonl")


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
    os.fdopen, os.ftruncate, os.unlink = counted(os.fdopen), counted(os.ftruncate), counted(os.unlink)
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


def end_everywhere(folder: Path, run: Callable[[Path], None], step: int = 1, repeatable: bool = True) -> None:
    """Take a run to its end after a kill at every `step`-th instant; exits with a message if one cannot go on.

    Args:
        folder: The folder of the copies.
        run: Makes the run in a folder, or continues it there; it was called before, so that imports are made.
        step: How far the instants are apart.
        repeatable: Whether two runs have the same files, so that copies can be compared with real kills.
    """
    gc.collect()
    gc.freeze()  # else a collection in a child copies the pages of all objects

    def observed(out: Path, act: Callable[[int], None]) -> None:
        before_operations(act)
        run(out)

    if forked(lambda: observed(folder / "0", copying(folder, step))):
        sys.exit("the run that is copied failed")
    instants = sorted(int(path.stem) for path in folder.glob("[1-9]*.draws"))
    for nth in instants[1::5] if repeatable else ():
        killed = folder.parent / f"killed-{nth}" / "run"
        killed.parent.mkdir()
        status = forked(lambda killed=killed, nth=nth: observed(killed, die_at(nth)))  # type: ignore[misc]
        if not os.WIFSIGNALED(status) or not same_files(killed, folder / str(nth)):
            sys.exit(f"the copy of instant {nth} is not what a kill leaves")
    for nth in (0, *instants):  # the whole run reaches its end twice
        if forked(lambda nth=nth: run(folder / str(nth))):  # type: ignore[misc]
            sys.exit(f"could not go on after a kill at instant {nth}")
