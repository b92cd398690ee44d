"""The privacy mechanism of a run: what is refused before it, the facts that its noise follows from, and its name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset

from ..algorithms.averaging import Averaging
from ..algorithms.local_steps import LocalSteps
from ..algorithms.message_weights import iterate_weights, message_weights
from ..algorithms.method import Method
from ..algorithms.registry import identity_of, works_by_rows
from ..errors import UsageError
from ..gradients.loop import refuse_coupled_records
from ..gradients.own_code import own_classes, own_names
from ..problems.client_data import FetchedRecords
from ..problems.functions import FunctionProblem
from ..problems.objective import Objective
from ..problems.problem import Problem
from ..sampling.participation import FixedSize, Poisson, Rotation, known_participation
from ..storage.history import NOT_COVERED
from .extension import Extension
from .run import LOGGING_SETTINGS, Plan, batches_of

if TYPE_CHECKING:
    from ..privacy.facts import Setting
    from ..privacy.mechanism import Mechanism
    from ..privacy.statement import Privacy

RECORDED = (
    "the run recorded the clients' losses, gradient norms, memory errors and message norms without noise "
    f"(diagnostics = true): they are {NOT_COVERED}"
)

_NAMED = 5  # classes and functions of the user's own that a note names

EVALUATED = "the test and validation records: results on them are recorded without noise"


def mechanism_of(
    problem: Objective,
    method: Method,
    plan: Plan,
    privacy: Privacy,
    notes: tuple[str, ...],
    witness: Path | None,
    extension: Extension | None,
    own_engine: bool = False,
) -> Mechanism:
    """Return the mechanism of a run, which has the noise of the run that it continues.

    `own_engine`: the gradients come from an engine of the user's own.
    """
    from ..privacy.facts import FULL, Sampling, Setting
    from ..privacy.mechanism import Mechanism

    batches = batches_of(problem, plan)
    if problem.x0.dtype in (torch.float16, torch.bfloat16):
        raise UsageError(f"{problem.x0.dtype} rounds messages over their bound; private runs take float32 or float64")
    if privacy.noise != "seeded" and (privacy.sampling is not None or plan.batch_rate is not None):
        raise UsageError(
            f"with noise={privacy.noise!r} no gain from sampling is claimed: the coins come from the run's seed, "
            "which is no secret; drop sampling and batch_rate"
        )
    if plan.memory.dtype is not None:
        raise UsageError(
            f"memory_dtype={str(plan.memory.dtype).removeprefix('torch.')} rounds memories, and messages rounded alike "
            f"would leave their bound; private runs keep their memories in the model's {problem.x0.dtype}"
        )
    if privacy.record_clip is not None:
        if problem.sizes is None:
            raise UsageError("record_clip needs records; plain functions have none")
        refuse_coupled_records(problem)
    match plan.participation:
        case Poisson(rate):
            clients = Sampling(rate, "poisson", amplify=privacy.sampling is not None)
        case Rotation(_, rate):
            clients = Sampling(rate, "poisson", amplify=privacy.sampling is not None)
        case FixedSize(count):
            clients = Sampling(count / problem.clients, "fixed", amplify=False)
        case _:
            clients = FULL
    divisors = problem.sizes if batches is None else batches.expected
    records: float | tuple[float, ...] | None = float(divisors.min()) if divisors is not None else None
    if divisors is not None and (plan.weights is not None or privacy.record_clip is not None):
        records = tuple(divisors.tolist())
    # An engine of the user's own does not see the batches, and code of a subclass may read records that are not drawn.
    drawn = type(problem) is Problem and not own_engine
    setting = Setting(
        clients=problem.clients,
        rounds=plan.rounds,
        sampling=clients,
        batch=Sampling(plan.batch_rate, amplify=drawn) if plan.batch_rate is not None else FULL,
        records=records,
        all_records=float(problem.sizes.sum()) if privacy.unit == "record" and problem.sizes is not None else None,
        dimension=method.message_length(len(problem.x0)),
        parameters=len(problem.x0),
        buffers=problem.statistics,
        start="gradients" if isinstance(plan.initial_memory, str) and plan.initial_memory == "gradient" else "public",
        local_steps=plan.local is not None,
        weights=tuple(plan.weights.tolist()) if plan.weights is not None else (),
        message_weights=message_weights_for(method, plan, privacy),
        groups=_groups(plan),
        workload=_workload(method, plan, privacy),
    )
    name = noise_name(method, privacy, plan, setting, extension)
    sigma = extension.sigma if extension is not None else None
    evaluated = isinstance(problem, Problem) and (problem.test or problem.validation) is not None
    gaps = (EVALUATED,) if evaluated else ()
    return Mechanism(privacy, method, setting, plan.privacy_seed, name, notes, gaps, witness, sigma)


def message_weights_for(method: Method, plan: Plan, privacy: Privacy) -> tuple[float, ...] | None:
    """Return the weight of each round's message in the last model, if the noise schedule depends on it."""
    if privacy.noise_schedule != "best":
        return None
    if plan.server_optimizer is not None or plan.averaging is not None:
        raise UsageError(
            "noise_schedule='best' is for the last iterate of plain steps; leave out the server's optimizer and the "
            "average, or choose another noise_schedule"
        )
    return message_weights(method, [plan.step_size(k) for k in range(plan.rounds)])


