"""A party's account by unit and by kind of message, also if other files of its folder are removed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from normec import GD, Method, NormEC, Privacy, UsageError
from normec.cli.federation import app
from normec.federation.protocol import journal, party_state
from normec.federation.protocol.account import FILE, Releases
from normec.federation.protocol.gradient_oracle import GradientOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.spending import spending
from normec.federation.protocol.terms import PlanTerms
from normec.federation.protocol.wire import Refusal, Reply
from normec.privacy import gaussian

from .faulty_network import DIMENSION, Quadratic
from .hostile import SIGMA, HostileServer, zeros

ALL = Policy(
    epsilon=50.0, allow_without_noise=True, methods=["normec", "gd"], trusts=["local", "central"], simulation=True
)


def server(folder: Path, run: str, privacy: Privacy | None, method: Method | None = None) -> HostileServer:
    party = Party(folder, ALL, Quadratic(), node="a")
    sigma = SIGMA if privacy is not None else 0.0
    return HostileServer(
        party, zeros(DIMENSION), run=run, privacy=privacy, sigma=sigma, method=method or NormEC(0.1, 0.5)
    )


def test_a_ledgers_epsilon_is_printed_under_no_other_name(tmp_path: Path) -> None:
    secure = Privacy(sigma=SIGMA, noise="secure", memory="noisy", trust="local")
    assert isinstance(server(tmp_path, "r", secure).ask(), Reply)
    found = spending(tmp_path, ALL)
    assert found["epsilon"] == found["epsilons"]["client"] == pytest.approx(gaussian.epsilon(1 / SIGMA, ALL.delta))
    by_record = spending(tmp_path, ALL.model_copy(update={"unit": "record"}))
    assert (
        by_record["epsilon"] == by_record["epsilons"]["record"] == pytest.approx(gaussian.epsilon(2 / SIGMA, ALL.delta))
    )
    with pytest.raises(UsageError, match="was begun for relation = 'zero-out', got 'replace'; keep the policy's"):
        spending(tmp_path, ALL.model_copy(update={"relation": "replace"}))


@pytest.mark.parametrize(
    ("unit", "relation", "client", "record"),
    [("client", "zero-out", 4.0, 2.0), ("client", "replace", 4.0, 4.0), ("record", "zero-out", 8.0, 4.0)],
)
def test_a_ledger_that_was_begun_for_one_unit(
    unit: str, relation: str, client: float, record: float, tmp_path: Path
) -> None:
    """Its multiplier is that of a message of bound b: the change is b for a client left out, 2b for anything else."""
    line = {"kind": "release", "run": "r~0", "node": "a", "count": 3, "multiplier": 4.0, "recovered": False}
    header = {"kind": "header", "format": 1, "unit": unit, "relation": relation}
    releases = Releases(tmp_path, [header, line])
    releases.check(relation)
    for name, multiplier in (("client", client), ("record", record)):
        assert releases.epsilon(name, 1e-5) == pytest.approx(gaussian.epsilon(math.sqrt(3) / multiplier, 1e-5))


def test_messages_without_noise_are_counted_when_their_runs_are_removed(tmp_path: Path) -> None:
    bare = server(tmp_path, "bare", None, GD())
    for _ in range(3):
        assert isinstance(bare.ask(), Reply)
    assert isinstance(
        server(tmp_path, "noisy", Privacy(sigma=SIGMA, noise="secure", memory="noisy", trust="local")).ask(), Reply
    )
    before = spending(tmp_path, ALL)
    assert (before["releases"], before["without_noise"]) == (1, 3)
    assert sorted(part["without_noise"] for part in before["runs"].values()) == [0, 3]
    shutil.rmtree(tmp_path / "runs")
    assert spending(tmp_path, ALL) == before


def test_a_failed_computation_without_noise_is_no_message(tmp_path: Path) -> None:
    class Fails(GradientOracle):
        def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
            raise RuntimeError

    bare = server(tmp_path, "bare", None, GD())
    bare.party = Party(tmp_path, ALL, Fails(), node="a")
    assert isinstance(bare.ask(), Refusal)
    assert spending(tmp_path, ALL)["without_noise"] == 0


def test_an_account_tells_messages_of_different_protection_apart(tmp_path: Path) -> None:
    for run, privacy in {
        "local": Privacy(sigma=SIGMA, noise="secure", memory="noisy", trust="local"),
        "central": Privacy(sigma=SIGMA, noise="secure", trust="central"),
        "seeded": Privacy(sigma=SIGMA, noise="seeded", memory="noisy", trust="local"),
    }.items():
        assert isinstance(server(tmp_path, run, privacy).ask(), Reply)
    found = spending(tmp_path, ALL)
    assert [found[name] for name in ("releases", "central", "seeded", "without_noise")] == [3, 1, 1, 0]
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text(encoding="utf-8").splitlines()[1:]]
    assert [(line["trust"], line["noise"]) for line in lines] == [
        ("local", "secure"),
        ("central", "secure"),
        ("local", "seeded"),
    ]
    (tmp_path / "policy.toml").write_text("epsilon = 50.0\n")
    shown = CliRunner().invoke(app, ["ledger", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert "1 left bare under central trust, 1 with seeded noise (protects nobody)" in shown


def test_a_flooded_journal_hides_neither_itself_nor_a_lost_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 2000)
    asking = server(tmp_path, "r", Privacy(sigma=SIGMA, noise="secure", memory="noisy", trust="local"))
    assert not asking.party.folder.joinpath("events.jsonl").exists()
    for _ in range(50):
        assert isinstance(asking.send(asking.fields(privacy__sigma=0.001)), Refusal)
    assert isinstance(asking.ask(), Reply)
    assert spending(tmp_path, ALL)["journal_full"]
    (tmp_path / "policy.toml").write_text("epsilon = 50.0\n")
    assert "is full" in CliRunner().invoke(app, ["ledger", str(tmp_path)], env={"COLUMNS": "200"}).output
    shutil.rmtree(tmp_path / "runs")
    for name in (FILE, FILE + ".head"):
        (tmp_path / name).unlink()
    with pytest.raises(UsageError, match="restore the ledger from a copy"):
        spending(tmp_path, ALL)
    answer = asking.ask()
    assert isinstance(answer, Refusal)
    assert answer.reason == "failed"


def test_a_process_forked_by_the_partys_code_does_not_keep_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(party_state, "_PATIENCE", 0.0)
    children: list[int] = []

    class Forks(GradientOracle):
        """As a pool, or a data loader whose workers stay, does."""

        def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
            if not children:
                child = os.fork()
                if child == 0:
                    signal.pause()  # until it is killed
                children.append(child)
            return torch.ones_like(x), 1.0

    asking = HostileServer(Party(tmp_path, ALL, Forks(), node="a"), zeros(DIMENSION))
    try:
        assert [type(asking.ask()) for _ in range(3)] == [Reply] * 3
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
