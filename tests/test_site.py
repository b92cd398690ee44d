"""The documentation site builds without a warning and needs nothing from the network."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import normec

from .support.waiting import LIMIT

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-5000:]
    return out


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    for module in ("normec", *(f"normec.{name}" for name in normec._PACKAGES)):
        text = (site / "reference" / f"{module}.html").read_text(encoding="utf-8")
        names = getattr(importlib.import_module(module), "__all__", ())
        assert [name for name in names if f'id="{module}.{name}"' not in text] == []


@pytest.mark.slow
def test_pages_load_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|link|iframe)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]*)"')
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    found = {page.name: loaded.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: links for name, links in found.items() if links} == {}


@pytest.mark.slow
def test_relative_links_of_the_site_lead_to_a_file(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|//", link) and page.name != "404.html":
                assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"
