"""Convert wire fields to Flower's records and back: one ConfigRecord of scalars and one ArrayRecord of vectors.

Received records may contain anything. The description and the size of each array are checked before any of its numbers
are read. Nothing is unpickled, and no memory is allocated because of a claim in a header.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import WireError
from ..protocol.terms import LONGEST_SPEC
from ..protocol.wire import FLOATS, LARGEST, OCTETS, Fields, most_octets

if TYPE_CHECKING:
    from flwr.app import Array as FlowerArray
    from flwr.app import RecordDict

SCALARS, ARRAYS = "fields", "arrays"
_HEADER = 512  # the header of an .npy file is shorter
_MOST_FIELDS = 64
_LONGEST_NAME = 256


class SharedArrays:
    """The arrays of messages that are sent together. An array that several share is converted and hashed once."""

    def __init__(self) -> None:
        # The arrays themselves are kept too, because Python may give the identity of a freed one to another.
        self._made: dict[int, tuple[np.ndarray[Any, Any], FlowerArray]] = {}

    def of(self, array: np.ndarray[Any, Any]) -> FlowerArray:
        """The array as Flower's array, an .npy file into which the numbers are copied once."""
        if id(array) not in self._made:
            self._made[id(array)] = array, _written(array)
        return self._made[id(array)][1]


def to_records(fields: Fields, shared: SharedArrays | None = None) -> RecordDict:
    """Convert fields to Flower's records; `shared` are the arrays of messages that are sent together."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    shared, vectors = shared or SharedArrays(), ArrayRecord()
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            vectors[name] = shared.of(value)
    scalars: dict[str, Any] = {name: value for name, value in fields.items() if name not in vectors}
    return RecordDict({SCALARS: ConfigRecord(scalars), ARRAYS: vectors})


def from_records(records: object, largest: int = LARGEST) -> Fields:
    """Convert received records to fields. Raises `WireError` for anything that `to_records` does not make."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    if not isinstance(records, RecordDict) or set(records) != {SCALARS, ARRAYS}:
        raise WireError(f"a message must hold the records {SCALARS} and {ARRAYS}, and nothing else")
    scalars, vectors = records[SCALARS], records[ARRAYS]
    if not isinstance(scalars, ConfigRecord) or not isinstance(vectors, ArrayRecord):
        raise WireError("the records of a message are of the wrong kind")
    if len(scalars) + len(vectors) > _MOST_FIELDS:
        raise WireError(f"a message has at most {_MOST_FIELDS} fields")
    found: Fields = {}
    for name, value in _items(scalars):
        if type(value) not in (int, float, str, bool):
            raise WireError("a field must be a number, a string or a bool")
        if isinstance(value, str) and len(value) > LONGEST_SPEC:
            raise WireError(f"a word has at most {LONGEST_SPEC} characters")
        found[name] = value
    for name, value in _items(vectors):
        if name in found:
            raise WireError("a field is given twice")
        found[name] = _vector(value, largest)
    return found


def _written(array: np.ndarray[Any, Any]) -> FlowerArray:
    from flwr.app import Array

    header, whole = io.BytesIO(), np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(whole))
    return Array(str(whole.dtype), whole.shape, "numpy.ndarray", b"".join((header.getvalue(), whole.data)))


def _items(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if not all(type(name) is str and len(name) <= _LONGEST_NAME for name in record):
        raise WireError("a field needs a short name")
    return list(record.items())


def _vector(array: FlowerArray, largest: int) -> np.ndarray[Any, Any]:
    """The numbers of an array, after checking that it is an .npy of version 1 with one dimension of floats or bytes."""
    shape, data = array.shape, array.data
    dtype = next((known for known in (*FLOATS, OCTETS) if known.name == array.dtype), None)
    if array.stype != "numpy.ndarray" or dtype is None:
        raise WireError("an array must be a float32, float64 or uint8 array of NumPy")
    largest = most_octets(largest) if dtype == OCTETS else largest
    if len(shape) != 1 or type(shape[0]) is not int or not 1 <= shape[0] <= largest:
        raise WireError(f"an array must be a vector of 1 to {largest} numbers")
    size = shape[0] * dtype.itemsize
    if not isinstance(data, bytes) or not size < len(data) <= size + _HEADER:
        raise WireError("the size of an array does not match its shape")
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        stated = np.lib.format.read_array_header_1_0(file, max_header_size=_HEADER)
    except Exception:  # NumPy's header reader can raise any error of Python's parser
        raise WireError("an array's header cannot be read") from None
    if version != (1, 0) or stated != ((shape[0],), False, dtype) or len(data) - file.tell() != size:
        raise WireError("an array does not match its header")
    return np.frombuffer(data, dtype, shape[0], file.tell())
