"""The server's folder: a run like any other, that goes on where it was; and what it refuses to start with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import GD, Diverged, NormEC, Privacy, Problem, UsageError, load
from normec.federation.flower.task import trained
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.terms import PlanTerms
from normec.report import page
from normec.report.run_view import read_run
from normec.settings import RunConfig
from normec.training.summary import summarise, write_summary, write_tables

from .faulty_network import Quadratic
from .in_process import NODES, InProcessFederation, plan, shares, softmax

METHOD = NormEC(0.1, 0.5)
SECURE = Privacy(epsilon=20.0, noise="secure", memory="noisy", trust="local")


def federation(folder: Path, **changes: Any) -> InProcessFederation:
    policy = Policy(epsilon=100.0, least_sigma=0.01, allow_without_noise=True)
    return InProcessFederation(folder, METHOD, plan(4), policy=policy, oracles=[Quadratic()] * len(NODES), **changes)


def test_a_federated_run_reads_like_any_other(tmp_path: Path) -> None:
    """Summary and page by the code of all runs; a test set at the server; ε in every row."""
    problem = Problem(softmax(), nn.functional.cross_entropy, [shares()[0]], test=shares()[1])

    def evaluate(x: Tensor) -> Mapping[str, float]:
        return problem.to(torch.device("cpu"), x.dtype).evaluate(x, {})

    policy = Policy(epsilon=100.0, least_sigma=0.01)
    found = InProcessFederation(tmp_path, METHOD, plan(3), policy=policy, privacy=SECURE, evaluate=evaluate)
    found.run()
    run = found.server.finish()
    assert run.finished
    assert [row["round"] for row in run.history] == [0, 1, 2, 3]
    assert run.history["messages"] == [0, 5, 10, 15]
    assert run.history["parties"] == [5, 5, 5]
    assert len(run.history["accuracy"]) == 4
    assert run.history["epsilon"] == sorted(run.history["epsilon"])
    assert run.history["epsilon"][-1] == pytest.approx(20.0, rel=1e-6)  # calibrated for all rounds
    assert "loss" not in run.history.rows[0]  # not covered by the noise, so not sent
    assert "message_norm" not in run.history.rows[0]
    assert run.privacy is not None
    assert run.privacy.releases == 3
    folder = tmp_path / "server"
    summary = summarise(run, RunConfig(clients=5, trust="local", memory="noisy", noise="secure"))
    page.write_run(folder, summary)
    view = read_run(folder, summary)
    assert (view.status, view.round, view.rounds) == ("finished", 3, 3)
    assert view.epsilon == pytest.approx(20.0, rel=1e-6)
    assert not view.notes
    assert "accuracy" in (folder / "report.html").read_text(encoding="utf-8")
    found.server.close()


def test_the_model_of_a_federation_can_be_loaded(tmp_path: Path) -> None:
    """Frozen parameters stay as they are; without the module of the app, the numbers are there."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].requires_grad_(False)
    found = federation(tmp_path)
    found.run()
    run = found.server.finish()
    found.server.close()
    run.state.x = torch.arange(6.0)
    run.model = trained(model, run.x)
    folder = tmp_path / "server"
    write_tables(folder, run)
    write_summary(folder, summarise(run, RunConfig(clients=5, private=False)))
    inputs = torch.tensor([[1.0, -2.0]])
    hidden = inputs @ torch.tensor([[0.0, 1.0], [2.0, 3.0]]).T + torch.tensor([4.0, 5.0])
    assert torch.equal(load(folder, model=model).predict(inputs), model[1](hidden).detach())
    assert load(folder).tensors["0.bias"].tolist() == [4, 5]
    with pytest.raises(UsageError, match="give the module"):
        load(folder).predict(inputs)


def test_a_killed_server_goes_on(tmp_path: Path) -> None:
    plain, broken = federation(tmp_path / "plain"), federation(tmp_path / "broken")
    expected = plain.run()
    while not broken.server.finished:
        broken.restart_server()
        requests = broken.server.requests()
        for node, request in requests.items():
            broken.server.receive(node, broken.ask(node, request))
        broken.restart_server()  # the answers are gone, the parties send them again
        broken.round()
    assert torch.equal(broken.server.finish().x, expected)
    history = broken.server.storage.history
    assert [row["round"] for row in history] == [0, 1, 2, 3, 4]
    broken.restart_server()
    assert broken.server.finished
    assert len(broken.server.finish().history) == 5  # the last row is there once
    for one in (plain, broken):
        one.server.close()


