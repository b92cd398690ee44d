"""Read the folder of a run, which may be finished, running, interrupted or damaged.

Nothing here changes a folder or locks it; files that cannot be read become notes on the page.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..algorithms.catalogue import CATALOGUE
from ..errors import UsageError
from ..storage import PROFILE
from ..storage.history import UNNOISED, History
from ..storage.tags import read_tags
from ..system.files import parse_toml, read_bytes, read_json, read_text
from . import schema

if TYPE_CHECKING:
    from ..privacy.statement import Privacy

MOST_BYTES = 64 * 2**20  # of one file of a run; a page of more than that helps nobody
SIMULATION = "Simulation: seeded noise protects nobody"
STATEMENTS = "statements.json"  # what each party of a federation has spent, where their folders are known
PARTS = ("config.toml", "metrics.jsonl", "summary.json")
STATUS = {
    "training": "is training",
    "finished": "finished",
    "interrupted": "was interrupted",
    "stopped": "stopped early",
    "diverged": "diverged",
    "failed": "failed",
    "unfinished": "ended without a summary",
    "unreadable": "cannot be read",
}


@dataclass
class RunView:
    """The contents of a run's folder.

    `identity` is the identity in its checkpoint, `paid` the ε of the ledger, and `notes` the files that could not be
    read.
    """

    folder: Path
    status: str = "unfinished"
    summary: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    toml: str = ""
    own_names: tuple[str, ...] = ()  # of the settings in `method_settings`, if config.toml has them
    history: History = field(default_factory=History)
    identity: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    paid: float = 0.0
    released: int = 0  # the messages of one client that `paid` covers; 0 where they were not counted
    statement: Privacy | None = None  # that of the ledger, once it is verified
    clients: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None  # where the time of some rounds went
    parties: list[dict[str, Any]] = field(default_factory=list)  # of a federation: what each of them has spent
    distrust: str | None = None  # why the ledger does not support the stated spending
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def method(self) -> str:
        named = re.match(r"Method\(name='([^']+)'", str(self.identity.get("method", "")))
        return str(self.settings.get("method") or (named[1] if named else "a method"))

    @property
    def method_settings(self) -> dict[str, Any]:
        """The settings of the method itself, such as alpha and beta."""
        names = self.own_names or (CATALOGUE[self.method].settings if self.method in CATALOGUE else ())
        return {name: self.settings[name] for name in names if self.settings.get(name) is not None}

    @property
    def lr(self) -> float | str | None:
        """The step size that was used, in words if it changes; None if nothing says it."""
        found = self.identity.get("lr", self.settings.get("lr"))
        return found if isinstance(found, int | float | str) else None

    @property
    def final(self) -> dict[str, Any]:
        """The last value of every column."""
        found: dict[str, Any] = {}
        for row in self.history:
            found |= row
        return found or dict(self.summary.get("final") or {})

    @property
    def round(self) -> int:
        known = self.summary.get("round") if self.status != "training" else None
        return int(known if known is not None else self.final.get("round", 0))

    @property
    def rounds(self) -> int | None:
        for source in (self.summary, self.identity, self.settings):
            if isinstance(source.get("rounds"), int):
                return int(source["rounds"])
        return None

    @property
    def privacy(self) -> dict[str, Any] | None:
        """What a finished or interrupted private run spent, in its own words."""
        held = self.summary.get("privacy")
        return held if isinstance(held, dict) else None

    @property
    def private(self) -> bool:
        return bool(self.privacy or self.settings.get("private") or self.identity.get("privacy"))

    @property
    def terms(self) -> dict[str, Any]:
        """Who is protected from whom, as settings; those of the ledger count, once it is verified."""
        stated = self.statement.to_dict() if self.statement is not None else {}
        return {**self.settings, **(self.identity.get("privacy") or {}), **stated}

    @property
    def simulation(self) -> bool:
        """Whether the run's noise came from its seed, so that it protects nobody."""
        return self.private and simulated(self.privacy or {}, self.terms)

    @property
    def uncovered(self) -> list[str]:
        """The columns of a private run that the guarantee does not cover."""
        return [name for name in UNNOISED if self.final.get(name) is not None] if self.private else []

    @property
    def epsilon(self) -> float | None:
        """ε so far; None for a run without privacy, or if the ledger does not support it."""
        if self.distrust is not None:
            return None
        if self.status != "training" and self.privacy is not None:
            return max(float(self.privacy["epsilon"]), self.paid)
        known = self.final.get("epsilon")
        return max(known or 0.0, self.paid) if self.private and (known or self.paid) else None

    @property
    def budget(self) -> float | None:
        """The ε that was the target; None where ε was only reported."""
        terms = self.terms
        target = (
            self.privacy.get("is_target", True) if self.privacy else not (terms.get("replay") or terms.get("sigma"))
        )
        if not self.private or not target:
            return None
        return terms.get("epsilon")

    @property
    def bound(self) -> float | None:
        """The bound on the norm of a message."""
        return self.summary.get("message_bound")


