"""The package as people get it: built, installed into an empty environment, and used from two sides.

One environment serves all tests of this file, in their order: first with what `pip install normec` brings, then with
the extras. Nothing of the checkout is on its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from .support.waiting import LIMIT

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "src", "benchmarks", "publications")
pytestmark = pytest.mark.slow

TRAIN = """
import sys, torch, normec

torch.manual_seed(0)
inputs, true = torch.randn(120, 5), torch.randn(5)
targets = (inputs @ true > 0).long()
clients = [torch.utils.data.TensorDataset(inputs[i::6], targets[i::6]) for i in range(6)]
problem = normec.Problem(torch.nn.Linear(5, 2), torch.nn.functional.cross_entropy, clients=clients)
run = normec.train(problem, normec.NormEC(), lr=0.5, rounds=int(sys.argv[1]), out="run", seed=0)
print(run.history["round"][-1], sorted(name for name in sys.modules if name in ("scipy", "sklearn", "typer", "flwr")))
"""

HOSPITALS = """
import torch, normec

data = normec.data.load("breast_cancer")
inputs, targets = data.train.tensors
hospitals = [torch.utils.data.TensorDataset(inputs[i::3], targets[i::3]) for i in range(3)]
problem = normec.Problem(normec.models.Softmax(30, 2), torch.nn.functional.cross_entropy, clients=hospitals,
                         test=data.test)
privacy = normec.Privacy(epsilon=4, delta=1e-4, unit="record", trust="secure-sum", record_clip=1.0)
run = normec.train(problem, normec.DPSGD(normec.Clip(1.0)), lr=0.3, rounds=30, privacy=privacy, out="run-hospitals")
print(run.privacy.epsilon, run.history["accuracy"][-1])
"""

METHOD = """
import normec

class Signs(normec.Method):
    \"\"\"The sign of the gradient, shortened to length one.\"\"\"

    bound = 1.0

    def message(self, update, state, key=None):
        return update.sign() / update.shape[-1] ** 0.5, state
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and of the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    listed = subprocess.run(["git", "ls-files", "-z", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    # The environment of the tests was made with the same requirements of the build, in an environment of its own.
    call([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", tree], folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """An empty environment; on the disk, because torch is too large for a folder in memory."""
    with TemporaryDirectory() as folder:
        call([sys.executable, "-m", "venv", "--without-pip", Path(folder) / "venv"], Path(folder))
        yield Path(folder) / "venv" / "bin" / "python"


def call(command: list[str | Path], folder: Path, returns: int = 0) -> str:
    left_out = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == returns, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout if returns == 0 else done.stdout + done.stderr


def install(python: Path, *what: str) -> None:
    # Compiling all of torch takes longer than the tests, which import a part of it.
    usual = ["--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
    call([sys.executable, "-m", "pip", "--python", python, "install", *usual, *what], python.parent)


@pytest.fixture(scope="module")
def python_with_extras(python: Path, wheel: Path) -> Path:
    """The same environment with `normec[all]`."""
    install(python, f"{wheel}[all]")
    return python


def test_both_archives_hold_every_file_of_the_package_and_the_wheel_nothing_else(built: Path, wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src/normec"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = set(listed.stdout.split())
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {f"src/{name}" for name in names} >= files
    [facts] = {name.partition("/")[0] for name in names} - {"normec"}
    assert facts.endswith(".dist-info")
    [source] = built.glob("*.tar.gz")
    with tarfile.open(source) as tar:
        assert {name.partition("/")[2] for name in tar.getnames()} >= {*files, "pyproject.toml", "README.md", "LICENSE"}


def test_without_extras_it_trains_saves_and_resumes(python: Path, wheel: Path, tmp_path: Path) -> None:
    install(python, str(wheel))
    (tmp_path / "learn.py").write_text(TRAIN)
    assert call([python, "learn.py", "20"], tmp_path).split() == ["20", "[]"]
    assert call([python, "learn.py", "20"], tmp_path).split() == ["20", "[]"]  # it is finished and only read
    refused = call([python, "-m", "normec", "train"], tmp_path, returns=2)
    assert "pip install 'normec[all]'" in refused
    assert "Traceback" not in refused


def test_an_engineer_goes_from_nothing_to_a_private_model_and_its_page(
    python_with_extras: Path, tmp_path: Path
) -> None:
    (tmp_path / "hospitals.py").write_text(HOSPITALS)
    epsilon, accuracy = map(float, call([python_with_extras, "hospitals.py"], tmp_path).split())
    assert epsilon <= 4
    assert accuracy > 0.85
    call([python_with_extras, "-m", "normec", "report", "run-hospitals"], tmp_path)
    assert "4" in (tmp_path / "run-hospitals" / "report.html").read_text(encoding="utf-8")


def test_a_researcher_compares_a_method_of_her_own(python_with_extras: Path, tmp_path: Path) -> None:
    (tmp_path / "signs.py").write_text(METHOD)
    shared = ["--data", "digits", "--clients", "10", "--rounds", "20", "--lr", "0.1", "--out", "compared"]
    command = [python_with_extras, "-m", "normec", "compare", "normec", "signs.py:Signs", *shared, "--json", "--quiet"]
    found = json.loads(call(command, tmp_path))
    assert len(found["rows"]) == 2
    assert list((tmp_path / "compared").glob("*.html"))
