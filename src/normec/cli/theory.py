"""normec theory: bounds, plans with the best bounds, and checks of the bounds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from . import options as o

app = typer.Typer(help="Compute bounds, plan parameters, and check the bounds.", no_args_is_help=True)
PLAN_SETTINGS = (
    *("data", "data_dir", "target", "data_schema", "split", "model", "clients", "alpha", "beta", "rounds"),
    *("private", "epsilon", "delta", "relation", "trust", "seed"),
)


@app.command("bound")
def bound(
    L: Annotated[float, typer.Option("--L", help="Smoothness of f.")],
    L_max: Annotated[float, typer.Option("--L-max", help="The largest smoothness of a client's f_i.")],
    beta: Annotated[float, typer.Option(help="β.")],
    gamma: Annotated[float, typer.Option(help="γ, the step size.")],
    rounds: Annotated[int, typer.Option(help="K + 1, the number of messages per client.")],
    F0: Annotated[float, typer.Option("--F0", help="f(x⁰) − f_inf.")],
    method: Annotated[str, typer.Option(help="normec or clip21-sgd2m.")] = "normec",
    R: Annotated[
        float | None,
        typer.Option("--R", help="normec: max ‖∇f_i(x⁰) − g_i⁰‖, or an upper bound of it.", show_default=False),
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="normec: α.", show_default=False)] = None,
    sigma: Annotated[float, typer.Option(help="Noise per client and coordinate of a message.")] = 0.0,
    dim: Annotated[int | None, typer.Option(help="Number of parameters of the model.", show_default=False)] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.", show_default=False)] = None,
    decay: Annotated[float, typer.Option(help="Forgetting rate λ; needs --B.")] = 0.0,
    B: Annotated[float | None, typer.Option("--B", help="Bound on ‖∇f_i(x^k)‖.", show_default=False)] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="Local steps per round; needs --local-lr and --B.", show_default=False)
    ] = None,
    local_lr: Annotated[float | None, typer.Option(help="Step size of a local step.", show_default=False)] = None,
    convex: Annotated[bool, typer.Option("--convex", help="All f_i are convex; for local steps.")] = False,
    sample_rate: Annotated[
        float | None,
        typer.Option(help="Probability that a client takes part in a round; for β ≤ α.", show_default=False),
    ] = None,
    tau: Annotated[float | None, typer.Option(help="clip21-sgd2m: τ.", show_default=False)] = None,
    client_momentum: Annotated[
        float | None, typer.Option(help="clip21-sgd2m: the share of the old average, p.", show_default=False)
    ] = None,
    average_error: Annotated[
        float | None,
        typer.Option(
            help="clip21-sgd2m: max ‖∇f_i(x⁰) − v_i⁰‖, the largest gradient norm if averages start at zero.",
            show_default=False,
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Compute the bound of Theorem 1 or 2, or of a variant.

    Theorem 2 is that of runs with noise (--sigma). Both are printed as the paper states them, corrected, and sharper.
    Variants are forgetting (--decay), local steps (--local-steps), drawn clients (--sample-rate), and client momentum
    (--method clip21-sgd2m).
    """
    from .. import theory
    from ..errors import UsageError, at_least, one_of

    one_of(("normec", "clip21-sgd2m"), method=method)
    at_least(1, dim=1 if dim is None else dim, clients=1 if clients is None else clients)
    own = {"--R": R, "--alpha": alpha}
    momentum = {"--tau": tau, "--client-momentum": client_momentum, "--average-error": average_error}
    variants: dict[str, Any] = {
        "--sigma": sigma or None, "--decay": decay or None, "--B": B, "--local-steps": local_steps,
        "--local-lr": local_lr, "--convex": convex or None, "--sample-rate": sample_rate, "--dim": dim,
        "--clients": clients,
    }  # fmt: skip
    needed, foreign = (own, momentum) if method == "normec" else (momentum, {**own, **variants})
    missing = [name for name, value in needed.items() if value is None]
    given = [name for name, value in foreign.items() if value is not None]
    if missing or given:
        takes = " and ".join([", ".join([*needed][:-1]), [*needed][-1]])
        wrong = f"missing: {', '.join(missing)}" if missing else f"it does not take {', '.join(given)}"
        raise UsageError(f"the bound of {method} needs {takes}; {wrong}")
    if method == "clip21-sgd2m":
        numbers: dict[str, Any] = {"L": L, "L_max": L_max, "beta": beta, "client_momentum": client_momentum}
        start: dict[str, Any] = {"F0": F0, "tau": tau, "average_error": average_error}
        value = theory.clip21_sgd2m(**numbers, **start, gamma=gamma, rounds=rounds)
        _show_bounds({"clip21-sgd2m": value, "gamma_unclipped": theory.clip21_sgd2m_gamma(**numbers)}, as_json)
        return
    if sigma and (dim is None or clients is None):
        raise UsageError("--sigma needs --dim and --clients")
    if (local_steps is None) != (local_lr is None):
        raise UsageError("--local-steps and --local-lr go together; give both")
    if convex and local_steps is None:
        raise UsageError("--convex is for --local-steps; leave it out, or give local steps")
    if decay and (local_steps is not None or sample_rate is not None):
        raise UsageError("no bound covers --decay with --local-steps or --sample-rate; leave out one of them")
    if (decay > 0 or local_steps is not None) != (B is not None):
        raise UsageError("--B goes with --decay or --local-steps, whose bounds need it; give both")
    common: dict[str, Any] = {
        "L": L, "L_max": L_max, "R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds, "F0": F0,
    }  # fmt: skip
    noise: dict[str, Any] = {"sigma": sigma, "dim": dim or 1, "clients": clients or 1}
    path: dict[str, Any] = {"convex": convex}
    if local_steps is not None:
        path |= {"steps": local_steps, "local_lr": local_lr}
    found: dict[str, Any]
    if sample_rate is not None:
        found = {"sampled clients": theory.sampled_clients(**common, **noise, **path, B=B, sample_rate=sample_rate)}
    elif local_steps is not None:
        found = {
            form: theory.local_steps(**common, **noise, **path, B=cast(float, B), form=form)
            for form in ("corrected", "sharper", "tracked")
        }
        smoothness = theory.local_smoothness(L_max=L_max, **path)
        found["gamma_max"] = theory.gamma_max(beta=beta, R=common["R"], alpha=common["alpha"], L_max=smoothness)
        found["drift"] = theory.local_drift(L_max=L_max, **path, B=cast(float, B))
    elif decay:
        closed, tracked = (
            theory.forgetting(**common, **noise, decay=decay, B=B or 0.0, form=form) for form in ("closed", "tracked")
        )
        found = {"paper": None, "corrected": closed, "tracked": tracked}  # the paper has no forgetting
    else:
        found = {
            form: theory.theorem2(**common, **noise, form=form) for form in ("paper", "corrected", "sharper", "tracked")
        }
        numbers = {"beta": beta, "R": R, "alpha": alpha, "L_max": L_max}
        found["gamma_max"] = theory.gamma_max(**numbers)
        found["R_invariant"] = theory.invariant(**numbers, gamma=gamma)
    _show_bounds(found, as_json)


