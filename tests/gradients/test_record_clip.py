"""The clip per record: its bound, and every engine's sum against a loop over records in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Compute, Privacy, Problem, train
from normec.data import Flip
from normec.errors import UsageError
from normec.gradients.choice import choose_engine
from normec.gradients.record_clip import RecordClip
from normec.models import Logistic, Softmax, binary_loss
from normec.problems.problem import Loss
from normec.sampling.batches import Batches, PoissonBatches
from normec.sampling.random_streams import Stream

SIZES = (12, 3, 20)
CLIPS = [RecordClip(size, by_layer) for size in (0.7, "auto") for by_layer in (False, True)]  # type: ignore[arg-type]
NAMES = ["clip", "clip by layer", "auto", "auto by layer"]


@pytest.mark.parametrize("clip", CLIPS, ids=NAMES)
@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-3, 0.1, 1.0, 1e3, 1e30])
def test_the_bound_holds_for_gradients_of_any_length(clip: RecordClip, length: float) -> None:
    torch.manual_seed(0)
    grads = F.normalize(torch.randn(50, sum(SIZES), dtype=torch.float64)) * length
    grads[:25, :12] *= 1e-6  # one layer far smaller than the others
    bounded = clip(grads, SIZES).norm(dim=1)
    assert float(bounded.max()) <= clip.bound * (1 + 1e-12)
    if length >= 1e3:  # the bound is attained, or nearly
        assert float(bounded[25:].min()) > 0.99 * clip.bound
    if length == 0.0:
        assert not bounded.any()


def by_hand(grad: np.ndarray[Any, Any], clip: RecordClip, layers: list[slice]) -> np.ndarray[Any, Any]:
    """One record's share."""
    parts = layers if clip.by_layer else [slice(0, len(grad))]
    share = np.zeros_like(grad)
    for part in parts:
        length = math.sqrt(float(np.sum(grad[part] ** 2)))
        each = clip.bound / math.sqrt(len(parts))
        if clip.size == "auto":
            share[part] = grad[part] / (math.sqrt(len(parts)) * length + 0.01)
        else:
            share[part] = grad[part] * min(1.0, each / length)
    return share


def softmax_gradient(x: np.ndarray[Any, Any], a: np.ndarray[Any, Any], y: int) -> np.ndarray[Any, Any]:
    scores = x[:12].reshape(3, 4) @ a + x[12:]
    p = np.exp(scores) / np.exp(scores).sum() - np.eye(3)[y]
    return np.concatenate([np.outer(p, a).ravel(), p])


def logistic_gradient(x: np.ndarray[Any, Any], a: np.ndarray[Any, Any], y: int) -> np.ndarray[Any, Any]:
    return a * (1 / (1 + math.exp(-float(a @ x))) - y)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("clip", CLIPS, ids=NAMES)
@pytest.mark.parametrize("engine", ["loop", "linear"])
@pytest.mark.parametrize("kind", ["softmax", "logistic"])
def test_engines_add_up_bounded_records(kind: str, engine: str, clip: RecordClip) -> None:
    torch.manual_seed(1)
    model: nn.Module = Softmax(4, 3) if kind == "softmax" else Logistic(4)
    loss: Loss = F.cross_entropy if kind == "softmax" else binary_loss
    classes = 3 if kind == "softmax" else 2
    clients = [TensorDataset(2 * torch.randn(n, 4).double(), torch.randint(0, classes, (n,))) for n in (5, 9)]
    problem = Problem(model.double(), loss, clients)
    x = torch.randn(len(problem.x0), dtype=torch.float64)
    made = choose_engine(engine, problem, None, 0, clip, private=True)
    assert made.name == engine
    grads = torch.cat([block.grads for block in made.blocks(x, {}, 0)]).numpy()
    of, layers = (
        (softmax_gradient, [slice(0, 12), slice(12, 15)]) if kind == "softmax" else (logistic_gradient, [slice(0, 4)])
    )
    for client, data in enumerate(clients):
        inputs, targets = (tensor.numpy() for tensor in data.tensors)
        shares = [by_hand(of(x.numpy(), a, int(y)), clip, layers) for a, y in zip(inputs, targets, strict=True)]
        np.testing.assert_allclose(grads[client], sum(shares) / len(shares), atol=1e-12)


most_seen = 0


class OwnFlip:
    """Of the same bits as `Flip`, but unknown to the library, which must call it record by record."""

    draws = 1

    def __call__(self, inputs: Tensor, uniforms: Tensor) -> Tensor:
        global most_seen  # objects and classes forget every record
        most_seen = max(most_seen, len(inputs))
        return Flip()(inputs, uniforms)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("batches", ["whole", "fixed", "coins"])
