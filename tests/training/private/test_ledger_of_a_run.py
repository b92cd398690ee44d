"""The ledger of a run on disk: paid before released, never under-counted, over kills and restarts."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normec import Callback, NormEC, Privacy, Storage, load, train
from normec.distributed.optimizer import ClientOptimizer
from normec.errors import UsageError
from normec.experiments import results
from normec.report.run_view import read_run

from ...support.runs import EndAt, StopAt, releases, snapshot
from ...support.waiting import LIMIT
from .killing import problem

RUN: dict[str, Any] = {"lr": 0.05, "rounds": 12, "seed": 0, "storage": Storage(checkpoint_seconds=1000.0)}


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_every_round_is_one_line_with_its_running_epsilon(tmp_path: Path, noise: str) -> None:
    privacy = Privacy(epsilon=5, trust="secure-sum", noise=noise)  # type: ignore[arg-type]
    run = train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", privacy=privacy, **RUN)
    header = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])
    assert header["privacy"]["epsilon"] == 5
    paid = releases(tmp_path / "run")
    assert [line["round"] for line in paid] == list(range(12))
    epsilons = [line["epsilon"] for line in paid]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == pytest.approx(5, rel=1e-6)
    assert run.privacy is not None
    assert run.privacy.epsilon == epsilons[-1]


def test_a_resumed_simulation_is_not_charged_twice(tmp_path: Path) -> None:
    privacy = Privacy(epsilon=5, trust="secure-sum")
    whole = train(problem(), NormEC(0.1, 0.1), out=tmp_path / "whole", privacy=privacy, **RUN)
    first = train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", privacy=privacy, callbacks=[StopAt(7)], **RUN)
    assert first.stopped == "interrupted"
    again = train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", privacy=privacy, **RUN)
    assert torch.equal(again.x, whole.x)
    assert again.history.rows == whole.history.rows
    assert len(releases(tmp_path / "run")) == 12


class StopFirst(Callback):
    """Ctrl-C before the first round, when the run is handed to its callbacks."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "run":
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    "privacy", [None, Privacy(epsilon=5, trust="secure-sum"), Privacy(epsilon=5, noise="secure", trust="local")]
)
def test_a_run_that_is_interrupted_before_its_first_round_can_be_read_and_continued(
    tmp_path: Path, privacy: Privacy | None
) -> None:
    for _ in range(2):
        stopped = train(problem(), NormEC(0.1, 0.1), out=tmp_path, privacy=privacy, callbacks=[StopFirst()], **RUN)
        assert (stopped.stopped, stopped.state.round) == ("interrupted", 0)
        assert read_run(tmp_path).status == "interrupted"
        assert (tmp_path / "report.html").exists()
    assert train(problem(), NormEC(0.1, 0.1), out=tmp_path, privacy=privacy, **RUN).finished
    if privacy is not None:
        assert len(releases(tmp_path)) == 12


class Fails(Callback):
    """Ends the process's part in a run as a kill does, without a result."""

    def round(self, round: int) -> None:
        if round == 9:
            raise MemoryError


@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("ending", [StopAt(4), EndAt(4)], ids=["interrupted", "stopped by a rule"])
def test_a_result_that_is_older_than_the_ledger_does_not_understate_what_was_spent(
    tmp_path: Path, noise: Any, ending: Callback
) -> None:
    privacy = Privacy(epsilon=5, trust="secure-sum", noise=noise)
    first = train(problem(), NormEC(0.1, 0.1), out=tmp_path, privacy=privacy, callbacks=[ending], **RUN)
    with pytest.raises(MemoryError):
        train(problem(), NormEC(0.1, 0.1), out=tmp_path, privacy=privacy, callbacks=[Fails()], **RUN)
    paid, spent = releases(tmp_path)[-1], load(tmp_path).privacy
    assert first.privacy is not None
    assert spent is not None
    assert spent.epsilon == max(first.privacy.epsilon, paid["epsilon"])
    assert spent.releases == paid["releases"] == 9
    (row,) = results.each(results.collect([tmp_path]).records)
    assert row["epsilon"] == read_run(tmp_path).epsilon == spent.epsilon
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary["privacy"]["epsilon"] = math.nan
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UsageError, match="does not belong"):
        load(tmp_path)


KILLED = """
import os, signal, sys
from tests.training.private.killing import problem
from tests.training.private.test_ledger_of_a_run import RUN
from normec import Callback, NormEC, Privacy, train
class Die(Callback):
    def round(self, round):
        if round == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
privacy = Privacy(epsilon=5, trust="secure-sum", noise=sys.argv[3])
run = train(problem(), NormEC(0.1, 0.1), out=sys.argv[1], privacy=privacy, callbacks=[Die()], **RUN)
print(run.state.round, run.stopped)
"""


