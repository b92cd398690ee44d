"""Studies: equal tuning budgets, resumed runs, records that are checked, and diagnostics that are correct."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from sklearn.metrics import roc_auc_score

from benchmarks.privacy import pfl_cnn, records, runner, studies, tanh_cnns, trial, tuning
from benchmarks.privacy.contenders import ALL, CONTENDERS, RECORD_CONTENDERS, ROLES, ROUNDS, Contender
from benchmarks.privacy.design import range_ends, settings
from benchmarks.privacy.studies import STUDIES, Cell, Study
from benchmarks.privacy.trial import Trial
from normec import DPSGD, NormEC, SmoothedNorm, train
from normec.errors import UsageError
from normec.experiments import build
from normec.settings import make
from normec.training.train import prepare

from ...support.forked_workers import from_a_server

pytestmark = pytest.mark.slow  # nothing of the library depends on it

BUDGET = tuning.TuningBudget(2, (0,), (2, 3), rounds=(3, 5))
FEW = ("NormEC", "NormEC, no SN", "DP-SGD, norm")
WHERE: dict[str, Any] = {"data": "digits", "model": "softmax", "clients": 20}
TINY = Study(
    "tiny", "softmax regression on digits, 20 clients", WHERE, BUDGET, epsilons=(8.0,), splits=("iid",), contenders=FEW
)


def test_the_area_under_the_curve() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 20, (500,), generator=generator).float()  # many ties
    positive = torch.rand(500, generator=generator) < 0.1 + scores / 40
    assert trial.area(scores, positive) == pytest.approx(roc_auc_score(positive.numpy(), scores.numpy()))
    assert math.isnan(trial.area(scores, torch.ones(500, dtype=torch.bool)))


def drawn(contender: Contender, count: int, rounds: tuple[int, ...] = ROUNDS, **options: Any) -> list[dict[str, Any]]:
    return settings(contender.method, contender.bounds(ROLES), contender.fixed, count, rounds, **options)


def test_every_study_compares_under_one_guarantee() -> None:
    for study in STUDIES.values():
        cells = study.cells()
        assert len(cells) == len(set(cells)) == len(study.contenders) * len(study.epsilons) * len(study.splits)
        at_record_level = study.settings.get("unit") == "record"
        if study.name == "cifar10-pfl":  # it repeats what others did
            continue
        assert set(study.contenders) <= set(RECORD_CONTENDERS if at_record_level else CONTENDERS)
        if not at_record_level and study.name != "cifar10-pfl-true":  # the defaults: client, zero-out, sum, 1e-5
            assert not {"unit", "relation", "trust", "delta"} & set(study.settings)
        assert len(study.budget.test_seeds) >= 3
        assert not set(study.budget.tuning_seeds) & set(study.budget.test_seeds)
    for name in ("a9a-100", "a9a-1000", "w8a-100", "w8a-1000", "digits-100"):
        assert STUDIES[name].contenders == tuple(CONTENDERS)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_states_the_seconds_that_its_cells_took(name: str) -> None:
    """Within a factor of two; local steps are longer."""
    study = STUDIES[name]
    held = records.read(study, Path(__file__).resolve().parents[3] / "benchmarks/privacy/records")
    took = [
        one["seconds"] / study.budget.run_rounds(contender)
        for one in held
        if not (contender := study.contender(one["method"])).local
    ]
    assert 1 / 2 < sum(took) / len(took) / study.seconds_per_round < 2


def test_the_networks_of_the_published_results() -> None:
    """Their sizes, as the authors' code prints them."""
    sizes = [sum(one.numel() for one in make().parameters()) for make in (tanh_cnns.cifar10, tanh_cnns.mnist)]
    assert sizes == [550_570, 26_010]
    assert tanh_cnns.cifar10()(torch.zeros(2, 3, 32, 32)).shape == tanh_cnns.mnist()(torch.zeros(2, 1, 28, 28)).shape


