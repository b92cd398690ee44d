"""Two optimizers whose calls rank 1 makes in another order: `python -m tests.distributed.order_job FOLDER CASE`.

CASE: "steps" (the steps of the two optimizers are swapped) or "spent" (rank 1 asks what was spent before its step).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normec import Privacy, SmoothedNorm
from normec import distributed as cluster
from normec.errors import RankLost, UsageError

from ..support.waiting import LIMIT

WIDE = 100


def main(folder: Path, case: str) -> None:
    said: list[str] = []
    with cluster.join(timeout=LIMIT) as communicator:
        rank, pairs = communicator.rank, []
        for sigma in (50.0, 0.01):
            x = nn.Parameter(torch.zeros(WIDE))
            privacy = Privacy(sigma=sigma, trust="secure-sum", noise="secure")
            how: dict[str, Any] = {"privacy": privacy, "rounds": 3, "ledger": folder / f"{sigma}.jsonl"}
            pairs.append((x, cluster.DPSGD([x], 1.0, SmoothedNorm(0.1), **how)))
        for x, optimizer in reversed(pairs) if rank and case == "steps" else pairs:
            x.grad = torch.ones(WIDE)
            try:
                if rank and case == "spent":
                    optimizer.spent()
                optimizer.step()
                said.append("nothing")
            except (UsageError, RankLost) as error:
                said.append(f"{type(error).__name__}: {error}")
                break
    moved = [bool(x.detach().any()) for x, _ in pairs]
    (folder / f"found-{rank}.json").write_text(json.dumps({"said": said, "moved": moved}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
