"""A distributed method, as its author writes it and as every engine runs it.

One round, for the clients that take part:

    message      (update, client state) → (message, draft)     what a client would send, and its state if it does
    commit       (draft, what was sent) → client state         once the message was paid for and has left
    server_step  (mean message, server state) → (direction, server state);   then x ← x − lr · direction

Clients that do not take part apply `absent`. `update` is the client's gradient at x. The mean is over all clients;
those that are absent count as zero, so that a sum of messages means the same in every round.

All functions are pure: they return new tensors and change none. Client functions work row by row on tensors ``[c, …]``
of any number c of clients; server functions work on one vector ``[d]``. A state is a tensor, or a dictionary of named
tensors of any shape; `client_init` and `server_init` say which. The states named "memory" (client) and "estimate"
(server), which are also the names of single tensors, get a little more attention: `initial_memory` sets them, and the
history records how far memories are from the gradients.

What a method says of itself is believed only as far as it was said of the same code: a subclass that overrides
`message` inherits neither the `lipschitz` constant nor the fused form of its base.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..errors import UsageError
from ..sampling.random_streams import Key
from .operators import OPERATORS, Operator

State = Any  # a tensor, or a mapping of named tensors
Tables = dict[str, Tensor]
MEMORY, ESTIMATE = "memory", "estimate"  # the names of states that are single tensors
CLIENT_FUNCTIONS = ("client_init", "message", "commit", "absent")
SERVER_FUNCTIONS = ("server_init", "server_step")


@dataclass(frozen=True)
class ScaledDifference:
    """The fused form of a client's round: v = u − g (or u, without a memory); m = s(‖v‖) v; g ← keep · g + step · m.

    Engines then need two passes over the gradients and no table of messages.
    """

    scale: Callable[[Tensor], Tensor]
    memory: bool
    step: float = 1.0
    keep: float = 1.0


class Method:
    """Base class of all methods. Override `message`, and whatever else differs from a method without state.

    Subclasses are usually frozen dataclasses whose fields are the method's settings.

    Example:
        >>> import torch
        >>> class Signs(Method):
        ...     '''Sends the signs, scaled to length one.'''
        ...     bound = 1.0
        ...     def message(self, update, state, key=None):
        ...         return update.sign() / update.shape[-1] ** 0.5, state
        >>> Signs().client_step(torch.tensor([3.0, -2.0, 0.5, 1.0]), {})[0]
        tensor([ 0.5000, -0.5000,  0.5000,  0.5000])
    """

    name: ClassVar[str] = ""
    """The name that reports and parties use; the class's own in small letters, unless given."""

    lipschitz: float | None = None
    """A constant L with ‖message(u) − message(u')‖ ≤ L‖u − u'‖ for every state, or None, which claims nothing."""

    recordable: bool = False
    """Whether `server_step` may be recorded as a CUDA graph: it launches the same kernels in every round."""

    follow: ClassVar[Callable[..., Tensor] | None] = None
    """(memory, sent) → memory: a client's "memory" as the server can follow it from the messages alone.

    A federation keeps such a row for each party, to screen its messages and to restore a party that lost its disk.
    """

    sent_between: ClassVar[Callable[..., Tensor] | None] = None
    """(memory before, memory after) → message: what a memory that was rounded has taken; for `memory_dtype`."""

    noise_response: tuple[float, float] | None = None
    """(κ, β) where noise z in the mean message is noise e ← κ e + β z in the direction; None claims nothing.

    A server optimizer that corrects for the noise needs it.
    """

    initial_memory_sets: ClassVar[tuple[str, ...]] = (MEMORY,)
    """The client states that `initial_memory` sets."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.name = cls.name or cls.__name__.lower()

    @property
    def bound(self) -> float:
        """The largest norm that a message can have; infinite where there is none, and then no privacy."""
        return math.inf

    def client_init(self, x: Tensor) -> State:  # noqa: ARG002
        """The state of one client at the start; `x` is ``[d]``."""
        return {}

    def message(self, update: Tensor, state: State, key: Key | None = None) -> tuple[Tensor, State]:
        """What each client would send, and the draft of its new state, named and shaped like the state.

        Args:
            update: The clients' gradients, ``[c, d]``.
            state: The clients' states, each tensor ``[c, …]``.
            key: The randomness of this round and these clients, for methods that draw.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define message")

    def commit(self, draft: State, sent: Tensor) -> State:  # noqa: ARG002
        """The clients' new states, once their messages have left; `sent` carries noise where memory="noisy"."""
        return draft

    def absent(self, state: State, rounds: int = 1) -> State:  # noqa: ARG002
        """The states of clients that take no part in so many rounds."""
        return state

    def server_init(self, x: Tensor) -> State:  # noqa: ARG002
        """The server's state at the start."""
        return {}

    def server_step(self, mean_message: Tensor, state: State) -> tuple[Tensor, State]:
        """The direction of the step, x ← x − lr · direction, and the server's new state."""
        return mean_message, state

    def client_step(self, update: Tensor, state: State, key: Key | None = None) -> tuple[Tensor, State]:
        """`message` and `commit` in one, for loops of one's own without noise. Engines call the two themselves."""
        message, draft = self.message(update, state, key)
        return message, self.commit(draft, message)

    def payload(self, dimension: int, itemsize: int) -> int:
        """Bytes of one message of so many numbers."""
        return dimension * itemsize

    def fused(self) -> ScaledDifference | None:
        """The fused form that computes the same as the client's functions, or None."""
        return None

    def spec(self) -> dict[str, Any]:
        """The method's settings as plain JSON values: what runs, checkpoints and parties know it by."""
        declared = hasattr(self, "__dataclass_fields__")
        names = [one.name for one in dataclasses.fields(cast(Any, self))] if declared else list(vars(self))
        held = {name: getattr(self, name) for name in names if not name.startswith("_")}
        return {name: _plain(type(self).__name__, name, value) for name, value in held.items()}


