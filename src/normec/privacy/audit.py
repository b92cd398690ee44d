"""Audits: a lower bound on the ε of a mechanism, from its outputs with and without a worst-case unit (the canary).

A mechanism that is (ε, δ)-DP satisfies P[S | with] <= e^ε P[S | without] + δ for every S, and the same with the cases
exchanged. An audit runs it many times in both cases, computes a score, chooses S = {score > threshold}, and derives the
smallest ε that is compatible with the frequencies.

There are two bounds, each at half of the risk 1 − `confidence`, so that the larger one holds with probability
`confidence`:
- `clopper_pearson` makes no assumption on the scores. The score and the threshold are chosen on some runs and judged on
  others, with exact binomial limits. With N judged runs it cannot exceed about ln(N/8), whatever the leak. To find a
  leak that is not Gaussian, audit a claim well below that (ε = 2 for a thousand runs).
- `gaussian` assumes that the score is Gaussian with equal variances in both cases, like every linear score of a
  Gaussian mechanism. The distance of the means over the standard deviation is then a lower bound on μ, and ε follows by
  μ-GDP. It comes within a few per cent of the claim, so it can detect small violations. The assumption is true for a
  mechanism that does what it claims, so a correct mechanism is refuted with probability at most 1 − `confidence`. A
  refutation shows that a mechanism does something else; only `clopper_pearson` bounds its ε without assumptions.

Everything that is adapted to the data (directions, the choice of a score, thresholds) is adapted on runs that are not
judged.

`audit_releases` takes the releases that an observer sees, and tries these scores:

| score | finds |
| --- | --- |
| along the canary's known message | too little noise, a message above its bound |
| Fisher's discriminant over releases | a release without noise, noise used in two rounds |
| Fisher's discriminant over coordinates | a coordinate with little noise, the same noise in all coordinates |
| Fisher's discriminant over all observations | noise that two clients share, noise that is used again later |
| largest and smallest deviation, total energy | truncated tails, one-sided noise, noise that depends on the message |
| coordinates whose noise was seen before, or is 0 | a coarse grid, few seeds, no noise |

Fisher's discriminant inverts the covariance of the noise, so it finds a direction without noise in any number of
coordinates. `audit_scores` takes custom scores: one per run, or several, whose best combination is learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError, at_least, needed, open_unit
from . import gaussian

Scores = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Audit:
    """Two measured lower bounds on ε, and the claim that they are compared with.

    Args:
        clopper_pearson: The bound that assumes nothing of the scores.
        gaussian: The bound for Gaussian scores.
        mu: The lower bound on μ from which `gaussian` follows; 0 if there is none for this claim.
        delta: The δ of the guarantee, in (0, 1).
        confidence: The probability with which the larger of the two bounds holds.
        trials: The number of judged runs of each kind.
        claim: The ε that is claimed; None if nothing is claimed.
        score: The score that told the two kinds of runs apart.

    Example:
        >>> found = Audit(0.7, gaussian=1.9, mu=0.5, delta=1e-5, confidence=0.999, trials=500, claim=2.0)
        >>> found.epsilon, found.violated
        (1.9, False)
    """

    clopper_pearson: float
    gaussian: float
    mu: float
    delta: float
    confidence: float
    trials: int
    claim: float | None = None
    score: str = "given"

    @property
    def epsilon(self) -> float:
        """The larger bound; each of the two has half the risk."""
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
        share = self.epsilon / self.claim if self.claim else 1.0
        verdict = "REFUTED" if self.violated else f"not refuted; the bound reaches {share:.0%} of it"
        return f"{measured}; claim epsilon = {self.claim:.4g}: {verdict}"


def audit(
    run: Callable[[bool, int], float | Sequence[float]],
    trials: int,
    delta: float,
    confidence: float = 0.999,
    claim: float | None = None,
    gaussian_scores: bool = True,
) -> Audit:
    """Audit a mechanism that can be run with and without the canary.

    Args:
        run: `run(with_canary, trial)` runs the mechanism with fresh noise and returns one score, or one per round.
        trials: The number of runs of each kind, at least 16.
        delta: The δ of the guarantee, in (0, 1).
        confidence: The probability with which the larger of the two bounds holds.
        claim: The ε that is claimed; None if nothing is claimed.
        gaussian_scores: Whether linear scores are Gaussian. False for a sampled mechanism or a score that is not
            linear; then only Clopper–Pearson's bound is computed.

    Returns:
        The bounds.

    Raises:
        UsageError: A number is out of range, or a score is not finite.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> mechanism = lambda with_canary, trial: draw.normal(float(with_canary))
        >>> found = audit(mechanism, trials=2000, delta=1e-5, claim=4.38)
        >>> found.violated, found.epsilon > 3
        (False, True)
    """
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
    """Audit scores that were observed with and without the canary.

    Args:
        inside: Scores with the canary, ``[trials]`` or ``[trials, scores per run]``.
        outside: Scores without the canary, in the same form.
        delta: The δ of the guarantee, in (0, 1).
        confidence: The probability with which the larger of the two bounds holds.
        claim: The ε that is claimed; None if nothing is claimed.
        gaussian_scores: Whether linear scores are Gaussian. False for a sampled mechanism or a score that is not
            linear; then only Clopper–Pearson's bound is computed.

    Returns:
        The bounds.

    Raises:
        UsageError: A number is out of range, there are too few scores, or one is not finite.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> audit_scores(draw.normal(1, 1, 2000), draw.normal(0, 1, 2000), delta=1e-5, claim=1.0).violated  # it is 4.38
        True
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


