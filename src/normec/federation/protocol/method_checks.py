"""Checks of a method's functions on synthetic gradients, and properties of a method that a federation relies on.

The server runs the checks before a run begins, and a party before it pays for its first message of a run. So a method
that fails, or violates its own claims, is refused with an error that depends on nobody's data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithms.method import MEMORY, Steps, Tables, follows
from ...algorithms.operators import norms
from ...errors import UsageError
from ...sampling.random_streams import Key, Stream
from ...training.metrics import ROUNDING
from .wire import Array

_SIZES = (1.0, 1e6)  # of the coordinates of the synthetic gradients


def restorable(steps: Steps) -> bool:
    """Whether a party that lost its state can continue, because the server keeps its memory or there is no state."""
    return not steps.stateful or keeps_rows(steps)


def keeps_rows(steps: Steps) -> bool:
    """Whether the server follows each party's memory."""
    return steps.has_memory and follows(steps.method)


def first_state(steps: Steps) -> Tables:
    """The state of a party that has sent nothing yet: tables of one row."""
    return {name: start[None].clone() for name, start in steps.initial_client_state.items()}


def as_kept(tables: Tables, steps: Steps) -> Tables:
    """A copy of a client's tables in the precision that `client_init` chose for them.

    The method's next function may write to the memory of what the last one returned.
    """
    return {name: rows.detach().to(steps.initial_client_state[name].dtype, copy=True) for name, rows in tables.items()}


def as_used(tables: Tables, like: Tensor) -> Tables:
    """A copy of a client's tables in the dtype of x, as the training loop passes them to a method."""
    return {
        name: rows.to(like.dtype if rows.is_floating_point() else rows.dtype, copy=True)
        for name, rows in tables.items()
    }


def public_vector(steps: Steps, state: Tables) -> Array | None:
    """The numbers that the method broadcasts from the server's state, one after the other; None without any."""
    public = steps.broadcast(state)
    if not public:
        return None
    found: Array = torch.cat([value.reshape(-1) for value in public.values()]).numpy()
    return found


def public_tables(vector: Array | None, steps: Steps) -> Tables | None:
    """The numbers of `public_vector` with the names and shapes that the method gives them.

    Raises:
        UsageError: There are more or fewer numbers than the method broadcasts.
    """
    public = steps.broadcast(steps.initial_server_state)
    expected = sum(value.numel() for value in public.values()) if public else 0
    found = len(vector) if vector is not None else 0
    if found != expected:
        raise UsageError(f"{steps.method.name} broadcasts {expected} numbers beside x, and {found} were sent")
    if public is None or vector is None:
        return public
    parts = torch.tensor(vector).split([value.numel() for value in public.values()])
    return {name: part.view(value.shape) for part, (name, value) in zip(parts, public.items(), strict=True)}


def check_client_functions(steps: Steps, like: Tensor) -> None:
    """Call `message`, `commit` and `absent` for a model like `like`.

    Raises:
        UsageError: One of them fails, or a message is not finite or longer than the method's bound.
    """
    method, public = steps.method, steps.broadcast(steps.initial_server_state)
    key = Key(Stream(0, "operator"), 0, torch.tensor([0]))
    for size in _SIZES:
        update = _synthetic_gradient(like, size)
        try:
            with torch.random.fork_rng(devices=[]):
                message, draft = steps.message(update.clone(), as_used(first_state(steps), like), key, public)
                kept = as_kept(steps.commit(draft, message), steps)
                steps.absent(as_used(kept, like), 2)
        except UsageError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"{method.name} fails for a synthetic gradient: {what}") from None
        length = float(norms(message))
        if not length <= method.bound * (1 + ROUNDING):
            raise UsageError(
                f"{method.name} makes a message of norm {length:.6g} from a synthetic gradient, above its bound "
                f"{method.bound:g}"
            )


def check_server_functions(steps: Steps, x0: Tensor) -> None:
    """Check the functions that only the server relies on, with the initial x.

    Raises:
        UsageError: `client_init`, or the shapes of what is broadcast, depend on the values of x, what is broadcast has
            another dtype than x, `server_step` fails, or `follow` disagrees with the client's own functions about the
            memory.
    """
    name = type(steps.method).__name__
    elsewhere = Steps(steps.method, torch.zeros_like(x0))
    if not _same(steps.initial_client_state, elsewhere.initial_client_state):
        raise UsageError(
            f"{name}.client_init must not depend on the values of x: a party that joins later does not know the first x"
        )
    public = steps.broadcast(steps.initial_server_state) or {}
    if any(value.dtype != x0.dtype for value in public.values()):
        raise UsageError(f"{name}.broadcast must return tensors of the model's {x0.dtype} for a federation")
    public_tables(public_vector(steps, steps.initial_server_state), elsewhere)
    start = {name: value.clone() for name, value in steps.initial_server_state.items()}
    steps.server_step(x0.new_zeros(steps.message_length), start)
    if not keeps_rows(steps):
        return
    before, update = as_used(first_state(steps), x0), _synthetic_gradient(x0, 1.0)
    with torch.random.fork_rng(devices=[]):
        key = Key(Stream(0, "operator"), 0, torch.tensor([0]))
        message, draft = steps.message(update, before, key, steps.broadcast(steps.initial_server_state))
        sent = message + 0.1 * _synthetic_gradient(message[0], 1.0)  # as if noise had been added
        kept = steps.commit(draft, sent)
        followed = steps.follow(before[MEMORY].clone(), sent.clone())
        pairs = [(followed, kept[MEMORY])]
        if followed.shape == kept[MEMORY].shape:
            pairs += [(steps.absent_memory(kept[MEMORY].clone()), steps.absent(kept)[MEMORY])]
    for found, wanted in pairs:
        if found.shape != wanted.shape or not torch.allclose(found.to(wanted), wanted, rtol=1e-4, atol=1e-6):
            raise UsageError(
                f"{name}.follow does not give the memory that commit and absent give; correct it or leave it out"
            )


def _synthetic_gradient(like: Tensor, size: float) -> Tensor:
    """A synthetic gradient, the same one each time."""
    drawn = torch.randn(1, len(like), generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return drawn.to(like.dtype) * size


def _same(one: Tables, other: Tables) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
