"""Small problems with every kind of layer, loss and batch, and what must be equal between two engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, EF21, GD, Clip, Clip21, Method, NormEC, Problem, RandK, SmoothedNorm, TopK, models
from normec.data.augment import CropFlip, Normalize
from normec.gradients.batched import BatchedEngine
from normec.gradients.engine import Engine
from normec.gradients.loop import LoopEngine
from normec.gradients.precision import Precision
from normec.gradients.shared.engine import SharedEngine
from normec.models import NonconvexPenalty, binary_loss
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches

BATCH = 5
SIZES = (9, 9, 9, 3, 7)  # client 3 has fewer records than a batch, and stands between the others
CLASSES = 4

METHODS: dict[str, Method] = {
    "normec": NormEC(0.5, 0.4),
    "normec-alpha-0": NormEC(0.0, 0.05),
    "normec-no-server-norm": NormEC(0.1, 0.3, server_norm=False),
    "normec-decay": NormEC(1.0, 0.5, decay=0.1),
    "normec-decay-no-server-norm": NormEC(1.0, 0.5, False, 0.02),
    "clip21": Clip21(0.3),
    "clip21-decay": Clip21(0.6, decay=0.05),
    "ef21-top-k": EF21(TopK(9)),
    "ef21-rand-k": EF21(RandK(9)),
    "dpsgd-clip": DPSGD(Clip(0.8)),
    "dpsgd-norm": DPSGD(SmoothedNorm(0.1), beta=0.7),
    "gd": GD(),
}


class Text(nn.Module):
    """Embedding with padding, Conv1d, BatchNorm over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(9, 6, padding_idx=0), nn.Conv1d(6, 5, 3, stride=2, bias=False)
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.norm(self.conv(self.table(tokens).transpose(1, 2)))).mean(-1))
        return found


class Stop(torch.autograd.Function):
    """Its input, through which no slope goes back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:  # type: ignore[override]  # noqa: ARG004
        return None


class Stopped(nn.Module):
    """A norm that takes part in the forward pass alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x + Stop.apply(self.norm(x)))  # type: ignore[no-untyped-call]
        return found


class Tied(nn.Module):
    """Two layers with one weight; a layer and a BatchNorm that are passed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.second(self.first(x))))
        found: Tensor = self.head(self.norm(self.first(x)))
        return found


class Partly(nn.Module):
    """Frozen layers before, between and inside; parameters that take no part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm, self.middle = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.spare, self.head = nn.Linear(3, 3), nn.Linear(4, CLASSES)
        for module in (self.frozen, self.middle):
            module.requires_grad_(False)
        for parameter in (self.norm.weight, self.head.bias):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.middle(self.norm(self.frozen(x)))).mean((2, 3)))
        return found


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 8, (3, 2), padding="same", dilation=2, bias=False),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1, groups=4, padding_mode="circular"),
        nn.Conv2d(8, 6, 3, padding=(2, 1), groups=2, padding_mode="reflect"),
        nn.Tanh(),
        nn.Conv2d(6, 4, (1, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


def cubes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1, stride=(1, 2, 1)),
        nn.BatchNorm3d(4),
        nn.Tanh(),
        nn.InstanceNorm3d(4, affine=True),
        nn.Conv3d(4, 4, (1, 2, 2), groups=2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


def batch_norms() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(6, affine=False),
        nn.Linear(6, 8),
        nn.BatchNorm1d(8, momentum=0.3, eps=1e-3),
        nn.Tanh(),
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 3, 2, padding=1),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.Tanh(),
        nn.BatchNorm2d(3, affine=False, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(27, CLASSES),
    )


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.GroupNorm(4, 8),
        nn.Tanh(),
        nn.Conv2d(8, 6, 2),
        nn.GroupNorm(3, 6, affine=False),
        nn.InstanceNorm2d(6),
        nn.Tanh(),
        nn.LayerNorm((2, 3)),
        nn.InstanceNorm2d(6, affine=True, eps=1e-3),
        nn.Flatten(1, 2),
        nn.LayerNorm(3, bias=False),
        nn.Linear(3, 5),
        nn.LayerNorm(5, elementwise_affine=False),
        nn.RMSNorm(5, eps=1e-4),
        nn.Flatten(),
        nn.Linear(60, CLASSES),
    )


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES))


def named(name: str, *shape: int) -> Callable[[], nn.Module]:
    return lambda: models.build(name, shape, CLASSES, hidden=8).model


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.2)


def per_position(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def dense() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, CLASSES, 1))


