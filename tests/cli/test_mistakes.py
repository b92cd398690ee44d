"""Every mistake: one line on stderr, exit code 2, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from normec import __version__
from normec.cli.app import app, run

from ..support.runs import snapshot

MISTAKES = [
    (["train", "--alpha", "-1"], "alpha must be >= 0"),
    (["train", "--beta", "0"], "beta must be > 0"),
    (["train", "--beta", "nan"], "beta must be > 0"),
    (["train", "--lr", "nan"], "lr must be >= 0 and finite"),
    (["train", "--lr", "inf"], "lr must be >= 0 and finite"),
    (["train", "--clients", "0"], "clients must be a whole number >= 1"),
    (["train", "--clients", "100000"], "at most the number of records"),
    (["train", "--rounds", "0"], "rounds must be a whole number >= 1"),
    (["train", "--rounds", "5", "--epochs", "2"], "give rounds or epochs"),
    (["train", "--batch-size", "0"], "batch_size must be a whole number >= 1"),
    (["train", "--seed", "-1"], "seed must be a whole number >= 0, got -1"),
    (["train", "--data", "digit"], "did you mean 'digits'"),
    (["train", "--model", "softmx"], "did you mean 'softmax'"),
    (["train", "--model", "resnet20"], "needs images"),
    (["train", "--model", "logistic"], "is for 2 classes"),
    (["train", "--method", "normc"], "did you mean 'normec'"),
    (["train", "--method", "heavyball"], "scaffold, FILE.py:CLASS"),
    (["train", "--split", "lable"], "split: input should be 'iid', 'dirichlet',"),
    (["train", "--set", "betta=1"], "did you mean 'beta'"),
    (["train", "--set", "beta"], "expected key=value"),
    (["train", "--set", "clients=many"], "clients: input should be a valid integer, got 'many'"),
    (["train", "--tau", "1"], "tau does not apply to normec"),
    (["train", "--set", "method_settings=tau=1"], "method_settings does not apply to normec"),
    (
        ["compare", "normec", "--set", "method_settings=tau=1"],
        "method_settings applies to none of the methods compared",
    ),
    (["train", "--split", "column"], "add --set column=NUMBER"),
    (["train", "--set", "decay=1.0"], "decay must lie in [0, 1)"),
    (["train", "--set", "momentum=0.9"], "momentum does not apply to normec"),
    (["train", "--method", "dpsgd-norm", "--set", "momentum=1.0"], "momentum must lie in [0, 1)"),
    (["train", "--method", "ef21", "--set", "k=100000", "--no-privacy"], "k must be at most the dimension"),
    (["train", "--method", "ef21"], "ef21 sends messages without a bound"),
    (["train", "--method", "gd"], "gd sends messages without a bound"),
    (["train", "--epsilon", "0"], "epsilon must be > 0"),
    (["train", "--epsilon", "nan"], "epsilon must be > 0"),
    (["train", "--delta", "1"], "delta must lie in (0, 1)"),
    (["train", "--delta", "nan"], "delta must lie in (0, 1)"),
    (["train", "--trust", "nobody"], "trust: input should be 'local',"),
    (["train", "--no-privacy", "--epsilon", "3"], "epsilon is for private runs"),
    (["train", "--set", "initial_memory=gradient"], "a release of its own"),
    (["train", "--set", "memory=noisy"], "re-sends each client's noise"),
    (
        ["train", "--unit", "record", "--method", "normec", "--set", "batch_rate=0.5"],
        "a clean memory remembers records",
    ),
    (["train", "--no-privacy", "--trust", "local"], "trust is for private runs"),
    (["train", "--rounds", "3", "--set", "warmup=3"], "warmup must be below the 3 rounds"),
    (["privacy", "epsilon", "--sigma", "-1", "--releases", "3"], "sigma must be > 0"),
    (["privacy", "epsilon", "--sigma", "1", "--releases", "0"], "releases must be a whole number >= 1"),
    (
        ["privacy", "noise", "--epsilon", "1", "--releases", "3", "--clients", "0"],
        "clients must be a whole number >= 1",
    ),
    (["privacy", "noise", "--epsilon", "1", "--releases", "3", "--groups", "0"], "groups must be a whole number >= 1"),
    (
        ["privacy", "noise", "--epsilon", "1", "--releases", "3", "--bound", "inf"],
        "bound must be > 0 and finite, got inf",
    ),
    (["privacy", "table", "--sampling-rate", "2"], "sampling_rate must lie in (0, 1], got 2.0"),
    (["privacy", "noise", "--epsilon", "nan", "--releases", "3"], "epsilon must be > 0"),
    (["privacy", "noise", "--epsilon", "1", "--releases", "3", "--delta", "2"], "delta must lie in (0, 1)"),
    (["privacy", "epsilon", "--sigma", "1", "--releases", "3", "--sampling-rate", "0.1"], "the server sees who sends"),
    (["privacy", "audit", "--method", "gd"], "unknown method"),
    (["train", "--set", "sample_rate=1.5"], "sampling must lie in (0, 1]"),
    (["train", "--set", "sample_count=101"], "cannot draw 101 of 100"),
    (["train", "--set", "batch_size=500"], "batch_size = 500 is more than any client has"),
    (["train", "--set", "engine=fast"], "unknown engine"),
    (["train", "--device", "toaster"], "no device 'toaster'"),
    (["train", "--unknown"], "train --help` lists all"),
    (["train", "--eps", "8"], "there is no option --eps, did you mean '--epsilon'?"),
    (["train", "--learning-rate", "0.1"], "did you mean '--lr'?"),
    (["train", "--no-private"], "did you mean '--no-privacy'?"),
    (["train", "--decay", "0.1"], "there is no option --decay; write --set decay=VALUE"),
    (["trian"], "there is no command 'trian', did you mean 'train'?"),
    (["privacy", "audits"], "there is no command 'audits', did you mean 'audit'?"),
    (["train", "digits"], "a data set is named with --data digits"),
    (["train", "patients.csv"], "give it as --data patients.csv --target COLUMN"),
    (["train", "--data", "patients.csv", "--target", "sick"], "there is no file patients.csv"),
    (["train", "--model", "net.py"], "as net.py:NAME"),
    (["train", "--method", "EF21"], "did you mean 'ef21'?"),
    (["train", "--rounds", "1e3"], "'1e3' is not a valid integer"),
    (["results"], "there is no folder runs"),
    (["results", "nowhere"], "there is no folder nowhere"),
    (["ui", "nowhere"], "there is no folder nowhere"),
    (["tag", "nowhere", "--add", "x"], "nowhere holds no run"),
    (["train", "missing.toml"], "no configuration file"),
    (["compare", "normec", "clip21:beta=1"], "beta does not apply to clip21"),
    (["compare", "gd", "gd", "--no-privacy"], "occurs twice"),
    (["compare", "normec", "gd"], "gd:private=false"),
    (["compare", "normec", "gd:private=false,epsilon=3"], "epsilon is for private runs"),
    (["train", "--data", "a.csv", "--data-schema", "nowhere.toml"], "there is no table schema nowhere.toml; write one"),
    (["train", "--lr", "fast"], "lr: input should be a valid number, got 'fast'"),
    (["train", "--lr", "theory"], "without noise, which privacy does not cover"),
    (["theory", "plan", "--rounds", "0", "--no-privacy"], "rounds must be a whole number >= 1"),
    (["compare", "--lr", "1,x"], "numbers separated by commas"),
    (["compare", "--by", "luck"], "unknown criterion"),
    (["data", "get", "cifar"], "did you mean 'cifar10'"),
    (["train", "--data", "imagenet"], "unknown dataset 'imagenet'; choose from"),
    (["train", "--lr", "1e300"], "lr must lie in [0, 3e+38]"),
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert says in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("beta = ", "cannot be read as TOML"),
        ("[method]\nbeta = 1\n", "method: input should be a valid string"),
        ("lr = 'fast'", "lr: input should be a valid number"),
    ],
)
def test_a_bad_file_of_settings(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text(text)
    assert run(["train", "bad.toml"]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


def test_nan_in_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.svm").write_text("".join(f"{i % 2} 1:{i} 2:1\n" for i in range(40)) + "1 1:nan 2:1\n")
    assert run(["train", "--data", "libsvm:bad.svm", "--clients", "2"]) == 2
    assert "bad.svm" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.svm"]


@pytest.mark.parametrize("extra", [[], ["--no-privacy"]], ids=["private", "plain"])
def test_a_loss_that_is_not_finite_in_the_first_round(
    extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Inputs near the largest float overflow in the first matrix product of an MLP, whose parameters are not zero.
    monkeypatch.chdir(tmp_path)
    rows = (f"{i % 2} 1:{3e38 if i == 33 else i} 2:3e38\n" for i in range(40))
    Path("huge.svm").write_text("".join(rows))
    assert run(["train", "--data", "libsvm:huge.svm", "--clients", "2", "--model", "mlp", *extra]) == 2
    said = capsys.readouterr().err
    assert "not finite in round 0" in said
    assert "client" in said
    assert [path.name for path in tmp_path.iterdir()] == ["huge.svm"]


def test_a_loss_that_stops_being_finite_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "train",
        "--no-privacy",
        "--method",
        "gd",
        "--model",
        "mlp",
        "--lr",
        "1e30",
        "--rounds",
        "50",
        "--out",
        "run",
        "--quiet",
    ]
    assert run(arguments) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "not finite in round" in said
    assert (tmp_path / "run" / "checkpoint" / "latest.json").exists()
    assert '"status": "diverged"' in (tmp_path / "run" / "summary.json").read_text()


def test_a_folder_that_is_no_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("thesis").mkdir()
    Path("thesis/chapter.txt").write_text("do not touch")
    assert run(["train", "--out", "thesis"]) == 2
    assert "is not a run" in capsys.readouterr().err
    assert [path.name for path in Path("thesis").iterdir()] == ["chapter.txt"]


def test_another_configuration_in_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--rounds", "3", "--out", "run", "--quiet"]) == 0
    before = snapshot(Path("run"))
    capsys.readouterr()
    assert run(["train", "--rounds", "3", "--beta", "0.2", "--out", "run"]) == 2
    assert "beta is 0.011 there, 0.2 here" in capsys.readouterr().err
    assert snapshot(Path("run")) == before


def test_a_section_in_a_file_of_settings_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[train]\nlr = 0.1\n")
    assert run(["train", "mine.toml"]) == 2
    assert "move the settings below [train] to its top" in capsys.readouterr().err


@pytest.mark.parametrize("group", [(), ("privacy",), ("theory",), ("data",), ("federation",)])
def test_a_group_without_a_command_shows_its_help(group: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*group]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "Usage:" in printed.out
    assert "Commands:" in printed.out


def test_help_has_a_short_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "-h"]) == 0
    assert "--epsilon" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "sweep", "tag"])
def test_help_describes_each_argument_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    (argument,) = (one for one in group.commands[name].params if isinstance(one, typer.core.TyperArgument))
    assert run([name, "--help"]) == 0
    assert argument.help
    assert " ".join(capsys.readouterr().out.split()).count(argument.help) == 1


def test_a_name_that_a_file_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("class Network: ...\n")
    assert run(["train", "--model", "net.py:Netwrk"]) == 2
    assert capsys.readouterr().err == "error: net.py has no name Netwrk, did you mean 'Network'?\n"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("command", ["train", "compare", "sweep", "results", "report", "tag", "ui"])
def test_help_is_plain_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert "\\" not in capsys.readouterr().out


def test_a_model_that_does_not_fit_its_data_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(
        "from torch import nn\n"
        "def narrow(): return nn.Linear(7, 10)\n"
        "def few(): return nn.Linear(64, 3)\n"
        "def pair(): return nn.LSTM(64, 10)\n"
    )
    for name, error in (("narrow", "RuntimeError: mat1"), ("few", "IndexError: Target"), ("pair", "TypeError")):
        assert run(["train", "--model", f"nets.py:{name}", "--clients", "3"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: nets.py:{name} fails on the first records: {error}")
        assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["nets.py"]


def test_a_table_without_its_app_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flwr")
    assert run(["federation", "local", "--table", "patients.csv"]) == 2
    assert "name its folder with --app" in capsys.readouterr().err
