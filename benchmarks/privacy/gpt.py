"""A small GPT that predicts the next character, its training on public text, and its LoRA adapters."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPT(nn.Module):
    """A transformer with causal attention; from characters ``[B, T]`` to scores ``[B, characters, T]``."""

    def __init__(self, characters: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(characters, width), nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        for parameter in (self.embedding.weight, self.position):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.blocks(self.embedding(characters) + self.position)))
        return found.transpose(-1, -2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        found: Tensor = x + self.mlp(self.before_mlp(x))
        return found


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable map of low rank, which is zero at first (Hu et al., ICLR 2022)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = (
            nn.Linear(frozen.in_features, rank, bias=False),
            nn.Linear(rank, frozen.out_features, False),
        )
        nn.init.normal_(self.down.weight, std=1 / math.sqrt(frozen.in_features))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.frozen(x) + self.up(self.down(x))
        return found


def with_adapters(model: GPT, rank: int) -> GPT:
    """Freeze a model and give the queries and values of its attention adapters of that rank; the model is changed."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, _Block)
        block.query, block.value = LoRALinear(block.query, rank), LoRALinear(block.value, rank)  # type: ignore[assignment]
    return model


def pretrained(model: GPT, inputs: Tensor, targets: Tensor, steps: int, cache: Path) -> GPT:
    """The model after training on public windows ``[N, T]``, which is done once and then read from the folder `cache`.

    Training is AdamW with batches of 128 windows and a step size that falls along a cosine. It is not private.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    key = hashlib.sha256(f"{steps} {model}".encode())
    for part in (inputs, targets, *(parameter.detach() for parameter in model.parameters())):
        key.update(part.cpu().contiguous().numpy().tobytes())
    path = cache / f"gpt-{key.hexdigest()[:12]}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    model = model.to(device)
    inputs, targets = inputs.to(device), targets.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2))
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(inputs), (128,), generator=draw).to(device)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        schedule.step()
    model = model.cpu()
    cache.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), written)
    written.replace(path)
    return model