def _groups(plan: Plan) -> int:
    """Return the number of groups that take turns; a subclass may draw whom it likes, and counts as one group."""
    rule = plan.participation
    return rule.groups if isinstance(rule, Rotation) and known_participation(rule) else 1


def _workload(method: Method, plan: Plan, privacy: Privacy) -> tuple[float, ...]:
    """Return how much of a message is in the iterates, if the noise is correlated for them.

    The steps of an optimizer of the server are taken as sums of the messages.
    """
    if not privacy.correlates:
        return ()
    return iterate_weights(method, plan.rounds) if plan.server_optimizer is None else (1.0,) * plan.rounds


def noise_name(
    method: Method, privacy: Privacy, plan: Plan, setting: Setting, extension: Extension | None = None
) -> str:
    """Return the name of a run's seeded noise; runs that differ in any public setting share no noise.

    A continued run does not share it with a run of as many rounds from the start.

    The engine, the device and the logging are not part of the name, so the same run has the same noise.
    """
    public = {name: value for name, value in plan.identity().items() if name not in LOGGING_SETTINGS}
    public |= {"method": identity_of(method), "privacy": privacy.to_dict()}
    public |= {"clients": setting.clients, "dimension": setting.dimension}
    public |= extension.facts() if extension is not None else {}
    return hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()[:16]


