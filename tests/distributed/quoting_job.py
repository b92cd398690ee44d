"""Rank 1 fails with an error that quotes a record, and rank 0 writes what it hears of it.

`python -m tests.distributed.quoting_job FOLDER`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from normec import distributed as cluster
from normec.errors import RankLost

from ..support.waiting import LIMIT

RECORD = "Jane Roe, born 1970"


def main(folder: Path) -> None:
    with suppress(ValueError), cluster.join(timeout=LIMIT) as communicator:
        x = nn.Parameter(torch.zeros(3))
        optimizer = cluster.GD([x], lr=0.1)
        x.grad = torch.ones(3)
        if communicator.rank:
            float(RECORD)
        try:
            optimizer.step()
        except RankLost as error:
            (folder / "heard").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
