"""The pages of the benchmark, made from the records: README.md, studies.md, results.csv and the picture."""

from __future__ import annotations

import math
import statistics as plain_statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normec.algorithms.method import Steps
from normec.experiments import methods
from normec.experiments.export import Row, to_csv, to_markdown
from normec.settings import make
from normec.system.files import write_atomic

from .conditions import (
    LITTLE,
    Conditions,
    Held,
    by_condition,
    leading_family,
    noise,
    on_linear_models,
    on_networks,
    private,
    without_noise,
)
from .contenders import ALL, CONTENDERS, Family
from .design import range_ends
from .records import Record, cell_of, percent, read
from .statistics import LEVEL, Comparison, compare, expected_best, rank
from .studies import STUDIES, TRAMER_BONEH, Condition, Published, Study, shown

RECORDS = "records"  # the folder of the records and the picture, next to README.md
ALL_RESULTS = "studies.md"  # the page with the tables of all studies, next to README.md
PICTURE = "winners.png"
FAMILIES: Mapping[Family, str] = {
    "plain": "DP-SGD",
    "momentum": "with momentum or Adam",
    "local": "local steps",
    "error feedback": "error feedback",
}
NETWORKS, ALIKE, DIFFERENT = "Networks, 1,000 clients", "clients alike", "clients differ"
QUESTION = "cifar10-10000"
# Studies of CIFAR-10 with 10,000 clients, and their models.
MANY_SMALL = {QUESTION: "the CNN", "cifar10-features-10000": "softmax regression on fixed features"}
GOAL_EPSILON, GOALS = 8.0, {"iid": 55.0, "label": 50.0}  # what was to be reached there, in percent
RECORD_LEVEL = ", each record protected, a trusted server"  # how the descriptions of these studies end
UNMOVED = 0.5  # training that changes an accuracy by fewer points does not move it
CLOSE = 0.5  # how many points below a published accuracy a result may be
PFL, PFL_TRUE = "cifar10-pfl", "cifar10-pfl-true"
MEASURES = {"area": "area under the ROC curve", "next_character": "accuracy of the next character"}
INTRODUCTION = """# Private distributed methods at a true ε

Which method should be used under a true guarantee? {contenders} methods are compared under the same exact ε at
δ = 1e-5, with the same number of settings tried for each of them. Unless a study says otherwise, every client is
protected against a server that sees only sums, and all clients take part in every round. Not every study includes
every method. [All results]({all_results}) has the table of each study, what the methods cost, and how much tuning they
need.

![The best method by noise and split]({picture})

{caption}

## Which method to use

{advice}

{reading_advice}

    python -m benchmarks.privacy list                  # studies, what has run, and how long the rest takes
    python -m benchmarks.privacy run a9a-100/label/8   # a study, split, ε or method; continues after an interruption
    python -m benchmarks.privacy page                  # writes the pages from the records
"""
ADVICE = """\
The method in *italics* has the best mean rank over the conditions of its line, among those that ran in all of them;
another one is "not significantly worse" if its mean rank is within Nemenyi's critical difference
([names]({all_results}#not-significantly-worse)). Noise is little if √d/(μn) is below {little:g}: its norm in the mean
of all directions of a run, relative to the largest possible signal.{unranked}"""
RESULTS = """# All results of the privacy benchmark

The tables behind [the comparison of private distributed methods](README.md), which also says how the numbers are
measured and cited.
"""
READING = """## How to read and cite

**±** in [a table of a study]({all_results}) is half of the {level:.0f} % confidence interval of a mean over test seeds,
in points. All methods of a condition are tested with the same seeds, and the interval comes from their pooled variance
after the effect that a seed has on all of them is removed ([statistics.py](statistics.py)). So it is the same for all
methods of a column, and it says how sure a mean is, not how much single runs differ. Where results stand beside
published ones, ± is the standard deviation over the test seeds. Each study says with how many seeds it was tuned and
tested.

**One number** is identified by its study, split, ε and method. Its line in `{records}/STUDY.jsonl` has the seeds, the
test result of each seed, the chosen setting, the validation result of every setting, the device and the versions;
[results.csv]({records}/results.csv) has one row for each line.{example}

**Citation.** Give the study, split, ε and method, the number of test seeds, and the version or commit of normec whose
record it is. [CITATION.cff](../../CITATION.cff) has the citation of the software and of the paper on NormEC; the papers
of other methods are named in the docstrings of their classes.
"""


