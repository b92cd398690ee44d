"""The page of the studies: it shows what there is, counts leads fairly, and says what was not run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from matplotlib import image

from benchmarks.privacy import leads, page, picture, work
from benchmarks.privacy.contenders import CONTENDERS, outermost
from benchmarks.privacy.studies import STUDIES, Place


def made(study: str, method: str, epsilon: float, split: str, value: float, spread: float = 0.01) -> work.Record:
    remembers = CONTENDERS[method].remembers
    why = {"gradient": 0.5, "estimate": 1.0, "noise": 2.0, "cosine": 0.1} | (
        {"memory_error": 0.25} if remembers else {}
    )
    effort = STUDIES[study].effort
    long = [one for one in effort.settings(method) if one["rounds"] == sorted(effort.rounds)[-2]]
    chosen = next((one for one in long if not outermost(effort.contender(method), one, effort.trials)), long[0])
    kept = STUDIES[study].asked(Place(study, method, epsilon, split))
    ran = {"seconds": 90.0, "device": "CPU", "versions": {"torch": "2"}}
    tested = {"accuracies": [value] * len(STUDIES[study].effort.test_seeds), "accuracy": value, "spread": spread}
    tried = [value if one == chosen else value / 2 for one in effort.settings(method)]
    return {**kept, "chosen": chosen, "tried": tried, **tested, **why, **ran}


def test_the_page_says_who_wins_and_what_was_not_run(tmp_path: Path) -> None:
    values = dict(zip(CONTENDERS, (0.80, 0.81, 0.71, 0.75, 0.60, 0.72), strict=True))
    records = [made("a9a-100", name, 8.0, "iid", value) for name, value in values.items()]
    records += [made("a9a-100", "NormEC", 4.0, "iid", 0.9)]  # the only one of its place: nobody has won there
    work.write(STUDIES["a9a-100"], tmp_path, records)
    page.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| a9a-100, iid | NormEC, no SN (+1.0) |" in text
    assert "| NormEC, no SN | not run | not run | not run | **81.0 ± 1.0** |" in text
    assert "| NormEC | not run | not run | 90.0 ± 1.0 | 80.0 ± 1.0 |" in text
    assert "| a9a-100, iid | **+9.0** / -1.0 |" in text
    for kind in ("a9a-100", "split iid", "noise 0.2 and more"):
        assert f"| {kind} | 1 | +9.0; ahead 1 (0.1), behind 0 (0.0) | -1.0; ahead 0 (0.0), behind 0 (0.1) |" in text
    assert "the step size in 0 of 7 (1); β or τ in 0 of 6 (1); the longest run in 0 of 7 (2)." in text
    assert "| NormEC | iid | 4 | 0.5 | 0.1 |" in text
    assert "| a9a-100 | 0.2 |" in text  # 2 / √100
    assert "Ran: 7 cells in 10 minutes on CPU, torch 2." in text
    assert text.count("Not run.") == len(STUDIES) - 1
    assert len((tmp_path / "honest.csv").read_text().splitlines()) == 8
    assert page.standing(tmp_path) == f"7 of {sum(len(one.cells()) for one in STUDIES.values())}"
    assert "NormEC, no SN (+1.0)" in "\n".join(page.summary(tmp_path, Path("honest")))
    assert "not run yet" in "\n".join(page.summary(tmp_path / "nowhere", Path("honest")))


def test_what_a_study_does_not_ask_for_is_no_gap(tmp_path: Path) -> None:
    longer = "cifar10-10000-longer"  # of ε = 2 and 8 alone
    for study, epsilon in ((longer, 8.0), ("a9a-100", 4.0)):
        records = [made(study, name, epsilon, "iid", 0.7) for name in CONTENDERS]
        work.write(STUDIES[study], tmp_path, records)
    text = "\n".join(page.summary(tmp_path, Path("honest")))
    assert f"| {longer}, iid | – | NormEC (+0.0) |" in text
    assert "| a9a-100, iid | NormEC (+0.0) | not run |" in text


def test_the_turns_of_a_study_are_told(tmp_path: Path) -> None:
    turns = dict(zip(CONTENDERS, (0.9, 0.7, -0.2, 0.5, -0.9, -0.8), strict=True))
    records = [made("a9a-100", name, 8.0, "iid", 0.7) | {"turn": turn} for name, turn in turns.items()]
    work.write(STUDIES["a9a-100"], tmp_path, records)
    work.write(STUDIES["w8a-100"], tmp_path, [made("w8a-100", name, 8.0, "iid", 0.7) for name in CONTENDERS])
    page.write(tmp_path, pictures=False)
    text = (tmp_path / "README.md").read_text()
    assert "| a9a-100, iid | 0.9 | 0.7 | -0.2 | 0.5 | -0.9 | -0.8 |" in text
    assert text.count("| w8a-100, iid |") == 2  # who wins, and by how much; no turns, for it has none


def test_every_setting_tried_has_a_line(tmp_path: Path) -> None:
    records = [made("a9a-100", name, 8.0, "iid", 0.8) for name in ("NormEC, forgetting", "DP-SGD, clip")]
    work.write(STUDIES["a9a-100"], tmp_path, records)
    page.write(tmp_path, pictures=False)
    with (tmp_path / "tried.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(one["tried"]) for one in records)
    for record in records:
        (best,) = [one for one in rows if one["method"] == record["method"] and one["chosen"] == "1"]
        assert float(best["validation"]) == 0.8
        assert {name: float(best[name]) for name in ("lr", "rounds")} == {
            name: record["chosen"][name] for name in ("lr", "rounds")
        }
        assert best["tau" if "tau" in record["chosen"] else "beta"]
        assert best["split"] == "iid"


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ((11, 11, 11, 11), "4 of 24 (4; DP-SGD, clip 4 highest)"),
        ((0, 0, 11, 5), "3 of 24 (4; DP-SGD, clip 2 lowest and 1 highest)"),
        ((0, 5, 11, 5), "2 of 24 (4)"),  # half of them
    ],
)
def test_choices_at_an_edge_are_told_by_method(ranks: tuple[int, ...], told: str, tmp_path: Path) -> None:
    study = STUDIES["a9a-100"]
    records = [made("a9a-100", name, epsilon, "iid", 0.8) for name in CONTENDERS for epsilon in study.epsilons]
    by_step = sorted(study.effort.settings("DP-SGD, clip"), key=lambda one: float(one["lr"]))
    for record, rank in zip(records[-4:], ranks, strict=True):
        record["chosen"] = by_step[rank]
    work.write(study, tmp_path, records)
    page.write(tmp_path, pictures=False)
    assert f"the step size in {told}; β or τ in" in (tmp_path / "README.md").read_text()


def test_leads_are_counted_by_what_places_share() -> None:
    """Against counts made by hand."""
    places = {}
    for epsilon, split, noise, lead in ((8.0, "iid", 0.1, 0.05), (4.0, "iid", 1.0, -0.03), (8.0, "label", 1.0, 0.001)):
        values = dict.fromkeys(CONTENDERS, 0.5) | {"NormEC": 0.7 + lead, "DP-SGD, clip": 0.7}
        own = {name: made("w8a-100", name, epsilon, split, value) for name, value in values.items()}
        own["DP-SGD, norm"]["noise"] = noise
        places[Place("w8a-100", "", epsilon, split)] = own
    text = "\n".join(leads.lines(places))
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


def test_a_place_run_again_with_more_effort_counts_once() -> None:
    again = next(study for study in STUDIES.values() if study.instead)
    first = STUDIES[again.instead]
    assert {**again.settings} == {**first.settings}
    assert again.effort.trials > first.effort.trials
    places = {
        Place(name, "", epsilon, "iid"): {one: made(name, one, epsilon, "iid", 0.5) for one in CONTENDERS}
        for name, epsilon in ((first.name, 8.0), (first.name, 4.0), (again.name, 8.0))
    }
    text = "\n".join(leads.lines(places))
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


def test_the_pictures_have_every_study_that_ran(tmp_path: Path) -> None:
    records = {name: [made("a9a-100", name, 8.0, "iid", 0.7)] for name in CONTENDERS}
    work.write(STUDIES["a9a-100"], tmp_path, [one for own in records.values() for one in own])
    assert not page.write(tmp_path / "nothing", pictures=True)[3:]
    assert [path.name for path in page.write(tmp_path)] == ["README.md", "honest.csv", "tried.csv", "accuracy-1.png"]
    assert (tmp_path / "accuracy-1.png").stat().st_size > 10_000
    (tmp_path / "accuracy-2.png").touch()  # of studies that are no more
    page.write(tmp_path)
    assert not (tmp_path / "accuracy-2.png").exists()
    every = {name: [made(name, "NormEC", 8.0, "iid", 0.7)] for name in STUDIES}
    (tmp_path / "all").mkdir()
    widths = [image.imread(path).shape[1] for path in picture.draw(every, tmp_path / "all")]
    assert widths == [1200] * 3  # three studies each
    assert "](accuracy-1.png)" in (tmp_path / "README.md").read_text()
    assert page.write(tmp_path, pictures=False)[3:] == []
    assert "](accuracy-1.png)" in (tmp_path / "README.md").read_text()  # it is there, whoever drew it
