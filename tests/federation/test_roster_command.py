"""The commands with which parties make and compare their rosters."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from normec.cli.federation import app
from normec.federation.secure_sum.keys import Identity
from normec.federation.secure_sum.roster import Roster


def test_entries_of_all_parties_are_the_roster(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    entries = []
    for name in names:
        given = ["identity", str(tmp_path / name / "identity.pem"), "--name", name]
        made = CliRunner().invoke(app, given)
        assert made.exit_code == 0
        assert CliRunner().invoke(app, given).stdout == made.stdout  # the key is kept
        entries.append(made.stdout)
    path = tmp_path / "roster.toml"
    path.write_text("\n".join(entries))
    roster = Roster.load(path)
    assert [member.name for member in roster.members] == list(names)
    keys = [Identity.load(tmp_path / name / "identity.pem").public for name in names]
    assert [member.key for member in roster.members] == keys
    shown = json.loads(CliRunner().invoke(app, ["roster", str(path), "--json"]).stdout)
    assert shown["digest"] == roster.digest.hex()
    assert [one["fingerprint"] for one in shown["parties"]] == [member.fingerprint for member in roster.members]
    assert roster.members[0].fingerprint in CliRunner().invoke(app, ["roster", str(path)]).stdout
