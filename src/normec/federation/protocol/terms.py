"""The terms of a run in a request: its method, its privacy and its plan, as plain numbers and words.

A party trusts none of them. It builds the method itself, so that the bound of a message is the bound of the operator
that the party applies, and it compares noise, unit and trust with its own policy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...algorithms import registry
from ...algorithms.local_steps import LocalSteps
from ...algorithms.method import CLIENT_FUNCTIONS, Method
from ...errors import UsageError
from ...gradients.record_clip import RecordClip
from ...privacy.statement import Privacy

METHOD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
MOST_SETTINGS = 32  # of a method
LONGEST_SPEC = 4096  # characters of a method's settings
DEEPEST_SPEC = 2  # tables in tables: a method of a method, with its operator
NOISES = ("none", "seeded", "secure", "exact")


@dataclass(frozen=True)
class MethodTerms:
    """A method by its name, its settings (`Method.spec`) as JSON, and a digest of its code if it is not normec's."""

    name: str
    spec: str
    code: str

    @staticmethod
    def of(method: Method) -> MethodTerms:
        """The terms of a method. Raises `UsageError` if a party could not build the same method from them."""
        kind = type(method)
        changed = [name for name in CLIENT_FUNCTIONS if name in vars(method)]
        if changed:
            raise UsageError(
                f"this {kind.__name__} has its own {changed[0]}, which parties cannot know; "
                "define it in a class, and name the class in the parties' policies"
            )
        name, text = short_name(registry.name_of(method)), json.dumps(method.spec(), sort_keys=True)
        if not METHOD_NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be sent as the name of a method; use at most 64 letters, digits, '.', '-' and '_'"
            )
        built = registry.build_class(kind, read_spec(text), name)
        if built.spec() != method.spec() or built.bound != method.bound:
            raise UsageError(f"{name}({text}) does not build the method that was given; correct its spec()")
        return MethodTerms(name, text, registry.source_digest(kind))

    def build(self, allowed: Sequence[str]) -> Method:
        """Build the method from the party's own code. Raises `UsageError` if the party does not have it.

        Args:
            allowed: The methods in the party's policy: those of normec and of installed packages, and FILE.py:CLASS.
        """
        known = {short_name(name): name for name in allowed}
        if self.name not in known:
            raise UsageError(f"method {self.name} is not among methods = {list(known)}")
        kind = registry.find(known[self.name])
        if registry.source_digest(kind) != self.code:
            raise UsageError(f"the party's code of {self.name} differs from the server's; install the same version")
        try:
            given = read_spec(self.spec)
            method = registry.build_class(kind, given, self.name)
            missing = method.spec().keys() - given.keys()
            if missing:  # a default may differ from version to version
                raise UsageError(f"{self.name} needs a value of {min(missing)}")
            if math.isnan(float(method.bound)):
                raise UsageError(f"{self.name} has no bound with these settings")
        except UsageError:
            raise
        except Exception as error:  # anything that a method raises for settings that it did not expect
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"{self.name} cannot be built with the server's settings: {what}") from None
        return method


def short_name(name: str) -> str:
    """The name of a method in messages: for a class in a file, the name of the class."""
    return name.rpartition(":")[2]


def read_spec(text: str) -> dict[str, Any]:
    """Read a method's settings from JSON. Raises `UsageError` for anything but a small table of bounded values."""
    if len(text) > LONGEST_SPEC:
        raise UsageError(f"the method's settings must be at most {LONGEST_SPEC} characters")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("the method's settings are not valid JSON") from None
    if not isinstance(given, dict) or len(given) > MOST_SETTINGS:
        raise UsageError(f"the method's settings must be a table with at most {MOST_SETTINGS} entries")
    for name, value in given.items():
        if len(name) > 64 or not _plain(value, DEEPEST_SPEC):
            raise UsageError("a method's setting must be a short word, true or false, or a number from 1e-12 to 1e9")
    return given


