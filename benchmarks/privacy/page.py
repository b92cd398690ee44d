"""The studies on a page: a table each, who wins where and by how much, and what the estimates were made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from normec.experiments.tables import to_markdown
from normec.system.files import write_atomic

from . import edges, leads, sheets, why
from .contenders import CONTENDERS
from .leads import NOT_RUN, Places, by_place, targets
from .studies import STUDIES, Place, Study
from .work import Record, percent, read

TRIAL = "momentum.md"  # written by hand, beside the page
INTRODUCTION = (
    "Every client is protected against a server that sees only sums (client level, zero-out, secure sum), with exact ε "
    "at δ = 1e-5; all clients take part in every round. For each ε and split every method got the same number of "
    "settings, spread evenly over its own ranges (rounds, step size, β or τ, forgetting), judged on a fifth of the "
    "training records held out; the best was trained anew on all training records with other seeds and is reported on "
    "the test set: mean ± standard deviation, in percent. The tuning itself is not covered by the guarantee. Every "
    "record belongs to one client: none is reused. The settings tried are few: a method with "
    "more of them to choose is at a disadvantage, and a single tuning seed lets chance in. DP-SGD is without momentum: "
    "where it swings (below), that may be worth more than error feedback."
)


def grids(records: Sequence[Record], splits: Iterable[str] = (), epsilons: Iterable[float] = ()) -> list[str]:
    """One table a split, methods down, ε across; of the splits and ε given, else of all there are.

    The best is in bold where all methods have run.
    """
    lines = []
    for split in splits or sorted({one["split"] for one in records}):
        held = {(one["method"], one["epsilon"]): one for one in records if one["split"] == split}
        across = sorted(epsilons or {epsilon for _, epsilon in held})
        ran = {e: [one["accuracy"] for (_, at), one in held.items() if at == e] for e in across}
        best = {e: max(values) if len(values) == len(CONTENDERS) else None for e, values in ran.items()}
        rows = [[name, *(_shown(held.get((name, e)), best[e]) for e in across)] for name in CONTENDERS]
        lines += [*to_markdown((split, *targets(across)), rows), ""]
    return lines


def _shown(record: Record | None, best: float | None) -> str:
    if record is None:
        return NOT_RUN
    return f"**{percent(record)}**" if record["accuracy"] == best else percent(record)


def write(folder: Path, pictures: bool = True) -> list[Path]:
    """The page of the records in `folder`, their numbers as CSV, and pictures if asked for; it shows what there is."""
    held = {name: read(study, folder) for name, study in STUDIES.items()}
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if pictures:
        from . import picture

        drawn = picture.draw(held, folder)
        for old in set(folder.glob("accuracy-*.png")) - set(drawn):
            old.unlink()
    every = [one for records in held.values() for one in records]
    paths = [folder / name for name in ("README.md", "honest.csv", "tried.csv")]
    shown = [path.name for path in sorted(folder.glob("accuracy-*.png"))]
    write_atomic(paths[0], "\n".join(lines(held, shown)).rstrip() + "\n")
    write_atomic(paths[1], sheets.by_cell(every))
    write_atomic(paths[2], sheets.by_setting(every))
    return [*paths, *drawn]


def lines(held: Mapping[str, Sequence[Record]], shown: Sequence[str] = ()) -> list[str]:
    found = ["# What honest privacy gives", "", INTRODUCTION, ""]
    for name in shown:
        found += [f"![test accuracy over ε, a panel for each study and split]({name})", ""]
    first, places = next(iter(STUDIES.values())), _by_place(held)
    found += [
        f"    normec privacy study {first.name}     # goes on where it stopped",
        f"    normec privacy study {first.name} --cell '{first.cells()[1].key}' --out runs/again     # one cell",
        "",
    ]
    found += ["## Who wins", "", *_winners(places), "", *leads.lines(places), "", "## Why", "", *why.lines(places), ""]
    for name, study in STUDIES.items():
        found += _study(study, held[name])
    return [*found, "All numbers: [honest.csv](honest.csv); all settings tried: [tried.csv](tried.csv)."]


def _study(study: Study, records: Sequence[Record]) -> list[str]:
    what = "area under the ROC curve" if study.effort.by == "area" else "accuracy"
    effort = study.effort
    seeds = f"{len(effort.tuning_seeds)} seed{'s' if len(effort.tuning_seeds) > 1 else ''} each"
    found = [f"## {study.name}", "", f"{study.shows[0].upper()}{study.shows[1:]}; test {what}."]
    found[-1] += f" {effort.trials} settings a method, {seeds}; tested with {len(effort.test_seeds)} seeds."
    found[-1] += "".join(f" {note}." for note in study.notes)
    if not records:
        return [*found, "", "Not run.", ""]
    found[-1] += f" {edges.told(study, records)} {_ran(records)}"
    return [*found, "", *grids(records, study.splits, study.epsilons)]


def _ran(records: Sequence[Record]) -> str:
    """Where the cells ran, and how long that took."""
    machines: dict[str, list[float]] = {}
    for one in records:
        machines.setdefault(f"{one['device']}, torch {one['versions']['torch']}", []).append(one["seconds"])
    shares = [f"{len(own)} cells in {sum(own) / 60:.0f} minutes on {name}" for name, own in machines.items()]
    return f"Ran: {'; '.join(shares)}."


def _by_place(held: Mapping[str, Sequence[Record]]) -> dict[Place, dict[str, Record]]:
    """The records of each study, split and ε of which all methods have run."""
    found: dict[Place, dict[str, Record]] = {}
    for records in held.values():
        for one in records:
            place = Place(one["study"], "", one["epsilon"], one["split"])
            found.setdefault(place, {})[one["method"]] = one
    return {place: methods for place, methods in found.items() if len(methods) == len(CONTENDERS)}


def _winners(places: Places) -> list[str]:
    """The best method of each place, and its lead over the second."""
    return by_place(places, lambda place: _lead(places[place])) if places else ["Not run."]


def _lead(methods: Mapping[str, Record]) -> str:
    first, second = sorted(methods.values(), key=lambda one: -one["accuracy"])[:2]
    return f"{first['method']} (+{100 * (first['accuracy'] - second['accuracy']):.1f})"


def standing(folder: Path) -> str:
    """How many of the studies' cells have run."""
    done = sum(len(read(study, folder)) for study in STUDIES.values())
    return f"{done} of {sum(len(study.cells()) for study in STUDIES.values())}"


def summary(folder: Path, link: Path) -> list[str]:
    """For the project's README, from where the folder is reached by `link`: the best method of each place."""
    held = {name: read(study, folder) for name, study in STUDIES.items()}
    places = _by_place(held)
    if not places:
        return ["**What honest privacy gives**: not run yet; `normec privacy study all` runs it."]
    page = f"[tables, and why]({(link / 'README.md').as_posix()})"
    trials = [study.effort.trials for name, study in STUDIES.items() if held[name]]
    tuned = f"every method tuned alike ({min(trials)} to {max(trials)} settings)"
    head = f"client level, zero-out, secure sum, exact ε, {tuned}, none with momentum; lead over the second in points."
    if (folder / TRIAL).exists():
        head += f" On networks with little noise momentum may change it: [a trial]({(link / TRIAL).as_posix()})."
    return [f"**Under a true guarantee, the best method** ({page}): {head}", "", *_winners(places)]
