"""normec suggest: settings for a problem that has not been tuned, with the reason for each."""

from __future__ import annotations

import json
from typing import Any

from . import options as o

SETTINGS = (
    *("data", "data_dir", "target", "data_schema", "clients", "split", "model", "method", "rounds"),
    *("private", "epsilon", "delta", "unit", "relation", "trust", "seed"),
)


def suggest(config: o.ConfigFile = None, set_: o.Set = None, as_json: o.Json = False, **flags: Any) -> None:
    """Suggest settings, and print the command to train with them.

    These are step size, β or τ, forgetting and rounds, with a reason for each. Only public sizes are used: the
    numbers of clients and parameters, and the privacy target; where records are protected, also the number of
    records of each client. Nothing is computed from the records themselves.
    """
    from ..experiments import suggestions
    from ..settings.declaration import text_of
    from ..settings.validation import load

    given = o.overrides(set_, flags)
    chosen = load(config, given)
    found = suggestions.suggested(chosen)
    line = suggestions.command(found, given, None if config is None else str(config))
    if as_json:
        print(json.dumps({**found.to_dict(), "command": line}))
        return
    from .output import show

    rows = [(one.name, text_of(one.value), one.reason) for one in found.chosen]
    title = f"{found.method} on {chosen.data}, {chosen.model}"
    show(rows, ("setting", ">value", "reason"), title, wrapped=True)
    print(found.outlook)
    facts = found.facts
    model = f"{facts.dimension} parameters in {len(facts.tensor_sizes)} tensors"
    records = f", {sum(facts.records)} records" if facts.records is not None else ""
    print(f"Only these public sizes were used: {facts.clients} clients, {model}{records}.")
    print(f"To train: {line}")
