"""The app that `init` writes, and the settings in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from normec.errors import UsageError
from normec.experiments import methods
from normec.federation.flower.definition import _plan
from normec.federation.flower.scaffold import app_name, write_app
from normec.federation.flower.settings import NAMES, RECORDED, app_config, located, named_by_a_command, read
from normec.federation.local.federation import Federation, LocalOptions, permissive_policy
from normec.federation.protocol.policy import load_policy
from normec.federation.protocol.terms import MethodTerms
from normec.settings import RunConfig, load
from normec.settings.config import FEDERATED
from normec.system.files import to_toml

from ..support.waiting import LIMIT


def test_the_app_names_every_setting_and_its_settings_are_good(tmp_path: Path) -> None:
    write_app(tmp_path / "My App")
    config = app_config(tmp_path / "My App")
    assert config.keys() == set(NAMES)
    settings = read(config)
    assert (settings.name, settings.run.method, settings.run.trust, settings.least) == ("my-app", "normec", "local", 5)
    load_policy(tmp_path / "My App" / "policy.toml")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        write_app(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["task.py"]
    write_app(tmp_path / "new")
    with pytest.raises(UsageError, match="not empty"):
        write_app(tmp_path / "new")


@pytest.mark.parametrize(
    ("folder", "name"), [("a", "a"), ("3 cats!", "app-3-cats"), ("x" * 40, "x" * 32), ("ß", "app")]
)
def test_names_that_flower_takes(folder: str, name: str) -> None:
    assert app_name(Path(folder)) == name


def test_names_are_those_of_any_run() -> None:
    assert set(FEDERATED) <= RunConfig.model_fields.keys()
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"roundz": 3}, "did you mean 'rounds'"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": "ten"}, "rounds"),
        ({"trust": "local", "secure_sum": True}, "secure_sum = true contradicts trust = local"),
        ({"parties": 3, "min_parties": 4}, "at most parties = 3"),
        ({"name": "a/b"}, r"name: string should match pattern .*\[A-Za-z0-9\].*, got .a/b."),
        ({"round_seconds": -1.0}, "round_seconds"),
        ({"parties": 3, "records": "9,14"}, "records must be a number from 1 on for each of the 3 parties"),
        ({"parties": 3, "records": "9,14,many"}, "records must be"),
        ({"parties": 3, "records": "9,14,0.5"}, "records must be"),
        ({"parties": 3, "records": "9,14,inf"}, "records must be"),
    ],
)
def test_mistakes(config: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        read(config)


def test_private_by_default_with_noise_at_the_party() -> None:
    config = read({"epsilon": 2.0}).run
    assert (config.private, config.trust, config.noise, config.memory) == (True, "local", "secure", "noisy")
    assert read({"trust": "central"}).run.memory == "clean"
    assert not read({"private": False}).run.private
    assert read({"batch-size": 4, "epsilon": ""}).run.batch_size == 4


def test_public_numbers_of_records() -> None:
    """They divide the sums of clipped records, and are the weights where these are to follow the records."""
    for given, found in (("30,10,40", [30.0, 10.0, 40.0]), ("25", [25.0]), (25, [25.0]), (2.5, [2.5]), ("", None)):
        settings = read({"parties": 3, "records": given, "unit": "record", "record_clip": "auto", "lr": 0.1})
        assert settings.records_of_parties == found
        assert settings.run.record_clip == "auto"
    plan = _plan(read({"parties": 2, "weights": "records", "lr": 0.1}).run, [30.0, 10.0])
    assert plan.weights is not None
    assert plan.weights.tolist() == pytest.approx([1.5, 0.5])
    for records in (None, [25.0]):
        with pytest.raises(UsageError, match="give these numbers as records"):
            _plan(read({"parties": 2, "weights": "records", "lr": 0.1}).run, records)


def test_a_folder_is_known_by_its_settings(tmp_path: Path) -> None:
    run = read({"epsilon": 2.0, "lr": 0.1, "parties": 3}).run
    (tmp_path / "config.toml").write_text(to_toml(run.record(RECORDED)))
    assert load(tmp_path / "config.toml") == run
    assert "split" not in run.record(RECORDED)


def test_a_permissive_policy_can_be_read(tmp_path: Path) -> None:
    import tomli_w

    mine = f"{Path(__file__).with_name('methods') / 'my_method.py'}:Clip21SGDM"
    for config in (
        *({}, {"private": False}, {"trust": "central", "noise": "seeded"}, {"method": "dpsgd-clip"}),
        *({"server_norm": "by-tensor"}, {"method": "ef21", "private": False}, {"method": mine, "lr": 0.1}),
        *({"method": "clip21-adaptive"}, {"method": "scaffold"}, {"method": "fedavg"}, {"unit": "record"}),
    ):
        settings = read(config)
        (tmp_path / "policy.toml").write_text(tomli_w.dumps(permissive_policy(settings)))
        policy = load_policy(tmp_path / "policy.toml")
        MethodTerms.of(methods.build(settings.run, 20)).build(policy.methods)


def test_a_method_in_a_file_of_the_app(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    shutil.copy(Path(__file__).with_name("methods") / "my_method.py", tmp_path / "app")
    config = {"method": "my_method.py:Clip21SGDM", "method_settings": "tau=0.25,eta=0.4", "alpha": ""}
    with pytest.raises(UsageError, match="lr must be given"):
        read(config)
    run = read({**config, "lr": 0.1}).run
    assert run.method == "my_method.py:Clip21SGDM"  # wherever the app is unpacked
    (tmp_path / "config.toml").write_text(to_toml(run.record(RECORDED)))
    assert load(tmp_path / "config.toml") == run
    there = run.model_copy(update={"method": located(run.method, tmp_path / "app")})
    assert methods.build(there, 5).spec() == {"tau": 0.25, "eta": 0.4}
    assert located("dpsgd-clip", tmp_path) == "dpsgd-clip"

    def federation(**changes: str) -> Federation:
        config_ = {**config, "lr": 0.1, **changes}
        return Federation(LocalOptions(tmp_path / "app", tmp_path / "out", 2, config_))

    assert federation().method == f"{(tmp_path / 'app' / 'my_method.py').resolve()}:Clip21SGDM"
    with pytest.raises(UsageError, match="has no setting 'taus', did you mean 'tau'"):
        federation(method_settings="taus=1")
    with pytest.raises(UsageError, match="there is no file"):
        federation(method="my_methods.py:Clip21SGDM")


def test_a_command_names_files_of_the_app_or_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    for folder, names in ((tmp_path, ("here.py", "both.py")), (app, ("both.py", "there.py"))):
        for name in names:
            (folder / name).touch()
    monkeypatch.chdir(tmp_path)
    assert named_by_a_command("here.py:Mine", app) == f"{tmp_path.resolve() / 'here.py'}:Mine"
    assert named_by_a_command("here.py:Mine", None) == f"{tmp_path.resolve() / 'here.py'}:Mine"
    for name in ("both.py:Mine", "there.py:Mine", "nowhere.py:Mine", "dpsgd-clip"):
        assert named_by_a_command(name, app) == name


@pytest.mark.parametrize("method", ["dpsgd-clip", "clip21", "dpsgd-norm", "fedavg"])
def test_another_method_than_the_apps_has_its_usual_settings(method: str, tmp_path: Path) -> None:
    """The template has an alpha, and this app a server_norm and a step size, all for its own method."""
    write_app(tmp_path / "app")
    file = tmp_path / "app" / "pyproject.toml"
    text = file.read_text().replace('\nlr = ""', "\nlr = 0.7").replace('\nserver_norm = ""', "\nserver_norm = false")
    file.write_text(text)

    def run(**config: Any) -> RunConfig:
        return Federation(LocalOptions(tmp_path / "app", tmp_path / "out", 2, config)).settings.run

    assert run(method=method) == read({**_settings_but_method(file), "method": method}).run
    given = run(method=method, lr=0.3)
    assert (given.alpha, given.lr, given.rounds) == (None, 0.3, 30)
    for same in ({}, {"method": "normec"}):
        kept = run(**same)
        assert (kept.method, kept.alpha, kept.server_norm, kept.lr) == ("normec", 0.01, False, 0.7)


def _settings_but_method(file: Path) -> dict[str, Any]:
    """The settings of an app for two parties, without those that are for its method."""
    others = ("alpha", "server_norm", "lr", "method")
    given = {name: value for name, value in app_config(file.parent).items() if name not in others}
    return {**given, "parties": 2, "out": str(file.parents[1] / "out")}


def test_other_commands_do_not_load_flower() -> None:
    code = "import sys, normec.cli.app, normec.federation; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT, check=False).returncode == 0


@pytest.mark.slow
def test_without_flower_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['flwr'] = None; from normec.cli.app import run; sys.exit(run(['federation', 'local']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=LIMIT, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "pip install 'normec[federation]'" in ended.stderr
