"""An audit of a method as it really runs: a canary client, the real rounds, the real noise.

The canary's gradient is huge along a known direction and changes its sign every round, so its messages have full
length whatever its memory holds: the worst a client can send. All other clients send nothing. What the observer
sees is read back from the server's estimate, round by round, and scored along the canary's direction; `normec.privacy.
audit` turns scores with and without the canary into a lower bound on ε.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, at_least
from ..functions import FunctionProblem
from ..gradients import Block
from ..methods import Method
from ..objective import Buffers
from ..privacy import Audit, Privacy, Setting, audit_scores, calibrate, release
from ..privacy.mechanism import Mechanism, facts_of
from ..rounds import Rounds
from ..run import Plan
from ..sampling import Everyone
from ..storage import RunStorage

HUGE = 1e6


def audit_method(
    method: Method,
    privacy: Privacy,
    *,
    clients: int = 3,
    rounds: int = 5,
    dimension: int = 16,
    trials: int = 1000,
    confidence: float = 0.999,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Audit:
    """Run `method` under `privacy` `trials` times each way; the claim is the exact ε of that many rounds."""
    at_least(16, trials=trials)
    at_least(1, clients=clients, rounds=rounds, dimension=dimension)
    if privacy.unit != "client" or privacy.sampling is not None:
        raise UsageError("the audit knows canaries at client level, without sampling")
    # One message is seen under "local" trust: the canary's own.
    setting = Setting(clients if privacy.trust != "local" else 1, rounds, dimension=dimension)
    claim = calibrate(release(facts_of(method), privacy, setting), privacy)
    fixed = replace(privacy, epsilon=None, sigma=claim.sigma, replay=None)
    scores = []
    for case, present in enumerate((True, False)):
        runs = []
        for trial in range(trials):
            one = Mechanism(fixed, method, setting, seed=2 * (seed * trials + trial) + case)
            runs.append(_observe(method, one, setting, dimension, present))
            progress(case * trials + trial + 1)
        scores.append(np.array(runs))
    return audit_scores(scores[0], scores[1], privacy.delta, confidence, claim.epsilon)


class _Canary:
    """Gradients as they would be worst: client 0's huge and of changing sign, all others zero."""

    name = "canary"
    threads = 1

    def __init__(self, clients: int, sign: float) -> None:
        self._clients, self._sign = torch.arange(clients), sign

    def blocks(
        self,
        x: Tensor,
        buffers: Buffers,  # noqa: ARG002
        round: int,
        clients: Tensor | None = None,  # noqa: ARG002
        *,
        full: bool = False,  # noqa: ARG002
    ) -> Iterator[Block]:
        grads = x.new_zeros(len(self._clients), len(x))
        grads[0, 0] = self._sign * (-1.0) ** round * HUGE
        yield Block.of(self._clients, grads, x.new_zeros(len(self._clients)))


def _observe(method: Method, mechanism: Mechanism, setting: Setting, dimension: int, present: bool) -> list[float]:
    """The observer's score of each round: the noisy sum along the canary's direction."""
    sign = 1.0 if present else 0.0 if mechanism.privacy.relation == "zero-out" else -1.0
    problem = FunctionProblem([torch.sum] * setting.clients, torch.zeros(dimension, dtype=torch.float64))
    plan = Plan(
        lr=0.0,
        rounds=setting.rounds,
        batch_size=None,
        batch_rate=None,
        warmup=0,
        seed=0,
        participation=Everyone(),
        initial_memory="zero",
        log_every=setting.rounds,
        evaluate_every=setting.rounds,
        full_gradient=False,
    )
    rounds = Rounds(problem, method, plan, _Canary(setting.clients, sign), RunStorage(None, {}), 0.0, (), mechanism)
    state = rounds.initial()
    seen = []
    for _ in range(setting.rounds):
        before = method.carried(state.estimate)
        rounds.step(state)
        total = (state.estimate - before) * (setting.clients / method.beta)
        seen.append(float(total[0]))
    return seen
