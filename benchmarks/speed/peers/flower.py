"""Flower's simulation: one supernode per client on Ray, messages through its grid, no client memory."""

from __future__ import annotations

import os
import random
import time
from functools import cache
from typing import Any

import torch

from ..clock import Clock
from ..workloads import ALPHA, LR, Case, WorkloadData


def run(data: WorkloadData, clock: Clock) -> str:
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    case = data.case
    setting = case.to_dict()
    server, client = ServerApp(), ClientApp()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        own = _records(**setting)
        state = message.content["arrays"].to_torch_state_dict()
        gradient = _gradient(own, state, context.node_config["partition-id"])
        content = RecordDict({"arrays": ArrayRecord(gradient), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content=content, reply_to=message)

    @server.main()
    def main(grid: Any, context: Any) -> None:  # noqa: ARG001
        state = {name: p.detach().clone() for name, p in data.built.model.named_parameters()}
        nodes: list[int] = []
        while len(nodes) < case.clients:
            time.sleep(0.1)
            nodes = list(grid.get_node_ids())
        done = False
        while not done:
            content = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord()})
            chosen = random.sample(nodes, case.drawn)
            replies = grid.send_and_receive([Message(content, node, "train") for node in chosen])
            for reply in replies:
                for name, part in reply.content["arrays"].to_torch_state_dict().items():
                    state[name] -= LR / case.drawn * part
            done = clock.tick()

    run_simulation(
        server,
        client,
        num_supernodes=case.clients,
        backend_config={
            "init_args": {"address": "local", "num_cpus": case.threads, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return f"no client memory; Ray actors: {case.threads}"


@cache
def _records(**setting: Any) -> WorkloadData:
    """The data of a case, made once per Ray actor."""
    return WorkloadData(Case(**setting))


def _gradient(data: WorkloadData, state: dict[str, torch.Tensor], client: int) -> dict[str, torch.Tensor]:
    """The client's normalised gradient on a batch of its records."""
    model = data.built.model
    model.load_state_dict(state, strict=False)
    inputs, targets = data.client_batch(client)
    model.zero_grad()
    data.built.loss(model(inputs), targets).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    length = ALPHA + torch.stack([part.norm() for part in found.values()]).norm()
    return {name: part / length for name, part in found.items()}
