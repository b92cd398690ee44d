"""Write pages about runs, comparisons, sweeps and checks of the theory, each as one file that needs no network."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..system.files import write_atomic
from . import comparison_page, guarantee, run_page, runs_page, sweep_page, theory_page
from .html import Html
from .run_view import is_file, is_run, trusted_run

NAME = "report.html"
Link = Callable[[Path], str]


def kind_of(folder: Path) -> str | None:
    """What a folder holds: "sweep", "comparison", "theory" or "run"; None for anything else."""
    if is_run(folder):
        return "run"
    for kind, mark in (("sweep", "sweep.toml"), ("comparison", comparison_page.FILE), ("theory", theory_page.FILE)):
        if is_file(folder / mark):
            return kind
    return "sweep" if os.path.isdir(folder / "cells") else None  # noqa: PTH112  (Path.is_dir may raise)


def render(folder: Path, served: str | None = None, link: Link | None = None) -> str:
    """The page of a folder that is not a run's; see `run_page` for those."""
    match kind_of(folder):
        case "sweep":
            return sweep_page.render(folder, served, link)
        case "comparison":
            return comparison_page.render(folder, served, link)
        case "theory":
            return theory_page.render(folder, served)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    try:
        inside = sorted(path.name for path in folder.iterdir() if kind_of(path))
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from None
    cure = f"; name what is in it: {', '.join(inside[:5])}{' …' if len(inside) > 5 else ''}" if inside else ""
    raise UsageError(f"{folder} holds no run, comparison, sweep or verification{cure}")


def write(folder: Path, path: Path | None = None) -> Path:
    """Write the page about the contents of a folder, into the folder or to `path`."""
    if is_run(folder):
        return write_run(folder, path=path)
    path = folder / NAME if path is None else path
    return _write(path, render(folder, link=lambda run: runs_page.link_to(run, path)))


def write_run(folder: Path, summary: dict[str, Any] | None = None, path: Path | None = None) -> Path:
    """A run's page, with `summary` in place of its summary.json if that is still to be written."""
    return _write(path or folder / NAME, run_page.render(trusted_run(folder, summary)))


def write_comparison(folder: Path) -> Path:
    return _write(folder / NAME, comparison_page.render(folder))


def write_sweep(folder: Path) -> Path:
    return _write(folder / NAME, sweep_page.render(folder))


def write_many(folders: Sequence[Path], path: Path) -> Path:
    """One page about several runs."""
    command = runs_page.many_command(folders, path)
    return _write(path, render_many(folders, lambda run: runs_page.link_to(run, path), command))


def render_many(folders: Sequence[Path], link: Link, rerun: Html | None = None, served: str | None = None) -> str:
    views = {name: trusted_run(folder) for name, folder in _named(folders).items()}
    if not views:
        raise UsageError("name at least one run")
    links = {name: link(view.folder) for name, view in views.items()}
    return runs_page.render(views, links, title=f"{len(views)} runs", rerun=rerun, served=served)


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """Folders by the shortest parts of their paths that distinguish them."""
    resolved = list(dict.fromkeys(folder.resolve() for folder in folders))
    for length in range(1, max((len(path.parts) for path in resolved), default=1) + 1):
        names = ["/".join(path.parts[-length:]) for path in resolved]
        if len(set(names)) == len(names):
            return dict(zip(names, resolved, strict=True))
    return {str(path): path for path in resolved}


def _write(path: Path, text: str) -> Path:
    # What no noise covers is for whoever runs the simulation, and not for all users of the machine.
    write_atomic(path, text, private=guarantee.WARNED in text)
    return path
