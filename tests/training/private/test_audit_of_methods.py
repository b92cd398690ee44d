"""The audit of the real rounds: true mechanisms are not refuted, and each planted bug is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normec import (
    DPSGD,
    AdaptiveClip,
    Clip,
    Clip21,
    Clip21SGD2M,
    LocalSteps,
    MomentumNormEC,
    NormEC,
    Privacy,
    Scaffold,
    SmoothedNorm,
)
from normec.algorithms.method import Method, ScaledDifference
from normec.errors import UsageError
from normec.experiments.audit import audit_method
from normec.privacy.facts import Setting
from normec.privacy.mechanism import Mechanism
from normec.privacy.noise import SeededNoise
from normec.privacy.release import Release
from normec.training import fused_update as update
from normec.training.client_update import ClientUpdate
from normec.training.loop import TrainingLoop

METHODS = {
    "normec": NormEC(0.01, 0.1),
    "normec-plain": NormEC(0.01, 0.1, server_norm=False),
    "normec-forgetting": NormEC(0.01, 0.1, decay=0.2),
    "clip21": Clip21(0.3),
    "dpsgd-norm": DPSGD(SmoothedNorm(0.01)),
    "dpsgd-clip": DPSGD(Clip(0.3), beta=0.5),
    "dpsgd-momentum": DPSGD(Clip(0.3), momentum=0.9),
    "normec-momentum": MomentumNormEC(0.01, 0.1, client_momentum=0.5),
    "clip21-sgd2m": Clip21SGD2M(0.3, client_momentum=0.5),
    "dpsgd-adaptive": AdaptiveClip(DPSGD(Clip(0.3))),
    "clip21-adaptive": AdaptiveClip(Clip21(0.3)),
    "clip21-sgd2m-adaptive": AdaptiveClip(Clip21SGD2M(0.3, client_momentum=0.5)),
}
PATIENTS = (30, 85, 172, 199)  # the canary is in the first or in the last hospital
HOSPITALS = [size / 486 for size in PATIENTS]
SMALL: dict[str, Any] = {"rounds": 2, "trials": 240, "dimension": 6}  # two rounds: of some clients, and of all
LARGER: dict[str, Any] = {**SMALL, "rounds": 3}  # where the canary shows less
FEWEST: dict[str, Any] = {**SMALL, "trials": 192}
ONE: dict[str, Any] = {**FEWEST, "rounds": 1}  # enough for most bugs

# Every method, and every combination of trust, relation and noise, at least once.
TRUE = [
    ("normec", "secure-sum", "zero-out", "seeded"),
    ("dpsgd-momentum", "secure-sum", "zero-out", "secure"),
    ("dpsgd-adaptive", "secure-sum", "replace", "seeded"),
    ("clip21", "secure-sum", "replace", "secure"),
    ("normec-momentum", "local", "zero-out", "seeded"),
    ("dpsgd-norm", "local", "zero-out", "secure"),
    ("normec-plain", "local", "replace", "seeded"),
    ("normec-forgetting", "local", "replace", "secure"),
    ("clip21-sgd2m", "central", "zero-out", "seeded"),
    ("clip21-sgd2m-adaptive", "central", "zero-out", "secure"),
    ("dpsgd-clip", "central", "replace", "seeded"),
    ("clip21-adaptive", "central", "replace", "secure"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trust", "relation", "noise"), TRUE)
def test_true_mechanisms_are_not_refuted_and_the_bound_has_teeth(
    name: str, trust: Any, relation: Any, noise: Any
) -> None:
    privacy = Privacy(epsilon=8, trust=trust, relation=relation, noise=noise)
    found = audit_method(METHODS[name], privacy, **SMALL)
    assert not found.violated, found
    assert found.epsilon > 0.25 * found.claim


LOCAL = {
    "fedavg": (DPSGD(Clip(0.3)), LocalSteps(steps=5, lr=0.1, scale="difference")),
    "fedprox": (DPSGD(Clip(0.3)), LocalSteps(steps=3, lr=0.1, prox=0.5, scale="difference")),
    "fed-normec": (NormEC(0.01, 0.1), LocalSteps(steps=3, lr=0.1, prox=0.3)),
    "scaffold": (Scaffold(0.3), LocalSteps(steps=3, lr=0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trust"),
    [
        ("fedavg", "secure-sum"),
        ("fedprox", "central"),
        ("fed-normec", "local"),
        ("scaffold", "secure-sum"),
        ("scaffold", "local"),
    ],
)
def test_local_steps_are_not_refuted_and_the_bound_has_teeth(name: str, trust: Any) -> None:
    method, local = LOCAL[name]
    found = audit_method(method, Privacy(epsilon=8, trust=trust, noise="seeded"), local=local, **SMALL)
    assert not found.violated, found
    assert found.epsilon > 0.25 * found.claim


@pytest.mark.slow
def test_noise_for_one_of_five_local_steps_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    method, local = LOCAL["fedavg"]
    monkeypatch.setattr(Release, "sum_sigma", lambda release, sigma: sigma * release.drawn / 5)
    privacy = Privacy(epsilon=2, trust="secure-sum", noise="seeded")
    assert audit_method(method, privacy, local=local, **FEWEST).violated


def test_the_audit_refuses_local_steps_that_it_cannot_follow() -> None:
    for local in (LocalSteps(epochs=1, lr=0.1), LocalSteps(steps=2, lr=0.1, optimizer="adam")):
        with pytest.raises(UsageError, match="by sgd without momentum"):
            audit_method(NormEC(0.01, 0.1), Privacy(epsilon=8, trust="secure-sum"), local=local)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "trust"),
    [
        (METHODS["normec"], "secure-sum"),
        (METHODS["normec"], "central"),
        (METHODS["normec"], "local"),
        (AdaptiveClip(DPSGD(Clip(0.3))), "central"),  # clients read a number that the server makes of the sum
    ],
)
def test_weighted_sums_keep_their_epsilon(method: Method, trust: Any) -> None:
    privacy = Privacy(epsilon=8, trust=trust)
    found = audit_method(method, privacy, weights=HOSPITALS, **LARGER)
    assert not found.violated, found
    assert found.epsilon > 0.25 * found.claim


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trust", "weights", "noise"),
    [("local", HOSPITALS, "seeded"), ("local", (), "secure"), ("secure-sum", HOSPITALS, "seeded")],
)
def test_records_of_unequal_hospitals_keep_their_epsilon(trust: Any, weights: Any, noise: Any) -> None:
    """Under local trust every hospital adds the noise of its own records; the canary is in the first or the last."""
    privacy = Privacy(epsilon=8, trust=trust, unit="record", record_clip=1.0, noise=noise)
    found = audit_method(DPSGD(Clip(1.0)), privacy, weights=weights, records=PATIENTS, **SMALL | {"trials": 480})
    assert not found.violated, found
    assert found.epsilon > 0.25 * found.claim


@pytest.mark.slow
def test_more_runs_come_nearer() -> None:
    privacy = Privacy(epsilon=8, trust="secure-sum", noise="seeded")
    found = audit_method(DPSGD(SmoothedNorm(0.01)), privacy, rounds=2, trials=1200, dimension=2)
    assert not found.violated
    assert found.claim == pytest.approx(8, rel=1e-6)
    assert found.epsilon > 0.75 * 8


def test_too_few_runs_and_other_units_are_refused() -> None:
    privacy = Privacy(epsilon=8, trust="secure-sum")
    with pytest.raises(UsageError, match="trials must be a whole number >= 192"):
        audit_method(NormEC(0.01, 0.1), privacy, trials=100)
    with pytest.raises(UsageError, match="clients must be a whole number >= 4"):
        audit_method(NormEC(0.01, 0.1), privacy, clients=3)
    with pytest.raises(UsageError, match="needs record_clip and the records of each of the 4 clients"):
        audit_method(NormEC(0.01, 0.1), Privacy(epsilon=8, unit="record", trust="local"))
    record = Privacy(epsilon=8, unit="record", record_clip=1.0, trust="local")
    with pytest.raises(UsageError, match="keeps a state"):
        audit_method(NormEC(0.01, 0.1), record, records=PATIENTS)
    with pytest.raises(UsageError, match="records are for an audit at record level"):
        audit_method(NormEC(0.01, 0.1), privacy, records=PATIENTS)
    with pytest.raises(UsageError, match="without sampling"):
        audit_method(NormEC(0.01, 0.1), replace(privacy, sampling=0.5))


def drawn_as(change: Callable[[Mechanism, Tensor, float, tuple[Any, ...]], Tensor]) -> Callable[..., None]:
    """A bug that changes each draw of noise; the change gets the mechanism, the draw, σ and the draw's name."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = Mechanism._draw

        def planted(self: Mechanism, like: Tensor, sigma: float, *path: Any) -> Tensor:
            return change(self, real(self, like, sigma, *path), sigma, path)

        patch.setattr(Mechanism, "_draw", planted)

    return plant


