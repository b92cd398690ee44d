"""Stop and go on: after a Ctrl-C at any round, the same call ends in the bits of the run that was left alone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import (
    DPSGD,
    EF21,
    GD,
    Clip,
    Clip21,
    Compute,
    FixedSize,
    LocalSteps,
    Logging,
    Memory,
    NormEC,
    Poisson,
    Problem,
    RandK,
    SmoothedNorm,
    Storage,
    TopK,
    UsageError,
    train,
)

from ..support.runs import StopAt, problem, same, snapshot

METHODS = {
    "normec": NormEC(0.1, 0.3),
    "normec-no-server-norm": NormEC(0.1, 0.3, server_norm=False),
    "normec-decay": NormEC(0.1, 0.3, decay=0.1),
    "clip21": Clip21(0.3),
    "top-k": EF21(TopK(3)),
    "rand-k": EF21(RandK(3)),
    "dpsgd-clip": DPSGD(Clip(0.5)),
    "dpsgd-norm": DPSGD(SmoothedNorm(0.1), beta=0.5),
    "dpsgd-momentum": DPSGD(Clip(0.5), momentum=0.8),
    "gd": GD(),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "batches": {"batch_size": 4},
    "sampled": {"participation": Poisson(0.4)},
    "rare": {"participation": Poisson(0.05), "batch_size": 3},
    "fixed": {"participation": FixedSize(3), "batch_size": 4, "logging": Logging(full_gradient=True)},
    "local steps": {"local": LocalSteps(steps=3, lr=0.1, momentum=0.5), "batch_size": 4},
    "local epochs": {"local": LocalSteps(epochs=2, lr=0.1, optimizer="adam"), "batch_size": 4},
    "gradient": {"memory": Memory(initial="gradient")},
    "given": {"memory": Memory(initial=torch.full((15,), 0.1))},
    "schedule": {"lr": lambda k: 0.3 / (1 + k)},
    "rows": {"logging": Logging(every=3, evaluate_every=4)},
    "float64": {"compute": Compute(dtype=torch.float64), "batch_size": 4},
}


def check(out: Path, kind: str, method: Any, stops: list[int], **options: Any) -> None:
    options = {"lr": 0.2, "rounds": 13, "seed": 7, "logging": Logging(every=1, evaluate_every=2)} | options
    alone = train(problem(kind), method, out=out / "alone", **options)
    for stop in stops:
        halted = train(problem(kind), method, out=out / "stopped", callbacks=[StopAt(stop)], **options)
        assert halted.state.round == stop
        assert halted.finished == (stop == 13)
    resumed = train(problem(kind), method, out=out / "stopped", **options)
    same(alone, resumed)
    same(alone, train(problem(kind), method, **options))  # and a folder changes nothing
    here, there = snapshot(out / "stopped"), snapshot(out / "alone")
    assert here.keys() == there.keys() >= {"metrics.jsonl", "checkpoint/latest.json"}
    for name in here.keys() - {"checkpoint/latest.json", "summary.json", "report.html"}:  # which hold timings
        assert here[name] == there[name], name


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("kind", ["linear", "batchnorm"])
def test_every_method_goes_on_to_the_same_bits(tmp_path: Path, kind: str, method: Any) -> None:
    check(tmp_path, kind, method, stops=[5], batch_size=4)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_setting_goes_on_to_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    check(tmp_path, "linear", NormEC(0.1, 0.3), stops=[4], **options)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", ["linear", "batchnorm", "dropout"])
def test_stopping_after_many_rounds_of_few(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, Clip21(0.3), stops=[1, 2, 3, 7, 12], participation=FixedSize(2), batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batchnorm", "dropout"])
def test_local_steps_of_models_with_buffers_and_dropout_go_on(tmp_path: Path, kind: str) -> None:
    local = LocalSteps(steps=3, lr=0.1, prox=0.2)
    check(tmp_path, kind, NormEC(0.1, 0.3), stops=[2, 9], local=local, participation=FixedSize(2), batch_size=4)


def test_a_folder_belongs_to_its_local_steps(tmp_path: Path) -> None:
    how: dict[str, Any] = {"lr": 0.2, "rounds": 3, "out": tmp_path / "run"}
    train(problem(), NormEC(0.1, 0.3), local=LocalSteps(steps=3, lr=0.1), **how)
    more, near = LocalSteps(steps=4, lr=0.1), LocalSteps(steps=3, lr=0.1, prox=0.1)
    for other, named in ((None, "local"), (more, "local_steps is 3 there, 4 here"), (near, "prox is 0.0 there")):
        with pytest.raises(UsageError, match=named):
            train(problem(), NormEC(0.1, 0.3), local=other, **how)


@pytest.mark.slow
def test_stopping_after_the_last_round_is_finishing(tmp_path: Path) -> None:
    check(tmp_path, "linear", NormEC(0.1, 0.3), stops=[13])


def test_functions_resume_too(tmp_path: Path) -> None:
    def make() -> Any:
        return Problem.from_functions([lambda x, c=c: ((x - c) ** 4).sum() for c in range(3)], torch.full((2,), 0.5))

    options: dict[str, Any] = {"lr": 0.01, "rounds": 9, "logging": Logging(every=1)}
    alone = train(make(), EF21(RandK(1)), **options)
    train(make(), EF21(RandK(1)), out=tmp_path / "run", callbacks=[StopAt(4)], **options)
    same(alone, train(make(), EF21(RandK(1)), out=tmp_path / "run", **options))


def test_a_finished_run_is_returned_as_it_is(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": 0.2, "rounds": 6, "out": tmp_path / "run"}
    first = train(problem("batchnorm"), GD(), **options)
    before = snapshot(tmp_path / "run")
    again = train(problem("batchnorm"), GD(), **options)
    same(first, again)
    after = snapshot(tmp_path / "run")
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in after if not name.endswith("latest.json"))


def test_ctrl_c_leaves_the_handler_as_it_was_and_a_second_one_is_immediate(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    options: dict[str, Any] = {
        "lr": 0.2,
        "rounds": 9,
        "out": tmp_path / "run",
        "storage": Storage(checkpoint_seconds=0),
    }
    with pytest.raises(KeyboardInterrupt):
        train(problem(), GD(), callbacks=[StopAt(4, times=2)], **options)
    assert signal.getsignal(signal.SIGINT) is handler
    halted = train(problem(), GD(), callbacks=[StopAt(6)], **options)
    assert not halted.finished
    assert signal.getsignal(signal.SIGINT) is handler
    same(train(problem(), GD(), lr=0.2, rounds=9), train(problem(), GD(), **options))


def test_timings_go_on_where_they_were(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": 0.2, "rounds": 12, "out": tmp_path / "run"}
    halted = train(problem(), GD(), callbacks=[StopAt(7)], **options)
    resumed = train(problem(), GD(), **options)
    assert resumed.timings["gradients"] > halted.timings["gradients"]
    assert resumed.timings["total"] > halted.timings["total"]
