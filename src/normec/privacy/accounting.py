"""Privacy accounting: from releases to ε, and from ε to σ.

Formal guarantee. An `Account` holds releases, each a Gaussian of noise multiplier z = σ/Δ, Poisson-sampled at rate
q or not. `Account.epsilon()` is an ε for which their adaptive composition is (ε, δ)-DP:

| releases | computation | exact? |
| --- | --- | --- |
| q = 1 | μ² = Σ 1/z², closed form (`gaussian`) | yes, to 1e-13 |
| q < 1 | the smallest of PLD, RDP (`subsampled`) and the un-amplified μ-GDP | upper bound |

The PLD is about 1e-4 above the true ε as long as its rounding errors are far below δ. Their bound lies between 1e-12
and 1e-10 per round, the latter with little noise and a small rate, and is taken off δ: if it is a tenth of δ, ε is one
or two per cent above the truth, and from half of δ on the PLD is not used. RDP is a few per cent above the true ε, and
more for a few rounds with a tiny δ.

Leaving out the amplification is always valid: if the observer also learns which units were drawn, each round is either
a plain Gaussian release or nothing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import UsageError, at_least, fraction, needed, open_unit, positive
from . import gaussian
from .gaussian import delta, epsilon, mu_for
from .subsampled import LARGEST_EPSILON, Group, epsilon_pld, epsilon_rdp, interval, resolvable

__all__ = ["Account", "Event", "delta", "epsilon", "epsilon_of", "mu_for", "sigma_for"]

_CHECKPOINTS = 32
# Relative: a calibrated run pays round by round, and rounding raises its sum of μ² by less than this.
_MARGIN = 1e-11


@dataclass(frozen=True)
class Event:
    """Releases of one kind.

    Args:
        multiplier: The noise multiplier z = σ/Δ.
        rate: The probability with which the unit takes part in a release.
        count: The number of releases.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> Event(multiplier=2.0, rate=0.1, count=100)
        Event(multiplier=2.0, rate=0.1, count=100)
    """

    multiplier: float
    rate: float = 1.0
    count: int = 1

    def __post_init__(self) -> None:
        positive(multiplier=self.multiplier)
        fraction(rate=self.rate)
        at_least(1, count=self.count)
        # NumPy's numbers of single precision would be added up in it.
        for name, kind in (("multiplier", float), ("rate", float), ("count", int)):
            object.__setattr__(self, name, kind(getattr(self, name)))


class Account:
    """The releases made so far, and the ε they add up to.

    Args:
        delta: The δ of the guarantee, in (0, 1).
        events: The releases to begin with.
        planned: All releases of a run whose noise changes by round, for `upper`.

    Raises:
        UsageError: `delta` does not lie in (0, 1).

    Example:
        >>> account = Account(delta=1e-5)
        >>> account.add(Event(multiplier=10.0, count=100))
        >>> account.mu, round(account.epsilon(), 3)
        (1.0, 4.377)
    """

    def __init__(self, delta: float, events: Iterable[Event] = (), planned: Iterable[Event] = ()) -> None:
        open_unit(delta=delta)
        self.delta = float(delta)
        self.releases = 0
        self._square, self._lost = 0.0, 0.0  # μ² of the releases that are not sampled, summed after Neumaier
        self._sampled: dict[tuple[float, float], int] = {}
        self._planned = {(event.multiplier, event.rate): event.count for event in planned if event.rate < 1}
        self._upper: dict[tuple[tuple[Group, ...], float], float] = {}
        for event in events:
            self.add(event)

    @classmethod
    def of_mu(cls, mu: float, releases: int, delta: float) -> Account:
        """The account of `releases` un-sampled releases that are μ-GDP together."""
        account = cls(delta)
        account._square, account.releases = mu * mu, releases
        return account

    def copy(self) -> Account:
        """An account of the same releases, to which others can be added."""
        twin = Account(self.delta)
        twin.releases, twin._square, twin._lost = self.releases, self._square, self._lost
        twin._sampled, twin._upper, twin._planned = dict(self._sampled), self._upper, self._planned
        return twin

    def add(self, event: Event) -> None:
        """Count the releases of `event`."""
        self.releases += event.count
        if event.rate < 1:
            key = (event.multiplier, event.rate)
            self._sampled[key] = self._sampled.get(key, 0) + event.count
            return
        # Products do not raise on overflow, as a power would; the term is never 0, so rounding cannot remove μ².
        term = max(event.count * (1 / event.multiplier) * (1 / event.multiplier), math.ulp(0.0))
        total = self._square + term
        if math.isfinite(total):
            larger, smaller = max(self._square, term), min(self._square, term)
            self._lost += (larger - total) + smaller
        self._square = total

    @property
    def mu(self) -> float:
        """μ of the releases that are not sampled."""
        return math.sqrt(self._square + self._lost)

    @property
    def mu_unamplified(self) -> float:
        """μ of all releases as if the unit took part in each: an upper bound without amplification."""
        return math.hypot(self.mu, *(math.sqrt(count) / z for (z, _), count in self._sampled.items()))

    def epsilon(self) -> float:
        """ε at `delta`, exact or an upper bound."""
        return self._epsilon(self._groups(), self.mu, None)

    def within(self, limit: float) -> bool:
        """Whether `epsilon()` is at most `limit`; bounds that take less time than a PLD are tried first."""
        plain = gaussian.epsilon(self.mu_unamplified, self.delta)
        if plain <= limit or plain > LARGEST_EPSILON:
            return plain <= limit
        groups, mu = resolvable(self._groups(), self.mu)
        return (bool(groups) and epsilon_rdp(groups, mu, self.delta) <= limit) or self.epsilon() <= limit

    def upper(self, horizon: int) -> float:
        """An upper bound of ε that is cheap enough for every round of a run of `horizon` rounds.

        Without sampling it is `epsilon()`. With sampling the count is rounded up to the next of about 32 checkpoints
        (spaced evenly in √count, the last at `horizon`) and each checkpoint is computed once. ε is monotone in the
        count, so the bound is never too small. If the noise changes by round, each kind of planned round has its own
        horizon, and they share the checkpoints. `epsilon()` may be the larger one, because a PLD is computed on an
        interval, which follows here from `horizon` and there from the releases.
        """
        if not self._sampled:
            return self.epsilon()
        at_least(1, horizon=horizon)

        kinds = len(self._planned)
        parts = max(1, _CHECKPOINTS // (2 * kinds)) if kinds else _CHECKPOINTS  # several kinds take longer to compose

        def ahead(group: Group) -> float:
            most = self._planned.get((group.multiplier, group.rate), horizon)
            return most * (math.ceil(parts * math.sqrt(group.releases / most) - 1e-9) / parts) ** 2

        groups = tuple(g._replace(releases=max(g.releases, math.ceil(ahead(g) - 1e-6))) for g in self._groups())
        mu = max(self.mu, 2 ** (math.ceil(16 * math.log2(self.mu)) / 16)) if self.mu > 0 else 0.0
        if (groups, mu) not in self._upper:
            self._upper[groups, mu] = self._epsilon(groups, mu, horizon)
        return self._upper[groups, mu]

    def tightest(self, horizon: int) -> float:
        """The smaller of `epsilon()` and `upper(horizon)`; both are upper bounds of ε."""
        return min(self.epsilon(), self.upper(horizon))

    def _groups(self) -> tuple[Group, ...]:
        return tuple(Group(z, rate, count) for (z, rate), count in sorted(self._sampled.items()))

    def _epsilon(self, groups: tuple[Group, ...], mu: float, horizon: int | None) -> float:
        plain = gaussian.epsilon(math.hypot(mu, *(math.sqrt(g.releases) / g.multiplier for g in groups)), self.delta)
        if plain > LARGEST_EPSILON:
            return plain
        groups, mu = resolvable(groups, mu)
        if not groups:
            return plain
        # One interval for the whole run keeps the one-round distributions cached between checkpoints.
        planned = tuple(g._replace(releases=max(g.releases, horizon or 0)) for g in groups)
        if self._planned and horizon is not None:
            whole = {**self._planned, **{key: max(n, self._planned.get(key, n)) for key, n in self._sampled.items()}}
            planned = resolvable([Group(z, rate, n) for (z, rate), n in sorted(whole.items())], 0.0)[0] or groups
        guess = min(plain, epsilon_rdp(planned, mu, self.delta))
        known = min(plain, epsilon_rdp(groups, mu, self.delta))
        return min(known, epsilon_pld(groups, mu, self.delta, interval(planned, mu, guess)))


def epsilon_of(events: Iterable[Event], delta: float) -> float:
    """ε at `delta` of all `events` together.

    Args:
        events: The releases.
        delta: The δ of the guarantee, in (0, 1).

    Returns:
        ε; never below the truth.

    Raises:
        UsageError: `delta` does not lie in (0, 1).

    Example:
        >>> round(epsilon_of([Event(multiplier=10.0, count=100)], delta=1e-5), 3)
        4.377
    """
    return Account(delta, events).epsilon()


def sigma_for(account_at: Callable[[float], Account], target: float) -> float:
    """The smallest σ whose account stays within `target`, to 1e-6 in ε, or to 1e-8 in σ if a PLD's ε jumps by more.

    `target` is kept with a relative margin of 1e-11, so that a ledger that adds up the same run round by round, and
    allows nothing above the target, pays for the last one. The σ that suffices without amplification, found from the
    closed form, is the upper end of the bracket; the root is then searched on the full account, and the answer is moved
    up until `account_at(σ).epsilon() <= target` holds.

    Args:
        account_at: The account of the whole run as a function of σ; its ε falls in σ.
        target: The ε to stay within.

    Returns:
        The standard deviation of the noise, per coordinate.

    Raises:
        UsageError: No noise reaches the target.

    Example:
        >>> sigma = sigma_for(lambda sigma: Account(1e-5, [Event(sigma, count=100)]), target=8.0)
        >>> round(sigma, 3)
        6.002
    """
    positive(epsilon=target)
    target *= 1 - _MARGIN
    brentq = needed("scipy.optimize", "privacy").brentq
    enough = mu_for(target, account_at(1.0).delta)

    def plain_excess(log_sigma: float) -> float:
        return math.log(account_at(math.exp(log_sigma)).mu_unamplified / enough)

    low, high = -1.0, 1.0
    while plain_excess(high) > 0:
        high += 2.0
        if high > 80:
            raise UsageError(f"epsilon = {target:g} cannot be reached by more noise; choose a larger epsilon")
    while plain_excess(low) <= 0:
        low -= 2.0
    log_sigma = float(brentq(plain_excess, low, high, xtol=1e-13, rtol=1e-14))

    def excess(log_sigma: float) -> float:
        return math.log(max(account_at(math.exp(log_sigma)).epsilon(), 1e-300) / target)

    if account_at(math.exp(log_sigma))._sampled:
        high, low = log_sigma + 1e-9, log_sigma - 1.0
        while excess(low) <= 0:
            high, low = low, low - 1.0
        log_sigma = float(brentq(excess, low, high, xtol=2e-8, rtol=1e-12)) if excess(high) <= 0 else high
    return _just_within(account_at, target, math.exp(log_sigma))


def _just_within(account_at: Callable[[float], Account], target: float, sigma: float) -> float:
    """Adjust a σ that solves ε(σ) = target up to rounding, so that the target is kept."""

    def kept(sigma: float) -> bool:
        return account_at(sigma).epsilon() <= target

    failing = sigma * (1 - 1e-6)
    if not kept(sigma):
        failing, sigma = _nudged(kept, sigma)
    finest = 1e-8 if account_at(sigma)._sampled else 1e-14  # a PLD costs a second, and its ε may jump
    while account_at(sigma).epsilon() < target * (1 - 5e-7) and sigma - failing > finest * sigma:
        middle = (failing + sigma) / 2
        if kept(middle):
            sigma = middle
        else:
            failing = middle
    return sigma


def _nudged(kept: Callable[[float], bool], sigma: float) -> tuple[float, float]:
    """Raise a σ that is too small by relative steps that double, from 1e-15 on; return the last too small and the next.

    With sampling the first steps are far below what the search has left over, and each costs a PLD. So every eighth σ
    is tried first, and then those before the first of these that suffices, by bisection.
    """
    tried, nudge = [sigma], 1e-15
    while True:
        for _ in range(8):
            tried.append(tried[-1] * (1 + nudge))
            nudge *= 2
        if kept(tried[-1]):
            break
        tried = tried[-1:]
    first = 1 + bisect.bisect_left(tried[1:-1], True, key=kept)
    return tried[first - 1], tried[first]
