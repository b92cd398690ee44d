"""Requests of a hostile server, field by field: the party goes on, and pays for nothing but what really left it."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import Problem
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.terms import PlanTerms
from normec.federation.protocol.wire import Refusal, Reply
from normec.privacy import gaussian

from .faulty_network import DIMENSION, Quadratic
from .hostile import SIGMA, HostileServer, zeros
from .oracles import Untouched

POLICY = Policy(epsilon=1e6, trusts=["local", "central"], methods=["normec", "clip21", "ef21", "dpsgd", "gd"])


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


WHOLE = [0, -1, 1, 2, 2**20, 4 * 10**8, 2**31, 2**62, 2**63 - 1, 2**63, 2**200, -(2**70)]
REAL = [0.0, -0.0, -1.0, 5e-324, 1e-300, 1e-9, 1.0, 1e9, 1e30, 1e100, 1e200, 1.7e308, math.inf, -math.inf, math.nan]
WORDS = ["", "a", "none", "seeded", "secure", "exact", "central", "secure-sum", "gd", "Identity", "TopK", "../up"]
WORDS += ["e" * 32, "0" * 64, "x" * 100_000, "a\n", "a\0"]
THINGS = [
    None,
    True,
    False,
    b"",
    [],
    {},
    (),
    nested(900),
    {"a": {"b": nested(100)}},
    np.float64(1),
    np.int64(1),
    object(),
]
SPECS = [
    *("{}", "[]", "0", "null", "{" * 4000, "[" * 2000 + "]" * 2000, '{"alpha": ' + "9" * 4000 + ', "beta": 1}'),
    *(
        f'{{"alpha": {number}, "beta": 0.5}}'
        for number in ("NaN", "-1", "0", "1e9", "1e10", "1e999", "null", "[]", '""')
    ),
    *(f'{{"alpha": 0.1, "beta": {number}}}' for number in ("0", "-1", "1e-12", "1e9", "true", '"x"', "[1, 2]")),
    *(f'{{"alpha": 0.1, "beta": 0.5, "decay": {number}}}' for number in ("1", "-1", "2", "0.9999999", "1e-12", "true")),
    *('{"alpha": 0.1, "beta": 0.5, "more": 1}', '{"operator": {"operator": "Identity"}}', '{"tau": 1.0}'),
    '{"alpha": {"operator": "SmoothedNorm", "alpha": 0.1}, "beta": 0.5}',
    "{" + ", ".join(f'"s{i}": 1' for i in range(100_000)) + "}",
]
VECTORS = [np.full(DIMENSION, value) for value in (math.nan, math.inf, 1.7e308, -1e30, 5e-324, 0.0)]
VECTORS += [np.zeros(DIMENSION, kind) for kind in (np.float32, np.float16, np.int64, np.complex128, object, ">f8")]
VECTORS += [np.zeros(shape) for shape in (0, 1, DIMENSION + 1, (DIMENSION, 1), ())]
EXTREMES = [*WHOLE, *REAL, *WORDS, *SPECS, *THINGS, *VECTORS]
GOOD = HostileServer(Party("unused", POLICY, Quadratic()), zeros(DIMENSION)).fields()
FIELDS = [*sorted(GOOD), "record.row", "more"]


class Scene:
    """A party with a state of the run that is attacked, and a good server with a run of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        party = Party(folder, POLICY, Quadratic(), node="a")
        self.bad, self.good = (HostileServer(party, zeros(DIMENSION), run=run) for run in ("bad", "good"))
        for server in (self.bad, self.good):
            assert isinstance(server.ask(), Reply)

    def attack(self, changes: dict[str, Any]) -> None:
        self.bad.send(self.bad.fields() | changes)
        self.check()

    def check(self) -> None:
        assert isinstance(self.good.ask(), Reply)
        releases = read_releases(self.folder)
        assert releases.count() == len(self.bad.left | self.good.left)
        assert releases.recovered() == 0
        assert releases.epsilon("client", 1e-5) <= 1e6


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("field", FIELDS)
def test_one_field_at_its_extremes(field: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for value in EXTREMES:
        scene.bad.send(scene.bad.fields() | {field: value})
    scene.bad.send({name: value for name, value in scene.bad.fields().items() if name != field})
    scene.check()


def test_what_is_no_table(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for thing in EXTREMES:
        assert isinstance(scene.bad.send(thing), Refusal)
    scene.check()


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(EXTREMES), min_size=2, max_size=6))
def test_several_fields_at_once(changes: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        Scene(Path(folder)).attack(changes)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    number=st.one_of(st.floats(), st.integers(-(2**65), 2**65), st.floats(1e-9, 1e9), st.integers(0, 2000)),
    field=st.sampled_from(FIELDS),
)
def test_any_number_in_any_field(number: float, field: str) -> None:
    with TemporaryDirectory() as folder:
        Scene(Path(folder)).attack({field: number})