SIGNIFICANT = "significant difference"
LEGEND = (
    f"± is half of the {100 * (1 - LEVEL):.0f} % confidence interval of a mean. Two methods of a column differ "
    f"significantly if they are further apart than its last row (Tukey, level {LEVEL}); a value is bold if all methods "
    "have run and all others are significantly worse."
)
BY_CONDITION = """## By condition

The best test value in percent of each family (accuracy; on w8a the area under the ROC curve). A value is bold if all \
methods of the study have run and no method of another family is within the honestly significant difference. The noise \
is √d/(μn).
"""
WITHOUT_NOISE = """## Without noise

The same methods with the same bounds on their messages run without noise. This protects nobody; it shows what the \
bounds cost where clients differ, which is the case that error feedback was made for. The splits go from clients that \
are alike (iid) over Dirichlet splits to clients of one class each (label).
"""
PROTOCOL = """## How it is measured

For each ε and split every method gets the same number of settings from a seeded Latin hypercube over its ranges
(rounds, step size, β or τ, and so on), and each is trained on four fifths of the training records and evaluated on the
last fifth. The best setting is trained again on all training records with other seeds, which are the same for all
methods. The tables of the studies show the mean on the test set in percent, and half of its 95 % confidence interval. A
value is bold if all others have run and are significantly worse: two methods differ significantly if they are further
apart than Tukey's honestly significant difference, with seeds as blocks. Over conditions, mean ranks are compared by
Friedman's and Nemenyi's tests, which take conditions to be independent; those that share a data set are not quite.

The guarantee covers the training, not the choice of settings. Every record belongs to exactly one client.
[contenders.py](contenders.py) has the methods and their ranges, [studies.py](studies.py) the studies.

## A method or a study of your own

One file beside that of your [method](../../docs/tutorials/own-method.md) is enough, here `my_study.py`:

```py
from benchmarks.privacy.contenders import Contender
from benchmarks.privacy.studies import Study
from benchmarks.privacy.tuning import TuningBudget

MINE = Study(
    "digits-mine",
    "softmax regression on digits, 100 clients",
    {"data": "digits", "model": "softmax", "clients": 100},  # settings of `normec train`
    TuningBudget(trials=6, tuning_seeds=(0,), test_seeds=(2, 3, 4)),
    epsilons=(8.0,),
    splits=("iid", "label"),
    contenders=("DP-SGD, clip", "NormEC, forgetting", "Mine"),
    own={"Mine": Contender("my_method.py:Clip21SGDM", "error feedback", {"tau": "memory", "lr": "plain_steps"})},
)
```

    python -m benchmarks.privacy run my_study.py:MINE --out my-results

The command prints a table like those of [all results](studies.md) and keeps the records in `my-results/records/`;
`my_study.py:MINE/iid` runs one split of it. A range is two bounds, a list of choices, or a role that other methods
share (`ROLES` in contenders.py); `fixed=` of a contender holds settings that are not tuned, such as the server's
optimizer. The number of rounds is tuned as well, with the choices of `TuningBudget(..., rounds=(100, 200))`. To add the
method to this page, make it an entry of `CONTENDERS`, and a study one of `STUDIES`.
"""


def write(folder: Path, picture: bool = True) -> list[Path]:
    """Write the pages of the records in `folder`/records.

    Args:
        folder: The folder of README.md.
        picture: Draw the picture as well.

    Returns:
        The files that were written.
    """
    inner = folder / RECORDS
    held = {name: read(study, inner) for name, study in STUDIES.items()}
    inner.mkdir(parents=True, exist_ok=True)
    paths = [folder / "README.md", folder / ALL_RESULTS, inner / "results.csv"]
    write_atomic(paths[0], text(held))
    write_atomic(paths[1], all_results(held))
    write_atomic(paths[2], to_csv([_row(one) for records in held.values() for one in records]))
    if picture:
        from .picture import draw

        paths.append(draw(by_condition(held), inner / PICTURE))
    return paths


def values(records: Mapping[str, Record]) -> dict[str, list[float]]:
    """The test values of each contender of a condition."""
    return {name: one["accuracies"] for name, one in records.items()}


def of_study(study: Study, folder: Path) -> list[str]:
    """The section of one study, whose records are in `folder`, with the differences that are significant."""
    records = read(study, folder)
    return [*_study(study, records, differences=True), LEGEND, ""] if records else _study(study, records)


def text(held: Held) -> str:
    """README.md."""
    found = by_condition(held)
    conditions, plain = private(found), without_noise(found)
    compared = {one: compare(values(own)) for one, own in found.items()}
    start = INTRODUCTION.format(
        contenders=len(CONTENDERS),
        picture=f"{RECORDS}/{PICTURE}",
        caption=_caption(conditions, compared),
        advice="\n".join([*advice(conditions), *_many_small(conditions, compared)]) or "Not run.",
        reading_advice=ADVICE.format(little=LITTLE, all_results=ALL_RESULTS, unranked=_unranked(conditions, compared)),
        all_results=ALL_RESULTS,
    )
    parts = [start, *_question(conditions, compared), *_conditions(conditions, compared, BY_CONDITION)]
    parts += [*_pretrained(held), *_ranks(conditions), *_conditions(plain, compared, WITHOUT_NOISE)]
    parts += [*_published(held), *_pfl(held), _reading(conditions, compared), PROTOCOL]
    return "\n".join(parts).rstrip() + "\n"


def all_results(held: Held) -> str:
    """studies.md: the table of each study, what methods cost, and how much tuning they need."""
    conditions = private(by_condition(held))
    parts = [RESULTS, *_near(rankings(conditions)), *_costs(held), *_tuning(held)]
    for name, study in STUDIES.items():
        parts += _study(study, held[name])
    return "\n".join(parts).rstrip() + "\n"


