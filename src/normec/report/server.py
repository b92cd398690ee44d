"""The live page: a small server for this machine only that lists runs and follows them while they train.

It reads and never writes, answers on 127.0.0.1 to requests that name it so (no other site can reach it through the
browser), and serves no file by its path: runs are found by walking below the root, assets by their names. On Linux it
answers its own user alone, because the files of private runs are readable by their owner alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from ..errors import UsageError
from ..system.connections import available, connection_owner, still_open
from . import document, page, run_page
from .charts import thinned
from .html import e, plain
from .listing import Listing, address
from .run_view import is_run, read_run

ASSETS = {
    "style.css": "text/css; charset=utf-8",
    "plotly.js": "text/javascript; charset=utf-8",
    **dict.fromkeys(
        ("theme.js", "charts.js", "page.js", "sweep.js", "bounds.js", "live.js", "list.js"),
        "text/javascript; charset=utf-8",
    ),
}
SERVED = "/assets/"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


MOST_FIELDS = 1000


class BadQueryError(UsageError):
    """The query of a URL is invalid."""


class Server(ThreadingHTTPServer):
    """Serves the runs below `root` on 127.0.0.1; port 0 takes a free one."""

    daemon_threads = True

    def __init__(self, root: Path, port: int = 0) -> None:
        if not root.is_dir():
            raise UsageError(f"there is no folder {root}")
        self.listing = Listing(root)
        self.knows_owners = sys.platform == "linux" and available()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}; choose another, or 0 for a free one"
            ) from None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "normec", ""

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return self._say(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 only")
        if self.server.knows_owners and not self._from_owner():
            return self._say(HTTPStatus.FORBIDDEN, "this server answers its own user only")
        try:
            self._answer()
        except BadQueryError as error:
            self._say(HTTPStatus.BAD_REQUEST, str(error))
        except UsageError as error:
            self._say(HTTPStatus.NOT_FOUND, str(error))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client closed the connection
        except Exception as error:  # the border between one page and the server
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"this page cannot be made: {type(error).__name__}: {error}")
        return None

    def _from_owner(self) -> bool:
        """Whether the request comes from a process of the same user, or of root."""
        owner = connection_owner(self.client_address, self.connection.getsockname())
        return owner in (0, os.getuid()) and still_open(self.connection.fileno())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing to the terminal."""

    def _answer(self) -> None:
        try:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query, errors="surrogateescape", max_num_fields=MOST_FIELDS)
        except ValueError as error:
            raise BadQueryError(f"the address cannot be read: {error}") from None
        head, _, rest = asked.path.removeprefix("/").partition("/")
        name = unquote(rest, errors="surrogateescape").strip("/") or "."
        match head:
            case "":
                self._send(index(self.server.listing.root).encode(), "text/html; charset=utf-8")
            case "assets" if rest in ASSETS:
                self._asset(rest)
            case "api" if rest == "runs":
                self._json(self._changes(query))
            case "rows":
                self._json(self._rows(name, query))
            case "run":
                self._page(name)
            case "together":
                self._together(query.get("run", []))
            case _:
                self._say(HTTPStatus.NOT_FOUND, "there is no such page")

    def _changes(self, query: dict[str, list[str]]) -> dict[str, object]:
        try:
            return self.server.listing.changes(query.get("since", [None])[0])
        except UsageError as error:
            raise BadQueryError(str(error)) from None

    def _folder(self, name: str) -> Path:
        folder = self.server.listing.folder(name)
        if folder is None:
            raise UsageError(f"there is no run {name}")
        return folder

    def _page(self, name: str) -> None:
        folder = self._folder(name)
        if is_run(folder):
            text = run_page.render(read_run(folder), SERVED, live=f"/rows/{address(name)}")
        else:
            text = page.render(folder, SERVED, link=self._link)
        self._send(text.encode(), "text/html; charset=utf-8")

    def _together(self, names: list[str]) -> None:
        if not names:
            raise BadQueryError("name the runs to show together: /together?run=NAME&run=NAME")
        folders = [self._folder(name) for name in names]
        others = [name for name, folder in zip(names, folders, strict=True) if not is_run(folder)]
        if others:
            raise BadQueryError(f"{others[0]} is not a single run; only runs can be shown together")
        text = page.render_many(folders, self._link, served=SERVED)
        self._send(text.encode(), "text/html; charset=utf-8")

    def _link(self, folder: Path) -> str:
        return "/run/" + address(folder.resolve().relative_to(self.server.listing.root).as_posix())

    def _rows(self, name: str, query: dict[str, list[str]]) -> dict[str, object]:
        """Rows after the first `have`, if the last of those is still of round `last`; else all."""
        have, last = (_whole(key, query.get(key, ["-1"])[0]) for key in ("have", "last"))
        view = read_run(self._folder(name))
        rows = view.history.rows
        goes_on = 0 < have <= len(rows) and rows[have - 1]["round"] == last
        return {
            "status": view.status,
            "headline": run_page.headline(view),
            "cards": [list(fact) for fact in run_page.card_facts(view) if fact[1]],
            "anew": not goes_on,
            "have": len(rows),
            "last": rows[-1]["round"] if rows else -1,
            "rows": rows[have:] if goes_on else thinned(rows),
        }

    def _asset(self, name: str) -> None:
        if name == "plotly.js":
            self._send(document.plotly_compressed(), ASSETS[name], {"Content-Encoding": "gzip"})
        else:
            self._send(document.asset(name).encode(), ASSETS[name])

    def _json(self, value: object) -> None:
        self._send(json.dumps(plain(value), allow_nan=False).encode(), "application/json")

    def _say(self, status: HTTPStatus, text: str) -> None:
        line = "".join(character if character.isprintable() else "\ufffd" for character in text)
        self._send(line.encode(), "text/plain; charset=utf-8", status=status)

    def _send(
        self, body: bytes, kind: str, more: dict[str, str] | None = None, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(body))} | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _whole(name: str, text: str) -> int:
    if re.fullmatch(r"-1|[0-9]{1,18}", text) is None:
        raise BadQueryError(f"{name} must be a whole number, or -1, got {text[:60]!r}")
    return int(text)


def index(root: Path) -> str:
    """The list of runs, which a script fills and updates."""
    sort = e("select", e("option", "by folder", value=""), id="sort")
    tools = e(
        "div",
        e("label", "Find ", e("input", type="search", id="find", autocomplete="off", placeholder="mlp beta=0.1 tag:x")),
        e("label", "Sort ", sort),
        e("button", "Choose all", type="button", class_="small", id="all"),
        e("button", "Compare", type="button", class_="small", id="together", disabled=True),
        e("span", "Reading the runs …", id="state", class_="quiet", role="status"),
        class_="tools",
    )
    columns = e("details", e("summary", "Columns"), e("div", id="columns", class_="tools"), id="choice")
    empty = e(
        "p",
        "No runs here yet. Start one, such as ",
        e("code", "normec train"),
        "; it will appear by itself.",
        id="empty",
        hidden=True,
    )
    table = e("table", e("thead", e("tr", id="heads")), e("tbody", id="runs"), class_="runs")
    lead = e("div", e("h1", f"Runs in {root.name}/"), class_="lead")
    listed = e("div", columns, e("div", table, class_="scroll list"), hidden=True, id="list")
    body = e("div", tools, empty, listed)
    scripts = ("list.js",)
    return document.document("Runs · normec", e("div", lead, body), [], {}, scripts=scripts, served=SERVED)
