"""Rules by operation: models of any structure have the loop's gradients, and rules compute what is large."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Problem
from normec.gradients.choice import choose_engine
from normec.gradients.loop import LoopEngine
from normec.gradients.record_clip import RecordClip
from normec.gradients.shared import layers
from normec.gradients.shared.engine import SharedEngine
from normec.gradients.shared.operations import OperationModel
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches

from .cases import BATCH, CASES, CLASSES, apart, everything, problem
from .structures import STRUCTURES

CLOSE = 1e-10
MANY = {"resnet20", "resnet20-gn"}  # the same operations as in other cases, many times


def by_operation(of: Problem) -> tuple[LoopEngine, SharedEngine]:
    assert isinstance(of.records, ResidentRecords)
    assert of.sizes is not None
    batches = Batches(of.sizes, BATCH, 1)
    return LoopEngine(of, batches, 1), SharedEngine(of, of.records, batches, 1, "float32", OperationModel)


def compare(of: Problem) -> None:
    loop, shared = by_operation(of)
    for round, clients in ((0, None), (4, torch.tensor([0, 3, 4]))):
        assert apart(everything(shared, of, round, clients), everything(loop, of, round, clients)) < CLOSE
    shared._block = 18
    assert apart(everything(shared, of, 6, full=True), everything(loop, of, 6, full=True)) < CLOSE


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", STRUCTURES)
def test_gradients_are_the_loop_s(name: str) -> None:
    compare(problem(STRUCTURES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in MANY])
def test_models_of_layers_are_computed_as_well(name: str) -> None:
    compare(problem(name))


def by_table(of: Problem) -> set[str]:
    """The parameters with a gradient that no rule computed."""
    _, shared = by_operation(of)
    found: list[int] = []
    collect = OperationModel.collect

    def watched(self: OperationModel) -> None:
        found.extend(i for i, table in enumerate(self._tables) if table.grad is not None)
        collect(self)

    with mock.patch.object(OperationModel, "collect", watched):
        everything(shared, of)
    names = [name for name, parameter in of.model.named_parameters() if parameter.requires_grad]
    return {names[i] for i in found}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt", set()),
        ("gpt with tied weights", set()),
        ("vit", {"first", "positions"}),
        ("lora", set()),
        ("products", {"bias", "scale", "outer"}),  # parts and products of parameters have tables
        ("mobile", set()),
        ("transposed convolutions", set()),
    ],
)
def test_only_small_parameters_have_a_gradient_for_every_client_in_a_table(name: str, expected: set[str]) -> None:
    assert by_table(problem(STRUCTURES[name])) == expected


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "private"), [("gpt with tied weights", False), ("vit", True), ("cross attention", False), ("lora", True)]
)
def test_they_take_the_shared_pass(name: str, private: bool) -> None:
    of = problem(STRUCTURES[name])
    engine = choose_engine("auto", of, None, 1, private=private)
    assert apart(everything(engine, of), everything(LoopEngine(of, None, 1), of)) < CLOSE
    assert engine.name == "shared"


def test_bfloat16_passes_are_the_loop_s_to_its_precision() -> None:
    of = problem(STRUCTURES["gpt"], dtype=torch.float32)
    assert isinstance(of.records, ResidentRecords)
    shared = SharedEngine(of, of.records, None, 1, "bf16", OperationModel)
    found = everything(shared, of)
    expected = everything(LoopEngine(of, None, 1, None, "bf16"), of)
    assert found.grads.dtype == torch.float32
    assert float((found.grads - expected.grads).norm() / expected.grads.norm()) < 0.05


class Text(nn.Module):
    """A model of another library, which returns its outputs with a name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.model(numbers).logits
        return found


def language(outputs: Tensor, targets: Tensor) -> Tensor:
    return (
        F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
        if outputs.ndim == 3
        else F.cross_entropy(outputs, targets[:, 0])
    )


def hugging_face(kind: str) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "bert":
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(vocab_size=20, max_position_embeddings=12, num_labels=4, **shape, **still)
        return Text(transformers.BertForSequenceClassification(config))
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=20, n_positions=12, n_embd=16, n_layer=2, n_head=2, **still)
    config.use_cache = False
    model = transformers.GPT2LMHeadModel(config)
    if kind == "gpt2 with adapters":
        peft: Any = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(model, adapters)
    return Text(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt2 with adapters"])
def test_models_of_transformers_take_the_shared_pass(kind: str) -> None:
    model = hugging_face(kind)
    draw = torch.Generator().manual_seed(0)
    clients = [
        TensorDataset(torch.randint(0, 20, (5, 7), generator=draw), torch.randint(0, 4, (5, 7), generator=draw))
        for _ in range(3)
    ]
    of = Problem(model, language, clients).to(torch.device("cpu"), torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = choose_engine("auto", of, None, 1)
        found = everything(engine, of)
    assert engine.name == "shared"
    assert apart(found, everything(LoopEngine(of, None, 1), of)) < CLOSE


@pytest.mark.parametrize("clip", [None, RecordClip(0.3)])
@pytest.mark.parametrize("name", ["gpt with tied weights", "padded embedding"])
def test_a_product_with_one_hot_vectors_adds_up_the_rows_of_an_embedding(
    name: str, clip: RecordClip | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU does for small tables."""
    monkeypatch.setitem(layers._ONE_HOT, "cpu", 2**25)
    of = problem(STRUCTURES[name])
    assert isinstance(of.records, ResidentRecords)
    engine = SharedEngine(of, of.records, None, 1, "float32", OperationModel, record_clip=clip)
    with mock.patch.object(layers.aten, "embedding_dense_backward", side_effect=AssertionError("not by a product")):
        found = everything(engine, of)
    assert apart(found, everything(LoopEngine(of, None, 1, clip), of)) < CLOSE


def test_an_embedding_whose_gradients_depend_on_the_whole_batch_is_refused() -> None:
    of = Problem(
        nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(8, CLASSES)),
        F.cross_entropy,
        [TensorDataset(torch.randint(0, 9, (5, 2)), torch.arange(5) % CLASSES)] * 2,
    )
    engine = choose_engine("shared", of, None, 1)
    everything(engine, of)
    assert engine.name == "loop"
