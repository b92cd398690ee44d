"""Run `python -m normec` and the `normec` command. A user's mistake ends with one line and exit code 2."""

from __future__ import annotations

import sys

from .system.processes import exit_with_parent, keep_freed_memory


def main() -> None:
    exit_with_parent()  # before the imports, which take seconds
    try:
        from .cli.app import run
    except ModuleNotFoundError as error:
        print(f"error: the command line needs {error.name}: pip install 'normec[all]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("error: interrupted; the same command continues where it stopped", file=sys.stderr)
        sys.exit(130)
    keep_freed_memory()
    sys.exit(run())


if __name__ == "__main__":
    main()
