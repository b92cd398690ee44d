"""The optimizers under real torchrun against the round loop, and what they refuse."""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import normec
from normec import Privacy, Problem
from normec import distributed as cluster
from normec.distributed.optimizer import POSITION
from normec.errors import UsageError

from ..support.runs import data
from .optimizers import DEFINITIONS, HOSTED, LR, METHODS, OPTIMIZERS, RANKS, RESUMED, ROUNDS, SEED, WEIGHTS, model
from .torchrun import torchrun

N = RANKS * HOSTED


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizing")
    ended = torchrun(RANKS, "-m", "tests.distributed.optimizer_job", str(folder), cwd=folder)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def facts(done: Path) -> list[dict[str, Any]]:
    return [json.loads((done / f"facts-{rank}.json").read_text()) for rank in range(RANKS)]


def by_rounds(name: str) -> torch.Tensor:
    problem = Problem(model(), F.cross_entropy, [data(9 + 2 * i, i) for i in range(N)])
    return normec.train(
        problem,
        DEFINITIONS[name],
        lr=LR,
        rounds=ROUNDS,
        seed=SEED,
        server_optimizer=OPTIMIZERS.get(name),
        weights=WEIGHTS if name == "normec-weighted" else "equal",
        compute=normec.Compute(dtype=torch.float64),
    ).x


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_round_loop_s_trajectory(done: Path, name: str) -> None:
    torch.testing.assert_close(load_file(done / f"{name}.safetensors")["x"], by_rounds(name), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_saved_state_goes_on_also_with_a_compiled_model(done: Path, name: str) -> None:
    x = load_file(done / f"resumed-{name}.safetensors")["x"]
    torch.testing.assert_close(x, by_rounds(name), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_step_is_one_all_reduce_of_four_bytes_a_parameter(facts: list[dict[str, Any]]) -> None:
    assert [fact["calls"] for fact in facts] == [[["all_reduce", 4 * (40 * 10 + 10 + POSITION)]]] * RANKS


@pytest.mark.slow
def test_groups_have_their_own_step_sizes(facts: list[dict[str, Any]]) -> None:
    assert facts[0]["moved"] == [True, False]
    assert facts[0]["lrs"] == pytest.approx([0.05, 0.0])


@pytest.mark.slow
def test_mistakes_are_said_on_every_rank(facts: list[dict[str, Any]]) -> None:
    expected = {
        "closure": "UsageError: closures are not supported",
        "late group": "UsageError: parameters cannot be added after the optimizer was created",
        "odd group": "UsageError: a parameter group takes only lr, got momentum",
        "half": "UsageError: parameters must be float32 or float64, got torch.bfloat16",
        "method": "UsageError: the ranks do not agree: seed is 0 on rank 0 and 1 on rank 1",
        "swapped": "UsageError: rank 0 cannot continue from this state: rank is 1 in the state, 0 here",
        "no data": "Diverged: rank 1: client 1 has no gradient (no step was made) in round 0",
        "nan": "Diverged: rank 1: the gradient of client 1 is not finite (no step was made) in round 0",
        "long": "above the bound 1",
    }
    for fact in facts:
        assert fact["said"].keys() == expected.keys()
        for name, words in expected.items():
            assert words in fact["said"][name], name


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("trust", ["local", "secure-sum", "central"])
def test_noise_is_what_was_paid_for(done: Path, facts: list[dict[str, Any]], noise: str, trust: str) -> None:
    """x = −(Σ noise)/n: of n = 2 clients with σ = 0.5 its deviation is 0.5/√2, whoever draws it."""
    found = [fact["private"][f"{noise} {trust}"] for fact in facts]
    assert found[0] == found[1], "all ranks hold the same x"
    assert found[0][0] == pytest.approx(0.5 / 2**0.5, rel=0.03)
    for fact in facts:
        assert "calibrated for 2 rounds" in fact["private"][f"{noise} {trust} over"]
        assert "privacy needs rounds" in fact["private"]["no rounds"]
    lines = [json.loads(line) for line in (done / f"{noise}-{trust}").read_text().splitlines()]
    assert sum(line.get("count", 0) for line in lines) == 2


@pytest.mark.slow
def test_a_state_of_two_ranks_is_no_state_of_one(done: Path) -> None:
    alone = METHODS["normec"](model(), clients=HOSTED, seed=SEED)
    held = torch.load(done / "normec-0.pt", weights_only=True)["optimizer"]
    with pytest.raises(UsageError, match="ranks is 2 in the state, 1 here"):
        alone.load_state_dict(held)


def test_noise_that_changes_by_step_is_refused() -> None:
    privacy = Privacy(epsilon=8, noise="seeded", noise_schedule="linear:0.5", trust="local")
    with pytest.raises(UsageError, match="the same noise in every step"):
        cluster.NormEC([nn.Parameter(torch.zeros(2))], 0.1, 0.1, 0.1, privacy=privacy, rounds=2)


def test_correlated_noise_is_refused() -> None:
    privacy = Privacy(epsilon=8, noise="seeded", trust="central", noise_bands=2)
    with pytest.raises(UsageError, match="correlated noise gains nothing; leave out noise_bands"):
        cluster.NormEC([nn.Parameter(torch.zeros(2))], 0.1, 0.1, 0.1, privacy=privacy, rounds=2)


def test_names_and_numbers_in_place_of_objects_are_refused() -> None:
    x = nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match=r"method must be a normec\.Method, such as normec\.NormEC\(\), got 'normec'"):
        cluster.ClientOptimizer([x], "normec", lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"privacy must be a normec\.Privacy, .*, got 8"):
        cluster.ClientOptimizer([x], normec.NormEC(), lr=0.1, privacy=8, rounds=3)  # type: ignore[arg-type]


def test_a_method_that_corrects_local_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="scaffold corrects every local step of a client"):
        cluster.ClientOptimizer([nn.Parameter(torch.zeros(2))], normec.Scaffold(tau=1.0), lr=0.1)


