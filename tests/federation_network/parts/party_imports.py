"""What a party imports before it reads its files; `forked_parties` imports it once for all parties."""

import importlib
import os

from normec.federation.local.superlink import QUIET

os.environ.update(QUIET)  # Flower reads it when it is imported
for name in (
    "flwr.clientapp",
    "flwr.supernode.fleet_http_connection",
    "normec.cli.app",
    "normec.federation.flower.app",
):
    importlib.import_module(name)
