"""The commands that operate a federation, for the owners of a server and of a party: checks, status, terms, backups."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o

if TYPE_CHECKING:
    from ..federation.flower.signed_terms import SignedTerms

PartyPath = Annotated[
    Path | None, typer.Argument(help="The party's file, as `init` writes one (party.toml).", show_default=False)
]
PartyFilePath = Annotated[Path, typer.Argument(help="The party's file (party.toml).", show_default=False)]
TermsPath = Annotated[Path, typer.Argument(help="The file of terms.", show_default=False)]

terms = typer.Typer(help="The terms of a run, in a file that all parties sign.", no_args_is_help=True)


def doctor(file: PartyFilePath, as_json: o.Json = False) -> int:
    """Check a party before its first round.

    Key, certificates, clock, versions, policy, data, ledger and terms are checked. Each check prints one line, with
    a cure if it found a problem. The exit code is 1 if there is a problem.
    """
    require_flower()
    from ..federation.flower.doctor import Finding, examine
    from ..federation.flower.party_file import load_party_file
    from .output import printable

    found: list[Finding] = []
    for finding in examine(load_party_file(file)):
        found.append(finding)
        if not as_json:
            print(f"{finding.state:<8} {finding.check:<16} {printable(finding.text)}", flush=True)
    problems = sum(one.state == "problem" for one in found)
    if as_json:
        print(json.dumps({"ok": not problems, "findings": [dataclasses.asdict(one) for one in found]}))
    else:
        print(f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems: the party can take part")
    return 1 if problems else 0


def status(
    path: Annotated[
        Path,
        typer.Argument(help="At the server, the folder of the run; at a party, its party.toml.", show_default=False),
    ],
    database: Annotated[
        Path | None,
        typer.Option(help="The SuperLink's --database, which knows who is online.", show_default=False),
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Show how a federation stands.

    At the server: rounds, parties and their ε. At a party: what it has spent.
    """
    if path.is_dir():
        return _status_of_run(path, database, as_json)
    from ..errors import UsageError
    from ..federation.flower.party_file import load_party_file
    from ..federation.protocol.departure import departures
    from ..federation.protocol.policy import load_policy
    from ..federation.protocol.spending import spending

    if database is not None and path.exists():
        raise UsageError("--database belongs to the server; give the folder of the run with it")
    if database is not None:
        raise UsageError(f"there is no folder {path}; the server creates it when all parties of the run are online")
    own = load_party_file(path)
    found = {**spending(own.folder, load_policy(own.policy)), "left": departures(own.folder)}
    if as_json:
        print(json.dumps(found))
        return 0
    show_spending(found)
    return 0


def _status_of_run(folder: Path, database: Path | None, as_json: bool) -> int:
    from ..federation.protocol.run_status import run_status
    from ..privacy.display import shown_delta, shown_epsilon
    from .output import printable, show

    found, online = run_status(folder), {}
    if database is not None:
        from ..federation.flower.superlink_database import party_activity

        online = party_activity(database)
    if as_json:
        table = dataclasses.asdict(found)
        for party in table["parties"]:
            seen = online.get(party["name"])
            party |= {"online": seen.online, "last_seen": seen.last_seen} if seen is not None else {}
        print(json.dumps(table))
        return 0
    rows = []
    for one in found.parties:
        seen = online.get(one.name)
        here = "" if database is None else "not registered" if seen is None else "online" if seen.online else "offline"
        spent = "" if one.epsilon is None else shown_epsilon(one.epsilon)
        events = ", ".join(f"{name}: {count}" for name, count in one.events.items())
        last = _when(seen.last_seen) if seen is not None else ""
        rows.append((one.name, here, last, str(one.accepted), str(one.behind), spent, events))
    rounds = f" of {found.rounds}" if found.rounds is not None else ""
    spent = ""
    if found.epsilon is not None and found.delta is not None:
        spent = f", ε = {shown_epsilon(found.epsilon)} per {found.unit} at δ = {shown_delta(found.delta)}"
    columns = ("party", "now", "last seen", ">messages", ">rounds behind", ">ε in this run", "events")
    show(rows, columns, title=f"{found.name}: {found.status}, round {found.round}{rounds}{spent}")
    if found.last_event is not None:
        print(printable(f"last event: {_in_words(found.last_event)}"))
    return 0


