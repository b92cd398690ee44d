"""Split a training set over clients, and a fixed test part of data sets that have none.

Every scheme of `split` assigns each record to exactly one client and leaves no client empty. If chance leaves a client
empty, the split is refused and not drawn again, because that would be another distribution than the one that was
chosen. All are deterministic in `seed`.

    iid        a random permutation cut into sizes that differ by at most one
    dirichlet  each class distributed over the clients in proportions ~ Dirichlet(concentration, …, concentration)
    label      records sorted by label and cut into clients × shards_per_client contiguous shards;
               one shard per client is the fully sorted split, more are assigned at random (McMahan et al. 2017)
    column     one client for each distinct value of `groups`, in the values' sorted order
    centre     the same for the natural owners that a data set names, such as hospitals
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import UsageError, at_least, one_of, positive

SCHEMES = ("iid", "dirichlet", "label", "column", "centre")
BY_GROUPS = ("column", "centre")  # the data decide the number of clients
_TEST_FRACTION, _TEST_SEED = 0.2, 0

Indices = npt.NDArray[np.int64]
Column = Tensor | npt.NDArray[Any] | Sequence[int] | Sequence[str]


def split(
    targets: Tensor,
    clients: int | None,
    scheme: str = "iid",
    seed: int = 0,
    *,
    concentration: float = 0.5,
    shards_per_client: int = 1,
    groups: Column | None = None,
) -> list[Tensor]:
    """Divide records among clients.

    Args:
        targets: The class of each record, ``[records]``.
        clients: The number of clients. It may be None for "column" and "centre", where the data decides; a number given
            there must agree with it.
        scheme: "iid", "label" (sorted by class, in shards), "dirichlet" (the classes of a client are drawn from a
            Dirichlet distribution), "column" or "centre" (one client for each value of `groups`).
        seed: The seed of the split.
        concentration: The concentration of "dirichlet"; small numbers make clients differ more.
        shards_per_client: The number of shards of each client, for "label".
        groups: The owner of each record, for "column" and "centre".

    Returns:
        For each client the sorted indices of its records, int64.

    Raises:
        UsageError: An argument is unknown, out of range or missing for the scheme.

    Example:
        >>> import torch
        >>> [part.tolist() for part in split(torch.tensor([0, 1, 0, 1]), 2, "label")]
        [[0, 2], [1, 3]]
    """
    one_of(SCHEMES, scheme=scheme)
    at_least(0, seed=seed)
    if targets.ndim != 1:
        raise UsageError(f"targets must be one value per record, got shape {tuple(targets.shape)}")
    if scheme in BY_GROUPS:
        return _by_client(*_column(scheme, len(targets), clients, groups))
    if clients is None:
        raise UsageError(f"clients must be given for scheme {scheme!r}; only 'column' and 'centre' find it in the data")
    at_least(1, clients=clients)
    if clients > len(targets):
        raise UsageError(
            f"clients must be at most the number of records, {len(targets)}, got {clients}; take fewer clients"
        )
    random = np.random.default_rng(seed)
    labels = targets.detach().cpu().numpy()
    if scheme == "iid":
        owners = _iid(len(labels), clients, random)
    elif scheme == "label":
        owners = _label(labels, clients, shards_per_client, random)
    else:
        owners = _dirichlet(labels, clients, concentration, random)
    return _by_client(owners, clients)


def _by_client(owners: Indices, clients: int) -> list[Tensor]:
    order = torch.from_numpy(np.argsort(owners, kind="stable"))
    return list(order.split(np.bincount(owners, minlength=clients).tolist()))


def _even(records: int, parts: int) -> Indices:
    """The part of each position when 0 … records − 1 is split into `parts` ranges whose sizes differ by at most one."""
    return np.arange(records, dtype=np.int64) * parts // records


def _iid(records: int, clients: int, random: np.random.Generator) -> Indices:
    owners = np.empty(records, dtype=np.int64)
    owners[random.permutation(records)] = _even(records, clients)
    return owners


def _label(labels: npt.NDArray[Any], clients: int, shards: int, random: np.random.Generator) -> Indices:
    at_least(1, shards_per_client=shards)
    if clients * shards > len(labels):
        raise UsageError(
            f"clients × shards_per_client must be at most the number of records, {len(labels)}, "
            f"got {clients} × {shards}; take fewer of either"
        )
    # Shuffled before the stable sort, so that the order within a label depends on the seed and not on the file.
    shuffled = random.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    holder = np.repeat(np.arange(clients, dtype=np.int64), shards)
    if shards > 1:
        holder = random.permutation(holder)
    owners = np.empty(len(labels), dtype=np.int64)
    owners[order] = holder[_even(len(labels), clients * shards)]
    return owners


def _dirichlet(labels: npt.NDArray[Any], clients: int, concentration: float, random: np.random.Generator) -> Indices:
    positive(concentration=concentration)
    owners = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        shares = random.dirichlet(np.full(clients, concentration))
        # Cumulative, so that rounding neither loses nor repeats a record; the last cut is exact by hand.
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        owners[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    empty = np.flatnonzero(np.bincount(owners, minlength=clients) == 0)
    if len(empty):
        raise UsageError(
            f"client {empty[0]} would hold no record ({len(empty)} of {clients} clients would, with "
            f"concentration {concentration:g} and {len(labels)} records); take a larger concentration or fewer "
            "clients, or another seed"
        )
    return owners


def _column(scheme: str, records: int, clients: int | None, groups: Column | None) -> tuple[Indices, int]:
    if groups is None:
        raise UsageError(
            f"scheme {scheme!r} needs groups: one integer or string for each record; heart-disease, tables whose "
            "schema names a centre, and LIBSVM files with a qid have them"
        )
    column = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if column.dtype.kind == "O" and all(isinstance(value, str) for value in column.flat):
        column = column.astype(str)
    if column.dtype.kind not in "iubUS":
        raise UsageError(f"groups must be integers or strings, got {column.dtype}")
    if column.shape != (records,):
        raise UsageError(f"groups must have one value per record, {records}, got shape {column.shape}")
    values, owners = np.unique(column, return_inverse=True)
    if clients is not None and clients != len(values):
        raise UsageError(f"clients must be the number of distinct groups, {len(values)}, got {clients}; leave it out")
    if not records:
        raise UsageError("groups is empty; a split needs at least one record")
    return owners.astype(np.int64), len(values)


def stratified(targets: npt.NDArray[Any]) -> tuple[Indices, Indices]:
    """Training and test records, both in the file's order: 20 % of every class, rounded, drawn with seed 0.

    Results are comparable only on the same records, so they must not depend on the version of a library: the order
    comes from the raw bits of PCG64, the only stream that NumPy guarantees never to change.
    """
    bits = np.random.PCG64(_TEST_SEED)
    chosen = np.zeros(len(targets), dtype=bool)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        members = members[np.argsort(bits.random_raw(len(members)), kind="stable")]
        chosen[members[: round(_TEST_FRACTION * len(members))]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def fifth(records: int) -> tuple[Indices, Indices]:
    """Training and test records, both in the file's order: 20 % of all, rounded, drawn with seed 0.

    This is for files whose records may be protected: who is held out depends on their number alone. In `stratified`, a
    record of another class moves a fifth of all others from one part to the other, which no guarantee for records
    covers.
    """
    order = np.argsort(np.random.PCG64(_TEST_SEED).random_raw(records), kind="stable")
    held = order[: round(_TEST_FRACTION * records)]
    return np.setdiff1d(order, held), np.sort(held)
