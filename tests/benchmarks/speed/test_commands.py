"""The command, its processes and its error messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed import measurement
from benchmarks.speed.commands import app
from benchmarks.speed.implementations import Implementation
from benchmarks.speed.measurement import Limits, Measured, Task, measure_all, runner
from benchmarks.speed.workloads import Case
from normec.cli.app import run

from ...support.forks import ENVIRONMENT, Fork, end_with_us
from ...support.waiting import LIMIT, wait_for

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "benchmarks.speed"]
PATIENT = ("--seconds", "1e6", "--limit", "1e6")  # a slow machine makes as many rounds as a fast one
SMALL = ("--workload", "logistic", "--n", "50", "--rounds", "3", "--repeats", "1", "--threads", "1", *PATIENT)
CASE = {"workload", "clients", "drawn", "batch", "device", "precision", "floor", "passes", "ours", "rows"}
ROW = {
    *("name", "kind", "choice", "per_record", "status", "reason", "note", "seconds", "mean", "spread", "rounds"),
    *("processes", "start_up", "peak_bytes", "device_bytes", "waited", "versions"),
    *("over_floor", "over_floor_and_passes", "over_ours"),
}


def measure(*arguments: str) -> tuple[int, str, str]:
    """Run the command to its end in a forked process; return its exit code, and what it wrote to its two streams."""
    process = Fork(["-m", "benchmarks.speed", *arguments], ROOT)
    shown, said = process.communicate()
    assert process.returncode is not None
    return process.returncode, shown, said


@pytest.mark.slow
def test_a_killed_benchmark_goes_on_and_has_all_fields_and_consistent_ratios(tmp_path: Path) -> None:
    bare, out = tmp_path / "bare", tmp_path / "bench"
    venv.create(bare)
    python = str(bare / "bin" / "python")
    some = ["--floors", "eager,one-thread", "--engines", "linear", "--peers", "pfl", "--peer-python", python]
    some += ["--out", str(out), "--json"]
    kept = out / "measured.jsonl"
    process = subprocess.Popen(
        [*COMMAND, *SMALL, *some],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_us,
    )
    try:
        wait_for(lambda: kept.exists() and kept.read_text().count("\n") >= 2, "the first measurement")
    finally:
        process.kill()
        process.wait()
    before = [json.loads(line) for line in kept.read_text().splitlines()[1:]]
    with kept.open("a") as file:
        file.write('{"case": {"workload"')  # cut off
    code, shown, said = measure(*SMALL, *some)
    assert code == 0, said
    assert not any(Implementation(**line["implementation"]).name in said for line in before)
    after = [json.loads(line) for line in kept.read_text().splitlines()]
    assert after[1 : 1 + len(before)] == before
    assert len(after) == 1 + 6  # a line of conditions, and one for each process or its absence
    found = json.loads(shown)
    assert found["limits"] == {"rounds": 3, "seconds": 1e6, "repeats": 1, "limit": 1e6, "beside": 1}
    assert found["machine"]["threads"] == 1
    (case,) = found["cases"]
    assert set(case) == CASE
    assert [row["choice"] for row in case["rows"] if row["kind"] == "floor"] == ["eager", "one-thread"]
    assert (case["clients"], case["drawn"]) == (50, 1)  # 0.5 of a client: at least one
    rows = {row["name"]: row for row in case["rows"]}
    for row in rows.values():
        assert set(row) == ROW
    assert rows["pfl"]["status"] == "not installed"
    assert "pfl" in rows["pfl"]["reason"]
    for name in ("floor, eager", "memory passes", "normec, linear", "hand-written loop"):
        row = rows[name]
        assert (row["status"], row["processes"], row["rounds"]) == ("measured", 1, 3)
        assert row["over_floor"] == pytest.approx(row["seconds"] / case["floor"])
        assert row["over_floor_and_passes"] == pytest.approx(row["seconds"] / (case["floor"] + case["passes"]))
        assert row["over_ours"] == pytest.approx(row["seconds"] / rows["normec, linear"]["seconds"])
        assert row["spread"][0] <= row["seconds"] <= row["spread"][1]
        assert row["peak_bytes"] > 5e7  # torch alone is more
        assert len(row["start_up"]) == 1
        assert 0 <= row["waited"] <= 1
        assert row["versions"]["torch"] == torch.__version__
    assert case["floor"] == min(row["seconds"] for row in rows.values() if row["kind"] == "floor" and row["seconds"])
    assert json.loads((out / "bench.json").read_text()) == found
    assert (out / "cost.png").exists()
    code, _, said = measure(*SMALL, *some, "--rounds", "4")
    assert code == 2
    assert said == f"error: {kept} has measurements with rounds 3, and this benchmark has 4; " + (
        "choose another folder\n"
    )


@pytest.mark.slow
def test_a_slow_implementation_is_stopped_and_a_failing_one_has_a_reason() -> None:
    loop = Implementation("hand-written")
    with runner(Limits(rounds=3, limit=1e-6), None) as started:
        ((_, stopped),) = started.measure([Task(Case("mlp", 2), loop)])
        assert stopped["reason"] == "stopped after 1e-06 s"
    with runner(Limits(rounds=3, limit=LIMIT), None) as started:
        ((_, failed),) = started.measure([Task(Case("mlp", 2, device="nowhere"), loop)])
        assert failed["status"] == "failed"
        assert "nowhere" in failed["reason"]
        assert "\n" not in failed["reason"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workload", "restnet20"], "did you mean 'resnet20'"),
        (["--engines", "lop"], "did you mean 'loop'"),
        (["--peers", "flwr"], "did you mean 'flower'"),
        (["--floors", "kpt"], "did you mean 'kept'"),
        (["--n", "ten"], "n must be whole numbers"),
        (["--n", "0"], "n must be a whole number >= 1"),
        (["--rounds", "0"], "rounds must be a whole number >= 1"),
        (["--repeats", "0"], "repeats must be a whole number >= 1"),
        (["--limit", "nan"], "limit must be > 0"),
        (["--beside", "0"], "beside must be a whole number >= 1"),
        (["--beside", "2"], "on a CPU one process is measured at a time"),
        (["--threads", "0"], "threads must be a whole number >= 1"),
        (["--precision", "fp8"], "unknown precision"),
        (["--precision", "tf32"], "tf32 is a precision of GPUs"),
        (["--device", "tpu"], "unknown device"),
        (["--peer-python", "/nowhere/python"], "/nowhere/python"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["--out", "folder", *arguments], app) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert says in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_list_is_repeated_and_what_could_not_run_is_not_measured_again() -> None:
    lines: list[str] = []
    implementations = [Implementation("passes"), Implementation("engine", "linear")]
    found = Measured(Case("mlp", 2), {implementation: [] for implementation in implementations})
    with runner(Limits(rounds=1, repeats=2, limit=LIMIT), None) as started:
        assert not measure_all(started, [found], lines.append)
    names = [line.split(": ")[1] for line in lines]
    assert names == ["memory passes, 1", "normec, linear, 1", "memory passes, 2"]
    refused = found.outcomes[implementations[1]][-1]
    assert refused["status"] == "does not apply"
    assert "linear engine is for" in refused["reason"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the states of processes are read in /proc")
def test_while_one_is_timed_the_others_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []
    begin, go = measurement._Child.__init__, measurement._Child.go
    seen: list[int] = []

    def added(child: Any, *arguments: Any) -> None:
        begin(child, *arguments)
        children.append(child)

    def alone(child: Any) -> None:
        others = [other._process.pid for other in children if other is not child]
        wait_for(lambda: all(state(pid) in {"T", "Z", ""} for pid in others), "the others to stop")
        assert state(child._process.pid) not in {"T", "Z", ""}
        seen.append(sum(state(pid) == "T" for pid in others))
        go(child)

    monkeypatch.setattr(measurement._Child, "__init__", added)
    monkeypatch.setattr(measurement._Child, "go", alone)
    tasks = [Task(Case("logistic", 50), Implementation("hand-written"), repeat) for repeat in range(3)]
    with runner(Limits(rounds=2, seconds=1e6, limit=LIMIT, beside=3), None) as started:
        found = list(started.measure(tasks))
    assert sorted(task.repeat for task, _ in found) == [0, 1, 2]
    assert [(outcome["status"], len(outcome["times"])) for _, outcome in found] == [("measured", 2)] * 3
    assert len(seen) == 3
    assert seen[0] == 2  # the third process is started before any can be ready
    assert not any("start_up" in outcome for _, outcome in found)  # it would be that of several at once


def state(pid: int) -> str:
    """The letter of a process's state; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.slow
