"""normec: distributed private optimisation with smoothed normalisation and error feedback.

The public names are loaded on first use, so that ``import normec`` is fast and loads torch only when something is
computed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms.adaptive_clip import AdaptiveClip
    from .algorithms.averaging import Averaging
    from .algorithms.client_momentum import EF21SGDM, Clip21SGD2M, MomentumNormEC
    from .algorithms.direct import DPSGD, GD
    from .algorithms.error_feedback import EF21, Clip21, ErrorFeedback, NormEC
    from .algorithms.local_steps import LocalSteps
    from .algorithms.lr_schedule import LRSchedule
    from .algorithms.method import Method
    from .algorithms.operators import Clip, Identity, RandK, SmoothedNorm, TopK
    from .algorithms.scaffold import Scaffold
    from .algorithms.server_optimizer import ServerOptimizer
    from .errors import BudgetSpent, Diverged, UsageError
    from .privacy import Privacy
    from .problems.problem import Problem
    from .sampling.participation import Everyone, FixedSize, Poisson, Rotation
    from .storage.history import History
    from .training.callbacks import Callback, EarlyStopping
    from .training.options import Compute, Logging, Memory, Storage
    from .training.run import Run
    from .training.saved_run import SavedRun, load
    from .training.suggestion import PublicFacts, SuggestedSetting, Suggestion, suggest
    from .training.train import train

__version__ = "0.1.0"

_HOME = {
    "algorithms.adaptive_clip": ("AdaptiveClip",),
    "algorithms.averaging": ("Averaging",),
    "algorithms.client_momentum": ("Clip21SGD2M", "EF21SGDM", "MomentumNormEC"),
    "algorithms.direct": ("DPSGD", "GD"),
    "algorithms.error_feedback": ("Clip21", "EF21", "ErrorFeedback", "NormEC"),
    "algorithms.local_steps": ("LocalSteps",),
    "algorithms.lr_schedule": ("LRSchedule",),
    "algorithms.method": ("Method",),
    "algorithms.operators": ("Clip", "Identity", "RandK", "SmoothedNorm", "TopK"),
    "algorithms.scaffold": ("Scaffold",),
    "algorithms.server_optimizer": ("ServerOptimizer",),
    "errors": ("BudgetSpent", "Diverged", "UsageError"),
    "privacy": ("Privacy",),
    "problems.problem": ("Problem",),
    "sampling.participation": ("Everyone", "FixedSize", "Poisson", "Rotation"),
    "storage.history": ("History",),
    "training.callbacks": ("Callback", "EarlyStopping"),
    "training.options": ("Compute", "Logging", "Memory", "Storage"),
    "training.run": ("Run",),
    "training.saved_run": ("SavedRun", "load"),
    "training.suggestion": ("PublicFacts", "SuggestedSetting", "Suggestion", "suggest"),
    "training.train": ("train",),
}
_PACKAGES = ("data", "distributed", "federation", "models", "privacy", "theory", "trackers")
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "DPSGD",
    "EF21",
    "EF21SGDM",
    "GD",
    "AdaptiveClip",
    "Averaging",
    "BudgetSpent",
    "Callback",
    "Clip",
    "Clip21",
    "Clip21SGD2M",
    "Compute",
    "Diverged",
    "EarlyStopping",
    "ErrorFeedback",
    "Everyone",
    "FixedSize",
    "History",
    "Identity",
    "LRSchedule",
    "LocalSteps",
    "Logging",
    "Memory",
    "Method",
    "MomentumNormEC",
    "NormEC",
    "Poisson",
    "Privacy",
    "Problem",
    "PublicFacts",
    "RandK",
    "Rotation",
    "Run",
    "SavedRun",
    "Scaffold",
    "ServerOptimizer",
    "SmoothedNorm",
    "Storage",
    "SuggestedSetting",
    "Suggestion",
    "TopK",
    "UsageError",
    "load",
    "suggest",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE:
        raise AttributeError(f"module 'normec' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
