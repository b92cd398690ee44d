"""The settings of a run, each declared once: in `RunConfig`.

Flags, configuration files, the records of a run, the documentation and shell completion follow from the declaration.

A setting that is not given takes the value that its declaration names: the method's own, for example. A setting that
is given but does not apply is refused, so that no setting is silently ignored.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..algorithms.averaging import USUAL_DECAY
from ..algorithms.catalogue import CATALOGUE
from ..algorithms.lr_schedule import SCHEDULES
from ..algorithms.server_optimizer import OPTIMIZERS
from ..errors import UsageError, nearest
from ..system.files import read_toml
from .data_defaults import usual_settings

Scalar = str | int | float | bool
METHODS = "normec.methods"  # the entry point group for methods of other packages (`algorithms.registry`)

Group = Literal["data", "model", "method", "local", "privacy", "training", "logging", "compute", "storage"]
GROUPS: tuple[Group, ...] = get_args(Group)

# Settings on which the defaults of several settings depend.
_METHOD = ("method", "private")
_LOCAL = (*_METHOD, "local_steps", "local_epochs")
_LENGTH = ("rounds", "epochs", "batch_size", "data", "records", "clients", "validation")


def setting(
    default: Any,
    description: str,
    group: Group,
    *,
    unset: str = "",
    flag: bool | str = False,
    identity: bool = True,
    federated: bool = False,
    follows: tuple[str, ...] = (),
    values: tuple[str, ...] | str = (),
) -> Any:
    """Declare one setting of `RunConfig`.

    Args:
        default: The value of a setting that is not given; None if there is none, or if it depends on others.
        description: One line of plain English without a full stop; "{values}" stands for the values that it takes.
        group: The group that help texts and tables show the setting in.
        unset: What None means, for help texts and tables.
        flag: Whether the command line has a flag for it; a text names the flag, as in "--private/--no-privacy".
        identity: Whether the run's numbers depend on it; then it is part of the run's name and fixed for a folder.
        federated: Whether a federated run takes it.
        follows: The settings that decide its value if none is given.
        values: The values that it usually takes, for help and completion, or the module:name of a table of them. The
            values of a Literal need not be listed.
    """
    facts: dict[str, Any] = {
        "group": group,
        "unset": unset,
        "flag": flag,
        "identity": identity,
        "federated": federated,
        "follows": list(follows),
        "values": values if isinstance(values, str) else list(values),
    }
    return Field(default=default, description=description, json_schema_extra=facts)


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
    validation: float = setting(0.0, "Share of the training records held out for choosing settings", "data")

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
        "Method: {values}, or FILE.py:CLASS for one of your own",
        "method",
        flag=True,
        federated=True,
        values=tuple(CATALOGUE),
    )
    alpha: float | None = setting(
        None,
        "Smoothing α of the normalisation",
        "method",
        unset="the method's own",
        flag=True,
        federated=True,
        follows=_METHOD,
    )
    beta: float | None = setting(
        None,
        "Step size β of the memories, or scale of the messages",
        "method",
        unset="the method's own",
        flag=True,
        federated=True,
        follows=_METHOD,
    )
    server_norm: bool | Literal["by-tensor", "in-place"] | None = setting(
        None,
        "Normalise the server's step: true, false, {values}",
        "method",
        unset="the method's own",
        flag="--server-norm/--no-server-norm",
        federated=True,
        follows=_METHOD,
    )
    decay: float | None = setting(
        None,
        "Share λ of the memories that is forgotten in each round",
        "method",
        unset="the method's own",
        federated=True,
        follows=_METHOD,
    )
    momentum: float | None = setting(
        None, "Momentum of the server's step", "method", unset="the method's own", federated=True, follows=_METHOD
    )
    client_momentum: float | None = setting(
        None,
        "Share of its old average that a client with momentum keeps in each round",
        "method",
        unset="the method's own",
        federated=True,
        follows=_METHOD,
    )
    tau: float | None = setting(
        None,
        "Clipping threshold τ of a message",
        "method",
        unset="the method's own",
        flag=True,
        federated=True,
        follows=_METHOD,
    )
    quantile: float | None = setting(
        None,
        "Share of the lengths below the threshold of adaptive clipping",
        "method",
        unset="the method's own",
        federated=True,
        follows=_METHOD,
    )
    threshold_lr: float | None = setting(
        None,
        "Step size of the threshold of adaptive clipping",
        "method",
        unset="the method's own",
        federated=True,
        follows=_METHOD,
    )
    bit_weight: float | None = setting(
        None,
        "Weight in a message of the number that adaptive clipping adds",
        "method",
        unset="the method's own",
        federated=True,
        follows=_METHOD,
    )
    compressor: Literal["topk", "randk"] | None = setting(
        None,
        "Compressor of EF21 and EF21-SGDM: {values}",
        "method",
        unset="the method's own",
        federated=True,
        follows=_METHOD,
    )
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
    replay: Literal["per-coordinate", "total-norm", "variance"] | None = setting(
        None, "Use the paper's noise formula, read as {values}; ε is then reported, not a target", "privacy"
    )
    record_clip: float | Literal["auto"] | None = setting(
        None,
        "Norm to which each record's gradient is clipped, with unit = record, or auto for a norm below 1",
        "privacy",
        unset="auto with unit = record; none with batch_size, local steps or augmentation, and in a federation",
        follows=("unit", "private", "batch_size", "local_steps", "local_epochs", "data", "augment"),
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
        augmented = self.augment and self.data == "cifar10"
        covered = self.private and self.unit == "record" and self.batch_size is None and not local and not augmented
        return "auto" if self.record_clip is None and covered else self.record_clip

    def record(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the settings that have a value, in plain types; only those in `names`, if given."""
        return self.model_dump(exclude_none=True, include=None if names is None else set(names))

    def digest(self) -> str:
        """Return eight characters that identify this configuration."""
        more = {"diagnostics": True} if self.private and self.diagnostics else {}
        text = json.dumps(self.identity_settings() | more, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting, as the command line, the records and the documentation read it."""

    name: str
    kind: Any  # its annotation in `RunConfig`
    default: Any
    text: str
    group: Group
    unset: str
    flag: bool | str
    identity: bool
    federated: bool
    follows: tuple[str, ...]
    usual: tuple[str, ...] | str

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the setting accepts; other values, if any, are not words."""
        return tuple(choice for part in _parts(self.kind) if get_origin(part) is Literal for choice in get_args(part))

    @property
    def values(self) -> tuple[str, ...]:
        """The values to show in help texts; empty if there are none, or too many."""
        return self.usual if isinstance(self.usual, tuple) and self.usual else self.choices

    def all_values(self) -> tuple[str, ...]:
        """Return the values for shell completion; may import the module that defines them."""
        if isinstance(self.usual, str):
            module, _, name = self.usual.partition(":")
            return tuple(getattr(import_module(module), name))
        return (*self.values, *(("true", "false") if bool in _parts(self.kind) else ()))

    @property
    def flag_name(self) -> str:
        """Its flag, such as "--lr" or "--private/--no-privacy"; empty if it has none."""
        usual = f"--{self.name.replace('_', '-')}" if self.flag else ""
        return self.flag if isinstance(self.flag, str) else usual

    @property
    def types(self) -> tuple[Any, ...]:
        """The types of its values, out of str, int, float and bool."""
        return tuple(part for part in _parts(self.kind) if get_origin(part) is not Literal)

    @property
    def description(self) -> str:
        """One sentence, without its full stop."""
        *most, last = self.values or ("",)
        return self.text.replace("{values}", f"{', '.join(most)} or {last}" if most else last)

    @property
    def default_text(self) -> str:
        """The default as text; a description if it depends on other settings."""
        return self.unset or "none" if self.default is None else text_of(self.default)

    @property
    def help(self) -> str:
        """The description with its default, as a sentence."""
        return f"{self.description} (default: {self.default_text})."


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union except None."""
    whole = kind if get_origin(kind) is Literal or not get_args(kind) else None
    members = (whole,) if whole is not None else get_args(kind)
    return tuple(part for part in members if part is not NoneType)


def _declared() -> dict[str, Setting]:
    found = {}
    for name, field in RunConfig.model_fields.items():
        facts: dict[str, Any] = dict(field.json_schema_extra)  # type: ignore[arg-type]  # a mapping, by `setting`
        usual = facts.pop("values")
        facts |= {"follows": tuple(facts["follows"]), "usual": usual if isinstance(usual, str) else tuple(usual)}
        found[name] = Setting(name, field.annotation, field.default, field.description or "", **facts)
    return found


SETTINGS: Mapping[str, Setting] = _declared()
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


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the configuration in a TOML file with `overrides`; raises `UsageError` with one line."""
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            settings = read_toml(Path(path))
        except FileNotFoundError:
            raise UsageError(f"there is no configuration file {path}") from None
    return make({**settings, **(overrides or {})})


def make(settings: Mapping[str, Any]) -> RunConfig:
    """Return a checked configuration with the defaults of its data set; integers are accepted for floats."""
    fields = RunConfig.model_fields
    own = {key: value for key, value in settings.items() if key not in fields}
    if own and is_own(str(settings.get("method", ""))):
        settings = {key: value for key, value in settings.items() if key in fields}
        own = parse_assignments(settings.get("method_settings") or "") | own
        settings["method_settings"] = format_assignments(own)
    for key, value in settings.items():
        if key not in fields and isinstance(value, Mapping):
            raise UsageError(f"a file of settings has no sections; move the settings below [{key}] to its top")
        if key not in fields:
            raise UsageError(f"there is no setting {key!r}{nearest(key, fields)}; `normec train --settings` lists all")
    if settings.get("private") is False:
        settings = {"seed": 0, **settings}  # nothing in the run is secret, so the default seed is 0
    try:
        checked = RunConfig.model_validate({**usual_settings(settings), **settings})
        return RunConfig.model_construct(_fields_set=set(settings), **dict(checked))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg'].lower()}, got {first['input']!r}") from None


def is_own(method: str) -> bool:
    """Whether a method comes from a user's file or from another installed package."""
    return ":" in method or any(point.name == method for point in entry_points(group=METHODS))


def parse_assignment(text: str) -> tuple[str, Scalar]:
    """Parse 'key=value' with the value in TOML; a bare word is a string."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise UsageError(f"expected key=value, got {text!r}")
    try:
        parsed: Scalar = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return key.strip(), parsed


def parse_assignments(text: str) -> dict[str, Scalar]:
    """'key=value,key=value' as a table; a value may be a list, [1,2], whose commas divide nothing."""
    return dict(parse_assignment(part) for part in re.split(r",(?![^\[\]]*\])", text) if part.strip())


def format_assignments(table: Mapping[str, Scalar]) -> str:
    """Return a table as text that `parse_assignments` reads."""
    return ",".join(f"{key}={json.dumps(table[key])}" for key in sorted(table))


def text_of(value: Any) -> str:
    """Return a value as people write it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as the text of a file that `load` reads."""
    import tomli_w

    return tomli_w.dumps(settings)
