"""A small federation with faults: quadratics, a network that misbehaves, and processes that are killed.

Every durable write passes `os.write`, `os.fsync` or `os.replace`; `dying` raises around the m-th of them, which is what
a kill between two system calls leaves on the disk. `left` remembers every distinct message that ever left a party.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from normec import DPSGD, Clip21, Method, NormEC, Privacy, SmoothedNorm
from normec.algorithms import registry
from normec.algorithms.method import MEMORY, Steps
from normec.federation.protocol import party_state
from normec.federation.protocol.account import FILE, read_releases
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.gradient_oracle import GradientOracle
from normec.federation.protocol.method_checks import keeps_rows
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.reconciliation import after_absence, reconcile
from normec.federation.protocol.terms import PlanTerms
from normec.federation.protocol.wire import Refusal, Reply, Request, to_fields

from .in_process import plan

DIMENSION = 5
NODES = ["a", "b", "c"]
OWN_METHOD = f"{Path(__file__).with_name('methods') / 'my_method.py'}:Clip21SGDM"
POLICY = Policy(
    epsilon=1e6,
    least_sigma=1e-3,
    allow_without_noise=True,
    trusts=["local", "central"],
    methods=["normec", "clip21", "dpsgd", OWN_METHOD],
)

NOISY = Privacy(sigma=0.5, noise="secure", memory="noisy", trust="local")
SETTINGS: dict[str, tuple[Method, Privacy | None]] = {
    "no noise": (NormEC(0.1, 0.5, server_norm=False), None),
    "noisy memory": (NormEC(0.1, 0.5), NOISY),
    "noisy memory that forgets": (NormEC(0.1, 0.5, decay=0.1), NOISY),
    "clean memory": (Clip21(0.5), Privacy(sigma=0.5, noise="secure", memory="clean", trust="local")),
    "central": (NormEC(0.1, 0.5), Privacy(sigma=0.5, noise="secure", trust="central")),
    "a user's own method": (registry.build(OWN_METHOD, {}), NOISY),
    "no memory": (DPSGD(SmoothedNorm(0.1), momentum=0.5), Privacy(sigma=0.5, noise="secure", trust="local")),
}


class Killed(BaseException):
    """What a SIGKILL looks like from inside: nobody handles it."""


@contextmanager
def dying(point: int) -> Iterator[None]:
    """Die before (even) or after (odd) the (point // 2)-th durable write; live if there are fewer."""
    seen = 0

    def deadly(real: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            nonlocal seen
            here, seen = seen == point // 2, seen + 1
            if here and point % 2 == 0:
                raise Killed
            found = real(*given, **more)
            if here:
                raise Killed
            return found

        return call

    patches = [mock.patch.object(os, name, deadly(getattr(os, name))) for name in ("write", "fsync", "replace")]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


class Quadratic(GradientOracle):
    """∇f_i(x) = x − b_i: parties that disagree."""

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
        grad = x - torch.linspace(-3, 3, len(x), dtype=x.dtype) * (index + 1)
        return grad, float(grad.square().sum() / 2)


@dataclass
class FaultyFederation:
    """The server and the parties; `asked` are all requests, and `flying` the answers that are on their way."""

    folder: Path
    method: Method
    privacy: Privacy | None = None
    minimum: int = 1
    policy: Policy = POLICY
    left: dict[str, set[str]] = field(default_factory=lambda: {node: set() for node in NODES})
    asked: list[Request] = field(default_factory=list)
    flying: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = self._open()

    def _open(self) -> Coordinator:
        return Coordinator(
            self.method,
            torch.zeros(DIMENSION, dtype=torch.float64),
            NODES,
            plan(10_000, lr=0.1),
            run="trial",
            privacy=self.privacy,
            folder=self.folder / "server",
            minimum=self.minimum,
        )

    def restart(self) -> None:
        self.server.close()
        self.server = self._open()

    def home(self, node: str) -> Path:
        return self.folder / node

    def ask(self, node: str, point: int | None = None) -> None:
        """Carry the request of this round to a party, which dies at `point`; its answer flies."""
        request = self.server.requests().get(node)
        if request is not None:
            self.asked.append(request)
            self.carry(request, point)

    def ask_late(self, number: int) -> None:
        """Carry an earlier request to its party, perhaps for the second time."""
        if self.asked:
            self.carry(self.asked[-1 - number % len(self.asked)])

    def carry(self, request: Request, point: int | None = None) -> None:
        node = request.node
        party = Party(self.home(node), self.policy, Quadratic(), node=node)
        try:
            with dying(10**9 if point is None else point):
                answer = party.answer(to_fields(request))
        except Killed:
            return
        if isinstance(answer, Reply):
            self.left[node].add(answer.message.tobytes().hex())
        self.flying.append((node, dict(to_fields(answer))))

    def deliver(self, number: int, *, keep: bool = False) -> None:
        if self.flying:
            node, fields = self.flying[number % len(self.flying)]
            if not keep:
                del self.flying[number % len(self.flying)]
            self.server.receive(node, fields)

    def lose(self, number: int) -> None:
        if self.flying:
            del self.flying[number % len(self.flying)]

    def wipe(self, node: str, what: str = "all") -> None:
        if what == "all":
            shutil.rmtree(self.home(node), ignore_errors=True)
        elif what == "state":
            shutil.rmtree(self.home(node) / "runs", ignore_errors=True)
        else:
            self.lose_ledger(node)

    def lose_ledger(self, node: str) -> None:
        """Delete the ledger, check that a party that has spent refuses to go on, and empty its folder."""
        spent = read_releases(self.home(node)).count()
        for name in (FILE, FILE + ".head"):
            (self.home(node) / name).unlink(missing_ok=True)
        request = self.server.requests().get(node)
        if request is not None and spent:
            answer = Party(self.home(node), self.policy, Quadratic(), node=node).answer(request)
            assert isinstance(answer, Refusal)
            assert answer.reason == "failed"
        self.wipe(node)

    def close(self, point: int | None = None) -> None:
        """Close the round; the server dies at `point` and is started again."""
        if not self.server.ready:
            return
        try:
            with dying(10**9 if point is None else point):
                self.server.close_round()
        except Killed:
            self.restart()
        self.check()

    def answer(self, node: str) -> None:
        """Let a party answer without a fault: with a handshake if it needs one, and with its message."""
        for _ in range(3):
            before = len(self.flying)
            self.ask(node)
            while len(self.flying) > before:
                self.deliver(before)

    def settle(self) -> None:
        """Run two rounds without faults, after which whatever was lost has been noticed, and check all parties."""
        self.flying.clear()
        goal = self.server.round + 2
        while self.server.round < goal:
            for node in NODES:
                self.answer(node)
            assert self.server.waiting == set()
            self.close()
        self.check_parties()

    def check(self) -> None:
        """What holds after every round: ĝ = mean g_i, every round has its row, every message is counted once."""
        state, parties = self.server.state.run, self.server.state.parties
        if state.clients and (self.privacy is None or self.privacy.trust == "local"):
            torch.testing.assert_close(state.estimate, state.memory.mean(0), rtol=1e-9, atol=1e-9)
        assert [row["round"] for row in self.server.storage.history] == list(range(state.round))
        assert sum(party.accepted for party in parties.values()) == state.messages

    def check_parties(self) -> None:
        """Each party's memory is the server's row of it, and no account is short of what left."""
        x = self.server.state.run.x
        steps, rows = Steps(self.method, torch.zeros_like(x)), self.server.state.run.clients
        assert bool(rows) == keeps_rows(steps)
        for number, (node, request) in enumerate(self.server.requests().items()):
            state = party_state.load(party_state.path_of(self.home(node), self.server.run, node))
            assert state is not None
            agreed = reconcile(state, request, steps)
            assert agreed is not None
            assert agreed.accepted == self.server.state.parties[node].accepted
            if rows and (self.privacy is None or self.privacy.memory == "noisy" or self.privacy.trust == "central"):
                own = after_absence(steps, agreed, request.round, x)[MEMORY][0]
                torch.testing.assert_close(
                    own, rows[MEMORY][number], rtol=0 if steps.ignores_absence else 1e-12, atol=0
                )
            if self.privacy is not None:
                assert read_releases(self.home(node)).count("trial", node) >= len(self.left[node])


def settled(folder: Path, name: str = "noisy memory", minimum: int = 1) -> FaultyFederation:
    """A federation of one of the `SETTINGS`, in which everyone has a memory."""
    federation = FaultyFederation(folder, *SETTINGS[name], minimum)
    federation.settle()
    return federation
