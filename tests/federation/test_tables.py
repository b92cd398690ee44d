"""A party with a table: the app reads it with its schema, and what is wrong with it stays at the party."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import NormEC, UsageError
from normec.data import load_schema, read_table
from normec.experiments.build import PRIVATE_SETTINGS
from normec.federation.flower.new_terms import new_terms
from normec.federation.flower.records import from_records, to_records
from normec.federation.flower.scaffold import write_app
from normec.federation.flower.settings import RECORDED
from normec.federation.flower.supernode import load_client, load_task, read_private_key
from normec.federation.local import inputs
from normec.federation.local.federation import Federation, LocalOptions, run
from normec.federation.protocol.journal import read_journal
from normec.settings.config import FEDERATED
from normec.system.files import to_toml
from normec.training.saved_run import Result

from .hostile import HostileServer, zeros
from .party_files import forget_app, make_ssh_key

flower = pytest.importorskip("flwr.app")

SCHEMA = 'target = "ill"\nclasses = ["no", "yes"]\n[inputs]\nage = {low = 20, high = 80}\n'


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    write_app(tmp_path / "app", schema=tmp_path / "schema.toml")
    forget_app()
    return tmp_path / "app"


def ask(app: Path, folder: Path, table: Path, **more: str) -> list[dict[str, Any]]:
    """The answers of a party to two requests: the handshake, and the message."""
    (folder / "policy.toml").write_text("epsilon = 8\nleast_sigma = 1e-3")
    config = {"folder": str(folder / "state"), "policy": str(folder / "policy.toml"), "data": str(table), **more}
    client, found = load_client(app), list[dict[str, Any]]()
    asking = HostileServer(None, zeros(4, "float32"), method=NormEC(0.1, 0.5))  # type: ignore[arg-type]
    for _ in range(2):
        metadata = flower.Metadata(1, "message", 1, 2, "", "", time.time(), 3600.0, "train")
        message = flower.Message(content=to_records(asking.fields()), metadata=metadata)
        reply = client(message, flower.Context(1, 2, config, flower.RecordDict(), run_config={}))
        found.append(from_records(reply.content))
        asking.token = found[-1].get("token", "")
    return found


def test_a_party_answers_with_its_table(app: Path, tmp_path: Path) -> None:
    table = tmp_path / "patients.csv"
    table.write_text("age,ill,name\n30,no,x\n70,yes,y\n")
    first, second = ask(app, tmp_path, table)
    assert first["reason"] == "state"
    assert len(second["message"]) == 4
    task = load_task(app)
    assert (task.model().in_features, task.model().out_features) == (1, 2)
    with pytest.raises(UsageError, match=r"name its table in party\.toml"):
        task.data(0, 1)


def test_a_mistake_in_a_table_is_not_told_to_the_server(app: Path, tmp_path: Path) -> None:
    table = tmp_path / "patients.csv"
    table.write_text("age,ill,name\n30,no,x\nfour score,yes,patient 4711\n")
    for answer in ask(app, tmp_path, table):
        assert answer["reason"] == "failed"
        assert "score" not in str(answer)
    assert "'four score' is not a number" in read_journal(tmp_path / "state" / "events.jsonl")[-1]["exact"]


def test_a_party_with_signed_terms_refuses_other_requests(app: Path, tmp_path: Path) -> None:
    table = tmp_path / "patients.csv"
    table.write_text("age,ill\n30,no\n70,yes\n")
    for name in "ab":
        make_ssh_key(tmp_path / name)
    terms = new_terms(app, {name: tmp_path / f"{name}.pub" for name in "ab"}, {"name": "trial", "rounds": 5})
    terms = terms.sign(read_private_key(tmp_path / "a"))
    terms.save(tmp_path / "terms.json")
    given = {"terms": str(tmp_path / "terms.json"), "key": str(tmp_path / "a")}
    assert ask(app, tmp_path, table, **given)[0]["reason"] == "failed", "b has not signed"
    terms.sign(read_private_key(tmp_path / "b")).save(tmp_path / "signed.json")
    given["terms"] = str(tmp_path / "signed.json")
    assert ask(app, tmp_path, table, **given)[0]["reason"] == "terms"
    last = read_journal(tmp_path / "state" / "events.jsonl")[-1]["exact"]
    assert "the agreed terms have" in last
    assert not (tmp_path / "state" / "ledger.jsonl").exists()


def test_the_server_tests_with_a_public_table(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "public.csv"
    table.write_text("age,ill\n80,yes\n")
    task = load_task(app)
    assert task.test() is None
    monkeypatch.setenv("NORMEC_TEST_TABLE", str(table))
    found = task.test()
    assert found is not None
    assert torch.equal(found[0][0], read_table(table, load_schema(app / "table.toml")).inputs[0])


def test_an_app_without_a_schema_takes_no_table(tmp_path: Path) -> None:
    write_app(tmp_path / "plain")
    assert not (tmp_path / "plain" / "learning" / "table_task.py").exists()
    forget_app()
    answers = ask(tmp_path / "plain", tmp_path, tmp_path / "patients.csv")
    assert answers[0]["reason"] == "failed"
    assert "has no table.toml" in read_journal(tmp_path / "state" / "events.jsonl")[-1]["exact"]


def test_a_mistake_in_the_schema_writes_no_app(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text("target = 1")
    with pytest.raises(UsageError, match="target must be a name"):
        write_app(tmp_path / "app", schema=tmp_path / "schema.toml")
    assert not (tmp_path / "app").exists()


def test_a_federation_on_one_machine_needs_a_readable_table_for_each_party(app: Path, tmp_path: Path) -> None:
    good, other, bad = (tmp_path / f"{name}.csv" for name in ("good", "other", "bad"))
    for table, age in ((good, 80), (other, 81)):
        table.write_text(f"age,ill\n{age},yes\n30,no\n")
    bad.write_text("age,ill\n80,perhaps\n")

    def federation(*tables: Path, parties: int | None = None) -> Federation:
        return Federation(LocalOptions(app, tmp_path / "out", parties, {}, tables=tables))

    with pytest.raises(UsageError, match="read tables; name one for each of them"):
        federation()
    with pytest.raises(UsageError, match="once for each of 3 parties, got 2"):
        federation(good, other, parties=3)
    with pytest.raises(UsageError, match=r"bad\.csv, line 2, column 'ill': 'perhaps'"):
        federation(good, bad)
    copy = tmp_path / "copy.csv"
    copy.write_bytes(good.read_bytes())
    for same in (good, copy, tmp_path / "app" / ".." / "good.csv"):
        with pytest.raises(UsageError, match=r"has the same content as --table .*good\.csv: two parties would send"):
            federation(good, other, same)
    assert not (tmp_path / "out").exists()
    assert federation(good, other).config["parties"] == 2


def test_a_task_that_was_changed_needs_no_tables(app: Path, tmp_path: Path) -> None:
    task = app / "learning" / "task.py"
    task.write_text(task.read_text(encoding="utf-8") + "\nOWN = True\n", encoding="utf-8")
    assert Federation(LocalOptions(app, tmp_path / "out", 2, {})).config["parties"] == 2


def test_a_folder_belongs_to_its_tables_and_settings(app: Path, tmp_path: Path) -> None:
    north, south, west = (tmp_path / f"{name}.csv" for name in ("north", "south", "west"))
    for age, table in enumerate((north, south, west), start=30):
        table.write_text(f"age,ill\n80,yes\n{age},no\n")
    out = tmp_path / "out"
    given = {
        **dict.fromkeys((name for name in PRIVATE_SETTINGS if name in FEDERATED), ""),
        "private": False,
        "rounds": 5,
    }
    trial = LocalOptions(app, out, None, given, tables=(north, south))

    def again(**changed: Any) -> Result:
        return run(dataclasses.replace(trial, **changed), [], lambda: True)

    config = Federation(trial).settings.run.model_copy(update={"model": "Linear"}).record(RECORDED)
    (out / "config.toml").write_text(to_toml(config))
    summary = {"status": "finished", "rounds": 5, "round": 5, "privacy": None, "final": {}, "config": config}
    (out / "summary.json").write_text(json.dumps(summary))
    assert again().summary == summary
    north.rename(tmp_path / "moved.csv")
    assert again(tables=(tmp_path / "moved.csv", south)).summary == summary
    with pytest.raises(UsageError, match=r"party-1 had another table than .*west\.csv; choose another folder"):
        again(tables=(tmp_path / "moved.csv", west))
    with pytest.raises(UsageError, match=r"party-0 had another table than .*south\.csv"):
        again(tables=(south, tmp_path / "moved.csv"))
    south.write_text("age,ill\n80,yes\n")
    with pytest.raises(UsageError, match=r"out holds a federation in which party-1 had another table"):
        again(tables=(tmp_path / "moved.csv", south))
    tables = trial.tables
    (tmp_path / "moved.csv").rename(north)
    south.write_text("age,ill\n80,yes\n31,no\n")
    for setting, said in (
        ({"min_parties": 1}, "min_parties is None there, 1 here; choose another folder with --out"),
        ({"lr": 0.125}, "lr is .* there, 0.125 here; choose another folder with --out"),
        ({"rounds": 6}, "a finished run of 5 rounds, got rounds = 6, .*; choose another folder with --out"),
    ):
        with pytest.raises(UsageError, match=said):
            again(tables=tables, config={**trial.config, **setting})
    assert again().summary == summary


def test_a_federation_that_never_began_takes_other_tables(app: Path, tmp_path: Path) -> None:
    settings = Federation(LocalOptions(app, tmp_path / "out", 2, {}, tables=_two(tmp_path, 30))).settings
    home = tmp_path / "out" / "federation"
    for age in (30, 31):
        inputs.claim(home, app, settings, _two(tmp_path, age))
    (home / "parties" / "party-0").mkdir(parents=True)
    (home / "parties" / "party-0" / "ledger.jsonl").touch()
    inputs.claim(home, app, settings, _two(tmp_path, 31))
    with pytest.raises(UsageError, match="party-0 had another table"):
        inputs.claim(home, app, settings, _two(tmp_path, 30))


def _two(folder: Path, age: int) -> tuple[Path, Path]:
    """Two tables, whose contents depend on a number."""
    tables = folder / f"{age}-a.csv", folder / f"{age}-b.csv"
    for number, table in enumerate(tables):
        table.write_text(f"age,ill\n80,yes\n{age + number},no\n")
    return tables
