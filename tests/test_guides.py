"""The guides run as they are printed, block by block, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorials/own-method.md", "guides/server-step.md"])
def test_every_block_of_a_guide_runs(name: str, tmp_path: Path) -> None:
    program = []
    for language, file, text in BLOCK.findall((DOCS / name).read_text(encoding="utf-8")):
        if file:
            (tmp_path / file).write_text(text)
        elif language == "python":
            program.append(text)
        elif language == "console":
            for line in re.findall(r"^\$ normec (.*)$", text, re.MULTILINE):
                run([sys.executable, "-m", "normec", *shlex.split(line), "--quiet"], tmp_path)
    assert program
    (tmp_path / "guide.py").write_text("\n".join(program))
    run([sys.executable, "guide.py"], tmp_path)
