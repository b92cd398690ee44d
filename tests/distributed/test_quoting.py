"""What other ranks hear of a rank that fails, whose error may quote a record of its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..cli.command import completed
from .quoting_job import RECORD
from .torchrun import torchrun

LAUNCHER = """
import sys
from normec.distributed.launch import launch

sys.exit(launch([sys.executable, "-m", "tests.distributed.quoting_job", sys.argv[1]], 2, max_restarts=0))
"""

pytestmark = pytest.mark.slow


def test_a_rank_on_another_machine_hears_the_kind_of_an_error_alone(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "tests.distributed.quoting_job", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "heard").read_text() == "rank 1 ended: ValueError"


def test_ranks_of_one_user_hear_what_an_error_says(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    done = completed("launcher.py", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert RECORD in (tmp_path / "heard").read_text()
