"""The pages in a real browser: they draw, answer to hand and keyboard, complain of nothing and ask for nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from normec.report import page as pages
from normec.storage.history import History
from normec.system.files import parse_toml

PAGES = ("private", "plain", "diverged", "comparison", "sweep")
TRACES = "plot => plot.data.filter(trace => trace.name !== undefined).map(trace => trace.name)"


def plot(page: Any, chart: str) -> Any:
    return page.locator(f"#chart-{chart} .plot")


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_alone_and_in_silence(name: str, library: Path, look: Any) -> None:
    seen = look()
    page = seen.drawn(library / name / "report.html")
    assert seen.requests == [(library / name / "report.html").as_uri()]  # nothing but the page itself
    drawn = page.locator(".plot .main-svg").count()
    assert drawn >= page.locator(".plot").count() > 2
    assert page.locator("h1").count() == 1
    assert page.title().endswith("normec")


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(("name", "scheme"), [*((name, "light") for name in PAGES), ("sweep", "dark")])
def test_no_page_is_wider_than_a_phone(name: str, scheme: str, library: Path, look: Any) -> None:
    page = look(viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True, is_mobile=True).drawn(
        library / name / "report.html"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("html").get_attribute("data-theme") == scheme


@pytest.mark.slow
def test_hovering_shows_the_measured_values(library: Path, look: Any) -> None:
    page = look().drawn(library / "diagnosed" / "report.html")
    history = History(library / "diagnosed" / "metrics.jsonl")
    history.reread()
    area = plot(page, "grad_norm").locator(".nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
    label = plot(page, "grad_norm").locator(".hoverlayer")
    label.get_by_text("0", exact=True).first.wait_for()
    assert f"{history['grad_norm'][0]:.4g}" in label.text_content()


def test_the_curves_are_the_history(library: Path, look: Any) -> None:
    page = look().drawn(library / "private" / "report.html")
    history = History(library / "private" / "metrics.jsonl")
    history.reread()
    drawn = plot(page, "accuracy").evaluate("plot => [plot.data[0].x, plot.data[0].y].map(one => Array.from(one))")
    assert drawn[0] == history.rounds("accuracy")
    assert drawn[1] == pytest.approx([100 * value for value in history["accuracy"]], rel=1e-5)


@pytest.mark.slow
def test_a_legend_button_hides_a_curve_by_hand_and_by_key(library: Path, look: Any) -> None:
    page = look().drawn(library / "comparison" / "report.html")
    before = plot(page, "loss").evaluate(TRACES)
    assert set(before) == {"normec", "dpsgd-clip:tau=0.5", "gd:private=false,lr=1.0"}
    button = page.get_by_role("button", name="dpsgd-clip:tau=0.5")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    for chart in ("loss", "accuracy"):
        assert "dpsgd-clip:tau=0.5" not in plot(page, chart).evaluate(TRACES)
    button.press("Enter")
    assert plot(page, "loss").evaluate(TRACES) == before


@pytest.mark.slow
def test_scale_and_axis_can_be_chosen(library: Path, look: Any) -> None:
    page = look().drawn(library / "diagnosed" / "report.html")
    kind = "plot => plot.layout.yaxis.type"
    assert plot(page, "loss").evaluate(kind) == "log"
    page.get_by_role("button", name="Loss: logarithmic axis").click()
    assert plot(page, "loss").evaluate(kind) == "linear"
    page.locator("#axis").select_option("epsilon")
    xs = plot(page, "loss").evaluate("plot => Array.from(plot.data[0].x)")
    assert xs[-1] == pytest.approx(8, rel=1e-3)


@pytest.mark.slow
def test_colours_follow_the_system_until_chosen_and_the_choice_lasts(library: Path, look: Any) -> None:
    seen = look(color_scheme="dark")
    page = seen.drawn(library / "private" / "report.html")
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(back)
    page.get_by_role("button", name="Use light colours").click()
    light = page.evaluate(back)
    assert light != dark
    page.reload()
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate(back) == light
    ink = plot(page, "loss").evaluate("plot => plot.layout.font.color")
    assert ink == page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--quiet').trim()")


@pytest.mark.slow
def test_the_keyboard_reaches_every_control(library: Path, look: Any) -> None:
    page = look().drawn(library / "sweep" / "report.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0  # it shows itself
    reached = set()
    for _ in range(160):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "[document.activeElement.id, document.activeElement.className, document.activeElement.textContent]"
                ".join('|')"
            )
        )
        if any("Copy" in one for one in reached):
            break
    for wanted in (
        "theme|",
        "map-metric|",
        "map-x|",
        "map-y|",
        "|draw|",
        "|key|",
        "axis|",
        "small scale",
        "small copy",
    ):
        assert any(wanted in one for one in reached), wanted


@pytest.mark.slow
def test_a_cell_of_the_heat_map_opens_its_run(library: Path, look: Any) -> None:
    page = look().drawn(library / "sweep" / "report.html")
    page.locator("#map-x").select_option("lr")
    page.locator("#map-y").select_option("beta")
    area = page.locator("#heat-map .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    held = page.locator("#heat-map").evaluate("p => [p.data[0].x, p.data[0].y, p.layout.annotations.length]")
    assert held[0] == ["0.05", "0.5", "1e+20"]
    assert held[1] == ["default", "0.01", "0.1"]
    assert held[2] == 5  # four cells with a value in them, and the broken one with its word
    with page.expect_navigation():
        page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.8)  # lr 0.5, beta 0.1
    assert page.url.endswith("/sweep/cells/beta-0.1-lr-0.5-seed-0/report.html")
    page.wait_for_selector("html[data-drawn]")


@pytest.mark.slow
def test_the_frame_marks_the_cell_that_the_criterion_chose_whatever_is_shown(library: Path, look: Any) -> None:
    reached = {}
    for beta in ("0.01", "0.1"):
        for lr in ("0.05", "0.5"):
            folders = [library / f"sweep/cells/beta-{beta}-lr-{lr}-seed-{seed}" for seed in (0, 1)]
            finals = [json.loads((folder / "summary.json").read_text())["final"] for folder in folders]
            reached[lr, beta] = sum(final["validation_accuracy"] for final in finals)
    lr, beta = max(reached, key=reached.__getitem__)
    page = look().drawn(library / "sweep" / "report.html")
    page.locator("#map-x").select_option("lr")
    page.locator("#map-y").select_option("beta")
    for metric in ("accuracy", "validation_accuracy", "loss"):
        page.locator("#map-metric").select_option(metric)
        drawn = page.locator("#heat-map").evaluate("p => [p.data[0].x, p.data[0].y, p.layout.shapes]")
        assert [(one["x0"] + one["x1"], one["y0"] + one["y1"]) for one in drawn[2]] == [
            (2 * drawn[0].index(lr), 2 * drawn[1].index(beta))
        ]


@pytest.mark.slow
def test_the_heat_map_is_a_table_of_links_too(library: Path, look: Any) -> None:
    page = look().drawn(library / "sweep" / "report.html")
    page.get_by_text("The same as a table, with links").press("Enter")
    page.locator("#map-x").select_option("lr")
    page.locator("#map-y").select_option("beta")
    row = page.locator("#heat-table tr").filter(has=page.get_by_role("rowheader", name="0.01", exact=True))
    link = row.get_by_role("link").first  # lr 0.05
    shown = link.text_content()
    page.locator("#map-metric").select_option("loss")
    assert link.text_content() != shown
    page.locator("#map-metric").select_option("epsilon")
    assert link.text_content() == "8"
    link.press("Enter")
    page.wait_for_selector("html[data-drawn]")
    assert page.url.endswith("/beta-0.01-lr-0.05-seed-0/report.html")


@pytest.mark.slow
def test_ticked_cells_are_drawn_with_the_spread_of_their_seeds(library: Path, look: Any) -> None:
    page = look().drawn(library / "sweep" / "report.html")
    while page.locator("input.draw:checked").count():
        page.locator("input.draw:checked").first.uncheck()
    assert plot(page, "loss").evaluate(TRACES) == []
    page.get_by_role("checkbox", name=re.compile("beta 0.1,.* lr 0.5$")).check()
    seeds = []
    for seed in (0, 1):
        history = History(library / f"sweep/cells/beta-0.1-lr-0.5-seed-{seed}/metrics.jsonl")
        history.reread()
        seeds.append(history["loss"][-1])
    low, high, middle = plot(page, "loss").evaluate("plot => plot.data.map(trace => trace.y[trace.y.length - 1])")
    assert middle == pytest.approx(sum(seeds) / 2, rel=1e-4)
    assert high - low == pytest.approx(2 * abs(seeds[0] - seeds[1]) / 2**0.5, rel=1e-3)  # ± one standard deviation


@pytest.mark.slow
def test_tables_sort_by_their_heads(library: Path, look: Any) -> None:
    page = look().drawn(library / "comparison" / "report.html")
    table = page.get_by_role("table", name="Results")
    head = table.get_by_role("button", name="training loss")
    column = table.locator("th").all_text_contents().index("training loss (not covered by the guarantee)")
    values = f"rows => rows.map(row => parseFloat(row.cells[{column}].textContent))"
    for order in (sorted, lambda one: sorted(one, reverse=True)):
        head.click()
        found = table.locator("tbody tr").evaluate_all(values)
        assert found == order(found)
        assert len(set(found)) == 3


@pytest.mark.slow
def test_the_settings_of_the_method_stand_at_the_top(library: Path, look: Any) -> None:
    page = look().drawn(library / "private" / "report.html")
    settings = parse_toml((library / "private" / "config.toml").read_text(), "config.toml")
    top = page.locator("dl.settings")
    shown = dict(zip(top.locator("dt").all_text_contents(), top.locator("dd").all_text_contents(), strict=True))
    for symbol, name in (("α", "alpha"), ("β", "beta"), ("decay", "decay"), ("lr", "lr")):
        assert float(shown[symbol]) == settings[name]
    assert top.bounding_box()["y"] < page.locator("#curves").bounding_box()["y"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 390])
def test_the_cells_of_a_sweep_are_a_table_that_is_not_cut(width: int, library: Path, look: Any) -> None:
    page = look(viewport={"width": width, "height": 900}).drawn(library / "sweep" / "report.html")
    table = page.get_by_role("table", name="Cells")
    box = page.locator(".scroll", has=table)
    hidden = "box => box.scrollWidth - box.clientWidth"
    few = table.locator("th:visible").all_text_contents()
    assert {"status", "runs", "test accuracy", "validation accuracy"} <= set(few)
    if width == 1400:
        assert box.evaluate(hidden) == 0
    page.get_by_label("all numbers").check()
    assert set(few) < set(table.locator("th:visible").all_text_contents())
    box.evaluate("box => box.scrollTo(box.scrollWidth, 0)")  # whatever is wider than the screen can be reached
    last, frame = table.locator("th").last.bounding_box(), box.bounding_box()
    assert last["x"] + last["width"] <= frame["x"] + frame["width"] + 1


@pytest.mark.slow
def test_copying_gives_the_command(library: Path, look: Any) -> None:
    seen = look(permissions=["clipboard-read", "clipboard-write"])
    page = seen.drawn(library / "private" / "report.html")
    page.get_by_role("button", name="Copy the command").click()
    page.get_by_text("Copied").wait_for()
    held = page.evaluate("navigator.clipboard.readText()")
    assert held.startswith("normec train ")
    assert held == page.locator("#rerun code").first.text_content()


def test_nothing_that_a_run_holds_is_run(copied: Path, look: Any) -> None:
    evil = '</script><script>document.title="taken"</script><img src=x onerror="document.title=\'taken\'">'
    folder = copied / "private"
    settings = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(settings.replace('"digits"', f"'''{evil}'''"))
    summary = json.loads((folder / "summary.json").read_text())
    summary["device"] = summary["versions"]["torch"] = evil
    summary["privacy"]["notes"] = [evil]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "clients.json").write_text('{"columns": ["client", "<b>x</b>"], "rows": [[0, "<script>1</script>"]]}')
    page = look().drawn(pages.write_run(folder))
    assert page.title() == "private · normec"
    assert page.locator("img").count() == 0
    for place in (".what", ".cards", "#privacy", "#configuration", "#timing"):
        assert evil in page.locator(place).first.text_content()
    assert page.locator("td", has_text="<script>1</script>").count() == 1
