"""An audit at record level of what leaves a party, with and without a record, by way of the whole protocol."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Privacy, Problem
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.terms import PlanTerms, RecordTerms
from normec.federation.protocol.wire import Reply
from normec.privacy.audit import Audit, View, audit_releases

from .hostile import HostileServer, zeros
from .oracles import ClipsTheSum

RECORDS, MESSAGES, RUNS, DELTA = 6, 2, 120, 1e-5
SIGMA = 0.1
POLICY = Policy(epsilon=1e6, unit="record", least_sigma=1e-3, methods=["dpsgd"])
TERMS = {"plan.records.divisor": float(RECORDS), "plan.records.by_layer": False, "plan.records.clip": 1.0}


def data(with_canary: bool) -> Problem:
    """f_r(x) = a_r·x: the gradients are the records; the canary is long and points the other way."""
    records = torch.tensor([[0.6, 0.3, 0.1], [0.5, -0.2, 0.3], [0.9, 0.1, -0.4], [0.4, 0.4, 0.2], [0.7, 0.0, 0.0]])
    canary = torch.tensor([[-40.0, 0.0, 0.0]])
    given = (torch.cat([records, canary]) if with_canary else records).double()
    model = nn.Linear(3, 1, bias=False).double()
    return Problem(
        model, lambda out, target: (out[:, 0] * target).mean(), [TensorDataset(given, torch.ones(len(given)))]
    )


def sent(oracle: ProblemOracle) -> tuple[np.ndarray, float]:
    """The messages of one run of a fresh party, and the ε that its ledger states."""
    with TemporaryDirectory() as folder:
        privacy = Privacy(sigma=SIGMA, noise="secure", unit="record", memory="noisy", trust="local")
        party = Party(folder, POLICY, oracle, node="a")
        server = HostileServer(party, zeros(3), method=DPSGD(Clip(1.0)), privacy=privacy, sigma=SIGMA)
        answers = [server.ask(**TERMS) for _ in range(MESSAGES)]
        assert all(isinstance(answer, Reply) for answer in answers)
        found = np.array([answer.message for answer in answers if isinstance(answer, Reply)])
        return found, read_releases(Path(folder)).epsilon("record", DELTA)


def audited(kind: type[ProblemOracle]) -> Audit:
    seen, means, claim = [], [], 0.0
    for with_canary in (True, False):
        oracle = kind(data(with_canary))
        runs = []
        for _ in range(RUNS):
            messages, claim = sent(oracle)
            runs.append(messages)
        plan = PlanTerms(seed=0, batch_size=0, rounds=1)
        terms = RecordTerms(float(RECORDS), by_layer=False, clip=1.0)
        clean, _ = oracle.clipped_gradient(torch.zeros(3, dtype=torch.float64), 0, 0, plan, terms, secret_coins=True)
        seen.append(np.array(runs))
        means.append(np.tile(clean.numpy(), (MESSAGES, 1)))
    return audit_releases([View("the server", *seen, *means, claim=claim)], DELTA)


@pytest.mark.slow
def test_the_epsilon_of_a_partys_ledger_is_not_refuted() -> None:
    found = audited(ProblemOracle)
    assert not found.violated, str(found)
    assert found.epsilon > 0.1 * (found.claim or 0.0)  # the audit comes near enough to find a small violation


@pytest.mark.slow
def test_a_clip_of_the_sum_is_refuted() -> None:
    assert audited(ClipsTheSum).violated
