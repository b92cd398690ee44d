"""The real command, its processes and its refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import venv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks.speed.contestants import Contestant
from benchmarks.speed.measure import Effort, arena, compete
from benchmarks.speed.workloads import Case
from normec.cli.app import run

from ...cli.command import COMMAND, ENVIRONMENT, end_with_us, normec
from ...support.waiting import LIMIT, wait_for

PATIENT = ("--seconds", "1e6", "--limit", "1e6")  # a slow machine makes as many rounds as a fast one
SMALL = ("--workload", "logistic", "--n", "50", "--rounds", "3", "--repeats", "1", "--threads", "1", *PATIENT)
CASE = {"workload", "clients", "drawn", "batch", "device", "precision", "floor", "passes", "ours", "rows"}
ROW = {
    *("name", "kind", "choice", "per_record", "status", "reason", "note", "seconds", "mean", "spread", "rounds"),
    *("processes", "start_up", "peak_bytes", "device_bytes", "waited", "versions"),
    *("over_floor", "over_floor_and_passes", "over_ours"),
}


@pytest.mark.slow
def test_all_fields_and_consistent_ratios(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    venv.create(bare)
    python = str(bare / "bin" / "python")
    some = ("--floors", "eager,one-thread", "--engines", "linear", "--peers", "pfl", "--peer-python", python)
    done = normec("bench", *SMALL, *some, "--out", "bench", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["effort"] == {"rounds": 3, "seconds": 1e6, "repeats": 1, "limit": 1e6}
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
    assert json.loads((tmp_path / "bench" / "bench.json").read_text()) == found
    assert (tmp_path / "bench" / "cost.png").exists()


def test_a_contestant_that_is_too_slow_is_stopped_and_one_that_fails_says_why() -> None:
    case = Case("mlp", 2)
    with arena(Effort(rounds=3, limit=1e-6), None) as place:
        assert place.measure(case, Contestant("naive"))["reason"] == "stopped after 1e-06 s"
    with arena(Effort(rounds=3, limit=LIMIT), None) as place:
        failed = place.measure(Case("mlp", 2, device="nowhere"), Contestant("naive"))
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
    assert run(["bench", "--out", "folder", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert says in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_list_is_repeated_and_who_could_not_run_is_not_asked_again() -> None:
    said: list[str] = []
    contestants = [Contestant("passes"), Contestant("engine", "linear")]
    with arena(Effort(rounds=1, repeats=2, limit=LIMIT), None) as place:
        found, interrupted = compete(place, Case("mlp", 2), contestants, said.append, lambda _: None)
    assert not interrupted
    names = [line.split(": ")[1] for line in said]
    assert names == ["memory passes, 1", "normec, linear, 1", "memory passes, 2"]
    refused = found.outcomes[contestants[1]][-1]
    assert refused["status"] == "does not apply"
    assert "linear engine is for" in refused["reason"]


@pytest.mark.slow
def test_told_to_end_it_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = [
        "bench",
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
        env={**ENVIRONMENT, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_us,
    )
    try:
        wait_for(lambda: list(scratch.glob("normec-bench-*/answer.json")), "the first contestant's first answer")
        request = next(scratch.glob("normec-bench-*/request.json"))
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
def test_ranks_against_one_process(tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    small = ("--workload", "mlp", "--n", "20", "--repeats", "1", "--rounds", "2", *PATIENT)
    done = normec("bench", "--ranks", "2", *small, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["speedup"] == pytest.approx(found["alone"] / found["spread"])
    assert found["dimension"] == 784 * 64 + 64 + 64 * 10 + 10
    assert found["all_reduce"] > 0
    assert list(found["projected"].values()) == sorted(found["projected"].values())
