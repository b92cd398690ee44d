"""Follow a federated run from outside its server: pass new rows of its history to callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ...storage.history import History
from ...training.callbacks import Callback


class Follower:
    """Passes new rows of a run's history to `callbacks` whenever `look` is called."""

    def __init__(self, folder: Path, rounds: int, callbacks: Sequence[Callback]) -> None:
        self._path, self._rounds, self._callbacks = folder / "metrics.jsonl", rounds, callbacks
        self._seen: int | None = None  # the last round that was passed on; None before the first look
        self.look()

    def look(self) -> None:
        """Pass on the rows that were added since the last call."""
        history = History(self._path)
        try:
            history.reread()
        except UsageError:  # truncated while the server restarts; it will be complete again
            return
        if self._seen is None:
            self._seen = history.rows[-1]["round"] if len(history) else -1
            for callback in self._callbacks:
                callback.begin(max(self._seen, 0), self._rounds)
            return
        for row in history:
            if row["round"] > self._seen:
                self._seen = row["round"]
                for callback in self._callbacks:
                    callback.row(row)
                    callback.round(row["round"])
