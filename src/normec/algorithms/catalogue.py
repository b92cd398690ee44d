"""The methods that command lines, configuration files and reports know by name, with their usual settings.

An entry names the class or function that makes the method; it is imported when the method is built, so that help texts
and completion need no torch. A new method of this package is a file beside this one and an entry here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

Settings = Mapping[str, Any]
StepSize = float | Callable[[Settings], float]

GROUP = "normec.methods"  # the entry points by which installed packages offer methods of their own
ROUNDS = 300  # of a run, unless an entry or the user says otherwise


@dataclass(frozen=True)
class Entry:
    """A named method.

    Attributes:
        title: The name that reports print.
        factory: MODULE:NAME below this package, called with the settings; it also gets `sizes`, the lengths of the
            model's tensors, where it has such a parameter.
        settings: The method's settings with their defaults; None stands for a value that depends on the model.
        lr: The usual step size, or a function of the settings.
        private: The settings that differ in a private run; None for a method whose messages have no bound.
        private_lr: The usual step size of a private run.
        private_rounds: The usual rounds of a private run.
        local: The usual local steps, by the settings of the group "local"; None for a method that sends one gradient.
        private_local: The settings of the local steps that differ in a private run.
    """

    title: str
    factory: str
    settings: Settings
    lr: StepSize
    private: Settings | None = field(default_factory=dict)
    private_lr: StepSize | None = None
    private_rounds: int = ROUNDS
    local: Settings | None = None
    private_local: Settings = field(default_factory=dict)

    def make(self) -> Callable[..., Any]:
        """The class or function that builds the method."""
        module, _, name = self.factory.partition(":")
        made: Callable[..., Any] = getattr(import_module(f".{module}", __package__), name)
        return made

    def build(self, settings: Settings, sizes: Sequence[int], participation: float = 1.0) -> Any:
        """Build the method for a model of tensors of these sizes, of whose clients this share takes part in a round."""
        own = dict(settings)
        if self.takes("sizes"):
            own["sizes"] = tuple(sizes)
        if self.takes("participation"):
            own["participation"] = participation
        return self.make()(**own)

    def takes(self, argument: Literal["sizes", "participation"]) -> bool:
        """Whether the method is built with this argument, which follows from the problem or the run."""
        return argument in inspect.signature(self.make()).parameters

    def defaults(self, private: bool) -> dict[str, Any]:
        """The settings that are used where none are given."""
        return {**self.settings, **((self.private or {}) if private else {})}

    def local_defaults(self, private: bool) -> dict[str, Any]:
        """The settings of the local steps where none are given; empty for a method that sends one gradient."""
        return {**self.local, **(self.private_local if private else {})} if self.local is not None else {}

    def step_size(self, settings: Settings, private: bool) -> float:
        """The usual step size for these settings; a server's momentum p makes it 1 − p times as long."""
        chosen = self.private_lr if private and self.private_lr is not None else self.lr
        size = chosen(settings) if callable(chosen) else chosen
        return size * (1 - (settings.get("momentum") or 0.0))


def _by_server_norm(with_norm: float, without: float) -> Callable[[Settings], float]:
    """A normalised step has length one, any other the length of the gradient: each has its own usual step size."""
    return lambda settings: without if settings.get("server_norm") is False else with_norm


_ADAPTIVE = {"quantile": 0.5, "threshold_lr": 0.2, "bit_weight": 0.2}

