"""Tables written as TOML are read back by Python's own reader."""

from __future__ import annotations

import math
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from normec.system.files import to_toml

from ..support.texts import CHARACTERS

SCALARS = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text(CHARACTERS))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(CHARACTERS), inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(st.text(CHARACTERS), VALUES, max_size=5))
def test_what_is_written_is_read_back(table: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(table)) == table


def test_numbers_that_json_does_not_have() -> None:
    read = tomllib.loads(to_toml({"a": math.inf, "b": -math.inf, "c": math.nan}))
    assert (read["a"], read["b"]) == (math.inf, -math.inf)
    assert math.isnan(read["c"])
