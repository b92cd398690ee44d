"""BatchNorm: each client's statistics are those of a plain run of its own; evaluation uses their average."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import GD, Logging, Memory, NormEC, Poisson, Problem, train
from normec.gradients.choice import choose_engine
from normec.problems.problem import averaged

ROUNDS, LR = 12, 0.2


def data(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64) * (1 + seed) + seed
    return TensorDataset(x, torch.randint(0, 3, (rows,), generator=generator))


def network(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=momentum), nn.ReLU(), nn.Linear(5, 3)).double()


CLIENTS = [data(8, 0), data(13, 1), data(6, 2)]
TEST = data(30, 3)


def plain_run(momentum: float | None) -> list[nn.Module]:
    """One plain module a client, parameters set alike after each round, buffers never exchanged."""
    models: list[nn.Module] = [network(momentum).train() for _ in CLIENTS]
    for _ in range(ROUNDS):
        for model, dataset in zip(models, CLIENTS, strict=True):
            model.zero_grad()
            F.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1]).backward()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(p.grad for p in same) / len(same)  # type: ignore[misc]
                for p in same:
                    p -= LR * mean
    return models


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
def test_each_client_s_buffers_are_a_plain_run_s(momentum: float | None) -> None:
    models = plain_run(momentum)
    run = train(Problem(network(momentum), F.cross_entropy, CLIENTS, TEST), GD(), lr=LR, rounds=ROUNDS)
    for name, rows in run.state.buffers.items():
        for i, model in enumerate(models):
            assert torch.allclose(rows[i], dict(model.named_buffers())[name], rtol=0, atol=1e-12), (name, i)
    assert not torch.allclose(run.state.buffers["1.running_mean"][0], run.state.buffers["1.running_mean"][1])


def test_the_model_and_the_last_evaluation_use_the_average() -> None:
    models = plain_run(0.1)
    run = train(Problem(network(), F.cross_entropy, CLIENTS, TEST), GD(), lr=LR, rounds=ROUNDS)
    merged = copy.deepcopy(models[0]).eval()
    with torch.no_grad():
        for name, buffer in merged.named_buffers():
            rows = [dict(model.named_buffers())[name] for model in models]
            if buffer.is_floating_point():
                buffer.copy_(sum(rows) / 3)  # type: ignore[arg-type]
        outputs = merged(TEST.tensors[0])
    assert run.model is not None
    assert torch.allclose(run.model(TEST.tensors[0]), outputs, atol=1e-12)
    assert int(run.model[1].num_batches_tracked) == ROUNDS  # type: ignore[index]
    assert run.history["test_loss"][-1] == pytest.approx(float(F.cross_entropy(outputs, TEST.tensors[1])), abs=1e-12)


def test_floats_are_averaged_and_counters_take_the_largest() -> None:
    rows = {
        "mean": torch.tensor([[1.0, 2.0], [3.0, 6.0]]),
        "count": torch.tensor([4, 9]),
        "on": torch.tensor([0, 1]) > 0,
    }
    found = averaged(rows)
    assert found["mean"].tolist() == [2.0, 4.0]
    assert found["count"].item() == 9
    assert found["on"].item() is True


def test_a_client_not_drawn_keeps_its_buffers() -> None:
    problem = Problem(network(), F.cross_entropy, CLIENTS)
    run = train(problem, NormEC(0.1, 0.1), lr=LR, rounds=30, participation=Poisson(0.3), seed=4)
    drawn = [Poisson(0.3).draw(3, k, 4) for k in range(30)]
    times = torch.stack([torch.bincount(d, minlength=3) for d in drawn if d is not None]).sum(0)
    assert len(set(times.tolist())) > 1
    assert torch.equal(run.state.buffers["1.num_batches_tracked"], times)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "options",
    [
        {"logging": Logging(every=1)},
        {"logging": Logging(evaluate_every=1)},
        {"logging": Logging(full_gradient=True, every=1)},
    ],
)
def test_logging_does_not_move_the_buffers(options: dict[str, object]) -> None:
    problem = Problem(network(), F.cross_entropy, CLIENTS, TEST)
    quiet = train(problem, GD(), lr=LR, rounds=9, batch_size=4, logging=Logging(every=100, evaluate_every=100))
    looked = train(problem, GD(), lr=LR, rounds=9, batch_size=4, **options)  # type: ignore[arg-type]
    assert torch.equal(quiet.x, looked.x)
    for name, rows in quiet.state.buffers.items():
        assert torch.equal(rows, looked.state.buffers[name]), name


def test_gradient_as_initial_memory_does_not_count_as_a_forward_pass() -> None:
    problem = Problem(network(), F.cross_entropy, CLIENTS)
    run = train(problem, NormEC(0.1, 0.1), lr=LR, rounds=5, memory=Memory(initial="gradient"))
    assert run.state.buffers["1.num_batches_tracked"].tolist() == [5, 5, 5]


def test_row_k_of_a_short_run_is_row_k_of_a_long_one() -> None:
    problem = Problem(network(), F.cross_entropy, CLIENTS, TEST)
    short = train(problem, GD(), lr=LR, rounds=3, logging=Logging(every=1, evaluate_every=1))
    long = train(problem, GD(), lr=LR, rounds=5, logging=Logging(every=1, evaluate_every=1))
    assert short.history.rows == long.history.rows[:4]


def test_row_0_describes_the_untrained_model() -> None:
    problem = Problem(network(), F.cross_entropy, CLIENTS, TEST)
    run = train(problem, GD(), lr=LR, rounds=3)
    outputs = network().eval()(TEST.tensors[0]).detach()
    assert run.history["test_loss"][0] == pytest.approx(float(F.cross_entropy(outputs, TEST.tensors[1])), abs=1e-12)


class Remembers(nn.Module):
    """A buffer that is assigned anew, not changed in place: legal, and common for moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3).double()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + x.mean(0)
        out: Tensor = self.net(x)
        return out


