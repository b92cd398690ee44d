"""The releases of a run, round by round, and the noise that they need; connects `rules` and `accounting`.

σ is always the standard deviation per coordinate of ONE client's noise; if clients of unequal size add unequal noise
(rule C1), that of the client whose records move its message most. Under local trust it is added to the message,
and where a sum is seen to the weighted message (rule W); with equal weights they are the same. The observer named by
`trust` faces σ·gain (secure sum: √honest, central: √n, local: 1), so round k has the noise multiplier

    z_k = gain · σ_k / (min(cap, Δ_k + surcharge·σ_k) + row_surcharge·σ_k),

where cap is the largest Δ that the bound of the messages allows (`record_sensitivity.Sensitivity`; infinite with rule
C1), and σ_k = σ, or σ_k = σ s_k under a noise schedule s (`noise_schedule`).

If G groups of clients take turns (rule P1), a client takes part at most once in each cycle of G rounds. The account is
then that of one release in each cycle, and Δ_k that of the client's turn number ⌊k/G⌋.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError, at_least, positive
from .accounting import Account, Event, sigma_for
from .record_sensitivity import Sensitivity
from .statement import Privacy


@dataclass(frozen=True)
class Release:
    """The composed event of a run: Gaussian releases with sensitivity Δ_k, Poisson-sampled or not.

    Args:
        sensitivity: Δ_k of each round.
        gain: σ_eff/σ, as the observer sees it.
        drawn: The standard deviation of all noise in the sum, divided by σ: √n, or 1 under local trust.
        rate: The rate of the Poisson sampling; 1 without sampling.
        rounds: The number of rounds.
        surcharge: What snapping to the noise's grid adds to Δ_k, divided by σ.
        bound: The largest norm of a message.
        heaviest: The largest factor by which a message is multiplied in the sum that is seen.
        dimension: The dimension of a message.
        notes: What belongs beside ε in a report.
        schedule: s_k = σ_k/σ of each round; None if the noise is constant.
        relative: σ_i/σ of each client's own noise (rule C1); None if all clients add σ.
        groups: The number of groups of clients that take turns (rule P1).
        row_surcharge: What rounding rows of correlated noise adds to Δ_k (rule M1), divided by σ.

    Example:
        >>> run = Release(Sensitivity(cap=1.0), gain=10.0, drawn=10.0, rate=1.0, rounds=100)
        >>> round(run.epsilon(sigma=1.0, delta=1e-5), 3), round(run.sigma(epsilon=8.0, delta=1e-5), 3)
        (4.377, 0.6)
    """

    sensitivity: Sensitivity
    gain: float
    drawn: float
    rate: float
    rounds: int
    surcharge: float = 0.0
    bound: float = math.inf
    heaviest: float = 1.0
    dimension: int | None = None
    notes: tuple[str, ...] = ()
    schedule: tuple[float, ...] | None = None
    relative: tuple[float, ...] | None = None
    groups: int = 1
    row_surcharge: float = 0.0

    @property
    def turns(self) -> int:
        """The most rounds in which one client takes part, which are those that the run pays for."""
        return -(-self.rounds // self.groups)

    def sigma_at(self, sigma: float, round: int) -> float:
        """σ_k of one round."""
        if self.schedule is None:
            return sigma
        self._check_scheduled(round + 1)
        return sigma * self.schedule[round]

    def sum_sigma(self, sigma: float) -> float:
        """The standard deviation per coordinate of the sum of all clients' noise."""
        return sigma * self.drawn

    def multipliers(self, sigma: float, rounds: int, first: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """z_k for k = first .. first + rounds − 1."""
        positive(sigma=sigma)
        sensitivity = self.sensitivity.at(np.arange(first, first + rounds, dtype=np.float64) // self.groups)
        noise = np.full(rounds, sigma)
        if self.schedule is not None:
            self._check_scheduled(first + rounds)
            noise *= self.schedule[first : first + rounds]
        moved = np.minimum(self.sensitivity.cap, sensitivity + self.surcharge * noise) + self.row_surcharge * noise
        return np.asarray(self.gain * noise / moved, dtype=np.float64)

    def _check_scheduled(self, rounds: int) -> None:
        if self.schedule is not None and rounds > len(self.schedule):
            raise UsageError(
                f"the noise is scheduled for {len(self.schedule)} rounds, got round number {rounds}; schedule it too"
            )

    def event(self, sigma: float, round: int = 0, count: int = 1) -> Event:
        """The ledger's event for `count` rounds from `round` on.

        If Δ_k grows or the noise changes, the event has the constant multiplier with the same Σ 1/z_k², and hence the
        same ε. Sampled rounds have no such multiplier: rounds with different noise are paid for one by one, and so are
        rounds of groups that take turns while Δ_k grows, because the ledger counts their cycles.
        """
        at_least(0, round=round)
        at_least(1, count=count)
        if self.sensitivity.is_constant and self.schedule is None:
            return Event(float(self.multipliers(sigma, 1)[0]), self.rate, count)
        if self.schedule is not None and count == 1:
            return Event(float(self.multipliers(sigma, 1, round)[0]), self.rate)
        if self.groups > 1 and count > 1:
            raise UsageError(
                f"{count} rounds of several turns with growing sensitivity are no single event; pay for each of them"
            )
        if self.schedule is not None and self.rate < 1:
            raise UsageError(f"{count} sampled rounds with different noise are no single event; pay for each of them")
        squares = float(np.sum(self.multipliers(sigma, count, round) ** -2.0))
        return Event(math.sqrt(count / squares), self.rate, count)

    def account(self, sigma: float, delta: float, rounds: int | None = None) -> Account:
        """The account of the first `rounds` rounds (default: all)."""
        rounds = self.rounds if rounds is None else rounds
        at_least(1, rounds=rounds)
        turns = -(-rounds // self.groups)
        if self.sensitivity.is_constant and self.schedule is None:
            return Account(delta, [self.event(sigma, 0, turns)])
        if self.rate < 1 and not self.sensitivity.is_constant:
            raise UsageError("a sampled release with growing sensitivity has no rule; set amplify=False")
        if self.rate < 1:
            return Account(delta, self.kinds(sigma, rounds))
        each = self.multipliers(sigma, rounds)[:: self.groups]  # of the first group, which has the most turns
        return Account.of_mu(math.sqrt(float(np.sum(each**-2.0))), turns, delta)

    def kinds(self, sigma: float, rounds: int | None = None) -> list[Event]:
        """The first `rounds` rounds (default: all) as events, one for each noise multiplier."""
        found, counts = np.unique(
            self.multipliers(sigma, self.rounds if rounds is None else rounds), return_counts=True
        )
        return [Event(float(z), self.rate, int(count)) for z, count in zip(found, counts, strict=True)]

    def epsilon(self, sigma: float, delta: float, rounds: int | None = None) -> float:
        """ε at `delta` after `rounds` rounds with noise `sigma` per client."""
        return self.account(sigma, delta, rounds).epsilon()

    def sigma(self, epsilon: float, delta: float) -> float:
        """The smallest noise per client with which all rounds stay within (epsilon, delta)."""
        return sigma_for(lambda sigma: self.account(sigma, delta), epsilon)


def paper_sigma(release: Release, privacy: Privacy) -> float:
    """The noise of the paper's formula, with O(·) read as an equality: s = bound·√(K ln(1/δ))/ε.

    | `replay` | reading of s | σ per coordinate |
    | --- | --- | --- |
    | "per-coordinate" | standard deviation of a coordinate | s |
    | "total-norm" | E‖z‖² = s² | s/√d |
    | "variance" | variance of a coordinate of a message in units of its bound | bound·√(s/bound) |

    None of them gives the ε in the formula; report `release.epsilon(σ, δ)` instead. The paper's factor β
    belongs to the server's step, not to the message, and is left out here.

    Args:
        release: The releases of the whole run.
        privacy: The privacy statement.

    Returns:
        The standard deviation of one client's noise, per coordinate.

    Raises:
        UsageError: The statement names no reading of the formula, or the dimension that it needs is unknown.

    Example:
        >>> run = Release(Sensitivity(cap=1.0), gain=1.0, drawn=1.0, rate=1.0, rounds=100, bound=1.0)
        >>> round(paper_sigma(run, Privacy(epsilon=8, replay="per-coordinate")), 3)
        4.241
    """
    if privacy.epsilon is None or privacy.replay is None:
        raise UsageError("the paper's formula needs epsilon and replay")
    size = math.sqrt(release.rounds * math.log(1 / privacy.delta)) / privacy.epsilon
    if privacy.replay == "variance":
        size = math.sqrt(size)
    elif privacy.replay == "total-norm":
        if release.dimension is None:
            raise UsageError("replay='total-norm' needs the message's dimension")
        size /= math.sqrt(release.dimension)
    positive(bound=release.bound)
    return release.bound * size


@dataclass(frozen=True)
class Calibrated:
    """A noise, and the exact ε that it amounts to.

    Args:
        sigma: The standard deviation of one client's noise, per coordinate.
        epsilon: The exact ε.
        delta: The δ of the guarantee, in (0, 1).
        is_target: Whether that ε is a promise, or only reported.

    Example:
        >>> Calibrated(sigma=1.0, epsilon=4.377, delta=1e-5, is_target=False).sigma
        1.0
    """

    sigma: float
    epsilon: float
    delta: float
    is_target: bool


def calibrate(release: Release, privacy: Privacy) -> Calibrated:
    """The noise that `privacy` asks for, with its true ε: from a target, as given, or by the paper's formula.

    Args:
        release: The releases of the whole run.
        privacy: The privacy statement.

    Returns:
        The noise and its ε.

    Raises:
        UsageError: No noise reaches the target.

    Example:
        >>> run = Release(Sensitivity(cap=1.0), gain=10.0, drawn=10.0, rate=1.0, rounds=100)
        >>> found = calibrate(run, Privacy(epsilon=8, trust="secure-sum"))
        >>> round(found.sigma, 3), round(found.epsilon, 3)
        (0.6, 8.0)
    """
    if privacy.replay is not None:
        sigma = paper_sigma(release, privacy)
    elif privacy.sigma is not None:
        sigma = privacy.sigma
    else:
        sigma = release.sigma(privacy.budget, privacy.delta)
    return Calibrated(sigma, release.epsilon(sigma, privacy.delta), privacy.delta, privacy.is_target)
