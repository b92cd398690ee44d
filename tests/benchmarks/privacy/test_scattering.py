"""The scattering transform: what its definition promises, and features that no record but its own changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.privacy import scattering
from normec import Problem, UsageError
from normec.experiments import build
from normec.settings import make


def images(count: int = 3, side: int = 32) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def test_the_first_path_is_the_local_mean() -> None:
    """Against a Gaussian of width 1.6 in space, away from the border."""
    x = images(1, 64)
    found = scattering.scattering(x).view(1, 3, 81, 16, 16)[:, :, 0]
    offsets = torch.arange(-12.0, 13.0)
    kernel = torch.exp(-(offsets**2) / (2 * 1.6**2))
    kernel = kernel / kernel.sum()
    blurred = F.conv2d(x.view(3, 1, 64, 64), kernel.outer(kernel)[None, None], padding=12).view(1, 3, 64, 64)
    assert torch.allclose(found[..., 4:12, 4:12], blurred[..., ::4, ::4][..., 4:12, 4:12], atol=2e-3)


def test_a_flat_image_has_no_waves() -> None:
    found = scattering.scattering(torch.full((1, 1, 32, 32), 0.7)).view(81, 8, 8)
    assert torch.allclose(found[0], torch.tensor(0.7), atol=1e-4)
    assert float(found[1:].abs().max()) < 1e-4


def test_a_wave_is_found_by_the_wavelet_of_its_angle() -> None:
    """A plane wave of the frequency of the finest wavelets along each axis."""
    across = torch.cos(0.75 * math.pi * torch.arange(32.0)).expand(32, 32)
    for image, angle in ((across.T, 0), (across, scattering.ANGLES // 2)):
        found = scattering.scattering(image.reshape(1, 1, 32, 32)).view(81, 8, 8).mean((1, 2))
        assert int(found[1 : 1 + scattering.ANGLES].argmax()) == angle


def test_transposing_an_image_exchanges_the_wavelets_of_the_two_axes() -> None:
    """Up to the border, those of 0° see in the transposed image what those of 90° saw."""
    x = images(1, 64)[:, :1]
    plain, transposed = (scattering.scattering(one).view(81, 16, 16)[:, 4:12, 4:12].mean((1, 2)) for one in (x, x.mT))
    first, other = plain[1:9], transposed[1:9]
    assert torch.allclose(first[0], other[4], rtol=1e-2)
    assert torch.allclose(first[4], other[0], rtol=1e-2)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("side", [28, 32])
def test_features_of_an_image_depend_on_it_alone(side: int) -> None:
    x = images(4, side)
    found = scattering.features(x)
    assert found.shape == (4, 3 * 81 * (side // 4) ** 2)
    assert bool((found.norm(dim=1) <= 1).all())
    alone = torch.cat([scattering.features(one[None]) for one in x])
    assert torch.allclose(found, alone, atol=1e-6)


def identity(x: Tensor) -> Tensor:
    return x


@pytest.mark.slow
def test_mirrored_features_are_those_of_the_mirror_image_and_of_the_image_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scattering, "SYNTHETIC", 20)
    x = images(3)
    found = scattering.mirrored_features(x, identity)
    assert torch.allclose(found.norm(dim=1), torch.ones(3), atol=1e-4)
    assert torch.allclose(found, scattering.mirrored_features(x.flip(-1), identity), atol=1e-6)
    assert not torch.allclose(found, scattering.mirrored_features(x.flip(-2), identity), atol=1e-3)
    alone = torch.cat([scattering.mirrored_features(one[None], identity) for one in x])
    assert torch.allclose(found, alone, atol=1e-6)


def test_root_features_are_main_components_of_synthetic_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a singular value decomposition of the roots, up to the signs of the components."""
    monkeypatch.setattr(scattering, "COMPONENTS", 6)
    monkeypatch.setattr(scattering, "_components", {})
    x = images(4, 28)[:, :1]
    found = scattering.root_features(x, identity)
    assert torch.allclose(found.norm(dim=1), torch.full((4,), scattering.LONG), atol=1e-4)
    alone = torch.cat([scattering.root_features(one[None], identity) for one in x])
    assert torch.allclose(found, alone, atol=1e-3)

    def roots(pictures: Tensor) -> Tensor:
        plain = scattering.scattering(pictures)
        groups = (plain.sign() * plain.abs().sqrt()).view(len(plain), scattering.GROUPS, -1)
        scaled = (groups - groups.mean(2, keepdim=True)) / (groups.var(2, keepdim=True, correction=0) + 1e-5).sqrt()
        return scaled.flatten(1) / math.sqrt(81 * 49)

    held = roots(scattering.synthetic_images(12, 1, 28))
    _, lengths, directions = torch.linalg.svd(held - held.mean(0), full_matrices=False)
    wanted = (roots(x) - held.mean(0)) @ directions[:6].T / lengths[:6].sqrt()
    wanted = scattering.LONG * wanted / wanted.norm(dim=1, keepdim=True)
    assert torch.allclose(found.flip(1).abs(), wanted.abs(), atol=1e-2)


@pytest.mark.slow
def test_channels_have_the_same_scale_in_synthetic_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the features of an image are averaged with those of its mirror image, which reduces some deviations."""
    monkeypatch.setattr(scattering, "SYNTHETIC", 40)
    x = scattering.synthetic_images(40, 3, 32)
    plain = scattering.scattering(x).std((0, 2, 3))
    scaled = scattering.mirrored_features(x, identity).view(40, 243, 64).std((0, 2))
    assert float(plain.max() / plain.min()) > 10
    assert float(scaled.max() / scaled.min()) < 3


@pytest.mark.slow
def test_the_amplitudes_of_synthetic_images_fall_like_one_over_the_frequency() -> None:
    x = scattering.synthetic_images(100, 3, 64)
    assert x.shape == (100, 3, 64, 64)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    assert torch.equal(x, scattering.synthetic_images(100, 3, 64))
    window = torch.hann_window(64, periodic=False)
    waves = (x - x.mean((2, 3), keepdim=True)) * window[:, None] * window
    rows = torch.fft.fft2(waves).abs().mean((0, 1))[0, 4:17]
    frequency = torch.arange(4.0, 17.0).log()
    slope = float(((rows.log() - rows.log().mean()) * (frequency - frequency.mean())).sum() / frequency.var() / 12)
    assert -1.25 < slope < -0.75


def test_other_features_are_refused() -> None:
    problem = build.problem(make({"data": "digits", "clients": 7, "seed": 0}))
    with pytest.raises(
        UsageError, match="unknown features 'sift'; choose from scattering, root scattering, mirrored scattering"
    ):
        scattering.with_features(problem, "sift")


@pytest.mark.slow
def test_a_problem_of_features_keeps_clients_and_labels() -> None:
    config = make({"data": "digits", "clients": 7, "validation": 0.2, "seed": 0})
    plain = build.problem(config)
    pictures = Problem(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        F.cross_entropy,
        [
            torch.utils.data.TensorDataset(inputs.view(-1, 1, 8, 8), targets)
            for inputs, targets in (plain.records.batch(client, None) for client in range(7))
        ],
    )
    found = scattering.with_features(pictures)
    assert found.records.sizes.tolist() == plain.records.sizes.tolist()
    for client in range(7):
        inputs, targets = found.records.batch(client, None)
        assert torch.equal(targets, plain.records.batch(client, None)[1])
        own = scattering.features(pictures.records.batch(client, None)[0])
        assert torch.allclose(inputs, own, atol=1e-5)
    assert found.model.weight.shape == (10, 81 * 4)
