"""What a saved state may be loaded into, what is paid for then, and whose noise it draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normec import Privacy, cluster
from normec.cluster import ClientOptimizer
from normec.errors import UsageError

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
