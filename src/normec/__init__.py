"""normec: distributed private optimisation with smoothed normalisation and error feedback.

The public names, loaded when first used, so that ``import normec`` is quick and needs torch only where
something is computed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callbacks import Callback
    from .errors import Diverged, UsageError
    from .history import History
    from .methods import DPSGD, EF21, GD, Clip21, Method, NormEC
    from .operators import Clip, Identity, RandK, SmoothedNorm, TopK
    from .privacy import Privacy
    from .problem import Problem
    from .run import Run
    from .sampling import Everyone, FixedSize, Poisson
    from .training import train

__version__ = "0.1.0"

_HOME = {
    "callbacks": ("Callback",),
    "errors": ("Diverged", "UsageError"),
    "history": ("History",),
    "methods": ("Clip21", "DPSGD", "EF21", "GD", "Method", "NormEC"),
    "operators": ("Clip", "Identity", "RandK", "SmoothedNorm", "TopK"),
    "privacy": ("Privacy",),
    "problem": ("Problem",),
    "sampling": ("Everyone", "FixedSize", "Poisson"),
    "run": ("Run",),
    "training": ("train",),
}
_ROOMS = ("cluster",)
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "DPSGD",
    "EF21",
    "GD",
    "Callback",
    "Clip",
    "Clip21",
    "Diverged",
    "Everyone",
    "FixedSize",
    "History",
    "Identity",
    "Method",
    "NormEC",
    "Poisson",
    "Privacy",
    "Problem",
    "RandK",
    "Run",
    "SmoothedNorm",
    "TopK",
    "UsageError",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE:
        raise AttributeError(f"module 'normec' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
