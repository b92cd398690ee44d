"""Running out of memory: blocks shrink, or the loop takes over; gradients and statistics are as if nothing had been.

The stand-in for a small device raises when a pass has done all its work, so that buffers have been touched.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from normec import GD, Compute, FixedSize, NormEC, train
from normec.gradients.choice import choose_engine
from normec.gradients.shared.engine import SharedEngine
from normec.sampling.batches import Batches

from ..support.runs import alike
from .cases import BATCH, apart, everything, problem
from .test_engines import close
from .test_verified_engine import lines


def narrow(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Room for `most` clients at a time; returns the sizes that were asked for."""
    asked: list[int] = []
    whole = SharedEngine._pass

    def passed(self: SharedEngine, *args: Any) -> Tensor:
        losses = whole(self, *args)
        asked.append(len(losses))
        if len(losses) > most:
            raise torch.OutOfMemoryError("no room")
        return losses

    monkeypatch.setattr(SharedEngine, "_pass", passed)
    return asked


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("most", [1, 2])
def test_blocks_shrink_until_they_fit(
    most: int, sampled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"lr": 0.3, "rounds": 8, "batch_size": BATCH, "seed": 2}
    if sampled:
        options["participation"] = FixedSize(4)
    loop = train(problem("batch norms"), NormEC(0.1, 0.3), compute=Compute(engine="loop"), **options)
    asked = narrow(monkeypatch, most)
    run = train(problem("batch norms"), NormEC(0.1, 0.3), compute=Compute(engine="shared"), **options)
    assert max(asked) > most
    assert max(asked[-5:]) <= most
    assert run.engine == "shared"
    assert lines(caplog) == []
    close(run, loop)


@pytest.mark.slow
def test_without_room_for_one_client_the_loop_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"lr": 0.3, "rounds": 4, "batch_size": BATCH}
    loop = train(problem("batch norms"), GD(), compute=Compute(engine="loop"), **options)
    narrow(monkeypatch, 0)
    run = train(problem("batch norms"), GD(), compute=Compute(engine="shared"), **options)
    reason = "the device has too little memory for it"
    assert lines(caplog) == [f"engine shared is not used; the loop runs instead: {reason}"]
    alike(run, loop)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("cannot\nbe done")])
def test_what_fails_in_the_midst_of_a_round_is_done_by_the_loop(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The block of the short client is done, and taken; every other one fails, though the check went well."""
    of = problem("batch norms")
    assert of.sizes is not None
    engine = choose_engine("shared", of, Batches(of.sizes, BATCH, 1), 1)
    expected = everything(choose_engine("loop", of, Batches(of.sizes, BATCH, 1), 1), of)
    whole = SharedEngine._pass

    def passed(
        self: SharedEngine, x: Tensor, buffers: Any, rows: Any, grads: Tensor, numbers: Tensor, *more: Any
    ) -> Tensor:
        losses = whole(self, x, buffers, rows, grads, numbers, *more)
        if self._problem is of and numbers.shape[1] == BATCH:
            raise error
        return losses

    monkeypatch.setattr(SharedEngine, "_pass", passed)
    assert apart(everything(engine, of), expected) < 1e-10
    assert engine.name == "loop"
    assert len(lines(caplog)) == 1
    assert "\n" not in lines(caplog)[0]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["shared", "batched", "loop"])
def test_a_run_s_engine_is_gone_with_it(name: str) -> None:
    """A recorded engine holds gigabytes of a GPU, and Python's collector of cycles does not know that."""
    given = problem("batch norms")
    engine = choose_engine(name, given, Batches(given.sizes, BATCH, 2), 2)
    kept = weakref.ref(engine)
    gc.collect()
    gc.disable()
    try:
        train(given, NormEC(0.1, 0.3), lr=0.3, rounds=3, batch_size=BATCH, seed=2, compute=Compute(engine=engine))
        del engine
        assert kept() is None
    finally:
        gc.enable()