def simulated(privacy: Mapping[str, Any], terms: Mapping[str, Any]) -> bool:
    """Whether a summary's table of privacy is that of a simulation; older ones are known by their `terms`."""
    return bool(privacy.get("simulation", terms.get("noise") == "seeded"))


def is_run(folder: Path) -> bool:
    return any(is_file(folder / part) for part in PARTS)


def is_file(path: Path) -> bool:
    """Whether the path is a regular file; False if it is not accessible."""
    return os.path.isfile(path)  # noqa: PTH113  (Path.is_file raises where a folder may not be searched)


def read_run(folder: Path, summary: dict[str, Any] | None = None) -> RunView:
    """A run's folder, with `summary` in place of its summary.json if that is still to be written."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if not is_run(folder):
        raise UsageError(f"{folder} holds no run: there is no {', '.join(PARTS[:-1])} or {PARTS[-1]} in it")
    view = RunView(folder)
    view.summary = summary or _kept(view, "summary.json", _json(view, "summary.json"), schema.SUMMARY, None)
    try:
        view.toml = read_text(folder / "config.toml", MOST_BYTES)
        held = parse_toml(view.toml, "config.toml")
        view.settings = _kept(view, "config.toml", _flat(held), schema.SETTINGS, schema.scalar)
        view.own_names = _own_names(held)
    except FileNotFoundError:
        pass
    except UsageError as error:
        view.notes.append(_within(view, error))
    if not view.settings:
        held = view.summary.get("config", {})
        view.settings = _kept(view, "summary.json", _flat(held), schema.SETTINGS, schema.optional(schema.scalar))
        view.own_names = _own_names(held)
    latest = "checkpoint/latest.json"
    view.checkpoint = _kept(view, latest, _json(view, latest), schema.CHECKPOINT, None)
    view.identity = _kept(view, latest, view.checkpoint.get("identity", {}), schema.IDENTITY, schema.anything)
    view.tags = _tags(view)
    view.paid = _paid(folder / "ledger.jsonl")
    view.clients = _clients(view)
    view.profile = _profile(view)
    view.parties = _parties(view)
    view.history = _history(view)
    view.status = str(view.summary.get("status", "unfinished"))
    if summary is None and being_written(folder):
        view.status = "training"
        if "seats" in view.checkpoint:
            _count_parties(view)
    elif view.private:
        _verify(view)
    return view


def _verify(view: RunView) -> None:
    """Compare the spending that a run states with its ledger."""
    from ..privacy.ledger_verification import verified

    try:
        known = verified(view.folder, {**view.summary, "final": view.final, "config": view.terms})
        if known is not None:
            view.paid, view.released, view.statement = known
        else:
            view.paid = 0.0
    except UsageError as error:
        view.distrust = str(error)
        view.notes.append(view.distrust)


def _count_parties(view: RunView) -> None:
    """Count the messages that a party of a running federation may have released beyond the server's ledger."""
    from ..privacy.ledger_verification import verified

    with suppress(UsageError):  # the ledger may be half-written now; the next request finds it whole
        known = verified(view.folder)
        if known is not None:
            view.paid, view.released = max(view.paid, known.epsilon), known.releases


def trusted_run(folder: Path, summary: dict[str, Any] | None = None) -> RunView:
    """Like `read_run`, but refuses a run whose ledger does not support its ε."""
    view = read_run(folder, summary)
    if view.distrust is not None:
        raise UsageError(view.distrust)
    return view


def read_runs(folders: list[Path]) -> tuple[list[RunView], list[str]]:
    """The runs that can be read, and a line about each one that cannot."""
    views, notes = [], []
    for folder in folders:
        try:
            views.append(trusted_run(folder))
        except UsageError as error:
            notes.append(str(error))
    return views, notes