def _in_words(event: Mapping[str, Any]) -> str:
    """A line of the journal as text: ``away, round 3, parties a and b, at 2026-05-04 03:02:01 UTC``."""
    parts = [str(event.get("event"))]
    for name, value in event.items():
        if name not in ("event", "time"):
            parts.append(f"{name} {' and '.join(map(str, value)) if isinstance(value, list) else value}")
    return ", ".join([*parts, *([f"at {_when(event['time'])}"] if "time" in event else [])])


def _when(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def backup(
    file: PartyFilePath,
    archive: Annotated[Path, typer.Argument(help="The new archive (.tgz).", show_default=False)],
) -> int:
    """Save a party's folder to an archive. Meanwhile no request is answered."""
    from ..federation.flower.party_file import load_party_file
    from ..federation.protocol.backup import back_up
    from ..federation.protocol.policy import load_policy

    own = load_party_file(file)
    head = back_up(own.folder, load_policy(own.policy), archive)
    print(f"{archive} holds {own.folder} with {head.lines} lines of its ledger; the party's key is not in it")
    return 0


def restore(
    file: PartyFilePath,
    archive: Annotated[Path, typer.Argument(help="An archive that `backup` wrote.", show_default=False)],
    charge_lost: Annotated[
        bool,
        typer.Option(
            "--charge-lost",
            help="Restore although messages may be missing in the backup, and charge the whole budget for them.",
        ),
    ] = False,
) -> int:
    """Restore a party's folder. A ledger never goes back: what is missing in the backup is charged, or refused."""
    from ..federation.flower.party_file import load_party_file
    from ..federation.protocol.backup import restore as restored
    from ..federation.protocol.policy import load_policy
    from ..privacy.display import shown_epsilon

    own = load_party_file(file)
    policy = load_policy(own.policy)
    found = restored(own.folder, policy, archive, charge_lost=charge_lost)
    spent = shown_epsilon(found.epsilon, 6)
    print(f"{own.folder} is restored, with {found.lines} lines of its ledger and ε = {spent} spent")
    if found.charged:
        print("The whole budget counts as spent. The party refuses every request until its owner raises epsilon.")
    return 0


def leave(
    file: PartyFilePath,
    run: Annotated[str, typer.Argument(help="The name of the run.", show_default=False)],
) -> int:
    """Leave a run for good. The party refuses every later request of it, and what was sent stays spent."""
    from ..federation.flower.party_file import load_party_file
    from ..federation.flower.signed_terms import SignedTerms, files_of
    from ..federation.protocol.account import read_releases
    from ..federation.protocol.departure import leave as depart
    from ..federation.protocol.policy import load_policy
    from ..federation.protocol.wire import run_name

    own = load_party_file(file)
    policy = load_policy(own.policy)
    known = set(policy.runs) - {"any"}
    known |= {SignedTerms.load(one).run for one in files_of(own.terms)} if own.terms is not None else set()
    known |= set(map(run_name, read_releases(own.folder, policy.witness).runs())) if own.folder.is_dir() else set()
    depart(own.folder, run, known)
    print(f"This party has left run {run} and refuses it from now on. Tell the others: they decide whether to go on")
    print("under the same terms, if min_parties allows it, or to agree on new terms without this party.")
    return 0


@terms.command()
def new(
    app: Annotated[Path, typer.Argument(help="The folder of the app.", show_default=False)],
    party: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=KEY.pub", help="A party and its public key; repeat it, in the order of registration."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file of settings that differ from those of the app.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The new file.")] = Path("terms.json"),
    set_: o.Set = None,
) -> int:
    """Write the terms of a run. They come from an app, its settings and the keys of the parties."""
    require_flower()
    from ..errors import UsageError
    from ..federation.flower.new_terms import new_terms, parse_parties
    from ..system.files import read_toml

    if out.exists():
        raise UsageError(f"{out} exists; terms are not changed after they are written, so choose another name")
    try:
        changes = read_toml(config) if config is not None else {}
    except FileNotFoundError:
        raise UsageError(f"there is no file of settings {config}") from None
    made = new_terms(app, parse_parties(party), {**changes, **o.overrides(set_, {})})
    made.save(out)
    _show_terms(made)
    print(f"{out}: send it to all parties; each runs `normec federation terms sign {out.name} --key KEY`")
    return 0


