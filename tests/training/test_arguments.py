"""Every number a caller can get wrong: refused in one line that names it, before anything is written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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
    EarlyStopping,
    FixedSize,
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
    errors,
    train,
)

from ..support.runs import problem

NAN, INF = math.nan, math.inf
MAKERS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "alpha": (SmoothedNorm, [-1, -1e-300, NAN, INF, -INF]),
    "alpha of NormEC": (lambda v: NormEC(v, 0.1), [-1, NAN, INF]),
    "beta": (lambda v: NormEC(0.1, v), [0, -1, NAN, INF, -INF]),
    "beta of DPSGD": (lambda v: DPSGD(Clip(1.0), v), [0, -1, NAN, INF]),
    "decay": (lambda v: NormEC(0.1, 0.1, decay=v), [-0.1, 1, 1.5, NAN, INF]),
    "decay of Clip21": (lambda v: Clip21(0.1, v), [-0.1, 1, NAN]),
    "momentum": (lambda v: DPSGD(Clip(1.0), momentum=v), [-0.1, 1, 1.5, NAN, INF]),
    "tau": (Clip, [0, -1, NAN, INF, -INF]),
    "tau of Clip21": (Clip21, [0, -1, NAN, INF]),
    "k": (TopK, [0, -1, 1.5, NAN, INF, True]),
    "k of RandK": (RandK, [0, -1, 1.5, NAN, INF]),
    "rate": (Poisson, [0, -0.1, 1.1, NAN, INF]),
    "count": (FixedSize, [0, -1, 1.5, NAN, INF]),
}


@pytest.mark.parametrize(
    ("name", "make", "value"),
    [(name.split()[0], make, value) for name, (make, values) in MAKERS.items() for value in values],
)
def test_methods_operators_and_samplings_refuse(name: str, make: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{name} must .*got {re.escape(str(value))}$") as error:
        make(value)
    assert "\n" not in str(error.value)


START = ["grad", torch.full((15,), NAN), torch.full((15,), INF), torch.zeros(14), torch.zeros(3, 15)]
OPTIONS: dict[str, list[Any]] = {
    "lr": [NAN, INF, -INF],
    "rounds": [0, -1, 1.5, NAN, INF],
    "epochs": [0, -1, 1.5, NAN, INF],
    "batch_size": [0, -1, 1.5, NAN, INF],
    "seed": [-1, 1.5, NAN],
    "logging": [None, True, {"every": 1}],
    "memory": [None, "gradient", Logging()],
    "compute": [None, "loop", torch.float64],
    "storage": [None, 30.0],
}
GROUPED: list[tuple[str, Callable[[Any], dict[str, Any]], list[Any]]] = [
    ("log_every", lambda value: {"logging": Logging(every=value)}, [0, -1, 1.5, NAN, True]),
    ("evaluate_every", lambda value: {"logging": Logging(evaluate_every=value)}, [0, -1, 1.5, NAN]),
    ("checkpoint_seconds", lambda value: {"storage": Storage(checkpoint_seconds=value)}, [-1, NAN, INF]),
    ("initial_memory", lambda value: {"memory": Memory(initial=value)}, START),
    ("memory_dtype", lambda value: {"memory": Memory(dtype=value)}, [torch.float16, torch.int8]),
    ("memory_home", lambda value: {"memory": Memory(home=value)}, ["disc"]),
    ("engine", lambda value: {"compute": Compute(engine=value)}, ["lop"]),
    ("precision", lambda value: {"compute": Compute(precision=value)}, ["fp8"]),
]


def refused(match: str, out: Path, of: Any = None, method: Any = None, **options: Any) -> None:
    rounds = {} if "epochs" in options else {"rounds": 3}
    with pytest.raises(UsageError, match=match) as error:
        train(of or problem(), method or NormEC(0.1, 0.1), out=out / "run", **({"lr": 0.1} | rounds | options))
    assert "\n" not in str(error.value)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OPTIONS.items() for value in values])
def test_training_refuses(tmp_path: Path, name: str, value: Any) -> None:
    refused(name, tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("name", "grouped", "value"), [(name, grouped, value) for name, grouped, values in GROUPED for value in values]
)
def test_training_refuses_in_groups(
    tmp_path: Path, name: str, grouped: Callable[[Any], dict[str, Any]], value: Any
) -> None:
    with pytest.raises(UsageError, match=name) as error:
        train(problem(), NormEC(0.1, 0.1), lr=0.1, rounds=3, out=tmp_path / "run", **grouped(value))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_training_refuses_a_negative_step_size(tmp_path: Path) -> None:
    refused("lr", tmp_path, lr=-0.1)


def test_training_refuses_epochs_of_empty_batches(tmp_path: Path) -> None:
    refused("batch_size", tmp_path, epochs=1, batch_size=0)


def test_training_refuses_batches_that_no_client_can_fill(tmp_path: Path) -> None:
    most = int(problem().records.sizes.max())
    refused("is more than any client has", tmp_path, batch_size=most + 1)
    assert train(problem(), NormEC(0.1, 0.1), lr=0.1, rounds=1, batch_size=most).finished


def test_functions_refuse_a_batch_size(tmp_path: Path) -> None:
    refused("batch_size", tmp_path, Problem.from_functions([lambda x: x.sum()], torch.ones(2)), batch_size=-5)


def test_rounds_or_epochs_not_both_and_not_neither(tmp_path: Path) -> None:
    refused("give rounds or epochs, one of them", tmp_path, rounds=3, epochs=2)
    refused("give rounds or epochs, one of them", tmp_path, rounds=None)


def test_what_does_not_fit_the_problem_is_refused(tmp_path: Path) -> None:
    refused("k must be at most the dimension 15, got 16", tmp_path, method=EF21(TopK(16)))
    refused("cannot draw 5 of 4 clients", tmp_path, participation=FixedSize(5))
    refused(
        "gd has no memory; initial_memory must stay 'zero'", tmp_path, method=GD(), memory=Memory(initial="gradient")
    )
    refused("dpsgd has no memory", tmp_path, method=DPSGD(Clip(1.0)), memory=Memory(initial=torch.zeros(15)))


def test_zero_is_a_step_size_and_alpha(tmp_path: Path) -> None:
    run = train(problem(), NormEC(0.0, 0.1), lr=0.0, rounds=2, out=tmp_path / "run")
    assert torch.equal(run.x, problem().x0)


CHECKS: dict[str, tuple[Callable[..., None], list[Any], list[Any]]] = {
    "finite": (errors.finite, [0, -5, 1e300], [NAN, INF, -INF]),
    "positive": (errors.positive, [1e-300, 5], [0, -1, NAN, INF]),
    "non_negative": (errors.non_negative, [0, 0.0, 5], [-1e-300, NAN, INF]),
    "open_unit": (errors.open_unit, [1e-300, 0.5], [0, 1, -1, 2, NAN]),
    "fraction": (errors.fraction, [1e-300, 1], [0, -1, 1.0001, NAN]),
    "at_least": (lambda **v: errors.at_least(2, **v), [2, 100], [1, -2, 2.5, 3.0, True, NAN, "3"]),
}


@pytest.mark.parametrize(("check", "good", "bad"), CHECKS.values(), ids=CHECKS.keys())
def test_checks_name_the_argument_and_the_value(check: Callable[..., None], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check(width=value)
        check(width=value, other=value)
    for value in bad:
        with pytest.raises(UsageError, match=rf"^width must .*, got {re.escape(repr(value))}$"):
            check(width=value)
        with pytest.raises(UsageError, match=r"^other must "):
            check(width=good[0], other=value)


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    errors.one_of(("normec", "clip21"), method="clip21")
    with pytest.raises(
        UsageError, match=r"^unknown method 'clip12', did you mean 'clip21'\?; choose from normec, clip21$"
    ):
        errors.one_of(("normec", "clip21"), method="clip12")
    with pytest.raises(UsageError, match=r"^unknown method 'zzz'; choose from normec, clip21$"):
        errors.one_of(("normec", "clip21"), method="zzz")


def test_a_usage_error_is_a_value_error_and_divergence_is_not() -> None:
    assert issubclass(UsageError, ValueError)
    assert not issubclass(errors.Diverged, ValueError)


def test_numbers_as_text_are_refused_like_other_wrong_values(tmp_path: Path) -> None:
    for check in (errors.finite, errors.positive, errors.non_negative, errors.open_unit, errors.fraction):
        with pytest.raises(UsageError, match=r"^width must .*, got the text '0\.5'$"):
            check(width="0.5")  # type: ignore[arg-type]
    refused("rounds must be a whole number >= 1, got '2'", tmp_path, rounds="2")
    refused("lr must be a number, .*, got the text '0.1'", tmp_path, lr="0.1")


def test_objects_of_another_kind_are_refused(tmp_path: Path) -> None:
    refused(
        "callbacks must be a list of objects of normec.Callback, got EarlyStopping", tmp_path, callbacks=EarlyStopping()
    )
    refused("callbacks must be a list of .*, got builtin_function", tmp_path, callbacks=[print])
    refused(r"participation must be normec.Poisson\(rate\), normec.FixedSize", tmp_path, participation=0.5)
    adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    refused("server_optimizer must be .*, got Adam$", tmp_path, server_optimizer=adam)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 10)
    refused(r"lr_schedule must be .*, such as lambda optimizer: .*, got StepLR; ", tmp_path, lr_schedule=scheduler)
    refused("cannot be made: .*'step_size'; give its settings in a function", tmp_path, lr_schedule=type(scheduler))
    with pytest.raises(UsageError, match="clients must be a list of data sets, one for each client, got 5"):
        Problem(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, 5)  # type: ignore[arg-type]