def test_after_sigterm_no_process_and_no_folder_is_left(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = [
        "--workload",
        "mlp",
        "--n",
        "100",
        "--rounds",
        "1000000",
        *PATIENT,
    ]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--threads", "1"],
        cwd=ROOT,
        env={**ENVIRONMENT, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_us,
    )
    try:
        wait_for(lambda: list(scratch.glob("normec-bench-*/*/answer.json")), "the first answer")
        request = next(scratch.glob("normec-bench-*/*/request.json"))
        process.terminate()
        assert process.wait(LIMIT) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert list(scratch.glob("normec-bench-*")) == []
    if Path("/proc/self/cmdline").exists():
        assert not any(str(request).encode() in line for line in command_lines())


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


@pytest.mark.slow
def test_ranks_against_one_process() -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    small = ("--workload", "mlp", "--n", "20", "--repeats", "1", "--rounds", "2", *PATIENT)
    code, shown, said = measure("--ranks", "2", *small, "--json")
    assert code == 0, said
    found = json.loads(shown)
    assert found["speedup"] == pytest.approx(found["alone"] / found["spread"])
    assert found["dimension"] == 784 * 64 + 64 + 64 * 10 + 10
    assert found["all_reduce"] > 0
    assert list(found["projected"].values()) == sorted(found["projected"].values())
