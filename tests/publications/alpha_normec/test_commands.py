"""The commands on images: ResNet20 on made-up data in the format of CIFAR-10, with only what training needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from normec.cli.app import run
from normec.experiments import build
from normec.sampling.batches import rounds_of
from publications.alpha_normec import protocol
from publications.alpha_normec.commands import app
from publications.alpha_normec.methods import DP_NORMEC, configure

from ...support.waiting import LIMIT
from .conftest import ROOT

pytestmark = pytest.mark.slow  # nothing of the library depends on it

BARRED = ("matplotlib", "sklearn", "PIL", "pyarrow", "flwr", "mlflow", "cryptography", "opendp")
TINY = ["--set", "records=120", "--set", "test_records=12", "--set", "rounds=1", "--set", "short_rounds=1"]
TINY += ["--set", "clients=3", "--set", "precision=float32", "--set", "device=cpu"]
CELLS = ["readings-sn-in-place-normec-sn-beta-0.1-seed-42", "private-total-norm-normec-beta-0.1-lr-0.1-seed-42"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    for part, count in (("train", 150), ("test", 20)):
        images = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        np.save(tmp_path / "data" / "cifar10" / f"{part}_x.npy", images)
        np.save(tmp_path / "data" / "cifar10" / f"{part}_y.npy", (np.arange(count) % 10).astype(np.uint8))
    return tmp_path / "data"


def test_cells_run_where_only_training_is_installed(images: Path, tmp_path: Path) -> None:
    barrier = tmp_path / "bar" / "sitecustomize.py"
    barrier.parent.mkdir()
    barrier.write_text(f"import sys\nfor name in {BARRED}:\n    sys.modules[name] = None\n")  # import then fails
    source = Path(sys.modules["normec"].__path__[0]).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (barrier.parent, source, ROOT))),
        "NORMEC_DATA": str(images),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "publications.alpha_normec", "run", *CELLS, *TINY, "--jobs", "1", "--quiet"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "done: 0 cells are pending" in done.stdout
    for name in CELLS:
        record = json.loads((tmp_path / "runs/alpha_normec/paper/records/cells" / f"{name}.json").read_text())
        assert (record["status"], record["config"]["data"]) == ("finished", "cifar10")
        assert record["curve"]["epoch"] == [0, 1]
    assert record["privacy"]["epsilon"] > 1e3
    assert record["config"]["model"] == "resnet20-gn"


def test_what_the_plan_counts_is_what_the_data_has(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan uses the published size of CIFAR-10; this compares it with the records of the workers."""
    monkeypatch.setenv("NORMEC_DATA", str(images))
    base = protocol.make("paper", {"records": 47, "clients": 3, "batch_size": 4})
    problem = build.problem(configure(base, DP_NORMEC, 0.1, 0.1))
    assert problem.sizes is not None
    assert protocol.extent(base) == protocol.Extent(rounds_of(1, problem.sizes, 4), len(problem.x0))
    assert protocol.extent(protocol.make("paper")) == protocol.Extent(140, 269722)


def test_without_the_data_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NORMEC_DATA", raising=False)
    words = ["run", "tables", "--folder", str(tmp_path / "r"), "--runs", str(tmp_path / "runs")]
    assert run(words, app) == 2
    assert "cifar10 is not here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_list_names_every_cell_with_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--folder", str(tmp_path), "--json"], app) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 204
    assert listed[0]["config"]["beta"] == 0.01
    assert {row["state"] for row in listed} == {"pending", "only if best"}
    assert run(["list", "alpha", "--folder", str(tmp_path)], app) == 0
    assert "8 cells" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["run", "tabels"], "did you mean 'tables'?"),
        (["run", "--set", "noize=1"], "did you mean 'noise'?"),
        (["collect", str(tmp_path / "none.tgz")], "there is no"),
        (["pages", "--set", "betas=[0.2]"], "no beta = 0.2"),
    ):
        assert run([*words, "--folder", str(tmp_path / "r")], app) == 2
        printed = capsys.readouterr().err
        assert says in printed
        assert printed.count("\n") == 1
