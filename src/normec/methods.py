"""Algorithm 1 of the paper and its relatives, in one scheme.

With memory g_i at client i, estimate ĝ at the server, step size γ and forgetting λ (``decay``):

    client i:  m_i = Ψ(∇f_i(x) − g_i)            the message, without β
               g_i ← (1−λ) g_i + β m_i           the memory
    server:    ĝ ← (1−λ) ĝ + (β/n) Σ m_i         so that ĝ = mean g_i, always
               x ← x − γ ĝ   or   x − γ ĝ/‖ĝ‖    (server normalisation; 0/0 = 0)

Without error feedback g_i = 0 always and ĝ ← p ĝ + (β/n) Σ m_i, with ``momentum`` p at the server. λ = 0 and
p = 0 are the paper. A private client adds its noise to the message on the way out; nothing here knows of it.
Every method is one line of this scheme:

    NormEC(α, β)   Ψ = Norm_α, error feedback, server normalisation (Algorithm 1)
    Clip21(τ)      Ψ = Clip_τ, error feedback, β = 1
    EF21(C)        Ψ = C, a contractive compressor, error feedback, β = 1
    DPSGD(Ψ, β, p) no error feedback: eq. (2), p = 0 there
    GD()           the identity, no error feedback

All steps are pure and work row by row: gradients and memories ``[..., d]``, means ``[d]``.

A subclass may override `message`, `remember`, `idle_step`, `carried` and `server_step`. Every training loop then calls
them; the fused path (`update.scaled`) and recorded rounds (`closing`) serve only methods that keep the scheme's steps.
Under privacy a client's steps that are not this library's see one client at a time (`by_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .errors import UsageError, positive
from .operators import Clip, Identity, Operator, SmoothedNorm, normalise
from .streams import Key


@dataclass(frozen=True)
class Method:
    """A point of the scheme above. Use the constructors below; build one by hand for a new combination."""

    name: str
    operator: Operator
    beta: float = 1.0
    feedback: bool = True
    server_norm: bool = False
    decay: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        positive(beta=self.beta)
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay must lie in [0, 1), got {self.decay}")
        if self.decay and not self.feedback:
            raise UsageError(f"decay needs a memory to forget; {self.name} has no error feedback")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum must lie in [0, 1), got {self.momentum}")
        if self.momentum and self.feedback:
            raise UsageError(f"momentum would part ĝ from the memories' mean; {self.name} has error feedback")

    def __repr__(self) -> str:
        """A dataclass's, less a momentum of 0: runs and noise are known by it, and older ones had no such field."""
        shown = [one.name for one in fields(self) if one.name != "momentum" or self.momentum]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def client_step(self, grad: Tensor, memory: Tensor, key: Key | None = None) -> tuple[Tensor, Tensor]:
        """(∇f_i(x), g_i) → (m_i, new g_i). `key` feeds a random operator; see `RandK`."""
        message = self.message(grad, memory, key)
        return message, self.remember(memory, message)

    def message(self, grad: Tensor, memory: Tensor, key: Key | None = None) -> Tensor:
        """m_i = Ψ(∇f_i(x) − g_i), or Ψ(∇f_i(x)) without error feedback."""
        return self.operator(grad - memory if self.feedback else grad, key)

    def remember(self, memory: Tensor, message: Tensor) -> Tensor:
        """g_i ← (1−λ) g_i + β m_i; a client without error feedback has nothing to remember."""
        return self.idle_step(memory) + self.beta * message if self.feedback else memory

    def idle_step(self, memory: Tensor) -> Tensor:
        """What a client that is not drawn this round does: nothing, but for forgetting, which all do alike."""
        return (1 - self.decay) * memory if self.decay else memory

    def carried(self, estimate: Tensor) -> Tensor:
        """What of ĝ stays in it for the next round."""
        return self.idle_step(estimate) if self.feedback else self.momentum * estimate

    def server_step(self, mean_message: Tensor, estimate: Tensor) -> tuple[Tensor, Tensor]:
        """((1/n) Σ m_i, ĝ) → (direction, new ĝ); then x ← x − γ · direction."""
        step = self.beta * mean_message
        estimate = self.carried(estimate) + step if self.feedback or self.momentum else step
        return (normalise(estimate) if self.server_norm else estimate), estimate


CLIENT_STEPS = ("message", "remember", "idle_step")
SERVER_STEPS = ("server_step", "carried")


def overridden(method: Method, *steps: str) -> list[str]:
    """Those of the named steps that a subclass, or the object itself, defines anew."""
    return [name for name in steps if getattr(getattr(method, name), "__func__", None) is not getattr(Method, name)]


def works_by_rows(method: Method) -> bool:
    """Whether all of a client's steps are this library's, which treat every row of a table alone."""
    return type(method.operator) in (SmoothedNorm, Clip, Identity) and not overridden(method, *CLIENT_STEPS)


def by_rows(step: Callable[..., Tensor], *tables: Tensor) -> Tensor:
    """`step` of tables ``[c, ...]``, shown one row of each at a time: whatever it does, it mixes no clients."""
    rows = zip(*(table.split(1) for table in tables), strict=True)
    return torch.cat([step(*(row.clone() for row in each)) for each in rows])


def refuse_unused_overrides(method: Method) -> None:
    """Refuse an override that no training loop would call.

    Loops call `message` and `remember` one by one, because noise is added between the two.
    """
    if overridden(method, "client_step"):
        raise UsageError(
            f"{type(method).__name__} overrides client_step, which no training loop calls; "
            "override message and remember, of which it is made"
        )


def identity_of(method: Method) -> str:
    """The text that runs, checkpoints and noise know a method by; a subclass is not taken for its base."""
    kinds = [kind for kind in (type(method), type(method.operator)) if kind.__module__.partition(".")[0] != __package__]
    return repr(method) + "".join(f" ({kind.__module__}.{kind.__qualname__})" for kind in kinds)


def NormEC(alpha: float, beta: float, server_norm: bool = True, decay: float = 0.0) -> Method:  # noqa: N802
    """α-NormEC, Algorithm 1; ``server_norm=False`` is the paper's ablation "without SN"."""
    return Method("normec", SmoothedNorm(alpha), beta, server_norm=server_norm, decay=decay)


def Clip21(tau: float, decay: float = 0.0) -> Method:  # noqa: N802
    """Error feedback around clipping (Khirirat et al. 2023), no server normalisation."""
    return Method("clip21", Clip(tau), decay=decay)


def EF21(compressor: Operator) -> Method:  # noqa: N802
    """Error feedback around a contractive compressor (Richtárik et al. 2021)."""
    return Method("ef21", compressor)


def DPSGD(operator: Operator, beta: float = 1.0, momentum: float = 0.0) -> Method:  # noqa: N802
    """Direct normalisation or clipping, eq. (2): x ← x − γ (β/n) Σ Ψ(∇f_i(x)); the bias stays.

    Momentum is PyTorch's: a step of γ goes on as γ p, γ p², …, γ/(1−p) in all. It costs no privacy.
    """
    return Method("dpsgd", operator, beta, feedback=False, momentum=momentum)


def GD() -> Method:  # noqa: N802
    """Distributed gradient descent: the exact mean gradient."""
    return Method("gd", Identity(), feedback=False)
