"""An audit of whole sums at party and at patient level: what opened sums show is no more than the ledgers state.

A ledger states a noise multiplier 1/μ for each vector: whether the protected party, or patient, was there shifts the
noise of the sum by at most μ standard deviations. The tests measure this shift in opened sums, in the view of a server
with a colluding party, which subtracts all that the colluder sent. Every sum has a thousand coordinates, so few sums
tell the standard deviation, and the shift of their mean is known up to √(2/sums) standard deviations. Planted bugs show
that the audit notices: noise that a dropout leaves out, noise that is used in two attempts, weights that the
sensitivity leaves out, the noise of a colluder that is counted, and records that are not clipped.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normec import DPSGD, Clip, Privacy
from normec.federation.protocol import sum_terms
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import GradientOracle
from normec.federation.protocol.sum_coordinator import SumCoordinator
from normec.federation.protocol.sum_party import SumParty
from normec.federation.protocol.sum_terms import FOLDER, setting_of
from normec.federation.protocol.terms import RecordTerms
from normec.federation.protocol.wire import SumReply, SumRequest, to_fields
from normec.federation.secure_sum import server as secure_sum
from normec.federation.secure_sum.server import OpenedSum
from normec.privacy.facts import Setting
from normec.privacy.noise import SecureNoise

from .summing_hospitals import NODES, SIZES, SummingHospitals

DIMENSION, SUMS, DELTA = 1000, 6, 1e-5
SIGMA = 0.05
COLLUDER = "d"
WEIGHTS = (1.5, 0.5, 1.5, 0.5)
FALSE_ALARM = 6.0  # standard deviations: one alarm in a billion audits of a right protocol
PARTY = Privacy(sigma=SIGMA, trust="secure-sum", delta=DELTA)
PATIENT = Privacy(sigma=SIGMA / 10, trust="secure-sum", delta=DELTA, unit="record", record_clip=1.0)


def direction() -> Tensor:
    drawn = np.random.default_rng(0).normal(size=DIMENSION)
    return torch.from_numpy(drawn / np.linalg.norm(drawn))


class Constant(GradientOracle):
    """The same records in every round, each of which is its own gradient; they are clipped as the terms say."""

    def __init__(self, *records: Tensor, clips: bool = True) -> None:
        self._records, self._clips = torch.stack(records), clips

    def check(self, x: Tensor) -> None: ...

    def check_records(self) -> None: ...

    def gradient(self, *_: Any, **__: Any) -> tuple[Tensor, float]:
        return self._records.mean(dim=0), 0.0

    def clipped_gradient(self, *given: Any, **_: Any) -> tuple[Tensor, float]:
        terms = next(one for one in given if isinstance(one, RecordTerms))
        clip = Clip(terms.clip or 1.0) if self._clips else Clip(1e9)
        return torch.stack([clip(one) for one in self._records]).sum(dim=0) / terms.divisor, 0.0


class Noise(SecureNoise):
    """Noise from a seeded generator that remembers what it drew, newest last."""

    def __init__(self, seed: int) -> None:
        self._draw, self.drawn = np.random.default_rng(seed), list[np.ndarray[Any, Any]]()

    def integers(self, count: int, scale: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        self.drawn.append(np.rint(self._draw.normal(size=count) * scale).astype(np.int64))
        return self.drawn[-1]


class NoNoise(Noise):
    """A planted bug: no noise at all."""

    def integers(self, count: int, scale: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        super().integers(count, scale)
        self.drawn[-1] = np.zeros(count, np.int64)
        return self.drawn[-1]


class SameNoise(Noise):
    """A planted bug: every vector has the noise of the first one."""

    def integers(self, count: int, scale: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.drawn:
            return super().integers(count, scale)
        self.drawn.append(self.drawn[0])
        return self.drawn[-1]


class Remembering(SumCoordinator):
    """A server that remembers the sums that it opens, with their parties."""

    def _attach(self) -> None:
        self.opened: list[tuple[tuple[int, ...], np.ndarray[Any, Any]]] = []
        super()._attach()

    def _take_sum(self, opened: OpenedSum) -> None:
        self.opened.append((opened.survivors, self.grid.decode(opened.values).numpy()))
        super()._take_sum(opened)


class Audited(SummingHospitals):
    """Four hospitals whose server colludes with one of them."""

    server: Remembering

    def __init__(self, folder: Path, privacy: Privacy, noises: Mapping[str, Noise], **given: Any) -> None:
        self.noises = dict(noises)
        self.answers: dict[str, bytes] = {}
        changes = {"weights": torch.tensor(WEIGHTS, dtype=torch.float64)}
        super().__init__(folder, DPSGD(Clip(1.0)), SUMS, privacy, plan_changes=changes, **given)

    def _opened(self) -> Remembering:
        zeros = torch.zeros(DIMENSION, dtype=torch.float64)
        return Remembering(self.method, zeros, NODES, self.plan, **self._given)

    def restart(self, node: str) -> None:
        self.parties[node] = SumParty(self.home(node), self.policies[node], self.oracles[node], self.noises[node])

    def ask(self, node: str, request: SumRequest) -> str:
        answer = self.parties[node].answer(to_fields(request))
        assert isinstance(answer, SumReply)
        self.answers[node] = answer.content.tobytes()
        return self.server.receive(node, to_fields(answer))

    def secretly_opened(self) -> OpenedSum:
        """Ask for the shares of the current sum and open it in a copy of the server's folder; the server gives up."""
        while self.server.stage != "reveals":
            self.exchange(lambda node, stage: (node, stage) != ("c", "vectors"))
        copy = self.folder / f"copy-{self.server.round}"
        shutil.copytree(self.folder / "server" / FOLDER, copy)
        for node, request in self.server.requests().items():
            self.ask(node, request)
        with secure_sum.Server(copy, self.roster, self.server.terms) as server:
            for node in ("a", "b", "d"):
                server.receive(NODES.index(node), self.answers[node])
            server.advance()
            assert server.sum is not None
            found = server.sum
        self.server.repeat_round()
        return found

    def known(self, vector: int) -> np.ndarray[Any, Any]:
        """The noise of the colluder in its vector of this number."""
        return self.noises[COLLUDER].drawn[vector] * self.server.grid.step


