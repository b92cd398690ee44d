"""The message of a party, from its own data and its own copy of the method."""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithms.method import Steps, Tables
from ...algorithms.operators import norms
from ...errors import UsageError
from ...sampling.random_streams import Key, Stream
from ...training.metrics import ROUNDING
from .gradient_oracle import GradientOracle
from .method_checks import as_used, public_tables
from .wire import Request


def client_message(
    oracle: GradientOracle, request: Request, steps: Steps, client: Tables
) -> tuple[Tensor, Tables, float]:
    """The message, the draft of the client's state, and f_i(x).

    The message has the precision of x. Where records are clipped, it is in double precision, unless its noise is seeded
    or there is none. Raises what the party's code raises, and `UsageError` if the message is not finite or exceeds its
    bound.
    """
    x = torch.tensor(request.x)
    steps.begin(request.plan.seed, request.round)
    public = public_tables(request.public, steps)
    grad, loss = _gradient(oracle, request, steps, client, public)
    if grad.shape != x.shape:
        raise UsageError(f"the gradient has shape {tuple(grad.shape)}, x has {tuple(x.shape)}")
    key = Key(Stream(request.plan.seed, "operator"), request.round, torch.tensor([request.index]))
    # The functions of a method may write to what they get, and to what they returned before.
    messages, draft = steps.message(grad.detach().to(x, copy=True)[None], as_used(client, x), key, public)
    draft = {name: rows.detach().clone() for name, rows in draft.items()}
    if request.plan.records is not None:
        # The rule for records needs the constant of Ψ at every memory that the server may return. In float32 a norm may
        # overflow, and then one record decides whether the message is zero.
        wide = x.double()
        given = as_used(public, wide) if public is not None else None
        messages, _ = steps.message(grad.detach().to(wide, copy=True)[None], as_used(client, wide), key, given)
    # Noise on a grid is added before the message of a record-level run is rounded to the precision of x.
    exact = request.plan.records is not None and request.privacy.noise not in ("seeded", "none")
    messages = messages.detach().to(torch.float64 if exact else x.dtype, copy=True)
    if not bool(torch.isfinite(messages).all()):
        raise UsageError("the message is not finite; check the data and the loss at this x")
    length = float(norms(messages))
    if request.privacy.bound and length > request.privacy.bound * (1 + ROUNDING):
        raise UsageError(f"the message has norm {length:.6g}, above the bound {request.privacy.bound:g}")
    # The memory changes when the server has accepted the message. A failure must show now, because the server would
    # notice it then.
    steps.commit(as_used(draft, x), messages.to(x.dtype, copy=True))
    draft = {name: _shared(rows, client[name]) for name, rows in draft.items()}
    return messages[0], draft, float(loss)


def _gradient(
    oracle: GradientOracle, request: Request, steps: Steps, client: Tables, public: Tables | None
) -> tuple[Tensor, float]:
    """The gradient or the update that the plan asks for, and f_i(x)."""
    x, plan = torch.tensor(request.x), request.plan
    if plan.records is not None:
        secret = request.privacy.noise != "seeded"
        return oracle.clipped_gradient(x, request.index, request.round, plan, plan.records, secret_coins=secret)
    if steps.corrects:
        correction = steps.local_correction(as_used(client, x), public)[0]
        return oracle.corrected_update(x, request.index, request.round, plan, correction)
    return oracle.gradient(x, request.index, request.round, plan)


def _shared(rows: Tensor, known: Tensor) -> Tensor:
    """`known` if both tensors are equal, so that a table that a message does not change is stored once."""
    return known if rows.dtype == known.dtype and torch.equal(rows, known) else rows


def in_words(error: BaseException) -> str:
    """An error as one line of a party's own log."""
    return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
