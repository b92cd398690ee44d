"""The terms of a secure sum, on which privacy and result depend. Every signature in the sum covers their digest.

So the server cannot show different terms to different parties: a party accepts no key and no list of survivors that
was signed under other terms than its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...errors import UsageError, at_least, non_negative, positive
from ...system.files import parse_json, read_text, write_atomic
from .keys import digest
from .roster import FEWEST, MOST, Roster

MODULI = (32, 64)  # bits
LARGEST_DIMENSION = 2**24
LARGEST_TERMS = 2**16  # bytes
MOST_ROUNDS = 2**20
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,95}")


def least_threshold(parties: int) -> int:
    """⌊2n/3⌋ + 1: any two quorums then share an honest party, as long as at most a third of the parties collude."""
    return 2 * parties // 3 + 1


@dataclass(frozen=True)
class Terms:
    """What all parties of a run agree on before it begins.

    Args:
        run: The name of the run with the random number that makes it unique.
        roster: The digest of the roster, in hexadecimal digits.
        parties: The number of parties n in the roster.
        threshold: The number of parties t whose shares open a sum and whose signatures allow it.
        minimum: The smallest number of parties in a sum, n_min.
        colluding: The largest number of parties c that may collude with the server.
        sigma: The standard deviation of each party's noise; 0 for a sum that is only masked.
        step: The distance between two points of the grid on which vectors lie.
        dimension: The length d of the vectors.
        rounds: The number of sums of the run.
        weights: The public weight of each party.
        method: The method and its settings, as text.
        plan: Everything else that the parties agree on, as text.
        modulus_bits: The sum is computed modulo 2 to this power, 32 or 64.
    """

    run: str
    roster: str
    parties: int
    threshold: int
    minimum: int
    colluding: int
    sigma: float
    step: float
    dimension: int
    rounds: int
    weights: tuple[float, ...]
    method: str
    plan: str = ""
    modulus_bits: int = 32

    def __post_init__(self) -> None:
        for name in ("run", "roster", "method", "plan"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} must be a text, got {getattr(self, name)!r}")
        for name in ("sigma", "step"):
            if type(getattr(self, name)) is not float:
                raise UsageError(f"{name} must be a number with a decimal point, got {getattr(self, name)!r}")
        if not _RUN.fullmatch(self.run):
            raise UsageError(f"{self.run!r} cannot be the name of a run; use at most 96 letters, digits and '.~-_'")
        at_least(FEWEST, parties=self.parties)
        at_least(1, dimension=self.dimension, rounds=self.rounds)
        at_least(0, colluding=self.colluding)
        non_negative(sigma=self.sigma)
        positive(step=self.step)
        self._check_limits()
        self._check_numbers_of_parties()
        if len(self.weights) != self.parties or not all(
            type(weight) is float and weight > 0 and math.isfinite(weight) for weight in self.weights
        ):
            raise UsageError(f"weights must be {self.parties} positive numbers, one for each party")
        if len(self.canonical) > LARGEST_TERMS:
            raise UsageError(f"the terms have {len(self.canonical)} bytes, more than {LARGEST_TERMS}; shorten the plan")

    def _check_limits(self) -> None:
        for name, limit in (("parties", MOST), ("dimension", LARGEST_DIMENSION), ("rounds", MOST_ROUNDS)):
            if getattr(self, name) > limit:
                raise UsageError(f"{name} must be at most {limit}, got {getattr(self, name)}")
        if self.modulus_bits not in MODULI:
            raise UsageError(f"modulus_bits must be 32 or 64, got {self.modulus_bits}")

    def _check_numbers_of_parties(self) -> None:
        n, t = self.parties, self.threshold
        at_least(least_threshold(n), threshold=t)
        if t > n:
            raise UsageError(f"threshold must be at most the number of parties, {n}, got {t}")
        least = max(t, self.colluding + 2)
        if type(self.minimum) is not int or not least <= self.minimum <= n:
            raise UsageError(f"minimum must be a whole number from {least} to {n}, got {self.minimum!r}")
        if self.colluding >= 2 * t - n:
            raise UsageError(
                f"with {n} parties and threshold {t} at most {2 * t - n - 1} parties may collude with the server, got "
                f"{self.colluding}; raise the threshold"
            )

    @cached_property
    def canonical(self) -> bytes:
        """The terms as JSON with one spelling, which is what the digest is computed from."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @cached_property
    def digest(self) -> bytes:
        return digest("terms", self.canonical)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The type of the numbers in a vector, in the order of bytes in which they travel."""
        return np.dtype(f"<u{self.modulus_bits // 8}")

    @property
    def most_attempts(self) -> int:
        """The number of attempts after which a party refuses the run, so that a server cannot fill its disk."""
        return min(16 * (self.rounds + 16), 2 * self.rounds + 2**16)

    def first_difference(self, other: Terms) -> str | None:
        """The first setting that differs from other terms; None if they are the same."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != getattr(other, field.name):
                return field.name
        return None

    def check_roster(self, roster: Roster) -> None:
        """Raise `UsageError` if the terms were made for another roster."""
        if self.parties != len(roster) or self.roster != roster.digest.hex():
            raise UsageError("the terms were made for another roster; compare the roster files of all parties")

    @classmethod
    def read(cls, content: str | bytes, where: str = "the terms") -> Self:
        """Read terms from JSON. Raises `UsageError` if they are not valid."""
        if len(content) > LARGEST_TERMS:
            raise UsageError(f"{where} must have at most {LARGEST_TERMS} bytes")
        table: Any = parse_json(content, where)
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(table, dict) or set(table) != known or not isinstance(table["weights"], list):
            raise UsageError(f"{where} must be a table of {', '.join(sorted(known))}")
        return cls(**(table | {"weights": tuple(table["weights"])}))

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.read(read_text(path, LARGEST_TERMS), str(path))
        except FileNotFoundError:
            raise UsageError(f"there are no terms at {path}; all parties of a run use the same file") from None

    def save(self, path: Path) -> None:
        write_atomic(path, self.canonical + b"\n")
