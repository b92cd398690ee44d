"""Write tutorials as Jupyter notebooks into docs/notebooks: `python docs/make_notebooks.py`.

A notebook holds the text of its page and runs what the page shows. A block of Python is a code cell. A block with the
title of a file writes that file. A block of commands is a cell of bash that ends at the first command that fails. All
other text, fragments of code included, is Markdown.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode, v4

DOCS = Path(__file__).resolve().parent
TUTORIALS = ("first-model", "own-method")
BLOCK = re.compile(r'^```(?P<language>python|console)(?: title="(?P<file>\S+)")?\n(?P<text>.*?)^```$', re.M | re.S)
ABOUT = re.compile(r"^This page is also a \[notebook\]\([^)]*\)\.\n\n", re.M)
SIBLING = re.compile(r"(\]\()([\w-]+\.md)")


def notebook(page: Path) -> NotebookNode:
    """Return a tutorial as a notebook without outputs."""
    text = ABOUT.sub("", page.read_text(encoding="utf-8"))
    cells, end = [], 0
    for block in BLOCK.finditer(text):
        cells.append(_markdown(text[end : block.start()]))
        cells.append(v4.new_code_cell(_code(block["language"], block["file"], block["text"])))
        end = block.end()
    cells.append(_markdown(text[end:]))
    made = v4.new_notebook(cells=[cell for cell in cells if cell.source])
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # random ids would change the file every time
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.validate(made)
    return made


def written(page: Path) -> str:
    """Return the text of the notebook's file."""
    return nbformat.writes(notebook(page)) + "\n"


def _code(language: str, file: str | None, text: str) -> str:
    text = text.rstrip("\n")
    if language == "console":
        return "%%bash -e\n" + "\n".join(line.removeprefix("$ ") for line in text.splitlines())
    return f"%%writefile {file}\n{text}" if file else text


def _markdown(text: str) -> NotebookNode:
    """A cell of text; links to pages beside the tutorial lead to their folder."""
    return v4.new_markdown_cell(SIBLING.sub(r"\1../tutorials/\2", text).strip("\n"))


if __name__ == "__main__":
    for name in TUTORIALS:
        (DOCS / "notebooks" / f"{name}.ipynb").write_text(written(DOCS / "tutorials" / f"{name}.md"), encoding="utf-8")
