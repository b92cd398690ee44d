"""Private runs that are killed (`tests.support.kills`): a problem, a run, and the draws that cannot be repeated.

As a program, for every STEP-th instant: ``python -m tests.training.private.killing FOLDER NOISE ROUNDS STEP``. Beside
the copy of instant N, N.draws has a line for every draw of noise that cannot be repeated.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from normec import Logging, NormEC, Privacy, Problem, Rotation, Storage, train
from normec.privacy.noise import SecureNoise

from ...support.kills import end_everywhere


def problem() -> Any:
    """Three clients that pull in different directions, six parameters."""
    centres = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Problem.from_functions(
        [lambda x, c=c: ((x - c) ** 2).sum() for c in centres], torch.zeros(6, dtype=torch.float64)
    )


def private_run(out: Path, noise: str, rounds: int, **options: Any) -> Any:
    """A run whose only checkpoints are those of its first and its last round; NOISE may be "seeded correlated"."""
    kind, _, correlated = noise.partition(" ")
    privacy = Privacy(epsilon=5, trust="secure-sum", noise=kind)  # type: ignore[arg-type]
    if correlated:
        privacy = Privacy(sigma=1.0, trust="central", noise=kind, noise_bands="best")  # type: ignore[arg-type]
    given = {
        "participation": Rotation(3) if correlated else None,
        "lr": 0.05,
        "rounds": rounds,
        "seed": 0,
        "logging": Logging(every=1),
        "storage": Storage(checkpoint_seconds=1000.0),
    } | options
    return train(problem(), NormEC(0.1, 0.1), out=out, privacy=privacy, **given)


def note_draws(path: Path) -> None:
    """Write down the digest of all noise that is drawn afresh."""
    draw = SecureNoise.integers

    def noted(self: SecureNoise, count: int, scale: float) -> Any:
        found = draw(self, count, scale)
        with path.open("a") as file:
            file.write(hashlib.sha256(found.tobytes()).hexdigest() + "\n")
        return found

    SecureNoise.integers = noted  # type: ignore[method-assign]


def main(folder: Path, noise: str, rounds: int, step: int) -> None:
    def run(out: Path) -> None:
        note_draws(out.parent / f"{out.name}.draws")
        private_run(out, noise, rounds)

    private_run(folder.parent / "first", noise, 1)  # what a run imports is then there before the forks
    end_everywhere(folder, run, step, repeatable=noise.startswith("seeded"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
