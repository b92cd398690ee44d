"""A configuration with every value that is used: the defaults that depend on the method, on privacy and on the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..settings.config import RunConfig, is_own
from ..training.run import default_evaluate_every, default_log_every
from . import build, methods


@dataclass(frozen=True)
class Measured:
    """What a configuration leaves to the data and to the machine; None where it is not known.

    A run knows all of it once its problem is built. A folder knows what its summary or its checkpoint says.
    """

    clients: int | None = None
    dimension: int | None = None
    rounds: int | None = None
    lr: float | None = None
    device: str | None = None
    engine: str | None = None
    method: str | None = None  # how a method of one's own is found, if not by its name


def resolved(config: RunConfig, measured: Measured | None = None) -> RunConfig:
    """The configuration with the values that are used in place of those that were not given.

    It trains the same run. A value that is not known stays as it is in `config`; one that does not exist stays None:
    `rounds` where `epochs` are given, `epsilon` where `sigma` is, the seed of noise that comes from a secret.

    Args:
        config: The configuration as it was asked for.
        measured: What is known of the run's data.

    Raises:
        UsageError: There is no such method.
    """
    known = measured or Measured()
    rounds = methods.rounds(config)
    total = known.rounds if rounds is None else rounds
    used: dict[str, Any] = {
        **_of_the_method(config, known),
        "clients": known.clients if known.clients is not None else build.number_of_clients(config),
        "epsilon": build.target_epsilon(config),
        "lr": _step_size(config, known.lr),
        "rounds": rounds,
        "weights": config.weights or "equal",
        "memory": config.memory_used,
        "record_clip_by": config.record_clip_by or ("record" if config.record_clip is not None else None),
        "diagnostics": config.diagnostics or not config.private,
        "memory_dtype": config.memory_dtype or config.dtype,
        "device": known.device or config.device,
        "engine": known.engine or config.engine,
    }
    if total is not None:
        given = config.log_every, config.evaluate_every
        used["log_every"] = given[0] if given[0] is not None else default_log_every(total)
        used["evaluate_every"] = given[1] if given[1] is not None else default_evaluate_every(total)
    return config.model_copy(update=used)


def _of_the_method(config: RunConfig, known: Measured) -> dict[str, Any]:
    if is_own(config.method):
        own = methods.own_settings_used(config.model_copy(update={"method": known.method or config.method}))
        return {**dict.fromkeys(methods.SETTINGS), "method_settings": own}
    return methods.settings_used(config, known.dimension)


def _step_size(config: RunConfig, measured: float | None) -> Any:
    """The step size; that of the theory is known once it was computed."""
    if config.lr is None:
        return None if is_own(config.method) else methods.step_size(config)
    return measured if config.lr == "theory" and measured is not None else config.lr
