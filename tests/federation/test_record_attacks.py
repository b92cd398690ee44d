"""A hostile server against the protection of records: whatever it asks, a record moves a message by what is paid.

`moved` measures this: two parties whose data differ in one record answer the same request with the same seeded noise,
so the difference of their messages is that of the messages before the noise.
"""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Method, NormEC, Privacy, Problem, SmoothedNorm, UsageError
from normec.algorithms import registry
from normec.algorithms.operators import norms
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import GradientOracle, ProblemOracle
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.terms import PlanTerms, RecordTerms
from normec.federation.protocol.wire import Refusal, Reply
from normec.gradients.loop import record_shares
from normec.gradients.record_clip import RecordClip
from normec.privacy import gaussian

from .hostile import HostileServer, zeros
from .oracles import ClipsTheSum

SIGMA, DIVISOR = 0.5, 8.0
OWN = Path(__file__).with_name("methods") / "my_method.py"
POLICY = Policy(epsilon=1e6, unit="record", least_sigma=1e-3, simulation=True, methods=["normec", "dpsgd", "clip21"])
RECORDS = {"plan.records.divisor": DIVISOR, "plan.records.by_layer": False, "plan.records.clip": 1.0}
STEEP = DPSGD(Clip(5.0))


def steep(outputs: Tensor, targets: Tensor) -> Tensor:
    """exp overflows: the gradient of a record is finite or not, as x decides."""
    return (outputs.exp() * targets).mean()


def oracle(records: int, loss: Any = steep, model: nn.Module | None = None) -> ProblemOracle:
    """Records 0, 1, …: the last one is the largest and points the other way."""
    rng = np.random.default_rng(3)
    inputs = torch.from_numpy(rng.normal(size=(7, 3)))
    inputs[6] = torch.tensor([-900.0, 0.0, 0.0])
    given = TensorDataset(inputs[:records], torch.ones(records, dtype=torch.float64))
    return ProblemOracle(Problem(model or nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double(), loss, [given]))


def asking(folder: Path, own: GradientOracle, method: Method = STEEP, **privacy: Any) -> HostileServer:
    stated = {"sigma": SIGMA, "noise": "seeded", "unit": "record", "trust": "local", "memory": "noisy", **privacy}
    party = Party(folder, POLICY, own, node="a")
    return HostileServer(party, zeros(4), method=method, privacy=Privacy(**stated), sigma=stated["sigma"])


def moved(folder: Path, x: Any, method: Method = STEEP, *, kind: Any = oracle, **changes: Any) -> float:
    """How far the last record moves the message at x."""
    seen = []
    for name, records in (("with", 7), ("without", 6)):
        server = asking(folder / name, kind(records), method)
        answer = server.ask(np.asarray(x, np.float64), **RECORDS | changes)
        assert isinstance(answer, Reply)
        seen.append(answer.message)
    return float(np.linalg.norm(seen[0] - seen[1]))


POINTS = {
    "an ordinary point": [0.1, 0.2, 0.3, 0.4],
    "the record is huge": [-0.2, 0.0, 0.0, 0.0],
    "the record overflows": [-1.0, 0.0, 0.0, 0.0],
    "most records overflow": [1e4, 1e4, -1e4, 900.0],
    "all is beyond reason": [1e30, -1e30, 1e30, -1e30],
}


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("clip", [1.0, 0.01, 30.0, "auto"])
@pytest.mark.parametrize("name", POINTS)
def test_no_point_lets_a_record_move_more_than_its_share(name: str, clip: Any, tmp_path: Path) -> None:
    changes = dict(RECORDS, **{"plan.records.clip": clip})
    if clip == "auto":
        del changes["plan.records.clip"]
    bound = (1.0 if clip == "auto" else clip) / DIVISOR
    seen = []
    for who, records in (("with", 7), ("without", 6)):
        server = asking(tmp_path / who, oracle(records))
        answer = server.send({**_without(server.fields(np.array(POINTS[name]))), **changes})
        answer = server.send({**_without(server.fields(np.array(POINTS[name]))), **changes})
        assert isinstance(answer, Reply)
        seen.append(answer.message)
    assert float(np.linalg.norm(seen[0] - seen[1])) <= bound * (1 + 1e-9)
    charged = read_releases(tmp_path / "with").epsilon("record", 1e-5)
    assert charged == pytest.approx(gaussian.epsilon(min(bound, 10.0) / SIGMA, 1e-5), rel=1e-9)


