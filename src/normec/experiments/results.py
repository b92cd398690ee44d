"""Runs on disk as tidy rows: one row per run, mean and spread over seeds, or the best of a tuned setting per cell.

A column is a setting, a metric (its value at the end of the run, or its mean over seeds; for ε the largest) or the
spread of a metric (the standard deviation over seeds). A run that is found twice counts once: the same configuration,
and the same noise, if the noise does not follow from the seed.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest
from ..privacy.ledger_verification import verified
from ..report import schema
from ..report.result_metrics import BY_COLUMN, own_metrics, values_of
from ..report.run_view import method_settings
from ..settings import config
from ..settings.assignments import format_assignments
from ..settings.config import IDENTITY, RunConfig
from ..settings.validation import make
from ..storage.history import STARTED_BY, History
from ..storage.run_folder import stored_secret
from ..system.files import read_toml
from ..training import saved_run
from . import methods, tuning
from .resolve import Measured, resolved

Row = dict[str, Any]
Key = tuple[Any, ...]

ALWAYS = ("data", "model", "method")
METRICS = tuple(BY_COLUMN)
STATES = ("finished", "stopped", "diverged", "failed", "unfinished")
PARTS = ("config.toml", "summary.json", "metrics.jsonl", "checkpoint")  # a folder with any of them is a run
TAKEN = {*RunConfig.model_fields, *METRICS, *STATES} - {*methods.SETTINGS}  # columns that no method's setting can have


@dataclass(frozen=True)
class Record:
    """One run: all its settings, its status and its summary."""

    folder: Path
    settings: Mapping[str, Any]
    status: str
    summary: Mapping[str, Any]
    paid: float | None = None  # epsilon from the ledger, for a private run that is not finished
    own: tuple[str, ...] = ()  # settings of a method of the user's own


@dataclass(frozen=True)
class Found:
    """The runs below some folders, and a line about each run that is left out."""

    records: list[Record]
    notes: list[str]


def collect(paths: Sequence[Path]) -> Found:
    """Return every run at or below `paths`: single runs, cells of sweeps, and runs of comparisons."""
    records: dict[Key, Record] = {}
    notes: list[str] = []
    copies: list[str] = []
    for path in paths:
        if not path.is_dir():
            raise UsageError(
                f"{path} is a file; give a folder of runs"
                if path.exists()
                else f"there is no folder {path}; give one that holds runs"
            )
        for folder in _folders(path):
            try:
                record = _read(folder)
            except (UsageError, OSError) as error:
                notes.append(f"left out: {error}")
                continue
            if record.status == "unfinished":
                notes.append(f"unfinished: {folder}, at round {record.summary['round']}")
            same = (record.own, _noise_of(record), *_key(record, (*IDENTITY, *record.own)))
            other = records.setdefault(same, record)
            if other is not record:
                kept = max(
                    other, record, key=lambda one: (one.status == "finished", _metrics(one).get("epsilon") or 0.0)
                )  # rounds that one folder released twice count
                records[same] = kept
                copies.append(f"{(record if kept is other else other).folder} is the same run as {kept.folder}")
    if copies:
        more = f", and {len(copies) - 1} more" if len(copies) > 1 else ""
        notes.append(f"found twice, counted once: {copies[0]}{more}")
    if not records and not notes:
        raise UsageError(f"there are no runs in {', '.join(map(str, paths))}")
    return Found(list(records.values()), notes)


def of(summary: Mapping[str, Any], folder: Path) -> Record:
    """Return the record of a run from its summary."""
    status = summary["status"]
    known = {key: summary.get(key) for key in ("clients", "dimension", "rounds")}
    held = summary["config"]
    settings = _settings_of_python(held) if STARTED_BY in held else _settings(held, Measured(**known))
    return _record(folder, settings, status if status in STATES else "unfinished", summary)


def _record(
    folder: Path, settings: dict[str, Any], status: str, summary: Mapping[str, Any], paid: float | None = None
) -> Record:
    """Return a record in which the settings of a method have columns of their own."""
    found = method_settings(settings)
    rest = format_assignments({name: found.pop(name) for name in list(found) if name in TAKEN}) or None
    own = tuple(name for name in found if name not in IDENTITY)
    return Record(folder, {**settings, **found, "method_settings": rest}, status, summary, paid, own)


def _settings(held: Mapping[str, Any], measured: Measured | None = None) -> dict[str, Any]:
    """Return every setting with the value that was used, also if the record has only the given settings.

    Of a user's own method they are those of the record: a folder may come from anybody, and the file that it names is
    not run.
    """
    try:
        return resolved(make(held), measured, own_code=False).model_dump()
    except UsageError:  # from another version: use the record as it is
        return {**RunConfig().model_dump(), **held}


def varied(records: Iterable[Record]) -> list[str]:
    """Return the settings in which runs differ."""
    held = list(records)
    names = _names(held)
    return [name for name in config.varied([record.settings for record in held]) if name in names]


def each(records: Sequence[Record]) -> list[Row]:
    """Return one row per run; metrics that only some runs have are empty in the others."""
    names, columns = _shown(records), _own_columns(records)
    return [
        {
            **dict(zip(names, _key(record, names), strict=True)),
            "status": record.status,
            "round": record.summary.get("round"),
            "rounds": record.summary.get("rounds"),
            **_metrics(record),
            **{name: own_metrics(record.summary["final"]).get(name) for name in columns},
            "error": record.summary.get("error"),
            "folder": str(record.folder),
        }
        for record in records
    ]


def over_seeds(records: Sequence[Record]) -> list[Row]:
    """Return one row per setting: mean and spread of every metric over the seeds with a result."""
    names = [key for key in _shown(records) if key != "seed"]
    own = _own_columns(records)
    return [_summary(group, names, own) for group in _grouped(records, names).values()]


def tuned(records: Sequence[Record], tune: Sequence[str], by: str, on_test: bool = False) -> list[Row]:
    """Return one row per cell: the values of the settings `tune` with the best mean of the column `by` over seeds.

    `tuned` names these settings, and `tried` is the number of values. `edge` names a tuned setting whose best value is
    the smallest or the largest one; the optimum may lie beyond it.
    """
    tuning.check(by, on_test)
    known = [name for name in (*RunConfig.model_fields, *_names(records)) if name != "seed"]
    for name in tune:
        if name == "seed":
            raise UsageError("seed cannot be tuned, because results are means over seeds; leave it out")
        if name not in known:
            raise UsageError(f"there is no setting {name!r} to tune{nearest(name, known)}")
    names = [key for key in _shown(records) if key != "seed"]
    cells = _grouped(records, [key for key in names if key not in tune])
    own, rows = _own_columns(records), []
    for cell in cells.values():
        candidates = _grouped(cell, tune)
        chosen = _best(candidates, by)
        kept = candidates[chosen] if chosen is not None else cell
        row = _summary(kept, names, own)
        row |= dict(zip(tune, chosen or (None,) * len(tune), strict=True))
        row |= {
            "tuned": ", ".join(tune),
            "by": by,
            "tried": len(candidates),
            "edge": ", ".join(_edges(candidates, chosen, tune)),
        }
        rows.append(row)
    return rows


def best(records: Sequence[Record], by: str) -> Row | None:
    """Return the setting with the best mean over seeds."""
    names = [key for key in varied(records) if key != "seed"]
    candidates = _grouped(records, names)
    chosen = _best(candidates, by)
    return _summary(candidates[chosen], names) if chosen is not None else None


def _best(candidates: Mapping[Key, Sequence[Record]], by: str) -> Key | None:
    seeds = {record.settings["seed"] for group in candidates.values() for record in group}
    values = {}
    for key, group in candidates.items():
        held: dict[Any, list[float | None]] = {}
        for record in group:
            found = tuning.value(record.summary, by)
            if found is None and record.status in tuning.RESULTS:
                raise tuning.unmeasured(by)
            held.setdefault(record.settings["seed"], []).append(found)
        values[key] = [one for seed in seeds for one in held.get(seed, [None])]
    return tuning.best(values, by)


def _edges(candidates: Iterable[Key], chosen: Key | None, tune: Sequence[str]) -> Iterator[str]:
    for position, name in enumerate(tune):
        tried = {key[position] for key in candidates}
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in tried)
        if chosen is not None and numbers and len(tried) > 1 and chosen[position] in (min(tried), max(tried)):
            yield name


def _summary(group: Sequence[Record], names: Sequence[str], own: Sequence[str] = ()) -> Row:
    """Return a row: settings, how many runs are in which state, and every metric, with those of the user's own."""
    row: Row = dict(zip(names, _key(group[0], names), strict=True))
    row |= {state: sum(record.status == state for record in group) for state in STATES}
    finished = [
        _metrics(record) | own_metrics(record.summary["final"]) for record in group if record.status in tuning.RESULTS
    ]
    for name in (*METRICS, *own):
        values = [metrics[name] for metrics in finished if metrics.get(name) is not None]
        middle = max if name == "epsilon" else statistics.fmean  # the guarantee is the worst one
        row[name] = middle(values) if values else None
        row[f"{name}_spread"] = statistics.stdev(values) if len(values) > 1 else None
    return row


