"""A folder that is damaged, of another configuration or in use: one line, and every byte in it stays."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset

from normec import Clip21, Compute, FixedSize, Logging, Memory, NormEC, Problem, UsageError, train
from normec.experiments import runs
from normec.settings import make
from normec.storage.checkpoint import save_tensors

from ..support.runs import StopAt, data, problem, same, snapshot

OPTIONS: dict[str, Any] = {"lr": 0.2, "rounds": 8, "seed": 7, "logging": Logging(every=1), "batch_size": 4}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped half way, which no test changes."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    train(problem(), Clip21(0.3), out=out, callbacks=[StopAt(4)], **OPTIONS)
    assert set(snapshot(out)) == {
        ".lock",
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
        "report.html",
        "summary.json",
        "checkpoint/latest.json",
        "checkpoint/round-00000004.safetensors",
    }
    return out


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the run stopped half way."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def refused(out: Path, match: str, of: Problem | None = None, method: Any = None, **options: Any) -> None:
    """Refused in one line, nothing changed, added or removed."""
    before = snapshot(out)
    with pytest.raises(UsageError, match=match) as error:
        train(of or problem(), method or Clip21(0.3), out=out, **(OPTIONS | options))
    assert "\n" not in str(error.value)
    assert snapshot(out) == before


def flipped(name: str, at: float) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        held = bytearray((out / name).read_bytes())
        held[int(at * (len(held) - 1))] ^= 0x10
        (out / name).write_bytes(held)

    return damage


def written(name: str, text: bytes) -> Callable[[Path], None]:
    return lambda out: (out / name).write_bytes(text) and None


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        held = (out / name).read_bytes()
        (out / name).write_bytes(held[: int(share * len(held))])

    return damage


def edited(**changes: Any) -> Callable[[Path], None]:
    """latest.json with fields changed (None: removed)."""

    def damage(out: Path) -> None:
        facts = json.loads((out / LATEST).read_text()) | changes
        (out / LATEST).write_text(json.dumps({k: v for k, v in facts.items() if v is not None}))

    return damage


TENSORS, LATEST, METRICS = "checkpoint/round-00000004.safetensors", "checkpoint/latest.json", "metrics.jsonl"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "first byte": (flipped(TENSORS, 0), "damaged"),
    "a byte": (flipped(TENSORS, 0.5), "damaged"),
    "last byte": (flipped(TENSORS, 1), "damaged"),
    "truncated": (cut(TENSORS, 0.7), "damaged"),
    "empty": (cut(TENSORS, 0), "damaged"),
    "deleted": (lambda out: (out / TENSORS).unlink(), "missing"),
    "garbage json": (written(LATEST, b"\x00\xff garbage"), "latest.json is damaged"),
    "empty json": (written(LATEST, b""), "latest.json is damaged"),
    "json list": (written(LATEST, b"[1, 2]"), "latest.json is damaged"),
    "json null": (written(LATEST, b"null"), "latest.json is damaged"),
    "half a json": (cut(LATEST, 0.5), "latest.json is damaged"),
    "another format": (edited(format=99), "has format 99, this version reads 1"),
    "no checksum": (edited(sha256=None), "latest.json is damaged"),
    "shortened metrics": (cut(METRICS, 0.6), "edited or damaged"),
    "deleted metrics": (lambda out: (out / METRICS).unlink(), "edited or damaged"),
}
UNSEEN: dict[str, Callable[[Path], Any]] = {
    "identity is a list": edited(identity=[]),
    "no round": edited(round=None),
    "no metrics": edited(metrics=None),
    "another round": edited(round=3),
    "other messages": edited(messages=5),
    "fewer metrics": edited(metrics={"bytes": 0, "sha256": ""}),
    "metrics no json": flipped(METRICS, 0),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("damage", "match"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_run_is_refused(run: Path, damage: Callable[[Path], Any], match: str) -> None:
    damage(run)
    refused(run, match)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("damage", UNSEEN.values(), ids=UNSEEN.keys())
def test_damage_outside_the_tensors_is_refused_too(run: Path, damage: Callable[[Path], Any]) -> None:
    damage(run)
    refused(run, "damaged|changed")


def test_undoing_the_damage_makes_it_whole_again(run: Path) -> None:
    flipped(TENSORS, 0.5)(run)
    refused(run, "damaged")
    flipped(TENSORS, 0.5)(run)
    same(train(problem(), Clip21(0.3), out=run, **OPTIONS), train(problem(), Clip21(0.3), **OPTIONS))


OTHERS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.1},
    "rounds": {"rounds": 7},
    "seed": {"seed": 8},
    "batch_size": {"batch_size": 5},
    "participation": {"participation": FixedSize(2)},
    "initial_memory": {"memory": Memory(initial="gradient")},
    "dtype": {"compute": Compute(dtype=torch.float64)},
    "method": {"method": Clip21(0.4)},
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("key", "options"), OTHERS.items(), ids=OTHERS.keys())
def test_another_configuration_is_refused_and_named(run: Path, key: str, options: dict[str, Any]) -> None:
    refused(run, f"another configuration: {key} is .* there, .* here", **options)


def test_another_problem_is_refused_and_named(run: Path) -> None:
    clients = [data(9 + 2 * i, i) for i in range(4)]
    model = problem().model
    refused(run, "clients is 4 there, 3 here", Problem(model, F.cross_entropy, clients[:3]))
    refused(run, "data is", Problem(model, F.cross_entropy, clients[::-1]))
    refused(run, "start is", Problem(nn.Linear(4, 3), F.cross_entropy, clients))
    refused(run, "dimension is 15 there, 12 here", Problem(nn.Linear(4, 3, bias=False), F.cross_entropy, clients))


def test_another_given_memory_is_refused(tmp_path: Path) -> None:
    given = torch.zeros(15)
    train(problem(), Clip21(0.3), out=tmp_path / "run", memory=Memory(initial=given), callbacks=[StopAt(4)], **OPTIONS)
    refused(tmp_path / "run", "initial_memory", memory=Memory(initial=given + 1))


def test_another_split_of_the_same_records_is_refused(tmp_path: Path) -> None:
    whole, model = data(20, 0), problem().model
    first, second = (
        Problem(model, F.cross_entropy, [Subset(whole, range(at)), Subset(whole, range(at, 20))]) for at in (6, 14)
    )
    train(first, NormEC(0.1, 0.1), out=tmp_path / "run", callbacks=[StopAt(4)], **OPTIONS)
    refused(tmp_path / "run", "data", second, NormEC(0.1, 0.1))


HOLD = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"


def test_a_folder_in_use_by_another_process_is_refused(run: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(run / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with (run / METRICS).open("a") as metrics:
            metrics.write('{"round": 4}\n')  # a row that the other process has written since its checkpoint
        refused(run, "another process writes to")
        other.kill()
    assert train(problem(), Clip21(0.3), out=run, **OPTIONS).finished  # its lock died with it


@pytest.mark.parametrize("started_by", ["train", "the command line"])
def test_a_folder_is_in_use_until_the_result_is_written(
    started_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process would take the half-written model for that of a killed one, and remove it."""

    def start() -> None:
        if started_by == "train":
            train(problem(), Clip21(0.3), out=tmp_path / "run", **OPTIONS)
        else:
            runs.execute(make({"rounds": 2, "clients": 4, "private": False}), tmp_path / "run")

    tried = []

    def meanwhile(tensors: dict[str, Any], path: Path) -> None:
        with pytest.raises(UsageError, match="another process writes to"):
            start()
        tried.append(path)
        save_tensors(tensors, path)

    monkeypatch.setattr("normec.training.summary.save_tensors", meanwhile)
    start()
    assert len(tried) == 1
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_refusal_lets_go_of_the_folder(run: Path) -> None:
    flipped(TENSORS, 0.5)(run)
    refused(run, "damaged")
    with (run / ".lock").open("ab") as lock, contextlib.ExitStack() as held:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # would raise if the refused call still held it
        held.callback(fcntl.flock, lock, fcntl.LOCK_UN)


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"cannot write to .*choose another folder"):
            train(problem(), Clip21(0.3), out=out, **OPTIONS)
    assert snapshot(tmp_path) == {"file": b"mine"}
