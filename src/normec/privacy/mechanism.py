"""One run's noise: each round is paid for in the ledger, then its messages leave with noise.

    mechanism.pay(k)                      pays for one release of round k, each time; raises `BudgetSpent`
    sent = mechanism.send(messages, …)    what the memory may take: the message itself, or what was sent
    mechanism.outgoing(sums, share, v)    what leaves this process: its part of the sum, with its part of the noise
    mechanism.received(whole)             the sum the server sees

Under "local" trust every message gets its own noise, drawn for its client, so that it does not matter where the
client lives. Where only the sum is seen, one draw of variance nσ² stands for the n clients' draws: the same
distribution at a fraction of the cost. So it does in simulations of local trust, unless memories take the noise: nobody
is there to look at single messages. Where the clients are spread over processes, each draws for its own before
anything leaves it; seeded noise is one vector that all of them know, and each adds its share of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms.error_feedback import ErrorFeedbackScheme
from ..algorithms.method import CLIENT_FUNCTIONS, Method, Steps, claim_covers, has_functions_of
from ..errors import UsageError
from ..system.files import read_if_present, writing
from .accounting import Account, Event, mu_for
from .hash_chain import read_chain
from .ledger import Head, Ledger, LedgerDamaged, LedgerInUse, Receipt, affordable
from .noise import GridNoise, noise_source, privatise
from .release import calibrate
from .rounding_grid import from_grid, grid_step, snap
from .rules import release
from .setting import Facts, Setting
from .statement import Privacy


@dataclass(frozen=True)
class Spent:
    """What a run's messages amount to: the exact ε at δ, and everything needed to read it rightly."""

    epsilon: float
    delta: float
    sigma: float
    releases: int
    is_target: bool
    simulation: bool  # the noise comes from a seeded generator and protects nobody
    statement: str
    not_covered: tuple[str, ...]
    notes: tuple[str, ...]
    beyond_ledger: int = 0  # of `releases`, those a party may have made of which the run's own ledger knows nothing

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def facts_of(method: Method, dimension: int = 1) -> Facts:
    """A method as the rules see it: by what it states of itself, and no more than that.

    The record rule for hidden memories is proved for error feedback (`ErrorFeedbackScheme`) alone. A method with a
    state of another kind has no Lipschitz constant that the rules could use: a record may act through the state.
    """
    steps = Steps(method, torch.zeros(dimension))
    scheme = has_functions_of(method, ErrorFeedbackScheme, *CLIENT_FUNCTIONS)
    claimed = claim_covers(method, "lipschitz", *CLIENT_FUNCTIONS) and (scheme or not steps.stateful)
    lipschitz = method.lipschitz if claimed and method.lipschitz is not None else math.inf
    beta, decay = (method.beta, method.decay) if isinstance(method, ErrorFeedbackScheme) else (1.0, 0.0)
    return Facts(method.name, method.bound, steps.stateful, lipschitz, beta, decay, made_of_messages=scheme)


