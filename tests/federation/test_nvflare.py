"""The filter for NVIDIA FLARE, on FLARE's own objects and in a job of its simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare")

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.filter import ContentBlockedException
from nvflare.apis.fl_constant import FilterKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.task_controller import TaskController
from nvflare.apis.impl.wf_comm_client import WFCommClient
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.event import fire_event_to_components
from nvflare.private.fed.client.client_engine_executor_spec import TaskAssignment
from nvflare.private.fed.client.client_runner import ClientRunner, ClientRunnerConfig, TaskRouter

from normec import BudgetSpent, UsageError
from normec.federation.nvflare.private_updates import LEDGER, PrivateUpdates

from ..support.waiting import LIMIT

SHAPES = {"weight": (300, 20), "bias": (20,)}
LENGTH = 6020

TRAIN = """
import nvflare.client as flare
import torch

flare.init()
while flare.is_running():
    received = flare.receive()
    ahead = {name: torch.full_like(torch.as_tensor(value), 3.0) for name, value in received.params.items()}
    flare.send(flare.FLModel(params=ahead, params_type="DIFF", metrics={"accuracy": 0.5}))
"""

JOB = """
import sys
import torch
from nvflare.app_opt.pt.job_config.fed_avg import FedAvgJob
from nvflare.job_config.api import FilterType
from nvflare.job_config.script_runner import ScriptRunner
from normec.federation.nvflare.private_updates import PrivateUpdates

folder = sys.argv[1]
model = torch.nn.Linear(4, 2)
job = FedAvgJob(name="private", n_clients=2, num_rounds=3, initial_model=model)
for site in ("site-1", "site-2"):
    job.to(ScriptRunner(script=folder + "/train.py"), site)
    own = PrivateUpdates(folder + "/ledgers/{site}", epsilon=8.0, rounds=3, clip=1.0)
    job.to(own, site, filter_type=FilterType.TASK_RESULT, tasks=["train"])
