"""The example as a user starts it, and two hosts in network namespaces with a wire between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ..support.forks import ROOT
from ..support.waiting import LIMIT
from .torchrun import ENVIRONMENT, torchrun_from_nothing


@pytest.mark.slow
def test_the_example_learns_saves_one_state_a_rank_and_leaves_no_thread(tmp_path: Path) -> None:
    """A thread that outlives the process group may ask for the interpreter when there is none any more.

    That aborts a rank which has done well.
    """
    example = str(ROOT / "examples" / "torchrun_cifar.py")
    assert len(Path(example).read_text().splitlines()) <= 60
    flags = ["--data", "digits", "--model", "mlp", "--epochs", "4", "--save", "state"]
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, runpy, sys\n"
        f"sys.argv = {[example, *flags]!r}\n"
        f"runpy.run_path({example!r}, run_name='__main__')\n"
        "pathlib.Path('threads-' + os.environ['RANK']).write_text(str(len(os.listdir('/proc/self/task'))))\n"
    )
    done = torchrun_from_nothing(2, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("epoch 4:")
    assert float(last.rpartition(" ")[2].rstrip("%")) > 60
    for rank in range(2):
        held = torch.load(tmp_path / f"state-{rank}.pt", weights_only=True)
        assert held["optimizer"]["normec"]["rank"] == rank
        assert (tmp_path / f"threads-{rank}").read_text() == "1"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a pair of virtual interfaces: 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"normec-a{os.getpid()}", f"normec-b{os.getpid()}")
    made = []
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
                made.append(name)
            _ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire0", "netns", names[1])
            for number, name in enumerate(names, 1):
                for command in (
                    ["addr", "add", f"10.77.0.{number}/24", "dev", "wire0"],
                    ["link", "set", "wire0", "up"],
                    ["link", "set", "lo", "up"],
                ):
                    _ip("-n", name, *command)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in made:
            _ip("netns", "del", name)


@pytest.mark.slow
def test_two_hosts_make_one_run(two_hosts: tuple[str, str], tmp_path: Path) -> None:
    arguments = ["-m", "normec", "train", "--rounds", "20", "--quiet", "--no-privacy", "--method", "normec"]
    arguments += ["--alpha", "0.1", "--beta", "0.1", "--lr", "0.1"]
    processes = []
    for host, name in enumerate(two_hosts):
        (tmp_path / f"host-{host}").mkdir()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)]
        launcher += ["--nproc-per-node", "1", "--master-addr", "10.77.0.1", "--master-port", "29411"]
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *launcher, *arguments, "--out", "run"],
                cwd=tmp_path / f"host-{host}",
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "wire0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        errors = process.communicate(timeout=LIMIT)[1]
        assert process.returncode == 0, errors[-3000:]
    assert (tmp_path / "host-0" / "run" / "summary.json").exists()
    assert not (tmp_path / "host-1" / "run").exists(), "the first rank's host alone keeps the run"
