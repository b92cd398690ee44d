"""normec ui: a page on this machine that lists runs and follows them while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ui(
    folder: Annotated[Path, typer.Argument(help="Where the runs are.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> int:
    """Watch runs in a browser: this machine only, nothing is written; Ctrl-C ends it."""
    from ..report.server import Server

    with Server(folder, port) as server:
        print(f"watching {folder} on {server.address} (Ctrl-C ends it)", flush=True)
        if open_:
            import webbrowser

            webbrowser.open(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
    return 0
