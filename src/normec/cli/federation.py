"""normec federation: federations over Flower, with a template, a local trial, parties and their accounts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import federation_operations as operations
from . import options as o
from .federation_operations import PartyPath, require_flower

if TYPE_CHECKING:
    from ..training.saved_run import Result

app = typer.Typer(help="Run federations over Flower. Each party enforces its own privacy.", no_args_is_help=True)

NOT_ADMITTED, UNREACHABLE, SPENT = 3, 4, 5  # exit codes of `party`, beside those of every command

for _command in (operations.doctor, operations.status, operations.backup, operations.restore, operations.leave):
    app.command()(_command)
app.add_typer(operations.terms, name="terms")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.", show_default=False)],
    table: Annotated[
        Path | None,
        typer.Option(
            help="Schema of the parties' tables (CSV or Parquet): the app then needs no code.", show_default=False
        ),
    ] = None,
) -> int:
    """Write a Flower app, a template for your own model and data."""
    from ..federation.flower.scaffold import write_app

    for path in write_app(folder, schema=table):
        print(path)
    if table is not None:
        print(f"Each party names its table in {folder / 'party.toml'}; the settings are in {folder / 'pyproject.toml'}")
        return 0
    print(f"Put your model and data into {folder / 'learning' / 'task.py'}; try it with:")
    print(f"  normec federation local --app {folder} --parties 5")
    return 0


@o.command(app, "local", federated=True, defaults="that of the app or example")
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
        typer.Option(
            min=1, help="Number of parties (default: 4 hospitals, one for each table, or 5).", show_default=False
        ),
    ] = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option(
            "--table",
            help="Table of a party, CSV or Parquet, for an app made by `init --table`; once for each party.",
            show_default=False,
        ),
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
    """Run a whole federation on this machine.

    There is a SuperLink and one process per party, with TLS. Without options, four hospitals train a model whose
    secure sums protect every patient with ε = 1. A method other than that of the app or example runs with its usual
    settings. No process is left running. The run has a folder like any other; the same command continues after a
    stop.
    """
    require_flower()
    from ..errors import UsageError
    from ..experiments.build import PRIVATE_SETTINGS
    from ..federation.flower.settings import named_by_a_command
    from ..federation.local.federation import LocalOptions, run
    from ..settings.config import FEDERATED
    from .federation_display import federation_display, show_parties
    from .train import show_result

    if tables and app_ is None:
        raise UsageError("--table is for an app made by `normec federation init --table`; name its folder with --app")
    config = o.overrides(set_, flags)
    if config.get("private") is False:  # then the app's privacy settings do not apply
        config = {**dict.fromkeys((name for name in PRIVATE_SETTINGS if name in FEDERATED), ""), **config}
    if "method" in config:
        config["method"] = named_by_a_command(str(config["method"]), app_)
    options = LocalOptions(app_, out, parties, config, policy, flower_nodes, data, tables or ())
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
    """Run Flower's SuperLink so that only its owner controls it. Takes flower-superlink's options."""
    require_flower()
    from ..federation.flower.programs import run_superlink

    run_superlink(context.args)
    return 0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(context: typer.Context) -> int:
    """Run Flower's SuperNode, which runs the server's app.

    Only its owner can use its port. Takes flower-supernode's options.
    """
    require_flower()
    from ..federation.flower.programs import run_flower_supernode

    run_flower_supernode(context.args)
    return 0


@app.command()
def party(
    file: PartyPath = None,
    superlink: Annotated[
        str | None, typer.Option(help="HOST:PORT of the server's SuperLink.", show_default=False)
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(help="Certificate of the authority that signed the server's.", show_default=False),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="The party's private key (ssh-keygen -t ecdsa -b 384).", show_default=False)
    ] = None,
    app_: Annotated[
        Path | None, typer.Option("--app", help="The party's copy of the app; only this code runs.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the party's memory and account.", show_default=False)
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="The party's policy.", show_default=False)] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The party's table, CSV or Parquet (default: the app's data()).", show_default=False),
    ] = None,
    terms: Annotated[
        Path | None,
        typer.Option(help="The terms that all parties signed; others are refused (default: none).", show_default=False),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            min=0, help="Passed to the app's data(), which defines its meaning (default: 0).", show_default=False
        ),
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Passed to the app's data() as well (default: 1).", show_default=False)
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds to keep trying if the server does not admit the party (default: 150).",
            show_default=False,
        ),
    ] = None,
    reach_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds to wait for a server that cannot be reached (default: for ever).", show_default=False
        ),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="text|json", help="Format of the log (default: text).", show_default=False)
    ] = None,
) -> int:
    """Take part as one party, with your own copy of the app.

    The server's copy is not downloaded. A party file, as `init` writes one, holds the options; those that are given
    here take precedence. Exit codes: 0 stopped by a signal, 1 failure, 2 a mistake in the configuration, 3 the
    server does not admit the party, 4 the server cannot be reached, 5 the budget is spent.
    """
    import math

    require_flower()
    from ..federation.flower.party_file import load_party_file
    from ..federation.flower.signed_terms import agreed_by_all
    from ..federation.flower.supernode import NotAdmitted, Unreachable, limits_of, load_client, run_supernode
    from ..federation.protocol.policy import load_policy
    from .service_log import log_to_stdout

    given = {
        "superlink": superlink,
        "root_certificates": root_certificates,
        "key": key,
        "app": app_,
        "folder": folder,
        "policy": policy,
        "data": data,
        "terms": terms,
        "partition": partition,
        "partitions": partitions,
        "patience": patience,
        "log_format": log_format,
    }
    own = load_party_file(file, given)
    log_to_stdout(own.log_format)
    rules = load_policy(own.policy)  # report a mistake now, not at the first request
    if own.terms is not None:  # before any code of the app runs, which could prevent a later check
        agreed_by_all(own.terms, own.key, own.app)
    client = load_client(own.app)
    if own.data is not None:
        _check_table(own.app, own.data)
    spent = _spent_budget(own.folder, rules)
    if spent:
        return _stop(spent, SPENT)
    reach = math.inf if reach_seconds is None else reach_seconds
    try:
        run_supernode(
            client,
            own.superlink,
            own.root_certificates,
            own.key,
            own.node_config,
            limits_of(rules),
            own.patience,
            reach,
        )
    except NotAdmitted as error:
        return _stop(str(error), NOT_ADMITTED)
    except Unreachable as error:
        return _stop(str(error), UNREACHABLE)
    return 0


@app.command()
def identity(
    path: Annotated[
        Path, typer.Argument(help="The file of the party's key, such as identity.pem.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="The name of the party in the roster.", show_default=False)],
) -> int:
    """Create a party's key for secure sums, if it has none. Prints its entry of the roster."""
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
    """Show the parties of a roster. Prints the fingerprints of their keys, and the digest that all must share."""
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


