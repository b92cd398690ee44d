"""Four hospitals at patient level: the UCI Heart Disease data as in FLamby, under local trust and a secure sum.

`tune` chooses settings by cross-validation on the training patients: a fifth of them, drawn anew for each seed, is held
out, and a setting's score is the mean over the seeds of the accuracy on these patients, as the mean over the hospitals.
`measure` trains with the chosen settings on all training patients and evaluates on FLamby's test patients, which are
used for no choice.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, calibrate_dp_mechanism
from dp_accounting.rdp import RdpAccountant

from normec.experiments import build, methods
from normec.privacy.accounting import Account, Event
from normec.settings import make
from normec.system.files import write_atomic
from normec.training.train import prepare, ready

from .statistics import LEVEL, compare

RECORD = Path(__file__).parent / "records" / "heart-disease.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "results" / "heart-disease.md"
SCALINGS, TRUSTS, EPSILONS = ("centre", "public"), ("secure-sum", "local"), (0.1, 1.0, 5.0, 10.0)
DELTA = 1e-4  # FLamby's smallest
TUNING_SEEDS, TEST_SEEDS, HELD_OUT = range(8), range(100, 120), 0.2
SHARED = {"data": "heart-disease", "unit": "record", "delta": DELTA}
MEAN = "accuracy_mean_over_clients"
SHOWS = "four hospitals at patient level, beside FLamby's results"
Settings = dict[str, Any]

# What FLamby publishes (flamby/dp_example/results_fed_heart_disease.csv): the mean over five seeds of the mean accuracy
# over the hospitals, at δ = 1e-4.
PUBLISHED: Mapping[float | None, float] = {None: 0.712475, 0.1: 0.605625, 1.0: 0.685259, 5.0: 0.703620, 10.0: 0.700426}
PATIENTS = (199, 172, 30, 85)
TEST_PATIENTS = (104, 89, 16, 45)
SMALLEST = min(TEST_PATIENTS)  # Switzerland
PARTS = ("conditions", "without_privacy", "flamby")  # of the record; a line of its file is an entry of one part
Record = dict[str, list[dict[str, Any]]]


def candidates(method: str) -> list[Settings]:
    """The settings among which `tune` chooses."""
    found: list[Settings] = []
    for rounds in (10, 30):
        if method == "dpsgd-clip":
            found += [{"tau": 1.0, "record_clip": "auto", "lr": lr, "rounds": rounds} for lr in (0.02, 0.07, 0.2)]
            found += [{"tau": 1.0, "record_clip": 1.0, "lr": lr, "rounds": rounds} for lr in (0.1, 0.3, 1.0)]
        elif method == "dpsgd-norm":
            found += [{"alpha": alpha, "lr": lr, "rounds": rounds} for alpha in (0.3, 1.0) for lr in (0.05, 0.15)]
        elif method == "clip21":
            found += [
                {"tau": tau, "decay": 0.0, "lr": lr, "rounds": rounds} for tau in (0.3, 1.0) for lr in (0.07, 0.2)
            ]
        else:
            found += [
                {"alpha": 1.0, "beta": beta, "decay": 0.1, "server_norm": False, "lr": lr, "rounds": rounds}
                for beta in (0.3, 1.0)
                for lr in (0.1, 0.5)
            ]
    return [{"method": method, **one} for one in found]


@dataclass(frozen=True)
class Condition:
    """What a run must keep: the scaling of the inputs, who sees what, and ε."""

    scaling: str
    trust: str
    epsilon: float
    method: str = "dpsgd-clip"

    @property
    def settings(self) -> Settings:
        return {**SHARED, "scaling": self.scaling, "trust": self.trust, "epsilon": self.epsilon, "method": self.method}


CONDITIONS = [Condition(scaling, trust, e) for scaling in SCALINGS for trust in TRUSTS for e in EPSILONS]
# The methods that `normec compare` runs, for their defaults.
OTHER_METHODS = ("normec", "clip21", "dpsgd-norm")
OTHERS = [Condition("public", trust, 1.0, method) for method in OTHER_METHODS for trust in TRUSTS]


def accuracy(settings: Settings, seed: int, validation: float = 0.0) -> dict[str, float]:
    """Train once; returns the accuracies on the held-out patients, or on the test patients, and the exact ε."""
    config = make({**settings, "seed": seed, "validation": validation})
    problem = build.problem(config)
    method = methods.build(config, len(problem.x0), problem.tensor_sizes)
    options = build.training(config)
    at_the_end = replace(options.logging, every=10**6, evaluate_every=10**6)
    with ready(config.precision):
        run = prepare(problem, method, replace(options, logging=at_the_end)).run()
    last, prefix = run.history.rows[-1], "validation_" if validation else ""
    over_all = last[f"{prefix}accuracy"]
    found = {"over_patients": over_all, "over_hospitals": last.get(f"{prefix}{MEAN}", over_all)}
    return found | ({"epsilon": run.privacy.epsilon} if run.privacy is not None else {})


def tune(shared: Settings, tried: list[Settings]) -> dict[str, Any]:
    """The setting with the best score, and the scores of all; `shared` are the settings that all have."""
    scores = [
        statistics.fmean(accuracy({**shared, **one}, seed, HELD_OUT)["over_hospitals"] for seed in TUNING_SEEDS)
        for one in tried
    ]
    found = [{"settings": one, "score": score} for one, score in zip(tried, scores, strict=True)]
    best: dict[str, Any] = max(found, key=lambda one: float(one["score"]))
    return {"chosen": best["settings"], "score": best["score"], "tried": found}


def measure(condition: Condition) -> dict[str, Any]:
    """Tune a condition, and train with the chosen setting on all training patients, once for each test seed."""
    tuned = tune(condition.settings, candidates(condition.method))
    runs = [accuracy({**condition.settings, **tuned["chosen"]}, seed) for seed in TEST_SEEDS]
    means = {
        f"{name}_mean": statistics.fmean(run[name] for run in runs) for name in ("over_hospitals", "over_patients")
    }
    spread = statistics.stdev(run["over_hospitals"] for run in runs)
    return {**vars(condition), **tuned, **means, "over_hospitals_std": spread, "runs": runs}


def without_privacy(scaling: str) -> dict[str, Any]:
    """Gradient descent without noise, weighted by records, with settings that are chosen alike."""
    shared = {"data": "heart-disease", "scaling": scaling, "private": False, "method": "gd"}
    tuned = tune(shared, [{"lr": lr, "rounds": rounds} for rounds in (10, 30, 100, 300) for lr in (0.03, 0.1, 0.3)])
    return {"scaling": scaling, **tuned, **accuracy({**shared, **tuned["chosen"]}, 0)}


def flamby_epsilon(epsilon: float, patients: int, delta: float = DELTA) -> tuple[float, float]:
    """The ε that FLamby's run at a hospital amounts to, where it states `epsilon`.

    FLamby calibrates the noise for 15 epochs of Poisson samples of 4 patients, by Opacus and its RDP accountant, and
    makes 15 × 100 steps on batches of shuffled epochs.

    Returns:
        ε had the batches been Poisson samples, and ε without any gain from sampling: each patient is in one batch of
        each epoch.
    """
    batches = -(-patients // 4)
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))  # Opacus's
    multiplier = calibrate_dp_mechanism(
        lambda: RdpAccountant(orders),
        lambda z: SelfComposedDpEvent(PoissonSampledDpEvent(1 / batches, GaussianDpEvent(z)), 15 * batches),
        epsilon,
        delta,
    )
    sampled = Account(delta, [Event(multiplier, 1 / batches, 1500)]).epsilon()
    full = Account(delta, [Event(multiplier, 1.0, -(-1500 // batches))]).epsilon()
    return sampled, full


def run(processes: int = 2, report: Callable[[str], None] = lambda _: None, path: Path = RECORD) -> None:
    """Measure every condition and write the record; conditions that it holds already are not run again."""
    record = read(path)
    known = {condition_of(one) for one in record["conditions"]}
    todo = [one for one in [*CONDITIONS, *OTHERS] if one not in known]
    with ProcessPoolExecutor(processes) as pool:
        for found in pool.map(measure, todo):
            record["conditions"].append(found)
            _write(path, record)
            report(
                f"{found['scaling']}, {found['trust']}, ε = {found['epsilon']:g}, {found['method']}: "
                f"{100 * found['over_hospitals_mean']:.1f} %"
            )
        record["without_privacy"] = list(pool.map(without_privacy, SCALINGS))
        record["flamby"] = [
            {"epsilon": e, "by_hospital": [list(flamby_epsilon(e, patients)) for patients in PATIENTS]}
            for e in EPSILONS
        ]
    _write(path, record)


def read(path: Path = RECORD) -> Record:
    """The record: the conditions, the runs without privacy, and the ε that FLamby's noise implies."""
    found: Record = {part: [] for part in PARTS}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        found[entry.pop("part")].append(entry)
    return found


