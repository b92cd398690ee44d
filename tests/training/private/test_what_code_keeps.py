"""The sums of a private run move by what is charged for, whatever code of the caller's own keeps and draws."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, Callback, Compute, Privacy, Problem, SmoothedNorm, train
from normec.data.augment import Augment
from normec.privacy.mechanism import Mechanism
from normec.training.repeatability import machine_facts

CHARGED = 2.0  # one client is replaced by another, and Ψ shortens messages to 1
PRIVACY = Privacy(epsilon=8, delta=1e-5, relation="replace", trust="secure-sum")
Sums = Callable[..., Tensor]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sums]:
    """The sums of a private run without their noise; x stays where it is."""
    seen: list[Tensor] = []
    usual = Mechanism.outgoing

    def outgoing(self: Mechanism, total: Tensor, *more: Any, **named: Any) -> Any:
        seen.append(total.clone())
        return usual(self, total, *more, **named)

    monkeypatch.setattr(Mechanism, "outgoing", outgoing)

    def of(problem: Any, rounds: int = 3, method: Any = None, **more: Any) -> Tensor:
        seen.clear()
        method = DPSGD(SmoothedNorm(0.01)) if method is None else method
        train(problem, method, lr=lambda _: 0.0, rounds=rounds, privacy=PRIVACY, seed=0, **more)
        return torch.stack(seen)

    return of


def within(one: Tensor, other: Tensor) -> None:
    moved = (one - other).norm(dim=1)
    assert float(moved.max()) <= CHARGED * (1 + 1e-6), moved


def clients(other: bool, last: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Data of six clients, of which the first is replaced, or the last has another number of records."""
    draw = torch.Generator().manual_seed(0)
    found = [
        (1 + 0.1 * torch.randn(size, 4, generator=draw), 1 + 0.1 * torch.randn(size, 3, generator=draw))
        for size in (6, 6, 6, 6, 6, last)
    ]
    if other:
        found[0] = (found[0][0] + 4, found[0][1])
    return found