def test_a_folder_of_another_run_and_one_in_use(tmp_path: Path) -> None:
    found = federation(tmp_path)
    with pytest.raises(UsageError, match="another process writes to"):
        Coordinator(**found.arguments)
    found.server.close()
    with pytest.raises(UsageError, match="parties is"):
        Coordinator(**{**found.arguments, "parties": ["x", "y"]})
    with pytest.raises(UsageError, match="run of another configuration"):
        Coordinator(**{**found.arguments, "method": NormEC(0.2, 0.5)})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parties": []}, "needs at least one party"),
        ({"parties": ["a", "a"]}, "each with a name of its own"),
        ({"parties": ["../a", "b"]}, "cannot name a run or party"),
        ({"run": "a b"}, "cannot name a run or party"),
        ({"minimum": 0}, "minimum must lie between 1 and the 2"),
        ({"minimum": 3}, "minimum must lie between 1 and the 2"),
    ],
)
def test_what_cannot_be_a_federation(changes: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"parties": ["a", "b"], "run": "r", **changes}
    with pytest.raises(UsageError, match=says):
        Coordinator(METHOD, torch.zeros(5), plan=plan(3), **given)


def test_a_party_works_on_one_clients_data_without_statistics() -> None:
    images = TensorDataset(torch.rand(8, 3), torch.arange(8) % 2)
    with pytest.raises(UsageError, match="one client; the problem has 2"):
        ProblemOracle(Problem(nn.Linear(3, 2), nn.functional.cross_entropy, [images, images]))
    normed = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pytest.raises(UsageError, match="use GroupNorm"):
        ProblemOracle(Problem(normed, nn.functional.cross_entropy, [images]))
    oracle = ProblemOracle(Problem(nn.Linear(3, 2), nn.functional.cross_entropy, [images]))
    with pytest.raises(UsageError, match="has 8 parameters, x has 7"):
        oracle.gradient(torch.zeros(7), 0, 0, PlanTerms(0, 0, 1))


def test_a_step_to_infinity_is_said_and_not_saved(tmp_path: Path) -> None:
    found = InProcessFederation(tmp_path, GD(), plan(4, lr=1e308), oracles=[Quadratic()] * len(NODES))
    with pytest.raises(Diverged, match="x is not finite"):
        found.run()
    assert found.server.round < 4
    found.server.close()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("trust", ["local", "central"])
def test_diagnostics_are_part_of_a_private_run_and_of_its_statement(tmp_path: Path, trust: str) -> None:
    """Un-noised columns do not join a run that promised to have none, and a run that has them says so."""
    privacy = Privacy(epsilon=20.0, noise="secure", trust=trust)  # type: ignore[arg-type]
    policy = Policy(epsilon=100.0, least_sigma=0.01, trusts=["local", "central"])
    given = {"policy": policy, "privacy": privacy, "oracles": [Quadratic()] * len(NODES)}
    silent = dataclasses.replace(plan(2), diagnostics=False)
    found = InProcessFederation(tmp_path / "silent", METHOD, silent, **given)  # type: ignore[arg-type]
    found.round()
    found.server.close()
    found.arguments["plan"] = dataclasses.replace(silent, diagnostics=True)
    with pytest.raises(UsageError, match="diagnostics"):
        found.restart_server()
    found.arguments["plan"] = silent
    found.restart_server()
    found.run()
    spent = found.server.finish().privacy
    found.server.close()
    assert spent is not None
    assert not any("diagnostics" in gap for gap in spent.not_covered)
    assert not any(set(row) & {"loss", "message_norm"} for row in found.server.storage.history.rows)
    open_ = InProcessFederation(tmp_path / "open", METHOD, plan(2), **given)  # type: ignore[arg-type]
    open_.run()
    spent = open_.server.finish().privacy
    open_.server.close()
    assert spent is not None
    assert any("diagnostics = true" in gap for gap in spent.not_covered)
    assert ("message_norm" in open_.server.storage.history.rows[0]) == (trust == "central")
