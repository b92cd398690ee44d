"""The declaration of the settings, and the values that a run's folder says were used."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import normec as n
from normec import data, models
from normec.algorithms.catalogue import CATALOGUE
from normec.errors import UsageError
from normec.experiments import build, methods, results, runs, settings_page
from normec.experiments.resolve import resolved
from normec.gradients.choice import ENGINES
from normec.gradients.precision import PRECISIONS
from normec.report import page
from normec.settings import RunConfig, load, make
from normec.settings.config import SETTINGS, varied
from normec.settings.declaration import GROUPS
from normec.system.files import to_toml
from normec.training.memory_table import HOMES

SMALL: dict[str, Any] = {"clients": 4, "rounds": 6, "seed": 3}
OWN = """
from dataclasses import dataclass
from normec import Clip, Method

@dataclass(frozen=True)
class Mine(Method):
    tau: float = 0.5
    name_of_it: str = "mine"

    @property
    def bound(self):
        return self.tau

    def message(self, update, state, key=None):
        return Clip(self.tau)(update), state
"""
RUNS: dict[str, dict[str, Any]] = {
    "private": SMALL,
    "no seed": {"clients": 4, "rounds": 6},
    "sigma": {**SMALL, "sigma": 0.1, "method": "dpsgd-clip"},
    "not private": {**SMALL, "private": False, "method": "clip21"},
    "k of the model": {**SMALL, "private": False, "method": "ef21"},
    "theory": {**SMALL, "private": False, "lr": "theory"},
    "epochs": {"clients": 4, "seed": 3, "private": False, "epochs": 1, "batch_size": 50, "memory_dtype": "bfloat16"},
    "column": {"split": "column", "column": 3, "rounds": 4, "private": False, "method": "gd"},
    "local steps": {**SMALL, "method": "fed-normec", "prox": 0.2},
    "local epochs": {**SMALL, "private": False, "method": "fedavg", "local_epochs": 2, "batch_size": 100},
    "optimizer": {
        **SMALL,
        "server_optimizer": "adam",
        "server_optimizer_settings": "betas=[0.9,0.99],eps=1e-6",
        "averaging": "polyak",
    },
    "schedule": {**SMALL, "server_optimizer": "nesterov", "lr_schedule": "step", "lr_schedule_settings": "ramp_up=2"},
    "epochs, averaged": {"clients": 4, "private": False, "epochs": 1, "batch_size": 50, "averaging": "ema"},
    "stopped early": {**SMALL, "validation": 0.2, "early_stopping": "validation_loss"},
    "weighted": {**SMALL, "split": "dirichlet", "weights": "records", "public_sizes": True},
    "weights given": {**SMALL, "private": False, "weights": "0.4,0.3,0.2,0.1"},
    "records": {**SMALL, "unit": "record", "trust": "local", "record_clip": "auto", "record_clip_by": "layer"},
    "own": {**SMALL, "method": "mine.py:Mine", "lr": 0.1, "tau": 0.25},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def identity(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoint/latest.json").read_text())["identity"]
    return found


def test_values_that_are_offered_are_those_that_there_are() -> None:
    assert SETTINGS["model"].values == models.MODELS
    assert SETTINGS["method"].values == tuple(CATALOGUE)
    assert SETTINGS["engine"].values == ENGINES
    assert set(SETTINGS["split"].choices) == set(data.SCHEMES)
    assert set(SETTINGS["precision"].choices) == set(PRECISIONS)
    assert set(SETTINGS["memory_home"].choices) == set(HOMES)
    assert {"digits", "a9a"} <= set(SETTINGS["data"].all_values())
    assert SETTINGS["server_norm"].all_values() == ("by-tensor", "in-place", "true", "false")
    fields = dataclasses.asdict(n.Privacy(epsilon=1.0, trust="local"))
    shared = build.PRIVATE_SETTINGS
    assert set(shared) - {"public_sizes", "witness"} == fields.keys() - {"sampling"}
    assert set(methods.SETTINGS) == {key for entry in CATALOGUE.values() for key in entry.settings}


def test_every_setting_is_described() -> None:
    assert {one.group for one in SETTINGS.values()} == set(GROUPS)
    for one in SETTINGS.values():
        assert one.description[0].isupper()
        assert not one.description.endswith(".")
        assert "{" not in one.description
        assert set(one.follows) <= SETTINGS.keys()
        assert one.unset or one.default is not None or one.name in ("column", "replay", "record_clip", "epochs")


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ({}, "73cf7f0f"),
        ({"method": "clip21", "lr": 0.1, "private": False}, "f8b8a185"),
        ({"trust": "local"}, "586bd212"),
        ({"trust": "local", "memory": "noisy"}, "73e14a40"),
        ({"unit": "record", "method": "normec-momentum"}, "fdad76bb"),
        ({"unit": "record", "method": "normec", "trust": "local", "memory": "clean", "record_clip": 1.0}, "7650187c"),
    ],
)
def test_runs_keep_their_names(settings: dict[str, Any], digest: str) -> None:
    """Folders of sweeps and committed records are known by these digests, which therefore must not change."""
    assert make(settings).digest() == digest


@pytest.mark.parametrize("unit", ["client", "record"])
@pytest.mark.parametrize("trust", ["local", "secure-sum", "central"])
def test_memories_take_what_the_statement_takes(unit: Any, trust: Any) -> None:
    """The default is the statement's own; a run that it changes has another name than with clean memories."""
    asked = make({"unit": unit, "trust": trust})
    assert resolved(asked).memory == n.Privacy(epsilon=1, unit=unit, trust=trust).memory
    clean = make({"unit": unit, "trust": trust, "memory": "clean"})
    assert (asked.digest() == clean.digest()) is ((unit, trust) != ("record", "local"))


