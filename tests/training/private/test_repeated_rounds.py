"""A round that is made again costs nothing only where it comes out bit for bit the same; else it draws other noise."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import (
    DPSGD,
    Callback,
    Clip,
    Compute,
    ErrorFeedback,
    Logging,
    Method,
    NormEC,
    Privacy,
    Problem,
    Run,
    SmoothedNorm,
    train,
)
from normec.distributed.optimizer import ClientOptimizer
from normec.errors import UsageError
from normec.privacy import Account, Event
from normec.sampling.random_streams import Key
from normec.training import loop, repeatability

from ...support.datasets import Fetched
from ...support.runs import StopAt, releases

ROUNDS, STOPPED = 8, 3
PRIVACY = Privacy(sigma=2.0, trust="secure-sum", noise="seeded")


class Own(ErrorFeedback):
    """A message of the caller's own, whose code may change from one process to the next."""

    def message(self, update: Tensor, state: Tensor, key: Key | None = None) -> tuple[Tensor, Tensor]:
        return super().message(update, state, key)


def problem(lazy: bool = False, moved: float = 0.0) -> Problem:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    data = [
        TensorDataset(torch.randn(6, 5, generator=draw), torch.randint(0, 3, (6,), generator=draw)) for _ in range(4)
    ]
    data[1].tensors[0].add_(moved)
    parts = [Fetched(*part.tensors) for part in data] if lazy else data
    return Problem(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), F.cross_entropy, parts)


def made(folder: Path, of: Problem, method: Method | None = None, **options: Any) -> Run:
    return train(of, method or NormEC(0.1, 0.1), lr=0.1, rounds=ROUNDS, privacy=PRIVACY, out=folder, **options)


def rewound(folder: Path, of: Problem, method: Method | None = None, **options: Any) -> Run:
    """A run to its end, and its folder with the checkpoint of round 3, as a kill would leave it."""
    made(folder, of, method, callbacks=[StopAt(STOPPED)], **options)
    shutil.copytree(folder / "checkpoint", folder.parent / "kept")
    whole = made(folder, of, method, **options)
    again(folder)
    return whole


def again(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(folder.parent / "kept", folder / "checkpoint")


def attempts(folder: Path) -> list[tuple[int, int]]:
    """(round, attempt) of every release."""
    return [(line["round"], line["attempt"]) for line in releases(folder)]


ONCE = [(k, 0) for k in range(ROUNDS)]
REPEATED = [(k, 1) for k in range(STOPPED, ROUNDS)]


def test_the_same_bits_are_the_same_release(tmp_path: Path) -> None:
    whole = rewound(tmp_path / "run", problem())
    repeated = made(tmp_path / "run", problem())
    assert torch.equal(repeated.x, whole.x)
    assert attempts(tmp_path / "run") == ONCE


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("lazy", "method"), [(True, None), (False, Own(Clip(0.5)))], ids=["lazy data", "a method of the user's own"]
)
def test_what_may_come_out_otherwise_is_paid_for_again_with_other_noise(
    lazy: bool, method: Method | None, tmp_path: Path
) -> None:
    whole = rewound(tmp_path / "run", problem(lazy), method)
    repeated = made(tmp_path / "run", problem(lazy), method)
    assert attempts(tmp_path / "run") == ONCE + REPEATED
    assert repeated.privacy is not None
    assert repeated.privacy.releases == ROUNDS + len(REPEATED)
    assert not torch.equal(repeated.x, whole.x)


def test_another_engine_pays_again_and_so_does_going_back(tmp_path: Path) -> None:
    """Sums in another order differ in their last bits: under the same noise the difference would be in the clear."""
    folder = tmp_path / "run"
    rewound(folder, problem(), compute=Compute(engine="shared"))
    made(folder, problem(), compute=Compute(engine="loop"))
    assert attempts(folder) == ONCE + REPEATED
    again(folder)
    made(folder, problem(), compute=Compute(engine="shared"))
    assert attempts(folder) == ONCE + REPEATED + [(k, 2) for k in range(STOPPED, ROUNDS)]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("engine", "kept"), [("shared", False), ("batched", True), ("loop", True)])