@pytest.mark.parametrize("claim", [{"record.lost": 2**31}, {"record.lost": 2**62}, {"record.lost": 1000}])
def test_a_claim_of_lost_messages_counts_only_after_a_handshake(claim: dict[str, int], tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.bad.token = "f" * 32  # of no handshake
    scene.attack(claim)


@pytest.mark.parametrize("lost", [3, 10**6, 2**31])
def test_a_claim_after_a_handshake_costs_no_more_than_the_budget(lost: int, tmp_path: Path) -> None:
    """Three messages are charged in full; of more, one past what the budget allows. A larger budget is usable again."""
    allowed = 5
    epsilon = gaussian.epsilon(math.sqrt(allowed) / SIGMA, 1e-5) * (1 + 1e-12)
    party = Party(tmp_path, Policy(epsilon=epsilon), Quadratic(), node="a")
    liar = HostileServer(party, zeros(DIMENSION), run="lies")
    answer = liar.ask(record__lost=lost)
    releases = read_releases(tmp_path)
    assert releases.recovered() == min(lost, allowed + 1)
    assert isinstance(answer, Reply if lost == 3 else Refusal)
    for _ in range(3):
        liar.ask(record__lost=lost)
    assert read_releases(tmp_path).recovered() == min(lost, allowed + 1)
    richer = Party(tmp_path, Policy(epsilon=2 * epsilon), Quadratic(), node="a")
    assert isinstance(HostileServer(richer, zeros(DIMENSION), run="other").ask(), Reply)


def test_a_claim_that_the_rest_of_the_budget_cannot_pay_still_stops_all_spending(tmp_path: Path) -> None:
    """Expensive messages of a lost disk are charged although not even one fits; cheap ones are then refused too."""
    epsilon = gaussian.epsilon(math.sqrt(5) / SIGMA, 1e-5)
    party = Party(tmp_path, Policy(epsilon=epsilon), Quadratic(), node="a")
    cheap = HostileServer(party, zeros(DIMENSION), run="cheap")
    for _ in range(4):
        assert isinstance(cheap.ask(), Reply)
    dear = HostileServer(party, zeros(DIMENSION), run="dear", sigma=SIGMA / 2)
    assert isinstance(dear.ask(record__lost=3), Refusal)
    assert read_releases(tmp_path).recovered() == 1
    answer = cheap.ask()
    assert isinstance(answer, Refusal)
    assert answer.reason == "budget"


@pytest.mark.parametrize("sigma", [1e-300, 1e-8, 0.5, 1e7, 1e8, 1e100, 1e200])
def test_noise_outside_the_limits_is_refused_before_the_data_are_touched(sigma: float, tmp_path: Path) -> None:
    party = Party(tmp_path, Policy(epsilon=8.0), Untouched(), node="a")
    answer = HostileServer(party, zeros(DIMENSION), sigma=sigma).ask()
    assert isinstance(answer, Refusal)
    assert answer.reason in ("noise", "malformed")
    assert read_releases(tmp_path).count() == 0
    assert "AssertionError" not in (tmp_path / "events.jsonl").read_text()


def test_a_model_of_another_size_is_refused_before_anything_is_paid(tmp_path: Path) -> None:
    records = TensorDataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    oracle = ProblemOracle(Problem(nn.Linear(3, 2), nn.functional.cross_entropy, [records]))
    party = Party(tmp_path, Policy(epsilon=8.0), oracle, node="a")
    answer = HostileServer(party, zeros(9)).ask()
    assert isinstance(answer, Refusal)
    assert read_releases(tmp_path).count() == 0
    assert "the model here has 8 parameters" in (tmp_path / "events.jsonl").read_text()
    assert isinstance(HostileServer(party, zeros(8)).ask(), Reply)


def test_code_that_cannot_work_is_noticed_before_anything_is_paid() -> None:
    records = TensorDataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(RuntimeError):
        ProblemOracle(Problem(nn.Linear(7, 2), nn.functional.cross_entropy, [records]))


def test_a_large_client_number_takes_no_memory() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("mask", torch.ones(1000))

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.linear(inputs) * self.mask[0]
            return found

    records = TensorDataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    oracle = ProblemOracle(Problem(Masked(), nn.functional.cross_entropy, [records]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    oracle.gradient(torch.zeros(8), 2**20 - 1, 0, PlanTerms(0, 2, 10))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB; a row each would be 4 GiB
