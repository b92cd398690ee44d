"""Suggested settings: the noise that they are made for, the rule, what they may know, and that they train."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from normec import Privacy, Problem, PublicFacts, Suggestion, UsageError, suggest, train
from normec.algorithms.catalogue import METHODS
from normec.training import suggestion as rule

from ..support.gaussian_mechanism import gaussian_mu

FACTS = PublicFacts(clients=100, dimension=650)


def unseen(_: Tensor) -> NoReturn:
    raise AssertionError("a client's function was called")


class Watched(Dataset[Any]):
    """Records that count how often they are read."""

    def __init__(self, count: int) -> None:
        self.count, self.reads = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return torch.full((4,), float(at)), torch.tensor(at % 3)


def of_records(*counts: int, shift: float = 0.0) -> Problem:
    torch.manual_seed(0)
    parts = [TensorDataset(torch.randn(n, 4) + shift, torch.arange(n) % 3) for n in counts]
    return Problem(nn.Linear(4, 3), F.cross_entropy, parts)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("method", rule.RULED)
@pytest.mark.parametrize("relation", ["zero-out", "replace"])
@pytest.mark.parametrize("trust", ["local", "secure-sum", "central"])
def test_the_noise_is_that_of_the_guarantee(method: str, relation: Any, trust: Any) -> None:
    privacy = Privacy(epsilon=3, delta=1e-6, relation=relation, trust=trust)
    moved = 2 if relation == "replace" else 1
    clients = math.sqrt(FACTS.clients) if trust == "local" else FACTS.clients
    expected = moved * math.sqrt(FACTS.dimension) / gaussian_mu(3, 1e-6) / clients
    for rounds in (50, 400):  # at a given ε the number of rounds does not matter
        found = suggest(FACTS, method, privacy=privacy, rounds=rounds)
        assert found.noise == pytest.approx(expected, rel=1e-4)


def test_the_noise_of_records_is_that_of_the_run() -> None:
    problem = of_records(40, 60, 20)
    privacy = Privacy(epsilon=2, unit="record", record_clip="auto", trust="local")
    for weights in ("equal", "records"):
        found = suggest(problem, privacy=privacy, weights=weights, rounds=4)
        run = train(problem, **found.settings, seed=0)
        assert run.privacy is not None
        sizes = np.array([40.0, 60.0, 20.0])
        share = np.full(3, 1 / 3) if weights == "equal" else sizes / sizes.sum()
        own = run.privacy.sigma * sizes.min() / sizes  # σ is the noise of the client with the fewest records
        assert found.noise == pytest.approx(np.linalg.norm(share * own) * math.sqrt(15 / 4))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 2.0])
def test_the_distance_is_the_best_compromise(noise: float) -> None:
    reach = rule.REACH * math.sqrt(650)
    lengths = np.linspace(0, 1.2 * reach, 200_001)
    left = (reach - lengths) ** 2 + (rule.NOISE_WEIGHT * noise * lengths) ** 2
    assert rule.distance(650, noise, rule.REACH) == pytest.approx(lengths[left.argmin()], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("epsilon", [0.1, 1, 3, 8, 100])
@pytest.mark.parametrize("width", [4, 64])
def test_the_path_of_clipped_records_is_as_long_as_reach_and_noise_allow(epsilon: float, width: int) -> None:
    """(D/D∞)² + (ρD/c)² = 1, with the noise of the sum as it is added: σ√(dT)/n times the step size."""
    sizes = (10 * width, width, 3 * width, 3)
    facts = PublicFacts(4, sum(sizes), sizes, records=(50,) * 4)
    found = suggest(facts, privacy=Privacy(epsilon=epsilon, unit="record", trust="central"), rounds=80)
    lr, deviation = found.values["lr"], 1 / gaussian_mu(epsilon, 1e-5) * math.sqrt(80) / (4 * 50)
    noise = lr * deviation * math.sqrt(facts.dimension * 80)
    assert (lr * 80 / rule.REACH_RECORDS) ** 2 + (noise / rule.RECORDS_NOISE) ** 2 == pytest.approx(1, rel=0.1)


def test_the_layers_of_a_model_do_not_matter() -> None:
    for privacy in (Privacy(epsilon=8, unit="record", trust="local"), Privacy(epsilon=8, trust="local")):
        one, several = (
            suggest(PublicFacts(3, 650, sizes, records=(100,) * 3), "dpsgd-clip", privacy=privacy).values
            for sizes in ((640, 10), (320, 10, 310, 10))
        )
        assert one == several


def test_a_small_model_of_clipped_records_makes_steps_that_learn() -> None:
    """4√d would be 12 for 9 parameters: with 200 steps, lr = 0.06 learnt nothing beyond the larger class."""
    facts = PublicFacts(4, 9, (8, 1), records=(250,) * 4)
    found = suggest(facts, privacy=Privacy(epsilon=3, unit="record", trust="local"))
    assert found.values["lr"] > 1
    assert found.values["lr"] * 200 * found.noise < rule.RECORDS_NOISE


@pytest.mark.parametrize("rounds", [60, 200])
def test_the_noise_in_the_estimate_is_the_stated_one(rounds: int) -> None:
    """The noise of ĝ alone, as the server adds it up."""
    found = suggest(FACTS, privacy=Privacy(epsilon=2, trust="secure-sum"), rounds=rounds)
    beta, decay = found.values["beta"], found.values["decay"]
    draw = np.random.default_rng(0)
    estimate, norms = np.zeros(FACTS.dimension), []
    deviation = found.noise * math.sqrt(rounds / FACTS.dimension)
    stated = rule.between(rule.ESTIMATE_NOISE["normec"], found.noise)
    for _ in range(2000):
        estimate = (1 - decay) * estimate + beta * deviation * draw.standard_normal(FACTS.dimension)
        norms.append(np.linalg.norm(estimate))
    assert np.mean(norms[500:]) == pytest.approx(stated, rel=0.1)  # β has two digits


def test_more_noise_means_shorter_steps_and_smaller_memories() -> None:
    found = [suggest(FACTS, privacy=Privacy(epsilon=e, trust="secure-sum")).values for e in (8, 4, 2, 1, 0.5)]
    assert all(more["lr"] > less["lr"] for more, less in pairwise(found))
    assert all(more["beta"] / more["decay"] > less["beta"] / less["decay"] for more, less in pairwise(found))
    assert all(more["decay"] <= less["decay"] for more, less in pairwise(found))


def test_without_privacy_the_usual_settings() -> None:
    found = suggest(FACTS)
    assert (found.method, found.noise, found.settings["privacy"]) == ("normec", 0.0, None)
    assert found.values == {"rounds": 300, "alpha": 0.01, "beta": 0.1, "server_norm": True, "decay": 0.0, "lr": 0.05}
    assert suggest(FACTS, "fedavg", rounds=7).values["rounds"] == 7
    assert suggest(FACTS, "fedavg").settings["local"].steps == 5


@pytest.mark.parametrize("method", METHODS)
def test_a_suggestion_is_shown_with_every_value(method: str) -> None:
    """Also values that are names or switches, as the compressor of EF21 and the normalised steps of NormEC."""
    found = suggest(FACTS, method)
    first, *lines, last = str(found).splitlines()
    assert (first, last) == (f"method = {method}", found.outlook)
    shown = dict(line.partition(": ")[0].split(" = ") for line in lines)
    assert shown.keys() == found.values.keys()
    for name, value in found.values.items():
        assert shown[name] == str(value) or float(shown[name]) == pytest.approx(value), name


def test_no_function_of_a_client_is_called() -> None:
    problem = Problem.from_functions([unseen] * 20, torch.zeros(7))
    found = suggest(problem, privacy=Privacy(epsilon=1, trust="local"))
    assert found.facts == PublicFacts(clients=20, dimension=7)
    with pytest.raises(AssertionError, match="was called"):
        train(problem, **found.settings)


def test_no_record_is_read() -> None:
    parts = [Watched(30), Watched(50)]
    problem = Problem(nn.Linear(4, 3), F.cross_entropy, parts)
    before = [part.reads for part in parts]
    suggest(problem, privacy=Privacy(epsilon=1, trust="local"))
    assert suggest(problem, privacy=Privacy(epsilon=1, unit="record", trust="local")).facts.records == (30, 50)
    assert [part.reads for part in parts] == before


@pytest.mark.parametrize("unit", ["client", "record"])
def test_other_records_get_the_same_suggestion(unit: Any) -> None:
    privacy = Privacy(epsilon=1, unit=unit, trust="local")
    one, other = (suggest(of_records(9, 12, shift=shift), privacy=privacy) for shift in (0.0, 100.0))
    assert one == other
    sizes_alone = suggest(of_records(9, 12), privacy=Privacy(epsilon=1, trust="local"))
    assert sizes_alone == suggest(
        of_records(90, 7), privacy=Privacy(epsilon=1, trust="local")
    )  # sizes of protected clients


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"clients": 3.5, "dimension": 2}, "clients must be a whole number"),
        ({"clients": 3, "dimension": math.nan}, "dimension must be a whole number"),
        ({"clients": 3, "dimension": 2, "tensor_sizes": (1,)}, "add up to the dimension 2"),
        ({"clients": 3, "dimension": 2, "records": (1, 2)}, "one number for each of the 3 clients"),
        ({"clients": 1, "dimension": 2, "records": (1.5,)}, "records must be a whole number"),
    ],
)
def test_facts_are_whole_numbers(facts: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        PublicFacts(**facts)


RECORDS = Privacy(epsilon=1, unit="record", trust="local")
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a method that is not covered": (
        (FACTS, "fedavg"),
        {"privacy": Privacy(epsilon=8, trust="local")},
        "no rule for the settings",
    ),
    "a method without a bound": ((FACTS, "gd"), {"privacy": Privacy(epsilon=8, trust="local")}, "without a bound"),
    "a memory of records": ((FACTS, "normec"), {"privacy": RECORDS}, "only dpsgd-clip has a rule"),
    "records that are not counted": ((FACTS,), {"privacy": RECORDS}, "how many each client holds"),
    "sampled clients": ((FACTS,), {"privacy": Privacy(epsilon=8, trust="central", sampling=0.1)}, "leave out sampling"),
    "a number as privacy": ((FACTS,), {"privacy": 8}, "must be a normec.Privacy"),
    "an unknown method": ((FACTS, "normex"), {}, "did you mean 'normec'"),
    "no rounds": ((FACTS,), {"rounds": 0}, "rounds must be a whole number"),
    "weights of nobody": (
        (FACTS,),
        {"privacy": Privacy(epsilon=8, trust="local"), "weights": [0.5, 0.5]},
        "weights need a problem",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rule_covers_is_refused(name: str) -> None:
    arguments, options, says = REFUSED[name]
    with pytest.raises(UsageError, match=says):
        suggest(*arguments, **options)


@pytest.mark.parametrize("method", rule.RULED)
def test_a_suggestion_trains(method: str) -> None:
    problem = of_records(9, 12, 7)
    found = suggest(problem, method, privacy=Privacy(epsilon=8, trust="local"), rounds=5)
    run = train(problem, **found.settings, seed=0)
    assert run.state.round == 5
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(8, rel=1e-3)
    assert {one.name for one in found.chosen} <= {"rounds", "lr", "alpha", "beta", "tau", "decay", "server_norm"}


@pytest.mark.parametrize("method", rule.RULED)
def test_other_parts_of_the_statement_are_kept(method: str) -> None:
    privacy = Privacy(epsilon=8, noise_schedule="linear:0.5", honest=50, trust="secure-sum")
    found = suggest(FACTS, method, privacy=privacy)
    assert found.privacy == privacy
    constant = dataclasses.replace(privacy, noise_schedule="constant")
    assert found.noise == suggest(FACTS, method, privacy=constant).noise
    alone = suggest(FACTS, method, privacy=Privacy(epsilon=8, trust="secure-sum"))
    assert found.noise == pytest.approx(alone.noise * math.sqrt(2))  # half of the clients hide the sum


def test_every_reason_is_a_sentence() -> None:
    for epsilon in (0.1, 1, 8, 100):
        for method in rule.RULED:
            found: Suggestion = suggest(FACTS, method, privacy=Privacy(epsilon=epsilon, trust="local"))
            for text in (*(one.reason for one in found.chosen), found.outlook):
                assert text[0].isupper() or text[0] == "ε"
                assert text.endswith(".")
    assert "expect little" in dataclasses.replace(found, noise=2.0).outlook


def test_an_argument_that_is_no_method_and_a_method_of_the_users_own_are_refused() -> None:
    with pytest.raises(UsageError, match=r"got an object Privacy; .*the privacy statement as privacy="):
        suggest(FACTS, Privacy(epsilon=8))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no rule is known for a method of your own, my\.py:Mine"):
        suggest(FACTS, "my.py:Mine", privacy=Privacy(epsilon=8))


def test_settings_can_be_changed_before_they_are_used() -> None:
    found = suggest(PublicFacts(clients=100, dimension=650), privacy=Privacy(epsilon=8, trust="secure-sum"))
    found.settings["rounds"] = 7
    assert found.settings["rounds"] == 7
    assert found.values["rounds"] == 200
