"""Checkpoints: tensors in safetensors, everything else in JSON, no pickles.

    checkpoint/round-00000120.safetensors    x, memory, estimate, buffers
    checkpoint/latest.json                   its name and checksum, the run's identity and counters; at the end also
                                             the table of clients

`latest.json` is written when the run begins, before there is a checkpoint. It is always replaced last, in one step, so
a process that is killed leaves either the old checkpoint or the new one. A folder that has files of a run but no
`latest.json` is damaged. A checkpoint that is damaged, incomplete, or of another configuration is refused and not
overwritten. In private runs only the owner can read these files, because they contain the clients' memories.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..system.files import read_if_present, write_atomic, writing

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
SECRET = "noise_secret"  # the key in an identity for the digest of the noise secret
EXTENDED = "extended"  # the key in an identity of a run that was continued to more rounds
LATEST = "latest.json"
# Keys of an identity that are compared after all others: those before explain why they differ.
_LAST = {"privacy": 1, "rounds": 1, "log_every": 2, "evaluate_every": 2, SECRET: 3, EXTENDED: 3}
CURE = "restore it from a backup, or start again in another folder"
_STATE = re.compile(r"round-\d{8,}\.safetensors")
# The last pattern is for temporary files of safetensors.
_OURS = re.compile(rf"{_STATE.pattern}|\..*\.part|\.tmp\w{{6}}")


class Checkpoints:
    """The newest checkpoint of one run; `identity` is everything that the run's numbers depend on."""

    def __init__(
        self, folder: Path, identity: dict[str, Any], private: bool = False, previous: dict[str, Any] | None = None
    ) -> None:
        """`private`: only the owner can read the files. `previous`: the identity of a run that this one continues."""
        self.folder, self.identity, self._previous = folder, json.loads(json.dumps(identity)), previous
        self._private = private

    @property
    def begun(self) -> bool:
        """Whether the run has begun, with or without a checkpoint."""
        return (self.folder / LATEST).exists()

    def begin(self) -> None:
        """Record that a run begins here; its other files are valid only together with this record."""
        with writing(self.folder):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700 if self._private else 0o777, exist_ok=True)
        if not self.begun:
            self._point({"round": 0, "file": None})

    def save(self, round: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.begin()
        path = self.folder / f"round-{round:08d}.safetensors"
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomic(path, lambda aside: save_tensors(held, aside), private=self._private)
        self._point({"round": round, "file": path.name, "sha256": _checksum(path), **facts})
        with writing(self.folder):
            for old in self.folder.iterdir():
                if old.name != path.name and _OURS.fullmatch(old.name):
                    old.unlink(missing_ok=True)  # older rounds, and incomplete files of a killed process

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return (tensors, facts) of the newest checkpoint; None if there is none yet."""
        from safetensors.torch import load_file

        latest = self.folder / LATEST
        data = read_if_present(latest)
        if data is None:
            lost = sorted(path.name for path in self.folder.glob("round-*") if _STATE.fullmatch(path.name))
            if lost:
                raise UsageError(f"{latest} is missing beside {lost[-1]}; {CURE}")
            return None
        facts = _checked(latest, data)
        self._same(facts["identity"])
        if facts["file"] is None:
            return None
        path = self.folder / facts["file"]
        if not path.exists() or _checksum(path) != facts["sha256"]:
            state = "missing" if not path.exists() else "damaged (its checksum differs)"
            raise UsageError(f"{path} is {state}; {CURE}")
        return load_file(str(path)), facts

    def _point(self, facts: dict[str, Any]) -> None:
        """Replace latest.json."""
        latest = {"format": FORMAT, "identity": self.identity, **facts}
        latest["checksum"] = _own_checksum(latest)
        write_atomic(self.folder / LATEST, json.dumps(latest, indent=1) + "\n", private=self._private)

    def _same(self, identity: dict[str, Any]) -> None:
        if identity in (self.identity, self._previous):
            return
        ours = self._previous or self.identity  # a run that goes on may have more rounds
        keys = sorted(ours.keys() | identity.keys(), key=lambda key: (_LAST.get(key, 0), key))
        if _but_epsilon(ours) != _but_epsilon(identity):
            keys.insert(0, "privacy")  # other settings differ because the statements do
        for key in keys:
            here, there = ours.get(key), identity.get(key)
            if here != there and key == SECRET:
                raise UsageError(f"the secret of the noise in {self.folder.parent} is missing or has changed; {CURE}")
            if here != there:
                raise UsageError(
                    f"{self.folder.parent} holds a run of another configuration: {_difference(key, here, there)}; "
                    "choose another folder for this run"
                )


def _but_epsilon(identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the privacy statement of a run without its ε, which follows from its rounds."""
    stated = identity.get("privacy")
    return stated and {name: value for name, value in stated.items() if name != "epsilon"}


def _difference(key: str, here: Any, there: Any) -> str:
    """Return in which setting two runs differ; of privacy statements it is the first one that differs.

    ε comes last, because a run with more rounds may have another one.
    """
    if isinstance(here, dict) and isinstance(there, dict):
        for name in sorted({**there, **here}, key=lambda name: name == "epsilon"):
            if there.get(name) != here.get(name):
                return f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
    if key == "privacy":
        return "it is private there, and not here" if here is None else "it is not private there, but it is here"
    return f"{key} is {there!r} there, {here!r} here"


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return what the newest checkpoint of a run holds beside its tensors, without locking the run.

    Args:
        folder: The folder of the checkpoints.

    Raises:
        UsageError: latest.json is damaged.
    """
    latest = folder / LATEST
    data = read_if_present(latest)
    return None if data is None else _checked(latest, data)


def _checked(latest: Path, data: bytes) -> dict[str, Any]:
    """Return the contents of latest.json; raises `UsageError` if it is damaged."""
    try:
        facts: dict[str, Any] = json.loads(data)
        if facts["format"] != FORMAT:
            raise UsageError(
                f"{latest} has format {facts['format']}, this version reads {FORMAT}; use the version that wrote it"
            )
        whole = facts["checksum"] == _own_checksum(facts)
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise UsageError(f"{latest} is damaged; {CURE}")
    return facts


def save_tensors(held: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file; a full disk raises `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(held, str(path))
    except SafetensorError as error:  # it has no separate type for disk errors
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def _own_checksum(facts: dict[str, Any]) -> str:
    rest = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; {CURE}") from None
