"""A party's memory, deposited with the server: sealed under the party's own key, and never taken back when it is old.

A deposit is made together with a vector and labelled with its attempt. The label is authenticated, so the server can
return an older deposit but cannot pass it off as a newer one. A party that still has its folder knows the label of its
newest deposit. A party that lost everything accepts a deposit only if the certified history contains no later attempt
with its vector. If the server denies having a deposit, nothing can be done: the memory begins anew.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .keys import NONCE, Identity
from .refusals import Refused

LABEL = 8  # bytes


def seal(identity: Identity, terms: bytes, attempt: int, content: bytes) -> bytes:
    """Encrypt what a party deposits in an attempt. The length of the content stays visible; keep it constant."""
    label, nonce = attempt.to_bytes(LABEL, "big"), secrets.token_bytes(NONCE)
    return label + nonce + AESGCM(identity.deposit_key(terms)).encrypt(nonce, content, label)


def unseal(identity: Identity, terms: bytes, sealed: bytes, newest: int) -> tuple[int, bytes]:
    """The attempt and the content of a deposit.

    Args:
        identity: The party that made it.
        terms: The digest of the run's terms.
        sealed: What the server returns.
        newest: The newest attempt for which the party is known to have made a deposit.

    Raises:
        Refused: The deposit is older, was changed, or belongs to another party or run.
    """
    label, nonce, text = sealed[:LABEL], sealed[LABEL : LABEL + NONCE], sealed[LABEL + NONCE :]
    try:
        content = AESGCM(identity.deposit_key(terms)).decrypt(nonce, text, label)
    except (InvalidTag, ValueError):
        raise Refused("deposit", "the deposit was changed, or it was made for another run") from None
    attempt = int.from_bytes(label, "big")
    if attempt < newest:
        raise Refused("deposit", f"the deposit is of attempt {attempt}, the last vector was made in attempt {newest}")
    return attempt, content
