"""Whether a release would come out bit for bit the same if it were made again, and what its bits depend on."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .. import __version__
from ..algorithms.direct import DPSGD
from ..algorithms.error_feedback import Clip21, NormEC
from ..algorithms.method import Method
from ..algorithms.operators import Clip, SmoothedNorm
from ..problems.client_data import ResidentRecords
from ..problems.functions import FunctionProblem
from ..problems.objective import Objective
from ..problems.problem import Problem
from ..sampling.participation import Participation
from .code_digest import UnknownObject, code_digest

_ARITHMETIC = ("MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "ATEN_", "KMP_", "CUBLAS_", "NVIDIA_TF32_", "TORCH_ALLOW_TF32_")


def computation(problem: Objective, method: Method, participation: Participation) -> str | None:
    """What computes the messages, as a digest: the same one computes the same messages from the same records.

    None where that cannot be known: data sets that are asked record by record, steps that are not this library's, code
    that cannot be looked into.
    """
    known = type(method) in (NormEC, Clip21) or (
        type(method) is DPSGD and type(method.operator) in (SmoothedNorm, Clip)
    )
    if not known or vars(method).keys() - {*method.spec(), "operator"}:  # an object with functions of its own
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


def adds_in_one_order(engine: str, device: torch.device) -> bool:
    """Whether an engine's kernels add up in the same order every time.

    On a GPU a caller's model may use kernels that do not: interpolation, padding by reflection, `index_add`. Only the
    engines that take known layers alone are known to repeat themselves there.
    """
    return device.type == "cpu" or engine in ("shared", "linear")


def machine(device: torch.device) -> tuple[str, ...]:
    """What the bits of a sum and of its noise depend on: versions, the processor, the GPU, and how they compute.

    The environment's variables count that choose instructions or kernels of the libraries that torch computes with.
    """
    versions = [__version__, torch.__version__, np.__version__, platform.python_version()]  # NumPy draws the noise
    how = [torch.backends.cpu.get_cpu_capability(), f"mkldnn {torch.backends.mkldnn.enabled}"]
    for kind in ("matmul", "conv"):  # a CPU may round the inputs of products, too
        how.append(f"{kind} {getattr(getattr(torch.backends.mkldnn, kind, None), 'fp32_precision', None)}")
    how.append(f"subnormals {float(torch.tensor([1e-40]) * 1) != 0}")
    how.append(f"deterministic {torch.are_deterministic_algorithms_enabled()}")
    how += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_ARITHMETIC)]
    found = [*versions, device.type, _processor(), *how]
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
