"""Real runs, a comparison and a sweep on disk, made once, and a real browser to look at their pages."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from normec.errors import Diverged
from normec.experiments import compare, runs
from normec.report import page
from normec.report.server import Server
from normec.settings import make
from normec.training.callbacks import Callback

from ..support.waiting import LIMIT

SMALL: dict[str, Any] = {"data": "digits", "clients": 10, "rounds": 12, "evaluate_every": 3}
GRID = {"beta": (0.01, 0.1), "lr": (0.05, 0.5)}


def run(folder: Path, **settings: Any) -> Path:
    """A run in `folder`; one that diverges is left as it ended."""
    try:
        runs.execute(make({**SMALL, **settings}), folder)
    except Diverged:
        assert settings.get("lr", 0) > 1e10
    return folder


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/ with private (and diagnosed), plain, diverged, comparison and sweep. Tests that change it copy it first."""
    root = tmp_path_factory.mktemp("library") / "runs"
    run(root / "private")
    run(root / "diagnosed", diagnostics=True)
    run(root / "plain", private=False)
    run(root / "diverged", private=False, method="gd", model="mlp", lr=1e20)
    names, shared = ["normec", "dpsgd-clip:tau=0.5", "gd:private=false,lr=1.0"], {**SMALL, "diagnostics": True}
    entries = compare.candidates(names, shared, [0.05, 0.5])
    compare.write(compare.run(entries, root / "comparison", lambda _: Callback()), root / "comparison")
    for beta in GRID["beta"]:
        for lr in GRID["lr"]:
            for seed in (0, 1):
                name = f"beta-{beta}-lr-{lr}-seed-{seed}"
                run(root / "sweep" / "cells" / name, beta=beta, lr=lr, seed=seed, validation=0.2, diagnostics=True)
    run(root / "sweep" / "cells" / "broken", private=False, method="gd", model="mlp", lr=1e20, validation=0.2)
    grid = "\n".join(f"{key} = {list(values)}" for key, values in GRID.items())
    (root / "sweep" / "sweep.toml").write_text(f'by = "validation_accuracy"\nseeds = 2\n[grid]\n{grid}\n')
    page.write_sweep(root / "sweep")
    return root


@pytest.fixture
def copied(library: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(library, tmp_path / "runs"))


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    """A server of the live page of a folder, in a thread of its own."""
    with Server(root) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    found = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip("no Chromium on this machine: install one, or set CHROMIUM to its path")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=quiet)
        yield browser
        browser.close()


class Look:
    """A page in the browser, and everything about it that should not happen.

    Args:
        page: An empty page, in a context of its own.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._heard = {
            "console": lambda message: self.complaints.append(f"{message.type}: {message.text}"),
            "pageerror": lambda error: self.complaints.append(f"error: {error}"),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, hear in self._heard.items():
            self.page.on(event, hear)

    def leave(self) -> bool:
        """Make the page as if it were new; returns whether it can be used again, as when it only opened files."""
        for event, hear in self._heard.items():
            self.page.remove_listener(event, hear)
        if self.complaints or not self.requests or not all(url.startswith("file:") for url in self.requests):
            return False
        self.page.evaluate("localStorage.clear(), sessionStorage.clear()")
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")
        return True

    def open(self, where: Path | str) -> Any:
        self.page.goto(where.as_uri() if isinstance(where, Path) else where)
        return self.page

    def drawn(self, where: Path | str) -> Any:
        """Open, and wait for the curves."""
        self.open(where)
        self.page.wait_for_selector("html[data-drawn]")
        return self.page


class EmptyPages:
    """Empty pages by the settings of their contexts. Where one was drawn, the next takes a third of the time."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._left: dict[str, Any] = {}

    def take(self, how: dict[str, Any]) -> Any:
        page = self._left.pop(repr(how), None)
        if page is None:
            context = self._browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | how))
            context.set_default_timeout(1000 * LIMIT)
            page = context.new_page()
        return page

    def put_back(self, how: dict[str, Any], page: Any) -> None:
        """Keep it, and close all but two: the process of each takes memory."""
        self._left[repr(how)] = page
        while len(self._left) > 2:
            self._left.pop(next(iter(self._left))).context.close()


@pytest.fixture(scope="session")
def empty_pages(chromium: Any) -> EmptyPages:
    return EmptyPages(chromium)


@pytest.fixture
def look(empty_pages: EmptyPages, request: pytest.FixtureRequest) -> Iterator[Any]:
    """look(**context settings) → Look; whatever it opened must not have complained."""
    opened: list[tuple[Look, dict[str, Any]]] = []

    def open_one(**how: Any) -> Look:
        opened.append((Look(empty_pages.take(how)), how))
        return opened[-1][0]

    failed = request.session.testsfailed
    yield open_one
    complaints = [line for one, _ in opened for line in one.complaints]
    for one, how in opened:
        if request.session.testsfailed == failed and one.leave():
            empty_pages.put_back(how, one.page)
        else:
            one.page.context.close()
    assert not complaints
