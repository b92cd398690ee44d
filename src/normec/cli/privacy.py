"""normec privacy: ε from noise, noise from ε, tables, and audits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o

if TYPE_CHECKING:
    from ..privacy import Facts, Release

_LARGEST_MODEL = 10**9  # parameters: what rounding to a grid adds to the noise of secure records is that of so many

app = typer.Typer(help="Compute ε from noise, noise from ε and tables; audit methods.", no_args_is_help=True)

Releases = Annotated[int, typer.Option(help="Number of messages per client; with --groups, of rounds.")]
Delta = Annotated[float, typer.Option(help="δ.")]
Relation = Annotated[str, typer.Option(help="zero-out or replace.")]
Trust = Annotated[str, typer.Option(help="local, secure-sum or central.")]
Clients = Annotated[int, typer.Option(help="Number of clients.")]
Summed = Annotated[
    int | None,
    typer.Option(
        help="Number of clients (default: one in each group); unless trust is local, their noise adds up.",
        show_default=False,
    ),
]
Honest = Annotated[int | None, typer.Option(help="Honest clients in a secure sum (default: all).", show_default=False)]
SamplingRate = Annotated[
    float | None, typer.Option(help="Rate of secret Poisson sampling of clients.", show_default=False)
]
Schedule = Annotated[
    str, typer.Option(help="How the noise changes by round: constant, linear:R, exponential:R, or a number per round.")
]
Groups = Annotated[int, typer.Option(help="Groups of clients that take turns, one in each round.")]
Bound = Annotated[
    float | None,
    typer.Option(help="The largest norm of a message (default: that of --method, otherwise 1).", show_default=False),
]
MethodOfMessages = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:KEY=VALUE,…]",
        help="The method (default: any with messages of norm 1; for records, dpsgd-clip).",
        show_default=False,
    ),
]
Unit = Annotated[str, typer.Option(help="Who is protected: client or record.")]
RecordClip = Annotated[
    str | None,
    typer.Option(
        help="Largest norm of a record's gradient, auto (below 1) or none (default: auto with --unit record).",
        show_default=False,
    ),
]
Records = Annotated[
    int | None, typer.Option(help="Fewest records of a client, where their gradients are clipped.", show_default=False)
]
BatchRate = Annotated[
    float | None,
    typer.Option(help="Rate of secret Poisson sampling of a client's records, with --unit record.", show_default=False),
]


@app.command("epsilon")
def epsilon(
    sigma: Annotated[float, typer.Option(help="Noise on a message, per coordinate.")],
    releases: Releases,
    delta: Delta = 1e-5,
    relation: Relation = "zero-out",
    trust: Trust = "local",
    clients: Summed = None,
    honest: Honest = None,
    sampling_rate: SamplingRate = None,
    method: MethodOfMessages = None,
    bound: Bound = None,
    unit: Unit = "client",
    record_clip: RecordClip = None,
    records: Records = None,
    batch_rate: BatchRate = None,
    noise_schedule: Schedule = "constant",
    groups: Groups = 1,
    as_json: o.Json = False,
) -> None:
    """Compute the exact ε of a given noise."""
    composed = _release(
        clients,
        releases,
        groups,
        method,
        bound,
        records,
        batch_rate,
        sigma=sigma,
        delta=delta,
        relation=relation,
        trust=trust,
        honest=honest,
        sampling=sampling_rate,
        noise_schedule=noise_schedule,
        unit=unit,
        record_clip=_record_clip(record_clip, unit),
    )
    _answer(as_json, composed, sigma=sigma, epsilon=composed.epsilon(sigma, delta), delta=delta)


@app.command("noise")
def noise(
    epsilon: Annotated[float, typer.Option(help="The target ε.")],
    releases: Releases,
    delta: Delta = 1e-5,
    relation: Relation = "zero-out",
    trust: Trust = "local",
    clients: Summed = None,
    honest: Honest = None,
    sampling_rate: SamplingRate = None,
    method: MethodOfMessages = None,
    bound: Bound = None,
    unit: Unit = "client",
    record_clip: RecordClip = None,
    records: Records = None,
    batch_rate: BatchRate = None,
    noise_schedule: Schedule = "constant",
    groups: Groups = 1,
    as_json: o.Json = False,
) -> None:
    """Compute the smallest noise that keeps a target ε. It is that of each coordinate of a client's message."""
    composed = _release(
        clients,
        releases,
        groups,
        method,
        bound,
        records,
        batch_rate,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        trust=trust,
        honest=honest,
        sampling=sampling_rate,
        noise_schedule=noise_schedule,
        unit=unit,
        record_clip=_record_clip(record_clip, unit),
    )
    sigma = composed.sigma(epsilon, delta)
    _answer(as_json, composed, sigma=sigma, epsilon=composed.epsilon(sigma, delta), delta=delta)


