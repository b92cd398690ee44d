"""Pictures for papers: what is written in a heat map, and the band around a mean over seeds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from normec.errors import UsageError
from normec.report import pictures
from normec.report.spread import over_seeds
from normec.storage.history import History


def history(values: list[float], every: int = 1, column: str = "loss") -> History:
    found = History()
    for k, value in enumerate(values):
        found.append({"round": k, column: value} if k % every == 0 else {"round": k})
    return found


def test_the_band_is_the_deviation_or_the_range_over_seeds() -> None:
    table = np.random.default_rng(1).uniform(1, 2, (3, 7))
    seeds = [history(list(row)) for row in table]
    band = over_seeds(seeds, "loss", "deviation")
    assert band.mean == pytest.approx(table.mean(0))
    assert band.high == pytest.approx(table.mean(0) + table.std(0, ddof=1))
    band = over_seeds(seeds, "loss", "range")
    assert (band.low, band.high) == (list(table.min(0)), list(table.max(0)))


def test_only_rounds_that_all_seeds_measured_are_averaged() -> None:
    band = over_seeds([history([1.0] * 9, 2), history([3.0] * 7, 3), history([], 1)], "loss")
    assert band.rounds == [0, 6]
    assert band.mean == [2.0, 2.0]
    assert band.seeds == 2
    assert over_seeds([], "loss").rounds == []


def labels(path: Path) -> list[str]:
    """Every text of an SVG picture, which matplotlib leaves as comments."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_a_heat_map_has_its_values_in_its_cells(tmp_path: Path) -> None:
    values = [[91.25, None, 80.0], [10.0, 95.5, float("nan")]]
    pictures.heatmap(
        {"ε = 1": values, "ε = 8": values},
        tmp_path / "map.svg",
        rows=[0.01, 0.1],
        columns=["a", "b", "c"],
        y_label="beta",
        x_label="method",
        label="accuracy",
        format=".1f",
        best="max",
        missing="diverged",
    )
    seen = labels(tmp_path / "map.svg")
    for text, count in (("91.2", 2), ("95.5", 2), ("80.0", 2), ("diverged", 4), ("ε = 1", 1), ("0.01", 2), ("beta", 1)):
        assert seen.count(text) == count, text


def test_a_heat_map_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 × 2 cells got values of shape"):
        pictures.heatmap(
            {"": [[1.0, 2.0]]}, tmp_path / "m.png", rows=[1, 2], columns=[1, 2], y_label="", x_label="", label=""
        )
    assert not (tmp_path / "m.png").exists()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_heat_map_of_equal_or_missing_values_is_drawn(scale: str, tmp_path: Path) -> None:
    for values in ([[2.0, 2.0]], [[None, None]]):
        path = tmp_path / "map.svg"
        pictures.heatmap(
            {"": values}, path, rows=["r"], columns=[1, 2], y_label="y", x_label="x", label="v", scale=scale, best="min"
        )  # type: ignore[call-overload]
        assert path.exists()


def test_curves_draw_the_panels_that_have_data_and_refuse_none(tmp_path: Path) -> None:
    seeds = [history([2.0, 1.0, value]) for value in (0.4, 0.6)]
    panels = pictures.PANELS + pictures.HEALTH
    pictures.curves({"one": seeds, "other": seeds[0]}, tmp_path / "c.svg", spread="deviation", panels=panels)
    seen = labels(tmp_path / "c.svg")
    assert "training loss f(x)" in seen
    assert "ε spent" not in seen
    assert {"one", "other"} <= set(seen)
    with pytest.raises(UsageError, match="nothing to draw"):
        pictures.curves({"one": History()}, tmp_path / "d.svg")
    with pytest.raises(UsageError, match="unknown spread"):
        pictures.curves({"one": seeds}, tmp_path / "d.svg", spread="sd")  # type: ignore[arg-type]


def test_many_columns_are_drawn_in_several_rows() -> None:
    found = History()
    names = [f"metric_{number}" for number in range(9)]
    for k in range(3):
        found.append({"round": k, **dict.fromkeys(names, 1.0 + k)})
    sheet = pictures.history_figure(found)
    assert [axis.get_ylabel() for axis in sheet.axes] == [name.replace("_", " ") for name in names]
    assert len({round(axis.get_subplotspec().rowspan.start) for axis in sheet.axes}) == 3
    width, height = sheet.get_size_inches()
    assert width < 15
    assert width < 2 * height