def being_written(folder: Path) -> bool:
    """Whether a process is training in the folder, without using its lock."""
    try:
        lock = (folder / ".lock").lstat()  # a link would name the lock of another process
    except OSError:
        return False
    try:
        held = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:  # another system: a run that wrote within the last minute
        try:
            return abs(time.time() - (folder / "metrics.jsonl").stat().st_mtime) < 60  # an archive may name any time
        except OSError:
            return False
    # By its inode alone: some file systems show another device here than `stat` does.
    lines = (line.split() for line in held.splitlines() if "FLOCK" in line)
    return any(part.rpartition(":")[2] == str(lock.st_ino) for line in lines for part in line if part.count(":") == 2)


def _tags(view: RunView) -> list[str]:
    try:
        return read_tags(view.folder)
    except UsageError as error:
        view.notes.append(_within(view, error))
        return []


def _paid(path: Path) -> float:
    """ε of the last whole line of a ledger, unchecked; 0 where there is none."""
    try:
        lines = read_bytes(path, tail=4096).split(b"\n")[1:-1]
        last = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError, RecursionError):
        return 0.0
    return float(last["epsilon"]) if schema.record({"epsilon": schema.number})(last) else 0.0


def _clients(view: RunView) -> dict[str, Any] | None:
    """The table of clients, if there is one and every row has a cell for every column."""
    held = _json(view, "clients.json")
    if not held:
        return None
    cells = schema.list_of(schema.list_of(schema.optional(schema.scalar)))
    whole = schema.record({"columns": schema.list_of(schema.text), "rows": cells})(held)
    if whole and all(len(row) == len(held["columns"]) for row in held["rows"]):
        return held
    view.notes.append("clients.json is not what a run writes, and is left out")
    return None


def _profile(view: RunView) -> dict[str, Any] | None:
    """The table of a profile, if there is one."""
    held = _json(view, PROFILE)
    if held and not schema.PROFILE(held):
        view.notes.append(f"{PROFILE} is not what a run writes, and is left out")
        return None
    return held or None


def _parties(view: RunView) -> list[dict[str, Any]]:
    """What each party of a federation has spent, if the folder says so."""
    held = _json(view, STATEMENTS)
    if not held:
        return []
    if schema.record({"parties": schema.list_of(schema.PARTY)})(held):
        return list(held["parties"])
    view.notes.append(f"{STATEMENTS} is not what a federation writes, and is left out")
    return []


def _history(view: RunView) -> History:
    history = History(view.folder / "metrics.jsonl")
    try:
        history.reread(MOST_BYTES)
    except UsageError as error:
        view.notes.append(_within(view, error))
        return History()
    if all(schema.ROW(row) and schema.count(row.get("round")) for row in history):
        return history
    view.notes.append("metrics.jsonl is not what a run writes, and is left out: a row has no round, or no numbers")
    return History()


def _json(view: RunView, name: str) -> dict[str, Any]:
    try:
        held = read_json(view.folder / name, MOST_BYTES)
    except FileNotFoundError:
        return {}
    except UsageError as error:
        view.notes.append(_within(view, error))
        return {}
    if not isinstance(held, dict):
        view.notes.append(f"{name} is not what a run writes")
        return {}
    return held


def method_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `method_settings` of a run's record as one table; empty if there are none, or if they are damaged.

    The command line writes them as text, and Python as a table, in which the settings of an operator are a table too.
    """
    held = record.get("method_settings")
    if isinstance(held, str):
        from ..settings.assignments import parse_assignments  # it needs pydantic, which other pages do without

        with suppress(UsageError):
            return dict(parse_assignments(held))
    found: dict[str, Any] = {}
    for name, value in held.items() if isinstance(held, dict) else ():
        found |= value if isinstance(value, dict) and name in value else {name: value}
    return found


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with those of the method among them; other lists and tables as text."""
    rest = {**method_settings(settings), **{name: settings[name] for name in settings if name != "method_settings"}}
    nested = {name: json.dumps(value, default=str) for name, value in rest.items() if isinstance(value, list | dict)}
    return {**rest, **nested}


def _own_names(settings: dict[str, Any]) -> tuple[str, ...]:
    return tuple(method_settings(settings))


def _within(view: RunView, error: UsageError) -> str:
    """An error about a file of the run, which it names as the run's folder does."""
    return str(error).replace(f"{view.folder}{os.sep}", "")


def _kept(
    view: RunView, name: str, held: dict[str, Any], known: Mapping[str, schema.Check], others: schema.Check | None
) -> dict[str, Any]:
    """The valid entries of a file's table; the others are noted and left out."""
    kept, wrong = schema.fitting(held, known, others)
    if wrong:
        view.notes.append(f"{name} is not what a run writes; left out: {', '.join(wrong[:5])}")
    return kept
