"""The HTML document around the sections: one self-contained file, or a live page whose assets are served.

A page carries its own policy: only the scripts written here may run (by their hashes), and nothing may be fetched. So
the contents of a run's files can be shown but never executed. The plotting library (plotly.js, MIT) is inside,
compressed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from .. import __version__
from .html import Html, data_block, e, join

PLOTLY = "plotly-cartesian-4.1.1.min.js.gz"
SCRIPTS = ("theme.js", "charts.js", "page.js")
STYLES = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"


class Section(NamedTuple):
    """A part of the page with a heading, found in its contents."""

    identifier: str
    title: str
    body: Html

    def html(self) -> Html:
        return e("section", e("h2", self.title), self.body, id=self.identifier)


def cards(facts: Sequence[tuple[str, str, str]]) -> Html:
    """The main results as (name, value, remark)."""
    shown = [
        e("div", e("dt", name), e("dd", value, e("small", word) if word else None), class_="card")
        for name, value, word in facts
        if value
    ]
    return e("dl", shown, class_="cards")


def copyable(text: str, label: str) -> Html:
    """A block of text with a button that copies it."""
    button = e("button", "Copy", type="button", class_="small copy", aria_label=f"Copy {label}")
    return e("div", button, e("pre", e("code", text), tabindex="0", aria_label=label), class_="copyable")


def notes_of(lines: Sequence[str]) -> Html | None:
    return e("ul", [e("li", line) for line in lines], class_="notes") if lines else None


def pill(status: str) -> Html:
    return e("span", status, class_=f"pill {status}")


def tag_mark(tag: str) -> Html:
    return join(" ", e("span", tag, class_="tag", title="tag"))


def document(
    title: str,
    lead: Html,
    sections: Sequence[Section],
    data: dict[str, Any],
    *,
    scripts: Sequence[str] = (),
    served: str | None = None,
) -> str:
    """A whole page. `scripts` run after the common ones; `served` is where a server keeps the assets, if one does."""
    contents = e("nav", [e("a", part.title, href=f"#{part.identifier}") for part in sections], aria_label="Contents")
    bar = e(
        "header",
        e("a", "normec", class_="brand", href="/" if served else "#main", title="all runs" if served else "to the top"),
        contents,
        e("button", "Dark", type="button", id="theme", class_="small", aria_label="Dark colours", aria_pressed="false"),
        class_="bar",
    )
    skip = e("a", "Skip to the content", href="#main", class_="skip")
    foot = e("footer", e("p", f"Written by normec {__version__}. Drawn with plotly.js (MIT)."))
    main = e("main", lead, [part.html() for part in sections], id="main", tabindex="-1")
    body = e("body", skip, bar, main, foot, data_block("data", data), _scripts(scripts, served))
    head = e(
        "head",
        e("meta", charset="utf-8"),
        None if served else e("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        e("meta", name="color-scheme", content="light dark"),
        e("title", title),
        e("link", rel="icon", href="data:,"),
        _link("style.css", served),
        _link("theme.js", served),
    )
    return "<!doctype html>\n" + e("html", head, body, lang="en") + "\n"


def asset(name: str) -> str:
    return _read(name).decode()


@cache
def _read(name: str) -> bytes:
    return (resources.files(__package__) / "assets" / name).read_bytes()


def plotly_compressed() -> bytes:
    return _read(PLOTLY)


def _link(name: str, served: str | None) -> Html:
    if name.endswith(".css"):
        if served:
            return e("link", rel="stylesheet", href=served + name)
        return Html(f"<style>{asset(name)}</style>")
    return e("script", src=served + name) if served else Html(f"<script>{asset(name)}</script>")


def _scripts(more: Sequence[str], served: str | None) -> Html:
    names = [*SCRIPTS[1:], *more]
    if served:
        return join(_link("plotly.js", served), [_link(name, served) for name in names])
    library = Html(f'<script type="text/plain" id="plotly">{_encoded()}</script>')
    return join(library, Html(f"<script>{_joined(tuple(names))}</script>"))


@cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(asset(name) for name in names)


@cache
def _encoded() -> str:
    return base64.b64encode(plotly_compressed()).decode()


@cache
def _hash_of_plotly() -> str:
    return _hash(gzip.decompress(plotly_compressed()))


def _policy(more: Sequence[str]) -> str:
    ours = [asset("theme.js"), _joined((*SCRIPTS[1:], *more))]
    hashes = [_hash_of_plotly(), *(_hash(text.encode()) for text in ours)]
    return f"default-src 'none'; script-src {' '.join(hashes)}; {STYLES}"


def _hash(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
