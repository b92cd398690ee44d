"""Several clients on one rank: each one's data enter one message of a release, whatever the caller's loop does."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normec import Clip, Privacy
from normec import distributed as cluster
from normec.distributed import ClientOptimizer
from normec.distributed.flat_parameters import FlatParameters, Held
from normec.errors import UsageError
from normec.sampling.random_streams import Generators

from ..support.waiting import LIMIT

pytestmark = pytest.mark.usefixtures("new_objects")

WIDE = 3
SEEDED = Privacy(sigma=1.0, trust="secure-sum", relation="zero-out", noise="seeded")  # a client may move a sum by 1


class Training:
    """Two parameter groups, two clients, noise that is the same each time, and the sums that left."""

    def __init__(self, first: float | None) -> None:
        """`first`: the slope of client 0's loss; None if it is absent."""
        self.slopes = (first, -0.1)
        self.x = [nn.Parameter(torch.zeros(WIDE, dtype=torch.float64)) for _ in range(2)]
        self.new_optimizer()

    def new_optimizer(self) -> None:
        how: dict[str, Any] = {"clients": 2, "privacy": SEEDED, "rounds": 20, "seed": 3}
        self.optimizer: ClientOptimizer = cluster.DPSGD([{"params": [x]} for x in self.x], 1.0, Clip(1.0), **how)
        self.sums: list[Tensor] = []
        self.add_up = self.optimizer.communicator.sum_async
        self.optimizer.communicator.sum_async = self.noted  # type: ignore[method-assign]

    def noted(self, part: Tensor) -> Callable[[], Tensor]:
        self.sums.append(part[: 2 * WIDE].clone())
        return self.add_up(part)

    def backward(self, client: int) -> None:
        slope = self.slopes[client]
        if slope is not None:
            (slope * torch.cat(self.x).sum()).backward()  # type: ignore[no-untyped-call]

    def turn(self, client: int) -> None:
        with self.optimizer.client(client):
            self.backward(client)

    def round(self) -> None:
        for client in range(2):
            self.turn(client)
        self.optimizer.step()


def moved(loop: Callable[[Training], None]) -> list[float]:
    """How far the sums of a loop move if client 0 is left out."""
    pair = [Training(first) for first in (1e3, None)]
    for training in pair:
        loop(training)
        assert training.optimizer.spent().releases >= len(training.sums)
    with_it, without_it = (training.sums for training in pair)
    return [float((one - other).norm()) for one, other in zip(with_it, without_it, strict=True)]


def test_gradients_of_parameters_that_left_their_group_enter_no_other_message() -> None:
    def removed(training: Training) -> None:
        training.round()
        training.optimizer.param_groups.pop()
        with pytest.raises(UsageError, match="the parameters of the groups were exchanged after the optimizer was"):
            training.round()
        assert training.x[1].grad is None, "cleared, although no group holds it"

    def exchanged(training: Training) -> None:
        training.optimizer.param_groups[1]["params"] = [training.x[1].detach().clone()]
        with pytest.raises(UsageError, match="the parameters of the groups were exchanged after the optimizer was"):
            training.round()

    assert moved(removed) == pytest.approx([1.0])
    assert moved(exchanged) == []


def test_a_round_that_is_begun_again_takes_no_client_twice() -> None:
    """Client 1 fails twice, after its backward pass: the loop goes on with an empty turn of it."""

    def retried(training: Training) -> None:
        for attempt in range(2):
            training.turn(0)
            with suppress(RuntimeError), training.optimizer.client(1):
                training.backward(1)
                raise RuntimeError(f"out of memory at attempt {attempt}")
        with training.optimizer.client(1):
            pass
        training.optimizer.step()
        for client in (1, 0):  # in any order
            training.turn(client)
        training.optimizer.step()

    with pytest.warns(UserWarning, match="client 1 has no gradient"):
        assert moved(retried) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("number", [2, -1])
def test_a_loop_that_goes_on_after_a_refused_client_adds_it_to_no_other(number: int) -> None:
    def went_on(training: Training) -> None:
        training.backward(0)
        with pytest.raises(UsageError, match="are numbered 0 to 1"), training.optimizer.client(number):
            raise AssertionError("the turn of no client")
        training.turn(1)
        with pytest.raises(UsageError, match=r"client\(0\) had no turn in round 0, so the gradients of all clients"):
            training.optimizer.step()
        training.round()

    assert moved(went_on) == pytest.approx([1.0])


