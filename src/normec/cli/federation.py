"""normec federation: federations over Flower, with a template, a local trial, parties and their accounts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options as o

if TYPE_CHECKING:
    from ..experiments.runs import Result

app = typer.Typer(help="Federations over Flower, in which each party enforces its own privacy.", no_args_is_help=True)

Superlink = Annotated[str, typer.Option(help="HOST:PORT of the server's SuperLink.", show_default=False)]
Authority = Annotated[Path, typer.Option(help="Certificate of the authority that signed the server's.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.", show_default=False)],
) -> int:
    """Write a Flower app that runs as it is, as a template for your own model and data."""
    from ..federation.flower.scaffold import write_app

    for path in write_app(folder):
        print(path)
    print(f"Put your model and data into {folder / 'learning' / 'task.py'}; try it with:")
    print(f"  normec federation local --app {folder} --parties 5")
    return 0


@o.command(app, "local", only=("rounds", "seed", "private", "epsilon", "delta", "unit", "trust"))
def local(
    app_: Annotated[
        Path | None, typer.Option("--app", help="A folder made by `init` (default: an example).", show_default=False)
    ] = None,
    data: Annotated[
        Literal["heart-disease", "digits"],
        typer.Option(help="The example, if there is no app: four hospitals, or handwritten digits."),
    ] = "heart-disease",
    parties: Annotated[
        int | None,
        typer.Option(min=1, help="Number of parties (default: 4 hospitals, otherwise 5).", show_default=False),
    ] = None,
    set_: o.Set = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="One policy for all parties (default: one that accepts this run).", show_default=False),
    ] = None,
    flower_nodes: Annotated[
        bool,
        typer.Option(
            "--flower-nodes", help="Use Flower's SuperNodes, which run the app that the server sends; slower."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/federation"),
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    **flags: Any,
) -> int:
    """Run a whole federation on this machine: a SuperLink and one process per party, with TLS.

    Without options, four hospitals train a model whose secure sums protect every patient with ε = 1. No process is left
    running. The run has a folder like any other; the same command continues after a stop.
    """
    _require_flower()
    from ..experiments.build import PRIVATE_SETTINGS
    from ..federation.local.federation import LocalOptions, run
    from ..settings.config import FEDERATED
    from .federation_display import federation_display, show_parties
    from .train import show_result

    config = o.overrides(set_, flags)
    if config.get("private") is False:  # then the app's privacy settings do not apply
        config = {**dict.fromkeys((name for name in PRIVATE_SETTINGS if name in FEDERATED), ""), **config}
    options = LocalOptions(app_, out, parties, config, policy, flower_nodes, data)
    display = federation_display(quiet)
    try:
        with _StopFlag() as stop_flag:
            result = run(options, [display], lambda: stop_flag.unset, display.parties)
    finally:
        display.close()
    if as_json:
        print(json.dumps({"folder": str(result.folder), **result.summary, **_figures(result)}))
    else:
        show_result(result)
        show_parties(display.statuses)
    if result.summary["status"] == "stopped":
        print(f"{result.summary['stopped']}; see {out}/federation/parties/*/events.jsonl", file=sys.stderr)
        return 1
    return 0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(context: typer.Context) -> int:
    """Run Flower's SuperLink so that only its owner on this machine controls it; takes flower-superlink's options."""
    _require_flower()
    from ..federation.flower.access_control import run_superlink

    run_superlink(context.args)
    return 0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(context: typer.Context) -> int:
    """Run Flower's SuperNode, which runs the server's app, so that only its owner can use its port.

    Takes flower-supernode's options.
    """
    _require_flower()
    from ..federation.flower.access_control import run_flower_supernode

    run_flower_supernode(context.args)
    return 0


@app.command()
def party(
    superlink: Superlink,
    root_certificates: Authority,
    key: Annotated[Path, typer.Option(help="The party's private key (ssh-keygen -t ecdsa -b 384).")],
    app_: Annotated[Path, typer.Option("--app", help="The party's copy of the app; only this code runs.")],
    folder: Annotated[Path, typer.Option(help="Folder of the party's memory and account.")],
    policy: Annotated[Path, typer.Option(help="The party's policy.")],
    partition: Annotated[int, typer.Option(min=0, help="Passed to the app's data(), which defines its meaning.")] = 0,
    partitions: Annotated[int, typer.Option(min=1, help="Passed to the app's data() as well.")] = 1,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to keep trying if the server does not admit the party.")
    ] = 150.0,
) -> int:
    """Take part as one party with your own copy of the app; the server's copy is not downloaded."""
    _require_flower()
    from ..federation.flower.supernode import limits_of, load_client, run_supernode
    from ..federation.protocol.policy import load_policy

    allowed = limits_of(load_policy(policy))  # report a mistake now, not at the first request
    config = {"partition-id": partition, "num-partitions": partitions, "folder": str(folder), "policy": str(policy)}
    run_supernode(load_client(app_), superlink, root_certificates, key, config, allowed, patience)
    return 0


