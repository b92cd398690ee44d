"""normec federation: real parties over Flower; an app to begin with, a trial on this machine, a party, its account."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o

app = typer.Typer(help="Real parties over Flower, each enforcing its own privacy.", no_args_is_help=True)

Superlink = Annotated[str, typer.Option(help="HOST:PORT of the server's SuperLink.", show_default=False)]
Authority = Annotated[Path, typer.Option(help="Certificate of the authority that signed the server's.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.", show_default=False)],
) -> int:
    """Write a Flower app that runs as it is, to put one's own model and data into."""
    from ..federation.flower.scaffold import write_app

    for path in write_app(folder):
        print(path)
    print(f"Put your model and data into {folder / 'learning' / 'task.py'}; try it with:")
    print(f"  normec federation local --app {folder} --parties 5")
    return 0


@o.command(app, "local", only=("rounds", "seed", "private"))
def local(
    app_: Annotated[
        Path | None, typer.Option("--app", help="A folder made by `init`; without it, the digits.", show_default=False)
    ] = None,
    parties: Annotated[int, typer.Option(min=1, help="How many parties.")] = 5,
    set_: o.Set = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="One policy for all parties; without it, one that agrees to this run.", show_default=False),
    ] = None,
    flower_nodes: Annotated[
        bool,
        typer.Option("--flower-nodes", help="Flower's own SuperNodes, which run the app the server sends; slower."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/federation"),
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    **flags: Any,
) -> int:
    """A whole federation on this machine: a SuperLink, a process a party, a run; TLS on, nothing left running.

    The run lives in a folder like any other; the same command goes on after a stop.
    """
    _need_flower()
    from ..experiments.build import PRIVATE_SETTINGS
    from ..federation.local import run as machine
    from ..settings.config import FEDERATED
    from .progress import watcher
    from .train import show_result

    config = o.overrides(set_, flags)
    if config.get("private") is False:  # the app's own privacy settings mean nothing then
        config = {**dict.fromkeys((name for name in PRIVATE_SETTINGS if name in FEDERATED), ""), **config}
    asked = machine.Asked(app_, out, parties, config, policy, flower_nodes)
    display = watcher("federation", quiet)
    try:
        with _Wanted() as wanted:
            result = machine.run(asked, [display], lambda: wanted.still)
    finally:
        display.close()
    if as_json:
        print(json.dumps({"folder": str(result.folder), **result.summary}))
    else:
        show_result(result)
    if result.summary["status"] == "stopped":
        print(f"{result.summary['stopped']}; see {out}/federation/parties/*/events.jsonl", file=sys.stderr)
        return 1
    return 0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(context: typer.Context) -> int:
    """Flower's SuperLink, which nobody commands but its owner on this machine; the options are flower-superlink's."""
    _need_flower()
    from ..federation.flower.gate import serve_superlink

    serve_superlink(context.args)
    return 0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(context: typer.Context) -> int:
    """Flower's SuperNode, which runs the app that the server sends; its port answers to its owner alone.

    The options are flower-supernode's.
    """
    _need_flower()
    from ..federation.flower.gate import serve_supernode

    serve_supernode(context.args)
    return 0


@app.command()
def party(
    superlink: Superlink,
    root_certificates: Authority,
    key: Annotated[Path, typer.Option(help="The party's private key (ssh-keygen -t ecdsa -b 384).")],
    app_: Annotated[Path, typer.Option("--app", help="The party's own copy of the app: this code runs, no other.")],
    folder: Annotated[Path, typer.Option(help="Where the party keeps its memory and its account.")],
    policy: Annotated[Path, typer.Option(help="The party's policy.")],
    partition: Annotated[int, typer.Option(min=0, help="Passed to the app's data(); its meaning is the app's.")] = 0,
    partitions: Annotated[int, typer.Option(min=1, help="Passed to the app's data() too.")] = 1,
    poll: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks for a request.")] = 0.5,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to go on trying where one is not let in.")] = 150.0,
) -> int:
    """Take part as one party, with one's own copy of the app; the server's is not even fetched."""
    _need_flower()
    from ..federation.flower.node import load_client, serve
    from ..federation.protocol.policy import load_policy

    largest = load_policy(policy).largest_model  # a mistake in it shows now, not at the first request
    config = {"partition-id": partition, "num-partitions": partitions, "folder": str(folder), "policy": str(policy)}
    serve(load_client(app_), superlink, root_certificates, key, config, largest, poll, patience)
    return 0


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="The party's folder.", show_default=False)],
    policy: Annotated[
        Path | None, typer.Option(help="The party's policy; FOLDER/policy.toml by default.", show_default=False)
    ] = None,
    as_json: o.Json = False,
) -> int:
    """What a party has spent: ε, δ and messages, in all and by run."""
    from ..federation.protocol.policy import load_policy
    from ..federation.protocol.spending import spending
    from ..report.words import epsilon
    from .tables import show

    found = spending(folder, load_policy(policy if policy is not None else folder / "policy.toml"))
    if as_json:
        print(json.dumps(found))
        return 0
    budget = "no budget" if found["budget"] is None else f"of {found['budget']:g}"
    rows = [
        ("ε spent", f"{epsilon(found['epsilon'])} {budget}, at δ = {found['delta']:g}"),
        ("protected", f"{found['unit']}, {found['relation']}"),
        ("messages with noise", f"{found['releases']}, of which {found['recovered']} charged after a lost disk"),
        (
            "of these",
            f"{found['central']} left bare under central trust, {found['seeded']} with seeded noise (protects nobody)",
        ),
        ("messages without noise", str(found["without_noise"])),
        ("failed computations", f"{found['failed']}, each answered with noise alone and paid for"),
        ("requests refused", ", ".join(f"{why}: {n}" for why, n in found["refusals"].items()) or "none"),
    ]
    if found["journal_full"]:
        rows.append(("events.jsonl", "is full: later failures and refusals are not counted; move it away to go on"))
    for run, part in found["runs"].items():
        rows.append((f"run {run}", f"ε = {epsilon(part['epsilon'])}, {part['releases']} messages with noise"))
    show(rows, title=found["ledger"])
    return 0


class _Wanted:
    """`still` is true until Ctrl-C or SIGTERM; a flag, since an exception might be raised where it is swallowed."""

    def __init__(self) -> None:
        self.still = True

    def __enter__(self) -> _Wanted:
        import signal

        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        import signal

        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        self.still = False


def _need_flower() -> None:
    import os

    from ..errors import UsageError

    # Read by Flower when it is imported: nothing is reported, nothing is looked up.
    os.environ.update({"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"})
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError("a federation needs Flower: pip install 'normec[federation]'") from None