@pytest.mark.parametrize(
    ("weights", "why"),
    [("records", "public_sizes"), ("0.5,much", "equal, records, or numbers"), ("0.5,0.5", "each of the 4 clients")],
)
def test_weights_that_cannot_be_used_are_refused(here: Path, weights: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        runs.execute(make({**SMALL, "weights": weights}), here / "run")
    assert not (here / "run/config.toml").exists()


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("name", RUNS)
def test_a_folder_holds_every_value_that_was_used(here: Path, name: str) -> None:
    """Held against the checkpoint's identity, which training makes from its plan."""
    asked = make(RUNS[name])
    summary = runs.execute(asked, here / "run").summary
    held = tomllib.loads((here / "run/config.toml").read_text())
    assert summary["config"] == held
    known = identity(here / "run")
    assert held["lr"] == known["lr"] or (name == "schedule" and known["lr"].startswith("a schedule"))
    for key in ("log_every", "evaluate_every", "full_gradient", "warmup", "precision", "batch_size", "clients"):
        assert held.get(key) == known[key], key
    assert held.get("rounds", known["rounds"]) == known["rounds"]
    assert ("rounds" in held) != ("epochs" in held)
    assert (held["device"], held["engine"]) == ("cpu", summary["engine"])
    assert held["memory_dtype"] == RUNS[name].get("memory_dtype", "float32")
    assert held.get("epsilon") == ((known["privacy"] or {}).get("epsilon"))
    assert held["diagnostics"] is (not held["private"])
    missing = {key for key in RunConfig.model_fields if key not in held}
    assert missing <= {
        *(
            "data_dir",
            "records",
            "test_records",
            "scaling",
            "target",
            "data_schema",
            *("early_stopping", "patience", "min_delta"),
            "honest",
            "column",
            "replay",
            "record_clip",
            "sigma",
            "epsilon",
            "witness",
            "record_clip_by",
            *("noise_schedule", "noise_bands", "groups"),
        ),
        *("rounds", "epochs", "batch_size", "batch_rate", "sample_rate", "sample_count", "seed", "method_settings"),
        *("server_optimizer", "server_optimizer_settings", "lr_schedule", "lr_schedule_settings"),
        *("averaging", "averaging_decay", "averaging_start"),
        *methods.SETTINGS,
        *methods.LOCAL,
    }
    local = {key: held.get(key) for key in methods.LOCAL}
    assert known.get("local", dict.fromkeys(methods.LOCAL)) == local
    assert held.get("server_optimizer_settings") == {
        "optimizer": "betas=[0.9, 0.99],eps=1e-06,weight_decay=0",
        "schedule": "dampening=0,momentum=0.9,nesterov=true,weight_decay=0",
    }.get(name)
    assert held.get("lr_schedule_settings") == {"schedule": "every=1,factor=0.1,ramp_up=2"}.get(name)
    averages = {"optimizer": (None, 3), "epochs, averaged": (0.99, 0)}
    assert (held.get("averaging_decay"), held.get("averaging_start")) == averages.get(name, (None, None))
    if name == "own":
        assert held["method_settings"] == 'name_of_it="mine",tau=0.25'
        assert '"tau": 0.25' in known["method"]
    else:
        assert set(methods.SETTINGS) & held.keys() == CATALOGUE[held["method"]].settings.keys()
        spec = json.dumps(methods.build(asked, summary["dimension"]).spec())
        assert all(json.dumps(held[key]) in spec for key in set(methods.SETTINGS) & held.keys() - {"compressor"})


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", RUNS)
def test_a_config_file_repeats_its_run_and_goes_on_in_its_folder(here: Path, name: str) -> None:
    asked = make(RUNS[name])
    first = runs.execute(asked, here / "run")
    stored = load(here / "run/config.toml")
    assert resolved(stored) == stored
    before = (here / "run/summary.json").read_bytes()
    assert runs.execute(stored, here / "run").summary == json.loads(before)  # the folder is its own, and finished
    again = runs.execute(stored, here / "again")
    secret = identity(here / "run").get("noise_secret")
    assert {**identity(here / "again"), "noise_secret": secret} == identity(here / "run")
    if secret is None:
        assert again.history.rows == first.history.rows
    assert again.summary["config"] == first.summary["config"]


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", RUNS)
def test_a_folder_of_an_older_version_is_recognised(here: Path, name: str) -> None:
    """Its config.toml holds what was given, and the defaults that depend on nothing."""
    asked = make(RUNS[name])
    runs.execute(asked, here / "run")
    (here / "run/config.toml").write_text(to_toml(asked.record()))
    known = runs.existing(here / "run", asked)
    assert known is not None
    assert known.summary["status"] == "finished"
    (here / "run/summary.json").unlink()
    assert runs.execute(asked, here / "run").summary["status"] == "finished"  # by its checkpoint
    with pytest.raises(UsageError, match=r"seed is .* there, 4 here"):
        runs.existing(here / "run", make({**RUNS[name], "seed": 4}))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("private", {"beta": 0.2}, "beta is 0.011 there, 0.2 here"),
        ("private", {"epsilon": 4.0}, "epsilon is 8.0 there, 4.0 here"),
        ("private", {"log_every": 2}, "log_every is 1 there, 2 here"),
        ("k of the model", {"k": 7}, "k is 65 there, 7 here"),
        ("column", {"clients": 5}, "clients is 17 there, 5 here"),
        ("epochs", {"evaluate_every": 5}, "evaluate_every is 1 there, 5 here"),
        ("own", {"tau": 0.3}, "method_settings"),
        ("theory", {"lr": 0.5}, "lr is 0.0"),
    ],
)
def test_another_configuration_is_refused(here: Path, name: str, change: dict[str, Any], word: str) -> None:
    runs.execute(make(RUNS[name]), here / "run")
    with pytest.raises(UsageError, match=word):
        runs.execute(make({**RUNS[name], **change}), here / "run")


