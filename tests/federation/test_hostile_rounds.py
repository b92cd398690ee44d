"""A server that changes its mind between rounds: methods, bounds, batches, repeated requests, tightened policies."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Clip21, Method, NormEC, Privacy, Problem, SmoothedNorm
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import GradientOracle, ProblemOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.terms import PlanTerms, PrivacyTerms
from normec.federation.protocol.wire import Refusal, Reply
from normec.privacy import gaussian

from .faulty_network import DIMENSION, Quadratic
from .hostile import SIGMA, HostileServer, zeros

POLICY = Policy(epsilon=8.0)


def server(folder: Path, policy: Policy = POLICY, oracle: GradientOracle | None = None) -> HostileServer:
    party = Party(folder, policy, Quadratic() if oracle is None else oracle, node="a")
    return HostileServer(party, zeros(DIMENSION))


def test_each_message_costs_what_its_own_method_and_noise_make_it_cost(tmp_path: Path) -> None:
    asking, square = server(tmp_path), 0.0
    kinds: list[tuple[Method, float]] = [
        (NormEC(0.1, 0.5), 10.0),
        (Clip21(5.0), 10.0),
        (NormEC(0.0, 1e6, decay=0.9), 3.0),
        (DPSGD(Clip(0.01)), 0.02),
        (DPSGD(SmoothedNorm(1e9)), 1e5),
    ]
    for method, sigma in kinds:
        asking.method, asking.sigma = method, sigma
        assert isinstance(asking.ask(), Reply)
        square += (method.bound / sigma) ** 2
    releases = read_releases(tmp_path)
    assert releases.count() == len(kinds)
    assert releases.epsilon("client", 1e-5) == pytest.approx(gaussian.epsilon(math.sqrt(square), 1e-5), rel=1e-9)


def test_a_repeated_request_brings_the_same_message_and_no_second_payment(tmp_path: Path) -> None:
    asking = server(tmp_path)
    asking.send(asking.fields())
    granted = asking.fields()
    answers = [asking.send(granted) for _ in range(3)]
    assert all(isinstance(answer, Reply) for answer in answers)
    assert len({answer.message.tobytes() for answer in answers if isinstance(answer, Reply)}) == 1
    assert read_releases(tmp_path).count() == 1


def test_rounds_do_not_go_backwards(tmp_path: Path) -> None:
    asking = server(tmp_path)
    assert isinstance(asking.ask(round=5), Reply)
    for earlier in (4, 0):
        answer = asking.ask(round=earlier)
        assert isinstance(answer, Refusal)
        assert answer.reason == "late"
    assert read_releases(tmp_path).count() == 1


def test_a_loss_is_not_sent_again_once_the_policy_forbids_it(tmp_path: Path) -> None:
    asking = server(tmp_path, POLICY.model_copy(update={"report_loss": True}))
    first = asking.ask()
    assert isinstance(first, Reply)
    assert first.loss is not None
    asking.dropped = ""
    asking.party = Party(tmp_path, POLICY, Quadratic(), node="a")
    again = asking.ask()
    assert isinstance(again, Reply)
    assert again.message.tobytes() == first.message.tobytes()
    assert again.loss is None


class Choosing(GradientOracle):
    """Whatever the server chooses, the gradient is huge; and it depends on the seed and the batch size."""

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
        return torch.full_like(x, 1e20 * (plan.seed + plan.batch_size)), 0.0


def test_batches_that_the_server_chooses_cost_as_much_as_all_records(tmp_path: Path) -> None:
    """The server picks the seed, so it knows who is in a batch: no gain from sampling is ever counted."""
    asking = server(tmp_path, oracle=Choosing())
    for seed, size in ((0, 0), (1, 1), (2, 1)):
        answer = asking.ask(plan__seed=seed, plan__batch_size=size)
        assert isinstance(answer, Reply)
        assert float(np.linalg.norm(answer.message)) < 1 + SIGMA * (math.sqrt(DIMENSION) + 7.5)
    expected = gaussian.epsilon(math.sqrt(3) / SIGMA, 1e-5)
    assert read_releases(tmp_path).epsilon("client", 1e-5) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_size_of_number_in_x_gets_a_finite_message(dtype: type, tmp_path: Path) -> None:
    records = TensorDataset(torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([1]))
    oracle = ProblemOracle(Problem(nn.Linear(3, 2), nn.functional.cross_entropy, [records]))
    asking = server(tmp_path, oracle=oracle)
    for value in (0.0, 5e-324, 1e-38, 1.0, 1e20, 0.99e30):
        answer = asking.ask(np.array([value, -value] * 4, dtype))
        assert isinstance(answer, Reply)
        assert answer.message.dtype == dtype
        assert np.isfinite(answer.message).all()


def test_noise_that_nobody_asked_for_is_secure() -> None:
    method = NormEC(0.1, 0.5)
    assert PrivacyTerms.of(Privacy(sigma=1.0, trust="local"), 1.0, method).noise == "secure"


@pytest.mark.parametrize("simulation", [False, True])
def test_seeded_noise_needs_the_partys_consent(simulation: bool, tmp_path: Path) -> None:
    asking = server(tmp_path, POLICY.model_copy(update={"simulation": simulation}))
    asking.privacy = Privacy(sigma=SIGMA, noise="seeded", memory="noisy", trust="local")
    answer = asking.ask()
    assert isinstance(answer, Reply if simulation else Refusal)
    assert read_releases(tmp_path).count() == simulation
