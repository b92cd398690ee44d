"""Pages of the site that are not Markdown files below docs/: the API reference, and files that pages link to.

MkDocs calls the functions `on_files` and `on_page_markdown`. The API reference has one page for each public package,
with every name of its `__all__`. A link that leaves docs/ (to a README of benchmarks/, to a module) leads to a copy of
the file below repository/, so that pages are read on the site as in the repository.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COPIES = "repository"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^()\s#]+)(#[^()\s]*)?\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the API reference, and a copy of every file outside of docs/ that some page links to."""
    names = []
    for module, title, text in api_pages():
        names.append({title: f"reference/{module}.md"})
        files.append(File.generated(config, f"reference/{module}.md", content=text))
    _fill(config["nav"], "Python API", names)
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    waiting += [ROOT / path.removeprefix(f"{COPIES}/") for path in _nav_paths(config["nav"]) if path.startswith(COPIES)]
    copied: set[Path] = set()
    while waiting:
        page = waiting.pop()
        if not page.is_relative_to(DOCS):
            if page in copied or not page.is_file():
                continue
            copied.add(page)
            uri = f"{COPIES}/{page.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(page)))
        if page.suffix == ".md":
            waiting += [target for _, target in _targets(page) if not target.is_relative_to(DOCS)]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/, and links of copied pages, to where their targets are on the site."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    source = ROOT / uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else DOCS / uri

    def moved(link: re.Match[str]) -> str:
        start, target, anchor = link[1], link[2], link[3] or ""
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = _resolve(source, target)
        on_site = path.relative_to(DOCS) if path.is_relative_to(DOCS) else Path(COPIES) / path.relative_to(ROOT)
        if path.is_dir():  # a folder without a page of its own has no place on the site
            return f"`{path.relative_to(ROOT).as_posix()}/`"
        return f"{start}{os.path.relpath(on_site, Path(uri).parent)}{anchor})"

    parts = CODE.split(markdown)
    blocks = CODE.findall(markdown)
    prose = [LINK.sub(moved, part) for part in parts]
    return "".join(text for pair in zip(prose, [*blocks, ""], strict=True) for text in pair)


class Doctests(griffe.Extension):
    """Show the section "Example:" of a docstring as code; the parser knows it as "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def api_pages() -> list[tuple[str, str, str]]:
    """The pages of the API reference: for every public package its name, its title and its text."""
    top = ast.parse((ROOT / "src/normec/__init__.py").read_text(encoding="utf-8"))
    packages = ast.literal_eval(_assigned(top, "_PACKAGES") or ast.Tuple([]))
    pages = []
    for module in ("normec", *(f"normec.{name}" for name in packages)):
        folder = ROOT / "src" / module.replace(".", "/")
        source = (folder / "__init__.py").read_text(encoding="utf-8")
        public = _assigned(ast.parse(source), "__all__")  # the package of federations has none: it is a set of commands
        names = sorted(ast.literal_eval(public), key=str.lower) if public else []
        text = [f"# {module}", f"::: {module}\n    options: {{members: [], show_root_heading: false}}"]
        text += [f"::: {module}.{name}" for name in names]
        pages.append((module, module, "\n\n".join(text) + "\n"))
    return pages


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    """The value that a module assigns to `name`; None if it assigns none."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [name]:
            return statement.value
    return None


def _fill(nav: list[Any], title: str, entries: list[Any]) -> None:
    """Replace the entries of the section `title`, at any depth."""
    for item in nav:
        for name, value in item.items() if isinstance(item, dict) else ():
            if name == title:
                item[name] = entries
            elif isinstance(value, list):
                _fill(value, title, entries)


def _nav_paths(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [path for value in (nav.values() if isinstance(nav, dict) else nav) for path in _nav_paths(value)]


def _targets(page: Path) -> list[tuple[str, Path]]:
    prose = CODE.sub("", page.read_text(encoding="utf-8"))
    links = [link for _, link, _ in LINK.findall(prose) if not re.match(r"[a-z]+:", link)]
    return [(link, _resolve(page, link)) for link in links]


def _resolve(page: Path, link: str) -> Path:
    """The file that a link of a page leads to; a folder's README stands for the folder."""
    path = (page.parent / link).resolve()
    return path / "README.md" if (path / "README.md").is_file() else path
