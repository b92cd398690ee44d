"""What a request says of the run: its method, its privacy and its plan, as plain numbers and words.

A party trusts none of it. It builds the method anew, so that the bound of a message is the bound of the operator
that the party itself applies; noise, unit and trust are held against its own policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...algorithms.methods import CLIENT_STEPS, Method, overridden
from ...algorithms.operators import Clip, Identity, Operator, RandK, SmoothedNorm, TopK
from ...errors import UsageError
from ...privacy.statement import Privacy

# The methods that travel, and the operators each may have; another name would say nothing to a party's policy.
METHODS: dict[str, tuple[str, ...]] = {
    "normec": ("SmoothedNorm",),
    "clip21": ("Clip",),
    "ef21": ("TopK", "RandK"),
    "dpsgd": ("SmoothedNorm", "Clip"),
    "gd": ("Identity",),
}
OPERATORS = (SmoothedNorm, Clip, TopK, RandK, Identity)  # exactly these: a subclass is another operator
NOISES = ("none", "seeded", "secure", "exact")
LATER = (
    "trust='secure-sum' over a network is a later piece of work: the server would still see each message; "
    "use trust='local', or 'central' where the server is trusted"
)


@dataclass(frozen=True)
class MethodTerms:
    """A method by its numbers, less the server's momentum, which is no party's business.

    `parameter`: alpha, tau or k; 0 for the identity.
    """

    name: str
    operator: str
    parameter: float
    beta: float
    feedback: bool
    server_norm: bool
    decay: float

    @staticmethod
    def of(method: Method) -> MethodTerms:
        changed = overridden(method, "client_step", *CLIENT_STEPS)
        if changed:
            raise UsageError(
                f"{type(method).__name__} overrides {changed[0]}, which a federation cannot describe to its parties: "
                "they would run the base method; use one of normec's methods"
            )
        operator = method.operator
        if type(operator) not in OPERATORS:
            raise UsageError(
                f"a federation cannot describe the operator {operator} to its parties; "
                f"use {', '.join(kind.__name__ for kind in OPERATORS)}"
            )
        match operator:
            case SmoothedNorm(alpha):
                parameter = alpha
            case Clip(tau):
                parameter = tau
            case TopK(k) | RandK(k):
                parameter = float(k)
            case _:
                parameter = 0.0
        terms = MethodTerms(
            name=method.name,
            operator=type(operator).__name__,
            parameter=float(parameter),
            beta=float(method.beta),
            feedback=method.feedback,
            server_norm=method.server_norm,
            decay=float(method.decay),
        )
        terms.build()
        return terms

    def build(self) -> Method:
        """The method; raises `UsageError` where the numbers make none."""
        if self.operator not in METHODS.get(self.name, ()):
            raise UsageError(f"unknown method; a federation has {', '.join(METHODS)}, each with its own operator")
        operator: Operator
        match self.operator:
            case "SmoothedNorm":
                operator = SmoothedNorm(self.parameter)
            case "Clip":
                operator = Clip(self.parameter)
            case "Identity":
                operator = Identity()
            case _:
                if not self.parameter.is_integer():
                    raise UsageError("k must be a whole number")
                operator = (TopK if self.operator == "TopK" else RandK)(int(self.parameter))
        return Method(self.name, operator, self.beta, self.feedback, self.server_norm, self.decay)


@dataclass(frozen=True)
class PrivacyTerms:
    """What ε depends on. `noise="none"` is a run without privacy: `sigma` is then 0. `bound` 0 means there is none."""

    noise: str
    sigma: float
    bound: float
    delta: float
    unit: str
    relation: str
    trust: str
    memory: str

    @staticmethod
    def of(privacy: Privacy | None, sigma: float, method: Method) -> PrivacyTerms:
        bound = method.operator.bound
        stated: dict[str, Any] = {"bound": float(bound) if math.isfinite(bound) else 0.0}
        if privacy is None:
            names = ("unit", "relation", "trust", "memory")
            stated |= {name: Privacy.__dataclass_fields__[name].default for name in names}
            return PrivacyTerms(noise="none", sigma=0.0, delta=0.0, **stated)
        decided = privacy.with_noise("secure")  # real parties: noise that nobody can repeat, unless it was asked for
        stated |= {name: getattr(decided, name) for name in ("noise", "delta", "unit", "relation", "trust", "memory")}
        return PrivacyTerms(sigma=float(sigma), **stated)

    def build(self, delta: float) -> Privacy | None:
        """The statement a party holds its own account by, at its own `delta`; None for a run without noise."""
        if self.noise == "none":
            return None
        stated: Any = {name: getattr(self, name) for name in ("noise", "unit", "relation", "trust", "memory")}
        return Privacy(sigma=self.sigma, delta=delta, **stated)


@dataclass(frozen=True)
class PlanTerms:
    """What a client's computation depends on beside x. `batch_size` 0: full local gradients."""

    seed: int
    batch_size: int
    rounds: int
