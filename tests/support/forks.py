"""Python programs in processes that are forked where torch and the command are loaded, not started from nothing.

Most of the time of a small run goes into its imports. A server makes them once, and a small run makes those of
functions; then it forks a process for each program. The ranks of `normec train --processes` and of torchrun, and the
workers of a sweep, are forked from their launcher in the same way: only the call that starts one is another.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from os import pidfd_open
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from .forked_workers import ForkingContext
from .waiting import LIMIT

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
FIRST_USE = (  # what torch, plots and accounts import when they are first used
    "dp_accounting.rdp",
    "matplotlib.backends.backend_agg",
    "scipy.optimize",
    "scipy.signal",
    "torch._dynamo",
)
TORCHRUN = ["-m", "torch.distributed.run"]
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
CANNOT_FLUSH = 120  # Python's exit code


class Fork:
    """A program in a forked process, to be used like `subprocess.Popen` with pipes to its three streams.

    Args:
        words: What follows `python` on a command line: the path of a script or `-m` and a module, and arguments.
        cwd: The folder in which it runs.
    """

    def __init__(self, words: Sequence[str], cwd: Path) -> None:
        inner, pipes = [], []
        for ours_writes in (True, False, False, False):
            read, write = os.pipe()
            inner.append(read if ours_writes else write)
            pipes.append(write if ours_writes else read)
        socket.send_fds(_server(), [json.dumps({"words": list(words), "cwd": str(cwd)}).encode()], inner)
        for end in inner:
            os.close(end)
        self.stdin, self.stdout, self.stderr = (os.fdopen(end, mode) for end, mode in zip(pipes, "wrr", strict=False))
        self._answers = os.fdopen(pipes[3], "rb", buffering=0)
        self.pid = self._answer()
        self.returncode: int | None = None

    def _answer(self) -> int:
        assert wait([self._answers], LIMIT), "the server of forks does not answer"
        return int.from_bytes(self._answers.read(8), "little", signed=True)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None and wait([self._answers], 0):
            self.returncode = self._answer()
        return self.returncode

    def wait(self, timeout: float = LIMIT) -> int:
        """Wait for the end of the process, and return its exit code."""
        assert self.returncode is not None or wait([self._answers], timeout), f"process {self.pid} does not end"
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float = LIMIT) -> tuple[str, str]:
        """End the input, wait for the end of the process, and return what it wrote to its two streams."""
        self.stdin.close()
        texts: dict[int, str] = {}
        streams = (self.stdout, self.stderr)
        readers = [threading.Thread(target=lambda n: texts.update({n: streams[n].read()}), args=(n,)) for n in (0, 1)]
        for reader in readers:
            reader.daemon = True
            reader.start()
        for reader in readers:
            reader.join(timeout)
        self.wait(timeout)
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def end_with_us() -> None:
    """Ask the kernel for SIGKILL at the parent's death (Linux only)."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@functools.cache
def _server() -> socket.socket:
    """Start the server; it ends when our end of the connection is closed, at the latest with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"from {__name__} import serve; serve({theirs.fileno()})"
        command = [sys.executable, "-c", code]
        server = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def serve(descriptor: int) -> None:
    """Fork a process for each request."""
    requests = socket.socket(fileno=descriptor)
    _make_imports()
    children: dict[int, tuple[int, int]] = {}  # by the handle of a process: its number, and where its exit code goes
    while True:
        for ready in wait([requests, *children]):
            if ready in children:
                child, answers = children.pop(ready)
                _tell(answers, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                os.close(answers)
                os.close(ready)
                continue
            text, streams, _, _ = socket.recv_fds(requests, 2**16, 4)
            if not text:
                os._exit(0)
            child = os.fork()
            if child == 0:
                end_with_us()
                requests.close()
                for number, stream in enumerate(streams[:3]):
                    os.dup2(stream, number)
                for stream in streams:
                    os.close(stream)
                asked = json.loads(text)
                os.chdir(asked["cwd"])
                _finish(asked["words"])
            _tell(streams[3], child)
            children[pidfd_open(child)] = child, streams[3]
            for stream in streams[:3]:
                os.close(stream)


def _tell(answers: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(answers, number.to_bytes(8, "little", signed=True))


def _make_imports() -> None:
    import tomli_w  # noqa: F401

    import normec.experiments.compare
    import normec.experiments.runs
    import normec.report.page  # noqa: F401
    from normec.cli.app import run
    from normec.distributed import launch
    from normec.experiments import tasks

    for name in FIRST_USE:
        importlib.import_module(name)
    shown = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with tempfile.TemporaryDirectory() as folder:
        assert run(["train", "--rounds", "1", "--clients", "4", "--quiet", "--out", f"{folder}/run"]) == 0
    sys.stdout.flush()
    os.dup2(shown, 1)
    os.close(shown)
    gc.collect()
    gc.freeze()  # else a collection in a child copies the pages of all objects
    launch.subprocess = SimpleNamespace(Popen=ForkedPopen, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    forking = ForkingContext()
    tasks.get_context = lambda _: forking  # type: ignore[attr-defined]


def _run(words: Sequence[str]) -> None:
    """Run a program as `python WORDS` would."""
    sys.path[0] = str(Path.cwd())
    if words[0] == "-m":
        if list(words[:2]) == TORCHRUN:
            from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

            subprocess_handler.Popen = ForkedPopen  # type: ignore[assignment,misc]
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


class ForkedPopen:
    """`subprocess.Popen` of a Python program, for launchers; its process is forked from the launcher's.

    The words are those of a Python command line, or the name of an installed program that is one. The name of the
    process of a rank is "rank" and its number.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        **_: object,
    ) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            environment = dict(os.environ if env is None else env)
            code = _flushed(_exit_code(lambda: self._be(self.args, environment, stdout, stderr)))
            os._exit(1 if code < 0 else code)  # exit functions are those of the launcher, and are left to it

    @staticmethod
    def _be(
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: int | IO[Any] | None,
        stderr: int | IO[Any] | None,
    ) -> None:
        os.setsid()
        if "RANK" in env:
            LIBC.prctl(PR_SET_NAME, f"rank {env['RANK']}".encode(), 0, 0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        for number, target in ((1, stdout), (2, stderr)):
            if target == subprocess.STDOUT:
                os.dup2(1, number)
            elif target is not None:
                os.dup2(nothing if isinstance(target, int) else target.fileno(), number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(env)
        program = list(args[1:]) if args[0] == sys.executable else [str(shutil.which(args[0])), *args[1:]]
        _run([word for word in program if word != "-u"])

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            handle = pidfd_open(self.pid)
            ended = wait([handle], timeout)
            os.close(handle)
            if not ended:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code


def _finish(words: Sequence[str]) -> NoReturn:
    """Run a program, and end the process as Python does: threads, exit functions, streams, and the exit code.

    Python would then take apart all that the server has imported, on pages of memory that are copied for it: this takes
    ten times as long as the fork.
    """
    code = _exit_code(lambda: _run(words))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    code = _flushed(code)
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _flushed(code: int) -> int:
    """Write what the streams hold, and return the exit code; it is another one if nobody reads them any more."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return CANNOT_FLUSH
    return code


def _exit_code(program: Callable[[], None]) -> int:
    """Run a program, and return the exit code with which Python would end; −SIGINT if it would end by that signal."""
    code: object = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    return code or 0
