"""The states of optimizers: where they may be loaded, which releases are then counted, and which noise is drawn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normec import Clip, Privacy
from normec import distributed as cluster
from normec.distributed import ClientOptimizer
from normec.errors import BudgetSpent, UsageError

from .optimizers import released

pytestmark = pytest.mark.usefixtures("new_objects")

GIVEN: dict[str, Any] = {"sigma": 5.0, "noise": "seeded", "trust": "secure-sum", "relation": "zero-out"}


def normec(parameters: list[nn.Parameter], clients: int = 1) -> ClientOptimizer:
    return cluster.NormEC(parameters, 0.0, 0.1, 5.0, clients=clients, privacy=Privacy(**GIVEN), rounds=10)


def test_a_state_of_one_client_is_no_state_of_four() -> None:
    """Four clients would otherwise all begin with the memory of one."""
    one = normec([nn.Parameter(torch.zeros(6))])
    four = normec([nn.Parameter(torch.zeros(6))], clients=4)
    with pytest.raises(UsageError, match="clients is 1 in the state, 4 here"):
        four.load_state_dict(one.state_dict())
    with pytest.raises(UsageError, match="clients is 4 in the state, 1 here"):
        one.load_state_dict(four.state_dict())


def test_a_state_of_other_weights_is_refused() -> None:
    def made(weights: tuple[float, ...] | None) -> ClientOptimizer:
        how: dict[str, Any] = {"privacy": Privacy(**GIVEN), "rounds": 10, "weights": weights}
        return cluster.NormEC([nn.Parameter(torch.zeros(6))], 0.0, 0.1, 5.0, clients=2, **how)

    weighted, equal = made((0.75, 0.25)), made(None)
    with pytest.raises(UsageError, match=r"weights is \[1.5, 0.5\] in the state, \[\] here"):
        equal.load_state_dict(weighted.state_dict())
    with pytest.raises(UsageError, match=r"weights is \[\] in the state, \[1.5, 0.5\] here"):
        weighted.load_state_dict(equal.state_dict())


def test_a_state_of_other_shapes_is_refused() -> None:
    one = normec([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))])
    other = normec([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))])
    with pytest.raises(UsageError, match=r"parameters is \[\[1\], \[2\]\] in the state, \[\[2\], \[1\]\] here"):
        other.load_state_dict(one.state_dict())


def test_a_state_with_another_layer_frozen_is_refused() -> None:
    layers = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)]
    one, other = normec(layers), normec(layers[::-1])
    with pytest.raises(UsageError, match=r"parameters is \[\[2\], None\] in the state, \[None, \[2\]\] here"):
        other.load_state_dict(one.state_dict())


def stated(**statement: Any) -> tuple[nn.Parameter, ClientOptimizer]:
    x = nn.Parameter(torch.zeros(4))
    return x, cluster.DPSGD([x], 0.1, Clip(1.0), privacy=Privacy(**GIVEN | statement), rounds=9)


@pytest.mark.parametrize(
    ("name", "here", "words"),
    [
        ("relation", "replace", "relation is 'zero-out' in the state, 'replace' here"),
        ("trust", "local", "trust is 'secure-sum' in the state, 'local' here"),
        ("delta", 1e-3, "delta is 1e-05 in the state, 0.001 here"),
        ("sigma", 50.0, "sigma is 5.0 in the state, 50.0 here"),
    ],
)
def test_a_state_of_another_statement_is_refused(name: str, here: Any, words: str) -> None:
    """The releases of one statement have another ε under another statement."""
    x, optimizer = stated()
    released(x, optimizer)
    _, other = stated(**{name: here})
    with pytest.raises(UsageError, match=f"{words}; keep the statement, or start again"):
        other.load_state_dict(optimizer.state_dict())
    assert other.spent().releases == 0


def simulated(seed: int | None = 3, lr: float = 1.0, start: float = 0.0) -> tuple[nn.Parameter, ClientOptimizer]:
    x = nn.Parameter(torch.full((4,), start, dtype=torch.float64))
    return x, cluster.DPSGD([x], lr, Clip(1.0), privacy=Privacy(**GIVEN), rounds=9, seed=seed)


def noise_of(seed: int, lr: float, start: float) -> Tensor:
    """The noise of a first round: its gradient is zero."""
    return released(*simulated(seed, lr, start)) / lr


@pytest.mark.slow
def test_optimizers_with_one_seed_have_different_noise_unless_they_are_alike() -> None:
    same, again = noise_of(3, 1.0, 0.0), noise_of(3, 1.0, 0.0)
    assert torch.equal(same, again), "a given seed repeats a simulation"
    for other in (noise_of(3, 2.0, 0.0), noise_of(3, 1.0, 1.0), noise_of(4, 1.0, 0.0)):
        assert not torch.isclose(same, other, rtol=1e-6).any()


def test_the_noise_depends_on_frozen_layers_too() -> None:
    noise = []
    for frozen in (0.0, 1.0):
        x, still = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.full((2,), frozen), requires_grad=False)
        noise.append(released(x, cluster.DPSGD([x, still], 1.0, Clip(1.0), privacy=Privacy(**GIVEN), rounds=9, seed=3)))
    assert not torch.isclose(*noise).any()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("seed", [None, 3])
def test_optimizers_that_go_on_from_one_state_share_their_account_and_no_noise(seed: int | None) -> None:
    """Four releases of round 0 in one process, by three optimizers and one that is rolled back."""
    x, first = simulated(seed)
    state = copy.deepcopy(first.state_dict())
    seen = [released(x, first)]
    others = []
    for _ in range(2):
        x, other = simulated(seed)
        other.load_state_dict(copy.deepcopy(state))
        seen.append(released(x, other))
        others.append(other)
    x, last = simulated(seed)
    last.load_state_dict(copy.deepcopy(others[0].state_dict()))
    last.load_state_dict(copy.deepcopy(state))
    seen.append(released(x, last))
    assert all(not torch.isclose(a, b).any() for i, a in enumerate(seen) for b in seen[:i]), "noise was used twice"
    assert [optimizer.spent().releases for optimizer in (first, *others, last)] == [4] * 4


def test_releases_of_optimizers_that_go_on_from_one_state_count_against_one_budget() -> None:
    target = {"epsilon": 2.0, "sigma": None}
    x, first = stated(**target)
    state = copy.deepcopy(first.state_dict())
    for _ in range(9):
        released(x, first)
    y, second = stated(**target)
    second.load_state_dict(state)
    with pytest.raises(BudgetSpent, match="above the budget of 2"):
        released(y, second)


def test_an_optimizer_that_is_made_anew_at_a_later_x_goes_on_with_the_noise_of_its_state() -> None:
    x, whole = simulated()
    expected = [released(x, whole) for _ in range(4)]
    x, first = simulated()
    for _ in range(2):
        released(x, first)
    y, second = simulated(start=7.0)  # in place of the saved x
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for noise in expected[2:]:
        torch.testing.assert_close(released(y, second), noise)


def test_what_a_given_seed_means_is_listed(tmp_path: Path) -> None:
    words = "other trainings with the same seed, start and settings"
    x = nn.Parameter(torch.zeros(4))
    secure: dict[str, Any] = {"privacy": Privacy(**GIVEN | {"noise": "secure"}), "rounds": 9, "ledger": tmp_path / "l"}
    kept = cluster.DPSGD([x], 1.0, Clip(1.0), seed=3, **secure)
    for optimizer, listed in ((simulated(3)[1], True), (simulated(None)[1], False), (kept, False)):
        assert any(words in gap for gap in optimizer.spent().not_covered) is listed
