"""The round loop: the same seed the same bits whatever is watched; rows that say what a direct computation says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, EF21, GD, Callback, Clip, Clip21, FixedSize, Logging, NormEC, Problem, RandK, Run, TopK, train

from ..support.runs import states

LR, SEED = 0.2, 5


def data(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64) + 0.5 * seed
    return TensorDataset(x, torch.randint(0, 3, (rows,), generator=generator))


CLIENTS = [data(8, 0), data(11, 1), data(5, 2)]
TEST = data(20, 3)


def problem() -> Problem:
    torch.manual_seed(0)
    return Problem(nn.Linear(3, 3).double(), F.cross_entropy, CLIENTS, TEST)


def local(x: Tensor, i: int) -> tuple[float, Tensor]:
    """f_i and its gradient by softmax regression's formula."""
    inputs, targets = CLIENTS[i].tensors
    weight, bias = x[:9].view(3, 3), x[9:]
    logits = inputs @ weight.T + bias
    chance = torch.softmax(logits, 1)
    loss = -torch.log(chance[torch.arange(len(targets)), targets]).mean()
    slope = (chance - F.one_hot(targets, 3)) / len(targets)
    return float(loss), torch.cat(((slope.T @ inputs).flatten(), slope.sum(0)))


METHODS = {
    "normec": NormEC(0.1, 0.3),
    "clip21": Clip21(0.3, decay=0.01),
    "top-k": EF21(TopK(3)),
    "rand-k": EF21(RandK(3)),
    "dpsgd": DPSGD(Clip(0.5)),
    "gd": GD(),
}


class ProgressDisplay(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, first_round: int, rounds: int) -> None:
        self.seen.append(("begin", first_round, rounds))

    def round(self, round: int) -> None:
        self.seen.append(("round", round))

    def row(self, row: dict[str, Any]) -> None:
        torch.rand(3)  # a callback may draw; it must not matter
        self.seen.append(("row", row["round"]))

    def end(self, run: Run) -> None:
        self.seen.append(("end", run.state.round))


