"""normec theory, as a process; and the documentation's examples, as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

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


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*BOUND, "--sigma", "1"), "--sigma needs --dim and --clients"),
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
