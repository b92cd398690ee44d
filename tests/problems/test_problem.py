"""A problem's gradients and evaluation against plain PyTorch on the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from normec import GD, Callback, Compute, NormEC, Privacy, Problem, UsageError, train
from normec.data import load
from normec.gradients.choice import choose_engine
from normec.sampling.batches import Batches


def classes(rows: int, seed: int, features: int = 4, kinds: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, kinds, (rows,), generator=generator))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        self.out = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def frozen() -> nn.Sequential:
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.idle = network(), nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


MODELS = {"network": network, "tied": Tied, "frozen": frozen, "unused": Unused}


def flat_gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: zero_grad, backward, the trainable parameters' .grad in order."""
    model = copy.deepcopy(model).train()
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    held = [p for p in model.parameters() if p.requires_grad]
    parts = [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in held]
    return loss.detach(), torch.cat(parts)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("batch_size", [None, 4])
def test_gradients_are_plain_autograd_s(make: type[nn.Module], batch_size: int | None) -> None:
    model, clients = make(), [classes(m, seed) for seed, m in enumerate((5, 9, 3))]
    problem = Problem(model, F.cross_entropy, clients)
    assert problem.sizes is not None
    batches = Batches(problem.sizes, batch_size, seed=8) if batch_size else None
    (block,) = choose_engine("loop", problem, batches, 8).blocks(problem.x0, {}, round=2)
    assert block.clients.tolist() == [0, 1, 2]
    for i, dataset in enumerate(clients):
        x, y = dataset.tensors
        if batches is not None:
            (rows,) = batches.draw(torch.tensor([i]), 2)
            x, y = x[rows], y[rows]
        loss, gradient = flat_gradient(model, x, y)
        assert float(block.losses[i] - loss) == pytest.approx(0, abs=1e-14)
        assert float((block.grads[i] - gradient).abs().max()) < 1e-14


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_training_is_plain_torch_training(make: type[nn.Module]) -> None:
    """GD over two clients is SGD on the mean of their mean losses; the user's model is not touched."""
    model, clients = make(), [classes(5, 0), classes(9, 1)]
    before = copy.deepcopy(model.state_dict())
    run = train(Problem(model, F.cross_entropy, clients), GD(), lr=0.3, rounds=25)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.3)
    for _ in range(25):
        optimizer.zero_grad()
        (sum(F.cross_entropy(plain(d.tensors[0]), d.tensors[1]) for d in clients) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert run.model is not None
    assert not run.model.training
    for name, value in plain.state_dict().items():
        assert float((run.model.state_dict()[name] - value).abs().max()) < 1e-12, name


def test_evaluation_is_plain_and_does_not_touch_x() -> None:
    model, test = network(), classes(23, 5)
    problem = Problem(model, F.cross_entropy, [classes(5, 0)], test)
    x = problem.x0.clone()
    found = problem.evaluate(x, {}, batch_size=7)  # 23 = 3 · 7 + 2: the last batch weighs less
    outputs = model(test.tensors[0]).detach()
    assert found["test_loss"] == pytest.approx(float(F.cross_entropy(outputs, test.tensors[1])), abs=1e-13)
    assert found["accuracy"] == float((outputs.argmax(1) == test.tensors[1]).double().mean())
    assert torch.equal(x, problem.x0)
    assert not x.requires_grad


def gradient_of(problem: Problem) -> Tensor:
    (block,) = choose_engine("loop", problem, None, 0).blocks(problem.x0, problem.initial_buffers(), 0)
    return block.grads[0]


def test_the_problem_keeps_a_model_of_its_own() -> None:
    model = frozen()
    problem = Problem(model.eval(), F.cross_entropy, [classes(6, 0)])
    expected = gradient_of(problem)
    assert not model.training  # the user's model is not put into training mode either
    with torch.no_grad():
        model[0].weight.add_(1.0)  # type: ignore[operator]
    assert torch.equal(gradient_of(problem), expected)


def test_models_handed_out_are_copies() -> None:
    problem = Problem(network(), F.cross_entropy, [classes(6, 0)])
    first, second = problem.model_at(problem.x0, {}), problem.model_at(problem.x0 + 1, {})
    assert torch.equal(nn.utils.parameters_to_vector(first.parameters()), problem.x0)
    assert torch.equal(nn.utils.parameters_to_vector(second.parameters()), problem.x0 + 1)


def test_penalty_and_transform_enter_the_objective_and_not_each_other() -> None:
    model, data = network(), classes(6, 0)
    problem = Problem(
        model, F.cross_entropy, [data], data, penalty=lambda x: 0.1 * x.square().sum(), transform=lambda x: x / 2
    )
    (block,) = choose_engine("loop", problem, None, 0).blocks(problem.x0, {}, 0)
    loss, gradient = flat_gradient(model, data.tensors[0] / 2, data.tensors[1])
    x = problem.x0
    assert float(block.losses[0]) == pytest.approx(float(loss + 0.1 * x.square().sum()), abs=1e-13)
    assert float((block.grads[0] - gradient - 0.2 * x).abs().max()) < 1e-13
    assert problem.evaluate(x, {})["test_loss"] == pytest.approx(float(loss), abs=1e-13)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_binary_targets_with_one_logit(shape: tuple[int, ...]) -> None:
    data = classes(40, 0, kinds=2)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)) if len(shape) == 1 else nn.Sequential(nn.Linear(4, 1))
    model = model.double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.flatten(), targets.double())

    run = train(
        Problem(model, loss, [Subset(data, range(20)), Subset(data, range(20, 40))], data), GD(), lr=1, rounds=30
    )
    assert run.model is not None
    guess = (torch.sigmoid(run.model(data.tensors[0]).flatten()) > 0.5).long()
    assert run.history["accuracy"][-1] == float((guess == data.tensors[1]).double().mean())
    assert run.history["accuracy"][-1] > run.history["accuracy"][0]


