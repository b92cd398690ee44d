"""Mistakes with the optimizer, on two ranks of torchrun: `python -m tests.distributed.misuse_job FOLDER`."""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normec import Privacy, SmoothedNorm
from normec import distributed as cluster
from normec.errors import RankLost
from normec.training.communicator import Communicator

from ..support.waiting import LIMIT
from .optimizer_job import said

WIDE = 2000
SECURE = Privacy(sigma=0.5, delta=1e-5, unit="client", relation="zero-out", trust="secure-sum", noise="secure")


def lr_at_the_start(rank: int, folder: Path) -> str:  # noqa: ARG001
    return said(lambda: cluster.GD(nn.Linear(2, 2).parameters(), lr=0.1 + rank))


def lr_of_one_rank_alone(rank: int, folder: Path) -> str:  # noqa: ARG001
    net = nn.Linear(2, 2)
    optimizer = cluster.GD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    net(torch.ones(1, 2)).sum().backward()
    before = net.weight.detach().clone()
    words = said(optimizer.step)
    assert torch.equal(net.weight, before), "x has moved"
    return words


def ledger_of_one_rank_alone(rank: int, folder: Path) -> str:
    how: dict[str, Any] = {"privacy": SECURE, "rounds": 2, "ledger": folder / "one" if rank else None}
    return said(lambda: cluster.GD(nn.Linear(2, 2).parameters(), 0.1, **how))


def steps_in_another_order(rank: int, folder: Path) -> str:  # noqa: ARG001
    made = [(net := nn.Linear(2, 2), cluster.GD(net.parameters(), lr=0.1)) for _ in range(2)]
    words = []
    for net, optimizer in made if rank == 0 else reversed(made):
        net(torch.ones(1, 2)).sum().backward()
        words.append(said(optimizer.step))
    assert words[0].partition("optimizer is")[0] == words[1].partition("optimizer is")[0]
    return words[0]


def seed_of_one_rank_alone(rank: int, folder: Path) -> str:  # noqa: ARG001
    privacy = Privacy(sigma=1.0, trust="secure-sum", noise="seeded")
    how: dict[str, Any] = {"privacy": privacy, "rounds": 2, "seed": 0 if rank else None}
    return said(lambda: cluster.DPSGD(nn.Linear(2, 2).parameters(), 0.1, SmoothedNorm(0.1), **how))


def states_of_other_rounds(rank: int, folder: Path) -> str:  # noqa: ARG001
    net = nn.Linear(2, 2)
    optimizer = cluster.GD(net.parameters(), lr=0.1)
    states = [optimizer.state_dict()]
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states.append(optimizer.state_dict())
    return said(lambda: optimizer.load_state_dict(states[rank]))


def states_of_other_attempts(rank: int, folder: Path) -> str:  # noqa: ARG001
    """Both are of round 1, which was made twice: the server's estimates on the ranks would differ for good."""
    net = nn.Linear(2, 2)
    optimizer = cluster.NormEC(net.parameters(), lr=0.1, alpha=0.1, beta=0.1)
    start, states = copy.deepcopy(optimizer.state_dict()), []
    for slope in (1.0, -1.0):
        optimizer.load_state_dict(start)
        optimizer.zero_grad()
        (slope * net(torch.ones(1, 2)).sum()).backward()
        optimizer.step()
        states.append(copy.deepcopy(optimizer.state_dict()))
    return said(lambda: optimizer.load_state_dict(states[rank]))


def averaged_by_ddp(rank: int, folder: Path) -> str:  # noqa: ARG001
    net = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = cluster.GD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    return said(optimizer.step)


def averaged_by_fsdp(rank: int, folder: Path) -> str:  # noqa: ARG001
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    optimizer = cluster.GD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    return said(optimizer.step)


def averaged_by_ddp_from_the_second_step_on(rank: int, folder: Path) -> dict[str, Any]:  # noqa: ARG001
    net = nn.Linear(2, 2)
    optimizer = cluster.GD(net.parameters(), lr=0.1)
    DistributedDataParallel(nn.Linear(2, 2))  # of another model, which is none of the optimizer's business
    net(torch.ones(1, 2)).sum().backward()
    first = said(optimizer.step)
    wrapped = DistributedDataParallel(net)
    wrapped(torch.ones(1, 2)).sum().backward()
    return {"first": first, "wrapped": [said(optimizer.step), said(optimizer.step)]}


