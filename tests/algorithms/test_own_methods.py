"""Methods of the user's own: what a class defines is what every engine runs, or the run is refused."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import normec
from normec import (
    DPSGD,
    Callback,
    Clip,
    Diverged,
    ErrorFeedback,
    FixedSize,
    Memory,
    Method,
    NormEC,
    Privacy,
    Problem,
    SmoothedNorm,
    Storage,
    UsageError,
    train,
)
from normec.algorithms.method import Steps, fused_form, recordable
from normec.algorithms.operators import Scaling
from normec.algorithms.registry import identity_of
from normec.algorithms.tensor_norm import TensorNormEC
from normec.distributed.optimizer import ClientOptimizer
from normec.privacy.mechanism import facts_of

from ..support import own_methods, own_methods_by_hand
from ..support.own_methods import ALL, Clip21SGDM, Counting, Rotated, Still, Stubborn
from ..support.runs import InterruptAt

N, D, ROUNDS = 4, 6, 12
SUM: dict[str, Any] = {"epsilon": 8, "trust": "secure-sum"}
QUIET = Privacy(sigma=1e-13, trust="secure-sum")
CENTRES = 3 * torch.randn(N, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def bowls() -> Any:
    return Problem.from_functions(
        [lambda x, c=c: ((x - c) ** 2).sum() for c in CENTRES], torch.zeros(D, dtype=torch.float64)
    )


def by_hand(name: str, drawn: FixedSize | None, rounds: int = ROUNDS) -> tuple[Any, Any]:
    chosen = [range(N) if drawn is None else drawn.draw(N, k, 1).tolist() for k in range(rounds)]  # type: ignore[union-attr]
    slopes = [lambda x, c=c: 2 * (x - c) for c in CENTRES.numpy()]
    return own_methods_by_hand.run(name, slopes, D, 0.1, chosen)


def remembered(run: normec.Run) -> Any:
    tables = run.state.clients
    return tables.get("memory", tables.get("last"))


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("memory", ["device", "disk"])
@pytest.mark.parametrize("privacy", [None, QUIET, Privacy(sigma=1e-13, trust="local")], ids=["plain", "sum", "local"])
@pytest.mark.parametrize("drawn", [None, FixedSize(2)], ids=["all", "drawn"])
@pytest.mark.parametrize("name", ALL)
def test_what_a_class_defines_is_what_runs(
    name: str, drawn: FixedSize | None, privacy: Privacy | None, memory: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"privacy": privacy, "participation": drawn, "memory": Memory(home=memory)}
    run = train(bowls(), ALL[name], lr=0.1, rounds=ROUNDS, seed=1, out=tmp_path / "run", **options)
    x, kept = by_hand(name, drawn)
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    if remembered(run) is not None:
        np.testing.assert_allclose(remembered(run).numpy(), kept, rtol=0, atol=1e-10)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ALL)
def test_states_are_checkpointed(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": 0.1, "rounds": ROUNDS, "seed": 1, "participation": FixedSize(2)}
    options |= {"storage": Storage(checkpoint_seconds=0.0), "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        train(bowls(), ALL[name], callbacks=[InterruptAt(5)], **options)
    run = train(bowls(), ALL[name], **options)
    whole = train(bowls(), ALL[name], **{**options, "out": tmp_path / "whole"})
    assert torch.equal(run.x, whole.x)
    assert run.state.clients.keys() == whole.state.clients.keys()
    for table, other in zip(run.state.clients.values(), whole.state.clients.values(), strict=True):
        assert torch.equal(table, other)
    assert run.history.rows == whole.history.rows
    x, _ = by_hand(name, FixedSize(2))
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", ALL)
def test_the_optimizer_runs_it_and_saves_its_states(name: str) -> None:
    def optimizer() -> tuple[nn.Module, ClientOptimizer]:
        model = nn.Linear(D, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        return model, ClientOptimizer(model.parameters(), ALL[name], 0.1, clients=N)

    model, own = optimizer()
    for k in range(ROUNDS):
        if k == 5:
            saved, weights = own.state_dict(), model.state_dict()
            model, own = optimizer()
            model.load_state_dict(weights)
            own.load_state_dict(saved)
        for client, centre in enumerate(CENTRES):
            with own.client(client):
                ((model.weight[0] - centre) ** 2).sum().backward()
        own.step()
    x, _ = by_hand(name, None)
    np.testing.assert_allclose(model.weight.detach().numpy()[0], x, rtol=0, atol=1e-10)


def test_a_private_run_of_a_users_method_has_the_epsilon_of_its_bound() -> None:
    run = train(bowls(), Clip21SGDM(), lr=0.1, rounds=5, privacy=Privacy(sigma=3.0, trust="local"))
    plain = train(bowls(), ErrorFeedback(Clip(0.5)), lr=0.1, rounds=5, privacy=Privacy(sigma=3.0, trust="local"))
    assert run.privacy is not None
    assert plain.privacy is not None
    assert run.privacy.epsilon == plain.privacy.epsilon


def test_no_record_level_gain_is_claimed_for_states_that_no_proof_covers() -> None:
    facts = facts_of(Clip21SGDM(), D)
    assert facts.lipschitz == float("inf")
    assert not facts.made_of_messages
    assert facts_of(own_methods.Signs(), D).lipschitz == float("inf")


@dataclass(frozen=True)
class Claims(own_methods.Signs):
    """States a constant for its own map, without a state."""

    lipschitz: float | None = 2.0

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return Clip(1.0)(2 * update), state


class ClaimsNothing(Claims):
    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return update.sign() / update.shape[-1] ** 0.5, state


class ClaimsOfFeedback(NormEC):
    """A constant of its own for the message does not make the proof for hidden memories one about this class."""

    lipschitz = 1.0  # type: ignore[assignment]

    def commit(self, draft: Tensor, sent: Tensor) -> Tensor:
        return draft + 100 * sent


def test_a_constant_holds_for_the_class_that_states_it() -> None:
    assert facts_of(Claims(), D).lipschitz == 2.0
    assert facts_of(ClaimsNothing(), D).lipschitz == float("inf")
    assert facts_of(ClaimsOfFeedback(0.1, 0.3), D).lipschitz == float("inf")
    assert facts_of(NormEC(0.1, 0.3), D).lipschitz == 10.0


class OtherScale(Clip):
    """Its objects carry another map than that of the class, for which the class states no constant."""

    def __init__(self, tau: float) -> None:
        super().__init__(tau)
        self.scale = lambda norm: torch.where((norm > 5) & (norm < 5.001), -1.0, 1.0) * Clip(tau).scale(norm)  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [DPSGD, ErrorFeedback])
def test_a_constant_of_an_operator_holds_for_the_map_that_its_class_defines(kind: Any) -> None:
    assert facts_of(kind(Clip(0.5)), D).lipschitz == 1.0
    assert facts_of(kind(OtherScale(0.5)), D).lipschitz == float("inf")


@pytest.mark.parametrize("name", ["commit", "absent", "client_init", "message"])
def test_a_subclass_inherits_no_fused_form(name: str) -> None:
    assert fused_form(NormEC(0.1, 0.3)) is not None
    assert fused_form(ALL[name]) is None


def test_a_fused_form_that_computes_something_else_is_not_used() -> None:
    class Wrong(NormEC):
        def fused(self) -> Any:
            return ErrorFeedback(Clip(5.0), 0.3).fused()

    run, plain = (train(bowls(), kind(0.1, 0.3), lr=0.1, rounds=5) for kind in (Wrong, NormEC))
    torch.testing.assert_close(run.x, plain.x, rtol=0, atol=1e-12)


def test_only_steps_that_say_so_are_recorded() -> None:
    """A CUDA graph repeats kernels: Python code of a subclass would run once and never again."""
    assert recordable(NormEC(0.1, 0.3))
    assert recordable(TensorNormEC(0.1, 0.3, sizes=(D,)))
    assert not recordable(Still(0.1, 0.3))
    assert not recordable(ErrorFeedback(LongScale(0.1)))
    assert not recordable(Clip21SGDM())


class Doubled(NormEC):
    """Sends twice the operator's message: twice as long as the noise is made for."""

    def message(self, update: Tensor, state: Tensor, key: Any = None) -> tuple[Tensor, Tensor]:
        message, draft = super().message(update, state, key)
        return 2 * message, draft


