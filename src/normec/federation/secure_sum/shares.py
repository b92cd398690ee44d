"""Shamir shares of 16-byte seeds, from pycryptodome, and their recovery when some of them are false.

Shares are points of a polynomial over GF(2^128); party i holds the point i + 1. A commitment tells whether a recovered
seed is the right one, so false shares cannot change a sum: they are found and left out, or nothing is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, islice
from random import SystemRandom

from Crypto.Protocol.SecretSharing import Shamir

from .keys import SEED

MOST_TRIALS = 200  # sets of shares that are tried for one seed; each takes up to a second with 200 parties


def split(seed: bytes, threshold: int, parties: int) -> list[bytes]:
    """Shares of a seed for parties 0 to n − 1; any `threshold` of them determine it, and fewer say nothing."""
    return [bytes(share) for _, share in Shamir.split(threshold, parties, seed, ssss=False)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The seed from exactly as many shares as the threshold, by the number of the party that holds them."""
    return bytes(Shamir.combine([(party + 1, share) for party, share in shares.items()], ssss=False))


def recover(
    shares: Mapping[int, bytes], threshold: int, is_right: Callable[[bytes], bool]
) -> tuple[bytes | None, list[int]]:
    """Find a seed among shares of which some may be false.

    Args:
        shares: The shares by the number of the party that revealed them. The first ones are tried first, so put those
            last that are doubted.
        threshold: The number of shares that determine the seed.
        is_right: Tells whether a seed is the one that its owner committed to.

    Returns:
        The seed, or None if no set that was tried gives it, and the parties that are known to have revealed false
        shares.
    """
    for chosen in islice(_choices(list(shares), threshold), MOST_TRIALS):
        seed = combine({party: shares[party] for party in chosen})
        if len(seed) == SEED and is_right(seed):
            return seed, _false(shares, chosen, seed) if chosen != list(shares)[:threshold] else []
    return None, []


def _choices(parties: list[int], threshold: int) -> Iterator[list[int]]:
    """Sets of `threshold` parties: the first ones, then without one of them, then without two, and so on.

    If there are more sets than are tried, random ones follow those without one party: with half as many shares again as
    are needed, one in nine of them avoids two false ones, wherever these stand.
    """
    few = math.comb(len(parties), threshold) <= MOST_TRIALS
    for missing in range(len(parties) - threshold + 1 if few else 2):
        for left_out in combinations(parties[: threshold + missing], missing):
            chosen = [party for party in parties if party not in left_out][:threshold]
            if not missing or parties[threshold + missing - 1] in chosen:
                yield chosen
    while not few:
        drawn = set(SystemRandom().sample(parties, threshold))  # nobody foresees them
        yield [party for party in parties if party in drawn]


def _false(shares: Mapping[int, bytes], right: list[int], seed: bytes) -> list[int]:
    """The parties whose shares do not lie on the polynomial through the right ones."""
    others = right[1:]
    return [
        party
        for party in sorted(set(shares) - set(right))
        if combine({one: shares[one] for one in (*others, party)}) != seed
    ]