def test_a_call_that_is_broken_off_leaves_no_gradients_for_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while client 0's gradients are taken or cleared, and the loop goes on with client 1."""

    def interrupted(self: FlatParameters) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    def went_on(training: Training, call: str) -> None:
        turn = training.optimizer.client(0)
        turn.__enter__()
        training.backward(0)
        with monkeypatch.context() as patch:
            patch.setattr(FlatParameters, call, interrupted)
            with pytest.raises(KeyboardInterrupt):
                turn.__exit__(None, None, None)
        with pytest.raises(UsageError, match="an earlier call was broken off or refused, so the gradients of all"):
            training.turn(1)
        with pytest.raises(UsageError, match=r"client\(0\) had no turn"):
            training.optimizer.step()
        training.round()

    for call in ("gradient", "clear_gradients"):
        assert moved(partial(went_on, call=call)) == pytest.approx([1.0])


def test_a_call_in_the_middle_of_another_one_is_refused() -> None:
    """Two steps at the same time, in threads or in a signal's handler, would add up both messages in one sum."""

    def nested(training: Training) -> None:
        load = partial(training.optimizer.load_state_dict, training.optimizer.state_dict())

        def in_between(part: Tensor) -> Callable[[], Tensor]:
            for call in (training.optimizer.step, partial(training.turn, 0), load):
                with pytest.raises(UsageError, match="another call of this optimizer is running"):
                    call()
            return training.noted(part)

        training.optimizer.communicator.sum_async = in_between  # type: ignore[method-assign]
        for _ in range(2):
            training.round()
            with pytest.raises(UsageError, match="an earlier call was broken off or refused"):
                training.round()

    assert moved(nested) == pytest.approx([1.0, 1.0])


def test_a_client_that_was_refused_during_another_call_is_added_to_no_other() -> None:
    """A thread begins the next round too early, and goes on with client 1 and then again with client 0."""

    def early(training: Training) -> None:
        def in_between(part: Tensor) -> Callable[[], Tensor]:
            with torch.enable_grad():  # the mode is another one in each thread
                training.backward(0)
                with pytest.raises(UsageError, match="another call of this optimizer is running"):
                    training.turn(0)
            return training.noted(part)

        training.optimizer.communicator.sum_async = in_between  # type: ignore[method-assign]
        training.round()
        training.optimizer.communicator.sum_async = training.noted  # type: ignore[method-assign]
        with suppress(UsageError):
            for client in (1, 0):
                with suppress(UsageError):
                    training.turn(client)
            training.optimizer.step()
        training.round()

    assert moved(early) == pytest.approx([1.0, 1.0])


def test_gradients_from_before_the_optimizer_are_in_no_message() -> None:
    """A test of the model has left gradients of all clients."""

    def tested(training: Training) -> None:
        for client in range(2):
            training.backward(client)
        training.new_optimizer()
        training.round()

    assert moved(tested) == pytest.approx([1.0])


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught in the hook"])
@pytest.mark.parametrize("inside", [False, True], ids=["in nobody's turn", "in a turn"])
def test_a_hook_during_backward_takes_no_part_of_a_clients_gradients(inside: bool, caught: bool) -> None:
    """The gradients that follow the hook would be added to the next client's."""
    training, said = Training(1e3), []

    def take(_: Tensor) -> None:
        try:
            with training.optimizer.client(0):
                raise AssertionError("a turn in the middle of a backward pass")
        except UsageError as error:
            said.append(str(error))
            if not caught:
                raise

    for x in training.x:
        handle = x.register_post_accumulate_grad_hook(take)
        with suppress(UsageError):
            (training.turn if inside else training.backward)(0)
        handle.remove()
    assert len(said) == (1 if inside else 2)  # the second turn was refused
    assert all(("another call" if inside else "call it after backward()") in words for words in said)
    for client in (1, 0):
        with suppress(UsageError):
            training.turn(client)
    with suppress(UsageError):
        training.optimizer.step()
    assert len(training.sums) == inside  # outside of turns, the first one of these was refused
    training.round()
    plain = Training(1e3)
    plain.round()
    assert torch.equal(training.sums[0], plain.sums[0])


