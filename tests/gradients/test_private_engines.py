"""Engines of private runs: the caller's code never sees several clients' records, and no data choose an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from normec import DPSGD, Compute, LocalSteps, Privacy, Problem, SmoothedNorm, UsageError, models, train
from normec.gradients.choice import choose_engine
from normec.gradients.record_clip import RecordClip
from normec.gradients.shared.operations import OperationModel
from normec.gradients.shared.rules import ModuleModel
from normec.sampling.batches import PoissonBatches
from normec.training.options import Options
from normec.training.train import prepare

from ..support.datasets import Fetched

CLIENTS, CLASSES, FEATURES = 8, 3, 5


class Head(nn.Module):
    """A linear layer, which subclasses apply to what they make of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(x)
        return found


class Scales(Head):
    """Mixes the records of a batch only where a value is above 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.abs().amax().clamp(min=1.0))


class Counts(Head):
    """Looks at values through the length of a selection."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return 3 * found.roll(1, 1) if len(x[x > 10]) else found


class Keeps(Head):
    """Adds to an attribute what it sees, which vmap can do once, and in a private run again after it was undone."""

    seen: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().sum()
        return super().forward(x)


class OwnLinear(nn.Linear):
    pass


def built(model: nn.Module, outlier: int | None = None, loss: Any = F.cross_entropy) -> Problem:
    """Eight clients with values in [0, 1]; one of them has an outlier."""
    draw = torch.Generator().manual_seed(1)
    sets = []
    for client in range(CLIENTS):
        inputs = torch.rand(10, FEATURES, generator=draw)
        targets = torch.randint(0, CLASSES, (10,), generator=draw)
        if client == outlier:
            inputs[0, 0] = 1000.0
        sets.append(TensorDataset(inputs, targets))
    return Problem(model, loss, sets)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def gradients(problem: Problem, engine: str = "auto") -> tuple[str, Tensor]:
    """The engine that a private run takes and every client's gradient at the start."""
    plan = {"lr": 0.1, "rounds": 3, "privacy": Privacy(epsilon=2, trust="secure-sum"), "seed": 0}
    rounds = prepare(problem, DPSGD(SmoothedNorm(0.1)), Options(compute=Compute(engine=engine), **plan))  # type: ignore[arg-type]
    rows = torch.zeros(CLIENTS, len(problem.x0))
    for block in rounds.engine.blocks(problem.x0, problem.initial_buffers(), 0):
        rows[block.clients] = block.grads
    return rounds.engine.name, rows


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("engine", ["auto", "shared"])
@pytest.mark.parametrize(("model", "taken"), [(Scales, "shared"), (Counts, "loop")])
def test_a_model_that_mixes_records_for_some_values_does_not_couple_clients(
    model: Callable[[], nn.Module], taken: str, engine: str
) -> None:
    usual, plain = gradients(built(seeded(model)), engine)
    name, moved = gradients(built(seeded(model), outlier=4), engine)
    assert usual == name == taken
    others = [client for client in range(CLIENTS) if client != 4]
    assert torch.equal(plain[others], moved[others])
    assert not torch.equal(plain[4], moved[4])


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("model", [Scales, Counts, Keeps])
def test_the_engine_says_nothing_about_the_data(model: Callable[[], nn.Module]) -> None:
    """Client 0 is among those that engines are compared on; a run without privacy may look at it."""
    names = set()
    for outlier in (None, 0, 5):
        privacy = Privacy(epsilon=0.01, trust="secure-sum")
        run = train(built(seeded(model), outlier), DPSGD(SmoothedNorm(0.1)), lr=0.1, rounds=3, seed=0, privacy=privacy)
        names.add(run.engine)
    assert names == {{Scales: "shared", Counts: "loop", Keeps: "batched"}[model]}


def test_an_engine_that_fails_on_the_clients_records_stops_a_private_run() -> None:
    problem = built(seeded(lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES))))
    problem.records.targets[35] = CLASSES  # type: ignore[attr-defined]  # no such class
    with pytest.raises(UsageError, match=r"engine shared failed on the clients' records: .*give engine='loop'"):
        gradients(problem)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-gn", "resnet20-gn"])
def test_models_of_this_library_stay_on_the_shared_engine(name: str) -> None:
    made = models.build(name, (3, 8, 8), CLASSES, hidden=4)
    draw = torch.Generator().manual_seed(1)
    sets = [
        TensorDataset(torch.rand(2, 3, 8, 8, generator=draw), torch.randint(0, CLASSES, (2,), generator=draw))
        for _ in range(3)
    ]
    problem = Problem(made.model, made.loss, sets)
    engine = choose_engine("shared", problem, None, 0, private=True)
    found = torch.cat([block.grads for block in engine.blocks(problem.x0, {}, 0)])
    assert engine.name == "shared"
    loop = torch.cat([block.grads for block in choose_engine("loop", problem, None, 0).blocks(problem.x0, {}, 0)])
    assert float((found - loop).norm()) <= 1e-4 * float(loop.norm())