@dataclass(frozen=True)
class LongCall(SmoothedNorm):
    """Inherits `scale` and `bound`, and calls neither."""

    def __call__(self, v: Tensor, key: Any = None) -> Tensor:  # noqa: ARG002
        return 7 * v


@dataclass(frozen=True)
class LongScale(SmoothedNorm):
    def scale(self, norm: Tensor) -> Tensor:
        return 3 * super().scale(norm)


@dataclass(frozen=True)
class HalfCall(Clip):
    """Keeps its bound, and is not what its inherited `scale` says."""

    def __call__(self, v: Tensor, key: Any = None) -> Tensor:
        return 0.5 * super().__call__(v, key)


class Growing(own_methods.Signs):
    """States a bound of 1 when it is asked for the first time, and a larger one later."""

    asked = 0

    @property
    def bound(self) -> float:
        Growing.asked += 1
        return 1.0 if Growing.asked == 1 else 100.0

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return 50 * update.sign() / update.shape[-1] ** 0.5, state


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("trust", ["local", "secure-sum", "central"])
@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize(
    "method",
    [Doubled(0.1, 0.3), ErrorFeedback(LongCall(0.1)), ErrorFeedback(LongScale(0.1))],
    ids=["method", "operator's call", "operator's scale"],
)
def test_a_message_past_its_bound_stops_a_private_run(method: Method, noise: str, trust: str) -> None:
    privacy = Privacy(epsilon=8, trust=trust, noise=noise)  # type: ignore[arg-type]
    with pytest.raises(Diverged, match="above its bound in round 0"):
        train(bowls(), method, lr=0.1, rounds=3, privacy=privacy)