def _caption(conditions: Conditions, compared: Mapping[Condition, Comparison]) -> str:
    """What a full and a hollow mark of the picture mean, and how many are full."""
    full = sum(leading_family(one, compared[one]) is not None for one in conditions)
    return (
        f"A mark is a condition, in the colour of the best method's family. It is full in {full} of "
        f"{len(conditions)} private conditions: all methods of the study have run, and no method of another family is "
        "within the significant difference. In the others it is hollow: the lead of the best family may be chance, or "
        "some methods have not run."
    )


def _reading(conditions: Conditions, compared: Mapping[Condition, Comparison]) -> str:
    """How to read and cite a number, with the best one of the first condition as an example."""
    example = ""
    one = next(iter(conditions), None)
    if one is not None:
        name = compared[one].best
        record, value = conditions[one][name], _value(compared[one], name, STUDIES[one.study]).strip("*")
        example = (
            f" For example,\n{value} is the test {_measure(STUDIES[one.study])} of {name} in {one}, the mean of "
            f"{len(record['accuracies'])} seeds. This command measures it again:\n\n"
            f'    python -m benchmarks.privacy run "{one.study}/{cell_of(record).key}" --out FOLDER\n\n'
            "The same version on the same machine repeats it. Another version may draw other noise from the same "
            "seeds, and the\nresult then differs about as much as ± says."
        )
    return READING.format(level=100 * (1 - LEVEL), records=RECORDS, example=example, all_results=ALL_RESULTS)


def common(conditions: Conditions) -> list[str]:
    """The contenders that are ranked: those that ran in more than half of the conditions."""
    ran = Counter(name for own in conditions.values() for name in own)
    return [name for name in CONTENDERS if 2 * ran[name] > len(conditions)]


def _means(conditions: Conditions, ranked: Sequence[str]) -> list[dict[str, float]]:
    """The mean values of the ranked contenders, for those of the conditions in which all of them ran."""
    held = [own for own in conditions.values() if set(ranked) <= set(own)]
    return [{name: float(own[name]["accuracy"]) for name in ranked} for own in held]


@dataclass(frozen=True)
class Advice:
    """The method with the best mean rank in conditions of one kind.

    Attributes:
        where: The kind of conditions.
        noise: "little noise", "much noise", or nothing if conditions are not divided by their noise.
        conditions: How many conditions there are.
        best: The contender with the best mean rank.
        rank: Its mean rank.
        near: The contenders that are not significantly worse, the best first.
        others: How many contenders it is compared with.
    """

    where: str
    noise: str
    conditions: int
    best: str
    rank: float
    near: tuple[str, ...]
    others: int

    def __str__(self) -> str:
        amount = f"with {self.noise} " if self.noise else ""
        return (
            f"{amount}*{self.best}* ({self.conditions} conditions; {len(self.near)} of {self.others} others are not "
            "significantly worse)"
        )


def rankings(conditions: Conditions) -> list[Advice]:
    """The best method on linear models, by split and amount of noise, and on networks with 1,000 clients, by split."""
    parts = (("little noise", 0.0, LITTLE), ("much noise", LITTLE, math.inf))
    kinds: list[tuple[str, Conditions, Sequence[tuple[str, float, float]]]] = [
        ("Linear models", on_linear_models(conditions), parts),
        (NETWORKS, on_networks(conditions), (("", 0.0, math.inf),)),
    ]
    found = []
    for kind, held, amounts in kinds:
        ran = _in_all(held)
        for same, alike in ((True, ALIKE), (False, DIFFERENT)):
            for amount, low, high in amounts:
                own = {
                    one: each
                    for one, each in held.items()
                    if (one.split == "iid") == same and low <= noise(each) < high
                }
                if len(own) > 1 and len(ran) > 1:
                    ranking = rank(_means(own, ran))
                    best, *others = ranking.ranks
                    near = [name for name in others if ranking.ranks[name] - ranking.ranks[best] <= ranking.difference]
                    found.append(
                        Advice(
                            f"{kind}, {alike}", amount, len(own), best, ranking.ranks[best], tuple(near), len(others)
                        )
                    )
    return found


def advice(conditions: Conditions) -> list[str]:
    """The best methods as lines of advice, one for each kind of conditions."""
    by_kind: dict[str, list[Advice]] = {}
    for one in rankings(conditions):
        by_kind.setdefault(one.where, []).append(one)
    return [f"- **{where}**: {'; '.join(map(str, found))}." for where, found in by_kind.items()]


def _best_unranked(
    conditions: Conditions, compared: Mapping[Condition, Comparison]
) -> dict[Condition, tuple[str, str]]:
    """Where a method that is not ranked on networks is best nevertheless: this method, and the best ranked one."""
    held = on_networks(conditions)
    ranked = _in_all(held)
    found = {}
    for one in held:
        means = compared[one].means
        if compared[one].best not in ranked and ranked:
            found[one] = compared[one].best, max(ranked, key=lambda name: means[name])
    return found


