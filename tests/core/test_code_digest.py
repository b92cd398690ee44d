"""A digest of code changes with whatever changes a result, and with nothing else."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normec.code_digest import UnknownObject, code_digest


def smoothed(amount: float) -> Callable[..., Any]:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=amount)

    return loss


def helper(x: Any) -> Any:
    return x * SCALE


SCALE = 1.0


def by_global(x: Any) -> Any:
    return helper(x)


def net(p: float, width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.Dropout(p), nn.Linear(width, 2))


PAIRS: dict[str, tuple[Any, Any]] = {
    "constant": (lambda x: x * 1.0, lambda x: x * 3.0),
    "operation": (lambda x: x + 1, lambda x: x - 1),
    "default": (functools.partial(lambda x, c: x * c, c=1.0), functools.partial(lambda x, c: x * c, c=2.0)),
    "closure": (smoothed(0.0), smoothed(0.1)),
    "tensor": (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
    "number": (torch.tensor(1.0), torch.tensor(2.0)),
    "last digits of a number": (torch.tensor(0.123456), torch.tensor(0.123457)),
    "dropout": (net(0.1), net(0.8)),
    "layers": (net(0.1), net(0.1, width=4)),
    "order": ([1, 2], [2, 1]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_computes_otherwise_has_another_digest(name: str) -> None:
    one, other = PAIRS[name]
    assert code_digest(one) != code_digest(other)


def test_the_same_made_twice_has_the_same_digest() -> None:
    assert code_digest(net(0.1), smoothed(0.1)) == code_digest(net(0.1), smoothed(0.1))
    assert code_digest(net(0.1).eval()) == code_digest(net(0.1))


@pytest.mark.parametrize("made", [smoothed, lambda c: functools.partial(helper, c=c)], ids=["closures", "partials"])
def test_every_one_of_many_alike_counts(made: Callable[[float], Any]) -> None:
    """What is put together for one of them alone must not be taken for that of the one before."""
    before = code_digest([made(float(i)) for i in range(6)])
    for changed in range(6):
        assert code_digest([made(i + 0.5 * (i == changed)) for i in range(6)]) != before


def test_globals_that_a_function_reaches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest(by_global)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert code_digest(by_global) != before


losses: Any = None


def by_module(x: Any) -> Any:
    return losses.weighted(x)


def by_import(x: Any) -> Any:
    import losses  # type: ignore[import-not-found]

    return losses.weighted(x)


def test_what_a_function_reaches_in_a_module_of_one_s_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module's name, as in `losses.weighted(x)`: its functions, and what these reach."""
    module = types.ModuleType("losses")
    exec("SCALE = 1.0\nOTHER = 1.0\ndef weighted(x):\n    return x * SCALE", vars(module))
    monkeypatch.setitem(globals(), "losses", module)
    before = code_digest(by_module)
    monkeypatch.setattr(module, "OTHER", 2.0)
    assert code_digest(by_module) == before
    monkeypatch.setattr(module, "SCALE", 2.0)
    scaled = code_digest(by_module)
    assert scaled != before
    exec("def weighted(x):\n    return x + SCALE", vars(module))
    assert code_digest(by_module) not in (before, scaled)
    for unknown in (by_import, [module]):
        with pytest.raises(UnknownObject):
            code_digest(unknown)


class Named(dict[str, float]):
    """Entries, and attributes beside them."""


class Thing:
    def __repr__(self) -> str:
        return "Thing"


def test_what_a_container_does_not_show_has_no_digest() -> None:
    named = Named(a=1.0)
    assert code_digest(named) == code_digest(Named(a=1.0))
    named.scale = 2.0  # type: ignore[attr-defined]
    for unknown in (named, {Thing()}):
        with pytest.raises(UnknownObject):
            code_digest(unknown)


def test_cycles_end_and_what_cannot_be_looked_into_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert code_digest(ring)
    with pytest.raises(UnknownObject):
        code_digest(itertools.count())
