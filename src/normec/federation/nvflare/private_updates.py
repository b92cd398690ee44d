"""`PrivateUpdates`: a filter of task results for an NVIDIA FLARE job, with a guarantee over all its rounds.

    job.to(PrivateUpdates("/srv/ledger", epsilon=8.0, rounds=50, clip=1.0), "site-1",
           filter_type=FilterType.TASK_RESULT, tasks=["train"])

FLARE's own filters add noise to each result and keep no account, so that their ε grows with the rounds unseen. This
filter clips a site's weight difference to a norm, pays for it in a ledger on the site's disk, adds Gaussian noise from
a secure generator on a grid, and sends nothing else: metrics, losses, numbers of steps and other headers of the result
are left out, because no noise covers them. σ follows from ε, δ and the number of rounds. The ledger outlives the job:
once its budget is spent, every result is blocked, also in the next job with the same folder.

FLARE applies a filter to the tasks that the job names for it, and the server names the tasks: an executor that answers
all of them (that of a `ScriptRunner` does) would send the same update without noise for a task of another name, and
FLARE's own `submit_model` and `validate` ask for a model and for metrics. So the filter listens to FLARE's events, and
empties every result of its site that did not pass it. In FLARE's workflows between clients (swarm learning, cyclic
learning, cross-site evaluation) a site sends its update as the data of a task to another site, and FLARE ignores what
filters make of it. The filter empties the data of all such tasks, so these workflows do not work with it.

What is protected is the site with all its data, against everybody who sees its results (unit "client", trust "local").
Not covered are whether and when a site answers or fails, and what its training code sends by other ways than task
results, such as FLARE's event streams of metrics; leave those out of the job.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants

from ...algorithms.direct import DPSGD
from ...algorithms.operators import Clip
from ...errors import at_least, positive
from ...privacy.facts import Setting
from ...privacy.mechanism import Mechanism
from ...privacy.statement import Privacy
from ...system.files import private_folder

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext

LEDGER = "ledger.jsonl"
_CODES = {value for name, value in vars(ReturnCode).items() if name.isupper()}  # words of FLARE, not of the site
_PASSED = "normec.passed"  # the key of a task's context that says that its result passed a filter
_GIVEN = "normec.given"  # the key at which the data of a task are kept until it is known who sends them
_NUMBERS = "normec.rounds"  # the key at which the numbers of the server are kept, which FLARE removes with the task
_ROUNDS = (AppConstants.CURRENT_ROUND, AppConstants.START_ROUND, AppConstants.NUM_ROUNDS)  # numbers of the server


class PrivateUpdates(Filter):  # type: ignore[misc]  # NVFlare has no types
    """Clip a site's weight differences, add noise, and account for every one of them.

    Args:
        folder: The folder of the ledger; "{site}" stands for the name of the site.
        epsilon: The target ε of all results that this ledger covers.
        rounds: The number of results for which the noise is calibrated.
        clip: The largest norm of a result.
        delta: The target δ.
        relation: What a site is compared with: one whose result is zero ("zero-out"), or with other data ("replace").
        witness: A file outside the folder that also counts the ledger's lines, so that an older copy is refused.

    Raises:
        UsageError: A number is out of its range, or the relation is unknown.
    """

    def __init__(
        self,
        folder: str,
        epsilon: float,
        rounds: int,
        clip: float,
        delta: float = 1e-5,
        relation: Literal["zero-out", "replace"] = "zero-out",
        witness: str | None = None,
    ) -> None:
        super().__init__()
        positive(clip=clip)
        at_least(1, rounds=rounds)
        self._privacy = Privacy(epsilon=epsilon, delta=delta, relation=relation, trust="local", noise="secure")
        self.folder, self.epsilon, self.rounds, self.clip = folder, epsilon, rounds, clip
        self.delta, self.relation, self.witness = delta, relation, witness
        self._mechanism: Mechanism | None = None
        self._form: list[tuple[str, tuple[int, ...], str]] = []

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a result that holds the noisy weight difference and nothing else of the site."""
        found = self._covered(shareable, fl_ctx)
        fl_ctx.set_prop(_PASSED, True, private=True, sticky=False)
        return found

    def _covered(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code if code in _CODES else ReturnCode.EXECUTION_EXCEPTION)
        try:
            dxo = from_shareable(shareable)
        except Exception:
            raise ContentBlockedException("a result must be a DXO with a weight difference") from None
        if dxo.data_kind != DataKind.WEIGHT_DIFF:
            raise ContentBlockedException(f"a result must be a weight difference, got {dxo.data_kind}")
        if not dxo.data:
            raise ContentBlockedException("a result has no parameters")
        arrays = {name: np.asarray(dxo.data[name]) for name in sorted(dxo.data)}
        form = [(name, array.shape, array.dtype.name) for name, array in arrays.items()]
        mechanism = self._opened(form, str(fl_ctx.get_identity_name()))
        mechanism.pay(mechanism.releases)  # raises `BudgetSpent`, and FLARE then sends an error without content
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()]).astype(np.float64))
        if not bool(torch.isfinite(flat).all()):
            flat = torch.zeros_like(flat)  # only noise is sent, because an error would tell something about the data
        length = float(torch.linalg.vector_norm(flat))
        message = flat * min(1.0, self.clip / length) if length else flat
        noisy = mechanism.noisy(message[None], torch.tensor([0]))[0].numpy()
        return _reply(fl_ctx.get_prop(_NUMBERS) or {}, _parted(noisy, arrays, dxo.data))

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Empty results that passed no `PrivateUpdates`, and tasks for other sites; FLARE sends what is left."""
        if event_type == EventType.BEFORE_TASK_DATA_FILTER:
            fl_ctx.set_prop(_GIVEN, fl_ctx.get_prop(FLContextKey.TASK_DATA), private=True, sticky=False)
        elif event_type == EventType.AFTER_TASK_DATA_FILTER:
            if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) != FilterKey.IN:  # FLARE sends what came to its filters
                _empty(fl_ctx.get_prop(_GIVEN), ReturnCode.TASK_DATA_FILTER_ERROR)
                _empty(fl_ctx.get_prop(FLContextKey.TASK_DATA), ReturnCode.TASK_DATA_FILTER_ERROR)
            fl_ctx.set_prop(_GIVEN, None, private=True, sticky=False)
        elif event_type == EventType.BEFORE_TASK_EXECUTION:
            numbers = _numbers(fl_ctx.get_prop(FLContextKey.TASK_DATA))
            fl_ctx.set_prop(_NUMBERS, numbers, private=True, sticky=False)
        elif event_type == EventType.BEFORE_TASK_RESULT_FILTER:
            fl_ctx.set_prop(_PASSED, False, private=True, sticky=False)
        elif event_type == EventType.AFTER_TASK_RESULT_FILTER and not fl_ctx.get_prop(_PASSED):
            _empty(fl_ctx.get_prop(FLContextKey.TASK_RESULT), ReturnCode.TASK_RESULT_FILTER_ERROR)

    def close(self) -> None:
        """Release the ledger. FLARE ends the process of a site with its job, which releases it as well."""
        if self._mechanism is not None:
            self._mechanism.close()
            self._mechanism = None

    def _opened(self, form: list[tuple[str, tuple[int, ...], str]], site: str) -> Mechanism:
        """The mechanism with its ledger; the first result decides the names and shapes of all others."""
        if self._mechanism is None:
            for name, _, kind in form:
                if kind not in ("float32", "float64"):
                    raise ContentBlockedException(f"{name} is of type {kind}; send parameters of floating point only")
            folder = Path(self.folder.replace("{site}", site))
            private_folder(folder)
            size = sum(int(np.prod(shape)) for _, shape, _ in form)
            setting = Setting(clients=1, rounds=self.rounds, dimension=size, parameters=size)
            witness = Path(self.witness) if self.witness is not None else None
            self._mechanism = Mechanism(
                self._privacy, DPSGD(Clip(self.clip)), setting, 0, f"nvflare {site}", witness=witness
            )
            self._mechanism.open(folder / LEDGER)
            self._form = form
        if form != self._form:
            raise ContentBlockedException("the parameters of a result differ from those of the first one")
        return self._mechanism


def _parted(vector: Any, arrays: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The vector in the shapes and types of the arrays that it was made from."""
    parts, start = {}, 0
    for name, array in arrays.items():
        part = vector[start : start + array.size].reshape(array.shape).astype(array.dtype)
        parts[name] = torch.from_numpy(part) if isinstance(given[name], torch.Tensor) else part
        start += array.size
    return parts


def _empty(sent: object, code: str) -> None:
    if isinstance(sent, Shareable):
        sent.clear()
        sent.update(make_reply(code))


def _numbers(task: object) -> dict[str, int]:
    """The numbers of rounds that the server gave to a task."""
    found = {name: task.get_header(name) for name in _ROUNDS} if isinstance(task, Shareable) else {}
    return {name: value for name, value in found.items() if type(value) is int}


def _reply(numbers: dict[str, int], data: dict[str, Any]) -> Shareable:
    """A new result with the data and the server's numbers of rounds; FLARE adds the server's cookies later."""
    reply = make_reply(ReturnCode.OK)
    for name, value in numbers.items():
        reply.set_header(name, value)
    return DXO(DataKind.WEIGHT_DIFF, data, {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}).update_shareable(reply)