def test_alone_it_is_an_ordinary_optimizer() -> None:
    net = nn.Linear(3, 1)
    optimizer = cluster.NormEC(net.parameters(), lr=0.05, alpha=0.1, beta=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (net(inputs)[:, 0] - inputs.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_all_hosted_clients_must_have_their_gradient() -> None:
    net = nn.Linear(3, 1)
    optimizer = cluster.GD(net.parameters(), lr=0.1, clients=2)
    with optimizer.client(0):
        net(torch.ones(1, 3)).sum().backward()
    with pytest.raises(normec.Diverged, match="client 1 has no gradient"):
        optimizer.step()
    for client in range(2):
        with optimizer.client(client):
            net(torch.ones(1, 3)).sum().backward()
    for unknown in (2, -1, 0.5, None):
        with (
            pytest.raises(UsageError, match=f"are numbered 0 to 1, got {unknown}"),
            optimizer.client(unknown),  # type: ignore[arg-type]
        ):
            raise AssertionError("the turn of no client")
    optimizer.step()


def test_a_turn_that_fails_takes_back_an_earlier_one() -> None:
    x = nn.Parameter(torch.zeros(1))
    optimizer = cluster.GD([x], lr=1.0, clients=2)
    for client, fails in ((0, False), (1, False), (0, True)):
        with contextlib.suppress(RuntimeError), optimizer.client(client):
            x.sum().backward()
            if fails:
                raise RuntimeError("out of memory")
    with pytest.raises(normec.Diverged, match="client 0 has no gradient"):
        optimizer.step()
    assert float(x) == 0.0


def test_a_server_optimizer_moves_all_parameters_alike() -> None:
    net = nn.Linear(4, 3)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.2}]
    with pytest.raises(UsageError, match="server_optimizer takes one lr for all parameter groups"):
        cluster.GD(groups, 0.1, server_optimizer="adam")


def test_a_state_of_another_server_optimizer_is_refused() -> None:
    net = nn.Linear(4, 3)
    saved = cluster.GD(net.parameters(), 0.1, server_optimizer="adam").state_dict()
    with pytest.raises(UsageError, match="cannot continue from this state: server_optimizer is Adam"):
        cluster.GD(net.parameters(), 0.1).load_state_dict(saved)


