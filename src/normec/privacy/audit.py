"""How much privacy a mechanism loses in fact: a lower bound on ε from its outputs with and without a worst-case unit.

A mechanism that is (ε, δ)-DP satisfies P[S | with] <= e^ε P[S | without] + δ for every S, and the same exchanged.
Run it often both ways, compute a score, choose S = {score > threshold}, and read off the ε that the frequencies
force.

Two bounds, each holding with probability `confidence`:
- `clopper_pearson`: no assumption on the scores. The threshold is chosen on one half of the runs and judged on the
  other, with exact binomial limits. From N runs it cannot show more than about ln(N/4), whatever the leak.
- `gaussian`: the scores are Gaussian with equal variances, as they are for linear scores of a Gaussian mechanism.
  The distance of the means over the standard deviation is then a lower bound on μ, and ε follows by μ-GDP. It comes
  within a few per cent of the claim, so it has teeth.

A canary that is worst for the Gaussian sends messages of full length in a known direction, and with ALTERNATING
signs: noise that is used twice cancels in the difference of two rounds, and a message that is always the same would
cancel with it. Give one score a round (the observed sum minus what is expected without the canary, along the
direction); for several scores a run, the combination that tells the two cases apart best is learned on the first
quarter of the runs (Fisher's discriminant) and judged on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normec.errors import UsageError, at_least, open_unit
from normec.privacy import gaussian
from normec.privacy.extras import needed

Scores = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Audit:
    """What was measured: two lower bounds on ε at `delta`, and the claim they are held against."""

    clopper_pearson: float
    gaussian: float
    mu: float
    delta: float
    confidence: float
    trials: int
    claim: float | None = None

    @property
    def epsilon(self) -> float:
        """The larger bound; it holds with probability `confidence` because each of the two was given half the risk."""
        return max(self.clopper_pearson, self.gaussian)

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted."""
        return self.claim is not None and self.epsilon > self.claim

    def __str__(self) -> str:
        runs = f"{self.confidence:.4%} confidence, {self.trials} runs each way"
        measured = f"epsilon >= {self.epsilon:.4g} at delta = {self.delta:g} ({runs})"
        if self.claim is None:
            return measured
        verdict = (
            "REFUTED" if self.violated else f"not refuted; the bound reaches {self.epsilon / self.claim:.0%} of it"
        )
        return f"{measured}; claim epsilon = {self.claim:.4g}: {verdict}"


def audit(
    run: Callable[[bool, int], float | Sequence[float]],
    trials: int,
    delta: float,
    confidence: float = 0.999,
    claim: float | None = None,
    gaussian_scores: bool = True,
) -> Audit:
    """Audit `run(with_canary, trial)`: the mechanism with fresh noise, returning one score or one a round."""
    at_least(16, trials=trials)
    inside = np.array([run(True, trial) for trial in range(trials)], dtype=np.float64)
    outside = np.array([run(False, trial) for trial in range(trials, 2 * trials)], dtype=np.float64)
    return audit_scores(inside, outside, delta, confidence, claim, gaussian_scores)


def audit_scores(
    inside: Scores,
    outside: Scores,
    delta: float,
    confidence: float = 0.999,
    claim: float | None = None,
    gaussian_scores: bool = True,
) -> Audit:
    """Audit scores observed with (`inside`) and without (`outside`) the canary: [trials] or [trials, scores a run].

    With `gaussian_scores=False` (a sampled mechanism, a score that is not linear) only Clopper–Pearson speaks.
    """
    open_unit(delta=delta, confidence=confidence)
    inside, outside = _checked(inside), _checked(outside)
    each = (1 + confidence) / 2 if gaussian_scores else confidence
    if inside.ndim == 2:
        first = min(len(inside), len(outside)) // 4
        weights = discriminant(inside[:first], outside[:first])
        inside, outside = inside[first:] @ weights, outside[first:] @ weights
    mu = gaussian_mu(inside, outside, each) if gaussian_scores else 0.0
    return Audit(
        clopper_pearson=clopper_pearson_epsilon(inside, outside, delta, each),
        gaussian=gaussian.epsilon(mu, delta),
        mu=mu,
        delta=delta,
        confidence=confidence,
        trials=min(len(inside), len(outside)),
        claim=claim,
    )


