"""The fused form of a method that has one."""

from __future__ import annotations

from normec.algorithms.method import Method, ScaledDifference, fused_form


def form(method: Method) -> ScaledDifference:
    found = fused_form(method)
    assert found is not None
    return found
