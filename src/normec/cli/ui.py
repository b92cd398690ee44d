"""normec ui: a local web page that lists runs and follows them while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import printable


def ui(
    folder: Annotated[Path, typer.Argument(help="Folder of the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 chooses a free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> int:
    """Watch runs in a browser on this machine. Nothing is written; Ctrl-C ends the server."""
    import signal
    import threading

    from ..report.server import Server

    asked = threading.Event()
    with Server(folder, port) as server:
        # A flag and not an exception, which might be raised where it is swallowed, so that the server would not stop.
        before = signal.signal(signal.SIGINT, lambda *_: asked.set())
        serving = threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True)
        serving.start()
        print(f"watching {printable(str(folder))} on {server.address} (Ctrl-C ends it)", flush=True)
        if open_:
            import webbrowser

            webbrowser.open(server.address)
        asked.wait()
        signal.signal(signal.SIGINT, before)
        server.shutdown()
        print()
    return 0
