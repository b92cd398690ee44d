"""A server that reads a private image by asking for models at which the arithmetic overflows if a pixel is bright."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import Problem
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.wire import Array, Reply

from .hostile import HostileServer, zeros

PIXELS, LEVELS = 16, 17  # an image's pixels are 0, 1/16, …, 1
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 1, bias=False), nn.Linear(1, 2, bias=False))
LARGEST = float(np.finfo(np.float32).max)


def private_image(number: int) -> Tensor:
    return torch.randint(LEVELS, (PIXELS,), generator=torch.Generator().manual_seed(number)) / (LEVELS - 1)


def party(folder: Path, image: Tensor) -> Party:
    records = TensorDataset(image[None], torch.tensor([1]))
    oracle = ProblemOracle(Problem(MODEL, nn.functional.cross_entropy, [records]))
    return Party(folder, Policy(epsilon=1.0, least_sigma=1.0), oracle, node="a")


def overflowing(pixel: int, threshold: float) -> Array:
    """A finite model whose logits are infinite if and only if the pixel is brighter than `threshold`."""
    x = zeros(PIXELS + 2, np.float32)
    x[pixel] = 1e19
    x[PIXELS] = LARGEST / 1e19 / threshold
    return x


def read_image(server: HostileServer) -> tuple[Tensor, list[object]]:
    """Binary search of each pixel; an answer that is no message counts as "brighter". Also: all that was seen."""
    found, seen = torch.zeros(PIXELS), list[object]()
    for pixel in range(PIXELS):
        low, high = 0, LEVELS - 1  # the pixel is between low/16 and high/16
        while low < high:
            middle = (low + high) // 2
            answer = server.ask(overflowing(pixel, (middle + 0.5) / 16))
            shape = (len(answer.message), answer.loss) if isinstance(answer, Reply) else answer.reason
            seen.append((type(answer), answer.round, shape))
            low, high = (low, middle) if isinstance(answer, Reply) else (middle + 1, high)
        found[pixel] = low / 16
    return found, seen


def test_the_attack_would_work_on_bare_gradients() -> None:
    """The models of the attack do overflow for bright pixels and for no others: the next test rests on this."""
    image = private_image(0)
    problem = Problem(MODEL, nn.functional.cross_entropy, [TensorDataset(image[None], torch.tensor([1]))])
    for pixel in range(PIXELS):
        for threshold in (0.03, 0.47, 0.97):
            x = torch.from_numpy(overflowing(pixel, threshold))
            finite = bool(torch.isfinite(problem.outputs(x, image[None])).all())
            assert finite == bool(image[pixel] < threshold)


@pytest.mark.parametrize("sigma", [10.0, 1e100], ids=["noise that costs", "noise so large that it costs nothing"])
def test_overflows_tell_the_server_nothing_and_every_answer_is_paid_for(sigma: float, tmp_path: Path) -> None:
    seen = []
    for number in (0, 1):
        image = private_image(number)
        server = HostileServer(party(tmp_path / str(number), image), zeros(PIXELS + 2, np.float32), sigma=sigma)
        found, transcript = read_image(server)
        assert not torch.equal(found, image)
        releases = read_releases(tmp_path / str(number))
        assert releases.count() == len(server.left)
        assert releases.epsilon("client", 1e-5) <= 1.0
        assert (len(server.left) > 0) == (sigma == 10.0)
        seen.append(transcript)
    assert seen[0] == seen[1]  # kinds, rounds, sizes, reasons: the same for both images
