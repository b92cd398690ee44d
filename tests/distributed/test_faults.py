"""Ranks that are killed, hang, are interrupted, or come back in another number: real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ..cli.command import normec, start
from ..support.forks import Fork
from ..support.runs import snapshot
from .kills import kill_again_and_again
from .processes import Job, listening, wait_for_end
from .torchrun import words

ROUNDS = 80
RUN = [
    *("train", "--rounds", str(ROUNDS), "--batch-size", "12", "--seed", "0", "--diagnostics"),
    *("--set", "checkpoint_seconds=0.0", "--quiet"),
]
TWO = [*RUN, "--processes", "2"]
ENDLESS = ["train", "--rounds", "1000000", "--set", "log_every=1", "--batch-size", "12", "--quiet", "--processes", "2"]

pytestmark = pytest.mark.slow


def results(folder: Path) -> dict[str, bytes]:
    """What must not depend on how often a rank was killed."""
    return {name: data for name, data in snapshot(folder).items() if name.endswith((".safetensors", ".jsonl"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    done = normec(*TWO, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_two_processes_make_the_run_of_one(whole: Path, tmp_path: Path) -> None:
    assert normec(*RUN, "--out", "one", cwd=tmp_path).returncode == 0
    rows, alone = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, tmp_path / "one")
    )
    assert [row["round"] for row in rows] == [row["round"] for row in alone]
    assert rows[20] == pytest.approx(alone[20], rel=1e-3)  # float32: later rounds drift apart by rounding
    names = {path.name for path in whole.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "summary.json", "ledger.jsonl", "report.html", "clients.json"}
    assert json.loads((whole / "summary.json").read_text())["ranks"] == 2


def killed(program: list[str], victims: tuple[int, ...], folder: Path, met: bool = True, blames: bool = True) -> Path:
    """The folder of a run whose ranks were killed in this order, each after more rounds, or before the ranks have met.

    On a busy machine a run can be over before the kill; then it is made again. `met`: whether the ranks have met before
    a kill; `blames`: whether the launcher says which rank it lost.
    """
    for attempt in range(20):
        place = folder / str(attempt)
        place.mkdir()
        job = Job(Fork([*program, "--out", "run"], place), place)
        if all(_kill(job, victim, met, blames) for victim in victims):
            assert job.ended() == 0, job.errors
            return place / "run"
        assert job.ended() == 0, job.errors
    raise AssertionError("no kill comes before the run is over")


def _kill(job: Job, victim: int, met: bool, blames: bool) -> bool:
    """Kill a rank, and wait until the launcher says so; False if the job is over before."""
    if met:
        job.wait_for_history(200)
    job.wait_for_ranks(2)
    process = job.ranks.get(victim)
    if process is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    blamed = job.blamed() if blames else victim  # all of the old ranks have ended: the next victim is a new one
    assert blamed in (victim, None), job.errors
    return blamed is not None


# The command, whose launcher hardly waits for ranks to end by themselves after another one has failed or was killed.
IMPATIENT = """
from normec.__main__ import main
from normec.distributed import launch

