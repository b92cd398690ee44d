"""A federated run as its settings define it: the method, the plan, and what else its coordinator needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...algorithms.averaging import averaging_of
from ...algorithms.lr_schedule import scheduled
from ...algorithms.method import Method
from ...algorithms.server_optimizer import server_optimizer_of
from ...errors import UsageError, at_least
from ...experiments import build, methods, server
from ...sampling.participation import Everyone
from ...settings.config import RunConfig
from ...training.client_weights import checked_weights
from ...training.run import Plan, default_evaluate_every
from .settings import Settings


def definition_of(
    settings: Settings,
    method: str,
    dimension: int,
    folder: Path | None = None,
    evaluate: Callable[[Tensor], Mapping[str, float]] | None = None,
) -> tuple[Method, Plan, dict[str, Any]]:
    """The arguments of a coordinator of either kind.

    Args:
        settings: The settings of the run.
        method: The name of the method, with the path of its file if it has one.
        dimension: The number of parameters of the model.
        folder: The folder of the run; None for none.
        evaluate: Returns the metrics that the server measures at x.

    Returns:
        The method, the plan, and the keyword arguments.

    Raises:
        UsageError: A setting is missing or does not fit the others.
    """
    config = settings.run
    given = {
        "run": settings.name,
        # Records are clipped if the terms say so, because parties must agree on the number that divides their sum.
        "privacy": build.statement(config, config.record_clip),
        "folder": folder,
        "minimum": settings.least,
        "evaluate": evaluate,
        "records": settings.records_of_parties,
    }
    built = methods.build(config.model_copy(update={"method": method}), dimension)
    return built, _plan(config, settings.records_of_parties), given


def _plan(config: RunConfig, records: list[float] | None) -> Plan:
    rounds, lr = methods.rounds(config), methods.step_size(config)
    if rounds is None or isinstance(lr, str):
        raise UsageError(f"a federation needs rounds and lr as numbers, got rounds = {rounds}, lr = {lr}")
    at_least(1, rounds=rounds)
    schedule = server.schedule(config)
    weights = build.weights(config.weights)
    if weights == "records":
        if records is None or len(records) == 1:
            raise UsageError(
                "the server does not know how many records the parties hold; give these numbers as records, if they "
                "are public, or the weights as numbers"
            )
        weights = [number / sum(records) for number in records]
    return Plan(
        lr=lr if schedule is None else scheduled(schedule, lr, rounds, 0),
        rounds=rounds,
        batch_size=config.batch_size,
        batch_rate=config.batch_rate,
        warmup=0,
        seed=config.public_seed,
        participation=Everyone(),
        initial_memory="zero",
        log_every=1,
        evaluate_every=config.evaluate_every if config.evaluate_every is not None else default_evaluate_every(rounds),
        full_gradient=False,
        diagnostics=config.diagnostics or not config.private,
        local=methods.local_steps(config),
        server_optimizer=server_optimizer_of(server.optimizer(config)),
        averaging=averaging_of(server.average(config), rounds, 0),
        weights=None if isinstance(weights, str) else checked_weights(weights, config.clients or 1),
    )
