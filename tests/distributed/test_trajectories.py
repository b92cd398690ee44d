"""One process, two ranks, three ranks: the same run to rounding, for every method; the same words for every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from normec import NormEC, Run

from ..support.runs import states
from .cases import CASES, Case, cases_of
from .torchrun import torchrun


@cache
def alone(name: str) -> Run:
    return CASES[name].train()


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The files of a job of so many ranks with its cases; that of two ranks has secure noise and mistakes besides."""

    @cache
    def made(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        (folder / "a file").write_text("")
        names = ["trajectories", *(("secure", "mistakes") if ranks == 2 else ())]
        done = torchrun(ranks, "-m", "tests.distributed.jobs", str(folder), *names, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return made


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (1, 2, 3) for name in cases_of(ranks)])
def test_the_same_run(spread: Callable[[int], Path], ranks: int, name: str) -> None:
    folder = spread(ranks)
    one = alone(name)
    held = load_file(folder / f"{name}.safetensors")
    facts = json.loads((folder / f"{name}.json").read_text())
    torch.testing.assert_close(held, states(one), rtol=1e-9, atol=1e-9)
    assert facts["messages"] == one.state.messages
    assert [row.keys() for row in facts["rows"]] == [row.keys() for row in one.history.rows]
    for row, expected in zip(facts["rows"], one.history.rows, strict=True):
        # disagreement is a difference of squares: half the digits are left of it
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert facts["clients"]["client"] == one.clients["client"]
    for column, values in one.clients.items():
        assert facts["clients"][column] == pytest.approx(values, rel=1e-8, abs=1e-8)
    if one.privacy is not None:
        assert facts["privacy"]["epsilon"] == pytest.approx(one.privacy.epsilon)
        assert facts["privacy"]["releases"] == one.privacy.releases


@pytest.mark.slow
def test_secure_noise_is_added_on_each_rank_as_whole_numbers(spread: Callable[[int], Path]) -> None:
    x, clean = load_file(spread(2) / "secure.safetensors")["x"], Case(NormEC(0.1, 0.3)).train().x
    away = float((x - clean).norm())
    assert 1e-6 < away < 0.1, "noise of a thousandth moves x a little, and does move it"


@pytest.mark.slow
def test_mistakes_are_said_on_every_rank(spread: Callable[[int], Path]) -> None:
    first, second = (json.loads((spread(2) / f"said-{rank}.json").read_text()) for rank in range(2))
    expected = {
        "seeds": "the ranks do not agree: seed is 0 on rank 0 and 1 on rank 1",
        "few": "1 clients on 2 ranks leave 1 ranks without data; start at most 1",
        "nan": "of client 4 is not finite in round",
        "nan, private": "of client 4 is not finite in round",
        "long": "the message of clients 0, 1, 2, 3, 4 … is above its bound in round 0",
        "file": "a file",
        "method": "the ranks do not agree: method is",
    }
    assert first.keys() == second.keys() == expected.keys()
    for name, words in expected.items():
        assert words in first[name], name
        assert words in second[name], name
