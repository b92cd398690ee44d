"""One run's noise: each round is paid for in the ledger, then its messages leave with noise.

    mechanism.pay(k)                      raises `BudgetSpent`; nothing of round k may leave before
    sent = mechanism.send(messages, …)    what the memory may take: the message itself, or what was sent
    mechanism.outgoing(sums, share, m)    what leaves this process: its part of the sum, with its part of the noise
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..methods import CLIENT_STEPS, Method, overridden
from ..operators import proven_lipschitz
from .accounting import Account
from .grid import from_grid, grid_step, snap
from .ledger import Head, Ledger, LedgerDamaged, LedgerInUse
from .noise import GridNoise, noise_source, privatise
from .release import calibrate
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
    statement: str
    not_covered: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def facts_of(method: Method) -> Facts:
    """A method as the rules see it."""
    # The record rule is proved for the scheme's own messages and memories, and for the operator that states L.
    usual = not overridden(method, *CLIENT_STEPS)
    lipschitz = proven_lipschitz(method.operator) if usual else math.inf
    return Facts(method.name, method.operator.bound, method.feedback, lipschitz, method.beta, method.decay)


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
    ) -> None:
        """`name`: of the run, by its public configuration, never its data; two runs of one seed share no noise."""
        privacy = privacy.with_noise("secure")
        self.privacy, self.method, self.setting = privacy, method, setting
        self.release = release(facts_of(method), privacy, setting)
        self.calibrated = calibrate(self.release, privacy)
        self.sigma = self.calibrated.sigma
        self._source = noise_source(privacy.noise or "secure", seed if privacy.noise == "seeded" else None)
        self._account = Account(privacy.delta)
        self._ledger: Ledger | None = None
        self.name, self._notes = name, notes
        # A simulation that repeats to the bit pays for a hundredth of its rounds at once; all others round by round.
        self._chunk = max(1, setting.rounds // 100) if privacy.noise == "seeded" else 1
        self._paid: int | None = None
        self._attempt = 0
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
        """Keep the account in the file `path`."""
        if self._ledger is not None:
            return
        try:
            self._ledger = Ledger(path, self.privacy, self.setting.rounds, Head(*expect) if expect else None)
        except (LedgerDamaged, LedgerInUse) as error:
            raise UsageError(str(error)) from None

    @property
    def head(self) -> list[Any] | None:
        """For a checkpoint: the ledger as it is now."""
        return list(self._ledger.head) if self._ledger is not None else None

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()

    @property
    def begun(self) -> bool:
        """Whether the ledger holds releases of this or an earlier process."""
        return self._ledger is not None and self._ledger.releases > 0

    def pay(self, round: int, key: str | None = None) -> None:
        """Before anything of `round` leaves; the second call for a round does nothing.

        `key` names a release that would come out bit for bit the same if it were made again, and then costs nothing
        more. Without one a round that is made again is paid for again, and draws other noise.
        """
        if self._paid == round:
            return
        self._attempt = 0
        if self._ledger is None:
            self._account.add(self.release.event(self.sigma, round))
        elif key is None or self._chunk == 1:
            event = self.release.event(self.sigma, round)
            self._attempt = self._ledger.spend(round, event, self.sigma, key).attempt
        else:
            end = min(round - round % self._chunk + self._chunk, self.setting.rounds)
            event = self.release.event(self.sigma, round, end - round)
            self._attempt = self._ledger.reserve(round, event, self.sigma, key).attempt
        self._paid, self._sum = round, None

    @property
    def attempt(self) -> int:
        """Which release of its round the one paid for last is: part of its noise's name."""
        return self._attempt

    def paid_elsewhere(self, round: int, attempt: int) -> None:
        """The rank that keeps the ledger has paid for `round`."""
        self._paid, self._attempt, self._sum = round, attempt, None

    def send(self, messages: Tensor, clients: Tensor) -> Tensor:
        """Messages ``[c, d]`` on their way to the server; returns what the clients' memories may take."""
        if self._paid is None:
            raise UsageError("a message may only leave after its round was paid for")
        if self.privacy.trust != "local":
            if isinstance(self._source, GridNoise):
                step = grid_step(self.release.sum_sigma(self.sigma))
                self._add(snap(messages, step, self.release.bound).sum(0))
            else:
                self._add(messages.sum(0))
            return messages
        if isinstance(self._source, GridNoise):
            sent = privatise(messages, self.sigma, self._source, bound=self.release.bound)
        else:
            sent = messages + torch.stack(
                [self._draw(messages[0], self.sigma, "client", client) for client in clients.tolist()]
            )
        self._add(sent.sum(0))
        return sent if self.keeps_noise else messages

    def outgoing(self, sums: Tensor, share: float = 1.0, messages: int = 0) -> Tensor:
        """Σ of what clients here send in the round that was paid for last; `sums`: Σ of messages not passed to `send`.

        `share`: of all clients, those that live here; their part of the variance is added. `messages`: how many were
        not passed to `send`, in all processes; for local trust. On the grid: integers.
        """
        sigma = self.release.sum_sigma(self.sigma)
        if self.privacy.trust == "local" and not messages:
            return sums if self._sum is None else self._sum
        if isinstance(self._source, GridNoise):
            scale = math.sqrt(share) * sigma / grid_step(sigma)
            noise = torch.from_numpy(self._source.integers(len(sums), scale))
            return (noise if self._sum is None else self._sum.cpu() + noise).to(sums.device)
        noise = share * self.noise_of_sum(sums, messages)
        return sums + noise if self._sum is None else self._sum + noise

    def noise_of_sum(self, like: Tensor, messages: int) -> Tensor:
        """All the noise of the round that was paid for last, where `takes_sums`; under local trust that of messages."""
        local = self.privacy.trust == "local"
        sigma = self.sigma * math.sqrt(messages) if local else self.release.sum_sigma(self.sigma)
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

    def spent(self) -> Spent:
        """The exact account of what was paid for so far."""
        account, ledger = self._account, self._ledger
        if ledger is not None:
            epsilon, releases = ledger.exact_epsilon(), ledger.releases
        else:
            epsilon, releases = account.epsilon() if account.releases else 0.0, account.releases
        return Spent(
            epsilon=epsilon,
            delta=self.privacy.delta,
            sigma=self.sigma,
            releases=releases,
            is_target=self.privacy.is_target,
            statement=self.privacy.promise(self.setting.clients),
            not_covered=tuple(self.privacy.not_covered()),
            notes=(*self.release.notes, *self._notes),
        )

    def _add(self, part: Tensor) -> None:
        self._sum = part if self._sum is None else self._sum + part

    def _draw(self, like: Tensor, sigma: float, *path: str | int) -> Tensor:
        named = (self.name, "round", self._paid or 0, "attempt", self._attempt, *path)
        return self._source.draw(like.shape, sigma, *named, device=like.device, dtype=like.dtype)
