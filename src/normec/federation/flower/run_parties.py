"""The parties of a run: nodes of Flower, identified by their registered keys.

The number of a node changes when a SuperLink without a database restarts, but its key does not. The name of a party is
the fingerprint of its public key, and parties are numbered as clients in the order of their registration.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...system.files import write_atomic
from ..protocol.wire import NAME

if TYPE_CHECKING:
    from flwr.serverapp import Grid

FILE = "parties.json"
SILENCE = 300.0  # seconds without an answer after which the run gives up


@dataclass(frozen=True)
class OnlineParty:
    """A party that is online: the current number of its node, and the time since when it is online."""

    node: int
    since: str


def name_of(public_key: bytes) -> str:
    return f"party-{hashlib.sha256(public_key).hexdigest()[:16]}"


class RunParties:
    """The parties of a run, in the order of their client numbers."""

    def __init__(self, grid: Grid, names: list[str]) -> None:
        self._grid, self.names = grid, names
        self._nodes: dict[int, str] = {}
        self._online: dict[str, OnlineParty] = {}
        self._answered = time.monotonic()

    def online(self) -> dict[str, OnlineParty]:
        """The parties that are online according to Flower. While the SuperLink does not answer, the last known ones."""
        import httpx

        try:
            nodes = _nodes(self._grid)
        except httpx.HTTPError as error:
            if time.monotonic() - self._answered > SILENCE:
                raise _unanswered(error) from None
            return self._online
        self._answered = time.monotonic()
        found = {}
        for node in nodes:
            name = name_of(node.public_key)
            if name in self.names:
                found[name] = OnlineParty(int(node.node_id), str(node.last_activated_at))
                self._nodes[int(node.node_id)] = name
        self._online = found
        return found

    def name(self, node: int) -> str:
        return self._nodes.get(node, "?")


def _nodes(grid: Grid) -> list[Any]:
    """Flower's nodes that are online."""
    from flwr.supercore.run import RunNotRunningException

    try:
        return list(grid.get_nodes())
    except RunNotRunningException:
        raise UsageError("the run was stopped at the SuperLink; start it again to continue") from None


def _unanswered(error: Exception) -> UsageError:
    return UsageError(
        f"the SuperLink has not answered for {SILENCE:g} s ({error}); start it, then start the run again to continue"
    )


def kept_names(path: Path, entry: str) -> list[str]:
    """The names of a run's parties in a file of its folder, where they are the list `entry`.

    Raises:
        UsageError: The file is damaged.
    """
    try:
        names = json.loads(path.read_text(encoding="utf-8"))[entry]
        if isinstance(names, list) and all(isinstance(name, str) and NAME.fullmatch(name) for name in names):
            return names
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} is damaged: it must list the run's parties; restore it, or use another folder")


def gather(grid: Grid, folder: Path, parties: int, seconds: float, say: Callable[[str], None]) -> RunParties:
    """The parties of a run: those in its folder, or else the first `parties` nodes that are registered and online."""
    path = folder / FILE
    if path.exists():
        names = kept_names(path, "parties")
        if len(names) != parties:
            raise UsageError(f"the run in {folder} has {len(names)} parties, got parties = {parties}; keep the number")
        return RunParties(grid, names)
    nodes = _gathered(grid, parties, seconds, say)
    names = [name_of(node.public_key) for node in nodes[:parties]]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"parties": names}) + "\n")
    return RunParties(grid, names)


def _gathered(grid: Grid, parties: int, seconds: float, say: Callable[[str], None]) -> list[Any]:
    """Wait until enough nodes are online, and return them in the order of their registration."""
    import httpx

    until, seen = time.monotonic() + seconds, -1
    while True:
        try:
            nodes: list[Any] = sorted(_nodes(grid), key=lambda node: (node.registered_at, node.node_id))
        except httpx.HTTPError as error:
            raise _unanswered(error) from None
        if len(nodes) >= parties:
            return nodes
        if len(nodes) != seen:
            say(f"{len(nodes)} of {parties} parties are online")
            seen = len(nodes)
        if time.monotonic() > until:
            raise UsageError(
                f"only {seen} of {parties} parties came online within {seconds:g} s; start the others, or wait longer"
            )
        time.sleep(0.5)