def discriminant(inside: Scores, outside: Scores) -> Scores:
    """Fisher's direction: the pooled covariance inverted on the difference of means.

    A direction without any noise (a forgotten draw, a reused one) makes the covariance singular; the ridge of 1e-9
    of its largest entry keeps such a direction, and lets it win.
    """
    gap = inside.mean(0) - outside.mean(0)
    covariance = np.atleast_2d(np.cov(inside, rowvar=False) + np.cov(outside, rowvar=False))
    ridge = 1e-9 * max(float(np.abs(covariance).max()), 1e-300)
    return np.asarray(np.linalg.solve(covariance + ridge * np.eye(len(gap)), gap), dtype=np.float64)


def gaussian_mu(inside: Scores, outside: Scores, confidence: float) -> float:
    """A lower confidence bound on |mean − mean'|/std for Gaussian scores of equal variance.

    Half the risk for the standard deviation (χ²), half for the means (normal, both signs); infinite if the scores
    never vary.
    """
    stats = needed("scipy.stats", "privacy")
    risk = (1 - confidence) / 2
    freedom = len(inside) + len(outside) - 2
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    deviation = math.sqrt(squares / float(stats.chi2.ppf(risk, freedom)))
    gap = abs(float(inside.mean() - outside.mean()))
    if deviation <= 1e-12 * gap:
        return math.inf if gap > 0 else 0.0
    error = float(stats.norm.isf(risk / 2)) * math.sqrt(1 / len(inside) + 1 / len(outside))
    return max(0.0, gap / deviation - error)


def clopper_pearson_epsilon(inside: Scores, outside: Scores, delta: float, confidence: float) -> float:
    """A lower confidence bound on ε that assumes nothing of the scores."""
    first = min(len(inside), len(outside)) // 2
    flip, swap, threshold = _best_threshold(inside[:first], outside[:first], delta, confidence)
    sign = -1.0 if flip else 1.0
    hits, false_hits = (sign * part[first:] > threshold for part in ((outside, inside) if swap else (inside, outside)))
    return float(
        _forced(np.array([hits.sum()]), len(hits), np.array([false_hits.sum()]), len(false_hits), delta, confidence)[0]
    )


def _best_threshold(inside: Scores, outside: Scores, delta: float, confidence: float) -> tuple[bool, bool, float]:
    """The event score > threshold (of ± score, of either case) that would prove most on these runs."""
    best = (-math.inf, False, False, 0.0)
    for flip in (False, True):
        for swap in (False, True):
            a, b = (outside, inside) if swap else (inside, outside)
            a, b = np.sort(-a if flip else a), np.sort(-b if flip else b)
            thresholds = np.unique(np.concatenate([a, b]))
            hits = len(a) - np.searchsorted(a, thresholds, side="right")
            false_hits = len(b) - np.searchsorted(b, thresholds, side="right")
            proved = _forced(hits, len(a), false_hits, len(b), delta, confidence)
            top = int(np.argmax(proved))
            best = max(best, (float(proved[top]), flip, swap, float(thresholds[top])))
    return best[1:]


def _forced(
    hits: np.ndarray[Any, Any],
    of: int,
    false_hits: np.ndarray[Any, Any],
    false_of: int,
    delta: float,
    confidence: float,
) -> Scores:
    """ln((p − δ)/q), p from below and q from above by Clopper–Pearson at half the risk; 0 where that says nothing."""
    beta = needed("scipy.stats", "privacy").beta
    risk = (1 - confidence) / 2
    p = np.where(hits > 0, beta.ppf(risk, np.maximum(hits, 1), of - hits + 1), 0.0)
    q = np.where(false_hits < false_of, beta.isf(risk, false_hits + 1, np.maximum(false_of - false_hits, 1)), 1.0)
    return np.asarray(np.log(np.maximum(p - delta, 1e-300) / q).clip(min=0.0), dtype=np.float64)


def _checked(scores: Scores) -> Scores:
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim not in (1, 2) or len(scores) < 16:
        raise UsageError(f"an audit needs scores of at least 16 runs each way, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise UsageError("an audit's scores must be finite, got NaN or infinity; the mechanism diverged")
    return scores