def test_regression_has_no_accuracy() -> None:
    data = TensorDataset(torch.randn(6, 2), torch.randn(6, 1))
    run = train(Problem(nn.Linear(2, 1), F.mse_loss, [data], data), GD(), lr=0.1, rounds=3)
    assert run.history["test_loss"]
    assert run.history["accuracy"] == []


def test_another_dtype_trains_in_it() -> None:
    data = TensorDataset(torch.randn(6, 2), torch.randn(6, 1))
    problem = Problem(nn.Linear(2, 1), F.mse_loss, [data], data)
    run = train(problem, NormEC(0.1, 0.1), lr=0.1, rounds=3, compute=Compute(dtype=torch.float64))
    assert run.x.dtype == run.state.memory.dtype == torch.float64
    assert problem.x0.dtype == torch.float32  # the problem itself stays


def test_what_is_no_problem_is_refused() -> None:
    data = classes(4, 0)
    still = nn.Linear(4, 3).double().requires_grad_(False)
    with pytest.raises(UsageError, match="no trainable parameters"):
        Problem(still, F.cross_entropy, [data])
    with pytest.raises(UsageError, match="complex parameters"):
        Problem(nn.Linear(4, 3, dtype=torch.complex64), F.cross_entropy, [data])
    with pytest.raises(UsageError, match=r"must return a scalar, got shape \(4,\)"):
        train(Problem(network(), lambda o, t: F.cross_entropy(o, t, reduction="none"), [data]), GD(), lr=0.1, rounds=1)
    with pytest.raises(UsageError, match="the loss must return a tensor, through which gradients flow, got float"):
        train(Problem(network(), lambda o, t: F.cross_entropy(o, t).item(), [data]), GD(), lr=0.1, rounds=1)
    with pytest.raises(UsageError, match="at least one client"):
        Problem(network(), F.cross_entropy, [])


def test_a_class_for_a_loss_and_one_set_for_all_clients_are_refused() -> None:
    held = TensorDataset(torch.randn(6, 3), torch.arange(6) % 2)
    with pytest.raises(UsageError, match=r"such as CrossEntropyLoss\(\), got the class"):
        Problem(nn.Linear(3, 2), nn.CrossEntropyLoss, [held])
    with pytest.raises(UsageError, match=r"one for each client, got one TensorDataset; normec\.data\.split divides"):
        Problem(nn.Linear(3, 2), F.cross_entropy, held)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"client 0 is a tuple of tensors; give TensorDataset\(inputs, targets\)"):
        Problem(nn.Linear(3, 2), F.cross_entropy, [held.tensors])
    with pytest.raises(UsageError, match="client 0 is a tuple of arrays; give TensorDataset"):
        Problem(nn.Linear(3, 2), F.cross_entropy, [tuple(one.numpy() for one in held.tensors)])
    with pytest.raises(UsageError, match=r"test and validation need data sets.*give TensorDataset\(inputs, targets\)"):
        Problem(nn.Linear(3, 2), F.cross_entropy, [held], held.tensors)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss])