def _without(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not name.startswith("plan.records")}


class Jumpy(nn.Module):
    """Looks a number up, in a table that ends: a record beyond the threshold makes the forward pass fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.table = nn.Linear(3, 1).double(), torch.zeros(2, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.linear(inputs).flatten()
        return found + self.table[(found > 500).long() * 100 + (found < 0).long()]


def test_a_record_that_makes_the_partys_code_fail_adds_nothing(tmp_path: Path) -> None:
    def plain(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) ** 2).mean()

    def jumpy(records: int) -> ProblemOracle:
        return oracle(records, plain, Jumpy())

    x, failing = [-1.0, 0.0, 0.0, 0.0], jumpy(7)._problem
    with pytest.raises(IndexError):
        record_shares(
            failing, torch.tensor(x, dtype=torch.float64), *failing.records.batch(0, None), RecordClip(1.0), 8
        )
    assert moved(tmp_path, x, kind=jumpy) <= 1.0 / DIVISOR * (1 + 1e-9)
    for name in ("with", "without"):
        assert not any(line["event"] == "failed" for line in read_journal(tmp_path / name / "events.jsonl"))


def test_a_record_that_fails_leaves_the_bits_of_the_others() -> None:
    """If its neighbours were computed in batches of another shape, they would be rounded differently."""

    def plain(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) ** 2).mean()

    plan, terms = PlanTerms(seed=7, batch_size=0, rounds=4), RecordTerms(DIVISOR, by_layer=False, clip=1.0)
    x = torch.tensor([-1.0, 1 / 3, 1 / 7, 0.1], dtype=torch.float64)
    sums = [
        oracle(records, plain, Jumpy()).clipped_gradient(x, 0, 0, plan, terms, secret_coins=True)[0]
        for records in (7, 6)
    ]
    assert torch.equal(*sums)


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e30])
@pytest.mark.parametrize("count", [2, 9, 17])
def test_the_other_records_are_rounded_alike_at_any_point(count: int, scale: float) -> None:
    """All sums of the first layer cancel here, so the order of additions decides about every record's gradient."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(count, 784), torch.arange(count) % 4
    model, plan = nn.Sequential(nn.Linear(784, 33), nn.ReLU(), nn.Linear(33, 4)), PlanTerms(7, batch_size=0, rounds=4)
    orthogonal = torch.linalg.svd(inputs.double()).Vh[count:]
    first = (torch.randn(33, len(orthogonal), dtype=torch.float64) @ orthogonal).float()
    x = scale * torch.cat([first.flatten(), torch.zeros(33), torch.randn(4 * 33), torch.zeros(4)])

    def total(start: int) -> Tensor:
        data = TensorDataset(inputs[start:], targets[start:])
        own = ProblemOracle(Problem(model, nn.functional.cross_entropy, [data]))
        return own.clipped_gradient(x, 0, 0, plan, RecordTerms(1.0, by_layer=False, clip=1.0), secret_coins=True)[0]

    assert float((total(0) - total(1)).double().norm()) <= 1 + 1e-5


