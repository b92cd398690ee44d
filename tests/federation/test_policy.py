"""A party's own rules: the file, the floor on noise, the budget over all runs, and refusals that say little."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normec import (
    DPSGD,
    GD,
    AdaptiveClip,
    Clip,
    Clip21,
    Clip21SGD2M,
    LocalSteps,
    Method,
    NormEC,
    Privacy,
    SmoothedNorm,
    UsageError,
)
from normec.federation.protocol import allowed_methods
from normec.federation.protocol.account import FILE, read_releases
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.gradient_oracle import GradientOracle
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy, load_policy
from normec.federation.protocol.spending import spending
from normec.federation.protocol.terms import MethodTerms, PlanTerms
from normec.federation.protocol.wire import REASONS, Refusal, Reply, Request, run_name, to_fields
from normec.privacy import gaussian

from .faulty_network import DIMENSION, Quadratic
from .in_process import plan

SECURE = Privacy(sigma=2.0, noise="secure", memory="noisy", trust="local")
CAREFUL = Policy(epsilon=8.0)


def server(
    method: Method,
    privacy: Privacy | None,
    run: str = "trial",
    rounds: int = 1000,
    local: LocalSteps | None = None,
) -> Coordinator:
    x0 = torch.zeros(DIMENSION, dtype=torch.float64)
    return Coordinator(method, x0, ["a"], plan(rounds, local=local), run=run, privacy=privacy)


def asked(party: Party, coordinator: Coordinator) -> Reply | Refusal:
    """The party's answer to the round's request, after the handshake."""
    answer = party.answer(to_fields(coordinator.requests()["a"]))
    if isinstance(answer, Refusal) and answer.reason == "state":
        coordinator.receive("a", answer)
        answer = party.answer(to_fields(coordinator.requests()["a"]))
    return answer


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('epsilon = 4\ndelta = 1e-6\nleast_sigma = 2\ntrusts = ["local", "central"]\nruns = ["trial-7"]\n')
    policy = load_policy(path)
    assert (policy.epsilon, policy.delta, policy.least_sigma) == (4.0, 1e-6, 2.0)
    assert policy.trusts == ["local", "central"]
    assert policy.runs == ["trial-7"]
    assert not policy.simulation
    assert not policy.allow_without_noise
    assert not policy.report_loss


def test_paths_in_the_file_lead_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ledger has the same witness, whichever folder a command is started in."""
    path, elsewhere = tmp_path / "policy.toml", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path.write_text('epsilon = 4\nwitness = "ledger.witness"\nroster = "parties.toml"\nidentity = "/keys/own.pem"\n')
    policy = load_policy(path)
    assert policy.witness == str(tmp_path / "ledger.witness")
    assert policy.roster == str(tmp_path / "parties.toml")
    assert policy.identity == "/keys/own.pem"
    path.write_text("epsilon = 4\n")
    assert load_policy(path).witness is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epsilom = 4", "did you mean 'epsilon'"),
        ("epsilon = 'much'", "epsilon: input should be a valid number"),
        ("epsilon = -1", "epsilon: input should be greater than 0"),
        ("epsilon = inf", "epsilon: input should be a finite number"),
        ("epsilon = 4\nleast_sigma = 0", "least_sigma: input should be greater than or equal to 0.000001"),
        ("epsilon = 4\nleast_sigma = nan", "least_sigma"),
        ("epsilon = 4\ndelta = 1", "delta: input should be less than 1"),
        ("epsilon = 4\nmethods = ['sgd']", "methods: unknown method 'sgd'"),
        ("epsilon = 4\nmethods = []", "methods: list should have at least 1 item"),
        ("epsilon = 4\ntrusts = ['secure']", "trusts.0"),
        ("epsilon = 4\nsimulation = 'yes'", "simulation"),
        ("epsilon = 4\nruns = ['../up']", "cannot be the name of a run"),
        ("", "epsilon is missing"),
        ("epsilon = ", "cannot be read as TOML"),
    ],
)
def test_mistakes_in_the_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says.replace("(", "\\(").replace(".", "\\.")):
        load_policy(path)
    with pytest.raises(UsageError, match="there is no policy"):
        load_policy(tmp_path / "other.toml")