def _plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is a bounded number, a bool, a short word or None.

    With a `depth`, it may also be a list of such values, or a table of values of one depth less.
    A table that names a method names one of normec's, because the server must not choose which file a party loads.
    """
    if depth and isinstance(value, list):
        return all(_plain(one) for one in value)
    if depth and isinstance(value, dict):
        named = value.get("method", "normec")
        known = isinstance(named, str) and named in registry.BUILT_IN
        return known and all(len(name) <= 64 and _plain(one, depth - 1) for name, one in value.items())
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, str):
        return len(value) <= 64
    return isinstance(value, int | float) and (value == 0 or 1e-12 <= abs(value) <= 1e9)


@dataclass(frozen=True)
class PrivacyTerms:
    """The terms on which ε depends. Without privacy, `noise` is "none" and `sigma` 0. `bound` 0 means no bound.

    `sigma` is the noise of the round. If the noise changes by round, `least_sigma` is the smallest noise of the run.
    """

    noise: str
    sigma: float
    bound: float
    delta: float
    unit: str
    relation: str
    trust: str
    memory: str
    least_sigma: float | None = None

    @staticmethod
    def of(privacy: Privacy | None, sigma: float, method: Method) -> PrivacyTerms:
        bound = method.bound
        stated: dict[str, Any] = {"bound": float(bound) if math.isfinite(bound) else 0.0}
        if privacy is None:
            stated |= {"unit": "client", "relation": "zero-out", "trust": "local"}
            return PrivacyTerms(noise="none", sigma=0.0, delta=0.0, memory="clean", **stated)
        decided = privacy.with_noise("secure")  # noise that nobody can repeat, unless the user chose otherwise
        stated |= {name: getattr(decided, name) for name in ("noise", "delta", "unit", "relation", "trust", "memory")}
        return PrivacyTerms(sigma=float(sigma), **stated)

    def scaled(self, ratio: float) -> PrivacyTerms:
        """The terms for a party whose noise is `ratio` times that of the run."""
        least = None if self.least_sigma is None else self.least_sigma * ratio
        return dataclasses.replace(self, sigma=self.sigma * ratio, least_sigma=least)

    def build(self, delta: float, records: RecordTerms | None = None) -> Privacy | None:
        """The statement for the party's own account, at its own `delta`; None for a run without noise."""
        if self.noise == "none":
            return None
        stated: Any = {name: getattr(self, name) for name in ("noise", "unit", "relation", "trust", "memory")}
        if records is not None:
            stated |= records.statement
        return Privacy(sigma=self.sigma, delta=delta, **stated)


@dataclass(frozen=True)
class RecordTerms:
    """How a party bounds what one record adds to its message.

    The party sends Ψ of (1/`divisor`) Σ clip(∇ℓ_r(x)) − g_i. `clip` None is record_clip="auto". The `divisor` is a
    public number that the server states for this party; the party never tells how many records it holds. With
    `batch_rate`, each record is drawn with this probability in each round.
    """

    divisor: float
    by_layer: bool
    clip: float | None = None
    batch_rate: float | None = None

    @staticmethod
    def of(privacy: Privacy, records: float, batch_rate: float | None) -> RecordTerms | None:
        """The terms for a party whose public number of records is `records`; None without a clip per record."""
        if privacy.record_clip is None:
            return None
        clip = None if isinstance(privacy.record_clip, str) else float(privacy.record_clip)
        divisor = float(records) if batch_rate is None else batch_rate * float(records)
        return RecordTerms(divisor, privacy.by_layer, clip, batch_rate)

    def build(self) -> RecordClip:
        """The clip of every record's gradient."""
        return RecordClip("auto" if self.clip is None else self.clip, self.by_layer)

    @property
    def statement(self) -> dict[str, Any]:
        """The clip as a `Privacy` states it."""
        clip = self.build()
        return {"record_clip": clip.size, "record_clip_by": "layer" if clip.by_layer else "record"}


@dataclass(frozen=True)
class LocalTerms:
    """The local steps of a party in a round, under the names of `LocalSteps`."""

    steps: int
    lr: float
    optimizer: str
    momentum: float
    prox: float
    scale: str

    @staticmethod
    def of(local: LocalSteps) -> LocalTerms:
        if local.steps is None:
            raise UsageError(
                "a federation takes local steps, not local epochs: the time that a party takes would show how many "
                "records it holds; give steps"
            )
        numbers = {name: float(getattr(local, name)) for name in ("lr", "momentum", "prox")}
        return LocalTerms(steps=local.steps, optimizer=local.optimizer, scale=local.scale, **numbers)

    def build(self) -> LocalSteps:
        """The local steps. Raises `UsageError` if they are not valid."""
        words: Any = {"optimizer": self.optimizer, "scale": self.scale}
        return LocalSteps(steps=self.steps, lr=self.lr, momentum=self.momentum, prox=self.prox, **words)


@dataclass(frozen=True)
class PlanTerms:
    """What a client's computation and its account depend on beside x.

    `batch_size` 0: full local gradients. `local` None: one gradient in a round. `heaviest`: the largest n·w_i of the
    server's weights, which the noise of a central sum must cover; None if all parties have equal weights. `records`
    None: no clip per record.
    """

    seed: int
    batch_size: int
    rounds: int
    local: LocalTerms | None = None
    heaviest: float | None = None
    records: RecordTerms | None = None