def _in_all(held: Conditions) -> list[str]:
    """The contenders that ran in all of these conditions."""
    return [name for name in CONTENDERS if all(name in own for own in held.values())]


def _unranked(conditions: Conditions, compared: Mapping[Condition, Comparison]) -> str:
    """The methods that are not ranked on networks, and where one of them is best nevertheless."""
    held = on_networks(conditions)
    ranked = _in_all(held)
    others = list(dict.fromkeys(name for own in held.values() for name in own if name not in ranked))
    if not others or not ranked:
        return ""
    said = f"\n{', '.join(others)} ran in few conditions with networks and are not ranked there."
    ahead: dict[str, list[tuple[Condition, str]]] = {}
    for one, (best, known) in _best_unranked(conditions, compared).items():
        ahead.setdefault(best, []).append((one, known))
    for best, where in ahead.items():
        ran = sum(best in own for own in held.values())
        surely = [(one, known) for one, known in where if compared[one].apart(best, known)]
        said += f" {best} has the highest value in {len(where)} of the {ran} such conditions in which it ran"
        means = {one: {name: 100 * compared[one].means[name] for name in (best, known)} for one, known in surely}
        apart = [f"{one}: {means[one][best]:.1f} % and {means[one][known]:.1f} % ({known})" for one, known in surely]
        said += f", significantly above the best ranked method in {len(apart)} ({'; '.join(apart)})." if apart else "."
    return said


def recommended(held: Held) -> dict[str, set[str]]:
    """For each kind of conditions in the advice, the contenders that are best or not significantly worse."""
    conditions = private(by_condition(held))
    compared = {one: compare(values(own)) for one, own in conditions.items()}
    found: dict[str, set[str]] = {}
    for line in rankings(conditions):
        found.setdefault(line.where, set()).update((line.best, *line.near))
    for one, (best, _) in _best_unranked(conditions, compared).items():
        found.setdefault(f"{NETWORKS}, {ALIKE if one.split == 'iid' else DIFFERENT}", set()).add(best)
    for one in conditions:
        if one.study in MANY_SMALL:
            found.setdefault(_ten_thousand(one.study), set()).update(compared[one].tied())
    return found


def _near(found: Sequence[Advice]) -> list[str]:
    """The methods that are not significantly worse than the best, which the advice only counts."""
    if not found:
        return []
    rows = [
        [
            f"{one.where}{f', {one.noise}' if one.noise else ''}",
            str(one.conditions),
            f"{one.best} ({one.rank:.1f})",
            "; ".join(one.near),
        ]
        for one in found
    ]
    return [
        "## Not significantly worse",
        "",
        "The methods whose mean ranks are within Nemenyi's critical difference of the best one, the best first.",
        "",
        *to_markdown(("where", "conditions", "best (mean rank)", "not significantly worse"), rows),
        "",
    ]


def _ten_thousand(study: str) -> str:
    """The title of a study with 10,000 clients in the advice."""
    model = MANY_SMALL[study].removeprefix("the ")
    return f"{model[0].upper()}{model[1:]}, 10,000 clients"


def _many_small(conditions: Conditions, compared: Mapping[Condition, Comparison]) -> list[str]:
    """Lines of advice: whether error feedback leads a step that remembers, on CIFAR-10 with 10,000 clients."""
    lines = []
    for study in MANY_SMALL:
        said = _verdict([one for one in conditions if one.study == study], compared)
        if said:
            lines.append(f"- **{_ten_thousand(study)}** (CIFAR-10): {said[0].lower()}{said[1:]}")
    return lines


def _verdict(own: Sequence[Condition], compared: Mapping[Condition, Comparison]) -> str:
    """Where the best error feedback leads the best step that remembers, and where the difference may be chance."""
    ahead, behind, level = [], [], 0
    for one in own:
        feedback, remembering = (_best(compared[one], family) for family in ("error feedback", "momentum"))
        if feedback is None or remembering is None:
            continue
        lead = 100 * (compared[one].means[feedback] - compared[one].means[remembering])
        clients = "iid clients" if one.split == "iid" else f"clients sorted by {one.split}"
        place = f"with {clients} at {shown(one.epsilon)}"
        if not compared[one].apart(feedback, remembering):
            level += 1
        elif lead > 0:
            ahead.append(f"{place} (+{lead:.1f} points)")
        else:
            behind.append(f"{place} (+{-lead:.1f} points)")
    if not ahead and not behind and not level:
        return ""
    contenders = STUDIES[own[0].study].contenders
    steps = [kind for kind in ("momentum", "Adam") if f"DP-SGD, norm, {kind}" in contenders]
    said = []
    if ahead:
        only = "only " if behind or level else ""
        said.append(f"Error feedback leads {' and '.join(steps)} {only}{' and '.join(ahead)}.")
    if behind:
        leading = " or ".join(steps)
        said.append(f"{leading[0].upper()}{leading[1:]} leads {' and '.join(behind)}.")
    if level:
        which = "the other" if said else "the"
        rest = f"{which} {f'{level} conditions' if level > 1 else 'condition'}"
        said.append(f"In {rest} the difference is not significant.")
    return " ".join(said)


