"""Sums with dropouts at every stage: they equal plain arithmetic to the last bit, or nothing is opened."""

from __future__ import annotations

import functools
import random
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from normec.errors import UsageError
from normec.federation.secure_sum import keys, shares
from normec.federation.secure_sum import party as party_module
from normec.federation.secure_sum.server import AttemptFailed, Stage
from normec.federation.secure_sum.wire import MaskedVector, decode_answers
from normec.privacy.noise import SecureNoise
from normec.privacy.secure_sum import SumGrid

from .parties import Federation


def test_a_round_takes_three_exchanges_and_the_first_five(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    counts = []
    for round in range(4):
        before = federation.exchanges
        federation.check(federation.sum(round, f"model {round}".encode()))
        counts.append(federation.exchanges - before)
    assert counts == [5, 3, 3, 3]
    assert not federation.server.reports
    assert all(ledger.paid == [0, 1, 2, 3] for ledger in federation.ledgers)
    assert all(ledger.counted == {0: True, 1: True, 2: True} for ledger in federation.ledgers)


def drop_randomly(federation: Federation, draw: random.Random, attempts: int) -> int:
    """So many attempts in which parties fall silent at random; how many sums were opened."""
    round, opened, terms = 0, 0, federation.terms
    for _ in range(attempts):
        rate = draw.choice([0.02, 0.1, 0.3])
        federation.server.start(round, draw.randbytes(3))
        try:
            while federation.server.sum is None:
                answering = {party for party in range(terms.parties) if draw.random() > rate}
                stage, attempt = federation.server.stage, federation.server.attempt
                federation.stage(lambda party, _, those=answering: party in those)
                if stage is Stage.SIGNATURES and len(answering) < terms.threshold:
                    pytest.fail("an opening began without enough signatures")
        except AttemptFailed as failed:
            if failed.left >= failed.needed:
                pytest.fail(str(failed))
            assert federation.server.sum is None
            continue
        made = federation.server.sum
        assert made.attempt == attempt
        assert len(made.survivors) >= terms.minimum
        federation.check(made)
        round, opened = round + 1, opened + 1
    for ledger in federation.ledgers:
        assert len(ledger.paid) == len(set(ledger.paid)) == len(ledger.made)
    return opened


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("parties", [3, 4, 5])
def test_masks_cancel_whoever_drops_out(tmp_path: Path, parties: int) -> None:
    federation = Federation(tmp_path, parties, rounds=10_000)
    assert drop_randomly(federation, random.Random(parties), 12) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("parties", [4, 5, 6, 7])
def test_masks_cancel_in_a_thousand_patterns_of_dropouts(tmp_path: Path, parties: int) -> None:
    federation = Federation(tmp_path, parties, rounds=10_000)
    assert drop_randomly(federation, random.Random(parties), 250) >= 50


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("stage", list(Stage)[1:])
def test_one_party_may_drop_out_at_any_stage(tmp_path: Path, stage: Stage) -> None:
    federation = Federation(tmp_path, 5)
    made = federation.sum(0, reaches=lambda party, now: party != 2 or now < stage)
    federation.check(made)
    assert (2 in made.survivors) == (stage > Stage.VECTORS)
    federation.check(federation.sum(1))
    made = federation.sum(2)
    federation.check(made)
    assert made.survivors == (0, 1, 2, 3, 4)
    counted = 2 in federation.expected_survivors(0)
    assert federation.ledgers[2].counted.get(0, False) == counted


def test_a_sum_modulo_two_to_the_64(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 5, modulus_bits=64, dimension=1000)
    made = federation.sum(0, reaches=lambda party, now: party != 2 or now < Stage.VECTORS)
    federation.check(made)
    assert made.values.dtype == np.uint64
    assert made.values.max() > 2**60


def test_too_few_parties_open_nothing_and_the_next_attempt_is_paid_for_again(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    federation.until(Stage.VECTORS)
    with pytest.raises(AttemptFailed, match="2 parties are left"):
        federation.stage(lambda party, _: party < 2)
    made = federation.sum(0)
    federation.check(made)
    assert made.attempt == 1
    assert [ledger.paid for ledger in federation.ledgers] == [[0, 1], [0, 1], [1], [1]]
    first, second = (federation.ledgers[0].made[attempt] for attempt in (0, 1))
    assert not np.array_equal(first, second)
    federation.sum(1)
    assert [ledger.counted for ledger in federation.ledgers][:3] == [{0: False, 1: True}] * 2 + [{1: True}]


def test_late_reveals_still_open_a_certified_sum(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 5)
    federation.until(Stage.REVEALS)
    with pytest.raises(AttemptFailed, match="2 parties are left"):
        federation.stage(lambda party, _: party in (0, 1))
    with pytest.raises(UsageError, match="has not been opened"):
        federation.server.start(1, b"")
    federation.stage(lambda party, _: party in (2, 3))
    assert federation.server.sum is not None
    federation.check(federation.server.sum)
    with pytest.raises(UsageError, match="must not be summed again"):
        federation.server.start(0, b"")


def test_a_certified_sum_that_cannot_be_opened_is_not_counted(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    federation.until(Stage.REVEALS)
    for party in range(4):
        federation.exchange(party)  # they know the certificate; the server loses what they revealed, and gives up
    made = federation.sum(0)
    federation.check(made)
    federation.sum(1)
    assert all(ledger.counted == {0: False, made.attempt: True} for ledger in federation.ledgers)


def test_a_server_that_is_restarted_opens_the_certified_sum(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    federation.until(Stage.REVEALS)
    federation.restart_server()
    assert federation.server.stage is Stage.REVEALS
    federation.stage()
    assert federation.server.sum is not None
    assert federation.server.sum.attempt == 0
    federation.check(federation.server.sum)


def test_an_opened_sum_is_kept_until_the_next_round_begins(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    made = federation.sum(0)
    federation.restart_server()
    again = federation.server.sum
    assert again is not None
    assert again[:3] == made[:3]
    np.testing.assert_array_equal(again.values, made.values)
    federation.check(federation.sum(1))
    federation.server.close()
    (tmp_path / "server" / "opening.bin").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="is damaged"):
        federation.restart_server()
    (tmp_path / "server" / "opening.bin").unlink()
    federation.restart_server()
    federation.check(federation.sum(2))


def test_a_budget_that_is_spent_is_a_dropout(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    federation.ledgers[3].budget = 1
    federation.sum(0)
    made = federation.sum(1)
    federation.check(made)
    assert made.survivors == (0, 1, 2)
    assert any(report.party == 3 and "budget" in report.what for report in federation.server.reports)


@pytest.mark.slow
def test_a_sum_of_many_parties(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 30)
    made = federation.sum(0, reaches=lambda party, now: (party, now) not in {(7, Stage.VECTORS), (9, Stage.REVEALS)})
    federation.check(made)
    assert 7 not in made.survivors
    assert 9 in made.survivors


@functools.cache
def random_parts(threshold: int, parties: int) -> list[int]:
    """The values at 1 … `parties` of a random polynomial over GF(2^128) with x^128 + x^7 + x^2 + x + 1 that is 0 at 0.

    All points are computed at once, each as two unsigned numbers. A point has at most 8 bits.
    """
    words = np.frombuffer(secrets.token_bytes(16 * (threshold - 1)), ">u8").astype(np.uint64).reshape(-1, 2)
    one, top, points = np.uint64(1), np.uint64(63), np.arange(1, parties + 1, dtype=np.uint64)
    high, low = np.zeros_like(points), np.zeros_like(points)
    for constant_high, constant_low in [*words, (0, 0)]:  # Horner's method
        total_high = np.full_like(points, constant_high)
        total_low = np.full_like(points, constant_low)
        for bit in range(8):
            chosen = -((points >> np.uint64(bit)) & one)  # all bits, or none
            total_high, total_low = total_high ^ (high & chosen), total_low ^ (low & chosen)
            reduced = -(high >> top) & np.uint64(0b10000111)
            high, low = (high << one) | (low >> top), (low << one) ^ reduced
        high, low = total_high, total_low
    return [(int(a) << 64) + int(b) for a, b in zip(high, low, strict=True)]


def quickly_split(seed: bytes, threshold: int, parties: int) -> list[bytes]:
    """Shamir shares as pycryptodome deals them, with one polynomial for all seeds, to which each adds its own."""
    return [(part ^ int.from_bytes(seed, "big")).to_bytes(16, "big") for part in random_parts(threshold, parties)]


AGREED = keys.KeyPair.shared


def agree_once(pair: keys.KeyPair, public: bytes, known: dict[frozenset[bytes], bytes | None]) -> bytes | None:
    """What two pairs share, computed by the first of their owners."""
    both = frozenset((pair.public, public))
    if both not in known:
        known[both] = AGREED(pair, public)
    return known[both]


@pytest.mark.slow
def test_a_sum_of_two_hundred_parties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked_once: functools._lru_cache_wrapper[bool]
) -> None:
    """The largest roster. On one core, pycryptodome would take minutes to deal the shares of all parties.

    Each party checks the same signatures as the others, 120,000 in all, and two parties compute the same secrets; here
    each signature is checked once, and each secret is computed once.
    """
    dealt = quickly_split(b"0123456789abcdef", 3, 200)
    assert shares.combine({party: dealt[party] for party in (0, 101, 199)}) == b"0123456789abcdef"
    monkeypatch.setattr(party_module, "split", quickly_split)
    known: dict[frozenset[bytes], bytes | None] = {}
    monkeypatch.setattr(keys.KeyPair, "shared", lambda pair, public: agree_once(pair, public, known))
    federation = Federation(tmp_path, 200, rounds=1)
    silent = {17: Stage.VECTORS, 60: Stage.SIGNATURES, 133: Stage.REVEALS}
    made = federation.sum(0, reaches=lambda party, now: now < silent.get(party, Stage.REVEALS + 1))
    federation.check(made)
    assert made.survivors == tuple(party for party in range(200) if party != 17)
    assert all(len(ledger.paid) == (ledger.number != 17) for ledger in federation.ledgers)
    # An advertisement, a receipt and a signature of each party that came so far.
    assert checked_once.cache_info().misses == 200 + 199 + 198


@pytest.mark.parametrize("sigma", [0.5, 0.0])
def test_messages_on_the_grid_with_noise_come_out_as_their_sum(tmp_path: Path, sigma: float) -> None:
    """Weighted messages through the grid and the masks; with noise, all of its variance and nothing else is added."""
    size, weights = 4000, (0.5, 1.0, 1.5, 1.0)
    grid = SumGrid(parties=4, bound=1.0, sigma=sigma, weights=weights)
    federation = Federation(
        tmp_path, 4, sigma=sigma, step=grid.step, modulus_bits=grid.bits, weights=weights, dimension=size
    )
    messages = np.random.default_rng(0).normal(size=(4, size)) / (2 * size**0.5)
    for ledger, message, weight in zip(federation.ledgers, messages, weights, strict=True):
        ledger.vector = grid.encode(message, SecureNoise() if sigma else None, weight)
    made = federation.sum(0, reaches=lambda party, now: party != 2 or now < Stage.VECTORS)
    survivors = list(made.survivors)
    assert survivors == [0, 1, 3]
    error = grid.decode(made.values).numpy() - np.array(weights)[survivors] @ messages[survivors]
    if sigma:  # a sum of squares of 4000 Gaussians, six of its standard deviations
        assert abs(error.var() / (3 * sigma**2) - 1) < 6 * (2 / size) ** 0.5
    else:
        assert np.abs(error).max() <= 3 * grid.step


def test_the_noise_of_a_sum_has_the_variance_and_the_tails_of_the_account(tmp_path: Path) -> None:
    """100,000 coordinates of one sum without party 2: a Gaussian with the noise of the three others, with its tails."""
    size, sigma = 100_000, 0.3
    grid = SumGrid(parties=4, bound=1.0, sigma=sigma)
    federation = Federation(tmp_path, 4, sigma=sigma, step=grid.step, modulus_bits=grid.bits, dimension=size)
    for ledger in federation.ledgers:
        ledger.vector = grid.encode(np.zeros(size), SecureNoise())
    made = federation.sum(0, reaches=lambda party, now: party != 2 or now < Stage.VECTORS)
    found = grid.decode(made.values).numpy() / (sigma * 3**0.5)
    squares = float(found @ found)
    assert min(stats.chi2.cdf(squares, size), stats.chi2.sf(squares, size)) > 1e-6
    assert stats.kstest(found, "norm").pvalue > 1e-6
    for far in (1.0, 2.0, 3.0, 4.0):
        for beyond in (np.count_nonzero(found > far), np.count_nonzero(found < -far)):
            assert stats.binomtest(beyond, size, stats.norm.sf(far)).pvalue > 1e-6
    assert np.abs(found).max() < 7.0  # exceeded once in a million sums


# ---- what the server sees -------------------------------------------------------------------------------------------


def masked_bytes(federation: Federation, party: int) -> np.ndarray:
    """All bytes of masked vectors that the server received from a party."""
    seen = [answer for data in federation.seen[party] for answer in decode_answers(data)]
    vectors = [answer.vector for answer in seen if isinstance(answer, MaskedVector)]
    return np.frombuffer(b"".join(vectors), dtype=np.uint8)


def suspicious(counts: Iterable[np.ndarray]) -> bool:
    """Whether a chi-square test at one in a million rejects that all rows of counts have one distribution."""
    table = np.array([np.bincount(one, minlength=256) for one in counts])
    return bool(stats.chi2_contingency(table).pvalue < 1e-6)


def test_what_the_server_sees_of_a_party_does_not_depend_on_its_data(tmp_path: Path) -> None:
    """Two runs with the same sum and different vectors of party 0; the sum itself is all that they show."""
    size, seen, sums = 8192, [], []
    some = np.arange(size, dtype=np.uint32)
    for name, vectors in {"a": (some, -some, some, some), "b": (some * 0, some * 0, some * 2, some * 0)}.items():
        federation = Federation(tmp_path / name, 4, dimension=size)
        for ledger, vector in zip(federation.ledgers, vectors, strict=True):
            ledger.vector = vector
        sums.append(federation.sum(0).values)
        seen.append(masked_bytes(federation, 0))
        assert not stats.chisquare(np.bincount(seen[-1], minlength=256)).pvalue < 1e-6
    np.testing.assert_array_equal(sums[0], sums[1])
    assert len(seen[0]) == len(seen[1]) == 4 * size
    assert not suspicious(seen)
    assert suspicious([seen[0], some.view(np.uint8)]), "the test must notice a vector without masks"


def test_every_attempt_has_masks_of_its_own(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 3, dimension=1000)
    for ledger in federation.ledgers:
        ledger.vector = np.zeros(1000, dtype=np.uint32)
    for round in range(3):
        assert not federation.sum(round).values.any()
    vectors = [masked_bytes(federation, party).view("<u4").reshape(3, 1000) for party in range(3)]
    everything = np.concatenate(vectors)
    assert everything.any(axis=1).all()
    for one in range(9):
        for other in range(one):
            for combined in (everything[one] - everything[other], everything[one] + everything[other]):
                assert np.count_nonzero(combined == 0) < 5
