"""Metrics, named test sets and class weights against values that are computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import normec as n
from normec.gradients.choice import choose_engine
from normec.gradients.loop import LoopEngine
from normec.gradients.record_clip import RecordClip

CE = nn.functional.cross_entropy


def table(seed: int, size: int = 12) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, 4, generator=draw), torch.randint(3, (size,), generator=draw))


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def recall_of_one(outputs: Tensor, targets: Tensor) -> float:
    """Not a mean over records, so that batches and sets must be joined."""
    hits = (outputs.argmax(1) == 1) & (targets == 1)
    return float(hits.sum() / (targets == 1).sum())


class Recall:
    """The same as an object that sees batches, as torchmetrics' are."""

    def __init__(self) -> None:
        self.hits = self.all = 0

    def reset(self) -> None:
        self.hits = self.all = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.hits += int(((outputs.argmax(1) == 1) & (targets == 1)).sum())
        self.all += int((targets == 1).sum())

    def compute(self) -> Tensor:
        return torch.tensor(self.hits / self.all if self.all else float("nan"))


class Two(Recall):
    def compute(self) -> Any:
        return {"recall": super().compute(), "count": self.all}


def outputs_of(held: n.Problem, data: TensorDataset) -> tuple[Tensor, Tensor]:
    inputs, targets = data.tensors
    return held.model_at(held.x0, {})(inputs).detach(), targets


