"""Sources of noise, and its addition to messages.

| source | for | reproducible | safe against floating-point attacks |
| --- | --- | --- | --- |
| `SeededNoise(seed)` | simulations | yes: same seed, same path, same device kind → same noise | no |
| `SecureNoise()` | deployments | never | yes: exact rounded Gaussians on a grid (`keystream`, `rounding_grid`) |
| `ExactNoise()` | deployments, small models | never | yes: OpenDP's discrete Gaussian on the same grid |

`path` identifies a draw, e.g. ("round", 7, "client", 3). A seeded source uses (seed, path) as the key of each draw, so
that the noise of a round does not depend on earlier draws; the caller must use each path once. The other sources ignore
it.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, at_least, needed, one_of, positive
from .keystream import Keystream, rounded_gaussians
from .rounding_grid import from_grid, grid_step, snap

Shape = int | tuple[int, ...] | torch.Size


class NoiseSource(Protocol):
    """A source of independent Gaussians with standard deviation `sigma` per coordinate."""

    def draw(
        self,
        shape: Shape,
        sigma: float,
        *path: int | str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor: ...


class SeededNoise:
    """Reproducible noise for simulations.

    torch's CPU generator keeps 32 bits of its seed: of 42,000 hashed seeds two would agree with probability 0.2,
    and two rounds would share their noise. So CPU draws come from NumPy's PCG64DXSM under a 128-bit key; CUDA's
    Philox takes 64 bits.

    Args:
        seed: The seed.

    Raises:
        UsageError: The seed is negative.

    Example:
        >>> source = SeededNoise(7)
        >>> torch.equal(source.draw(3, 1.0, "round", 0), source.draw(3, 1.0, "round", 0))
        True
    """

    def __init__(self, seed: int) -> None:
        at_least(0, seed=seed)
        self.seed = seed

    def draw(
        self,
        shape: Shape,
        sigma: float,
        *path: int | str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        positive(sigma=sigma)
        if not path:
            raise UsageError("seeded noise needs a path, e.g. ('round', 7): two draws with one path are the same noise")
        size = _size(shape)
        digest = hashlib.sha256(json.dumps([self.seed, *path]).encode()).digest()
        if torch.device(device).type == "cpu":
            generator = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(digest, "little")))
            wide = np.float64 if dtype == torch.float64 else np.float32
            return (torch.from_numpy(generator.standard_normal(size, dtype=wide)) * sigma).to(dtype)
        keyed = torch.Generator(device=device)
        keyed.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(size, generator=keyed, device=device, dtype=dtype) * sigma


class GridNoise:
    """Noise that is added as integers on the grid; the base of `SecureNoise` and `ExactNoise`."""

    def integers(self, count: int, scale: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        """`count` independent integers of standard deviation `scale`."""
        raise NotImplementedError

    def draw(
        self,
        shape: Shape,
        sigma: float,
        *path: int | str,  # noqa: ARG002  (fresh noise needs no path)
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Noise on the grid of `sigma`; to release a message use `privatise`, which also rounds the message."""
        size, step = _size(shape), grid_step(sigma)
        integers = torch.from_numpy(self.integers(math.prod(size), sigma / step)).reshape(size)
        return (integers.to(torch.float64) * step).to(device, dtype)

    def __reduce__(self) -> NoReturn:
        raise TypeError("secure noise cannot be copied or saved: a copy would draw the same noise twice")


