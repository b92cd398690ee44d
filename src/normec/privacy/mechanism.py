"""The noise mechanism of a run: each round is paid for in the ledger, then its messages are sent with noise.

    mechanism.pay(k)                      pays for one release of round k at every call; raises `BudgetSpent`
    sent = mechanism.send(messages, …)    the messages for the memories, before or after the noise
    mechanism.outgoing(sums, share, …)    this process's part of the sum, with its part of the noise
    mechanism.received(whole, like)       the sum that the server sees

Under "local" trust every message has its own noise, drawn for its client, so that the process of a client does not
matter. If only the sum is visible, one draw of variance nσ² replaces the draws of n clients: it has the same
distribution at a fraction of the cost. The same holds in simulations of local trust, where nobody sees single messages,
unless memories contain the noise. If clients are distributed over processes, each process draws noise for its own
clients before it sends anything; seeded noise is one vector that all processes know, and each adds its share.

Correlated noise (rule M1) depends on past rounds, which are kept in tables of the run's state: `correlate` takes them,
and `keep_round` adds a finished round. Seeded noise keeps w_t. Noise on a grid keeps the sums S_t without noise and the
released sums, because the row of a round is an integer that contains earlier S_t.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms.error_feedback import ErrorFeedbackScheme
from ..algorithms.method import CLIENT_FUNCTIONS, Method, Steps, Tables, has_functions_of, rows_like
from ..algorithms.operators import claim_covers
from ..algorithms.registry import works_by_rows
from ..errors import UsageError
from ..sampling.random_streams import Key, Stream
from ..system.files import read_if_present, writing
from ..system.processes import process_identity
from .accounting import Account, Event, mu_for
from .correlated_noise import HISTORY, ONE, SUMS, BandedNoise, best_coefficients
from .facts import Facts, Setting
from .hash_chain import read_chain
from .ledger import (
    Head,
    Ledger,
    LedgerDamaged,
    LedgerInUse,
    Payments,
    Receipt,
    affordable,
    charged_releases,
    without_used_coins,
)
from .noise import GridNoise, noise_source, privatise
from .release import Calibrated, calibrate
from .rounding_grid import from_grid, grid_step, snap
from .rules import release
from .secure_sum import SumGrid
from .statement import Privacy

LARGEST_SUM = 2**62 // ONE  # of messages on a grid under correlated noise, which multiplies them by coefficients
FARTHEST = 64.0  # standard deviations that no noise reaches
SHORTEST_BOUND = 1e-15  # the square of a shorter length is no normal number of float32, and no check would see it


@dataclass(frozen=True)
class Spent:
    """The privacy spending of a run: the exact ε at δ, with the statement and the notes that explain it."""

    epsilon: float
    delta: float
    sigma: float
    releases: int
    is_target: bool
    simulation: bool  # the noise comes from a seeded generator and protects nobody
    statement: str
    not_covered: tuple[str, ...]
    notes: tuple[str, ...]
    beyond_ledger: int = 0  # those of `releases` that a party may have made and that are not in the run's ledger
    stopped_by_rule: bool = False  # a rule that saw results ended the run: `epsilon` is that of all planned rounds

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def facts_of(method: Method, dimension: int = 1) -> Facts:
    """The facts about a method that the rules use, taken from its own claims.

    The record rule for hidden memories is proved only for error feedback (`ErrorFeedbackScheme`). A method with a state
    of another kind has no Lipschitz constant for the rules, because a record may act through the state.
    """
    steps, scheme = Steps(method, torch.zeros(dimension)), made_of_messages(method)
    claimed = claim_covers(method, "lipschitz", *CLIENT_FUNCTIONS) and (scheme or not steps.stateful)
    lipschitz = method.lipschitz if claimed and method.lipschitz is not None else math.inf
    beta, decay = (method.beta, method.decay) if isinstance(method, ErrorFeedbackScheme) else (1.0, 0.0)
    return Facts(method.name, method.bound, steps.stateful, lipschitz, beta, decay, made_of_messages=scheme)


def made_of_messages(method: Method) -> bool:
    """Whether a client's state is the memory of error feedback: a function of the messages that were sent alone."""
    return has_functions_of(method, ErrorFeedbackScheme, *CLIENT_FUNCTIONS, "_forgotten") and all(
        isinstance(inspect.getattr_static(method, name), int | float) for name in ("beta", "decay")
    )  # numbers, not properties that may say something else the next time