def test_metrics_of_sets_by_name_are_those_of_all_outputs_at_once() -> None:
    clean, shifted, kept = table(10), table(11, 30), table(12, 20)
    metrics = {"recall": recall_of_one, "streamed": Recall(), "two": Two()}
    held = n.Problem(net(), CE, [table(1)], test={"clean": clean, "shifted": shifted}, validation=kept, metrics=metrics)
    found = held.evaluate(held.x0, {}, batch_size=7)
    both = TensorDataset(*(torch.cat(pair) for pair in zip(clean.tensors, shifted.tensors, strict=True)))
    for prefix, data in {"": both, "validation_": kept, "clean_": clean, "shifted_": shifted}.items():
        outputs, targets = outputs_of(held, data)
        wanted = recall_of_one(outputs, targets)
        for name in ("recall", "streamed", "two_recall"):
            assert found[f"{prefix}{name}"] == pytest.approx(wanted), (prefix, name)
        assert found[f"{prefix}two_count"] == int((targets == 1).sum())
        assert found[f"{prefix}accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
        loss = found["test_loss" if not prefix else f"{prefix}loss"]
        assert loss == pytest.approx(float(CE(outputs, targets)), rel=1e-6)
    assert "accuracy_mean_over_clients" not in found
    assert held.evaluate(held.x0, {}) == pytest.approx(found)  # nothing is left of the first evaluation


class TwoTargets(Dataset[Any]):
    """Records with two class numbers each, of which the second is not predicted."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, record: int) -> Any:
        inputs, target = self.data[record]
        return inputs, (target, (target + 1) % 3)


def test_several_targets_of_a_record_reach_the_metrics_and_have_no_accuracy() -> None:
    seen = table(3)

    def second_is_next(_: Tensor, targets: Any) -> float:
        return float((targets[1] == (targets[0] + 1) % 3).float().mean())

    def first(outputs: Tensor, targets: Any) -> Tensor:
        return CE(outputs, targets[0])

    metrics = {"next": second_is_next, "recall": lambda outputs, targets: recall_of_one(outputs, targets[0])}
    held = n.Problem(net(), first, [TwoTargets(table(1))], test=TwoTargets(seen), metrics=metrics)
    found = held.evaluate(held.x0, {}, batch_size=5)
    outputs, targets = outputs_of(held, seen)
    assert found.keys() == {"test_loss", "next", "recall"}
    assert found["test_loss"] == pytest.approx(float(CE(outputs, targets)), rel=1e-6)
    assert found["next"] == 1
    assert found["recall"] == pytest.approx(recall_of_one(outputs, targets))


def test_a_batch_loss_of_pairs_with_scores_is_evaluated_without_an_accuracy() -> None:
    def batch_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        outputs = model(batch[0])
        return {"loss": CE(outputs, batch[1]), "logits": outputs}

    held = n.Problem(net(), None, [table(1)], test=table(3), batch_loss=batch_loss)
    outputs, targets = outputs_of(held, table(3))
    found = held.evaluate(held.x0, {})
    assert found == {"test_loss": pytest.approx(float(CE(outputs, targets)), rel=1e-6)}


def test_metrics_are_recorded_with_every_evaluation() -> None:
    held = n.Problem(net(), CE, [table(1), table(2)], test=table(3), metrics={"recall": recall_of_one})
    run = n.train(held, n.GD(), lr=0.1, rounds=4, logging=n.Logging(every=1, evaluate_every=2))
    assert run.history.rounds("recall") == [0, 2, 4]
    assert run.model is not None
    inputs, targets = table(3).tensors
    assert run.history["recall"][-1] == pytest.approx(recall_of_one(run.model(inputs).detach(), targets))


def test_a_metric_without_a_value_is_left_out_of_its_row() -> None:
    held = n.Problem(net(), CE, [table(1)], test=table(3), metrics={"never": lambda *_: float("nan")})
    run = n.train(held, n.GD(), lr=0.1, rounds=2)
    assert run.finished
    assert not run.history["never"]


def test_metrics_and_names_that_cannot_be_columns_are_refused() -> None:
    for wrong, message in (
        ([recall_of_one], "a dict of metrics"),
        ({"my metric": recall_of_one}, "letters, digits"),
        ({"recall": 3}, "a function of outputs"),
        ({"recall": Recall}, "a function of outputs"),
    ):
        with pytest.raises(n.UsageError, match=message):
            n.Problem(net(), CE, [table(1)], test=table(3), metrics=wrong)  # type: ignore[arg-type]
    with pytest.raises(n.UsageError, match="letters, digits"):
        n.Problem(net(), CE, [table(1)], test={"a b": table(3)})
    for more in ({"metrics": {"loss": recall_of_one}}, {"test": {"validation": table(4)}}):
        held = n.Problem(net(), CE, [table(1)], **{"test": table(3), **more})  # type: ignore[arg-type]
        with pytest.raises(n.UsageError, match="has a column"):
            n.train(held, n.GD(), lr=0.1, rounds=1)
    held = n.Problem(net(), CE, [table(1)], test=table(3), metrics={"whole": lambda outputs, _: outputs})
    with pytest.raises(n.UsageError, match=r"must be one number.*\(12, 3\)"):
        n.train(held, n.GD(), lr=0.1, rounds=1)


WEIGHTS = (0.5, 2.0, 1.5)


@pytest.mark.parametrize("engine", ["loop", "shared", "batched", "auto"])
def test_class_weights_multiply_the_losses_of_the_records(engine: str) -> None:
    data = [table(1, 8), table(2, 8)]
    held = n.Problem(net().double(), CE, data, class_weights=WEIGHTS)
    (block,) = choose_engine(engine, held, None, seed=0).blocks(held.x0, {}, 0)
    for client, own in enumerate(data):
        model = net().double()
        inputs, targets = own.tensors
        each = CE(model(inputs.double()), targets, reduction="none")
        (each * torch.tensor(WEIGHTS)[targets]).mean().backward()
        grad = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(block.grads[client], grad, rtol=1e-10, atol=1e-12)


def test_class_weights_count_for_single_records_too() -> None:
    """With PyTorch's own weights the weight of a batch of one record would cancel."""
    held = n.Problem(net().double(), CE, [table(1, 5)], class_weights=WEIGHTS)
    (block,) = LoopEngine(held, None, 0, RecordClip(1e9, False)).blocks(held.x0, {}, 0)
    (plain,) = LoopEngine(held, None, 0).blocks(held.x0, {}, 0)
    torch.testing.assert_close(block.grads, plain.grads, rtol=1e-10, atol=1e-12)


def test_class_weights_that_make_no_sense_are_refused() -> None:
    for weights, loss, message in (
        ((), CE, "one per class"),
        ((1.0, -1.0, 1.0), CE, "numbers >= 0"),
        ((0.0, 0.0, 0.0), CE, "not all 0"),
        (WEIGHTS, nn.functional.mse_loss, "cross_entropy"),
    ):
        with pytest.raises(n.UsageError, match=message):
            n.Problem(net(), loss, [table(1)], class_weights=weights)
