"""normec theory: bounds, plans with the best bounds, and checks of the bounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

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
    R: Annotated[float, typer.Option("--R", help="max ‖∇f_i(x⁰) − g_i⁰‖, or an upper bound of it.")],
    alpha: Annotated[float, typer.Option(help="α.")],
    beta: Annotated[float, typer.Option(help="β.")],
    gamma: Annotated[float, typer.Option(help="γ, the step size.")],
    rounds: Annotated[int, typer.Option(help="K + 1, the number of messages per client.")],
    F0: Annotated[float, typer.Option("--F0", help="f(x⁰) − f_inf.")],
    sigma: Annotated[float, typer.Option(help="Noise per client and coordinate of a message.")] = 0.0,
    dim: Annotated[int | None, typer.Option(help="Number of parameters of the model.", show_default=False)] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.", show_default=False)] = None,
    decay: Annotated[float, typer.Option(help="Forgetting rate λ; needs --B.")] = 0.0,
    B: Annotated[float | None, typer.Option("--B", help="Bound on ‖∇f_i(x^k)‖.", show_default=False)] = None,
    as_json: o.Json = False,
) -> None:
    """Compute the bound of Theorem 1, or of Theorem 2 with --sigma.

    It is printed as the paper states it, corrected, and sharper.
    """
    from .. import theory
    from ..errors import UsageError, at_least

    at_least(1, dim=1 if dim is None else dim, clients=1 if clients is None else clients)
    if sigma and (dim is None or clients is None):
        raise UsageError("--sigma needs --dim and --clients")
    if (decay > 0) != (B is not None):
        raise UsageError("--decay and --B go together; the bound with forgetting needs both")
    common: dict[str, Any] = {
        "L": L, "L_max": L_max, "R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds, "F0": F0,
    }  # fmt: skip
    noise: dict[str, Any] = {"sigma": sigma, "dim": dim or 1, "clients": clients or 1}
    if decay:
        closed, tracked = (
            theory.forgetting(**common, **noise, decay=decay, B=B or 0.0, form=form) for form in ("closed", "tracked")
        )
        found = {"paper": None, "corrected": closed, "tracked": tracked}  # the paper has no forgetting
    else:
        found = {
            form: theory.theorem2(**common, **noise, form=form) for form in ("paper", "corrected", "sharper", "tracked")
        }
        found["gamma_max"] = theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=L_max)
        found["R_invariant"] = theory.invariant(R=R, alpha=alpha, beta=beta, gamma=gamma, L_max=L_max)
    if as_json:
        print(json.dumps(found))
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
