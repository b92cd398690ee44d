"""How often a better setting may lie outside of what was tried: choices from an outermost part of their range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .contenders import CONTENDERS, Setting, outermost
from .studies import Study
from .tuned import Effort
from .work import Record

_OFTEN = 0.75  # the share of its choices from which on a method is named


def told(study: Study, records: Sequence[Record]) -> str:
    """A sentence on a study's choices."""
    step, moved, length = (_counted(study.effort, records, names) for names in (("lr",), ("beta", "tau"), ("rounds",)))
    return (
        "Chosen from an outermost part of its range (in brackets: how often if all settings were as good; methods that "
        f"did so in three quarters or more): the step size in {step}; β or τ in {moved}; the longest run in {length}."
    )


def _counted(effort: Effort, records: Sequence[Record], names: Sequence[str]) -> str:
    """Of the choices of one of `names`: those at an edge, how many by chance, and whose."""
    found, of, by_chance, often = 0, 0, 0.0, []
    for method in CONTENDERS:
        chosen = [one["chosen"] for one in records if one["method"] == method and set(names) & set(one["chosen"])]
        ends = Counter(end for one in chosen for end in _ends(effort, method, one, names))
        tried = [bool(_ends(effort, method, one, names)) for one in effort.settings(method)]
        found, of = found + ends.total(), of + len(chosen)
        by_chance += len(chosen) * sum(tried) / len(tried)
        if chosen and ends.total() >= _OFTEN * len(chosen):
            often.append(f"{method} {' and '.join(f'{count} {end}' for end, count in ends.items())}")
    whose = f"; {', '.join(often)}" if often else ""
    return f"{found} of {of} ({by_chance:.0f}{whose})"


def _ends(effort: Effort, method: str, setting: Setting, names: Sequence[str]) -> list[str]:
    """At which end each of `names` lies, of those at one; a method has β or τ, not both."""
    ends = outermost(effort.contender(method), setting, effort.trials)
    ends |= {"rounds": "longest"} if setting["rounds"] == max(effort.rounds) else {}
    return [ends[name] for name in names if name in ends]
