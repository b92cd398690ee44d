"""Who takes part: the rates of each rule, and draws that depend on nothing but the seed and the round."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normec import Everyone, FixedSize, Poisson, Rotation, UsageError
from normec.sampling.participation import Participation


def draws(participation: Participation, n: int, rounds: int, seed: int = 0) -> Tensor:
    """[rounds, n] of zeros and ones."""
    table = torch.zeros(rounds, n, dtype=torch.float64)
    for k in range(rounds):
        drawn = participation.draw(n, k, seed)
        assert drawn is not None
        assert torch.equal(drawn, drawn.unique())  # sorted, nobody twice
        table[k, drawn] = 1
    return table


def test_poisson_draws_each_client_alone_with_its_rate() -> None:
    n, rounds, rate = 20, 1500, 0.3
    table = draws(Poisson(rate), n, rounds)
    spread = math.sqrt(rate * (1 - rate) / rounds)
    assert float((table.mean(0) - rate).abs().max()) < 5 * spread
    assert float(table.sum(1).var()) == pytest.approx(n * rate * (1 - rate), rel=0.2)  # binomial: independent coins
    paired = torch.corrcoef(table.T) - torch.eye(n, dtype=torch.float64)
    assert float(paired.abs().max()) < 6 / math.sqrt(rounds)
    in_a_row = torch.corrcoef(torch.stack((table[:-1].flatten(), table[1:].flatten())))[0, 1]
    assert abs(float(in_a_row)) < 5 / math.sqrt(table.numel())


def test_fixed_size_draws_that_many_uniformly() -> None:
    table = draws(FixedSize(3), 10, 1500)
    assert bool((table.sum(1) == 3).all())
    assert float((table.mean(0) - 0.3).abs().max()) < 5 * math.sqrt(0.3 * 0.7 / 1500)


def test_draws_depend_on_seed_and_round_alone() -> None:
    for participation in (Poisson(0.5), FixedSize(4), Rotation(2, rate=0.5)):
        forward = draws(participation, 9, 40)
        assert torch.equal(forward, draws(participation, 9, 40))
        assert not torch.equal(forward, draws(participation, 9, 40, seed=1))
        late = participation.draw(9, 39, 0)
        assert late is not None
        assert late.tolist() == forward[39].nonzero()[:, 0].tolist()
    assert Everyone().draw(9, 0, 0) is None


def test_more_clients_than_there_are_cannot_be_drawn() -> None:
    with pytest.raises(UsageError, match="cannot draw 5 of 4 clients; ask for at most 4"):
        FixedSize(5).draw(4, 0, 0)


@pytest.mark.parametrize("rate", [1.0, 0.6])
@pytest.mark.parametrize(("clients", "groups"), [(7, 3), (8, 4), (5, 5), (4, 1)])
def test_two_turns_of_a_client_are_groups_apart(clients: int, groups: int, rate: float) -> None:
    rounds = 400
    table = draws(Rotation(groups, rate), clients, rounds)
    for client in range(clients):
        turns = table[:, client].nonzero()[:, 0]
        assert bool((turns % groups == client % groups).all())
        assert len(turns) <= math.ceil(rounds / groups)
        share = len(turns) / len(range(client % groups, rounds, groups))
        assert share == pytest.approx(rate, abs=5 * math.sqrt(0.24 * groups / rounds)) if rate < 1 else share == 1
    expected = Rotation(groups, rate).expected_messages(clients, rounds)
    assert expected == pytest.approx(float(table.sum()), abs=5 * math.sqrt(table.sum()))
    if rate == 1:
        for k in range(2 * groups + 1):
            assert Rotation(groups).expected_messages(clients, k) == float(table[:k].sum())


def test_more_groups_than_clients_are_refused() -> None:
    with pytest.raises(UsageError, match="groups = 5 is more than the 4 clients; ask for at most 4"):
        Rotation(5).draw(4, 0, 0)
