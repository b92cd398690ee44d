"""The settings of a run, each declared once: in `RunConfig`.

Flags, configuration files, the records of a run, the documentation and shell completion follow from the declaration.

A setting that is not given takes the value that its declaration names: the method's own, for example. A setting of a
method, of local steps, of privacy or of the server's step that is given but does not apply is refused when the run is
built, so that it is not silently ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ..algorithms.averaging import USUAL_DECAY
from ..algorithms.catalogue import CATALOGUE
from ..algorithms.lr_schedule import SCHEDULES
from ..algorithms.server_optimizer import OPTIMIZERS
from .declaration import Group, Setting, declared, setting

# Settings on which the defaults of several settings depend.
_METHOD = ("method", "private", "unit", "data")
_LOCAL = (*_METHOD, "local_steps", "local_epochs")
_LENGTH = ("rounds", "epochs", "batch_size", "data", "records", "clients", "validation")

_of_method = partial(setting, None, group="method", unset="the method's own", federated=True, follows=_METHOD)


class RunConfig(BaseModel):
    """The configuration of one run. Equal configurations are the same run."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    data: str = setting(
        "digits",
        "Data set (`normec data list` shows them), a CSV or Parquet file, libsvm:PATH, or FILE.py:NAME for your own",
        "data",
        flag=True,
        values="normec.data.entries:ENTRIES",
    )
    data_dir: str | None = setting(
        None, "Folder of the data files", "data", unset="NORMEC_DATA, then the cache", flag=True, identity=False
    )
    target: str | None = setting(
        None, "Target column of a CSV or Parquet file", "data", unset="that of the schema", flag=True
    )
    data_schema: str | None = setting(
        None,
        "TOML file with the public ranges and categories of the columns of a CSV or Parquet file",
        "data",
        unset="none; numbers are then used as they are",
        flag=True,
    )
    records: int | None = setting(None, "Training records to use, drawn by the seed", "data", unset="all")
    test_records: int | None = setting(None, "Test records to use, the same ones for every seed", "data", unset="all")
    clients: int | None = setting(
        None,
        "Number of clients",
        "data",
        unset="100; with split = column or centre, one for each value",
        flag=True,
        follows=("split", "data", "column", "records", "validation"),
    )
    split: Literal["iid", "dirichlet", "label", "column", "centre"] = setting(
        "iid", "How the records are divided among the clients: {values}", "data", flag=True
    )
    concentration: float = setting(
        0.5, "Concentration of the Dirichlet split; smaller values make the clients differ more", "data"
    )
    shards: int = setting(1, "Shards of sorted labels per client in the label split", "data")
    column: int | None = setting(None, "Input column whose values define the clients of the column split", "data")
    scaling: Literal["public", "centre"] | None = setting(
        None,
        "Scaling of heart-disease: by fixed numbers (public), or by the statistics of each hospital, which the "
        "guarantee does not cover (centre)",
        "data",
        unset="public for heart-disease",
        follows=("data",),
    )
    augment: bool = setting(True, "Augment training images where the data set has an augmentation", "data")
    validation: float = setting(
        0.0, "Share of the training records held out for choosing settings or stopping early", "data", flag=True
    )

    model: str = setting(
        "softmax",
        "Model: {values}, or FILE.py:NAME for one of your own",
        "model",
        flag=True,
        values=("softmax", "logistic", "mlp", "cnn", "cnn-gn", "resnet20", "resnet20-gn"),
    )
    hidden: int = setting(64, "Width of the hidden layer of the MLP", "model")
    penalty: float = setting(0.0, "Weight of the non-convex penalty on the parameters", "model")

    method: str = setting(
        "normec",
        "Method: {values}, or FILE.py:CLASS for one of your own; where records are protected, dpsgd-clip by default",
        "method",
        flag=True,
        federated=True,
        values=tuple(CATALOGUE),
    )
    alpha: float | None = _of_method("Smoothing α of the normalisation", flag=True)
    beta: float | None = _of_method("Step size β of the memories, or scale of the messages", flag=True)
    server_norm: bool | Literal["by-tensor", "in-place"] | None = _of_method(
        "Normalise the server's step: true, false, {values}", flag="--server-norm/--no-server-norm"
    )
    decay: float | None = _of_method("Share λ of the memories that is forgotten in each round")
    momentum: float | None = _of_method("Momentum of the server's step")
    client_momentum: float | None = _of_method(
        "Share of its old average that a client with momentum keeps in each round"
    )
    tau: float | None = _of_method("Clipping threshold τ of a message", flag=True)
    quantile: float | None = _of_method("Share of the lengths below the threshold of adaptive clipping")
    threshold_lr: float | None = _of_method("Step size of the threshold of adaptive clipping")
    bit_weight: float | None = _of_method("Weight in a message of the number that adaptive clipping adds")
    compressor: Literal["topk", "randk"] | None = _of_method("Compressor of EF21 and EF21-SGDM: {values}")
    k: int | None = setting(
        None,
        "Coordinates that the compressor keeps",
        "method",
        unset="a tenth of the parameters",
        federated=True,
        follows=(*_METHOD, "data", "model", "hidden"),
    )
    method_settings: str | None = setting(
        None,
        "Settings of a method of your own, as KEY=VALUE,…",
        "method",
        unset="those of its class",
        federated=True,
        follows=_METHOD,
    )

    local_steps: int | None = setting(
        None,
        "Steps that a client makes on its own data in a round",
        "local",
        unset="the method's own; most methods send one gradient",
        flag=True,
        federated=True,
        follows=_LOCAL,
    )
    local_epochs: int | None = setting(
        None,
        "Passes over its own records that a client makes in a round, instead of local_steps",
        "local",
        unset="none",
        flag=True,
        follows=_LOCAL,
    )
    local_lr: float | None = setting(
        None,
        "Step size of a local step",
        "local",
        unset="the method's own",
        flag=True,
        federated=True,
        follows=_LOCAL,
    )
    local_optimizer: Literal["sgd", "adam"] | None = setting(
        None,
        "Optimizer of the local steps, fresh in every round: {values}",
        "local",
        unset="sgd",
        federated=True,
        follows=_LOCAL,
    )
    local_momentum: float | None = setting(
        None, "Momentum of local steps by sgd", "local", unset="0", federated=True, follows=_LOCAL
    )
    prox: float | None = setting(
        None,
        "Weight of the proximal term that pulls local steps back towards the server's model",
        "local",
        unset="the method's own, or 0",
        federated=True,
        follows=_LOCAL,
    )
    local_scale: Literal["gradient", "difference"] | None = setting(
        None,
        "What local steps amount to: the mean gradient on their path (gradient), or how far they went (difference)",
        "local",
        unset="the method's own, or gradient",
        federated=True,
        follows=_LOCAL,
    )

    private: bool = setting(
        True, "Add noise with a privacy guarantee", "privacy", flag="--private/--no-privacy", federated=True
    )
    epsilon: float | None = setting(
        None,
        "Privacy target ε",
        "privacy",
        unset="8; with sigma, none",
        flag=True,
        federated=True,
        follows=("private", "sigma"),
    )
    delta: float = setting(1e-5, "Privacy target δ", "privacy", flag=True, federated=True)
    unit: Literal["client", "record"] = setting(
        "client", "Unit of protection: {values}", "privacy", flag=True, federated=True
    )
    relation: Literal["zero-out", "replace"] = setting(
        "zero-out", "How neighbouring data sets differ: {values}", "privacy", flag=True, federated=True
    )
    trust: Literal["local", "secure-sum", "central"] = setting(
        "secure-sum",
        "What the server sees: each message (local), their sum (secure-sum), or everything (central)",
        "privacy",
        flag=True,
        federated=True,
    )
    honest: int | None = setting(
        None, "Clients in every sum that keep their noise secret, with trust = secure-sum", "privacy", unset="all"
    )
    sigma: float | None = setting(
        None,
        "Noise of a client per coordinate, instead of a target ε",
        "privacy",
        unset="calibrated for ε",
        federated=True,
    )
    noise: Literal["seeded", "secure", "exact"] = setting(
        "seeded", "Source of the noise: {values}; seeded noise is for simulations", "privacy", federated=True
    )
    memory: Literal["clean", "noisy"] | None = setting(
        None,
        "Whether memories take messages before the noise (clean) or after it (noisy)",
        "privacy",
        unset="clean; noisy with unit = record and trust = local",
        federated=True,
        follows=("unit", "trust"),
    )
    noise_schedule: str | None = setting(
        None,
        "How the noise is divided over the rounds: {values}, or one number for each round",
        "privacy",
        unset="constant",
        flag=True,
        federated=True,
        follows=("private",),
        values=("constant", "best", "linear:R", "exponential:R"),
    )
    noise_bands: int | Literal["best"] | None = setting(
        None,
        "Rounds over which the noise is correlated, with trust = central and groups; best is as many as groups",
        "privacy",
        unset="independent noise in every round",
    )
    replay: Literal["per-coordinate", "total-norm", "variance"] | None = setting(
        None, "Use the paper's noise formula, read as {values}; ε is then reported, not a target", "privacy"
    )
    record_clip: float | Literal["auto"] | None = setting(
        None,
        "Norm to which each record's gradient is clipped, with unit = record, or auto for a norm below 1",
        "privacy",
        unset="auto with unit = record; none in a federation",
        follows=("unit", "private", "local_steps", "local_epochs"),
        federated=True,
    )
    record_clip_by: Literal["record", "layer"] | None = setting(
        None,
        "What record_clip bounds: the gradient of a whole record, or each layer alone",
        "privacy",
        unset="record",
        federated=True,
    )
    witness: str | None = setting(
        None,
        "File in another folder that also counts the ledger's lines, so that a restored older ledger is refused",
        "privacy",
        unset="none",
        identity=False,
    )
    public_sizes: bool = setting(False, "Declare public how many records each client holds", "privacy", identity=False)

    lr: float | Literal["theory"] | None = setting(
        None,
        "Step size, or theory for the one with the best guarantee",
        "training",
        unset="the method's own",
        flag=True,
        federated=True,
    )
    rounds: int | None = setting(
        None,
        "Rounds of training, with one message of each client",
        "training",
        unset="the method's own, unless epochs are given",
        flag=True,
        federated=True,
        follows=(*_METHOD, "epochs"),
    )
    epochs: int | None = setting(
        None, "Passes over the records of the average client, instead of rounds", "training", flag=True
    )
    lr_schedule: str | None = setting(
        None,
        "How the step size changes over the rounds: {values}, or a class of torch.optim.lr_scheduler",
        "training",
        unset="a constant step size",
        federated=True,
        values=tuple(SCHEDULES),
    )
    lr_schedule_settings: str | None = setting(
        None,
        "Settings of the schedule, as KEY=VALUE,…, for example ramp_up=10,end=0.1",
        "training",
        unset="those of the schedule",
        federated=True,
        follows=("lr_schedule",),
    )
    server_optimizer: str | None = setting(
        None,
        "Optimizer of the server's step: {values}, or a class of torch.optim",
        "training",
        unset="x ← x − lr · direction",
        federated=True,
        values=tuple(OPTIMIZERS),
    )
    server_optimizer_settings: str | None = setting(
        None,
        "Settings of the server's optimizer, as KEY=VALUE,…, for example betas=[0.9,0.99]",
        "training",
        unset="those of the optimizer",
        federated=True,
        follows=("server_optimizer",),
    )
    averaging: Literal["ema", "polyak"] | None = setting(
        None,
        "Average of the iterates that is evaluated and returned: {values}",
        "training",
        unset="the last iterate",
        federated=True,
    )
    averaging_decay: float | None = setting(
        None,
        "Factor of an iterate's weight in each later round, with averaging = ema",
        "training",
        unset=f"{USUAL_DECAY:g}",
        federated=True,
        follows=("averaging",),
    )
    averaging_start: int | None = setting(
        None,
        "First round whose iterate is part of the average",
        "training",
        unset="0; with averaging = polyak, half of the rounds",
        federated=True,
        follows=("averaging", *_LENGTH),
    )
    early_stopping: str | None = setting(
        None,
        "Stop when this column of the history no longer improves: {values}, or COLUMN:min or COLUMN:max for another",
        "training",
        unset="all rounds are made",
        flag=True,
        values=("validation_loss", "validation_accuracy"),
    )
    patience: int | None = setting(
        None,
        "Regular evaluations without an improvement after which early stopping ends the run",
        "training",
        unset="5",
        flag=True,
        follows=("early_stopping",),
    )
    min_delta: float | None = setting(
        None,
        "Least change that early stopping counts as an improvement",
        "training",
        unset="0",
        follows=("early_stopping",),
    )
    warmup: int = setting(0, "First rounds in which the memories move and the model does not", "training")
    batch_size: int | None = setting(
        None, "Examples per gradient or local step", "training", unset="full batch", flag=True, federated=True
    )
    batch_rate: float | None = setting(
        None,
        "Probability with which an example enters a batch, instead of batch_size",
        "training",
        unset="full batch",
        federated=True,
    )
    sample_rate: float | None = setting(
        None, "Probability with which a client takes part in a round", "training", unset="every client takes part"
    )
    sample_count: int | None = setting(
        None, "Clients that take part in a round, instead of sample_rate", "training", unset="every client takes part"
    )
    groups: int | None = setting(
        None,
        "Public groups of clients that take turns, one group in each round",
        "training",
        unset="a client may take part in every round",
    )
    weights: str | None = setting(
        None,
        "Weights of the clients: {values} (each client's share of all records), or their numbers, as 0.5,0.3,0.2",
        "training",
        unset="equal",
        federated=True,
        values=("equal", "records"),
    )
    initial_memory: Literal["zero", "gradient"] = setting("zero", "First memories of the clients: {values}", "training")
    seed: int | None = setting(
        None,
        "Seed that repeats a run bit for bit",
        "training",
        unset="0; the noise and the sampling of a private run come from a fresh secret",
        flag=True,
        federated=True,
    )

    log_every: int | None = setting(
        None, "Rounds between two rows of the history", "logging", unset="about 500 rows in all", follows=_LENGTH
    )
    evaluate_every: int | None = setting(
        None,
        "Rounds between two evaluations on test data",
        "logging",
        unset="about 20 in all, and the rows 1, 2, 4, 8, … of the history before the first of them",
        federated=True,
        follows=_LENGTH,
    )
    full_gradient: bool = setting(
        False, "Record the exact loss and gradient even where training uses batches or samples clients", "logging"
    )
    diagnostics: bool = setting(
        False,
        "Record losses and norms of private runs too, which the guarantee does not cover; other runs always do",
        "logging",
        flag="--diagnostics/--no-diagnostics",
        federated=True,
        follows=("private",),
    )
    profile: bool = setting(
        False,
        "Leave a trace of some rounds in the run's folder, and a table of where their time goes",
        "logging",
        flag="--profile/--no-profile",
        identity=False,
    )

    device: str = setting(
        "auto",
        "Device: auto, cpu, cuda, cuda:1, …",
        "compute",
        flag=True,
        identity=False,
        values=("auto", "cpu", "cuda"),
    )
    dtype: Literal["float32", "float64"] = setting("float32", "Precision of the model: {values}", "compute")
    engine: str = setting(
        "auto",
        "How gradients are computed: {values}",
        "compute",
        flag=True,
        identity=False,
        values=("auto", "loop", "compiled", "recorded", "batched", "shared", "linear"),
    )
    precision: Literal["float32", "tf32", "bf16"] = setting(
        "tf32", "Precision of a GPU's matrix products: {values}", "compute", flag=True
    )
    memory_dtype: Literal["float32", "float64", "bfloat16"] | None = setting(
        None, "Precision of the memories: {values}", "compute", unset="that of the model", follows=("dtype",)
    )
    memory_home: Literal["device", "host", "disk"] = setting(
        "device", "Where the memories are kept: {values}", "compute", identity=False
    )

    checkpoint_seconds: float = setting(30.0, "Seconds between two checkpoints", "storage", identity=False)

    @property
    def public_seed(self) -> int:
        """The seed of the split, the first model and the batches; only noise and sampling are ever secret."""
        return self.seed if self.seed is not None else 0

    def identity_settings(self) -> dict[str, Any]:
        """Return the settings that the run's numbers depend on; `diagnostics` only decides which are recorded."""
        used: dict[str, Any] = {"memory": self.memory_used}
        if self.record_clip_used is not None:
            used["record_clip"] = self.record_clip_used
        return self.record(name for name in IDENTITY if name != "diagnostics") | used

    @property
    def memory_used(self) -> Literal["clean", "noisy"]:
        """What memories take: as given, or what suits the unit and the trust (`privacy.statement.default_memory`)."""
        return self.memory or ("noisy" if (self.unit, self.trust) == ("record", "local") else "clean")

    @property
    def record_clip_used(self) -> float | Literal["auto"] | None:
        """The clip of each record: as given, or "auto" for protected records, where a rule covers it.

        Without a clip per record, one record counts as much as a whole client.
        """
        local = self.local_steps is not None or self.local_epochs is not None
        covered = self.private and self.unit == "record" and not local
        return "auto" if self.record_clip is None and covered else self.record_clip

    def record(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the settings that have a value, in plain types; only those in `names`, if given."""
        return self.model_dump(exclude_none=True, include=None if names is None else set(names))

    def digest(self) -> str:
        """Return eight characters that identify this configuration."""
        more = {"diagnostics": True} if self.private and self.diagnostics else {}
        text = json.dumps(self.identity_settings() | more, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


SETTINGS: Mapping[str, Setting] = declared(RunConfig)
IDENTITY = tuple(name for name, one in SETTINGS.items() if one.identity)
# Settings that decide where and how a run is computed, or what is public; they are not part of its identity.
NOT_IDENTITY = tuple(name for name, one in SETTINGS.items() if not one.identity)
FEDERATED = tuple(name for name, one in SETTINGS.items() if one.federated)


def in_groups(*groups: Group) -> tuple[str, ...]:
    """Return the names of the settings in some groups."""
    return tuple(name for name, one in SETTINGS.items() if one.group in groups)


def varied(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in which runs differ, without those that differ only because other settings do.

    The default of a setting may depend on other settings (`Setting.follows`), like the smoothing of a method. Such a
    setting is listed if it differs between two runs that agree in these other settings.
    """
    names = [
        name for name in dict.fromkeys([*IDENTITY, *(key for run in runs for key in run)]) if name not in NOT_IDENTITY
    ]
    return [name for name in names if _differs(name, runs)]


def _differs(name: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    follows = SETTINGS[name].follows if name in SETTINGS else _METHOD
    seen: dict[str, Any] = {}
    for run in runs:
        basis = repr([run.get(other) for other in follows])
        if seen.setdefault(basis, run.get(name)) != run.get(name):
            return True
    return False