class OperatorMethod(Method):
    """A method whose messages are values of one operator Ψ: their bound and their size are Ψ's."""

    operator: Operator

    @property
    def bound(self) -> float:
        return self.operator.bound

    def payload(self, dimension: int, itemsize: int) -> int:
        return self.operator.payload(dimension, itemsize)


def _plain(owner: str, name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(owner, name, one) for one in value]
    if hasattr(value, "bound") and not isinstance(value, type):  # an operator
        kind = type(value)
        known = OPERATORS.get(kind.__name__) is kind  # else one of the caller's own
        title = kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"
        return {"operator": title, **{key: _plain(title, key, one) for key, one in vars(value).items()}}
    raise UsageError(
        f"the setting {name} of {owner} is a {type(value).__name__}, which no file can hold; override spec()"
    )


def text_of(method: Method) -> str:
    """A method as one line of text: its class and its settings."""
    kind = type(method)
    own = "" if kind.__module__.partition(".")[0] == __package__.partition(".")[0] else f"{kind.__module__}."
    return f"{own}{kind.__qualname__}({json.dumps(method.spec(), sort_keys=True)})"


def claim_covers(method: Method, claim: str, *functions: str) -> bool:
    """Whether the class that makes `claim` (an attribute) also knows these functions as they are.

    False where a subclass, or the object itself, defines one of the functions anew and inherits the claim.
    """
    classes = type(method).__mro__

    def home(name: str) -> int:
        return next((place for place, kind in enumerate(classes) if name in vars(kind)), len(classes))

    return all(name not in vars(method) and home(claim) <= home(name) for name in functions)


def overrides(method: Method, *functions: str) -> list[str]:
    """Those of the named functions that are not the ones of `Method`."""
    return [name for name in functions if not has_functions_of(method, Method, name)]


def has_functions_of(method: Method, kind: type[Method], *functions: str) -> bool:
    """Whether the named functions of a method are those of the class `kind`."""
    return all(getattr(getattr(method, name), "__func__", None) is getattr(kind, name) for name in functions)


def fused_form(method: Method) -> ScaledDifference | None:
    """The method's fused form, where it was stated for the functions that the method has."""
    return method.fused() if claim_covers(method, "fused", *CLIENT_FUNCTIONS) else None


def recordable(method: Method) -> bool:
    """Whether a recording may stand for the server's step."""
    return bool(method.recordable) and claim_covers(method, "recordable", *SERVER_FUNCTIONS)


