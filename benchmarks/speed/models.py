"""Models that people bring, for the workloads that the library has no model for; none of them needs data."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normec import UsageError
from normec.models import Built

WIDTH, LAYERS, HEADS = 128, 4, 4
RANK = 8  # of the adapters


class Adapted(nn.Module):
    """A frozen linear layer with a trainable update of low rank (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads: nn.Module = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.heads(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.before_mlp(x))))
        return found


class GPT(nn.Module):
    """A small GPT; `adapted`, only adapters of its attention are trained."""

    def __init__(self, length: int, vocabulary: int, adapted: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        if adapted:
            self.requires_grad_(False)
            for block in self.blocks:
                for name in ("heads", "joined"):
                    setattr(block, name, Adapted(getattr(block, name)))

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.tokens(numbers) + self.positions(
            torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
        )
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found


class ViT(nn.Module):
    """Patches of 4 × 4 pixels, a class token, and PyTorch's encoder."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape[0], WIDTH, 4, stride=4)
        count = (shape[1] // 4) * (shape[2] // 4)
        self.first, self.positions = (nn.Parameter(0.02 * torch.randn(1, n, WIDTH)) for n in (1, count + 1))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        found: Tensor = self.head(self.encoder(x)[:, 0])
        return found


class Bert(nn.Module):
    """A BERT of the package transformers, for the classification of texts."""

    def __init__(self, length: int, vocabulary: int, classes: int) -> None:
        super().__init__()
        try:
            made: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise UsageError("the workload bert needs the package transformers") from error
        config = made.BertConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=length,
            num_labels=classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = made.BertForSequenceClassification(config)

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.model(numbers).logits
        return found


class LSTM(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.LSTM(WIDTH, 2 * WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, vocabulary)

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.tokens(numbers))[0])
        return found


class _Inverted(nn.Module):
    """The block of MobileNetV2: expand, filter channel by channel, project."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.layers = nn.Sequential(
            *(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return x + found if self.same else found


class _Residual(nn.Module):
    """The block of ResNet18: two 3×3 convolutions, and a 1×1 convolution as the shortcut if the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet18 (He et al., 2016) for small images: 11 million parameters."""
    blocks: list[nn.Module] = []
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [_Residual(inputs, outputs, stride), _Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *blocks,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)),
    )


def mobilenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """MobileNetV2 (Sandler et al., 2018) for small images, with its dropout."""
    blocks: list[nn.Module] = []
    inputs = 32
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for expansion, outputs, repeats, stride in settings:
        for number in range(repeats):
            blocks.append(_Inverted(inputs, outputs, stride if number == 0 else 1, expansion))
            inputs = outputs
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()),
        *blocks,
        *(nn.Conv2d(inputs, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, classes)),
    )


def every_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of the next tokens."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


MODELS: dict[str, Callable[[tuple[int, ...], int, int], nn.Module]] = {  # of shape, classes and vocabulary
    "gpt": lambda shape, _, words: GPT(shape[0], words),
    "lora": lambda shape, _, words: GPT(shape[0], words, adapted=True),
    "vit": lambda shape, classes, _: ViT(shape, classes),
    "bert": lambda shape, classes, words: Bert(shape[0], words, classes),
    "lstm": lambda _, __, words: LSTM(words),
    "mobilenet": lambda shape, classes, _: mobilenet(shape, classes),
    "resnet18": lambda shape, classes, _: resnet18(shape, classes),
}


def build_model(name: str, shape: tuple[int, ...], classes: int, vocabulary: int) -> Built:
    """Build one of `MODELS`; its parameters are the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name](shape, classes, vocabulary)
    return Built(model, every_token if name in ("gpt", "lora", "lstm") else F.cross_entropy)