@dataclass(frozen=True)
class View:
    """What one observer sees of a mechanism, and what is claimed about it.

    Args:
        name: The name of the observer.
        inside: Observed vectors with the canary, ``[runs, releases, d]``.
        outside: Observed vectors without the canary.
        expected_inside: What the vectors with the canary would be without noise, ``[releases, d]``; the adversary knows
            it.
        expected_outside: The same without the canary.
        claim: The ε that is claimed for this observer.

    Example:
        >>> zero, one = np.zeros((1, 2)), np.ones((1, 2))
        >>> View("server", np.ones((48, 1, 2)), np.zeros((48, 1, 2)), one, zero, claim=1.0).name
        'server'
    """

    name: str
    inside: Scores
    outside: Scores
    expected_inside: Scores
    expected_outside: Scores
    claim: float


def audit_releases(views: Sequence[View], delta: float, confidence: float = 0.999) -> Audit:
    """Audit what several observers see; the claim of the observer that looks worst is judged.

    A third of the runs teaches the scores, a sixth chooses the view and the score for each of the two bounds, and the
    other half judges them. The bounds of the view that comes closest to its claim are returned.

    Args:
        views: What each observer sees.
        delta: The δ of the guarantee, in (0, 1).
        confidence: The probability with which the larger of the two bounds holds.

    Returns:
        The bounds.

    Raises:
        UsageError: There is no view, or one has fewer than 48 runs of a kind, or a value that is not finite.

    Example:
        >>> draw, zero, one = np.random.default_rng(0), np.zeros((1, 2)), np.ones((1, 2))
        >>> seen = [mean + draw.normal(0, 1, (300, 1, 2)) for mean in (one, zero)]
        >>> audit_releases([View("server", *seen, one, zero, claim=1.0)], delta=1e-5).violated
        True
    """
    open_unit(delta=delta, confidence=confidence)
    at_least(1, views=len(views))
    each = (1 + confidence) / 2
    linear: list[_Candidate] = []
    free: list[_Candidate] = []
    for view in views:
        found = _candidates(view)
        linear += [one for one in found if one.linear]
        free += found
    by_mu = max(linear, key=lambda one: _reached(gaussian.epsilon(one.chosen_mu(each), delta), one.claim))
    by_events = max(free, key=lambda one: _reached(one.chosen_events(delta, each), one.claim))
    mu = gaussian_mu(*by_mu.judged, each)
    bound = clopper_pearson_judged(by_events.chosen, by_events.judged, delta, each)
    by_gauss = gaussian.epsilon(mu, delta)
    worst = by_mu if _reached(by_gauss, by_mu.claim) >= _reached(bound, by_events.claim) else by_events
    # A bound for another claim than the reported one is set to 0.
    same_claim = by_mu.claim == worst.claim
    return Audit(
        clopper_pearson=bound if by_events.claim == worst.claim else 0.0,
        gaussian=by_gauss if same_claim else 0.0,
        mu=mu if same_claim else 0.0,
        delta=delta,
        confidence=confidence,
        trials=min(map(len, worst.judged)),
        claim=worst.claim,
        score=worst.name,
    )


