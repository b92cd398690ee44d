"""Relative links of the pages at the top, of the documentation, publications and benchmarks lead to a file."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(path for name in ("publications", "benchmarks") for path in (ROOT / name).rglob("*.md")),
    ]
)


def links(text: str) -> list[str]:
    """The relative links of a page; code is left out."""
    prose = re.sub(r"^```.*?^```|^ {4,}\S.*?$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return [link for link in LINK.findall(prose) if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*?)\s*$", prose, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", heading).lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link} names no heading"


def test_the_links_that_are_checked() -> None:
    assert links("[a](b.md) `[c](d.md)` ![e](f.png) [g](https://h) [i](j.md#k)") == ["b.md", "f.png", "j.md#k"]
    assert links("```\n[a](b.md)\n```\n\n    [c](d.md)\n") == []
    assert anchors("# One: two\n## β ≈ 0.1 is\n") == {"one-two", "β--01-is"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_tests_that_the_documentation_names_exist(page: Path) -> None:
    for file, _, function in re.findall(
        r"(?<![\w/])((?:\w+/)*test_\w+\.py)(::(\w+))?", page.read_text(encoding="utf-8")
    ):
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / file
        assert path.is_file(), f"there is no {path.relative_to(ROOT)}"
        assert not function or f"def {function}(" in path.read_text(encoding="utf-8"), f"{file} has no {function}"
