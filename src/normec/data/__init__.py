"""Data sets by name: loading, downloading, and splitting over clients.

    dataset = load("a9a")                              # or "cifar10", "digits", "patients.csv", "libsvm:PATH", …
    parts = split(dataset.train.tensors[1], 10, "dirichlet", seed=0, concentration=0.5)

Importing this needs torch and numpy only; scikit-learn and pillow are imported by the sets that need them.
"""

from .augment import Augment, CropFlip, Flip, Normalize, Scale, Transform
from .dataset import Dataset, load
from .fetch import get
from .folders import Listing, listing
from .partition import SCHEMES, split
from .table import (
    CategoryColumn,
    NumberColumn,
    TableCounts,
    TableRecords,
    TableSchema,
    load_schema,
    read_inputs,
    read_table,
)

__all__ = [
    "SCHEMES",
    "Augment",
    "CategoryColumn",
    "CropFlip",
    "Dataset",
    "Flip",
    "Listing",
    "Normalize",
    "NumberColumn",
    "Scale",
    "TableCounts",
    "TableRecords",
    "TableSchema",
    "Transform",
    "get",
    "listing",
    "load",
    "load_schema",
    "read_inputs",
    "read_table",
    "split",
]
