"""Pages are made from the records, with their numbers, verdicts and gaps; the committed ones of those committed."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from normec.errors import UsageError
from publications.alpha_normec.figures import arms
from publications.alpha_normec.figures.protocol import Protocol
from publications.alpha_normec.replay import (
    claims,
    facts,
    page_alpha,
    page_claims,
    page_private,
    page_readings,
    page_tables,
    pages,
    plan,
    records,
)
from publications.alpha_normec.replay.facts import Facts
from publications.alpha_normec.replay.plan import Planned

ROOT = Path(__file__).parents[3]


def test_the_committed_pages_are_those_of_the_committed_records(paper: Protocol, tmp_path: Path) -> None:
    committed = ROOT / "docs" / "replay"
    for name in ("cells", "honest"):
        if (committed / name).exists():
            shutil.copytree(committed / name, tmp_path / "docs" / "replay" / name)
    shutil.copyfile(ROOT / "README.md", tmp_path / "README.md")
    made = pages.write(paper, tmp_path / "docs" / "replay", tmp_path / "README.md", pictures=False)
    assert len(made) == 14
    for path in made:
        place = path.relative_to(tmp_path)
        told = f"{place} is not what `normec replay pages --readme README.md` makes of the records"
        assert path.read_text() == (ROOT / place).read_text(), told


@pytest.fixture(scope="module")
def cells(paper: Protocol) -> dict[str, Planned]:
    return {cell.name: cell for cell in plan.plan(paper)}


def test_a_cell_not_run_says_so_everywhere(paper: Protocol, tmp_path: Path) -> None:
    pages.write(paper, tmp_path, pictures=False)
    empty = Facts(paper, {})
    assert {claim.verdict(empty) for claim in claims.CLAIMS} == {"waits for cells not run"}
    text = (tmp_path / "tables.md").read_text()
    assert text.count("| not run | not run | not run | not run | not run |") == 16
    assert ".png" not in text
    assert "0 of 32" in (tmp_path / "README.md").read_text()
    for part in plan.PARTS:
        assert "not run" in (tmp_path / f"{part}.md").read_text()


def test_mean_spread_and_difference_over_the_seeds_that_ran(paper: Protocol, cells: Any, make: Any) -> None:
    names = [f"tables-normec-beta-0.1-seed-{seed}" for seed in (42, 43, 44)]
    values = (88.0, 89.0, 90.0)
    held = {name: make(cells[name], 10.0, 87.0, value) for name, value in zip(names, values, strict=True)}
    (row,) = (row for row in page_tables.rows(Facts(paper, held)) if row["seeds"])
    assert (row["method"], row["beta"], row["lr"]) == ("NormEC without SN", 0.1, 0.1)
    assert (row["paper"], row["final_test"], row["final_test_spread"]) == (86.09, 89.0, 1.0)
    assert row["difference"] == pytest.approx(2.91)
    assert row["passes_paper_at_epoch"] == 1
    text = "\n".join(page_tables.lines(Facts(paper, held)))
    assert "| NormEC without SN | 0.1 | 0.1 | 86.09 | 89.00 ± 1.00 | +2.91 | 89.00 | 88.00 | 88.00 | 3 of 3 |" in text
    assert "1 of 16 cells have run: ours is above the paper in 1" in text
    assert "| NormEC without SN | not run | 1 | not run | not run |" in text


def test_the_length_that_fits_best_and_where_the_paper_is_passed(cells: Any, make: Any) -> None:
    one, other = (cells[f"tables-{name}-beta-0.1-seed-42"] for name in ("normec", "clip21"))
    pairs = [(make(one, 10.0, 80.0, 84.0, 90.0), 86.0), (make(other, 10.0, 70.0, 84.0, 91.0), 85.0)]
    assert facts.best_length(pairs) == (2, pytest.approx(((2**2 + 1) / 2) ** 0.5))
    assert facts.passed(pairs[0][0], 84.0) == 2
    assert facts.passed(pairs[0][0], 95.0) is None
    assert facts.best_length([]) is None


def test_a_reading_that_fits_better_is_named(paper: Protocol, cells: Any, make: Any) -> None:
    held = {}
    for reading, away in (("sn-by-tensor", 1.0), ("tf32", 3.0)):
        for name in (name for name in cells if name.startswith(f"readings-{reading}")):
            cell, usual = cells[name], cells[name.replace(f"readings-{reading}", "tables")]
            held[name] = make(cell, cell.paper + away)
            held[usual.name] = make(usual, cell.paper - 3.0)
    found = {fit.reading.name: (fit.usual, fit.own, fit.cells) for fit in page_readings.fits(Facts(paper, held))}
    assert found["sn-by-tensor"] == (pytest.approx(3.0), pytest.approx(1.0), 3)
    assert found["tf32"] == (pytest.approx(3.0), pytest.approx(3.0), 1)
    assert found["sn-in-place"] == (None, None, 0)
    text = "\n".join(page_readings.lines(Facts(paper, held)))
    assert "Nearer to the paper than the tables' own: `sn-by-tensor` (on 3 cells 3.00 became 1.00)." in text
    assert "stop early" not in text.replace("stopped early", "")


def test_a_reading_is_held_against_the_tables_runs_that_stop_early(paper: Protocol, cells: Any, make: Any) -> None:
    held = {}
    for name in (name for name in cells if name.startswith("readings-split-dirichlet")):
        cell, usual = cells[name], cells[name.replace("readings-split-dirichlet", "tables")]
        held[name] = make(cell, 10.0, 20.0, cell.paper + 2.0)
        held[usual.name] = make(usual, 10.0, cell.paper - 1.0, cell.paper + 3.0)  # the first epoch fits best
    (fit,) = (one for one in page_readings.fits(Facts(paper, held)) if one.reading.name == "split-dirichlet")
    assert (fit.usual, fit.stopped, fit.own) == (pytest.approx(3.0), pytest.approx(1.0), pytest.approx(2.0))
    text = "\n".join(page_readings.lines(Facts(paper, held)))
    assert "RMS of those after 1 epochs" in text
    assert "None comes nearer than the tables' own runs do when they stop early." in text
    gone = next(name for name in held if name.startswith("readings"))
    usual = cells[gone.replace("readings-split-dirichlet", "tables")]
    held[gone] = make(cells[gone], 10.0, 20.0, 30.0, status="diverged")  # no cell to compare on any more
    held[usual.name] = make(usual, 10.0, usual.paper - 4.0, usual.paper + 30.0)
    (fit,) = (one for one in page_readings.fits(Facts(paper, held)) if one.reading.name == "split-dirichlet")
    assert (fit.cells, fit.usual, fit.stopped) == (2, pytest.approx(3.0), pytest.approx(1.0))
    assert "| diverged | not run | – |" in "\n".join(page_readings.lines(Facts(paper, held)))


def test_a_reading_far_from_the_paper_has_its_reason(paper: Protocol, cells: Any, make: Any) -> None:
    name = "memory-from-gradient-normec-beta-0.01-seed-42"
    cell = cells[f"readings-{name}"]
    usual = {f"tables-{name[21:]}": make(cells[f"tables-{name[21:]}"], cell.paper)}
    for value, told in ((17.0, True), (cell.paper - 5.0, False)):
        text = "\n".join(page_readings.lines(Facts(paper, {**usual, cell.name: make(cell, value)})))
        assert ("hundreds of rounds go the first one's way" in text) is told


def test_another_precision_stands_beside_every_seed(paper: Protocol, cells: Any, make: Any) -> None:
    own = "normec-beta-0.1-seed"
    ends = {
        f"readings-tf32-{own}-42": 88.0,
        f"tables-{own}-42": 87.0,
        f"tables-{own}-44": 87.5,
        "tables-clip21-beta-0.1-seed-42": 1.0,
    }
    held = {name: make(cells[name], value) for name, value in ends.items()}
    told = "In TF32 NormEC without SN at β = 0.1 ends at 88.00; in bf16 it ended at 87.00, 87.50 (a seed each)."
    assert told in page_readings.lines(Facts(paper, held))
    del held[f"readings-tf32-{own}-42"]
    assert "In TF32" not in "\n".join(page_readings.lines(Facts(paper, held)))


def complete(cells: dict[str, Planned], make: Any, value: Any) -> dict[str, records.Record]:
    """Records of all cells that are run in any case; `value(cell)` is their accuracy, or None for no record."""
    kept = [cell for cell in cells.values() if not cell.chosen and value(cell) is not None]
    return {cell.name: make(cell, 10.0, value(cell), epsilon=7.7e8 if cell.arm.private else None) for cell in kept}


def verdicts(paper: Protocol, held: dict[str, records.Record]) -> list[str]:
    return [claim.verdict(Facts(paper, held)) for claim in claims.CLAIMS]


def paper_like(cell: Planned) -> float:
    """Numbers as the paper's text has them."""
    if cell.arm.private:
        if cell.arm.name == arms.DP_NORMEC_SN.name:
            return 72.0 if cell.beta == 0.1 else 70.0
        best = 77.0 if cell.arm.name == arms.DP_NORMEC.name else 60.0
        return best if cell.lr == 0.1 else 40.0
    return cell.paper if cell.paper is not None else {0.01: 82.9, 0.1: 85.7, 1.0: 84.3, 10.0: 81.4}[cell.beta]