@dataclass(frozen=True)
class Case:
    """A model on inputs of a shape; "tokens" and "pixels" are whole numbers."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    inputs: str = "normal"
    targets: str = "classes"
    options: dict[str, Any] = field(default_factory=dict)
    kinks: bool = False  # ReLU or maximum: in float32 a rounding may move a unit over its kink


CASES: dict[str, Case] = {
    "mlp": Case(named("mlp", 1, 3, 3), (1, 3, 3), kinks=True),
    "cnn": Case(named("cnn", 1, 8, 8), (1, 8, 8), kinks=True),
    "cnn-gn": Case(named("cnn-gn", 3, 8, 8), (3, 8, 8), kinks=True),
    "resnet20": Case(named("resnet20", 3, 8, 8), (3, 8, 8), kinks=True),
    "resnet20-gn": Case(named("resnet20-gn", 3, 8, 8), (3, 8, 8), kinks=True),
    "small": Case(small, (6,)),
    "text": Case(Text, (8,), inputs="tokens"),
    "tied": Case(Tied, (6,)),
    "stopped": Case(Stopped, (6,)),
    "partly frozen or unused": Case(Partly, (2, 5, 6)),
    "convolutions": Case(convolutions, (2, 9, 8)),
    "cubes": Case(cubes, (1, 3, 5, 4)),
    "batch norms": Case(batch_norms, (6,)),
    "norms": Case(norms, (2, 5, 6)),
    "positions": Case(lambda: nn.Linear(3, CLASSES), (2, 3), per_position, targets="positions"),
    "class of each position": Case(dense, (2, 5), targets="some positions"),
    "bit of each position": Case(lambda: nn.Conv1d(2, 2, 3, padding=1), (2, 5), binary_loss, targets="many bits"),
    "regression": Case(
        lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)), (6,), F.mse_loss, "normal", "values"
    ),
    "smoothed labels": Case(small, (6,), smoothed),
    "ignored records": Case(small, (6,), targets="ignored"),
    "probabilities": Case(small, (6,), targets="chances"),
    "binary": Case(lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), (6,), binary_loss, targets="bits"),
    "penalty": Case(small, (6,), options={"penalty": NonconvexPenalty(0.3)}),
    "augmented pixels": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES)),
        (2, 5, 6),
        inputs="pixels",
        options={"augment": CropFlip(2), "transform": Normalize((0.4, 0.5), (0.2, 0.3))},
    ),
}


def problem(
    name: str | Case, device: str = "cpu", dtype: torch.dtype = torch.float64, sizes: tuple[int, ...] = SIZES
) -> Problem:
    """The case in so many clients of these sizes; its start is moved, so that no bias is zero and no scale one."""
    case = CASES[name] if isinstance(name, str) else name
    torch.manual_seed(0)
    model = case.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    count = sum(sizes)
    inputs = {
        "normal": lambda: torch.randn(count, *case.shape, dtype=torch.float64),
        "tokens": lambda: torch.randint(0, 9, (count, *case.shape)),
        "pixels": lambda: torch.randint(0, 256, (count, *case.shape), dtype=torch.uint8),
    }[case.inputs]()
    classes = torch.randint(0, CLASSES, (count,))
    targets = {
        "classes": lambda: classes,
        "ignored": lambda: torch.where(torch.arange(count) % 3 == 2, -100, classes),
        "positions": lambda: torch.randint(0, CLASSES, (count, case.shape[0])),
        "some positions": lambda: torch.randint(0, CLASSES, (count, case.shape[-1])).where(
            torch.rand(count, case.shape[-1]) < 0.8, -100
        ),
        "many bits": lambda: torch.randint(0, 2, (count, *case.shape)),
        "values": lambda: torch.randn(count, 2),
        "chances": lambda: torch.rand(count, CLASSES).softmax(1),
        "bits": lambda: classes % 2,
    }[case.targets]()
    if targets.is_floating_point():
        targets = targets.to(dtype)  # as a loss wants them, which promotes what differs
    clients = [TensorDataset(a, b) for a, b in zip(inputs.split(sizes), targets.split(sizes), strict=True)]
    return Problem(model, case.loss, clients, **case.options).to(torch.device(device), dtype)


def engines(
    of: Problem, batch: int | None, precision: Precision = "float32"
) -> tuple[LoopEngine, SharedEngine, BatchedEngine]:
    """All three on the same batches."""
    assert isinstance(of.records, ResidentRecords)
    assert of.sizes is not None
    batches = Batches(of.sizes, batch, 1) if batch is not None else None
    fast = of, of.records, batches, 1, precision
    return LoopEngine(of, batches, 1, None, precision), SharedEngine(*fast), BatchedEngine(*fast)


@dataclass
class Found:
    """Gradients ``[n, d]`` and losses ``[n]``, zero for clients not asked for, and the buffers after it."""

    grads: Tensor
    losses: Tensor
    buffers: dict[str, Tensor]


def everything(
    engine: Engine, of: Problem, round: int = 0, clients: Tensor | None = None, *, full: bool = False
) -> Found:
    found = Found(of.x0.new_zeros(of.clients, len(of.x0)), of.x0.new_zeros(of.clients), of.initial_buffers())
    seen = []
    for block in engine.blocks(of.x0, found.buffers, round, clients, full=full):
        found.grads[block.rows], found.losses[block.rows] = block.grads, block.losses
        seen.append(block.clients)
    asked = torch.arange(of.clients) if clients is None else clients
    assert torch.equal(torch.cat(seen).sort().values if seen else torch.empty(0, dtype=torch.int64), asked)
    return found


def apart(found: Found, expected: Found) -> float:
    """The largest difference, relative to the largest number of its kind."""
    pairs = [(found.grads, expected.grads), (found.losses, expected.losses)]
    pairs += [(found.buffers[name].double(), rows.double()) for name, rows in expected.buffers.items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs if b.numel())