def test_adambc_takes_the_noise_of_the_optimizers_own_steps() -> None:
    """Against the recursion s² ← κ² s² + β² ν² with one client and its σ."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    privacy = normec.Privacy(sigma=0.5, delta=1e-5, unit="client", relation="zero-out", trust="central", noise="seeded")
    how: dict[str, Any] = {"privacy": privacy, "rounds": 5, "seed": 1, "server_optimizer": "adambc"}
    optimizer = cluster.Clip21([parameter], 0.01, 1.0, decay=0.2, **how)
    variance = 0.0
    for _ in range(5):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()
        variance = 0.8**2 * variance + 0.5**2
        held = optimizer.state_dict()["normec"]["optimizer"]["noise_variance"]
        assert float(held) == pytest.approx(variance, rel=1e-12)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("trust", "squares"), [("local", 0.4**2 + 0.3**2 + 0.2**2 + 0.1**2), ("secure-sum", 1 / 4)])
def test_adambc_knows_the_noise_of_weighted_clients(trust: Any, squares: float) -> None:
    """The mean of 4 messages has noise of variance σ² Σ w_i² if each has its own, and σ²/4 if the sum has it."""
    net = model()
    privacy = normec.Privacy(sigma=0.5, delta=1e-5, relation="zero-out", trust=trust, noise="seeded")
    how: dict[str, Any] = {"privacy": privacy, "rounds": 2, "seed": 1, "server_optimizer": "adambc"}
    optimizer = cluster.DPSGD(net.parameters(), 0.01, normec.Clip(1.0), clients=4, weights=WEIGHTS, **how)
    for client in range(4):
        with optimizer.client(client):
            net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    held = optimizer.state_dict()["normec"]["optimizer"]["noise_variance"]
    assert float(held) == pytest.approx(0.5**2 * squares, rel=1e-12)


@pytest.mark.parametrize(("trust", "factor"), [("secure-sum", 1.6), ("local", 1.0)])
def test_the_noise_of_a_weighted_sum_covers_the_heaviest_client(trust: Any, factor: float) -> None:
    """4 clients of weights 0.4 to 0.1: the sum moves by 4 · 0.4 times a message at most."""
    privacy = normec.Privacy(epsilon=4, trust=trust, noise="seeded")
    sigmas = []
    for weights in (None, WEIGHTS):
        net = model()
        optimizer = cluster.NormEC(
            net.parameters(), LR, 0.1, 0.3, clients=4, privacy=privacy, rounds=3, weights=weights
        )
        sigmas.append(optimizer.spent().sigma)
    assert sigmas[1] == pytest.approx(factor * sigmas[0], rel=1e-6)
    with pytest.raises(UsageError, match="sum 1"):
        cluster.NormEC(model().parameters(), LR, 0.1, 0.3, clients=4, weights=(1, 1, 1, 1))


class Averaging(nn.parallel.DistributedDataParallel):
    """A subclass of DDP, as other libraries define one, that needs no process group."""

    def __init__(self, inner: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = inner


@pytest.mark.parametrize("rounds_before", [0, 1])
def test_a_model_in_a_subclass_of_ddp_is_refused(rounds_before: int) -> None:
    net, bystander = nn.Linear(2, 1), Averaging(nn.Linear(2, 1))
    optimizer = cluster.GD(net.parameters(), LR)
    for _ in range(rounds_before):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    wrapped = Averaging(net)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match="the model is wrapped in Averaging, which averages the gradients"):
        optimizer.step()
    assert wrapped.module is net
    assert bystander.module is not net


@pytest.mark.parametrize(
    "frozen_before", [True, False, None], ids=["before the optimizer", "after the optimizer", "never"]
)
def test_a_wrapped_model_that_the_collector_does_not_list_is_refused(frozen_before: bool | None) -> None:
    """Programs freeze all objects before they fork workers."""
    net = nn.Linear(2, 1)
    gc.unfreeze()  # tests/conftest.py has frozen what it collected
    wrapped = Averaging(net) if frozen_before else None
    try:
        if frozen_before:
            gc.freeze()
        optimizer = cluster.GD(net.parameters(), LR)
        if not frozen_before:
            wrapped = Averaging(net)
        if frozen_before is False:
            gc.freeze()
        net(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UsageError, match="the model is wrapped in Averaging"):
            optimizer.step()
        assert bool(gc.get_freeze_count()) is (frozen_before is not None)
        assert wrapped is not None
    finally:
        gc.freeze()


@pytest.mark.usefixtures("new_objects")
@pytest.mark.parametrize("extra", [0.0, 5.0, -500.0])
def test_a_gradient_that_no_client_took_enters_no_later_message(extra: float) -> None:
    """The caller computes one gradient more than there are clients, and does not clear the gradients between rounds."""
    x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    privacy = normec.Privacy(sigma=1e-9, noise="seeded")
    optimizer = cluster.DPSGD([x], lr=1.0, operator=normec.Clip(1.0), clients=2, privacy=privacy, rounds=3, seed=1)
    with optimizer.client(0):
        x[0].backward()
    with optimizer.client(1):
        pass
    (extra * x.sum()).backward()
    with pytest.warns(UserWarning, match="client 1 has no gradient"):
        optimizer.step()
    before = x.detach().clone()
    for client, slope in enumerate((1.0, 0.0)):
        with optimizer.client(client):
            (slope * x[0]).backward()
    optimizer.step()
    torch.testing.assert_close(before - x.detach(), torch.tensor([0.5, 0.0], dtype=torch.float64), rtol=0, atol=1e-7)


@pytest.mark.usefixtures("new_objects")
def test_a_private_step_without_one_of_the_clients_is_refused() -> None:
    """Another client's gradients may contain those of the one that is skipped, and go through two memories."""
    x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    privacy = normec.Privacy(sigma=1.0, noise="seeded")
    optimizer = cluster.NormEC([x], 1.0, 0.1, 0.1, clients=2, privacy=privacy, rounds=3)
    for taken, skipped in (((), 0), ((0,), 1), ((1,), 0), ((1, 1), 0)):
        for client in taken:
            with optimizer.client(client):
                x.sum().backward()
        with pytest.raises(UsageError, match=rf"client\({skipped}\) had no turn in round 0, so the gradients"):
            optimizer.step()
    for client in range(2):
        with optimizer.client(client):
            x.sum().backward()
    optimizer.step()
    assert optimizer.spent().releases == 1


