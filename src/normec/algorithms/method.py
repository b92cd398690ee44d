"""The interface of a distributed method: its author implements it, and every engine runs it.

One round, for the clients that take part:

    message      (update, client state) → (message, draft)     the message, and a draft of the new client state
    commit       (draft, what was sent) → client state         after the message was paid for and has been sent
    server_step  (mean message, server state) → (direction, server state);   then x ← x − lr · direction

A message has as many numbers as the model, unless `message_length` says otherwise. Numbers that the server makes public
with x, such as a threshold, come from `broadcast`. Clients that do not take part apply `absent`. `update` is the
client's gradient at x. The mean is over all clients; those that are absent count as zero, so that a sum of messages
means the same in every round.

All functions are pure: they return new tensors and change none. Client functions work row by row on tensors ``[c, …]``
of any number c of clients; server functions work on one vector ``[d]``. A state is a tensor, or a dictionary of named
tensors of any shape, as `client_init` and `server_init` define it. A state that is a single tensor is called "memory"
(client) or "estimate" (server). States of these names are special: `initial_memory` sets them, and the history records
the distance between memories and gradients.

A claim that a class makes about itself holds only for the code that it was made about: a subclass that overrides
`message` inherits neither the `lipschitz` constant nor the fused form of its base class.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..errors import UsageError
from ..sampling.random_streams import Key, derive_seed, own_numbers
from .operators import OPERATORS, Operator, claim_covers

State = Any  # a tensor, or a mapping of named tensors
Tables = dict[str, Tensor]
MEMORY, ESTIMATE = "memory", "estimate"  # the names given to states that are single tensors
CLIENT_FUNCTIONS = ("client_init", "message", "commit", "absent", "local_correction")
SERVER_FUNCTIONS = ("server_init", "server_step", "broadcast")


@dataclass(frozen=True)
class ScaledDifference:
    """The fused form of a client's round: v = u − g (or u, without a memory); m = s(‖v‖) v; g ← keep · g + step · m.

    With a fused form, engines need two passes over the gradients and no table of messages.
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
    """Whether `server_step` can be captured in a CUDA graph, because it launches the same kernels in every round."""

    linear_server: bool = True
    """Whether the direction is a linear function of the mean messages so far, the same in every round and coordinate.

    The statement belongs to the server's functions: a class that overrides them states it anew, or has none.
    """

    follow: ClassVar[Callable[..., Tensor] | None] = None
    """(memory, sent) → memory: how the server can compute a client's "memory" from its messages alone.

    In a federation the server keeps such a row for each party, to screen messages and to restore a party that lost its
    disk.
    """

    sent_between: ClassVar[Callable[..., Tensor] | None] = None
    """(memory before, memory after) → message: the message behind the change of a rounded memory (`memory_dtype`)."""

    noise_response: tuple[float, float] | None = None
    """(κ, β) where noise z in the mean message is noise e ← κ e + β z in the direction; None claims nothing.

    A server optimizer that corrects for the noise needs it.
    """

    noise_path: ClassVar[str] = ""
    """Why noise in a message does not reach the model linearly, if no setting would change that.

    Whatever needs `linear_server` or `noise_response` repeats it when it refuses the method.
    """

    initial_memory_sets: ClassVar[tuple[str, ...]] = (MEMORY,)
    """The client states that `initial_memory` sets."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.name = cls.name or cls.__name__.lower()

    @property
    def bound(self) -> float:
        """The largest norm that a message can have; infinite if there is none, which rules out privacy."""
        return math.inf

    def client_init(self, x: Tensor) -> State:  # noqa: ARG002
        """Return the initial state of one client; `x` is ``[d]``."""
        return {}

    def message(self, update: Tensor, state: State, key: Key | None = None) -> tuple[Tensor, State]:  # noqa: ARG002
        """Return the clients' messages and the drafts of their new states, named and shaped like the states.

        A method that overrides `broadcast` takes a fourth argument, ``public``: a dictionary of named tensors.

        Args:
            update: The clients' gradients, ``[c, d]``.
            state: The clients' states, each tensor ``[c, …]``.
            key: The random numbers of this round and these clients, for randomised methods.
        """
        raise UsageError(
            f"{type(self).__name__} does not define message; add message(update, state, key), which returns the "
            "clients' messages and the drafts of their new states"
        )

    def commit(self, draft: State, sent: Tensor) -> State:  # noqa: ARG002
        """Return the clients' new states after they have sent; with memory="noisy", `sent` includes the noise."""
        return draft

    def absent(self, state: State, rounds: int = 1) -> State:  # noqa: ARG002
        """Return the states of clients after `rounds` rounds in which they did not take part."""
        return state

    def local_correction(self, state: State, public: dict[str, Tensor]) -> Tensor:
        """Return what is added to the gradient of every local step, ``[c, d]``; for methods that need local steps.

        Args:
            state: The clients' states, each tensor ``[c, …]``.
            public: The numbers that `broadcast` returned.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define local_correction")

    def message_length(self, dimension: int) -> int:
        """Return how many numbers a message has, for a model of so many parameters."""
        return dimension

    def broadcast(self, state: State) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the public numbers that the server sends to every client beside x, made of the server's state.

        A method that overrides this function has one more argument in `message`: ``public``, these named tensors. They
        follow from earlier releases, so a client's guarantee holds whatever they are.
        """
        return {}

    def server_init(self, x: Tensor) -> State:  # noqa: ARG002
        """Return the initial state of the server."""
        return {}

    def server_step(self, mean_message: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the direction of the step, x ← x − lr · direction, and the server's new state."""
        return mean_message, state

    def client_step(self, update: Tensor, state: State, key: Key | None = None) -> tuple[Tensor, State]:
        """Call `message` and `commit`, for your own training loops without noise. Engines call the two separately."""
        message, draft = self.message(update, state, key)
        return message, self.commit(draft, message)

    def payload(self, dimension: int, itemsize: int) -> int:
        """Return the size of a message in bytes."""
        return dimension * itemsize

    def fused(self) -> ScaledDifference | None:
        """Return the fused form that computes the same as the client functions, or None."""
        return None

    def spec(self) -> dict[str, Any]:
        """Return the settings as plain JSON values; runs, checkpoints and parties identify the method by them."""
        declared = hasattr(self, "__dataclass_fields__")
        names = [one.name for one in dataclasses.fields(cast(Any, self))] if declared else list(vars(self))
        held = {name: getattr(self, name) for name in names if not name.startswith("_")}
        return {name: _plain(type(self).__name__, name, value) for name, value in held.items()}


class OperatorMethod(Method):
    """A method whose messages are values of an operator Ψ; it has the bound and the message size of Ψ."""

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
    if isinstance(value, Method):
        return {"method": value.name, **value.spec()}
    if hasattr(value, "bound") and not isinstance(value, type):  # an operator
        kind = type(value)
        known = OPERATORS.get(kind.__name__) is kind  # otherwise it is the user's own
        title = kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"
        return {"operator": title, **{key: _plain(title, key, one) for key, one in vars(value).items()}}
    raise UsageError(
        f"the setting {name} of {owner} is a {type(value).__name__}, which cannot be written to a file; give a plain "
        "number or text, or override spec()"
    )


def text_of(method: Method) -> str:
    """Return a method as one line of text: its class and its settings."""
    kind = type(method)
    own = "" if kind.__module__.partition(".")[0] == __package__.partition(".")[0] else f"{kind.__module__}."
    return f"{own}{kind.__qualname__}({json.dumps(method.spec(), sort_keys=True)})"


def overrides(method: Method, *functions: str) -> list[str]:
    """Return the named functions that a method overrides."""
    return [name for name in functions if not has_functions_of(method, Method, name)]


def has_functions_of(method: Method, kind: type[Method], *functions: str) -> bool:
    """Whether the named functions of a method are those of class `kind`."""
    return all(getattr(getattr(method, name), "__func__", None) is getattr(kind, name) for name in functions)


def refuse_other_arguments(method: Method) -> None:
    """Raise `UsageError` if a function of a method cannot be called with the arguments that engines pass."""
    for name in overrides(method, *CLIENT_FUNCTIONS, *SERVER_FUNCTIONS):
        expected = _arguments(name)
        if name == "message" and overrides(method, "broadcast"):
            expected = (*expected, "public")
        function = getattr(method, name)
        if inspect.ismethod(function):
            why = _why_not(function.__func__, ("self", *expected))
        else:
            why = _why_not.__wrapped__(function, expected)
        if why is not None:
            raise UsageError(
                f"{type(method).__name__}.{name} is called as {name}({', '.join(expected)}), and cannot be: {why}; "
                "give it these arguments"
            )


@lru_cache(maxsize=32)
def _arguments(name: str) -> tuple[str, ...]:
    """Return the arguments of a function of `Method`."""
    return tuple(argument for argument in inspect.signature(getattr(Method, name)).parameters if argument != "self")


@lru_cache(maxsize=256)
def _why_not(function: Callable[..., Any], arguments: tuple[str, ...]) -> str | None:
    """Return why a function cannot be called with arguments; None if it can. Every run asks it of the same ones."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def fused_form(method: Method) -> ScaledDifference | None:
    """Return the method's fused form, if it was stated for the functions that the method has."""
    return method.fused() if claim_covers(method, "fused", *CLIENT_FUNCTIONS) else None


def recordable(method: Method) -> bool:
    """Whether a CUDA graph may replace the server's step."""
    return bool(method.recordable) and claim_covers(method, "recordable", *SERVER_FUNCTIONS)


def follows(method: Method) -> bool:
    """Whether the server can compute a client's memory from its messages."""
    return method.follow is not None and claim_covers(method, "follow", *CLIENT_FUNCTIONS)


def may_round(method: Method) -> bool:
    """Whether memories may have a lower precision than x."""
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


def unknown_noise(method: Method, instead: str) -> str:
    """Say why it is not known how noise in a message reaches the model, and what to use `instead`."""
    if getattr(method, "server_norm", False):
        return f"its server normalises the step; use server_norm = false, or {instead}"
    return f"{method.noise_path or 'its class does not state it'}; use {instead}"


_NOTHING = nullcontext()


class Steps:
    """Calls the functions of a method with named tables, for a model of `len(x)` parameters, and checks their results.

    Raises:
        UsageError: The method overrides a function that no engine calls, or a function returns a wrong type or shape.
    """

    def __init__(self, method: Method, x: Tensor, one_by_one: bool = False) -> None:
        """Ask the method for its first states.

        Args:
            method: The method.
            x: The model's parameters, ``[d]``.
            one_by_one: Show the client's functions one client at a time, and call every function on a copy of the
                method that has seen nothing before. What they return is copied before the next call, which may write
                to the same memory. So whatever they do, and whatever they leave in the method's attributes, they mix
                no clients and tell the server nothing. The copies are of the method as it is now: what the caller
                changes in it later has no effect (`refuse_changes`).
        """
        if overrides(method, "client_step"):
            raise UsageError(
                f"{type(method).__name__} overrides client_step, which no training loop calls; "
                "override message and commit, which it calls"
            )
        refuse_other_arguments(method)
        self.method, self.one_by_one, self._given = method, one_by_one, method
        self._turn: tuple[int, int] = (0, 0)  # the seed and the round of what the functions draw
        self.method = self._own  # what cannot be copied is refused now
        with self._numbers("init"):
            client, server = method.client_init(x.clone()), method.server_init(x.clone())
        self._single_client, self._single_server = isinstance(client, Tensor), isinstance(server, Tensor)
        self.initial_client_state = self._all_kept(self._named(client, MEMORY, "client_init"))
        self.initial_server_state = self._all_kept(self._named(server, ESTIMATE, "server_init"))
        self.stateful = bool(self.initial_client_state)
        self.has_memory = MEMORY in self.initial_client_state and self.initial_client_state[MEMORY].shape == x.shape
        self.ignores_absence = "absent" not in overrides(method, "absent")
        self._dimension, self.message_length = len(x), method.message_length(len(x))
        self.broadcasts = bool(overrides(method, "broadcast"))
        self.corrects = bool(overrides(method, "local_correction"))
        self._stated = text_of(method) if one_by_one else ""

    def refuse_changes(self) -> None:
        """Raise `UsageError` if a setting of the method, of which copies are called, was changed in the meantime."""
        now = text_of(self._given) if self.one_by_one else ""
        if now != self._stated:
            raise UsageError(
                f"the method was changed during a private run: it is {now}, and the noise was calibrated for "
                f"{self._stated}; leave its settings as they are, or start another run"
            )

    def begin(self, seed: int, round: int) -> None:
        """Begin a round: functions of the user's own that draw from global generators draw the numbers of this round.

        The numbers would otherwise follow from how many others have drawn before, which depends on their data.
        """
        self._turn = seed, round

    def _numbers(self, *path: object) -> AbstractContextManager[None]:
        """Return a context in which a function is called; `path` is the function, and the client if it is known."""
        if not self.one_by_one:
            return _NOTHING
        seed, round = self._turn
        return own_numbers(derive_seed(seed, "method", *path, round), often=True)

    @property
    def _own(self) -> Method:
        """The method to call a function of."""
        if not self.one_by_one:
            return self.method
        try:
            return copy.deepcopy(self.method)
        except Exception as error:  # locks, open files, whatever a method holds
            raise UsageError(
                f"{type(self.method).__name__} holds something that cannot be copied, and a private run calls its "
                f"functions on copies ({error}); keep plain settings in its attributes"
            ) from error

    def broadcast(self, state: Tables) -> Tables | None:
        """The server's public numbers of the next round; None where the method has none."""
        if not self.broadcasts:
            return None
        with self._numbers("broadcast"):
            said = self._own.broadcast(self._as_server(state))
        return self._all_kept(self._named(said, ESTIMATE, "broadcast"))

    def local_correction(self, state: Tables, public: Tables | None) -> Tensor:
        """Return what is added to the gradients of the clients' local steps, ``[c, d]``."""
        count = len(next(iter(state.values())))
        if self.one_by_one and count > 1:
            return torch.cat([self.local_correction(_row(state, i), public) for i in range(count)])
        said = {name: value.clone() for name, value in (public or {}).items()}
        with self._numbers("local_correction"):
            given = self._own.local_correction(self._as_client(state), said)
        if not isinstance(given, Tensor) or given.shape != (count, self._dimension):
            raise self._wrong("local_correction", f"must return a tensor [{count}, {self._dimension}]")
        return self._kept(given)

    def message(
        self, update: Tensor, state: Tables, key: Key | None, public: Tables | None = None
    ) -> tuple[Tensor, Tables]:
        if self.broadcasts and public is None:
            raise TypeError(f"{self.method.name} needs the server's public numbers")
        if not self.one_by_one or len(update) == 1:
            return self._message(update, state, key, public)
        made = []
        for i in range(len(update)):
            own = Key(key.stream, key.step, key.clients[i : i + 1]) if key is not None else None
            made.append(self._message(update[i : i + 1].clone(), _row(state, i), own, public))
        return torch.cat([message for message, _ in made]), _joined([draft for _, draft in made])

    def _message(self, update: Tensor, state: Tables, key: Key | None, public: Tables | None) -> tuple[Tensor, Tables]:
        # The function gets the tensor itself, and might change it.
        shape, dtype = (len(update), self.message_length), update.dtype
        said = () if public is None else ({name: value.clone() for name, value in public.items()},)
        with self._numbers("message", *(key.clients.tolist() if key is not None and self.one_by_one else ())):
            given = self._own.message(update, self._as_client(state), key, *said)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)):
            raise self._wrong("message", "must return a tensor and the draft of the new state")
        if given[0].shape != shape:
            raise self._wrong("message", f"must return messages {list(shape)}, got {list(given[0].shape)}")
        if given[0].dtype != dtype or type(given[0]) is not Tensor:
            found = f"{type(given[0]).__name__} of {given[0].dtype}"
            raise self._wrong("message", f"must return a plain tensor of the gradients' {dtype}, got a {found}")
        return self._kept(given[0]), self._checked(given[1], state, "message")

    def commit(self, draft: Tables, sent: Tensor) -> Tables:
        if self.one_by_one and len(sent) > 1:
            rows = [self.commit(_row(draft, i), sent[i : i + 1].clone()) for i in range(len(sent))]
            return _joined(rows)
        with self._numbers("commit"):
            given = self._own.commit(self._as_client(draft), sent)
        return self._checked(given, draft, "commit")

    def absent(self, state: Tables, rounds: int = 1) -> Tables:
        count = len(next(iter(state.values()))) if state else 0
        if self.one_by_one and count > 1:
            return _joined([self.absent(_row(state, i), rounds) for i in range(count)])
        with self._numbers("absent"):
            given = self._own.absent(self._as_client(state), rounds)
        return self._checked(given, state, "absent")

    def follow(self, memory: Tensor, sent: Tensor) -> Tensor:
        """Return the clients' memories ``[c, d]`` as the server computes them, if `follows` holds."""
        if self.method.follow is None:
            raise TypeError(f"{self.method.name} does not define how memories follow from messages")
        return self.method.follow(memory, sent)

    def absent_memory(self, memory: Tensor) -> Tensor:
        """Return the memories ``[c, d]`` of clients that did not take part, as the server computes them."""
        state = {name: rows_like(start, len(memory)).clone() for name, start in self.initial_client_state.items()}
        return self.absent({**state, MEMORY: memory})[MEMORY]

    def server_step(self, mean_message: Tensor, state: Tables) -> tuple[Tensor, Tables]:
        with self._numbers("server_step"):
            given = self._own.server_step(mean_message, self._as_server(state))
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)):
            raise self._wrong("server_step", "must return a direction and the server's new state")
        direction, new = given[0], self._named(given[1], ESTIMATE, "server_step")
        if direction.shape != (self._dimension,):
            raise self._wrong("server_step", f"must return a direction of {self._dimension} numbers")
        if new.keys() != state.keys() or any(new[name].shape != state[name].shape for name in state):
            raise self._wrong("server_step", "must return a state named and shaped like server_init's")
        return self._kept(direction), self._all_kept(new)

    def _as_client(self, state: Tables) -> State:
        return state[MEMORY] if self._single_client else state

    def _as_server(self, state: Tables) -> State:
        return state[ESTIMATE] if self._single_server else state

    def _checked(self, given: State, like: Tables, where: str) -> Tables:
        found = self._named(given, MEMORY, where)
        if found.keys() != like.keys() or any(found[name].shape != like[name].shape for name in like):
            raise self._wrong(where, "must return a state named and shaped like client_init's, a row for each client")
        return self._all_kept(found)

    def _kept(self, given: Tensor) -> Tensor:
        """What a function returned, in memory of its own, unless all clients are shown to it at once."""
        return given.clone() if self.one_by_one else given

    def _all_kept(self, given: Tables) -> Tables:
        return {name: self._kept(value) for name, value in given.items()}

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