def test_a_default_that_is_given_is_the_same_run(here: Path) -> None:
    first = runs.execute(make(RUNS["private"]), here / "run")
    same = {**RUNS["private"], "beta": 0.011, "epsilon": 8.0, "log_every": 1, "memory_dtype": "float32"}
    assert runs.execute(make(same), here / "run").summary == json.loads(json.dumps(first.summary))


def test_the_theory_must_give_the_step_size_that_is_stored(here: Path) -> None:
    """A finished run with a number for a step size is not that of the theory unless the numbers agree."""
    runs.execute(make({**RUNS["theory"], "lr": 0.5}), here / "run")
    with pytest.raises(UsageError, match="lr"):
        runs.execute(make(RUNS["theory"]), here / "run")


def test_settings_that_follow_from_others_do_not_tell_runs_apart() -> None:
    used = [resolved(make({"method": name, "rounds": 40})).model_dump() for name in ("normec", "clip21")]
    assert varied(used) == ["method", "lr"]
    longer = [resolved(make({"rounds": rounds})).model_dump() for rounds in (40, 80)]
    assert varied(longer) == ["rounds"]  # evaluate_every differs too
    other = [resolved(make({"rounds": 40, "evaluate_every": every})).model_dump() for every in (1, 2)]
    assert varied(other) == ["evaluate_every"]
    assert varied([resolved(make({"beta": beta})).model_dump() for beta in (0.1, 0.2)]) == ["beta"]


def test_the_page_of_all_settings_is_current() -> None:
    """Otherwise: python -m normec.experiments.settings_page > docs/settings.md"""
    committed = Path(__file__).parents[2] / "docs" / "settings.md"
    assert committed.read_text(encoding="utf-8") == settings_page.page()


def from_python(out: Path, **how: Any) -> None:
    starts = [torch.ones(3), torch.zeros(3)]
    problem = n.Problem.from_functions([lambda x, a=a: (x - a).square().sum() for a in starts], torch.zeros(3))
    n.train(problem, n.NormEC(alpha=0.1, beta=0.2), **{"lr": 0.1, "rounds": 5, "out": out, **how})


