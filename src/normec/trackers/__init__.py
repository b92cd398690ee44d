"""Trackers as callbacks, which send the rows of a run to TensorBoard or MLflow.

    with MLflow("sqlite:///mlflow.db") as tracker:
        normec.train(problem, method, ..., callbacks=[tracker])

The libraries are imported when a tracker is created: ``pip install 'normec[track]'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import one_of
from .mlflow import MLflow
from .tensorboard import TensorBoard
from .tracker import Tracker

__all__ = ["MLflow", "TensorBoard", "Tracker", "named"]


def named(text: str, folder: Path, settings: Mapping[str, Any] | None = None) -> Tracker:
    """Return the tracker that ``tensorboard[:FOLDER]`` or ``mlflow[:URI]`` names.

    Args:
        text: The name.
        folder: The folder of the run.
        settings: The settings of the run, which the tracker shows.

    Returns:
        The tracker.

    Raises:
        UsageError: The name is unknown, or its library is not installed.

    Example:
        >>> tracker = named("tensorboard", Path("runs/first"))
        >>> tracker.folder.as_posix()
        'runs/first/tensorboard'
    """
    kind, _, where = text.partition(":")
    one_of(("tensorboard", "mlflow"), track=kind)
    if kind == "tensorboard":
        return TensorBoard(Path(where) if where else folder / "tensorboard", settings)
    return MLflow(where or None, run_name=folder.name, key=str(folder.resolve()), settings=settings)