def follows(method: Method) -> bool:
    """Whether the server can follow a client's memory from its messages."""
    return method.follow is not None and claim_covers(method, "follow", *CLIENT_FUNCTIONS)


def may_round(method: Method) -> bool:
    """Whether a memory may be kept in a lower precision than x."""
    return method.sent_between is not None and claim_covers(method, "sent_between", *CLIENT_FUNCTIONS)


def noise_response(method: Method, dimension: int) -> tuple[float, float] | None:
    """How noise reaches the direction, where the method states it and its server's functions bear it out."""
    claimed = method.noise_response
    if claimed is None or not claim_covers(method, "noise_response", *SERVER_FUNCTIONS):
        return None
    (keep, gain), draw = claimed, torch.Generator().manual_seed(1)
    means, noise = torch.randn(2, 3, dimension, dtype=torch.float64, generator=draw)
    found, effect = [], torch.zeros(dimension, dtype=torch.float64)
    steps = Steps(method, means[0])
    clean, noisy = steps.initial_server_state, steps.initial_server_state
    for mean, z in zip(means, noise, strict=True):
        direction, clean = steps.server_step(mean.clone(), clean)
        shifted, noisy = steps.server_step(mean + z, noisy)
        effect = keep * effect + gain * z
        found.append(torch.allclose(shifted - direction, effect, rtol=1e-9, atol=1e-9))
    return claimed if all(found) else None


class Steps:
    """A method's functions on named tables, for a model of `len(x)` parameters; whatever they return is checked.

    Raises:
        UsageError: The method has a function that no engine calls, or returns something of another form.
    """

    def __init__(self, method: Method, x: Tensor, one_by_one: bool = False) -> None:
        """`one_by_one`: show the client's functions one client at a time, so that whatever they do, they mix none."""
        if overrides(method, "client_step"):
            raise UsageError(
                f"{type(method).__name__} overrides client_step, which no training loop calls; "
                "override message and commit, of which it is made"
            )
        self.method, self.one_by_one = method, one_by_one
        client, server = method.client_init(x.clone()), method.server_init(x.clone())
        self._single_client, self._single_server = isinstance(client, Tensor), isinstance(server, Tensor)
        self.initial_client_state = self._named(client, MEMORY, "client_init")
        self.initial_server_state = self._named(server, ESTIMATE, "server_init")
        self.stateful = bool(self.initial_client_state)
        self.has_memory = MEMORY in self.initial_client_state and self.initial_client_state[MEMORY].shape == x.shape
        self.ignores_absence = "absent" not in overrides(method, "absent")

    def message(self, update: Tensor, state: Tables, key: Key | None) -> tuple[Tensor, Tables]:
        if not self.one_by_one or len(update) == 1:
            return self._message(update, state, key)
        made = []
        for i in range(len(update)):
            own = Key(key.stream, key.step, key.clients[i : i + 1]) if key is not None else None
            made.append(self._message(update[i : i + 1].clone(), _row(state, i), own))
        return torch.cat([message for message, _ in made]), _joined([draft for _, draft in made])

    def _message(self, update: Tensor, state: Tables, key: Key | None) -> tuple[Tensor, Tables]:
        given = self.method.message(update, self._as_client(state), key)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)):
            raise self._wrong("message", "must return a tensor and the draft of the new state")
        if given[0].shape != update.shape:
            raise self._wrong("message", f"must return messages {list(update.shape)}, got {list(given[0].shape)}")
        return given[0], self._checked(given[1], state, "message")

    def commit(self, draft: Tables, sent: Tensor) -> Tables:
        if self.one_by_one and len(sent) > 1:
            rows = [self.commit(_row(draft, i), sent[i : i + 1].clone()) for i in range(len(sent))]
            return _joined(rows)
        return self._checked(self.method.commit(self._as_client(draft), sent), draft, "commit")

    def absent(self, state: Tables, rounds: int = 1) -> Tables:
        count = len(next(iter(state.values()))) if state else 0
        if self.one_by_one and count > 1:
            return _joined([self.absent(_row(state, i), rounds) for i in range(count)])
        return self._checked(self.method.absent(self._as_client(state), rounds), state, "absent")

    def follow(self, memory: Tensor, sent: Tensor) -> Tensor:
        """Clients' memories ``[c, d]`` as the server follows them; for methods where `follows` holds."""
        if self.method.follow is None:
            raise TypeError(f"{self.method.name} does not say how its memories follow from messages")
        return self.method.follow(memory, sent)

    def absent_memory(self, memory: Tensor) -> Tensor:
        """Memories ``[c, d]`` of clients that took no part, as the server follows them."""
        state = {name: rows_like(start, len(memory)).clone() for name, start in self.initial_client_state.items()}
        return self.absent({**state, MEMORY: memory})[MEMORY]

    def server_step(self, mean_message: Tensor, state: Tables) -> tuple[Tensor, Tables]:
        given = self.method.server_step(mean_message, state[ESTIMATE] if self._single_server else state)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)):
            raise self._wrong("server_step", "must return a direction and the server's new state")
        direction, new = given[0], self._named(given[1], ESTIMATE, "server_step")
        if direction.shape != mean_message.shape:
            raise self._wrong("server_step", f"must return a direction of {len(mean_message)} numbers")
        if new.keys() != state.keys() or any(new[name].shape != state[name].shape for name in state):
            raise self._wrong("server_step", "must return a state named and shaped like server_init's")
        return direction, new

    def _as_client(self, state: Tables) -> State:
        return state[MEMORY] if self._single_client else state

    def _checked(self, given: State, like: Tables, where: str) -> Tables:
        found = self._named(given, MEMORY, where)
        if found.keys() != like.keys() or any(found[name].shape != like[name].shape for name in like):
            raise self._wrong(where, "must return a state named and shaped like client_init's, a row for each client")
        return found

    def _named(self, given: State, single: str, where: str) -> Tables:
        if isinstance(given, Tensor):
            return {single: given}
        if isinstance(given, Mapping) and all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in given.items()
        ):
            return dict(given)
        raise self._wrong(where, "must return a tensor or a dictionary of named tensors as its state")

    def _wrong(self, where: str, what: str) -> UsageError:
        return UsageError(f"{type(self.method).__name__}.{where} {what}")


