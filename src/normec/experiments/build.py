"""Building the arguments of `train` from a configuration: data of the clients, a model, a method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from .. import data, models
from ..data.partition import BY_GROUPS
from ..errors import UsageError, at_least, below_one
from ..problems.problem import Problem
from ..sampling.participation import FixedSize, Participation, Poisson, Rotation
from ..sampling.random_streams import derive_seed
from ..settings.config import RunConfig, in_groups
from ..system.code_files import in_a_file
from ..training.callbacks import Callback
from ..training.client_weights import KINDS, Weights
from ..training.communicator import Communicator
from ..training.options import Compute, Logging, Memory, Options, Storage, device_of
from . import methods, own_problem, server
from .early_stopping import early_stopping

if TYPE_CHECKING:
    from ..privacy import Privacy

# The settings that `problem` reads; configurations that agree in them have the same problem.
PROBLEM_SETTINGS = (*in_groups("data", "model"), "seed")
DEFAULT_CLIENTS = 100
DEFAULT_EPSILON = 8.0
PRIVATE_SETTINGS = tuple(name for name in in_groups("privacy") if name != "private")


def problem(config: RunConfig) -> Problem:
    """Return the problem: the clients' data and the initial model; the seed decides the split and the parameters."""
    penalty = models.NonconvexPenalty(config.penalty) if config.penalty else None
    if own_problem.has_own_data(config):
        return own_problem.problem(config, penalty)
    clients = number_of_clients(config)
    found = data.load(config.data, config.data_dir, config.scaling, target=config.target, schema=config.data_schema)
    inputs, targets = found.train.tensors
    used = _drawn(len(targets), "records", config.records, config.public_seed)
    kept, validation = (used[part] for part in _holdout(len(used), config))
    groups = found.groups
    if config.column is not None:
        if config.split != "column":
            raise UsageError(f"column needs split = 'column', got split = {config.split!r}")
        if inputs.ndim != 2 or not 0 <= config.column < inputs.shape[1]:
            raise UsageError(f"column must name one of the {inputs[0].numel()} inputs, got {config.column}")
        groups = torch.unique(inputs[:, config.column], return_inverse=True)[1]  # one client per distinct value
    elif config.split == "column" and groups is None:
        raise UsageError("split = 'column' needs the input whose values define the clients; add --set column=NUMBER")
    parts = data.split(
        targets[kept],
        clients,
        config.split,
        derive_seed(config.public_seed, "split"),
        concentration=config.concentration,
        shards_per_client=config.shards,
        groups=groups[kept] if groups is not None else None,
    )
    if in_a_file(config.model):
        built = models.Built(own_problem.model(config), F.cross_entropy)
    else:
        seed = derive_seed(config.public_seed, "model")
        built = models.build(config.model, found.shape, found.classes, hidden=config.hidden, seed=seed)
    made = Problem(
        built.model,
        built.loss,
        clients=[Subset(found.train, kept[part]) for part in parts],  # type: ignore[arg-type]  # tensors of indices
        test=_test(found, config),
        validation=_by_owner(found.train, validation, groups, config) if len(validation) else None,
        penalty=penalty,
        augment=found.augment if config.augment else None,
        transform=found.transform,
    )
    if in_a_file(config.model):
        made.refuse_misfit(config.model)
    return made


def number_of_clients(config: RunConfig) -> int | None:
    """Return the number of clients; None if the data decide it."""
    if own_problem.has_own_data(config):
        return None
    return DEFAULT_CLIENTS if config.clients is None and config.split not in BY_GROUPS else config.clients


def _drawn(count: int, setting: str, wanted: int | None, seed: int) -> Tensor:
    """Return which of `count` records are used: all of them, or `wanted` records drawn with `seed`."""
    if wanted is None:
        return torch.arange(count)
    at_least(1, **{setting: wanted})
    if wanted > count:
        raise UsageError(f"{setting} must be at most the {count} records there are, got {wanted}")
    draw = torch.Generator().manual_seed(derive_seed(seed, setting))
    return torch.randperm(count, generator=draw)[:wanted].sort().values


def _test(found: data.Dataset, config: RunConfig) -> Dataset[Any] | list[Dataset[Any]] | None:
    """Return the test records; if fewer are used, they are the same for every seed."""
    if found.test is None:
        return None
    used = _drawn(len(found.test), "test_records", config.test_records, seed=0)
    return _by_owner(found.test, used, found.test_groups, config)


def _by_owner(
    records: Dataset[Any], used: Tensor, owners: Tensor | None, config: RunConfig
) -> Dataset[Any] | list[Dataset[Any]]:
    """Return the records `used` in one set or, if the clients are the data set's centres, in one for each of them."""
    sets: list[Dataset[Any]] = [Subset(records, used)]  # type: ignore[arg-type]  # a tensor of indices
    if config.split == "centre" and owners is not None:
        parts = [used[owners[used] == owner] for owner in owners.unique()]
        if all(len(part) for part in parts):
            sets = [Subset(records, part) for part in parts]  # type: ignore[arg-type]
    return sets if len(sets) > 1 else sets[0]


def problem_key(config: RunConfig) -> str:
    """Return the settings that define the problem, as text."""
    return config.model_dump_json(include=set(PROBLEM_SETTINGS))


