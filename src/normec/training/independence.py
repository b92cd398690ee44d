"""Checks before a private run that the message of a client depends on that client's data alone.

Every privacy rule assumes this: when one client's data change, only that client's message may change. The same holds
for the clipped gradients of single records. Models, losses, transforms and data sets are Python code that may keep
state in attributes, so the checks run this code on a few records and compare gradients bit by bit:

    the first client alone;  beside and after another client;  beside and after that client with other data

each time with fresh copies of the model, the loss and the transforms. If any of the gradients differ, the clients are
coupled, or their gradients do not repeat, and the run is refused.

Methods of the caller's own are compared on made-up gradients, and then run on copies that have seen nothing
(`algorithms.method.Steps`), so that only state outside of the object can couple clients.

What the checks cannot see: a coupling that starts later than the first few gradients, or only for certain clients,
records or sizes (what a model, a loss or a transform keeps is undone after every client, see `gradients.restored`);
state outside the copied objects (a global, a closure, a file) that was set once before the check; the
data that an objective of the caller's own uses, if it is no `Problem`; and what a gradient engine, participation rule
or callback of the caller's own does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from ..algorithms.method import Method, Steps, rows_like
from ..algorithms.registry import works_by_rows
from ..errors import UsageError
from ..gradients.loop import RECORD_BLOCKS, LoopEngine, record_gradients, state_of_objective
from ..gradients.record_clip import RecordClip
from ..problems.batch_form import Tree, leaves_of, length, size_of
from ..problems.client_data import FetchedRecords, Records, ResidentRecords
from ..problems.functions import FunctionProblem
from ..problems.objective import Objective
from ..problems.problem import Problem, own_copy
from ..sampling.random_streams import Key, Stream, derive_seed, own_numbers, seed_generators

_PARTS = ("model", "loss", "penalty", "augment", "transform")  # code of the user, which may keep state
_RECORDS = 8  # records per client that are used in the check
_ROUNDING = 1e-9  # relative, in float64: how much a GPU's sums may vary between two runs

Some = TypeVar("Some", bound=Objective)


def refuse_coupled_clients(problem: Objective, seed: int, record_clip: RecordClip | None) -> None:
    """Refuse a problem in which one client's gradient depends on another client's data, or does not repeat.

    Args:
        problem: The problem; it is not changed.
        seed: The seed of the run, which decides what dropout and random transforms draw.
        record_clip: How every record's gradient is bounded; if given, records are checked as well.

    Raises:
        UsageError: A gradient changed with another client's data, or between two computations.
    """
    # Copies share what is in closures, defaults and classes, and other kinds of objectives are not copied.
    with state_of_objective(problem).restored(), torch.random.fork_rng():
        problem = _precise(problem) if problem.x0.is_cuda else problem
        for mine, other, third in _triples(problem.clients):
            _compare_clients(problem, seed, record_clip, mine, other, third)
        if record_clip is not None and isinstance(problem, Problem):
            _compare_records(problem, seed)


def refuse_modes() -> None:
    """Refuse modes and hooks of the caller's own that are active, because they see every operation of a run.

    Many operations compute several clients together, so a mode that changes results may mix them. An autocast rounds
    the products by which clipped records are measured, and a round that is repeated without it has other bits.
    """
    if name := active_mode():
        raise UsageError(f"{name} is active and would see the clients of a private run together; call train without it")
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise UsageError(
            "torch.autocast is active and would round what a private run measures; call train without it, and choose "
            "precision = 'bf16' for products in bfloat16"
        )


def active_mode() -> str:
    """The name of a mode or pair of hooks that sees every operation; empty if none is active."""
    seen = [mode for mode in torch.overrides._get_current_function_mode_stack() if type(mode) is not DeviceContext]
    name = type(seen[-1]).__name__ if seen else ""
    if torch._C._len_torch_dispatch_stack():
        name = "a TorchDispatchMode"
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("not used here"):
            pass
    except RuntimeError:
        name = "a pair of hooks for saved tensors"
    return name


def refuse_mixing_methods(method: Method, dimension: int) -> None:
    """Refuse a user's own method or operator that mixes clients, or reveals their gradients to the server.

    Args:
        method: The method, which is not changed. Methods of this library work row by row and are not checked.
        dimension: The dimension of a message.

    Raises:
        UsageError: A client's message or memory changed with another client's gradient, or the server's step changed
            with gradients that it was not given, or from one call to the next.
    """
    if works_by_rows(method):
        return
    draw = torch.Generator().manual_seed(0)
    usual = torch.randn(2, 3, dimension, dtype=torch.float64, generator=draw)
    other = usual.clone()
    other[:, 1:] = 3 - 2 * usual[:, 1:].flip(1)

    def first(steps: Steps, grads: Tensor, disturbance: Tensor) -> Tensor:
        """Return everything that the first client sends and keeps, if it draws the same numbers."""
        state = {name: rows_like(start, len(grads)).clone() for name, start in steps.initial_client_state.items()}
        for rows in state.values():
            if rows.is_floating_point() and rows.shape == disturbance.shape:
                rows += disturbance
        key = Key(Stream(0, "operator"), 0, torch.arange(len(grads)))
        own = {name: rows.clone() for name, rows in state.items()}
        with own_numbers(0):
            message, draft = steps.message(grads.clone(), own, key, steps.broadcast(steps.initial_server_state))
            kept = steps.commit(draft, message)
            idle = steps.absent({name: rows.clone() for name, rows in state.items()})
        parts = [message, *kept.values(), *idle.values()]
        return torch.cat([part[0].reshape(-1).to(torch.float64) for part in parts])

    own, beside = (Steps(own_copy(method), usual[0, 0]) for _ in range(2))
    found = [first(own, *usual), first(beside, *other), first(beside, *usual)]
    _refuse_unlike(found, f"the message of {method.name} for one client changes with the gradients of others")

    def served(gradients: Tensor) -> Tensor:
        """Return the server's step on a fixed sum, after clients have sent messages for these gradients."""
        steps = Steps(own_copy(method), usual[0, 0])
        for row in gradients.split(1, dim=1):
            first(steps, *row)
        return _served(steps)

    sizes = [served(size * gradients) for gradients in (usual, other) for size in (1.0, 1e-3, 1e3)]
    _refuse_unlike(sizes, f"the server's step of {method.name} changes with gradients that it was not given")
    steps = Steps(own_copy(method), usual[0, 0])
    _refuse_unlike([_served(steps) for _ in range(2)], f"the server's step of {method.name} does not repeat")


