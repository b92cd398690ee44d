"""normec bench: what a round costs, beside a floor, a hand-written loop and other libraries."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from normec.cli import options as o


def bench(
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME…]", help="resnet20, mlp, logistic (all by default).", show_default=False),
    ] = None,
    n: Annotated[
        str | None,
        typer.Option("--n", metavar="N[,N…]", help="Numbers of clients, instead of the usual.", show_default=False),
    ] = None,
    engines: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME…]", help="Engines of ours (all).", show_default=False)
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]", help="pfl, flower, jax, opacus, or none (all that are there).", show_default=False
        ),
    ] = None,
    floors: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]", help="Ways to run one batch; compiling is slow (all).", show_default=False
        ),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The Python that has them, if it is another one.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds a process, at most.")] = 200,
    seconds: Annotated[float, typer.Option(help="Time for them, at most.")] = 5.0,
    repeats: Annotated[int, typer.Option(help="How often the whole list is run.")] = 3,
    limit: Annotated[float, typer.Option(help="Seconds until a contestant is stopped.")] = 300.0,
    threads: Annotated[int | None, typer.Option(help="Cores a contestant gets (all).", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]", help="float32, tf32, bf16 (float32 on the CPU, else all).", show_default=False
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Instead: so many ranks, a core each, against one process on one.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json and cost.png.", show_default=False)] = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> int:
    """Measure whole rounds: time, ratios to the floor, peak memory, start-up.

    Every contestant runs in a process of its own, on the same cores, one after the other, and the list is repeated.
    See docs/performance.md for what each row means.
    """
    say = (lambda _: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    if ranks is not None:
        return _ranks(workload or "resnet20", n, ranks, repeats, min(rounds, 10), say, as_json)
    from . import measure, session

    summary = session.run(
        session.cases(_split(workload), _numbers(n), device, _split(precision), threads),  # type: ignore[arg-type]
        measure.Effort(rounds, seconds, repeats, limit),
        engines=_split(engines),
        peers=[] if peers == "none" else _split(peers),
        floors=_split(floors),
        peer_python=peer_python,
        out=out,
        say=say,
    )
    if as_json:
        print(json.dumps(summary))
    else:
        _show(summary)
        if out is not None:
            print(f"numbers: {out / 'bench.json'}\npicture: {out / 'cost.png'}")
    return 130 if summary["interrupted"] else 0


def _ranks(
    workload: str, n: str | None, ranks: int, repeats: int, rounds: int, say: Callable[[str], None], as_json: bool
) -> int:
    from . import ranks as by_ranks
    from . import session

    case = session.cases([workload], _numbers(n), "cpu", None, 1)[0]
    found = by_ranks.run(case, ranks, repeats, rounds, say)
    if as_json:
        print(json.dumps(found))
        return 0
    print(f"one process on one core  {found['alone']:.3f} s a round, {case.workload}, {case.clients} clients")
    print(
        f"{ranks} ranks, a core each     {found['spread']:.3f} s a round: {found['speedup']:.2f} times the throughput"
    )
    print(f"all-reduce of 4d bytes   {1e3 * found['all_reduce']:.2f} ms, d = {found['dimension']:,}")
    many = ", ".join(f"{ranks} ranks {1e3 * seconds:.0f} ms" for ranks, seconds in found["projected"].items())
    print(f"on paper, a client a rank and a ring of 25 Gbit/s with 50 µs a step: {many} a round")
    return 0


def _split(text: str | None) -> list[str] | None:
    return [part.strip() for part in text.split(",")] if text is not None else None


def _numbers(text: str | None) -> list[int] | None:
    from normec.errors import UsageError

    parts = _split(text)
    if parts is not None and not all(part.isdecimal() for part in parts):
        raise UsageError(f"n must be whole numbers with commas between, got {text!r}")
    return [int(part) for part in parts] if parts is not None else None


def _show(summary: dict[str, Any]) -> None:
    from normec.cli.tables import show

    columns = (
        "",
        *(f">{name}" for name in ("ms", "least – most", "× floor", "× floor+passes", "× ours", "MB", "start s")),
    )
    for case in summary["cases"]:
        lines, remarks = [], []
        for row in case["rows"]:
            waited = row["waited"] or 0
            said = [
                row["note"],
                row["status"] if row["status"] != "measured" else None,
                row["reason"],
                f"waited {100 * waited:.0f} % of its time for a core" if waited > 0.05 else None,
            ]
            if any(said):
                remarks.append(f"  {row['name']}: {', '.join(part for part in said if part)}")
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
                    f"{row['start_up'][0]:.1f}",
                ]
            )
        title = f"{case['workload']}: {case['clients']:,} clients, {case['drawn']:,} a round, batch {case['batch']}"
        show(lines, columns, title=f"{title}, {case['device']}, {case['precision']}")
        print("\n".join(remarks))
    machine = summary["machine"]
    print(f"{machine['processor']}, {machine['threads']} threads; torch {summary['versions']['torch']}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
