"""Whether a release would come out bit for bit the same if it were made again, and what its bits depend on."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from . import __version__
from .code_digest import UnknownObject, code_digest
from .functions import FunctionProblem
from .methods import CLIENT_STEPS, SERVER_STEPS, Method, overridden
from .objective import Objective
from .operators import Clip, SmoothedNorm
from .problem import Problem
from .records import ResidentRecords
from .sampling import Participation


def computation(problem: Objective, method: Method, participation: Participation) -> str | None:
    """What computes the messages, as a digest: the same one computes the same messages from the same records.

    None where that cannot be known: data sets that are asked record by record, steps that are not this library's, code
    that cannot be looked into.
    """
    if type(method.operator) not in (SmoothedNorm, Clip) or overridden(method, *CLIENT_STEPS, *SERVER_STEPS):
        return None
    try:
        if type(problem) is FunctionProblem:
            return code_digest(problem.functions, participation)
        if type(problem) is Problem and isinstance(problem.records, ResidentRecords):
            parts = problem.model, problem.loss, problem.penalty, problem.augment, problem.transform
            return code_digest(*parts, participation)
    except UnknownObject:
        return None
    return None


def machine(device: torch.device) -> tuple[str, ...]:
    """What the bits of a sum depend on: versions, the processor and its instructions, the GPU."""
    found = [__version__, torch.__version__, device.type, _processor(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        found += [torch.cuda.get_device_name(device), str(torch.version.cuda), str(torch.backends.cudnn.version())]
    return tuple(found)


@cache
def _processor() -> str:
    """The processor's model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} {platform.processor()}"
