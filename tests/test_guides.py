"""The README and the documentation run as they are printed, page by page, each in an empty folder.

Blocks of the language "python" are one program, and lines "$ normec …" of "console" blocks are run before it. Blocks of
the language "py" are fragments, and indented blocks show commands that need more than this machine has; neither runs.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from .cli.command import completed

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ normec (.*)$", re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """The fenced blocks of a page: the language, the name of a file or nothing, and the text."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def runnable(page: Path) -> bool:
    return any(language == "python" or COMMAND.search(text) for language, _, text in blocks(page))


def elsewhere(page: Path) -> bool:
    """Whether other tests run the page: examples of the theory one by one, notebooks in a kernel if there is one."""
    kernel = all(map(find_spec, ("nbformat", "nbclient", "ipykernel")))
    return page.name == "theory.md" or (kernel and (ROOT / "docs" / "notebooks" / f"{page.stem}.ipynb").exists())


PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if runnable(page) and not elsewhere(page))


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """What a program or a command printed that has ended well."""
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def program(page: Path, folder: Path) -> str:
    """Write the files of a page, and return its Python blocks as one program."""
    found = blocks(page)
    for language, name, text in found:
        if language == "python" and name:
            (folder / name).write_text(text)
    return "\n".join(text for language, name, text in found if language == "python" and not name)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(program(page, tmp_path))
    printed(completed("page.py", cwd=tmp_path))
    for language, _, text in blocks(page):
        for line in COMMAND.findall(text) if language == "console" else ():
            words = shlex.split(line)
            federation = words[:2] == ["federation", "local"]  # which starts processes; they are forked, too
            module = "tests.federation_network.forked_command" if federation else "normec"
            printed(completed("-m", module, *words, cwd=tmp_path))


@pytest.mark.slow
def test_the_readme_reaches_the_accuracy_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "readme.py").write_text(
        program(ROOT / "README.md", tmp_path) + '\nprint(run.history["accuracy"][-1])\n'
    )
    assert float(printed(completed("readme.py", cwd=tmp_path)).split()[-1]) > 0.95


def test_pages_that_run_are_found() -> None:
    names = {str(page.relative_to(ROOT / "docs")) for page in PAGES}
    assert {"index.md", "tutorials/lora.md", "tutorials/from-flower.md", "guides/server-step.md"} <= names


def test_titles_commands_and_fragments(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nx = 1\n```\n\n```py\ny\n```\n\n```python\nz = 2\n```\n')
    assert program(page, tmp_path) == "z = 2\n"
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
    assert runnable(page)
    page.write_text("```py\ny\n```\n\n    normec train\n")
    assert not runnable(page)
    assert COMMAND.findall("$ normec train --rounds 3\nnormec ui\n") == ["train --rounds 3"]
