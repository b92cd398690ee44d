"""Models and data in files of the user's own, as on the command line, against the same problem made in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import normec as n
from normec.errors import UsageError
from normec.experiments import build, grid, runs
from normec.sampling.random_streams import derive_seed
from normec.settings import make
from normec.system.code_files import object_in_file

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

made = []

class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, values):
        return self.body(values)

class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()

def table(seed):
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(8, 4, generator=draw), torch.arange(8) % 3)

def clients():
    made.append(1)
    return [table(i) for i in range(4)]

def records(seed):
    inputs, targets = table(seed).tensors
    return [{"values": value, "kind": kind} for value, kind in zip(inputs, targets)]

def wards():
    return {"clients": [records(i) for i in range(4)], "test": {"north": table_of(5)}, "target": "kind"}

class table_of:
    def __init__(self, seed):
        self.items = records(seed)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

def pairs():
    return {"clients": clients(), "test": table(9), "classes": 3}

class Scaled:
    scale = None

    def __call__(self, inputs):
        self.scale = inputs.std(0) if self.scale is None else self.scale
        return inputs / self.scale

scaled = {"clients": [table(i) for i in range(4)], "transform": Scaled()}
number = 3
misspelt = {"clients": [table(0)], "tset": table(1)}
broken = lambda: {"test": table(1)}
digits = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def config(file: Path, data: str = "clients", model: str = "Net", **more: Any) -> Any:
    how = {
        "data": f"{file}:{data}",
        "model": f"{file}:{model}" if model[0].isupper() else model,
        "rounds": 6,
        "seed": 3,
    }
    return make({**how, "private": False, "lr": 0.1, **more})


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("data", ["clients", "wards", "pairs"])
@pytest.mark.parametrize("private", [True, False])
def test_a_run_by_file_is_the_run_from_python(tmp_path: Path, file: Path, data: str, private: bool) -> None:
    result = runs.execute(config(file, data, private=private), tmp_path / "run")
    made = object_in_file(f"{file}:{data}", "name")()
    given = dict(made) if isinstance(made, dict) else {"clients": made}
    given.pop("classes", None)
    torch.manual_seed(derive_seed(3, "model"))
    net = object_in_file(f"{file}:Net", "name")()
    problem = n.Problem(net, torch.nn.functional.cross_entropy, **given)
    privacy = build.privacy(config(file, data, private=private))
    how: dict[str, Any] = {"lr": 0.1, "rounds": 6, "seed": 3, "privacy": privacy}
    how["logging"] = n.Logging(every=1, evaluate_every=1)
    run = n.train(problem, "normec", **how)
    assert result.history.rows == run.history.rows
    assert result.summary["clients"] == 4
    again = n.load(tmp_path / "run", model=net)
    assert torch.equal(again.x, run.x)


def test_a_finished_run_by_file_is_read_again_and_another_is_refused(tmp_path: Path, file: Path) -> None:
    runs.execute(config(file), tmp_path / "run")
    before = len(object_in_file(f"{file}:made", "name"))
    runs.execute(config(file), tmp_path / "run")
    assert len(object_in_file(f"{file}:made", "name")) == before  # the data were not even made
    with pytest.raises(UsageError, match=r"data is .*clients.* there"):
        runs.execute(config(file, "wards"), tmp_path / "run")
    assert runs.default_folder(config(file)).name.startswith("clients-Net-normec-")


def test_models_of_the_users_own_train_on_data_by_name_and_the_other_way_round(tmp_path: Path, file: Path) -> None:
    more: dict[str, Any] = {"private": False, "rounds": 3, "clients": 5, "lr": 0.5}
    found = runs.execute(make({**more, "data": "digits", "model": f"{file}:digits"}), tmp_path / "own model")
    assert found.summary["dimension"] == 650
    found = runs.execute(config(file, "pairs", "softmax"), tmp_path / "own data")
    assert found.summary["dimension"] == 15
    assert "accuracy" in found.summary["final"]


def test_a_run_without_privacy_leaves_nothing_behind_for_the_next_run_of_a_comparison(
    tmp_path: Path, file: Path
) -> None:
    """What it kept of the first client would be the same in all comparisons before the private run."""
    runs.execute(config(file, "scaled"), tmp_path / "reference")
    assert object_in_file(f"{file}:scaled", "name")["transform"].scale is None
    with pytest.raises(UsageError, match="client 0 changes when client 1 is computed before it"):
        runs.execute(config(file, "scaled", private=True), tmp_path / "private")


def test_sweeps_take_them(file: Path) -> None:
    grid.check(config(file))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data": "nobody"}, "has no name nobody"),
        ({"data": "number"}, "must return the clients' data sets"),
        ({"data": "broken"}, "must return the clients' data sets"),
        ({"data": "misspelt"}, "an entry 'tset'"),
        ({"model": "Wide"}, "needs width"),
        ({"data": "pairs", "clients": 7}, "clients is 7, but"),
        ({"data": "pairs", "split": "label"}, "split does not apply"),
        ({"data": "clients", "model": "softmax"}, "the number of classes"),
        ({"data": "clients", "model": "Table"}, "has no name Table"),
    ],
)
def test_mistakes_are_answered_in_one_line(file: Path, tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        runs.execute(config(file, **more), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_files_that_cannot_be_read_are_answered_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(UsageError, match=r"there is no file .*missing\.py; name a data set of your own"):
        build.problem(config(tmp_path / "missing.py"))
    with pytest.raises(UsageError, match=r"wrong\.py cannot be read: ModuleNotFoundError"):
        build.problem(config(tmp_path / "wrong.py"))
