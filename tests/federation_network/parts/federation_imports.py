"""What the processes of a federation import before they read their files; `forked_processes` imports it once for all.

The programs that Flower starts from its SuperLink are forked from it too.
"""

import gc
import importlib
import os
import subprocess
from types import SimpleNamespace

from normec.federation.local.superlink import QUIET

from ..forked_processes import RecordedPopen

os.environ.update(QUIET)  # Flower reads it when it is imported
for name in (
    "flwr.clientapp",
    "flwr.supercore.cli.flower_superexec",
    "flwr.superlink.cli.flwr_serverapp",
    "flwr.supernode.fleet_http_connection",
    "normec.cli.app",
    "normec.federation.flower.app",
    "normec.report.page",
):
    importlib.import_module(name)
for name in ("flwr.superlink.cli.flower_superlink", "flwr.supercore.superexec.executor.subprocess_executor"):
    launcher = importlib.import_module(name)
    launcher.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=RecordedPopen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
gc.collect()
gc.freeze()  # else a collection in a child copies the pages of all objects
