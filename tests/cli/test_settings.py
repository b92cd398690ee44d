"""Flags, help and completion, which follow from the declaration of the settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import typer
from click.shell_completion import ShellComplete

from normec.cli.app import app, run
from normec.settings.config import SETTINGS

from ..support.waiting import LIMIT

# What users script against. A flag may be added here, but none may go.
SHARED = (
    *("--data", "--data-dir", "--split", "--model", "--clients", "--alpha", "--beta", "--tau", "--private"),
    *("--no-privacy", "--diagnostics", "--no-diagnostics", "--epsilon", "--delta", "--unit", "--relation", "--trust"),
    *("--lr", "--rounds", "--epochs", "--batch-size", "--seed", "--device", "--engine", "--precision"),
    *("--set", "--out", "--json", "--quiet"),
)
FLAGS = {
    "train": {
        *SHARED,
        *("--method", "--server-norm", "--no-server-norm", "--track", "--processes", "--timeout", "--max-restarts"),
        "--settings",
    },
    "compare": {*SHARED, "--config", "--by"},
    "suggest": {
        *("--set", "--data", "--data-dir", "--target", "--data-schema", "--split", "--model", "--clients", "--method"),
        *("--rounds", "--private", "--no-privacy", "--epsilon", "--delta", "--unit", "--relation", "--trust", "--seed"),
        "--json",
    },
    "theory plan": {
        *("--set", "--data", "--data-dir", "--split", "--model", "--clients", "--alpha", "--beta", "--rounds"),
        *("--private", "--no-privacy", "--epsilon", "--delta", "--relation", "--trust", "--seed", "--json"),
    },
    "federation local": {
        *("--app", "--parties", "--set", "--rounds", "--seed", "--private", "--no-privacy", "--policy"),
        *("--flower-nodes", "--out", "--json", "--quiet"),
        *("--method", "--alpha", "--beta", "--tau", "--server-norm", "--no-server-norm", "--local-steps", "--local-lr"),
        *("--epsilon", "--delta", "--unit", "--relation", "--trust", "--noise-schedule", "--lr", "--batch-size"),
    },
}


def offered(*words: str) -> list[str]:
    """What the shell offers for the last word."""
    command = typer.main.get_command(app)
    found = ShellComplete(command, {}, "normec", "_NORMEC_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


@pytest.mark.parametrize("command", FLAGS)
def test_flags_stay(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    assert FLAGS[command] <= set(re.findall(r"--[\w-]+", capsys.readouterr().out))


def test_a_federation_has_no_flag_for_a_setting_that_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["federation", "local", "--help"]) == 0
    shown = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    others = {word for one in SETTINGS.values() if not one.federated for word in one.flag_name.split("/") if word}
    assert shown & others == {"--data"}  # the command's own: the example


def test_the_help_shows_flags_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    run(["train", "--help"])
    text = capsys.readouterr().out
    titles = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert titles == [
        *("Arguments", "Data", "Model", "Method", "Privacy", "Training", "Logging", "Compute", "Other"),
    ]
    words = " ".join(text.split())
    batch_size = SETTINGS["batch_size"]
    assert f"--batch-size INTEGER {batch_size.description} (default: {batch_size.unset})." in words
    assert words.index("Privacy:") < words.index("--epsilon") < words.index("Training:")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("words", "among"),
    [
        (("train", "--method", ""), {"normec", "clip21", "gd"}),
        (("train", "--method", "dpsgd"), {"dpsgd-norm", "dpsgd-clip"}),
        (("train", "--model", "res"), {"resnet20", "resnet20-gn"}),
        (("compare", "--data", "digi"), {"digits"}),
        (("compare", "normec", "clip"), {"clip21", "clip21-sgd2m"}),
        (("compare", "clip21:"), set()),
        (("train", "--trust", ""), {"local", "secure-sum", "central"}),
        (("train", "--lr", ""), {"theory"}),
        (("train", "--set", "memory_d"), {"memory_dtype="}),
        (("train", "--set", "memory_dtype="), {"memory_dtype=bfloat16"}),
        (("train", "--set", "augment="), {"augment=true", "augment=false"}),
        (("train", "--batch"), {"--batch-size"}),
    ],
)
def test_the_shell_offers_values(words: tuple[str, ...], among: set[str]) -> None:
    found = offered(*words)
    assert among <= set(found)
    assert all(value.startswith(words[-1]) for value in found)


def test_settings_are_listed_with_the_values_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--settings", "--method", "clip21", "--no-privacy", "--rounds", "100", "--set", "decay=0.1"]
    assert run([*words, "--json"]) == 0
    used = json.loads(capsys.readouterr().out)
    assert used.keys() == SETTINGS.keys()
    assert (used["tau"], used["decay"], used["lr"], used["alpha"], used["epsilon"]) == (0.1, 0.1, 1.0, None, None)
    assert (used["rounds"], used["evaluate_every"], used["clients"], used["memory_dtype"]) == (100, 5, 100, "float32")
    assert used["device"] in ("cpu", "cuda")
    assert run(words) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if " = " in line}
    assert lines.keys() == SETTINGS.keys()
    assert re.search(r"tau = 0\.1 +Clipping threshold .* \(default: the method's own\)\.", lines["tau"])
    assert "batch_size = (not set)" in lines["batch_size"]


def test_a_mistake_in_a_flag_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--rounds", "ten"]) == 2
    assert run(["train", "--split", "lable"]) == 2
    assert run(["train", "--roundz", "3"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "'ten' is not a valid integer" in first
    assert "split: input should be 'iid'" in second
    assert "there is no option --roundz, did you mean '--rounds'?" in third


def test_completion_of_flags_needs_no_torch() -> None:
    code = """
import sys
from click.shell_completion import ShellComplete
import typer
from normec.cli.app import app
command = typer.main.get_command(app)
found = ShellComplete(command, {}, "normec", "_NORMEC_COMPLETE").get_completions(["train", "--model"], "mlp")
assert [item.value for item in found] == ["mlp"], found
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("theory plan", "guarantee (default: false, unless epsilon or a file is given)."),
        ("federation local", "Privacy target ε (default: that of the app or example)."),
        ("train", "Privacy target ε (default: 8; with sigma, none)."),
    ],
)
def test_the_help_names_the_default_of_the_command(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
