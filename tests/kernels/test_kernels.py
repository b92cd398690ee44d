"""Triton's kernels do what plain PyTorch does: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from ..gradients.kernel_checks import CHECKS
from ..support.waiting import LIMIT

GPU = torch.cuda.is_available()


def missing() -> str | None:
    if GPU or "NORMEC_KERNELS" in os.environ:  # make test-kernels brings all that is needed
        return None
    try:
        numpy, triton = (tuple(map(int, version(name).split(".")[:2])) for name in ("numpy", "triton"))
    except PackageNotFoundError:
        return "Triton is not installed"
    if numpy >= (2, 4) and triton < (3, 8):
        return f"no GPU, and this Triton's interpreter does not work with NumPy {version('numpy')}"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the checks say in processes of their own: the interpreter must be asked for before Triton is imported.

    Interpreted, they take minutes on one core. Two processes share them: each takes the next one when it is free.
    """
    command = [sys.executable, "-m", "tests.gradients.kernel_checks", "cuda" if GPU else "cpu", "-"]
    environment = os.environ | ({} if GPU else {"TRITON_INTERPRET": "1"})
    ours, theirs = os.pipe()
    os.write(theirs, bytes(range(len(CHECKS))))
    os.close(theirs)
    started = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env=environment,
            stdin=ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(1 if GPU else 2)
    ]
    os.close(ours)
    return [line for one in started for line in one.communicate(timeout=6 * LIMIT)[0].split("\n")]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_a_kernel_does_what_plain_pytorch_does(check: str, said: list[str]) -> None:
    assert f"ok {check}" in said, "\n".join(said)