def _row(state: Tables, place: int) -> Tables:
    return {name: rows[place : place + 1].clone() for name, rows in state.items()}


def _joined(states: list[Tables]) -> Tables:
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def rows_like(start: Tensor, clients: int) -> Tensor:
    """A client's first state, once for each of so many clients."""
    return start.expand(clients, *start.shape)


def fused_form_agrees(method: Method, form: ScaledDifference, dimension: int) -> bool:
    """Whether a fused form agrees with the method's functions, in float64 on a few made-up clients."""
    width = min(dimension, 16)
    draw = torch.Generator().manual_seed(1)
    update, memory = torch.randn(2, 3, width, dtype=torch.float64, generator=draw)
    update[1] *= 1e3
    steps = Steps(method, memory[0])
    state = {name: rows_like(start, 3).clone() for name, start in steps.initial_client_state.items()}
    if form.memory != steps.has_memory or (steps.stateful and not steps.has_memory):
        return False
    if steps.has_memory:
        state[MEMORY] = memory.clone()
    message, draft = steps.message(update.clone(), state, None)
    kept, idle = steps.commit(draft, message), steps.absent({name: one.clone() for name, one in state.items()})
    v = update - memory if form.memory else update
    expected = v * form.scale(torch.linalg.vector_norm(v, dim=-1, keepdim=True))
    pairs = [(message, expected)]
    if form.memory:
        pairs += [(kept[MEMORY], form.keep * memory + form.step * expected), (idle[MEMORY], form.keep * memory)]
    return all(torch.allclose(found, wanted, rtol=1e-12, atol=1e-12) for found, wanted in pairs)


def build_operator(given: Any) -> Any:
    """An operator out of its spec; anything else as it is. Raises `UsageError` for unknown ones."""
    if not isinstance(given, Mapping) or "operator" not in given:
        return given
    settings = {name: value for name, value in given.items() if name != "operator"}
    kind: type[Operator] | None = OPERATORS.get(str(given["operator"]))
    if kind is None:
        raise UsageError(f"unknown operator; there are {', '.join(OPERATORS)}")
    try:
        return kind(**settings)
    except TypeError:
        raise UsageError(f"{kind.__name__} has no such settings: {', '.join(map(str, settings))}") from None