def _best(comparison: Comparison, family: Family) -> str | None:
    own = [name for name in comparison.means if ALL[name].family == family]
    return max(own, key=lambda name: comparison.means[name], default=None)


def _question(conditions: Conditions, compared: Mapping[Condition, Comparison]) -> list[str]:
    """All contenders on CIFAR-10 with 10,000 clients."""
    own, study = [one for one in conditions if one.study == QUESTION], STUDIES[QUESTION]
    if not own:
        return []
    heads = [f"{one.split}, {shown(one.epsilon)}" for one in own]
    rows = [
        [name, *(_value(compared[one], name, study) if name in conditions[one] else "not run" for one in own)]
        for name in study.contenders
    ]
    return [
        "## Is it error feedback or momentum?",
        "",
        f"CIFAR-10 with 10,000 clients, a CNN. {_verdict(own, compared)} Error feedback keeps a memory at every "
        "client, and momentum or Adam at the server keeps nothing there. "
        f"{_leads(compared, own)}All methods were tuned alike and tested with "
        f"{_counted(len(study.budget.test_seeds), 'seed')}:",
        "",
        *to_markdown(("test accuracy", *heads), rows),
        "",
        *_turns([conditions[one] for one in own]),
        *_goals(conditions, compared),
    ]


def _goals(conditions: Conditions, compared: Mapping[Condition, Comparison]) -> list[str]:
    """Whether the goals for CIFAR-10 with 10,000 clients are met, and by which model."""
    said = []
    for study, model in MANY_SMALL.items():
        held = {split: Condition(study, GOAL_EPSILON, split) for split in GOALS}
        if all(one in conditions for one in held.values()):
            best = {split: 100 * compared[one].means[compared[one].best] for split, one in held.items()}
            met = [best[split] >= goal for split, goal in GOALS.items()]
            verb = "meets both" if all(met) else "meets one of them" if any(met) else "does not meet them"
            reached = " and ".join(f"{value:.1f} %" for value in best.values())
            said.append(f"{model[0].upper()}{model[1:]} {verb}, with {reached}.")
    if not said:
        return []
    goals = " and ".join(f"{goal:g} % ({split})" for split, goal in GOALS.items())
    return [
        f"For CIFAR-10 with 10,000 clients, each of them protected, the goals at {shown(GOAL_EPSILON)} were {goals}. "
        f"{' '.join(said)}",
        "",
    ]


def _leads(compared: Mapping[Condition, Comparison], own: Sequence[Condition]) -> str:
    """A sentence on the leads over plain DP-SGD in each condition."""
    plain, feedback = "DP-SGD, norm", "NormEC, forgetting"
    leads = []
    for one in own:
        remembering = _best(compared[one], "momentum")
        if remembering is not None and {plain, feedback} <= set(compared[one].means):
            means = {name: compared[one].means[name] for name in (plain, feedback, remembering)}
            gains = [f"{100 * (means[name] - means[plain]):.1f}" for name in (feedback, remembering)]
            leads.append(f"{' and '.join(gains)} points ({one.split}, {shown(one.epsilon)})")
    if not leads:
        return ""
    return f"Over plain DP-SGD, NormEC with forgetting and the better of momentum and Adam gain {'; '.join(leads)}. "


def _turns(held: Sequence[Mapping[str, Record]]) -> list[str]:
    """Whether the gradient points back after the last step of plain DP-SGD."""
    turns = [own["DP-SGD, norm"]["turn"] for own in held if "turn" in own.get("DP-SGD, norm", {})]
    if not turns:
        return []
    return [
        "The cosines of the true gradients before and after the last step of plain DP-SGD are, in this order, "
        f"{', '.join(f'{one:.2f}' for one in turns)}. If they are far below zero, x oscillates across a valley.",
        "",
    ]


def _value(comparison: Comparison, name: str, study: Study) -> str:
    """A mean with its confidence interval, in bold if all others of the study have run and are significantly worse."""
    others = len(comparison.means) > 1
    alone = others and comparison.tied() == [name] and set(study.contenders) <= set(comparison.means)
    shown = f"{100 * comparison.means[name]:.1f} ± {100 * comparison.half_width:.1f}"
    return f"**{shown}**" if alone else shown


def _conditions(conditions: Conditions, compared: Mapping[Condition, Comparison], introduction: str) -> list[str]:
    """One line for each condition: the best method of each family, and who is not significantly worse than the best."""
    rows = []
    for one, own in conditions.items():
        comparison, cells = compared[one], []
        leading = leading_family(one, comparison)
        for family in FAMILIES:
            names = [name for name in comparison.means if ALL[name].family == family]
            best = max(names, key=lambda name: comparison.means[name], default=None)
            shown = f"{100 * comparison.means[best]:.1f}" if best is not None else "–"
            cells.append(f"**{shown}**" if family == leading else shown)
        tied = len(comparison.tied()) - 1
        rows.append([str(one), f"{noise(own):.2g}", *cells, comparison.best, f"{tied} of {len(comparison.means) - 1}"])
    if not rows:
        return []
    return [
        introduction,
        *to_markdown(("condition", "noise", *FAMILIES.values(), "best", "not significantly worse"), rows),
        "",
    ]