REFUSED: dict[str, tuple[dict[str, Any], Method, Privacy | None, str]] = {
    "another run": ({"runs": ["mine"]}, NormEC(0.1, 0.5), SECURE, "terms"),
    "a model too large": ({"largest_model": 3}, NormEC(0.1, 0.5), SECURE, "malformed"),
    "another method": ({"methods": ["clip21"]}, NormEC(0.1, 0.5), SECURE, "terms"),
    "no noise": ({}, NormEC(0.1, 0.5), None, "noise"),
    "seeded noise": ({}, NormEC(0.1, 0.5), Privacy(sigma=2.0, noise="seeded", memory="noisy", trust="local"), "noise"),
    "central trust": ({}, NormEC(0.1, 0.5), Privacy(sigma=2.0, noise="secure", trust="central"), "terms"),
    "another unit": ({}, NormEC(0.1, 0.5), Privacy(sigma=2.0, noise="secure", unit="record", trust="local"), "terms"),
    "another relation": (
        {},
        NormEC(0.1, 0.5),
        Privacy(sigma=2.0, noise="secure", relation="replace", trust="local"),
        "terms",
    ),
    "too little noise": ({"least_sigma": 2.001}, NormEC(0.1, 0.5), SECURE, "noise"),
    "too little for the bound": ({"least_sigma": 1.0}, Clip21(2.001), SECURE, "noise"),
    "no budget for one message": ({"epsilon": 0.01}, NormEC(0.1, 0.5), SECURE, "budget"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_what_the_server_hears(name: str, tmp_path: Path) -> None:
    rules, method, privacy, reason = REFUSED[name]
    party = Party(tmp_path, CAREFUL.model_copy(update=rules), Quadratic(), node="a")
    answer = asked(party, server(method, privacy))
    assert isinstance(answer, Refusal)
    assert answer.reason == reason
    assert answer.token == ""
    assert answer.reason in REASONS
    assert set(to_fields(answer)) == {"format", "kind", "encoding", "run", "node", "round", "reason", "token"}
    (line,) = [line for line in read_journal(tmp_path / "events.jsonl") if line["event"] == "refused"]
    assert len(line["exact"]) > 10
    assert read_releases(tmp_path).count() == 0


PLAIN, WITH_STEPS, WITH_PROX = None, LocalSteps(steps=2, lr=0.1), LocalSteps(steps=2, lr=0.1, prox=0.1)
REQUESTS: dict[str, tuple[Method, LocalSteps | None]] = {
    "dpsgd-clip": (DPSGD(Clip(0.1), momentum=0.5), PLAIN),
    "dpsgd-norm": (DPSGD(SmoothedNorm(0.1)), PLAIN),
    "dpsgd-adaptive": (AdaptiveClip(DPSGD(Clip(0.3))), PLAIN),
    "clip21-adaptive": (AdaptiveClip(Clip21(0.3)), PLAIN),
    "clip21-sgd2m-adaptive": (AdaptiveClip(Clip21SGD2M(0.3)), PLAIN),
    "fedavg": (DPSGD(Clip(0.3)), WITH_STEPS),
    "fedprox": (DPSGD(Clip(0.3)), WITH_PROX),
    "fed-normec": (NormEC(0.1, 0.5), WITH_STEPS),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", REQUESTS)
def test_a_name_of_the_catalogue_allows_what_it_says_and_no_more(name: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(f'epsilon = 8\nmethods = ["{name}"]\n')
    policy = load_policy(tmp_path / "policy.toml")
    others = {"normec": (NormEC(0.1, 0.5), PLAIN), "fed-normec, prox": (NormEC(0.1, 0.5), WITH_PROX)}
    others["dpsgd-norm, steps"] = (DPSGD(SmoothedNorm(0.1)), WITH_STEPS)
    allowed = set()
    for other, (method, local) in (REQUESTS | others).items():
        request = server(method, SECURE, local=local).requests()["a"]
        verdict = policy.check(request)
        if verdict is None:
            allowed.add(other)
            assert request.method.build(policy.classes) == method
        else:
            assert verdict.reason == "terms"
            assert f"is not among methods = ['{name}']" in verdict.exact
    assert allowed == {name}


def test_a_party_answers_a_request_that_its_policy_names_by_the_catalogue(tmp_path: Path) -> None:
    party = Party(tmp_path, CAREFUL.model_copy(update={"methods": ["fedavg", "dpsgd-norm"]}), Quadratic(), node="a")
    assert isinstance(asked(party, server(DPSGD(Clip(0.3)), SECURE, local=WITH_STEPS)), Reply)
    refused = asked(party, server(DPSGD(Clip(0.3)), SECURE, run="other"))
    assert isinstance(refused, Refusal)
    assert "dpsgd with these parts and local steps is not among" in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("spec", ["[]", "{}", '{"operator": 3}', '{"operator": {"operator": ["Clip"]}}', "{" * 9000])
def test_settings_without_meaning_are_not_those_of_a_name(spec: str) -> None:
    assert not allowed_methods.allowed("fedavg").covers(MethodTerms("dpsgd", spec, ""), None)


def test_names_of_one_class_do_not_collide(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('epsilon = 8\nmethods = ["fedavg", "dpsgd-clip", "dpsgd"]\n')
    assert load_policy(path).classes == ["dpsgd"]
    (tmp_path / "mine.py").write_text("import normec\n\n\nclass dpsgd(normec.DPSGD):\n    pass\n")
    path.write_text('epsilon = 8\nmethods = ["fedavg", "mine.py:dpsgd"]\n')
    with pytest.raises(UsageError, match="two have the name dpsgd"):
        load_policy(path)


def test_a_party_bounds_the_local_steps_of_a_round(tmp_path: Path) -> None:
    party = Party(tmp_path, CAREFUL.model_copy(update={"most_local_steps": 4}), Quadratic(), node="a")
    few, many = (server(NormEC(0.1, 0.5), SECURE, local=LocalSteps(steps=steps, lr=0.1)) for steps in (4, 5))
    assert isinstance(asked(party, few), Reply)
    answer = asked(party, many)
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"
    assert "5 local steps are more than most_local_steps = 4" in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("change", "word"), [({"optimizer": "lion"}, "unknown local_optimizer"), ({"momentum": 1.0}, "local_momentum must")]
)
def test_a_party_refuses_local_steps_that_it_cannot_make(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    party = Party(tmp_path, CAREFUL, Quadratic(), node="a")
    request = server(NormEC(0.1, 0.5), SECURE, local=LocalSteps(steps=2, lr=0.1)).requests()["a"]
    assert request.plan.local is not None
    local = dataclasses.replace(request.plan.local, **change)
    changed = dataclasses.replace(request, plan=dataclasses.replace(request.plan, local=local))
    answer = party.answer(to_fields(changed))
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"
    assert word in (tmp_path / "events.jsonl").read_text()


def test_local_steps_are_refused_at_record_level_by_server_and_party(tmp_path: Path) -> None:
    by_record = Privacy(sigma=2.0, noise="secure", unit="record", memory="noisy", trust="local")
    with pytest.raises(UsageError, match="local steps have no rule at record level"):
        server(NormEC(0.1, 0.5), by_record, local=LocalSteps(steps=2, lr=0.1))
    party = Party(tmp_path, CAREFUL.model_copy(update={"unit": "record"}), Quadratic(), node="a")
    plain, local = (
        server(NormEC(0.1, 0.5), privacy, local=work).requests()["a"]
        for privacy, work in ((by_record, None), (SECURE, LocalSteps(steps=2, lr=0.1)))
    )
    answer = party.answer(to_fields(dataclasses.replace(plain, plan=local.plan)))
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"
    assert "local steps have no rule at record level" in (tmp_path / "events.jsonl").read_text()


def test_the_floor_is_met_exactly(tmp_path: Path) -> None:
    party = Party(tmp_path, CAREFUL.model_copy(update={"least_sigma": 2.0}), Quadratic(), node="a")
    assert isinstance(asked(party, server(NormEC(0.1, 0.5), SECURE)), Reply)


def test_a_party_answers_to_its_own_name_only(tmp_path: Path) -> None:
    party = Party(tmp_path, CAREFUL, Quadratic(), node="b")
    answer = asked(party, server(NormEC(0.1, 0.5), SECURE))
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"


def test_a_claimed_bound_that_is_not_the_operators(tmp_path: Path) -> None:
    party = Party(tmp_path, CAREFUL, Quadratic(), node="a")
    coordinator = server(Clip21(2.0), Privacy(sigma=8.0, noise="secure", trust="local"))
    request = coordinator.requests()["a"]
    lying = dataclasses.replace(request, privacy=dataclasses.replace(request.privacy, bound=0.5))
    answer = party.answer(lying)
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"


def test_an_unbounded_method_under_noise_is_refused_by_the_party_too(tmp_path: Path) -> None:
    party = Party(tmp_path, CAREFUL.model_copy(update={"methods": ["gd"]}), Quadratic(), node="a")
    request = server(DPSGD(SmoothedNorm(0.1)), SECURE).requests()["a"]
    method = MethodTerms.of(GD())
    answer = party.answer(dataclasses.replace(request, method=method))
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"


def test_the_budget_runs_out_in_the_middle_and_a_new_run_brings_no_new_one(tmp_path: Path) -> None:
    afford = 5
    epsilon = gaussian.epsilon(math.sqrt(afford) / 2.0, 1e-5) * (1 + 1e-12)  # five messages of sigma 2, no sixth
    policy = CAREFUL.model_copy(update={"epsilon": epsilon})
    party = Party(tmp_path, policy, Quadratic(), node="a")
    sent = 0
    for run in ("first", "second"):
        coordinator = server(NormEC(0.1, 0.5), SECURE, run)
        for _ in range(3):
            answer = asked(party, coordinator)
            if isinstance(answer, Refusal):
                assert answer.reason == "budget"
                assert coordinator.receive("a", answer) == "refused"
                assert not coordinator.ready  # the round is not closed without anyone
                assert coordinator.waiting == set()
                coordinator.repeat_round()
                assert coordinator.waiting == {"a"}
                break
            sent += 1
            coordinator.receive("a", answer)
            coordinator.close_round()
    assert sent == afford
    found = spending(tmp_path, policy)
    json.dumps(found)
    assert found["epsilon"] == pytest.approx(epsilon, rel=1e-9)
    assert found["releases"] == afford
    assert found["refusals"] == {"budget": 1}
    assert {run_name(run): facts["releases"] for run, facts in found["runs"].items()} == {"first": 3, "second": 2}
    first = next(facts for run, facts in found["runs"].items() if run_name(run) == "first")
    assert first["epsilon"] == pytest.approx(gaussian.epsilon(math.sqrt(3) / 2, 1e-5), rel=1e-9)
    assert found["without_noise"] == 0
    more = Party(tmp_path, CAREFUL.model_copy(update={"epsilon": 2 * epsilon}), Quadratic(), node="a")
    assert isinstance(asked(more, coordinator), Reply)  # a party may raise its own budget


def test_the_relation_of_an_account_cannot_change(tmp_path: Path) -> None:
    assert isinstance(asked(Party(tmp_path, CAREFUL, Quadratic(), node="a"), server(NormEC(0.1, 0.5), SECURE)), Reply)
    other = Party(tmp_path, CAREFUL.model_copy(update={"relation": "replace"}), Quadratic(), node="a")
    answer = asked(
        other, server(NormEC(0.1, 0.5), Privacy(sigma=2.0, noise="secure", relation="replace", trust="local"), "second")
    )
    assert isinstance(answer, Refusal)
    assert answer.reason == "failed"
    assert "was begun for relation" in read_journal(tmp_path / "events.jsonl")[-1]["exact"]


def test_a_damaged_ledger_stops_the_party(tmp_path: Path) -> None:
    party, coordinator = Party(tmp_path, CAREFUL, Quadratic(), node="a"), server(NormEC(0.1, 0.5), SECURE)
    coordinator.receive("a", asked(party, coordinator))
    coordinator.close_round()
    ledger = tmp_path / FILE
    ledger.write_text(ledger.read_text().replace('"sigma":2.0', '"sigma":3.0'))
    answer = asked(party, coordinator)
    assert isinstance(answer, Refusal)
    assert answer.reason == "failed"
    with pytest.raises(UsageError, match="not what was written"):
        spending(tmp_path, CAREFUL)


class Broken(GradientOracle):
    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
        raise KeyError("patient in bed nine")


class Leaving(GradientOracle):
    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
        raise SystemExit("patient in bed nine")


class Endless(GradientOracle):
    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
        return x * math.nan, math.nan


class Misshapen(GradientOracle):
    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:  # noqa: ARG002
        return x[:-1], 0.0


@pytest.mark.parametrize(
    "oracle", [Broken(), Leaving(), Endless(), Misshapen()], ids=lambda oracle: type(oracle).__name__
)
def test_a_failed_computation_looks_like_any_other(oracle: GradientOracle, tmp_path: Path) -> None:
    answers = []
    for name, own in (("failing", oracle), ("working", Quadratic())):
        party, coordinator = Party(tmp_path / name, CAREFUL, own, node="a"), server(NormEC(0.1, 0.5), SECURE)
        for _ in range(2):
            answer = asked(party, coordinator)
            assert isinstance(answer, Reply)
            assert coordinator.receive("a", answer) == "taken"
            coordinator.close_round()
        answers.append(to_fields(answer))
        assert read_releases(tmp_path / name).count() == 2
        assert "bed nine" not in str(answers[-1])
    failed, worked = answers
    assert failed.keys() == worked.keys()
    for field in failed.keys() - {"message", "digest", "run"}:  # each server draws a number for its run
        assert failed[field] == worked[field]
    assert isinstance(failed["message"], np.ndarray)
    assert isinstance(worked["message"], np.ndarray)
    assert (failed["message"].shape, failed["message"].dtype) == (worked["message"].shape, worked["message"].dtype)
    assert float(np.abs(failed["message"]).min()) > 0  # noise on every coordinate
    assert [line["event"] for line in read_journal(tmp_path / "failing" / "events.jsonl")].count("failed") == 2
    assert spending(tmp_path / "failing", CAREFUL)["failed"] == 2


def test_a_run_without_noise_hides_no_failure(tmp_path: Path) -> None:
    party = Party(tmp_path, Policy(allow_without_noise=True), Broken(), node="a")
    answer = asked(party, server(NormEC(0.1, 0.5), None))
    assert isinstance(answer, Refusal)
    assert answer.reason == "failed"
    assert "bed nine" not in str(to_fields(answer))
    assert "patient in bed nine" in (tmp_path / "events.jsonl").read_text()


def test_the_loss_is_sent_only_where_the_policy_allows(tmp_path: Path) -> None:
    for report in (False, True):
        policy = CAREFUL.model_copy(update={"report_loss": report})
        answer = asked(Party(tmp_path / str(report), policy, Quadratic(), node="a"), server(NormEC(0.1, 0.5), SECURE))
        assert isinstance(answer, Reply)
        assert (answer.loss is not None) == report


def test_messages_without_noise_are_counted(tmp_path: Path) -> None:
    policy = Policy(allow_without_noise=True)
    party, coordinator = Party(tmp_path, policy, Quadratic(), node="a"), server(NormEC(0.1, 0.5), None)
    for _ in range(3):
        coordinator.receive("a", asked(party, coordinator))
        coordinator.close_round()
    found = spending(tmp_path, policy)
    assert (found["epsilon"], found["releases"], found["without_noise"]) == (0.0, 0, 3)
    with pytest.raises(UsageError, match="there is no folder"):
        spending(tmp_path / "nowhere", policy)


def test_a_message_made_on_other_terms_is_not_sent_again(tmp_path: Path) -> None:
    """A party that no longer allows messages without noise does not repeat one to a server that now asks for noise."""
    clean = asked(
        Party(tmp_path, Policy(allow_without_noise=True), Quadratic(), node="a"), server(NormEC(0.1, 0.5), None)
    )
    assert isinstance(clean, Reply)
    answer = asked(Party(tmp_path, CAREFUL, Quadratic(), node="a"), server(NormEC(0.1, 0.5), SECURE))
    assert isinstance(answer, Reply)
    assert answer.message.tobytes() != clean.message.tobytes()
    assert read_releases(tmp_path).count() == 1


def test_a_damaged_state_is_a_lost_one(tmp_path: Path) -> None:
    party, coordinator = Party(tmp_path, CAREFUL, Quadratic(), node="a"), server(NormEC(0.1, 0.5), SECURE)
    coordinator.receive("a", asked(party, coordinator))
    coordinator.close_round()
    (path,) = (tmp_path / "runs").glob("*/*.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    assert isinstance(asked(party, coordinator), Reply)
    assert coordinator.state.parties["a"].tokens[1:]
    assert "damaged" in {line["event"] for line in read_journal(tmp_path / "events.jsonl")}


def test_a_request_object_and_its_fields_are_the_same(tmp_path: Path) -> None:
    request = server(NormEC(0.1, 0.5), SECURE).requests()["a"]
    assert isinstance(request, Request)
    first = Party(tmp_path, CAREFUL, Quadratic(), node="a").answer(request)
    again = Party(tmp_path, CAREFUL, Quadratic(), node="a").answer(to_fields(request))
    assert first == again  # the same handshake, with the same token
