"""The command in processes of its own: forked where Python and torch are already loaded, or started from nothing."""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

from ..support.waiting import LIMIT

COMMAND = [sys.executable, "-m", "normec"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIBC = ctypes.CDLL(None)
# Forks a child for each request on its standard input, and answers with the exit code of the child. Most of the time
# of a command would go into its imports; here they are made once, and a small run makes those of functions.
SERVER = """
import json, os, runpy, sys, tempfile
import safetensors.torch, sklearn.datasets, tomli_w
import normec.experiments.compare, normec.experiments.runs, normec.report.page
from normec.__main__ import main
from normec.cli.app import run

answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
with tempfile.TemporaryDirectory() as folder:
    assert run(["train", "--rounds", "1", "--clients", "4", "--quiet", "--out", os.path.join(folder, "run")]) == 0
sys.stdout.flush()
os.dup2(answers, 1)

def serve():
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            return asked
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
    os._exit(0)

asked = serve()
os.chdir(asked["cwd"])
for number, name in enumerate((os.devnull, asked["out"], asked["err"])):
    os.dup2(os.open(name, os.O_WRONLY if number else os.O_RDONLY), number)
sys.argv = asked["arguments"]
if asked["script"]:
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    main()
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


def normec(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return _forked(["normec", *arguments], cwd, script=False)


def python(script: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python script to its end."""
    return _forked([str(script)], cwd, script=True)


def _forked(arguments: list[str], cwd: Path, script: bool) -> subprocess.CompletedProcess[str]:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        asked = {"arguments": arguments, "script": script, "cwd": str(cwd), "out": out.name, "err": err.name}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        assert wait([server.stdout], LIMIT), f"{' '.join(arguments)} does not end"
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, out.read().decode(), err.read().decode())


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start the command from nothing, as a user does."""
    return popen([*COMMAND, *arguments], cwd)


def popen(command: list[str], cwd: Path) -> subprocess.Popen[str]:
    """Start a process with pipes to its three streams; it ends when the tests end, however they end."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_us,
    )


def end_with_us() -> None:
    """Ask the kernel for SIGKILL at the parent's death (prctl 1 is PR_SET_PDEATHSIG; Linux only)."""
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)
