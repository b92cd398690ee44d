"""The kernels that move images about, against PyTorch, to the bit; run by `kernel_checks`."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Problem
from normec.data.augment import CropFlip, Flip, Normalize
from normec.gradients.shared.inputs import prepare_inputs
from normec.models.resnet import Shortcut

from .cases import BATCH, engines, problem
from .nearness import LAST

PRECISIONS = (torch.float32, torch.bfloat16)


def check_inputs(device: str) -> None:
    """Looked up, cropped, flipped and normalised in one go, or step by step where that is not what was asked."""
    torch.manual_seed(0)
    for channels, height, width in ((3, 8, 6), (1, 20, 17), (4, 5, 5)):
        shape = (channels, height, width)
        images = torch.randint(256, (9, *shape), dtype=torch.uint8)
        normal = Normalize(tuple(0.1 + 0.2 * k for k in range(channels)), tuple(0.3 + k for k in range(channels)))
        numbers = torch.tensor([8, 0, 3, 3, 7], device=device)
        drawn = torch.rand(5, 3, dtype=torch.float64, device=device)  # as a feed has them
        drawn[0], drawn[1] = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.0, 1 - 2**-24, 0.499])
        for augment, given in ((CropFlip(2), images), (None, images), (Flip(), images), (CropFlip(1), images.float())):
            parts = [TensorDataset(given, torch.zeros(9))]
            of = Problem(nn.Conv2d(channels, 2, 3), F.mse_loss, parts, augment=augment, transform=normal)
            of = of.to(torch.device(device), torch.float32)
            uniforms = drawn[:, : augment.draws] if augment is not None else None
            held = given.to(device)
            found = prepare_inputs(
                of, held, numbers[None], uniforms[None] if uniforms is not None else None, torch.float32
            )
            expected = held[numbers]
            if augment is not None and uniforms is not None:
                expected = augment(expected, uniforms)
            assert found.is_contiguous(memory_format=LAST)
            assert torch.equal(found, normal(expected)), (shape, augment)


def check_inputs_of_an_engine(device: str) -> None:
    """The kernel is what an engine's feed comes to."""
    from normec.kernels import images

    of = problem("augmented pixels", device, torch.float32)
    _, shared, _ = engines(of, BATCH)
    with mock.patch.object(images, "prepare", wraps=images.prepare) as called:
        blocks = list(shared.blocks(of.x0, of.initial_buffers(), 0))
    assert called.call_count == len(blocks) > 0
    assert all(call.args[4] is not None for call in called.call_args_list)  # cropped


def check_shortcut(device: str) -> None:
    """Every so-many-th pixel, zeros for missing channels, and the way back."""
    from normec.kernels.shortcut import pick, spread

    for channels, missing, stride, height, width in (
        (16, 16, 2, 6, 4),
        (3, 5, 2, 5, 7),
        (8, 1, 1, 3, 2),
        (4, 4, 3, 5, 6),
    ):
        for dtype in PRECISIONS:
            shortcut = Shortcut(stride, missing)
            x = torch.randn(3, channels, height, width, device=device).to(dtype).contiguous(memory_format=LAST)
            expected = shortcut(x.requires_grad_())
            g = torch.randn_like(expected).contiguous(memory_format=LAST)
            found = pick(x.detach(), stride, shortcut.before, channels + missing)
            assert torch.equal(found, expected)
            (slope,) = torch.autograd.grad(expected, x, g)
            assert torch.equal(spread(g, tuple(x.shape), stride, shortcut.before), slope)


CHECKS: tuple[Callable[[str], None], ...] = (
    check_inputs,
    check_inputs_of_an_engine,
    check_shortcut,
)