def refuse_false_constant(method: Method, lipschitz: float, dimension: int) -> None:
    """Refuse a constant of a user's method that some pairs of made-up gradients contradict; that none does is no proof.

    The rule for hidden memories needs more than the constant: a map that is cocoercive, as gradients of convex
    functions are.
    """
    if not math.isfinite(lipschitz) or works_by_rows(method):
        return
    draw = torch.Generator().manual_seed(0)
    directions = torch.randn(4, dimension, dtype=torch.float64, generator=draw)
    directions /= torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    steps = Steps(method, torch.zeros(dimension, dtype=torch.float64), one_by_one=True)
    key = Key(Stream(0, "operator"), 0, torch.arange(1))
    public = steps.broadcast(steps.initial_server_state)

    def sent(update: Tensor) -> Tensor:
        state = {name: rows_like(start, 1).clone() for name, start in steps.initial_client_state.items()}
        return steps.message(update[None].clone(), state, key, public)[0][0]

    for exponent in range(-6, 7, 2):
        one = 10.0**exponent * directions[0]
        for apart in (1e-3 * directions[1], directions[2], -2 * directions[0], -0.5 * directions[0], directions[3]):
            gap = 10.0**exponent * apart
            moved = sent(one + gap) - sent(one)
            length, most = float(moved.norm()), lipschitz * float(gap.norm())
            falls_short = steps.stateful and float(gap @ moved) < length**2 / lipschitz - 1e-6 * length * most
            if length > most * (1 + 1e-6) or falls_short:
                raise UsageError(
                    f"{method.name} states lipschitz = {lipschitz:g}, and gradients {float(gap.norm()):g} apart "
                    f"move its message by {length:g}; state a larger constant, or None"
                )


