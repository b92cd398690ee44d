"""Fixtures for tests of fetching: a web server on this machine, and a cache folder for each test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder; /short/… promises more than it sends, /hang/… stops half way and stays until the test ends."""

    def __init__(self, *arguments: Any, over: threading.Event, **named: Any) -> None:
        self.over = over
        super().__init__(*arguments, **named)

    def do_GET(self) -> None:
        if self.path.startswith(("/short/", "/hang/")):
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"x" * 1000)
            self.wfile.flush()
            if self.path.startswith("/hang/"):
                self.over.wait()
        else:
            super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    root = tmp_path / "site"
    root.mkdir()
    over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root), over=over))
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield root, f"http://127.0.0.1:{server.server_address[1]}"
    over.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("NORMEC_DATA", raising=False)
    return tmp_path / "xdg" / "normec"
