"""Settings for a problem that has not been tuned: a rule from public sizes and the privacy statement, with its reasons.

The rule sees `PublicFacts` and the statement, and nothing else: no record, gradient or loss. It depends on one number,

    ρ = σ_mean √(d/T) / b,

the norm of the noise in the mean of all messages, divided by the largest norm b of a message: d is the number of
parameters, T the number of rounds, and σ_mean the standard deviation per coordinate of the noise in one round's mean.
At a given ε it does not depend on T.

**The distance.** Let all steps together be D long, towards a model at the distance R. The mean of the messages points
there, and the noise moves x by up to ρD. The squared distance that is left, with weight w² on the noise,
(R − D)² + (wρD)², is smallest for

    D = R / (1 + (wρ)²).

R = r√d: each parameter moves by about r. The step size is D/T, divided by the largest norm of the server's direction.
With normalised steps, r = 1 + 1/(1 + (ρ/0.05)²): a model that little noise disturbs can go further, and where classes
are nearly separable, the best one is far away.

**Records clipped one by one.** Their mean is much shorter than 1, because records disagree, so that the path is longer
than the distance, by more than public sizes tell. PyTorch also draws the first weights of a layer so that those of one
unit have the same norm, however many inputs it has: training moves a wide model about as far as a narrow one, and what
noise does to the outputs depends on the norm ρD of all noise. Let D∞ be the length of the path without noise, and c the
largest norm of the noise. With (D/D∞)² + (ρD/c)² = 1,

    D = D∞ / √(1 + (ρD∞/c)²).

**Normalised steps** (server_norm) have the length lr whatever the noise. With forgetting λ = κ/T, ĝ has noise of the
norm ρ√(κ/2) relative to its signal, so the signal's part of a step is 1/√(1 + κρ²/2), and D is longer by this factor.

**The memory.** ĝ contains noise of the norm βρ√(T/(λ(2−λ))), or with τ in place of β for Clip21. β is as large as this
norm allows, because a memory that cannot grow as large as a gradient repairs no bias; memories grow to M = β/λ at most.
The noise in ĝ has the norm Mρ√(κ/2), so that it is smallest beside a memory of a given size if memories forget
rarely; with κ below 2, they would not be full before the run ends. How much noise is right depends on the size of the
gradients, which no public number tells. With little noise the norm is a compromise: clients that differ need large
memories, and sparse inputs with a rare class, whose gradients are short, need little noise. With much noise memories
hold little anyway, and follow the gradients better if they forget more often. So κ and the norm of the noise in ĝ go
from one value to another as the share ρ²/(ρ² + 0.2²) goes from 0 to 1.

r, w, κ and the norm of the noise in ĝ are fitted to runs on digits, a9a, w8a, phishing, mushrooms, breast_cancer and
wine; D∞ and c to networks with one hidden layer on digits, breast_cancer, wine and a table of made-up patients, and
compared with other values for linear models on the same data.
`python -m benchmarks.suggest` compares the result with tuned runs (docs/results/suggested-settings.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..algorithms.catalogue import CATALOGUE, METHODS, Entry, is_own
from ..errors import UsageError, at_least, one_of
from ..problems.objective import Objective
from .client_weights import Weights, relative_weights
from .named_method import local_steps_of, rounds_of_method

if TYPE_CHECKING:
    from ..privacy.statement import Privacy

ROUNDS = 200  # of a private run
REACH_NORMALISED = 1.0  # r of a method whose steps are normalised, with much noise; twice as much without noise
LITTLE = 0.05  # ρ at which half of this difference is left
REACH = 2.0  # r of the others: the mean of messages of norm 1 is shorter than 1, because clients disagree
NOISE_WEIGHT = 2.0  # w
REACH_RECORDS = 400.0  # D∞
RECORDS_NOISE = 15.0  # c
FORGETTINGS = {"normec": (2.0, 10.0), "clip21": (10.0, 10.0)}  # κ, with little noise and with much
ESTIMATE_NOISE = {"normec": (0.0067, 0.05), "clip21": (0.05, 0.05)}  # the norm of the noise in ĝ, likewise
LONGEST_MEMORY = {"normec": 1.0, "clip21": 0.25}
ALPHA = 0.01
THRESHOLD = 0.1  # of DP-SGD with clipping; values from 0.03 to 0.3 gave similar results
SMALL, LARGE = 0.2, 1.0  # ρ from which noise is noticed, and from which it exceeds the signal
RULED = ("normec", "clip21", "dpsgd-norm", "dpsgd-clip")


@dataclass(frozen=True)
class PublicFacts:
    """Everything that a suggestion knows of a problem: whole numbers that the participants know anyway.

    Args:
        clients: The number of clients.
        dimension: The number of the model's parameters.
        tensor_sizes: The number of parameters in each of the model's tensors (default: one tensor).
        records: How many records each client holds, where records are protected and their numbers are public; None
            otherwise.

    Raises:
        UsageError: A value is not a positive whole number, so that it may be a statistic of the data.

    Example:
        >>> PublicFacts(clients=100, dimension=650).tensor_sizes
        (650,)
        >>> PublicFacts(clients=100, dimension=650.5)
        Traceback (most recent call last):
        ...
        normec.errors.UsageError: dimension must be a whole number >= 1, got 650.5
    """

    clients: int
    dimension: int
    tensor_sizes: tuple[int, ...] = ()
    records: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        at_least(1, clients=self.clients, dimension=self.dimension)
        if not self.tensor_sizes:
            object.__setattr__(self, "tensor_sizes", (self.dimension,))
        for size in self.tensor_sizes:
            at_least(1, tensor_sizes=size)
        if sum(self.tensor_sizes) != self.dimension:
            raise UsageError(f"tensor_sizes must add up to the dimension {self.dimension}, got {self.tensor_sizes}")
        if self.records is None:
            return
        for count in self.records:
            at_least(1, records=count)
        if len(self.records) != self.clients:
            raise UsageError(
                f"records must have one number for each of the {self.clients} clients, got {len(self.records)}"
            )


@dataclass(frozen=True)
class SuggestedSetting:
    """One suggested setting, by its name on the command line, with the reason in a sentence.

    Args:
        name: The name of the setting.
        value: Its value.
        reason: Why it has this value.

    Example:
        >>> SuggestedSetting("rounds", 200, "The guarantee covers the whole run.").name
        'rounds'
    """

    name: str
    value: float | int | bool | str
    reason: str


@dataclass(frozen=True)
class Suggestion:
    """Suggested settings of a run, with their reasons.

    `settings` holds the arguments for `train`, and `values` the same settings under the names of the command line.

    Args:
        method: The name of the method.
        chosen: The settings with their reasons.
        facts: What is known of the problem.
        noise: ρ, the norm of the noise in the mean of all messages relative to the largest message; 0 without noise.
        privacy: The privacy statement of the run; None without noise.
        weights: The weights of the clients, as `train` takes them.
        public_sizes: Whether the clients' numbers of records are public.

    Example:
        >>> from normec import Privacy, suggest
        >>> found = suggest(PublicFacts(clients=100, dimension=650), privacy=Privacy(epsilon=8, trust="secure-sum"))
        >>> found.method, found.values["rounds"], found.values["lr"]
        ('normec', 200, 0.13)
        >>> print(found.chosen[0].reason)
        ε covers the whole run, and more rounds do not add noise to its result. 200 keep each step short.
    """

    method: str
    chosen: tuple[SuggestedSetting, ...]
    facts: PublicFacts
    noise: float
    privacy: Privacy | None = None
    weights: Weights = "equal"
    public_sizes: bool = False

    def __str__(self) -> str:
        """Return the settings with their reasons, a line for each, and how much the noise will hurt."""
        values = [f"{one.value:g}" if isinstance(one.value, float) else str(one.value) for one in self.chosen]
        lines = [f"{one.name} = {value}: {one.reason}" for one, value in zip(self.chosen, values, strict=True)]
        return "\n".join([f"method = {self.method}", *lines, self.outlook])

    @property
    def values(self) -> dict[str, Any]:
        """The suggested settings under their names on the command line."""
        return {one.name: one.value for one in self.chosen}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The arguments for `train`: `train(problem, **suggestion.settings)`; entries can be changed before."""
        entry, values = CATALOGUE[self.method], self.values
        own = {name: values.get(name, usual) for name, usual in entry.defaults(self.privacy is not None).items()}
        return {
            "method": entry.build(own, self.facts.tensor_sizes),
            "lr": values["lr"],
            "rounds": values["rounds"],
            "local": local_steps_of(entry, self.privacy is not None),
            "privacy": self.privacy,
            "weights": self.weights,
            "public_sizes": self.public_sizes,
        }

    @property
    def outlook(self) -> str:
        """How much the noise will hurt, in a sentence."""
        if self.privacy is None:
            return "There is no noise."
        size = f"The noise in the mean of all messages is {self.noise:.2g} times as long as the longest message"
        if self.noise < SMALL:
            return f"{size}: it is small beside what the clients say."
        if self.noise < LARGE:
            return f"{size}: expect to lose accuracy to it."
        return f"{size}: expect little. More clients, a larger ε or a model with fewer parameters would help."

    def to_dict(self) -> dict[str, Any]:
        """Return the suggestion in plain types."""
        return {
            "method": self.method,
            "settings": [dataclasses.asdict(one) for one in self.chosen],
            "noise": self.noise,
            "outlook": self.outlook,
            "facts": dataclasses.asdict(self.facts),
        }


