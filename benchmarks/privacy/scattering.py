"""Features of images that are not learned: the scattering transform, as in Tramèr and Boneh (ICLR 2021).

An image is convolved with Morlet wavelets of `SCALES` scales and `ANGLES` angles; the moduli, and the moduli of the
moduli convolved with wavelets of larger scales, are averaged over windows of 2^SCALES pixels. The filters are those of
Oyallon and Mallat (2015). Every image is transformed and normalised alone, and nothing is fitted to the data, so that a
guarantee for the model on the features covers everything that is learned from the records.

"scattering" normalises the coefficients in groups of channels, as a vector of length one. "root scattering" takes the
square roots of the coefficients, which brings large and small ones closer together, and keeps their `COMPONENTS` main
components in synthetic images, each divided by the root of its deviation there: gradients get less noise, and no
direction is much longer than another. Its vectors are `LONG` times as long: the gradient of the bias, which is as long
as that of the weights if features have length one, is then a small part of a record's gradient, so that clipping leaves
more of the rest. "mirrored scattering", for photographs, first scales each channel by its mean and deviation in
synthetic images, and then averages the features of an image and of its mirror image: a model need not learn both from
noisy gradients.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from normec import Problem
from normec.errors import one_of
from normec.models import Softmax
from normec.problems.client_data import Records

SCALES, ANGLES, GROUPS = 2, 8, 27
COMPONENTS, LONG = 1000, 5.0  # of root features
SYNTHETIC = 4000  # images whose statistics scale the channels of mirrored features
_AT_ONCE = 500  # images that are transformed together
_CACHED = 4  # sets of features that are kept: training and test images are the same for several seeds
_KINDS = ("scattering", "root scattering", "mirrored scattering")
Transform = Callable[[Tensor], Tensor]


def scattering(images: Tensor) -> Tensor:
    """The scattering coefficients ``[N, 81 · C, H / 4, W / 4]`` of images ``[N, C, H, W]``."""
    height, width = images.shape[2:]
    bank = _filters(_padded(height), _padded(width), images.device)
    found = [bank.apply(part, height, width) for part in images.float().split(_AT_ONCE)]
    return torch.cat(found)


def features(images: Tensor) -> Tensor:
    """The scattering coefficients of each image, normalised in groups of channels, as one vector, at most one long."""
    return _vectors(F.group_norm(scattering(images), GROUPS))


def root_features(images: Tensor, transform: Transform) -> Tensor:
    """The main components of the square roots of each image's coefficients, as a vector of length `LONG`.

    Args:
        images: Images ``[N, C, H, W]`` after `transform`.
        transform: Applied to synthetic images with values between 0 and 1, from which the components follow.
    """
    key = f"{transform} {tuple(images.shape[1:])} {images.device}"
    if key not in _components:
        _, channels, *size = images.shape
        synthetic = synthetic_images(2 * COMPONENTS, channels, max(size))[..., : size[0], : size[1]]
        roots = _roots(transform(synthetic.to(images.device)))
        mean = roots.mean(0)
        values, vectors = torch.linalg.eigh((roots - mean) @ (roots - mean).T)  # of a Gram matrix, the largest last
        values, vectors = values[-COMPONENTS:], vectors[:, -COMPONENTS:]
        _components[key] = mean, (roots - mean).T @ (vectors / values**0.75)
    mean, components = _components[key]
    found = torch.cat([(_roots(part) - mean) @ components for part in images.split(_AT_ONCE)])
    return F.normalize(found) * LONG


def _roots(images: Tensor) -> Tensor:
    found = scattering(images)
    return _vectors(F.group_norm(found.sign() * found.abs().sqrt(), GROUPS))


def mirrored_features(images: Tensor, transform: Transform) -> Tensor:
    """The mean of the scaled coefficients of each image and its mirror image, as one normalised vector.

    Args:
        images: Images ``[N, C, H, W]`` after `transform`.
        transform: Applied to synthetic images with values between 0 and 1 before their statistics are taken.
    """
    _, channels, *size = images.shape
    synthetic = synthetic_images(SYNTHETIC, channels, max(size))[..., : size[0], : size[1]].to(images.device)
    deviation, mean = torch.std_mean(scattering(transform(synthetic)), (0, 2, 3), keepdim=True)
    found = []
    for part in images.split(_AT_ONCE):
        both = (scattering(part) + scattering(part.flip(-1))) / 2
        found.append(_vectors(F.group_norm((both - mean) / deviation, 1)))
    return torch.cat(found)


def synthetic_images(count: int, channels: int, side: int) -> Tensor:
    """Random images ``[count, channels, side, side]`` with values between 0 and 1, the same in every call.

    Their amplitudes fall with the frequency f like 1/f, as in photographs (Field 1987); the channels mostly agree, and
    the contrast differs from image to image.
    """
    draw, tile = torch.Generator().manual_seed(1), 2 * side  # a part of a tile is not periodic
    frequency = torch.fft.fftfreq(tile)
    radius = (frequency[:, None] ** 2 + frequency**2).sqrt()
    radius[0, 0] = math.inf
    spectrum = torch.fft.fft2(torch.randn(count, 1 + channels, tile, tile, generator=draw)) / radius
    waves: Tensor = torch.fft.ifft2(spectrum).real[..., :side, :side]
    waves = waves / waves.std((0, 2, 3), keepdim=True)
    contrast = 0.22 * torch.exp(0.4 * torch.randn(count, 1, 1, 1, generator=draw))
    return (0.47 + contrast * (waves[:, :1] + 0.25 * waves[:, 1:])).clamp(0, 1)


def _vectors(normalised: Tensor) -> Tensor:
    flat = normalised.flatten(1)
    return flat / math.sqrt(flat.shape[1])


_components: dict[str, tuple[Tensor, Tensor]] = {}  # the mean of synthetic images, and their main components
_cache: dict[str, Tensor] = {}


def _digest(images: Tensor) -> str:
    return hashlib.sha256(images.cpu().contiguous().numpy().tobytes()).hexdigest()


def with_features(problem: Problem, kind: str = "scattering") -> Problem:
    """The problem of a softmax regression on the features of a problem with images.

    Args:
        problem: A problem whose transform scales images.
        kind: "scattering", "root scattering" or "mirrored scattering".
    """
    one_of(_KINDS, features=kind)
    transform = problem.transform if problem.transform is not None else torch.Tensor.float
    kinds = features, partial(root_features, transform=transform), partial(mirrored_features, transform=transform)
    by_kind: dict[str, Transform] = dict(zip(_KINDS, kinds, strict=True))
    computed = by_kind[kind]

    def pairs(records: Records) -> tuple[TensorDataset, list[int]]:
        held = [records.batch(client, None) for client in range(len(records.sizes))]
        images = torch.cat([inputs for inputs, _ in held])
        targets = torch.cat([targets for _, targets in held])
        key = f"{kind} {transform} {images.shape} {images.device} {_digest(images)}"
        if key not in _cache:
            if len(_cache) >= _CACHED:
                _cache.pop(next(iter(_cache)))
            _cache[key] = computed(transform(images))
        return TensorDataset(_cache[key], targets), records.sizes.tolist()

    found, sizes = pairs(problem.records)
    test, validation = (pairs(one)[0] if one is not None else None for one in (problem.test, problem.validation))
    inputs, targets = found.tensors
    model = Softmax(inputs.shape[1], 1 + int(targets.max())).to(inputs.device)
    clients = [Subset(found, rows) for rows in torch.arange(len(targets)).split(sizes)]
    return Problem(model, F.cross_entropy, clients, test=test, validation=validation).to(inputs.device)


def _padded(side: int) -> int:
    """The side of an image with half a window of its reflection around it, a multiple of the window."""
    window = int(2**SCALES)
    return ((side + window) // window + 1) * window


@cache
def _filters(height: int, width: int, device: torch.device) -> _Filters:
    return _Filters(height, width, device)


class _Filters:
    """Wavelets and the averaging window for one size of images, by their Fourier transforms."""

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        size = height, width
        self.size = size
        self.wavelets = [
            [
                _spectrum(_morlet(size, 0.8 * 2**scale, math.pi * angle / ANGLES, 0.75 * math.pi / 2**scale))
                for angle in range(ANGLES)
            ]
            for scale in range(SCALES)
        ]
        self.wavelets = [[one.to(device) for one in row] for row in self.wavelets]
        self.window = _spectrum(_gabor(size, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0)).to(device)

    def apply(self, images: Tensor, height: int, width: int) -> Tensor:
        """The coefficients of images ``[N, C, height, width]``."""
        tall, wide = self.size
        top, left = (tall - height) // 2, (wide - width) // 2
        padded = F.pad(images, (left, wide - width - left, top, tall - height - top), mode="reflect")
        spectrum = torch.fft.fft2(padded)
        paths = [self._mean(spectrum, 0)]
        second = []
        for scale, row in enumerate(self.wavelets):
            for wavelet in row:
                modulus = torch.fft.fft2(_smaller(spectrum * wavelet, scale))
                paths.append(self._mean(modulus, scale))
                for larger in range(scale + 1, SCALES):
                    for other in self.wavelets[larger]:
                        again = _smaller(modulus * _folded(other, scale), larger - scale)
                        second.append(self._mean(torch.fft.fft2(again), larger))
        step = 2**SCALES
        top, left = top // step, left // step
        found = torch.stack([*paths, *second], 2)
        return found[..., top : top + height // step, left : left + width // step].flatten(1, 2)

    def _mean(self, spectrum: Tensor, scale: int) -> Tensor:
        """The average over windows of a signal that was made smaller by 2^scale."""
        smooth: Tensor = torch.fft.ifft2(_folded(spectrum * _folded(self.window, scale), SCALES - scale, mean=True))
        return smooth.real


def _smaller(spectrum: Tensor, scale: int) -> Tensor:
    """The modulus of a signal, of which every 2^scale-th value is kept."""
    signal: Tensor = torch.fft.ifft2(_folded(spectrum, scale, mean=True))
    return signal.abs()


def _folded(spectrum: Tensor, scale: int, mean: bool = False) -> Tensor:
    """The spectrum of every 2^scale-th value (mean), or that of a filter for signals that were made so much smaller."""
    if scale == 0:
        return spectrum
    step = 2**scale
    height, width = spectrum.shape[-2] // step, spectrum.shape[-1] // step
    blocks = [
        spectrum[..., row * height : (row + 1) * height, column * width : (column + 1) * width]
        for row in range(step)
        for column in range(step)
    ]
    total = sum(blocks[1:], blocks[0])  # many times as fast as a sum over two dimensions of a view
    return total / step**2 if mean else total


def _spectrum(kernel: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.fft2(kernel)
    return spectrum.real.float()


def _gabor(size: tuple[int, int], width: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A Gaussian window of that width, its axis turned by `angle`, times a wave; periodic in both directions."""
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    curve = turn @ torch.diag(torch.tensor([1.0, slant**2], dtype=torch.float64)) @ turn.T / (2 * width**2)
    total = torch.zeros(size, dtype=torch.complex128)
    for down in range(-2, 3):
        for right in range(-2, 3):
            y, x = torch.meshgrid(
                torch.arange(size[0], dtype=torch.float64) + down * size[0],
                torch.arange(size[1], dtype=torch.float64) + right * size[1],
                indexing="ij",
            )
            fall = curve[0, 0] * y * y + 2 * curve[0, 1] * x * y + curve[1, 1] * x * x
            wave = frequency * (y * math.cos(angle) + x * math.sin(angle))
            total += torch.exp(torch.complex(-fall, wave))
    return total * slant / (2 * math.pi * width**2)


def _morlet(size: tuple[int, int], width: float, angle: float, frequency: float) -> Tensor:
    """A Gabor wavelet whose mean is made zero by subtracting a multiple of its window."""
    slant = 4.0 / ANGLES
    wave, window = _gabor(size, width, angle, frequency, slant), _gabor(size, width, angle, 0.0, slant)
    return wave - wave.sum() / window.sum() * window
