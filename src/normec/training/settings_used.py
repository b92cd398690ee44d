"""The settings of a run that was started from Python, with every value that is used, for its config.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..algorithms.method import Method
from ..algorithms.registry import name_of
from ..errors import UsageError
from ..problems.objective import Objective
from ..sampling.participation import Everyone, FixedSize, Poisson
from ..storage.history import STARTED_BY
from .run import Plan

if TYPE_CHECKING:
    from ..privacy.statement import Privacy


def settings_used(
    problem: Objective,
    method: Method,
    plan: Plan,
    privacy: Privacy | None,
    engine: str,
    checkpoint_seconds: float,
) -> dict[str, Any]:
    """Everything that `train` was asked for or took by default, under the names of `normec train --settings`.

    The problem itself is Python's: of it, the number of clients and of parameters are known.

    Args:
        problem: The problem on its device and in its precision.
        method: The method; its settings are those of its `spec`.
        plan: The plan of the run.
        privacy: The privacy statement, with its noise decided.
        engine: The name of the engine that computes the gradients.
        checkpoint_seconds: The seconds between two checkpoints.

    Returns:
        Plain values by name. What does not exist, such as the batch size of full gradients, is left out.
    """
    terms = privacy.to_dict() if privacy is not None else {}
    terms.pop("sampling", None)  # the participation says it
    used: dict[str, Any] = {
        STARTED_BY: "normec.train",
        "clients": problem.clients,
        "parameters": len(problem.x0),
        "method": _name(method),
        "private": privacy is not None,
        **terms,
        "lr": plan.lr if not callable(plan.lr) else plan.identity()["lr"],
        "rounds": plan.rounds,
        "warmup": plan.warmup,
        "batch_size": plan.batch_size,
        "batch_rate": plan.batch_rate,
        **_participation(plan),
        "weights": weights_text(plan.weights),
        "initial_memory": "given" if isinstance(plan.initial_memory, Tensor) else plan.initial_memory,
        "seed": plan.seed if plan.secret is None else None,
        "log_every": plan.log_every,
        "evaluate_every": plan.evaluate_every,
        "full_gradient": plan.full_gradient,
        "diagnostics": plan.diagnostics,
        "device": str(problem.x0.device),
        "dtype": _dtype(problem.x0.dtype),
        "engine": engine,
        "precision": plan.precision,
        "memory_dtype": _dtype(plan.memory.dtype or problem.x0.dtype),
        "memory_home": plan.memory.home,
        "checkpoint_seconds": float(checkpoint_seconds),
        "method_settings": method.spec(),
    }
    return present(used)


def present(table: dict[str, Any]) -> dict[str, Any]:
    """A table without the values that are None, which TOML cannot hold."""
    held = {name: present(value) if isinstance(value, dict) else value for name, value in table.items()}
    return {name: value for name, value in held.items() if value is not None and value != {}}


def weights_text(relative: Tensor | None) -> str:
    """Weights n·w_i as the setting `weights` takes them: "equal", or the numbers w_i."""
    if relative is None:
        return "equal"
    return ",".join(repr(weight) for weight in (relative / len(relative)).tolist())


def _name(method: Method) -> str:
    """The method's name for `normec train --method`, or its class where no command could find it."""
    try:
        return name_of(method)
    except (UsageError, OSError, TypeError):
        return f"{type(method).__module__}.{type(method).__qualname__}"


def _participation(plan: Plan) -> dict[str, Any]:
    match plan.participation:
        case Everyone():
            return {}
        case Poisson(rate):
            return {"sample_rate": rate}
        case FixedSize(count):
            return {"sample_count": count}
    return {"participation": repr(plan.participation)}


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