def suggest(
    problem: Objective | PublicFacts,
    method: str | None = None,
    *,
    privacy: Privacy | None = None,
    rounds: int | None = None,
    weights: Weights = "equal",
    public_sizes: bool = False,
) -> Suggestion:
    """Suggest the settings of a run: step size, β or τ, forgetting and rounds, with the reason for each.

    The suggestion depends only on public sizes: the number of clients, the sizes of the model's tensors, and the
    privacy statement; where records are protected, also on how many records each client holds. No record is read, so
    that following the suggestion costs no privacy. Tuning on the protected data would.

    Every client takes part in every round with all of its records. At a given ε, sampling clients takes about as
    much from the signal as from the noise, and small batches add noise of their own; both only save computation.

    Args:
        problem: What will be minimised, of which only the sizes are used; or the sizes themselves, as `PublicFacts`.
        method: The name of a method (default: "normec", or "dpsgd-clip" where records are protected).
        privacy: The privacy statement; None for a run without noise, which gets the usual settings of the method.
        rounds: The number of rounds, if it is fixed (default: suggested).
        weights: The weights of the clients, as for `train`.
        public_sizes: Declare public how many records each client holds, as for `train`.

    Returns:
        The suggestion. `train(problem, **suggestion.settings)` follows it.

    Raises:
        UsageError: There is no such method, no rule for it, or no privacy rule for the statement.

    Example:
        >>> from normec import Privacy
        >>> sizes = PublicFacts(clients=1000, dimension=650)
        >>> suggest(sizes, "dpsgd-clip", privacy=Privacy(epsilon=2, trust="secure-sum"), rounds=100).values
        {'rounds': 100, 'tau': 0.1, 'lr': 5.0}
    """
    if privacy is not None and not hasattr(privacy, "with_noise"):
        raise UsageError(f"privacy must be a normec.Privacy, such as Privacy(epsilon=8), got {privacy!r}")
    by_record = privacy is not None and privacy.unit == "record"
    name = method if method is not None else "dpsgd-clip" if by_record else "normec"
    if not isinstance(name, str):
        raise UsageError(
            f"method must be the name of a method, such as 'normec', got an object {type(name).__name__}; give a "
            "method by its name alone, and the privacy statement as privacy=…"
        )
    if is_own(name):
        raise UsageError(f"no rule is known for a method of your own, {name}; choose its settings on public data")
    one_of(METHODS, method=name)
    if rounds is not None:
        at_least(1, rounds=rounds)
    if privacy is None:
        return _without_noise(name, public_facts(problem), rounds, weights, public_sizes)
    _refuse_uncovered(name, privacy)
    privacy = privacy.with_record_clip("auto")
    facts = public_facts(problem, records=by_record)
    factors = None
    if not isinstance(problem, PublicFacts):
        factors = relative_weights(weights, problem, privacy, public_sizes)
    elif weights != "equal":
        raise UsageError("weights need a problem; give the problem, or leave out the weights")
    relative = tuple(factors.tolist()) if factors is not None else ()
    total = ROUNDS if rounds is None else rounds
    noise = _noise(name, facts, privacy, total, relative)
    chosen = tuple(_settings(name, facts, privacy, noise, total, given=rounds is not None))
    return Suggestion(name, chosen, facts, noise, privacy, weights, public_sizes)


