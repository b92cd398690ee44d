"""The audit of a method in its real training loop: a canary client, real rounds and real noise.

**Scenario.** The canary's gradient is huge along a dense random direction, and its sign follows +, −, −, −, +, …, so
its messages have full length whatever its memory is; this is the worst case for a client. The sign both changes and
stays from one round to the next, and to the one after it: noise that is used twice cancels in a difference, and noise
that returns with the opposite sign cancels in a sum. One other client, the opponent, pushes against the canary with
half its size, so that a bound on the sum of gradients is not mistaken for a bound on each message. All other clients
have small gradients, so that whatever enters their memories shows in their next messages. They are drawn only in every
other round, because their noise belongs in the sum of every round. The canary is the first client in half of the runs
and the last client in the others. The engine yields two blocks of clients, and the canary and its opponent are in the
same block, so that a bound on a block is not mistaken for a bound on a client.

**Observer.** The observer knows what every client would send without noise, from `Method.client_step` with one memory
per client: the definition, not the code under audit. Under "secure-sum" and "central" trust it sees the sum of each
round. Under "local" trust it sees every message. A simulation of local trust adds one draw to the sum instead; this sum
is audited as well and compared with the noise of all messages together.

**Turns.** If groups take turns, the clients of the round's group are drawn, and the opponent is in the group of the
canary. The sign of the canary's gradient then follows its turns. The observer knows the coefficients of correlated
noise, and combines the sums to rows whose noise is independent.

**Records.** At record level the canary is one record. All clients have small gradients, and the record moves that of
its client by its clipped norm over the client's number of records. Methods without a state are audited in this way.

`normec.privacy.audit_releases` turns the observations with and without the canary into a lower bound on ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms.local_steps import LocalSteps
from ..algorithms.message_weights import iterate_weights, message_weights
from ..algorithms.method import Method, Steps, rows_like
from ..errors import UsageError, at_least
from ..gradients.engine import Block
from ..privacy import Audit, Privacy, Setting, View, audit_releases, calibrate, release
from ..privacy.mechanism import Mechanism, facts_of
from ..privacy.noise import noise_source
from ..problems.functions import FunctionProblem
from ..problems.objective import Buffers
from ..storage.run_folder import RunStorage
from ..training.client_weights import checked_weights
from ..training.loop import TrainingLoop
from ..training.run import Plan

HUGE = 1e6
_SIGNS = (1.0, -1.0, -1.0, -1.0)


def audit_method(
    method: Method,
    privacy: Privacy,
    *,
    clients: int = 4,
    rounds: int = 4,
    dimension: int = 8,
    trials: int = 1000,
    confidence: float = 0.999,
    seed: int = 0,
    local: LocalSteps | None = None,
    weights: Sequence[float] = (),
    records: Sequence[int] = (),
    groups: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> Audit:
    """Try to refute the ε of `method` under `privacy` with `trials` runs with a canary and as many without.

    Args:
        method: The method, with a bounded operator.
        privacy: The statement to audit, without a gain from sampling; at record level with `record_clip` and `records`.
        clients: The number of clients; at least 4.
        rounds: The rounds of a run.
        dimension: The dimension of a message.
        trials: Runs with the canary, and as many without; at least 192. Half of them are judged.
        confidence: A true mechanism is refuted with probability 1 − confidence at most.
        seed: The seed of the canary's direction and of seeded noise.
        local: The clients' local steps, by sgd without momentum (default: one gradient per round).
        weights: The clients' weights, with the sum 1 (default: equal). They are sorted, so that the first client is the
            heaviest.
        records: At record level, the number of records of each client, in the order of the weights.
        groups: The number of groups of clients that take turns; with more than one, at least 2·groups + 2 clients.
        progress: Called with the number of finished runs.

    Returns:
        The bounds for the view that looked worst; `audit_releases` chooses it on runs that it does not judge.

    Raises:
        UsageError: A number is too small, or the audit does not cover the statement, the method or the local steps.
    """
    at_least(192, trials=trials)
    at_least(4 if groups == 1 else 2 * groups + 2, clients=clients)
    at_least(1, groups=groups, rounds=rounds, dimension=dimension)
    if privacy.sampling is not None:
        raise UsageError("the audit works without sampling; leave it out")
    shifts = _record_shifts(method, privacy, records, clients)
    if local is not None and (local.steps is None or local.optimizer != "sgd" or local.momentum):
        raise UsageError("the audit knows local steps by sgd without momentum; give local_steps, and leave those out")
    privacy = privacy.with_noise("seeded").for_rounds(rounds)
    planned = message_weights(method, [1.0] * rounds) if privacy.noise_schedule == "best" else None
    if weights and not records:
        weights = sorted(weights, reverse=True)
    relative = checked_weights(weights, clients) if weights else None
    setting = Setting(
        clients,
        rounds,
        dimension=method.message_length(dimension),
        parameters=dimension,
        local_steps=local is not None,
        message_weights=planned,
        weights=tuple(relative.tolist()) if relative is not None else (),
        records=tuple(map(float, records)) or None,
        groups=groups,
        workload=iterate_weights(method, rounds) if privacy.correlates else (),
    )
    composed = release(facts_of(method), privacy, setting)
    claim = calibrate(composed, privacy)
    fixed = replace(privacy, epsilon=None, sigma=claim.sigma, replay=None)
    direction = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, dimension)))
    direction /= direction.norm(dim=1, keepdim=True)
    observers = [(True, claim.epsilon)] if privacy.trust == "local" else [(False, claim.epsilon)]
    # Otherwise clients move the sum by different lengths, or in different rounds.
    alike = relative is None and composed.relative is None and groups == 1
    if privacy.trust == "local" and privacy.noise == "seeded" and privacy.memory == "clean" and alike:
        together = replace(composed, gain=math.sqrt(clients))  # the guarantee of the sum of all messages
        observers.append((False, together.epsilon(claim.sigma, privacy.delta)))
    views, done = [], 0
    for per_message, epsilon in observers:
        found = []
        for canary in (0, clients - 1):
            scenario = [
                _Scenario(
                    method, privacy.relation, clients, canary, direction, present, local, relative, shifts, groups
                )
                for present in (True, False)
            ]
            seen = []
            for case, one in enumerate(scenario):
                runs, mechanism = [], _RecordingMechanism(per_message, fixed, method, setting, seed=0)
                loop = _training_loop(one, mechanism, setting)
                for trial in range(canary > 0, trials, 2):
                    mechanism.begin_again((2 * (seed * trials + trial) + case) * 2 + per_message)
                    runs.append(_rows(_observe(one, mechanism, loop), mechanism))
                    done += 1
                    progress(done)
                seen.append(np.array(runs))
            with_canary, without = (_rows(one.expected(rounds, per_message), mechanism) for one in scenario)
            found.append(View(f"canary is client {canary}", seen[0], seen[1], with_canary, without, epsilon))
        name = "single messages" if per_message else "the sum"
        if alike:
            views.append(_pooled(found, name))
        views += [replace(one, name=f"{name}, {one.name}") for one in found]
    return audit_releases(views, privacy.delta, confidence)


def _rows(seen: Sequence[np.ndarray[Any, Any]], mechanism: Mechanism) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return observations ``[releases, d]`` as rows with independent noise: C times the sums of correlated noise."""
    sums = np.array(seen, dtype=np.float64)
    if mechanism.banded is None:
        return sums
    rows = np.zeros_like(sums)
    for back, coefficient in enumerate(mechanism.banded.fractions[: len(sums)]):
        rows[back:] += coefficient * sums[: len(sums) - back]
    return rows


