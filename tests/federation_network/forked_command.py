"""`normec federation local` with forked processes: `python -m tests.federation_network.forked_command ARGUMENTS`."""

from __future__ import annotations

import sys

from normec.cli.app import run
from normec.federation.local import federation

from .forked_processes import ForkedProcesses
from .parts import federation_imports  # noqa: F401


def main() -> int:
    federation.Processes = ForkedProcesses  # type: ignore[misc]
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