def _row(state: Tables, index: int) -> Tables:
    return {name: rows[index : index + 1].clone() for name, rows in state.items()}


def _joined(states: list[Tables]) -> Tables:
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def rows_like(start: Tensor, clients: int) -> Tensor:
    """Repeat the initial state of a client for `clients` clients."""
    return start.expand(clients, *start.shape)


def fused_form_agrees(method: Method, form: ScaledDifference, dimension: int) -> bool:
    """Whether a fused form agrees with the method's functions, in float64 on a few synthetic clients."""
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
    message, draft = steps.message(update.clone(), state, None, steps.broadcast(steps.initial_server_state))
    kept, idle = steps.commit(draft, message), steps.absent({name: one.clone() for name, one in state.items()})
    v = update - memory if form.memory else update
    expected = v * form.scale(torch.linalg.vector_norm(v, dim=-1, keepdim=True))
    pairs = [(message, expected)]
    if form.memory:
        pairs += [(kept[MEMORY], form.keep * memory + form.step * expected), (idle[MEMORY], form.keep * memory)]
    return all(torch.allclose(found, wanted, rtol=1e-12, atol=1e-12) for found, wanted in pairs)


def build_operator(given: Any) -> Any:
    """Build an operator from its spec, or return any other value; raises `UsageError` for unknown operators."""
    if not isinstance(given, Mapping) or "operator" not in given:
        return given
    settings = {name: value for name, value in given.items() if name != "operator"}
    kind: type[Operator] | None = OPERATORS.get(str(given["operator"]))
    if kind is None:
        raise UsageError(f"unknown operator {given['operator']!r}; choose from {', '.join(OPERATORS)}")
    try:
        return kind(**settings)
    except TypeError:
        raise UsageError(f"{kind.__name__} has no such settings: {', '.join(map(str, settings))}") from None
