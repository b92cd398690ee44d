"""Settings of all tests.

Hypothesis without time limits, folders in memory, garbage collection, the order of the files, and keys of secure noise.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .support.known_keys import KnownKeys

# An example may take as long as it needs, and Hypothesis keeps no examples on the disk.
settings.register_profile(
    "normec", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("normec")

# Runs wait for the disk at every write that must be durable, often for longer than they compute. The folders of tests
# are in memory, where there is enough of it: code is killed between writes, and never the machine.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # pytest's name for the parent of its folders


SECONDS = Path(__file__).with_name("seconds.json")  # how long each file takes that takes five or more
KEYS = KnownKeys()
_cases: dict[str, int] = {}  # the number of the last case that was collected, for tests marked `quick_cases`


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from what collection makes: the modules of all tests, and torch.

    Every full collection would go through these objects, which live to the end; one of them takes seconds.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, so that those that several tests share have known keys too."""
    KEYS.begin(item.nodeid)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the cases of a test with `quick_cases(n)` as slow, except the first and every n-th after it."""
    marker = item.get_closest_marker("quick_cases")
    if marker is not None:
        name = item.nodeid.partition("[")[0]
        number = _cases[name] = _cases.get(name, -1) + 1
        if number % marker.args[0]:
            item.add_marker("slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-seconds", action="store_true", help=f"Write {SECONDS.name}, by which the files are ordered."
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first, so that two processes end at about the same time.

    A file that was never measured counts as a second for each slow test. The files are ordered after `-m` has
    deselected tests: in `make test`, which leaves out the slow ones, they keep their order.
    """
    slow: dict[str, int] = {}
    for item in items:
        slow[_file(item.nodeid)] = slow.get(_file(item.nodeid), 0) + (item.get_closest_marker("slow") is not None)
    if any(slow.values()):
        measured = json.loads(SECONDS.read_text())
        items.sort(key=lambda item: -measured.get(_file(item.nodeid), slow[_file(item.nodeid)]))


def _file(test: str) -> str:
    return test.partition("::")[0]


_took: dict[str, float] = {}  # seconds of each file; of several processes, the one that starts the others fills it


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[_file(report.nodeid)] = _took.get(_file(report.nodeid), 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-seconds") and not hasattr(session.config, "workerinput"):
        long = {name: round(seconds) for name, seconds in sorted(_took.items()) if seconds >= 5}
        SECONDS.write_text(json.dumps(long, indent=2) + "\n")
