"""Which of Flower's nodes are the parties, by the keys they were registered with.

A node's number changes when a SuperLink without a database starts anew; its key does not. A party's name is the
fingerprint of its public key, and its number among the clients is the order of registration.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import write_atomic
from ..errors import UsageError
from .wire import NAME

if TYPE_CHECKING:
    from flwr.serverapp import Grid

FILE = "parties.json"


@dataclass(frozen=True)
class Present:
    """A party that is there: its node's number now, and since when."""

    node: int
    since: str


def name_of(public_key: bytes) -> str:
    return f"party-{hashlib.sha256(public_key).hexdigest()[:16]}"


class Roster:
    """The parties of a run, in the order of their client numbers."""

    def __init__(self, grid: Grid, names: list[str]) -> None:
        self._grid, self.names = grid, names
        self._nodes: dict[int, str] = {}
        self._present: dict[str, Present] = {}

    def present(self) -> dict[str, Present]:
        """The parties that Flower counts as online; as before where the SuperLink cannot say."""
        import httpx

        try:
            nodes = list(self._grid.get_nodes())
        except httpx.HTTPError:
            return self._present
        found = {}
        for node in nodes:
            name = name_of(node.public_key)
            if name in self.names:
                found[name] = Present(int(node.node_id), str(node.last_activated_at))
                self._nodes[int(node.node_id)] = name
        self._present = found
        return found

    def name(self, node: int) -> str:
        return self._nodes.get(node, "?")


def _kept(path: Path) -> list[str]:
    """The names in a run's list of parties."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["parties"]
        if isinstance(names, list) and all(isinstance(name, str) and NAME.fullmatch(name) for name in names):
            return names
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} is damaged: it must list the run's parties; restore it, or begin another folder")


def gather(grid: Grid, folder: Path, parties: int, seconds: float, say: Callable[[str], None]) -> Roster:
    """The run's parties: those written down in its folder, or else the first `parties` to be registered and present."""
    path = folder / FILE
    if path.exists():
        names = _kept(path)
        if len(names) != parties:
            raise UsageError(f"the run in {folder} has {len(names)} parties, got parties = {parties}; keep the number")
        return Roster(grid, names)
    until, seen = time.monotonic() + seconds, -1
    while True:
        nodes: list[Any] = sorted(grid.get_nodes(), key=lambda node: (node.registered_at, node.node_id))
        if len(nodes) >= parties:
            break
        if len(nodes) != seen:
            say(f"{len(nodes)} of {parties} parties are there")
            seen = len(nodes)
        if time.monotonic() > until:
            raise UsageError(f"only {seen} of {parties} parties came within {seconds:g} s; start them, or wait longer")
        time.sleep(0.5)
    names = [name_of(node.public_key) for node in nodes[:parties]]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"parties": names}) + "\n")
    return Roster(grid, names)
