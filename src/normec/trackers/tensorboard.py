"""TensorBoard: event files in a folder, with one scalar per column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import needed
from .tracker import Tracker


class TensorBoard(Tracker):
    """Writes a run to TensorBoard's event files.

    A run that continues takes back what it logged after its checkpoint.

    Args:
        folder: The folder of the event files.
        settings: The settings of the run, which the tracker shows.

    Raises:
        UsageError: TensorBoard is not installed.

    Example:
        >>> TensorBoard("events").folder.name
        'events'
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings)
        needed("tensorboard", "tensorboard")
        self.folder = Path(folder)

    def start(self, first_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=first_round or None)
        if self.settings and not first_round:
            listed = "\n".join(f"    {key} = {json.dumps(value)}" for key, value in self.settings.items())
            self._writer.add_text("settings", listed, 0)

    def log(self, values: dict[str, float], round: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)

    def finish(self, status: str, error: str | None) -> None:
        if error is not None:
            self._writer.add_text("status", f"{status}: {error}", 0)
        self._writer.close()