def killed(folder: Path, at: int, noise: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(at), noise],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.slow
def test_secure_noise_whose_record_is_lost_is_drawn_and_paid_again_until_the_budget_is_gone(tmp_path: Path) -> None:
    """Killed after 8 rounds with a checkpoint of round 1, releases lost: 1 … 7 are drawn anew, only 12 are allowed."""
    folder = tmp_path / "run"
    assert killed(folder, 8, "secure").returncode == -signal.SIGKILL
    assert len(releases(folder)) == 8
    (folder / "checkpoint" / "releases.jsonl").unlink()
    done = killed(folder, -1, "secure")
    assert done.returncode == 0, done.stderr
    assert "would bring epsilon" in done.stdout
    paid = releases(folder)
    assert [line["round"] for line in paid] == [0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    assert [line["attempt"] for line in paid] == [0] * 8 + [1] * 4
    assert paid[-1]["epsilon"] <= 5 * (1 + 1e-9)
    latest = json.loads((folder / "checkpoint" / "latest.json").read_text())
    assert latest["round"] == 5  # the model of that moment


@pytest.mark.slow
def test_seeded_noise_killed_goes_on_to_the_same_bits_at_no_extra_cost(tmp_path: Path) -> None:
    assert killed(tmp_path / "run", 8, "seeded").returncode == -signal.SIGKILL
    assert "12 None" in killed(tmp_path / "run", -1, "seeded").stdout
    privacy = Privacy(epsilon=5, trust="secure-sum")
    whole = train(problem(), NormEC(0.1, 0.1), out=tmp_path / "whole", privacy=privacy, **RUN)
    again = train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", privacy=privacy, **RUN)
    assert torch.equal(again.x, whole.x)
    assert len(releases(tmp_path / "run")) == len(releases(tmp_path / "whole")) == 12


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_ledger_that_was_touched_stops_the_run(tmp_path: Path, damage: str) -> None:
    folder, privacy = tmp_path / "run", Privacy(epsilon=5, trust="secure-sum")
    train(problem(), NormEC(0.1, 0.1), out=folder, privacy=privacy, callbacks=[StopAt(6)], **RUN)
    path = folder / "ledger.jsonl"
    text = path.read_text()
    if damage == "cut":
        path.write_text("\n".join(text.splitlines()[:-2]) + "\n")
    elif damage == "changed":
        path.write_text(text.replace('"sigma":', '"sigma": 1', 1))
    else:
        path.unlink()
        (folder / "ledger.jsonl.head").unlink()
    before = snapshot(folder)
    with pytest.raises(UsageError) as error:
        train(problem(), NormEC(0.1, 0.1), out=folder, privacy=privacy, **RUN)
    assert "\n" not in str(error.value)
    if damage != "gone":
        assert snapshot(folder) == before


def test_another_statement_is_another_run(tmp_path: Path) -> None:
    train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", privacy=Privacy(epsilon=5, trust="local"), **RUN)
    with pytest.raises(UsageError, match="another configuration: epsilon is 5 there, 6 here"):
        train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", privacy=Privacy(epsilon=6, trust="local"), **RUN)
    with pytest.raises(UsageError, match="another configuration: it is private there, and not here"):
        train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", **RUN)


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_folder_that_was_restored_or_deleted_is_refused_by_a_witness(noise: Any, tmp_path: Path) -> None:
    folder, older = tmp_path / "run", tmp_path / "older"
    options: dict[str, Any] = {"lr": 0.1, "rounds": 6, "out": folder, "storage": Storage(witness=tmp_path / "witness")}
    options["privacy"] = Privacy(epsilon=8.0, trust="secure-sum", noise=noise)
    train(problem(), NormEC(0.1, 0.1), callbacks=[StopAt(2)], **options)
    shutil.copytree(folder, older)
    assert train(problem(), NormEC(0.1, 0.1), **options).finished
    shutil.rmtree(folder)
    shutil.copytree(older, folder)
    with pytest.raises(UsageError, match="witness"):
        train(problem(), NormEC(0.1, 0.1), **options)
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match="witness"):
        train(problem(), NormEC(0.1, 0.1), **options)


@pytest.mark.parametrize("missing", ["privacy", "out"])
def test_a_witness_needs_a_ledger(missing: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"privacy": Privacy(epsilon=8.0, trust="local"), "out": tmp_path / "run"}
    del options[missing]
    with pytest.raises(UsageError, match="witness counts the lines of the ledger"):
        train(problem(), NormEC(0.1, 0.1), lr=0.1, rounds=2, storage=Storage(witness=tmp_path / "witness"), **options)


def test_the_optimizer_s_ledger_has_a_witness_too(tmp_path: Path) -> None:
    home = tmp_path / "job"

    def stepped() -> None:
        x = nn.Parameter(torch.zeros(3))
        options: dict[str, Any] = {"ledger": home / "ledger.jsonl", "witness": tmp_path / "witness", "rounds": 9}
        optimizer = ClientOptimizer([x], NormEC(0.1, 0.1), 0.1, privacy=Privacy(epsilon=8.0, trust="local"), **options)
        x.grad = torch.ones(3)
        optimizer.step()
        optimizer.close()

    stepped()
    shutil.copytree(home, tmp_path / "older")
    stepped()
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "older", home)
    with pytest.raises(UsageError, match="witness"):
        stepped()
