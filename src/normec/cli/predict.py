"""normec predict: the classes that a trained model chooses for the records of a table."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o

if TYPE_CHECKING:
    from torch import nn

    from ..data.table import TableSchema


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE", help="A CSV or Parquet file of new records; it needs no target.", show_default=False
        ),
    ],
    schema: Annotated[
        Path | None,
        typer.Option(
            help="The TOML file that describes the columns (default: what it said when the run was trained).",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="The run's model, if it is one of your own: this runs FILE.",
            show_default=False,
        ),
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Predict the classes of new records in a table.

    Prints CSV with the number of each record, in the order of the file, and its class.
    """
    from ..data.table import load_schema, read_inputs
    from ..errors import UsageError
    from ..problems.batch_form import scores_of
    from ..problems.problem import chosen_classes
    from ..storage.run_folder import SCHEMA
    from ..training.saved_run import load, read

    settings = read(folder).summary["config"]
    kept = folder / SCHEMA
    described = schema if schema is not None else kept if kept.exists() else settings.get("data_schema")
    if described is None:
        raise UsageError(f"{folder} names no schema of a table; give the one that it was trained with by --schema")
    known = load_schema(described)
    if kept.exists():
        _check_schema(folder, Path(described), known, load_schema(kept))
    inputs = read_inputs(file, known)
    outputs = scores_of(load(folder, model=_model(folder, settings, known, model)).predict(inputs))
    chosen = None if outputs is None else chosen_classes(outputs, len(inputs))
    if chosen is None or int(chosen.max()) >= len(known.classes):
        raise UsageError(
            f"the model of {folder} does not choose one of the {len(known.classes)} classes of {described}; give the "
            "schema that it was trained with by --schema"
        )
    found = ["/".join(known.classes[number]) for number in chosen.long().tolist()]
    if as_json:
        print(json.dumps({known.target: found}, ensure_ascii=False))
        return 0
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(("record", known.target))
    lines.writerows(enumerate(found, start=1))
    return 0


def _check_schema(folder: Path, path: Path, schema: TableSchema, trained: TableSchema) -> None:
    """Raise `UsageError` if a schema scales records, or numbers classes, in another way than that of the run did."""
    from ..errors import UsageError

    names = {**trained.inputs, **schema.inputs}
    changed = [name for name in names if trained.inputs.get(name) != schema.inputs.get(name)]
    changed += ["classes"] if trained.classes != schema.classes else []
    changed += ["the order of the inputs"] if not changed and [*trained.inputs] != [*schema.inputs] else []
    if changed:
        raise UsageError(
            f"{path} differs from the schema that {folder} was trained with ({', '.join(changed)}); leave out --schema "
            "to use that one"
        )


def _model(folder: Path, settings: Mapping[str, Any], schema: TableSchema, given: str | None) -> nn.Module:
    """Return a module of the run's kind: that in the user's file, or the model of this library that the run names."""
    from ..errors import UsageError
    from ..experiments import own_problem
    from ..models import MODELS, build
    from ..settings.validation import make
    from ..system.code_files import in_a_file

    if given is not None:
        if not in_a_file(given):
            raise UsageError(f"--model must be FILE.py:NAME, got {given!r}; leave it out for a model of normec")
        return own_problem.model(make({"model": given}))
    name = settings.get("model")
    if name not in MODELS:
        raise UsageError(
            f"{folder} holds the numbers of a model of your own, not its code; name it with --model FILE.py:NAME"
        )
    return build(name, (schema.width,), len(schema.classes), hidden=settings.get("hidden", 64)).model
