"""The list of runs in a real browser: sorting, columns, tags, and the comparison of runs that are chosen in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normec.storage.tags import change_tags

from .conftest import serving

NAMES = "rows => rows.filter(row => !row.hidden).map(row => row.querySelector('a').textContent)"


@pytest.fixture
def address(copied: Path) -> Iterator[str]:
    change_tags(copied / "private", ["baseline", "paper"])
    change_tags(copied / "plain", ["baseline"])
    with serving(copied) as running:
        yield running.address


def opened(look: Any, address: str, **how: Any) -> Any:
    page = look(**how).open(address)
    page.wait_for_selector("html[data-followed]")
    return page


def names(page: Any) -> list[str]:
    return list(page.locator("#runs tr").evaluate_all(NAMES))


def column(page: Any, title: str) -> list[str]:
    """The visible cells below a head; arrows mark the sorted one."""
    heads = page.locator("#heads th").all_text_contents()
    cells = f"rows => rows.filter(row => !row.hidden).map(row => row.cells[{heads.index(title)}].textContent)"
    return list(page.locator("#runs tr").evaluate_all(cells))


@pytest.mark.slow
def test_heads_sort_all_runs_up_down_and_back_into_their_folders(address: str, look: Any) -> None:
    page = opened(look, address)
    before = names(page)
    assert before[0] == "comparison"
    head = page.locator("#heads").get_by_role("button", name="accuracy")
    for order in (sorted, lambda one: sorted(one, reverse=True)):
        head.click()
        found = column(page, "accuracy")
        known = [float(text.removesuffix(" %")) for text in found if text]
        assert len(known) == 18  # every run, those of the folded sweep too
        assert known == order(known)
        assert found[: len(known)] == [text for text in found if text]  # gaps come last
    assert "sweep/cells/beta-0.1-lr-0.5-seed-0" in names(page)
    head.click()
    assert names(page) == before


@pytest.mark.slow
def test_the_newest_run_comes_first_if_asked(address: str, copied: Path, look: Any) -> None:
    page = opened(look, address)
    page.get_by_label("Sort").select_option(label="newest first")
    written = [(copied / name / "config.toml").stat().st_mtime_ns // 10**6 for name in names(page)]
    assert len(written) == 18
    assert written == sorted(written, reverse=True)


@pytest.mark.slow
def test_settings_that_differ_are_columns_and_others_can_be_chosen(address: str, look: Any) -> None:
    page = opened(look, address)
    heads = page.locator("#heads th").all_text_contents()
    assert [name for name in heads if name in ("lr", "α", "β", "decay", "rounds")] == ["lr", "α", "β", "decay"]
    page.locator("#heads").get_by_role("button", name="β", exact=True).click()
    assert next(text for text in column(page, "β") if text) == "0.01"
    page.get_by_text("Columns", exact=True).click()
    page.get_by_label("rounds", exact=True).check()
    page.get_by_label("alpha", exact=True).uncheck()
    heads = page.locator("#heads th").all_text_contents()
    assert "rounds" in heads
    assert "α" not in heads
    assert set(column(page, "rounds")) == {"12"}
    page.reload()  # the choice lasts
    page.wait_for_selector("html[data-followed]")
    assert page.locator("#heads th").all_text_contents() == heads


@pytest.mark.slow
def test_tags_and_settings_find_runs(address: str, copied: Path, look: Any) -> None:
    page = opened(look, address)
    page.get_by_role("button", name="baseline").first.click()
    assert names(page) == ["plain", "private"]
    page.get_by_label("Find").fill("tag:baseline private")
    assert names(page) == ["private"]
    page.get_by_label("Find").fill("beta=0.01 lr=0.5")
    assert names(page) == ["cells/beta-0.01-lr-0.5-seed-0", "cells/beta-0.01-lr-0.5-seed-1"]
    page.get_by_label("Find").fill("tag:new")
    assert names(page) == []
    change_tags(copied / "diagnosed", ["new"])  # the list follows
    page.locator("#runs").get_by_role("link", name="diagnosed").wait_for()
    assert names(page) == ["diagnosed"]


@pytest.mark.slow
def test_any_runs_that_are_chosen_are_compared(address: str, look: Any) -> None:
    page = opened(look, address)
    button = page.locator("#together")
    page.get_by_label("Choose private").check()
    assert button.is_disabled()
    page.get_by_role("button", name="9 runs: show").click()
    page.get_by_label("Choose sweep/cells/beta-0.1-lr-0.5-seed-0").check()
    page.get_by_label("Choose comparison/normec-lr-0.5").check()
    assert button.text_content() == "Compare 3 runs"
    button.click()
    page.wait_for_selector("html[data-drawn]")
    table = page.get_by_role("table", name="Results")
    links = table.get_by_role("link").all_text_contents()
    assert sorted(links) == ["beta-0.1-lr-0.5-seed-0", "normec-lr-0.5", "private"]
    heads = table.locator("th").all_text_contents()
    assert {"lr", "β"} <= set(heads)  # the settings that tell them apart
    assert page.locator(".tag").all_text_contents() == ["baseline", "paper"]


@pytest.mark.slow
def test_all_runs_that_are_shown_can_be_chosen(address: str, look: Any) -> None:
    page = opened(look, address)
    page.get_by_label("Find").fill("tag:baseline")
    page.get_by_role("button", name="Choose all").click()
    assert page.locator("#together").text_content() == "Compare 2 runs"
    page.get_by_role("button", name="Choose none").click()
    assert page.locator("#together").is_disabled()


@pytest.mark.slow
def test_nothing_overlaps_on_a_phone(address: str, look: Any) -> None:
    page = opened(look, address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    overlaps = """rows => rows.filter(row => !row.hidden && row.querySelector('.status')).filter(row => {
        const [name, status] = ['.name a', '.status'].map(part => row.querySelector(part).getBoundingClientRect());
        return name.right > status.left && name.bottom > status.top;
    }).length"""
    assert page.locator("#runs tr").evaluate_all(overlaps) == 0
    assert "β 0.011" in page.locator("tr", has=page.get_by_role("link", name="private", exact=True)).inner_text()
    page.get_by_label("Sort").select_option(label="accuracy, largest first")
    assert names(page)[0] == "comparison/gd-private-false-lr-1.0-lr-1"


@pytest.mark.slow
def test_an_empty_folder_says_so_only_after_it_was_read(tmp_path: Path, look: Any) -> None:
    with serving(tmp_path) as running:
        opened(look, running.address).get_by_text("No runs here yet").wait_for()