def _reached(epsilon: float, claim: float) -> float:
    """The fraction of the claim that a bound reaches."""
    return epsilon / claim if claim > 0 else math.inf


@dataclass(frozen=True)
class _Candidate:
    """A score on the runs that choose and on those that judge, each as (inside, outside)."""

    name: str
    linear: bool
    claim: float
    chosen: tuple[Scores, Scores]
    judged: tuple[Scores, Scores]

    def chosen_mu(self, confidence: float) -> float:
        return gaussian_mu(*self.chosen, confidence)

    def chosen_events(self, delta: float, confidence: float) -> float:
        return _best_threshold(*self.chosen, delta, confidence)[0]


def _candidates(view: View) -> list[_Candidate]:
    """All scores of a view, learned on the first third of its runs."""
    inside, outside = _checked_releases(view.inside), _checked_releases(view.outside)
    runs = min(len(inside), len(outside))
    learn, choose = runs // 3, runs // 2
    shift = np.asarray(view.expected_inside - view.expected_outside, dtype=np.float64)
    seen = [part - view.expected_outside for part in (inside, outside)]  # the observations minus their public part
    scores = _linear_scores(seen[0][:learn], seen[1][:learn], shift)
    found = []
    for name, is_linear, score in [*((n, True, s) for n, s in scores), *_other_scores(seen, learn, shift)]:
        values = [score(part[learn:runs]) for part in seen]
        cut = choose - learn
        found.append(
            _Candidate(
                f"{view.name}: {name}",
                is_linear,
                view.claim,
                (values[0][:cut], values[1][:cut]),
                (values[0][cut:], values[1][cut:]),
            )
        )
    return found


Score = Callable[[Scores], Scores]  # [runs, releases, d] → [runs]


def _linear_scores(inside: Scores, outside: Scores, shift: Scores) -> list[tuple[str, Score]]:
    """Projections on the canary's message, and on discriminants over releases, coordinates, and both."""
    touched = np.flatnonzero(np.abs(shift).sum(1))  # the releases in which the canary takes part
    lengths = np.linalg.norm(shift[touched], axis=1, keepdims=True)
    units = shift[touched] / np.where(lengths > 0, lengths, 1.0)
    signs = np.sign(units @ units[0]) if len(touched) else np.zeros(0)

    def along(seen: Scores) -> Scores:
        return np.asarray(np.einsum("nrd,rd->nr", seen[:, touched], units), dtype=np.float64)

    def across(seen: Scores) -> Scores:
        return np.asarray(np.einsum("nrd,r->nd", seen[:, touched], signs), dtype=np.float64)

    def everything(seen: Scores) -> Scores:
        return seen.reshape(len(seen), -1)

    def learned(features: Score, gap: Scores | None = None) -> Score:
        weights = discriminant(features(inside), features(outside), gap)
        return lambda seen: np.asarray(features(seen) @ weights, dtype=np.float64)

    return [
        ("the canary's message", lambda seen: np.einsum("nrd,rd->n", seen, shift)),
        ("a combination of releases", learned(along)),
        ("a combination of coordinates", learned(across)),
        ("a combination of all that is seen", learned(everything)),
        ("the canary's message against the noise as it is", learned(everything, shift.ravel())),
    ]


def _other_scores(seen: Sequence[Scores], learn: int, shift: Scores) -> list[tuple[str, bool, Score]]:
    """Scores that are not linear in the observations; only `clopper_pearson` judges them."""
    inside, outside = (part[:learn] for part in seen)
    touched = np.flatnonzero(np.abs(shift).sum(1))
    noise = np.concatenate([(inside - shift)[:, touched].ravel(), outside[:, touched].ravel()])
    known = np.sort(np.append(noise, 0.0))
    same = 1e-9 * float(noise.std())

    def repeated(values: Scores) -> Scores:
        where = np.searchsorted(known, values - same)
        near = known[np.minimum(where, len(known) - 1)]
        return np.asarray((np.abs(near - values) <= same).sum((1, 2)), dtype=np.float64)

    return [
        ("the largest deviation", False, lambda part: np.abs(part[:, touched]).max((1, 2))),
        ("the smallest coordinate", False, lambda part: part[:, touched].min((1, 2))),
        ("the largest coordinate", False, lambda part: part[:, touched].max((1, 2))),
        ("the energy", False, lambda part: (part[:, touched] ** 2).sum((1, 2))),
        ("noise that was seen before", False, lambda part: repeated(part[:, touched])),
        ("noise that was seen before, under the canary", False, lambda part: repeated((part - shift)[:, touched])),
    ]