def _show_bounds(found: dict[str, Any], as_json: bool) -> None:
    if as_json:  # which has no word for infinity
        finite = {name: None if value in (None, math.inf) else value for name, value in found.items()}
        print(json.dumps(finite))
        return
    from .output import number, show

    show([(name, number(value, 6)) for name, value in found.items()], title="upper bound of the smallest gradient norm")


@o.command(app, "plan", only=PLAN_SETTINGS, defaults={"private": "false, unless epsilon or a file is given"})
def plan(
    config: o.ConfigFile = None,
    set_: o.Set = None,
    as_json: o.Json = False,
    **flags: Any,
) -> None:
    """Choose parameters for a problem and a number of rounds. Their bound is compared with trivial bounds."""
    from ..experiments.theory_checks import plan as plans
    from ..settings.validation import load

    settings = o.overrides(set_, flags)
    if config is None:
        settings.setdefault("private", any(key in settings for key in ("epsilon", "sigma")))
    elif flags["epsilon"] is not None:
        settings.setdefault("private", True)
    found = plans.plan(load(config, settings))
    if as_json:
        print(json.dumps(found.facts()))
        return
    from .output import number, show

    facts = found.facts()
    names = ("L", "L_max", "F0", "grad_max", "sigma", "alpha", "beta", "lr", "decay", "warmup", "rounds", "R")
    rows = [(name, number(facts[name], 4)) for name in names]
    rows += [
        ("initial memory", facts["initial_memory"]),
        ("promise", number(facts["promise"], 4)),
        ("gradient norm at the start", number(facts["trivial"], 4)),
        ("exact gradient descent", number(facts["gradient_descent"], 4)),
    ]
    show(rows, title="plan")
    print(found.proposal.verdict())
    for note in facts["notes"]:
        print(f"note: {note}")
    if found.proposal.useful:
        print(f"settings: {found.command()}")
    else:
        print(
            "No settings are proposed, because the theory knows none. `normec suggest` has settings that were tested."
        )


@app.command("verify")
def verify(
    scale: Annotated[str, typer.Option(help="smoke (one minute) or full.")] = "smoke",
    data_dir: o.DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder of the pictures and the table.")] = Path("runs/theory"),
    as_json: o.Json = False,
) -> int:
    """Compare the methods with their bounds. The exit code is 1 if a bound fails unexpectedly."""
    from ..experiments.theory_checks import verify as verification

    found = verification.verify(scale, out, data_dir, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(found.facts()))
    else:
        print(found.table())
        for path in found.pictures:
            print(f"picture: {path}")
    return 0 if found.holds else 1
