"""Methods by name train with the command line's settings; mistakes in the arguments of `train` are one plain line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normec import (
    AdaptiveClip,
    Everyone,
    FixedSize,
    NormEC,
    Poisson,
    Privacy,
    Problem,
    Rotation,
    UsageError,
    train,
)
from normec.algorithms.catalogue import FOR_RECORDS
from normec.experiments import build, methods
from normec.settings import make
from normec.training.named_method import for_records, method_of, rounds_of_method

from ..support.runs import problem


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "name", ["normec", "clip21", "ef21", "dpsgd-clip", "gd", "fedavg", "scaffold", "dpsgd-adaptive"]
)
@pytest.mark.parametrize("private", [True, False])
def test_a_name_is_the_command_lines_method(name: str, private: bool) -> None:
    settings = make({"method": name, "clients": 5, "private": private, "model": "softmax"})
    of = build.problem(settings)
    privacy = Privacy(epsilon=8, trust="secure-sum") if private else None
    if private and name in ("ef21", "gd"):
        with pytest.raises(UsageError, match="without a bound"):
            train(of, name, rounds=1, privacy=privacy)
        return
    found = train(of, name, rounds=1, privacy=privacy, seed=0)
    expected = train(
        of,
        methods.build(settings, len(of.x0), of.tensor_sizes),
        lr=methods.step_size(settings),
        local=methods.local_steps(settings),
        rounds=1,
        privacy=privacy,
        seed=0,
    )
    assert torch.equal(found.x, expected.x)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", [*FOR_RECORDS, "clip21-sgd2m"])
def test_where_records_are_protected_too(name: str) -> None:
    settings = make({"method": name, "clients": 5, "unit": "record", "data": "digits"})
    of, privacy = build.problem(settings), Privacy(epsilon=8, unit="record")
    found = train(of, name, rounds=2, privacy=privacy, seed=0)
    expected = train(
        of,
        methods.build(settings, len(of.x0), of.tensor_sizes),
        lr=methods.step_size(settings),
        rounds=2,
        privacy=privacy,
        seed=0,
    )
    assert torch.equal(found.x, expected.x)
    assert rounds_of_method(for_records(name), private=True) == methods.rounds(settings)


def test_records_that_are_clipped_at_another_norm_have_the_usual_settings() -> None:
    of = build.problem(make({"clients": 5, "unit": "record", "data": "digits"}))
    clipped = train(of, "normec", rounds=1, privacy=Privacy(epsilon=8, unit="record", record_clip=0.5), seed=0)
    assert isinstance(clipped.method, NormEC)
    assert clipped.method.alpha == 0.01


@pytest.mark.slow
def test_the_usual_rounds() -> None:
    of = problem()
    assert train(of, "gd", device="cpu").state.round == 300
    assert train(of, "clip21", privacy=Privacy(epsilon=8, trust="local")).state.round == 50
    assert train(of, "gd", rounds=3).state.round == 3


@pytest.mark.parametrize(
    ("participation", "share"),
    [(None, 1.0), (Everyone(), 1.0), (Poisson(0.3), 0.3), (FixedSize(3), 3 / 4), (Rotation(2, 0.5), 1 / 4)],
)
def test_adaptive_clipping_gets_the_share_of_the_clients_that_take_part(participation: Any, share: float) -> None:
    method, _ = method_of("dpsgd-adaptive", problem(), False, participation)
    assert isinstance(method, AdaptiveClip)
    assert method.participation == pytest.approx(share)


class FirstTwo:
    """A rule of the user's own, which states no share."""

    def draw(self, clients: int, round: int, seed: int) -> Tensor:  # noqa: ARG002
        return torch.arange(2)


def test_only_methods_that_need_the_share_refuse_a_rule_whose_share_is_not_known() -> None:
    assert train(problem(), "normec", rounds=2, participation=FirstTwo()).state.messages == 4
    with pytest.raises(UsageError, match=r"dpsgd-adaptive depends on the share .* which FirstTwo does not state; give"):
        train(problem(), "dpsgd-adaptive", rounds=2, participation=FirstTwo())


def test_default_settings_of_a_method() -> None:
    assert NormEC() == NormEC(alpha=0.01, beta=0.1)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown device": ({"device": "quantum"}, "there is no device 'quantum' here"),
    "a name that is nearly right": ({"method": "normex"}, "did you mean 'normec'"),
    "a class": ({"method": NormEC}, "got the class NormEC"),
    "a number as privacy": ({"privacy": 8}, r"privacy must be a normec.Privacy, such as Privacy\(epsilon=8\), got 8"),
    "no step size": ({"lr": None}, "lr must be given"),
    "an endless step": ({"lr": 1e300}, "lr must lie in"),
    "swapped arguments": ({"problem": NormEC()}, "the first argument must be a normec.Problem, got NormEC"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    wrong, says = MISTAKES[name]
    options: dict[str, Any] = {"problem": problem(), "method": NormEC(), "lr": 0.1, "rounds": 2} | wrong
    with pytest.raises(UsageError, match=says):
        train(**options)


def test_a_scheduler_is_no_step_size() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(UsageError, match="a scheduler goes into lr_schedule"):
        train(problem(), NormEC(), lr=torch.optim.lr_scheduler.StepLR(optimizer, 1), rounds=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_no_mean_is_found_at_the_start(reduction: str) -> None:
    with pytest.raises(UsageError, match=f"got reduction='{reduction}'"):
        Problem(nn.Linear(2, 2), nn.CrossEntropyLoss(reduction=reduction), [])


def test_a_problem_with_its_parts_in_another_order() -> None:
    with pytest.raises(UsageError, match="in this order"):
        Problem([], F.cross_entropy, nn.Linear(2, 2))  # type: ignore[arg-type]