@pytest.mark.parametrize("engine", ["loop", "shared"])
@pytest.mark.parametrize("own", [False, True], ids=["known", "own"])
def test_batches_and_augmentation(own: bool, engine: str, batches: str) -> None:
    """Images of 2 × 2 pixels, flipped by a coin for each record and round, then clipped one by one."""
    torch.manual_seed(1)
    sizes, seed, k, clip = (5, 9), 3, 4, RecordClip(0.4)
    clients = [TensorDataset(torch.randn(n, 1, 2, 2).double(), torch.randint(0, 3, (n,))) for n in sizes]
    augment = OwnFlip() if own else Flip()
    problem = Problem(nn.Sequential(nn.Flatten(), Softmax(4, 3)).double(), F.cross_entropy, clients, augment=augment)
    x = torch.randn(15, dtype=torch.float64)
    drawn: Any = {
        "whole": None,
        "fixed": Batches(torch.tensor(sizes), 4, seed),
        "coins": PoissonBatches(torch.tensor(sizes), 0.5, seed),
    }[batches]
    made = choose_engine(engine, problem, drawn, seed, clip, private=True)
    found = {}
    for block in made.blocks(x, {}, k):
        found |= dict(zip(block.clients.tolist(), block.grads.clone(), strict=True))
    assert made.name == engine
    for client, (data, size) in enumerate(zip(clients, sizes, strict=True)):
        rows = torch.arange(size) if drawn is None else drawn.draw(torch.tensor([client]), k)[0]
        divisor = {"whole": size, "fixed": 4, "coins": 0.5 * size}[batches]
        uniforms = Stream(seed, "augment").uniform(torch.tensor([client]), k, len(rows))[0]
        total = np.zeros(15)
        for row, uniform in zip(rows.tolist(), uniforms.tolist(), strict=True):
            image, target = data.tensors[0][row, 0].numpy(), int(data.tensors[1][row])
            pixels = (image[:, ::-1] if uniform < 0.5 else image).ravel()
            total += by_hand(softmax_gradient(x.numpy(), pixels, target), clip, [slice(0, 15)])
        np.testing.assert_allclose(found[client].numpy(), total / divisor, atol=1e-12)
    if isinstance(augment, OwnFlip):
        assert most_seen == 1


@pytest.mark.parametrize("engine", ["loop", "shared", "linear"])
def test_a_full_gradient_beside_batches_is_divided_by_all_records(engine: str) -> None:
    data = [TensorDataset(torch.randn(count, 4), torch.arange(count) % 3) for count in (5, 8)]
    of, clip = Problem(Softmax(4, 3), F.cross_entropy, data), RecordClip(0.3)
    found = choose_engine(engine, of, Batches(torch.tensor([5, 8]), 3, 0), 0, clip)
    assert found.name == engine
    mine, expected = torch.zeros(2, 2, len(of.x0))
    for grads, one in ((mine, found), (expected, choose_engine("loop", of, None, 0, clip))):
        for block in one.blocks(of.x0, of.initial_buffers(), 0, full=True):
            grads[block.clients] = block.grads
    torch.testing.assert_close(mine, expected)


def test_an_augmentation_that_remembers_records_is_refused() -> None:
    class Blend(OwnFlip):
        """Mixes a record with the one before it."""

        before: Tensor | None = None

        def __call__(self, inputs: Tensor, uniforms: Tensor) -> Tensor:  # noqa: ARG002
            mixed = inputs if self.before is None else inputs + 0.1 * self.before
            self.before = inputs[-1:].clone()
            return mixed

    torch.manual_seed(1)
    clients = [TensorDataset(torch.randn(6, 1, 2, 2), torch.randint(0, 3, (6,)))]
    problem = Problem(nn.Sequential(nn.Flatten(), Softmax(4, 3)), F.cross_entropy, clients, augment=Blend())
    with pytest.raises(UsageError, match=r"the gradient of (a record|client 0) changes"):
        train(problem, DPSGD(Clip(1.0)), lr=0.1, rounds=2, privacy=Privacy(epsilon=4, unit="record"))


@pytest.mark.slow
def test_auto_needs_the_noise_of_a_clip_of_one() -> None:
    torch.manual_seed(1)
    clients = [TensorDataset(torch.randn(9 + i, 4), torch.randint(0, 3, (9 + i,))) for i in range(3)]
    sigmas = {}
    for clip, by in ((1.0, "record"), ("auto", "record"), ("auto", "layer"), (1.0, "layer")):
        privacy = Privacy(epsilon=4, unit="record", record_clip=clip, record_clip_by=by, trust="local")  # type: ignore[arg-type]
        problem = Problem(nn.Linear(4, 3), F.cross_entropy, clients)
        run = train(
            problem, DPSGD(Clip(1.0)), lr=0.1, rounds=3, seed=0, privacy=privacy, compute=Compute(engine="loop")
        )
        assert run.privacy is not None
        sigmas[clip, by] = run.privacy.sigma
    assert len(set(sigmas.values())) == 1, sigmas


def test_what_is_no_clip_is_refused() -> None:
    with pytest.raises(UsageError, match="record_clip"):
        Privacy(epsilon=4, unit="record", record_clip="automatic", trust="local")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs record_clip"):
        Privacy(epsilon=4, unit="record", record_clip_by="layer", trust="local")
    with pytest.raises(UsageError, match="unit='record'"):
        Privacy(epsilon=4, record_clip="auto", trust="local")
