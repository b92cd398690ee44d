"""A process group that loses a rank while an optimizer is in use: `python -m tests.distributed.regroup_job FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normec import Privacy, SmoothedNorm
from normec import distributed as cluster

from .optimizer_job import said

WIDE, STAY = 1000, 2


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), nn.Parameter(torch.zeros(WIDE))
    privacy = Privacy(sigma=1.0, trust="secure-sum", noise="secure")
    how: dict[str, Any] = {"privacy": privacy, "rounds": 3, "ledger": folder / "ledger.jsonl"}
    optimizer = cluster.DPSGD([x], 1.0, SmoothedNorm(0.1), **how)
    x.grad = torch.ones(WIDE)
    optimizer.step()
    dist.destroy_process_group()
    if rank < STAY:
        dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=STAY)
        sums: list[Tensor] = []
        add_up = dist.all_reduce

        def noted(part: Tensor, *given: Any, **named: Any) -> Any:
            sums.append(part)
            return add_up(part, *given, **named)

        dist.all_reduce = noted
        words = said(optimizer.step)
        (folder / f"found-{rank}.json").write_text(json.dumps({"said": words, "sums": len(sums)}))
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
