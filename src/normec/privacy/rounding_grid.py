"""The grid to which deployed messages are rounded, so that their last bits reveal nothing.

Floating-point addition of noise leaks, because the set of possible values of m + z depends on m (Mironov 2012). Here a
message is rounded to integer multiples of a power of two, `step` in (2^-31 σ, 2^-30 σ], and integers are added to
integers.

Claim 1 (lengths). Each coordinate is rounded toward zero, so ‖snap(m)‖ <= ‖m‖; m is first scaled into the ball of
the bound, with a margin for the rounding of the norm. Hence snapped messages have the same bound b, and Δ = b
(zero-out) or 2b (replace) hold for the message that is really sent, in any dimension.
Claim 2 (distances). Where Δ depends on ‖m − m'‖ (records), scaling into the ball is a projection and does not
increase it, and rounding moves each message by less than step in each coordinate, both in the direction of zero:
‖snap(m) − snap(m')‖ < ‖m − m'‖ + step·√d. The rules add this surcharge, 2^-30·√d·σ, to Δ: 3e-5 of σ for a million
coordinates. The client's memory is updated with the message before rounding.
Claim 3 (noise). With m on the grid, m + round(z) = round(m + z): the output is a function of m + z with z an exact
Gaussian, so its guarantee is that of the Gaussian. `SecureNoise` draws round(z) with exact probabilities.
Claim 4 (sums). Σ round(z_i) over h clients is not round(Σ z_i), but a random function of m + N(0, hσ²) that does not
depend on m, up to a relative error of order h·exp(−π² (σ/step)²), that is exp(−10^18). The proof is in
docs/concepts/secure-sum-account.md. Secure sums have a coarser grid of their own (`secure_sum`).
Claim 5 (discrete Gaussians). With s = σ/step, `ExactNoise` draws x with a probability proportional to exp(−x²/2s²). Let
v be N(0, s² − 16), and given v, x an integer with a probability proportional to exp(−(x − v)²/32). The normaliser is
the same for all v up to a factor of 1 ± 2.1·exp(−32π²) (Poisson summation), so x has the probabilities of `ExactNoise`
up to the square of that factor, 1 ± 10^-136. Hence `ExactNoise` is a random function of a Gaussian with variance
s² − 16. At s >= 2^30 this lowers σ by less than 2^-56 of it, which is below the rounding of a double.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import UsageError, positive
from .grid_account import GRID_BITS

_LARGEST = 2**52


def grid_step(sigma: float) -> float:
    """The power of two in (2^-31 σ, 2^-30 σ]."""
    positive(sigma=sigma)
    exponent = math.frexp(sigma)[1]  # σ = m·2^exponent with m in [1/2, 1)
    if not -900 < exponent < 900:
        raise UsageError(f"sigma must lie between 1e-270 and 1e270 on the grid, got {sigma}")
    return math.ldexp(1.0, exponent - 1 - GRID_BITS)


def snap(message: Tensor, step: float, bound: float) -> Tensor:
    """Integers k with k·step near `message` [..., d], rounded toward zero, each row of norm at most `bound`.

    The norm is guaranteed in exact arithmetic: the computed norm of d doubles is off by a factor of at most 1 ±
    d·2^-53.
    """
    if not bound > 0:
        raise UsageError(f"bound must be > 0, got {bound}")
    values = message.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise UsageError("a message with NaN or infinite entries is not sent; a smaller lr may cure it")
    if math.isfinite(bound):
        safe = bound * (1 - (values.shape[-1] + 8) * 2.0**-52)
        # Divided by the largest entry, so that squares neither overflow nor underflow.
        peak = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-300)
        norm = torch.linalg.vector_norm(values / peak, dim=-1, keepdim=True) * peak
        values = torch.where(norm > safe, values * (safe / norm), values)
    scaled = values / step
    if scaled.numel() and float(scaled.abs().max()) >= _LARGEST:
        raise UsageError(
            f"sigma is below 2^-{52 - GRID_BITS} of the message's size {bound:g}: no meaningful privacy; raise sigma"
        )
    return scaled.trunc().to(torch.int64)


def from_grid(integers: Tensor, step: float, like: Tensor) -> Tensor:
    """Convert noisy integers to the dtype and device of `like`; as post-processing, this costs no privacy."""
    return (integers.to(torch.float64) * step).to(like.device, like.dtype)