launch._PATIENCE = launch._PATIENCE_AFTER_KILL = 0.2
main()
"""


def test_a_killed_rank_brings_the_job_back_to_its_checkpoint(whole: Path, tmp_path: Path) -> None:
    assert results(killed(["-m", "normec", *TWO], (1, 0), tmp_path)) == results(whole)


def test_a_rank_killed_before_the_ranks_have_met_is_noticed(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    assert results(killed([str(tmp_path / "impatient.py"), *TWO], (1, 0), tmp_path, met=False)) == results(whole)


def test_kills_at_any_moment_of_any_process(tmp_path: Path) -> None:
    """With this seed: two ranks and then one in start-up, the launcher in a round, and a rank in a round."""
    kill_again_and_again(4, seed=5, folder=tmp_path)


def test_secure_noise_is_paid_for_at_least_as_often_as_it_leaves(tmp_path: Path) -> None:
    secure = ["--set", "noise=secure", "--set", "sigma=2.0", "--rounds", "40"]
    run = killed(["-m", "normec", *TWO, *secure], (1,), tmp_path)
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    releases = [line["round"] for line in lines if line["kind"] == "release"]
    assert set(releases) == set(range(40))
    # Fresh noise in a round that is made again is another release, and counts as one.
    assert len(releases) - 40 <= 2
    assert json.loads((run / "summary.json").read_text())["privacy"]["releases"] == len(releases)


def test_torchrun_restarts_it_too(whole: Path, tmp_path: Path) -> None:
    launcher = words(2, "-m", "normec", *RUN, max_restarts=2)
    assert results(killed(launcher, (1,), tmp_path, blames=False)) == results(whole)


def test_a_hanging_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    for timeout in (4, 20, 60, 180, 540):  # a busy machine needs longer for the ranks to meet and for a round
        job = Job(Fork(["impatient.py", *ENDLESS, "--timeout", str(timeout), "--out", "run"], tmp_path), tmp_path)
        job.wait_for_history(200)
        hanging = job.ranks.get(1)
        if hanging is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(hanging, signal.SIGSTOP)
        assert job.ended() == 1, job.errors
        assert not Path(f"/proc/{hanging}").exists()
        named = f"rank 1 did not answer within {timeout} s; it hangs, or its connection is lost"
        if any(named in line for line in job.errors):
            return
    raise AssertionError(job.errors)


def test_a_job_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    """And its ranks end with the launcher, however that ends; all are started from nothing, as by a user."""
    job = Job(start(*ENDLESS, "--out", "run", cwd=tmp_path), tmp_path)
    job.wait_for_history(200)  # the ranks are connected
    ranks = job.ranks
    assert len(ranks) == 2
    sockets = [address for process in (job.process.pid, *ranks.values()) for address in _addresses(process)]
    job.process.kill()
    for process in ranks.values():
        wait_for_end(process)
    assert sockets
    assert set(sockets) <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def _addresses(process: int) -> list[str]:
    """The addresses of all sockets that a process listens on, as the kernel writes them."""
    own = {str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
    return [address for address, _, inode in listening() if f"socket:[{inode}]" in own]


def test_ctrl_c_then_more_ranks_then_one(tmp_path: Path) -> None:
    job = Job.of_normec(*TWO, cwd=tmp_path)
    job.wait_for_history(200)
    job.process.send_signal(signal.SIGINT)
    assert job.ended() == 130, job.errors
    assert any("to continue: normec train" in line for line in job.errors)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert load_file(next((tmp_path / "run" / "checkpoint").glob("*.safetensors")))["client.memory"].shape[0] == 100

    job = Job.of_normec(*RUN, "--processes", "3", cwd=tmp_path)
    job.wait_for_history(200)
    job.process.send_signal(signal.SIGINT)
    assert job.ended() == 130, job.errors
    assert normec(*RUN, "--out", "run", cwd=tmp_path).returncode == 0
    rows = [json.loads(line)["round"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(ROUNDS + 1))
    last = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert last["privacy"]["releases"] == ROUNDS, "no release counted twice, none left out"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--processes", "0"], "processes must be a whole number >= 1, got 0"),
        (["--processes", "2", "--max-restarts", "-1"], "max_restarts must be a whole number >= 0, got -1"),
        (["--processes", "2", "--clients", "1"], "1 clients on 2 ranks leave 1 ranks without data"),
        (["--processes", "2", "--timeout", "0"], "timeout must be > 0 and finite, got 0.0"),
    ],
)
def test_mistakes_end_in_one_line(flags: list[str], line: str, tmp_path: Path) -> None:
    arguments = ["train", "--rounds", "3", "--quiet", "--no-privacy", *flags, "--out", "run"]
    done = normec(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