def test_the_bound_that_counts_is_the_one_the_noise_is_made_for() -> None:
    Growing.asked = 0
    with pytest.raises(Diverged, match="above its bound"):
        train(bowls(), Growing(), lr=0.1, rounds=3, privacy=Privacy(**SUM))


def test_an_operator_s_own_call_is_what_runs() -> None:
    halved = train(bowls(), ErrorFeedback(HalfCall(0.5)), lr=0.1, rounds=3)
    expected = train(bowls(), ErrorFeedback(Clip(0.25)), lr=0.1, rounds=3)
    torch.testing.assert_close(halved.x, expected.x)


class Centred(NormEC):
    """Subtracts the mean over the clients of a block: one client's message depends on the others'."""

    def message(self, update: Tensor, state: Tensor, key: Any = None) -> tuple[Tensor, Tensor]:
        return super().message(update - update.mean(0), state, key)


@pytest.mark.parametrize("method", [Centred(0.1, 0.3), NormEC(0.1, 0.3)], ids=["mixes", "does not"])
def test_a_method_that_mixes_clients_has_no_epsilon(method: Method) -> None:
    if isinstance(method, Centred):
        with pytest.raises(UsageError, match="changes with the gradients of others"):
            train(bowls(), method, lr=0.1, rounds=3, privacy=Privacy(**SUM))
        with pytest.raises(UsageError, match="changes with the gradients of others"):
            ClientOptimizer(
                nn.Linear(2, 2).parameters(), method, 0.1, privacy=Privacy(epsilon=8, trust="local"), rounds=3
            )
    assert train(bowls(), method, lr=0.1, rounds=3).finished


@dataclass(frozen=True)
class ByTheLongest(Scaling):
    """Shortens all rows that it sees by the same factor, once the longest of them is past the bound."""

    bound: float = 1000.0
    lipschitz: float = math.inf

    def scale(self, norm: Tensor) -> Tensor:
        return (self.bound / norm.max().clamp_min(self.bound)).expand_as(norm)

    def contraction(self, norm: float, dim: int) -> float:  # noqa: ARG002
        return 1.0


@dataclass(frozen=True)
class Backwards(ByTheLongest):
    """Sends messages far past its bound, in the opposite direction."""

    def scale(self, norm: Tensor) -> Tensor:
        return -1e6 / norm.clamp_min(1e-9)


class Telling(NormEC):
    """Its server's step uses the clients' gradient norms, which no message carries."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seen", {})

    def message(self, update: Tensor, state: Tensor, key: Any = None) -> tuple[Tensor, Tensor]:
        self.seen["norm"] = update.norm()  # type: ignore[attr-defined]
        return super().message(update, state, key)

    def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        direction, estimate = super().server_step(mean_message, state)
        return direction * self.seen["norm"], estimate  # type: ignore[attr-defined]


def slopes(last: float) -> Any:
    """Clients with gradients of norm 900, and one more."""
    return Problem.from_functions([lambda x, c=c: c * x[0] for c in (900.0, 900.0, last)], torch.zeros(3).double())


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_rows_that_are_mixed_for_some_values_only_are_never_seen_together(noise: Any) -> None:
    """No comparison on made-up gradients shows that the other clients' messages shrink once one is long."""
    privacy = Privacy(sigma=1e-3, noise=noise, trust="central")
    method = DPSGD(ByTheLongest())
    sums = [3 * train(slopes(c), method, lr=1.0, rounds=1, privacy=privacy).state.estimate[0] for c in (0.0, 1e6)]
    assert float(sums[0]) == pytest.approx(1800, abs=0.1)
    assert float(sums[1]) == pytest.approx(2800, abs=0.1)  # one message of the bound more


