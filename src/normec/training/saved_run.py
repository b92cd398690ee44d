"""A run that is read from its folder: `normec.load`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UsageError, needed
from ..storage.history import STARTED_BY, History, in_a_line
from ..storage.run_folder import FEDERATION, MODEL
from ..system.code_files import in_a_file
from ..system.files import read_if_present, read_json
from .prediction import PREDICTED, predicted

if TYPE_CHECKING:
    from ..privacy.mechanism import Spent


WENT_ON = "the run went on after this result and was killed: ε counts everything that it released"


@dataclass(frozen=True)
class Result:
    """The summary and the history of a run, new or read from its folder."""

    folder: Path
    summary: dict[str, Any]
    history: History


@dataclass(frozen=True)
class SavedRun(Result):
    """A run that was read from its folder by `normec.load`.

    Args:
        folder: The folder of the run.
        summary: The contents of summary.json: the status, the settings and the results.
        history: The rows that were recorded.
        tensors: The tensors of the final model, under the names of its `state_dict`; "x" for plain functions.
        model: The final model as a module; None if no module was given and the folder does not say how to build one.
        transform: What the problem applied to every batch before the model.

    Example:
        >>> from pathlib import Path
        >>> summary = {"status": "finished", "rounds": 20, "config": {"lr": 0.1}, "privacy": None}
        >>> run = SavedRun(Path("runs/first"), summary, History(), {"x": torch.zeros(2)})
        >>> run.finished, run.rounds, run.settings, run.x
        (True, 20, {'lr': 0.1}, tensor([0., 0.]))
    """

    tensors: dict[str, Tensor]
    model: nn.Module | None = None
    transform: Callable[[Any], Any] | None = None

    def __repr__(self) -> str:
        """Return the result in a line; the settings are in `settings`."""
        from ..privacy.display import shown_epsilon

        made = f"{self.settings.get('method', 'a method')}, {self.summary.get('round', 0)} of {self.rounds} rounds"
        epsilon = None if self.privacy is None else shown_epsilon(self.privacy.epsilon)
        return f"SavedRun({in_a_line(made, self.history, epsilon, self.stopped, self.folder)})"

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting with the value that was used."""
        held: dict[str, Any] = self.summary["config"]
        return held

    @property
    def finished(self) -> bool:
        """Whether all rounds were done."""
        return bool(self.summary["status"] == "finished")

    @property
    def stopped(self) -> str | None:
        """Why the run ended early, if it did."""
        return self.summary.get("stopped")

    @property
    def rounds(self) -> int:
        """The number of rounds that were planned."""
        return int(self.summary["rounds"])

    @property
    def privacy(self) -> Spent | None:
        """What was spent, which the ledger in the folder supports; None for a run without privacy."""
        from ..privacy.mechanism import Spent

        held = self.summary["privacy"]
        if held is None:
            return None
        try:
            return Spent(**held | {name: tuple(held[name]) for name in ("not_covered", "notes")})
        except (TypeError, KeyError):
            raise UsageError(
                f"{self.folder / 'summary.json'} is damaged: its privacy is not what a run writes; restore it from a "
                "backup"
            ) from None

    @property
    def x(self) -> Tensor:
        """The final model as a vector: its trainable parameters, flattened in order."""
        if "x" in self.tensors and self.model is None:
            return self.tensors["x"]
        parameters = [p.detach().flatten() for p in self._module().parameters() if p.requires_grad]
        return torch.cat(parameters)

    def predict(self, inputs: Any, batch_size: int = PREDICTED) -> Any:
        """Return the outputs of the final model; see `Run.predict`."""
        model = self._module()
        if "transform" in self.settings and self.transform is None:
            raise UsageError(
                f"the problem of this run transforms its inputs by {self.settings['transform']}; "
                "give it as normec.load(folder, model=…, transform=…)"
            )
        return predicted(model, inputs, self.transform, batch_size)

    def plot(self, path: str | Path | None = None, columns: list[str] | None = None) -> Any:
        """Draw the history; see `Run.plot`."""
        from ..report.pictures import history_figure

        return history_figure(self.history, path, columns)

    def _module(self) -> nn.Module:
        if self.model is None:
            raise UsageError(
                f"{self.folder} holds the numbers of a model, not its code; give the module: "
                "normec.load(folder, model=Net())"
            )
        return self.model


