"""Values that are not finite: at once, and nothing is written; later, and the last good checkpoint stays."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from normec import (
    DPSGD,
    EF21,
    GD,
    AdaptiveClip,
    Callback,
    Clip,
    Clip21,
    Diverged,
    Logging,
    Memory,
    NormEC,
    Poisson,
    Problem,
    RandK,
    SmoothedNorm,
    Storage,
    TopK,
    train,
)
from normec.errors import UsageError
from normec.problems.functions import FunctionProblem

from ..support.runs import snapshot

METHODS = {
    "normec": NormEC(0.1, 0.3),
    "normec-no-server-norm": NormEC(0.1, 0.3, server_norm=False),
    "clip21": Clip21(0.3),
    "top-k": EF21(TopK(1)),
    "rand-k": EF21(RandK(1)),
    "dpsgd-clip": DPSGD(Clip(0.5)),
    "dpsgd-norm": DPSGD(SmoothedNorm(0.1)),
    "gd": GD(),
}


def bowl(x: Tensor) -> Tensor:
    return ((x - 1) ** 2).sum()


def gentle(x: Tensor) -> Tensor:
    return bowl(x) / 50


def cliff(x: Tensor) -> Tensor:
    """log x₁ pulls x₁ down until it is negative, and then is NaN."""
    return 3 * torch.log(x[0])


def walk() -> FunctionProblem:
    """Client 1 walks over the edge after some rounds; clients 0 and 2 are fine."""
    return Problem.from_functions([gentle, cliff, gentle], torch.tensor([0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_in_the_first_round_leaves_no_folder(
    tmp_path: Path, method: Any, value: float
) -> None:
    problem = Problem.from_functions([bowl, bowl, lambda x: bowl(x) * value], torch.zeros(2))
    with pytest.raises(Diverged, match="the loss of client 2 is not finite in round 0") as error:
        train(problem, method, lr=0.1, rounds=5, out=tmp_path / "run", storage=Storage(checkpoint_seconds=0))
    assert (error.value.round, error.value.clients) == (0, [2])
    assert list(tmp_path.iterdir()) == []


def test_a_first_gradient_that_is_not_finite_leaves_no_folder_where_it_becomes_a_memory(tmp_path: Path) -> None:
    problem = Problem.from_functions([bowl, lambda x: bowl(x) * math.nan], torch.zeros(2))
    with pytest.raises(Diverged, match=r"client 1 .* round 0"):
        train(problem, Clip21(0.1), lr=0.1, rounds=5, out=tmp_path / "run", memory=Memory(initial="gradient"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_later_one_names_client_and_round_and_keeps_the_last_good_checkpoint(tmp_path: Path, method: Any) -> None:
    options: dict[str, Any] = {
        "lr": 0.1,
        "rounds": 500,
        "out": tmp_path / "run",
        "storage": Storage(checkpoint_seconds=0),
    }
    with pytest.raises(Diverged, match=r"the loss of client 1 is not finite in round \d+; a smaller lr") as first:
        train(walk(), method, **options)
    k = first.value.round
    assert k > 0
    assert first.value.clients == [1]
    latest = json.loads((tmp_path / "run/checkpoint/latest.json").read_text())
    assert latest["round"] == k
    held = load_file(tmp_path / "run/checkpoint" / latest["file"])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in held.values())
    assert float(held["x"][0]) < 0  # the step over the edge was the last one
    before = snapshot(tmp_path / "run")
    with pytest.raises(Diverged) as again:
        train(walk(), method, **options)
    assert (again.value.round, again.value.clients) == (k, [1])
    after = snapshot(tmp_path / "run")
    assert {name: before[name] for name in before if "checkpoint" in name} == {
        name: after[name] for name in after if "checkpoint" in name
    }


def test_rows_up_to_the_fall_are_kept_and_finite(tmp_path: Path) -> None:
    with pytest.raises(Diverged) as error:
        train(walk(), GD(), lr=0.1, rounds=500, out=tmp_path / "run", logging=Logging(every=1))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(error.value.round))
    assert all(math.isfinite(value) for row in rows for value in row.values())


class Counter(Callback):
    done = 0

    def round(self, round: int) -> None:
        self.done = round


def test_logging_seldom_does_not_delay_the_finding() -> None:
    found = []
    for log_every in (1, 7, 400):
        counter = Counter()
        with pytest.raises(Diverged) as error:
            train(
                walk(),
                GD(),
                lr=0.1,
                rounds=500,
                logging=Logging(every=log_every, evaluate_every=500),
                callbacks=[counter],
            )
        found += [error.value.round, counter.done]  # the broken round is not done
    assert len(set(found)) == 1


def kink(x: Tensor) -> Tensor:
    """Finite at 0, with a gradient that is not."""
    return x.abs().sqrt().sum() + bowl(x)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_gradient_that_is_not_finite_stops_the_run_and_names_the_client(tmp_path: Path, method: Any) -> None:
    problem = Problem.from_functions([bowl, kink, bowl], torch.zeros(2))
    with pytest.raises(Diverged, match=r"client 1 .*in round 0"):
        train(problem, method, lr=0.1, rounds=3, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_turns_nan_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    problem = Problem.from_functions([bowl], torch.zeros(2))
    with pytest.raises(UsageError, match="got nan in round 5"):
        train(problem, GD(), lr=lambda k: math.nan if k == 5 else 0.1, rounds=9, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nobody_drawn_in_round_0_and_nan_in_the_first_gradients_leaves_no_folder(tmp_path: Path) -> None:
    rate = Poisson(0.05)
    assert rate.draw(2, 0, seed=0) is not None
    assert len(rate.draw(2, 0, seed=0)) == 0  # type: ignore[arg-type]
    problem = Problem.from_functions([lambda x: bowl(x) * math.nan] * 2, torch.zeros(2))
    with pytest.raises(Diverged):
        train(problem, GD(), lr=0.1, rounds=500, participation=rate, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_coordinate_that_was_not_sent_stops_the_run_too(tmp_path: Path) -> None:
    problem = Problem.from_functions([bowl, lambda x: bowl(x) + x[0].abs().sqrt()], torch.zeros(20))
    with pytest.raises(Diverged, match=r"client 1 .*in round 0"):
        train(problem, EF21(RandK(1)), lr=0.1, rounds=1, out=tmp_path / "run")


def test_a_state_of_one_number_per_client_is_searched_too() -> None:
    """Adaptive clipping keeps such a state; the gradient of client 1 is infinite, and its loss is not."""
    root = [bowl, lambda x: x[0].sqrt(), bowl]
    problem = Problem.from_functions(root, torch.zeros(2))
    with pytest.raises(Diverged, match="the gradient of client 1 is not finite in round 0"):
        train(problem, AdaptiveClip(Clip21(0.1)), lr=0.1, rounds=5)
