"""Private runs that are killed: they end in the same files, and no noise is paid for twice without need."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from normec import DPSGD, Callback, Clip, Logging, Method, NormEC, Privacy, Problem, Storage, UsageError, train
from normec.storage.releases import Releases

from ...cli.command import completed
from ...support.gaussian_mechanism import gaussian_epsilon, gaussian_mu
from ...support.runs import StopAt, releases, results, snapshot
from .killing import private_run, problem

TIMED = "checkpoint/latest.json"


class CopyAndStop(StopAt):
    """Copies a folder when so many rounds are done, which is what a kill would leave of it, and stops the run."""

    def __init__(self, round: int, folder: Path, copy: Path) -> None:
        super().__init__(round)
        self.folder, self.copy = folder, copy

    def round(self, round: int) -> None:
        if round == self.at:
            shutil.copytree(self.folder, self.copy)
        super().round(round)


def killed_everywhere(folder: Path, noise: str, rounds: int, step: int) -> list[Path]:
    """Runs that were killed at instants `step` apart and then taken to their ends."""
    folder.mkdir()
    words = ["-m", "tests.training.private.killing", str(folder), noise, str(rounds), str(step)]
    done = completed(*words, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    return [path for path in folder.iterdir() if path.is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "rounds", "step"),
    [("seeded", 2, 1), ("seeded", 200, 83), ("seeded correlated", 5, 3), ("seeded correlated", 200, 83)],
    ids=["every instant", "reserved in chunks", "correlated", "correlated, in chunks"],
)
def test_a_simulation_ends_in_the_same_files_wherever_it_is_killed(
    tmp_path: Path, noise: str, rounds: int, step: int
) -> None:
    private_run(tmp_path / "whole", noise, rounds)
    expected = results(tmp_path / "whole")
    runs = killed_everywhere(tmp_path / "killed", noise, rounds, step)
    assert len(runs) > 10
    for run in runs:
        # The last run was not killed, and reached its end twice.
        assert results(run) == expected, run.name
        assert (run / "report.html").exists(), run.name


@pytest.mark.slow
def test_epsilon_of_a_row_does_not_depend_on_what_was_reserved_later(tmp_path: Path) -> None:
    """The folder of round 9 beside the ledger of round 151: what a kill at round 151 leaves of a run."""
    whole = private_run(tmp_path / "whole", "seeded", 200)
    copying = CopyAndStop(151, tmp_path / "run", tmp_path / "killed")
    private_run(tmp_path / "run", "seeded", 200, callbacks=[copying])
    resumed = private_run(tmp_path / "killed", "seeded", 200)
    assert resumed.history.rows == whole.history.rows
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    epsilons = resumed.history["epsilon"]
    assert epsilons == sorted(epsilons)
    assert len(set(epsilons)) == 100  # two rounds at a time are paid for
    whole_mu = gaussian_mu(5, 1e-5)  # σ is that of 200 releases at ε = 5
    for row in resumed.history.rows[:-1]:  # never below what had been released: rounds 0 … k
        made = whole_mu * math.sqrt((row["round"] + 1) / 200)
        assert row["epsilon"] >= gaussian_epsilon(made, 1e-5) * (1 - 1e-6)


@pytest.mark.slow
def test_secure_noise_is_drawn_and_paid_for_once_a_round_but_for_the_round_under_way(tmp_path: Path) -> None:
    runs = killed_everywhere(tmp_path / "killed", "secure", 3, 1)
    assert len(runs) > 30
    repeated = 0
    for run in runs:
        paid = Counter(line["round"] for line in releases(run))
        extra = sum(paid.values()) - len(paid)
        assert extra <= 1, run.name
        assert set(paid) == set(range(3 - extra)), run.name  # the budget is for three releases
        drawn = (run.parent / f"{run.name}.draws").read_text().split()
        assert len(drawn) <= sum(paid.values()), f"{run.name} has drawn noise that was not paid for"
        assert len(set(drawn)) == len(drawn)
        repeated += extra
        assert not list(run.rglob("*.part"))
        assert not (run / "checkpoint/releases.jsonl").exists()
    assert repeated > 0  # some kills did fall between the payment and the release


@pytest.mark.slow
def test_a_row_of_correlated_noise_that_is_drawn_again_is_charged_in_full(tmp_path: Path) -> None:
    """Three groups take turns in five rounds: two cycles, and one more charge for a round that is released again."""
    runs = killed_everywhere(tmp_path / "killed", "secure correlated", 5, 3)
    assert len(runs) > 20
    repeated = 0
    for run in runs:
        paid = Counter(line["round"] for line in releases(run))
        extra = sum(paid.values()) - len(paid)
        assert extra <= 1, run.name
        assert set(paid) == set(range(5)), run.name
        assert sum(line["charged"] for line in releases(run)) == 2 + extra, run.name
        drawn = (run.parent / f"{run.name}.draws").read_text().split()
        assert len(drawn) <= sum(paid.values()), f"{run.name} has drawn noise that was not paid for"
        assert len(set(drawn)) == len(drawn)
        repeated += extra
    assert repeated > 0


METHODS: dict[str, Method] = {
    "normec": NormEC(0.1, 0.1),
    "decay": NormEC(0.1, 0.1, decay=0.1),
    "dpsgd": DPSGD(Clip(1.0)),
}
STATEMENTS: dict[str, dict[str, Any]] = {
    "secure-sum": {"trust": "secure-sum"},
    "central": {"trust": "central"},
    "local": {"trust": "local"},
}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_killed_run_with_secure_noise_goes_on_to_the_same_state_for_nothing(
    tmp_path: Path, method: str, statement: str
) -> None:
    """A copy of the folder, taken in round 13, is what a kill would leave; the run itself stops with a checkpoint."""
    folder, twin = tmp_path / "run", tmp_path / "twin"
    options: dict[str, Any] = {
        "lr": 0.05,
        "rounds": 24,
        "logging": Logging(every=1),
        "storage": Storage(checkpoint_seconds=1000.0),
    }
    options["privacy"] = Privacy(epsilon=5, noise="secure", **STATEMENTS[statement])
    train(problem(), METHODS[method], out=folder, callbacks=[CopyAndStop(13, folder, twin)], **options)
    train(problem(), METHODS[method], out=twin, callbacks=[StopAt(13)], **options)
    ours, theirs = results(folder), results(twin)
    assert ours.keys() == theirs.keys()
    state = "checkpoint/round-00000013.safetensors"
    assert {name: value for name, value in ours.items() if name not in (state, TIMED)} == {
        name: value for name, value in theirs.items() if name not in (state, TIMED)
    }
    kept, again = load_file(folder / state), load_file(twin / state)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    done = train(problem(), METHODS[method], out=twin, **options)
    assert done.finished
    assert [line["round"] for line in releases(twin)] == list(range(24))
    assert done.privacy is not None
    assert done.privacy.epsilon == pytest.approx(5, rel=1e-6)


def test_memories_that_take_the_noise_are_saved_every_round(tmp_path: Path) -> None:
    """Killed before the checkpoint of round 6 was written: that round alone is paid for again."""
    options: dict[str, Any] = {"lr": 0.05, "rounds": 9, "storage": Storage(checkpoint_seconds=1000.0)}
    options["privacy"] = Privacy(epsilon=5, trust="local", memory="noisy", noise="secure")
    copying = CopyAndStop(7, tmp_path / "run", tmp_path / "killed")
    train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", callbacks=[copying], **options)
    done = train(problem(), NormEC(0.1, 0.1), out=tmp_path / "killed", **options)
    assert [line["round"] for line in releases(tmp_path / "killed")] == [0, 1, 2, 3, 4, 5, 6, 6, 7]
    assert done.stopped is not None


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a kill in round 5 leaves of a run with secure noise: a checkpoint of round 1, and releases 1 … 4."""
    private_run(tmp_path / "run", "secure", 9, callbacks=[CopyAndStop(5, tmp_path / "run", tmp_path / "killed")])
    return tmp_path / "killed"