def _pretrained(held: Held) -> list[str]:
    """What a condition says if no method improves on the model before private training."""
    lines = []
    for name, study in STUDIES.items():
        starts = [one["start"] for one in held[name] if "start" in one]
        ends = [100 * one["accuracy"] for one in held[name]]
        start = 100 * plain_statistics.fmean(starts) if starts else math.nan
        if all(abs(end - start) < UNMOVED for end in ends) and ends:
            lines += [
                f"In {name} the {_measure(study)} is {start:.1f} % before private training, and {min(ends):.1f} to "
                f"{max(ends):.1f} % after it. No method moves it, so this study does not tell methods apart.",
                "",
            ]
    return lines


def _ranks(conditions: Conditions) -> list[str]:
    means = _means(conditions, common(conditions))
    if len(means) < 2:
        return []
    ranking = rank(means)
    shared = len(_means(on_linear_models(conditions), common(conditions)))
    rows = [[name, f"{value:.1f}"] for name, value in ranking.ranks.items()]
    return [
        "## Mean ranks",
        "",
        f"Over the {ranking.conditions} conditions in which these methods ran, {shared} of them with linear "
        "models. Two mean ranks differ significantly if "
        f"they are more than {ranking.difference:.1f} apart (Nemenyi, level 0.05; Friedman's test: p = "
        f"{ranking.chance:.1g}).",
        "",
        *to_markdown(("method", "mean rank"), rows),
        "",
    ]


def _published(held: Held) -> list[str]:
    """Results at record level beside those that others have published; the method is chosen on validation data."""
    found = [
        "## Beside published results",
        "",
        "Patient level, beside FLamby's results: [Four hospitals](../../docs/results/heart-disease.md).",
        "",
    ]
    beside = [one for name, study in STUDIES.items() for one in _beside(study, held[name])]
    same = [one for one in beside if not one.published.other]
    if same:
        missed = [one for one in same if one.apart < -CLOSE]
        misses = "".join(
            f" Missed by {-CLOSE - one.apart:.2f} points on {one.shows}, with {100 * one.best['validation']:.2f} % on "
            f"validation data{''.join(map('; '.__add__, one.others_close))}."
            for one in missed
        )
        found += [
            f"Record level at (3, 1e-5), each record protected and a trusted server, beside {TRAMER_BONEH}. The "
            "method of a row is the one with the best validation result; ± is the standard deviation over test seeds. "
            f"The goal is to be at most {CLOSE:g} points below; {len(same) - len(missed)} of {len(same)} rows meet it."
            f"{misses}",
            "",
            *to_markdown(_BESIDE, [one.row for one in same]),
            "",
            "They train on batches of shuffled epochs and account for Poisson samples. Runs on features use full "
            "gradients here, whose ε is exact, and those of CNNs draw Poisson samples, whose ε is an upper bound. On "
            "CIFAR-10 and MNIST they normalise features by noisy statistics of the training set, clipped at medians "
            "that no noise covers. Here every image is normalised alone, on CIFAR-10 after its channels were scaled by "
            "statistics of synthetic images, and on Fashion-MNIST as its main components in synthetic images, so that "
            "nothing but gradients is released. Only here are features of CIFAR-10 averaged over an image and its "
            "mirror image.",
            "",
        ]
    others = {one: None for study in STUDIES.values() for one in study.published if one.other}
    for published in others:
        rows = [one for one in beside if one.published == published]
        reports = (
            f"{published.authors} report {published.accuracy} % on CIFAR-10 at ({published.epsilon:g}, 1e-5). "
            f"{published.other}."
        )
        if not rows:
            found += [f"{reports} Nothing was run at this ε.", ""]
            continue
        found += [
            f"{reports} So this is no repetition: it shows how far the studies above are from it at the same ε, with "
            "the same contenders and ranges of settings.",
            "",
            *to_markdown(_BESIDE, [one.row for one in rows]),
            "",
            *[line for one in rows if one.missing for line in (one.missing, "")],
        ]
    return found


_BESIDE = ("study", "method", "test accuracy", "published", "difference")


