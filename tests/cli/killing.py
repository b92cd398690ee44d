"""Commands that are killed (`tests.support.kills`): ``python -m tests.cli.killing FOLDER ARGUMENTS``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from normec.cli import app

from ..support.kills import end_everywhere


def main(folder: Path, arguments: Sequence[str]) -> None:
    def run(out: Path) -> None:
        code = app.run([*arguments, "--out", str(out)])
        assert code == 0, f"the command ends with exit code {code}"

    run(folder.parent / "whole")  # it also makes the imports of functions
    end_everywhere(folder, run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