def public_facts(problem: Objective | PublicFacts, records: bool = False) -> PublicFacts:
    """Return the public sizes of a problem; `records` adds how many records each client holds."""
    if isinstance(problem, PublicFacts):
        if records and problem.records is None:
            raise UsageError("where records are protected, the facts must say how many each client holds; give records")
        return problem
    sizes = tuple(getattr(problem, "tensor_sizes", ()))
    if records and problem.sizes is None:
        raise UsageError("unit='record' needs records; plain functions have none")
    counts = tuple(int(one) for one in problem.sizes) if records and problem.sizes is not None else None
    return PublicFacts(problem.clients, len(problem.x0), sizes, counts)


def _refuse_uncovered(name: str, privacy: Privacy) -> None:
    """Refuse what the rule was not made for."""
    if CATALOGUE[name].private is None:
        raise UsageError(f"{name} sends messages without a bound and has no private run; choose {', '.join(RULED)}")
    if name not in RULED:
        raise UsageError(
            f"there is no rule for the settings of {name} with noise; choose {', '.join(RULED)}, or train {name} with "
            "its usual settings"
        )
    if privacy.unit == "record" and name != "dpsgd-clip":
        raise UsageError(
            f"where records are protected, only dpsgd-clip has a rule, which needs the least noise, got {name}"
        )
    if privacy.sampling is not None:
        raise UsageError("the rule is for runs in which every client takes part; leave out sampling")