def _metrics(record: Record) -> Row:
    found = values_of(record.summary)
    return found | {"epsilon": record.paid} if record.paid is not None else found


def _own_columns(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in own_metrics(record.summary["final"])))


def _grouped(records: Iterable[Record], names: Sequence[str]) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(_key(record, names), []).append(record)
    return found


def _key(record: Record, names: Iterable[str]) -> Key:
    """Return the values of some settings, for grouping; a value of the wrong kind becomes text."""
    values = (record.settings.get(name) for name in names)
    return tuple(str(value) if isinstance(value, dict | list) else value for value in values)


def _shown(records: Sequence[Record]) -> list[str]:
    differ = varied(records)
    return [key for key in _names(records) if key in ALWAYS or key in differ or key == "seed"]


def _names(records: Iterable[Record]) -> list[str]:
    """Return the settings that tell runs apart, those of the users' own methods last."""
    return list(dict.fromkeys([*IDENTITY, *(name for record in records for name in record.own)]))


def _folders(path: Path) -> Iterator[Path]:
    """Yield the run folders at or below a path, in the order of their names."""
    for here, below, files in os.walk(path):
        if any(part in files or part in below for part in PARTS):
            below.clear()
            yield Path(here)
        else:
            below[:] = sorted(name for name in below if not name.startswith("."))