def _checked_releases(seen: Scores) -> Scores:
    seen = np.asarray(seen, dtype=np.float64)
    if seen.ndim != 3 or len(seen) < 48:
        raise UsageError(f"an audit of releases needs [runs >= 48, releases, d] each way, got shape {seen.shape}")
    if not np.isfinite(seen).all():
        raise UsageError("an audit's observations must be finite, got NaN or infinity; the mechanism diverged")
    return seen


def discriminant(inside: Scores, outside: Scores, gap: Scores | None = None) -> Scores:
    """Fisher's direction: the pooled covariance inverted on the difference of means, or on a known `gap`.

    A direction without any noise (a forgotten draw, a reused one) makes the covariance singular; the ridge, 1e-9 of its
    largest entry or 1e-12 of the gap's square, keeps such a direction, which then dominates.
    """
    if gap is None:
        gap = inside.mean(0) - outside.mean(0)
    covariance = np.atleast_2d(np.cov(inside, rowvar=False) + np.cov(outside, rowvar=False))
    ridge = max(1e-9 * float(np.abs(covariance).max()), 1e-12 * float(gap @ gap), 1e-200)
    return np.asarray(np.linalg.solve(covariance + ridge * np.eye(len(gap)), gap), dtype=np.float64)


def gaussian_mu(inside: Scores, outside: Scores, confidence: float) -> float:
    """A lower confidence bound on |mean − mean'|/std for Gaussian scores of equal variance.

    Half of the risk is for the standard deviation (χ²), and half for the means (normal, both signs). The bound is
    infinite if the scores never vary.
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
    """A lower confidence bound on ε without assumptions on the scores; half of the runs choose, half judge."""
    first = min(len(inside), len(outside)) // 2
    return clopper_pearson_judged(
        (inside[:first], outside[:first]), (inside[first:], outside[first:]), delta, confidence
    )


def clopper_pearson_judged(
    chosen: tuple[Scores, Scores], judged: tuple[Scores, Scores], delta: float, confidence: float
) -> float:
    """The bound that the `judged` scores prove for the event that looks best on the `chosen` ones."""
    _, flip, swap, threshold = _best_threshold(*chosen, delta, confidence)
    sign = -1.0 if flip else 1.0
    hits, false_hits = (sign * part > threshold for part in (judged[::-1] if swap else judged))
    return float(
        _forced(np.array([hits.sum()]), len(hits), np.array([false_hits.sum()]), len(false_hits), delta, confidence)[0]
    )


def _best_threshold(
    inside: Scores, outside: Scores, delta: float, confidence: float
) -> tuple[float, bool, bool, float]:
    """The event with the largest bound on these runs, as (bound, flip, swap, threshold).

    It is score > threshold, or −score > threshold with `flip`; with `swap` the runs without the canary are its hits.
    """
    best = (-math.inf, False, False, 0.0)
    for flip in (False, True):
        for swap in (False, True):
            a, b = (outside, inside) if swap else (inside, outside)
            a, b = np.sort(-a if flip else a), np.sort(-b if flip else b)
            thresholds = _thresholds(np.unique(np.concatenate([a, b])))
            hits = len(a) - np.searchsorted(a, thresholds, side="right")
            false_hits = len(b) - np.searchsorted(b, thresholds, side="right")
            proved = _forced(hits, len(a), false_hits, len(b), delta, confidence)
            top = int(np.argmax(proved))
            best = max(best, (float(proved[top]), flip, swap, float(thresholds[top])))
    return best


def _thresholds(values: Scores) -> Scores:
    """Midpoints between sorted scores: all near both ends, where rare events lie, and 128 between."""
    middles = np.append((values[:-1] + values[1:]) / 2, values[-1])
    if len(middles) <= 256:
        return middles
    inner = np.linspace(64, len(middles) - 65, 128).astype(int)
    return np.concatenate([middles[:64], middles[inner], middles[-64:]])


def _forced(
    hits: np.ndarray[Any, Any],
    of: int,
    false_hits: np.ndarray[Any, Any],
    false_of: int,
    delta: float,
    confidence: float,
) -> Scores:
    """ln((p − δ)/q) with Clopper–Pearson bounds, p from below and q from above, at half the risk each; at least 0."""
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
