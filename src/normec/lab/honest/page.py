"""The studies on a page: a table each, who wins where and by how much, and what the estimates were made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...atomic import write_atomic
from ..tables import to_csv, to_markdown
from .contenders import CONTENDERS
from .studies import STUDIES, Place, Study
from .work import Record, percent, place_of, read

NOT_RUN = "not run"
COLUMNS = ("gradient", "estimate", "noise", "cosine", "memory_error")
FORGETS = "NormEC, forgetting"
PAPER = tuple(name for name, one in CONTENDERS.items() if one.remembers and name != FORGETS)
BARE = "DP-SGD, norm"
DIRECT = tuple(name for name, one in CONTENDERS.items() if not one.remembers)
INTRODUCTION = (
    "Every client is protected against a server that sees only sums (client level, zero-out, secure sum), with exact ε "
    "at δ = 1e-5; all clients take part in every round. For each ε and split every method got the same number of "
    "settings, drawn at random from its own ranges (rounds, step size, β or τ, forgetting), judged on a fifth of the "
    "training records held out; the best was trained anew on all training records with other seeds and is reported on "
    "the test set: mean ± standard deviation, in percent. The tuning itself is not covered by the guarantee. Every "
    "record belongs to one client: none is reused. The settings tried are few: a method with "
    "more of them to choose is at a disadvantage, and a single tuning seed lets chance in."
)

FLOOR = (
    "Without SN a run moves x by γ times the sum of its directions. With T rounds at a given ε the noise in their mean "
    "has norm √d/(μn), whatever T, beside a mean of length at most 1 (in units of the largest message; μ is the "
    "guarantee as Gaussian DP, d the dimension, n the clients). With error feedback the same noise stays in ĝ for all "
    "later rounds: the sum of the directions then holds 2/√3 = 1.15 times as much beside the longest that it can be, "
    "and more once the memories have arrived at the gradients, for then the signal stops growing and the noise does "
    "not. So under noise error feedback can gain only by repairing a bias, and must gain more than it pays. "
    "The noise by study:",
)
MADE_OF = (
    "At the end of the test runs of the chosen settings, medians over the places above. `noise / ∇f`: the norm of the "
    "noise in ĝ beside the true gradient's; with error feedback it is all that has been gathered and stays, without it "
    "is one round's and new each time, so the two kinds are not to be compared. `memory error / ∇f`: how far the "
    "clients' memories are from their gradients, on average, beside the same. `cosine`: of ĝ and ∇f.",
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
        lines += [*to_markdown((split, *_targets(across)), rows), ""]
    return lines


def _targets(epsilons: Iterable[float]) -> list[str]:
    return [f"ε = {epsilon:g}" for epsilon in epsilons]


def _shown(record: Record | None, best: float | None) -> str:
    if record is None:
        return NOT_RUN
    return f"**{percent(record)}**" if record["accuracy"] == best else percent(record)


def write(folder: Path) -> list[Path]:
    """README.md and honest.csv from the records in `folder`."""
    held = {name: read(study, folder) for name, study in STUDIES.items()}
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "README.md", folder / "honest.csv"]
    write_atomic(paths[0], "\n".join(lines(held)).rstrip() + "\n")
    write_atomic(paths[1], to_csv([_row(one) for records in held.values() for one in records]))
    return paths


def lines(held: Mapping[str, Sequence[Record]]) -> list[str]:
    found = ["# What honest privacy gives", "", INTRODUCTION, ""]
    found += [f"    normec privacy study {next(iter(STUDIES))}     # goes on where it stopped", ""]
    found += ["## Who wins", "", *_winners(held), "", *_sides(held), "", "## Why", "", *_why(held), ""]
    for name, study in STUDIES.items():
        found += _study(study, held[name])
    return [*found, "All numbers: [honest.csv](honest.csv)."]


def _study(study: Study, records: Sequence[Record]) -> list[str]:
    what = "area under the ROC curve" if study.effort.by == "area" else "accuracy"
    effort = study.effort
    seeds = f"{len(effort.tuning_seeds)} seed{'s' if len(effort.tuning_seeds) > 1 else ''} each"
    found = [f"## {study.name}", "", f"{study.shows[0].upper()}{study.shows[1:]}; test {what}."]
    found[-1] += f" {effort.trials} settings a method, {seeds}; tested with {len(effort.test_seeds)} seeds."
    found[-1] += "".join(f" {note}." for note in study.notes)
    if not records:
        return [*found, "", "Not run.", ""]
    return [*found, "", *grids(records, study.splits, study.epsilons)]


def _by_place(held: Mapping[str, Sequence[Record]]) -> dict[Place, dict[str, Record]]:
    """The records of each study, split and ε of which all methods have run."""
    found: dict[Place, dict[str, Record]] = {}
    for records in held.values():
        for one in records:
            place = Place(one["study"], "", one["epsilon"], one["split"])
            found.setdefault(place, {})[one["method"]] = one
    return {place: methods for place, methods in found.items() if len(methods) == len(CONTENDERS)}


def _winners(held: Mapping[str, Sequence[Record]]) -> list[str]:
    """The best method of each place, and its lead over the second."""
    places = _by_place(held)
    if not places:
        return ["Not run."]
    across = sorted({place.epsilon for place in places})
    kinds = dict.fromkeys((place.study, place.split) for place in places)
    rows = [
        [f"{study}, {split}", *(_lead(places.get(Place(study, "", epsilon, split))) for epsilon in across)]
        for study, split in kinds
    ]
    return to_markdown(("study, split", *_targets(across)), rows)


def _lead(methods: Mapping[str, Record] | None) -> str:
    if methods is None:
        return NOT_RUN
    first, second = sorted(methods.values(), key=lambda one: -one["accuracy"])[:2]
    return f"{first['method']} (+{100 * (first['accuracy'] - second['accuracy']):.1f})"


def _best(methods: Mapping[str, Record], names: Iterable[str]) -> Record:
    return max((methods[name] for name in names), key=lambda one: float(one["accuracy"]))


def _sides(held: Mapping[str, Sequence[Record]]) -> list[str]:
    """Error feedback as in the paper, and with forgetting, against methods without: how often each is ahead."""
    places = _by_place(held)
    found = []
    for title, names in (("Error feedback as in the paper", PAPER), ("NormEC with forgetting", (FORGETS,))):
        for split in dict.fromkeys(place.split for place in places):
            leads = {
                place: _difference(_best(methods, names), _best(methods, DIRECT))
                for place, methods in places.items()
                if place.split == split
            }
            ahead = [place for place, (lead, noise) in leads.items() if lead > noise]
            behind = [place for place, (lead, noise) in leads.items() if lead < -noise]
            middle = statistics.median(100 * lead for lead, _ in leads.values())
            found.append(
                f"- **{title}, {split}**: against the better DP-SGD, ahead in {len(ahead)} of {len(leads)} places, "
                f"behind in {len(behind)}, level in the others; median lead {middle:+.1f} points."
            )
    level = (
        "Level: the difference is within the two spreads (their root sum of squares), from few seeds. The paper's side "
        "is the best of its three methods, by test accuracy, DP-SGD's the better of two: the larger side gains by it."
    )
    return [*found, "", level] if found else []


def _difference(one: Record, other: Record) -> tuple[float, float]:
    return one["accuracy"] - other["accuracy"], (one["spread"] ** 2 + other["spread"] ** 2) ** 0.5


def _why(held: Mapping[str, Sequence[Record]]) -> list[str]:
    """The noise that no method escapes, and what ĝ was made of at the end of the chosen runs."""
    places = _by_place(held)
    if not places:
        return ["Not run."]
    rows = []
    for name in CONTENDERS:
        for split in dict.fromkeys(place.split for place in places):
            own = [methods[name] for place, methods in places.items() if place.split == split]
            ended = [one for one in own if one.get("gradient")]
            rows += [[name, split, *_anatomy(ended)]] if ended else []
    header = ("method", "split", "noise / ∇f", "memory error / ∇f", "cosine", "β or τ", "rounds")
    return [*FLOOR, "", *_floors(places), "", *MADE_OF, "", *to_markdown(header, rows)]


def _floors(places: Mapping[Place, Mapping[str, Record]]) -> list[str]:
    """√d / (μ n) of each study and ε, read off the runs of DP-SGD with normalisation: a round's noise over √T."""
    across = sorted({place.epsilon for place in places})
    rows = []
    for study in dict.fromkeys(place.study for place in places):
        own = {place.epsilon: methods[BARE] for place, methods in places.items() if place.study == study}
        noise = {e: one["noise"] / one["chosen"]["rounds"] ** 0.5 for e, one in own.items() if "noise" in one}
        rows.append([study, *(f"{noise[e]:.2g}" if e in noise else NOT_RUN for e in across)])
    return to_markdown(("study", *_targets(across)), rows)