def in_full(cells: dict[str, Planned], make: Any, sn: float, without: float, clip21: float) -> dict[str, Any]:
    """Runs in full of SN at β = 1, whose first half has 70, and of the other two methods."""
    names = {"normec-sn-beta-1": sn, "normec-beta-0.1": without, "clip21-beta-0.1": clip21}
    found = {
        f"private-{noise}-{name}-lr-0.1-seed-42-long": value for noise in plan.NOISES for name, value in names.items()
    }
    made = {}
    for name, value in found.items():
        first = 70.0 if "normec-sn" in name else value
        made[name] = make(cells[name], 10.0, first, value, epsilon=1.6e9)
        made[name]["curve"]["epoch"] = [0, 150, 300]
    return made


def test_claims_hold_where_the_numbers_are_the_papers(paper: Protocol, cells: Any, make: Any) -> None:
    held = complete(cells, make, paper_like) | in_full(cells, make, 70.5, 78.0, 61.0)
    assert verdicts(paper, held) == ["held"] * 6
    text = "\n".join(page_claims.lines(Facts(paper, held)))
    assert text.count("**Held.** ") == 6
    assert "+32.9 at β = 0.01" in text  # 84.04 − 51.10, the paper's own
    assert "the highest accuracy changes by -5.0 points (total-norm), -5.0 points (total-variance)" in text
    assert "+17.0 (total-norm), +17.0 (total-variance) after 150 epochs" in text
    assert "+17.0 (total-norm), +17.0 (total-variance) after 300" in text
    assert "another draw of the noise changes a cell by up to 1.0 points" in text  # 77 and 78, 60 and 61
    assert "learned little" not in text
    assert "the second half is worth" not in text  # SN's best cell was not run in full


