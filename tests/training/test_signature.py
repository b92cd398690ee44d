"""The signature of `normec.train`: a plain function whose arguments all arrive."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import normec
from normec import Compute, FixedSize, Logging, Memory, NormEC, Storage
from normec.training.options import Options

from ..support.runs import problem

SETTINGS = "log_every evaluate_every full_gradient diagnostics initial_memory memory_dtype memory_home dtype engine"


def test_train_is_a_plain_function_with_a_signature_of_its_own() -> None:
    assert inspect.isfunction(normec.train)
    assert not hasattr(normec.train, "__wrapped__")
    assert normec.train.__qualname__ == "train"
    signature = inspect.signature(normec.train)
    assert list(signature.parameters)[:3] == ["problem", "method", "lr"]
    assert {one.kind for one in signature.parameters.values()} == {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    assert signature.return_annotation == "Run"


def test_the_options_of_the_loop_are_the_keywords_of_train() -> None:
    keywords = [one for one in inspect.signature(normec.train).parameters.values() if one.kind is one.KEYWORD_ONLY]
    absent = {dataclasses.MISSING: inspect.Parameter.empty}
    fields = [(one.name, one.type, absent.get(one.default, one.default)) for one in dataclasses.fields(Options)]
    assert [(one.name, one.annotation, one.default) for one in keywords] == fields


def test_every_argument_is_used(tmp_path: Path) -> None:
    """Against the file that states the values that a run used; none of them is a default."""
    normec.train(
        problem("batchnorm"),
        NormEC(0.1, 0.3),
        lr=0.2,
        rounds=6,
        batch_size=3,
        warmup=1,
        participation=FixedSize(2),
        lr_schedule=normec.LRSchedule("cosine", end=0.1),
        server_optimizer="adam",
        averaging=normec.Averaging("ema", decay=0.7, start=2),
        seed=5,
        out=tmp_path / "run",
        logging=Logging(every=2, evaluate_every=3, full_gradient=True),
        memory=Memory(initial="gradient", dtype=torch.bfloat16, home="host"),
        compute=Compute(dtype=torch.float64, engine="loop", precision="float32"),
        storage=Storage(checkpoint_seconds=7),
    )
    used = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    expected: dict[str, Any] = {
        "lr": 0.2,
        "rounds": 6,
        "batch_size": 3,
        "warmup": 1,
        "sample_count": 2,
        "lr_schedule": "cosine",
        "lr_schedule_settings": {"end": 0.1, "ramp_up": 0},
        "server_optimizer": "adam",
        "server_optimizer_settings": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0},
        "averaging": "ema",
        "averaging_decay": 0.7,
        "averaging_start": 2,
        "seed": 5,
        "log_every": 2,
        "evaluate_every": 3,
        "full_gradient": True,
        "initial_memory": "gradient",
        "memory_dtype": "bfloat16",
        "memory_home": "host",
        "dtype": "float64",
        "engine": "loop",
        "precision": "float32",
        "checkpoint_seconds": 7.0,
    }
    assert {name: used.get(name) for name in expected} == expected


def test_groups_cannot_be_changed_and_take_names_only() -> None:
    for group in (Logging, Memory, Compute, Storage):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group(), dataclasses.fields(group)[0].name, None)
        with pytest.raises(TypeError):
            group(None)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", SETTINGS.split())
def test_what_is_in_a_group_is_not_an_argument_of_train(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        normec.train(problem(), NormEC(0.1, 0.1), lr=0.1, rounds=1, **{name: None})  # type: ignore[arg-type]
