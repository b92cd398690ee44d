"""normec privacy: the known values, and what the default run says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Method, NormEC, Privacy, Problem, train
from normec.cli.app import run

KNOWN = [
    (["epsilon", "--sigma", "7.3462", "--releases", "300"], "epsilon", 12.267),
    (["epsilon", "--sigma", "7.3462", "--releases", "300", "--relation", "replace"], "epsilon", 30.519),
    (
        ["epsilon", "--sigma", "7.3462", "--releases", "300", "--trust", "secure-sum", "--clients", "10"],
        "epsilon",
        3.126,
    ),
    (
        [
            *("epsilon", "--sigma", "7.3462", "--releases", "300", "--trust", "secure-sum", "--clients", "10"),
            *("--relation", "replace"),
        ],
        "epsilon",
        7.002,
    ),
    (["noise", "--epsilon", "8", "--releases", "300"], "sigma", 10.396),
    (["noise", "--epsilon", "8", "--releases", "42300"], "sigma", 123.45),
    (["noise", "--epsilon", "8", "--releases", "300", "--bound", "0.5"], "sigma", 5.198),
    (["noise", "--epsilon", "8", "--releases", "4790", "--groups", "16"], "sigma", 10.396),  # 300 turns of a client
    (["epsilon", "--sigma", "7.3462", "--releases", "4800", "--groups", "16"], "epsilon", 12.267),
]


@pytest.mark.parametrize(("arguments", "name", "value"), KNOWN, ids=lambda value: str(value)[:50])
def test_known_values(arguments: list[str], name: str, value: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["privacy", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[name] == pytest.approx(value, rel=2e-4)


def test_noise_of_a_sum_without_a_number_of_clients_is_that_of_one_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["privacy", "noise", "--epsilon", "8", "--releases", "9", "--json", "--trust"]
    assert run([*words, "secure-sum"]) == 0
    alone = capsys.readouterr()
    assert "--clients" in alone.err
    assert run([*words, "secure-sum", "--clients", "1"]) == 0
    given = capsys.readouterr()
    assert given.err == ""
    assert given.out == alone.out


RECORDS = ("--unit", "record", "--record-clip", "1.5", "--records", "30")


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> float:
    assert run(["privacy", "noise", "--epsilon", "4", "--releases", "20", "--json", *words]) == 0
    return float(json.loads(capsys.readouterr().out)["sigma"])


def test_the_noise_of_a_record_is_that_of_its_share_of_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    for trust in (["--trust", "local"], ["--trust", "central", "--clients", "5"]):
        share = answered(capsys, *trust, "--bound", str(1.5 / 30))
        assert answered(capsys, *trust, *RECORDS) == pytest.approx(share, rel=1e-3)
        auto = [*trust, "--unit", "record", "--records", "30"]  # below 1, as a run has it
        assert answered(capsys, *auto) == answered(capsys, *auto, "--record-clip", "1")
        method = ["--method", "dpsgd-clip:tau=0.3"]
        whole = answered(capsys, *trust, "--relation", "replace", *method)
        found = answered(capsys, *trust, "--unit", "record", "--record-clip", "none", *method)
        assert found == pytest.approx(whole, rel=1e-3)
    # A clip beyond what a client's message can reach gains nothing over replacing the client.
    replaced = answered(capsys, "--relation", "replace", "--method", "dpsgd-clip:tau=0.02")
    assert answered(capsys, *RECORDS, "--method", "dpsgd-clip:tau=0.02") == pytest.approx(replaced, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "kind", "trust", "drawn"),
    [
        ("dpsgd-clip:tau=1", DPSGD(Clip(1.0)), "central", 0.4),
        ("normec:alpha=3,beta=0.5,decay=0.1", NormEC(3.0, 0.5, decay=0.1), "central", None),
        ("normec:alpha=3,beta=0.5,decay=0.1", NormEC(3.0, 0.5, decay=0.1), "local", 0.4),
    ],
)
def test_the_noise_of_a_record_is_that_of_a_run(
    method: str,
    kind: Method,
    trust: Literal["local", "central"],
    drawn: float | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clients = [TensorDataset(torch.randn(30, 2), torch.arange(30) % 2) for _ in range(5)]
    privacy = Privacy(epsilon=4, unit="record", record_clip=1.5, trust=trust, noise="seeded")
    problem = Problem(nn.Linear(2, 2), F.cross_entropy, clients)
    done = train(problem, kind, lr=0.1, rounds=20, seed=0, privacy=privacy, batch_rate=drawn)
    assert done.privacy is not None
    words = ["--trust", trust, "--clients", "5", *RECORDS, "--method", method]
    found = answered(capsys, *words, *(["--batch-rate", str(drawn)] if drawn else []))
    assert found == pytest.approx(done.privacy.sigma, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--records", "5"], "--records and --batch-rate are for --unit record"),
        (["--unit", "record"], "needs --records"),
        (["--unit", "record", "--records", "9", "--record-clip", "one"], "a number, auto or none, got 'one'"),
        (["--unit", "record", "--records", "9", "--record-clip", "-1"], "record_clip must be"),
        (["--unit", "record", "--records", "9", "--batch-rate", "2"], "batch_rate must lie in (0, 1]"),
        ([*RECORDS, "--records", "0"], "records must be a whole number >= 1"),
        (["--method", "clip21", "--bound", "2"], "leave out --bound"),
        (["--method", "nromec"], "did you mean 'normec'"),
        (["--method", "gd"], "messages without a bound"),
        (
            ["--trust", "central", "--clients", "2", "--method", "normec", *RECORDS, "--batch-rate", "0.1"],
            "a clean memory remembers records",
        ),
        (["--method", "fed-normec", *RECORDS], "local steps have no rule at record level"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_has_no_answer_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["privacy", "noise", "--epsilon", "4", "--releases", "20", *words]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_more_groups_than_clients_take_no_turns(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["privacy", "noise", "--epsilon", "8", "--releases", "320", "--groups", "16", "--trust", "central"]
    assert run([*words, "--clients", "15"]) == 2
    assert "--groups 16 is more than the 15 clients" in capsys.readouterr().err
    assert run([*words, "--json"]) == 0
    alone = capsys.readouterr()
    assert "16 clients, one in each group" in alone.err
    assert run([*words, "--clients", "16", "--json"]) == 0
    assert capsys.readouterr().out == alone.out


@pytest.mark.slow
def test_the_table_agrees_with_the_single_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "epsilon.png"
    arguments = ["privacy", "table", "--sigma", "7.3462", "--releases", "300", "--clients", "10", "--out", str(picture)]
    assert run([*arguments, "--sampling-rate", "0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = {name: values[-1] for name, values in found["epsilon"].items()}
    assert last["local, zero-out"] == pytest.approx(12.267, abs=1e-3)
    assert last["secure-sum, replace"] == pytest.approx(7.002, abs=1e-3)
    assert last["secure-sum, sampled 0.2"] < last["secure-sum, zero-out"] == pytest.approx(3.126, abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "accuracy", "advice"),
    [
        (["--rounds", "5"], 0.3, []),
        pytest.param([], 0.93, ["dpsgd-clip", "normec:private=false"], marks=pytest.mark.slow),
    ],
)
def test_the_default_run_is_private_and_says_so(
    words: list[str],
    accuracy: float,
    advice: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--quiet", *words]) == 0
    said = capsys.readouterr().out
    assert "ε = 8 at δ = 1e-05" in said
    assert "each client of 100 clients" in said
    assert "a server that sees only the sum" in said
    assert all(methods in said for methods in advice)  # to be compared with a run that nobody has changed
    (folder,) = (tmp_path / "runs").glob("digits-*")
    summary = json.loads((folder / "summary.json").read_text())
    assert 7.999 < summary["privacy"]["epsilon"] <= 8
    assert summary["final"]["accuracy"] > accuracy
    assert summary["clients"] == 100


def test_a_large_delta_and_fitted_inputs_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--data", "wine", "--clients", "5", "--rounds", "4", "--delta", "0.3", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "is not below 1/5 clients" in said
    assert "scaled by statistics of the training records" in said


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("schema", [False, True])
def test_classes_that_are_read_from_the_records_are_noted(schema: bool, tmp_path: Path) -> None:
    """One patient with a disease of its own adds an output to the model, whatever the noise is."""
    sizes = {}
    for disease in (1, 7):
        path = tmp_path / f"{disease}.csv"
        path.write_text("age,ill\n" + "".join(f"{i / 60},{i % 2}\n" for i in range(59)) + f"1,{disease}\n")
        (tmp_path / "schema.toml").write_text(
            'target = "ill"\nclasses = ["0", "1", "7"]\n[inputs]\nage = {low = 0, high = 1}\n'
        )
        described = ["--data-schema", str(tmp_path / "schema.toml")] if schema else ["--target", "ill"]
        words = ["--clients", "3", "--rounds", "2", "--unit", "record", "--out", str(tmp_path / f"run-{disease}")]
        assert run(["train", "--data", str(path), *described, *words, "--quiet"]) == 0
        summary = json.loads((tmp_path / f"run-{disease}" / "summary.json").read_text())
        sizes[disease] = summary["dimension"]
        assert any("those that occur in the records" in note for note in summary["privacy"]["notes"]) is not schema
        assert any("the test and validation records" in gap for gap in summary["privacy"]["not_covered"])
    assert (sizes[1] == sizes[7]) is schema


@pytest.mark.slow
def test_audit_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["privacy", "audit", "--method", "dpsgd-norm", "--trials", "192", "--rounds", "2"]
    assert run([*words, "--epsilon", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["dpsgd-norm"]
    assert found["claim"] == pytest.approx(8, rel=1e-6)
    assert 1 < found["epsilon"] < 8
    assert not found["refuted"]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "dpsgd-norm" in said
    assert "not refuted" in said


@pytest.mark.slow
def test_a_method_of_the_users_own_is_audited_with_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nimport normec\n\n\n@dataclass(frozen=True)\nclass Mine(normec.Method):\n"
        "    tau: float = 1.0\n    bound = 1.0\n\n    def message(self, update, state, key=None):\n"
        "        return normec.Clip(self.tau)(update), state\n"
    )
    words = ["privacy", "audit", "--method", f"{tmp_path / 'mine.py'}:Mine", "--trials", "192", "--rounds", "2"]
    assert run([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert not found["refuted"]
    assert run([*words, "--set", "tau=3"]) == 2  # longer than the bound that it claims
    assert "is above its bound in round 0" in capsys.readouterr().err


def test_the_audit_takes_turns_and_bands(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["privacy", "audit", "--method", "dpsgd-clip", "--trust", "central", "--trials", "192"]
    assert run([*words, "--groups", "2", "--noise-bands", "3"]) == 2
    assert "noise_bands = 3 is more than the 2 rounds between two turns" in capsys.readouterr().err