@terms.command("show")
def show_(
    file: TermsPath,
    party: Annotated[
        Path | None, typer.Option(help="A party file: what would the run cost this party?", show_default=False)
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Show the terms of a run and who has signed them. With --party, also what it would cost a party, or why not."""
    require_flower()
    from ..federation.flower.signed_terms import SignedTerms

    found = SignedTerms.load(file)
    if as_json:
        print(json.dumps({"run": found.run, "digest": found.digest, "signatures": found.state()}))
        return 0
    _show_terms(found)
    if party is not None:
        from ..federation.flower.doctor import would_cost
        from ..federation.flower.party_file import load_party_file
        from ..federation.flower.supernode import read_private_key
        from ..federation.protocol.policy import load_policy

        own = load_party_file(party)
        agreed = found.party_of(read_private_key(own.key).public_key()).agreed
        print(would_cost(agreed, load_policy(own.policy), own.folder))
    return 0


@terms.command()
def sign(
    file: TermsPath,
    key: Annotated[Path, typer.Option(help="The party's private key.")],
) -> int:
    """Sign the terms of a run with a party's key. Read them first: a signature is a promise."""
    require_flower()
    from ..federation.flower.signed_terms import SignedTerms
    from ..federation.flower.supernode import read_private_key

    found = SignedTerms.load(file)
    private = read_private_key(key)
    name = found.party_of(private.public_key()).name
    found.sign(private).save(file)
    print(f"{name} has signed run {found.run}; the fingerprint of the terms is {found.digest[:32]}")
    return 0


@terms.command()
def verify(file: TermsPath, as_json: o.Json = False) -> int:
    """Check all signatures under the terms of a run. The exit code is 1 if one is missing or wrong."""
    require_flower()
    from ..federation.flower.signed_terms import SignedTerms

    found = SignedTerms.load(file)
    state = found.state()
    complete = all(one == "signed" for one in state.values())
    if as_json:
        print(json.dumps({"run": found.run, "digest": found.digest, "complete": complete, "signatures": state}))
    else:
        for name, one in state.items():
            print(f"{one:<8} {name}")
        print(f"fingerprint of the terms: {found.digest[:32]}")
    return 0 if complete else 1


def _show_terms(found: SignedTerms) -> None:
    from ..privacy.display import shown_delta, shown_epsilon
    from .output import show

    first = found.parties[0].agreed
    privacy, seeded = first.privacy, first.privacy.noise == "seeded"
    noise = {one.name: f"{one.agreed.privacy.sigma:.4g}" for one in found.parties}
    least = {one.name: f"{one.agreed.privacy.least_sigma:.4g}" for one in found.parties if one.agreed.sigmas}
    rows = [
        ("method", f"{first.method.name} {first.method.spec}"),
        ("model", f"{first.parameters} parameters"),
        ("rounds", str(first.plan.rounds)),
        ("parties", ", ".join(f"{one.name} ({one.node})" for one in found.parties)),
        ("needed in a round", str(found.settings.get("min_parties", len(found.parties)))),
    ]
    if privacy.noise == "none":
        rows.append(("privacy", "none: the run has no noise"))
    else:
        rows += [
            ("protected", f"{privacy.unit}, {privacy.relation}, trust {privacy.trust}"),
            ("kind of noise", "seeded: a simulation, which protects nobody" if seeded else privacy.noise),
            ("noise σ", ", ".join(f"{name}: {sigma}" for name, sigma in noise.items())),
            ("bound of a message", f"{privacy.bound:g}"),
        ]
        rows += _record_rows(found)
        if least:
            rows.append(("smallest σ of a round", ", ".join(f"{name}: {sigma}" for name, sigma in least.items())))
        spent, unknown = found.epsilon(), "computed by a party, with its method and its policy: give --party"
        of_all = unknown if spent is None else f"{shown_epsilon(spent)} at δ = {shown_delta(privacy.delta)}"
        rows.append(("ε of all rounds", of_all))
    rows += [
        ("code of the app", found.app[:32]),
        ("made with", ", ".join(f"{name} {number}" for name, number in found.versions.items())),
        ("signatures", ", ".join(f"{name}: {state}" for name, state in found.state().items())),
        ("fingerprint", found.digest[:32]),
    ]
    show(rows, title=f"terms of run {found.run}")


def _record_rows(found: SignedTerms) -> list[tuple[str, str]]:
    """Return what the terms say about the records of the parties, where single records are clipped."""
    counted = {one.name: one.agreed.plan.records for one in found.parties if one.agreed.plan.records is not None}
    if not counted:
        return []
    first = next(iter(counted.values()))
    numbers = ", ".join(f"{name}: {records.divisor:g}" for name, records in counted.items())
    clip = "auto" if first.clip is None else f"{first.clip:g}"
    rows = [("records (public)", numbers), ("clip of a record", clip + ", for each layer" * first.by_layer)]
    return rows if first.batch_rate is None else [*rows, ("share of records drawn", f"{first.batch_rate:g}")]


def show_spending(found: dict[str, Any]) -> None:
    """Print what a party has spent, as `spending` returns it."""
    from ..privacy.display import shown_delta, shown_epsilon
    from .output import show

    budget = "no budget" if found["budget"] is None else f"of {found['budget']:g}"
    limits = {"record": f" of {found['record_budget']:g}"} if found["record_budget"] is not None else {}
    rows = [
        ("ε spent", f"{shown_epsilon(found['epsilon'])} {budget}, at δ = {shown_delta(found['delta'])}"),
        ("protected", f"{found['unit']}, {found['relation']}"),
        *(
            (f"ε per {unit}", f"{shown_epsilon(spent)}{limits.get(unit, '')}")
            for unit, spent in found["epsilons"].items()
            if unit != found["unit"]
        ),
        ("messages with noise", f"{found['releases']}, of which {found['recovered']} were charged after a lost disk"),
        (
            "of these",
            f"{found['central']} left bare under central trust, {found['seeded']} with seeded noise (protects nobody)",
        ),
        ("messages without noise", str(found["without_noise"])),
        ("failed computations", f"{found['failed']}, each answered with noise only and paid for"),
        ("requests refused", ", ".join(f"{why}: {n}" for why, n in found["refusals"].items()) or "none"),
    ]
    if found["journal_full"]:
        rows.append(
            ("events.jsonl", "is full: later failures and refusals are not counted; move the file away to count again")
        )
    for run, part in found["runs"].items():
        rows.append((f"run {run}", f"ε = {shown_epsilon(part['epsilon'])}, {part['releases']} messages with noise"))
    show(rows, title=found["ledger"])
    for run, when in found.get("left", {}).items():
        print(f"left run {run} on {when}")


def require_flower() -> None:
    """Turn Flower's telemetry off, and raise `UsageError` if Flower is not installed."""
    import os

    from ..errors import UsageError

    # Flower reads these when it is imported; it then sends no telemetry and checks for no updates.
    os.environ.update({"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"})
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError("a federation needs Flower: pip install 'normec[federation]'") from None