def made_as(change: Callable[[Mechanism], None]) -> Callable[..., None]:
    """A bug that changes each mechanism when it is made."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = Mechanism.__init__

        def planted(self: Mechanism, *arguments: Any, **words: Any) -> None:
            real(self, *arguments, **words)
            change(self)

        patch.setattr(Mechanism, "__init__", planted)

    return plant


def scale_sigma(factor: Callable[[Mechanism], float]) -> Callable[..., None]:
    def change(self: Mechanism) -> None:
        self.sigma *= factor(self)

    return made_as(change)


def few_seeds(patch: pytest.MonkeyPatch) -> None:
    real = SeededNoise.__init__
    patch.setattr(SeededNoise, "__init__", lambda self, seed: real(self, seed % 64))


def only_the_first_coordinate(_: Mechanism, noise: Tensor, *__: Any) -> Tensor:
    noise[1:] = 0
    return noise


def less_in_the_last_coordinate(_: Mechanism, noise: Tensor, *__: Any) -> Tensor:
    noise[-1] *= 0.02
    return noise


def noise_used_again(patch: pytest.MonkeyPatch) -> None:
    real = Mechanism._draw

    def planted(self: Mechanism, like: Tensor, sigma: float, *path: Any) -> Tensor:
        held, self._paid = self._paid, 0
        drawn = real(self, like, sigma, *path)
        self._paid = held
        return drawn

    patch.setattr(Mechanism, "_draw", planted)


def noise_shared_by_two_clients(patch: pytest.MonkeyPatch) -> None:
    real = Mechanism._draw

    def planted(self: Mechanism, like: Tensor, sigma: float, *path: Any) -> Tensor:
        path = ("client", path[1] // 2) if path[0] == "client" else path
        return real(self, like, sigma, *path)

    patch.setattr(Mechanism, "_draw", planted)


def sum_of_noise(patch: pytest.MonkeyPatch, sigma: Callable[[Mechanism, int], float]) -> None:
    """A bug in the standard deviation of the one draw that stands for all clients'."""
    patch.setattr(
        Mechanism, "noise_of_sum", lambda self, like, messages: self._draw(like, sigma(self, messages), "sum")
    )