def _anatomy(ended: Sequence[Record]) -> list[str]:
    def middle(values: Iterable[Any]) -> str:
        known = [float(value) for value in values if value is not None]
        return f"{statistics.median(known):.3g}" if known else "–"

    chosen = [one["chosen"] for one in ended]
    return [
        middle(one["noise"] / one["gradient"] for one in ended),
        middle(one["memory_error"] / one["gradient"] for one in ended if "memory_error" in one),
        middle(one["cosine"] for one in ended),
        middle(one.get("beta", one.get("tau")) for one in chosen),
        middle(one["rounds"] for one in chosen),
    ]


def standing(folder: Path) -> str:
    """How many of the studies' cells have run."""
    done = sum(len(read(study, folder)) for study in STUDIES.values())
    return f"{done} of {sum(len(study.cells()) for study in STUDIES.values())}"


def summary(folder: Path, link: Path) -> list[str]:
    """For the project's README, from where the folder is reached by `link`: the best method of each place."""
    held = {name: read(study, folder) for name, study in STUDIES.items()}
    if not _by_place(held):
        return ["**What honest privacy gives**: not run yet; `normec privacy study all` runs it."]
    page = f"[tables, and why]({(link / 'README.md').as_posix()})"
    head = "client level, zero-out, secure sum, exact ε, every method tuned alike; lead over the second in points."
    return [f"**Under a true guarantee, the best method** ({page}): {head}", "", *_winners(held)]


def _row(record: Record) -> dict[str, Any]:
    place = place_of(record)
    chosen = record["chosen"]
    return {
        "study": place.study,
        "split": place.split,
        "epsilon": place.epsilon,
        "method": place.method,
        "by": record["by"],
        "value": round(record["accuracy"], 6),
        "spread": round(record["spread"], 6),
        "loss": _digits(record.get("loss")),
        "trials": record["trials"],
        "rounds": chosen["rounds"],
        "lr": chosen["lr"],
        "beta": chosen.get("beta"),
        "tau": chosen.get("tau"),
        "decay": chosen.get("decay"),
        **{column: _digits(record.get(column)) for column in ("exact_epsilon", "sigma", *COLUMNS)},
    }


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
