"""One run of a study: its test or validation value, and diagnostics of the server's estimate at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normec import Diverged, Method, Problem, Run
from normec.algorithms.operators import normalise, norms
from normec.experiments import build, methods
from normec.gradients.choice import choose_engine
from normec.problems.client_data import Records
from normec.settings import RunConfig, make
from normec.training import interleaved
from normec.training.loop import TrainingLoop
from normec.training.observer import copied
from normec.training.run import Plan
from normec.training.train import prepare, ready

from . import shakespeare
from .scattering import with_features

Measurement = dict[str, Any]
DIAGNOSTICS = ("start", "parameters", "gradient", "estimate", "noise", "cosine", "turn", "memory_error")
CACHED = 8  # problems that are kept; the splits and seeds of one study
DIVERGED = 0.0  # the accuracy or area of a run that diverged


@dataclass(frozen=True)
class Trial:
    """A run to measure.

    Attributes:
        settings: The settings of the run; `features` names features of its images to train on.
        seed: Its seed.
        validation: The share of the training records that is held out.
        by: "accuracy", the "area" under the ROC curve if one class is so frequent that accuracy is not informative, or
            a metric of the problem.
        diagnose: Also compute the diagnostics of `_diagnostics`, and the value of a pretrained model as `start`.
    """

    settings: Mapping[str, Any]
    seed: int
    validation: float
    by: str = "accuracy"
    diagnose: bool = False


def measure(trials: Sequence[Trial]) -> list[Measurement]:
    """Run trials of the same precision, which take turns on a GPU.

    Returns:
        For each trial a dictionary with its `value` on the held-out records, or on the test set if none are held out.
    """
    begun = [_Begun.of(trial) for trial in trials]
    device, precision = begun[0].problem.x0.device, begun[0].rounds.plan.precision
    with ready(precision):
        ends = interleaved.run_interleaved([one.rounds.steps(lambda: False) for one in begun], device)
        return [one.found(end) for one, end in zip(begun, ends, strict=True)]


@dataclass(frozen=True)
class _Begun:
    trial: Trial
    problem: Problem
    method: Method
    rounds: TrainingLoop

    @classmethod
    def of(cls, trial: Trial) -> _Begun:
        settings = {**trial.settings, "seed": trial.seed, "validation": trial.validation}
        features = settings.pop("features", None)
        config: RunConfig = make(settings)
        problem = _problem(config, features, str(build.device(config.device)))
        method = methods.build(config, len(problem.x0), problem.tensor_sizes)
        options = build.training(config)
        at_the_end = replace(options.logging, every=config.rounds, evaluate_every=config.rounds)
        return cls(trial, problem, method, prepare(problem, method, replace(options, logging=at_the_end)))

    def found(self, run: Run | Exception) -> Measurement:
        if isinstance(run, Diverged):
            return {"value": DIVERGED, "diverged": run.round}
        if isinstance(run, Exception):
            raise run
        trial, problem = self.trial, self.problem
        last = run.history.rows[-1]
        prefix = "validation_" if trial.validation else ""
        found = {"loss": last["validation_loss" if trial.validation else "test_loss"]}
        held = problem.validation if trial.validation else problem.test
        found["value"] = _area(problem, run, held) if trial.by == "area" else last[prefix + trial.by]
        if trial.diagnose and trial.settings.get("model") in shakespeare.PRETRAINED:
            found["start"] = problem.evaluate(problem.x0, problem.initial_buffers())[prefix + trial.by]
        if run.privacy is not None:
            found["exact_epsilon"], found["sigma"] = run.privacy.epsilon, run.privacy.sigma
        found["parameters"] = len(problem.x0)
        plain = trial.settings.get("server_optimizer") is None and "estimate" in run.state.server
        explained = trial.diagnose and plain and set(run.state.clients) <= {"memory"}
        return found | (_diagnostics(problem, self.method, run, self.rounds.plan) if explained else {})


_cache: dict[str, Problem] = {}


def _problem(config: RunConfig, features: str | None, device: str) -> Problem:
    """The problem of a configuration on its device; the last few are cached, since most trials share one."""
    key = f"{device} {features} {build.problem_key(config)}"
    if key not in _cache:
        if len(_cache) >= CACHED:
            _cache.pop(next(iter(_cache)))
        made = shakespeare.problem(config) if config.data == shakespeare.NAME else build.problem(config)
        found = made.to(torch.device(device))
        _cache[key] = with_features(found, features) if features else found
    return _cache[key]


def area(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs of a positive and a negative record that the scores order correctly; ties count half."""
    _, position, count = scores.double().unique(return_inverse=True, return_counts=True)
    ranks = (count.cumsum(0) - (count - 1) / 2)[position]  # ties share the mean of their ranks
    p, n = int(positive.sum()), int((~positive).sum())
    if not p or not n:
        return math.nan
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * n))


@torch.no_grad()
def _area(problem: Problem, run: Run, held: Records | None) -> float:
    if held is None:
        return math.nan
    inputs, targets = held.batch(0, None)
    outputs = problem.outputs(run.x, inputs)
    scores = outputs.flatten() if outputs.numel() == len(targets) else outputs[:, 1] - outputs[:, 0]
    return area(scores.cpu(), (targets > 0).cpu())


def _diagnostics(problem: Problem, method: Method, run: Run, plan: Plan) -> Measurement:
    """Diagnostics at the end of a run whose server steps along ĝ, and whose clients keep at most a memory.

    These are the norms of ∇f, of ĝ, of the noise in ĝ and of the clients' memory error; the cosine of ĝ and ∇f; and
    `turn`, the cosine of ∇f before and after the last step, which is far below zero if steps are too long.

    With error feedback the noise in ĝ is the noise of all rounds, measured as ‖ĝ − mean g_i‖. Without it, it is the
    expected noise of one round, βσ√(d/n), or √((1−p²ᵀ)/(1−p²)) times as much with momentum p after T rounds.
    """
    state, n, seed = run.state, problem.clients, 0
    engine = choose_engine("auto", problem, None, seed, precision=plan.precision)
    direction = normalise(state.estimate) if getattr(method, "server_norm", False) else state.estimate
    before = state.x + plan.step_size(state.round - 1) * direction
    slope, earlier, away = torch.zeros_like(state.x), torch.zeros_like(state.x), 0.0
    for block in engine.blocks(before, copied(state.buffers), state.round, full=True):
        earlier += block.grads.sum(0) / n
    for block in engine.blocks(state.x, copied(state.buffers), state.round, full=True):
        slope += block.grads.sum(0) / n
        if state.clients:
            away += float(norms(block.grads - state.memory[block.rows].to(block.grads)).sum())
    sigma = run.privacy.sigma if run.privacy is not None else 0.0
    if state.clients:
        noise = float(torch.linalg.vector_norm(state.estimate - state.memory.mean(0)))
    else:
        p, beta = (getattr(method, name, default) for name, default in (("momentum", 0.0), ("beta", 1.0)))
        rounds = (1 - p ** (2 * state.round)) / (1 - p**2)
        noise = beta * sigma * math.sqrt(rounds * len(state.x) / n)
    found = {"gradient": float(norms(slope)), "estimate": float(norms(state.estimate)), "noise": noise}
    found |= {"cosine": _cosine(slope, state.estimate), "turn": _cosine(slope, earlier)}
    if state.clients:
        found["memory_error"] = away / n
    return found


def _cosine(one: Tensor, other: Tensor) -> float:
    lengths = float(norms(one)) * float(norms(other))
    return float(one @ other) / lengths if lengths > 0 else 0.0
