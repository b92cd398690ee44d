"""Each rank draws its own part of the noise, so a group with fewer ranks than the optimizer knows is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .torchrun import torchrun


@pytest.mark.slow
def test_no_sum_leaves_a_group_that_has_lost_a_rank(tmp_path: Path) -> None:
    """Two ranks of three begin another group: their sum would have two thirds of the variance that was paid for."""
    done = torchrun(3, "-m", "tests.distributed.regroup_job", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert f"this was rank {rank} of 3, and is rank {rank} of 2" in found["said"]
        assert found["sums"] == 0
