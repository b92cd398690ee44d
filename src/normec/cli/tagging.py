"""A callback that tags a run when it begins, so that a page of runs in progress has its tags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..storage.tags import change_tags
from ..training.callbacks import Callback


class Tagging(Callback):
    """Adds tags to the folder of a run.

    Args:
        folder: The folder.
        tags: The tags, which may be none.
    """

    def __init__(self, folder: Path, tags: Sequence[str]) -> None:
        self._folder, self._tags = folder, tags

    def begin(self, first_round: int, rounds: int) -> None:  # noqa: ARG002
        """Write the tags; config.toml exists already."""
        change_tags(self._folder, self._tags)
