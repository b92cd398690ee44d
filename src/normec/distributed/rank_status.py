"""When a collective call fails: which rank hangs, which one is gone, and what it said before it went.

Ranks that are left waiting say so in the job's store, and a rank that goes leaves its reason there; for a rank that was
killed the launcher does so. Who has said neither within a moment is the one that hangs or was killed. Nothing is
written while all is well.
"""

from __future__ import annotations

import contextlib
import time

from torch.distributed import PrefixStore, Store

from ..errors import RankLost

_GRACE = 10.0  # seconds for the others to notice and say that they wait, too


def attempt_store(store: Store, attempt: str) -> Store:
    """The part of a job's store that belongs to one attempt of its ranks; torchrun may keep its store over restarts."""
    return PrefixStore(f"attempt-{attempt}", store)


class RankStatus:
    """What ranks leave word of in the job's store."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float | None) -> None:
        """`store`: of this attempt of the ranks. `timeout`: how long a collective call waits, where it is known."""
        store = PrefixStore("status", store)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout

    def record_exit(self, reason: str) -> None:
        """This rank goes, for `reason`."""
        with contextlib.suppress(RuntimeError):  # the store went with its host
            self._store.set(f"left/{self._rank}", reason)

    def diagnose(self, error: RuntimeError) -> RankLost:
        """Why a collective call failed with `error`, as far as it can be known."""
        silent = set(range(self._size)) - {self._rank}
        left: dict[int, str] = {}
        deadline = time.monotonic() + _GRACE
        try:
            self._store.set(f"waiting/{self._rank}", "1")
            while silent and not left and time.monotonic() < deadline:
                for rank in sorted(silent):
                    if self._store.check([f"left/{rank}"]):
                        left[rank] = self._store.get(f"left/{rank}").decode(errors="replace")
                    if rank in left or self._store.check([f"waiting/{rank}"]):
                        silent.discard(rank)
                time.sleep(0.05)
        except RuntimeError:
            return RankLost("whoever keeps the job's store is gone: rank 0, or the process that started the ranks")
        if left:
            return RankLost("; ".join(f"rank {rank} ended: {why}" for rank, why in left.items()))
        if not silent:
            return RankLost(f"the connection between ranks broke: {_line(error)}")
        named = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, sorted(silent)))
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            limit = f"{self._timeout:g} s" if self._timeout is not None else "the group's time-out"
            return RankLost(f"{named} did not answer within {limit}: hanging, or cut off")
        return RankLost(f"{named} gone without a word: killed, or crashed")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
