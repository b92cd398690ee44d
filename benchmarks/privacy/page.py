"""The pages of the studies: README.md, accuracies.csv, tried.csv and pictures, made from the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from normec.experiments.export import Row, to_csv, to_markdown
from normec.system.files import write_atomic

from . import diagnostics, leads
from .leads import NOT_RUN, Conditions, by_condition, targets
from .records import Record, cell_of, percent, read
from .search_space import SEARCH_SPACES, Setting, range_ends
from .studies import STUDIES, Condition, Study
from .trial import DIAGNOSTICS
from .tuning import TuningBudget

RECORDS = "records"  # the folder of the records, CSV files and pictures, next to README.md
OFTEN = 0.75  # the share of choices at an end of a range from which on a method is named
INTRODUCTION = (
    "Which method is best under a true guarantee? Every client is protected against a server that sees only sums "
    "(client level, zero-out, secure sum), with exact ε at δ = 1e-5; all clients take part in every round. For each ε "
    "and split every method gets the same number of settings, spread evenly over its search space (rounds, step size, "
    "β or τ, forgetting), and is evaluated on a fifth of the training records. The best setting is trained again on "
    "all training records with other seeds, and the tables show its result on the test set: mean ± standard deviation, "
    "in percent. The guarantee does not cover the tuning itself. Every record belongs to exactly one client. The "
    "number of settings is small: a method with more parameters has a disadvantage, and with a single tuning seed "
    "chance plays a part. DP-SGD has no momentum; where it oscillates (see below) momentum may gain more than error "
    "feedback, as [a first trial](records/momentum.md) suggests."
)


def grids(records: Sequence[Record], splits: Iterable[str] = (), epsilons: Iterable[float] = ()) -> list[str]:
    """One table per split, with a row per method and a column per ε; by default for all splits and ε in the records.

    The best method is bold if all methods have run.
    """
    lines = []
    for split in splits or sorted({one["split"] for one in records}):
        held = {(one["method"], one["epsilon"]): one for one in records if one["split"] == split}
        across = sorted(epsilons or {epsilon for _, epsilon in held})
        ran = {e: [one["accuracy"] for (_, at), one in held.items() if at == e] for e in across}
        best = {e: max(values) if len(values) == len(SEARCH_SPACES) else None for e, values in ran.items()}
        rows = [[name, *(_shown(held.get((name, e)), best[e]) for e in across)] for name in SEARCH_SPACES]
        lines += [*to_markdown((split, *targets(across)), rows), ""]
    return lines


def _shown(record: Record | None, best: float | None) -> str:
    if record is None:
        return NOT_RUN
    return f"**{percent(record)}**" if record["accuracy"] == best else percent(record)


def write(folder: Path, pictures: bool = True) -> list[Path]:
    """Write the pages of the records in `folder`/records.

    Args:
        folder: The folder of README.md.
        pictures: Draw the pictures as well.

    Returns:
        The files that were written.
    """
    inner = folder / RECORDS
    held = {name: read(study, inner) for name, study in STUDIES.items()}
    inner.mkdir(parents=True, exist_ok=True)
    drawn = []
    if pictures:
        from . import picture

        drawn = picture.draw(held, inner)
        for old in set(inner.glob("accuracy-*.png")) - set(drawn):
            old.unlink()
    every = [one for records in held.values() for one in records]
    paths = [folder / "README.md", inner / "accuracies.csv", inner / "tried.csv"]
    shown = [f"{RECORDS}/{path.name}" for path in sorted(inner.glob("accuracy-*.png"))]
    write_atomic(paths[0], "\n".join(lines(held, shown)).rstrip() + "\n")
    write_atomic(paths[1], to_csv([_result_row(one) for one in every]))
    write_atomic(paths[2], to_csv([row for one in every for row in _tried_rows(one)]))
    return [*paths, *drawn]


def lines(held: Mapping[str, Sequence[Record]], shown: Sequence[str] = ()) -> list[str]:
    """README.md, with the pictures in `shown`."""
    found = ["# The privacy benchmark", "", INTRODUCTION, ""]
    for name in shown:
        found += [f"![Test accuracy over ε, one panel per study and split]({name})", ""]
    first, conditions = next(iter(STUDIES.values())), _by_condition(held)
    found += [
        f"    python -m benchmarks.privacy study {first.name}     # continues after an interruption",
        f"    python -m benchmarks.privacy study {first.name} --cell '{first.cells()[1].key}' --out runs/again",
        "    python -m benchmarks.privacy table --data digits --clients 100     # your own data, clients and ε",
        "    python -m benchmarks.privacy collect FILE.tgz     # add records from another machine",
        "    python -m benchmarks.privacy pages",
        "",
        "[studies.py](studies.py) defines the studies, [search_space.py](search_space.py) the search spaces.",
        "",
    ]
    found += ["## The best method", "", *_winners(conditions), "", *leads.lines(conditions), ""]
    found += ["## Why", "", *diagnostics.lines(conditions), ""]
    for name, study in STUDIES.items():
        found += _study(study, held[name])
    return [
        *found,
        f"Results: [accuracies.csv]({RECORDS}/accuracies.csv). Settings tried: [tried.csv]({RECORDS}/tried.csv).",
    ]


def _study(study: Study, records: Sequence[Record]) -> list[str]:
    what = "area under the ROC curve" if study.budget.by == "area" else "accuracy"
    budget = study.budget
    seeds = f"{len(budget.tuning_seeds)} seed{'s' if len(budget.tuning_seeds) > 1 else ''} each"
    found = [f"## {study.name}", "", f"{study.shows[0].upper()}{study.shows[1:]}; test {what}."]
    found[-1] += f" {budget.trials} settings per method, {seeds}; tested with {len(budget.test_seeds)} seeds."
    found[-1] += "".join(f" {note}." for note in study.notes)
    if not records:
        return [*found, "", "Not run.", ""]
    found[-1] += f" {_range_ends_sentence(study, records)} {_ran(records)}"
    return [*found, "", *grids(records, study.splits, study.epsilons)]


def _ran(records: Sequence[Record]) -> str:
    """The devices and the computing time of the records."""
    machines: dict[str, list[float]] = {}
    for one in records:
        machines.setdefault(f"{one['device']}, torch {one['versions']['torch']}", []).append(one["seconds"])
    shares = [f"{len(own)} cells in {sum(own) / 60:.0f} minutes on {name}" for name, own in machines.items()]
    return f"Computed: {'; '.join(shares)}."


def _by_condition(held: Mapping[str, Sequence[Record]]) -> dict[Condition, dict[str, Record]]:
    """The records by condition and method, for conditions in which all methods have run."""
    found: dict[Condition, dict[str, Record]] = {}
    for records in held.values():
        for one in records:
            found.setdefault(cell_of(one).condition, {})[one["method"]] = one
    return {condition: methods for condition, methods in found.items() if len(methods) == len(SEARCH_SPACES)}


def _winners(conditions: Conditions) -> list[str]:
    """The best method in each condition, and its lead over the second."""
    return by_condition(conditions, lambda one: _lead(conditions[one])) if conditions else ["Not run."]


def _lead(methods: Mapping[str, Record]) -> str:
    first, second = sorted(methods.values(), key=lambda one: -one["accuracy"])[:2]
    return f"{first['method']} (+{100 * (first['accuracy'] - second['accuracy']):.1f})"


def _range_ends_sentence(study: Study, records: Sequence[Record]) -> str:
    """How often a better setting may lie outside the search space: choices from an end of their range."""
    step, moved, length = (
        _count_range_ends(study.budget, records, names) for names in (("lr",), ("beta", "tau"), ("rounds",))
    )
    return (
        "Choices from the lowest or highest part of a range (in brackets the expected count if all settings were "
        f"equally good, and the methods with at least three quarters of such choices): step size {step}; β or τ "
        f"{moved}; longest run {length}."
    )


def _count_range_ends(budget: TuningBudget, records: Sequence[Record], names: Sequence[str]) -> str:
    """The choices of one of `names` at an end of the range: how many, how many by chance, and of which methods."""
    found, of, by_chance, often = 0, 0, 0.0, []
    for method in SEARCH_SPACES:
        chosen = [one["chosen"] for one in records if one["method"] == method and set(names) & set(one["chosen"])]
        ends = Counter(end for one in chosen for end in _ends(budget, method, one, names))
        tried = [bool(_ends(budget, method, one, names)) for one in budget.settings(method)]
        found, of = found + ends.total(), of + len(chosen)
        by_chance += len(chosen) * sum(tried) / len(tried)
        if chosen and ends.total() >= OFTEN * len(chosen):
            often.append(f"{method} {' and '.join(f'{count} {end}' for end, count in ends.items())}")
    whose = f"; {', '.join(often)}" if often else ""
    return f"{found} of {of} ({by_chance:.0f}{whose})"


def _ends(budget: TuningBudget, method: str, setting: Setting, names: Sequence[str]) -> list[str]:
    """The ends at which the settings in `names` lie; a method has β or τ, not both."""
    ends = range_ends(budget.search_space(method), setting, budget.trials)
    ends |= {"rounds": "longest"} if setting["rounds"] == max(budget.rounds) else {}
    return [ends[name] for name in names if name in ends]


def _tried_rows(record: Record) -> list[Row]:
    """Rows of tried.csv: the validation result of each setting of a cell."""
    settings = STUDIES[record["study"]].budget.settings(record["method"])
    return [
        {
            **_key_columns(record),
            **_setting_columns(setting),
            "validation": value,
            "chosen": int(setting == record["chosen"]),
        }
        for setting, value in zip(settings, record["tried"], strict=True)
    ]


def _key_columns(record: Record) -> Row:
    return {name: record[name] for name in ("study", "split", "epsilon", "method", "by")}


def _setting_columns(setting: Setting) -> Row:
    return {"rounds": setting["rounds"], "lr": setting["lr"]} | {n: setting.get(n) for n in ("beta", "tau", "decay")}


def _result_row(record: Record) -> Row:
    """A row of accuracies.csv: the test result of a cell and its chosen setting."""
    return {
        **_key_columns(record),
        "value": round(record["accuracy"], 6),
        "spread": round(record["spread"], 6),
        "loss": _rounded(record.get("loss")),
        "trials": record["trials"],
        **_setting_columns(record["chosen"]),
        **{column: _rounded(record.get(column)) for column in ("exact_epsilon", "sigma", *DIAGNOSTICS)},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
