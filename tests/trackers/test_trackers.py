"""TensorBoard and MLflow, the real libraries, read back from the disk and held against the run's own rows."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from normec.errors import Diverged, UsageError
from normec.experiments import runs
from normec.settings import make
from normec.trackers import MLflow, TensorBoard, Tracker, named
from normec.training.callbacks import Callback

from ..cli.command import normec
from ..support.runs import EndAt, StopAt

SMALL: dict[str, Any] = {"data": "digits", "clients": 10, "rounds": 12, "evaluate_every": 3, "checkpoint_seconds": 0.0}
Points = dict[str, list[tuple[int, float]]]


class Endings(Tracker):
    """Records how runs end."""

    def start(self, first_round: int) -> None:  # noqa: ARG002
        self.endings: list[tuple[str, str | None]] = []

    def log(self, values: dict[str, float], round: int) -> None:
        pass

    def finish(self, status: str, error: str | None) -> None:
        self.endings.append((status, error))


def expected(folder: Path) -> Points:
    found: Points = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name != "round":
                found.setdefault(name, []).append((row["round"], value))
    return found


def train(folder: Path, trackers: list[Tracker], *more: Callback, **settings: Any) -> None:
    with ExitStack() as entered:
        for tracker in trackers:
            entered.enter_context(tracker)
        runs.execute(make({**SMALL, **settings}), folder, [*more, *trackers])


def close(found: Points, wanted: Points) -> None:
    assert found.keys() == wanted.keys()
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6)


@pytest.mark.parametrize(("callback", "status"), [(EndAt(2), "finished"), (StopAt(2), "interrupted")])
def test_only_a_run_that_can_go_on_is_interrupted(tmp_path: Path, callback: Callback, status: str) -> None:
    tracker = Endings()
    train(tmp_path / "run", [tracker], callback, rounds=4)
    assert tracker.endings == [(status, None)]


# TensorBoard


def events(folder: Path) -> Points:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    tags = read.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags}


def test_tensorboard_has_every_row(tmp_path: Path) -> None:
    train(tmp_path / "run", [TensorBoard(tmp_path / "tb", {"method": "normec"})])
    close(events(tmp_path / "tb"), expected(tmp_path / "run"))


def test_tensorboard_goes_on_with_a_run_that_was_stopped(tmp_path: Path) -> None:
    train(tmp_path / "run", [TensorBoard(tmp_path / "tb")], StopAt(5))
    assert len(events(tmp_path / "tb")["epsilon"]) < 13
    train(tmp_path / "run", [TensorBoard(tmp_path / "tb")])
    close(events(tmp_path / "tb"), expected(tmp_path / "run"))


# MLflow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("mlflow")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def client(store: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store)


def logged(store: str, run: str) -> Points:
    found = client(store)
    names = found.get_run(run).data.metrics
    return {
        name: sorted((metric.step, metric.value) for metric in found.get_metric_history(run, name)) for name in names
    }


@pytest.mark.slow
def test_mlflow_has_every_row_and_setting(tmp_path: Path, store: str) -> None:
    tracker = MLflow(store, "digits", "first", settings={"method": "normec", "beta": 0.1, "k": None})
    train(tmp_path / "run", [tracker])
    close(logged(store, tracker.run_id), expected(tmp_path / "run"))
    run = client(store).get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params == {"method": "normec", "beta": "0.1"}
    assert client(store).get_experiment(run.info.experiment_id).name == "digits"


@pytest.mark.slow
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, store: str) -> None:
    first, second = (MLflow(store, key="it's this one") for _ in range(2))
    train(tmp_path / "run", [first], StopAt(5))
    assert client(store).get_run(first.run_id).info.status == "KILLED"
    train(tmp_path / "run", [second])
    assert second.run_id == first.run_id
    close(logged(store, first.run_id), expected(tmp_path / "run"))
    assert client(store).get_run(first.run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_a_diverged_run_is_failed_in_mlflow(tmp_path: Path, store: str) -> None:
    tracker = MLflow(store)
    with pytest.raises(Diverged):
        train(tmp_path / "run", [tracker], private=False, method="gd", model="mlp", lr=1e20)
    run = client(store).get_run(tracker.run_id)
    assert run.info.status == "FAILED"
    assert "is not finite in round 1" in run.data.tags["error"]


@pytest.mark.slow
def test_a_store_that_is_lost_at_the_end_does_not_end_the_run(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    def gone(*_: object) -> None:
        raise MlflowException("the server is gone")

    tracker = MLflow(store)
    monkeypatch.setattr(tracker._client, "set_terminated", gone)
    with pytest.warns(UserWarning, match="MLflow lost .*: the server is gone"):
        train(tmp_path / "run", [tracker], rounds=2)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_a_store_that_cannot_be_used_is_said_before_training(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(UsageError, match=r"^MLflow cannot use nowhere://x: .*"):
        MLflow("nowhere://x")
    with pytest.raises(UsageError, match="unknown track 'wandb'"):
        named("wandb", tmp_path)


@pytest.mark.slow
def test_the_command_tracks(tmp_path: Path) -> None:
    asked = ("train", "--rounds", "6", "--clients", "10", "--out", "run", "--quiet", "--json")
    done = normec(*asked, "--track", "tensorboard", "--track", "mlflow:sqlite:///own.db", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    close(events(tmp_path / "run" / "tensorboard"), expected(tmp_path / "run"))
    found = client(f"sqlite:///{tmp_path}/own.db")
    (run,) = found.search_runs([found.get_experiment_by_name("normec").experiment_id])
    close(logged(f"sqlite:///{tmp_path}/own.db", run.info.run_id), expected(tmp_path / "run"))
    assert run.data.params["clients"] == "10"
