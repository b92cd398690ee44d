"""Gradient oracles for attacks and audits: one that nobody may ask, and one with a planted bug."""

from __future__ import annotations

from torch import Tensor

from normec import Clip
from normec.federation.protocol.gradient_oracle import GradientOracle, ProblemOracle
from normec.federation.protocol.terms import PlanTerms, RecordTerms


class Untouched(GradientOracle):
    """Fails when it is asked for a gradient, because the party must refuse before it touches its data."""

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
        raise AssertionError("the data were touched")


class ClipsTheSum(ProblemOracle):
    """A planted bug: the sum is clipped, and not the records."""

    def clipped_gradient(
        self, x: Tensor, index: int, round: int, plan: PlanTerms, terms: RecordTerms, *, secret_coins: bool
    ) -> tuple[Tensor, float]:
        unbounded = RecordTerms(terms.divisor, terms.by_layer, 1e9, terms.batch_rate)
        total, loss = super().clipped_gradient(x, index, round, plan, unbounded, secret_coins=secret_coins)
        return Clip(1.0)(total), loss