def _noise(name: str, facts: PublicFacts, privacy: Privacy, rounds: int, relative: tuple[float, ...]) -> float:
    """Return ρ at constant noise; `relative` holds the numbers n·w_i, and is empty for equal weights."""
    from ..privacy.facts import Setting
    from ..privacy.mechanism import facts_of
    from ..privacy.release import calibrate
    from ..privacy.rules import release

    privacy = dataclasses.replace(privacy, noise_schedule="constant")
    entry = CATALOGUE[name]
    settings = entry.defaults(private=True)
    if privacy.record_bound is not None:
        settings["tau"] = privacy.record_bound
    method = entry.build(settings, facts.tensor_sizes)
    setting = Setting(facts.clients, rounds, records=facts.records, dimension=facts.dimension, weights=relative)
    released = release(facts_of(method), privacy, setting)
    sigma = calibrate(released, privacy).sigma
    if privacy.trust == "local":
        equal = (1.0,) * facts.clients
        factors = zip(released.relative or equal, relative or equal, strict=True)
        of_sum = sigma * math.hypot(*(own * weight for own, weight in factors))
    else:
        of_sum = released.sum_sigma(sigma)
    return of_sum / facts.clients * math.sqrt(facts.dimension / rounds) / float(method.bound)


def distance(dimension: int, noise: float, reach: float, forgettings: float = 0.0) -> float:
    """Return the length D of all steps together.

    Args:
        dimension: The number of parameters, d.
        noise: ρ, the norm of the noise relative to the largest message.
        reach: r, by which each parameter moves about.
        forgettings: κ, if the steps are normalised.

    Example:
        >>> round(distance(650, 0.0, reach=2)), round(distance(650, 0.5, reach=2))
        (51, 25)
        >>> round(distance(650, 0.5, reach=2, forgettings=10))
        38
    """
    length = reach * math.sqrt(dimension) / (1 + (NOISE_WEIGHT * noise) ** 2)
    return length * math.sqrt(1 + forgettings * noise**2 / 2)


def records_distance(noise: float) -> float:
    """Return the length D of all steps together, where records are clipped one by one.

    Args:
        noise: ρ, the norm of the noise relative to the largest message.

    Example:
        >>> round(records_distance(0.0)), round(records_distance(0.1))
        (400, 140)
    """
    return REACH_RECORDS / math.hypot(1, noise * REACH_RECORDS / RECORDS_NOISE)