def _record_shifts(method: Method, privacy: Privacy, records: Sequence[int], clients: int) -> tuple[float, ...] | None:
    """How far one record moves the gradient of each client; None at client level."""
    if privacy.unit == "client":
        if records:
            raise UsageError("records are for an audit at record level; leave them out, or give unit='record'")
        return None
    if privacy.record_bound is None or len(records) != clients:
        raise UsageError(
            f"an audit at record level needs record_clip and the records of each of the {clients} clients, "
            f"got {len(records)}"
        )
    if Steps(method, torch.zeros(1)).stateful:
        raise UsageError(
            f"{method.name} keeps a state, through which a record may act in many ways; at record level the audit is "
            "for methods without one"
        )
    return tuple(privacy.record_bound / own for own in records)


def _pooled(views: list[View], name: str) -> View:
    """Return one view of all runs, whichever client is the canary.

    In both kinds of runs, the expectation without the canary is replaced by that of the first view: the adversary knows
    which client would be the canary, but not whether it is present.
    """
    first = views[0]
    moved = [first.expected_outside - one.expected_outside for one in views]
    inside = _mixed([one.inside + move for one, move in zip(views, moved, strict=True)])
    outside = _mixed([one.outside + move for one, move in zip(views, moved, strict=True)])
    return replace(first, name=name, inside=inside, outside=outside)


