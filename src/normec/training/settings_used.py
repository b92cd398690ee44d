"""The settings of a run that was started from Python, with all values in use, for its config.toml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..algorithms.direct import DPSGD
from ..algorithms.lr_schedule import ScheduledLR
from ..algorithms.method import Method
from ..algorithms.operators import Clip, SmoothedNorm
from ..algorithms.registry import name_of
from ..errors import UsageError
from ..problems.objective import Objective
from ..problems.problem import Problem
from ..sampling.participation import Everyone, FixedSize, Poisson, Rotation
from ..storage.history import STARTED_BY
from .run import Plan

if TYPE_CHECKING:
    from ..privacy.statement import Privacy

_DPSGD: dict[type, str] = {Clip: "dpsgd-clip", SmoothedNorm: "dpsgd-norm"}


def settings_used(
    problem: Objective,
    method: Method,
    plan: Plan,
    privacy: Privacy | None,
    engine: str,
    checkpoint_seconds: float,
    witness: str | Path | None,
    profiled: bool,
) -> dict[str, Any]:
    """Return all arguments and defaults of `train`, under the names of `normec train --settings`.

    The problem is a Python object; only its name, if it has one, and its numbers of clients and of parameters are
    recorded.

    Args:
        problem: The problem on its device and in its precision.
        method: The method; its settings are those of its `spec`.
        plan: The plan of the run.
        privacy: The privacy statement, with the source of its noise.
        engine: The name of the engine that computes the gradients.
        checkpoint_seconds: The seconds between two checkpoints.
        witness: The file outside the folder that also counts the ledger's lines.
        profiled: Whether some rounds are profiled.

    Returns:
        Plain values by name. Settings without a value, such as the batch size of full gradients, are left out.
    """
    terms = privacy.to_dict() if privacy is not None else {}
    terms.pop("sampling", None)  # it is part of the participation
    if privacy is not None:  # `to_dict` leaves out what is usual
        by = {"record_clip_by": privacy.record_clip_by} if privacy.record_clip is not None else {}
        terms |= {"noise_schedule": privacy.noise_schedule, **by}
    used: dict[str, Any] = {
        STARTED_BY: "normec.train",
        "clients": problem.clients,
        "parameters": len(problem.x0),
        **_parts(problem),
        "method": _name(method),
        "private": privacy is not None,
        **terms,
        **_steps(plan),
        "rounds": plan.rounds,
        "warmup": plan.warmup,
        "batch_size": plan.batch_size,
        "batch_rate": plan.batch_rate,
        **(plan.local.settings() if plan.local is not None else {}),
        **_participation(plan),
        "weights": weights_text(plan.weights),
        "initial_memory": "given" if isinstance(plan.initial_memory, Tensor) else plan.initial_memory,
        "seed": plan.seed if plan.secret is None else None,
        "log_every": plan.log_every,
        "evaluate_every": plan.evaluate_every,
        "full_gradient": plan.full_gradient,
        "diagnostics": plan.diagnostics,
        "profile": profiled,
        "device": str(problem.x0.device),
        "dtype": _dtype(problem.x0.dtype),
        "engine": engine,
        "precision": plan.precision,
        "memory_dtype": _dtype(plan.memory.dtype or problem.x0.dtype),
        "memory_home": plan.memory.home,
        "checkpoint_seconds": float(checkpoint_seconds),
        "witness": str(witness) if witness is not None else None,
        "method_settings": method.spec(),
    }
    return present(used)


def present(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without its None values, which TOML cannot represent."""
    held = {name: present(value) if isinstance(value, dict) else value for name, value in table.items()}
    return {name: value for name, value in held.items() if value is not None and value != {}}


def weights_text(relative: Tensor | None) -> str:
    """Return weights n·w_i as the setting `weights` takes them: "equal", or the numbers w_i."""
    if relative is None:
        return "equal"
    return ",".join(repr(weight) for weight in (relative / len(relative)).tolist())


def _name(method: Method) -> str:
    """Return the method's name for `normec train --method`, or its class if no command can find it."""
    if type(method) is DPSGD and type(method.operator) in _DPSGD:  # one class has two names there
        return _DPSGD[type(method.operator)]
    try:
        return name_of(method)
    except (UsageError, OSError, TypeError):
        return f"{type(method).__module__}.{type(method).__qualname__}"


def _parts(problem: Objective) -> dict[str, Any]:
    """Return the names of the problem's data, model and transform."""
    if not isinstance(problem, Problem):
        return {}
    transform = problem.transform
    named = getattr(transform, "__qualname__", type(transform).__qualname__) if transform is not None else None
    return {"data": problem.name, "model": type(problem.model).__qualname__, "transform": named}


def _steps(plan: Plan) -> dict[str, Any]:
    """Return the settings that say how x moves and which iterate is returned."""
    used: dict[str, Any] = {"lr": plan.lr if isinstance(plan.lr, float) else plan.identity()["lr"]}
    if isinstance(plan.lr, ScheduledLR):
        schedule = plan.lr.schedule
        used |= {"lr": plan.lr.lr, "lr_schedule": schedule.name or plan.identity()["lr"]}
        used["lr_schedule_settings"] = schedule.settings_used(len(plan.lr.sizes))
    if plan.server_optimizer is not None:
        used["server_optimizer"] = plan.server_optimizer.name
        used["server_optimizer_settings"] = plan.server_optimizer.settings
    if plan.averaging is not None:
        used |= {"averaging": plan.averaging.kind, "averaging_decay": plan.averaging.decay}
        used["averaging_start"] = plan.averaging.start
    return used


def _participation(plan: Plan) -> dict[str, Any]:
    match plan.participation:
        case Everyone():
            return {}
        case Poisson(rate):
            return {"sample_rate": rate}
        case FixedSize(count):
            return {"sample_count": count}
        case Rotation(groups, rate):
            return {"groups": groups, "sample_rate": rate if rate < 1 else None}
    return {"participation": repr(plan.participation)}


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