def noise_of_drawn_clients_only(patch: pytest.MonkeyPatch) -> None:
    sum_of_noise(patch, lambda self, messages: self.sigma * math.sqrt(messages))


def noise_of_one_client_on_a_simulated_local_sum(patch: pytest.MonkeyPatch) -> None:
    sum_of_noise(patch, lambda self, _: self.sigma)


def noise_on_the_mean(patch: pytest.MonkeyPatch) -> None:
    sum_of_noise(patch, lambda self, _: self.release.sum_sigma(self.sigma) / self.setting.clients)


def wrong_n_in_the_sum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Release, "sum_sigma", lambda self, sigma: sigma)  # noqa: ARG005


def psi_of_the_sum(patch: pytest.MonkeyPatch) -> None:
    """Clients send their gradients as they are, and the sum of all is clipped."""
    real = TrainingLoop._whole
    patch.setattr(ClientUpdate, "send_fused", lambda self, state, block, meter: block.grads.sum(0))  # noqa: ARG005
    patch.setattr(
        TrainingLoop,
        "_whole",
        lambda self, total, *rest, **words: real(self, self.method.operator(total[None])[0], *rest, **words),
    )


def psi(form: ScaledDifference, v: Tensor) -> Tensor:
    return v * form.scale(v.norm(dim=-1, keepdim=True))


def psi_of_a_block(patch: pytest.MonkeyPatch) -> None:
    real = update.apply_fused

    def planted(form: ScaledDifference, block: Any, memory: Tensor, seed: int, *_: Any) -> update.Sent:
        whole = psi(form, block.grads.sum(0)[None])[0]
        sent = real(form, block, memory, seed)
        return update.Sent(whole, sent.distances, sent.lengths)

    patch.setattr(update, "apply_fused", planted)


def last_row_counted_three_times(patch: pytest.MonkeyPatch) -> None:
    """Each message keeps its bound, but the sum holds one of them three times."""
    real = update.apply_fused

    def planted(form: ScaledDifference, block: Any, memory: Tensor, seed: int, *_: Any) -> update.Sent:
        last = psi(form, block.grads[-1:])[0]
        sent = real(form, block, memory, seed)
        return update.Sent(sent.total + 2 * last, sent.distances, sent.lengths)

    patch.setattr(update, "apply_fused", planted)