def test_the_clients_of_a_rank_are_not_seen_together_either() -> None:
    x = nn.Parameter(torch.zeros(3))
    privacy = Privacy(sigma=1e-3, noise="seeded", trust="central")
    optimizer = ClientOptimizer([x], DPSGD(ByTheLongest()), 1.0, clients=2, privacy=privacy, rounds=1)
    for client, gradient in enumerate((900.0, 1e6)):
        with optimizer.client(client):
            x.grad = torch.tensor([gradient, 0.0, 0.0])
    optimizer.step()
    assert float(-2 * x[0]) == pytest.approx(1900, abs=0.1)


def test_a_long_message_in_the_opposite_direction_stops_a_private_run() -> None:
    with pytest.raises(Diverged, match="above its bound"):
        train(bowls(), DPSGD(Backwards()), lr=0.1, rounds=1, privacy=Privacy(sigma=1.0, trust="local"))


def test_a_server_step_that_uses_gradients_has_no_epsilon() -> None:
    with pytest.raises(UsageError, match="the server's step of normec changes with gradients"):
        train(bowls(), Telling(0.1, 0.3), lr=0.1, rounds=3, privacy=Privacy(**SUM))


class WholeStep(NormEC):
    def client_step(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return 5 * update, state


def test_an_overridden_client_step_is_refused_because_no_engine_calls_it(tmp_path: Path) -> None:
    for call in (
        lambda: train(bowls(), WholeStep(0.1, 0.3), lr=0.1, rounds=3, out=tmp_path / "run"),
        lambda: ClientOptimizer(nn.Linear(2, 2).parameters(), WholeStep(0.1, 0.3), 0.1),
    ):
        with pytest.raises(UsageError, match="overrides client_step"):
            call()
    assert not (tmp_path / "run").exists()


class TwoArguments(Method):
    bound = 1.0

    def message(self, update: Tensor, state: Any) -> Any:  # type: ignore[override]
        return update, state


class NoPublicNumbers(Method):
    def broadcast(self, state: Any) -> dict[str, Tensor]:  # noqa: ARG002
        return {"one": torch.ones(1)}

    def message(self, update: Tensor, state: Any, key: Any = None) -> Any:  # noqa: ARG002
        return update, state


@pytest.mark.parametrize(
    ("method", "call"),
    [
        (TwoArguments(), r"TwoArguments.message is called as message\(update, state, key\)"),
        (NoPublicNumbers(), r"message\(update, state, key, public\)"),
    ],
)
def test_a_function_with_other_arguments_is_refused_before_anything_is_written(
    method: Method, call: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=call):
        train(bowls(), method, lr=0.1, rounds=3, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class NoDraft(Method):
    def message(self, update: Tensor, state: Any, key: Any = None) -> Any:  # noqa: ARG002
        return update


class Shorter(Method):
    def message(self, update: Tensor, state: Any, key: Any = None) -> Any:  # noqa: ARG002
        return update[:, 1:], state


class NoTensors(Method):
    def client_init(self, x: Tensor) -> Any:  # noqa: ARG002
        return [1, 2]


class Renamed(Method):
    def client_init(self, x: Tensor) -> Any:
        return {"a": x}

    def message(self, update: Tensor, state: Any, key: Any = None) -> Any:  # noqa: ARG002
        return update, {"b": update}


class NoDirection(Method):
    def message(self, update: Tensor, state: Any, key: Any = None) -> Any:  # noqa: ARG002
        return update, state

    def server_step(self, mean_message: Tensor, state: Any) -> Any:  # noqa: ARG002
        return mean_message


WRONG: dict[type[Method], str] = {
    Method: "does not define message",
    NoDraft: "must return a tensor and the draft",
    Shorter: "must return messages",
    NoTensors: "a tensor or a dictionary of named tensors",
    Renamed: "named and shaped like client_init's",
    NoDirection: "must return a direction",
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", WRONG)
def test_mistakes_of_an_author_are_named(kind: type[Method]) -> None:
    with pytest.raises(UsageError, match=WRONG[kind]):
        train(bowls(), kind(), lr=0.1, rounds=2)


@dataclass(frozen=True)
class Weighted(own_methods.Signs):
    table: Any = None


def test_a_setting_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    method = Weighted(torch.ones(2))
    with pytest.raises(UsageError, match="override spec"):
        train(bowls(), method, lr=0.1, rounds=2, out=tmp_path / "run")


def test_a_checkpoint_of_the_base_is_not_the_subclass_s(tmp_path: Path) -> None:
    fake = type("NormEC", (Rotated,), {"__module__": "normec.algorithms.error_feedback"})
    train(bowls(), NormEC(0.1, 0.3), lr=0.1, rounds=3, out=tmp_path / "run")
    with pytest.raises(UsageError, match="method is"):
        train(bowls(), fake(0.1, 0.3), lr=0.1, rounds=3, out=tmp_path / "run")


def test_a_subclass_shares_no_noise_with_its_base() -> None:
    """If it did, the difference of two runs would be the difference of their messages, without noise."""

    class Silent(DPSGD):
        def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
            return 0 * update, state

    zeros = Problem.from_functions([lambda x: 0 * x.sum()] * 2, torch.zeros(3000, dtype=torch.float64))
    one, other = (
        train(
            zeros, kind(Clip(1.0)), lr=0.1, rounds=1, seed=3, privacy=Privacy(sigma=1.0, trust="local")
        ).state.estimate
        for kind in (DPSGD, Silent)
    )
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / 3000**0.5


def test_the_code_of_a_users_method_is_part_of_its_identity() -> None:
    assert "with code" in identity_of(Clip21SGDM())
    assert identity_of(Clip21SGDM()) != identity_of(Clip21SGDM(tau=0.6))
    assert "with code" not in identity_of(NormEC(0.1, 0.3))


@pytest.mark.parametrize(
    ("method", "known"),
    [
        (NormEC(0.1, 0.3), True),
        (Rotated(0.1, 0.3), False),
        (Stubborn(0.1, 0.3), False),
        (ErrorFeedback(HalfCall(1.0)), False),
        (ErrorFeedback(LongScale(0.1)), False),
        (Counting(), False),
    ],
    ids=["ours", "message", "commit", "call", "scale", "states"],
)
def test_the_record_rule_takes_no_constant_that_was_stated_for_another_map(method: Method, known: bool) -> None:
    assert (facts_of(method, D).lipschitz < float("inf")) == known


def test_no_theorem_is_about_a_subclass() -> None:
    with pytest.raises(UsageError, match="no theorem gives a step size"):
        train(bowls(), Rotated(0.1, 0.3), lr="theory", rounds=3)
    with pytest.raises(UsageError, match="no theorem gives a step size"):
        train(bowls(), Clip21SGDM(), lr="theory", rounds=3)


def test_memories_of_less_precision_need_a_method_that_can_say_what_they_took() -> None:
    problem = bowls()
    with pytest.raises(UsageError, match="memory_dtype is for memories made of messages alone"):
        train(problem, Clip21SGDM(), lr=0.1, rounds=3, memory=Memory(dtype=torch.bfloat16))
    assert train(problem, NormEC(0.1, 0.3), lr=0.1, rounds=3, memory=Memory(dtype=torch.bfloat16)).finished


@dataclass
class Remembering(Method):
    """Keeps the length of a very long gradient in an attribute, where other clients and the server find it."""

    bound = 1.0
    longest = 0.0

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        if float(update.norm()) > 1e5:
            self.longest = float(update.norm())
        return Clip(1.0)(update) / (2.0 if self.longest else 1.0), state

    def server_step(self, mean_message: Tensor, state: Any) -> tuple[Tensor, Any]:
        return mean_message + self.longest, state


def test_what_a_method_keeps_in_its_attributes_reaches_neither_other_clients_nor_the_server() -> None:
    """No made-up gradient is as long as the one that it waits for, so it can only be kept from being heard of."""
    privacy = Privacy(sigma=1e-9, noise="seeded", trust="central")
    run = train(slopes(1e6), Remembering(), lr=3.0, rounds=2, privacy=privacy)
    assert float(run.x[0]) == pytest.approx(-2 * (1 + 1 + 0.5), abs=1e-6)
    x = nn.Parameter(torch.zeros(3))
    seeded = Privacy(sigma=1e-9, noise="seeded", trust="local")
    optimizer = ClientOptimizer([x], Remembering(), 2.0, clients=2, privacy=seeded, rounds=1)
    for client, slope in enumerate((1e6, 900.0)):
        with optimizer.client(client):
            x.grad = torch.tensor([slope, 0.0, 0.0])
    optimizer.step()
    assert float(x[0]) == pytest.approx(-1.5, abs=1e-6)


class ServerRemembers(own_methods.Signs):
    """A momentum in an attribute: no checkpoint holds it, and a private run would lose it."""

    momentum: Tensor | float = 0.0

    def server_step(self, mean_message: Tensor, state: Any) -> tuple[Tensor, Any]:
        object.__setattr__(self, "momentum", 0.9 * self.momentum + mean_message)
        return self.momentum, state  # type: ignore[return-value]


class Locked(own_methods.Signs):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        object.__setattr__(self, "lock", threading.Lock())

    def spec(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("method", "why"), [(ServerRemembers(), "does not repeat"), (Locked(), "cannot be copied")], ids=["server", "lock"]
)
def test_a_method_that_needs_its_attributes_is_refused(method: Method, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        train(bowls(), method, lr=0.1, rounds=3, privacy=Privacy(**SUM))


class Labelled(Tensor):
    """A tensor of a type of its own, whose functions may say anything of its length."""


@dataclass(frozen=True)
class InAnotherForm(own_methods.Signs):
    form: str = "complex"

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:
        message, state = super().message(update, state, key)
        forms = {
            "complex": lambda: torch.complex(0 * message, message),  # noise is real
            "half": message.half,
            "labelled": lambda: message.as_subclass(Labelled),
        }
        return forms[self.form](), state


@pytest.mark.parametrize("privacy", [None, Privacy(**SUM)], ids=["plain", "private"])
@pytest.mark.parametrize("form", ["complex", "half", "labelled"])
def test_messages_are_plain_tensors_of_the_gradients_kind(form: str, privacy: Privacy | None) -> None:
    with pytest.raises(UsageError, match="must return a plain tensor"):
        train(bowls(), InAnotherForm(form=form), lr=0.1, rounds=2, privacy=privacy)


@dataclass(frozen=True)
class Vanishing(Method):
    """Messages a million times as long as their bound, and so short that their squares are 0 in float32."""

    bound = 1e-30

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return 1e-24 * Clip(1.0)(update), state


@pytest.mark.parametrize("method", [Vanishing(), DPSGD(Clip(1e-30))], ids=["own", "ours"])
def test_a_bound_that_no_length_can_be_held_against_is_refused(method: Method) -> None:
    of = Problem.from_functions([lambda x, c=c: ((x - c) ** 2).sum() for c in CENTRES.float()], torch.zeros(D))
    with pytest.raises(UsageError, match="lengths below 1e-15"):
        train(of, method, lr=1e24, rounds=1, privacy=Privacy(**SUM))


def test_a_clip_of_records_that_no_length_can_be_held_against_is_refused() -> None:
    """At 1e-42 the factors of the clip are multiples of the smallest number of float32: shares are 2 % too long."""
    with pytest.raises(UsageError, match="record_clip is 1e-42, and lengths below 1e-15"):
        train(
            classes(),
            DPSGD(Clip(1.0)),
            lr=1e38,
            rounds=1,
            privacy=Privacy(epsilon=2, unit="record", record_clip=1e-42, noise="secure"),
        )


class ClaimsTooMuch(Claims):
    """Its map doubles lengths, and turns round near zero."""

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return update / torch.linalg.vector_norm(update, dim=-1, keepdim=True), state

    lipschitz: float | None = 2.0


@dataclass(frozen=True)
class Turned(Clip):
    """Clips and turns by a right angle: no two messages move apart by more than the gradients, yet memories may."""

    @property
    def lipschitz(self) -> float:
        return 1.0

    def __call__(self, v: Tensor, key: Any = None) -> Tensor:
        clipped = super().__call__(v, key)
        return torch.stack([-clipped[..., 1::2], clipped[..., ::2]], dim=-1).flatten(-2)


def classes() -> Problem:
    data = [TensorDataset(torch.randn(5, 3), torch.randint(0, 2, (5,))) for _ in range(3)]
    return Problem(nn.Linear(3, 2), nn.functional.cross_entropy, data)


@pytest.mark.parametrize("method", [ClaimsTooMuch(), ErrorFeedback(Turned(1.0))], ids=["constant", "cocoercive"])
def test_a_constant_that_gradients_contradict_is_refused(method: Method) -> None:
    privacy = Privacy(sigma=1.0, unit="record", record_clip=1.0, trust="local")
    with pytest.raises(UsageError, match="states lipschitz"):
        train(classes(), method, lr=0.1, rounds=1, privacy=privacy)


class Expanding(NormEC):
    """Memories grow where the rule for records has them shrink."""

    def _forgotten(self, values: Tensor, rounds: int = 1) -> Tensor:  # noqa: ARG002
        return -50 * values


class Stepping(NormEC):
    """The step of the memory is computed by code, which may give another one each time."""

    @property
    def beta(self) -> float:  # type: ignore[override]
        return 0.3

    @beta.setter
    def beta(self, value: float) -> None: ...


@pytest.mark.parametrize("method", [Expanding(0.1, 0.1), Stepping(0.1, 0.1)], ids=["forgetting", "beta"])
def test_the_rule_for_records_is_for_the_memories_that_it_was_proved_for(method: Method) -> None:
    facts = facts_of(method, D)
    assert facts.lipschitz == float("inf")
    assert not facts.made_of_messages


def test_a_constant_that_the_user_states_is_noted_beside_the_epsilon() -> None:
    privacy = Privacy(sigma=1.0, unit="record", record_clip=1.0, trust="local")
    said = [
        train(classes(), method, lr=0.1, rounds=1, privacy=privacy).privacy for method in (Claims(), DPSGD(Clip(1.0)))
    ]
    assert said[0] is not None
    assert said[1] is not None
    assert "how far a record moves a message rests on the constant that signs states" in said[0].notes
    assert not any("constant" in note for note in said[1].notes)


class Annealed(Scaling):
    """Smoothed normalisation whose α is lowered during the run: its bound stays, and its constant grows."""

    bound = 1.0

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    @property
    def lipschitz(self) -> float:
        return 1 / self.alpha

    def scale(self, norm: Tensor) -> Tensor:
        return 1 / (self.alpha + norm)

    def contraction(self, norm: float, dim: int) -> float:  # noqa: ARG002
        return 1.0


class Sharpen(Callback):
    def __init__(self, operator: Annealed) -> None:
        self.operator = operator

    def round(self, round: int) -> None:  # noqa: ARG002
        self.operator.alpha = 1e-4


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", [DPSGD, ErrorFeedback])
def test_a_constant_that_grows_during_the_run_ends_it(kind: Any, tmp_path: Path) -> None:
    """The noise covers what a record can change at α = 1, which is a ten-thousandth of what it could change later."""
    operator = Annealed(1.0)
    privacy = Privacy(epsilon=2, unit="record", record_clip=0.01, trust="secure-sum", noise="secure")
    with pytest.raises(UsageError, match=r'changed during a private run.*"alpha": 0.0001'):
        train(
            classes(),
            kind(operator),
            lr=0.1,
            rounds=5,
            privacy=privacy,
            callbacks=[Sharpen(operator)],
            out=tmp_path / "run",
        )
    releases = (tmp_path / "run" / "ledger.jsonl").read_text().count('"kind":"release"')
    assert releases == 1, "the round after the change was paid for"


class Hidden(Method):
    """Its factor is no setting: no text of the method shows it."""

    bound = 1.0  # type: ignore[assignment]

    def __init__(self) -> None:
        self._factor = 0.5

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return self._factor * update, state


def test_what_is_changed_in_a_method_during_a_private_run_has_no_effect() -> None:
    method, ones = Hidden(), torch.ones(2, 3)
    steps, plain = Steps(method, ones[0], one_by_one=True), Steps(method, ones[0])
    method._factor = 2.0
    steps.refuse_changes()
    assert torch.equal(steps.message(ones.clone(), {}, None)[0], 0.5 * ones)
    assert torch.equal(plain.message(ones.clone(), {}, None)[0], 2 * ones), "a run without privacy may be changed"
