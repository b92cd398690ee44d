"""Server normalisation tensor by tensor, against a loop over the tensors written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normec.algorithms.error_feedback import NormEC
from normec.algorithms.tensor_norm import TensorNormEC
from normec.errors import UsageError
from normec.experiments import build, methods
from normec.settings import make
from normec.training.train import prepare

SIZES = (4, 1, 3)


@pytest.mark.parametrize("in_place", [False, True])
def test_each_tensor_has_length_one_or_zero(in_place: bool) -> None:
    method = TensorNormEC(0.1, 0.5, sizes=SIZES, in_place=in_place)
    draw = np.random.default_rng(0)
    estimate, found = np.zeros(8), torch.zeros(8, dtype=torch.float64)
    for _ in range(5):
        mean = draw.normal(size=8)
        mean[4] = 0.0  # the tensor of one number stays at zero: 0/0 = 0
        direction, found = method.server_step(torch.from_numpy(mean), found)
        estimate = estimate + 0.5 * mean
        parts = [part / np.linalg.norm(part) if part.any() else part for part in np.split(estimate, [4, 5])]
        np.testing.assert_allclose(direction.numpy(), np.concatenate(parts), atol=1e-12)
        if in_place:
            estimate = np.concatenate(parts)
        np.testing.assert_allclose(found.numpy(), estimate, atol=1e-12)


def test_clients_do_what_they_do_without_it() -> None:
    plain, other = NormEC(0.1, 0.5), TensorNormEC(0.1, 0.5, sizes=SIZES)
    grad, memory = torch.randn(3, 8), torch.randn(3, 8)
    for ours, theirs in zip(other.client_step(grad, memory), plain.client_step(grad, memory), strict=True):
        assert torch.equal(ours, theirs)


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(UsageError, match="add up to the 7 parameters, got 8"):
        TensorNormEC(0.1, 0.5, sizes=SIZES).server_step(torch.ones(7), torch.ones(7))


@pytest.mark.parametrize("way", ["by-tensor", "in-place"])
def test_a_configuration_names_it_and_the_models_tensors_are_used(way: str) -> None:
    config = make({"server_norm": way, "clients": 5, "private": False, "rounds": 1, "lr": 0.5})
    problem = build.problem(config)
    method = methods.build(config, len(problem.x0), problem.tensor_sizes)
    run = prepare(problem, method, build.training(config)).run()
    moved = (run.x - problem.x0) / 0.5
    lengths = [float(part.norm()) for part in moved.split([640, 10])]
    assert lengths == pytest.approx([1.0, 1.0], rel=1e-5)
    assert float((run.state.estimate - moved.neg()).norm() < 1e-5) == (way == "in-place")
