"""The studies' numbers as CSV: a line for each cell, and a line for each setting that was tried."""

from __future__ import annotations

from collections.abc import Sequence

from normec.experiments.tables import Row, to_csv

from .contenders import Setting
from .studies import STUDIES
from .trial import ANATOMY
from .work import Record, place_of


def by_cell(records: Sequence[Record]) -> str:
    """What each cell came to on the test set, with the setting chosen."""
    return to_csv([_cell(one) for one in records])


def by_setting(records: Sequence[Record]) -> str:
    """What each setting of each cell came to on the records held out."""
    rows = []
    for one in records:
        settings = STUDIES[one["study"]].effort.settings(one["method"])
        for setting, value in zip(settings, one["tried"], strict=True):
            validation = {"validation": value, "chosen": int(setting == one["chosen"])}
            rows.append({**_where(one), **_setting(setting), **validation})
    return to_csv(rows)


def _where(record: Record) -> Row:
    place = place_of(record)
    where = {"study": place.study, "split": place.split, "epsilon": place.epsilon, "method": place.method}
    return {**where, "by": record["by"]}


def _setting(setting: Setting) -> Row:
    return {"rounds": setting["rounds"], "lr": setting["lr"]} | {n: setting.get(n) for n in ("beta", "tau", "decay")}


def _cell(record: Record) -> Row:
    return {
        **_where(record),
        "value": round(record["accuracy"], 6),
        "spread": round(record["spread"], 6),
        "loss": _digits(record.get("loss")),
        "trials": record["trials"],
        **_setting(record["chosen"]),
        **{column: _digits(record.get(column)) for column in ("exact_epsilon", "sigma", *ANATOMY)},
    }


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