def test_an_assigned_buffer_is_kept() -> None:
    run = train(Problem(Remembers(), F.cross_entropy, CLIENTS), GD(), lr=LR, rounds=2)
    expected = torch.stack([2 * dataset.tensors[0].mean(0) for dataset in CLIENTS])
    assert torch.allclose(run.state.buffers["seen"], expected)


class Odd(nn.Module):
    """Buffers that plain PyTorch trains with: entries that share memory, a history, a part in the backward pass,
    one that a state_dict leaves out.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(4, 3).double(), kind
        self.seen: Tensor
        start = torch.ones(1, dtype=torch.float64)
        held = start.expand(3) if kind == "expanded" else start.repeat(3)
        self.register_buffer("seen", held, persistent=kind != "not persistent")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if self.kind in ("multiplies", "not persistent"):  # then autograd keeps it for the backward pass
            out = out * self.seen
        if self.kind in ("not detached", "not persistent") and self.training:
            mean = out.mean(0)
            self.seen = 0.9 * self.seen + 0.1 * (mean if self.kind == "not detached" else mean.detach())
        return out


CONSTANT = ("expanded", "multiplies")


@pytest.mark.parametrize(
    "kind",
    [
        "not detached",
        "multiplies",
        "expanded",
        "not persistent",
    ],
)
def test_odd_buffers_train_as_in_plain_pytorch(kind: str) -> None:
    run = train(Problem(Odd(kind), F.cross_entropy, CLIENTS, TEST), GD(), lr=LR, rounds=3)
    assert run.finished
    assert torch.equal(run.state.buffers["seen"][0], torch.ones(3, dtype=torch.float64)) == (kind in CONSTANT)
    assert run.model is not None
    loss = float(F.cross_entropy(run.model(TEST.tensors[0]), TEST.tensors[1]).detach())
    assert run.history["test_loss"][-1] == pytest.approx(loss, abs=1e-12)  # the model handed out is the one evaluated


def test_initial_buffers_stay_initial() -> None:
    problem = Problem(network(), F.cross_entropy, CLIENTS)
    before, own = problem.initial_buffers(), problem.initial_buffers()
    for _ in choose_engine("loop", problem, None, 0).blocks(problem.x0, own, 0):
        pass
    assert not torch.equal(own["1.running_mean"], before["1.running_mean"])
    for name, rows in problem.initial_buffers().items():
        assert torch.equal(rows, before[name]), name
