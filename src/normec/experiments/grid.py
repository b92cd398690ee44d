"""Grids of runs: from a TOML file to the list of its cells.

data = "digits"                 # settings of all cells, as in `normec train`
validation = 0.2
seeds = 3                       # 0, 1, 2; or a list
tune = ["lr"]                   # settings whose best value is chosen in each cell …
by = "validation_accuracy"      # … by this column

[grid]                          # every combination of these
lr = [0.05, 0.2, 1.0]

[[cases]]                       # settings that belong together; each case is combined with the whole grid
method = "normec"
grid.beta = [0.01, 0.1]         # a case may have its own grid

[[cases]]
method = "clip21"
tau = 0.1
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import models
from ..data.dataset import check_name
from ..errors import UsageError, at_least, nearest, one_of
from ..settings.assignments import Scalar
from ..settings.config import NOT_IDENTITY, RunConfig
from ..settings.declaration import text_of
from ..settings.validation import make
from ..system.code_files import in_a_file
from ..system.files import read_toml
from . import build, methods, tuning

OWN = ("grid", "cases", "seeds", "tune", "by", "tune_on_test")
LONGEST_NAME = 120


@dataclass(frozen=True)
class Cell:
    """One run of a grid, and the settings that distinguish it from the others."""

    config: RunConfig
    settings: Mapping[str, Scalar]

    @property
    def label(self) -> str:
        """The settings as one line: ``normec beta 0.1 lr 0.05 seed 0``."""
        parts = [(str(v) if key == "method" else f"{key} {text_of(v)}") for key, v in self.settings.items()]
        return " ".join(parts) or self.config.method

    @property
    def name(self) -> str:
        """The label as a folder name, with the digest that identifies the run."""
        plain = re.sub(r"[^\w.+-]+", "-", self.label).strip("-.")
        return f"{plain[:LONGEST_NAME]}-{self.config.digest()}"


@dataclass(frozen=True)
class Grid:
    """The cells in order, and how the best of them is chosen."""

    cells: tuple[Cell, ...]
    tune: tuple[str, ...] = ()
    by: str = tuning.DEFAULT
    on_test: bool = False


def load(path: str | Path, *, checked: bool = True) -> Grid:
    """Return the grid in a file; raises `UsageError` with one line before anything runs.

    Args:
        path: The file.
        checked: Whether every cell is checked. This loads a user's own methods and so runs the files that the grid
            names, which must not happen for a grid in somebody's folder of results.
    """
    return expand(read(path), checked=checked)


def read(path: str | Path) -> dict[str, Any]:
    """Read a grid file as tables."""
    try:
        return read_toml(Path(path))
    except FileNotFoundError:
        raise UsageError(f"there is no grid file {path}; give the path of a TOML file") from None


def expand(tables: Mapping[str, Any], *, checked: bool = True) -> Grid:
    """Return the grid that the tables of a grid file define; `checked` as in `load`."""
    shared = {key: value for key, value in tables.items() if key not in OWN}
    _known(shared, "the shared settings", OWN)
    common = _lists(tables.get("grid", {}), "grid")
    if "seeds" in tables:
        if "seed" in shared or "seed" in common:
            raise UsageError("seeds and seed are both given; keep seeds")
        common["seed"] = _seeds(tables["seeds"])
    cases = list(_cases(tables.get("cases")))
    if not common and "cases" not in tables:
        raise UsageError(
            "the grid is empty: give lists of values under [grid], tables [[cases]], or seeds; "
            "use `normec train` for a single run"
        )
    cells = []
    for number, (case, own) in enumerate(cases, 1):
        _check_conflicts(number, shared, common, case, own)
        values = {**own, **common}
        for combination in itertools.product(*values.values()):
            varied: dict[str, Scalar] = {**case, **dict(zip(values, combination, strict=True))}
            cells.append(_cell({**shared, **varied}, varied, checked))
    _distinct(cells)
    return _tuned(tables, tuple(cells))


def _cases(tables: Any) -> Iterator[tuple[dict[str, Scalar], dict[str, list[Scalar]]]]:
    """Yield the settings and the grid of each case; without cases, one empty case."""
    if tables is None:
        yield {}, {}
        return
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError("cases must be tables: write [[cases]], with two brackets, above each")
    if not tables:
        raise UsageError("cases is an empty list: there is nothing to run")
    for number, table in enumerate(tables, 1):
        where = f"case {number}"
        case = {key: value for key, value in table.items() if key != "grid"}
        _known(case, where, ("grid",))
        for key, value in case.items():
            if isinstance(value, list):
                raise UsageError(f"{key} in {where} is a list; put several values into grid.{key}")
        yield case, _lists(table["grid"], f"the grid of {where}") if "grid" in table else {}


def _lists(table: Any, where: str) -> dict[str, list[Scalar]]:
    """Check a table of settings, each with a list of values, and return it."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table of lists, got {table!r}")
    _known(table, where)
    for key, values in table.items():
        if not isinstance(values, list):
            raise UsageError(
                f"{key} in {where} must be a list of values, got {values!r}; put a single value above [grid]"
            )
        if not values:
            raise UsageError(f"{key} in {where} is an empty list: there is nothing to run")
        if key in NOT_IDENTITY:
            raise UsageError(f"{key} decides where a run is computed, not what; a grid over it repeats the same run")
        for position, value in enumerate(values):
            if value in values[:position]:
                raise UsageError(f"{key} in {where} has {value!r} twice")
    return dict(table)


