"""What is imported when: the help needs no torch, the library needs torch and numpy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from normec.__main__ import main
from normec.cli.app import app

from ..support.forks import ENVIRONMENT
from ..support.waiting import LIMIT
from .command import normec, start

HELP = """
import sys
from normec.cli.app import run
code = run(["--help"])
heavy = {"torch", "numpy", "sklearn", "pydantic", "matplotlib", "safetensors"} & set(sys.modules)
print("HEAVY", sorted(heavy), code)
"""

CLOSED_FORMS = """
import sys, tempfile
from normec.cli.app import run
for words in (
    ["noise", "--epsilon", "8", "--releases", "300", "--trust", "secure-sum", "--clients", "100"],
    ["epsilon", "--sigma", "10", "--releases", "300"],
):
    assert run(["privacy", *words]) == 0
with tempfile.TemporaryDirectory() as folder:
    assert run(["federation", "init", folder + "/app"]) == 0
import normec.privacy
print("TORCH", "torch" in sys.modules)
normec.privacy.SeededNoise, normec.privacy.SumGrid
print("TORCH", "torch" in sys.modules)
"""

# Nothing but torch, numpy and what they bring: every other distribution is hidden from the import system.
ALONE = """
import importlib.metadata, re, sys
def family(name, seen):
    name = name.lower().replace("_", "-")
    if name in seen: return seen
    seen.add(name)
    try: needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError: return seen
    for line in needs:
        if "extra ==" not in line:
            family(re.match(r"[\\w.-]+", line).group(), seen)
    return seen
allowed = family("torch", set()) | family("numpy", set()) | {"normec"}
owners = importlib.metadata.packages_distributions()
class Hide:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        held = {owner.lower().replace("_", "-") for owner in owners.get(top, [])}
        if held and not held & allowed:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)
sys.meta_path.insert(0, Hide())
try:
    import safetensors
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the test hides nothing")
import torch, normec
for name in normec.__all__:
    getattr(normec, name)
problem = normec.Problem(
    torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy,
    [torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(2)])
run = normec.train(problem, normec.NormEC(0.01, 0.1), lr=0.1, rounds=3, batch_size=4)
print("TRAINED", len(run.history))
"""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_help_imports_nothing_heavy() -> None:
    assert "HEAVY [] 0" in python(HELP)


@pytest.mark.slow
def test_closed_forms_of_privacy_and_a_new_app_need_no_torch() -> None:
    printed = python(CLOSED_FORMS)
    assert "epsilon = 8 at delta" in printed
    assert printed.split("TORCH")[1:] == [" False\n", " True\n"]


def test_ctrl_c_while_the_commands_are_imported_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "normec.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "normec.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted; the same command continues where it stopped\n"


def test_a_superlink_needs_no_torch() -> None:
    assert python("import sys, normec.federation.flower.programs\nprint('torch' in sys.modules)") == "False\n"


@pytest.mark.slow
def test_the_library_trains_with_torch_and_numpy_alone() -> None:
    assert "TRAINED 4" in python(ALONE)


@pytest.mark.slow
def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    printed, _ = start("train", "--rounds", "4", "--json", cwd=tmp_path).communicate(timeout=LIMIT)
    found = json.loads(printed)
    assert found["status"] == "finished"
    assert found["final"]["round"] == 4
    assert (tmp_path / found["folder"] / "config.toml").exists()


@pytest.mark.slow
def test_a_finished_run_is_shown_not_run_again(tmp_path: Path) -> None:
    first = json.loads(normec("train", "--rounds", "4", "--json", cwd=tmp_path).stdout)
    second = json.loads(normec("train", "--rounds", "4", "--json", cwd=tmp_path).stdout)
    assert first == second


@pytest.mark.slow
def test_a_profiled_run_names_its_trace_and_a_finished_one_says_that_nothing_was_profiled(tmp_path: Path) -> None:
    first = normec("train", "--rounds", "4", "--profile", "--out", "a", cwd=tmp_path)
    assert str(Path("a/trace.json.gz")) in first.stdout
    assert (tmp_path / "a/profile.json").exists()
    normec("train", "--rounds", "4", "--out", "b", cwd=tmp_path)
    said = normec("train", "--rounds", "4", "--profile", "--out", "b", cwd=tmp_path).stderr
    assert "finished already, and nothing was trained or profiled" in said
    assert "nothing was trained;" in normec("train", "--rounds", "4", "--profile", "--out", "a", cwd=tmp_path).stderr


@pytest.mark.slow
def test_a_config_file_is_read_back_as_written(tmp_path: Path) -> None:
    first = json.loads(
        normec("train", "--seed", "0", "--rounds", "4", "--beta", "1", "--json", "--out", "a", cwd=tmp_path).stdout
    )
    again = json.loads(normec("train", "a/config.toml", "--json", "--out", "b", cwd=tmp_path).stdout)
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert first["config"] == again["config"]


@pytest.mark.slow
def test_compare_without_methods_says_what_it_runs(tmp_path: Path) -> None:
    words = ["--no-privacy", "--set", "rounds=1", "--set", "clients=3", "--out", "all"]
    done = normec("compare", *words, cwd=tmp_path)
    assert done.returncode == 0
    said = done.stderr.splitlines()[0]
    assert said.startswith("comparing ")
    assert "non-private methods on digits with softmax: normec, clip21, ef21" in said
    assert (tmp_path / "all/report.html").exists()


def test_the_list_of_commands_cuts_no_summary() -> None:
    groups = [typer.main.get_command(app)]
    while groups:
        group = groups.pop()
        assert isinstance(group, typer.core.TyperGroup)
        room = 80 - 2 - max(map(len, group.commands)) - 6  # of a terminal of 80 columns, beside the longest name
        for name, command in group.commands.items():
            assert not command.get_short_help_str(room).endswith("..."), f"{group.name} {name}"
        groups += [one for one in group.commands.values() if isinstance(one, typer.core.TyperGroup)]
