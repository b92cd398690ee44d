"""The noise of a federation, measured: its variance, its independence, and where it is added."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from normec import NormEC, Privacy, UsageError
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.gradient_oracle import GradientOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.terms import PlanTerms
from normec.federation.protocol.wire import Refusal, Reply
from normec.privacy import gaussian

from .in_process import plan

DIMENSION, SIGMA, BETA = 20_000, 2.0, 0.5
NODES = ["a", "b", "c", "d"]
METHOD = NormEC(0.1, BETA, server_norm=False)
SURE = 7.0  # standard deviations: a right answer fails once in 10^11
POLICY = Policy(epsilon=100.0, trusts=["local", "central"], simulation=True)


class Constant(GradientOracle):
    """∇f_i = b_i, whatever x is."""

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
        return truth(index), 0.0


def truth(index: int) -> Tensor:
    return torch.linspace(-1, 1, DIMENSION, dtype=torch.float64) * (index + 1)


def message_of(index: int, memory: Tensor) -> Tensor:
    """What a party sends before the noise."""
    return METHOD.message(truth(index), memory)[0]


def one_round(folder: Path, privacy: Privacy, weights: Tensor | None = None) -> tuple[Coordinator, dict[str, Tensor]]:
    """The server after one round, and the messages as they left the parties."""
    server = Coordinator(
        METHOD,
        torch.zeros(DIMENSION, dtype=torch.float64),
        NODES,
        plan(3, weights=weights),
        run="noise",
        privacy=privacy,
    )
    sent = {}
    for _ in range(2):  # handshake, message
        for node, request in server.requests().items():
            answer = Party(folder / node, POLICY, Constant(), node=node).answer(request)
            assert isinstance(answer, Reply | Refusal)
            server.receive(node, answer)
            if isinstance(answer, Reply):
                sent[node] = torch.from_numpy(answer.message)
    server.close_round()
    return server, sent


def looks_like(noise: Tensor, sigma: float) -> None:
    """Mean and variance of Gaussian noise, and the share within one σ."""
    d = noise.numel()
    assert abs(float(noise.mean())) < SURE * sigma / math.sqrt(d)
    assert abs(float(noise.var()) / sigma**2 - 1) < SURE * math.sqrt(2 / d)
    inside = float((noise.abs() < sigma).double().mean())
    assert abs(inside - 0.682689) < SURE * math.sqrt(0.682689 * 0.317311 / d)


@pytest.mark.parametrize("kind", ["secure", "seeded"])
def test_local_noise_is_each_partys_own(kind: str, tmp_path: Path) -> None:
    server, sent = one_round(tmp_path, Privacy(sigma=SIGMA, noise=kind, memory="noisy", trust="local"))  # type: ignore[arg-type]
    clean = {node: message_of(i, torch.zeros(DIMENSION)) for i, node in enumerate(NODES)}
    noises = {node: sent[node] - clean[node] for node in NODES}
    for noise in noises.values():
        looks_like(noise, SIGMA)
    for one in NODES:
        for other in NODES:
            if one < other:
                correlation = float((noises[one] * noises[other]).mean()) / SIGMA**2
                assert abs(correlation) < SURE / math.sqrt(DIMENSION)
    n = len(NODES)
    excess = server.state.run.estimate * n / BETA - sum(clean.values())
    looks_like(excess, SIGMA * math.sqrt(n))
    for number, node in enumerate(NODES):  # the server's rows are what it saw
        torch.testing.assert_close(server.state.run.memory[number], BETA * sent[node])
    server.close()


@pytest.mark.parametrize("kind", ["secure", "seeded"])
def test_central_noise_is_one_draw_at_the_server(kind: str, tmp_path: Path) -> None:
    privacy = Privacy(sigma=SIGMA, noise=kind, trust="central")  # type: ignore[arg-type]
    server, sent = one_round(tmp_path, privacy)
    for number, node in enumerate(NODES):  # the messages travel clean
        torch.testing.assert_close(sent[node], message_of(number, torch.zeros(DIMENSION)))
        torch.testing.assert_close(server.state.run.memory[number], BETA * sent[node])
    n = len(NODES)
    looks_like(server.state.run.estimate * n / BETA - sum(sent.values()), SIGMA * math.sqrt(n))
    server.close()


def test_two_messages_of_one_party_share_no_noise(tmp_path: Path) -> None:
    privacy = Privacy(sigma=SIGMA, memory="noisy", trust="local")
    noises = []
    for run in ("first", "second"):
        server = Coordinator(
            METHOD, torch.zeros(DIMENSION, dtype=torch.float64), ["a"], plan(3), run=run, privacy=privacy
        )
        for _ in range(3):
            answer = Party(tmp_path, POLICY, Constant(), node="a").answer(server.requests()["a"])
            server.receive("a", answer)
            if isinstance(answer, Reply):
                memory = server.state.run.memory[0].clone()
                noises.append(torch.from_numpy(answer.message) - message_of(0, memory))
                server.close_round()
        server.close()
    assert len(noises) == 4
    for i, one in enumerate(noises):
        looks_like(one, SIGMA)
        for other in noises[:i]:
            assert abs(float((one * other).mean())) / SIGMA**2 < SURE / math.sqrt(DIMENSION)


@pytest.mark.parametrize(
    ("privacy", "says"),
    [
        (Privacy(sigma=1.0, trust="secure-sum"), "use SumCoordinator"),
        (Privacy(sigma=1.0, trust="central", sampling=0.5), "no amplification by sampling"),
        (Privacy(sigma=1.0, trust="central", noise_bands=2), "correlated noise gains nothing"),
        (
            Privacy(sigma=1.0, unit="record", record_clip=1.0, trust="local"),
            "give records, one number for each party or one for all",
        ),
        (Privacy(sigma=1.0, trust="central", memory="noisy"), "re-sends each client's noise"),
    ],
)
def test_what_a_federation_cannot_promise_is_refused(privacy: Privacy, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Coordinator(METHOD, torch.zeros(5), ["a", "b"], plan(3), run="no", privacy=privacy)


WEIGHTS = torch.tensor([1.6, 1.2, 0.8, 0.4], dtype=torch.float64)  # n·w_i


@pytest.mark.parametrize("kind", ["secure", "seeded"])
def test_weighted_central_noise_covers_the_heaviest_party(kind: str, tmp_path: Path) -> None:
    """The sum holds weighted messages and the noise of equal weights, and every party counts the heaviest weight."""
    privacy = Privacy(sigma=SIGMA, trust="central", noise=kind)  # type: ignore[arg-type]
    server, sent = one_round(tmp_path, privacy, WEIGHTS)
    clean = sum(weight * sent[node] for weight, node in zip(WEIGHTS, NODES, strict=True))
    looks_like((server.state.run.estimate / BETA - clean / 4) * 4, SIGMA * math.sqrt(4))
    spent = server.mechanism.release.epsilon(SIGMA, 1e-5, 1) if server.mechanism is not None else 0.0
    assert spent == pytest.approx(gaussian.epsilon(1.6 / (SIGMA * 2), 1e-5))
    for node in NODES:
        assert read_releases(tmp_path / node).epsilon("client", POLICY.delta) == pytest.approx(spent)


def test_weights_do_not_change_a_local_account(tmp_path: Path) -> None:
    server, sent = one_round(tmp_path, Privacy(sigma=SIGMA, noise="secure", memory="noisy", trust="local"), WEIGHTS)
    expected = sum(weight * sent[node] for weight, node in zip(WEIGHTS, NODES, strict=True)) / 4
    torch.testing.assert_close(server.state.run.estimate, BETA * expected, rtol=1e-9, atol=1e-12)
    for node in NODES:
        found = read_releases(tmp_path / node).epsilon("client", POLICY.delta)
        assert found == pytest.approx(gaussian.epsilon(1 / SIGMA, 1e-5))
