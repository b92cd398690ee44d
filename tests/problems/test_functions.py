"""Problems of plain functions, and the loop engine's blocks over any of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from normec import GD, Clip21, Compute, Logging, NormEC, Problem, UsageError, train
from normec.gradients import loop as loop_module
from normec.gradients.choice import choose_engine

CUBES = [lambda x, c=c: ((x - c) ** 3).sum() for c in range(5)]


def test_gradients_are_the_functions_derivatives() -> None:
    x0 = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (block,) = choose_engine("auto", Problem.from_functions(CUBES, x0), None, 0).blocks(x0, {}, 0)
    for c in range(5):
        assert torch.allclose(block.grads[c], 3 * (x0 - c) ** 2, rtol=1e-14)
        assert float(block.losses[c]) == pytest.approx(float(((x0 - c) ** 3).sum()), rel=1e-14)


def test_a_scalar_start_hands_scalars_to_the_functions() -> None:
    seen = SimpleNamespace(shapes=[])  # a list in the closure would be as before at the end of the run

    def f(x: Tensor) -> Tensor:
        seen.shapes.append(tuple(x.shape))
        return x**2

    run = train(Problem.from_functions([f], torch.tensor(3.0)), GD(), lr=0.25, rounds=2)
    assert set(seen.shapes) == {()}
    assert run.x.tolist() == [0.75]
    assert run.model is None


def test_the_start_is_copied_and_left_alone() -> None:
    x0 = torch.ones(3, requires_grad=True)
    problem = Problem.from_functions([lambda x: (x**2).sum()], x0)
    run = train(problem, GD(), lr=0.1, rounds=3)
    assert x0.tolist() == problem.x0.tolist() == [1.0, 1.0, 1.0]
    assert x0.grad is None
    assert run.x.tolist() == pytest.approx([0.8**3] * 3)


@pytest.mark.parametrize(
    ("functions", "x0", "message"),
    [
        ([], torch.zeros(2), "at least one client"),
        (CUBES, torch.zeros(2, dtype=torch.int64), "x0 must be a scalar or a vector of floats, got torch.int64"),
        (CUBES, torch.zeros(2, 3), r"x0 must be a scalar or a vector of floats, got torch.float32 of shape \(2, 3\)"),
    ],
)
def test_no_functions_or_no_vector_is_refused(functions: list, x0: Tensor, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(UsageError, match=message):
        Problem.from_functions(functions, x0)


def test_a_function_that_is_no_scalar_is_named() -> None:
    problem = Problem.from_functions([lambda x: x.sum(), lambda x: x], torch.zeros(3))
    with pytest.raises(UsageError, match=r"f_2 must return a scalar, got shape \(3,\)"):
        train(problem, GD(), lr=0.1, rounds=1)


def test_epochs_need_records() -> None:
    with pytest.raises(UsageError, match="epochs need records"):
        train(Problem.from_functions(CUBES, torch.zeros(2)), GD(), lr=0.1, epochs=1)


def test_a_constant_function_has_gradient_zero() -> None:
    problem = Problem.from_functions([lambda x: (x**2).sum(), lambda x: torch.tensor(1.0)], torch.ones(2))  # noqa: ARG005
    assert train(problem, GD(), lr=0.5, rounds=1).x.tolist() == [0.5, 0.5]


def test_f_in_float16_and_bfloat16() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        problem = Problem.from_functions(
            [lambda x: ((x - 1) ** 2).sum(), lambda x: ((x + 1) ** 2).sum()], torch.ones(4)
        )
        run = train(problem, NormEC(0.1, 0.1), lr=0.05, rounds=40, compute=Compute(dtype=dtype))
        assert run.x.dtype == dtype
        assert float(run.x.float().abs().max()) < 0.3


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("block_floats", [1, 4, 7, 1000])
def test_the_block_size_does_not_change_the_numbers(block_floats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """d = 2: blocks of 1, 2, 3 and all clients; only the order of a sum may differ."""
    problem = Problem.from_functions(CUBES, torch.tensor([0.3, 0.1], dtype=torch.float64))
    whole = train(problem, Clip21(0.4), lr=0.01, rounds=20, logging=Logging(every=1))
    monkeypatch.setattr(loop_module, "_BLOCK_FLOATS", block_floats)
    engine = choose_engine("loop", problem, None, 0)
    blocks = list(engine.blocks(problem.x0, {}, 0))
    assert len(blocks[0].clients) == min(5, max(1, block_floats // 2))
    assert torch.cat([block.clients for block in blocks]).tolist() == [0, 1, 2, 3, 4]
    parts = train(problem, Clip21(0.4), lr=0.01, rounds=20, logging=Logging(every=1))
    assert torch.allclose(whole.x, parts.x, rtol=0, atol=1e-13)
    assert torch.allclose(whole.state.memory, parts.state.memory, rtol=0, atol=1e-13)
    for a, b in zip(whole.history, parts.history, strict=True):
        assert b == pytest.approx(a, abs=1e-12)


def test_blocks_of_some_clients_and_of_nobody() -> None:
    problem = Problem.from_functions(CUBES, torch.tensor([0.3, 0.1]))
    engine = choose_engine("loop", problem, None, 0)
    (everyone,) = engine.blocks(problem.x0, {}, 0)
    (some,) = engine.blocks(problem.x0, {}, 0, torch.tensor([1, 4]))
    assert torch.equal(some.grads, everyone.grads[[1, 4]])
    assert sum(len(block.losses) for block in engine.blocks(problem.x0, {}, 0, torch.arange(0))) == 0


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown engine 'lop', did you mean 'loop'"):
        train(Problem.from_functions(CUBES, torch.zeros(2)), GD(), lr=0.1, rounds=1, compute=Compute(engine="lop"))
