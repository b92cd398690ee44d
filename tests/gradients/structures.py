"""Models that use parameters in other ways than one layer after the other, as the cases for rules by operation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import CLASSES, Case, per_position

VOCABULARY, WIDTH, POSITIONS = 9, 8, 6


class GPT(nn.Module):
    """Token and position embeddings, one block with causal attention, and a head that may be the token embedding."""

    mask: Tensor

    def __init__(self, tied: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False)
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.scores.weight = self.tokens.weight
        self.masked = masked
        self.register_buffer("mask", torch.ones(POSITIONS, POSITIONS).tril().bool())

    def forward(self, numbers: Tensor) -> Tensor:
        h = self.tokens(numbers) + self.positions(torch.arange(numbers.shape[1], device=numbers.device))
        parts = self.heads(self.before_attention(h)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        mask = self.mask if self.masked else None
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not self.masked)
        h = h + self.joined(attended.transpose(1, 2).flatten(2))
        found: Tensor = self.scores(h + self.down(F.gelu(self.up(self.before_mlp(h)))))
        return found


class ViT(nn.Module):
    """Patches, a class token, positions, and PyTorch's encoder; the batch may be its first or its second dimension."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.patches, self.batch_first = nn.Conv2d(2, WIDTH, 2, stride=2), batch_first
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 10, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.first.expand(len(h), -1, -1), h], dim=1) + self.positions
        h = self.encoder(h) if self.batch_first else self.encoder(h.transpose(0, 1)).transpose(0, 1)
        found: Tensor = self.scores(h[:, 0])
        return found


class CrossAttention(nn.Module):
    """Learned queries attend to the inputs, with keys and values of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=3, vdim=3, batch_first=True)
        self.scores = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), -1, -1)
        found: Tensor = self.scores(self.attention(queries, x, x, need_weights=True)[0].flatten(1))
        return found


class LoRA(nn.Module):
    """A frozen layer with a trainable update of low rank, twice, and a trainable head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(6, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, 6, bias=False) for _ in range(2))
        self.norm, self.head = nn.GroupNorm(2, 6).requires_grad_(False), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + 0.5 * up(down(x)))
        found: Tensor = self.head(self.norm(x))
        return found


class Products(nn.Module):
    """Parameters in products that are not layers: on the right, transposed, with a bias, scaled and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.left = nn.Parameter(torch.randn(6, 5) / 3), nn.Parameter(torch.randn(6, 5) / 3)
        self.bias, self.scale = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(()))
        self.outer = nn.Parameter(torch.randn(CLASSES, 6) / 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(torch.addmm(self.bias, x, self.right)) * self.scale + self.frozen
        h = torch.tanh(h @ self.left.T) + torch.tanh(x @ self.right @ self.left.transpose(-1, -2))
        return F.linear(h, self.outer * math.sqrt(2), self.bias[:CLASSES])


def mobile() -> nn.Module:
    """A depthwise-separable block, as in MobileNet."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 1, bias=False),
        nn.GroupNorm(2, 6),
        nn.Hardswish(),
        nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
        nn.InstanceNorm2d(6, affine=True),
        nn.Hardswish(),
        nn.Conv2d(6, 4, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1, groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 3, 2, dilation=2, padding=1, bias=False),
        nn.Flatten(2),
        nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool1d(3),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def padded() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 4, padding_idx=-2), nn.Flatten(), nn.Linear(24, CLASSES))


def _text(**how: bool) -> Case:
    return Case(lambda: GPT(**how), (POSITIONS,), per_position, "tokens", "positions")


class Recurrent(nn.Module):
    """A recurrent layer of some kind, and the class of its outputs and its last states."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU | nn.RNN], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.LazyLinear(CLASSES)
        self(torch.zeros(2, POSITIONS, dtype=torch.int64))

    def forward(self, numbers: Tensor) -> Tensor:
        outputs, last = self.layer(self.table(numbers))
        states = last if isinstance(last, tuple) else (last,)
        parts = [outputs.mean(1), *(state.transpose(0, 1).flatten(1) for state in states)]
        found: Tensor = self.head(torch.cat(parts, 1))
        return found


class Decoder(nn.Module):
    """A GRU that takes the sequence first, begins in a state that is computed, and has a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(3, 4), nn.Linear(4, CLASSES)
        self.layer = nn.GRU(3, 4)
        self.layer.weight_hh_l0.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.layer(x.transpose(0, 1), self.start(x[:, 0])[None])
        found: Tensor = self.head(outputs[-1])
        return found


def _recurrent(kind: type[nn.LSTM | nn.GRU | nn.RNN], **options: Any) -> Case:
    return Case(lambda: Recurrent(kind, **options), (POSITIONS,), inputs="tokens")


RECURRENT: dict[str, Case] = {
    "lstm": _recurrent(nn.LSTM),
    "lstm, two layers, both ways": _recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm without biases": _recurrent(nn.LSTM, bias=False),
    "gru, two layers": _recurrent(nn.GRU, num_layers=2),
    "gru, sequence first": Case(Decoder, (4, 3)),
    "rnn": _recurrent(nn.RNN, bidirectional=True),
    "rnn of relus": _recurrent(nn.RNN, nonlinearity="relu"),
}

STRUCTURES: dict[str, Case] = {
    "gpt": _text(),
    "gpt with tied weights": _text(tied=True),
    "gpt with a mask": _text(masked=True),
    "vit": Case(ViT, (2, 6, 6)),
    "vit, sequence first": Case(lambda: ViT(batch_first=False), (2, 6, 6)),
    "cross attention": Case(CrossAttention, (4, 3)),
    "lora": Case(LoRA, (6,)),
    "products": Case(Products, (6,)),
    "mobile": Case(mobile, (2, 6, 6)),
    "transposed convolutions": Case(transposed, (2, 3, 3)),
    "padded embedding": Case(padded, (POSITIONS,), inputs="tokens"),
    **RECURRENT,
}
