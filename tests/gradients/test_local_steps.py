"""Updates by local steps: every engine yields what a plain loop of steps on one client after the other yields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import LocalSteps, Problem, models
from normec.gradients.choice import choose_engine
from normec.gradients.loop import LoopEngine
from normec.problems.objective import Buffers
from normec.sampling.batches import Batches, PoissonBatches

from .cases import BATCH, CLASSES, SIZES, apart, everything, problem
from .test_private_engines import Scales, built, seeded

LR = 0.05
DRAWN = torch.tensor([0, 2, 3])


def linear(kind: str, sizes: tuple[int, ...] = SIZES, **options: Any) -> Problem:
    torch.manual_seed(2)
    made = models.build(kind, (6,), CLASSES if kind == "softmax" else 2)
    classes = CLASSES if kind == "softmax" else 2
    clients = [TensorDataset(torch.randn(size, 6), torch.randint(0, classes, (size,))) for size in sizes]
    return Problem(made.model, made.loss, clients, **options).to(torch.device("cpu"), torch.float64)


def of(name: str) -> Problem:
    if name == "softmax":
        return linear(name, penalty=models.NonconvexPenalty(0.3))
    if name == "softmax, own penalty":
        return linear("softmax", penalty=lambda x: 0.3 * x.square().sum() + x.sin().sum())
    if name == "softmax, full batches":
        return linear("softmax", (9, 12, 5, 7))
    return linear(name) if name == "logistic" else problem(name)


def batches(given: Problem, kind: str) -> Any:
    assert given.sizes is not None
    makes = {"batches": lambda: Batches(given.sizes, BATCH, 1), "coins": lambda: PoissonBatches(given.sizes, 0.4, 1)}
    return makes[kind]() if kind in makes else None


def by_hand(given: Problem, drawn: Any, local: LocalSteps, counts: list[int], round: int, clients: Tensor) -> Any:
    """Updates and losses by sgd, and the buffers; local step j of round k has the batch of round k · K_i + j."""
    loop, buffers = LoopEngine(given, drawn, 1), given.initial_buffers()
    updates, losses = given.x0.new_zeros(given.clients, len(given.x0)), given.x0.new_zeros(given.clients)
    for i in clients.tolist():
        y = given.x0.clone()
        for j in range(counts[i]):
            (block,) = loop.blocks(y, buffers, round * counts[i] + j, torch.tensor([i]))
            losses[i] = block.losses[0] if j == 0 else losses[i]
            y = y - local.lr * (block.grads[0] + local.prox * (y - given.x0))
        updates[i] = given.x0 - y if local.scale == "difference" else (given.x0 - y) / (counts[i] * local.lr)
    return updates, losses, buffers


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("clients", [None, DRAWN], ids=["all", "drawn"])
@pytest.mark.parametrize("records", ["batches", "all records"])
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(("mlp", "batched"), ("cnn", "batched"), ("small", "batched"), ("augmented pixels", "batched")),
        *(("softmax", "linear"), ("logistic", "linear"), ("small", "loop")),
        *(("softmax, own penalty", "linear"), ("softmax, full batches", "linear")),
    ],
)
def test_updates_are_those_of_steps_by_hand(name: str, engine: str, records: str, clients: Tensor | None) -> None:
    """ "small" has BatchNorm: a client's statistics go on from one of its steps to the next."""
    given = of(name)
    local = LocalSteps(steps=4, lr=LR, prox=0.3)
    chosen = torch.arange(given.clients) if clients is None else clients
    counts = [4] * given.clients
    made = choose_engine(engine, given, batches(given, records), 1, local=local)
    for round in (0, 1, 5):
        found = everything(made, given, round, clients)
        updates, losses, buffers = by_hand(given, batches(given, records), local, counts, round, chosen)
        torch.testing.assert_close(found.grads, updates, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.losses, losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.buffers, buffers, rtol=0, atol=1e-10)
    assert made.name == engine


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("name", "engine"), [("mlp", "batched"), ("augmented pixels", "batched"), ("softmax", "linear")]
)
def test_epochs_give_every_client_as_many_steps_as_it_has_batches(name: str, engine: str) -> None:
    given = of(name)
    local = LocalSteps(epochs=3, lr=LR, scale="difference")
    few = Batches(given.sizes, 3, 1)  # type: ignore[arg-type]
    counts = [3 * max(1, size // 3) for size in SIZES]
    made = choose_engine(engine, given, few, 1, local=local)
    for clients in (None, DRAWN):
        found = everything(made, given, 2, clients)
        chosen = torch.arange(given.clients) if clients is None else clients
        updates, losses, _ = by_hand(given, Batches(given.sizes, 3, 1), local, counts, 2, chosen)  # type: ignore[arg-type]
        torch.testing.assert_close(found.grads, updates, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.losses, losses, rtol=0, atol=1e-10)
    assert made.name == engine


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("local", [{"momentum": 0.8}, {"optimizer": "adam"}], ids=["momentum", "adam"])
@pytest.mark.parametrize(("name", "engine"), [("mlp", "batched"), ("softmax", "linear")])
def test_local_optimizers_are_the_loop_s(name: str, engine: str, local: dict[str, Any]) -> None:
    given = of(name)
    for how in ({"steps": 4}, {"epochs": 3}):
        work = LocalSteps(lr=LR, **how, **local)  # type: ignore[arg-type]
        few = Batches(given.sizes, 3, 1)  # type: ignore[arg-type]
        loop, fast = (choose_engine(kind, given, few, 1, local=work) for kind in ("loop", engine))
        assert apart(everything(fast, given, 1), everything(loop, given, 1)) < 1e-10
        assert fast.name == engine


def test_closed_form_on_records_drawn_by_coins() -> None:
    given, local = of("softmax"), LocalSteps(steps=3, lr=LR)
    loop, fast = (choose_engine(kind, given, batches(given, "coins"), 1, local=local) for kind in ("loop", "linear"))
    assert apart(everything(fast, given, 1), everything(loop, given, 1)) < 1e-10


def test_small_blocks_and_full_gradients_are_the_same() -> None:
    given, local = of("mlp"), LocalSteps(steps=3, lr=LR)
    whole = choose_engine("batched", given, batches(given, "batches"), 1, local=local)
    expected = everything(whole, given, 1)
    parts: Any = choose_engine("batched", given, batches(given, "batches"), 1, local=local)
    parts._fast._engine._block = 2 * BATCH
    assert apart(everything(parts, given, 1), expected) < 1e-12
    assert len(list(parts.blocks(given.x0, given.initial_buffers(), 1))) == 3
    loop = LoopEngine(given, None, 1)
    assert apart(everything(whole, given, 1, full=True), everything(loop, given, 1, full=True)) < 1e-12


def test_gradients_at_the_start_go_with_the_updates() -> None:
    given, local = of("cnn"), LocalSteps(steps=2, lr=LR)
    made = choose_engine("batched", given, batches(given, "batches"), 1, local=local)
    expected = everything(LoopEngine(given, batches(given, "batches"), 1), given, 2)  # round 1 begins with batch 2
    for block in made.blocks(given.x0, given.initial_buffers(), 1):
        torch.testing.assert_close(block.gradients, expected.grads[block.clients], rtol=0, atol=1e-10)
        torch.testing.assert_close(block.losses, expected.losses[block.clients], rtol=0, atol=1e-10)
        assert not torch.allclose(block.grads, block.gradients)


def test_dropout_is_left_to_the_loop_and_drawn_anew_for_every_step(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    clients = [TensorDataset(torch.randn(size, 6), torch.randint(0, CLASSES, (size,))) for size in SIZES]
    given = Problem(model, F.cross_entropy, clients).to(torch.device("cpu"), torch.float64)
    local = LocalSteps(steps=3, lr=LR)
    made = choose_engine("auto", given, batches(given, "batches"), 1, local=local)
    found = everything(made, given, 2)
    updates, losses, _ = by_hand(given, batches(given, "batches"), local, [3] * 5, 2, torch.arange(5))
    torch.testing.assert_close(found.grads, updates, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.losses, losses, rtol=0, atol=1e-10)
    assert made.name == "loop"
    assert "engine batched is not used; the loop runs instead" in caplog.text


def test_the_shared_pass_cannot_make_local_steps(caplog: pytest.LogCaptureFixture) -> None:
    made = choose_engine("shared", of("mlp"), None, 1, local=LocalSteps(steps=2, lr=LR))
    assert made.name == "loop"
    assert "every client has a model of its own" in caplog.text


def test_an_engine_of_the_users_own_makes_local_steps_too() -> None:
    given, local = of("mlp"), LocalSteps(steps=3, lr=LR)
    own = LoopEngine(given, None, 1)
    made = choose_engine(own, given, None, 1, local=local)
    assert (
        apart(everything(made, given, 1), everything(choose_engine("loop", given, None, 1, local=local), given, 1)) == 0
    )


class Named(nn.Module):
    """Calls its layers as functions, by the names of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.scales = nn.Parameter(torch.randn(4, 1, 3, 3)), nn.Parameter(torch.ones(4))
        self.shifts, self.fc = nn.Parameter(torch.zeros(4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(input=x, weight=self.kernels, stride=1)
        x = F.group_norm(input=x, num_groups=2, weight=self.scales, bias=self.shifts)
        x = F.adaptive_max_pool2d(input=F.max_pool2d(input=x, kernel_size=2), output_size=1)
        found: Tensor = self.fc(x.flatten(1))
        return found


def test_a_model_may_name_the_arguments_of_its_layers() -> None:
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(size, 1, 6, 6), torch.randint(0, CLASSES, (size,))) for size in SIZES]
    given = Problem(Named(), F.cross_entropy, clients).to(torch.device("cpu"), torch.float64)
    local = LocalSteps(steps=2, lr=LR)
    made = choose_engine("batched", given, None, 1, local=local)
    updates, _, _ = by_hand(given, None, local, [2] * 5, 0, torch.arange(5))
    torch.testing.assert_close(everything(made, given, 0).grads, updates, rtol=0, atol=1e-10)
    assert made.name == "batched"


@pytest.mark.parametrize("engine", ["auto", "batched", "shared"])
def test_private_runs_show_a_users_model_one_client_at_a_time(engine: str) -> None:
    def updates(outlier: int | None) -> tuple[str, Tensor]:
        given = built(seeded(Scales), outlier)
        made = choose_engine(engine, given, None, 0, private=True, local=LocalSteps(steps=3, lr=LR))
        empty: Buffers = {}
        rows = torch.cat([block.grads.clone() for block in made.blocks(given.x0, empty, 0)])
        return made.name, rows

    (usual, plain), (name, moved) = updates(None), updates(4)
    assert usual == name
    others = [client for client in range(len(plain)) if client != 4]
    assert torch.equal(plain[others], moved[others])
    assert not torch.equal(plain[4], moved[4])
