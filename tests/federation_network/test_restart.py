"""Five parties, a small CNN, a SuperLink of its own that is killed in the middle of a run and started again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import normec

from ..support.waiting import wait_for
from .network import WITHOUT_NOISE, NetworkFederation

pytestmark = pytest.mark.slow

ROUNDS = 4


def test_a_superlink_killed_and_restarted_changes_nothing(tmp_path: Path) -> None:
    settings = {"rounds": ROUNDS, "method": "clip21", "alpha": "", "tau": 0.5, "lr": 0.2, "seed": 1, **WITHOUT_NOISE}
    with NetworkFederation(tmp_path, "cnn", database=True) as network:
        federation, port = network.federation, int(network.federation.address.rpartition(":")[2])
        network.begin("cnn", **settings)
        wait_for(lambda: len(network.rows("cnn")) >= 1, "the first round to close")
        federation.processes.kill("superlink")
        federation.start_superlink(lambda: None, port=port, database=True)
        # Its server dies with it, and Flower does not start one anew: the same run is started again.
        assert network.end(network.begin("cnn", **settings)) == ""
        network.check("cnn")
        assert network.summary("cnn")["round"] == ROUNDS
        x, memory, rows = network.server("cnn")["x"], network.server("cnn")["client.memory"], network.rows("cnn")

        run = normec.train(network.problem(), normec.Clip21(tau=0.5), lr=0.2, rounds=ROUNDS, seed=1)
        torch.testing.assert_close(x, run.x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(memory, run.state.memory, rtol=1e-3, atol=1e-5)
        assert [row["round"] for row in rows] == list(range(ROUNDS + 1))