@pytest.mark.slow
def test_the_measurement_finds_a_clip_of_the_sum(tmp_path: Path) -> None:
    def wrong(records: int) -> ProblemOracle:
        return ClipsTheSum(oracle(records)._problem)

    assert moved(tmp_path / "right", POINTS["the record is huge"]) <= 1.0 / DIVISOR * (1 + 1e-9)
    assert moved(tmp_path / "wrong", POINTS["the record is huge"], kind=wrong) > 2 / DIVISOR


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e3, 1e29])
@pytest.mark.parametrize("name", POINTS)
def test_any_row_that_the_server_returns_is_a_public_memory(name: str, size: float, tmp_path: Path) -> None:
    """After a handshake the memory is what the server says: a record still moves the message by L·C/B at most."""
    row = size * np.array([0.5, -0.5, 0.5, 0.5])
    claims = {"round": 3, "record.accepted": 1, "record.since": 2, "record.digest": "0" * 64, "record.row": row}
    method = NormEC(0.5, 0.4)
    assert moved(tmp_path, POINTS[name], method, **claims) <= 2 * 1.0 / DIVISOR * (1 + 1e-6)


def overflowing(length: int, last: int) -> Tensor:
    """The longest vector whose norm is finite in float32, coordinate by coordinate; the `last` one is set last."""
    vector = torch.zeros(length)
    for place in [place for place in range(length) if place != last] + [last]:
        low, high = 0, 2**31 - 2**24  # the bits of 0 and of a number beyond the largest, as integers
        while high - low > 1:
            middle = (low + high) // 2
            vector[place] = torch.tensor(middle, dtype=torch.int32).view(torch.float32)
            finite = bool(torch.isfinite(norms(vector)).all())
            low, high = (middle, high) if finite else (low, middle)
        vector[place] = torch.tensor(low, dtype=torch.int32).view(torch.float32)
    return vector


