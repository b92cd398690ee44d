"""Noise schedules: how the noise of a run is divided over its rounds.

A schedule gives s_t > 0 for each round t, and the noise of round t is σ_t = σ s_t. Only the ratios of the s_t matter:
they are scaled so that the mean of 1/s_t² is 1. With the same sensitivity in all rounds, and without amplification by
sampling, σ is therefore the noise of the constant schedule with the same ε, because μ² = Σ Δ²/σ_t² is the same.

A schedule is a public function of the round. It must not depend on the data.

| schedule | s_t |
| --- | --- |
| "constant" | 1 |
| "linear:R" | a straight line from 1 in the first round to R in the last |
| "exponential:R" | a geometric sequence from 1 in the first round to R in the last |
| "best" | √(Δ_t / a_t), with a_t the weight of round t's message in the last model |
| numbers | one for each round |

The best schedule. Let the last model be x^T = x⁰ − Σ_t a_t (m_t + z_t), where m_t is the mean message of round t and
z_t its noise, of variance proportional to σ_t². If the messages m_t are fixed, the noise in x^T has a variance
proportional to V = Σ_t a_t² σ_t². Privacy fixes μ² = Σ_t Δ_t²/σ_t². By Cauchy and Schwarz,

    μ² V  =  Σ_t (Δ_t/σ_t)² · Σ_t (|a_t| σ_t)²  >=  (Σ_t |a_t| Δ_t)²,

with equality if and only if |a_t| σ_t is proportional to Δ_t/σ_t, that is σ_t² ∝ Δ_t/|a_t|; scaled to μ,
σ_t² = Δ_t Σ_s |a_s| Δ_s / (μ² |a_t|).  ∎

So "best" needs weights a_t that do not depend on the data, hence a server step that is linear, and noise that reaches x
only through its own round's message: with memory="noisy" the clients' later messages correct it. V is the noise that a
run adds to its last model; how later gradients respond to the noise of earlier models is not part of it. Under
amplification by sampling, ε is not a function of Σ_t Δ_t²/σ_t², and the formula is not the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import UsageError

NoiseSchedule = str | Sequence[float] | Callable[[int], float]
CONSTANT, BEST = "constant", "best"
_SHAPES = ("linear", "exponential")
_FORMS = "constant, best, linear:R, exponential:R, or one number for each round"
WIDEST = 1e6  # the largest ratio of two rounds' noise
LEVELS = 8  # different values of σ in a run that claims amplification by sampling: each costs a composition


def checked(schedule: NoiseSchedule) -> str | Callable[[int], float]:
    """The schedule in the form that a statement keeps: a text, or a function of the round.

    Args:
        schedule: A name, numbers, numbers in a text, or a function.

    Returns:
        The same schedule; numbers are written out as a text that gives the same numbers again.

    Raises:
        UsageError: It is not a schedule.

    Example:
        >>> checked([2, 1.5, 1]), checked("linear:0.5")
        ('2.0 1.5 1.0', 'linear:0.5')
    """
    if callable(schedule):
        return schedule
    if not isinstance(schedule, str):
        try:
            schedule = " ".join(repr(float(value)) for value in schedule)
        except (TypeError, ValueError):
            raise UsageError(f"noise_schedule must be {_FORMS}, got {schedule!r}") from None
    if schedule not in (CONSTANT, BEST):
        shape, _, ratio = schedule.partition(":")
        _refuse_out_of_range([_ratio(ratio, schedule)] if shape in _SHAPES else _numbers(schedule))
    return schedule


def written_out(schedule: str | Callable[[int], float], rounds: int) -> str:
    """The schedule as a text; the values of a function are written out for `rounds` rounds.

    Example:
        >>> written_out(lambda t: 2.0 - t, rounds=2)
        '2.0 1.0'
    """
    if not callable(schedule):
        return schedule
    return str(checked([schedule(t) for t in range(rounds)]))


def relative_noise(
    schedule: str | Callable[[int], float],
    rounds: int,
    sensitivities: Sequence[float] = (),
    weights: Sequence[float] = (),
    levels: int | None = None,
) -> tuple[float, ...] | None:
    """s_t of every round, scaled so that the mean of 1/s_t² is 1; None for the constant schedule.

    Args:
        schedule: The schedule.
        rounds: The number of rounds.
        sensitivities: Δ_t of every round, for "best".
        weights: The weight of every round's message in the last model, for "best".
        levels: The largest number of different values; if there are more, values that are close to each other are
            replaced by one with the same mean of 1/s².

    Returns:
        One number for each round.

    Raises:
        UsageError: The schedule does not fit the number of rounds, or two of its values are too far apart.

    Example:
        >>> [round(s, 3) for s in relative_noise("linear:0.5", rounds=3)]
        [1.503, 1.127, 0.752]
        >>> relative_noise("best", 3, sensitivities=[1, 1, 1], weights=[4, 4, 4])
        (1.0, 1.0, 1.0)
    """
    text = written_out(schedule, rounds)
    if text == CONSTANT:
        return None
    if text == BEST:
        found = [math.sqrt(delta / abs(weight)) for delta, weight in zip(sensitivities, weights, strict=True)]
    else:
        shape, colon, ratio = text.partition(":")
        found = _shape(shape, _ratio(ratio, text), rounds) if colon else _numbers(text)
    if len(found) != rounds:
        raise UsageError(f"noise_schedule has {len(found)} numbers, and the run has {rounds} rounds; give one for each")
    _refuse_out_of_range(found)
    if max(found) > WIDEST * min(found):
        raise UsageError(
            f"noise_schedule asks for noise that differs by a factor of {max(found) / min(found):.3g} between two "
            f"rounds; at most {WIDEST:g} is supported"
        )
    if levels is not None and len(set(found)) > levels:
        found = _in_levels(found, levels)
    scale = _precise_mean(found)
    return tuple(value / scale for value in found)


def _shape(shape: str, ratio: float, rounds: int) -> list[float]:
    parts = [t / max(1, rounds - 1) for t in range(rounds)]
    if shape == "linear":
        return [1 + (ratio - 1) * part for part in parts]
    return [ratio**part for part in parts]


def _in_levels(values: Sequence[float], levels: int) -> list[float]:
    """Values in bands of equal ratio, each replaced by the one with the mean of 1/s² of its band."""
    low = math.log(min(values))
    width = (math.log(max(values)) - low) / levels
    bands = [min(levels - 1, int((math.log(value) - low) / width)) for value in values]
    means = {
        band: _precise_mean([value for value, own in zip(values, bands, strict=True) if own == band])
        for band in set(bands)
    }
    return [means[band] for band in bands]


def _precise_mean(values: Sequence[float]) -> float:
    """The constant with the same mean of 1/s²."""
    return math.sqrt(len(values) / math.fsum(value**-2.0 for value in values))


def _numbers(schedule: str) -> list[float]:
    """The numbers that a text consists of."""
    try:
        found = [float(word) for word in schedule.split()]
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"noise_schedule must be {_FORMS}, got {schedule[:64]!r}")
    return found


def _ratio(text: str, schedule: str) -> float:
    """R of "linear:R" and "exponential:R"."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"noise_schedule must be {_FORMS}, got {schedule[:64]!r}") from None


def _refuse_out_of_range(values: Sequence[float]) -> None:
    for value in values:
        if not 1e-100 < value < 1e100:
            raise UsageError(f"the numbers of noise_schedule must be > 0, from 1e-100 to 1e100, got {value:g}")
