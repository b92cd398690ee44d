"""The page of the studies: it shows all records, counts leads, and marks what was not run."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from matplotlib import image

from benchmarks.privacy import leads, page, picture, records
from benchmarks.privacy.records import Record
from benchmarks.privacy.search_space import SEARCH_SPACES, range_ends
from benchmarks.privacy.studies import STUDIES, Cell, Condition

COMMITTED = Path(__file__).resolve().parents[3] / "benchmarks" / "privacy"


def test_the_committed_pages_are_those_of_the_committed_records(tmp_path: Path) -> None:
    shutil.copytree(COMMITTED / page.RECORDS, tmp_path / page.RECORDS)
    made = page.write(tmp_path, pictures=False)
    assert len(made) == 3
    for path in made:
        place = path.relative_to(tmp_path)
        hint = f"{place} is not what `python -m benchmarks.privacy pages` makes of the records"
        assert path.read_text() == (COMMITTED / place).read_text(), hint


def made(study: str, method: str, epsilon: float, split: str, value: float, spread: float = 0.01) -> Record:
    """A record that is made up."""
    error_feedback = SEARCH_SPACES[method].error_feedback
    diagnostics = {"gradient": 0.5, "estimate": 1.0, "noise": 2.0, "cosine": 0.1} | (
        {"memory_error": 0.25} if error_feedback else {}
    )
    budget = STUDIES[study].budget
    long = [one for one in budget.settings(method) if one["rounds"] == sorted(budget.rounds)[-2]]
    chosen = next((one for one in long if not range_ends(budget.search_space(method), one, budget.trials)), long[0])
    kept = STUDIES[study].expected(Cell(study, method, epsilon, split))
    ran = {"seconds": 90.0, "device": "CPU", "versions": {"torch": "2"}}
    tested = {"accuracies": [value] * len(STUDIES[study].budget.test_seeds), "accuracy": value, "spread": spread}
    tried = [value if one == chosen else value / 2 for one in budget.settings(method)]
    return {**kept, "chosen": chosen, "tried": tried, **tested, **diagnostics, **ran}


def test_the_page_says_who_wins_and_what_was_not_run(tmp_path: Path) -> None:
    values = dict(zip(SEARCH_SPACES, (0.80, 0.81, 0.71, 0.75, 0.60, 0.72), strict=True))
    held = [made("a9a-100", name, 8.0, "iid", value) for name, value in values.items()]
    held += [made("a9a-100", "NormEC", 4.0, "iid", 0.9)]  # the only method in its condition, so there is no winner
    records.write(STUDIES["a9a-100"], tmp_path / page.RECORDS, held)
    page.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| a9a-100, iid | NormEC, no SN (+1.0) |" in text
    assert "| NormEC, no SN | not run | not run | not run | **81.0 ± 1.0** |" in text
    assert "| NormEC | not run | not run | 90.0 ± 1.0 | 80.0 ± 1.0 |" in text
    assert "| a9a-100, iid | **+9.0** / -1.0 |" in text
    for kind in ("a9a-100", "split iid", "noise 0.2 and more"):
        assert f"| {kind} | 1 | +9.0; ahead 1 (0.1), behind 0 (0.0) | -1.0; ahead 0 (0.0), behind 0 (0.1) |" in text
    assert "step size 0 of 7 (1); β or τ 0 of 6 (1); longest run 0 of 7 (2)." in text
    assert "| NormEC | iid | 4 | 0.5 | 0.1 |" in text
    assert "| a9a-100 | 0.2 |" in text  # 2 / √100
    assert "Computed: 7 cells in 10 minutes on CPU, torch 2." in text
    assert text.count("Not run.") == len(STUDIES) - 1
    assert len((tmp_path / "records" / "accuracies.csv").read_text().splitlines()) == 8


def test_what_a_study_does_not_ask_for_is_no_gap(tmp_path: Path) -> None:
    longer = "cifar10-10000-longer"  # of ε = 2 and 8 alone
    for study, epsilon in ((longer, 8.0), ("a9a-100", 4.0)):
        held = [made(study, name, epsilon, "iid", 0.7) for name in SEARCH_SPACES]
        records.write(STUDIES[study], tmp_path / page.RECORDS, held)
    page.write(tmp_path, pictures=False)
    text = (tmp_path / "README.md").read_text()
    assert f"| {longer}, iid | – | NormEC (+0.0) |" in text
    assert "| a9a-100, iid | NormEC (+0.0) | not run |" in text


def test_the_turns_of_a_study_are_shown(tmp_path: Path) -> None:
    turns = dict(zip(SEARCH_SPACES, (0.9, 0.7, -0.2, 0.5, -0.9, -0.8), strict=True))
    held = [made("a9a-100", name, 8.0, "iid", 0.7) | {"turn": turn} for name, turn in turns.items()]
    records.write(STUDIES["a9a-100"], tmp_path / page.RECORDS, held)
    records.write(
        STUDIES["w8a-100"], tmp_path / page.RECORDS, [made("w8a-100", name, 8.0, "iid", 0.7) for name in SEARCH_SPACES]
    )
    page.write(tmp_path, pictures=False)
    text = (tmp_path / "README.md").read_text()
    assert "| a9a-100, iid | 0.9 | 0.7 | -0.2 | 0.5 | -0.9 | -0.8 |" in text
    assert text.count("| w8a-100, iid |") == 2  # who wins, and by how much; no turns, for it has none


def test_every_setting_tried_has_a_line(tmp_path: Path) -> None:
    held = [made("a9a-100", name, 8.0, "iid", 0.8) for name in ("NormEC, forgetting", "DP-SGD, clip")]
    records.write(STUDIES["a9a-100"], tmp_path / page.RECORDS, held)
    page.write(tmp_path, pictures=False)
    with (tmp_path / "records" / "tried.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(one["tried"]) for one in held)
    for record in held:
        (best,) = [one for one in rows if one["method"] == record["method"] and one["chosen"] == "1"]
        assert float(best["validation"]) == 0.8
        assert {name: float(best[name]) for name in ("lr", "rounds")} == {
            name: record["chosen"][name] for name in ("lr", "rounds")
        }
        assert best["tau" if "tau" in record["chosen"] else "beta"]
        assert best["split"] == "iid"


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ((11, 11, 11, 11), "4 of 24 (4; DP-SGD, clip 4 highest)"),
        ((0, 0, 11, 5), "3 of 24 (4; DP-SGD, clip 2 lowest and 1 highest)"),
        ((0, 5, 11, 5), "2 of 24 (4)"),  # half of them
    ],
)
def test_choices_at_the_end_of_a_range_are_counted_by_method(
    ranks: tuple[int, ...], shown: str, tmp_path: Path
) -> None:
    study = STUDIES["a9a-100"]
    held = [made("a9a-100", name, epsilon, "iid", 0.8) for name in SEARCH_SPACES for epsilon in study.epsilons]
    by_step = sorted(study.budget.settings("DP-SGD, clip"), key=lambda one: float(one["lr"]))
    for record, rank in zip(held[-4:], ranks, strict=True):
        record["chosen"] = by_step[rank]
    records.write(study, tmp_path / page.RECORDS, held)
    page.write(tmp_path, pictures=False)
    assert f"step size {shown}; β or τ" in (tmp_path / "README.md").read_text()


def test_leads_are_counted_by_what_conditions_share() -> None:
    """Against counts made by hand."""
    conditions = {}
    for epsilon, split, noise, lead in ((8.0, "iid", 0.1, 0.05), (4.0, "iid", 1.0, -0.03), (8.0, "label", 1.0, 0.001)):
        values = dict.fromkeys(SEARCH_SPACES, 0.5) | {"NormEC": 0.7 + lead, "DP-SGD, clip": 0.7}
        own = {name: made("w8a-100", name, epsilon, split, value) for name, value in values.items()}
        own["DP-SGD, norm"]["noise"] = noise
        conditions[Condition("w8a-100", epsilon, split)] = own
    text = "\n".join(leads.lines(conditions))
    assert "| w8a-100, iid | **-3.0** / **-20.0** | **+5.0** / **-20.0** |" in text
    assert "| w8a-100, label | not run | +0.1 / **-20.0** |" in text
    for kind, ahead, behind, middle in (
        ("w8a-100 | 3", "1 (0.2)", "1 (0.1)", "+0.1"),
        ("split iid | 2", "1 (0.1)", "1 (0.1)", "+1.0"),
        ("split label | 1", "0 (0.1)", "0 (0.0)", "+0.1"),
        ("noise from 0 to 0.05 | 1", "1 (0.1)", "0 (0.0)", "+5.0"),
        ("noise from 0.05 to 0.2 | 2", "0 (0.1)", "1 (0.1)", "-1.5"),
    ):
        assert f"| {kind} | {middle}; ahead {ahead}, behind {behind} | -20.0; ahead 0" in text


def test_a_condition_run_again_with_a_larger_budget_counts_once() -> None:
    again = next(study for study in STUDIES.values() if study.repeats)
    first = STUDIES[again.repeats]
    assert {**again.settings} == {**first.settings}
    assert again.budget.trials > first.budget.trials
    conditions = {
        Condition(name, epsilon, "iid"): {one: made(name, one, epsilon, "iid", 0.5) for one in SEARCH_SPACES}
        for name, epsilon in ((first.name, 8.0), (first.name, 4.0), (again.name, 8.0))
    }
    text = "\n".join(leads.lines(conditions))
    assert f"| {first.name}, iid | +0.0 / +0.0 | +0.0 / +0.0 |" in text  # shown, both of them
    assert f"| {first.name} | 1 |" in text
    assert f"| {again.name} | 1 |" in text
    assert "| split iid | 2 |" in text


def test_chance_alone_puts_methods_ahead() -> None:
    """Sides of equal size are ahead and behind alike; one method rarely beats the better of two."""
    ahead, behind = leads.chance(1, 3)
    assert behind > 3 * ahead  # the better of two is the harder to beat
    ahead, behind = leads.chance(len(leads.DIRECT), 2, draws=100_000)
    assert ahead == pytest.approx(behind, rel=0.05)
    assert 0.05 < ahead < 0.25


@pytest.mark.slow
def test_the_pictures_have_every_study_that_ran(tmp_path: Path) -> None:
    held = {name: [made("a9a-100", name, 8.0, "iid", 0.7)] for name in SEARCH_SPACES}
    records.write(STUDIES["a9a-100"], tmp_path / page.RECORDS, [one for own in held.values() for one in own])
    assert not page.write(tmp_path / "nothing", pictures=True)[3:]
    assert [path.name for path in page.write(tmp_path)] == [
        "README.md",
        "accuracies.csv",
        "tried.csv",
        "accuracy-1.png",
    ]
    assert (tmp_path / "records" / "accuracy-1.png").stat().st_size > 10_000
    (tmp_path / "records" / "accuracy-2.png").touch()  # of studies that are no more
    page.write(tmp_path)
    assert not (tmp_path / "records" / "accuracy-2.png").exists()
    every = {name: [made(name, "NormEC", 8.0, "iid", 0.7)] for name in STUDIES}
    (tmp_path / "all").mkdir()
    widths = [image.imread(path).shape[1] for path in picture.draw(every, tmp_path / "all")]
    assert widths == [1200] * 3  # three studies each
    assert "](records/accuracy-1.png)" in (tmp_path / "README.md").read_text()
    assert page.write(tmp_path, pictures=False)[3:] == []
    assert "](records/accuracy-1.png)" in (tmp_path / "README.md").read_text()  # it is there, whoever drew it
