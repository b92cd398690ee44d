"""The reasons for which a party refuses a request. The server learns the reason, and the party's log the details."""

from __future__ import annotations

REASONS = {
    "malformed": "the request could not be read",
    "terms": "the request belongs to other terms than the ones that this party agreed to",
    "signature": "a signature was not made with the key in the roster",
    "keys": "a key cannot be used",
    "few": "fewer parties take part than the terms require",
    "participants": "the list of participants does not fit the keys that were exchanged",
    "survivors": "the list of survivors does not fit this attempt",
    "quorum": "too few parties signed the same list of survivors",
    "repeated": "this step of the attempt was answered before, for another request",
    "order": "this step of the attempt is not due",
    "late": "the attempt is older than one that this party knows",
    "forgotten": "this party was restarted, and the secrets of the attempt are gone",
    "round": "the round does not follow the rounds that were summed before",
    "history": "the certificates do not continue the history that this party knows",
    "restored": "this party took part in sums that its own folder does not know: the folder is an old copy",
    "deposit": "the deposit is older than the party's last message, or it is damaged",
    "budget": "the party's privacy budget does not allow it",
    "failed": "the party could not make its message",
}


class Refused(Exception):  # noqa: N818  (an answer, not a mistake of the caller)
    """A party does not do what a request asks for.

    Args:
        reason: One of `REASONS`.
        exact: What exactly is wrong, for the party's own log.

    Example:
        >>> print(Refused("few", "3 parties take part, the terms require 5"))
        few: 3 parties take part, the terms require 5
    """

    def __init__(self, reason: str, exact: str) -> None:
        super().__init__(f"{reason}: {exact}")
        self.reason, self.exact = reason, exact
