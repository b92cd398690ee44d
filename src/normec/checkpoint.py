"""The state of a run on disk: tensors in safetensors, the rest in JSON, no pickles.

    checkpoint/round-00000120.safetensors    x, memory, estimate, buffers
    checkpoint/latest.json                   its name and checksum, the run's identity, counters

`latest.json` is replaced last and in one step, so a kill at any instant leaves either the old checkpoint
or the new one. A checkpoint that is damaged, or belongs to another configuration, is refused; nothing
is written over it.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from .atomic import private_folder, write_atomic
from .errors import UsageError

FORMAT = 1
_OURS = re.compile(r"round-\d{8,}\.safetensors|\..*\.part|\.tmp\w{6}")  # the last are safetensors' own


class Checkpoints:
    """The newest state of one run, known by `identity`: everything its numbers depend on."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, json.loads(json.dumps(identity))

    def save(self, round: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        self.folder.parent.mkdir(parents=True, exist_ok=True)
        private_folder(self.folder)  # the memories in it are functions of the clients' data
        path = self.folder / f"round-{round:08d}.safetensors"
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomic(path, lambda aside: save_file(held, str(aside)), private=True)
        latest = {
            "format": FORMAT,
            "round": round,
            "file": path.name,
            "sha256": _checksum(path),
            "identity": self.identity,
            **facts,
        }
        latest["checksum"] = _own_checksum(latest)
        write_atomic(self.folder / "latest.json", json.dumps(latest, indent=1) + "\n", private=True)
        for old in self.folder.iterdir():
            if old.name != path.name and _OURS.fullmatch(old.name):
                old.unlink(missing_ok=True)  # older rounds, and what a kill left half-written

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """(tensors, facts) of the newest checkpoint; None where there is none."""
        from safetensors.torch import load_file

        latest = self.folder / "latest.json"
        if not latest.exists():
            return None
        try:
            facts = json.loads(latest.read_text(encoding="utf-8"))
            if facts["format"] != FORMAT:
                raise UsageError(f"{latest} has format {facts['format']}, this version reads {FORMAT}")
            whole = facts["checksum"] == _own_checksum(facts)
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise UsageError(f"{latest} is damaged; move {self.folder} away to start anew")
        self._same(facts["identity"])
        path = self.folder / facts["file"]
        if not path.exists() or _checksum(path) != facts["sha256"]:
            state = "missing" if not path.exists() else "damaged (its checksum differs)"
            raise UsageError(f"{path} is {state}; move {self.folder} away to start anew")
        return load_file(str(path)), facts

    def _same(self, identity: dict[str, Any]) -> None:
        for key in sorted(self.identity.keys() | identity.keys()):
            here, there = self.identity.get(key), identity.get(key)
            if here != there:
                raise UsageError(
                    f"{self.folder.parent} holds a run of another configuration: {key} is {there!r} there, "
                    f"{here!r} here; choose another folder for this one"
                )


def _own_checksum(facts: dict[str, Any]) -> str:
    rest = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