def hooked(register: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    getattr(model[0], register)(lambda *_: None)
    return model


def shadowed() -> nn.Module:
    model = nn.Sequential(nn.Tanh(), nn.Linear(FEATURES, CLASSES))
    model[0].forward = lambda x: x / x.abs().amax().clamp(min=1.0)
    return model


def rules(engine: Any) -> type:
    """How the shared pass computes the model: by rules for its modules or for its operations, under vmap."""
    return type(engine._fast._model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(OwnLinear(FEATURES, CLASSES)),
        lambda: nn.Sequential(nn.Softmax(dim=0), nn.Linear(FEATURES, CLASSES)),
        lambda: nn.Sequential(nn.Softmax(dim=-2), nn.Linear(FEATURES, CLASSES)),
        lambda: nn.Sequential(nn.Flatten(0, 1), nn.Unflatten(0, (-1, FEATURES)), nn.Linear(FEATURES, CLASSES)),
        lambda: hooked("register_forward_hook"),
        lambda: hooked("register_forward_pre_hook"),
        shadowed,
    ],
)
def test_only_known_code_is_shown_the_records_of_several_clients(make: Callable[[], nn.Module]) -> None:
    problem = built(seeded(make))
    engine = choose_engine("auto", problem, None, 0, private=True)
    found = torch.cat([block.grads for block in engine.blocks(problem.x0, {}, 0)])
    assert rules(engine) is OperationModel
    loop = torch.cat([block.grads for block in choose_engine("loop", problem, None, 0).blocks(problem.x0, {}, 0)])
    torch.testing.assert_close(found, loop)
    plain = built(seeded(lambda: nn.Sequential(nn.Flatten(), nn.Softmax(dim=1), nn.Linear(FEATURES, CLASSES))))
    assert rules(choose_engine("auto", plain, None, 0, private=True)) is ModuleModel


class LimitedSlopes(torch.autograd.Function):
    """The identity, with slopes of all records together limited to a length, where a vmap rule forgets the clients."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return slopes / (slopes.norm() / 50).clamp(min=1)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, Any]:  # noqa: ARG004
        return LimitedSlopes.apply(x), in_dims[0]


class SlopesByRule(LimitedSlopes):
    generate_vmap_rule = True
    vmap = torch.autograd.Function.vmap


class Limited(Head):
    kind: type[torch.autograd.Function] = LimitedSlopes

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square() + self.kind.apply(x @ self.fc.weight.T)


class LimitedByRule(Limited):
    kind = SlopesByRule


@torch.library.custom_op("normec_tests::limited", mutates_args=())
def limited(x: Tensor) -> Tensor:
    return x.clone()


limited.register_autograd(LimitedSlopes.backward)
limited.register_vmap(lambda _, in_dims, x: (limited(x), in_dims[0]))


class LimitedByOperator(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square() + limited(x @ self.fc.weight.T)


def outlying(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets[:, None]).square().mean()


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("engine", ["auto", "shared", "batched"])
@pytest.mark.parametrize(("model", "fast"), [(Limited, False), (LimitedByOperator, False), (LimitedByRule, True)])
def test_a_vmap_rule_of_the_users_own_does_not_see_several_clients(
    model: Callable[[], nn.Module], fast: bool, engine: str
) -> None:
    """The backward pass of a function with such a rule would see the slopes of all clients at once."""
    usual, plain = gradients(built(seeded(model), loss=outlying), engine)
    name, moved = gradients(built(seeded(model), outlier=4, loss=outlying), engine)
    assert usual == name == ("loop" if not fast else "batched" if engine == "batched" else "shared")
    others = [client for client in range(CLIENTS) if client != 4]
    assert torch.equal(plain[others], moved[others])


class Nested(SlopesByRule):
    """Has no vmap rule of its own, and calls a function that has one."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return LimitedSlopes.apply(x)


class InBackward(SlopesByRule):
    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return MixedValues.apply(slopes)