def assumptions(
    problem: Objective, method: Method, privacy: Privacy, plan: Plan, counted: bool, own_engine: bool, profiled: bool
) -> tuple[str, ...]:
    """Return the assumptions of this run, for its report. `counted`: the rounds follow from the clients' sizes."""
    notes = []
    if own := _own_code(problem, method):
        unit = "record" if privacy.record_clip is not None else "client"
        notes.append(
            f"epsilon holds if {_listed(own)}, of neither PyTorch nor normec, treat each {unit} alone: a few gradients "
            "were compared at the start, and what such code keeps in attributes and closures is undone, but nothing "
            "checks global variables, files and other objects"
        )
    if not isinstance(plan.initial_memory, str):
        notes.append("the given initial memory is assumed to be public")
    if counted and privacy.unit == "client":
        notes.append(
            "the numbers of records of the clients are assumed to be public, because the rounds follow from them"
        )
    if plan.weights is not None:
        notes.append("the clients' weights are assumed to be public, because the sum and its noise follow from them")
    if plan.batch_size is not None and privacy.unit == "record":
        notes.append(
            "batches of a fixed size gain nothing: every round counts as if the record were in the batch; batch_rate, "
            "whose coins amplify privacy, and full gradients need less noise"
        )
    if plan.diagnostics:
        notes.append(RECORDED)
    if profiled:
        notes.append(f"the profile holds times of operations on the clients' records, which are {NOT_COVERED}")
    if isinstance(problem, Problem) and problem.shown:
        notes.append(f"the {problem.shown[0]} set contains records of the clients: results on it are {NOT_COVERED}")
    if isinstance(problem, Problem) and problem.repeated and privacy.unit == "client":
        notes.append(
            "some records lie in the data of several clients, or several times in one's: epsilon is that of one "
            "client's data, and says nothing about a person who is in several; if a loader reuses its memory, give "
            "each client a copy"
        )
    if isinstance(problem, Problem) and problem.perhaps_shown:
        notes.append(
            f"the {problem.perhaps_shown[0]} set uses the same memory as the clients' data, in a class of the user's "
            f"own: results on records that a client holds are {NOT_COVERED}"
        )
    if own_engine:
        notes.append("the gradients come from the user's own engine; nothing checks that it keeps the clients separate")
    if type(problem) not in (Problem, FunctionProblem):
        notes.append(
            f"the clients' losses come from the user's own class {type(problem).__name__}; "
            "only a few gradients at the start were checked for keeping the clients separate"
        )
    if not known_participation(plan.participation):
        notes.append(
            f"the user's own rule {type(plan.participation).__name__} decides which clients take part; "
            "nothing checks that it does not use the clients' data"
        )
    if plan.server_optimizer is not None and not plan.server_optimizer.known:
        notes.append(
            f"the caller's own optimizer {plan.server_optimizer.name} moves the model; nothing checks that it does not "
            "look at the clients' data"
        )
    return tuple(notes)


def _own_code(problem: Objective, method: Method) -> list[str]:
    """Return the names of the classes and functions of the user's own that compute clients, each once."""
    parts: tuple[object, ...] = ()
    if isinstance(problem, Problem):
        parts = (problem.model, problem.loss, problem.penalty, problem.augment, problem.transform, problem.form.collate)
        parts += _datasets(problem)
    elif isinstance(problem, FunctionProblem):
        parts = tuple(problem.functions)
    own = [name for part in parts for name in own_names(part)]
    if not works_by_rows(method):
        own += own_names(method) + own_names(getattr(method, "operator", None))
    return list(dict.fromkeys(own))


def _datasets(problem: Problem) -> tuple[object, ...]:
    """Return one data set of each class of the user's own, whose items are read during the run."""
    found: dict[type, object] = {}
    waiting: list[Any] = list(problem.records.datasets) if isinstance(problem.records, FetchedRecords) else []
    while waiting:
        dataset = waiting.pop()
        if type(dataset) is Subset:
            waiting.append(dataset.dataset)
        elif type(dataset) in (ConcatDataset, StackDataset):
            held = dataset.datasets
            waiting += held.values() if isinstance(held, dict) else held
        elif own_classes(dataset):
            found.setdefault(type(dataset), dataset)
    return tuple(found.values())


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= _NAMED else [*names[:_NAMED], f"{len(names) - _NAMED} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def refuse_subclasses(plan: Plan) -> None:
    """Refuse code of the caller's own in parts of a round that see all clients, or act on what is released."""
    for name, part, kind in (("local", plan.local, LocalSteps), ("averaging", plan.averaging, Averaging)):
        if part is not None and type(part) is not kind:
            raise UsageError(
                f"{name} is a {type(part).__name__}, a subclass of {kind.__name__}: nothing checks that its code keeps "
                f"the clients apart and reads no data, so a private run takes {kind.__name__} itself"
            )


def refuse_shared_records(problem: Problem, privacy: Privacy, diagnostics: bool) -> None:
    """Refuse records that occur more than once, and evaluation data that contain the clients' records."""
    if privacy.unit == "record" and problem.repeated:
        raise UsageError(
            "a record occurs more than once in the clients' data, and unit='record' accounts for one occurrence; "
            "give every record to one client, once, or protect whole clients"
        )
    if problem.shown and not diagnostics:
        raise UsageError(
            f"the {problem.shown[0]} set contains records of the clients, and its results are reported without noise; "
            "give records that no client holds, or set diagnostics = true (in Python, Logging(diagnostics=True))"
        )
