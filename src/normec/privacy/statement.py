"""The privacy statement of a run: who is protected, from whom, and how strongly.

Formal guarantee. Let M be the run, D and D' two data sets that differ in one `unit` by `relation`, and let O be
everything that the observer named by `trust` sees over all rounds. Then for every set S of outcomes

    P[O(D) in S] <= e^epsilon P[O(D') in S] + delta    and the same with D and D' exchanged.

This module contains only the statement; `rules` derives the sensitivity and the composition from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from ..errors import UsageError, at_least, fraction, one_of, open_unit, positive
from .display import shown_delta, shown_epsilon
from .noise_schedule import CONSTANT, NoiseSchedule, checked, written_out

Unit = Literal["client", "record"]
Relation = Literal["zero-out", "replace"]
Trust = Literal["local", "secure-sum", "central"]
Noise = Literal["seeded", "secure", "exact"]
Memory = Literal["clean", "noisy"]
Replay = Literal["per-coordinate", "total-norm", "variance"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "unit": ("client", "record"),
    "relation": ("zero-out", "replace"),
    "trust": ("local", "secure-sum", "central"),
    "noise": ("seeded", "secure", "exact"),
    "memory": ("clean", "noisy"),
    "record_clip_by": ("record", "layer"),
}
SIMULATION = "Simulation: seeded noise protects nobody. The same run with secure noise would make this promise."
_BY_SIZES = {  # what follows from the clients' numbers of records, and what to give instead
    "rounds": ("epochs of batches make the number of rounds, and with it the noise,", "give rounds"),
    "weights": ("weights by records make the sum, and with it the noise,", "give weights that are public"),
}
_READINGS = ("per-coordinate", "total-norm", "variance")
_NUMBERS = ("epsilon", "delta", "sampling", "sigma", "record_clip")


def default_memory(unit: str, trust: str) -> Memory:
    """The default of `Privacy.memory`: the choice with which the statement needs the least noise."""
    return "noisy" if (unit, trust) == ("record", "local") else "clean"


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        raise UsageError(f"{name} must be one number, got {value!r}") from None


@dataclass(frozen=True)
class Privacy:
    """The privacy guarantee of a run.

    In a private run a model, a loss, a transform and an augmentation start every client with the attributes they had.

    Args:
        epsilon: The target ε. Give `sigma` instead to fix the noise; ε is then reported.
        delta: The target δ.
        unit: What is protected: all data of one "client", or one "record" of one client.
        relation: "zero-out": the unit is absent (an absent client sends noise only). "replace": it is another one.
        trust: The server sees only the sum of the messages ("secure-sum"), sees each message ("local"), or adds the
            noise itself ("central").
        sampling: The rate at which clients are sampled, by Poisson coins that are kept secret; the gain is claimed.
            None claims nothing.
        honest: Under "secure-sum", how many clients in every sum keep their noise secret, the protected one included
            (default: all). Between real parties it is `honest_parties`: the smallest number of parties in a sum, less
            those that may collude with the server.
        noise: "seeded" for simulations, "secure" or "exact" for deployments (default: what the context calls for).
        memory: What the client adds to its memory g_i: the message before ("clean") or after ("noisy") the noise. The
            default is "noisy" for records under local trust, where a clean memory would add up what one record did to
            all messages so far, and "clean" elsewhere.
        sigma: The standard deviation of one client's noise, per coordinate, instead of a target.
        replay: Take the noise from the paper's own formula for `epsilon`, in one of its readings. It is not a target;
            the true ε is reported.
        record_clip: The norm to which every record's gradient is clipped before the client's mean is taken, or "auto"
            for g/(‖g‖ + 0.01), which has no threshold to choose and whose norm is below 1. If it is None, `train` uses
            "auto" for protected records wherever a rule covers it; a very large number clips nothing.
        record_clip_by: Whether the clip bounds a record's whole gradient ("record"), or each of the model's L trainable
            tensors alone by 1/√L of it ("layer").
        noise_schedule: How the noise is divided over the rounds: "constant", "best" (the least noise in the last model
            at the same ε), "linear:R", "exponential:R", one number for each round, or a function of the round
            (`privacy.noise_schedule`). Only the ratios of its values matter: they are scaled so that the mean of 1/σ_t²
            over the rounds is 1/σ².
        noise_bands: Under "central" trust, where groups of clients take turns (`Rotation`): over how many rounds the
            noise is correlated, at most the number of groups, or "best" for that number
            (`privacy.correlated_noise`). The noise of a round then cancels part of the noise before it, at the same
            ε (default: the noise of all rounds is independent).

    Raises:
        UsageError: A value is unknown or out of range, or two of them contradict each other.

    Example:
        >>> Privacy(epsilon=8).delta
        1e-05
    """

    epsilon: float | None = None
    delta: float = 1e-5
    unit: Unit = "client"
    relation: Relation = "zero-out"
    trust: Trust = "secure-sum"
    sampling: float | None = None
    honest: int | None = None
    noise: Noise | None = None
    memory: Memory | None = None  # `__post_init__` decides
    sigma: float | None = None
    replay: Replay | None = None
    record_clip: float | Literal["auto"] | None = None
    record_clip_by: Literal["record", "layer"] = "record"
    noise_schedule: NoiseSchedule = CONSTANT
    noise_bands: int | Literal["best"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_schedule", checked(self.noise_schedule))
        for name in _NUMBERS:  # numbers of other libraries become Python's, which files can hold and nobody can change
            value: Any = getattr(self, name)
            if not isinstance(value, int | float) and hasattr(value, "__float__"):
                object.__setattr__(self, name, _number(name, value))
        honest: Any = self.honest
        if type(honest) is not bool and isinstance(honest, Integral):
            object.__setattr__(self, "honest", int(honest))
        if self.memory is None:
            object.__setattr__(self, "memory", default_memory(self.unit, self.trust))
        if self.unit not in _CHOICES["unit"]:  # the nearest word may be the wrong unit: "patient" is close to "client"
            raise UsageError(
                f"unknown unit {self.unit!r}; choose 'record', which protects one record, such as a patient of a "
                "hospital, or 'client', which protects all data of one client"
            )
        for name, choices in _CHOICES.items():
            if name != "noise" or self.noise is not None:
                one_of(choices, **{name: getattr(self, name)})
        open_unit(delta=self.delta)
        if self.epsilon is not None:
            positive(epsilon=self.epsilon)
        if self.sigma is not None:
            positive(sigma=self.sigma)
        if self.replay is not None:
            one_of(_READINGS, replay=self.replay)
        if self.sampling is not None:
            fraction(sampling=self.sampling)
        if self.record_clip is not None:
            if isinstance(self.record_clip, str) and self.record_clip != "auto":
                raise UsageError(f"record_clip must be a number > 0 or 'auto', got the text {self.record_clip!r}")
            if self.record_clip != "auto":
                positive(record_clip=self.record_clip)
            if self.unit != "record":
                raise UsageError("record_clip only matters for unit='record', got unit='client'; leave it out")
        elif self.by_layer:
            raise UsageError("record_clip_by='layer' needs record_clip, the norm of all layers together, or 'auto'")
        if self.honest is not None:
            at_least(1, honest=self.honest)
            if self.trust != "secure-sum":
                raise UsageError(f"honest only matters for trust='secure-sum', got trust={self.trust!r}; leave it out")
        if (self.epsilon is None) == (self.sigma is None):
            given = "neither" if self.epsilon is None else f"epsilon = {self.epsilon} and sigma = {self.sigma}"
            raise UsageError(
                f"give epsilon (a target) or sigma (the noise), one of the two, such as Privacy(epsilon=8); got {given}"
            )
        if self.noise_bands is not None:
            if isinstance(self.noise_bands, str):
                one_of(("best",), noise_bands=self.noise_bands)
            else:
                at_least(1, noise_bands=self.noise_bands)
                object.__setattr__(self, "noise_bands", int(self.noise_bands))
        if self.correlates:
            if self.noise_schedule != CONSTANT:
                raise UsageError("noise_bands goes with the same noise in every round; leave out noise_schedule")
            if self.memory == "noisy":
                raise UsageError("noise_bands goes with memory='clean', got memory='noisy'; leave out one of them")
        if self.replay is not None and self.epsilon is None:
            raise UsageError("replay needs epsilon, which the paper's formula contains")
        if self.replay is not None and self.noise_schedule != CONSTANT:
            raise UsageError("replay is the paper's noise, which is the same in every round; leave out noise_schedule")

    @property
    def is_target(self) -> bool:
        """Whether `epsilon` is a target that the run keeps (False for a given `sigma` and for `replay`)."""
        return self.epsilon is not None and self.replay is None

    @property
    def budget(self) -> float:
        """The ε that no release may exceed; infinite if ε is only reported."""
        return float(self.epsilon) if self.epsilon is not None and self.is_target else math.inf

    def with_noise(self, default: Noise) -> Privacy:
        """This statement with `noise` set to `default` if it is None.

        Simulations in one process pass "seeded"; real parties and ranks pass "secure".
        """
        return self if self.noise is not None else dataclasses.replace(self, noise=default)

    def with_record_clip(self, default: float | Literal["auto"]) -> Privacy:
        """This statement with `record_clip` set to `default` if it protects records and has none."""
        clipped = self.unit != "record" or self.record_clip is not None
        return self if clipped else dataclasses.replace(self, record_clip=default)

    def for_rounds(self, rounds: int) -> Privacy:
        """This statement with the values of a `noise_schedule` that is a function written out for `rounds` rounds."""
        return (
            dataclasses.replace(self, noise_schedule=self.schedule(rounds)) if callable(self.noise_schedule) else self
        )

    def schedule(self, rounds: int) -> str:
        """The noise schedule of a run of `rounds` rounds, as a text."""
        return written_out(checked(self.noise_schedule), rounds)

    @property
    def correlates(self) -> bool:
        """Whether the noise of several rounds is correlated; one band is independent noise."""
        return self.noise_bands not in (None, 1)

    def bands_of(self, groups: int) -> int:
        """The number of rounds over which the noise is correlated, if so many groups take turns; 1 without correlation.

        Example:
            >>> Privacy(epsilon=8, trust="central", noise_bands="best").bands_of(groups=16)
            16
        """
        if self.noise_bands is None:
            return 1
        return groups if isinstance(self.noise_bands, str) else self.noise_bands

    def refuse_private_sizes(self, public_sizes: bool, what: Literal["rounds", "weights"] = "rounds") -> None:
        """Refuse rounds or weights, and with them a noise, that depend on the numbers of records of protected clients.

        Args:
            public_sizes: Whether the caller declares the numbers of records public.
            what: What follows from these numbers: the "rounds" of some epochs, or the clients' "weights".

        Raises:
            UsageError: They are not public, and the statement protects whole clients.
        """
        if self.unit == "client" and not public_sizes:
            source, cure = _BY_SIZES[what]
            raise UsageError(
                f"{source} a function of how many records the clients hold, which unit='client' protects; {cure}, or "
                "declare these numbers public with public_sizes=True"
            )

    @property
    def record_bound(self) -> float | None:
        """The largest norm of one record's share of its client's sum; None without a clip per record."""
        return 1.0 if isinstance(self.record_clip, str) else self.record_clip

    @property
    def by_layer(self) -> bool:
        """Whether the clip per record bounds each trainable tensor alone."""
        return self.record_clip_by == "layer"

    def to_dict(self) -> dict[str, Any]:
        """The statement in plain values, by which runs and ledgers are identified; unused settings are left out."""
        stated = dataclasses.asdict(self)
        if not self.by_layer:
            del stated["record_clip_by"]
        if self.noise_schedule == CONSTANT:
            del stated["noise_schedule"]
        if not self.correlates:
            del stated["noise_bands"]
        return stated

    def covering(self, epsilon: float) -> Privacy:
        """This statement, with its target raised to `epsilon`, rounded up, if more than the target was spent.

        Example:
            >>> Privacy(epsilon=2).covering(1.5).epsilon, Privacy(epsilon=2).covering(2.10001).epsilon
            (2, 2.101)
        """
        if epsilon <= self.budget:
            return self
        return dataclasses.replace(self, epsilon=math.ceil(epsilon * 1000) / 1000)

    def difference(self, stated: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
        """The first setting in which another statement's `to_dict` differs: (name, its value, the value here)."""
        own = self.to_dict()
        for name in {**own, **stated}:
            if stated.get(name) != own.get(name):
                return name, stated.get(name), own.get(name)
        return None

    def promise(self, clients: int | None = None) -> str:
        """Who is protected from whom, in one paragraph."""
        others = f" of {clients} clients" if clients is not None else ""
        who = {
            ("client", "zero-out"): f"each client{others}: whether it took part with all its data or sent noise only",
            ("client", "replace"): f"each client{others}: which data it holds, all of it exchanged at once",
            ("record", "zero-out"): "each record of each client: whether its gradient was counted or left out",
            ("record", "replace"): "each record of each client: which record it was",
        }[self.unit, self.relation]
        if self.trust == "local":
            against = "the server, the other clients and anyone who sees every message"
        elif self.trust == "central":
            against = "anyone who sees the models and the noisy sums; the server itself is trusted"
        elif self.honest is None:
            against = "a server that sees only the sum of all messages, all clients adding their noise"
        else:
            against = f"a server that sees only the sum, joined by all but {self.honest} clients"
        if self.is_target:
            strength = f"(epsilon, delta) = ({shown_epsilon(self.epsilon, 6)}, {shown_delta(self.delta)})"
        elif self.replay is not None:
            strength = (
                f"noise by the paper's formula, read as {self.replay}; the epsilon it was asked for is NOT what it"
                f" gives, the exact one at delta = {shown_delta(self.delta)} is reported beside the result"
            )
        else:
            strength = (
                f"given noise sigma = {self.sigma:g}; its epsilon at delta = {shown_delta(self.delta)} is reported"
                " beside the result"
            )
        promise = f"Protected: {who}. Against: {against}. Strength: {strength}."
        return f"{SIMULATION} {promise}" if self.noise == "seeded" else promise

    def not_covered(self) -> list[str]:
        """What the guarantee does not cover; part of every report."""
        gaps = [
            "the start, the step sizes and all other settings, if they were chosen by looking at the same data",
            "numbers published beside the messages (training losses, norms, counts, timings)",
            "a model chosen among rounds by un-noised results on the protected data",
            "other runs on the same data: their epsilons add up",
            "that a run diverged, and the clients that its error names: an un-noised look at what they computed",
            "the folders in which clients' memories are kept, if the method has any: checkpoints hold them as they are",
            f"what several {self.unit}s of one person reveal jointly: their epsilons add up, and delta grows faster",
        ]
        if self.trust == "secure-sum":
            least = f"{self.honest} honest clients" if self.honest is not None else "all clients"
            gaps.append(f"sums that contain the noise of fewer than {least}, because others drop out or collude")
            gaps.append("the secure-sum protocol itself, which must show the server nothing but the sum")
        if self.trust == "central":
            gaps.append("the server, which sees every message before the noise")
        if self.noise == "seeded":
            gaps.append("anyone: this is a simulation, its noise is seeded, and whoever learns the seed can remove it")
            gaps.append("floating-point attacks on the noise: secure noise lies on a grid, seeded noise does not")
        if self.sampling is not None:
            gaps.append("anyone who learns which clients were drawn: the gain from sampling needs secret coins")
        if self.unit == "record":
            gaps.append("how many records a client has, which is taken as public")
        if self.unit == "record" and self.record_clip is not None:
            gaps.append("rounding inside the gradient arithmetic, which the record rule takes as exact")
        return gaps

    def describe(self, clients: int | None = None) -> str:
        """`promise` and `not_covered` as one text."""
        return self.promise(clients) + " Not covered: " + "; ".join(self.not_covered()) + "."
