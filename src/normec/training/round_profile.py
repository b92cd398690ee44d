"""The profile of a run: a trace of some rounds, and a table of where their time goes.

A trace contains the names of operations, when they ran and, in a run without privacy, the shapes of their inputs; never
a value of a tensor. In a private run shapes and numbers among the arguments are left out as well, because they may
depend on private data. Times depend on the data all the same, and no noise covers them: of a private run, only the
owner can read the two files.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from ..storage import PROFILE, TRACE
from ..system.files import write_atomic
from .stopwatch import SPAN, Stopwatch

ROUND = "round"  # the span of a whole round
_WARM_UP = 10  # rounds before the first profiled one, in which engines compile, record and fill caches
_ROUNDS = 20  # the most rounds in a profile
_SECONDS = 2.0  # no further round begins after this time, so that the trace stays small enough to open
_OPERATIONS = 12  # operations in the table

log = logging.getLogger("normec")


class RoundProfile:
    """Profiles some rounds after a warm-up, and writes the result to the folder of the run."""

    def __init__(self, folder: Path, watch: Stopwatch, device: torch.device, *, private: bool) -> None:
        self._folder, self._watch, self._private = folder, watch, private
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profiler: profile | None = None
        self._first: int | None = None
        self._begun, self._done = 0.0, False

    def before(self, round: int, rounds: int) -> None:
        """Begin the profile if it is time; a short run is profiled from its middle on."""
        if self._first is None:
            self._first = round + min(_WARM_UP, (rounds - round) // 2)
        if self._done or self._profiler is not None or round < self._first:
            return
        if _profiler_enabled():
            log.warning("the run is not profiled, because another profiler is active in this process")
            self._done = True
            return
        self._profiler = profile(activities=self._activities, record_shapes=not self._private)
        self._profiler.start()
        self._watch.spans = True
        self._first, self._begun = round, time.monotonic()

    def after(self, round: int) -> None:
        """End the profile if `round`, the next one, is no longer part of it."""
        if self._profiler is None or self._first is None:
            return
        if round - self._first >= _ROUNDS or time.monotonic() - self._begun >= _SECONDS:
            self.write(round)

    def write(self, round: int) -> None:
        """End the profile before `round`, and write the trace and the table."""
        profiler = self._stopped()
        if profiler is None or self._first is None or round <= self._first:
            return
        made = round - self._first
        table = {"first_round": self._first, "rounds": made, **_table(profiler, made)}
        with tempfile.TemporaryDirectory() as aside:  # which only the owner can read
            profiler.export_chrome_trace(f"{aside}/{TRACE}")
            write_atomic(self._folder / TRACE, Path(aside, TRACE).read_bytes(), private=self._private)
        write_atomic(self._folder / PROFILE, json.dumps(table, indent=1) + "\n", private=self._private)

    def abandon(self) -> None:
        """End the profile of a run that failed; nothing is written."""
        self._stopped()

    def _stopped(self) -> profile | None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._watch.spans, self._done = False, True
            profiler.stop()
        return profiler


def _table(profiler: profile, rounds: int) -> dict[str, Any]:
    """Return the parts of a round and the operations that take longest, in milliseconds per round."""
    events = profiler.events() or []
    spans = [event for event in events if event.name.startswith(SPAN)]
    whole = [event for event in spans if event.name == SPAN + ROUND]
    each = 1e-3 / rounds  # from microseconds in all to milliseconds per round
    parts: dict[str, list[float]] = {}
    for span, inner in _nested(spans):
        name = span.name.removeprefix(SPAN)
        held = parts.setdefault("everything else" if name == ROUND else name, [0.0, 0.0])
        held[0] += each * (_length(span) - sum(map(_length, inner)))
        held[1] += each * (span.device_time_total - sum(one.device_time_total for one in inner))
    averages = [one for one in profiler.key_averages() if not one.key.startswith(SPAN)]
    averages.sort(key=lambda one: -max(one.self_cpu_time_total, one.self_device_time_total))
    return {
        "ms_per_round": each * sum(map(_length, whole)),
        "parts": [
            {"name": name, "ms": host, "device_ms": device}
            for name, (host, device) in sorted(parts.items(), key=lambda item: -max(item[1]))
        ],
        "operations": [
            {
                "name": one.key,
                "calls": one.count / rounds,
                "ms": each * one.self_cpu_time_total,
                "device_ms": each * one.self_device_time_total,
            }
            for one in averages[:_OPERATIONS]
        ],
    }


def _length(event: FunctionEvent) -> float:
    return float(event.time_range.elapsed_us())


def _nested(spans: Sequence[FunctionEvent]) -> list[tuple[FunctionEvent, list[FunctionEvent]]]:
    """Return every span with those directly inside it; spans of one thread lie inside each other or apart."""
    found: list[tuple[FunctionEvent, list[FunctionEvent]]] = []
    around: list[tuple[FunctionEvent, list[FunctionEvent]]] = []
    for span in sorted(spans, key=lambda one: (one.time_range.start, -one.time_range.end)):
        while around and around[-1][0].time_range.end <= span.time_range.start:
            around.pop()
        if around:
            around[-1][1].append(span)
        around.append((span, []))
        found.append(around[-1])
    return found
