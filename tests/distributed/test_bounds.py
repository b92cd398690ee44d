"""The bound that messages are held to is the one that the noise was calibrated for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normec
from normec import Clip, Privacy, UsageError
from normec import distributed as cluster
from normec.algorithms.operators import Scaling

pytestmark = pytest.mark.usefixtures("new_objects")

SIGMA = 0.5


class Scheduled(Scaling):
    """Clipping whose threshold is moved while the training runs."""

    tau = 1.0
    lipschitz = 1.0

    @property
    def bound(self) -> float:  # type: ignore[override]
        return self.tau

    def scale(self, norm: Tensor) -> Tensor:
        return (self.tau / norm).clamp(max=1.0)

    def contraction(self, norm: float, dim: int) -> float:  # noqa: ARG002
        return 0.0

    def __repr__(self) -> str:
        return "Scheduled()"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_bound_that_grows_later_lets_no_message_out(noise: Any, tmp_path: Path) -> None:
    operator, x = Scheduled(), nn.Parameter(torch.zeros(4))
    how: dict[str, Any] = {
        "privacy": Privacy(sigma=SIGMA, noise=noise, trust="local"),
        "rounds": 2,
        "ledger": tmp_path / "ledger",
    }
    optimizer = cluster.DPSGD([x], 1.0, operator, **how)
    operator.tau = 1000.0
    x.grad = torch.full((4,), 1000.0)
    with pytest.raises(UsageError, match=r'changed during a private run.*"tau": 1000'):
        optimizer.step()
    assert not optimizer.spent().releases, "nothing was sent"
    del operator.tau
    optimizer.step()
    assert float(x.detach().norm()) < 1 + 20 * SIGMA


def test_the_method_cannot_be_exchanged() -> None:
    optimizer = cluster.DPSGD([nn.Parameter(torch.zeros(4))], 1.0, Clip(1.0))
    with pytest.raises(AttributeError, match="method"):
        optimizer.method = normec.DPSGD(Clip(1e6))  # type: ignore[misc]
    assert optimizer.method == normec.DPSGD(Clip(1.0))
