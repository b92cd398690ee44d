"""Five parties in one process, each with a folder and digits of few labels, and a loop in place of the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from normec import Method, Privacy, Problem, data
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.federated_run import Evaluate
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.wire import to_fields
from normec.sampling.participation import Everyone, Participation
from normec.training.run import Plan

NODES = [f"party-{i}" for i in range(5)]
OPEN = Policy(
    allow_without_noise=True,
    report_loss=True,
    methods=["normec", "clip21", "ef21", "dpsgd", "gd", "normec-momentum", "clip21-sgd2m", "ef21-sgdm"],
)


def softmax() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def convolution() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)
    )


@cache
def shares() -> list[Subset[Any]]:
    """The digits of each party: 40 to 80 of them, sorted by label."""
    found = data.load("digits")
    _, targets = found.train.tensors
    order = targets[:300].argsort(stable=True)
    return [Subset(found.train, part.tolist()) for part in order.split([40, 50, 60, 70, 80])]


def whole(model: Callable[[], nn.Module]) -> Problem:
    """The data of all five parties as one problem, for training in one process."""
    return Problem(model(), nn.functional.cross_entropy, shares())


def own(model: Callable[[], nn.Module], index: int) -> ProblemOracle:
    return ProblemOracle(Problem(model(), nn.functional.cross_entropy, [shares()[index]]))


def plan(rounds: int, lr: float = 0.5, batch_size: int | None = None, **changes: Any) -> Plan:
    participation: Participation = changes.pop("participation", Everyone())
    return Plan(
        lr=lr,
        rounds=rounds,
        batch_size=batch_size,
        batch_rate=changes.pop("batch_rate", None),
        warmup=changes.pop("warmup", 0),
        seed=changes.pop("seed", 7),
        participation=participation,
        initial_memory="zero",
        log_every=1,
        evaluate_every=1,
        full_gradient=False,
        **changes,
    )


class InProcessFederation:
    """The server, and the parties with their folders. `ask` carries a request to a party and its answer back."""

    def __init__(
        self,
        folder: Path,
        method: Method,
        plan: Plan,
        *,
        model: Callable[[], nn.Module] = softmax,
        policy: Policy = OPEN,
        privacy: Privacy | None = None,
        minimum: int = 1,
        dtype: torch.dtype = torch.float64,
        oracles: list[Any] | None = None,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.folder, self.policy = folder, policy
        self.oracles = oracles if oracles is not None else [own(model, i) for i in range(len(NODES))]
        self.arguments: dict[str, Any] = {
            "method": method,
            "x0": whole(model).x0.to(dtype),
            "parties": NODES,
            "plan": plan,
            "run": "trial",
            "privacy": privacy,
            "folder": folder / "server",
            "minimum": minimum,
            "evaluate": evaluate,
        }
        self.server = Coordinator(**self.arguments)

    def restart_server(self) -> None:
        self.server.close()
        self.server = Coordinator(**self.arguments)

    def home(self, node: str) -> Path:
        return self.folder / node

    def party(self, node: str) -> Party:
        """The party as a new process opens it."""
        return Party(self.home(node), self.policy, self.oracles[NODES.index(node)], node=node)

    def ask(self, node: str, request: Any) -> Mapping[str, Any]:
        return to_fields(self.party(node).answer(to_fields(request)))

    def round(self) -> None:
        """Everybody answers, handshakes included; then the round closes."""
        while True:
            requests = self.server.requests()
            if not requests:
                break
            for node, request in requests.items():
                self.server.receive(node, self.ask(node, request))
        self.server.close_round()

    def run(self) -> Tensor:
        while not self.server.finished:
            self.round()
        return self.server.finish().x
