"""Models: their sizes, their shapes, their starts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import normec
from normec import models
from normec.data import CropFlip, Normalize
from normec.errors import UsageError


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        ("softmax", (64,), 10, 650),
        ("logistic", (123,), 2, 123),
        ("mlp", (784,), 10, 50_890),
        ("cnn", (1, 28, 28), 10, 56_714),
        ("cnn-gn", (3, 32, 32), 10, 24_346),
        ("resnet20", (3, 32, 32), 10, 269_722),
        ("resnet20-gn", (3, 32, 32), 10, 269_722),
    ],
)
def test_sizes_and_shapes(name: str, shape: tuple[int, ...], classes: int, expected: int) -> None:
    built = models.build(name, shape, classes)
    assert size(built.model) == expected
    outputs = built.model(torch.randn(4, *shape))
    assert outputs.shape == ((4,) if name == "logistic" else (4, classes))
    assert built.loss(outputs, torch.tensor([0, 1, 0, 1])).ndim == 0


def test_the_seed_decides_the_parameters_and_nothing_else_is_disturbed() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, same, other = (models.build("mlp", (5,), 3, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_option_a_shortcut_subsamples_and_pads_channels() -> None:
    block = models.resnet.Block(16, 32, 2, torch.nn.BatchNorm2d)
    for parameter in block.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_group_norm_variant_has_no_buffers_and_treats_images_alone() -> None:
    model = models.build("resnet20-gn", (3, 32, 32), 10).model
    assert not list(model.buffers())
    images = torch.randn(3, 3, 32, 32)
    together = model(images)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_logistic_loss_is_the_textbook_formula() -> None:
    z, y = torch.randn(20), torch.randint(0, 2, (20,))
    signs = 2.0 * y - 1
    torch.testing.assert_close(models.binary_loss(z, y), torch.log1p(torch.exp(-signs * z)).mean())


def test_nonconvex_penalty_and_its_gradient() -> None:
    x = torch.randn(30, dtype=torch.float64, requires_grad=True)
    value = models.NonconvexPenalty(0.1)(x)
    (gradient,) = torch.autograd.grad(value, x)
    at = x.detach()
    torch.testing.assert_close(gradient, 0.1 * 2 * at / (1 + at**2) ** 2)
    for points in (at, at.view(3, 10)):
        values, gradients = models.NonconvexPenalty(0.1).with_gradient(points)
        torch.testing.assert_close(values, (0.1 * points**2 / (1 + points**2)).sum(-1))
        torch.testing.assert_close(gradients.flatten(), gradient)
    assert torch.equal(at, x.detach())


def test_nonconvex_penalty_of_small_parameters_is_not_lost_in_rounding() -> None:
    values, _ = models.NonconvexPenalty(1.0).with_gradient(torch.full((10,), 1e-5))
    assert float(values) == pytest.approx(1e-9, rel=1e-5)


def test_models_that_do_not_fit_the_data_are_refused() -> None:
    with pytest.raises(UsageError, match="needs images"):
        models.build("cnn", (64,), 10)
    with pytest.raises(UsageError, match="2 classes"):
        models.build("logistic", (4,), 3)
    with pytest.raises(UsageError, match="did you mean 'resnet20'"):
        models.build("resnet2", (3, 32, 32), 10)


@pytest.mark.slow
def test_a_short_run_on_images_like_cifar_lowers_the_loss() -> None:
    """uint8 images whose class shows in their colour; crop, flip and normalisation as on CIFAR-10."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(48) % 3
    images = torch.randint(0, 90, (48, 3, 32, 32), generator=draw)
    images[torch.arange(48), labels] += 120
    built = models.build("resnet20", (3, 32, 32), 3, seed=1)
    problem = normec.Problem(
        built.model,
        built.loss,
        clients=[TensorDataset(images[i::2].byte(), labels[i::2]) for i in range(2)],
        augment=CropFlip(4),
        transform=Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    )
    run = normec.train(problem, normec.NormEC(0.01, 1.0, server_norm=False), lr=0.1, rounds=12, batch_size=8, seed=3)
    losses = run.history["loss"]
    assert sum(losses[-3:]) / 3 < 0.7 * losses[0]


def test_norm_relu_is_norm_shortcut_and_relu() -> None:
    x, shortcut = torch.randn(2, 3, 4, 4, 4)[:, :, :3]
    norm = torch.nn.BatchNorm2d(3)
    assert torch.equal(models.fused_norms.norm_relu(norm, x), torch.relu(norm(x)))
    assert torch.equal(models.fused_norms.norm_relu(norm, x, shortcut), torch.relu(norm(x) + shortcut))


def test_a_shortcut_without_missing_channels_is_its_input_where_no_pixel_is_left_out() -> None:
    x = torch.randn(2, 3, 5, 4)
    assert models.resnet.Shortcut(1, 0)(x) is x
    widened = models.resnet.Shortcut(2, 3)(x)
    assert torch.equal(widened[:, 1:4], x[:, :, ::2, ::2])
    assert widened.shape == (2, 6, 3, 2)
    assert widened.count_nonzero() == x[:, :, ::2, ::2].count_nonzero()