def test_a_gpu_that_may_add_up_otherwise_has_its_sums_kept(
    engine: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a caller's layers may add up in any order there, and sums that differ in a bit are two releases."""
    graphics = torch.device("cuda")
    monkeypatch.setattr(loop, "sums_in_fixed_order", lambda name, _: repeatability.sums_in_fixed_order(name, graphics))
    whole = rewound(tmp_path / "run", problem(), compute=Compute(engine=engine))
    assert {line["key"] is None for line in releases(tmp_path / "run")} == {kept}
    made(tmp_path / "run", problem(), compute=Compute(engine=engine))
    assert attempts(tmp_path / "run") == (ONCE + REPEATED if kept else ONCE)
    assert whole.finished


def test_rounds_that_were_paid_for_together_are_paid_again_from_the_first_that_is_left(tmp_path: Path) -> None:
    """Of 250 rounds two are paid for at once; stopped between the two, another engine pays for the second anew."""
    folder, options = tmp_path / "run", {"lr": 0.1, "rounds": 250, "privacy": PRIVACY, "out": tmp_path / "run"}
    train(problem(), NormEC(0.1, 0.1), compute=Compute(engine="shared"), callbacks=[StopAt(STOPPED)], **options)  # type: ignore[arg-type]
    run = train(problem(), NormEC(0.1, 0.1), compute=Compute(engine="loop"), callbacks=[StopAt(10)], **options)  # type: ignore[arg-type]
    assert run.privacy is not None
    assert run.privacy.releases == 11
    assert attempts(folder)[:4] == [(0, 0), (2, 0), (3, 1), (4, 0)]


def test_a_ledger_without_its_checkpoint_is_refused(tmp_path: Path) -> None:
    """Other data under the noise of the first run would show the difference of the two without noise."""
    folder = tmp_path / "run"
    made(folder, problem())
    shutil.rmtree(folder / "checkpoint")
    with pytest.raises(UsageError, match=r"latest\.json is missing beside"):
        made(folder, problem(moved=1.0))
    assert attempts(folder) == ONCE


def test_a_ledger_never_stands_without_a_checkpoint(tmp_path: Path) -> None:
    """Killed right after the first payment, a run knows by its checkpoint that the payment is its own."""
    seen = []

    class Looks(StopAt):
        def begin(self, first_round: int, rounds: int) -> None:  # noqa: ARG002
            seen.append((tmp_path / "run" / "ledger.jsonl").exists())

        def round(self, round: int) -> None:
            if round == 1:
                seen.append((tmp_path / "run" / "checkpoint" / "latest.json").exists())

    made(tmp_path / "run", problem(), callbacks=[Looks(99)])
    assert seen == [False, True]


def test_the_optimizer_pays_again_because_it_does_not_see_where_gradients_come_from(tmp_path: Path) -> None:
    found = []
    for gradient in (0.0, 1.0):
        x = nn.Parameter(torch.zeros(500))
        optimizer = ClientOptimizer(
            [x], DPSGD(Clip(1e-6)), 1.0, privacy=PRIVACY, rounds=2, ledger=tmp_path / "ledger.jsonl"
        )
        x.grad = torch.full((500,), gradient)
        optimizer.step()
        found.append(x.detach().clone())
        optimizer._noise._mechanism.close()  # type: ignore[union-attr]
    assert attempts(tmp_path) == [(0, 0), (0, 1)]
    assert abs(float(torch.corrcoef(torch.stack(found))[0, 1])) < 5 / 500**0.5


def bowls(moved: float) -> Any:
    return Problem.from_functions([lambda x, c=c: ((x - c) ** 2).sum() for c in (0.0, moved)], torch.zeros(3))


def enclosed(moved: float) -> Any:
    """The same, and each function holds its centre in a closure."""

    def bowl(centre: Tensor) -> Any:
        return lambda x: ((x - centre) ** 2).sum()

    return Problem.from_functions([bowl(torch.full((3,), c)) for c in (0.5, 1.0 + moved)], torch.zeros(3))


def smoothed(amount: float) -> Problem:
    of = problem()
    of.loss = lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=amount)
    return of


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", [bowls, enclosed, smoothed], ids=["functions", "closures", "loss"])
def test_code_and_functions_that_changed_make_another_release(tmp_path: Path, kind: Any) -> None:
    folder = tmp_path / "run"
    rewound(folder, kind(0.0))
    made(folder, kind(0.0))
    assert attempts(folder) == ONCE
    again(folder)
    made(folder, kind(1e-6))  # too little for the value at the start, which a checkpoint is known by
    assert attempts(folder) == ONCE + [(k, 1) for k in range(STOPPED, ROUNDS)]


@dataclass(frozen=True)
class Some:
    """A rule of the caller's own, known by its name, that draws others than before."""

    without: int = field(repr=False)

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:  # noqa: ARG002
        return torch.tensor([client for client in range(clients) if client != self.without])


