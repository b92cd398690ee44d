"""The lines of progress of a run whose output is no terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from normec import Poisson
from normec.cli.progress import Lines
from normec.experiments import runs
from normec.settings import make


def test_a_run_may_begin_with_a_round_in_which_nobody_takes_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = Poisson(0.05).draw(clients=10, round=0, seed=0)
    assert drawn is not None
    assert len(drawn) == 0
    config = make({"private": False, "clients": 10, "rounds": 6, "sample_rate": 0.05, "seed": 0})
    runs.execute(config, tmp_path / "run", [Lines("normec")])
    assert "normec  round 6/6  " in capsys.readouterr().err