class SecureNoise(GridNoise):
    """Exact rounded Gaussians from a keystream keyed by the operating system; it cannot be seeded.

    Example:
        >>> SecureNoise().draw(3, sigma=1.0).shape
        torch.Size([3])
    """

    def __init__(self) -> None:
        self._stream = Keystream()

    def integers(self, count: int, scale: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        return rounded_gaussians(self._stream, count, scale)


class ExactNoise(GridNoise):
    """OpenDP's discrete Gaussian: exact by proof and by a second library, at some 30 µs a coordinate.

    Raises:
        UsageError: OpenDP is not installed.

    Example:
        >>> ExactNoise().draw(3, sigma=1.0).shape
        torch.Size([3])
    """

    def __init__(self) -> None:
        self._opendp = needed("opendp.prelude", "exact-noise")
        self._opendp.enable_features("contrib")

    def integers(self, count: int, scale: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        dp = self._opendp
        space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
        return np.asarray(dp.m.make_gaussian(*space, scale=scale)([0] * count), dtype=np.int64).reshape(count)


def noise_source(kind: str, seed: int | None = None) -> NoiseSource:
    """The source that `Privacy.noise` names.

    Args:
        kind: "seeded", "secure" or "exact".
        seed: The seed of seeded noise; None for the others.

    Returns:
        The source.

    Raises:
        UsageError: The kind is unknown, seeded noise has no seed, or another kind has one.

    Example:
        >>> noise_source("seeded", seed=7).seed
        7
    """
    one_of(("seeded", "secure", "exact"), noise=kind)
    if kind == "seeded":
        if seed is None:
            raise UsageError("noise='seeded' needs a seed")
        return SeededNoise(seed)
    if seed is not None:
        raise UsageError(f"noise={kind!r} takes no seed: it is never repeatable")
    return SecureNoise() if kind == "secure" else ExactNoise()


def privatise(message: Tensor, sigma: float, source: NoiseSource, *path: int | str, bound: float) -> Tensor:
    """What is sent in place of a message: each row within `bound`, plus noise of `sigma` per coordinate.

    Formal guarantee: a Gaussian release of multiplier σ/Δ with Δ from `rules`. On the grid this holds bit for bit
    (`rounding_grid`).

    Args:
        message: The message, or rows of messages, ``[..., d]``.
        sigma: The standard deviation of the noise, per coordinate.
        source: The source of the noise.
        path: The path of the draw, such as ``"round", 7``; only seeded noise uses it. Two draws with the same path are
            the same noise.
        bound: The largest norm of a message; longer ones are scaled down.

    Returns:
        The noisy message or messages, in the same form.

    Raises:
        UsageError: A message is not finite, or `sigma` or `bound` is not positive.

    Example:
        >>> sent = privatise(torch.zeros(4), 0.5, SeededNoise(7), "round", 0, bound=1.0)
        >>> sent.shape
        torch.Size([4])
    """
    positive(sigma=sigma)
    if isinstance(source, GridNoise):
        step = grid_step(sigma)
        integers = snap(message, step, bound)
        noise = torch.from_numpy(source.integers(integers.numel(), sigma / step)).reshape(integers.shape)
        return from_grid(integers + noise, step, message)
    inside = _into_ball(message, bound)
    return inside + source.draw(inside.shape, sigma, *path, device=inside.device, dtype=inside.dtype)


def privatise_sum(messages: Tensor, sigma: float, source: NoiseSource, *path: int | str, bound: float) -> Tensor:
    """The noisy sum of messages, each within `bound`, with one draw of `sigma` per coordinate.

    n independent Gaussians of which only the sum is seen are one of variance nσ²: pass `Release.sum_sigma`.

    Args:
        messages: The messages, ``[n, d]``.
        sigma: The standard deviation of the noise, per coordinate.
        source: The source of the noise.
        path: The path of the draw, such as ``"round", 7``; only seeded noise uses it. Two draws with the same path are
            the same noise.
        bound: The largest norm of a message; longer ones are scaled down.

    Returns:
        The noisy sum, ``[d]``.

    Raises:
        UsageError: A message is not finite, or `sigma` or `bound` is not positive.

    Example:
        >>> total = privatise_sum(torch.ones(3, 4), 1e-6, SeededNoise(7), "round", 0, bound=1.0)
        >>> total.round(decimals=3)
        tensor([1.5000, 1.5000, 1.5000, 1.5000])
    """
    positive(sigma=sigma)
    if isinstance(source, GridNoise):
        step = grid_step(sigma)
        integers = snap(messages, step, bound).sum(dim=0)
        noise = torch.from_numpy(source.integers(integers.numel(), sigma / step)).reshape(integers.shape)
        return from_grid(integers + noise, step, messages)
    total = _into_ball(messages, bound).sum(dim=0)
    return total + source.draw(total.shape, sigma, *path, device=total.device, dtype=total.dtype)


def _size(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _into_ball(message: Tensor, bound: float) -> Tensor:
    if not bound > 0:
        raise UsageError(f"bound must be > 0, got {bound}")
    if not bool(torch.isfinite(message).all()):
        raise UsageError("a message with NaN or infinite entries is not sent; a smaller lr may cure it")
    if math.isinf(bound):
        return message
    norm = torch.linalg.vector_norm(message, dim=-1, keepdim=True, dtype=torch.float64)  # a long sum loses in float32
    return torch.where(norm > bound, message * (bound / norm).to(message.dtype), message)
