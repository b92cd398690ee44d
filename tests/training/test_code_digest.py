"""A digest of code changes with whatever changes a result, and with nothing else."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normec.training.code_digest import UnknownObject, code_digest


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


class Row(list[float]):
    """A caller's own list, with an attribute."""

    def __init__(self, scale: float) -> None:
        super().__init__([1.0])
        self.scale = scale


def marked(scale: float) -> Callable[..., Any]:
    def times(x: Any) -> Any:
        return x * times.scale  # type: ignore[attr-defined]

    times.scale = scale  # type: ignore[attr-defined]
    return times


PAIRS: dict[str, tuple[Any, Any]] = {
    "constant": (lambda x: x * 1.0, lambda x: x * 3.0),
    "operation": (lambda x: x + 1, lambda x: x - 1),
    "default": (functools.partial(lambda x, c: x * c, c=1.0), functools.partial(lambda x, c: x * c, c=2.0)),
    "closure": (smoothed(0.0), smoothed(0.1)),
    "tensor": (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
    "number": (torch.tensor(1.0), torch.tensor(2.0)),
    "close numbers": (torch.tensor(1.00001), torch.tensor(1.00002)),
    "method of a tensor": (torch.zeros(3).dot, torch.ones(3).dot),
    "attribute of a function": (marked(1.0), marked(2.0)),
    "attribute of a list": (Row(1.0), Row(2.0)),
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


def test_globals_that_a_function_reaches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest(by_global)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert code_digest(by_global) != before


def bowl(centre: torch.Tensor) -> Callable[..., Any]:
    return lambda x: (x - centre).square().sum()


def stretched(centre: torch.Tensor) -> Callable[..., Any]:
    return functools.partial(lambda c, x: (x - c).square().sum(), centre)


@pytest.mark.parametrize("kind", [bowl, stretched], ids=["closures", "partials"])
def test_every_one_of_several_functions_counts(kind: Callable[..., Any]) -> None:
    """What is made on the way to the contents of one function is gone, and its address taken, at the next."""
    centres = [torch.full((2,), float(k)) for k in range(6)]
    before = code_digest([kind(centre) for centre in centres])
    for changed in range(6):
        others = [centre + (k == changed) for k, centre in enumerate(centres)]
        assert code_digest([kind(centre) for centre in others]) != before


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Writes a module of the caller's and imports it as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        for known in ("callers_losses", "callers_parts"):
            monkeypatch.delitem(sys.modules, known, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return write


def test_what_a_function_takes_from_a_module_of_the_caller_s_counts(written: Callable[[str, str], Any]) -> None:
    """A loss that calls `parts.weighted`: the file of `parts` may change while that of the loss does not."""
    own = "import callers_parts\n\n\ndef loss(x):\n    return callers_parts.weighted(x)\n"
    found = []
    for weight in ("1.0", "2.00", "1.0"):
        written("callers_parts", f"WEIGHT = {weight}\n\n\ndef weighted(x):\n    return WEIGHT * x\n")
        found.append(code_digest(written("callers_losses", own).loss))
    assert found[0] == found[2] != found[1]


def test_what_a_function_imports_when_it_is_called_is_not_known(written: Callable[[str, str], Any]) -> None:
    own = "def loss(x):\n    from callers_parts import weighted\n\n    return weighted(x)\n"
    with pytest.raises(UnknownObject, match="imports callers_parts"):
        code_digest(written("callers_losses", own).loss)
    assert code_digest(written("callers_losses", "def loss(x):\n    import math\n\n    return math.exp(x)\n").loss)


def test_cycles_end_and_what_cannot_be_looked_into_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert code_digest(ring)
    with pytest.raises(UnknownObject):
        code_digest(itertools.count())


def by_operator(x: Any) -> Any:
    return torch.ops.somebody.scale(x)


def by_part(x: Any) -> Any:
    return OPERATORS.scale(x)


OPERATORS = torch.ops.somebody
HIDDEN = {
    "an operator of anybody's": by_operator,
    "operators under another name": by_part,
    "a generator of random numbers": random.Random(1),
    "a subclass of a compiled class": type("Own", (random.Random,), {})(1),
    "a function of a compiled module": msgspec.json.decode,
    "a compiled function": torch.jit.script(F.relu),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_keeps_more_than_its_attributes_is_unknown(name: str) -> None:
    """Two of them may have the same names and attributes, and compute something else."""
    with pytest.raises(UnknownObject):
        code_digest(HIDDEN[name])


def test_a_cached_function_is_known_by_what_it_caches() -> None:
    one, other = functools.lru_cache(lambda x: x * 1.0), functools.lru_cache(lambda x: x * 3.0)
    assert code_digest(one) != code_digest(other)
