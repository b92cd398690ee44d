"""One private run of a study: what it reaches, and what its estimate is made of when it ends."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import gradients
from ...errors import Diverged
from ...methods import Method
from ...observing import copied
from ...operators import norms
from ...problem import Problem
from ...records import Records
from ...run import Run
from ...training import train
from .. import build, methods
from ..config import RunConfig, make

Found = dict[str, Any]
DIVERGED = 0.0  # the accuracy, or the area, of a run that did not come to its end


def measure(settings: dict[str, Any], seed: int, validation: float, by: str, why: bool = False) -> Found:
    """`value` at the end of a run: on the records held out where some are, else on the test set.

    `by` says what is measured: "accuracy", or "area", that under the ROC curve, where one class is so common that
    accuracy says nothing. With `why` also what ĝ holds at the end: see `_anatomy`.
    """
    config: RunConfig = make({**settings, "seed": seed, "validation": validation})
    problem = _problem(build.known_by(config), config, str(build.device(config.device)))
    method = methods.build(config, len(problem.x0), problem.tensor_sizes)
    asked = build.training(config)
    asked |= {"log_every": config.rounds, "evaluate_every": config.rounds}
    try:
        run = train(problem, method, **asked)
    except Diverged as error:
        return {"value": DIVERGED, "diverged": error.round}
    last = run.history.rows[-1]
    prefix = "validation_" if validation else ""
    found = {"loss": last["validation_loss" if validation else "test_loss"]}
    held = problem.validation if validation else problem.test
    found["value"] = last[f"{prefix}accuracy"] if by == "accuracy" else _area(problem, run, held)
    if run.privacy is not None:
        found["exact_epsilon"], found["sigma"] = run.privacy.epsilon, run.privacy.sigma
    return found | (_anatomy(problem, method, run) if why else {})


_kept: dict[str, Problem] = {}


def _problem(name: str, config: RunConfig, device: str) -> Problem:
    """The problem of a configuration, on its device; the last few are kept, for trials differ in little else."""
    key = f"{device} {name}"
    if key not in _kept:
        if len(_kept) >= 4:
            _kept.pop(next(iter(_kept)))
        _kept[key] = build.problem(config).to(torch.device(device))
    return _kept[key]


def area(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs, a positive and a negative record, that the scores put in order; a tie counts half."""
    values, place, count = scores.double().unique(return_inverse=True, return_counts=True)
    del values
    ranks = (count.cumsum(0) - (count - 1) / 2)[place]  # ties share the mean of their ranks
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


def _anatomy(problem: Problem, method: Method, run: Run) -> Found:
    """Norms at the end: of ∇f, of ĝ, of the noise in ĝ, of the clients' memory error; and the cosine of ĝ and ∇f.

    With error feedback the noise in ĝ is all that it has gathered, ‖ĝ − mean g_i‖, measured; without, that of one
    round, βσ√(d/n), expected.
    """
    state, seed = run.state, 0
    engine = gradients.choose("auto", problem, None, seed)
    total, away = torch.zeros_like(state.x), 0.0
    for block in engine.blocks(state.x, copied(state.buffers), state.round, full=True):
        total += block.grads.sum(0)
        if method.feedback:
            away += float(norms(block.grads - state.memory[block.rows].to(block.grads)).sum())
    slope, n = total / problem.clients, problem.clients
    sigma = run.privacy.sigma if run.privacy is not None else 0.0
    if method.feedback:
        noise = float(torch.linalg.vector_norm(state.estimate - state.memory.mean(0)))
    else:
        noise = method.beta * sigma * math.sqrt(len(state.x) / n)
    both = float(torch.linalg.vector_norm(slope)), float(torch.linalg.vector_norm(state.estimate))
    found = {"gradient": both[0], "estimate": both[1], "noise": noise}
    found["cosine"] = float(slope @ state.estimate) / (both[0] * both[1]) if both[0] * both[1] > 0 else 0.0
    if method.feedback:
        found["memory_error"] = away / n
    return found
