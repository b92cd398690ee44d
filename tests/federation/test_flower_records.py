"""Fields as Flower's records and back, and records that no party writes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normec.errors import WireError
from normec.federation.flower.records import SharedArrays, from_records, to_records

from ..support.texts import CHARACTERS

flwr = pytest.importorskip("flwr.app")

scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans(), st.text(CHARACTERS, max_size=50)
)
names = st.text("abcdefgh.", min_size=1, max_size=10)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(names, scalars, max_size=8), st.integers(1, 200), st.sampled_from([np.float32, np.float64]))
def test_there_and_back(table: dict[str, Any], size: int, dtype: type) -> None:
    vector = np.linspace(-1, 1, size).astype(dtype)
    fields = {**table, "vector": vector}

    records = to_records(fields)
    found = from_records(records)
    assert found.keys() == fields.keys()
    assert all(type(found[name]) is type(value) and found[name] == value for name, value in table.items())
    assert found["vector"].dtype == dtype
    assert found["vector"].tobytes() == vector.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_an_array_is_the_file_that_numpy_writes(dtype: type) -> None:
    """It is made without Flower's copies, and an array of several messages is made once."""
    vector, shared = np.arange(300).astype(dtype)[::2], SharedArrays()
    one, other = (to_records({"x": vector}, shared)["arrays"]["x"] for _ in range(2))
    assert one is other
    plain = flwr.Array(vector)
    assert (one.dtype, one.shape, one.stype, one.data) == (plain.dtype, plain.shape, plain.stype, plain.data)


def test_an_array_is_not_taken_for_another_that_is_gone() -> None:
    shared = SharedArrays()
    for number in range(100):  # each array is free when the next one is made
        (found,) = from_records(to_records({"x": np.full(1000, float(number))}, shared))["x"][:1]
        assert found == number


def saved(value: np.ndarray[Any, Any], **how: Any) -> bytes:
    """The file that NumPy writes."""
    whole = io.BytesIO()
    np.save(whole, value, **how)
    return whole.getvalue()


def array(**description: Any) -> Any:
    """Four zeros as Flower sends them, with another description."""
    zeros = {"dtype": "float32", "shape": (4,), "stype": "numpy.ndarray", "data": saved(np.zeros(4, np.float32))}
    return flwr.Array(**zeros | description)


@pytest.mark.parametrize(
    "odd",
    [
        array(stype="pickle"),
        array(dtype="int32"),
        array(dtype="float16"),
        array(shape=(2, 2)),
        array(shape=()),
        array(shape=(0,)),
        array(shape=(5,)),
        array(shape=(10**12,)),
        array(shape=(-4,)),
        array(data=b""),
        array(data=pickle.dumps(np.zeros(4, np.float32))),
        array(data=saved(np.zeros(4, np.float32)) + b"x"),
        array(data=saved(np.zeros(4, np.float32))[:-1]),
        array(data=saved(np.zeros(4, np.int32))),
        array(data=saved(np.zeros((2, 2), np.float32))),
        array(data=saved(np.zeros(4, ">f4"))),
        array(data=saved(np.array([print] * 4), allow_pickle=True)),
        array(data=b"\x93NUMPY\x01\x00" + b"(" * 137),
        array(data=b"\x93NUMPY\x03\x00" + saved(np.zeros(4, np.float32))[8:]),
        array(data=b"PK\x03\x04" + bytes(140)),
    ],
)
def test_odd_arrays_are_named_faults(odd: Any) -> None:
    records = flwr.RecordDict({"fields": flwr.ConfigRecord({"round": 1}), "arrays": flwr.ArrayRecord({"x": odd})})
    with pytest.raises(WireError):
        from_records(records)


def test_odd_records_are_named_faults() -> None:
    config, arrays = flwr.ConfigRecord, flwr.ArrayRecord
    for odd in (
        None,
        {"fields": {}},
        flwr.RecordDict({}),
        flwr.RecordDict({"fields": config({}), "arrays": arrays({}), "more": config({})}),
        flwr.RecordDict({"fields": arrays({}), "arrays": config({})}),
        flwr.RecordDict({"fields": flwr.MetricRecord({"a": 1}), "arrays": arrays({})}),
        flwr.RecordDict({"fields": config({"a": b"bytes"}), "arrays": arrays({})}),
        flwr.RecordDict({"fields": config({"a": [1, 2]}), "arrays": arrays({})}),
        flwr.RecordDict({"fields": config({"a": "x" * 10_000}), "arrays": arrays({})}),
        flwr.RecordDict({"fields": config({f"a{i}": i for i in range(100)}), "arrays": arrays({})}),
        flwr.RecordDict({"fields": config({"x": 1}), "arrays": arrays({"x": array()})}),
    ):
        with pytest.raises(WireError):
            from_records(odd)


def test_the_largest_array_is_the_readers_choice() -> None:
    records = to_records({"x": np.zeros(100, np.float32)})
    assert from_records(records, largest=100)["x"].size == 100
    with pytest.raises(WireError):
        from_records(records, largest=99)