@pytest.mark.parametrize("idle_last", [False, True], ids=["in order", "who is idle comes last"])
@pytest.mark.parametrize("failures", [0, 2], ids=["at once", "after failures"])
@pytest.mark.parametrize("draw", [torch.rand, np.random.random, random.random], ids=["torch", "NumPy", "Python"])
def test_random_numbers_that_a_client_draws_do_not_change_those_of_others(
    draw: Callable[..., Any], failures: int, idle_last: bool
) -> None:
    """Everybody knows the seed of the script, and so the masks and batches of all other clients."""
    outside: list[list[float]] = []

    def number() -> float:
        return float(draw(1) if draw is torch.rand else draw())

    def masked(training: Training) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        training.new_optimizer()
        other = cluster.GD([nn.Parameter(torch.zeros(1))], 1.0, clients=2)
        outside.append([])
        for _ in range(3):
            idle = [client for client in range(2) if training.slopes[client] is None]
            order = sorted(range(2), key=idle.__contains__) if idle_last else [1, 0]
            for client in order:
                for attempt in range(1 + (failures if client == 0 and not idle else 0)):
                    with suppress(RuntimeError), training.optimizer.client(client), other.client(client):
                        slope = training.slopes[client]
                        if slope is not None:
                            (number() * slope * torch.cat(training.x).sum()).backward()
                            if client == 0 and attempt < failures:
                                raise RuntimeError("out of memory")
            training.optimizer.step()
            outside[-1].append(number())

    with torch.random.fork_rng():
        assert moved(masked) == pytest.approx([1.0] * 3)
    assert outside[0] == outside[1], "the loop's own numbers tell how many a client has drawn"
    assert len(set(outside[0])) == 3


def test_clients_and_rounds_have_numbers_of_their_own() -> None:
    def drawn(seed: int) -> list[float]:
        torch.manual_seed(seed)
        training = Training(1e3)
        found = []
        for _ in range(2):
            for client in range(2):
                with training.optimizer.client(client):
                    found.append(float(torch.rand(1)))
                    training.backward(client)
            training.optimizer.step()
        return found

    with torch.random.fork_rng():
        first = drawn(5)
        assert len(set(first)) == 4
        assert drawn(5) == first
        assert not set(drawn(6)) & set(first)


def local_steps(training: Training, client: int) -> None:
    """Move the parameters by local steps of a client, and leave them there."""
    slope = training.slopes[client]
    with torch.no_grad():
        for x in training.x if slope is not None else ():
            start = x.clone()
            x -= (slope or 0.0) * (1 + x)
            x.grad = start - x


