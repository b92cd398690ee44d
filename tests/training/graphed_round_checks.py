"""Rounds as CUDA graphs record them against rounds step by step, on any device: the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import (
    DPSGD,
    GD,
    Clip,
    Clip21,
    Compute,
    Diverged,
    FixedSize,
    Logging,
    LRSchedule,
    NormEC,
    Privacy,
    Problem,
    Run,
)
from normec.algorithms.tensor_norm import TensorNormEC
from normec.training.loop import TrainingLoop
from normec.training.options import Options
from normec.training.train import prepare, ready

from ..support.runs import problem, same

PRIVATE = Privacy(epsilon=8, delta=1e-5, unit="client", relation="zero-out", trust="secure-sum", noise="seeded")
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
LINEAR = (12, 3)  # sizes of the linear problem's tensors

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "normec": (NormEC(0.1, 0.3), {}),
    "without sn, forgetting": (NormEC(0.1, 0.3, server_norm=False, decay=0.1), {}),
    "clip21": (Clip21(0.5), {}),
    "dpsgd": (DPSGD(Clip(0.5), 0.7), {}),
    "dpsgd, momentum": (DPSGD(Clip(0.5), 0.7, momentum=0.8), {}),
    "gd": (GD(), {"lr": lambda k: 0.3 / (1 + k)}),
    "by tensor": (TensorNormEC(0.1, 0.3, sizes=LINEAR, in_place=True), {"warmup": 2}),
    "drawn": (NormEC(0.1, 0.3), {"participation": FixedSize(3)}),
    "drawn, forgetting": (NormEC(0.1, 0.3, decay=0.1), {"participation": FixedSize(3)}),
    "adam, averaged": (NormEC(0.1, 0.3), {"lr": 0.02, "server_optimizer": "adam", "averaging": "ema"}),
    "averaged": (Clip21(0.5), {"averaging": "polyak", "warmup": 2}),
    "momentum, on a schedule": (
        DPSGD(Clip(0.5)),
        {"server_optimizer": "momentum", "lr_schedule": LRSchedule("cosine", ramp_up=3), "warmup": 2},
    ),
    "adambc, private": (Clip21(0.5, decay=0.1), {"lr": 0.02, "privacy": PRIVATE, "server_optimizer": "adambc"}),
    "private": (NormEC(0.1, 0.3), {"privacy": PRIVATE}),
    "weighted": (NormEC(0.1, 0.3), {"weights": WEIGHTS}),
    "weighted, drawn, local": (
        DPSGD(Clip(0.5)),
        {"weights": WEIGHTS, "privacy": replace(PRIVATE, trust="local"), "participation": FixedSize(3)},
    ),
    "private, local": (Clip21(0.5), {"privacy": replace(PRIVATE, trust="local"), "participation": FixedSize(3)}),
}
ABLE = {name for name in CASES if name != "drawn, forgetting"}


def rounds(kind: str, method: Any, device: str, options: dict[str, Any]) -> TrainingLoop:
    settings = {
        "lr": 0.2,
        "rounds": 23,
        "batch_size": 4,
        "logging": Logging(every=5, evaluate_every=10),
        "device": device,
        **options,
    }
    return prepare(
        problem(kind), method, Options(compute=Compute(engine="shared", precision="float32"), seed=0, **settings)
    )


def ended(under_way: TrainingLoop) -> Run:
    with ready("float32"):
        return under_way.run()


def compare(name: str, device: str, kind: str = "linear") -> None:
    """A run whose rounds are computed as for a recording, where they may be, has the bits of a run step by step."""
    method, options = CASES[name]
    plain, at_once = rounds(kind, method, device, options), rounds(kind, method, device, options)
    plain.graphed.able = False
    assert at_once.graphed.suited == (name in ABLE)
    at_once.graphed.able = at_once.graphed.suited  # as it is on a GPU
    count = 0
    run = at_once.graphed.run

    def counted(*given: Any) -> torch.Tensor | None:
        nonlocal count
        count += 1
        return run(*given)

    at_once.graphed.run = counted  # type: ignore[method-assign]
    same(ended(plain), ended(at_once))
    # Of 23 rounds the five with a row are not.
    assert count == (18 if name in ABLE else 0), count
    recorded = at_once.graphed._graphs
    if name in ABLE and recorded is not None:
        assert recorded._kept, "nothing was recorded"


def check_blame(device: str) -> None:
    """What breaks in a round that nobody looks at is reported at the next row, with that round and that client."""
    parts = [TensorDataset(torch.full((8, 4), 1.0 + i), torch.zeros(8, dtype=torch.int64)) for i in range(4)]
    parts[2].tensors[0][7] = 3e38  # overflows in the round that draws it
    torch.manual_seed(0)
    of = Problem(nn.Linear(4, 3), F.cross_entropy, parts)
    options: dict[str, Any] = {
        "lr": 0.1,
        "rounds": 40,
        "batch_size": 1,
        "logging": Logging(every=10, evaluate_every=20),
        "device": device,
    }
    reported = []
    for able in (False, True):
        under_way = prepare(
            of, NormEC(0.1, 0.3), Options(compute=Compute(engine="shared", precision="float32"), seed=0, **options)
        )
        under_way.graphed.able = able
        try:
            ended(under_way)
        except Diverged as error:
            reported.append((error.round, error.clients, str(error)))
    assert len(reported) == 2, reported
    assert reported[0] == reported[1], reported
    assert reported[0][1] == [2], reported


def check_gradients_that_move(device: str) -> None:
    """An engine may put the gradients elsewhere in every round; the rounds are replayed nevertheless."""
    options = {"participation": FixedSize(3), "rounds": 40, "logging": Logging(every=10**6, evaluate_every=10**6)}
    plain, at_once = (rounds("linear", NormEC(0.1, 0.3), device, options) for _ in range(2))
    plain.graphed.able, at_once.graphed.able = False, at_once.graphed.suited
    run, held = at_once.graphed.run, []

    def elsewhere(state: Any, block: Any) -> torch.Tensor | None:
        held.append(replace(block, grads=block.grads.clone(), losses=block.losses.clone()))  # no address is used twice
        return run(state, held[-1])

    at_once.graphed.run = elsewhere  # type: ignore[method-assign]
    same(ended(plain), ended(at_once))
    assert len(held) > 30
    recorded = at_once.graphed._graphs
    if recorded is not None:
        assert sum(recorded._seen.values()) < len(held) / 2, "most rounds were not replayed"
