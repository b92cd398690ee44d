"""Keys, shares and masks against published vectors, other implementations and plain arithmetic."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from Crypto.Cipher import ChaCha20

from normec.errors import UsageError
from normec.federation.secure_sum import keys, shares
from normec.federation.secure_sum.deposit import seal, unseal
from normec.federation.secure_sum.keys import Identity, KeyPair
from normec.federation.secure_sum.masks import add_mask, add_pair_mask
from normec.federation.secure_sum.refusals import Refused

# RFC 5869, appendix A: input keying material, salt, info, length, output keying material.
HKDF_VECTORS = [
    (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        42,
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        "".join(f"{i:02x}" for i in range(0x50)),
        "".join(f"{i:02x}" for i in range(0x60, 0xB0)),
        "".join(f"{i:02x}" for i in range(0xB0, 0x100)),
        82,
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09da3275600c2f09b8"
        "367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        "0b" * 22,
        "",
        "",
        42,
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]
# RFC 7748, section 6.1.
ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
ALICE_PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
BOB_PUBLIC = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
TERMS = bytes(range(32))


@pytest.mark.parametrize(("secret", "salt", "info", "length", "expected"), HKDF_VECTORS)
def test_hkdf_gives_the_vectors_of_the_rfc(secret: str, salt: str, info: str, length: int, expected: str) -> None:
    found = keys.hkdf(bytes.fromhex(secret), bytes.fromhex(salt), bytes.fromhex(info), length)
    assert found.hex() == expected


def test_derived_keys_are_hkdf_of_their_context() -> None:
    """By hand: extract and expand with the standard library, over the MessagePack list of the context."""
    info = b"\x96\xc4\x13normec secure sum 1\xa9pair mask\x07\x02\x03\x05"
    pseudorandom = hmac.new(TERMS, b"secret", hashlib.sha256).digest()
    expected = hmac.new(pseudorandom, info + b"\x01", hashlib.sha256).digest()
    assert keys.derive(b"secret", TERMS, "pair mask", 7, 2, 3, 5) == expected
    context = {(7, 2, 3, 5), (7, 2, 5, 3), (7, 23, 5, 1), (72, 3, 5, 1)}
    assert len({keys.derive(b"secret", TERMS, "pair mask", *one) for one in context}) == len(context)
    assert keys.derive(b"secret", TERMS, "self mask", 7, 2, 3, 5) != expected


def test_x25519_gives_the_vectors_of_the_rfc() -> None:
    alice, bob = KeyPair(bytes.fromhex(ALICE)), KeyPair(bytes.fromhex(BOB))
    assert (alice.public.hex(), bob.public.hex()) == (ALICE_PUBLIC, BOB_PUBLIC)
    assert alice.shared(bob.public) == bob.shared(alice.public) == bytes.fromhex(SHARED)


@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31)])
def test_keys_of_low_order_are_not_used(public: bytes) -> None:
    assert KeyPair(bytes.fromhex(ALICE)).shared(public) is None
    assert not keys.usable(public)
    assert keys.usable(bytes.fromhex(BOB_PUBLIC))


def test_a_signature_holds_for_one_purpose_and_one_content() -> None:
    identity = Identity.generate()
    signature = identity.sign("advert", b"content")
    assert keys.signed_by(identity.public, "advert", b"content", signature)
    assert not keys.signed_by(identity.public, "statement", b"content", signature)
    assert not keys.signed_by(identity.public, "advert", b"other", signature)
    assert not keys.signed_by(Identity.generate().public, "advert", b"content", signature)


def test_an_identity_is_kept_in_a_private_file(tmp_path: Path) -> None:
    identity, path = Identity.generate(), tmp_path / "key.pem"
    identity.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load(path).public == identity.public
    with pytest.raises(UsageError, match="never replaced"):
        Identity.generate().save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="not a private key"):
        Identity.load(path)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("parties", [3, 4, 5, 6, 7])
def test_every_set_of_enough_shares_gives_the_seed(parties: int) -> None:
    for threshold in range(2, parties + 1):
        seed = keys.new_seed()
        dealt = shares.split(seed, threshold, parties)
        for holders in itertools.combinations(range(parties), threshold):
            assert shares.combine({holder: dealt[holder] for holder in holders}) == seed
        fewer = {holder: dealt[holder] for holder in range(threshold - 1)}
        assert shares.combine(fewer) != seed


@pytest.mark.slow
def test_random_sets_of_shares_give_the_seed_of_200_parties() -> None:
    draw, seed = random.Random(0), keys.new_seed()
    dealt = shares.split(seed, 134, 200)
    assert len(set(dealt)) == 200
    for _ in range(5):
        holders = draw.sample(range(200), 134)
        assert shares.combine({holder: dealt[holder] for holder in holders}) == seed
    with_the_last = [0, *range(67, 200)]
    assert shares.combine({holder: dealt[holder] for holder in with_the_last}) == seed


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("liars", [(0,), (2, 6), (0, 1, 2), (3, 4, 8)])
def test_false_shares_are_found(liars: tuple[int, ...]) -> None:
    seed = keys.new_seed()
    dealt = dict(enumerate(shares.split(seed, 6, 9)))
    for liar in liars:
        dealt[liar] = keys.new_seed()
    found, blamed = shares.recover(dealt, 6, lambda one: one == seed)
    assert found == seed
    assert set(blamed) <= set(liars)
    assert blamed == list(liars) or not set(liars) & set(range(6))


def test_false_shares_that_stand_among_the_first_are_found_among_many() -> None:
    """One in nine sets of five has none of the five; 194 random sets all have one with a probability of 4e-10."""
    seed = keys.new_seed()
    dealt = dict(enumerate(shares.split(seed, 5, 16)))
    liars = [2, 3, 4, 5, 6]
    for liar in liars:
        dealt[liar] = keys.new_seed()
    found, blamed = shares.recover(dealt, 5, lambda one: one == seed)
    assert found == seed
    assert blamed == liars


def test_too_many_false_shares_give_nothing() -> None:
    seed = keys.new_seed()
    dealt = dict(enumerate(shares.split(seed, 4, 5)))
    dealt[1], dealt[3] = keys.new_seed(), keys.new_seed()
    assert shares.recover(dealt, 4, lambda one: one == seed) == (None, [])


@pytest.mark.parametrize("size", [1, 5, 1000, 2**16, 2**16 + 1, 200_001])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_mask_is_the_key_stream_of_chacha20(size: int, bits: int) -> None:
    """Against another implementation, that of pycryptodome; its stream with a nonce of 8 zeros is the same."""
    key = bytes(range(1, 33))
    expected = np.frombuffer(
        ChaCha20.new(key=key, nonce=bytes(8)).encrypt(bytes(bits // 8 * size)), dtype=f"<u{bits // 8}"
    )
    found = np.zeros(size, dtype=f"u{bits // 8}")
    add_mask(found, key)
    np.testing.assert_array_equal(found, expected)
    add_mask(found, key, negative=True)
    assert not found.any()


def test_pair_masks_cancel() -> None:
    key, vectors = bytes(32), [np.zeros(9, dtype=np.uint32) for _ in range(2)]
    add_pair_mask(vectors[0], key, 3, 8)
    add_pair_mask(vectors[1], key, 8, 3)
    assert vectors[0].any()
    assert not (vectors[0] + vectors[1]).any()
    add_pair_mask(vectors[1], key, 8, 3, remove=True)
    assert not vectors[1].any()


def test_a_deposit_opens_for_its_owner_and_run_and_never_goes_back() -> None:
    owner = Identity.generate()
    old, new = (seal(owner, TERMS, attempt, f"memory {attempt}".encode()) for attempt in (3, 7))
    assert b"memory" not in old
    assert unseal(owner, TERMS, new, 7) == (7, b"memory 7")
    assert unseal(owner, TERMS, new, 5) == (7, b"memory 7")
    relabelled = new[:8] + old[8:]
    for given, identity, terms in (
        (old, owner, TERMS),
        (relabelled, owner, TERMS),
        (new, Identity.generate(), TERMS),
        (new, owner, bytes(32)),
        (new[:-1], owner, TERMS),
        (b"", owner, TERMS),
    ):
        with pytest.raises(Refused) as refused:
            unseal(identity, terms, given, 7)
        assert refused.value.reason == "deposit"
