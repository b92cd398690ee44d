"""Diagnosis of a failed collective call: which rank hangs, which rank has ended, and why.

When a collective call fails, every rank that was waiting records this in the job's store. A rank that ends records its
reason there, and the launcher does so for a rank that was killed. A rank that has recorded neither after a few seconds
hangs, was killed, or has not noticed yet. Nothing is written while the job works.
"""

from __future__ import annotations

import contextlib
import time

from torch.distributed import PrefixStore, Store

from ..errors import RankLost

_GRACE = 10.0  # seconds for the other ranks to notice the failure and record that they wait


def attempt_store(store: Store, attempt: str) -> Store:
    """Return the part of a job's store for one attempt; torchrun may keep its store across restarts."""
    return PrefixStore(f"attempt-{attempt}", store)


class RankStatus:
    """The status of the ranks, in the job's store."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float | None) -> None:
        """`store` belongs to this attempt. `timeout` is that of collective calls, if it is known."""
        store = PrefixStore("status", store)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout

    def record_exit(self, reason: str) -> None:
        """Record that this rank ends, and why."""
        with contextlib.suppress(RuntimeError):  # the store has ended with its host
            self._store.set(f"left/{self._rank}", reason)

    def diagnose(self, error: RuntimeError) -> RankLost:
        """Return why a collective call failed with `error`, as far as this is known."""
        silent = set(range(self._size)) - {self._rank}
        left: dict[int, str] = {}
        deadline = time.monotonic() + _GRACE
        try:
            self._store.set(f"waiting/{self._rank}", "1")
            while True:
                for rank in sorted(silent):
                    if self._store.check([f"left/{rank}"]):
                        left[rank] = self._store.get(f"left/{rank}").decode(errors="replace")
                    if rank in left or self._store.check([f"waiting/{rank}"]):
                        silent.discard(rank)
                if not silent or left or time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
        except RuntimeError:
            return RankLost(
                "the process with the job's store has ended: rank 0, or the process that started the ranks; if it lost "
                "another rank, it names that one"
            )
        if left:
            return RankLost("; ".join(f"rank {rank} ended: {why}" for rank, why in left.items()))
        if not silent:
            return RankLost(f"the connection between the ranks failed: {_line(error)}")
        named = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, sorted(silent)))
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            limit = f"{self._timeout:g} s" if self._timeout is not None else "the timeout of the process group"
            fate = (
                "it hangs, or its connection is lost"
                if len(silent) == 1
                else "they hang, or have lost their connection"
            )
            return RankLost(f"{named} did not answer within {limit}; {fate}")
        if len(silent) == 1:
            return RankLost(f"{named} ended without a message; it was killed, or it crashed")
        # A rank that computes for long, or waits for this one, has not noticed yet.
        return RankLost(f"at least one of {named} was killed, or crashed; the others may still be at work")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