@dataclass(frozen=True)
class _Beside:
    """The best record of a study at one ε, by its validation result, beside a published one."""

    study: Study
    published: Published
    best: Record
    others: tuple[Record, ...]
    not_run: tuple[str, ...]

    @property
    def shows(self) -> str:
        return self.study.shows.removesuffix(RECORD_LEVEL)

    @property
    def apart(self) -> float:
        """How many points our result is above the published one."""
        return 100 * float(self.best["accuracy"]) - self.published.accuracy

    @property
    def row(self) -> list[str]:
        return [
            self.shows,
            self.best["method"],
            percent(self.best),
            f"{self.published.accuracy:.1f}",
            f"{self.apart:+.2f}",
        ]

    @property
    def others_close(self) -> list[str]:
        """Those that are close to the published result, but are not chosen on validation data."""
        return [
            f"{one['method']} has {100 * one['accuracy']:.2f} % on test data, but {100 * one['validation']:.2f} % on "
            "validation data"
            for one in self.others
            if 100 * float(one["accuracy"]) - self.published.accuracy >= -CLOSE
        ]

    @property
    def missing(self) -> str:
        """A sentence on the contenders that have not run."""
        if not self.not_run:
            return ""
        verb = "has" if len(self.not_run) == 1 else "have"
        return f"On {self.shows} {'; '.join(self.not_run)} {verb} not run at {shown(self.published.epsilon)}."


def _beside(study: Study, records: Sequence[Record]) -> list[_Beside]:
    """The results of a study beside published ones; where a study repeats them, all its contenders have to have run."""
    found = []
    for published in study.published:
        own = {one["method"]: one for one in records if one["epsilon"] == published.epsilon}
        left = tuple(name for name in study.contenders if name not in own)
        if own and (published.other or not left):
            best = max(own.values(), key=lambda one: float(one["validation"]))
            others = tuple(one for one in own.values() if one is not best)
            found.append(_Beside(study, published, best, others, left))
    return found


def _pfl(held: Held) -> list[str]:
    """The set-up of pfl-research with the ε that it states and the one that its clients have, and a true ε of 2."""
    if not held[PFL] or not held[PFL_TRUE]:
        return []
    (published,), best = held[PFL], max(held[PFL_TRUE], key=lambda one: float(one["validation"]))
    rows = [
        [one["method"], STUDIES[one["study"]].shows, *ends, percent(one)]
        for one, *ends in (
            (published, f"{published['epsilon']:g}", f"{_rounded_up(published['exact_epsilon']):,}"),
            (best, f"{best['epsilon']:g}", f"{best['exact_epsilon']:.3g}"),
        )
    ]
    return [
        "The CIFAR-10 benchmark of pfl-research states (2, 1e-6) for noise that is scaled as for a cohort of 1,000 "
        "clients out of 10⁶, and simulates 1,000 clients. The ε of these 1,000 is computed from the noise that was "
        "added; with sampled clients it is an upper bound.",
        "",
        *to_markdown(("method", "study", "stated ε", "ε of the 1,000 clients", "test accuracy"), rows),
        "",
    ]


def _rounded_up(value: float) -> int:
    """A large ε with three digits, rounded up."""
    unit = int(10 ** max(0, math.floor(math.log10(value)) - 2))
    return math.ceil(value / unit) * unit


def _vectors(chosen: Mapping[str, Any]) -> tuple[int, int]:
    """The vectors of a model's length that a client sends in a round, and that it keeps between rounds."""
    x = torch.zeros(1000)
    steps = Steps(methods.build(make(chosen), len(x)), x)
    kept = sum(table.numel() for table in steps.initial_client_state.values())
    return round(steps.message_length / len(x)), round(kept / len(x))


def _costs(held: Held) -> list[str]:
    """What a method costs: rounds, numbers sent, vectors kept, and seconds, as medians over its chosen settings."""
    rows = []
    for name, contender in CONTENDERS.items():
        own = [one for records in held.values() for one in records if one["method"] == name]
        if own:
            rounds = plain_statistics.median(one["chosen"]["rounds"] for one in own)
            longer = [one["seconds"] / STUDIES[one["study"]].budget.run_rounds(contender) for one in own]
            shortest = [_seconds(held, one["study"]) for one in own]
            slower = plain_statistics.median(a / b for a, b in zip(longer, shortest, strict=True) if b)
            sent, kept = _vectors(own[0]["chosen"])
            sizes = [size for one in own if (size := _parameters(held, one["study"])) is not None]
            upload = f"{4 * sent * plain_statistics.median(sizes):,.0f}" if sizes else "not known"
            rows.append([name, f"{rounds:g}", str(sent), upload, str(kept), f"{slower:.1f}"])
    if not rows:
        return []
    return [
        "## Costs",
        "",
        "Medians over the conditions in which a method ran. Vectors have the model's length (4 bytes per number); a "
        "client sends some in a round and keeps some between rounds. The time of a round is relative to the fastest "
        "method of the same study; cells ran on different machines, several at a time, so only large differences mean "
        "something.",
        "",
        *to_markdown(
            ("method", "rounds chosen", "vectors sent", "bytes sent in a round", "vectors kept", "time of a round"),
            rows,
        ),
        "",
    ]


def _parameters(held: Held, study: str) -> int | None:
    """The number of parameters of a study's model, if one of its records has it."""
    return next((round(one["parameters"]) for one in held[study] if "parameters" in one), None)


def _seconds(held: Held, study: str) -> float:
    """The seconds per round of the fastest method of a study."""
    of = STUDIES[study]
    return min(float(one["seconds"]) / of.budget.run_rounds(of.contender(one["method"])) for one in held[study])


