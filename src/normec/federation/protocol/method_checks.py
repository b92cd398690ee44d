"""Checks of a method's functions on made-up gradients, and what a federation may rely on.

The server runs them before a run begins, a party before it pays for its first message of a run. So a method that cannot
work, or does not do what it says of itself, is refused by an error in which nobody's data have a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithms.method import MEMORY, Steps, Tables, follows
from ...algorithms.operators import norms
from ...errors import UsageError
from ...sampling.random_streams import Key, Stream
from ...training.metrics import ROUNDING

_SIZES = (1.0, 1e6)  # of the made-up gradients' coordinates


def restorable(steps: Steps) -> bool:
    """Whether the server can follow each party's memory, keep a row for it, and give it back to a party that lost it.

    A client that keeps nothing has nothing to lose.
    """
    return not steps.stateful or keeps_rows(steps)


def keeps_rows(steps: Steps) -> bool:
    """Whether the server follows each party's memory."""
    return steps.has_memory and follows(steps.method)


def first_state(steps: Steps) -> Tables:
    """The state of a party that has sent nothing yet: tables of one row."""
    return {name: start[None].clone() for name, start in steps.initial_client_state.items()}


def as_kept(tables: Tables, steps: Steps) -> Tables:
    """A client's tables in the precision that `client_init` chose for them."""
    return {name: rows.detach().to(steps.initial_client_state[name].dtype) for name, rows in tables.items()}


def as_used(tables: Tables, like: Tensor) -> Tables:
    """A copy of a client's tables in the precision of x, as the training loop hands them to a method."""
    return {
        name: rows.to(like.dtype if rows.is_floating_point() else rows.dtype, copy=True)
        for name, rows in tables.items()
    }


def check_client_functions(steps: Steps, like: Tensor) -> None:
    """Call `message`, `commit` and `absent` for a model like `like`.

    Raises:
        UsageError: One of them fails, or a message is not finite or longer than the method's bound.
    """
    method, public = steps.method, steps.broadcast(steps.initial_server_state)
    key = Key(Stream(0, "operator"), 0, torch.tensor([0]))
    for size in _SIZES:
        update = _made_up(like, size)
        try:
            with torch.random.fork_rng(devices=[]):
                message, draft = steps.message(update.clone(), as_used(first_state(steps), like), key, public)
                kept = as_kept(steps.commit(draft, message), steps)
                steps.absent(as_used(kept, like), 2)
        except UsageError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"{method.name} cannot work on a made-up gradient: {what}") from None
        length = float(norms(message))
        if not length <= method.bound * (1 + ROUNDING):
            raise UsageError(
                f"{method.name} makes a message of norm {length:.6g} of a made-up gradient, past its bound "
                f"{method.bound:g}"
            )


def check_server_functions(steps: Steps, x0: Tensor) -> None:
    """Check what only the server relies on; call it with the first x.

    Raises:
        UsageError: `client_init` depends on the numbers in x, `server_step` fails, or `follow` and the client's own
            functions come to different memories.
    """
    name = type(steps.method).__name__
    elsewhere = Steps(steps.method, torch.zeros_like(x0)).initial_client_state
    if not _same(steps.initial_client_state, elsewhere):
        raise UsageError(
            f"{name}.client_init must not depend on the numbers in x: a party that joins later does not know the first"
        )
    nothing = x0.new_zeros(steps.message_length)
    steps.server_step(nothing, {name: value.clone() for name, value in steps.initial_server_state.items()})
    if not keeps_rows(steps):
        return
    before, update = as_used(first_state(steps), x0), _made_up(x0, 1.0)
    with torch.random.fork_rng(devices=[]):
        key, public = Key(Stream(0, "operator"), 0, torch.tensor([0])), steps.broadcast(steps.initial_server_state)
        message, draft = steps.message(update, before, key, public)
        sent = message + 0.1 * _made_up(message[0], 1.0)  # with something like noise on it
        kept = steps.commit(draft, sent)
        followed = steps.follow(before[MEMORY].clone(), sent.clone())
        pairs = [(followed, kept[MEMORY])]
        if followed.shape == kept[MEMORY].shape:
            pairs += [(steps.absent_memory(kept[MEMORY].clone()), steps.absent(kept)[MEMORY])]
    for found, wanted in pairs:
        if found.shape != wanted.shape or not torch.allclose(found.to(wanted), wanted, rtol=1e-4, atol=1e-6):
            raise UsageError(
                f"{name}.follow does not come to the memory that commit and absent come to; correct it or leave it out"
            )


def _made_up(like: Tensor, size: float) -> Tensor:
    """One gradient, the same each time."""
    drawn = torch.randn(1, len(like), generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return drawn.to(like.dtype) * size


def _same(one: Tables, other: Tables) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