def test_releases_cut_short_or_lost_are_paid_for_again(killed: Path) -> None:
    path = killed / "checkpoint/releases.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    done = private_run(killed, "secure", 9)
    assert [line["round"] for line in releases(killed)] == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert done.stopped is not None
    assert done.state.round == 8


def test_releases_that_were_changed_are_refused(killed: Path) -> None:
    path = killed / "checkpoint/releases.jsonl"
    path.write_text(path.read_text().replace('"sum": "', '"sum": "AAAA', 1))
    before = snapshot(killed)
    with pytest.raises(UsageError, match=r"releases\.jsonl is damaged"):
        private_run(killed, "secure", 9)
    assert snapshot(killed) == before


def test_releases_that_the_ledger_does_not_know_are_refused(killed: Path, tmp_path: Path) -> None:
    """Releases of one run beside the ledger of the same run at an earlier time."""
    extra = json.loads((tmp_path / "killed/checkpoint/releases.jsonl").read_text().splitlines()[-1])
    later = Releases(killed / "checkpoint/releases.jsonl")
    later.load()
    later.append(extra["round"] + 1, 0, torch.zeros(6, dtype=torch.float64))
    with pytest.raises(UsageError, match="not in its ledger"):
        private_run(killed, "secure", 9)


def test_the_releases_never_outgrow_the_checkpoint(tmp_path: Path) -> None:
    sizes = []

    class Look(Callback):
        def round(self, round: int) -> None:  # noqa: ARG002
            path = tmp_path / "run/checkpoint/releases.jsonl"
            sizes.append(path.stat().st_size if path.exists() else 0)

    large = Problem.from_functions([lambda x, c=c: ((x - c) ** 2).sum() for c in range(3)], torch.zeros(50_000))
    privacy = Privacy(epsilon=5, trust="secure-sum", noise="secure")
    train(large, NormEC(0.1, 0.1), lr=0.05, rounds=20, out=tmp_path / "run", privacy=privacy, callbacks=[Look()])
    assert max(sizes) <= 2**20 + 4 * 50_000 * 1.4  # the limit, and one more line in base64
    assert sorted(sizes)[10] > 0