def _mixed(parts: list[np.ndarray[Any, np.dtype[np.float64]]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Interleave the runs of all parts, so that every section has the same mixture."""
    length = min(map(len, parts))
    return np.stack([part[:length] for part in parts], axis=1).reshape(-1, *parts[0].shape[1:])


@dataclass(frozen=True)
class _Scenario:
    """The gradients of all clients in runs with (`present`) or without the canary, which is client `canary`."""

    method: Method
    relation: str
    clients: int
    canary: int
    directions: Tensor
    present: bool
    local: LocalSteps | None = None
    weights: Tensor | None = None  # n·w_i, unless all are equal
    shifts: tuple[float, ...] | None = None  # at record level, how far a record moves each client's gradient
    groups: int = 1
    # By round and chosen clients, what `halves` returns.
    computed: dict[tuple[int, tuple[int, ...]], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Gradients that a client computes in a round."""
        return self.local.steps or 1 if self.local is not None else 1

    @property
    def opponent(self) -> int:
        """The client next to the canary in its group, in the same block."""
        return self.groups if self.canary == 0 else self.canary - self.groups

    def by_role(self, rows: Tensor) -> Tensor:
        """Return the rows of clients in the order canary, opponent, others."""
        leading = [self.canary, self.opponent]
        return rows[leading + [client for client in range(self.clients) if client not in leading]]

    def gradients(self, round: int) -> Tensor:
        """Return the gradients ``[n, d]``, which do not depend on x."""
        direction, rest = self.directions
        sign = _SIGNS[round // self.groups % len(_SIGNS)]
        absent = 0.0 if self.relation == "zero-out" else -1.0
        grads: Tensor = (0.3 * min(self.method.bound, 1.0) * rest).repeat(self.clients, 1)
        if self.shifts is not None:
            grads[self.canary] += sign * self.shifts[self.canary] * (1.0 if self.present else absent) * direction
            return grads
        grads[self.opponent] = -sign * HUGE / 2 * direction
        grads[self.canary] = sign * HUGE * (1.0 if self.present else absent) * direction
        return grads

    def halves(self, round: int, chosen: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        """Return the chosen clients of each half of all clients, and their gradients, unless there are none."""
        if (round, chosen) not in self.computed:
            grads, middle = self.gradients(round), self.clients // 2
            halves = ([c for c in chosen if c < middle], [c for c in chosen if c >= middle])
            self.computed[round, chosen] = [(torch.tensor(half), grads[half]) for half in halves if half]
        return self.computed[round, chosen]

    def updates(self, round: int, correction: Tensor | float = 0.0) -> Tensor:
        """Return the clients' updates: the gradients, or where local steps with these gradients lead.

        `correction` is added to every gradient of the local steps.
        """
        grads, local = self.gradients(round), self.local
        if local is None:
            return grads
        y = torch.zeros_like(grads)  # x is 0 throughout
        for _ in range(self.steps):
            y = y - local.lr * (grads + correction + local.prox * y)
        return -y if local.scale == "difference" else -y / (self.steps * local.lr)

    def drawn(self, round: int) -> Tensor:
        """Return the drawn clients: canary and opponent in every round, the others in every second round.

        If groups take turns, they are the clients of the round's group.
        """
        if self.groups > 1:
            return torch.arange(round % self.groups, self.clients, self.groups)
        chosen = range(self.clients) if round % 2 == 1 else sorted((self.canary, self.opponent))
        return torch.tensor(list(chosen))

    def expected(self, rounds: int, per_message: bool) -> list[np.ndarray[Any, Any]]:
        """Return what the observer would see without noise, by the definition of the method."""
        steps = Steps(self.method, self.directions[0])
        state = {name: rows_like(start, self.clients).clone() for name, start in steps.initial_client_state.items()}
        server, seen = dict(steps.initial_server_state), []
        for k in range(rounds):
            drawn, public = self.drawn(k), steps.broadcast(server)
            grads = self.updates(k, steps.local_correction(state, public) if steps.corrects else 0.0)
            sent = grads.new_zeros(self.clients, steps.message_length)
            before = {name: rows.clone() for name, rows in state.items()}
            state = {name: rows.clone() for name, rows in steps.absent(before).items()}
            own = {name: rows[drawn] for name, rows in before.items()}
            sent[drawn], draft = steps.message(grads[drawn], own, None, public)
            weighted = sent if self.weights is None else sent * self.weights[:, None]
            if steps.broadcasts:
                _, server = steps.server_step(weighted.sum(0) / self.clients, server)
            for name, rows in steps.commit(draft, sent[drawn]).items():
                state[name][drawn] = rows
            seen += list(self.by_role(sent).numpy()) if per_message else [weighted.sum(0).numpy()]
        return seen


class _ScenarioEngine:
    """The engine of a scenario; each half of the clients is one block."""

    name = "canary"
    threads = 1

    def __init__(self, scenario: _Scenario) -> None:
        self._scenario = scenario

    def blocks(
        self,
        x: Tensor,
        buffers: Buffers,  # noqa: ARG002
        round: int,
        clients: Tensor | None = None,
        *,
        full: bool = False,  # noqa: ARG002
    ) -> Iterator[Block]:
        chosen = tuple(range(self._scenario.clients) if clients is None else clients.tolist())
        # A round of an engine is one local step.
        for part, grads in self._scenario.halves(round // self._scenario.steps, chosen):
            yield Block.of(part, grads.clone(), x.new_zeros(len(part)))


@dataclass(frozen=True)
class _ScenarioParticipation:
    """The participation rule of a scenario."""

    scenario: _Scenario

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:  # noqa: ARG002
        drawn = self.scenario.drawn(round)
        return None if len(drawn) == clients else drawn


class _RecordingMechanism(Mechanism):
    """The mechanism under audit; with `per_message`, messages are made one by one, and each noisy message is stored."""

    def __init__(self, per_message: bool, *arguments: Any, **words: Any) -> None:
        self.per_message = per_message
        self.seen: dict[int, Tensor] = {}
        self.whole = torch.zeros(0)
        super().__init__(*arguments, **words)
        # The engine of a scenario yields sums of clipped records; the loop need not clip them.
        self.privacy = replace(self.privacy, unit="client", record_clip=None, record_clip_by="record")

    def begin_again(self, seed: int) -> None:
        """Forget what was paid, for another run; seeded noise is that of `seed`."""
        if self.simulated:
            self._source = noise_source("seeded", seed)
        self._attempts.clear()
        self._cycles.clear()
        self._made.clear()
        self.take_account(())

    @property
    def takes_sums(self) -> bool:
        return super().takes_sums and not self.per_message

    def received(self, whole: Tensor, like: Tensor) -> Tensor:
        self.whole = super().received(whole, like).clone()
        return self.whole

    def noisy(self, messages: Tensor, clients: Tensor) -> Tensor:
        sent = super().noisy(messages, clients)
        self.seen.update(zip(clients.tolist(), sent, strict=True))
        return sent


def _training_loop(scenario: _Scenario, mechanism: _RecordingMechanism, setting: Setting) -> TrainingLoop:
    """Return the training loop of all runs of a scenario, each of which begins with a state of its own."""
    dimension = scenario.directions.shape[1]
    problem = FunctionProblem([torch.sum] * setting.clients, torch.zeros(dimension, dtype=torch.float64))
    plan = Plan(
        lr=0.0,
        rounds=setting.rounds,
        batch_size=None,
        batch_rate=None,
        warmup=0,
        seed=0,
        participation=_ScenarioParticipation(scenario),
        initial_memory="zero",
        log_every=setting.rounds,
        evaluate_every=setting.rounds,
        full_gradient=False,
        local=scenario.local,
        weights=scenario.weights,
    )
    engine, storage = _ScenarioEngine(scenario), RunStorage(None, {})
    return TrainingLoop(problem, scenario.method, plan, engine, storage, 0.0, (), mechanism)


def _observe(scenario: _Scenario, mechanism: _RecordingMechanism, loop: TrainingLoop) -> list[np.ndarray[Any, Any]]:
    """Return what the observer sees of one run: the sum of each round, or its messages in the order of `by_role`."""
    loop.storage.history.rows = []  # a row seeds torch's generators
    state, seen = loop.initial(), []
    for _ in range(loop.plan.rounds):
        mechanism.seen.clear()
        loop.step(state)
        if mechanism.per_message:
            nothing = torch.zeros(loop.method_steps.message_length, dtype=torch.float64)
            rows = torch.stack([mechanism.seen.get(client, nothing) for client in range(scenario.clients)])
            seen += list(scenario.by_role(rows).numpy())
        else:
            seen.append(mechanism.whole.numpy())
    return seen
