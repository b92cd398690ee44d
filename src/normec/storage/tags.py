"""Tags of a run: words by which its owner finds it again, in a file beside its results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import UsageError
from ..system.files import read_json, write_atomic

FILE = "tags.json"
MOST_TAGS = 50
_TAG = re.compile(r"[\w.+-]{1,40}")
_MOST_BYTES = 2**16


def read_tags(folder: Path) -> list[str]:
    """Return the tags of a run in the order they were given; none if it has no file of tags.

    Raises:
        UsageError: The file is not a list of tags.
    """
    try:
        held = read_json(folder / FILE, _MOST_BYTES)
    except FileNotFoundError:
        return []
    if not isinstance(held, list) or len(held) > MOST_TAGS or not all(_is_tag(tag) for tag in held):
        raise UsageError(f"{folder / FILE} is not a list of tags")
    return list(dict.fromkeys(held))


def check_tags(tags: Iterable[str]) -> None:
    """Raise `UsageError` for a tag with other characters than a tag has, or too many tags."""
    given = list(tags)
    for tag in given:
        if not _is_tag(tag):
            raise UsageError(f"a tag has 1 to 40 letters, digits and characters of '_.+-', got {tag!r}")
    if len(given) > MOST_TAGS:
        raise UsageError(f"a run has at most {MOST_TAGS} tags, got {len(given)}")


def change_tags(folder: Path, add: Iterable[str] = (), remove: Iterable[str] = ()) -> list[str]:
    """Add tags to a run, and take tags from it.

    Args:
        folder: The folder of the run.
        add: Tags of letters, digits and the characters "_.+-", of at most 40 characters each.
        remove: Tags that it should no longer have; those that it has not are ignored.

    Returns:
        The tags that the run has now.

    Raises:
        UsageError: A tag has other characters, or there would be too many.
    """
    new, gone = list(add), set(remove)
    check_tags(new)
    tags = [tag for tag in dict.fromkeys([*read_tags(folder), *new]) if tag not in gone]
    check_tags(tags)
    if tags or (folder / FILE).exists():
        write_atomic(folder / FILE, json.dumps(tags, ensure_ascii=False) + "\n")
    return tags


def _is_tag(value: object) -> bool:
    return isinstance(value, str) and _TAG.fullmatch(value) is not None