@app.command("table")
def table(
    sigma: Annotated[float, typer.Option(help="Noise on a message, per coordinate.")] = 1.0,
    releases: Annotated[int, typer.Option(help="Largest number of rounds.")] = 300,
    delta: Delta = 1e-5,
    clients: Clients = 100,
    sampling_rate: SamplingRate = None,
    bound: Annotated[float, typer.Option(help="The largest norm of a message.")] = 1.0,
    out: Annotated[Path, typer.Option(help="File of the picture.")] = Path("epsilon.png"),
    as_json: o.Json = False,
) -> None:
    """Show ε over rounds for several observers. Prints a table and draws a picture."""
    from ..experiments import epsilon_table
    from ..privacy.display import shown_epsilon

    found = epsilon_table.build(sigma, releases, delta, clients, sampling_rate, bound)
    epsilon_table.draw(found, out)
    if as_json:
        print(json.dumps({"rounds": found.rounds, "epsilon": found.columns, "picture": str(out)}))
        return
    from .output import show

    rows = [
        [str(k), *(shown_epsilon(values[i]) for values in found.columns.values())] for i, k in enumerate(found.rounds)
    ]
    show(rows, (">rounds", *(f">{name}" for name in found.columns)), title=found.title)
    print(f"picture: {out}")


@app.command("audit")
def audit(
    method: Annotated[str, typer.Option(help="Name of a method, FILE.py:CLASS for one of your own, or all.")] = "all",
    set_: o.Set = None,
    epsilon: Annotated[float, typer.Option(help="The claimed ε. A small one reveals more kinds of bugs.")] = 2.0,
    delta: Delta = 1e-5,
    relation: Relation = "zero-out",
    trust: Trust = "secure-sum",
    noise: Annotated[str, typer.Option(help="seeded, secure or exact.")] = "seeded",
    rounds: Annotated[int, typer.Option(help="Rounds of a run.")] = 4,
    trials: Annotated[int, typer.Option(help="Runs with the canary, and as many without.")] = 1000,
    noise_schedule: Annotated[str, typer.Option(help="How the noise changes by round; best for linear methods.")] = (
        "constant"
    ),
    groups: Groups = 1,
    noise_bands: Annotated[
        int, typer.Option(help="Rounds over which the noise is correlated, with --trust central and --groups.")
    ] = 1,
    as_json: o.Json = False,
) -> int:
    """Try to refute the claimed ε.

    Compares runs with and without a worst-case client. The exit code is 1 if a claim is refuted.
    """
    from ..algorithms.catalogue import PRIVATE_METHODS
    from ..errors import one_of
    from ..experiments import methods
    from ..experiments.audit import audit_method
    from ..privacy import Privacy
    from ..settings.validation import make
    from ..system.code_files import in_a_file
    from .output import number, show

    bounded = ("normec-plain", "normec-forgetting", *PRIVATE_METHODS)
    if not in_a_file(method):
        one_of(("all", *bounded), method=method)
    extra: dict[str, dict[str, Any]] = {
        "normec-plain": {"method": "normec", "server_norm": False},
        "normec-forgetting": {"method": "normec", "decay": 0.2},
    }
    privacy = Privacy(
        epsilon=epsilon,
        delta=delta,
        relation=_literal(relation),
        trust=_literal(trust),
        noise=_literal(noise),
        noise_schedule=noise_schedule,
        noise_bands=noise_bands,
    )
    clients = 4 if groups == 1 else 2 * groups + 2
    names = bounded if method == "all" else (method,)
    found = {}
    for name in names:
        print(f"auditing {name}", file=sys.stderr, flush=True)
        config = make({**extra.get(name, {"method": name}), **o.overrides(set_, {})})
        built, local = methods.build(config, dim=16), methods.local_steps(config)
        found[name] = audit_method(
            built, privacy, clients=clients, rounds=rounds, trials=trials, local=local, groups=groups
        )
    if as_json:
        facts = {
            name: {
                "epsilon": one.epsilon,
                "gaussian": one.gaussian,
                "clopper_pearson": one.clopper_pearson,
                "claim": one.claim,
                "refuted": one.violated,
                "confidence": one.confidence,
                "judged_runs": one.trials,
                "score": one.score,
            }
            for name, one in found.items()
        }
        print(json.dumps(facts))
    else:
        rows = [
            [
                name,
                number(one.claim, 4),
                number(one.gaussian, 4),
                number(one.clopper_pearson, 4),
                "REFUTED" if one.violated else "not refuted",
                one.score,
            ]
            for name, one in found.items()
        ]
        columns = ("method", ">claimed ε", ">ε ≥ (Gaussian)", ">ε ≥ (no assumption)", "verdict", "strongest evidence")
        show(rows, columns, title=f"δ = {delta:g}, {trust}, {relation}: each verdict holds with 99.9 % confidence")
    return 1 if any(one.violated for one in found.values()) else 0


