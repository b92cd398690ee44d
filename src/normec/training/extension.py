"""A finished run that is continued to more rounds, with the noise that it had.

The rounds of both parts form one account. A noise that was calibrated for a target ε over fewer rounds amounts to more
over all of them, so the caller must ask for the larger ε. The ledger notes the new statement before the first further
release.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..storage.checkpoint import EXTENDED
from .run import LOGGING_SETTINGS, Plan

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism
    from ..privacy.statement import Privacy

_MAY_DIFFER = ("rounds", "lr", "privacy", EXTENDED, *LOGGING_SETTINGS)


@dataclass(frozen=True)
class Extension:
    """What a continued run takes from the run before.

    Args:
        rounds: The number of rounds that the run had before.
        found: The identity in its checkpoint; None if the checkpoint is already that of the continued run.
        sigma: The noise of one client; None without privacy.
    """

    rounds: int
    found: dict[str, Any] | None
    sigma: float | None

    def previous(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the identity that the run before must have had, given the identity of the one that continues it."""
        if self.found is None:
            return None
        same = {name: value for name, value in identity.items() if name not in _MAY_DIFFER}
        held: dict[str, Any] = json.loads(json.dumps(same))
        return {**held, **{name: self.found[name] for name in _MAY_DIFFER if name in self.found}}

    def facts(self) -> dict[str, Any]:
        """Return the entry of the continued run's identity."""
        return {EXTENDED: {"rounds": self.rounds, "sigma": self.sigma}}


def logging_of(plan: Plan, found: Mapping[str, Any] | None, given: Mapping[str, Any]) -> Plan:
    """Return the plan with the rows and evaluations of the run in the folder, where the caller left them open.

    Args:
        plan: The plan of the continued run.
        found: The identity in the folder's checkpoint.
        given: The settings `log_every` and `evaluate_every` as the caller gave them.
    """
    if found is None or (EXTENDED not in found and not _more_rounds(plan, found)):
        return plan
    kept = {name: found[name] for name, value in given.items() if value is None and isinstance(found.get(name), int)}
    return dataclasses.replace(plan, **kept)


def extension_of(
    found: Mapping[str, Any] | None, done: int, identity: Mapping[str, Any], plan: Plan, folder: Path | None
) -> Extension | None:
    """Return how the run in a folder is continued; None if it is not, or is another run, which its checkpoint refuses.

    Args:
        found: The identity in the folder's checkpoint.
        done: The number of rounds that are done there.
        identity: The identity of the run that is asked for, without its data, which the checkpoint compares.
        plan: Its plan.
        folder: The folder, where this process has it.
    """
    if found is None:
        return None
    kept = found.get(EXTENDED)
    if isinstance(kept, Mapping) and found.get("rounds") == plan.rounds:
        return Extension(int(kept["rounds"]), None, kept.get("sigma"))
    ours = json.loads(json.dumps(dict(identity)))
    if not _more_rounds(plan, found) or any(
        value != found.get(name) for name, value in ours.items() if name not in _MAY_DIFFER
    ):
        return None
    before = int(found["rounds"])
    if _but_epsilon(ours["privacy"]) != _but_epsilon(found["privacy"]):
        return None
    if done < before:
        raise UsageError(
            f"{folder} holds a run of {before} rounds, of which {done} are done; finish it before you ask for "
            f"{plan.rounds} rounds, or choose another folder"
        )
    if _first_sizes(plan, before) != found.get("lr"):
        raise UsageError(
            f"{folder} holds a run of {before} rounds with other step sizes, lr = {found.get('lr')}; a run goes on "
            "with the step sizes it had, so give lr as a number, or as a function that begins with them"
        )
    return Extension(before, dict(found), None)


def with_noise_before(extension: Extension, privacy: Privacy, folder: Path) -> Extension:
    """Return the extension of a private run with the noise that its ledger records."""
    from ..privacy.hash_chain import LedgerDamaged, read_chain

    if extension.sigma is not None:
        return extension
    if privacy.replay is not None or "noise_schedule" in privacy.to_dict():
        raise UsageError("replay and a noise_schedule are made for a number of rounds; more rounds need a new run")
    if privacy.correlates:
        raise UsageError("the coefficients of noise_bands are made for a number of rounds; more rounds need a new run")
    try:
        lines = read_chain(folder / "ledger.jsonl").lines
    except (LedgerDamaged, OSError) as error:
        raise UsageError(str(error)) from None
    noise = {float(line["sigma"]) for line in lines if line.get("kind") == "release"}
    if len(noise) != 1:
        raise UsageError(f"{folder / 'ledger.jsonl'} does not have one noise for all rounds; start a new run")
    return dataclasses.replace(extension, sigma=noise.pop())


def refuse_hidden_growth(extension: Extension, mechanism: Mechanism, folder: Path) -> None:
    """Refuse more rounds whose ε exceeds the target that the caller states."""
    planned, target = mechanism.calibrated.epsilon, mechanism.privacy.budget
    if planned <= target * (1 + 1e-9):
        return
    needed = math.ceil(planned * 1000) / 1000
    raise UsageError(
        f"{folder} holds a run of {extension.rounds} rounds with sigma = {mechanism.sigma:.4g}; "
        f"{mechanism.setting.rounds} rounds with this noise amount to epsilon = {needed:g}, above {target:g}; "
        f"to accept that, ask for epsilon = {needed:g}, or start a new run in another folder, "
        "whose epsilon adds to this one's"
    )


def _more_rounds(plan: Plan, found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("rounds"), int) and found["rounds"] < plan.rounds


def _but_epsilon(privacy: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if privacy is None else {name: value for name, value in privacy.items() if name != "epsilon"}


def _first_sizes(plan: Plan, rounds: int) -> Any:
    """Return the step size of the first rounds as an identity has it."""
    if isinstance(plan.lr, float):
        return plan.lr
    sizes = list(plan.lr[:rounds]) if isinstance(plan.lr, tuple) else [plan.lr(k) for k in range(rounds)]
    return f"a schedule, {hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]}"
