"""Data of any shape: the gradients of every form are those of plain autograd, and what cannot be trained is refused."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import normec as n
from normec.gradients.choice import ENGINES, choose_engine
from normec.gradients.loop import LoopEngine
from normec.gradients.record_clip import RecordClip

CE = nn.functional.cross_entropy
SIZES = (4, 6, 5)


class TwoInputs(nn.Module):
    """A model of two inputs, by position or by name, whose outputs are a tensor or a dict."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(3, 4, dtype=torch.float64), nn.Embedding(5, 4, dtype=torch.float64)
        self.out, self.form = nn.Linear(4, 3, dtype=torch.float64), form

    def forward(self, values: Tensor, kind: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.out(torch.tanh(self.left(values) + self.right(kind)))
        if self.form == "tensor":
            return logits
        loss = CE(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


def tensors(client: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(client)
    size = SIZES[client % len(SIZES)]
    values = torch.randn(size, 3, dtype=torch.float64, generator=draw)
    return values, torch.randint(5, (size,), generator=draw), torch.randint(3, (size,), generator=draw)


class Items(Dataset[Any]):
    """A map-style data set of any items, as `datasets.Dataset` is one."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def dicts(client: int, label: str = "labels") -> list[dict[str, Any]]:
    return [dict(zip(("values", "kind", label), row, strict=True)) for row in zip(*tensors(client), strict=True)]


def plain_python(client: int) -> list[dict[str, Any]]:
    """Lists and numbers, as a `datasets.Dataset` without a format gives them."""
    return [{name: value.tolist() for name, value in item.items()} for item in dicts(client)]


def padded(items: list[Any]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def by_model(model: nn.Module, batch: Any) -> Any:
    return model(**batch)


def by_hand(model: nn.Module, batch: Any) -> Tensor:
    return CE(model(batch["values"], batch["kind"]), batch["labels"])


def by_attribute(model: Any, batch: Any) -> Tensor:
    """Calls parts of the model instead of its forward."""
    values, kind, labels = batch
    return CE(model.out(torch.tanh(model.left(values) + model.right(kind))), labels)


def by_logits(outputs: Any, targets: Tensor) -> Tensor:
    return CE(outputs["logits"], targets)


Make = Callable[[int], Any]
FORMS: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "tuples": (lambda i: Items(list(zip(*tensors(i), strict=True))), "tensor", {"loss": CE}),
    "a list": (lambda i: list(zip(*tensors(i), strict=True)), "tensor", {"loss": CE}),
    "three tensors": (lambda i: TensorDataset(*tensors(i)), "tensor", {"loss": CE}),
    "a subset": (lambda i: Subset(TensorDataset(*tensors(i)), range(SIZES[i])), "tensor", {"loss": CE}),
    "nested": (lambda i: Items([((a, b), c) for a, b, c in zip(*tensors(i), strict=True)]), "tensor", {"loss": CE}),
    "dicts": (lambda i: Items(dicts(i)), "tensor", {"loss": CE}),
    "a dict and a target": (
        lambda i: Items([({"values": a, "kind": b}, c) for a, b, c in zip(*tensors(i), strict=True)]),
        "tensor",
        {"loss": CE},
    ),
    "named target": (lambda i: Items(dicts(i, "diagnosis")), "tensor", {"loss": CE, "target": "diagnosis"}),
    "plain Python": (lambda i: Items(plain_python(i)), "tensor", {"loss": CE}),
    "outputs in a dict": (lambda i: Items(dicts(i)), "dict", {"loss": by_logits}),
    "streams": (lambda i: Stream(dicts(i)), "tensor", {"loss": CE}),
    "generators": (lambda i: (item for item in dicts(i)), "tensor", {"loss": CE}),
    "loaders": (lambda i: DataLoader(Items(dicts(i)), batch_size=2, shuffle=True), "tensor", {"loss": CE}),
    "loaders of streams": (lambda i: DataLoader(Stream(dicts(i)), batch_size=2), "tensor", {"loss": CE}),
    "loaders that collate": (
        lambda i: DataLoader(Items(dicts(i)), batch_size=2, collate_fn=padded),
        "tensor",
        {"loss": CE},
    ),
    "collate": (lambda i: Items(dicts(i)), "tensor", {"loss": CE, "collate": padded}),
    "the model's own loss": (lambda i: Items(dicts(i)), "dict", {"loss": None, "batch_loss": by_model}),
    "a loss of the batch": (lambda i: Items(dicts(i)), "tensor", {"loss": None, "batch_loss": by_hand}),
    "a loss of parts": (lambda i: TensorDataset(*tensors(i)), "tensor", {"loss": None, "batch_loss": by_attribute}),
}


def problem(form: str, **more: Any) -> n.Problem:
    make, outputs, how = FORMS[form]
    test = {} if form in ("generators",) else {"test": make(0)}
    if isinstance(test.get("test"), list):
        test = {"test": Items(test["test"])}
    return n.Problem(TwoInputs(outputs), clients=[make(i) for i in range(3)], **test, **how, **more)


def expected(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Losses and gradients of all clients on these records, by plain autograd."""
    losses, grads = [], []
    for client, own in enumerate(rows):
        model = TwoInputs()
        values, kind, labels = (part[own] for part in tensors(client))
        loss = CE(model(values, kind), labels)
        loss.backward()
        losses.append(loss.detach())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(losses), torch.stack(grads)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_plain_autograd(form: str, engine: str) -> None:
    held = problem(form)
    assert held.sizes is not None
    assert held.sizes.tolist() == list(SIZES)
    found = choose_engine(engine, held, None, seed=0)
    (block,) = found.blocks(held.x0, held.initial_buffers(), 0)
    losses, grads = expected([torch.arange(size) for size in SIZES])
    close = 1e-6 if form == "plain Python" else 1e-12  # Python's floats become PyTorch's default type
    torch.testing.assert_close(block.losses, losses, rtol=close, atol=close)
    torch.testing.assert_close(block.grads, grads, rtol=close, atol=close)


@pytest.mark.parametrize("form", ["dicts", "three tensors", "a loss of the batch"])
def test_batches_are_drawn_from_every_form(form: str) -> None:
    held = problem(form)
    rows = [torch.tensor([2, 0]), torch.tensor([5]), torch.tensor([1, 3, 4])]
    for client, own in enumerate(rows):
        point = held.x0.clone().requires_grad_()
        loss = held.client_loss(point, client, own, {}, None)
        (grad,) = torch.autograd.grad(loss, point)
        torch.testing.assert_close(grad, expected(rows)[1][client], rtol=1e-12, atol=1e-14)
        summed = held.client_loss(point, client, own, {}, None, divisor=7.0)
        assert float(summed) == pytest.approx(float(loss) * len(own) / 7)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name not in ("auto", "loop")])
def test_engines_for_pairs_of_tensors_fall_back_to_the_loop(engine: str) -> None:
    assert isinstance(choose_engine(engine, problem("dicts"), None, seed=0), LoopEngine)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", ["tuples", "dicts", "a loss of the batch", "the model's own loss"])
def test_one_record_is_one_item(form: str) -> None:
    """The clipped gradient is the mean of the items' clipped gradients, each by plain autograd."""
    held, bound = problem(form), 0.3
    (block,) = LoopEngine(held, None, 0, RecordClip(bound, False)).blocks(held.x0, held.initial_buffers(), 0)
    for client, size in enumerate(SIZES):
        total = torch.zeros_like(held.x0)
        for record in range(size):
            rows = [torch.tensor([record]) if other == client else torch.tensor([0]) for other in range(3)]
            grad = expected(rows)[1][client]
            total += grad * min(1.0, bound / float(grad.norm()))
        torch.testing.assert_close(block.grads[client], total / size, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_private_runs_take_every_form_with_their_accuracy() -> None:
    how: dict[str, Any] = {"lr": 0.1, "rounds": 3, "seed": 0}
    for form in ("dicts", "three tensors", "the model's own loss"):
        for privacy in (
            n.Privacy(epsilon=5.0, trust="central"),
            n.Privacy(epsilon=5.0, trust="central", unit="record", record_clip=1.0),
        ):
            run = n.train(problem(form), n.NormEC(0.1, 0.2), privacy=privacy, **how)
            assert run.privacy is not None
            assert run.privacy.epsilon == pytest.approx(5.0, rel=1e-5)
            values, kind, labels = tensors(0)
            assert run.model is not None
            right = (
                TwoInputs.forward(run.model, values, kind)["logits"]
                if form.startswith("the")
                else run.model(values, kind)
            ).argmax(1) == labels  # type: ignore[arg-type]
            assert run.history["accuracy"][-1] == pytest.approx(float(right.double().mean()))


def test_records_that_a_collate_function_may_mix_are_not_protected_one_by_one() -> None:
    privacy = n.Privacy(epsilon=5.0, trust="central", unit="record", record_clip=1.0)
    with pytest.raises(n.UsageError, match="collate"):
        n.train(problem("collate"), n.NormEC(0.1, 0.2), lr=0.1, rounds=2, privacy=privacy)


def test_predictions_take_what_the_model_takes() -> None:
    run = n.train(problem("dicts"), n.GD(), lr=0.1, rounds=2)
    values, kind, _ = tensors(1)
    assert run.model is not None
    wanted = run.model(values, kind).detach()
    torch.testing.assert_close(run.predict({"values": values, "kind": kind}, batch_size=2), wanted)
    torch.testing.assert_close(run.predict((values, kind)), wanted)
    encoded = UserDict(values=values, kind=kind)  # as a tokenizer of Hugging Face returns its tensors
    torch.testing.assert_close(run.predict(encoded), wanted)


def test_the_transform_sees_the_inputs_of_a_dict() -> None:
    def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**inputs, "values": 2 * inputs["values"]}

    held = problem("dicts", transform=doubled)
    values, kind, labels = tensors(0)
    loss = held.client_loss(held.x0, 0, None, {}, None)
    assert float(loss) == pytest.approx(float(CE(TwoInputs()(2 * values, kind), labels)))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield (torch.zeros(3), torch.zeros((), dtype=torch.int64))


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no target": ([{"values": torch.zeros(3), "kind": torch.zeros(())}], {}, "name the target among them"),
    "two targets": ([{"a": torch.zeros(3), "label": 0, "labels": 0}], {}, "name the target among them"),
    "another target": ([{"a": torch.zeros(3), "labels": 0}], {"target": "y"}, "have 'a', 'labels', not the target 'y'"),
    "another name": (
        [{"a": torch.zeros(3), "labels": 0}],
        {},
        "fails on the first records: TypeError.*inputs are a dict of 'a'.*these names as keyword arguments",
    ),
    "text": ([{"text": "words", "labels": 0}], {}, "'text' of the records of client 0 holds str"),
    "unlike lengths": ([{"a": [1, 2], "labels": 0}, {"a": [1], "labels": 1}], {}, "do not fit into one batch"),
    "alone": ([(torch.zeros(3),)], {}, "pairs of an input and a target"),
    "no batch": ([3.0], {"collate": lambda _: 3.0}, "must hold tensors"),
    "one row": (
        [(torch.zeros(3), 0)] * 2,
        {"collate": lambda _: (torch.zeros(1, 3), torch.zeros(2))},
        "first dimension",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_data_that_cannot_be_trained_on_are_refused(case: str) -> None:
    items, how, message = WRONG[case]
    held = n.Problem(nn.Linear(3, 2), CE, [Items(items)], **how)
    with pytest.raises(n.UsageError, match=message):
        n.train(held, n.GD(), lr=0.1, rounds=1)


def test_sets_without_an_end_or_without_records_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normec.problems.client_data._MOST_STREAMED", 100)
    with pytest.raises(n.UsageError, match="does not end"):
        n.Problem(nn.Linear(3, 2), CE, [Endless()])
    with pytest.raises(n.UsageError, match="what one record is"):
        n.Problem(nn.Linear(3, 2), CE, [DataLoader(Stream([]), batch_size=None)])
    with pytest.raises(n.UsageError, match="client 1 has no records"):
        n.Problem(TwoInputs(), CE, [Items(dicts(0)), Stream([])])
    with pytest.raises(n.UsageError, match="iterated over"):
        n.Problem(nn.Linear(3, 2), CE, [3])


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return CE(outputs, targets, reduction="sum")


def test_an_infinite_mean_is_not_taken_for_a_sum() -> None:
    extreme = TensorDataset(torch.full((6, 3), 1e38), torch.zeros(6, 2))
    assert n.Problem(nn.Linear(3, 2), nn.functional.mse_loss, [extreme]).clients == 1


def test_losses_that_are_no_means_are_found_at_the_start() -> None:
    sets = [TensorDataset(torch.randn(6, 3), torch.arange(6) % 2)]
    for loss, message in (
        (summed, "the sum over a batch"),
        (partial(CE, reduction="sum"), "reduction='sum'"),
        (nn.CrossEntropyLoss(reduction="sum"), "reduction='sum'"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), "class_weights"),
        (partial(CE, weight=torch.tensor([1.0, 2.0])), "class_weights"),
    ):
        with pytest.raises(n.UsageError, match=message):
            n.Problem(nn.Linear(3, 2), loss, sets)
    fetched = n.Problem(TwoInputs(), lambda outputs, targets: summed(outputs, targets), [Items(dicts(0))])
    with pytest.raises(n.UsageError, match="the sum over a batch"):
        n.train(fetched, n.GD(), lr=0.1, rounds=1)
    with pytest.raises(n.UsageError, match="not both"):
        n.Problem(nn.Linear(3, 2), CE, sets, batch_loss=by_hand)
    with pytest.raises(n.UsageError, match="augment is for inputs in one tensor"):
        n.Problem(TwoInputs(), CE, [Items(dicts(0))], augment=n.data.augment.CropFlip())


def test_a_loss_of_pytorch_that_gets_a_dict_is_refused_with_the_cure() -> None:
    items = [{"values": torch.zeros(3, dtype=torch.float64), "kind": torch.tensor(1), "labels": torch.tensor(0)}] * 4
    cure = r"give a loss of one entry, .* torch\.nn\.functional\.cross_entropy\(outputs\['logits'\], targets\)"
    with pytest.raises(n.UsageError, match=cure):
        n.train(n.Problem(TwoInputs("dict"), CE, [items]), n.GD(), lr=0.1, rounds=1)
    picked = n.Problem(TwoInputs("dict"), lambda outputs, targets: CE(outputs["logits"], targets), [items])
    assert n.train(picked, n.GD(), lr=0.1, rounds=1).finished
