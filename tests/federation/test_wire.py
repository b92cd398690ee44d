"""Messages as fields and back, and whatever else may come over a network."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normec import DPSGD, EF21, GD, Clip, Clip21, Method, NormEC, Privacy, RandK, SmoothedNorm, TopK, UsageError
from normec.algorithms.registry import BUILT_IN
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.screening import Limits
from normec.federation.protocol.terms import LocalTerms, MethodTerms, PlanTerms, PrivacyTerms
from normec.federation.protocol.wire import (
    REASONS,
    Record,
    Refusal,
    Reply,
    Request,
    WireError,
    chained,
    from_fields,
    to_fields,
)

from .faulty_network import NODES, FaultyFederation

METHODS: list[Method] = [
    NormEC(0.01, 0.1, decay=0.05),
    NormEC(0.0, 0.1, server_norm=False),
    Clip21(0.3),
    EF21(TopK(3)),
    EF21(RandK(4)),
    DPSGD(SmoothedNorm(0.1), 2.0, momentum=0.5),
    DPSGD(Clip(0.5)),
    GD(),
]

RUN = "run-1~0123456789abcdef"
EVERY_METHOD = tuple(BUILT_IN)
WITH_LOCAL_STEPS = PlanTerms(7, 32, 10, LocalTerms(5, 0.1, "sgd", 0.5, 0.25, "difference"))


def request(**changes: Any) -> Request:
    method = NormEC(0.01, 0.1)
    x = np.linspace(-1, 1, 5)
    given = Request(
        run=RUN,
        node="a",
        round=3,
        index=0,
        parties=5,
        x=x,
        method=MethodTerms.of(method),
        privacy=PrivacyTerms.of(Privacy(epsilon=8.0, trust="local"), 2.5, method),
        plan=PlanTerms(7, 32, 10),
        record=Record(2, 3, "0" * 64, "", 1, "f" * 32, x / 3),
    )
    return dataclasses.replace(given, **changes)


def same(one: Any, other: Any) -> bool:
    first, second = to_fields(one), to_fields(other)
    return first.keys() == second.keys() and all(np.array_equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_method_comes_out_as_it_went_in(method: Method) -> None:
    assert MethodTerms.of(method).build(EVERY_METHOD) == method


@pytest.mark.parametrize(
    "message",
    [
        request(),
        request(record=Record()),
        request(plan=WITH_LOCAL_STEPS),
        Reply(RUN, "a", 3, 2, "1" * 64, np.ones(3, np.float32), 0.5),
        Reply(RUN, "a", 0, 1, "1" * 64, np.ones(3)),
        *(Refusal(RUN, "a", 1, reason, "e" * 32) for reason in REASONS),
    ],
)
def test_there_and_back(message: Any) -> None:
    fields = to_fields(message)
    assert all(type(value) in (int, float, str, bool, np.ndarray) for value in fields.values())
    back = from_fields(fields)
    assert type(back) is type(message)
    assert same(back, message)


def broken_fields(good: dict[str, Any]) -> dict[str, Any]:
    """Every kind of wrong field there is, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in good.items():
        found[f"{name} missing"] = {key: item for key, item in good.items() if key != name}
        for other in (None, [], {}, b"x", "word with spaces", -1, True, math.nan, math.inf, 1e300, 2**70, "x" * 1000):
            if type(other) is not type(value) or (isinstance(other, float) and not math.isfinite(other)):
                found[f"{name} = {str(other)[:20]!r}"] = {**good, name: other}
        if isinstance(value, str):
            found[f"{name} strange"] = {**good, name: "../../etc"}
        if type(value) is int:
            found[f"{name} negative"] = {**good, name: -1}
        if isinstance(value, np.ndarray):
            arrays = {
                "NaN": np.full_like(value, np.nan),
                "inf": np.full_like(value, np.inf),
                "half": value.astype(np.float16),
                "whole numbers": value.astype(np.int64),
                "complex": value.astype(np.complex128),
                "objects": value.astype(object),
                "other byte order": value.astype(">f8"),
                "empty": value[:0],
                "a matrix": value[None],
                "a number": np.float64(1.0),
                "a masked array": np.ma.masked_array(value),
            }
            found |= {f"{name} {kind}": {**good, name: array} for kind, array in arrays.items()}
    return found