def test_claims_fall_where_the_numbers_are_the_reverse(paper: Protocol, cells: Any, make: Any) -> None:
    held = complete(cells, make, lambda cell: 150.0 - paper_like(cell) + 5 * (cell.alpha or 0))
    found = verdicts(paper, held | in_full(cells, make, 95.0, 50.0, 60.0))
    assert [*found[:3], *found[4:]] == ["not held"] * 5


def test_a_claim_of_two_halves_may_hold_in_part(paper: Protocol, cells: Any, make: Any) -> None:
    def best_with_server_norm(cell: Planned) -> float:
        return 80.0 if cell.arm.name == arms.DP_NORMEC_SN.name else paper_like(cell)

    assert verdicts(paper, complete(cells, make, best_with_server_norm))[3] == "held in part"


def test_a_claim_waits_for_a_single_missing_cell(paper: Protocol, cells: Any, make: Any) -> None:
    missing = "tables-dpsgd-norm-beta-0.1-seed-"
    held = complete(cells, make, lambda cell: None if cell.name.startswith(missing) else paper_like(cell))
    assert verdicts(paper, held)[:3] == ["waits for cells not run", "held", "held"]


def test_private_pages_carry_the_exact_epsilon(paper: Protocol, cells: Any, make: Any, tmp_path: Path) -> None:
    held = complete(cells, make, lambda cell: None if cell.reading == "total-variance" else paper_like(cell))
    for record in held.values():
        records.write(tmp_path / "cells", record)
    pages.write(paper, tmp_path, pictures=True)
    text = (tmp_path / "private.md").read_text()
    assert text.count("7.7e+08 after 150 epochs") == 2
    assert "exact ε: not run" in text
    assert "ε = 8; no run here has it" in text
    assert "| DP-NormEC without SN | 77.56 | 77.00 | 37.00 |" in text
    with (tmp_path / "private.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 74
    assert {row["exact_epsilon"] for row in rows} == {"770000000.0", ""}
    assert not (tmp_path / "private-total-variance.png").exists()
    for name in ("tables", "alpha", "private-total-norm"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert not (tmp_path / f"{name}.pdf").exists()
    assert page_private.peak(Facts(paper, held), "total-norm", arms.DP_CLIP21) == 60.0
    assert page_alpha.grid(Facts(paper, held))[0] == [82.86, 85.43, 84.29, 81.48]


def test_the_readmes_results_stand_between_their_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    pages.section(readme, ["new", "lines"])
    assert readme.read_text() == f"before\n{pages.BEGIN}\nnew\nlines\n{pages.END}\nafter\n"
    readme.write_text("no markers\n")
    with pytest.raises(UsageError, match="once each"):
        pages.section(readme, ["new"])
    assert readme.read_text() == "no markers\n"