def test_a_loss_that_compares_all_outputs_with_all_targets_is_refused(loss: Any) -> None:
    """[n, 1] beside [n] becomes [n, n]; the gradient is then not that of the mean over the records."""
    held = TensorDataset(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6.0))
    with pytest.raises(UsageError, match=r"outputs have the shape \[4, 1\], and targets \[4\]; give targets\.reshape"):
        Problem(nn.Linear(3, 1), loss, [held])
    Problem(nn.Linear(3, 1), lambda outputs, targets: loss(outputs.squeeze(1), targets), [held])
    Problem(nn.Linear(3, 1), loss, [TensorDataset(held.tensors[0], held.tensors[1].unsqueeze(1))])


def test_class_numbers_of_a_type_that_the_loss_does_not_take_are_refused_with_the_cure() -> None:
    held = TensorDataset(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int32))
    with pytest.raises(UsageError, match=r"class numbers are of the type int64: give targets\.long\(\)"):
        train(Problem(nn.Linear(4, 3), F.cross_entropy, [held]), GD(), lr=0.1, rounds=1)


def test_a_problem_is_shown_in_a_line() -> None:
    problem = Problem(nn.Linear(4, 3), F.cross_entropy, [classes(5, 0), classes(5, 1)])
    assert repr(problem) == "Problem(Linear, 15 parameters, 2 clients)"


FLOATS = TensorDataset(torch.zeros(5, 4), torch.zeros(5))
ONE_COLUMN = TensorDataset(torch.zeros(5, 4), torch.zeros(5, 1, dtype=torch.int64))
WIDE = TensorDataset(torch.zeros(5, 9), torch.zeros(5, dtype=torch.int64))
FROM_ONE = TensorDataset(torch.zeros(5, 4), torch.full((5,), 3))


@pytest.mark.parametrize("privacy", [None, Privacy(epsilon=8, unit="record", trust="local")])
@pytest.mark.parametrize(
    ("clients", "test", "said"),
    [
        ([FLOATS], None, r"the first records: .*targets are float32 of shape \[4\].*; .*give targets\.long\(\)"),
        ([ONE_COLUMN], None, r"the first records: .*give one class number for each record: targets\.squeeze\(1\)"),
        ([WIDE], None, r"the first records: .*inputs are float32 of shape \[4, 9\]"),
        ([FROM_ONE], None, "the first records: .*3 classes apart, which have the numbers 0 to 2: number the classes"),
        ([classes(5, 0)], WIDE, "test set 0: RuntimeError"),
    ],
)
def test_records_that_do_not_fit_the_model_are_refused_in_words(
    clients: list[TensorDataset], test: TensorDataset | None, said: str, privacy: Privacy | None
) -> None:
    problem = Problem(nn.Linear(4, 3), F.cross_entropy, clients, test)
    with pytest.raises(UsageError, match=f"the model or its loss fails on {said}"):
        train(problem, NormEC(0.1, 0.1), lr=0.1, rounds=2, seed=0, privacy=privacy)


def test_an_error_of_a_callback_stays_as_it_is() -> None:
    class Broken(Callback):
        def round(self, round: int) -> None:
            raise RuntimeError(f"mine in round {round}")

    with pytest.raises(RuntimeError, match=r"^mine in round 1$"):
        train(Problem(network(), F.cross_entropy, [classes(5, 0)]), GD(), lr=0.1, rounds=2, callbacks=[Broken()])


def test_one_line_speaks_of_all_data_loaders(caplog: pytest.LogCaptureFixture) -> None:
    loaders = [DataLoader(classes(5, seed), batch_size=2) for seed in range(3)]
    Problem(network(), F.cross_entropy, loaders, test=DataLoader(classes(5, 9)))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["client 0 and 2 more", "test set 0"]


def test_a_problem_knows_the_name_of_its_data() -> None:
    digits = load("digits")
    inputs, targets = digits.train.tensors
    clients = [TensorDataset(inputs[i::5], targets[i::5]) for i in range(5)]
    model = nn.Linear(64, 10)
    assert Problem(model, F.cross_entropy, [Subset(digits.train, [0, 1])]).name == "digits"
    assert Problem(model, F.cross_entropy, clients, test=digits.test).name == "digits"
    assert Problem(model, F.cross_entropy, clients, test=digits.test, name="mine").name == "mine"
    assert Problem(model, F.cross_entropy, clients).name is None
    assert Problem(model, F.cross_entropy, clients, test={"shifted": digits.test}).name == "digits"
    assert Problem(model, F.cross_entropy, clients, test={"shifted": digits.test}, name="mine").name == "mine"
