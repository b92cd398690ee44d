"""Make the terms of a run, which nobody has signed yet, from the requests that the server would send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...system.files import read_bytes
from ..protocol.agreed_terms import AgreedTerms
from ..protocol.coordinator import Coordinator
from ..protocol.wire import NAME
from . import settings as settings_of_run
from .definition import definition_of
from .run_parties import name_of
from .signed_terms import Signatory, SignedTerms, digest_of_app, public_key, raw_key
from .supernode import load_task
from .task import first_model
from .versions import versions


def new_terms(app: Path, keys: Mapping[str, Path], changes: Mapping[str, Any]) -> SignedTerms:
    """The terms of a run, without signatures.

    Args:
        app: The folder of the app; its pyproject.toml has the settings.
        keys: The public key file of each party by name, in the order in which the server registers them.
        changes: Settings that differ from those of the app.

    Raises:
        UsageError: A setting, a key or the app has a mistake.
    """
    stated = changes.get("parties", len(keys))
    if stated != len(keys):
        raise UsageError(
            f"the settings have parties = {stated}, got {len(keys)} with --party; name every party, or change parties"
        )
    given = {**settings_of_run.app_config(app), **changes, "parties": len(keys)}
    settings = settings_of_run.read(given)
    if settings.summed:
        raise UsageError(
            "these terms are for single messages, and the run has secure sums; its parties sign the terms of a sum "
            "when it begins, and need no file"
        )
    names, parties = [], []
    for name, path in keys.items():
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be a party's name; use at most 64 letters, digits, '.', '-' and '_'")
        try:
            text = read_bytes(path, 2**16).decode("ascii", "replace").strip()
        except FileNotFoundError:
            raise UsageError(
                f"there is no public key {path} of {name}; name the .pub file that ssh-keygen wrote"
            ) from None
        node = name_of(raw_key(public_key(text.encode(), str(path))))
        if node in names:
            raise UsageError(f"{name} has the same key as another party; every party needs its own")
        names.append(node)
        parties.append((name, " ".join(text.split()[:2])))
    method = settings_of_run.located(settings.run.method, app)
    x0 = first_model(load_task(app))
    built, plan, further = definition_of(settings, method, len(x0))
    coordinator = Coordinator(built, x0, names, plan, **further)  # without a folder it writes nothing
    mechanism, requests = coordinator.mechanism, coordinator.requests()
    if len(requests) < len(names):
        raise UsageError(coordinator.stopped or "the run cannot begin under these settings")
    signatories = []
    for (name, key), node in zip(parties, names, strict=True):
        request, sigmas = requests[node], tuple[float, ...]()
        if mechanism is not None and request.privacy.least_sigma is not None:
            ratio = request.privacy.sigma / mechanism.sigma_at(0)
            sigmas = tuple(ratio * mechanism.sigma_at(k) for k in range(coordinator.plan.rounds))
        signatories.append(Signatory(name, key, AgreedTerms.of(request, sigmas)))
    coordinator.close()
    used = {name: value for name, value in given.items() if value != "" and name != "out"}
    return SignedTerms(settings.name, digest_of_app(app), used, versions(), tuple(signatories))


def parse_parties(given: Sequence[str]) -> dict[str, Path]:
    """Parse 'NAME=FILE' entries, in their order."""
    found: dict[str, Path] = {}
    for text in given:
        name, sign, path = text.partition("=")
        if not sign or not name or not path or name in found:
            raise UsageError(f"--party must be NAME=PUBLIC_KEY_FILE, each name once, got {text!r}")
        found[name] = Path(path).expanduser()
    return found