class Mechanism:
    """The noise of a run. The constructor refuses statements that no rule covers, before anything is computed."""

    def __init__(
        self,
        privacy: Privacy,
        method: Method,
        setting: Setting,
        seed: int,
        name: str = "",
        notes: tuple[str, ...] = (),
        gaps: tuple[str, ...] = (),
        witness: Path | None = None,
        sigma: float | None = None,
    ) -> None:
        """Derive the release and calibrate the noise.

        Args:
            name: A name for the run, derived from its public configuration and never from its data, so that two runs
                with the same seed share no noise.
            notes: Remarks for reports of ε.
            gaps: What this run does not cover, in addition to the list of the statement.
            witness: A file outside the ledger's folder that also counts its lines (see `Ledger`).
            sigma: The noise of a run that this one continues; None to calibrate it.
        """
        privacy = privacy.with_noise("secure").for_rounds(setting.rounds)
        self.privacy, self.method, self.setting = privacy, method, setting
        facts = facts_of(method, setting.parameters or setting.dimension or 1)
        self.release = release(facts, privacy, setting)
        if self.release.bound < SHORTEST_BOUND:
            raise UsageError(
                f"{method.name} bounds its messages by {self.release.bound:g}, and lengths below {SHORTEST_BOUND:g} "
                "vanish in single precision; raise the bound, and lower the step size by as much"
            )
        if privacy.record_bound is not None and privacy.record_bound < SHORTEST_BOUND:
            raise UsageError(
                f"record_clip is {privacy.record_bound:g}, and lengths below {SHORTEST_BOUND:g} vanish in single "
                "precision; raise it"
            )
        if privacy.record_clip is not None and math.isfinite(facts.lipschitz) and not works_by_rows(method):
            refuse_false_constant(method, facts.lipschitz, setting.dimension or 1)
            notes = (*notes, f"how far a record moves a message rests on the constant that {method.name} states")
        self._continues = sigma is not None
        self.calibrated = (
            calibrate(self.release, privacy)
            if sigma is None
            else Calibrated(sigma, self.release.epsilon(sigma, privacy.delta), privacy.delta, privacy.is_target)
        )
        self.sigma = self.calibrated.sigma
        scheduled = self.release.schedule is not None
        # The kinds of rounds, for a cheap bound on their ε (`Account.upper`); without sampling ε itself is cheap.
        self._planned = self.release.kinds(self.sigma) if scheduled and self.release.rate < 1 else []
        self._source = noise_source(privacy.noise or "secure", seed if privacy.noise == "seeded" else None)
        self._steps: dict[float, float] = {}  # σ → step
        if privacy.trust == "secure-sum" and privacy.noise == "secure":
            self._step_of(self.sigma * min(self.release.schedule or (1.0,)))  # refuses noise that is too small
        self.banded = self._banded_noise()
        self._past: Tables = {}  # of correlated noise, in the run's state
        self._row: Tables = {}  # what the current round adds to them
        self._account = Account(privacy.delta, planned=self._planned)
        # Without a ledger: the releases of each round, and the cycles of groups that take turns with a release.
        self._attempts: Counter[int] = Counter()
        self._cycles: set[int] = set()
        self._enough = mu_for(privacy.budget, privacy.delta) if math.isfinite(privacy.budget) else math.inf
        self._ledger: Ledger | None = None
        self._made: list[tuple[int, Event, float]] = []  # what was paid without a ledger
        self.name, self._notes, self._gaps, self._witness = name, notes, gaps, witness
        # A simulation that can be repeated bit for bit pays for a hundredth of its rounds at once, if their noise is
        # the same.
        alike = not scheduled and (setting.groups == 1 or self.release.sensitivity.is_constant)
        self._chunk = max(1, setting.rounds // 100) if privacy.noise == "seeded" and alike else 1
        self._owner: tuple[int, ...] | None = None  # the process that pays for the rounds
        self._paid: int | None = None
        self._attempt = 0
        self._recalled = False
        self._sum: Tensor | None = None

    def _banded_noise(self) -> BandedNoise | None:
        """The correlation of the noise; None if the noise of all rounds is independent."""
        bands = self.privacy.bands_of(self.setting.groups)
        if bands == 1:
            return None
        banded = BandedNoise(best_coefficients(bands, self.setting.workload))
        if isinstance(self._source, GridNoise):
            most = math.ceil(self.setting.clients / self.setting.groups) * self.release.bound * self.release.heaviest
            if not most / grid_step(self.release.sum_sigma(self.sigma)) < LARGEST_SUM:
                raise UsageError(
                    f"sums of messages of up to {self.release.bound:g} under sigma = {self.sigma:g} do not fit into "
                    "the 64 bits of correlated noise on a grid; raise sigma, or leave out noise_bands"
                )
        return banded

    def correlate(self, past: Tables, coefficients: Sequence[int] | None = None) -> None:
        """Take the tables of past rounds, for correlated noise.

        Args:
            past: The tables, which `keep_round` changes; empty before the first round.
            coefficients: Those that the run began with; None for a run that begins now.
        """
        if self.banded is None:
            return
        if coefficients is not None:
            if len(coefficients) != self.banded.bands:
                raise UsageError(
                    f"the checkpoint has {len(coefficients)} coefficients of correlated noise, and the run has "
                    f"{self.banded.bands}; restore the run's folder from a backup"
                )
            self.banded = BandedNoise(coefficients)
        self._past = past

    def empty_past(self, like: Tensor) -> Tables:
        """The tables of past rounds before the first one, for messages like `like`; none without correlated noise."""
        if self.banded is None:
            return {}
        if not isinstance(self._source, GridNoise):
            return {HISTORY: self.banded.empty_table(len(like), like.dtype, like.device)}
        host = torch.device("cpu")
        return {
            HISTORY: self.banded.empty_table(len(like), torch.float64, host),
            SUMS: self.banded.empty_table(len(like), torch.int64, host),
        }

    def keep_round(self, round: int) -> None:
        """Note that `round` is finished; correlated noise needs what it has drawn in the next rounds."""
        if self.banded is not None:
            for name, row in self._row.items():
                self.banded.keep(self._past[name], round, row)
            self._row = {}

    def sigma_at(self, round: int) -> float:
        """The noise of one client in `round`."""
        return self.release.sigma_at(self.sigma, round)

    @property
    def round_sigma(self) -> float:
        """The noise of one client in the round that was paid for last."""
        return self.sigma_at(self._paid or 0)

    @property
    def _sum_sigma(self) -> float:
        """The noise of the sum in the round that was paid for last."""
        return self.release.sum_sigma(self.round_sigma)

    @property
    def _sum_step(self) -> float:
        """The step of the grid of the sum in the round that was paid for last."""
        if self._adds_integers:
            most = self.setting.clients * (self.release.bound + FARTHEST * self.round_sigma)
            return max(grid_step(self.round_sigma), math.ldexp(1.0, math.frexp(most)[1] - 62))
        if self.privacy.trust != "secure-sum" or self.privacy.noise == "exact":
            return grid_step(self._sum_sigma)
        return self._step_of(self.round_sigma)

    @property
    def _adds_integers(self) -> bool:
        """Whether messages that left with real noise of their own are added up as integers.

        Their sum is then the same in any order. A sum of floats would show the order in which an engine takes the
        clients, which follows from their numbers of records. Where records are protected, these numbers are public, and
        floats are added up.
        """
        local = self.privacy.trust == "local" and self.privacy.unit == "client"
        return local and isinstance(self._source, GridNoise)

    def _step_of(self, sigma: float) -> float:
        """The step of the grid of a secure sum in which each client has the noise `sigma`."""
        if sigma not in self._steps:
            grid = SumGrid(self.setting.clients, self.release.bound, sigma, self.setting.weights)
            self._steps[sigma] = grid.step
        return self._steps[sigma]

    @property
    def keeps_noise(self) -> bool:
        """Whether the clients' memories are updated with the noisy message."""
        return self.privacy.memory == "noisy"

    @property
    def takes_sums(self) -> bool:
        """Whether only the sum of messages is needed, with real-valued noise."""
        return not isinstance(self._source, GridNoise) and (self.privacy.trust != "local" or not self.keeps_noise)

    @property
    def simulated(self) -> bool:
        """Whether the noise is seeded: it can be repeated and protects nobody."""
        return self.privacy.noise == "seeded"

    def open(self, path: Path, expect: list[Any] | None = None) -> None:
        """Keep the account in the file `path`, which must exist if a checkpoint has its head `expect`."""
        if self._ledger is not None:
            return
        if read_if_present(path) is None and expect:
            raise UsageError(f"{path} is missing; restore it from a backup, or start again in another folder")
        try:
            with writing(path):
                head = Head(*expect) if expect else None
                self._ledger = Ledger(
                    path,
                    self.privacy,
                    self.release.turns,
                    head,
                    witness=self._witness,
                    planned=self._planned,
                    amend=self._continues,
                    groups=self.release.groups,
                )
        except (LedgerDamaged, LedgerInUse) as error:
            raise UsageError(str(error)) from None

    def recognise(self, head: list[Any]) -> None:
        """Raise if the ledger does not continue the one whose `head` a saved state holds."""
        if self._ledger is None:
            raise UsageError("there is no ledger to recognise; open one first")
        try:
            read_chain(self._ledger.path, Head(*head))
        except LedgerDamaged as error:
            raise UsageError(str(error)) from None

    @property
    def head(self) -> list[Any] | None:
        """The current head of the ledger, for a checkpoint."""
        return list(self._ledger.head) if self._ledger is not None else None

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()

    def pay(self, round: int, key: str | None = None) -> None:
        """Pay for one release of `round` before anything of it is sent. Raises `BudgetSpent`.

        Every call pays for another release with other noise, unless `key` identifies a release in the ledger that would
        be the same bit for bit if it were made again. Anything left from an earlier call is dropped.
        """
        self._paid, self._sum = None, None
        if self._ledger is None:
            self._refuse_forks()
            attempt = self._next_attempt(round, round)
            event = without_used_coins(self.release.event(self.sigma, round), attempt)
            if self._charges(round, attempt, self._cycles):
                self._account = self._with(event, round)
            self._attempts[round] += 1
            self._cycles.add(round // self.release.groups)
            self._made.append((round, event, self.sigma_at(round)))
        else:
            with writing(self._ledger.path):
                attempt = self._spend(self._ledger, round, key).attempt
        self._paid, self._attempt, self._recalled = round, attempt, False

    def _next_attempt(self, round: int, current: int) -> int:
        """The attempt of `round` that is paid for next without a ledger, if `current` is the next round."""
        if self.release.groups > 1:
            return self._attempts[round]
        return self.releases - current  # 0 unless a round is repeated; never twice the same for a round

    def _charges(self, round: int, attempt: int, cycles: set[int]) -> bool:
        return charged_releases(range(round, round + 1), attempt, self.release.groups, cycles) > 0

    def _refuse_forks(self) -> None:
        """Refuse a fork, which would release the same rounds with other noise beside this account in memory."""
        self._owner = self._owner or process_identity()
        if not self.simulated and self._owner != process_identity():
            raise UsageError(
                f"process {self._owner[1]} has begun to pay for these rounds, and this process is a fork of it; "
                "keep the account in a ledger, or start another run in this process"
            )

    def _spend(self, ledger: Ledger, round: int, key: str | None) -> Receipt:
        if key is None or self._chunk == 1:
            return ledger.spend(round, self.release.event(self.sigma, round), self.sigma_at(round), key)
        end = min(round - round % self._chunk + self._chunk, self.setting.rounds)
        return ledger.reserve(round, self.release.event(self.sigma, round, end - round), self.sigma, key)

    def take_account(self, events: Iterable[Event]) -> None:
        """Set the account so far to `events`, if there is no ledger."""
        self._account = Account(self.privacy.delta, events, self._planned)

    def recall(self, round: int, attempt: int) -> None:
        """Use instead of `pay` if this attempt of `round` was released before and its sum is known."""
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
        """The number of releases that were paid for."""
        if self._ledger is not None:
            return self._ledger.releases
        return self._account.releases if self.release.groups == 1 else self._attempts.total()

    @property
    def attempt(self) -> int:
        """The attempt of the last payment, which is part of the path of its noise."""
        return self._attempt

    def paid_elsewhere(self, round: int, attempt: int) -> None:
        """Note that the rank with the ledger has paid for `round`."""
        self._paid, self._attempt, self._sum, self._recalled = round, attempt, None, False

    def send(self, messages: Tensor, clients: Tensor, weights: Tensor | None = None) -> Tensor:
        """Send messages ``[c, d]`` to the server; returns the messages with which memories are updated.

        `weights`: n·w_i of these clients, ``[c]``, if they are not equal. A sum takes weighted messages, and its noise
        covers the heaviest; under local trust the server weights the messages that it receives.
        """
        self._check_paid()
        if self._recalled:
            return messages
        if self.privacy.trust != "local":
            weighted = messages if weights is None else messages * weights[:, None]
            if isinstance(self._source, GridNoise):
                self._add(snap(weighted, self._sum_step, self.release.bound * self.release.heaviest).sum(0))
            else:
                self._add(weighted.sum(0))
            return messages
        sent = self.noisy(messages, clients)
        received = sent if weights is None else sent * weights[:, None]
        if self._adds_integers:
            received = (received.double() / self._sum_step).round().to(torch.int64)
        self._add(received.sum(0))
        return sent if self.keeps_noise else messages

    def noisy(self, messages: Tensor, clients: Tensor) -> Tensor:
        """Messages ``[c, d]`` with the noise of their clients, as an observer of single messages sees them."""
        sigmas = self.client_sigmas(clients)
        if isinstance(self._source, GridNoise) and self.release.relative is None:
            return privatise(messages, self.round_sigma, self._source, bound=self.release.bound)
        if isinstance(self._source, GridNoise):
            rows = zip(messages, sigmas, strict=True)
            return torch.stack([privatise(row, own, self._source, bound=self.release.bound) for row, own in rows])
        named = zip(clients.tolist(), sigmas, strict=True)
        return messages + torch.stack([self._draw(messages[0], own, "client", client) for client, own in named])

    def client_sigmas(self, clients: Tensor) -> list[float]:
        """The noise of some clients in the round that was paid for last."""
        sigma, relative = self.round_sigma, self.release.relative
        return [sigma if relative is None else sigma * relative[client] for client in clients.tolist()]

    def variance_of_messages(self, drawn: Tensor | None, weights: Tensor | None) -> float:
        """The variance, in units of σ², of the noise in a sum of messages that carry their own: Σ (n·w_i)² (σ_i/σ)².

        Args:
            drawn: The clients that take part; None for all of them.
            weights: n·w_i of all clients; None if they are equal.
        """
        if weights is None and self.release.relative is None:
            return self.setting.clients if drawn is None else len(drawn)
        factors = torch.ones(self.setting.clients, dtype=torch.float64) if weights is None else weights.double().cpu()
        if self.release.relative is not None:
            factors = factors * torch.tensor(self.release.relative, dtype=torch.float64)
        return float((factors if drawn is None else factors[drawn.cpu()]).square().sum())

    def outgoing(self, sums: Tensor, share: float = 1.0, variance: float = 0) -> Tensor:
        """The noisy sum of this process for the round that was paid for last; integers for noise on a grid.

        Args:
            sums: The sum of the messages that were not passed to `send`.
            share: The fraction of all clients in this process, and so of the variance that is added.
            variance: Under local trust, the variance in units of σ² of the noise of the messages in all processes that
                were not passed to `send`: their number, or the sum of their squared weights.
        """
        self._check_paid()
        sigma = self._sum_sigma
        if self.privacy.trust == "local" and not variance:
            nothing = torch.zeros_like(sums, dtype=torch.int64) if self._adds_integers else sums
            return nothing if self._sum is None else self._sum
        if isinstance(self._source, GridNoise) and self.banded is not None:
            return self._row_on_grid(self._source, self.banded, sums)
        if isinstance(self._source, GridNoise):
            scale = math.sqrt(share) * sigma / self._sum_step
            noise = torch.from_numpy(self._source.integers(len(sums), scale))
            return (noise if self._sum is None else self._sum.cpu() + noise).to(sums.device)
        noise = share * self.noise_of_sum(sums, variance)
        return sums + noise if self._sum is None else self._sum + noise

    def noise_of_sum(self, like: Tensor, variance: float) -> Tensor:
        """The whole noise of the round that was paid for last, if `takes_sums`.

        Under local trust it is the noise of the messages of the round, with `variance` in units of σ².
        """
        self._check_paid()
        local = self.privacy.trust == "local"
        sigma = self.round_sigma * math.sqrt(variance) if local else self._sum_sigma
        independent = self._draw(like, sigma, "sum")
        if self.banded is None:
            return independent
        correlated = self.banded.noise(independent, self._past[HISTORY], self._paid or 0)
        self._row = {HISTORY: correlated}
        return correlated

    def _row_on_grid(self, source: GridNoise, banded: BandedNoise, sums: Tensor) -> Tensor:
        """The row of the round, Σ ⌊c_i S_{t−i}⌋ + round(z_t), in a run of one process."""
        own = torch.zeros(len(sums), dtype=torch.int64) if self._sum is None else self._sum.cpu()
        self._row = {SUMS: own}
        noise = torch.from_numpy(source.integers(len(sums), self._sum_sigma / self._sum_step))
        past = banded.of_past(self._past[SUMS], self._paid or 0)
        return (banded.of_round(own) + past + noise).to(sums.device)

    def variance_of_sum(self, variance: float) -> float:
        """The variance per coordinate of the noise in a round's sum.

        Under local trust it is that of the messages of the round, with `variance` in units of σ².
        """
        if self.privacy.trust == "local":
            return self.round_sigma**2 * variance
        return self._sum_sigma**2

    def received(self, whole: Tensor, like: Tensor) -> Tensor:
        """Convert the sum over all processes to the dtype of `like`."""
        if whole.is_floating_point():
            return whole
        if self.banded is not None:
            row = whole.cpu().to(torch.float64) * self._sum_step
            released = self.banded.noise(row, self._past[HISTORY], self._paid or 0)
            self._row[HISTORY] = released
            return released.to(like)
        return from_grid(whole, self._sum_step, like)

    def epsilon(self) -> float:
        """An upper bound of ε so far, which is cheap to compute."""
        if self._ledger is not None:
            return self._ledger.epsilon
        return self._account.upper(self.release.turns) if self._account.releases else 0.0

    def epsilon_at(self, round: int) -> float:
        """An upper bound of ε up to and including `round`, which is cheap to compute and the same in a resumed run."""
        return self._ledger.epsilon_at(round) if self._ledger is not None else self.epsilon()

    def epsilon_with(self, more: int) -> float:
        """ε of the releases so far and `more` releases, each at the smallest noise of the rounds so far."""
        account = self._ledger.account() if self._ledger is not None else self._account.copy()
        rounds = min(max(1, self.releases), self.setting.rounds)
        least = float(self.release.multipliers(self.sigma, rounds).min())
        account.add(Event(least, count=more))
        return account.epsilon()

    def epsilon_to_end(self, round: int, key: str | None = None) -> float:
        """ε of the releases so far and of one of every planned round from `round` on, as far as the budget allows.

        Rounds that `pay` would not charge for with this `key`, because they were reserved, count once.
        """
        ledger, due = self._ledger, Counter[Event]()
        account = ledger.account() if ledger is not None else self._account.copy()
        cycles = ledger.cycles if ledger is not None else set(self._cycles)
        rest = self.release.multipliers(self.sigma, self.setting.rounds - round, round).tolist()
        for k, multiplier in enumerate(rest, round):
            attempt = ledger.next_attempt(k, key) if ledger is not None else self._next_attempt(k, round)
            if attempt is not None and self._charges(k, attempt, cycles):
                cycles.add(k // self.release.groups)
                due[without_used_coins(Event(multiplier, self.release.rate), attempt)] += 1
        for event, count in due.items():
            account.add(dataclasses.replace(event, count=count))
        return min(account.epsilon(), self.privacy.budget)

    def spent(self) -> Spent:
        """The exact spending so far."""
        if self._ledger is not None:
            epsilon = self._ledger.exact_epsilon()
        else:
            epsilon = self._account.tightest(self.release.turns) if self.releases else 0.0
        return Spent(
            epsilon=epsilon,
            delta=self.privacy.delta,
            sigma=self.sigma,
            releases=self.releases,
            is_target=self.privacy.is_target,
            simulation=self.simulated,
            statement=self.privacy.promise(self.setting.clients),
            not_covered=(*self.privacy.not_covered(), *self._gaps),
            notes=(*self.release.notes, *self._notes),
        )

    def payments(self) -> Payments | None:
        """What was paid without a ledger; None if there is one."""
        if self._ledger is not None:
            return None
        return Payments(self.privacy, self.release.turns, tuple(self._planned), tuple(self._made), self.release.groups)

    def _with(self, event: Event, round: int) -> Account:
        """The account with one more event, without a ledger. Raises `BudgetSpent`."""
        after = self._account.copy()
        after.add(event)
        if after.mu_unamplified <= self._enough:  # much cheaper to compute than ε
            return after
        return affordable(self._account, event, self.privacy, self.release.turns, round)[0]

    def _check_paid(self) -> None:
        if self._paid is None:
            raise UsageError("a message may be sent only after its round was paid for")

    def _add(self, part: Tensor) -> None:
        self._sum = part if self._sum is None else self._sum + part

    def _draw(self, like: Tensor, sigma: float, *path: str | int) -> Tensor:
        named = (self.name, "round", self._paid or 0, "attempt", self._attempt, *path)
        return self._source.draw(like.shape, sigma, *named, device=like.device, dtype=like.dtype)