# Without noise, alpha is the paper's choice after its first experiment and beta its best value; the step sizes suit
# the digits, about 1/L for the methods that follow the gradient.
# Private settings, step sizes and rounds won on validation data of the digits at ε = 8, IID, with 16 trials each,
# rounded; the memory forgets, so that the noise in ĝ does not pile up.
CATALOGUE: Mapping[str, Entry] = {
    "normec": Entry(
        title="NormEC",
        factory="tensor_norm:normec",
        settings={"alpha": 0.01, "beta": 0.1, "server_norm": True, "decay": 0.0},
        lr=_by_server_norm(0.05, 1.0),
        private={"beta": 0.011, "decay": 0.05},
        private_lr=_by_server_norm(0.09, 1.5),
        private_rounds=200,
    ),
    "clip21": Entry(
        title="Clip21",
        factory="error_feedback:Clip21",
        settings={"tau": 0.1, "decay": 0.0},
        lr=1.0,
        private={"tau": 0.03},
        private_lr=0.3,
        private_rounds=50,
    ),
    "ef21": Entry(
        title="EF21", factory="error_feedback:ef21", settings={"compressor": "topk", "k": None}, lr=1.0, private=None
    ),
    "dpsgd-norm": Entry(
        title="DP-SGD with normalisation",
        factory="direct:dpsgd_norm",
        settings={"alpha": 0.01, "beta": 1.0, "momentum": 0.0},
        lr=0.2,
        private_lr=0.73,
        private_rounds=50,
    ),
    "dpsgd-clip": Entry(
        title="DP-SGD with clipping",
        factory="direct:dpsgd_clip",
        settings={"tau": 0.1, "beta": 1.0, "momentum": 0.0},
        lr=1.0,
        private={"tau": 0.47},
        private_lr=0.5,
        private_rounds=200,
    ),
    "gd": Entry(title="gradient descent", factory="direct:GD", settings={}, lr=1.0, private=None),
    "normec-momentum": Entry(
        title="NormEC with client momentum",
        factory="client_momentum:MomentumNormEC",
        settings={"alpha": 0.01, "beta": 0.1, "client_momentum": 0.9, "server_norm": True, "decay": 0.0},
        lr=_by_server_norm(0.05, 1.0),
        private={"beta": 0.011, "decay": 0.05, "client_momentum": 0.5},
        private_lr=_by_server_norm(0.09, 1.5),
        private_rounds=200,
    ),
    "clip21-sgd2m": Entry(
        title="Clip21-SGD2M",
        factory="client_momentum:Clip21SGD2M",
        settings={"tau": 0.1, "beta": 1.0, "client_momentum": 0.9, "decay": 0.0},
        lr=1.0,
        private={"tau": 0.03, "client_momentum": 0.5},
        private_lr=0.3,
        private_rounds=50,
    ),
    "ef21-sgdm": Entry(
        title="EF21-SGDM",
        factory="client_momentum:ef21_sgdm",
        settings={"compressor": "topk", "k": None, "client_momentum": 0.9, "server_norm": False},
        lr=_by_server_norm(0.05, 1.0),
        private=None,
    ),
    "dpsgd-adaptive": Entry(
        title="DP-SGD with adaptive clipping",
        factory="adaptive_clip:dpsgd_adaptive",
        settings={"tau": 0.1, "beta": 1.0, "momentum": 0.0, **_ADAPTIVE},
        lr=1.0,
        private={"tau": 0.47},
        private_lr=0.5,
        private_rounds=200,
    ),
    "clip21-adaptive": Entry(
        title="Clip21 with adaptive clipping",
        factory="adaptive_clip:clip21_adaptive",
        settings={"tau": 0.1, "decay": 0.0, **_ADAPTIVE},
        lr=1.0,
        private={"tau": 0.03},
        private_lr=0.3,
        private_rounds=50,
    ),
    "clip21-sgd2m-adaptive": Entry(
        title="Clip21-SGD2M with adaptive clipping",
        factory="adaptive_clip:clip21_sgd2m_adaptive",
        settings={"tau": 0.1, "beta": 1.0, "client_momentum": 0.9, "decay": 0.0, **_ADAPTIVE},
        lr=1.0,
        private={"tau": 0.03, "client_momentum": 0.5},
        private_lr=0.3,
        private_rounds=50,
    ),
    # The settings of local steps won on validation data of the digits, over 2 seeds, without noise and at ε = 8, among
    # 3 to 18 trials each. Without noise tau is meant to clip nothing; it only keeps a client from going astray.
    "fedavg": Entry(
        title="DP-FedAvg",
        factory="direct:dpsgd_clip",
        settings={"tau": 10.0, "momentum": 0.0},
        lr=1.0,
        private={"tau": 0.3},
        private_rounds=100,
        local={"local_steps": 5, "local_lr": 1.0, "local_scale": "difference"},
    ),
    "fedprox": Entry(
        title="DP-FedProx",
        factory="direct:dpsgd_clip",
        settings={"tau": 10.0, "momentum": 0.0},
        lr=1.0,
        private={"tau": 0.3},
        private_rounds=100,
        local={"local_steps": 5, "local_lr": 1.0, "local_scale": "difference", "prox": 0.1},
    ),
    "fed-normec": Entry(
        title="Fed-NormEC",
        factory="tensor_norm:normec",
        settings={"alpha": 0.01, "beta": 0.1, "server_norm": True, "decay": 0.0},
        lr=_by_server_norm(0.1, 1.0),
        private={"beta": 0.011, "decay": 0.05},
        private_lr=_by_server_norm(0.09, 1.5),
        private_rounds=200,
        local={"local_steps": 5, "local_lr": 0.1},
        private_local={"local_lr": 0.03},
    ),
    "scaffold": Entry(
        title="DP-SCAFFOLD",
        factory="scaffold:Scaffold",
        settings={"tau": 1.0},
        lr=1.5,
        local={"local_steps": 5, "local_lr": 0.3},
    ),
}