def one_client_has_no_number(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1's gradient is not finite in a private run, of which rank 0 must not learn."""
    x = nn.Parameter(torch.zeros(WIDE))
    how: dict[str, Any] = {"privacy": SECURE, "rounds": 3, "ledger": folder / "nan"}
    optimizer = cluster.DPSGD([x], 1.0, SmoothedNorm(0.1), **how)
    heard = []
    for factor in (1.0, math.nan, 1.0):
        x.grad = torch.full((WIDE,), factor if rank else 1.0)
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            optimizer.step()
        heard.append([str(warning.message) for warning in noted])
    return {"heard": heard, "x": float(x.detach().double().sum()), "releases": optimizer.spent().releases}


def ledger_that_is_exchanged(rank: int, folder: Path) -> str:
    x = nn.Parameter(torch.zeros(WIDE))
    ledger = folder / "exchanged.jsonl"
    optimizer = cluster.DPSGD([x], 1.0, SmoothedNorm(0.1), privacy=SECURE, rounds=3, ledger=ledger)
    x.grad = torch.ones(WIDE)
    optimizer.step()
    if rank == 0:
        ledger.rename(folder / "taken.jsonl")
        ledger.write_text("")
    x.grad = torch.ones(WIDE)
    return said(optimizer.step)


def ledger_after_a_refused_optimizer(rank: int, folder: Path) -> dict[str, Any]:  # noqa: ARG001
    x = nn.Parameter(torch.zeros(WIDE))
    how: dict[str, Any] = {"privacy": replace(SECURE, trust="local", memory="noisy"), "rounds": 2}
    how["ledger"] = folder / "refused.jsonl"
    refused = said(lambda: cluster.NormEC([x], 1.0, 0.1, 0.1, server_optimizer="adambc", **how))
    return {"refused": refused, "next": said(lambda: cluster.NormEC([x], 1.0, 0.1, 0.1, **how))}


def frozen_layer(rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(rank)  # ranks begin differently, the frozen layer too
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    how: dict[str, Any] = {"privacy": SECURE, "rounds": 3, "ledger": folder / "frozen"}
    optimizer = cluster.NormEC(net.parameters(), 0.1, 0.1, 0.1, **how)
    before: Tensor = net[0].weight.detach().clone()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = {"moved": not torch.equal(net[0].weight, before), "weight": before.tolist()}
    net[0].requires_grad_(True)
    found["unfrozen"] = said(optimizer.step)
    net[0].requires_grad_(False)
    net[1].requires_grad_(False)
    found["frozen later"] = said(optimizer.step)
    found["releases"] = optimizer.spent().releases
    return found


CASES = (
    lr_at_the_start,
    lr_of_one_rank_alone,
    ledger_of_one_rank_alone,
    seed_of_one_rank_alone,
    steps_in_another_order,
    states_of_other_rounds,
    states_of_other_attempts,
    averaged_by_ddp,
    averaged_by_fsdp,
    averaged_by_ddp_from_the_second_step_on,
    one_client_has_no_number,
    ledger_that_is_exchanged,
    ledger_after_a_refused_optimizer,
    frozen_layer,
)


def one_step_more(communicator: Communicator) -> str:
    """Rank 1 makes a step that rank 0 does not: it must not wait for ever."""
    net = nn.Linear(2, 2)
    optimizer = cluster.GD(net.parameters(), lr=0.1)
    try:
        for _ in range(2 + communicator.rank):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    except RankLost as error:
        return f"RankLost: {error}"
    return "nothing"


def main(folder: Path) -> None:
    with cluster.join(timeout=LIMIT) as communicator:
        found: dict[str, Any] = {case.__name__: case(communicator.rank, folder) for case in CASES}
        rank = communicator.rank
        found["one_step_more"] = one_step_more(communicator)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