def between(ends: tuple[float, float], noise: float) -> float:
    """Return a constant of the rule that goes from the first value to the second as the noise ρ grows."""
    share = noise**2 / (noise**2 + SMALL**2)
    return (1 - share) * ends[0] + share * ends[1]


def _settings(
    name: str, facts: PublicFacts, privacy: Privacy, noise: float, rounds: int, given: bool
) -> Iterator[SuggestedSetting]:
    """Yield the settings of a private run, one by one."""
    yield SuggestedSetting("rounds", rounds, _rounds_reason(rounds, given))
    direction = 1.0  # the largest norm of the server's direction
    reach = furthest = REACH
    forgettings = 0.0
    if name in LONGEST_MEMORY:
        decay = _rounded(min(0.5, between(FORGETTINGS[name], noise) / rounds))
        spread = math.sqrt(rounds / (decay * (2 - decay)))  # of noise in ĝ, relative to that of β times a mean message
        step = _rounded(min(LONGEST_MEMORY[name] * decay, between(ESTIMATE_NOISE[name], noise) / (noise * spread)))
        yield SuggestedSetting(
            "decay",
            decay,
            f"Memories forget within {1 / decay:.2g} rounds, so that noise does not pile up in the server's estimate.",
        )
        yield SuggestedSetting(
            "beta" if name == "normec" else "tau",
            step,
            f"Memories grow to {step / decay:.2g} at most, and the noise in the server's estimate has the norm "
            f"{step * noise * spread:.2g}.",
        )
        direction = step / decay
    if name in ("normec", "dpsgd-norm"):
        yield SuggestedSetting("alpha", ALPHA, f"Messages are normalised as long as they are well above {ALPHA:g}.")
    if name == "normec":
        yield SuggestedSetting("server_norm", True, "A step has the length lr, whatever the size of the gradients.")
        direction, reach, forgettings = 1.0, REACH_NORMALISED * (1 + 1 / (1 + (noise / LITTLE) ** 2)), decay * rounds
        furthest = 2 * REACH_NORMALISED
    if name == "dpsgd-clip":
        bound = privacy.record_bound
        direction = THRESHOLD if bound is None else bound
        reason = "The noise scales with it, and so does a step: its exact value matters little."
        if bound is not None:
            reason = "Records are clipped already, so that their mean is never clipped."
        yield SuggestedSetting("tau", direction, reason)
    if privacy.record_bound is not None:
        length, free = records_distance(noise), REACH_RECORDS
        suits = "clipped records, whose mean is much shorter than 1"
    else:
        length, free = distance(facts.dimension, noise, reach, forgettings), distance(facts.dimension, 0.0, furthest)
        suits = f"a model of {facts.dimension} parameters"
    steps = f"All steps together are {_rounded(length):g} long"
    reason = f"{steps}, which suits {suits}."
    if length < 0.9 * free:
        reason = f"{steps}. Without noise they would be {_rounded(free):g}, but noise adds up too."
    yield SuggestedSetting("lr", _rounded(length / rounds / direction), reason)


def _rounds_reason(rounds: int, given: bool) -> str:
    if given:
        return "As given."
    return f"ε covers the whole run, and more rounds do not add noise to its result. {rounds} keep each step short."


def _without_noise(
    name: str, facts: PublicFacts, rounds: int | None, weights: Weights, public_sizes: bool
) -> Suggestion:
    """Return the usual settings of a method."""
    entry: Entry = CATALOGUE[name]
    usual = "The usual value: without noise there is nothing to weigh, and you can tune it at no cost in privacy."
    own = {key: value for key, value in entry.defaults(private=False).items() if value is not None}
    total = rounds if rounds is not None else rounds_of_method(entry, private=False)
    values = {"rounds": total, **own, "lr": entry.step_size(own, private=False)}
    chosen = tuple(
        SuggestedSetting(key, value, "As given." if key == "rounds" and rounds is not None else usual)
        for key, value in values.items()
        if value is not None
    )
    return Suggestion(name, chosen, facts, 0.0, None, weights, public_sizes)


def _rounded(value: float) -> float:
    """Return a value to two significant digits, which are as many as the rule is worth."""
    return float(f"{value:.2g}")
