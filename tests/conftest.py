"""What holds for all tests: examples without clocks and files, and the order of the files."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# An example may take as long as it needs, and none is kept on the disk.
settings.register_profile(
    "normec", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("normec")


_cases: dict[str, int] = {}  # of tests with the marker `quick_cases`: how many are collected


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a test with the marker `quick_cases(n)`, every n-th case is quick, and the others are slow."""
    marker = item.get_closest_marker("quick_cases")
    if marker is not None:
        name = item.nodeid.partition("[")[0]
        number = _cases[name] = _cases.get(name, -1) + 1
        if number % marker.args[0]:
            item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files with the most slow tests first, so that two processes end at about the same time.

    It runs after `-m` has deselected tests: in `make test`, without the slow ones, files keep their order.
    """
    slow: dict[object, int] = {}
    for item in items:
        slow[item.path] = slow.get(item.path, 0) + (item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.path])