def load(folder: str | Path, model: nn.Module | None = None, transform: Callable[[Any], Any] | None = None) -> SavedRun:
    """Read a run from its folder: its results, its history, what was spent, and the final model.

    The ledger of a private run must support the ε of its summary, else the run is refused.

    Args:
        folder: The folder of a run, from `train(..., out=folder)`, `Run.save`, the command line or a federation.
        model: A module with the run's parameters, into a copy of which they are loaded. A run of `normec train` needs
            none if its settings name a model and data of normec. A file that they name is not run, because a folder
            may come from anybody.
        transform: The transform of the problem, if it has one; `predict` applies it.

    Returns:
        The run. Without a module `model` is None, and `tensors` holds the parameters.

    Raises:
        UsageError: The folder holds no finished or interrupted run, a file of it is damaged, or the model does not fit.

    Example:
        >>> import tempfile, torch
        >>> from normec import GD, Problem, train
        >>> problem = Problem.from_functions([lambda x: (x**2).sum()], torch.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = train(problem, GD(), lr=0.25, rounds=2, out=folder)
        ...     again = load(folder)
        >>> again.finished, again.x, again.history["loss"]
        (True, tensor([0.2500, 0.2500]), [2.0, 0.5, 0.125])
    """
    folder = Path(folder)
    found = read(folder)
    if found.summary["status"] in ("diverged", "failed"):
        raise UsageError(f"the run in {folder} {found.summary['status']}: {found.summary.get('error')}")
    tensors = _tensors(folder / MODEL)
    unnamed = STARTED_BY in found.summary["config"] or found.summary.get("engine") == FEDERATION
    if model is None and not unnamed and "x" not in tensors:
        model, transform = _named_model(found.summary["config"]) or (None, transform)
    if model is not None:
        model = _filled(model, tensors, folder)
    return SavedRun(found.folder, found.summary, found.history, tensors, model, transform)


def read(folder: Path) -> Result:
    """Read a run from its folder; the ledger of a private run must support its summary.

    What was promised is said in the words of the ledger. If the run was interrupted, went on and was killed, its
    summary is older than its ledger, and the ε is the ledger's.
    """
    from ..privacy.ledger_verification import verified

    try:
        summary = read_json(folder / "summary.json")
    except FileNotFoundError:
        raise UsageError(f"{folder} has no finished or interrupted run (there is no summary.json)") from None
    if not isinstance(summary, dict) or "status" not in summary:
        raise UsageError(
            f"{folder / 'summary.json'} is damaged: it has no status; remove it, and run the command again to write it"
        )
    paid = verified(folder, summary)
    spent = summary.get("privacy")
    if paid is not None and isinstance(spent, dict):
        said: dict[str, Any] = {"statement": paid.promise(summary.get("clients"))}
        if spent["releases"] < paid.releases:
            said |= {"epsilon": paid.epsilon, "releases": paid.releases, "notes": [*spent.get("notes", ()), WENT_ON]}
        summary = {**summary, "privacy": {**spent, **said}}
    history = History(folder / "metrics.jsonl")
    history.reread()
    return Result(folder, summary, history)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file."""
    held = read_if_present(path)
    if held is None:
        raise UsageError(f"{path} is missing; call train again with the same folder to write it")
    unpacked = needed("safetensors.torch").load
    try:
        tensors: dict[str, Tensor] = unpacked(held)
    except Exception as error:  # of the Rust library, which has one type for all
        raise UsageError(
            f"{path} is damaged: {error}; restore it from a backup, or remove it and call train again with the same "
            "folder to write it"
        ) from None
    return tensors


def _named_model(settings: Mapping[str, Any]) -> tuple[nn.Module, Callable[[Any], Any] | None] | None:
    """Return the model and the transform that the settings of a run of the command line name; None for code in files.

    A folder that somebody else has written may name any file, and to load it is to run it.
    """
    from ..experiments import build
    from ..settings.validation import make

    config = make(settings)
    if in_a_file(config.model) or in_a_file(config.data):
        return None
    problem = build.problem(config)
    return problem.model, problem.transform


def _filled(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> nn.Module:
    """Return a copy of the module with the run's parameters and buffers, in their type."""
    filled = copy.deepcopy(model).eval()
    floating = next((value.dtype for value in tensors.values() if value.is_floating_point()), None)
    try:
        filled.to(dtype=floating).load_state_dict(dict(tensors))
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"the model does not fit {folder / MODEL}: {why}; give a module with the layers of the run's model"
        ) from None
    return filled
