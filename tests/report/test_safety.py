"""Whatever a run's folder holds is shown as text: in pages, in the list's data and in a terminal."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from normec.cli.output import printable
from normec.privacy import ledger_verification
from normec.report import page
from normec.report.html import e

EVIL = '<script>document.title="taken"</script><img src=x onerror=alert(1)>'
PROMISED = ledger_verification.TERMS  # with other settings than the ledger states a page is refused
STEERING = "\x1b]0;taken\x07\x1b[31m\u202edlrow\x9b2J"


class Tags(HTMLParser):
    """The elements of a page, and its text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1] not in ("script", "style"):
            self.text += data


def poisoned(folder: Path, evil: str) -> Path:
    """A run with `evil` in every string that its files hold, except those that its ledger contradicts."""
    for name in ("summary.json", "checkpoint/latest.json"):
        held = json.loads((folder / name).read_text())
        ledger = {"ledger": held["ledger"]} if "ledger" in held else {}  # else its epsilon would not be shown at all
        (folder / name).write_text(json.dumps({**_replaced(held, evil), **ledger}))
    quoted = json.dumps(evil)
    settings = [line.partition(" = ") for line in (folder / "config.toml").read_text().splitlines()]
    lines = [
        f"{key} = {quoted if value.startswith(chr(34)) and key not in PROMISED else value}"
        for key, _, value in settings
    ]
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    (folder / "clients.json").write_text(json.dumps({"columns": ["client", evil], "rows": [[evil, evil]]}))
    return folder


def _replaced(held: Any, evil: str) -> Any:
    if isinstance(held, dict):
        return {key: value if key in PROMISED else _replaced(value, evil) for key, value in held.items()} | {evil: evil}
    if isinstance(held, list):
        return [_replaced(value, evil) for value in held]
    return evil if isinstance(held, str) else held


@pytest.mark.parametrize("evil", [EVIL, STEERING, EVIL + STEERING + "\x00\r"], ids=["script", "steering", "both"])
def test_no_string_of_a_run_becomes_an_element(evil: str, library: Path, tmp_path: Path) -> None:
    name = os.fsdecode(EVIL.replace("/", "\u2215").encode() + b"\xff")  # a folder's name may not be UTF-8
    folder = poisoned(Path(shutil.copytree(library / "diagnosed", tmp_path / name)), evil)
    sound = Tags((library / "diagnosed" / "report.html").read_text())
    pages = [page.write(folder), page.write_many([folder, library / "plain"], tmp_path / "many.html")]
    for path in pages:
        found = Tags(path.read_text(encoding="utf-8"))
        assert "img" not in found.tags
        assert found.handlers == []
        assert not set(found.text) & set("\x1b\x07\x00\x9b\u202e")
    found = Tags(pages[0].read_text(encoding="utf-8"))
    assert found.tags.count("script") == sound.tags.count("script")
    assert EVIL[:30] in found.text  # it is shown, as text


def test_attributes_are_closed_by_nothing_in_them() -> None:
    assert e("a", "x", href="\"'><b>\x1b") == '<a href="&quot;&#x27;&gt;&lt;b&gt;\ufffd">x</a>'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ‖∇f‖ ε naïve", "plain ‖∇f‖ ε naïve"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r\u2028", "a\\nb\\r\\u2028"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\udcff", "\\udcff"),
    ],
)
def test_a_terminal_shows_control_characters_and_does_not_obey_them(text: str, shown: str) -> None:
    assert printable(text) == shown
    printable(text).encode()  # no half of a surrogate pair is left


def test_the_commands_of_a_federations_page_run_nothing_that_its_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "run'; touch taken; echo '\"$(touch taken)"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "config.toml").write_text("rounds = 3\n")
    (folder / "checkpoint" / "latest.json").write_text(json.dumps({"identity": {"parties": ["a", "b"]}}))
    commands = [line for line in Tags(page.write(folder).read_text()).text.split("Copy") if "flwr run" in line]
    assert len(commands) == 2
    for command, end in zip(commands, ("-again", ""), strict=True):
        words = shlex.split(command.partition("To go on")[0].partition("With all parties")[0])
        assert words[:4] == ["flwr", "run", ".", "-c"]
        assert tomllib.loads(words[4])["out"] == f"{folder}{end}"
        assert len(words) == 5