WATCHED: list[dict[str, Any]] = [
    {"logging": Logging(every=1)},
    {"logging": Logging(every=7, evaluate_every=3)},
    {"logging": Logging(full_gradient=True, every=2)},
    {"callbacks": [ProgressDisplay()]},
    {"logging": Logging(evaluate_every=1, full_gradient=True), "callbacks": [ProgressDisplay()]},
]


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("setting", ["full", "batches", "sampled"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_the_same_seed_gives_the_same_bits_however_it_is_watched(method: Any, setting: str) -> None:
    options: dict[str, Any] = {"lr": LR, "rounds": 14, "seed": SEED}
    options |= {"full": {}, "batches": {"batch_size": 4}, "sampled": {"participation": FixedSize(2)}}[setting]
    quiet = train(problem(), method, logging=Logging(every=1000, evaluate_every=1000), **options)
    for watching in WATCHED:
        watched = train(problem(), method, **options, **watching)
        for name, value in states(quiet).items():
            assert torch.equal(value, states(watched)[name]), name
        assert quiet.state.messages == watched.state.messages


def test_different_seeds_differ_where_there_is_chance_and_only_there() -> None:
    def end(seed: int, method: Any, **options: Any) -> Tensor:
        return train(problem(), method, lr=LR, rounds=5, seed=seed, **options).x

    assert not torch.equal(end(0, GD(), batch_size=4), end(1, GD(), batch_size=4))
    assert not torch.equal(end(0, GD(), participation=FixedSize(2)), end(1, GD(), participation=FixedSize(2)))
    assert not torch.equal(end(0, EF21(RandK(3))), end(1, EF21(RandK(3))))
    assert torch.equal(end(0, NormEC(0.1, 0.1)), end(1, NormEC(0.1, 0.1)))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("sampled", [False, True])
def test_rows_say_what_a_direct_computation_says(sampled: bool) -> None:
    """Row k against x^k and g^k of runs that stop at k."""
    options: dict[str, Any] = {"lr": LR, "seed": SEED, "participation": FixedSize(2) if sampled else None}
    method = Clip21(0.3)
    run = train(problem(), method, rounds=6, logging=Logging(every=1, evaluate_every=2), **options)
    assert run.history.rounds("round") == list(range(7))
    assert run.history.rounds("accuracy") == run.history.rounds("test_loss") == [0, 2, 4, 6]
    for k, row in enumerate(run.history):
        if k:
            stopped = train(problem(), method, rounds=k, **options)
            x = stopped.x
            memory = stopped.state.clients.get("memory", torch.zeros(3, 12, dtype=torch.float64))
        else:
            x, memory = problem().x0, torch.zeros(3, 12, dtype=torch.float64)
        drawn = FixedSize(2).draw(3, k, SEED) if sampled else torch.arange(3)
        assert drawn is not None
        found = [local(x, i) for i in drawn.tolist()]
        errors = [float((grad - memory[i]).norm()) for i, (_, grad) in zip(drawn.tolist(), found, strict=True)]
        assert row["loss"] == pytest.approx(sum(loss for loss, _ in found) / len(found), abs=1e-12)
        assert row["memory_error"] == pytest.approx(sum(errors) / len(errors), abs=1e-12)
        if sampled:
            assert "grad_norm" not in row
        else:
            assert row["grad_norm"] == pytest.approx(float(sum(grad for _, grad in found).norm() / 3), abs=1e-12)  # type: ignore[union-attr]
        assert row["messages"] == k * len(drawn)
        assert row["bytes"] == row["messages"] / 3 * 12 * 8
        if k % 2 == 0:
            logits = TEST.tensors[0] @ x[:9].view(3, 3).T + x[9:]
            assert row["test_loss"] == pytest.approx(float(F.cross_entropy(logits, TEST.tensors[1])), abs=1e-12)
            assert row["accuracy"] == float((logits.argmax(1) == TEST.tensors[1]).double().mean())


FULL: list[dict[str, Any]] = [{"batch_size": 4}, {"participation": FixedSize(2)}]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("options", FULL, ids=["batches", "sampled"])
def test_full_gradient_rows_are_exact(options: dict[str, Any]) -> None:
    options = options | {"lr": LR, "seed": SEED}
    run = train(problem(), Clip21(0.3), rounds=4, logging=Logging(every=1, full_gradient=True), **options)
    for k, row in enumerate(run.history):
        state = train(problem(), Clip21(0.3), rounds=k, **options).state if k else None
        x = state.x if state else problem().x0
        memory = state.memory if state else torch.zeros(3, 12, dtype=torch.float64)
        found = [local(x, i) for i in range(3)]
        expected = {
            "loss": sum(loss for loss, _ in found) / 3,
            "grad_norm": float(sum(grad for _, grad in found).norm() / 3),  # type: ignore[union-attr]
            "memory_error": sum(float((grad - memory[i]).norm()) for i, (_, grad) in enumerate(found)) / 3,
        }
        assert {column: row[column] for column in expected} == pytest.approx(expected, abs=1e-12)


def test_bytes_count_what_a_sparse_message_takes() -> None:
    run = train(problem(), EF21(TopK(3)), lr=LR, rounds=10, logging=Logging(every=5, evaluate_every=5))
    assert run.history["bytes"] == [0, 5 * 3 * (8 + 4), 10 * 3 * (8 + 4)]
    assert run.history["messages"] == [0, 15, 30]


def test_the_step_size_may_follow_a_schedule() -> None:
    def schedule(k: int) -> float:
        return 0.5 / (1 + k) if k != 3 else 0.0

    run = train(problem(), GD(), lr=schedule, rounds=8)
    x = problem().x0
    for k in range(8):
        x = x - schedule(k) * sum(local(x, i)[1] for i in range(3)) / 3
    assert float((run.x - x).abs().max()) < 1e-13


def test_mini_batches_and_epochs() -> None:
    """8 records on average and batches of 3: an epoch is two rounds; with full batches it is one."""
    by_epochs = train(problem(), GD(), lr=LR, epochs=4, batch_size=3, seed=SEED)
    assert by_epochs.rounds == by_epochs.state.round == 8
    assert torch.equal(by_epochs.x, train(problem(), GD(), lr=LR, rounds=8, batch_size=3, seed=SEED).x)
    assert train(problem(), GD(), lr=LR, epochs=3).rounds == 3


def test_callbacks_hear_everything_in_order() -> None:
    watcher = ProgressDisplay()
    run = train(problem(), GD(), lr=LR, rounds=4, logging=Logging(every=2, evaluate_every=100), callbacks=[watcher])
    assert watcher.seen == [
        ("begin", 0, 4),
        ("row", 0),
        ("round", 1),
        ("round", 2),
        ("row", 2),
        ("round", 3),
        ("round", 4),
        ("row", 4),
        ("end", 4),
    ]
    assert run.finished
    assert run.engine == "shared"


@pytest.mark.slow
def test_defaults_log_about_500_rows_and_evaluate_about_20_times() -> None:
    one = Problem.from_functions([lambda x: (x**2).sum()], torch.ones(1))
    assert 500 <= len(train(one, GD(), lr=0.01, rounds=1600).history) <= 560
    run = train(problem(), GD(), lr=LR, rounds=100)
    assert run.history.rounds("test_loss") == [0, 1, 2, 4, *range(5, 101, 5)]
    assert len(run.history) == 101


@pytest.mark.slow
def test_at_every_row_the_last_evaluation_is_at_most_half_of_the_rounds_old() -> None:
    for rounds in (50, 100, 1100):
        history = train(problem(), GD(), lr=LR, rounds=rounds).history
        evaluated = set(history.rounds("test_loss"))
        assert len(evaluated) <= 35
        last = 0
        for row in history:
            last = row["round"] if row["round"] in evaluated else last
            assert last >= row["round"] / 2


def test_evaluations_that_were_asked_for_are_the_only_ones() -> None:
    run = train(problem(), GD(), lr=LR, rounds=100, logging=Logging(evaluate_every=40))
    assert run.history.rounds("test_loss") == [0, 40, 80, 100]


def test_timings_have_parts_within_the_total() -> None:
    timings = train(problem(), GD(), lr=LR, rounds=20).timings
    parts = [timings[part] for part in ("gradients", "update", "evaluation", "checkpoint")]
    assert min(parts) >= 0
    assert 0 < sum(parts) <= timings["total"] * 1.01