# The methods that a rule for clipped records covers (R4), with the settings that they use for protected records.
#
# At client level a bounded message is all that counts, so alpha and tau are small there. Here the noise follows
# L (s + e_k), with L = 1/alpha for normalisation and 1 for clipping, s the largest share of a record in its client's
# gradient, and e_k what the memory holds of it. With a small alpha this exceeds 2b, and clipping the records gains
# nothing. So alpha and tau are larger than the gradients, which are shorter than 1 as all records are, and memories
# forget quickly, which keeps e_k a small multiple of s.
#
# The values except those of dpsgd-clip won on validation data, a fifth of the training records, of digits,
# breast_cancer and 4,000 records of a9a, with 20, 10 and 20 clients that are alike and softmax regression: the best
# mean accuracy over 3 seeds, local trust and secure sums, and ε = 1, 2 and 8, rounded. gd has those of dpsgd-clip.
FOR_RECORDS: Mapping[str, Settings] = {
    "dpsgd-clip": {"tau": 1.0, "lr": 2.0},
    "dpsgd-norm": {"alpha": 3.0, "lr": 8.0, "rounds": 50},
    "normec": {"alpha": 10.0, "beta": 1.0, "decay": 0.5, "server_norm": False, "lr": 20.0, "rounds": 50},
    "clip21": {"tau": 10.0, "decay": 0.5, "lr": 5.0, "rounds": 20},
    "gd": {"lr": 2.0, "rounds": 200},
}

METHODS = tuple(CATALOGUE)
PRIVATE_METHODS = tuple(name for name, entry in CATALOGUE.items() if entry.private is not None)
PAPER_METHODS = ("normec", "clip21", "ef21", "dpsgd-norm", "dpsgd-clip", "gd")


def installed() -> dict[str, EntryPoint]:
    """Return the methods that installed packages offer, by name."""
    return dict(_offered(tuple((path, _changed(path)) for path in sys.path)))


@lru_cache(maxsize=1)
def _offered(folders: tuple[tuple[str, int | None], ...]) -> dict[str, EntryPoint]:  # noqa: ARG001
    """Read the entry points of all packages, which takes milliseconds; once while no folder of them changes."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _changed(path: str) -> int | None:
    """Return when a folder was last changed, as by the installation of a package; None if it is not there."""
    with suppress(OSError):
        return Path(path).stat().st_mtime_ns
    return None


def is_own(name: str) -> bool:
    """Whether a method comes from a user's file or from another installed package."""
    return ":" in name or name in installed()
