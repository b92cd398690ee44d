"""What a private run writes down: nothing that is computed from the clients' data without noise, unless it is asked to.

One check is independent of the columns' names: two runs whose clients hold different records, and whose model stands
still, may not differ in anything that they record.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import Compute, Logging, NormEC, Privacy, Problem, train
from normec.errors import Diverged, UsageError
from normec.sampling.participation import Poisson
from normec.storage.history import UNNOISED, Row
from normec.training.callbacks import Callback
from normec.training.run_mechanism import RECORDED

COVERED = {"round", "messages", "bytes", "epsilon", "test_loss", "accuracy"}
PRIVACY = Privacy(epsilon=8, trust="secure-sum")
ROWS = Logging(every=1, evaluate_every=2)
DIAGNOSTICS = replace(ROWS, diagnostics=True)
RUN: dict[str, Any] = {"lr": 0.1, "rounds": 6, "logging": ROWS}
DIAGNOSED: dict[str, Any] = {**RUN, "logging": DIAGNOSTICS}


class Heard(Callback):
    """Keeps the rows that callbacks get."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(self, row: Row) -> None:
        self.rows.append(row)


def problem(seed: int = 0, clients: int = 4) -> Problem:
    """Linear regression; the seed decides the clients' records, not the model and not the test set."""
    draw = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(99)

    def records(source: torch.Generator) -> torch.utils.data.TensorDataset:
        inputs = torch.randn(8, 3, generator=source)
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

    torch.manual_seed(0)
    test = records(fixed)
    return Problem(
        torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, [records(draw) for _ in range(clients)], test=test
    )


def test_a_private_run_records_only_what_the_guarantee_covers(tmp_path: Path) -> None:
    heard = Heard()
    run = train(problem(), NormEC(0.1, 0.1), privacy=PRIVACY, out=tmp_path / "run", callbacks=[heard], **RUN)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.history.rows == heard.rows
    assert [row["round"] for row in rows] == list(range(7))
    assert {name for row in rows for name in row} == COVERED - {"accuracy"}  # a regression has no accuracy
    assert run.clients == {}
    assert run.privacy is not None
    assert RECORDED not in run.privacy.notes


def test_what_is_recorded_does_not_depend_on_the_records_where_no_message_does() -> None:
    """With lr = 0 the model says nothing of the records, so neither may any number of the history."""
    runs = [
        train(problem(seed), NormEC(0.1, 0.1), privacy=PRIVACY, **{**RUN, "lr": 0.0}).history.rows for seed in (1, 2)
    ]
    assert runs[0] == runs[1]
    asked = [
        train(problem(seed), NormEC(0.1, 0.1), privacy=PRIVACY, **{**DIAGNOSED, "lr": 0.0}).history.rows
        for seed in (1, 2)
    ]
    for one, other in zip(*asked, strict=True):
        assert all(one[name] != other[name] for name in ("loss", "grad_norm", "disagreement"))


def test_diagnostics_add_what_is_not_covered_and_say_so() -> None:
    run = train(problem(), NormEC(0.1, 0.1), privacy=PRIVACY, **DIAGNOSED)
    plain = train(problem(), NormEC(0.1, 0.1), **RUN)
    for row in (run.history.rows[0], plain.history.rows[0]):
        assert set(UNNOISED) <= set(row)
    assert len(run.clients["loss"]) == len(plain.clients["loss"]) == 4
    assert run.privacy is not None
    assert RECORDED in run.privacy.notes


@pytest.mark.parametrize(
    "privacy", [PRIVACY, Privacy(epsilon=8, trust="local"), Privacy(epsilon=8, memory="noisy", trust="local")]
)
def test_diagnostics_change_no_number_of_the_run(privacy: Privacy) -> None:
    quiet, asked = (
        train(problem(), NormEC(0.1, 0.1), privacy=privacy, seed=0, **recorded) for recorded in (RUN, DIAGNOSED)
    )
    assert torch.equal(quiet.x, asked.x)
    assert quiet.history["test_loss"] == asked.history["test_loss"]


def test_a_run_goes_on_only_as_it_was_begun(tmp_path: Path) -> None:
    train(problem(), NormEC(0.1, 0.1), privacy=PRIVACY, out=tmp_path / "run", **RUN)
    with pytest.raises(UsageError, match="diagnostics is False there, True here"):
        train(problem(), NormEC(0.1, 0.1), privacy=PRIVACY, out=tmp_path / "run", **DIAGNOSED)
    train(problem(), NormEC(0.1, 0.1), out=tmp_path / "plain", **RUN)
    train(problem(), NormEC(0.1, 0.1), out=tmp_path / "plain", **DIAGNOSED)  # means nothing there


def test_full_gradients_are_refused_without_diagnostics(tmp_path: Path) -> None:
    asked = {**RUN, "privacy": PRIVACY, "logging": replace(ROWS, full_gradient=True), "batch_size": 2}
    with pytest.raises(UsageError, match="add diagnostics=True") as refused:
        train(problem(), NormEC(0.1, 0.1), out=tmp_path / "run", **asked)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
    asked["logging"] = replace(DIAGNOSTICS, full_gradient=True)
    assert train(problem(), NormEC(0.1, 0.1), **asked).history["grad_norm"]


def breaking() -> Problem:
    """Two clients; the loss of the second is not a number once x has moved."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        moved = (x - 1).abs().max() > 1e-3
        return x.square().sum() * torch.where(moved, math.nan, 1.0)

    return Problem.from_functions([lambda x: x.square().sum(), broken], torch.ones(3))


def test_a_loss_that_is_not_finite_is_noticed_though_it_is_not_recorded() -> None:
    for after in (3, 6):  # on the way, and only in the last look at x^K
        once = {"lr": lambda k, after=after: float(k == after - 1), "compute": Compute(engine="loop")}
        for recorded in (RUN, DIAGNOSED):
            with pytest.raises(Diverged, match="the loss of client 1 is not finite") as found:
                train(breaking(), NormEC(0.1, 0.1), privacy=PRIVACY, **{**recorded, **once})
            assert found.value.round == after
    assert any("diverged" in gap for gap in PRIVACY.not_covered())


@pytest.mark.slow
def test_the_number_of_messages_does_not_show_secret_coins() -> None:
    """A gain from sampling needs the coins secret; how many clients were drawn says something about each."""
    sampled = Privacy(sigma=2.0, trust="secure-sum", sampling=0.5)
    counts = [
        train(problem(clients=6), NormEC(0.1, 0.1), privacy=sampled, seed=seed, **RUN).history["messages"]
        for seed in (1, 2)
    ]
    assert counts[0] == counts[1] == [3.0 * k for k in range(7)]  # expected
    claimed = train(problem(clients=6), NormEC(0.1, 0.1), privacy=PRIVACY, participation=Poisson(0.5), seed=1, **RUN)
    assert claimed.history["messages"][-1] == claimed.state.messages  # no gain is claimed: every round counts in full
