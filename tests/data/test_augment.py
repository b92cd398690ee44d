"""Crops and flips against a plain loop over images; normalisation against the formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normec.data import CropFlip, Flip, Normalize, Scale
from normec.errors import UsageError


def loop_crop_flip(images: np.ndarray, u: np.ndarray, padding: int) -> np.ndarray:
    """One image at a time: pad with zeros, cut the window out, mirror it."""
    out = np.empty_like(images)
    for i, image in enumerate(images):
        channels, height, width = image.shape
        padded = np.zeros((channels, height + 2 * padding, width + 2 * padding), dtype=image.dtype)
        padded[:, padding : padding + height, padding : padding + width] = image
        top, left = int(u[i, 0] * (2 * padding + 1)), int(u[i, 1] * (2 * padding + 1))
        window = padded[:, top : top + height, left : left + width]
        out[i] = window[:, :, ::-1] if u[i, 2] < 0.5 else window
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 9),
    channels=st.integers(1, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    padding=st.integers(0, 5),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.int64]),
)
def test_crop_flip_is_the_loop(
    seed: int, batch: int, channels: int, height: int, width: int, padding: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(1, 256, (batch, channels, height, width), generator=random).to(dtype)
    u = torch.rand(batch, 3, generator=random, dtype=torch.float64)
    before = images.clone()
    out = CropFlip(padding)(images, u)
    assert out.dtype == dtype
    assert out.shape == images.shape
    np.testing.assert_array_equal(out.numpy(), loop_crop_flip(images.numpy(), u.numpy(), padding))
    assert torch.equal(images, before), "the input must stay as it was"


def test_every_offset_and_both_mirrors_occur_equally_often() -> None:
    image = torch.arange(1, 26, dtype=torch.float32).view(1, 1, 5, 5)
    steps = torch.arange(5, dtype=torch.float64) / 5 + 0.1
    u = torch.cartesian_prod(steps, steps, torch.tensor([0.25, 0.75], dtype=torch.float64))
    out = CropFlip(2)(image.expand(len(u), 1, 5, 5), u)
    assert len({tuple(o.flatten().tolist()) for o in out}) == 5 * 5 * 2


def test_the_largest_uniforms_stay_inside() -> None:
    u = torch.full((1, 3), 1 - 2.0**-24)
    for padding in range(200):
        images = torch.ones(1, 1, 2, 2)
        np.testing.assert_array_equal(
            CropFlip(padding)(images, u).numpy(), loop_crop_flip(images.numpy(), u.double().numpy(), padding)
        )


def test_under_vmap_and_with_leading_dimensions_nothing_changes() -> None:
    images, u = torch.randint(0, 256, (3, 4, 3, 8, 8), dtype=torch.uint8), torch.rand(3, 4, 3)
    for augment, draws in ((CropFlip(2), 3), (Flip(), 1)):
        assert augment.draws == draws
        one_by_one = torch.stack([augment(images[i], u[i, :, :draws]) for i in range(3)])
        assert torch.equal(augment(images, u[..., :draws]), one_by_one)
        assert torch.equal(torch.vmap(augment)(images, u[..., :draws]), one_by_one)


def test_flip_mirrors_images_whose_draw_is_below_one_half() -> None:
    images = torch.arange(12).view(2, 1, 2, 3)
    out = Flip()(images, torch.tensor([[0.49], [0.5]]))
    assert out[0, 0].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert torch.equal(out[1], images[1])


def test_normalize_is_the_formula_for_bytes_and_floats() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    normalize = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    out = normalize(images)
    assert out.dtype == torch.float32
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (images.numpy().transpose(0, 2, 3, 1) / 255 - mean) / std
    np.testing.assert_allclose(out.numpy().transpose(0, 2, 3, 1), expected, rtol=0, atol=2e-6)
    assert torch.equal(normalize(images.float() / 255), out)


def test_scale_is_mnists_normalize() -> None:
    images = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(Scale()(images), Normalize((0.1307,), (0.3081,))(images))


def test_constants_first_met_in_inference_mode_still_differentiate() -> None:
    normalize = Normalize((0.123,), (0.321,))
    with torch.inference_mode():
        normalize(torch.zeros(1, 1, 2, 2))
    pixels = torch.rand(1, 1, 2, 2, requires_grad=True)
    normalize(pixels).sum().backward()
    assert pixels.grad is not None
    torch.testing.assert_close(pixels.grad, torch.full_like(pixels, 1 / 0.321))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_and_in_a_cuda_graph_nothing_changes() -> None:
    images, u = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8), torch.rand(16, 3)
    augment, normalize = CropFlip(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    there, draws = images.cuda(), u.cuda()
    assert torch.equal(augment(there, draws).cpu(), augment(images, u))
    expected = normalize(augment(there, draws))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = normalize(augment(there, draws))
    graph.replay()
    assert torch.equal(out, expected)
    torch.testing.assert_close(out.cpu(), normalize(augment(images, u)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CropFlip(-1), "padding must be a whole number >= 0, got -1"),
        (lambda: CropFlip()(torch.zeros(2, 3, 8, 8), torch.zeros(2, 1)), r"CropFlip needs .* uniforms \[\.\.\., 3\]"),
        (lambda: Flip()(torch.zeros(8, 8), torch.zeros(1)), "Flip needs"),
        (lambda: Normalize((0.5,), (0.0,)), "std must be > 0"),
        (lambda: Normalize((0.5,), (0.5, 0.5)), "got 1 and 2"),
        (lambda: Scale()(torch.zeros(2, 3, 8, 8)), "1 channels, got images of shape"),
    ],
)
def test_mistakes_are_named(make: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()  # type: ignore[operator]
