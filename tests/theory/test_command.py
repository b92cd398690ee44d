"""normec theory, as a process; and the documentation's examples, as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from normec import theory
from normec.experiments.theory_checks import verify as theory_verify

from ..cli.command import normec

DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "theory.md"
BOUND = (
    *("theory", "bound", "--L", "1", "--L-max", "2", "--R", "0.1", "--alpha", "0.1", "--beta", "0.1"),
    *("--gamma", "0.02", "--rounds", "100", "--F0", "1"),
)


def test_bound_as_stated_and_as_corrected(tmp_path: Path) -> None:
    done = normec(*BOUND, "--sigma", "0.1", "--dim", "400", "--clients", "4", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    base = 1 / (0.02 * 100) + 0.2 + 0.01
    assert found["paper"] == pytest.approx(base + 2 * 0.1 * 0.1 * 10)
    assert found["corrected"] == pytest.approx(base + 2 * 0.1 * 0.1 * 10 * 10)
    assert found["sharper"] < found["corrected"]
    clean = json.loads(normec(*BOUND, "--json", cwd=tmp_path).stdout)
    assert clean["paper"] == clean["corrected"] == pytest.approx(base)


NUMBERS = {"L": 1.0, "L_max": 2.0, "R": 0.1, "alpha": 0.1, "beta": 0.1, "gamma": 0.02, "rounds": 100, "F0": 1.0}
MOMENTUM = (
    *("theory", "bound", "--method", "clip21-sgd2m", "--L", "1", "--L-max", "2", "--beta", "0.8", "--gamma", "0.02"),
    *("--rounds", "100", "--F0", "1", "--tau", "0.5", "--client-momentum", "0.5", "--average-error", "1.5"),
)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("variant", ["drawn", "local", "both"])
def test_bound_of_local_steps_and_drawn_clients(variant: str, tmp_path: Path) -> None:
    path: dict[str, Any] = {"steps": 3, "local_lr": 0.01, "B": 2.0} if variant != "drawn" else {}
    flags = ["--local-steps", "3", "--local-lr", "0.01", "--B", "2"] if path else []
    if variant != "local":
        flags += ["--sample-rate", "0.5"]
    found = json.loads(normec(*BOUND, *flags, "--json", cwd=tmp_path).stdout)
    if variant == "local":
        for form in ("corrected", "sharper", "tracked"):
            assert found[form] == pytest.approx(theory.local_steps(**NUMBERS, **path, form=form))
        assert found["drift"] == pytest.approx(theory.local_drift(L_max=2.0, **path))
        assert found["gamma_max"] == pytest.approx(0.05 / theory.local_smoothness(L_max=2.0, steps=3, local_lr=0.01))
    else:
        expected = theory.sampled_clients(**NUMBERS, **path, sample_rate=0.5)
        assert found == {"sampled clients": pytest.approx(expected)}


def test_bound_of_client_momentum(tmp_path: Path) -> None:
    found = json.loads(normec(*MOMENTUM, "--json", cwd=tmp_path).stdout)
    numbers = {"L": 1.0, "L_max": 2.0, "beta": 0.8, "client_momentum": 0.5}
    bound = theory.clip21_sgd2m(**numbers, F0=1.0, tau=0.5, gamma=0.02, rounds=100, average_error=1.5)
    assert found["clip21-sgd2m"] == pytest.approx(bound)
    assert found["gamma_unclipped"] == pytest.approx(theory.clip21_sgd2m_gamma(**numbers))
    several = ("--rounds", "9000", "--gamma", "0.9", "--tau", "1e-6", "--json")
    endless = json.loads(normec(*MOMENTUM, *several, cwd=tmp_path).stdout)
    assert endless["clip21-sgd2m"] is None, "an infinite bound is none"


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*BOUND, "--sigma", "1"), "--sigma needs --dim and --clients"),
        ((*BOUND, "--tau", "1"), "the bound of normec needs --R and --alpha; it does not take --tau"),
        ((*BOUND, "--local-steps", "3"), "--local-steps and --local-lr go together"),
        ((*BOUND, "--local-steps", "3", "--local-lr", "0", "--B", "1"), "local_lr must be > 0 and finite, got 0"),
        ((*BOUND, "--convex"), "--convex is for --local-steps"),
        ((*BOUND, "--B", "3"), "--B goes with --decay or --local-steps"),
        ((*BOUND, "--decay", "0.1", "--B", "3", "--sample-rate", "0.5"), "no bound covers --decay with"),
        ((*MOMENTUM[:-2], "--sigma", "1"), "--average-error; missing: --average-error"),
        ((*MOMENTUM, "--sigma", "1"), "it does not take --sigma"),
        ((*BOUND, "--method", "clip21"), "method"),
        ((*BOUND[:-6], "--gamma", "9", "--rounds", "100", "--F0", "1"), "gamma must be at most gamma_max"),
        (("theory", "verify", "--scale", "huge"), "unknown scale 'huge'"),
        (("theory", "plan", "--set", "method=clip21"), "plans are for normec"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = normec(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_plan_promises_and_says_when_empty(tmp_path: Path) -> None:
    common = ("theory", "plan", "--data", "digits", "--clients", "20", "--set", "penalty=0.001", "--json")
    clean = json.loads(normec(*common, "--rounds", "500", cwd=tmp_path).stdout)
    assert clean["useful"]
    assert clean["promise"] < clean["trivial"]
    private = json.loads(normec(*common, "--rounds", "50", "--epsilon", "8", cwd=tmp_path).stdout)
    assert not private["useful"]
    assert private["sigma"] > 0
    assert "promise is empty" in private["verdict"]
    shown = [normec(*common[:-1], *more, cwd=tmp_path).stdout for more in (("--rounds", "500"), ("--epsilon", "8"))]
    assert [("settings: " in text, "normec suggest" in text) for text in shown] == [(True, False), (False, True)]


@pytest.mark.slow
def test_verify_writes_a_table_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest scale of all; a set whose file is missing is left out, and said to be."""
    tiny = theory_verify.Scale(3, 3, 2, (10, 30), (5,), ("phishing",), 5)
    monkeypatch.setitem(theory_verify.SCALES, "tiny", tiny)
    found = theory_verify.verify("tiny", tmp_path / "out", str(tmp_path), lambda _: None)
    assert found.holds
    assert not all(check.holds for check in found.checks)  # the paper's two statements
    assert [path.name for path in found.pictures] == ["theory-quadratics.png"]
    assert "Left out: phishing" in (tmp_path / "out" / "table.md").read_text()
    assert json.loads((tmp_path / "out" / "theory.json").read_text())["holds"]


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


def test_the_documentation_has_examples() -> None:
    assert len(snippets()) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(snippets()) if DOCS.exists() else 0))
def test_every_example_of_the_documentation_runs(number: int) -> None:
    exec(compile(snippets()[number], f"docs/concepts/theory.md, example {number + 1}", "exec"), {})