def _served(steps: Steps) -> Tensor:
    """Return the server's direction and new state for a made-up mean message, from its first state."""
    draw = torch.Generator().manual_seed(2)
    mean_message = torch.randn(steps.message_length, dtype=torch.float64, generator=draw)
    with own_numbers(0):  # it may draw
        start = {name: value.clone() for name, value in steps.initial_server_state.items()}
        direction, state = steps.server_step(mean_message, start)
    return torch.cat([part.reshape(-1).to(torch.float64) for part in (direction, *state.values())])


def _precise(problem: Objective) -> Objective:
    """Return the problem in float64, where the varying order of a GPU's sums has a negligible effect.

    A few records show whether the model can run in float64; all of a client's records may need too much memory.
    """
    with suppress(Exception):  # it cannot
        precise = problem.to(problem.x0.device, torch.float64)
        with suppress(Exception):  # the model may need batches of a fixed size
            _gradient(_pair(precise, 0, 0, _RECORDS), 0, 0, None)
            return precise
        _gradient(precise, 0, 0, None)
        return precise
    return problem


def _triples(clients: int) -> list[tuple[int, int, int]]:
    """Return triples (checked client, client computed before it, client whose data that one gets), from both ends."""
    if clients == 1:
        return [(0, 0, 0)]
    last = clients - 1
    return [(0, 1, last if last > 1 else 0), (last, 0, clients // 2)]


def _compare_clients(problem: Objective, seed: int, clip: RecordClip | None, mine: int, other: int, third: int) -> None:
    what = f"the gradient of client {mine} changes when client {other} is computed before it"
    if not isinstance(problem, FunctionProblem | Problem):
        found = []
        for _ in range(2):  # clients of other kinds of problems cannot be exchanged, only computed in turn
            found.append(_gradient(problem, mine, seed, clip))
            _gradient(problem, other, seed, clip)
        _refuse_unlike(found, what)
        return
    try:
        most = _RECORDS
        found = [_after((), _pair(problem, mine, other, most), seed, clip)]
    except Exception:  # the model may need batches of a fixed size
        most = max(problem.sizes.tolist()) if problem.sizes is not None else _RECORDS
        found = [_after((), _pair(problem, mine, other, most), seed, clip)]
    usual, disturbed = (_pair(problem, mine, source, most) for source in (other, third))
    if isinstance(disturbed, Problem) and isinstance(disturbed.records, ResidentRecords):
        disturbed.records = _altered(disturbed.records)
    if isinstance(disturbed, Problem):  # a subclass may read the other client's records at any time
        found.append(_after((), _pair(problem, mine, third, most), seed, clip))
        with suppress(Exception):  # the model may not accept altered records
            found.append(_after((), disturbed, seed, clip))
    for before in ((usual,), (disturbed,), (usual, disturbed)):
        try:
            found.append(_after(before, usual, seed, clip))
        except Exception as error:  # it succeeded alone, so state of other clients interferes
            raise UsageError(f"{what}: {str(error).splitlines()[0]}; keep no state between clients") from error
    _refuse_unlike(found, what)


def _pair(problem: Objective, mine: int, other: int, most: int) -> Objective:
    """Return a problem with two clients, as numbers 0 and 1, each with at most `most` records."""
    pair = copy.copy(problem)
    pair.clients = 2
    if isinstance(pair, FunctionProblem):
        pair.functions = [pair.functions[mine], pair.functions[other]]
    if isinstance(pair, Problem):
        pair.records = _beginnings(pair.records, (mine, other), most)
        pair.sizes = pair.records.sizes
    return pair


def _beginnings(held: Records, clients: Sequence[int], most: int) -> Records:
    """Return the first records of some clients."""
    if isinstance(held, FetchedRecords):
        return FetchedRecords([_Beginning(held.datasets[client], most) for client in clients], held.device, held.form)
    batches = [held.batch(client, torch.arange(min(most, int(held.sizes[client])))) for client in clients]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    rows = torch.arange(len(inputs), device=inputs.device).split([len(part) for part, _ in batches])
    return ResidentRecords(inputs, targets, rows)


def _altered(held: ResidentRecords) -> ResidentRecords:
    """Return the records with those of client 1 changed: floats are shifted, integers are only reordered."""
    return ResidentRecords(_altered_rows(held.inputs, held.rows[1]), held.targets.clone(), held.rows)


def _altered_rows(inputs: Tensor, rows: Tensor | slice) -> Tensor:
    """Return the inputs with some rows changed: floats are shifted, integers are only reordered."""
    inputs = inputs.clone()
    moved = inputs[rows].flip(0)
    inputs[rows] = 3 - 2 * moved if moved.is_floating_point() else moved
    return inputs


class _Beginning(Dataset[Any]):
    """The first records of a data set, fetched as in the run."""

    def __init__(self, dataset: Dataset[Any], most: int) -> None:
        self._dataset, self._most = dataset, most

    def __len__(self) -> int:
        return min(self._most, length(self._dataset))

    def __getitem__(self, record: int) -> Any:
        return self._dataset[record]


def _after(before: Sequence[Objective], pair: Objective, seed: int, clip: RecordClip | None) -> Tensor:
    """Return loss and gradient of client 0, from fresh copies that computed client 1 of each of `before` first."""
    pair = _with_parts(pair, pair, own_copy)
    for other in before:
        with suppress(Exception):  # the model may not accept altered records
            _gradient(_with_parts(other, pair), 1, seed, clip)
    return _gradient(pair, 0, seed, clip)


def _with_parts(to: Some, source: Objective, copied: Callable[[Any], Any] = lambda part: part) -> Some:
    """Return `to` with the parts of `source`: the same objects, which share their state, or copies."""
    given = copy.copy(to)
    if isinstance(given, Problem):
        for name in _PARTS:
            setattr(given, name, copied(getattr(source, name)))
    return given


def _gradient(problem: Objective, client: int, seed: int, clip: RecordClip | None) -> Tensor:
    """Return the client's loss and gradient at the start, on all its records."""
    loop = LoopEngine(problem, None, seed, clip, record_blocks=RECORD_BLOCKS[-1:])
    (block,) = loop.blocks(problem.x0, problem.initial_buffers(), 0, torch.tensor([client]))
    return torch.cat([block.losses, block.grads[0]])


def _compare_records(problem: Problem, seed: int) -> None:
    """Check that a record's gradient does not change with other records in its batch or with records before it."""
    held = _beginnings(problem.records, (0, 0), _RECORDS)
    usual = held.batch(0, None)
    if size_of(usual[0]) < 2:
        return
    for once, again in zip(leaves_of(usual[0]), leaves_of(held.batch(0, None)[0]), strict=True):
        if not torch.equal(once, again):
            raise UsageError("the records of client 0 change between two reads; keep no state in a data set")
    disturbed = tree_map(lambda leaf: _altered_rows(leaf, slice(1, None)), usual[0]), usual[1]
    uniforms = None
    if problem.augment is not None:
        whose, device = torch.zeros(1, dtype=torch.int64), problem.x0.device
        drawn = Stream(seed, "augment").uniform(whose, 0, size_of(usual[0]) * problem.augment.draws)
        uniforms = drawn.view(-1, problem.augment.draws).to(device)

    def first(*batches: tuple[Tree, Tree]) -> Tensor:
        parts = _with_parts(problem, problem, own_copy)
        for inputs, targets in batches:
            seed_generators(derive_seed(seed, "model", 0, 0), problem.x0.device)
            if isinstance(inputs, Tensor):
                inputs = parts.augmented_by_record(inputs, uniforms)
            grads, _ = record_gradients(parts, problem.x0, inputs, targets)
        return grads[0]

    found = [first(usual), first(disturbed), first(usual, usual), first(disturbed, usual)]
    _refuse_unlike(found, "the gradient of a record changes with the other records of its client")


def _refuse_unlike(found: Sequence[Tensor], what: str) -> None:
    first = found[0]
    if bool(torch.isnan(first).any()):  # values that are not finite are reported elsewhere
        return
    for other in found[1:]:
        same = torch.equal(first, other)
        if not same and first.is_cuda and first.dtype == torch.float64:
            same = bool((first - other).norm() <= _ROUNDING * first.norm())
        if not same:
            raise UsageError(
                f"{what}, so no epsilon covers this run: look for state in the model, the loss, the transforms or the "
                "data sets (running statistics, caches, counters), for statistics of a whole batch, and for random "
                "numbers that do not come from torch's generators"
            )
