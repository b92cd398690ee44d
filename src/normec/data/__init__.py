"""Data sets by name: loading, downloading, and splitting over clients.

    dataset = load("a9a")                              # or "cifar10", "digits", "libsvm:PATH", …
    parts = split(dataset.train.tensors[1], 10, "dirichlet", seed=0, concentration=0.5)

Importing this needs torch and numpy only; scikit-learn and pillow are imported by the sets that need them.
"""

from .augment import Augment, CropFlip, Flip, Normalize, Scale, Transform
from .dataset import Dataset, load
from .fetch import get
from .folders import Listing, listing
from .partition import SCHEMES, split

__all__ = [
    "SCHEMES",
    "Augment",
    "CropFlip",
    "Dataset",
    "Flip",
    "Listing",
    "Normalize",
    "Scale",
    "Transform",
    "get",
    "listing",
    "load",
    "split",
]