@dataclass
class Seen:
    """What a run shows of each round, and μ of one vector by the ledger of the protected party."""

    sums: np.ndarray[Any, Any]
    stated: float


@dataclass(frozen=True)
class Scene:
    """Who is protected, at which level, and what is wrong."""

    privacy: Privacy = PARTY
    protected: str = "a"
    noises: Mapping[str, type[Noise]] = field(default_factory=dict)
    clips: bool = True
    twice: bool = False  # whether the server opens two attempts of each round

    def run(self, folder: Path, present: bool) -> Seen:
        """A run of `SUMS` rounds; party c drops out with its vector, unless it is the protected one."""
        far, nothing = direction() * 40, torch.zeros(DIMENSION, dtype=torch.float64)
        small = [torch.from_numpy(np.random.default_rng(i).normal(size=DIMENSION)) / 40 for i in range(4)]
        oracles = {node: Constant(small[i], clips=self.clips) for i, node in enumerate(NODES)}
        in_question = far if present else nothing
        at_record = self.privacy.unit == "record"
        records = [small[0], in_question] if at_record else [in_question]
        oracles[self.protected] = Constant(*records, clips=self.clips)
        noises = {node: self.noises.get(node, Noise)(1000 + 10 * i + present) for i, node in enumerate(NODES)}
        federation = Audited(folder, self.privacy, noises, oracles=oracles, records=SIZES if at_record else None)
        try:
            shown = [self._round(federation) for _ in range(SUMS)]
            ledger = read_releases(federation.home(self.protected)).account(self.privacy.unit, DELTA)
            return Seen(np.array(shown), ledger.mu / math.sqrt(ledger.releases))
        finally:
            federation.close()

    def _round(self, federation: Audited) -> np.ndarray[Any, Any]:
        k = federation.server.round
        if not self.twice:
            federation.round(lambda node, stage: (node, stage) != ("c", "vectors"))
            survivors, total = federation.server.opened[-1]
            assert survivors == (0, 1, 3)
            return np.asarray(total - federation.known(k))
        first = federation.secretly_opened()
        federation.round()
        survivors, total = federation.server.opened[-1]
        assert (first.survivors, survivors) == ((0, 1, 3), (0, 1, 2, 3))
        before = federation.server.grid.decode(first.values).numpy() - federation.known(2 * k)
        return np.asarray(total - federation.known(2 * k + 1) - before)


def audited(folder: Path, scene: Scene) -> tuple[float, float, float]:
    """The shift in standard deviations, the standard error of this estimate, and what the ledger states."""
    there, away = (scene.run(folder / str(present), present) for present in (True, False))
    assert there.stated == away.stated
    rest = [one.sums - one.sums.mean(axis=0) for one in (there, away)]
    freedom = 2 * DIMENSION * (SUMS - 1)
    deviation = math.sqrt(sum(float((one**2).sum()) for one in rest) / freedom)
    shift = float((there.sums.mean(axis=0) - away.sums.mean(axis=0)) @ direction().numpy()) / max(deviation, 1e-12)
    return shift, math.hypot(math.sqrt(2 / SUMS), shift / math.sqrt(2 * freedom)), there.stated


RIGHT = {
    "a party": Scene(),
    "a patient": Scene(PATIENT),
    "a party whose round is attempted twice": Scene(protected="c", twice=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_sums_show_no_more_than_the_ledgers_state(tmp_path: Path, name: str) -> None:
    shift, error, stated = audited(tmp_path, RIGHT[name])
    assert shift - FALSE_ALARM * error <= stated
    assert shift > 0.6 * stated, "the audit must come near enough to find a small violation"


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(Scene(noises={"b": NoNoise}), id="the noise of a party is forgotten when another drops out"),
        pytest.param(
            Scene(protected="c", twice=True, noises={"a": SameNoise, "b": SameNoise}),
            id="noise is used again in a second attempt",
        ),
        pytest.param(Scene(PATIENT, clips=False), id="records are not clipped"),
        pytest.param(Scene(PATIENT, noises={"a": SameNoise, "b": SameNoise}), id="noise never changes"),
    ],
)
def test_noise_and_clips_that_are_missing_are_noticed(tmp_path: Path, scene: Scene) -> None:
    shift, error, stated = audited(tmp_path, scene)
    assert shift - FALSE_ALARM * error > stated


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [PARTY, PATIENT], ids=["a party", "a patient"])
def test_weights_that_the_sensitivity_leaves_out_are_noticed(
    tmp_path: Path, privacy: Privacy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unweighted(*given: Any) -> Setting:
        return dataclasses.replace(setting_of(*given), weights=())

    monkeypatch.setattr(sum_terms, "setting_of", unweighted)
    shift, error, stated = audited(tmp_path, Scene(privacy))
    assert shift - FALSE_ALARM * error > stated


@pytest.mark.slow
def test_noise_of_a_colluder_that_is_counted_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_terms, "honest_parties", lambda smallest, _: smallest)
    shift, error, stated = audited(tmp_path, Scene())
    assert shift - FALSE_ALARM * error > stated
