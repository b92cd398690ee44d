"""The statement: what it refuses and what it says; and that importing the package needs torch and numpy only."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from normec.errors import UsageError
from normec.privacy import Privacy

from ..support.waiting import LIMIT


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({}, r"such as Privacy\(epsilon=8\); got neither"),
        ({"epsilon": 8, "sigma": 1}, "one of the two.*got epsilon = 8 and sigma = 1"),
        ({"epsilon": 0}, "epsilon must be > 0"),
        ({"epsilon": math.nan}, "epsilon must be > 0"),
        ({"epsilon": math.inf}, "epsilon must be > 0"),
        ({"epsilon": 8, "delta": 0}, "delta must lie in"),
        ({"epsilon": 8, "delta": 1}, "delta must lie in"),
        ({"epsilon": 8, "delta": math.nan}, "delta must lie in"),
        ({"sigma": math.nan}, "sigma must be > 0"),
        ({"sigma": -1}, "sigma must be > 0"),
        ({"epsilon": 8, "unit": "user"}, "unknown unit"),
        ({"epsilon": 8, "unit": "patient"}, "choose 'record'"),  # though 'client' is the nearer word
        ({"epsilon": 8, "relation": "replaced"}, "did you mean 'replace'"),
        ({"epsilon": 8, "trust": "sum"}, "unknown trust"),
        ({"epsilon": 8, "noise": "gaussian"}, "unknown noise"),
        ({"epsilon": 8, "memory": "dirty"}, "unknown memory"),
        ({"epsilon": 8, "replay": "std"}, "unknown replay"),
        ({"sigma": 8, "replay": "variance"}, "needs epsilon"),
        ({"epsilon": 8, "trust": "local", "honest": 5}, "secure-sum"),
        ({"epsilon": 8, "trust": "secure-sum", "honest": 0}, "honest must be"),
        ({"epsilon": 8, "record_clip": 1.0}, "unit='record'"),
        ({"epsilon": 8, "unit": "record", "record_clip": math.nan}, "record_clip must be"),
        ({"epsilon": 8, "unit": "record", "record_clip": "0.5"}, "a number > 0 or 'auto', got the text '0.5'"),
    ],
)
def test_nonsense_is_refused_in_one_line(words: dict, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        Privacy(**words)
    assert "\n" not in str(caught.value)


def test_plain_words() -> None:
    text = Privacy(epsilon=8, trust="secure-sum", honest=90, noise="seeded").describe(100)
    for part in (
        "each client of 100 clients",
        "only the sum",
        "all but 90",
        "(8, 1e-05)",
        "Not covered",
        "drop out",
        "seed",
    ):
        assert part in text
    assert "trusted" in Privacy(epsilon=1, trust="central").promise()
    assert "each record" in Privacy(epsilon=1, unit="record", trust="local").promise()
    assert "(8.00001, 1e-05)" in Privacy(epsilon=8.0000049, trust="local").promise()  # never less than the target
    assert "seed" not in Privacy(epsilon=1, noise="secure", trust="local").describe()


@pytest.mark.parametrize("unit", ["client", "record"])
def test_a_person_with_several_units_is_named(unit: str) -> None:
    gaps = Privacy(epsilon=1, unit=unit, trust="local").not_covered()  # type: ignore[arg-type]
    assert sum(f"several {unit}s of one person" in one for one in gaps) == 1


def test_a_replay_never_calls_its_epsilon_a_target() -> None:
    privacy = Privacy(epsilon=8, replay="total-norm", trust="local")
    assert not privacy.is_target
    assert "NOT" in privacy.promise()
    assert "(8" not in privacy.promise()
    assert Privacy(sigma=3, trust="local").budget == math.inf
    assert Privacy(epsilon=8, trust="local").budget == 8


@pytest.mark.slow
def test_importing_needs_torch_and_numpy_only() -> None:
    blocked = ("scipy", "dp_accounting", "opendp", "cryptography")
    code = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "import normec.privacy as p\n"
        "p.SeededNoise(1).draw(3, 1.0, 'a'); p.Privacy(epsilon=8).describe()\n"
        "try: p.SecureNoise()\n"
        "except ValueError as error: print(error)\n"
        "try: p.epsilon_of([p.Event(1.0)], 1e-5)\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install 'normec[privacy]'") == 2


def test_numbers_of_other_libraries_are_taken_as_python_s() -> None:
    given = Privacy(epsilon=np.float32(2), delta=np.float64(1e-5), trust="local")  # type: ignore[arg-type]
    assert json.loads(json.dumps(given.to_dict())) == Privacy(epsilon=2.0, trust="local").to_dict()
    several: Any = {"epsilon": Decimal(2), "delta": np.array(1e-5), "trust": "secure-sum", "honest": np.int64(3)}
    assert json.loads(json.dumps(Privacy(**several).to_dict()))["honest"] == 3


def test_a_number_that_the_caller_changes_later_stays_as_it_was_stated() -> None:
    clip: Any = torch.tensor(1.0)
    stated = Privacy(epsilon=2, unit="record", record_clip=clip)
    clip.fill_(100.0)
    assert stated.record_bound == 1.0


def test_several_numbers_are_not_one() -> None:
    for many in (torch.ones(2), np.ones(2)):
        with pytest.raises(UsageError, match="epsilon must be one number"):
            Privacy(epsilon=many)  # type: ignore[arg-type]


def test_a_delta_is_never_shown_smaller_than_it_is() -> None:
    assert "(epsilon, delta) = (8, 3.33334e-05)" in Privacy(epsilon=8, delta=1 / 30000).promise()