job.simulator_run(folder + "/work")
"""


def context(site: str = "site-1") -> FLContext:
    found = FLContext()
    found.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
    return found


def result(value: float = 5.0, kind: Any = DataKind.WEIGHT_DIFF, dtype: Any = np.float32) -> Any:
    data = {name: np.full(shape, value, dtype) for name, shape in SHAPES.items()}
    meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: 4711, "initial_metrics": {"loss": 4711.0}}
    shareable = DXO(kind, data, meta).to_shareable()
    shareable.set_header("patients", 4711)
    shareable.set_header("current_round", 4711)
    shareable.add_cookie("patients", 4711)
    shareable["more"] = 4711
    return shareable


def vector(shareable: Any) -> Any:
    return np.concatenate([part.ravel() for part in from_shareable(shareable).data.values()])


def test_a_result_is_clipped_and_covered_by_the_noise_of_its_epsilon(tmp_path: Path) -> None:
    own = PrivateUpdates(str(tmp_path / "{site}"), epsilon=8.0, rounds=3, clip=1.0)
    sent = np.stack([vector(own.process(result(), context())) for _ in range(3)])
    sigma = float(sent.std())
    # Gaussian differential privacy: 3 releases of sensitivity 1 have mu = sqrt(3)/sigma, and with it this delta.
    mu, normal = 3**0.5 / sigma, NormalDist()
    delta = normal.cdf(mu / 2 - 8 / mu) - np.exp(8) * normal.cdf(-mu / 2 - 8 / mu)
    assert delta == pytest.approx(1e-5, rel=0.5)
    assert abs(sent.mean() - LENGTH**-0.5) < 5 * sigma / (3 * LENGTH) ** 0.5
    assert abs(np.corrcoef(sent)[0, 1]) < 5 / LENGTH**0.5, "fresh noise in each round"


def test_nothing_else_of_the_site_leaves(tmp_path: Path) -> None:
    found = PrivateUpdates(str(tmp_path), epsilon=8.0, rounds=3, clip=1.0).process(result(), context())
    assert "4711" not in repr({**found, "DXO": from_shareable(found).meta})
    assert found.get_header("current_round") is None
    assert {name: part.shape for name, part in from_shareable(found).data.items()} == SHAPES
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    failed["trace"] = "patient 4711"
    again = PrivateUpdates(str(tmp_path / "b"), epsilon=8.0, rounds=3, clip=1.0).process(failed, context())
    assert (again.get_return_code(), "4711" in repr(again)) == (ReturnCode.EXECUTION_EXCEPTION, False)
    failed.set_return_code("patient 4711")
    again = PrivateUpdates(str(tmp_path / "b"), epsilon=8.0, rounds=3, clip=1.0).process(failed, context())
    assert again.get_return_code() == ReturnCode.EXECUTION_EXCEPTION


@pytest.mark.parametrize(
    "wrong", [{"epsilon": 0.0}, {"delta": 2.0}, {"clip": -1.0}, {"rounds": 0}, {"relation": "add"}]
)
def test_a_mistake_is_named_when_the_job_is_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        PrivateUpdates(str(tmp_path), **({"epsilon": 1.0, "rounds": 3, "clip": 1.0} | wrong))
    assert not any(tmp_path.iterdir())


def test_the_budget_outlives_the_job(tmp_path: Path) -> None:
    given = {"epsilon": 8.0, "rounds": 3, "clip": 1.0}
    first = PrivateUpdates(str(tmp_path), **given)  # type: ignore[arg-type]
    for _ in range(2):
        first.process(result(), context())
    with pytest.raises(UsageError, match="in use by another process"):
        PrivateUpdates(str(tmp_path), **given).process(result(), context())  # type: ignore[arg-type]
    first.close()
    second = PrivateUpdates(str(tmp_path), **given)  # type: ignore[arg-type]
    second.process(result(), context())
    with pytest.raises(BudgetSpent):
        second.process(result(), context())
    lines = [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines()]
    assert [line["releases"] for line in lines[1:]] == [1, 2, 3]
    assert lines[-1]["epsilon"] <= 8.0


def test_other_results_are_blocked_before_they_cost_anything(tmp_path: Path) -> None:
    own = PrivateUpdates(str(tmp_path), epsilon=8.0, rounds=3, clip=1.0)
    for wrong in (result(kind=DataKind.WEIGHTS), result(dtype=np.int64), make_reply(ReturnCode.OK)):
        with pytest.raises(ContentBlockedException):
            own.process(wrong, context())
    assert not (tmp_path / LEDGER).exists()
    own.process(result(), context())
    with pytest.raises(ContentBlockedException, match="differ from those of the first"):
        own.process(result(dtype=np.float64), context())
    assert np.isfinite(vector(own.process(result(float("nan")), context()))).all()


class AnyTask(Executor):  # type: ignore[misc]
    """Trains, whatever the task is called, as the executor of a `ScriptRunner` does."""

    def execute(self, *_: Any) -> Any:
        return result()


class Engine:
    """What FLARE's runner of tasks needs of a site's engine."""

    def __init__(self, own: PrivateUpdates) -> None:
        self.own, self.sent = own, list[str]()  # what leaves to other sites
        self.contexts = FLContextManager(engine=self, identity_name="site-1", job_id="job")

    def register_aux_message_handler(self, **_: Any) -> None:
        pass

    def fire_event(self, event: str, fl_ctx: FLContext) -> None:
        fire_event_to_components(event, [self.own], fl_ctx)

    def validate_targets(self, names: list[str]) -> tuple[list[Client], list[str]]:
        return [Client(name, name) for name in names], []

    def send_aux_request(self, request: Shareable, **_: Any) -> dict[str, Shareable]:
        self.sent.append(repr(request))
        return {}


@pytest.mark.parametrize("name", ["train", "validate", "submit_model", "Train"])
def test_the_result_of_a_task_of_another_name_does_not_leave_without_noise(tmp_path: Path, name: str) -> None:
    own = PrivateUpdates(str(tmp_path / "{site}"), epsilon=8.0, rounds=3, clip=1.0)
    chains = {f"train{FilterKey.DELIMITER}{FilterKey.OUT}": [own]}
    engine, router = Engine(own), TaskRouter()
    router.add_executor(["*"], AnyTask())
    runner = ClientRunner({}, ClientRunnerConfig(router, {}, chains, handlers=[own]), "job", engine)
    task = Shareable()
    task.set_header("current_round", 2)
    with engine.contexts.new_context() as fl_ctx:
        fl_ctx.set_peer_context(fl_ctx)
        found = runner._process_task(TaskAssignment(name, "1", task), fl_ctx)
    assert "4711" not in repr(found)
    if name == "train":
        assert found.get_header("current_round") == 2
        assert float(np.linalg.norm(vector(found) - 5.0)) > 100
    else:
        assert found.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
        assert "DXO" not in found
        assert not (tmp_path / "site-1").exists()


@pytest.mark.parametrize("sender", [TaskController, WFCommClient])
@pytest.mark.parametrize("filtered", [False, True])
def test_no_update_leaves_as_a_task_for_another_site(tmp_path: Path, sender: Any, filtered: bool) -> None:
    """FLARE's workflows between clients send updates in this way, and `TaskController` ignores what filters return."""
    own = PrivateUpdates(str(tmp_path / "{site}"), epsilon=8.0, rounds=3, clip=1.0)
    engine, sending = Engine(own), sender()
    if filtered:
        sending.task_data_filters = {f"report{FilterKey.DELIMITER}{FilterKey.OUT}": [own]}
    with engine.contexts.new_context() as fl_ctx:
        task = Task("report", result(), timeout=1)
        sending.broadcast_and_wait(task, fl_ctx, [Client("site-2", "2")], 1)
    (sent,) = engine.sent
    assert "4711" not in sent
    assert "DXO" not in sent


@pytest.mark.slow
def test_a_job_of_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py"), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    for site in ("site-1", "site-2"):
        path = tmp_path / "ledgers" / site / LEDGER
        assert path.exists(), done.stdout[-2000:] + done.stderr[-2000:]
        assert len(path.read_text().splitlines()) == 4, "a header and a line for each of three rounds"