class MixedValues(LimitedSlopes):
    """Divides by the length of all that it sees, if that is above 50."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x / (x.norm() / 50).clamp(min=1)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, Any]:  # noqa: ARG004
        return MixedValues.forward(x), in_dims[0]


class MixingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return MixedValues.forward(found) if func is torch.ops.aten.abs.default else found


class MixingTensor(Tensor):
    """Ones, by which everything may be multiplied that is mixed then."""

    @staticmethod
    def __new__(cls, held: Tensor) -> MixingTensor:
        made: MixingTensor = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = next(one for one in args if not isinstance(one, MixingTensor))
        return MixedValues.forward(seen) if func is torch.ops.aten.mul.Tensor else seen


class Indirect(Head):
    """Code that sees what vmap hides, and is not called by the model itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.fc.weight.T
        if self.way == "function":
            y = Nested.apply(y)
        elif self.way == "backward":
            y = InBackward.apply(y)
        elif self.way == "hook":
            y.register_hook(MixedValues.apply)
        elif self.way == "callable":
            far = F.triplet_margin_with_distance_loss(
                y, y + 1, y - 1, distance_function=lambda a, b: MixedValues.apply(a - 2 * b).norm(dim=-1)
            )
            y = y + far
        elif self.way == "saved":
            with torch.autograd.graph.saved_tensors_hooks(MixedValues.forward, lambda held: held):
                y = y.square()
        elif self.way == "tensor":
            y = y * MixingTensor(torch.ones(CLASSES, dtype=x.dtype))
        else:
            with MixingMode():
                y = y.abs()
        return super().forward(x).square() + y


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("engine", ["shared", "batched"])
@pytest.mark.parametrize("way", ["function", "backward", "hook", "callable", "saved", "mode", "tensor"])
def test_no_indirect_code_of_the_user_sees_several_clients(way: str, engine: str) -> None:
    _, plain = gradients(built(seeded(lambda: Indirect(way)), loss=outlying), engine)
    _, moved = gradients(built(seeded(lambda: Indirect(way)), outlier=4, loss=outlying), engine)
    others = [client for client in range(CLIENTS) if client != 4]
    assert torch.equal(plain[others], moved[others])


class Watched(Tensor):
    """Records whose functions see what a run computes with them."""

    seen: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            cls.seen += [len(one) for one in args if isinstance(one, Tensor) and one.ndim]
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(("kind", "engine"), [(TensorDataset, "shared"), (Fetched, "loop")])
def test_the_class_of_the_records_sees_nothing_of_a_run(kind: type[TensorDataset], engine: str) -> None:
    draw = torch.Generator().manual_seed(1)
    sets = [
        kind(torch.rand(10, FEATURES, generator=draw).as_subclass(Watched), torch.zeros(10, dtype=torch.int64))
        for _ in range(CLIENTS)
    ]
    Watched.seen.clear()
    problem = Problem(seeded(lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES))), F.cross_entropy, sets)
    name, rows = gradients(problem)
    assert name == engine
    assert float(rows.norm()) > 0
    assert all(count <= 10 for count in Watched.seen)  # at most one client, when its records are read


def test_records_that_are_no_tensors_without_their_class_are_refused() -> None:
    sets = [TensorDataset(MixingTensor(torch.rand(10, FEATURES)), torch.zeros(10, dtype=torch.int64))] * 2
    with pytest.raises(UsageError, match="the class MixingTensor; give them as plain tensors"):
        Problem(Head(), F.cross_entropy, sets)


@pytest.mark.parametrize("way", ["function", "backward", "hook", "callable", "mode", "tensor"])
def test_no_indirect_code_of_the_user_sees_several_records(way: str) -> None:
    problem = built(seeded(lambda: Indirect(way)), loss=outlying)
    with pytest.raises(UsageError, match="would see several clients or records together"):
        list(choose_engine("loop", problem, None, 0, RecordClip(1.0), private=True).blocks(problem.x0, {}, 0))


def test_a_loss_with_a_vmap_rule_of_its_own_is_refused_where_records_are_clipped() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outlying(MixedValues.apply(outputs), targets)

    problem = built(seeded(lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES))), loss=loss)
    for name in ("shared", "loop"):
        engine = choose_engine(name, problem, None, 0, RecordClip(1.0), private=True)
        with pytest.raises(UsageError, match="vmap rule of MixedValues"):
            list(engine.blocks(problem.x0, {}, 0))


def test_a_penalty_with_a_vmap_rule_of_its_own_is_refused_where_clients_have_models_of_their_own() -> None:
    """After the first local step, the linear engine computes the penalties of all clients at once."""
    draw = torch.Generator().manual_seed(1)
    sets = [
        TensorDataset(torch.rand(10, FEATURES, generator=draw), torch.randint(0, CLASSES, (10,), generator=draw))
        for _ in range(4)
    ]
    made = models.build("softmax", (FEATURES,), CLASSES)
    problem = Problem(made.model, made.loss, sets, penalty=lambda x: MixedValues.apply(x).square().sum())
    local = LocalSteps(steps=2, lr=0.1)
    with pytest.raises(UsageError, match="vmap rule of MixedValues"):
        train(problem, DPSGD(SmoothedNorm(0.1)), lr=0.1, rounds=1, local=local, compute=Compute(engine="linear"))