def zero() -> nn.Linear:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Longest:
    """Pads texts to the longest one that it has seen."""

    def __init__(self) -> None:
        self.length = 0

    def __call__(self, items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        self.length = max(self.length, *(len(text) for text, _ in items))
        padded = [F.pad(text, (0, self.length - len(text))) for text, _ in items]
        return torch.stack(padded), torch.tensor([label for _, label in items])


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.scores = nn.Embedding(10, 4), nn.Linear(4, 2)
        nn.init.zeros_(self.scores.weight)

    def forward(self, texts: Tensor) -> Tensor:
        found: Tensor = self.scores(self.words(texts).mean(1))
        return found


def texts(other: bool) -> list[list[tuple[Tensor, int]]]:
    draw = torch.Generator().manual_seed(0)
    found = [[(torch.randint(1, 10, (3 + i % 3,), generator=draw), 1) for i in range(6)] for _ in range(14)]
    if other:
        found[0] = [(torch.randint(1, 10, (60,), generator=draw), 1) for _ in range(6)]
    return found


@pytest.mark.parametrize("folder", [False, True])
def test_the_checksums_of_a_folder_leave_nothing_in_a_collate_function(sums: Sums, folder: bool) -> None:
    """They read the first record of every client; the texts of all others were as long as the first one since."""

    def run(other: bool) -> Tensor:
        of = Problem(Mean(), F.cross_entropy, texts(other), collate=Longest())  # type: ignore[arg-type]
        return sums(of, out=tempfile.mkdtemp() if folder else None)

    within(run(False), run(True))


class Centred:
    """A collate function that subtracts the mean of the first batch that it has seen."""

    mean: Tensor | None = None

    def __call__(self, items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.stack(parts) for parts in zip(*items, strict=True))
        self.mean = inputs.mean(0) if self.mean is None else self.mean
        return inputs - self.mean, targets


class Unchanged(Augment):
    draws = 1

    def __call__(self, inputs: Tensor, uniforms: Tensor) -> Tensor:  # noqa: ARG002
        return inputs


def test_a_problem_with_an_augmentation_leaves_nothing_in_a_collate_function(sums: Sums) -> None:
    """Whether it gets one tensor is seen from a record of the first client."""

    def run(other: bool) -> Tensor:
        data = [list(zip(*pair, strict=True)) for pair in clients(other)]
        return sums(Problem(nn.Sequential(zero()), F.mse_loss, data, collate=Centred(), augment=Unchanged()))  # type: ignore[arg-type]

    within(run(False), run(True))


class Bare:
    """What an objective of the caller's own has beside its clients' losses."""

    __slots__ = ()
    augment = sizes = None
    statistics = False

    def initial_buffers(self) -> dict[str, Tensor]:
        return {}

    def evaluate(self, *_: object) -> dict[str, float]:
        return {}

    def model_at(self, *_: object) -> None:
        return None

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def to(self, *_: object) -> Self:
        return self


class Objective(Bare):
    """An objective of the caller's own; `centred` is what a subclass keeps."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data, self.clients, self.x0 = data, len(data), torch.zeros(12)

    def centred(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def client_loss(self, x: Tensor, client: int, *_: object) -> Tensor:
        inputs, targets = self.data[client]
        return F.mse_loss(self.centred(inputs) @ x.view(4, 3), targets)


class ByData(Objective):
    """Keeps the first mean by `data`, which counts no change."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(data)
        self.mean = torch.zeros(4)

    def centred(self, inputs: Tensor) -> Tensor:
        if not self.mean.any():
            self.mean.data.copy_(inputs.mean(0))
        return inputs - self.mean


def of_class(data: list[tuple[Tensor, Tensor]]) -> Objective:
    """One of a class that is made for it and keeps the first mean."""

    class OfClass(Objective):
        mean: Tensor | None = None

        def centred(self, inputs: Tensor) -> Tensor:
            if self.mean is None:
                type(self).mean = inputs.mean(0)
            return inputs - self.mean  # type: ignore[operator]

    return OfClass(data)


def in_default(data: list[tuple[Tensor, Tensor]]) -> Objective:
    """One of a class that is made for it and keeps the first mean in a default value."""

    class InDefault(Objective):
        def centred(self, inputs: Tensor, kept: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
            return inputs - kept.setdefault("mean", inputs.mean(0))

    return InDefault(data)


class First(nn.Module):
    mean: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = inputs.mean(0) if self.mean is None else self.mean
        return inputs - self.mean


class InDict(Objective):
    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(data)
        self.parts = {"inputs": [First()]}

    def centred(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.parts["inputs"][0](inputs)
        return found


class InModule(Objective):
    """Keeps the first mean in a module of PyTorch, in an attribute that a problem has too."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(data)
        self.model = nn.BatchNorm1d(4, momentum=1.0, affine=False)

    def centred(self, inputs: Tensor) -> Tensor:
        mean = self.model.running_mean
        assert mean is not None
        if not mean.any():
            self.model(inputs)
        return inputs - mean


class InModel(Objective):
    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(data)
        self.model = nn.Sequential(First())

    def centred(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.model(inputs)
        return found


class InBuffers(InModule):
    """The same, with so many buffers in a list that they might be the clients' data."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(data)
        self.held = [*self.model.buffers(), *torch.zeros(100, 2).unbind()]


@dataclass(slots=True)
class InSlots(Bare):
    """An objective without a dictionary."""

    data: list[tuple[Tensor, Tensor]]
    mean: Any = None

    @property
    def clients(self) -> int:
        return len(self.data)

    @property
    def x0(self) -> Tensor:
        return torch.zeros(12)

    def client_loss(self, x: Tensor, client: int, *_: object) -> Tensor:
        inputs, targets = self.data[client]
        self.mean = inputs.mean(0) if self.mean is None else self.mean
        return F.mse_loss((inputs - self.mean) @ x.view(4, 3), targets)


class Steps(list[int]):
    """A list that is called as a function."""

    mean: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        self.mean = inputs.mean(0) if self.mean is None else self.mean
        return inputs - self.mean


def by_functions(centred: Any, data: list[tuple[Tensor, Tensor]]) -> Any:
    def loss(pair: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        used = centred if callable(centred) else next(iter(centred))
        return F.mse_loss(used(pair[0]) @ x.view(4, 3), pair[1])

    return Problem.from_functions([partial(loss, pair) for pair in data], torch.zeros(12))


class Subclass(Problem):
    """A problem that keeps the first mean in an attribute that it had before."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.mean, self.parts = torch.zeros(4), {"targets": First()}
        super().__init__(nn.Sequential(zero()), F.mse_loss, [TensorDataset(*pair) for pair in data])

    def value(self, x: Tensor, inputs: Any, targets: Any, *more: Any, **named: Any) -> Any:
        if not self.mean.any():
            self.mean.data.copy_(inputs.mean(0))
        self.parts["targets"](targets)
        shift = self.parts["targets"].mean
        return super().value(x, inputs - self.mean, targets - shift, *more, **named)


@pytest.mark.parametrize(
    "make",
    [
        *(ByData, of_class, in_default, InDict, InModule, InModel, InBuffers, InSlots, Subclass),
        *(lambda data: by_functions(Steps(), data), lambda data: by_functions(frozenset([First()]), data)),
    ],
)
def test_an_objective_keeps_nothing_of_a_client(sums: Sums, make: Callable[[Any], Any]) -> None:
    """Not by changes that tensors do not count, in classes, defaults, nested parts or modules of PyTorch."""
    within(sums(make(clients(False))), sums(make(clients(True))))


class Closure(nn.Module):
    """Subtracts the mean of the first inputs that it has seen, which its function keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, kept = zero(), dict[str, Tensor]()
        self.centred = lambda inputs: inputs - kept.setdefault("mean", inputs.detach().mean(0))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layer(self.centred(inputs))
        return found


def test_a_prediction_leaves_nothing_behind_in_the_functions_of_a_model(sums: Sums) -> None:
    def run(other: bool) -> Tensor:
        data = clients(other)
        of = Problem(Closure(), F.mse_loss, [TensorDataset(*pair) for pair in data])
        train(of, DPSGD(SmoothedNorm(0.01)), lr=0.1, rounds=2).predict(data[0][0])
        return sums(of)

    within(run(False), run(True))


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_that_a_problem_s_model_got_later_keeps_nothing(sums: Sums, before: bool) -> None:
    """Neither in a private run nor in one without privacy before it."""

    def hook() -> Callable[..., Any]:
        kept: dict[str, Tensor] = {}
        return lambda _, given: (given[0] - kept.setdefault("mean", given[0].detach().mean(0)),)

    def run(other: bool) -> Tensor:
        of = Problem(nn.Sequential(zero()), F.mse_loss, [TensorDataset(*pair) for pair in clients(other)])
        of.model.register_forward_pre_hook(hook())
        if before:
            train(of, DPSGD(SmoothedNorm(0.01)), lr=0.1, rounds=2, compute=Compute(engine="loop"))
        return sums(of, compute=Compute(engine="loop"))

    within(run(False), run(True))


class Half:
    """Half of the clients, drawn from the global generator of a library."""

    def __init__(self, library: str) -> None:
        self.library, self.drawn = library, list[list[int]]()

    def draw(self, clients: int, round: int, seed: int) -> Tensor:  # noqa: ARG002
        if self.library == "torch":
            order = torch.randperm(clients).tolist()
        elif self.library == "numpy":
            order = np.random.permutation(clients).tolist()
        else:
            order = random.sample(range(clients), clients)
        self.drawn.append(sorted(order[: clients // 2]))
        return torch.tensor(self.drawn[-1])


class Draws(nn.Module):
    """Draws as many numbers as there are records."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = zero()

    def forward(self, inputs: Tensor) -> Tensor:
        kept: Tensor = self.layer(F.dropout(inputs, 0.5))
        return kept


def drawing(last: int) -> Problem:
    return Problem(Draws(), F.mse_loss, [TensorDataset(*pair) for pair in clients(False, last)])


@pytest.mark.parametrize("library", ["torch", "numpy", "random"])
def test_who_takes_part_does_not_depend_on_what_clients_have_drawn(sums: Sums, library: str) -> None:
    """A rule of the caller's own draws the numbers of its round; another number of records drew other clients."""
    found = []
    for last in (6, 40):
        of = drawing(last)
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        rule = Half(library)
        sums(of, rounds=8, participation=rule)
        found.append(rule.drawn)
        # The generators of the caller go on where they were.
        assert np.random.random() == np.random.RandomState(5).random_sample()
        assert random.random() == random.Random(5).random()
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) > 1


class Shifted:
    """A transform by a number that a callback draws after every round."""

    shift = 0.0

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs + self.shift


class Redraw(Callback):
    def __init__(self, transform: Shifted) -> None:
        self.transform, self.drawn = transform, list[float]()

    def begin(self, round: int, rounds: int) -> None:  # noqa: ARG002
        self.draw()

    def round(self, round: int) -> None:  # noqa: ARG002
        self.draw()

    def end(self, run: object) -> None:  # noqa: ARG002
        self.draw()

    def draw(self) -> None:
        self.transform.shift = 10 * float(torch.randn(()))
        self.drawn.append(self.transform.shift)


def test_what_a_callback_draws_does_not_depend_on_what_clients_have_drawn(sums: Sums) -> None:
    found = []
    for last in (6, 40):
        transform = Shifted()
        data = [TensorDataset(*pair) for pair in clients(False, last)]
        of = Problem(Draws(), F.mse_loss, data, transform=transform)
        callback = Redraw(transform)
        torch.manual_seed(5)
        sums(of, rounds=4, callbacks=[callback])
        found.append(callback.drawn)
    assert found[0] == found[1]
    assert len(set(found[0])) == 6  # four rounds, the begin and the end


class Dithered(DPSGD):
    """Draws from torch's generator for every message."""

    seen: list[Tensor]

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:
        made, draft = super().message(update, state, key)
        self.seen.append(torch.rand(()) * made)
        return self.seen[-1], draft


def test_a_method_may_draw_for_its_messages(sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message has numbers of its own, which are those of the client and the round."""

    def run(other: bool) -> list[Tensor]:
        seen: list[Tensor] = []
        monkeypatch.setattr(Dithered, "seen", seen, raising=False)
        data = [TensorDataset(*pair) for pair in clients(other)]
        sums(Problem(nn.Sequential(zero()), F.mse_loss, data), method=Dithered(SmoothedNorm(0.01)))
        return seen[-18:]  # of six clients in three rounds

    one, other = run(False), run(True)
    assert all(torch.equal(*pair) for pair in zip(one[1:6], other[1:6], strict=True))
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[1], one[7])
    assert len({round(float(message.norm()), 6) for message in one}) == 18


class Wanders(DPSGD):
    """A server that moves at random as well."""

    seen: list[Tensor]

    def server_step(self, mean_message: Tensor, state: Any) -> tuple[Tensor, Any]:
        step = 0.5 * torch.randn_like(mean_message)
        self.seen.append(step)
        return mean_message + step, state


def test_a_server_s_random_step_does_not_depend_on_what_clients_have_drawn(
    sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for last in (6, 40):
        seen: list[Tensor] = []
        monkeypatch.setattr(Wanders, "seen", seen, raising=False)
        of = drawing(last)
        torch.manual_seed(5)
        sums(of, rounds=3, method=Wanders(SmoothedNorm(0.01)))
        found.append(torch.stack(seen[-3:]))
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], found[0][1])


def test_a_release_does_not_know_what_else_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn sets two variables of the threads' library, so that a run that went on paid for rounds again."""
    device = torch.device("cpu")
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):
        monkeypatch.delenv(name, raising=False)
    before = machine_facts(device)
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    assert machine_facts(device) == before
    monkeypatch.setenv("KMP_DETERMINISTIC_REDUCTION", "1")
    assert machine_facts(device) != before


def test_a_release_knows_the_settings_of_torch_that_change_bits() -> None:
    device = torch.device("cpu")
    before = machine_facts(device)
    torch.set_default_dtype(torch.float64)
    try:
        assert machine_facts(device) != before
    finally:
        torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert machine_facts(device) != before
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert machine_facts(device) == before