def _literal(word: str) -> Any:
    """Return a word from the command line as a literal type; the statement checks it."""
    return word


def _record_clip(text: str | None, unit: str) -> float | str | None:
    """The clip per record, which a run has as well if nothing is said."""
    if text is None:
        return "auto" if unit == "record" else None
    try:
        return None if text == "none" else text if text == "auto" else float(text)
    except ValueError:
        from ..errors import UsageError

        raise UsageError(f"--record-clip takes a number, auto or none, got {text!r}") from None


def _release(
    clients: int | None,
    releases: int,
    groups: int,
    method: str | None,
    bound: float | None,
    records: int | None,
    batch_rate: float | None,
    **statement: Any,
) -> Release:
    from ..errors import UsageError, at_least, fraction
    from ..privacy import FULL, Privacy, Sampling, Setting, release

    at_least(1, releases=releases, groups=groups, clients=1 if clients is None else clients)
    privacy = Privacy(**statement)
    if privacy.unit == "client" and (records is not None or batch_rate is not None):
        raise UsageError("--records and --batch-rate are for --unit record")
    if privacy.record_clip is not None and records is None:
        raise UsageError(
            "a clip per record needs --records, the fewest records that a client has; or give --record-clip none"
        )
    if clients is None:
        if privacy.trust != "local":
            assumed = "one client" if groups == 1 else f"{groups} clients, one in each group"
            print(f"This is for {assumed}; the noise of all clients adds up: give --clients.", file=sys.stderr)
        clients = groups
    if groups > clients:
        raise UsageError(f"--groups {groups} is more than the {clients} clients; ask for at most {clients}")
    if batch_rate is not None:
        fraction(batch_rate=batch_rate)
    if records is not None:
        at_least(1, records=records)
    facts, local = _facts(method, bound, statement)
    setting = Setting(
        clients,
        releases,
        Sampling(privacy.sampling) if privacy.sampling is not None else FULL,
        batch=Sampling(batch_rate) if batch_rate is not None else FULL,
        records=None if records is None else records * (batch_rate or 1.0),
        dimension=_LARGEST_MODEL,
        local_steps=local,
        groups=groups,
    )
    return release(facts, privacy, setting)


def _facts(method: str | None, bound: float | None, statement: dict[str, Any]) -> tuple[Facts, bool]:
    """The facts about the messages, those of a method or a bound alone, and whether they come from local steps."""
    from ..errors import UsageError, positive
    from ..privacy import Facts

    if method is None and (bound is not None or statement["unit"] == "client"):
        bound = 1.0 if bound is None else bound
        positive(bound=bound)
        return Facts("a message", bound, feedback=True), False
    if bound is not None:
        raise UsageError("--method has a bound of its own; leave out --bound")
    from ..experiments import methods
    from ..privacy.mechanism import facts_of
    from ..settings.validation import make

    name, own = methods.split_name(method or "dpsgd-clip")
    private = {key: statement.get(key) for key in ("epsilon", "sigma", "unit", "record_clip")}
    config = make({"method": name, **own, **{key: value for key, value in private.items() if value is not None}})
    return facts_of(methods.build(config, dim=1)), methods.local_steps(config) is not None


def _answer(as_json: bool, composed: Release, **facts: float) -> None:
    if as_json:
        print(json.dumps({**facts, "notes": list(composed.notes)}))
        return
    from ..privacy.display import shown_delta, shown_epsilon  # rounds σ up too: less noise would miss the target

    spent, sigma = shown_epsilon(facts["epsilon"], 6), shown_epsilon(facts["sigma"], 6)
    print(f"epsilon = {spent} at delta = {shown_delta(facts['delta'])}, sigma = {sigma} per client")
    for note in composed.notes:
        print(f"note: {note}")
