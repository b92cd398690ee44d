"""The command: measure whole rounds and print the tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from normec.cli import options as o

app = typer.Typer(name="python -m benchmarks.speed", rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def bench(
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="resnet20, mlp, cnn, logistic, gpt, lora, vit, bert, lstm, mobilenet, resnet18 (default: all).",
            show_default=False,
        ),
    ] = None,
    n: Annotated[
        str | None,
        typer.Option("--n", metavar="N[,N…]", help="Numbers of clients (default: by workload).", show_default=False),
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME…]", help="Engines of normec (default: by workload).", show_default=False),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]", help="pfl, flower, jax, opacus, or none (default: all).", show_default=False
        ),
    ] = None,
    floors: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]", help="Variants of the floor; compiling is slow (default: all).", show_default=False
        ),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The Python that has the other libraries.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Maximal number of timed rounds per process.")] = 200,
    seconds: Annotated[
        float | None, typer.Option(help="Maximal time for them (default: 5, on a GPU 0.5).", show_default=False)
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Number of passes over the whole list (default: 3, on a GPU 1).", show_default=False),
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which an implementation is stopped.")] = 300.0,
    beside: Annotated[
        int | None,
        typer.Option(
            help="Processes that get ready at once, on a GPU alone; while one is timed, the others are stopped "
            "(default: one for each core, at most 16).",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Cores of an implementation (default: all).", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="float32, tf32, bf16 (default: float32 on the CPU, tf32 and bf16 on a GPU).",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Instead compare this many ranks, with a core each, with one process.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for bench.json and cost.png; what it has is not measured again.",
            show_default=False,
        ),
    ] = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> int:
    """Measure whole rounds: time, ratios to the floor, peak memory and start-up time.

    The implementations run one after the other on the same cores, each in its own process, and the list is repeated.
    docs/results/performance.md explains the rows.
    """
    log = (lambda _: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    on_gpu = device != "cpu"
    if seconds is None:
        seconds = 0.5 if on_gpu else 5.0
    if repeats is None:
        repeats = 1 if on_gpu else 3
    if beside is None:
        beside = min(16, os.cpu_count() or 1) if on_gpu else 1
    if ranks is not None:
        return _ranks(workload or "resnet20", n, ranks, repeats, min(rounds, 10), log, as_json)
    from . import measurement, session

    summary = session.run(
        session.cases(_split(workload), _numbers(n), device, _split(precision), threads),  # type: ignore[arg-type]
        measurement.Limits(rounds, seconds, repeats, limit, beside),
        engines=_split(engines),
        peers=[] if peers == "none" else _split(peers),
        floors=_split(floors),
        peer_python=peer_python,
        out=out,
        log=log,
    )
    if as_json:
        print(json.dumps(summary))
    else:
        _show(summary)
        if out is not None:
            print(f"numbers: {out / 'bench.json'}\npicture: {out / 'cost.png'}")
    return 130 if summary["interrupted"] else 0


def _ranks(
    workload: str, n: str | None, ranks: int, repeats: int, rounds: int, log: Callable[[str], None], as_json: bool
) -> int:
    from . import ranks as by_ranks
    from . import session

    case = session.cases([workload], _numbers(n), "cpu", None, 1)[0]
    found = by_ranks.run(case, ranks, repeats, rounds, log)
    if as_json:
        print(json.dumps(found))
        return 0
    print(f"one process on one core  {found['alone']:.3f} s per round, {case.workload}, {case.clients} clients")
    print(
        f"{ranks} ranks, a core each     {found['spread']:.3f} s per round: {found['speedup']:.2f} times the throughput"
    )
    print(f"all-reduce of 4d bytes   {1e3 * found['all_reduce']:.2f} ms, d = {found['dimension']:,}")
    many = ", ".join(f"{ranks} ranks {1e3 * seconds:.0f} ms" for ranks, seconds in found["projected"].items())
    print(f"estimated with one client per rank and a ring of 25 Gbit/s with 50 µs per step: {many} per round")
    return 0


def _split(text: str | None) -> list[str] | None:
    return [part.strip() for part in text.split(",")] if text is not None else None


def _numbers(text: str | None) -> list[int] | None:
    from normec import UsageError

    parts = _split(text)
    if parts is not None and not all(part.isdecimal() for part in parts):
        raise UsageError(f"n must be whole numbers separated by commas, got {text!r}")
    return [int(part) for part in parts] if parts is not None else None


def _show(summary: dict[str, Any]) -> None:
    from normec.cli.output import show

    columns = (
        "",
        *(f">{name}" for name in ("ms", "least – most", "× floor", "× floor+passes", "× ours", "MB", "start s")),
    )
    for case in summary["cases"]:
        lines, remarks = [], []
        for row in case["rows"]:
            waited = row["waited"] or 0
            parts = [
                row["note"],
                row["status"] if row["status"] != "measured" else None,
                row["reason"],
                f"waited {100 * waited:.0f} % of its time for a core" if waited > 0.05 else None,
            ]
            if any(parts):
                remarks.append(f"  {row['name']}: {', '.join(part for part in parts if part)}")
            if row["seconds"] is None:
                continue
            held = row["peak_bytes"] if case["device"] == "cpu" else row["device_bytes"]
            lines.append(
                [
                    row["name"],
                    _number(1e3 * row["seconds"]),
                    " – ".join(_number(1e3 * value) for value in row["spread"]),
                    *(_number(row[key]) for key in ("over_floor", "over_floor_and_passes", "over_ours")),
                    f"{held / 1e6:,.0f}" if held is not None else "",
                    f"{row['start_up'][0]:.1f}" if row["start_up"] else "",
                ]
            )
        title = f"{case['workload']}: {case['clients']:,} clients, {case['drawn']:,} per round, batch {case['batch']}"
        show(lines, columns, title=f"{title}, {case['device']}, {case['precision']}")
        print("\n".join(remarks))
    machine = summary["machine"]
    print(f"{machine['processor']}, {machine['threads']} threads; torch {summary['versions']['torch']}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
