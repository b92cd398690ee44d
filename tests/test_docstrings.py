"""Every public name has a docstring that says what its arguments are, and examples that run."""

from __future__ import annotations

import doctest
import inspect
import sys

import pytest

import normec


@pytest.mark.parametrize("name", normec.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    thing = getattr(normec, name)
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if name in ("train", "Run", "Privacy") or (isinstance(thing, type) and issubclass(thing, Exception)):
        return  # described in prose or in a table
    arguments = [one for one in inspect.signature(thing).parameters if one not in ("args", "kwargs")]
    assert not arguments or "Args:" in text
    for argument in arguments:
        assert f"{argument}:" in text, f"{name} does not describe {argument}"


@pytest.mark.parametrize("module", sorted({getattr(normec, name).__module__ for name in normec.__all__}))
def test_examples_in_docstrings_run(module: str) -> None:
    failed, tried = doctest.testmod(sys.modules[module], optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed
    if module not in ("normec.training.train", "normec.training.run"):
        assert tried, f"{module} has no example"
