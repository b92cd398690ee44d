"""The sensitivity at record level: how far one record can move a client's message in round k.

Setting. The client forms G(x) = (1/B) Σ clip_C(∇ℓ_r(x)) with a fixed, public B, keeps a memory g, and sends

    m_k = Ψ(G_k − g_k) + noise,        g_{k+1} = (1−λ) g_k + β Ψ(G_k − g_k),        g_0 public.

Ψ is the gradient of a convex function and L-Lipschitz: smoothed normalisation, ∇(‖v‖ − α ln(1 + ‖v‖/α)), with L =
1/α; clipping, the projection onto a ball, with L = 1. Its values are bounded by b.

Claim. Between neighbours, given the same messages so far (hence the same models x), the mean of round k moves by at
most

    Δ_k = min(2b, L (s + e_k)),    e_0 = 0,    e_{k+1} = (1−λ) e_k + β min(Ls, 2b),

if β L <= 2 (1−λ), with s = C/B for "zero-out" and 2C/B for "replace". For λ = 0 and smoothed normalisation this is
(s/α)(1 + kβ/α), and the condition is β <= 2α.

Proof. ‖G_k − G'_k‖ <= s at every x. Write e_k for the distance of the two memories.
Message: Ψ is L-Lipschitz and bounded, so ‖m_k − m'_k‖ <= min(2b, L‖(G_k − g_k) − (G'_k − g'_k)‖) <= min(2b, L(s +
e_k)). Memory: pass through h = (1−λ) g'_k + β Ψ(G_k − g'_k).
 ‖g_{k+1} − h‖ = (1−λ) ‖(g_k − g'_k) − c (Ψ(G_k − g'_k) − Ψ(G_k − g_k))‖ with c = β/(1−λ). As the gradient of a convex
 L-smooth function Ψ is 1/L-cocoercive (Baillon, Haddad): ⟨u, Ψ(v+u) − Ψ(v)⟩ >= ‖Ψ(v+u) − Ψ(v)‖²/L for u = g_k − g'_k.
 Hence ‖u − c(Ψ(v+u) − Ψ(v))‖² <= ‖u‖² − (2c/L − c²) ‖Ψ(v+u) − Ψ(v)‖² <= ‖u‖² when c L <= 2, and
 ‖g_{k+1} − h‖ <= (1−λ) e_k.
 ‖h − g'_{k+1}‖ = β ‖Ψ(G_k − g'_k) − Ψ(G'_k − g'_k)‖ <= β min(Ls, 2b).  Add the two.  ∎

Where the memory is a function of the messages sent (memory="noisy" seen by the observer) or there is none, e_k = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Sensitivity:
    """Δ_k = min(cap, slope·(shift + e_k)), e_{k+1} = keep·e_k + drift. A constant Δ has an infinite slope."""

    cap: float
    slope: float = math.inf
    shift: float = 1.0
    drift: float = 0.0
    keep: float = 1.0

    @property
    def is_constant(self) -> bool:
        return self.drift == 0 or self.slope * self.shift >= self.cap

    @property
    def by_distance(self) -> bool:
        """Whether Δ depends on the distance of two messages, not on their norms; rounding to a grid then adds to it."""
        return self.slope * self.shift < self.cap

    def at(self, rounds: Floats) -> Floats:
        """Δ_k for an array of round numbers k = 0, 1, …"""
        if not self.by_distance:
            return np.full_like(rounds, self.cap)
        if self.keep < 1:
            memory = self.drift * -np.expm1(rounds * math.log(self.keep)) / (1 - self.keep)
        else:
            memory = self.drift * rounds
        return np.minimum(self.cap, self.slope * (self.shift + memory))