def test_other_code_may_use_vmap_rules_of_its_own_again_after_a_pass() -> None:
    problem = built(seeded(lambda: Indirect("function")), loss=outlying)
    gradients(problem, "shared")
    assert torch.equal(torch.vmap(MixedValues.apply)(torch.ones(2, 2)), torch.ones(2, 2))
    with MixingMode():
        assert float(torch.zeros(1).abs()) == 0.0


def test_a_vmap_rule_of_the_users_own_does_not_see_several_records() -> None:
    plan: dict[str, Any] = {"lr": 0.1, "rounds": 2, "seed": 0}
    privacy = Privacy(epsilon=2, unit="record", record_clip=1.0, trust="secure-sum")
    with pytest.raises(UsageError, match=r"vmap rule of LimitedSlopes.*generate_vmap_rule"):
        train(built(seeded(Limited), loss=outlying), DPSGD(SmoothedNorm(0.1)), privacy=privacy, **plan)
    run = train(built(seeded(LimitedByRule), loss=outlying), DPSGD(SmoothedNorm(0.1)), privacy=privacy, **plan)
    assert run.finished


class Records(Head):
    """Notes how many records it is shown at once."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.note = seen.append

    def forward(self, x: Tensor) -> Tensor:
        self.note(len(x))
        return super().forward(x)


def test_a_model_sees_one_client_at_a_time_and_one_record_where_records_are_clipped() -> None:
    for clip, size in ((None, 10), (RecordClip(1.0), 1)):
        seen: list[int] = []
        problem = built(seeded(lambda seen=seen: Records(seen)))  # type: ignore[misc]
        engine = choose_engine("shared", problem, None, 0, clip, private=True)
        list(engine.blocks(problem.x0, {}, 0))
        assert engine.name == "shared"
        seen.clear()
        list(engine.blocks(problem.x0, {}, 1))
        assert set(seen) == {size}


@pytest.mark.parametrize("rate", [None, 0.5])
def test_engines_that_clip_records_are_compared_on_few_of_them(rate: float | None) -> None:
    """The loop takes them a few at a time, so that comparing all records of a large client would take minutes."""
    draw, records = torch.Generator().manual_seed(1), 8000
    owned = TensorDataset(torch.rand(records, FEATURES, generator=draw), torch.arange(records) % CLASSES)
    problem = Problem(models.Softmax(FEATURES, CLASSES), F.cross_entropy, [owned])
    seen: list[int] = []
    hook = nn.modules.module.register_module_forward_hook(lambda *given: seen.append(len(given[-1])))
    try:
        batches = PoissonBatches(torch.tensor([records]), rate, 0) if rate is not None else None
        engine = choose_engine("auto", problem, batches, 0, RecordClip(0.1), private=True)
        list(engine.blocks(problem.x0, {}, 0))
    finally:
        hook.remove()
    assert engine.name == "linear"
    assert 0 < sum(seen) < records // 32


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_keeps_the_shared_engine_away(register: str) -> None:
    """The backward pass is outside vmap, where a hook would see several clients."""
    problem = built(seeded(lambda: hooked(register)))
    engine = choose_engine("auto", problem, None, 0, private=True)
    list(engine.blocks(problem.x0, {}, 0))
    assert engine.name != "shared"


def test_hooks_for_all_modules_see_one_client_at_a_time() -> None:
    problem = built(seeded(lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES))))
    seen: list[int] = []
    forward = nn.modules.module.register_module_forward_hook(lambda *given: seen.append(len(given[-1])))
    try:
        engine = choose_engine("auto", problem, None, 0, private=True)
        list(engine.blocks(problem.x0, {}, 0))
    finally:
        forward.remove()
    assert set(seen) == {10}
    backward = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert choose_engine("auto", problem, None, 0, private=True).name != "shared"
    finally:
        backward.remove()


def test_records_that_one_client_leaves_out_change_no_bit_of_the_others() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES)))
    usual, other = built(model), built(model)
    other.records.targets[:3] = -100  # type: ignore[attr-defined]
    (one, plain), (two, moved) = gradients(usual), gradients(other)
    assert one == two == "shared"
    assert torch.equal(plain[1:], moved[1:])
    loop = gradients(other, "loop")[1]
    assert float((moved - loop).norm()) <= 1e-5 * float(loop.norm())