def noise_before_psi(patch: pytest.MonkeyPatch) -> None:
    real = update.apply_fused

    def planted(form: ScaledDifference, block: Any, memory: Tensor, seed: int, *_: Any) -> update.Sent:
        block.grads.add_(torch.randn_like(block.grads))
        return real(form, block, memory, seed)

    patch.setattr(update, "apply_fused", planted)
    patch.setattr(Mechanism, "outgoing", lambda self, sums, *_: sums)  # noqa: ARG005


def memories_take_the_noise_of_a_sum(patch: pytest.MonkeyPatch) -> None:
    """Each client adds its own noise and remembers the noisy message, though only the sum is seen."""

    def send(self: Mechanism, messages: Tensor, clients: Tensor, *_: Any) -> Tensor:
        sent = self.noisy(messages, clients)
        self._add(sent.sum(0))
        return sent

    def outgoing(self: Mechanism, sums: Tensor, *_: Any) -> Tensor:
        absent = self.setting.clients - self._counted
        self._counted = 0
        rest = self._draw(sums, self.sigma * math.sqrt(absent), "absent") if absent else torch.zeros_like(sums)
        return (self._sum if self._sum is not None else sums) + rest

    def noisy(self: Mechanism, messages: Tensor, clients: Tensor) -> Tensor:
        self._counted = getattr(self, "_counted", 0) + len(clients)
        return real(self, messages, clients)

    real = Mechanism.noisy
    patch.setattr(Mechanism, "takes_sums", property(lambda self: False))  # noqa: ARG005
    patch.setattr(Mechanism, "noisy", noisy)
    patch.setattr(Mechanism, "send", send)
    patch.setattr(Mechanism, "outgoing", outgoing)


def no_noise_on_the_bit(_: Mechanism, noise: Tensor, *__: Any) -> Tensor:
    """The number that adaptive clipping sends beside the update goes out as it is."""
    noise[-1] = 0
    return noise


def noise_inside_the_local_steps(patch: pytest.MonkeyPatch) -> None:
    """Every local step is noised before the message is clipped, and the message is sent as it is."""
    real = LocalSteps.step

    def planted(self: LocalSteps, moved: Tensor, grads: Tensor, *rest: Any) -> None:
        real(self, moved, grads + torch.randn_like(grads), *rest)

    patch.setattr(LocalSteps, "step", planted)
    patch.setattr(Mechanism, "outgoing", lambda self, sums, *_: sums)  # noqa: ARG005


def weights_ignored(patch: pytest.MonkeyPatch) -> None:
    """The noise is that of equal weights, and the sum is weighted."""
    patch.setattr(Setting, "heaviest", property(lambda self: 1.0))  # noqa: ARG005


def noise_of_the_share(patch: pytest.MonkeyPatch) -> None:
    """A hospital's noise follows its share of the sum twice: the smaller its share of the noise, the larger it is."""
    true = Mechanism.client_sigmas
    patch.setattr(
        Mechanism,
        "client_sigmas",
        lambda self, clients: [
            sigma * 30 / PATIENTS[client] for sigma, client in zip(true(self, clients), clients.tolist(), strict=True)
        ],
    )


def noise_of_another_client(patch: pytest.MonkeyPatch) -> None:
    """The clients' noise is in the wrong order."""
    true = Mechanism.client_sigmas
    patch.setattr(Mechanism, "client_sigmas", lambda self, clients: true(self, 3 - clients))


