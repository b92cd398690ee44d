"""Backup and restoration of a party's folder. A ledger never goes back.

A backup is an archive of the folder with the head of its ledger. Messages that the party made after the backup are not
in it, and a folder that was simply copied back would count them as never made. So `restore` asks the witness of the
policy, which lies outside the folder, how many lines the ledger had:

- The witness knows the head of the backup: no message was made since, and the whole folder is restored.
- The witness knows more lines, or there is none: messages may be missing. How many there were and with how much noise
  is not known, but the policy never let the party spend more than its budget. So they are charged at this upper bound:
  the ledger gets a line that brings the ε of the client to the budget. The party then refuses everything until its
  owner raises the budget. The states of runs are not restored, because they are older than what the server has seen;
  the party gets its memory from the server by a handshake, like a party that lost its disk. In a run with secure sums
  there is no such handshake, but the other parties are witnesses: the state is restored with the record of the run, and
  a party that has made a vector since is told so (`secure_sum.history`). This needs the owner's explicit consent
  (`charge_lost`).

The charge must also be enough when the budget is raised and further messages are added to it. At client level no
message gains from sampling, so all messages together are μ-GDP, and the budget (ε, δ) says that μ is at most that of
the curve through (ε, δ). The line brings μ to this value or above it, and a larger μ is the weaker guarantee at every δ
and in every composition. A record moves a message at most twice as far as a client that is left out, and no farther
than one that is replaced (`price`), so the same line with that factor covers all records, drawn in batches or not.

A budget for records alone gives no such bound, and the restoration is refused: messages on batches that were drawn gain
from sampling, their δ(ε) is no curve of that family, and one point of it does not say what they add to later messages.

The bound holds if the budget was never above the larger of the one at the time of the backup and the one of the present
policy, each at its own δ. A folder that still has a ledger is never replaced.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...privacy.accounting import Account, Event
from ...privacy.hash_chain import Chain, Head, LedgerDamaged, read_chain, read_head
from ...system.files import parse_json, private_folder, read_if_present, unpacked, write_atomic, writing
from . import party_state
from .account import FILE, Releases, read_releases
from .policy import Policy

FACTS = "backup.json"
_FORMAT = 2
_LARGEST_FACTS = 2**16
_LEFT_OUT = (".lock",)
_HALF_WRITTEN = (".new", ".part")  # files that take the place of others when they are whole
_NO_NOISE = 1e-9  # a noise multiplier
_TIGHT = 1e-6  # how far above the budget the charge may go, relatively


@dataclass(frozen=True)
class Restored:
    """The outcome of a restoration.

    `lines` is the length of the ledger, `charged` says whether lost messages were charged, and `epsilon` is what the
    policy's unit has spent now.
    """

    lines: int
    charged: bool
    epsilon: float


def back_up(folder: Path, policy: Policy, archive: Path) -> Head:
    """Write the party's folder to a new archive that only its owner can read. Returns the head of its ledger.

    Raises:
        UsageError: There is no folder, its ledger is damaged, or the archive exists.
    """
    if not (folder / FILE).exists():
        raise UsageError(f"{folder} holds no ledger; there is nothing to back up yet")
    if archive.exists():
        raise UsageError(f"{archive} exists; give each backup a name of its own")
    with party_state.locked(folder):
        read_releases(folder, policy.witness)  # a damaged folder is not worth a backup
        head = read_chain(folder / FILE).head
        facts = {
            "format": _FORMAT,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "ledger": list(head),
            "budgets": policy.budgets,
            "delta": policy.delta,
        }

        def write(path: Path) -> None:
            with tempfile.TemporaryDirectory() as aside, tarfile.open(path, "w:gz") as whole:
                note = Path(aside) / FACTS
                note.write_text(json.dumps(facts) + "\n", encoding="utf-8")
                whole.add(note, FACTS)
                for inside in sorted(folder.rglob("*"), key=_heads_first):
                    if inside.name in _LEFT_OUT or inside.suffix in _HALF_WRITTEN:
                        continue
                    if inside.is_file() and not inside.is_symlink():
                        whole.add(inside, f"folder/{inside.relative_to(folder).as_posix()}", recursive=False)

        write_atomic(archive, write, private=True)
    return head


def _heads_first(path: Path) -> tuple[bool, Path]:
    """The order in which files are copied: a head before the lines that it counts.

    A party that takes part in a secure sum writes to the record of the run while the backup is made. Lines that a head
    does not count yet are kept; lines that it counts must not be missing.
    """
    return path.suffix != ".head", path


def restore(folder: Path, policy: Policy, archive: Path, *, charge_lost: bool = False) -> Restored:
    """Restore a party's folder from a backup; see the module for what happens to messages made since.

    Args:
        folder: A folder that does not exist, or is empty.
        policy: The party's policy, with its witness and its budgets.
        archive: The backup.
        charge_lost: Whether to charge the whole budget if messages may be missing.

    Returns:
        What was restored.

    Raises:
        UsageError: The folder has a ledger, the backup is damaged, or messages may be missing and `charge_lost` is
            false.
    """
    _check_empty(folder)
    with unpacked(archive) as found:
        facts, source = _facts(found, archive), found / "folder"
        head = Head(int(facts["ledger"][0]), str(facts["ledger"][1]))
        try:
            known = read_chain(source / FILE, head)
        except (LedgerDamaged, FileNotFoundError) as error:
            raise UsageError(f"{archive} is damaged: {error}") from None
        if known.head != head:
            raise UsageError(f"{archive} is damaged: its ledger has {known.head.lines} lines, {head.lines} were saved")
        releases = Releases(source / FILE, known.lines)
        releases.check(policy.relation)
        lost = _lost(policy, head)
        if lost and not charge_lost:
            raise UsageError(
                f"{lost}; with --charge-lost the backup is restored and the whole budget counts as spent, which is the "
                "most that the missing messages can have cost"
            )

        def complete(copy: Path) -> None:
            if lost:
                limits = [(facts["budgets"], float(facts["delta"])), (policy.budgets, policy.delta)]
                _charge(copy, policy, limits, releases)

        with writing(folder):
            _copy(source, folder, complete, with_states=not lost)
    if policy.witness is not None:
        write_atomic(Path(policy.witness), (folder / f"{FILE}.head").read_bytes(), private=True)
    present = read_releases(folder, policy.witness)
    lines = read_chain(folder / FILE).head.lines
    return Restored(lines, bool(lost), present.epsilon(policy.unit, policy.delta))


def _check_empty(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or any(path.name not in _LEFT_OUT for path in folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty, and a ledger is never replaced; if it is damaged, move the folder away and keep it"
        )


def _facts(found: Path, archive: Path) -> dict[str, Any]:
    content = read_if_present(found / FACTS, _LARGEST_FACTS)
    facts: Any = parse_json(content, str(archive)) if content is not None else None
    try:
        if facts is not None and facts["format"] == _FORMAT and len(facts["ledger"]) == 2 and facts["budgets"]:
            return dict(facts)
    except (KeyError, TypeError):
        pass
    raise UsageError(f"{archive} is no backup of a party's folder; `normec federation backup` writes one")


def _lost(policy: Policy, head: Head) -> str:
    """Why messages may be missing in the backup; empty if the witness shows that none are."""
    if policy.witness is None:
        return "the policy has no witness, so nobody knows whether messages were made after the backup"
    try:
        seen = read_head(Path(policy.witness))
    except LedgerDamaged as error:
        return str(error)
    if seen is None:
        return f"the witness {policy.witness} is missing, so nobody knows whether messages were made after the backup"
    if seen == head:
        return ""
    if seen.lines <= head.lines:
        return f"the witness {policy.witness} does not belong to this backup, or is older than it"
    return f"the ledger had {seen.lines} lines according to its witness, the backup has {head.lines}"


def _copy(source: Path, folder: Path, complete: Callable[[Path], None], *, with_states: bool) -> None:
    """Put the files of a backup into place in one step, after `complete` has changed the copy that it is given.

    If the copy cannot be completed, or the process is killed, there is no folder that could be used without the charge.
    """
    private_folder(folder.parent)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(aside, ignore_errors=True)
    private_folder(aside)
    try:
        for path in sorted(source.rglob("*")):
            inside = path.relative_to(source)
            if not path.is_file() or path.is_symlink() or (party_state.of_messages(inside) and not with_states):
                continue
            private_folder((aside / inside).parent)
            write_atomic(aside / inside, path.read_bytes(), private=True)
        complete(aside)
        if folder.exists():
            for left in folder.iterdir():
                left.unlink()
            folder.rmdir()
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _charge(folder: Path, policy: Policy, limits: list[tuple[dict[str, float], float]], releases: Releases) -> None:
    """Append a line that brings the client's account to the largest of some budgets, each with its δ."""
    if not all("client" in budgets for budgets, _ in limits):
        raise UsageError(
            "there is no bound on what was spent: the policy limits records alone, now or when the backup was made, "
            "and what batches of records cost cannot be added to later messages; begin a new folder with a smaller "
            "budget"
        )
    noise = min(_completing(releases.account("client", delta), budgets["client"]) for budgets, delta in limits)
    more = 2 if policy.relation == "zero-out" else 1  # how much farther a record may move a message than the client
    line = {
        "kind": "release",
        "run": "restored",
        "node": "restored",
        "step": 0,
        "count": 1,
        "unit": policy.unit,
        "trust": "local",
        "noise": "secure",
        "sigma": 0.0,
        "client": noise,
        "record": noise / more,
        "recovered": True,
    }
    with Chain(folder / FILE) as chain:
        chain.append(line)


def _completing(account: Account, budget: float) -> float:
    """The noise multiplier of one release that brings ε to the budget or slightly above it."""
    if math.isinf(budget):
        raise UsageError("the policy has no epsilon, so there is no bound on what was spent; begin a new folder")

    def epsilon(multiplier: float) -> float:
        after = account.copy()
        after.add(Event(multiplier, 1.0, 1))
        return after.epsilon()

    low, high = _NO_NOISE, 1e6  # at the first ε is huge, and with the last a release costs nothing
    while high / low > 1 + _TIGHT:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(middle) >= budget else (low, middle)
    return low