def test_local_steps_that_a_client_forgets_to_undo_move_nobody_else() -> None:
    """The parameters after a client's local steps say what its data are, and the next client would begin there."""

    def loop(training: Training) -> None:
        for client in range(2):
            with training.optimizer.client(client):
                local_steps(training, client)
        training.optimizer.step()

    assert max(moved(loop)) <= 1 + 1e-6


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_no_local_steps_for_another_client(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """It comes once or twice while the parameters are set back, and the caller begins the round again."""

    def loop(training: Training) -> None:
        left, set_back = [times], FlatParameters.set_back

        def interrupted(self: FlatParameters, held: list[Held]) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise KeyboardInterrupt
            set_back(self, held)

        with monkeypatch.context() as patch:
            patch.setattr(FlatParameters, "set_back", interrupted)
            turn = training.optimizer.client(0)
            turn.__enter__()
            local_steps(training, 0)
            with pytest.raises(KeyboardInterrupt):
                turn.__exit__(None, None, None)
            with pytest.raises(UsageError, match="an earlier call was broken off or refused"):
                training.turn(0)
        for client in range(2):
            with training.optimizer.client(client):
                local_steps(training, client)
        training.optimizer.step()

    assert max(moved(loop)) <= 1 + 1e-6


@pytest.mark.parametrize("signs", [False, True])
def test_parameters_are_set_back_to_their_own_memory_and_to_the_bit(signs: bool) -> None:
    """Client 0 leaves two parameters in one memory, or zeros with another sign, which a loss may read."""

    def loop(training: Training) -> None:
        for client in range(2):
            with training.optimizer.client(client), torch.no_grad():
                if client == 0 and training.slopes[0] is not None:
                    if signs:
                        training.x[0].neg_()
                    else:
                        training.x[1].data = training.x[0].data
                        training.x[0] += 5
                for x in training.x:
                    x.grad = (training.slopes[client] or 0.0) * (x + torch.ones(WIDE).double().copysign(x))
        training.optimizer.step()
        assert training.x[0].data_ptr() != training.x[1].data_ptr()

    assert max(moved(loop)) <= 1 + 1e-6


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_no_random_numbers_of_a_client_to_the_loop(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    training, left, restore = Training(0.1), [times], Generators.restore

    def interrupted(self: Generators) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise KeyboardInterrupt
        restore(self)

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    monkeypatch.setattr(Generators, "restore", interrupted)
    turn = training.optimizer.client(0)
    turn.__enter__()
    torch.rand(3), np.random.random(3), random.random()
    with pytest.raises(KeyboardInterrupt):
        turn.__exit__(None, None, None)
    with pytest.raises(UsageError, match="an earlier call was broken off or refused"):
        training.turn(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    training.round()


def test_parameters_without_dimensions_and_frozen_ones_of_eight_bits() -> None:
    scale = nn.Parameter(torch.tensor(1.0))
    frozen = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    optimizer = cluster.DPSGD([scale, frozen], 1.0, Clip(1.0), clients=2, privacy=SEEDED, rounds=2)
    for client in range(2):
        with optimizer.client(client):
            (0.1 * scale).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert optimizer.spent().releases == 1


def test_losses_of_all_clients_may_be_computed_before_their_turns() -> None:
    training = Training(0.1)
    losses = [slope * torch.cat(training.x).square().sum() for slope in (0.1, -0.1)]
    for client, loss in enumerate(losses):
        with training.optimizer.client(client):
            loss.backward()  # type: ignore[no-untyped-call]
    training.optimizer.step()
    assert len(training.sums) == 1


def test_parameters_that_are_converted_are_refused_before_anything_is_paid() -> None:
    training = Training(0.1)
    training.round()
    for x in training.x:
        x.data = x.data.float()
    for client in range(2):
        training.turn(client)
    with pytest.raises(UsageError, match=r"were torch\.float64 on cpu .* torch\.float32 on cpu now"):
        training.optimizer.step()
    assert training.optimizer.spent().releases == 1


def test_a_compiled_loop_leaves_the_step_alone() -> None:
    training = Training(0.1)
    torch.compile(training.optimizer.step, backend="eager")  # only wraps it
    for client in range(2):
        training.turn(client)
    torch.compile(lambda: training.optimizer.step(), backend="eager")()
    assert len(training.sums) == 1
    assert training.optimizer.spent().releases == 1


def test_a_turn_that_was_broken_off_does_not_end_a_later_one() -> None:
    """Ctrl-C comes before the end of a turn has begun, and what keeps it is freed during the client's next turn."""

    def loop(training: Training) -> None:
        optimizer = training.optimizer
        broken = optimizer._set_apart(0)
        broken.__enter__()
        optimizer._set_back()
        for client in range(2):
            with optimizer.client(client):
                if client == 0:
                    broken.__exit__(None, None, None)
                local_steps(training, client)
        optimizer.step()

    assert max(moved(loop)) <= 1 + 1e-6


LEFT_OPEN = """
import torch
from normec import Clip, Privacy, distributed as cluster
x = torch.nn.Parameter(torch.zeros(2))
private = Privacy(sigma=1.0, trust="secure-sum", relation="zero-out", noise="seeded")
optimizer = cluster.DPSGD([x], 1.0, Clip(1.0), clients=2, privacy=private, rounds=2)
turn = optimizer.client(0)
turn.__enter__()
x.sum().backward()
"""


@pytest.mark.slow
def test_a_turn_that_is_open_at_the_end_of_the_program_does_not_crash_it() -> None:
    """The interpreter closes it while it takes tensors apart; what touches them then aborts the process."""
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
