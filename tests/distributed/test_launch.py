"""The launcher with ranks of a line each: whom it blames, what it starts again, and that every wait ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normec.distributed import launch
from normec.system.processes import PARENT

from ..support.waiting import LIMIT
from .processes import listening
from .torchrun import ENVIRONMENT

FOREVER = "signal.pause()"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"

Ranks = Callable[..., list[str]]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """A command whose ranks do what the words say; each writes its number and attempt down before it begins."""
    for name in ("_PATIENCE", "_PATIENCE_AFTER_KILL"):
        monkeypatch.setattr(launch, name, 0.2)

    def command(*what: str) -> list[str]:
        for rank, words in enumerate(what):
            (tmp_path / f"rank-{rank}.py").write_text(words)
        script = (
            "import os, pathlib, signal, sys\n"
            "rank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
            f"folder = pathlib.Path({str(tmp_path)!r})\n"
            "with open(folder / 'begun', 'a') as file: file.write(f'{rank} in attempt {attempt}\\n')\n"
            "exec((folder / f'rank-{rank}.py').read_text())\n"
        )
        return [sys.executable, "-c", script]

    return command


def begun(folder: Path) -> list[str]:
    return sorted((folder / "begun").read_text().splitlines())


def test_a_rank_that_dies_while_the_others_wait_is_noticed(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """As before the group has formed: rank 0 waits for a rank that is gone, and would wait for ten minutes."""
    assert launch.launch(ranks(FOREVER, DIE, FOREVER), 3, max_restarts=1) == 1
    errors = capfd.readouterr().err.splitlines()
    assert errors == [
        "rank 1 was killed by SIGKILL; restarting all ranks from the last checkpoint",
        "error: rank 1 was killed by SIGKILL, after 1 restarts; the same command continues from the last checkpoint",
    ]


def test_the_rank_that_was_killed_first_is_blamed(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 aborts when rank 1 is gone, as torch may do when a connection breaks."""
    os.mkfifo(tmp_path / "wire")
    waits = "open(folder / 'wire').read(); os.abort()"
    assert launch.launch(ranks(waits, f"wire = open(folder / 'wire', 'w'); {DIE}"), 2, max_restarts=0) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: rank 1 was killed by SIGKILL")


def test_two_ranks_at_once(ranks: Ranks, tmp_path: Path) -> None:
    once = "attempt == '0' and os.kill(os.getpid(), signal.SIGKILL)"
    assert launch.launch(ranks(once, once, "None"), 3, max_restarts=1) == 0
    assert begun(tmp_path)[-1] == "2 in attempt 1"


def test_a_mistake_of_one_rank_is_said_and_nothing_is_started_again(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mistake = "print('error: no such file', file=sys.stderr); sys.exit(2)"
    assert launch.launch(ranks(FOREVER, mistake), 2, max_restarts=3) == 2
    assert capfd.readouterr().err.splitlines() == ["rank 1: error: no such file"]
    assert {line.split()[-1] for line in begun(tmp_path)} == {"0"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_told_to_stop_is_not_started_again(
    number: int, ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "ready")
    ready = f"signal.signal(signal.SIGINT, signal.SIG_DFL); open(folder / 'ready', 'w').write('ready'); {FOREVER}"

    def stop() -> None:
        heard = 0
        while heard < 2:  # a rank that has not opened the pipe yet is heard at the next opening
            with (tmp_path / "ready").open() as pipe:
                heard += pipe.read().count("ready")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert launch.launch(ranks(ready, ready), 2, max_restarts=3) == 128 + number
    thread.join()
    assert begun(tmp_path) == ["0 in attempt 0", "1 in attempt 0"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_being_started_is_told_to_stop_too(
    number: int, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the process of rank 1 exists and its start has not returned: it would wait for ever."""
    started = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            started.append(self)
            if len(started) == 2:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(launch, "_PATIENCE", LIMIT)
    monkeypatch.setattr(launch, "_PATIENCE_AFTER_KILL", LIMIT)
    monkeypatch.setattr(subprocess, "Popen", Popen)
    hear = f"signal.signal(signal.SIGINT, signal.SIG_DFL); signal.alarm({LIMIT:.0f}); {FOREVER}"
    assert launch.launch(ranks(hear, hear, hear), 3, max_restarts=3) == 128 + number
    assert len(started) == 2
    ends = {-number} if number == signal.SIGTERM else {-number, 1}  # 1 if Python was interrupted in its own start
    assert {process.returncode for process in started} <= ends


def test_a_job_that_ctrl_c_stops_ends_like_one_however_its_ranks_end(ranks: Ranks, tmp_path: Path) -> None:
    """Python ends with 1 where Ctrl-C comes while it imports a package."""
    os.mkfifo(tmp_path / "ready")
    rank = "try:\n open(folder / 'ready', 'w').write('ready')\n signal.pause()\nexcept KeyboardInterrupt:\n sys.exit(1)"

    def stop() -> None:
        with (tmp_path / "ready").open() as pipe:
            pipe.read()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    assert launch.launch(ranks(rank), 1, max_restarts=3) == 130
    thread.join()


def test_a_rank_whose_launcher_is_gone_ends_before_it_imports_anything_heavy() -> None:
    """Imports take seconds, and a rank that is killed with its launcher must not outlive it for so long."""
    environment = {**ENVIRONMENT, PARENT: "1", "RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, "-X", "importtime", "-m", "normec", "train"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "the process that started this rank has ended"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "normec.system.processes" in imported
    assert not imported & {"torch", "numpy"}


def test_a_store_listens_on_the_loopback_interface_alone() -> None:
    store = launch._store()
    port = store.port
    assert [address for address, at, _ in listening() if at == port] == ["0100007F"]
    del store
    assert port not in [at for _, at, _ in listening()], "the port is given back"