NORMEC, CLIPPED = NormEC(0.01, 0.1), DPSGD(Clip(0.3))
# name → (bug, method, trust, ε, more arguments)
BUGS: dict[str, tuple[Callable[..., None], Method, str, float, dict[str, Any]]] = {
    "noise scaled by beta": (scale_sigma(lambda self: self.method.beta), NORMEC, "secure-sum", 8, {}),
    "total norm called per coordinate": (
        scale_sigma(lambda self: 1 / math.sqrt(self.setting.dimension or 1)),
        NORMEC,
        "secure-sum",
        8,
        {},
    ),
    "one round forgotten": (
        drawn_as(lambda self, noise, *_: noise * (self._paid != 1)),
        NORMEC,
        "secure-sum",
        8,
        FEWEST,
    ),
    "noise used again": (noise_used_again, NORMEC, "secure-sum", 8, FEWEST),
    "only the first coordinate": (drawn_as(only_the_first_coordinate), NORMEC, "secure-sum", 8, {}),
    "one number for all coordinates": (
        drawn_as(lambda _, noise, *__: noise[:1].expand(len(noise)).clone()),
        CLIPPED,
        "central",
        8,
        {},
    ),
    "less in the last coordinate": (drawn_as(less_in_the_last_coordinate), CLIPPED, "central", 8, {}),
    "wrong n in the sum": (wrong_n_in_the_sum, NORMEC, "secure-sum", 8, FEWEST),
    "noise on the mean": (noise_on_the_mean, NORMEC, "central", 8, {}),
    "noise of drawn clients only": (
        noise_of_drawn_clients_only,
        NORMEC,
        "secure-sum",
        8,
        {"clients": 8, **SMALL},
    ),
    "Ψ of the sum": (psi_of_the_sum, CLIPPED, "secure-sum", 8, {}),
    "Ψ of a block": (psi_of_a_block, CLIPPED, "secure-sum", 8, {}),
    "last row counted three times": (last_row_counted_three_times, CLIPPED, "secure-sum", 8, {}),
    "noise before Ψ": (noise_before_psi, CLIPPED, "secure-sum", 8, {}),
    "memories take the noise of a sum": (
        memories_take_the_noise_of_a_sum,
        Clip21(0.3),
        "secure-sum",
        60,
        {"clients": 8, "rounds": 4, "dimension": 2, "trials": 240},
    ),
    "sigma over sqrt(n) under local trust": (
        scale_sigma(lambda self: 1 / math.sqrt(self.setting.clients)),
        NORMEC,
        "local",
        8,
        {},
    ),
    "noise of one client on a simulated local sum": (
        noise_of_one_client_on_a_simulated_local_sum,
        NORMEC,
        "local",
        8,
        LARGER,
    ),
    "noise shared by two clients": (noise_shared_by_two_clients, CLIPPED, "local", 8, {}),
    "no noise for the last client": (
        drawn_as(lambda self, noise, _, path: noise * (path[-1] != self.setting.clients - 1)),
        CLIPPED,
        "local",
        8,
        {},
    ),
    "one-sided noise": (drawn_as(lambda _, noise, *__: noise.abs()), NORMEC, "central", 1, {**SMALL, "trials": 600}),
    "noise of half precision": (drawn_as(lambda _, noise, *__: noise.half().double()), NORMEC, "central", 1, FEWEST),
    "noise cut at 2 sigma": (
        drawn_as(lambda _, noise, sigma, __: noise.clamp(-2 * sigma, 2 * sigma)),
        NORMEC,
        "central",
        1,
        LARGER,
    ),
    "weights ignored in the sensitivity": (
        weights_ignored,
        NORMEC,
        "secure-sum",
        8,
        {**SMALL, "weights": HOSPITALS, "trials": 400},
    ),
    "a quantile's bit without noise": (drawn_as(no_noise_on_the_bit), METHODS["dpsgd-adaptive"], "secure-sum", 8, {}),
    "noise inside the local steps": (
        noise_inside_the_local_steps,
        CLIPPED,
        "secure-sum",
        8,
        {"local": LocalSteps(steps=3, lr=0.1)},
    ),
    "half of a control variate's noise": (
        drawn_as(lambda _, noise, *__: noise * torch.linspace(1, 0, len(noise), dtype=noise.dtype).ge(0.5)),
        Scaffold(0.3),
        "central",
        8,
        {"local": LocalSteps(steps=3, lr=0.1)},
    ),
    "few seeds": (few_seeds, NORMEC, "secure-sum", 1, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, method, trust, epsilon, more = BUGS[name]
    plant(monkeypatch)
    privacy = Privacy(epsilon=epsilon, trust=trust, noise="seeded")  # type: ignore[arg-type]
    found = audit_method(method, privacy, **ONE | more)
    assert found.violated, found


@pytest.mark.slow
@pytest.mark.parametrize("plant", [noise_of_the_share, noise_of_another_client])
def test_wrong_noise_of_single_hospitals_is_refuted(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    privacy = Privacy(epsilon=4, unit="record", record_clip=1.0, noise="seeded", trust="local")
    found = audit_method(DPSGD(Clip(1.0)), privacy, weights=HOSPITALS, records=PATIENTS, **FEWEST)
    assert found.violated, found


QUICK: dict[str, Any] = {"rounds": 1, "trials": 192, "dimension": 2}


def test_one_round_with_noise_inside_the_local_steps_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    noise_inside_the_local_steps(monkeypatch)
    local = LocalSteps(steps=2, lr=0.1)
    assert audit_method(CLIPPED, Privacy(epsilon=8, trust="secure-sum"), local=local, **QUICK).violated


@pytest.mark.slow
def test_one_round_with_a_bit_without_noise_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_as(no_noise_on_the_bit)(monkeypatch)
    assert audit_method(METHODS["dpsgd-adaptive"], Privacy(epsilon=8, trust="secure-sum"), **QUICK).violated
