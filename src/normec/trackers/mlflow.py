"""MLflow: one MLflow run per run, in a database file or on a server."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

from .. import __version__
from ..errors import UsageError, needed
from .tracker import Tracker

LOCAL = "sqlite:///mlflow.db"
KEY = "normec.training.run"
SECONDS_BETWEEN = 1.0
MOST_HELD = 900  # a batch may have 1000
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """Logs a run to MLflow.

    A run that continues is recognised by its `key` and continues there too: rows that the store already has are not
    logged twice. MLflow's own telemetry is switched off, unless the environment says otherwise.

    Args:
        uri: The store (default: $MLFLOW_TRACKING_URI, or mlflow.db in the working folder).
        experiment: The name of the experiment.
        run_name: The name of the run.
        key: What the run is recognised by when it continues, such as its folder.
        settings: The settings of the run, which the tracker shows.

    Raises:
        UsageError: MLflow is not installed, or the store cannot be used.

    Example:
        >>> tracker = MLflow("sqlite:///mlflow.db", run_name="first")  # doctest: +SKIP
    """

    def __init__(
        self,
        uri: str | None = None,
        experiment: str = "normec",
        run_name: str | None = None,
        *,
        key: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(settings)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._mlflow = needed("mlflow", "mlflow")
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or LOCAL
        self.experiment, self.run_name, self.key = experiment, run_name, key
        self.run_id = ""
        self._last = -1  # the last round that the store has
        self._held: list[Any] = []
        self._sent = 0.0
        self._lost = False
        for chatty in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        try:
            self._client = self._mlflow.MlflowClient(tracking_uri=self.uri)
            self._client.search_experiments(max_results=1)  # before anything is trained
        except self._mlflow.MlflowException as error:
            raise UsageError(f"MLflow cannot use {self.uri}: {str(error).splitlines()[0]}") from None

    def start(self, first_round: int) -> None:
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        known = self._known(experiment) if first_round else None
        if known is not None:
            self.run_id = known
            self._client.update_run(known, status="RUNNING")
            self._last = self._last_round()
            return
        tags = {"normec.version": __version__} | ({KEY: _digest(self.key)} if self.key is not None else {})
        made = self._client.create_run(experiment, run_name=self.run_name, tags=tags)
        self.run_id = made.info.run_id
        params = [self._mlflow.entities.Param(name, str(value)) for name, value in self.settings.items()]
        self._client.log_batch(self.run_id, params=params)

    def log(self, values: dict[str, float], round: int) -> None:
        if round <= self._last:
            return
        now = int(1000 * time.time())
        self._held += [self._mlflow.entities.Metric(name, value, now, round) for name, value in values.items()]
        if time.monotonic() - self._sent > SECONDS_BETWEEN or len(self._held) > MOST_HELD:
            self._send()

    def finish(self, status: str, error: str | None) -> None:
        self._send()
        if self._lost:
            return
        try:
            if error is not None:
                self._client.set_tag(self.run_id, "error", error)
            self._client.set_terminated(self.run_id, STATUS[status])
        except self._mlflow.MlflowException as lost:
            self._lose(lost)

    def _send(self) -> None:
        """Send the collected rows to the store."""
        held, self._held, self._sent = self._held, [], time.monotonic()
        if self._lost or not held:
            return
        try:
            self._client.log_batch(self.run_id, metrics=held)
        except self._mlflow.MlflowException as lost:
            self._lose(lost)

    def _lose(self, error: Exception) -> None:
        """Go on without the store, whose failure must not end the run."""
        self._lost = True
        warnings.warn(f"MLflow lost {self.uri}, the run goes on without it: {error}", stacklevel=3)

    def _known(self, experiment: str) -> str | None:
        """Return the newest run with this key; None if there is none."""
        if self.key is None:
            return None
        runs = self._client.search_runs(
            [experiment], f"tags.`{KEY}` = '{_digest(self.key)}'", order_by=["start_time DESC"], max_results=1
        )
        return str(runs[0].info.run_id) if runs else None

    def _last_round(self) -> int:
        history = self._client.get_metric_history(self.run_id, "messages")
        return max((metric.step for metric in history), default=-1)


def _digest(key: str) -> str:
    """Return a digest of a key, which needs no quotes in a search."""
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