def condition_of(entry: Mapping[str, Any]) -> Condition:
    """The condition of an entry of the record."""
    return Condition(*(entry[name] for name in ("scaling", "trust", "epsilon", "method")))


def _write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"part": part, **entry}) for part in PARTS for entry in record[part]]
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def write_page(folder: Path, target: Path) -> Path | None:
    """Write the page of the record in `folder`; None if the record there is not complete."""
    record = read(folder / RECORD.name)
    complete = {condition_of(one) for one in record["conditions"]} >= {*CONDITIONS, *OTHERS}
    if not complete or not all(record.values()):
        return None
    write_atomic(target, page(record))
    return target


def page(record: Record) -> str:
    """The page docs/results/heart-disease.md."""
    by_condition = {condition_of(one): one for one in record["conditions"]}
    held = {(at.scaling, at.trust, at.epsilon): by_condition[at] for at in CONDITIONS}
    plain = {one["scaling"]: one for one in record["without_privacy"]}
    lines = [
        "| ε | FLamby, published | FLamby's scaling, local | FLamby's scaling, secure sum | public scaling, local | "
        "public scaling, secure sum |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    columns = [(scaling, trust) for scaling in SCALINGS for trust in TRUSTS[::-1]]
    for epsilon in EPSILONS:
        cells = [_cell(held[scaling, trust, epsilon]) for scaling, trust in columns]
        lines.append(f"| {epsilon:g} | {100 * PUBLISHED[epsilon]:.1f} | {' | '.join(cells)} |")
    ends = [f"{100 * plain[scaling]['over_hospitals']:.1f}" for scaling, _ in columns]
    lines.append(f"| no privacy | {100 * PUBLISHED[None]:.1f} | {' | '.join(ends)} |")
    patients = ["| ε | " + " | ".join(f"{_name(s)}, {_trust(t)}" for s, t in columns) + " |", "| --- " * 5 + "|"]
    for epsilon in EPSILONS:
        cells = [f"{100 * held[scaling, trust, epsilon]['over_patients_mean']:.1f}" for scaling, trust in columns]
        patients.append(f"| {epsilon:g} | {' | '.join(cells)} |")
    true = ["| ε that FLamby states | had the batches been Poisson samples | without a gain from sampling |"]
    true.append("| --- | --- | --- |")
    for one in record["flamby"]:
        sampled, full = zip(*one["by_hospital"], strict=True)
        true.append(f"| {one['epsilon']:g} | {_range(sampled)} | {_range(full)} |")
    chosen = [
        "| scaling | trust | ε | record_clip | lr | rounds | score |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for at in CONDITIONS:
        one = held[at.scaling, at.trust, at.epsilon]
        own = one["chosen"]
        cells = [_name(at.scaling), _trust(at.trust), f"{at.epsilon:g}", str(own["record_clip"]), f"{own['lr']:g}"]
        chosen.append(f"| {' | '.join(cells)} | {own['rounds']} | {100 * one['score']:.1f} |")
    parts = {"results": lines, "patients": patients, "true": true, "chosen": chosen, "methods": _methods(by_condition)}
    tables = {name: "\n".join(table) for name, table in parts.items()}
    return TEXT.format(
        **tables,
        seeds=len(TEST_SEEDS),
        epsilon=f"{OTHERS[0].epsilon:g}",
        tested=sum(TEST_PATIENTS),
        smallest=SMALLEST,
        one_patient=f"{100 / SMALLEST / len(TEST_PATIENTS):.1f}",
        tried=len(candidates("dpsgd-clip")),
        others_tried=len(candidates(OTHER_METHODS[0])),
        tuning_seeds=len(TUNING_SEEDS),
        level=LEVEL,
    )


def _methods(held: Mapping[Condition, Mapping[str, Any]]) -> list[str]:
    """Which methods are behind DP-SGD with clipping, and their results under both kinds of trust."""
    methods, trusts = ("dpsgd-clip", *OTHER_METHODS), TRUSTS[::-1]
    rows = ["| method | local | secure sum |", "| --- | --- | --- |"]
    own = {
        (method, trust): held[replace(OTHERS[0], method=method, trust=trust)] for method in methods for trust in trusts
    }
    rows += [f"| `{method}` | {' | '.join(_cell(own[method, trust]) for trust in trusts)} |" for method in methods]
    said = []
    for trust in trusts:
        gaps = []
        for method in OTHER_METHODS:
            pair = {one: [run["over_hospitals"] for run in own[one, trust]["runs"]] for one in ("dpsgd-clip", method)}
            compared = compare(pair)  # of two methods, Tukey's test is the paired t-test
            gap = 100 * (compared.means["dpsgd-clip"] - compared.means[method])
            sure = "" if compared.apart("dpsgd-clip", method) else " (not significant)"
            gaps.append(f"{gap:.1f} points over `{method}`{sure}")
        said.append(f"{_where(trust)}, the lead of `dpsgd-clip` is {', '.join(gaps[:-1])} and {gaps[-1]}.")
    return [*said, "", *rows]


def _where(trust: str) -> str:
    return {"local": "Under local trust", "secure-sum": "In a secure sum"}[trust]


def _cell(one: Mapping[str, Any]) -> str:
    return f"{100 * one['over_hospitals_mean']:.1f} ± {100 * one['over_hospitals_std']:.1f}"


def _name(scaling: str) -> str:
    return {"centre": "FLamby's scaling", "public": "public scaling"}[scaling]


def _trust(trust: str) -> str:
    return {"local": "local", "secure-sum": "secure sum"}[trust]


def _range(values: tuple[float, ...]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


TEXT = """# Four hospitals

The data set `heart-disease` holds the patients of four centres (Cleveland, Budapest, Zurich and Basel, Long Beach):
740 with complete records, of which 486 are for training, 199, 172, 30 and 85. The model predicts heart disease from 13
inputs. Each centre is a client, and the guarantee protects each patient.

    normec train --data heart-disease --unit record --epsilon 1                 # the server sees sums
    normec train --data heart-disease --unit record --epsilon 1 --trust local   # the server sees every message
    normec compare --data heart-disease --unit record --epsilon 1

Patients, inputs, test sets and metric are those of FLamby's Fed-Heart-Disease (du Terrail et al., NeurIPS 2022). The
files are part of normec: Janosi, Steinbrunn, Pfisterer and Detrano (1988), Heart Disease, UCI Machine Learning
Repository, doi 10.24432/C52P4X, licence CC BY 4.0.

## Defaults

- **Clients.** `split = centre`: one client for each hospital. Other splits divide the pooled patients.
- **Weights.** `weights = records`, because the numbers of patients are published. A patient then counts alike in every
  hospital, and moves the weighted sum by the same length; see [weights](../guides/weights.md).
- **Method.** DP-SGD with clipping, with `record_clip = auto`. The memories of error feedback add up what one record did
  to all messages so far, so that messages need more noise; the [other methods](#other-methods) are not better here.
- **Scaling.** `scaling = public` uses fixed round numbers of medical practice (`normec/data/heart_disease.py`). They
  are no statistics of the patients, so that the guarantee covers everything that the model learns from them.
  `scaling = centre` is FLamby's: each hospital's inputs are scaled by the mean and the standard deviation of its own
  training patients. No noise covers these numbers, and a run says so.
- **Model.** Softmax regression with two classes, which is logistic regression with an intercept. Its two rows of
  weights move against each other, so that their noise costs no more than that of one row.

## Results

The table shows the mean over the hospitals of the test accuracy in percent, as mean ± standard deviation over {seeds}
seeds, at δ = 1e-4. `python -m benchmarks.privacy run heart-disease` computes everything on this page.

{results}

The columns with FLamby's scaling are comparable with the published one. What public scaling adds to them is not due to
privacy or to the method: it keeps the differences between hospitals, which scaling by hospital removes. For example,
cholesterol was not measured in Switzerland and is 0 there.

The row without privacy is plain gradient descent, with step size and rounds chosen in the same way. That some private
runs are better is no merit of the noise. With {tested} test patients, a difference of one or two points may be chance;
one of the {smallest} in Switzerland is {one_patient} points of the mean.

Over all test patients, in percent:

{patients}

## Other methods

Public scaling, ε = {epsilon}, tuned alike: mean over the hospitals of the test accuracy in percent, as mean ± standard
deviation. The methods are compared by paired t-tests over the seeds, at the level {level:g}.

{methods}

## What the published ε stands for

FLamby's code calibrates its noise for 15 epochs but makes 15 × 100 steps, which are 30 to 188 epochs of the hospitals.
It accounts for Poisson samples and takes batches of shuffled epochs. This table shows the ε that its noise implies, as
the range over the hospitals, at δ = 1e-4. The right column is a bound for what the code does: every patient is in one
batch of each epoch, and no gain from a secret order of the batches is proved here. The left column is not a bound for
it.

{true}

The ε of our runs is exact for what they do: full gradients, every round counted, records clipped one by one.

## How the settings were chosen

Test patients were not used for this choice. For every condition, each setting ({tried} for `dpsgd-clip`, {others_tried}
for each other method) was trained with {tuning_seeds} seeds on four fifths of the training patients. Its score is the
accuracy on the other fifth, as the mean over the hospitals. The choice itself is not covered by the guarantee. Neither
are the numbers of the public scaling: some other round numbers were compared with them on the training patients.

{chosen}
"""