@pytest.mark.slow
def test_a_norm_that_overflows_for_one_record_does_not_make_the_message_zero(tmp_path: Path) -> None:
    """The memory that the server returns is so long that its norm overflows in float32 with the record alone."""

    def hinge(outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
        return outputs.relu().mean()

    def large(records: int) -> ProblemOracle:
        inputs = torch.zeros(7, 20)
        inputs[:6, 0], inputs[:6, 1], inputs[6, 0] = -1.0, torch.arange(6) / 100, 1e6
        given = TensorDataset(inputs[:records], torch.ones(records))
        return ProblemOracle(Problem(nn.Sequential(nn.Linear(20, 1), nn.Flatten(0)), hinge, [given]))

    row, x, alpha = -overflowing(21, last=0).numpy(), np.eye(21, dtype=np.float32)[0], 1e9
    claims = {"round": 3, "record.accepted": 1, "record.since": 2, "record.digest": "0" * 64, "record.row": row}
    seen = []
    for name, records in (("with", 7), ("without", 6)):
        server = asking(tmp_path / name, large(records), NormEC(alpha, 0.4))
        answer = server.ask(x, **RECORDS | claims | {"plan.records.clip": 1e6, "plan.records.divisor": 1.0})
        assert isinstance(answer, Reply)
        seen.append(answer.message)
    assert float(np.linalg.norm(seen[0] - seen[1])) <= 1e6 / alpha * (1 + 1e-3)


def test_terms_that_change_from_message_to_message_are_charged_as_they_are(tmp_path: Path) -> None:
    """The clip, the divisor, the noise and the method change in the middle of a run without a memory."""
    server, square = asking(tmp_path, oracle(7)), 0.0
    for clip, divisor, sigma, method in [
        (1.0, 8.0, 0.5, STEEP),
        (0.1, 8.0, 0.5, STEEP),
        (1e9, 1.0, 5.0, STEEP),
        (1.0, 1000.0, 0.01, STEEP),
        (1.0, 8.0, 0.5, DPSGD(SmoothedNorm(0.1))),
        (2.0, 30.0, 0.125, DPSGD(Clip(0.01))),
    ]:
        server.method, server.sigma = method, sigma
        answer = server.ask(plan__records__clip=clip, plan__records__divisor=divisor, plan__records__by_layer=False)
        assert isinstance(answer, Reply)
        slope = method.lipschitz
        assert slope is not None
        square += (min(2 * method.bound, slope * clip / divisor) / sigma) ** 2
    found = read_releases(tmp_path).epsilon("record", 1e-5)
    assert found == pytest.approx(gaussian.epsilon(math.sqrt(square), 1e-5), rel=1e-9)


def test_a_memory_that_began_clean_is_never_used_as_a_public_one(tmp_path: Path) -> None:
    """The unit is switched in the middle: the memory of the first messages contains what no noise covers."""
    both = POLICY.model_copy(update={"units": ["client", "record"]})
    server = asking(tmp_path, oracle(7), NormEC(0.5, 0.4), unit="client", memory="clean")
    server.party = Party(tmp_path, both, oracle(7), node="a")
    first = server.ask()
    assert isinstance(first, Reply)
    accepted = {"round": 1, "record.accepted": 1, "record.since": 1, "record.digest": first.digest}
    server.dropped = ""
    second = server.ask(**accepted)
    assert isinstance(second, Reply)
    server.privacy = Privacy(sigma=SIGMA, noise="seeded", unit="record", memory="noisy", trust="local")
    accepted |= {"round": 2, "record.accepted": 2, "record.since": 2, "record.digest": second.digest}
    answer = server.ask(**accepted | RECORDS)
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"
    assert "began with a state that no noise covers" in read_journal(tmp_path / "events.jsonl")[-1]["exact"]
    assert read_releases(tmp_path).count() == 2


def test_a_state_of_another_method_is_never_used_as_a_public_memory(tmp_path: Path) -> None:
    """The method is switched in the middle: the first one keeps more than messages, under the name of a memory."""
    both = POLICY.model_copy(update={"methods": ["normec", f"{OWN}:LocalAverage"]})
    server = asking(tmp_path, oracle(7), registry.build(f"{OWN}:LocalAverage", {"tau": 0.5}))
    server.party = Party(tmp_path, both, oracle(7), node="a")
    accepted: dict[str, Any] = {}
    for step in range(2):  # by itself the method is charged for its whole bound, and may keep what it likes
        answer = server.ask(**accepted | RECORDS)
        assert isinstance(answer, Reply)
        server.dropped, done = "", step + 1
        accepted = {"round": done, "record.accepted": done, "record.since": done, "record.digest": answer.digest}
    found = read_releases(tmp_path)
    assert found.epsilon("record", 1e-5) == pytest.approx(gaussian.epsilon(math.sqrt(2) / SIGMA, 1e-5), rel=1e-9)
    server.method = NormEC(0.5, 0.4)
    refused = server.ask(**accepted | RECORDS)
    assert isinstance(refused, Refusal)
    assert refused.reason == "terms"
    assert "began with a state that no noise covers" in read_journal(tmp_path / "events.jsonl")[-1]["exact"]
    assert read_releases(tmp_path).count() == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a divisor near zero": ({"plan.records.divisor": 1e-300}, "malformed"),
    "a divisor of zero": ({"plan.records.divisor": 0.0}, "malformed"),
    "a divisor below one": ({"plan.records.divisor": 0.5}, "malformed"),
    "a negative divisor": ({"plan.records.divisor": -8.0}, "malformed"),
    "no divisor: the party's own count": ({"plan.records.divisor": None}, "malformed"),
    "a divisor that is no number": ({"plan.records.divisor": math.nan}, "malformed"),
    "a huge divisor": ({"plan.records.divisor": 1e100}, "malformed"),
    "a clip of zero": ({"plan.records.clip": 0.0}, "malformed"),
    "a clip of 1e300": ({"plan.records.clip": 1e300}, "malformed"),
    "batches at a rate of zero": ({"plan.records.batch_rate": 0.0}, "malformed"),
    "batches above one": ({"plan.records.batch_rate": 1.5}, "malformed"),
    "batches of a known size": ({"plan.batch_size": 4}, "terms"),
    "a clip in a run for clients": ({"privacy.unit": "client"}, "malformed"),
    "a clean memory": ({"privacy.memory": "clean"}, "terms"),
    "a sum": ({"privacy.trust": "central", "privacy.memory": "clean"}, "terms"),
    "another relation": ({"privacy.relation": "replace"}, "terms"),
    "the noise of a party with more records": ({"privacy.sigma": 1e-4}, "noise"),
    "noise beside which rounding shows": (
        {"privacy.sigma": 1e-8, "plan.records.divisor": 2.0**39, "plan.records.clip": 1.0},
        "noise",
    ),
    "numbers that the method does not broadcast": ({"public": np.zeros(1)}, "terms"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_terms_that_are_refused_cost_nothing(name: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[name]
    server = asking(tmp_path, oracle(7), NormEC(0.5, 0.4))
    changed = {key: value for key, value in {**RECORDS, **changes}.items() if value is not None}
    answer = server.ask(**changed)
    assert isinstance(answer, Refusal)
    assert answer.reason == reason
    assert read_releases(tmp_path).count() == 0


def test_a_policy_may_demand_a_clip(tmp_path: Path) -> None:
    server = asking(tmp_path, oracle(7))
    server.party = Party(tmp_path, POLICY.model_copy(update={"largest_record_clip": 1.0}), oracle(7), node="a")
    assert isinstance(server.ask(**RECORDS), Reply)
    for changes in ({}, {**RECORDS, "plan.records.clip": 1.01}):
        answer = server.ask(**changes)
        assert isinstance(answer, Refusal)
        assert answer.reason == "terms"
    assert read_releases(tmp_path).count() == 1


def test_a_client_level_budget_is_charged_for_the_whole_message(tmp_path: Path) -> None:
    """A cheap message for a record is dear for the client: b/σ per message, and the budget ends at once."""
    afford = gaussian.epsilon(math.sqrt(3) * 5.0 / SIGMA, 1e-5) * (1 + 1e-9)
    policy = Policy(epsilon=afford, units=["client", "record"], least_sigma=1e-3, simulation=True)
    server = asking(tmp_path, oracle(7))
    server.party = Party(tmp_path, policy, oracle(7), node="a")
    for _ in range(3):
        assert isinstance(server.ask(**RECORDS), Reply)
    answer = server.ask(**RECORDS)
    assert isinstance(answer, Refusal)
    assert answer.reason == "budget"
    releases = read_releases(tmp_path)
    assert releases.epsilon("client", 1e-5) == pytest.approx(afford, rel=1e-6)
    assert releases.epsilon("record", 1e-5) == pytest.approx(gaussian.epsilon(math.sqrt(3) / 8 / SIGMA, 1e-5))


def test_a_second_budget_for_records_ends_runs_for_clients_too(tmp_path: Path) -> None:
    """A run for clients moves a record's message by up to 2b: R1, whatever relation the client's account has."""
    sigma = 20.0
    twice = gaussian.epsilon(math.sqrt(2) * 2 * 5.0 / sigma, 1e-5) * (1 + 1e-9)
    policy = Policy(epsilon=1e3, record_epsilon=twice, simulation=True)
    server = asking(tmp_path, oracle(7), unit="client", sigma=sigma)
    server.party = Party(tmp_path, policy, oracle(7), node="a")
    answers = [server.ask() for _ in range(3)]
    assert [type(answer) for answer in answers] == [Reply, Reply, Refusal]
    assert answers[2].reason == "budget"  # type: ignore[union-attr]


def test_a_party_whose_code_clips_no_records_takes_no_part(tmp_path: Path) -> None:
    class Plain(GradientOracle):
        def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
            return x, 0.0

    answer = asking(tmp_path, Plain()).ask(**RECORDS)
    assert isinstance(answer, Refusal)
    assert answer.reason == "failed"
    assert read_releases(tmp_path).count() == 0


def test_records_that_depend_on_each_other_are_refused_before_anything_is_paid(tmp_path: Path) -> None:
    class Centred(nn.Module):
        """Keeps a mean of what it saw, so that a record's gradient depends on the records before it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen = nn.Linear(3, 1).double(), torch.zeros(3, dtype=torch.float64)

        def forward(self, inputs: Tensor) -> Tensor:
            found = self.linear(inputs - self.seen).flatten()
            self.seen = self.seen + 0.1 * torch.ones(3, dtype=torch.float64)
            return found

    party = asking(tmp_path, oracle(6, lambda out, target: ((out - target) ** 2).mean(), Centred()))
    answer = party.ask(**RECORDS)
    assert isinstance(answer, Refusal)
    assert answer.reason == "failed"
    assert "so no epsilon covers this run" in read_journal(tmp_path / "events.jsonl")[-1]["exact"]
    assert read_releases(tmp_path).count() == 0


class KeepsTheFirst(nn.Module):
    """Divides its inputs by the size of the first ones that it saw, as initialisations that depend on data do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1).double()
        self.size: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.size is None:
            self.size = inputs.abs().mean()
        found: Tensor = self.linear(inputs / self.size).flatten()
        return found


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def remembering() -> Any:
    """A loss that keeps the largest output that it saw in a closure."""
    known = [0.0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.numel() > 1:
            known[0] = max(known[0], float(outputs.detach().abs().max()))
        return squares(outputs / (1 + known[0]), targets)

    return loss


@pytest.mark.parametrize("kind", ["a model", "a loss"])
def test_what_code_kept_when_the_data_were_loaded_is_in_no_clipped_message(kind: str, tmp_path: Path) -> None:
    """The trial gradient sees records together and unclipped, and its results are not released."""

    def made(records: int) -> ProblemOracle:
        if kind == "a model":
            return oracle(records, squares, KeepsTheFirst())
        return oracle(records, remembering())

    assert moved(tmp_path, POINTS["an ordinary point"], kind=made) <= 1 / DIVISOR * (1 + 1e-9)


@pytest.mark.parametrize("noise", ["none", "seeded"])
def test_what_code_kept_in_another_run_is_in_no_clipped_message(noise: str, tmp_path: Path) -> None:
    """A run for clients, or one without noise, sees all records together."""

    class KeepsOfBatches(KeepsTheFirst):
        """Keeps the largest input of batches of four records, which neither the trial nor the checks compute."""

        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) == 4:
                self.size = max(self.size or 1.0, float(inputs.detach().abs().max()))
            found: Tensor = self.linear(inputs / (self.size or 1.0)).flatten()
            return found

    point, seen = np.array(POINTS["an ordinary point"]), []
    for name, records in (("with", 7), ("without", 6)):
        own = oracle(records, squares, KeepsOfBatches())
        for unit in ("client", "record"):
            server = asking(tmp_path / name, own)
            server.run = unit
            rules = {"units": ["client", "record"], "allow_without_noise": True}
            server.party = Party(tmp_path / name, POLICY.model_copy(update=rules), own, node="a")
            how = {"privacy.noise": noise, "privacy.sigma": SIGMA if noise == "seeded" else 0.0}
            for round in range(3):  # batches of four that reach the last record
                whole = {"privacy.unit": "client", "plan.batch_size": 4, "round": round, **how}
                answer = server.ask(point, **(whole if unit == "client" else RECORDS))
                assert isinstance(answer, Reply)
        seen.append(answer.message)
    assert float(np.linalg.norm(seen[0] - seen[1])) <= 1 / DIVISOR * (1 + 1e-9)


class WritesToAFrozenParameter(KeepsTheFirst):
    """Divides its inputs by a frozen parameter, to which it writes the size of batches of some length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.size = length, nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == self.length:
            self.size.data.copy_(inputs.abs().mean())
        return super().forward(inputs)


def test_a_frozen_parameter_that_changes_with_the_data_is_refused() -> None:
    with pytest.raises(UsageError, match="the frozen parameter size depends on the data"):
        oracle(7, squares, WritesToAFrozenParameter(7))


def test_a_frozen_parameter_that_changes_later_is_in_no_clipped_message() -> None:
    point, seen = torch.tensor(POINTS["an ordinary point"], dtype=torch.float64), []
    terms = RecordTerms(DIVISOR, by_layer=False, clip=1.0)
    for records in (7, 6):
        own = oracle(records, squares, WritesToAFrozenParameter(4))
        for round in range(3):
            with pytest.raises(UsageError, match="the frozen parameter size depends on the data"):
                own.gradient(point, 0, round, PlanTerms(seed=7, batch_size=4, rounds=4))
        plan = PlanTerms(seed=7, batch_size=0, rounds=4)
        seen.append(own.clipped_gradient(point, 0, 0, plan, terms, secret_coins=False)[0])
    assert float((seen[0] - seen[1]).norm()) <= 1 / DIVISOR * (1 + 1e-9)


def test_what_a_method_keeps_in_an_attribute_is_in_no_clipped_message(tmp_path: Path) -> None:
    name = f"{OWN.with_name('wrong_methods.py')}:HiddenMomentum"
    policy, seen = POLICY.model_copy(update={"methods": [name]}), []
    for who, records in (("with", 7), ("without", 6)):
        server = asking(tmp_path / who, oracle(records, squares), registry.build(name, {"tau": 1e3}))
        server.party = Party(tmp_path / who, policy, oracle(records, squares), node="a")
        for _ in range(2):
            answer = server.ask(np.array(POINTS["an ordinary point"]), **RECORDS)
            assert isinstance(answer, Reply)
        seen.append(answer.message)
    assert float(np.linalg.norm(seen[0] - seen[1])) <= 1 / DIVISOR * (1 + 1e-9)


def test_a_record_that_occurs_twice_is_refused() -> None:
    inputs = torch.ones(4, 3, dtype=torch.float64)
    twice = torch.utils.data.Subset(TensorDataset(inputs, torch.ones(4, dtype=torch.float64)), [0, 1, 1])
    own = ProblemOracle(Problem(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double(), steep, [twice]))
    with pytest.raises(UsageError, match="occurs more than once"):
        own.check_records()


def test_the_masks_of_dropout_are_secret() -> None:
    """Their order follows the records: with masks that the server knows, a record left out shows in all later ones."""
    own = oracle(6, model=nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1), nn.Flatten(0)).double())
    plan, terms = PlanTerms(seed=7, batch_size=0, rounds=4), RecordTerms(DIVISOR, by_layer=False, clip=1.0)
    x = torch.full((4,), 0.1, dtype=torch.float64)
    seeded = [own.clipped_gradient(x, 0, 0, plan, terms, secret_coins=False)[0] for _ in range(2)]
    secret = [own.clipped_gradient(x, 0, 0, plan, terms, secret_coins=True)[0] for _ in range(2)]
    assert torch.equal(*seeded)
    assert not torch.equal(*secret)


def test_the_masks_of_dropout_cannot_be_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CPU generator keeps 32 bits of a seed: a server could compare a message with those of all 2^32 masks."""
    own = oracle(6, model=nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1), nn.Flatten(0)).double())
    plan, terms = PlanTerms(seed=7, batch_size=0, rounds=4), RecordTerms(DIVISOR, by_layer=False, clip=1.0)
    x, found = torch.full((4,), 0.1, dtype=torch.float64), []
    for number in range(4):
        monkeypatch.setattr(secrets, "randbits", lambda _, secret=7 + 2**32 * number: secret)
        found.append(own.clipped_gradient(x, 0, 0, plan, terms, secret_coins=True)[0])
    assert len({tuple(one.tolist()) for one in found}) == 4


def test_a_penalty_at_the_party_is_refused() -> None:
    """At an x of the server's choice its slope rounds the sum of the records to a multiple of itself."""
    problem = oracle(6)._problem
    problem.penalty = lambda x: x.square().sum()
    with pytest.raises(UsageError, match="does not go with a penalty"):
        ProblemOracle(problem).check_records()