@pytest.mark.parametrize("name", ALL)
def test_every_contender_runs(name: str) -> None:
    """One round of each on digits, private; a setting that its method does not know would be refused."""
    where: dict[str, Any] = {**WHERE, "epsilon": 8.0}
    if name in RECORD_CONTENDERS:
        where |= {"unit": "record", "trust": "central", "clients": 1}
    (found,) = trial.measure([Trial({**where, **drawn(ALL[name], 1)[0], "rounds": 1}, 0, 0.0, diagnose=True)])
    assert found["exact_epsilon"] == pytest.approx(8.0, rel=1e-6)
    assert 0 < found["value"] <= 1


@pytest.mark.parametrize("name", ALL)
def test_settings_are_spread_evenly_over_their_ranges(name: str) -> None:
    contender = ALL[name]
    found = drawn(contender, 12, (10, 20, 40))
    assert found == drawn(contender, 12, (10, 20, 40))
    assert found != drawn(contender, 12, (10, 20, 40), seed=1)
    for key, values in contender.bounds(ROLES).items():
        if isinstance(values, list):
            counts = Counter(setting[key] for setting in found)
            assert set(counts.values()) == {12 // len(values)}
            continue
        low, high = values
        parts = sorted(math.log(setting[key] / low) / math.log(high / low) * 12 for setting in found)
        assert all(part - 0.1 <= place <= part + 1.1 for part, place in enumerate(parts))  # three digits are kept
    assert Counter(setting["rounds"] for setting in found) == {10: 4, 20: 4, 40: 4}
    assert all(setting["method"] == contender.method for setting in found)


def test_step_sizes_follow_their_role() -> None:
    steps = ROLES["steps"]
    assert ALL["DP-SGD, norm"].bounds(ROLES)["lr"] == steps
    assert ALL["DP-SGD, norm, momentum"].bounds(ROLES)["lr"] == pytest.approx([0.3 * one for one in steps])
    assert ALL["DP-SGD, norm"].bounds({**ROLES, "steps": (3.0, 4.0)})["lr"] == (3.0, 4.0)


@pytest.mark.parametrize("name", ["DP-SGD, norm", "NormEC, forgetting", "Fed-NormEC"])
@pytest.mark.parametrize("count", [6, 12])
def test_long_runs_meet_short_and_long_steps(name: str, count: int) -> None:
    """Drawn one by one, a contender may get no long run, or none with a long step."""
    low, high = ALL[name].bounds(ROLES)["lr"]
    found = drawn(ALL[name], count)
    for rounds in ROUNDS:
        own = [setting["lr"] for setting in found if setting["rounds"] == rounds]
        parts = sorted(int(math.log(lr / low) / math.log(high / low) * count) for lr in own)
        assert len(parts) == count // len(ROUNDS)
        assert [part // len(ROUNDS) for part in parts] == list(range(len(parts)))


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_any_number_of_settings(count: int) -> None:
    for name in ("DP-SGD, norm", "NormEC, client momentum"):
        found = drawn(ALL[name], count)
        assert len(found) == len({json.dumps(one) for one in found}) == count
        lengths = Counter(one["rounds"] for one in found)
        assert max(lengths.values()) - min(lengths.get(rounds, 0) for rounds in ROUNDS) <= 1


def test_values_at_the_end_of_their_range() -> None:
    bounds = {"lr": (1.0, 16.0), "tau": (1.0, 16.0), "decay": [0.1, 0.2]}
    assert range_ends(bounds, {"lr": 4.0, "tau": 4.0}, 4) == {}
    assert range_ends(bounds, {"lr": 1.9, "tau": 4.0}, 4) == {"lr": "lowest"}
    assert range_ends(bounds, {"lr": 1.9, "tau": 8.1}, 4) == {"lr": "lowest", "tau": "highest"}


def test_the_best_by_validation_is_tested_with_other_seeds() -> None:
    found = tuning.tune_and_test(ALL["DP-SGD, norm"], {**WHERE, "split": "iid", "epsilon": 8.0}, BUDGET)
    chosen = BUDGET.settings(ALL["DP-SGD, norm"])[max(range(2), key=lambda k: found["tried"][k])]
    assert found["chosen"] == chosen
    where = {**WHERE, "split": "iid", "epsilon": 8.0, **chosen}
    assert found["accuracies"] == [one["value"] for one in trial.measure([Trial(where, seed, 0.0) for seed in (2, 3)])]
    assert found["exact_epsilon"] == pytest.approx(8.0, rel=1e-6)


def test_the_cosine_shows_steps_that_are_too_long() -> None:
    plain = {**WHERE, "method": "gd", "private": False, "rounds": 20}
    short, long = trial.measure([Trial({**plain, "lr": lr}, 0, 0.0, diagnose=True) for lr in (0.1, 50.0)])
    assert short["turn"] > 0.9
    assert long["turn"] < -0.2
    for one in (short, long):  # ĝ was the gradient before the step
        assert one["turn"] == pytest.approx(one["cosine"], abs=1e-3)


def test_the_turn_is_that_of_the_gradient_in_the_last_step() -> None:
    """With server normalisation, against gradients by autograd at the ends of runs of 7 and of 8 rounds."""
    settings = {**WHERE, "method": "normec", "private": False, "lr": 3.0, "beta": 0.3}
    slopes = []
    for rounds in (7, 8):
        config = make({**settings, "rounds": rounds, "seed": 0, "validation": 0.0})
        problem = build.problem(config)
        x = train(problem, NormEC(0.01, 0.3), lr=3.0, rounds=rounds, seed=0).x.clone().requires_grad_()
        records = [problem.records.batch(client, None) for client in range(problem.clients)]
        loss = sum(problem.loss(problem.outputs(x, inputs), targets) for inputs, targets in records)
        slopes += torch.autograd.grad(loss, x)
    (found,) = trial.measure([Trial({**settings, "rounds": 8}, 0, 0.0, diagnose=True)])
    wanted = float(torch.cosine_similarity(*slopes, dim=0))
    assert abs(wanted) < 0.95
    assert found["turn"] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("settings", [{"method": "normec", "beta": 0.1, "decay": 0.0}, {"method": "dpsgd-norm"}])
def test_the_noise_in_the_estimate_is_what_the_guarantee_needs(settings: dict[str, Any]) -> None:
    """Averaged over seeds: βσ√(kd/n) with error feedback, βσ√(d/n) without."""
    where = {**WHERE, "epsilon": 8.0, "rounds": 16, "lr": 0.01, **settings}
    found = trial.measure([Trial(where, seed, 0.0, diagnose=True) for seed in range(3)])
    beta, gathered = (0.1, 16) if settings["method"] == "normec" else (1.0, 1)
    wanted = beta * found[0]["sigma"] * math.sqrt(gathered * 650 / 20)
    assert sum(one["noise"] for one in found) / 3 == pytest.approx(wanted, rel=0.1)
    assert ("memory_error" in found[0]) == (settings["method"] == "normec")


@pytest.mark.parametrize("name", ["NormEC", "NormEC, forgetting", "DP-SGD, norm"])
def test_a_committed_record_comes_out_again(name: str) -> None:
    """What was published can be run again: the same noise level, and the same accuracy up to the draws of the noise."""
    folder = Path(__file__).resolve().parents[3] / "benchmarks/privacy/records"
    study = STUDIES["digits-100"]
    cell = Cell(study.name, name, 8.0, "iid")
    held = {(one["method"], one["epsilon"], one["split"]): one for one in records.read(study, folder)}
    record = held[name, 8.0, "iid"]
    settings = {**study.shared_settings(cell), **record["chosen"]}
    found = trial.measure([Trial(settings, seed, 0.0) for seed in record["test_seeds"]])
    assert [one["sigma"] for one in found] == pytest.approx([record["sigma"]] * len(found), rel=1e-9)
    accuracy = sum(one["value"] for one in found) / len(found)
    assert accuracy == pytest.approx(record["accuracy"], abs=0.03)  # three seeds, whose spread is below 0.01


@pytest.mark.parametrize(("momentum", "rounds"), [(0.8, 40), (0.99, 25)])
def test_the_noise_that_momentum_carries_on(momentum: float, rounds: int) -> None:
    """Against what is left of ĝ when that of the same run without noise is taken away; x stands still."""
    settings = {**WHERE, "rounds": rounds, "lr": 1e-9, "method": "dpsgd-norm", "momentum": momentum}
    (found,) = trial.measure([Trial({**settings, "epsilon": 8.0}, 0, 0.0, diagnose=True)])
    estimates = []
    for config in (make({**settings, "epsilon": 8.0}), make({**settings, "epsilon": None, "private": False})):
        method = DPSGD(SmoothedNorm(0.01), momentum=momentum)
        estimates.append(prepare(build.problem(config), method, build.training(config)).run().state.estimate)
    assert found["noise"] == pytest.approx(float((estimates[0] - estimates[1]).norm()), rel=0.1)


def test_a_run_that_diverges_counts_as_zero() -> None:
    (found,) = trial.measure([Trial({**WHERE, "method": "clip21", "tau": 0.1, "lr": 1e38, "rounds": 8}, 0, 0.2)])
    assert found["value"] == 0.0
    assert "diverged" in found


def test_runs_that_take_turns_are_the_runs_alone() -> None:
    """Also where one of them diverges; a cell looks at the time once a group."""
    where = {**WHERE, "split": "iid", "epsilon": 8.0}
    settings = [{"method": "dpsgd-norm", "lr": 0.1}, {"method": "clip21", "tau": 0.1, "lr": 1e38}]
    trials = [Trial({**where, **one, "rounds": 5}, seed, 0.2) for one in settings for seed in (0, 1)]
    alone = [trial.measure([one])[0] for one in trials]
    assert trial.measure(trials) == alone
    assert ["diverged" in one for one in alone] == [False, False, True, True]
    left = iter([False] * 3)
    budget = replace(BUDGET, trials=3)
    found = tuning.tune_and_test(ALL["NormEC"], where, budget, time_is_over=lambda: next(left), together=2)
    assert found == tuning.tune_and_test(ALL["NormEC"], where, budget)
    assert next(left, None) is None  # three trials and two tests are three groups


def test_runs_without_noise_are_recorded_without_an_epsilon(tmp_path: Path) -> None:
    """Also with a Dirichlet split; the files are JSON without the extension for infinity."""
    study = replace(TINY, epsilons=(studies.NO_NOISE,), splits=("iid", "dirichlet 2"), contenders=("DP-SGD, norm",))
    assert runner.run({"tiny": study.cells()}, tmp_path, device="cpu", studies={"tiny": study})
    lines = (tmp_path / "tiny.jsonl").read_text().splitlines()
    held = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [records.cell_of(one) for one in held] == study.cells()
    for one in held:
        assert one["epsilon"] is None
        assert not {"sigma", "exact_epsilon"} & set(one)
    settings = {**WHERE, "private": False, "split": "dirichlet", "concentration": 2.0, **held[1]["chosen"]}
    again = trial.measure([Trial(settings, seed, 0.0) for seed in held[1]["test_seeds"]])
    assert held[1]["accuracies"] == [one["value"] for one in again]
    assert held[0]["accuracies"] != held[1]["accuracies"]


def test_the_noise_of_pfl_research_is_that_of_its_statement() -> None:
    """By another library: (2, 1e-6) for 1,000 of 10⁶ clients, with the noise of a cohort of 50 scaled up to theirs."""
    study = STUDIES["cifar10-pfl"]
    (chosen,) = study.budget.settings(study.contender(study.contenders[0]))
    multiplier = chosen["sigma"] * math.sqrt(study.settings["clients"]) / chosen["tau"] * (1000 / 50)
    event = PoissonSampledDpEvent(1000 / 1e6, GaussianDpEvent(multiplier))
    account = PLDAccountant().compose(SelfComposedDpEvent(event, chosen["rounds"]))
    assert account.get_epsilon(study.settings["delta"]) == pytest.approx(2.0, abs=2e-3)


def test_the_network_of_pfl_research() -> None:
    model = pfl_cnn.simple_cnn()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_626_442
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


CELLS = {"tiny": TINY.cells()}
KNOWN = {"tiny": TINY}


def test_a_study_stopped_anywhere_continues_to_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.run(CELLS, tmp_path / "whole", device="cpu", studies=KNOWN)
    clock = iter([0.0] * 7 + [9.0] * 9)  # four runs a cell: stops in the middle of the second
    monkeypatch.setattr(runner.time, "time", lambda: next(clock))
    assert not runner.run(CELLS, tmp_path / "parts", limit_seconds=5.0, device="cpu", studies=KNOWN)
    monkeypatch.undo()
    assert len(records.read(TINY, tmp_path / "parts")) == 1
    (part,) = (tmp_path / "parts" / "parts").iterdir()
    assert len(part.read_text().splitlines()) == 2
    part.write_text(part.read_text() + '{"run": "acc')  # a kill in the middle of a line
    assert runner.run(CELLS, tmp_path / "parts", device="cpu", studies=KNOWN)
    assert not list((tmp_path / "parts" / "parts").iterdir())
    whole, parts = records.read(TINY, tmp_path / "whole"), records.read(TINY, tmp_path / "parts")
    assert list(map(without_seconds, whole)) == list(map(without_seconds, parts))
    assert [one["method"] for one in whole] == list(FEW)


def test_several_processes_make_the_same_records(tmp_path: Path) -> None:
    assert runner.run(CELLS, tmp_path / "one", device="cpu", studies=KNOWN)
    assert runner.run(CELLS, tmp_path / "two", device="cpu", studies=KNOWN, processes=2)
    one, two = (records.read(TINY, tmp_path / name) for name in ("one", "two"))
    assert list(map(without_seconds, one)) == list(map(without_seconds, two))


def test_a_cell_that_fails_takes_no_other_record_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EF21 has no bound, so that a private run of it is refused. The processes are forked, not spawned as above."""
    monkeypatch.setattr(runner, "get_context", from_a_server("benchmarks.privacy.runner"))
    own = {"EF21": Contender("ef21", "error feedback", {"lr": "steps"})}
    study = replace(TINY, contenders=("EF21", *FEW), own=own)
    said: list[str] = []
    with pytest.raises(UsageError, match="ef21"):
        runner.run(
            {"tiny": study.cells()}, tmp_path, device="cpu", studies={"tiny": study}, processes=2, report=said.append
        )
    assert [one["method"] for one in records.read(study, tmp_path)] == list(FEW)
    assert any("EF21: Refused" in line for line in said)


def test_runs_of_other_settings_are_not_taken_over() -> None:
    where: dict[str, Any] = {**WHERE, "split": "iid", "epsilon": 8.0}
    known: dict[str, Any] = {}
    tuning.tune_and_test(ALL["DP-SGD, norm"], where, BUDGET, keep=known.__setitem__)
    assert len(known) == 4
    more = dict(known)
    other = replace(BUDGET, roles=(("steps", (0.5, 0.6)),))
    found = tuning.tune_and_test(ALL["DP-SGD, norm"], where, other, more)
    assert len(more) == 8
    assert found == tuning.tune_and_test(ALL["DP-SGD, norm"], where, other)


def test_one_cell_is_made_again(tmp_path: Path) -> None:
    again = [cell for cell in TINY.cells() if cell.method == "DP-SGD, norm"]
    assert runner.run(CELLS, tmp_path / "whole", device="cpu", studies=KNOWN)
    assert runner.run({"tiny": again}, tmp_path / "again", device="cpu", studies=KNOWN)
    held = records.read(TINY, tmp_path / "whole")
    assert list(map(without_seconds, records.read(TINY, tmp_path / "again"))) == [without_seconds(held[2])]


def test_without_time_nothing_starts(tmp_path: Path) -> None:
    assert not runner.run(CELLS, tmp_path, limit_seconds=0.0, device="cpu", studies=KNOWN)
    assert not list(tmp_path.iterdir())


def test_a_record_of_another_study_is_refused(tmp_path: Path) -> None:
    cell = TINY.cells()[0]
    record = TINY.expected(cell) | {"chosen": BUDGET.settings(ALL[cell.method])[0], "accuracies": [0.5, 0.6]}
    (tmp_path / "tiny.jsonl").write_text(json.dumps(record) + "\n")
    assert records.read(TINY, tmp_path) == [record]
    with pytest.raises(UsageError, match="trials is 2 in the record, 3 in the study"):
        records.read(replace(TINY, budget=replace(BUDGET, trials=3)), tmp_path)
    with pytest.raises(UsageError, match=r"a record of iid/8/NormEC.*which is no cell of tiny; remove its line"):
        records.read(replace(TINY, epsilons=(4.0,)), tmp_path)
    with pytest.raises(UsageError, match="test_seeds is \\[2, 3\\] in the record, \\[2, 3, 4\\] in"):
        records.read(replace(TINY, budget=replace(BUDGET, test_seeds=(2, 3, 4))), tmp_path)
    with pytest.raises(UsageError, match=r"is not among the settings .* remove its line from .*tiny.jsonl"):
        records.read(replace(TINY, budget=replace(BUDGET, rounds=(3, 6), roles=(("steps", (0.5, 0.6)),))), tmp_path)
    (tmp_path / "tiny.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="no record of tiny"):
        records.read(TINY, tmp_path)


def test_names_stand_for_cells() -> None:
    with pytest.raises(UsageError, match="a9a-100"):
        studies.chosen(["a9a-10"])
    with pytest.raises(UsageError, match="a9a-100 has no condition 'iid/3'"):
        studies.chosen(["a9a-100/iid/3"])
    assert list(studies.chosen(["w8a-100", "all"])) == ["w8a-100", *(name for name in STUDIES if name != "w8a-100")]
    found = studies.chosen(["a9a-100/iid/8", "a9a-100/label/2/NormEC, no SN", "a9a-100/iid"])["a9a-100"]
    assert len(found) == len(set(found)) == 4 * len(CONTENDERS) + 1
    assert found[len(CONTENDERS)].key == "label/2/NormEC, no SN"


def line(cell: Cell) -> dict[str, Any]:
    """A record of a9a-100 that is made up."""
    study = STUDIES["a9a-100"]
    chosen = study.budget.settings(ALL[cell.method])[0]
    return {**study.expected(cell), "chosen": chosen, "accuracies": [0.8] * 3, "accuracy": 0.8}


@pytest.mark.parametrize("form", ["folder", "tgz"])
def test_records_are_collected_once(form: str, tmp_path: Path) -> None:
    study = STUDIES["a9a-100"]
    lines = [line(cell) for cell in study.cells()[:2]]
    source, folder = tmp_path / "other", tmp_path / "records"
    (source / "deeper").mkdir(parents=True)
    (source / "deeper" / "a9a-100.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines[::-1]))
    (source / "notes.jsonl").write_text("ignored")
    given = Path(shutil.make_archive(str(source), "gztar", source)) if form == "tgz" else source
    assert sorted(records.collect(given, folder)) == [
        f"a9a-100/{cell.key}" for cell in sorted(study.cells()[:2], key=lambda cell: cell.key)
    ]
    assert records.read(study, folder) == lines
    assert records.collect(given, folder) == []


def test_a_record_that_does_not_fit_refuses_all(tmp_path: Path) -> None:
    study = STUDIES["a9a-100"]
    lines = [line(cell) for cell in study.cells()[:2]]
    (tmp_path / "a9a-100.jsonl").write_text("".join(json.dumps(one | {"clients": 7}) + "\n" for one in lines))
    with pytest.raises(UsageError, match="clients is 7 in the record"):
        records.collect(tmp_path, tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_other_numbers_need_replace(tmp_path: Path) -> None:
    study, folder, other = STUDIES["a9a-100"], tmp_path / "records", tmp_path / "other"
    record = line(study.cells()[0])
    for place, accuracy in ((folder, 0.8), (other, 0.9)):
        place.mkdir()
        records.write(study, place, [record | {"accuracy": accuracy}])
    with pytest.raises(UsageError, match="already with other numbers"):
        records.collect(other, folder)
    assert records.collect(other, folder, replace=True) == [f"a9a-100/{study.cells()[0].key}"]
    assert records.read(study, folder)[0]["accuracy"] == 0.9


@pytest.mark.parametrize("source", ["nothing.tgz", "text.tgz", "empty"])
def test_a_source_without_records_is_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "text.tgz").write_text("no archive")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        records.collect(tmp_path / source, tmp_path / "records")
    assert not (tmp_path / "records").exists()
