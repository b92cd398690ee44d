"""Where memories live changes no bit of a run; in bfloat16 a run ends near the one in float32."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import (
    EF21,
    GD,
    Callback,
    Clip21,
    FixedSize,
    Logging,
    Memory,
    NormEC,
    Privacy,
    Run,
    TopK,
    UsageError,
    train,
)
from normec.training.memory_table import HOMES, Home, MemoryTable

from ..support.covering import pairwise
from ..support.runs import StopAt, problem, same

METHODS = {"normec": NormEC(0.1, 0.3), "clip21-decay": Clip21(0.3, decay=0.1), "top-k": EF21(TopK(3))}
SETTINGS: dict[str, tuple[FixedSize | None, Any]] = {
    "everyone": (None, "gradient"),
    "sampled": (FixedSize(2), "zero"),
}


def run(method: Any, **options: Any) -> Run:
    options = {"lr": 0.2, "rounds": 12, "batch_size": 4, "seed": 7, "logging": Logging(every=3)} | options
    return train(problem("batchnorm"), method, **options)


def maps() -> str:
    return "".join(line for line in Path("/proc/self/maps").read_text().splitlines() if "/memory-" in line)


PAIRS = pairwise([*METHODS], [*SETTINGS], [None, torch.bfloat16, torch.float64])


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(("name", "setting", "dtype"), PAIRS, ids=str)
def test_homes_are_equal_to_the_bit(name: str, setting: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    method, (participation, start) = METHODS[name], SETTINGS[setting]
    memory = Memory(initial=start, dtype=dtype)
    here = run(method, participation=participation, memory=memory)
    homes: tuple[Home, ...] = ("host", "disk")
    for home in homes:
        there = run(method, participation=participation, memory=replace(memory, home=home), out=tmp_path / home)
        same(here, there)
    assert here.state.memory.dtype == (dtype or torch.float32)


def test_a_method_without_memory_has_no_table(tmp_path: Path) -> None:
    found = run(GD(), memory=Memory(home="disk", dtype=torch.bfloat16), out=tmp_path / "run")
    assert not found.state.clients
    same(found, run(GD()))


class Looks(Callback):
    """What lies in a folder after each round, and what is mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.mapped = folder, set[str](), ""

    def round(self, round: int) -> None:  # noqa: ARG002
        self.files |= {path.name for path in self.folder.rglob("memory-*")}
        self.mapped = maps()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are read from /proc")
def test_the_file_has_no_name_while_it_is_used_and_is_gone_after(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    found = run(NormEC(0.1, 0.3), memory=Memory(home="disk"), out=tmp_path / "run", callbacks=[looks])
    assert looks.files == set()
    assert str(tmp_path) in looks.mapped
    assert "(deleted)" in looks.mapped
    del found
    gc.collect()
    assert str(tmp_path) not in maps()
    assert not list(tmp_path.rglob("memory-*"))


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="initial_memory"):
        run(NormEC(0.1, 0.3), memory=Memory(home="disk", initial=torch.ones(2)), out=tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_fits_on_no_disk_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bytes") as error:
        MemoryTable(home="disk").of(torch.zeros(10**6), 10**10, torch.zeros(10**6), tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_table_is_n_d_numbers_and_zero(home: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    table = MemoryTable(dtype, home).of(torch.zeros(11), 7, torch.zeros(11), tmp_path)
    assert table.shape == (7, 11)
    assert table.untyped_storage().nbytes() == 7 * 11 * dtype.itemsize
    assert not table.any()
    table[3] += 1
    assert table.sum() == 11


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_rows_of_clients_not_drawn_are_not_touched(dtype: torch.dtype | None, home: Any) -> None:
    before = torch.zeros(4, len(problem("batchnorm").x0), dtype=dtype or torch.float32)
    for k in range(6):
        after = run(
            NormEC(0.1, 0.3), rounds=k + 1, participation=FixedSize(2), memory=Memory(dtype=dtype, home=home)
        ).state.memory
        drawn = FixedSize(2).draw(4, k, 7)
        assert drawn is not None
        for i in range(4):
            assert torch.equal(after[i], before[i]) == (i not in drawn.tolist())
        before = after.clone()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("before", "after"), [("disk", "device"), ("device", "host"), ("host", "disk")])
def test_a_run_goes_on_with_its_memory_elsewhere(before: Any, after: Any, tmp_path: Path) -> None:
    alone, first, then = (
        {"memory": Memory(dtype=torch.bfloat16, home=home), "participation": FixedSize(2)}
        for home in ("device", before, after)
    )
    run(Clip21(0.3), out=tmp_path / "run", callbacks=[StopAt(5)], **first)
    same(run(Clip21(0.3), **alone), run(Clip21(0.3), out=tmp_path / "run", **then))


def test_a_run_does_not_go_on_in_another_precision(tmp_path: Path) -> None:
    run(Clip21(0.3), out=tmp_path / "run", callbacks=[StopAt(5)])
    with pytest.raises(UsageError, match="memory"):
        run(Clip21(0.3), out=tmp_path / "run", memory=Memory(dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("method", [NormEC(0.1, 0.1), Clip21(0.2), EF21(TopK(12))], ids=lambda m: m.name)
def test_a_bfloat16_run_ends_near_the_float32_one(method: Any) -> None:
    options: dict[str, Any] = {"rounds": 150, "batch_size": None, "lr": 0.01}
    fine, coarse = run(method, **options), run(method, memory=Memory(dtype=torch.bfloat16), **options)
    moved = float((fine.x - problem("batchnorm").x0).norm())
    assert 0 < float((fine.x - coarse.x).norm()) < 0.05 * moved
    assert coarse.history["loss"][-1] == pytest.approx(fine.history["loss"][-1], rel=0.02)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("sampled", [None, FixedSize(2)], ids=["everyone", "sampled"])
@pytest.mark.parametrize("method", [NormEC(0.1, 0.3), Clip21(0.2), EF21(TopK(12))], ids=lambda m: m.name)
def test_the_estimate_stays_the_mean_of_rounded_memories(method: Any, sampled: Any) -> None:
    """What a memory takes is what is sent: roundings do not add up between the two."""
    found = run(method, rounds=120, lr=0.05, participation=sampled, memory=Memory(dtype=torch.bfloat16)).state
    away = float((found.memory.float().mean(0) - found.estimate).norm())
    assert away < 1e-4 * float(found.estimate.norm())


@pytest.mark.slow
def test_forgetting_wears_rounded_memories_down() -> None:
    """Rounded to the nearest, a step of a thousandth would never move a bfloat16."""
    method = Clip21(1e-6, decay=0.001)
    start = torch.ones(len(problem("batchnorm").x0))
    kept = run(
        method, rounds=500, lr=0.0, memory=Memory(initial=start, dtype=torch.bfloat16), participation=FixedSize(1)
    ).state.memory
    assert float(kept.float().mean()) == pytest.approx(0.999**500, rel=0.02)


def test_private_runs_keep_exact_memories() -> None:
    with pytest.raises(UsageError, match="private runs keep their memories"):
        train(
            problem("linear"),
            NormEC(0.1, 0.3),
            lr=0.1,
            rounds=2,
            privacy=Privacy(8.0, trust="local"),
            memory=Memory(dtype=torch.bfloat16),
        )