class Mechanism:
    """The noise of a run under way. Refuses what no rule covers when it is made, before anything is computed."""

    def __init__(
        self,
        privacy: Privacy,
        method: Method,
        setting: Setting,
        seed: int,
        name: str = "",
        notes: tuple[str, ...] = (),
        gaps: tuple[str, ...] = (),
    ) -> None:
        """Refuse what no rule covers.

        Args:
            name: The run's name, made of its public configuration, never of its data: two runs of one seed then share
                no noise.
            notes: What belongs beside ε in a report.
            gaps: What this run does not cover, beside what the statement itself lists.
        """
        privacy = privacy.with_noise("secure")
        self.privacy, self.method, self.setting = privacy, method, setting
        self.release = release(facts_of(method, setting.dimension or 1), privacy, setting)
        self.calibrated = calibrate(self.release, privacy)
        self.sigma = self.calibrated.sigma
        self._source = noise_source(privacy.noise or "secure", seed if privacy.noise == "seeded" else None)
        self._account = Account(privacy.delta)
        self._enough = mu_for(privacy.budget, privacy.delta) if math.isfinite(privacy.budget) else math.inf
        self._ledger: Ledger | None = None
        self.name, self._notes, self._gaps = name, notes, gaps
        # A simulation that repeats to the bit pays for a hundredth of its rounds at once; all others round by round.
        self._chunk = max(1, setting.rounds // 100) if privacy.noise == "seeded" else 1
        self._paid: int | None = None
        self._attempt = 0
        self._recalled = False
        self._sum: Tensor | None = None

    @property
    def keeps_noise(self) -> bool:
        """Whether the clients' memories take the noisy message."""
        return self.privacy.memory == "noisy"

    @property
    def takes_sums(self) -> bool:
        """Whether messages need not be seen one by one: only their sum counts, with noise of any real value."""
        return not isinstance(self._source, GridNoise) and (self.privacy.trust != "local" or not self.keeps_noise)

    @property
    def simulated(self) -> bool:
        """Whether the noise can be repeated by whoever knows the seed, so that it protects nobody."""
        return self.privacy.noise == "seeded"

    def open(self, path: Path, expect: list[Any] | None = None) -> None:
        """Keep the account in the file `path`; one that a checkpoint knows of must be there."""
        if self._ledger is not None:
            return
        if read_if_present(path) is None and expect:
            raise UsageError(f"{path} is missing; restore it from a backup, or start anew in another folder")
        try:
            with writing(path):
                self._ledger = Ledger(path, self.privacy, self.setting.rounds, Head(*expect) if expect else None)
        except (LedgerDamaged, LedgerInUse) as error:
            raise UsageError(str(error)) from None

    def recognise(self, head: list[Any]) -> None:
        """Refuse if the ledger is not the one that a saved state knew as `head`, or knows less than it did."""
        if self._ledger is None:
            raise UsageError("there is no ledger to recognise; open one first")
        try:
            read_chain(self._ledger.path, Head(*head))
        except LedgerDamaged as error:
            raise UsageError(str(error)) from None

    @property
    def head(self) -> list[Any] | None:
        """For a checkpoint: the ledger as it is now."""
        return list(self._ledger.head) if self._ledger is not None else None

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()

    def pay(self, round: int, key: str | None = None) -> None:
        """Pay for one release of `round`, before anything of it leaves; raises `BudgetSpent`.

        Every call pays for another release, whose noise has another name, unless `key` names a release that the ledger
        knows and that would come out bit for bit the same if it were made again. What an earlier call has left behind
        is dropped.
        """
        self._paid, self._sum = None, None
        if self._ledger is None:
            attempt = self._account.releases - round  # 0 unless a round is repeated; never twice the same for a round
            self._account = self._with(self.release.event(self.sigma, round), round)
        else:
            with writing(self._ledger.path):
                attempt = self._spend(self._ledger, round, key).attempt
        self._paid, self._attempt, self._recalled = round, attempt, False

    def _spend(self, ledger: Ledger, round: int, key: str | None) -> Receipt:
        if key is None or self._chunk == 1:
            return ledger.spend(round, self.release.event(self.sigma, round), self.sigma, key)
        end = min(round - round % self._chunk + self._chunk, self.setting.rounds)
        return ledger.reserve(round, self.release.event(self.sigma, round, end - round), self.sigma, key)

    def take_account(self, events: Iterable[Event]) -> None:
        """Take `events` as the whole account so far, where no ledger keeps it."""
        self._account = Account(self.privacy.delta, events)

    def recall(self, round: int, attempt: int) -> None:
        """In place of `pay`: this attempt of `round` was released before and its sum is known; nothing is drawn."""
        if self._ledger is not None and not self._ledger.has_paid(round, attempt):
            raise UsageError(
                f"round {round} is among the releases of the run but not in its ledger; restore both from one backup"
            )
        self._paid, self._attempt, self._sum, self._recalled = round, attempt, None, True

    @property
    def begun(self) -> bool:
        """Whether the ledger holds releases of this or an earlier process."""
        return self._ledger is not None and self._ledger.releases > 0

    @property
    def releases(self) -> int:
        """How many releases were paid for so far."""
        return self._ledger.releases if self._ledger is not None else self._account.releases

    @property
    def attempt(self) -> int:
        """Which release of its round the one paid for last is: part of its noise's name."""
        return self._attempt

    def paid_elsewhere(self, round: int, attempt: int) -> None:
        """The rank that keeps the ledger has paid for `round`."""
        self._paid, self._attempt, self._sum, self._recalled = round, attempt, None, False

    def send(self, messages: Tensor, clients: Tensor, weights: Tensor | None = None) -> Tensor:
        """Messages ``[c, d]`` on their way to the server; returns what the clients' memories may take.

        `weights`: n·w_i of these clients, ``[c]``, where they are not equal. A sum takes weighted messages, and its
        noise covers the heaviest; under local trust the server weights what it received.
        """
        self._check_paid()
        if self._recalled:
            return messages
        if self.privacy.trust != "local":
            weighted = messages if weights is None else messages * weights[:, None]
            if isinstance(self._source, GridNoise):
                step = grid_step(self.release.sum_sigma(self.sigma))
                self._add(snap(weighted, step, self.release.bound * self.release.heaviest).sum(0))
            else:
                self._add(weighted.sum(0))
            return messages
        sent = self.noisy(messages, clients)
        self._add((sent if weights is None else sent * weights[:, None]).sum(0))
        return sent if self.keeps_noise else messages

    def noisy(self, messages: Tensor, clients: Tensor) -> Tensor:
        """What an observer of single messages sees in place of ``[c, d]``: each with the noise of its client."""
        if isinstance(self._source, GridNoise):
            return privatise(messages, self.sigma, self._source, bound=self.release.bound)
        draws = [self._draw(messages[0], self.sigma, "client", client) for client in clients.tolist()]
        return messages + torch.stack(draws)

    def outgoing(self, sums: Tensor, share: float = 1.0, variance: float = 0) -> Tensor:
        """Σ of what clients here send in the round that was paid for last; `sums`: Σ of messages not passed to `send`.

        `share`: of all clients, those that live here; their part of the variance is added. `variance`: for local trust,
        the variance in units of σ² of the noise of all messages that were not passed to `send`, in all processes: how
        many they are, or the sum of their squared weights. On the grid: integers.
        """
        self._check_paid()
        sigma = self.release.sum_sigma(self.sigma)
        if self.privacy.trust == "local" and not variance:
            return sums if self._sum is None else self._sum
        if isinstance(self._source, GridNoise):
            scale = math.sqrt(share) * sigma / grid_step(sigma)
            noise = torch.from_numpy(self._source.integers(len(sums), scale))
            return (noise if self._sum is None else self._sum.cpu() + noise).to(sums.device)
        noise = share * self.noise_of_sum(sums, variance)
        return sums + noise if self._sum is None else self._sum + noise

    def noise_of_sum(self, like: Tensor, variance: float) -> Tensor:
        """All the noise of the round that was paid for last, where `takes_sums`.

        Under local trust it is that of the messages of the round, with `variance` in units of σ².
        """
        self._check_paid()
        local = self.privacy.trust == "local"
        sigma = self.sigma * math.sqrt(variance) if local else self.release.sum_sigma(self.sigma)
        return self._draw(like, sigma, "sum")

    def received(self, whole: Tensor, like: Tensor) -> Tensor:
        """The sum over all processes of what left them, as numbers of `like`'s type."""
        if whole.is_floating_point():
            return whole
        return from_grid(whole, grid_step(self.release.sum_sigma(self.sigma)), like)

    def epsilon(self) -> float:
        """ε of what was paid for so far; cheap, never below the truth."""
        if self._ledger is not None:
            return self._ledger.epsilon
        return self._account.upper(self.setting.rounds) if self._account.releases else 0.0

    def epsilon_at(self, round: int) -> float:
        """ε of what was paid for up to `round`, which a resumed run finds again; cheap, never below the truth."""
        return self._ledger.epsilon_at(round) if self._ledger is not None else self.epsilon()

    def spent(self) -> Spent:
        """The exact account of what was paid for so far."""
        account = self._ledger.exact_epsilon if self._ledger is not None else self._account.epsilon
        return Spent(
            epsilon=account() if self.releases else 0.0,
            delta=self.privacy.delta,
            sigma=self.sigma,
            releases=self.releases,
            is_target=self.privacy.is_target,
            simulation=self.simulated,
            statement=self.privacy.promise(self.setting.clients),
            not_covered=(*self.privacy.not_covered(), *self._gaps),
            notes=(*self.release.notes, *self._notes),
        )

    def _with(self, event: Event, round: int) -> Account:
        """The account with one more event, where no ledger keeps it; raises `BudgetSpent`."""
        after = self._account.copy()
        after.add(event)
        if after.mu_unamplified <= self._enough:  # which is much cheaper to know than ε
            return after
        return affordable(self._account, event, self.privacy, self.setting.rounds, round)[0]

    def _check_paid(self) -> None:
        if self._paid is None:
            raise UsageError("a message may only leave after its round was paid for")

    def _add(self, part: Tensor) -> None:
        self._sum = part if self._sum is None else self._sum + part

    def _draw(self, like: Tensor, sigma: float, *path: str | int) -> Tensor:
        named = (self.name, "round", self._paid or 0, "attempt", self._attempt, *path)
        return self._source.draw(like.shape, sigma, *named, device=like.device, dtype=like.dtype)