@app.command()
def identity(
    path: Annotated[
        Path, typer.Argument(help="The file of the party's key, such as identity.pem.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="The name of the party in the roster.", show_default=False)],
) -> int:
    """Create a party's key for secure sums, unless it exists, and print its entry of the roster."""
    from ..federation.secure_sum.keys import Identity
    from ..federation.secure_sum.roster import Member, entry

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        Identity.generate().save(path)
    print(entry(Member(name, Identity.load(path).public)), end="")
    print("Send this entry to the other parties, and compare the fingerprint by telephone.", file=sys.stderr)
    return 0


@app.command()
def roster(
    path: Annotated[Path, typer.Argument(help="A roster file.", show_default=False)],
    as_json: o.Json = False,
) -> int:
    """Show the parties of a roster with the fingerprints of their keys, and the digest that all must share."""
    from ..federation.secure_sum.roster import Roster
    from .output import show

    found = Roster.load(path)
    if as_json:
        parties = [{"name": member.name, "fingerprint": member.fingerprint} for member in found.members]
        print(json.dumps({"parties": parties, "digest": found.digest.hex()}))
        return 0
    rows = [(str(number), member.name, member.fingerprint) for number, member in enumerate(found.members)]
    show(rows, (">number", "party", "fingerprint"), title=f"roster {found.digest.hex()[:16]}")
    return 0


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="The party's folder.", show_default=False)],
    policy: Annotated[
        Path | None, typer.Option(help="The party's policy; FOLDER/policy.toml by default.", show_default=False)
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Show what a party has spent: ε, δ and messages, in total and per run."""
    from ..federation.protocol.policy import load_policy
    from ..federation.protocol.spending import spending
    from ..report.formatting import epsilon
    from .output import show

    found = spending(folder, load_policy(policy if policy is not None else folder / "policy.toml"))
    if as_json:
        print(json.dumps(found))
        return 0
    budget = "no budget" if found["budget"] is None else f"of {found['budget']:g}"
    limits = {"record": f" of {found['record_budget']:g}"} if found["record_budget"] is not None else {}
    rows = [
        ("ε spent", f"{epsilon(found['epsilon'])} {budget}, at δ = {found['delta']:g}"),
        ("protected", f"{found['unit']}, {found['relation']}"),
        *(
            (f"ε per {unit}", f"{epsilon(spent)}{limits.get(unit, '')}")
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
        rows.append((f"run {run}", f"ε = {epsilon(part['epsilon'])}, {part['releases']} messages with noise"))
    show(rows, title=found["ledger"])
    return 0


def _figures(result: Result) -> dict[str, Any]:
    """The figures by which a federation is judged, beside the summary of its run."""
    summary, final = result.summary, result.summary["final"]
    spent, settings = summary.get("privacy") or {}, summary["config"]
    private = {name: settings.get(name) if spent else None for name in ("unit", "trust")}
    done = summary["round"]
    return {
        "accuracy": final.get("accuracy"),
        "accuracy_mean_over_parties": final.get("accuracy_mean_over_clients"),
        "epsilon": spent.get("epsilon"),
        "delta": spent.get("delta"),
        **private,
        "seconds_per_round": summary["timings"]["total"] / done if done and "timings" in summary else None,
    }


class _StopFlag:
    """`unset` is True until Ctrl-C or SIGTERM; a flag, because an exception might be raised where it is swallowed."""

    def __init__(self) -> None:
        self.unset = True

    def __enter__(self) -> _StopFlag:
        import signal

        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        import signal

        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        self.unset = False


def _require_flower() -> None:
    import os

    from ..errors import UsageError

    # Flower reads these when it is imported; it then sends no telemetry and checks for no updates.
    os.environ.update({"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"})
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError("a federation needs Flower: pip install 'normec[federation]'") from None
