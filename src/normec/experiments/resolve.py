"""Filling in the defaults of a configuration that depend on the method, on privacy and on the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..algorithms.catalogue import is_own
from ..settings.config import RunConfig
from ..training.run import default_evaluate_every, default_log_every
from . import build, early_stopping, methods, server


@dataclass(frozen=True)
class Measured:
    """Values that the data and the machine decide; None if they are not known.

    All of them are known once the problem of a run is built. For a folder, its summary or its checkpoint has them.
    """

    clients: int | None = None
    dimension: int | None = None
    rounds: int | None = None
    lr: float | None = None
    log_every: int | None = None
    evaluate_every: int | None = None
    device: str | None = None
    engine: str | None = None
    method: str | None = None  # the name under which a user's own method is found, if it differs


def resolved(config: RunConfig, measured: Measured | None = None, *, own_code: bool = True) -> RunConfig:
    """Return the configuration with the values that are used for settings that were not given.

    It trains the same run. A value that is not known stays as it is in `config`. A setting that does not apply stays
    None: `rounds` if `epochs` are given, `epsilon` if `sigma` is given, the seed if the noise comes from a secret.

    Args:
        config: The configuration as it was given.
        measured: What is known of the run's data.
        own_code: Whether the class of a user's own method may be loaded, to find its default values. Loading it runs
            the file that the configuration names, which must not happen for the configuration in a run's folder.

    Raises:
        UsageError: There is no such method.
    """
    known = measured or Measured()
    rounds = methods.rounds(config)
    total = known.rounds if rounds is None else rounds
    used: dict[str, Any] = {
        **(_of_the_method(config, known) if own_code or not is_own(config.method) else {}),
        **methods.local_settings_used(config),
        **server.settings_used(config, total),
        **early_stopping.settings_used(config),
        "clients": known.clients if known.clients is not None else build.number_of_clients(config),
        "scaling": config.scaling or ("public" if config.data == "heart-disease" else None),
        "epsilon": build.target_epsilon(config),
        "lr": _step_size(config, known.lr),
        "noise_schedule": config.noise_schedule or "constant" if config.private else None,
        "rounds": rounds,
        "weights": config.weights or "equal",
        "memory": config.memory_used,
        "record_clip": config.record_clip_used,
        "record_clip_by": config.record_clip_by or ("record" if config.record_clip_used is not None else None),
        "diagnostics": config.diagnostics or not config.private,
        "memory_dtype": config.memory_dtype or config.dtype,
        "device": known.device or config.device,
        "engine": known.engine or config.engine,
    }
    if total is not None:
        usual = {"log_every": default_log_every, "evaluate_every": default_evaluate_every}
        for name, default in usual.items():
            held = (getattr(config, name), getattr(known, name))
            used[name] = next((value for value in held if value is not None), default(total))
    return config.model_copy(update=used)


def _of_the_method(config: RunConfig, known: Measured) -> dict[str, Any]:
    if is_own(config.method):
        own = methods.own_settings_used(config.model_copy(update={"method": known.method or config.method}))
        return {**dict.fromkeys(methods.SETTINGS), "method_settings": own}
    return methods.settings_used(config, known.dimension)


def _step_size(config: RunConfig, measured: float | None) -> Any:
    """Return the step size; that of the theory is known after it was computed."""
    if config.lr is None:
        return None if is_own(config.method) else methods.step_size(config)
    return measured if config.lr == "theory" and measured is not None else config.lr