def test_a_run_from_python_holds_every_value_that_was_used(tmp_path: Path) -> None:
    from_python(tmp_path / "own")
    held = tomllib.loads((tmp_path / "own/config.toml").read_text())
    assert held == {
        "started_by": "normec.train",
        "clients": 2,
        "parameters": 3,
        "method": "normec",
        "private": False,
        "lr": 0.1,
        "rounds": 5,
        "warmup": 0,
        "weights": "equal",
        "initial_memory": "zero",
        "seed": 0,
        "log_every": 1,
        "evaluate_every": 1,
        "full_gradient": False,
        "diagnostics": True,
        "profile": False,
        "device": "cpu",
        "dtype": "float32",
        "engine": "loop",
        "precision": "tf32",
        **{"memory_dtype": "float32", "memory_home": "device", "checkpoint_seconds": 30.0},  # noqa: PIE800
        "method_settings": {"alpha": 0.1, "beta": 0.2, "server_norm": True, "decay": 0.0},
    }


def test_a_private_run_from_python_states_its_privacy_and_no_secret(tmp_path: Path) -> None:
    from_python(
        tmp_path / "own",
        privacy=n.Privacy(epsilon=2.0, trust="secure-sum"),
        lr=lambda k: 0.1 / (k + 1),
        participation=n.FixedSize(1),
        memory=n.Memory(initial=torch.zeros(3)),
    )
    held = tomllib.loads((tmp_path / "own/config.toml").read_text())
    assert (held["private"], held["epsilon"], held["delta"], held["trust"]) == (True, 2.0, 1e-5, "secure-sum")
    assert (held["noise"], held["sample_count"], held["initial_memory"]) == ("seeded", 1, "given")
    assert held["lr"].startswith("a schedule")
    assert "seed" not in held


def test_runs_from_python_are_listed_and_shown_and_left_alone(tmp_path: Path) -> None:
    from_python(tmp_path / "own")
    with pytest.raises(UsageError, match="started from Python"):
        runs.execute(make(SMALL), tmp_path / "own")
    runs.execute(make(SMALL), tmp_path / "other")
    found = results.collect([tmp_path])
    assert found.notes == []
    rows = {Path(row["folder"]).name: row for row in results.each(found.records)}
    assert (rows["own"]["status"], rows["own"]["round"], rows["own"]["method"]) == ("finished", 5, "normec")
    assert results.over_seeds(found.records)
    text = page.write(tmp_path / "own").read_text()
    assert "started from Python" in text
    assert "left out" not in text


def test_a_run_from_python_that_is_begun_again_has_its_own_settings(tmp_path: Path) -> None:
    """A process that dies after config.toml and before its first checkpoint has begun no run."""
    from_python(tmp_path / "own")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.toml").write_bytes((tmp_path / "own/config.toml").read_bytes())
    from_python(tmp_path / "begun", lr=0.3)
    assert tomllib.loads((tmp_path / "begun/config.toml").read_text())["lr"] == 0.3
    with pytest.raises(UsageError, match="lr"):
        from_python(tmp_path / "begun", lr=0.4)
    assert tomllib.loads((tmp_path / "begun/config.toml").read_text())["lr"] == 0.3


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("private", [False, True])
def test_the_same_command_with_more_rounds_continues_a_finished_run(tmp_path: Path, private: bool) -> None:
    how = {**SMALL, "rounds": 4, "seed": 0, "private": private, **({"sigma": 0.5} if private else {})}
    runs.execute(make(how), tmp_path / "run")
    longer = runs.execute(make({**how, "rounds": 9}), tmp_path / "run")
    straight = runs.execute(make({**how, "rounds": 9}), tmp_path / "straight")
    assert (longer.summary["status"], longer.summary["round"]) == ("finished", 9)
    if private:
        assert longer.summary["privacy"]["epsilon"] == pytest.approx(straight.summary["privacy"]["epsilon"], rel=1e-9)
        assert longer.summary["privacy"]["releases"] == 9
    else:
        assert longer.summary["final"] == straight.summary["final"]
    again = runs.execute(make({**how, "rounds": 9}), tmp_path / "run")
    assert again.summary == json.loads(json.dumps(longer.summary))
    for other in ({"rounds": 4}, {"rounds": 12, "lr": 0.3}, {"rounds": 9, "log_every": 3}):
        with pytest.raises(UsageError):
            runs.execute(make({**how, **other}), tmp_path / "run")


def test_a_command_must_accept_the_larger_epsilon_of_more_rounds(tmp_path: Path) -> None:
    how = {**SMALL, "rounds": 4, "epsilon": 3.0}
    runs.execute(make(how), tmp_path / "run")
    with pytest.raises(UsageError, match="to accept that, ask for epsilon = "):
        runs.execute(make({**how, "rounds": 9}), tmp_path / "run")
    longer = runs.execute(make({**how, "rounds": 9, "epsilon": 6.0}), tmp_path / "run")
    assert 3.0 < longer.summary["privacy"]["epsilon"] < 6.0
    assert longer.summary["privacy"]["releases"] == 9
    again = runs.execute(make({**how, "rounds": 9, "epsilon": 6.0}), tmp_path / "run")
    assert again.summary == json.loads(json.dumps(longer.summary))
