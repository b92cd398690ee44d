"""Code of the user's own that returns the same memory in every call must not mix clients or records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from normec import DPSGD, Clip, Method, Privacy, Problem, UsageError, train
from normec import distributed as cluster
from normec.data.augment import Augment
from normec.problems.batch_form import own_item

CLIENTS, RECORDS, BOUND = 6, 4, 1e-3
Kept = dict[tuple[Any, ...], Tensor]


def halved(kept: Kept, records: Tensor) -> Tensor:
    out = kept.setdefault((records.shape, records.dtype), torch.empty_like(records))
    return torch.mul(records, 0.5, out=out)


class Halved:
    def __init__(self) -> None:
        self.kept: Kept = {}

    def __call__(self, records: Tensor) -> Tensor:
        return halved(self.kept, records)


class HalvedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Kept = {}

    def forward(self, records: Tensor) -> Tensor:
        return halved(self.kept, records)


class HalvedImages:
    """An augmentation, which also gets uniform numbers."""

    draws = 1

    def __init__(self) -> None:
        self.kept: Kept = {}

    def __call__(self, records: Tensor, uniforms: Tensor) -> Tensor:  # noqa: ARG002
        return halved(self.kept, records)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(last: float) -> list[TensorDataset]:
    """Clients of which the last one is scaled by `last`."""
    draw = torch.Generator().manual_seed(1)
    scales = [1.0] * (CLIENTS - 1) + [last]
    return [
        TensorDataset(scale * torch.randn(RECORDS, 3, generator=draw), torch.arange(RECORDS) % 2) for scale in scales
    ]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("transform", [Halved, HalvedModule])
def test_a_transform_that_returns_the_same_memory_mixes_no_clients(
    transform: Callable[[], Any], batch: int | None
) -> None:
    def sent(last: float) -> Tensor:
        problem = Problem(network(), F.cross_entropy, data(last), transform=transform())
        run = train(
            problem, DPSGD(Clip(BOUND)), lr=1.0, rounds=1, batch_size=batch, privacy=Privacy(sigma=1e-12), seed=0
        )
        return (problem.x0 - run.x) * CLIENTS

    assert 0 < (sent(1.0) - sent(-40.0)).norm() <= 2 * BOUND * (1 + 1e-4)


def test_an_augmentation_that_returns_the_same_memory_mixes_no_clients() -> None:
    augment: Augment = HalvedImages()
    fast = Problem(network(), F.cross_entropy, data(-40.0), augment=augment)
    plain = Problem(network(), F.cross_entropy, data(-40.0), transform=lambda records: 0.5 * records)
    x = [train(problem, DPSGD(Clip(BOUND)), lr=1.0, rounds=2).x for problem in (fast, plain)]
    torch.testing.assert_close(x[0], x[1], rtol=0, atol=1e-7)


def test_a_transform_that_writes_to_out_is_refused_where_records_are_clipped() -> None:
    problem = Problem(network(), F.cross_entropy, data(1.0), transform=Halved())
    with pytest.raises(UsageError, match="instead of writing to out="):
        train(problem, DPSGD(Clip(1.0)), lr=1.0, rounds=1, privacy=Privacy(epsilon=4, unit="record"))


class KeptClip:
    """Clips at 1 into memory that belongs to the class, by shape."""

    bound, lipschitz = 1.0, None
    kept: ClassVar[Kept] = {}

    def __call__(self, v: Tensor, key: Any = None) -> Tensor:  # noqa: ARG002
        out = self.kept.setdefault((v.shape, v.dtype), torch.empty_like(v))
        return torch.mul(v, 1 / v.norm(dim=-1, keepdim=True).clamp(min=1), out=out)

    def payload(self, dimension: int, itemsize: int) -> int:
        return dimension * itemsize


_MESSAGES: Kept = {}
_STATES: Kept = {}


class KeptDifference(Method):
    """Error feedback whose message, draft and new state lie in global memory."""

    bound = 1.0

    def client_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def message(self, update: Tensor, state: Tensor, key: Any = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        v = update - state
        out = _MESSAGES.setdefault((v.shape, v.dtype), torch.empty_like(v))
        torch.mul(v, 1 / v.norm(dim=-1, keepdim=True).clamp(min=1), out=out)
        return out, torch.add(state, out, out=_STATES.setdefault((v.shape, v.dtype), torch.empty_like(v)))

    def commit(self, draft: Tensor, sent: Tensor) -> Tensor:  # noqa: ARG002
        return _STATES[draft.shape, draft.dtype].copy_(draft)

    def absent(self, state: Tensor, rounds: int = 1) -> Tensor:  # noqa: ARG002
        return _STATES.setdefault((state.shape, state.dtype), torch.empty_like(state)).copy_(state)


def functions(own: float, position: int = -1) -> Problem:
    """Clients with constant gradients along the first coordinate, `own` for one of them and 5 for the others."""
    slopes = [5.0] * CLIENTS
    slopes[position] = own
    made: Any = Problem.from_functions([lambda x, g=g: g * x[0] for g in slopes], torch.zeros(2, dtype=torch.float64))
    return made


@pytest.mark.parametrize("method", [DPSGD(KeptClip()), KeptDifference()], ids=["operator", "method"])
def test_a_method_that_returns_the_same_memory_mixes_no_clients(method: Method) -> None:
    def sent(last: float) -> float:
        run = train(functions(last), method, lr=1.0, rounds=1, privacy=Privacy(sigma=1e-9), seed=0)
        return -CLIENTS * float(run.x[0])

    assert sent(5.0) == pytest.approx(CLIENTS, abs=1e-6)
    assert sent(0.0) == pytest.approx(CLIENTS - 1, abs=1e-6)
    assert sent(-5.0) == pytest.approx(CLIENTS - 2, abs=1e-6)


def test_the_states_of_such_a_method_stay_those_of_their_clients() -> None:
    run = train(functions(-5.0), KeptDifference(), lr=1e-3, rounds=3, privacy=Privacy(sigma=1e-9), seed=0)
    expected = [3.0] * (CLIENTS - 1) + [-3.0]
    np.testing.assert_allclose(run.state.memory[:, 0].numpy(), expected, atol=1e-6)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("last", [5.0, 0.0, -5.0])
def test_nor_does_it_in_an_optimizer_of_several_clients(last: float) -> None:
    x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    privacy = Privacy(sigma=1e-9, noise="seeded")
    optimizer = cluster.DPSGD([x], lr=1.0, operator=KeptClip(), clients=3, privacy=privacy, rounds=3, seed=0)
    for client, slope in enumerate((5.0, 5.0, last)):
        with optimizer.client(client):
            (slope * x[0]).backward()
    optimizer.step()
    assert -3 * float(x.detach()[0]) == pytest.approx(2 + np.sign(last), abs=1e-6)


class KeptItems(Dataset[tuple[Any, Tensor]]):
    """A data set that reads every record into the same tensor or array."""

    def __init__(self, records: Tensor, array: bool) -> None:
        self.records, self.array = records, array
        self.kept = torch.zeros(records.shape[1])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        self.kept.copy_(self.records[index])
        return (self.kept.numpy() if self.array else self.kept), torch.tensor(index % 2)


class KeptStream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, items: KeptItems) -> None:
        self.items = items

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.items[i] for i in range(len(self.items)))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", ["tensor", "array", "stream"])
def test_a_data_set_that_returns_the_same_memory_has_different_records(kind: str) -> None:
    clients = [one.tensors[0] for one in data(1.0)]
    kept = [KeptItems(records, array=kind == "array") for records in clients]
    found: list[Any] = [KeptStream(items) for items in kept] if kind == "stream" else list(kept)
    usual = [TensorDataset(records, torch.arange(len(records)) % 2) for records in clients]
    how: dict[str, Any] = {"lr": 0.1, "rounds": 2, "seed": 0, "privacy": Privacy(sigma=1e-12, unit="record")}
    x = [train(Problem(network(), F.cross_entropy, sets), DPSGD(Clip(1.0)), **how).x for sets in (found, usual)]
    torch.testing.assert_close(x[0], x[1], rtol=0, atol=1e-6)


class KeptServer(Method):
    """Momentum at the server, whose state lies where `message` writes too."""

    bound = 1.0

    def server_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        out = _MESSAGES.setdefault((update.shape, update.dtype), torch.empty_like(update))
        return torch.mul(update, 1 / update.norm(dim=-1, keepdim=True).clamp(min=1), out=out), state

    def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out = _MESSAGES.setdefault(((1, *state.shape), state.dtype), torch.empty_like(state)[None])
        new = torch.add(0.5 * state, mean_message, out=out[0])
        return new.clone(), new


class KeptPublic(KeptServer):
    """Messages that begin at a public centre, which lies where messages are written."""

    def broadcast(self, state: Tensor) -> dict[str, Tensor]:
        out = _MESSAGES.setdefault(((1, *state.shape), state.dtype), torch.empty_like(state)[None])
        return {"centre": out[0].copy_(state)}

    def message(  # type: ignore[override]
        self, update: Tensor, state: Any, key: Any, public: dict[str, Tensor]
    ) -> tuple[Tensor, Any]:
        return super().message(update + 1000 * public["centre"], state, key)


def heavy_ball(parameters: Any) -> torch.optim.Optimizer:
    class HeavyBall(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
            (p,) = self.param_groups[0]["params"]
            out = KeptClip.kept.setdefault(((1, *p.shape), p.dtype), torch.empty_like(p)[None])
            before = self.state[p].get("velocity", torch.zeros_like(p))
            self.state[p]["velocity"] = torch.add(0.5 * before, p.grad, out=out[0])
            p.data.sub_(self.param_groups[0]["lr"] * out[0])

    return HeavyBall()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [(KeptServer(), None), (KeptPublic(), None), (DPSGD(KeptClip()), heavy_ball)],
    ids=["server step", "broadcast", "server optimizer"],
)
def test_the_server_s_numbers_do_not_lie_where_messages_are_written(method: Method, optimizer: Any) -> None:
    """Every message is along the first coordinate, and one client moves each mean by at most 2/n."""

    def path(own: float, position: int) -> Tensor:
        how: dict[str, Any] = {"server_optimizer": optimizer} if optimizer is not None else {}
        privacy = Privacy(sigma=1e-9)
        return train(functions(own, position), method, lr=0.1, rounds=rounds, privacy=privacy, seed=0, **how).x

    rounds = 1 if isinstance(method, KeptPublic) else 4  # later centres depend on what was sent
    honest = 0.1 * 2 / CLIENTS * sum(2 - 0.5**k for k in range(rounds))
    for position in (0, CLIENTS - 1):
        assert (path(5.0, position) - path(-5.0, position)).norm() <= honest * (1 + 1e-6)


def test_clients_that_hold_the_same_memory_are_noted() -> None:
    kept, targets = torch.zeros(RECORDS, 3), torch.arange(RECORDS) % 2
    sets = [TensorDataset(kept.copy_(one.tensors[0]), targets) for one in data(1.0)]
    run = train(
        Problem(network(), F.cross_entropy, sets), DPSGD(Clip(1.0)), lr=0.1, rounds=1, privacy=Privacy(epsilon=8)
    )
    assert any("if a loader reuses its memory" in note for note in run.privacy.notes)


class Pair(NamedTuple):
    inputs: Tensor
    target: Tensor


def test_items_of_any_structure_are_copied() -> None:
    weight = torch.ones(2, requires_grad=True)
    kept = weight * 2  # deepcopy refuses it
    copied = own_item(Pair(kept, torch.tensor(1)))
    assert isinstance(copied, Pair)
    assert copied.inputs.data_ptr() != kept.data_ptr()
    torch.testing.assert_close(copied.inputs, kept.detach())
