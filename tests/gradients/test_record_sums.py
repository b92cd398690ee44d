"""Clipping by record in the shared pass, against gradients of single records that autograd computes one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Privacy, Problem, train
from normec.gradients.choice import choose_engine
from normec.gradients.engine import Block
from normec.gradients.precision import products
from normec.gradients.record_clip import RecordClip
from normec.gradients.shared import convolution, record_sums
from normec.gradients.shared import engine as engine_module
from normec.gradients.shared.convolution import windows_of
from normec.gradients.shared.engine import SharedEngine
from normec.gradients.shared.operations import OperationModel
from normec.gradients.shared.record_sums import Use, add_up, product_squares
from normec.gradients.shared.slots import NoRule, ParameterSlot
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches, BatchSource, PoissonBatches
from normec.training.fused_update import apply_fused

from ..support.forms import form
from .cases import CASES, CLASSES, Case, everything, problem
from .structures import STRUCTURES

CLOSE = 1e-10
MKLDNN: Any = torch.backends.mkldnn
CLIPS = {"clip": RecordClip(0.3), "auto by layer": RecordClip("auto", by_layer=True)}
# BatchNorm mixes records; the other cases that are left out have the same layers as one that is here.
MODELS: dict[str, Case] = STRUCTURES | {
    name: CASES[name] for name in ("mlp", "cnn", "cnn-gn", "convolutions", "norms", "regression", "binary")
}


def batches_of(of: Problem, kind: str) -> BatchSource | None:
    assert of.sizes is not None
    made: dict[str, BatchSource | None] = {
        "all records": None,
        "batches": Batches(of.sizes, 5, 1),
        "Poisson": PoissonBatches(of.sizes, 0.3, 1),
    }
    return made[kind]


def clipped(grads: list[Tensor], clip: RecordClip) -> Tensor:
    """One record's share, from the gradient of each tensor."""
    if not clip.by_layer:
        grads = [torch.cat([grad.flatten() for grad in grads])]
    each, shares = clip.bound / math.sqrt(len(grads)), []
    for grad in grads:
        length = float(grad.norm())
        scale = 1 / (math.sqrt(len(grads)) * length + 0.01) if clip.size == "auto" else min(1.0, each / length)
        shares.append(grad.flatten() * scale)
    return torch.cat(shares)


def by_hand(of: Problem, clip: RecordClip, batches: BatchSource | None, round: int) -> Tensor:
    """The gradients of all clients, record by record."""
    assert of.sizes is not None
    rows = [torch.arange(int(size)) for size in of.sizes]
    if batches is not None:
        rows = batches.draw(torch.arange(of.clients), round)
    divisors = of.sizes.double() if batches is None else batches.expected
    found = torch.zeros(of.clients, len(of.x0), dtype=torch.float64)
    parameters = {name: value.detach().requires_grad_() for name, value in of.unflatten(of.x0).items()}
    for client, own in enumerate(rows):
        for number in own.tolist():
            inputs, targets = of.records.batch(client, torch.tensor([number]))
            loss = of.loss(functional_call(of.model, parameters, (inputs,)), targets)
            grads = torch.autograd.grad(loss, list(parameters.values()))
            found[client] += clipped(list(grads), clip) / divisors[client]
    return found


