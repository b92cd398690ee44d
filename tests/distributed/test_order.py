"""Several optimizers of one job: no message leaves under the payment and the noise of another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .torchrun import torchrun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "missing"), [("steps", "round 0 is not paid for"), ("spent", "it is unknown what was spent")]
)
def test_no_message_leaves_under_the_payment_of_another_call(tmp_path: Path, case: str, missing: str) -> None:
    """Each rank adds its share of the noise: what rank 1 sends instead would have its own share alone."""
    done = torchrun(2, "-m", "tests.distributed.order_job", str(tmp_path), case, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert second["said"][0].startswith(f"UsageError: {missing}, because rank 0 does something else")
    assert first["said"][0].startswith("RankLost: ")
    assert first["moved"] == second["moved"] == [False, False]
