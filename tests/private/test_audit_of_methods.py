"""The audit of the real rounds: near the claim when all is right, a refutation for each planted bug."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normec import DPSGD, Clip, Clip21, NormEC, Privacy, SmoothedNorm
from normec.lab.audit import audit_method
from normec.privacy.mechanism import Mechanism

pytestmark = pytest.mark.slow

METHODS = {
    "normec": NormEC(0.01, 0.1),
    "normec-plain": NormEC(0.01, 0.1, server_norm=False),
    "normec-forgetting": NormEC(0.01, 0.1, decay=0.2),
    "clip21": Clip21(0.3),
    "dpsgd-norm": DPSGD(SmoothedNorm(0.01)),
    "dpsgd-clip": DPSGD(Clip(0.3), beta=0.5),
    "dpsgd-momentum": DPSGD(Clip(0.3), momentum=0.9),
}
CLAIM = Privacy(epsilon=8, trust="secure-sum")
SMALL: dict[str, Any] = {"rounds": 4, "trials": 400, "dimension": 16}


@pytest.mark.parametrize("name", METHODS)
def test_no_method_is_refuted_and_the_bound_has_teeth(name: str) -> None:
    found = audit_method(METHODS[name], CLAIM, **SMALL)
    assert not found.violated
    assert found.claim == pytest.approx(8, rel=1e-6)
    assert found.epsilon > 0.6 * 8


@pytest.mark.parametrize(
    "privacy",
    [Privacy(epsilon=8, trust="local"), Privacy(epsilon=8, trust="central", relation="replace")],
    ids=["local", "central, replace"],
)
def test_other_observers_and_relations(privacy: Privacy) -> None:
    found = audit_method(NormEC(0.01, 0.1), privacy, **SMALL)
    assert not found.violated
    assert found.epsilon > 0.6 * 8


def test_more_runs_come_nearer() -> None:
    found = audit_method(DPSGD(SmoothedNorm(0.01)), CLAIM, rounds=2, trials=4000, dimension=2)
    assert not found.violated
    assert found.epsilon > 0.88 * 8


def bug_noise_scaled_by_beta(patch: pytest.MonkeyPatch) -> None:
    real = Mechanism.__init__

    def planted(self: Mechanism, *arguments: Any, **words: Any) -> None:
        real(self, *arguments, **words)
        self.sigma *= self.method.beta

    patch.setattr(Mechanism, "__init__", planted)


def bug_total_norm_called_per_coordinate(patch: pytest.MonkeyPatch) -> None:
    real = Mechanism.__init__

    def planted(self: Mechanism, *arguments: Any, **words: Any) -> None:
        real(self, *arguments, **words)
        self.sigma /= (self.setting.dimension or 1) ** 0.5

    patch.setattr(Mechanism, "__init__", planted)


def bug_one_round_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = Mechanism._draw

    def planted(self: Mechanism, like: Tensor, sigma: float, *path: Any) -> Tensor:
        drawn = real(self, like, sigma, *path)
        return torch.zeros_like(drawn) if self._paid == 2 else drawn

    patch.setattr(Mechanism, "_draw", planted)


def bug_noise_used_again(patch: pytest.MonkeyPatch) -> None:
    real = Mechanism._draw

    def planted(self: Mechanism, like: Tensor, sigma: float, *path: Any) -> Tensor:
        held, self._paid = self._paid, 0
        drawn = real(self, like, sigma, *path)
        self._paid = held
        return drawn

    patch.setattr(Mechanism, "_draw", planted)


BUGS = [bug_noise_scaled_by_beta, bug_total_norm_called_per_coordinate, bug_one_round_forgotten, bug_noise_used_again]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_caught(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert audit_method(NormEC(0.01, 0.1), CLAIM, **SMALL).violated