@pytest.mark.parametrize(
    "good",
    [request(), request(plan=WITH_LOCAL_STEPS), Reply(RUN, "a", 3, 2, "1" * 64, np.ones(3), 0.5)],
    ids=["request", "local steps", "reply"],
)
def test_every_broken_field_is_named_and_not_echoed(good: Any) -> None:
    fields = dict(to_fields(good))
    optional = {"loss missing", "record.row missing"}
    for kind, broken in broken_fields(fields).items():
        if kind in optional:
            continue
        with pytest.raises(WireError) as caught:
            from_fields(broken)
        assert "etc" not in str(caught.value)
        assert "xxx" not in str(caught.value)
        assert "nan" not in str(caught.value)
    for extra in ("more", "x.y", "__class__"):
        with pytest.raises(WireError, match="unknown"):
            from_fields({**fields, extra: 1})
    for table in (None, [], "table", {1: 2}, {}):
        with pytest.raises(WireError):
            from_fields(table)  # type: ignore[arg-type]
    with pytest.raises(WireError, match="vector of 1 to 2"):
        from_fields(fields, largest=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"index": 5},
        {"round": 10},
        {"record": Record(accepted=4, since=3)},
        {"record": Record(accepted=2, since=4)},
        {"record": Record(row=np.ones(4))},
        {"record": Record(row=np.ones(5, np.float32))},
    ],
)
def test_requests_that_contradict_themselves(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        from_fields(to_fields(request(**changes)))


GOOD_SPEC = {"alpha": 0.01, "beta": 0.1, "decay": 0.0, "server_norm": True}
BAD_SPECS: dict[str, str] = {
    "no JSON": "alpha = 1",
    "no table": "[1, 2]",
    "deep": "[" * 2000 + "]" * 2000,
    "a deep setting": '{"alpha": ' + "[" * 500 + "]" * 500 + "}",
    "a table in a table in a table": '{"alpha": {"operator": {"operator": {"operator": "Clip"}}}}',
    "a method in a file": '{"method": {"method": "my_method.py:Clip21SGDM"}}',
    "a list as a method": '{"alpha": {"method": []}}',
    "a table as a method": '{"alpha": {"operator": {"method": {}}}}',
    "NaN": '{"alpha": NaN, "beta": 0.1}',
    "infinity": '{"alpha": Infinity, "beta": 0.1}',
    "an overflow": '{"alpha": 1e999, "beta": 0.1}',
    "a huge number": '{"alpha": ' + "9" * 4000 + "}",
    "a large number": '{"alpha": 1.1e9, "beta": 0.1}',
    "a tiny number": '{"alpha": 1e-13, "beta": 0.1}',
    "a long word": '{"alpha": "' + "x" * 65 + '"}',
    "a long name": '{"' + "x" * 65 + '": 1}',
    "too many settings": "{" + ", ".join(f'"s{i}": 1' for i in range(33)) + "}",
    "100000 settings": "{" + ", ".join(f'"s{i}": 1' for i in range(100_000)) + "}",
    "another alphabet": '{"alphа": 1}',
    "two lines": '{"alpha":\n1}',
}


@pytest.mark.parametrize("kind", BAD_SPECS)
def test_settings_that_no_request_may_hold(kind: str) -> None:
    fields = {**to_fields(request()), "method.spec": BAD_SPECS[kind]}
    with pytest.raises(WireError) as caught:
        from_fields(fields)
    assert len(str(caught.value)) < 100
    assert "xxx" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("sgd", GOOD_SPEC),
        ("../normec", GOOD_SPEC),
        ("normec.py:NormEC", GOOD_SPEC),
        ("NormEC", GOOD_SPEC),
        ("dpsgd", GOOD_SPEC),
        ("normec", {}),
        ("normec", {**GOOD_SPEC, "speed": 1}),
        ("normec", {**GOOD_SPEC, "self": 1}),
        ("normec", {**GOOD_SPEC, "operator": {"operator": "Identity"}}),
        ("normec", {**GOOD_SPEC, "alpha": -1.0}),
        ("normec", {**GOOD_SPEC, "alpha": "a"}),
        ("normec", {**GOOD_SPEC, "alpha": None}),
        ("normec", {**GOOD_SPEC, "alpha": [0.1]}),
        ("normec", {**GOOD_SPEC, "alpha": {"operator": "Clip", "tau": 1.0}}),
        ("normec", {**GOOD_SPEC, "beta": 0.0}),
        ("normec", {**GOOD_SPEC, "decay": 1.0}),
        ("clip21", {"tau": 0}),
        ("dpsgd", {"operator": 3}),
        ("dpsgd", {"operator": "Clip"}),
        ("dpsgd", {"operator": {"operator": "Clip"}}),
        ("dpsgd", {"operator": {"operator": "Clip", "tau": 1.0, "more": 1}}),
        ("dpsgd", {"operator": {"operator": "os.system", "tau": 1.0}}),
        ("dpsgd", {"operator": {"tau": 1.0}}),
        ("ef21", {"compressor": {"operator": "TopK", "k": 2.5}}),
    ],
)
def test_a_method_that_is_none_cannot_be_built(name: str, spec: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        MethodTerms(name, json.dumps(spec), "").build(EVERY_METHOD)


def test_a_method_that_the_policy_does_not_name_is_not_built() -> None:
    terms = MethodTerms.of(NormEC(0.01, 0.1))
    assert terms.spec == json.dumps(GOOD_SPEC, sort_keys=True)
    with pytest.raises(UsageError, match="normec is not among methods"):
        terms.build(["clip21", "dpsgd"])
    with pytest.raises(UsageError, match="code of normec differs from the server's"):
        dataclasses.replace(terms, code="0" * 16).build(EVERY_METHOD)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    trap = np.array([Trap()], dtype=object)
    for thing in (trap, pickle.dumps(Trap()), Trap()):
        with pytest.raises(WireError):
            from_fields({**to_fields(request()), "x": thing})
    assert not (tmp_path / "sprung").exists()


def hostile(rng: random.Random, good: Reply) -> list[dict[str, Any]]:
    """A bad message of each kind, a little different every time."""
    fields = dict(to_fields(good))
    size = len(good.message)
    noise = np.array([rng.gauss(0, 1) for _ in range(size)])
    changes: list[dict[str, Any]] = [
        {"message": noise * 10 ** rng.randint(5, 300)},
        {"message": np.where(np.arange(size) == rng.randrange(size), np.nan, noise)},
        {"message": np.where(np.arange(size) == rng.randrange(size), -np.inf, noise)},
        {"message": noise[: rng.randrange(1, size)]},
        {"message": np.concatenate([noise, noise])},
        {"message": noise[:, None]},
        {"message": noise.astype(np.float32)},
        {"message": noise.astype(np.float16)},
        {"message": (noise * 100).astype(np.int64)},
        {"message": noise.astype(object)},
        {"message": pickle.dumps(noise)},
        {"message": noise / 10},  # the digest is of another
        {"step": good.step + rng.randint(1, 9)},
        {"step": -rng.randint(1, 9)},
        {"digest": f"{rng.getrandbits(256):064x}"},
        {"run": f"other-{rng.randrange(100)}"},
        {"node": "b"},
        {"format": rng.randint(2, 99)},
        {"encoding": "quantised"},
        {"kind": "request"},
        {f"extra-{rng.randrange(9)}": rng.random()},
        {"loss": math.nan},
        {"kind": "refusal", "reason": "because"},
    ]
    return [{**fields, **change} for change in changes]


def test_two_hundred_malformed_messages_never_reach_x(tmp_path: Path) -> None:
    federation = FaultyFederation(
        tmp_path, NormEC(0.1, 0.5), Privacy(sigma=0.5, noise="secure", memory="noisy", trust="local")
    )
    rng = random.Random(5)
    federation.settle()
    request = federation.server.requests()["a"]
    federation.ask("a")
    good = from_fields(federation.flying.pop()[1])
    assert isinstance(good, Reply)
    sent = 0
    while sent < 200:
        for fields in hostile(rng, good):
            assert federation.server.receive("a", fields) == "dropped"
            sent += 1
    for fields in (None, [], 7, b"\x80\x04.", {}):
        assert federation.server.receive("a", fields) == "dropped"  # type: ignore[arg-type]
    assert federation.server.receive("mallory", to_fields(good)) == "dropped"
    assert federation.server.ready is False
    assert np.array_equal(federation.server.requests()["a"].x, request.x)
    assert federation.server.state.parties["a"].faults == sent + 5
    lines = [line for line in read_journal(tmp_path / "server" / "events.jsonl") if line["event"] == "dropped"]
    assert len(lines) == sent + 6
    assert all(line["why"] for line in lines)
    assert {line["party"] for line in lines} == {"a", "?"}
    assert federation.server.receive("a", to_fields(good)) == "taken"  # the honest one still counts
    federation.settle()
    assert torch.isfinite(federation.server.state.run.x).all()
    federation.server.close()


def test_a_message_past_its_bound_is_dropped_and_replaced(tmp_path: Path) -> None:
    """A party whose noise came out impossible, or that cheats: it is asked again, and makes another message."""
    federation = FaultyFederation(
        tmp_path, NormEC(0.1, 0.5), Privacy(sigma=0.5, noise="secure", memory="noisy", trust="local")
    )
    federation.settle()
    collector = federation.server.collector
    collector.limits, usual = Limits(1e-9, 1e-9, 1e-9), collector.limits
    federation.ask("a")
    federation.deliver(0)
    assert federation.server.state.parties["a"].drops == 1
    collector.limits = usual
    federation.ask("a")
    federation.deliver(0)
    assert "a" not in federation.server.waiting
    assert len(federation.left["a"]) == 4
    federation.settle()
    federation.server.close()


def test_a_message_within_its_bound_is_taken_and_one_past_it_is_not(tmp_path: Path) -> None:
    federation = FaultyFederation(tmp_path, NormEC(0.1, 0.5), None)
    unit = np.full(5, 1 / math.sqrt(5))
    for node, factor, outcome in zip(NODES, (0.99999, 1.01, 1e3), ("taken", "dropped", "dropped"), strict=True):
        message = unit * factor
        reply = Reply(federation.server.run, node, 0, 1, chained("", 1, message), message)
        assert federation.server.receive(node, to_fields(reply)) == outcome
    federation.server.close()