def _read(folder: Path) -> Record:
    """Read a run; a run without a summary is unfinished, and its last row is its result."""
    if (folder / "summary.json").exists():
        summary = saved_run.read(folder).summary
        if not isinstance(summary.get("config"), dict) or not isinstance(summary.get("final"), dict):
            raise UsageError(f"{folder / 'summary.json'} is damaged: it lacks the run's settings or its final row")
        wrong = schema.fitting(summary, schema.SUMMARY, None)[1]
        if wrong:
            raise UsageError(f"{folder / 'summary.json'} is damaged: {wrong[0]} has a wrong type")
        record = of(summary, folder)
        return record if record.status == "finished" else replace(record, paid=_paid(folder, summary))
    if not (folder / "config.toml").exists():
        raise UsageError(f"{folder} is incomplete: it has no config.toml")
    held = read_toml(folder / "config.toml")
    settings = _settings_of_python(held) if STARTED_BY in held else _settings(_checked(held))
    history = History(folder / "metrics.jsonl")
    history.reread()
    last = history.rows[-1] if len(history) else {}
    if not schema.ROW(last):
        raise UsageError(f"{folder / 'metrics.jsonl'} is damaged: its last row does not hold numbers")
    summary = {"round": last.get("round", 0), "final": last}
    return _record(folder, settings, "unfinished", summary, _paid(folder, {**summary, "config": held}))


def _noise_of(record: Record) -> str | None:
    """Return what tells the noise of a run from that of another one with its settings; None if the seed decides it.

    It is the run's secret. Where there is none, or it cannot be read, it is the result.
    """
    private = record.settings.get("private") or record.settings.get("privacy")
    if not private or (record.settings.get("noise") == "seeded" and record.settings.get("seed") is not None):
        return None
    with suppress(UsageError, OSError):
        secret = stored_secret(record.folder)
        if secret is not None:
            return f"{secret:x}"
    return json.dumps(record.summary["final"], sort_keys=True, default=str)


def _settings_of_python(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that was started from Python; lists and tables but the method's become text."""
    plain = {
        name: value
        if schema.scalar(value) or name == "method_settings"
        else json.dumps(value, default=str, sort_keys=True)
        for name, value in held.items()
    }
    return {**dict.fromkeys(IDENTITY), **plain}


def _checked(held: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a config.toml; raises `UsageError` if they are invalid."""
    make(held)
    return held


def _paid(folder: Path, summary: Mapping[str, Any]) -> float | None:
    """Return the ε that a run has paid for, which may be more than its summary or its last row says."""
    paid = verified(folder, summary)
    return paid.epsilon if paid is not None else None
