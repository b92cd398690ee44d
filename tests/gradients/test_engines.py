"""Whole runs: every method ends alike under every engine, reruns are equal to the bit, a run may change engines."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Compute, FixedSize, Logging, Memory, NormEC, Poisson, Privacy, Problem, Run, UsageError, train
from normec.experiments import build
from normec.gradients.choice import choose_engine
from normec.gradients.record_clip import RecordClip
from normec.sampling.batches import PoissonBatches
from normec.settings import make

from ..support.runs import StopAt, same, states
from .cases import BATCH, METHODS, problem

ENGINES = ("loop", "batched", "shared", "recorded")
SETTINGS: dict[str, dict[str, Any]] = {
    "batches": {"batch_size": BATCH},
    "sampled": {"batch_size": BATCH, "participation": FixedSize(3)},
    "full": {},
}
SOME = ("normec", "clip21-decay", "ef21-rand-k", "dpsgd-norm")
RUNS = [(name, "batches") for name in METHODS] + [(name, "sampled") for name in SOME] + [("normec-decay", "full")]


def run(engine: str, method: Any, name: str = "small", dtype: torch.dtype | None = None, **options: Any) -> Run:
    options = {"lr": 0.2, "rounds": 9, "seed": 3, "logging": Logging(every=7, evaluate_every=100)} | options
    found = train(problem(name), method, compute=Compute(engine=engine, dtype=dtype), **options)
    assert found.engine == engine
    return found


def close(found: Run, expected: Run) -> None:
    for part, value in states(expected).items():
        torch.testing.assert_close(states(found)[part], value, rtol=1e-9, atol=1e-9)
    for key, rows in expected.state.buffers.items():
        torch.testing.assert_close(found.state.buffers[key], rows, rtol=1e-9, atol=1e-9)
    assert found.state.messages == expected.state.messages
    assert [row.keys() for row in found.history] == [row.keys() for row in expected.history]
    for row, other in zip(found.history, expected.history, strict=True):
        assert row == pytest.approx(other, rel=1e-8, abs=1e-9)


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(("name", "setting"), RUNS)
def test_every_method_ends_alike(name: str, setting: str) -> None:
    expected = run("loop", METHODS[name], **SETTINGS[setting])
    for engine in ENGINES[1:]:
        close(run(engine, METHODS[name], **SETTINGS[setting]), expected)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["text", "augmented pixels", "penalty"])
def test_other_problems_end_alike_with_every_kind_of_row(name: str) -> None:
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "logging": Logging(every=7, evaluate_every=100, full_gradient=True),
        "participation": Poisson(0.6),
    }
    expected = run("loop", NormEC(0.1, 0.3), name, **options, memory=Memory(initial="gradient"))
    for engine in ENGINES[1:]:
        close(run(engine, NormEC(0.1, 0.3), name, **options, memory=Memory(initial="gradient")), expected)


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["secure-sum", "local"])
def test_private_runs_end_alike(trust: Any) -> None:
    privacy = Privacy(epsilon=8, delta=1e-5, unit="client", relation="zero-out", trust=trust)
    expected = run("loop", NormEC(0.1, 0.3, decay=0.1), "norms", privacy=privacy, batch_size=BATCH)
    for engine in ENGINES[1:]:
        close(run(engine, NormEC(0.1, 0.3, decay=0.1), "norms", privacy=privacy, batch_size=BATCH), expected)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_reruns_are_equal_to_the_bit(engine: str, setting: str) -> None:
    options = SETTINGS[setting] | {"dtype": torch.float32}
    same(run(engine, NormEC(0.1, 0.3), **options), run(engine, NormEC(0.1, 0.3), **options))


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize(("before", "after"), list(permutations(ENGINES, 2)))
def test_a_run_goes_on_under_another_engine(before: str, after: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": BATCH, "logging": Logging(every=1)}
    halted = run(before, NormEC(0.1, 0.3), out=tmp_path / "run", callbacks=[StopAt(7)], **options)
    assert halted.state.round == 7
    close(run(after, NormEC(0.1, 0.3), out=tmp_path / "run", **options), run("loop", NormEC(0.1, 0.3), **options))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("linear", "shared"), ("batched", "linear"), ("linear", "loop")])
def test_a_run_goes_on_with_and_without_the_closed_form(before: str, after: str, tmp_path: Path) -> None:
    of = build.problem(make({"clients": 5, "model": "softmax"})).to(torch.device("cpu"), torch.float64)
    options: dict[str, Any] = {"lr": 0.2, "rounds": 9, "batch_size": 9, "logging": Logging(every=100)}
    alone = train(of, NormEC(0.1, 0.3), compute=Compute(engine="loop"), **options)
    train(of, NormEC(0.1, 0.3), compute=Compute(engine=before), out=tmp_path / "run", callbacks=[StopAt(7)], **options)
    close(train(of, NormEC(0.1, 0.3), compute=Compute(engine=after), out=tmp_path / "run", **options), alone)


def test_what_no_fast_engine_does_is_done_by_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    of = problem("small")
    assert of.sizes is not None
    assert choose_engine("shared", of, PoissonBatches(of.sizes, 0.5, 0), 0).name == "loop"
    assert choose_engine("batched", of, None, 0, record_clip=RecordClip(1.0)).name == "loop"
    assert "Poisson batches" in caplog.messages[0]
    assert "record by record" in caplog.messages[1]
    assert len(caplog.messages) == 2
    assert choose_engine("auto", of, PoissonBatches(of.sizes, 0.5, 0), 0).name == "loop"  # nobody asked: nothing to say
    assert len(caplog.messages) == 2


def test_unknown_names_are_refused_in_one_line() -> None:
    wrong: list[dict[str, Any]] = [{"engine": "shard"}, {"precision": "fp8"}]
    for given in wrong:
        with pytest.raises(UsageError, match=r"did you mean|choose from") as error:
            train(problem("small"), NormEC(0.1, 0.3), lr=0.1, rounds=1, compute=Compute(**given))
        assert "\n" not in str(error.value)


def test_a_cpu_takes_large_products_client_by_client() -> None:
    """Many small clients gain by one pass; a client whose products keep the processor busy does not."""
    chosen = {}
    for width in (8, 1024):
        model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        sets = [TensorDataset(torch.zeros(400, 16), torch.zeros(400, dtype=torch.int64))] * 2
        chosen[width] = choose_engine("auto", Problem(model, F.cross_entropy, sets), None, 0).name
    assert chosen == {8: "shared", 1024: "loop"}