def _known(table: Mapping[str, Any], where: str, more: tuple[str, ...] = ()) -> None:
    for key in table:
        if key not in RunConfig.model_fields:
            guess = nearest(key, (*more, *RunConfig.model_fields))
            raise UsageError(f"there is no setting {key!r} ({where}){guess}; `normec train --settings` lists all")


def _check_conflicts(
    number: int, shared: Mapping[str, Any], common: Mapping[str, Any], case: Mapping[str, Any], own: Any
) -> None:
    """Check that a setting occurs once; only the constants of a case may replace shared settings."""
    pairs = [
        (common, "[grid]", shared, "the shared settings"),
        (common, "[grid]", case, f"case {number}"),
        (common, "[grid]", own, f"the grid of case {number}"),
        (own, f"the grid of case {number}", shared, "the shared settings"),
        (own, f"the grid of case {number}", case, f"case {number}"),
    ]
    for one, here, other, there in pairs:
        for key in one:
            if key in other:
                raise UsageError(f"{key} occurs in {here} and in {there}; keep one of them")


def _seeds(given: Any) -> list[Scalar]:
    if isinstance(given, list):
        if not given:
            raise UsageError("seeds is an empty list: there is nothing to run")
        for position, seed in enumerate(given):
            at_least(0, seeds=seed)
            if seed in given[:position]:
                raise UsageError(f"seeds has {seed} twice")
        return list(given)
    at_least(1, seeds=given)
    return list(range(given))


def _cell(settings: dict[str, Any], varied: dict[str, Scalar], checked: bool) -> Cell:
    """Return a cell, after checking if wanted that its settings fit the method and that a privacy rule covers them."""
    label = ", ".join(f"{key} = {text_of(value)}" for key, value in varied.items())
    try:
        config = make(settings)
        if checked:
            check(config)
    except UsageError as error:
        raise UsageError(f"{error} (in the cell {label})") from None
    return Cell(config, varied)


def check(config: RunConfig) -> None:
    """Refuse settings that are wrong, as far as this is known before data are read."""
    if not in_a_file(config.model):
        one_of(models.MODELS, model=config.model)
    if not in_a_file(config.data):
        check_name(config.data)
    method = methods.build(config, dim=1 if config.k is None else config.k)
    build.training(config.model_copy(update={"device": "cpu"}))  # the device of the cell may be on another machine
    if config.private and not math.isfinite(method.bound):
        raise UsageError(f"{config.method} sends messages without a bound; set private = false")


def _distinct(cells: list[Cell]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.config.digest(), cell)
        if other is not cell:
            raise UsageError(f"two cells are the same run: {other.label}, and {cell.label}; remove one of them")


def _tuned(tables: Mapping[str, Any], cells: tuple[Cell, ...]) -> Grid:
    tune, by, on_test = tables.get("tune", []), tables.get("by"), tables.get("tune_on_test", False)
    if not isinstance(tune, list) or not all(isinstance(name, str) for name in tune):
        raise UsageError(f'tune must be a list of settings, such as ["lr"], got {tune!r}')
    if not isinstance(on_test, bool):
        raise UsageError(f"tune_on_test must be true or false, got {on_test!r}")
    if by is not None and not isinstance(by, str):
        raise UsageError(f"by must be a column's name, got {by!r}")
    varied = {key for cell in cells for key in cell.settings}
    for name in tune:
        if name not in varied or name == "seed":
            raise UsageError(f"tune names {name!r}, which the grid does not vary{nearest(name, varied - {'seed'})}")
    validated = all(cell.config.validation > 0 for cell in cells)
    decides = by is not None or bool(tune)
    if by is None:
        by = tuning.DEFAULT if validated or tune else "loss"
    tuning.check(by, on_test)
    if decides and not all(tuning.records(cell.config, by) for cell in cells):
        raise tuning.uncovered(by)
    if by.startswith("validation") and not validated:
        raise UsageError(f"by = {by!r} needs validation data: set validation = 0.2, or choose by = 'loss'")
    return Grid(cells, tuple(tune), by, on_test)