QUICK = {"mlp", "cnn-gn", "gpt with tied weights", "lora", "products"}
SETTINGS = [
    ("clip", "all records"),
    ("auto by layer", "Poisson"),
    ("auto by layer", "all records"),
    ("clip", "batches"),
]
RUNS = [
    pytest.param(name, *setting, marks=() if name in QUICK and setting in SETTINGS[:2] else pytest.mark.slow)
    for name in MODELS
    for setting in (SETTINGS if name in QUICK else SETTINGS[:2])
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("name", "clip", "kind"), RUNS)
def test_sums_are_those_of_records_that_are_clipped_one_by_one(
    name: str, clip: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = problem(MODELS[name], sizes=(4, 4, 2, 3))
    assert isinstance(of.records, ResidentRecords)
    batches = batches_of(of, kind)
    engine = SharedEngine(of, of.records, batches, 1, "float32", private=True, record_clip=CLIPS[clip])
    expected = by_hand(of, CLIPS[clip], batches, 2)
    # All together; and in parts and with little memory, where norms have slack for terms that cancel.
    for block, held, close in ((1000, 2**24, CLOSE), (5, 40, 1e-7)):
        engine._block = block
        monkeypatch.setitem(record_sums._HELD, "cpu", held)
        found = everything(engine, of, 2).grads
        assert float((found - expected).abs().max()) < close * float(expected.abs().max())


@pytest.mark.parametrize("at_once", [1, 10**4, 10**9])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 5, 3, padding=1),
        nn.Conv2d(9, 4, (2, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2), bias=False),
        nn.Conv2d(8, 6, 1, stride=2),
        nn.Conv2d(8, 3, 7, padding="same", padding_mode="circular"),
    ],
)
def test_a_convolution_s_gradients_of_single_images(
    layer: nn.Conv2d, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all images fit into the cache together, or some, or none."""
    monkeypatch.setattr(convolution, "_WINDOW_FLOATS", at_once)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    draw = torch.Generator().manual_seed(3)
    images = torch.randn(7, layer.in_channels, 9, 8, dtype=torch.float64, generator=draw)
    model(images)
    data = TensorDataset(images, torch.randint(CLASSES, (7,), generator=draw))
    of = Problem(model, F.cross_entropy, [data])
    assert isinstance(of.records, ResidentRecords)
    engine = SharedEngine(of, of.records, None, 1, "float32", private=True, record_clip=CLIPS["clip"])
    expected = by_hand(of, CLIPS["clip"], None, 0)
    found = everything(engine, of, 0).grads
    assert float((found - expected).abs().max()) < CLOSE * float(expected.abs().max())


def test_tables_go_to_the_parameters_with_the_most_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of the early convolution without a table would take a product for every pair of its positions."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(8, 32, 3, stride=4, bias=False)),
        *(nn.Flatten(), nn.Linear(32 * 9, CLASSES, bias=False)),
    )
    of = Problem(model, F.cross_entropy, [TensorDataset(torch.randn(4, 1, 14, 14), torch.zeros(4, dtype=torch.int64))])
    assert isinstance(of.records, ResidentRecords)
    monkeypatch.setitem(record_sums._HELD, "cpu", 16 * 32 * 72)  # a batch is filled up to 16 records
    held: list[torch.Size] = []
    tables = record_sums.tables

    def seen(uses: dict[ParameterSlot, list[record_sums.Use]], weights: Tensor) -> dict[ParameterSlot, Tensor]:
        found = tables(uses, weights)
        held.extend(slot.shape for slot in found)
        return found

    monkeypatch.setattr(engine_module, "tables", seen)
    engine = SharedEngine(of, of.records, None, 1, "float32", private=True, record_clip=CLIPS["clip"])
    engine._block = 100
    everything(engine, of, 0)
    assert held == [torch.Size([8, 1, 3, 3])]


@pytest.mark.parametrize(("first", "blocks"), [(nn.Conv2d(1, 4, 3), [2, 2, 2, 2]), (nn.Identity(), [4, 4])])
def test_a_pass_with_convolutions_has_as_few_records_as_have_tables(first: nn.Module, blocks: list[int]) -> None:
    size = first(torch.zeros(1, 1, 16, 16)).numel()
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(size, 2**20 // size), nn.Linear(2**20 // size, CLASSES))
    data = [TensorDataset(torch.randn(16, 1, 16, 16), torch.zeros(16, dtype=torch.int64)) for _ in range(8)]
    of = Problem(model, F.cross_entropy, data)
    assert isinstance(of.records, ResidentRecords)
    engine = SharedEngine(of, of.records, None, 1, "float32", private=True, record_clip=CLIPS["clip"])
    assert [len(block.clients) for block in engine.blocks(of.x0, {}, 0)] == blocks


def test_the_norm_of_a_product_is_never_too_small() -> None:
    """Positions cancel: the gradient is a millionth of what is added up, and float32 loses it."""
    torch.manual_seed(0)
    left, right = torch.randn(200, 1, 8, 5), torch.randn(200, 1, 8, 7)
    left[:, :, 1::2], right[:, :, 1::2] = -left[:, :, ::2], right[:, :, ::2] * (1 + 1e-6 * torch.randn(200, 1, 4, 1))
    exact = (left.double().mT @ right.double()).square().sum((1, 2, 3))
    bound = product_squares(left, right).double()
    assert bool((bound >= exact).all())
    assert float(((left @ left.mT) * (right @ right.mT)).sum((1, 2, 3)).double().sub(exact).min()) < 0  # without slack
    usual = product_squares(torch.randn(200, 1, 8, 5), torch.randn(200, 1, 8, 7))
    assert bool(torch.isfinite(usual).all())


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("swapped", [False, True])
def test_factors_whose_squares_vanish_are_not_left_out_of_the_norm(positions: int, swapped: bool) -> None:
    """A record of tiny inputs and huge slopes has a gradient of ordinary size."""
    huge, tiny = torch.full((1, 1, positions, 1), 1.5e19), torch.full((1, 1, positions, 1000), 2e-23)
    left, right = (tiny, huge) if swapped else (huge, tiny)
    exact = float((left.double().mT @ right.double()).norm())
    assert 0.005 < exact < float(product_squares(left, right).sqrt())


def test_slack_is_invisible_where_nothing_cancels() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(50, 2, 6, 5), torch.randn(50, 2, 6, 7)
    exact = (left.double().mT @ right.double()).square().sum((1, 2, 3))
    assert float((product_squares(left, right).double() / exact - 1).abs().max()) < 2e-4


def layers(sizes: tuple[int, ...]) -> Problem:
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(size, 6).double(), torch.arange(size) % CLASSES) for size in sizes]
    return Problem(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double(), F.cross_entropy, clients)


@pytest.mark.parametrize("rules", [None, OperationModel])
def test_a_record_that_is_not_drawn_adds_nothing_even_if_it_fills_the_batch_up(
    rules: type[OperationModel] | None,
) -> None:
    """The table of a Poisson batch is filled up with a client's first record."""
    of = layers((4, 9))
    assert isinstance(of.records, ResidentRecords)
    of.records.inputs[0] = torch.nan
    assert of.sizes is not None
    batches = PoissonBatches(of.sizes, 0.4, 1)
    engine = SharedEngine(of, of.records, batches, 1, "float32", rules, private=True, record_clip=RecordClip(1.0))
    checked = 0
    for round in range(20):
        drawn = batches.draw(torch.arange(2), round)
        found = everything(engine, of, round)
        if 0 not in drawn[0].tolist():
            checked += len(drawn[0]) < len(drawn[1])
            assert bool(torch.isfinite(found.grads).all())
            if not len(drawn[0]):
                assert not found.grads[0].any()
        else:
            assert not bool(torch.isfinite(found.grads[0]).all())
        assert bool(torch.isfinite(found.grads[1]).all())
    assert checked > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn-gn", "gpt", "vit"])
def test_auto_takes_the_shared_pass_in_private_runs(name: str) -> None:
    of = problem(MODELS[name], sizes=(4, 3))
    engine = choose_engine("auto", of, None, 1, RecordClip(0.5), private=True)
    found = everything(engine, of).grads
    assert engine.name == "shared"
    expected = by_hand(of, RecordClip(0.5), None, 0)
    assert float((found - expected).abs().max()) < CLOSE * float(expected.abs().max())


@pytest.mark.parametrize("rules", [None, OperationModel])
def test_batch_norm_has_no_gradient_of_a_record(rules: type[OperationModel] | None) -> None:
    of = problem("small", sizes=(4, 3))
    assert isinstance(of.records, ResidentRecords)
    engine = SharedEngine(of, of.records, None, 1, "float32", rules, private=True, record_clip=RecordClip(0.5))
    with pytest.raises(NoRule, match="mixes the records"):
        everything(engine, of)


def test_bounds_hold_in_float32() -> None:
    """No client's sum is longer than its records allow, whatever the layers are."""
    for name in ("cnn-gn", "gpt", "vit"):
        of = problem(MODELS[name], dtype=torch.float32, sizes=(1, 1, 1))
        assert isinstance(of.records, ResidentRecords)
        clip = RecordClip(0.01)
        engine = SharedEngine(of, of.records, None, 1, "float32", private=True, record_clip=clip)
        lengths = everything(engine, of).grads.double().norm(dim=1)
        assert float(lengths.max()) <= 0.01 * (1 + 1e-5)
        assert float(lengths.min()) >= 0.01 * (1 - 1e-4)


def test_real_noise_keeps_the_records_apart_in_the_loop() -> None:
    """A simulation may take the shared pass; with noise that protects somebody, each record has bits of its own."""
    of = problem(MODELS["mlp"])
    for name in ("auto", "shared"):
        assert choose_engine(name, of, None, 0, CLIPS["clip"], private=True).name.startswith("shared")
        assert choose_engine(name, of, None, 0, CLIPS["clip"], private=True, contained=True).name == "loop"
    for noise, engine in (("seeded", "shared"), ("secure", "loop")):
        privacy = Privacy(sigma=1.0, unit="record", record_clip=1.0, noise=noise, trust="local")
        run = train(of, DPSGD(Clip(1.0)), lr=0.1, rounds=1, privacy=privacy)
        assert run.engine.startswith(engine)


@pytest.mark.parametrize(
    ("shape", "size", "dilation", "padding", "stride"),
    [
        ((2, 3, 9, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
        ((3, 1, 28, 28), (8, 8), (1, 1), (2, 2), (2, 2)),
        ((2, 4, 11, 6), (3, 2), (2, 3), (4, 0), (3, 1)),
        ((1, 2, 1, 9), (1, 4), (1, 2), (0, 3), (1, 2)),
    ],
)
def test_windows_by_a_view_are_those_of_unfold(
    shape: tuple[int, ...],
    size: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    stride: tuple[int, int],
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for laid_out in (x, x.to(memory_format=torch.channels_last)):
        expected = F.unfold(laid_out, size, dilation, padding, stride)
        assert torch.equal(windows_of(laid_out, size, dilation, padding, stride), expected)


class Mean(nn.Module):
    """A linear layer at every position of a record, or two of the same weights, or a convolution; then the mean."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Conv1d(4, 2, 1) if kind == "convolution" else nn.Linear(4, 2, bias=kind == "linear")

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "convolution":
            found: Tensor = self.layer(x.mT).mean(2)
            return found
        if self.kind == "one use each":
            return torch.stack([self.layer(x[:, position]) for position in range(12)]).mean(0)
        return self.layer(x).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("held", [2**24, 4])
@pytest.mark.parametrize("kind", ["linear", "convolution", "one use each"])
def test_a_record_whose_positions_cancel_moves_the_sum_by_no_more_than_the_clip(
    kind: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cancels in the norm does not cancel in the sum, where both are rounded differently."""
    monkeypatch.setitem(record_sums._HELD, "cpu", held)
    draw = torch.Generator().manual_seed(1)
    usual, targets = torch.randn(7, 12, 4, generator=draw), torch.arange(7) % 2
    clip = RecordClip(1.0)

    def sums(inputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        of = Problem(Mean(kind), F.cross_entropy, [TensorDataset(inputs, targets)])
        assert isinstance(of.records, ResidentRecords)
        engine = SharedEngine(of, of.records, None, 1, "float32", private=True, record_clip=clip)
        return everything(engine, of, 0).grads[0].double()

    for _ in range(12):
        extreme, numbers = usual.clone(), torch.randint(-50, 50, (12,), generator=draw).float()
        numbers[-1] -= numbers.sum()
        extreme[3] = 0
        extreme[3, :, 0] = numbers * 1e10
        assert float((sums(extreme) - sums(usual)).norm()) * len(usual) <= 2 * clip.bound * (1 + 1e-3)


@contextmanager
def rounded_products() -> Iterator[None]:
    """Some CPUs now round the factors of products to bfloat16."""
    before = MKLDNN.matmul.fp32_precision
    MKLDNN.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        MKLDNN.matmul.fp32_precision = before


def test_products_work_beside_settings_for_all_backends() -> None:
    """PyTorch raised an error where `allow_tf32` was read after `torch.backends.fp32_precision` had been set."""
    backends: Any = torch.backends
    settings = [backends, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, MKLDNN.matmul]

    def shown() -> list[str]:
        return [setting.fp32_precision for setting in settings]

    usual = shown()
    try:
        for general in ("tf32", "ieee", "bf16"):
            backends.fp32_precision = general
            before = shown()
            for precision in ("float32", "tf32"):
                with products(precision):
                    assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
                    assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
                    assert MKLDNN.matmul.fp32_precision in ("none", "ieee")
                assert shown() == before
    finally:
        for setting, value in zip(settings, usual, strict=True):
            setting.fp32_precision = value
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cuda.matmul.allow_tf32 = False


def test_a_cpu_adds_messages_and_records_up_without_rounding_their_factors() -> None:
    """`torch.set_float32_matmul_precision("medium")` made sums of messages half a per cent longer than their bound."""
    grads = torch.full((40, 2000), 1 + 2**-8 + 2**-9)
    with rounded_products():
        with products("tf32"):
            assert MKLDNN.matmul.fp32_precision == "ieee"
            sent = apply_fused(form(DPSGD(Clip(1.0))), Block.of(torch.arange(40), grads.clone(), grads[:, 0]), None, 0)
            weights, use = torch.ones(1, 40), Use(grads[0].shape, lambda rows, g: rows.copy_(g), (grads,))
            rows = torch.empty(1, 2000)
            add_up({}, {"one": use.each(40, grads.dtype)}, lambda _: rows, RecordClip(1.0), weights, 1)
        assert MKLDNN.matmul.fp32_precision == "bf16"
    for total in (sent.total, rows[0]):
        assert float(total.double().norm()) <= 40 * (1 + 1e-5)