@pytest.mark.parametrize("closure", [None, lambda: None], ids=["without closure", "with closure"])
def test_a_refused_step_drops_all_gradients(closure: Any) -> None:
    """They would otherwise be added to the next client's."""
    x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    privacy = normec.Privacy(sigma=1.0, noise="seeded")
    optimizer = cluster.DPSGD([x], 1.0, normec.Clip(1.0), clients=2, privacy=privacy, rounds=3)
    for _ in range(2):
        with optimizer.client(0):
            x.sum().backward()
        x.sum().backward()  # in nobody's turn
        with pytest.raises(UsageError, match=r"client\(1\) had no turn in round 0"):
            optimizer.step(closure)
        assert x.grad is None
    assert optimizer.spent().releases == 0


@pytest.mark.usefixtures("new_objects")
def test_a_mode_that_would_see_several_clients_is_refused_at_a_private_step() -> None:
    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    net = nn.Linear(2, 1)
    privacy = normec.Privacy(epsilon=4, noise="seeded")
    optimizer = cluster.DPSGD(net.parameters(), lr=LR, operator=normec.Clip(1.0), privacy=privacy, rounds=1)
    net(torch.ones(1, 2)).sum().backward()
    with Seen(), pytest.raises(UsageError, match="Seen is active"):
        optimizer.step()
    optimizer.step()


@pytest.mark.usefixtures("new_objects")
@pytest.mark.parametrize("affine", [True, False], ids=["with parameters", "without parameters"])
@pytest.mark.parametrize("converted", [True, False], ids=["before the optimizer", "after the optimizer"])
def test_sync_batch_norm_is_refused_at_a_private_step(affine: bool, converted: bool) -> None:
    net: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=affine), nn.Linear(3, 1))
    privacy = normec.Privacy(epsilon=4, noise="seeded")
    if converted:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    optimizer = cluster.DPSGD(net.parameters(), lr=LR, operator=normec.Clip(1.0), privacy=privacy, rounds=2)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    if not converted:
        optimizer.step()  # BatchNorm uses the records of one client alone
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    with pytest.raises(UsageError, match="SyncBatchNorm, which shares statistics"):
        optimizer.step()
    plain = cluster.GD(net.parameters(), LR)
    plain.step()  # without privacy nothing is promised
