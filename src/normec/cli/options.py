"""The flags that `train` and `compare` share, and how they become settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

ConfigFile = Annotated[Path | None, typer.Argument(help="A TOML file of settings.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, by its name.")]
Data = Annotated[str | None, typer.Option(help="Data set; `normec data list` names them.", show_default=False)]
DataDir = Annotated[str | None, typer.Option(help="Folder of data files.", show_default=False)]
Split = Annotated[str | None, typer.Option(help="iid, label, dirichlet or column.", show_default=False)]
Model = Annotated[
    str | None, typer.Option(help="softmax, logistic, mlp, cnn, cnn-gn, resnet20, resnet20-gn.", show_default=False)
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.", show_default=False)]
Alpha = Annotated[float | None, typer.Option(help="Smoothing of the normalisation.", show_default=False)]
Beta = Annotated[float | None, typer.Option(help="Size of a memory update.", show_default=False)]
Tau = Annotated[float | None, typer.Option(help="Clipping threshold.", show_default=False)]
Lr = Annotated[str | None, typer.Option(help="Step size, or theory.", metavar="NUMBER", show_default=False)]
Rounds = Annotated[int | None, typer.Option(help="Messages a client sends.", show_default=False)]
Epochs = Annotated[int | None, typer.Option(help="Instead of rounds: passes over the records.", show_default=False)]
BatchSize = Annotated[int | None, typer.Option(help="Records a gradient; all by default.", show_default=False)]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Repeat a run bit for bit. Without it, private noise comes from a fresh secret.", show_default=False
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 …", show_default=False)]
Engine = Annotated[
    str | None, typer.Option(help="auto, loop, compiled, batched, shared or linear.", show_default=False)
]
Precision = Annotated[
    str | None, typer.Option(help="A GPU's products: float32, tf32 (default) or bf16.", show_default=False)
]
Private = Annotated[
    bool | None,
    typer.Option("--private/--no-privacy", help="Noise with a guarantee (default), or none.", show_default=False),
]
Diagnostics = Annotated[
    bool | None,
    typer.Option(
        "--diagnostics/--no-diagnostics",
        help="Record losses and norms of private runs too; the guarantee does not cover them.",
        show_default=False,
    ),
]
Epsilon = Annotated[float | None, typer.Option(help="Privacy target ε (default 8).", show_default=False)]
Delta = Annotated[float | None, typer.Option(help="Privacy target δ (default 1e-5).", show_default=False)]
Unit = Annotated[str | None, typer.Option(help="Who is protected: client or record.", show_default=False)]
Relation = Annotated[str | None, typer.Option(help="zero-out or replace.", show_default=False)]
Trust = Annotated[str | None, typer.Option(help="local, secure-sum or central.", show_default=False)]
Out = Annotated[Path | None, typer.Option(help="Folder of the run.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


def overrides(assignments: list[str] | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Settings from `--set`, then from the flags that were given; of `flags`, only names of settings count."""
    from ..experiments.config import RunConfig, parse_assignment

    if isinstance(flags.get("lr"), str):
        flags = {**flags, "lr": parse_assignment(f"lr={flags['lr']}")[1]}
    return {
        **dict(map(parse_assignment, assignments or [])),
        **{key: value for key, value in flags.items() if value is not None and key in RunConfig.model_fields},
    }
