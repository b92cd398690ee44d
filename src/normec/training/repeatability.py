"""Whether repeating a release would give the same bits, and everything that the bits depend on."""

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

# scikit-learn sets these when it is imported; neither changes what is computed.
_NO_ARITHMETIC = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def computation_digest(problem: Objective, method: Method, participation: Participation) -> str | None:
    """Return a digest of the code that computes the messages; equal digests give equal messages for equal records.

    None if this cannot be known: for data sets that are fetched record by record, for methods other than NormEC, Clip21
    and DPSGD with clipping or normalisation, and for code that cannot be inspected.
    """
    known = type(method) in (NormEC, Clip21) or (
        type(method) is DPSGD and type(method.operator) in (SmoothedNorm, Clip)
    )
    if not known or vars(method).keys() - {*method.spec(), "operator"}:  # the object overrides functions
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


def sums_in_fixed_order(engine: str, device: torch.device) -> bool:
    """Whether the kernels of an engine are taken to sum in the same order every time.

    On a GPU a user's model may use kernels that do not, such as interpolation, reflection padding and `index_add`. The
    linear engine has none of them, and the shared pass has rules of its own for most layers; for layers and operations
    without a rule, it relies on PyTorch's kernels.
    """
    return device.type == "cpu" or engine in ("shared", "linear")


def machine_facts(device: torch.device) -> tuple[str, ...]:
    """Return what the bits of a sum and of its noise depend on: versions, processor, GPU, and how they round.

    This includes the environment variables that choose instructions or kernels of the libraries behind torch.
    """
    versions = [__version__, torch.__version__, np.__version__, platform.python_version()]  # NumPy draws the noise
    how = [torch.backends.cpu.get_cpu_capability(), f"mkldnn {torch.backends.mkldnn.enabled}"]
    for kind in ("matmul", "conv"):  # outside of `precision.products` a CPU may round the inputs of products as well
        rounded = getattr(getattr(torch.backends.mkldnn, kind, None), "fp32_precision", None)
        how.append(f"{kind} {'none' if rounded == 'ieee' else rounded}")
    how.append(f"subnormals {float(torch.tensor([1e-40]) * 1) != 0}")
    how.append(f"default {torch.get_default_dtype()}")
    attention = [kind for kind in _ATTENTION if getattr(torch.backends.cuda, f"{kind}_enabled")()]  # on a CPU as well
    how.append(f"attention by {' '.join(attention)}")
    how.append(f"deterministic {torch.are_deterministic_algorithms_enabled()}")
    set_here = {name: value for name, value in os.environ.items() if name not in _NO_ARITHMETIC}
    how += [f"{name}={value}" for name, value in sorted(set_here.items()) if name.startswith(_ARITHMETIC)]
    found = [*versions, device.type, _processor(), *how]
    if device.type == "cuda":
        found += [torch.cuda.get_device_name(device), str(torch.version.cuda), str(torch.backends.cudnn.version())]
    return tuple(found)


@cache
def _processor() -> str:
    """Return the model of the processor, if the system provides it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} {platform.processor()}"