def _holdout(count: int, config: RunConfig) -> tuple[Tensor, Tensor]:
    """Return the training records of the clients, and those that are held out for choosing settings."""
    below_one(validation=config.validation)
    if not config.validation:
        return torch.arange(count), torch.arange(0)
    draw = torch.Generator().manual_seed(derive_seed(config.public_seed, "validation"))
    order = torch.randperm(count, generator=draw)
    cut = held_out(count, config.validation)
    return order[cut:].sort().values, order[:cut].sort().values


def held_out(count: int, share: float) -> int:
    """Return how many of `count` records are held out."""
    return max(1, round(share * count)) if share else 0


def training(
    config: RunConfig,
    out: Path | None = None,
    callbacks: Sequence[Callback] = (),
    communicator: Communicator | None = None,
) -> Options:
    """The arguments of `train` that a configuration states."""
    promised = privacy(config)
    if promised is not None and config.epochs is not None and config.batch_size is not None:
        promised.refuse_private_sizes(config.public_sizes)  # before any data are read
    if promised is not None and config.weights == "records":
        promised.refuse_private_sizes(config.public_sizes, "weights")
    rule = early_stopping(config)
    return Options(
        lr=methods.step_size(config),
        rounds=methods.rounds(config),
        epochs=config.epochs,
        batch_size=config.batch_size,
        batch_rate=config.batch_rate,
        local=methods.local_steps(config),
        warmup=config.warmup,
        lr_schedule=server.schedule(config),
        server_optimizer=server.optimizer(config),
        averaging=server.average(config),
        privacy=promised,
        public_sizes=config.public_sizes,
        participation=_participation(config),
        weights=weights(config.weights),
        seed=config.seed,
        device=device(config.device),
        out=out,
        callbacks=callbacks if rule is None else (*callbacks, rule),
        logging=Logging(
            every=config.log_every,
            evaluate_every=config.evaluate_every,
            full_gradient=config.full_gradient,
            diagnostics=config.diagnostics,
            profile=config.profile,
        ),
        memory=Memory(
            initial=config.initial_memory,
            dtype=getattr(torch, config.memory_dtype) if config.memory_dtype is not None else None,
            home=config.memory_home,
        ),
        compute=Compute(
            dtype=getattr(torch, config.dtype),
            engine=config.engine,
            precision=config.precision,
            communicator=communicator,
        ),
        storage=Storage(checkpoint_seconds=config.checkpoint_seconds, witness=config.witness),
    )


def privacy(config: RunConfig) -> Privacy | None:
    """Return the privacy statement of a run that is no federation; None if privacy is off."""
    return statement(config, config.record_clip_used)


def statement(config: RunConfig, record_clip: float | Literal["auto"] | None) -> Privacy | None:
    """Return the privacy statement of a run with that clip per record; None if privacy is off."""
    from ..privacy import Privacy

    if not config.private:
        defaults = RunConfig()
        usual = {"memory": defaults.memory_used}  # which the record of a run without noise may hold
        for name in PRIVATE_SETTINGS:
            if getattr(config, name) not in (getattr(defaults, name), usual.get(name)):
                raise UsageError(f"{name} is for private runs, but private = false; remove one of the two")
        return None
    return Privacy(
        epsilon=target_epsilon(config),
        delta=config.delta,
        unit=config.unit,
        relation=config.relation,
        trust=config.trust,
        # A gain is claimed only if a rule allows it; otherwise every round counts in full.
        sampling=config.sample_rate if _sampling_gains(config) else None,
        honest=config.honest,
        noise=config.noise,
        memory=config.memory_used,
        sigma=config.sigma,
        replay=config.replay,
        record_clip=record_clip,
        record_clip_by=config.record_clip_by or "record",
        noise_schedule=config.noise_schedule or "constant",
        noise_bands=config.noise_bands,
    )


def target_epsilon(config: RunConfig) -> float | None:
    """Return the target ε of a private run; None if sigma is given, or without privacy."""
    given = not config.private or config.epsilon is not None or config.sigma is not None
    return config.epsilon if given else DEFAULT_EPSILON


def _sampling_gains(config: RunConfig) -> bool:
    return config.trust != "local" and (config.unit, config.relation, config.noise) == ("client", "zero-out", "seeded")


def device(name: str) -> torch.device:
    """Return a device by name; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device_of(name)


def weights(text: str | None) -> Weights:
    """The clients' weights as `train` takes them, from the text of a setting."""
    if text is None or text in KINDS:
        return cast(Weights, text or "equal")
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"weights must be equal, records, or numbers as in 0.5,0.3,0.2, got {text!r}") from None


def _participation(config: RunConfig) -> Participation | None:
    if config.sample_rate is not None and config.sample_count is not None:
        raise UsageError("give sample_rate or sample_count, not both")
    if config.groups is not None and config.sample_count is not None:
        raise UsageError("groups take turns as a whole or by sample_rate; leave out sample_count")
    if config.groups is not None:
        return Rotation(config.groups, config.sample_rate if config.sample_rate is not None else 1.0)
    if config.sample_rate is not None:
        return Poisson(config.sample_rate)
    return FixedSize(config.sample_count) if config.sample_count is not None else None
