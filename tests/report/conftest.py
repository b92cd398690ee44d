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
    """A page in the browser, and everything about it that should not happen."""

    def __init__(self, browser: Any, **how: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | how))
        self.context.set_default_timeout(1000 * LIMIT)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, where: Path | str) -> Any:
        self.page.goto(where.as_uri() if isinstance(where, Path) else where)
        return self.page

    def drawn(self, where: Path | str) -> Any:
        """Open, and wait for the curves."""
        self.open(where)
        self.page.wait_for_selector("html[data-drawn]")
        return self.page


@pytest.fixture
def look(chromium: Any) -> Iterator[Any]:
    """look(**context settings) → Look; whatever it opened must not have complained."""
    opened: list[Look] = []

    def open_one(**how: Any) -> Look:
        opened.append(Look(chromium, **how))
        return opened[-1]

    yield open_one
    complaints = [line for one in opened for line in one.complaints]
    for one in opened:
        one.context.close()
    assert not complaints