@pytest.mark.slow
def test_a_rule_that_draws_others_makes_another_release(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rewound(folder, problem(), participation=Some(0))
    made(folder, problem(), participation=Some(0))
    assert attempts(folder) == ONCE
    again(folder)
    made(folder, problem(), participation=Some(1))
    assert attempts(folder) == ONCE + REPEATED


class Drawing(ErrorFeedback):
    """A server whose step draws, so that x takes another way when it is made again."""

    def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        direction, estimate = super().server_step(mean_message, state)
        return direction + torch.rand(()), estimate


@pytest.mark.slow
def test_a_server_step_of_the_caller_s_own_gets_no_credit(tmp_path: Path) -> None:
    folder, method = tmp_path / "run", Drawing(SmoothedNorm(0.1), 0.1)
    rewound(folder, problem(), method)
    made(folder, problem(), method)
    assert attempts(folder) == ONCE + [(k, 1) for k in range(STOPPED, ROUNDS)]


@pytest.mark.slow
@pytest.mark.parametrize("coins", ["clients", "records"])
def test_a_repeated_round_gains_nothing_from_coins_that_were_used(coins: str, tmp_path: Path) -> None:
    """Who is drawn in a round follows from its number: the second release of the round has the coins of the first."""
    rate, sigma = 0.5, 2.0
    statement: dict[str, Any] = {"sigma": sigma, "trust": "secure-sum", "noise": "seeded"}
    options: dict[str, Any] = {"lr": 0.1, "rounds": ROUNDS, "out": tmp_path / "run"}
    if coins == "clients":
        options["privacy"] = Privacy(**statement, sampling=rate)
    else:
        options |= {"privacy": Privacy(**statement, unit="record"), "batch_rate": rate}
    method, folder = DPSGD(Clip(0.5)), tmp_path / "run"
    train(problem(True), method, callbacks=[StopAt(STOPPED)], **options)
    shutil.copytree(folder / "checkpoint", tmp_path / "kept")
    train(problem(True), method, **options)
    again(folder)
    run = train(problem(True), method, **options)
    lines = releases(folder)
    assert [line["rate"] for line in lines] == [rate] * ROUNDS + [1.0] * (ROUNDS - STOPPED)
    assert run.privacy is not None
    multiplier = lines[0]["multiplier"]
    events = [Event(multiplier, rate, ROUNDS), Event(multiplier, 1.0, ROUNDS - STOPPED)]
    assert run.privacy.epsilon == Account(1e-5, events).epsilon()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("how", ["subnormals", "variable"])
def test_arithmetic_of_another_kind_makes_another_release(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rounds otherwise gives other bits, and under the same noise their difference would be in the clear."""
    folder = tmp_path / "run"
    rewound(folder, problem())
    try:
        if how == "subnormals":
            assert torch.set_flush_denormal(True)
        else:
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        made(folder, problem())
    finally:
        torch.set_flush_denormal(False)
    assert attempts(folder) == ONCE + REPEATED


def test_a_run_does_not_round_products_because_the_caller_does(tmp_path: Path) -> None:
    mkldnn: Any = torch.backends.mkldnn
    folder, matmul = tmp_path / "run", mkldnn.matmul
    rewound(folder, problem())
    usual = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        made(folder, problem())
    finally:
        matmul.fp32_precision = usual
    assert attempts(folder) == ONCE


def test_the_number_of_threads_stays_that_of_the_run() -> None:
    """Sums over other parts have other bits, and the key of a release holds the number that the run began with."""
    seen: SimpleQueue[int] = SimpleQueue()  # a list would be as it was after every client

    class Setting(Callback):
        def round(self, round: int) -> None:
            torch.set_num_threads(1 + round % 2)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.put(torch.get_num_threads())
        return F.cross_entropy(outputs, targets)

    of = problem()
    of.loss = loss
    options: dict[str, Any] = {"privacy": PRIVACY, "compute": Compute(engine="loop"), "callbacks": [Setting()]}
    train(of, NormEC(0.1, 0.1), lr=0.1, rounds=4, **options)
    numbers = [seen.get() for _ in range(seen.qsize())]
    assert set(numbers[-12:]) == {1}


def counting_loss(after: int) -> Any:
    """A loss that becomes steeper with every call after so many; what it counts lies in its closure."""
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(outputs * (1 + max(0, calls - after)), targets)

    return loss


class Evaluates(StopAt):
    def round(self, round: int) -> None:
        self.run.evaluate()
        super().round(round)


def test_an_evaluation_changes_nothing_that_later_rounds_compute(tmp_path: Path) -> None:
    """A new process has not evaluated the earlier rounds, so its sums would be others, under the same noise."""

    def evaluated() -> Problem:
        torch.manual_seed(0)
        data = [TensorDataset(torch.randn(6, 5), torch.randint(0, 3, (6,))) for _ in range(4)]
        test = TensorDataset(torch.randn(6, 5), torch.randint(0, 3, (6,)))
        return Problem(nn.Linear(5, 3), counting_loss(60), data, test=test)

    options: dict[str, Any] = {"lr": 0.1, "rounds": 50, "privacy": PRIVACY, "seed": 0}
    options["logging"] = Logging(every=1, evaluate_every=1)
    runs = []
    for rounds in (50, 2):  # after round 2, the second process goes on with a loss that has counted nothing
        folder = tmp_path / str(rounds)
        train(evaluated(), "normec", callbacks=[Evaluates(rounds)], out=folder, **options)
        runs.append(train(evaluated(), "normec", callbacks=[Evaluates(50)], out=folder, **options))
    assert torch.equal(runs[0].x, runs[1].x)