def _stop(message: str, code: int) -> int:
    """Log why a party's process ends, and return its exit code."""
    import logging

    logging.getLogger("normec.party").error(message)
    return code


def _check_table(app: Path, data: Path) -> None:
    """Read the party's table once, so that a mistake in it is reported before the party takes part."""
    from ..data.table import note_counts, read_table
    from ..federation.flower.scaffold import schema_of

    note_counts(data, read_table(data, schema_of(app)).counts)


def _spent_budget(folder: Path, policy: Any) -> str:
    """Why no run can ask this party for anything more; empty if its budget is not used up."""
    from ..federation.protocol.spending import spending
    from ..privacy.display import shown_epsilon

    if policy.epsilon is None or not folder.is_dir():
        return ""
    found = spending(folder, policy)
    if found["epsilon"] < policy.epsilon:
        return ""
    spent = shown_epsilon(found["epsilon"], 6)
    return f"the budget is spent: epsilon = {spent} of {policy.epsilon:g} per {policy.unit}"


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="The party's folder.", show_default=False)],
    policy: Annotated[
        Path | None, typer.Option(help="The party's policy; FOLDER/policy.toml by default.", show_default=False)
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Show what a party has spent, in total and per run."""
    from ..federation.protocol.policy import load_policy
    from ..federation.protocol.spending import spending

    found = spending(folder, load_policy(policy if policy is not None else folder / "policy.toml"))
    if as_json:
        print(json.dumps(found))
        return 0
    operations.show_spending(found)
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