def _tuning(held: Held) -> list[str]:
    """How much accuracy each method loses if fewer settings are tried."""
    tries = (1, 3, 6)
    rows = []
    for name in CONTENDERS:
        own = [one for records in held.values() for one in records if one["method"] == name]
        if own:
            lost = []
            for k in tries:
                tried = [one["tried"] for one in own if len(one["tried"]) >= 2 * k]
                gaps = [100 * (max(values) - expected_best(values, k)) for values in tried]
                lost.append(f"{plain_statistics.fmean(gaps):.1f}" if gaps else "–")
            ends = [_step_at_an_end(one) for one in own]
            rows.append([name, *lost, f"{ends.count('lowest')} and {ends.count('highest')} of {len(ends)}"])
    if not rows:
        return []
    return [
        "## How much tuning each method needs",
        "",
        "The validation points that are lost if only 1, 3 or 6 of the settings are tried, as a mean over the "
        "conditions of studies that tried at least twice as many. The last column counts the choices from the lowest "
        "and the highest part of the range of step sizes; if there are many, a better setting may lie outside the "
        "range.",
        "",
        *to_markdown(("method", *(f"{k} tried" for k in tries), "step size at an end"), rows),
        "",
    ]


def _step_at_an_end(record: Record) -> str | None:
    """Which end of its range the chosen step size lies at; None if it is inside."""
    study = STUDIES[record["study"]]
    bounds = study.budget.bounds(study.contender(record["method"]))
    return range_ends({"lr": bounds["lr"]}, record["chosen"], study.budget.trials).get("lr")


def _study(study: Study, records: Sequence[Record], differences: bool = False) -> list[str]:
    budget = study.budget
    tried, seeds = _counted(budget.trials, "setting"), _counted(len(budget.tuning_seeds), "seed")
    line = f"{study.shows[0].upper()}{study.shows[1:]}; test {_measure(study)}."
    line += f" {tried} per method, {seeds} each; tested with {len(budget.test_seeds)} seeds."
    line += "".join(f" {note}." for note in study.notes)
    if not records:
        return [f"## {study.name}", "", line, "", "Not run.", ""]
    tables = _grids(study, records, differences)
    return [f"## {study.name}", "", f"{line} {_start(records)}{_ran(records)}", "", *tables]


def _measure(study: Study) -> str:
    """What the test values of a study are."""
    return MEASURES.get(study.budget.by, "accuracy")


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count > 1 else ''}"


def _start(records: Sequence[Record]) -> str:
    """The test value of a pretrained model before private training."""
    held = [100 * one["start"] for one in records if "start" in one]
    return f"Before private training the model reaches {plain_statistics.fmean(held):.1f} %. " if held else ""


def _grids(study: Study, records: Sequence[Record], differences: bool) -> list[str]:
    """One table per split, with a row per method and a column per ε, and a last row of significant `differences`."""
    lines: list[str] = []
    across = sorted(study.epsilons)
    for split in study.splits:
        held = {
            e: {
                cell.method: one
                for one in records
                for cell in [cell_of(one)]
                if (cell.split, cell.epsilon) == (split, e)
            }
            for e in across
        }
        compared = {e: compare(values(own)) for e, own in held.items() if own}
        rows = [
            [name, *(_value(compared[e], name, study) if name in held[e] else "not run" for e in across)]
            for name in study.contenders
        ]
        if differences:
            rows.append([SIGNIFICANT, *(_difference(compared[e]) if e in compared else "not run" for e in across)])
        lines += [*to_markdown((split, *map(shown, across)), rows), ""]
    return lines


def _difference(compared: Comparison) -> str:
    """The honestly significant difference in points."""
    return f"{100 * compared.difference:.1f}" if math.isfinite(compared.difference) else "not known"


def _ran(records: Iterable[Record]) -> str:
    """The devices and the computing time of the records."""
    machines: dict[str, list[float]] = {}
    for one in records:
        machines.setdefault(f"{one['device']}, torch {one['versions']['torch']}", []).append(one["seconds"])
    shares = [
        f"{_counted(len(own), 'cell')} in {_counted(max(1, round(sum(own) / 60)), 'minute')} on {name}"
        for name, own in machines.items()
    ]
    return f"Computed: {'; '.join(shares)}."


def _row(record: Record) -> Row:
    """A row of results.csv: the test result of a method in a condition, and its chosen setting."""
    chosen = {name: value for name, value in record["chosen"].items() if name != "method"}
    return {
        **{name: record[name] for name in ("study", "split", "epsilon", "method", "by")},
        "value": round(record["accuracy"], 6),
        "spread": round(record["spread"], 6),
        "seeds": len(record["accuracies"]),
        "trials": record["trials"],
        "exact_epsilon": _rounded(record.get("exact_epsilon")),
        "sigma": _rounded(record.get("sigma")),
        "seconds": record["seconds"],
        "chosen": " ".join(f"{name}={value}" for name, value in chosen.items()),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
