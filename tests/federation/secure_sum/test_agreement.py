"""Rosters and terms: what parties compare before a run, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from normec.errors import UsageError
from normec.federation.secure_sum.roster import Member, Roster
from normec.federation.secure_sum.terms import Terms, least_threshold

from .parties import identities, roster_of, terms_of

ROSTER = roster_of(identities(6))


def test_a_roster_is_read_as_it_was_written(tmp_path: Path) -> None:
    ROSTER.save(tmp_path / "roster.toml")
    again = Roster.load(tmp_path / "roster.toml")
    assert again == ROSTER
    assert again.digest == ROSTER.digest
    assert [again.number(member.key) for member in ROSTER.members] == list(range(6))
    assert ROSTER.members[2].fingerprint in (tmp_path / "roster.toml").read_text()


def test_the_digest_of_a_roster_depends_on_keys_names_and_order() -> None:
    members = ROSTER.members
    renamed = (Member("other", members[0].key), *members[1:])
    rekeyed = (Member(members[0].name, identities(1)[0].public), *members[1:])
    variants = [members, renamed, rekeyed, members[::-1], members[:5]]
    assert len({Roster(variant).digest for variant in variants}) == len(variants)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold tables"),
        ("party = 3", "must hold tables"),
        ("[[party]]\nname = 'a'\n", "a name and a key"),
        ("[[party]]\nname = 'a'\nkey = 'xyz'\n", "64 hexadecimal digits"),
        ("[[party]]\nname = 'a'\nkey = '" + "0" * 64 + "'\n", "3 to 200 parties"),
        ("[[party", "cannot be read as TOML"),
    ],
)
def test_a_file_that_is_no_roster_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "roster.toml").write_text(text)
    with pytest.raises(UsageError, match=says):
        Roster.load(tmp_path / "roster.toml")


def test_a_roster_names_nobody_twice() -> None:
    members = ROSTER.members
    with pytest.raises(UsageError, match="same key"):
        Roster((*members, Member("again", members[0].key)))
    with pytest.raises(UsageError, match="same name"):
        Roster((*members, Member(members[0].name, bytes(32))))
    with pytest.raises(UsageError, match="not in the roster"):
        ROSTER.number(bytes(32))


def test_terms_are_read_as_they_were_written(tmp_path: Path) -> None:
    terms = terms_of(ROSTER, sigma=0.1, weights=(0.3, 0.1, 1 / 3, 1e-9, 5.0, 2.0), plan='{"lr": 0.1}')
    terms.save(tmp_path / "terms.json")
    again = Terms.load(tmp_path / "terms.json")
    assert again == terms
    assert again.digest == terms.digest
    (tmp_path / "terms.json").write_text(json.dumps(json.loads(terms.canonical), indent=2))
    assert Terms.load(tmp_path / "terms.json").digest == terms.digest


def test_every_setting_changes_the_digest_and_is_named() -> None:
    terms = terms_of(ROSTER)
    changes: dict[str, Any] = {
        "run": "other",
        "roster": "00" * 32,
        "threshold": 6,
        "minimum": 6,
        "colluding": 1,
        "sigma": 1.0000000000000002,
        "step": 2.0**-21,
        "dimension": 6,
        "rounds": 101,
        "weights": (1.0,) * 5 + (1.5,),
        "method": "clip21",
        "plan": "lr",
        "modulus_bits": 64,
    }
    assert set(changes) == {field.name for field in dataclasses.fields(terms)} - {"parties"}
    digests = {terms.digest}
    for name, value in changes.items():
        given = {name: value} | ({"minimum": 6} if name == "threshold" else {})
        other = dataclasses.replace(terms, **given)
        digests.add(other.digest)
        assert terms.first_difference(other) == name
    assert len(digests) == 1 + len(changes)
    with pytest.raises(UsageError, match="another roster"):
        terms.check_roster(roster_of(identities(6)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threshold": 4}, "threshold must be a whole number >= 5"),
        ({"threshold": 7}, "at most the number of parties"),
        ({"minimum": 4}, "from 5 to 6"),
        ({"minimum": 7}, "from 5 to 6"),
        ({"colluding": 4, "minimum": 6}, "at most 3 parties may collude"),
        ({"weights": (1.0,)}, "6 positive numbers"),
        ({"weights": (1.0,) * 5 + (float("nan"),)}, "6 positive numbers"),
        ({"sigma": -1.0}, "sigma must be >= 0"),
        ({"sigma": float("nan")}, "sigma must be >= 0"),
        ({"step": 0.0}, "step must be > 0"),
        ({"modulus_bits": 16}, "must be 32 or 64"),
        ({"dimension": 2**24 + 1}, "at most 16777216"),
        ({"run": "a/b"}, "name of a run"),
        ({"plan": "x" * 70_000}, "shorten the plan"),
    ],
)
def test_terms_that_promise_nothing_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        terms_of(ROSTER, **change)


def test_two_quorums_share_more_parties_than_may_collude() -> None:
    for parties in range(3, 201):
        assert 3 * least_threshold(parties) > 2 * parties
        assert 2 * least_threshold(parties) - parties > parties // 3 - (parties % 3 == 0)


def test_the_table_of_the_documentation_states_what_terms_allow() -> None:
    page = (Path(__file__).parents[3] / "docs" / "concepts" / "secure-sum.md").read_text()
    rows = [tuple(map(int, row)) for row in re.findall(r"(?m)^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page)]
    assert len(rows) == 6
    for parties, threshold, drop, collude in rows:
        roster = roster_of(identities(parties))
        assert (least_threshold(parties), parties - threshold) == (threshold, drop)
        terms_of(roster, colluding=collude)
        with pytest.raises(UsageError):
            terms_of(roster, colluding=collude + 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": 1}', "[" * 100_000])
def test_a_text_that_is_no_terms_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Terms.read(text)
