"""Early stopping of a configuration: the settings early_stopping, patience and min_delta."""

from __future__ import annotations

from typing import Any, Literal, cast

from ..errors import UsageError
from ..settings.config import RunConfig
from ..training.callbacks import EarlyStopping
from .own_problem import has_own_data


def early_stopping(config: RunConfig) -> EarlyStopping | None:
    """The rule that may stop the run; None if all rounds are made.

    Raises:
        UsageError: A setting of the rule is wrong or given without the rule, or no record is held out for it.
    """
    given = {name: getattr(config, name) for name in ("patience", "min_delta") if getattr(config, name) is not None}
    if config.early_stopping is None:
        for name in given:
            raise UsageError(f"{name} goes with early_stopping, which is not given; add early_stopping=validation_loss")
        return None
    column, _, mode = config.early_stopping.partition(":")
    if mode not in ("", "min", "max"):
        raise UsageError(f"early_stopping must be COLUMN, COLUMN:min or COLUMN:max, got {config.early_stopping!r}")
    if not mode and not column.endswith(("loss", "accuracy", "accuracy_mean_over_clients")):
        raise UsageError(f"write early_stopping={column}:max or {column}:min, to say which values of {column} are good")
    if column.startswith("validation_") and not config.validation and not has_own_data(config):
        raise UsageError(f"early_stopping={column} needs records that are held out; add --validation 0.2")
    return EarlyStopping(column, **given, mode=cast(Literal["min", "max"], mode) if mode else None)


def settings_used(config: RunConfig) -> dict[str, Any]:
    """The settings of the rule with the values that are used; none without a rule."""
    rule = early_stopping(config)
    return {} if rule is None else {"patience": rule.patience, "min_delta": float(rule.min_delta)}
