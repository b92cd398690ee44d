"""Every setting of a run, in one flat table: a TOML file, `--set key=value`, or a flag.

The settings of methods have no default here: what is not given takes the method's own (see `methods`), and
what is given but means nothing to the method is refused, so that no setting is ever silently ignored.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import UsageError, nearest
from ..system.files import read_toml

Scalar = str | int | float | bool
METHODS = "normec.methods"  # the entry points of other packages' methods (`algorithms.registry`)


class RunConfig(BaseModel):
    """One run. A run is known by its configuration: the same one is the same run."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    data: str = "digits"
    data_dir: str | None = None
    records: int | None = None
    test_records: int | None = None
    clients: int | None = None
    split: Literal["iid", "dirichlet", "label", "column"] = "iid"
    concentration: float = 0.5
    shards: int = 1
    column: int | None = None
    augment: bool = True
    validation: float = 0.0

    model: str = "softmax"
    hidden: int = 64
    penalty: float = 0.0

    method: str = "normec"
    alpha: float | None = None
    beta: float | None = None
    server_norm: bool | Literal["by-tensor", "in-place"] | None = None
    decay: float | None = None
    momentum: float | None = None
    tau: float | None = None
    compressor: Literal["topk", "randk"] | None = None
    k: int | None = None
    method_settings: str | None = None  # KEY=VALUE,… of a method of one's own (FILE.py:CLASS, or of another package)

    private: bool = True
    epsilon: float | None = None
    delta: float = 1e-5
    unit: Literal["client", "record"] = "client"
    relation: Literal["zero-out", "replace"] = "zero-out"
    trust: Literal["local", "secure-sum", "central"] = "secure-sum"
    honest: int | None = None
    sigma: float | None = None
    noise: Literal["seeded", "secure", "exact"] = "seeded"
    memory: Literal["clean", "noisy"] = "clean"
    replay: Literal["per-coordinate", "total-norm", "variance"] | None = None
    record_clip: float | None = None
    public_sizes: bool = False

    lr: float | Literal["theory"] | None = None
    rounds: int | None = None
    epochs: int | None = None
    warmup: int = 0
    batch_size: int | None = None
    batch_rate: float | None = None
    sample_rate: float | None = None
    sample_count: int | None = None
    initial_memory: Literal["zero", "gradient"] = "zero"
    seed: int | None = None  # not given: 0, but noise and sampling of a private run come from a fresh secret

    log_every: int | None = None
    evaluate_every: int | None = None
    full_gradient: bool = False
    diagnostics: bool = False
    checkpoint_seconds: float = 30.0

    device: str = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    engine: str = "auto"
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    memory_dtype: Literal["float32", "float64", "bfloat16"] | None = None
    memory_home: Literal["device", "host", "disk"] = "device"

    @property
    def public_seed(self) -> int:
        """The seed of the split, the first model and the batches; only noise and sampling are ever secret."""
        return self.seed if self.seed is not None else 0

    def known_by(self) -> dict[str, Any]:
        """The settings that the run's numbers depend on; `diagnostics` decides only which of them are recorded."""
        return self.model_dump(exclude={*ELSEWHERE, "diagnostics"}, exclude_none=True)

    def digest(self) -> str:
        """Eight characters that name this configuration."""
        more = {"diagnostics": True} if self.private and self.diagnostics else {}
        text = json.dumps(self.known_by() | more, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


# Where and how a run is computed, and what is declared of its data, not what is computed: no part of its name or
# identity.
ELSEWHERE = ("data_dir", "device", "engine", "memory_home", "checkpoint_seconds", "public_sizes")


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration in a TOML file, with `overrides` on top; what is wrong is said in one line."""
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            settings = read_toml(Path(path))
        except FileNotFoundError:
            raise UsageError(f"there is no configuration file {path}") from None
    return make({**settings, **(overrides or {})})


def make(settings: Mapping[str, Any]) -> RunConfig:
    """A checked configuration; whole numbers are taken where a float is meant."""
    fields = RunConfig.model_fields
    own = {key: value for key, value in settings.items() if key not in fields}
    if own and is_own(str(settings.get("method", ""))):
        settings = {key: value for key, value in settings.items() if key in fields}
        own = parse_assignments(settings.get("method_settings") or "") | own
        settings["method_settings"] = ",".join(f"{key}={json.dumps(own[key])}" for key in sorted(own))
    for key in settings:
        if key not in fields:
            raise UsageError(f"there is no setting {key!r}{nearest(key, fields)}; `normec train --settings` lists all")
    if settings.get("private") is False:
        settings = {"seed": 0, **settings}  # nothing in it is secret: an unnamed seed is 0
    try:
        return RunConfig.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg'].lower()}, got {first['input']!r}") from None


def is_own(method: str) -> bool:
    """Whether a method is named as one of a user's file or of another installed package."""
    return ":" in method or any(point.name == method for point in entry_points(group=METHODS))


def parse_assignment(text: str) -> tuple[str, Scalar]:
    """'key=value' with the value in TOML; a bare word is a string."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise UsageError(f"expected key=value, got {text!r}")
    try:
        parsed: Scalar = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return key.strip(), parsed


def parse_assignments(text: str) -> dict[str, Scalar]:
    """'key=value,key=value' as a table."""
    return dict(parse_assignment(part) for part in text.split(",") if part.strip())


def to_toml(config: RunConfig) -> str:
    """The configuration as a file that `load` reads back, every default written out."""
    import tomli_w

    return tomli_w.dumps(config.model_dump(exclude_none=True))
