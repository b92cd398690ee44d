"""A run whose beginning failed begins again with a ledger; no round of a run with a folder is paid for in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import Callback, NormEC, Privacy, Problem, UsageError, train
from normec.problems.functions import FunctionProblem
from normec.training.options import Options
from normec.training.train import prepare


class FailsOnce(Callback):
    failed = False

    def begin(self, first: int, rounds: int) -> None:  # noqa: ARG002
        if not self.failed:
            self.failed = True
            raise ConnectionError("no tracker")


def problem() -> FunctionProblem:
    return Problem.from_functions([lambda x, c=c: (x - c).square().sum() for c in range(3)], torch.zeros(4))


def options(noise: Any, out: Path) -> dict[str, Any]:
    return {"lr": 0.1, "rounds": 6, "privacy": Privacy(epsilon=1.0, noise=noise, trust="secure-sum"), "out": out}


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_run_that_is_tried_again_pays_in_its_ledger(noise: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    rounds = prepare(problem(), NormEC(0.5, 0.1), Options(callbacks=[FailsOnce()], **options(noise, out)))
    with pytest.raises(ConnectionError):
        rounds.run()
    assert not (out / "ledger.jsonl").exists()
    first = rounds.run()
    assert first.finished
    assert first.privacy is not None
    assert first.privacy.releases == 6
    again = train(problem(), NormEC(0.5, 0.1), **options(noise, out))
    assert again.privacy is not None
    assert again.privacy.epsilon == first.privacy.epsilon
    assert again.privacy.releases == 6


def test_a_round_is_not_paid_for_in_memory_where_the_run_has_a_folder(tmp_path: Path) -> None:
    rounds = prepare(problem(), NormEC(0.5, 0.1), Options(**options("seeded", tmp_path / "run")))
    rounds.begun = True  # as if the ledger had been opened
    with pytest.raises(UsageError, match="round 0 cannot be paid for, because the ledger is not open"):
        rounds.run()
    assert rounds.mechanism is not None
    assert rounds.mechanism.spent().releases == 0


def test_a_private_checkpoint_without_a_ledger_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(problem(), NormEC(0.5, 0.1), **options("seeded", out))
    rounds = prepare(problem(), NormEC(0.5, 0.1), Options(**options("seeded", out)))
    tensors, facts = rounds.storage.load() or ({}, {})
    rounds.storage.save(6, tensors, {"messages": facts["messages"], "timings": {}, "ledger": None})
    rounds.storage.close()
    assert json.loads((out / "checkpoint" / "latest.json").read_text())["ledger"] is None
    with pytest.raises(UsageError, match="has 6 private rounds, but no ledger that paid for them"):
        train(problem(), NormEC(0.5, 0.1), **options("seeded", out))
