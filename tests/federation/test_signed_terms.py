"""The file of terms that all parties sign: keys of OpenSSH, changes after a signature, and the app's code."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

pytest.importorskip("flwr.app")

from flwr.app import Message, Metadata

from normec import UsageError
from normec.cli.app import run
from normec.federation.flower.app import _agreed, _Parties
from normec.federation.flower.doctor import would_cost
from normec.federation.flower.new_terms import new_terms, parse_parties
from normec.federation.flower.party_file import load_party_file
from normec.federation.flower.records import to_records
from normec.federation.flower.scaffold import write_app
from normec.federation.flower.signed_terms import SignedTerms, agreed_by_all, digest_of_app
from normec.federation.flower.supernode import load_task, read_private_key
from normec.federation.protocol.account import PartyAccount
from normec.federation.protocol.departure import departures
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.price import priced
from normec.federation.protocol.wire import Refusal, SumRequest, octets, to_fields
from normec.privacy.accounting import epsilon_of

from .party_files import forget_app, make_ssh_key

NAMES = ("north", "south", "east")
SETTINGS: dict[str, Any] = {
    "rounds": 10,
    "epsilon": 2.0,
    "unit": "record",
    "record_clip": 1.0,
    "records": "200,300,100",
}
TABLE = 'target = "ill"\nclasses = [0, 1]\n[inputs]\nage = {low = 20, high = 90}\nsex = {categories = ["f", "m"]}\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app for tables, keys of three parties, and the terms of a run that nobody has signed yet."""
    folder = tmp_path_factory.mktemp("terms")
    (folder / "table.toml").write_text(TABLE)
    write_app(folder / "app", schema=folder / "table.toml")
    for name in NAMES:
        make_ssh_key(folder / name)
    forget_app()
    new_terms(folder / "app", {name: folder / f"{name}.pub" for name in NAMES}, SETTINGS).save(folder / "terms.json")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "here")
    return tmp_path / "here"


def signed(folder: Path, names: tuple[str, ...] = NAMES) -> SignedTerms:
    terms = SignedTerms.load(folder / "terms.json")
    for name in names:
        terms = terms.sign(read_private_key(folder / name))
    terms.save(folder / "terms.json")
    return SignedTerms.load(folder / "terms.json")


def test_terms_state_what_each_party_is_asked(folder: Path) -> None:
    terms = SignedTerms.load(folder / "terms.json")
    noises = [one.agreed.privacy.sigma for one in terms.parties]
    divisors = [one.agreed.plan.records.divisor for one in terms.parties if one.agreed.plan.records is not None]
    assert divisors == [200, 300, 100]
    # The noise of a party is in proportion to what one of its records can change, 1/divisor.
    assert noises[0] * 200 == pytest.approx(noises[1] * 300) == pytest.approx(noises[2] * 100)
    assert [one.agreed.index for one in terms.parties] == [0, 1, 2]
    assert terms.parties[0].agreed.parameters == 2 * 2 + 2


def test_a_run_with_secure_sums_has_no_terms_of_single_messages(folder: Path) -> None:
    keys = {name: folder / f"{name}.pub" for name in NAMES}
    with pytest.raises(UsageError, match="these terms are for single messages"):
        new_terms(folder / "app", keys, {**SETTINGS, "trust": "secure-sum"})


def test_a_party_with_signed_terms_takes_part_in_no_secure_sum(folder: Path) -> None:
    signed(folder)
    policy = folder / "policy.toml"
    policy.write_text('runs = ["any"]\ntrusts = ["local", "secure-sum"]\nepsilon = 8.0\n')
    config = {"folder": str(folder / "party"), "policy": str(policy), "key": str(folder / "north")}
    request = SumRequest("app~0123456789abcdef", "north", 0, "roster", octets(b"roster"))
    metadata = Metadata(1, "0", 0, 1, "", "", 0.0, 3600.0, "train")
    message = Message(content=to_records(to_fields(request)), metadata=metadata)
    parties = _Parties(load_task(folder / "app"))
    answer = parties.answer({**config, "terms": str(folder / "terms.json")}, message)
    assert isinstance(answer, Refusal)
    journal = (folder / "party" / "events.jsonl").read_text(encoding="utf-8")
    assert "are those of single messages" in journal


def test_all_must_sign(folder: Path) -> None:
    partly = signed(folder, NAMES[:2])
    assert partly.state() == {"north": "signed", "south": "signed", "east": "missing"}
    with pytest.raises(UsageError, match="east has not signed the terms of run app"):
        agreed_by_all(folder / "terms.json", folder / "north", folder / "app")
    signed(folder, NAMES[2:])
    agreed = agreed_by_all(folder / "terms.json", folder / "south", folder / "app")
    assert agreed["app"].index == 1
    (folder / "all").mkdir()
    shutil.copy(folder / "terms.json", folder / "all" / "first.json")
    assert agreed_by_all(folder / "all", folder / "south", folder / "app") == agreed
    shutil.copy(folder / "terms.json", folder / "all" / "second.json")
    with pytest.raises(UsageError, match="two files of terms of run app"):
        agreed_by_all(folder / "all", folder / "south", folder / "app")


@pytest.mark.parametrize("change", ["rounds", "sigma", "settings", "app"])
def test_a_change_makes_every_signature_wrong(folder: Path, change: str) -> None:
    signed(folder)
    whole = json.loads((folder / "terms.json").read_text())
    terms = whole["terms"]
    if change == "rounds":
        for party in terms["parties"]:
            party["agreed"]["plan"]["rounds"] = 11
    elif change == "sigma":
        terms["parties"][1]["agreed"]["privacy"]["sigma"] *= 0.99
    elif change == "settings":
        terms["settings"]["epsilon"] = 3.0
    else:
        terms[change] = terms[change][::-1]
    (folder / "terms.json").write_text(json.dumps(whole))
    assert set(SignedTerms.load(folder / "terms.json").state().values()) == {"wrong"}
    assert run(["federation", "terms", "verify", str(folder / "terms.json")]) == 1


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Change the terms, and return why they cannot be read."""
    whole = json.loads((folder / "terms.json").read_text())
    change(whole["terms"])
    (folder / "terms.json").write_text(json.dumps(whole))
    with pytest.raises(UsageError) as error:
        SignedTerms.load(folder / "terms.json")
    assert str(error.value).isprintable()
    return str(error.value)


def test_nobody_signs_in_the_name_of_another_party(folder: Path) -> None:
    """A second entry of the same name, with another key, would take the place of the first one's missing signature."""
    terms = SignedTerms.load(folder / "terms.json")
    north, south, east = terms.parties
    forged = replace(terms, parties=(north, south, replace(east, name="south")))
    for name in ("north", "east"):
        forged = forged.sign(read_private_key(folder / name))
    forged.save(folder / "terms.json")
    with pytest.raises(UsageError, match="every party needs a name and a key of its own"):
        agreed_by_all(folder / "terms.json", folder / "north", folder / "app")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "order": (lambda terms: terms["parties"].reverse(), "are not those of party 0"),
    "run": (lambda terms: terms.update(run="other"), "are not those of party 0"),
    "no parties": (lambda terms: terms["parties"].clear(), "every party needs a name"),
    "fewer parties": (lambda terms: terms["parties"].pop(), "are not those of party 0"),
    "a key twice": (lambda terms: terms["parties"][2].update(key=terms["parties"][1]["key"]), "a key of its own"),
    "half of a character in a key": (
        lambda terms: terms["parties"][0].update(key="\ud800"),
        "the key of north is not a public key",
    ),
    "rounds of one": (
        lambda terms: terms["parties"][1]["agreed"]["plan"].update(rounds=10**6),
        "north and south differ: plan.rounds is 10 and 1000000",
    ),
    "trust of one": (
        lambda terms: terms["parties"][2]["agreed"]["privacy"].update(trust="central"),
        "north and east differ: privacy.trust is 'local' and 'central'",
    ),
    "a name for the terminal": (lambda terms: terms["parties"][1].update(name="\x1b[2Jsouth"), "a name must be"),
    "a huge model": (lambda terms: terms["parties"][0]["agreed"].update(parameters=10**15), "a model has 1 to"),
    "a word as noise": (lambda terms: terms["parties"][0]["agreed"]["privacy"].update(sigma="1"), "cannot be read"),
    "negative noise": (lambda terms: terms["parties"][0]["agreed"]["privacy"].update(sigma=-1.0), "cannot be read"),
    "no number as noise": (
        lambda terms: terms["parties"][0]["agreed"].update(sigmas=[float("nan")] * 10),
        "noise that changes by round",
    ),
    "no number in a setting": (lambda terms: terms["settings"].update(lr=float("nan")), "is no file of terms"),
    "a word as precision": (lambda terms: terms["parties"][0]["agreed"].update(dtype="9" * 5000), "a model has 1 to"),
    "a word as target": (lambda terms: terms["settings"].update(epsilon="small"), "epsilon"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_terms_that_a_person_would_misread_are_refused(folder: Path, name: str) -> None:
    change, message = CHANGES[name]
    assert message in changed(folder, change)


def test_an_error_in_terms_names_the_file_once(folder: Path) -> None:
    path = folder / "terms.json"
    whole = path.read_text()
    newer = f"{path}: the terms have format 2, this version reads 1; update normec"
    assert changed(folder, lambda terms: terms.update(format=2)) == newer
    path.write_text(whole)
    huge = changed(folder, lambda terms: terms["parties"][0]["agreed"].update(parameters=10**15))
    assert huge.startswith(f"{path}: the terms of a party cannot be read: a model has 1 to")


def test_a_signature_counts_for_its_own_party_only(folder: Path) -> None:
    signed(folder)
    whole = json.loads((folder / "terms.json").read_text())
    whole["signatures"]["north"] = whole["signatures"]["south"]
    (folder / "terms.json").write_text(json.dumps(whole))
    assert SignedTerms.load(folder / "terms.json").state()["north"] == "wrong"
    whole["terms"]["more"] = 1
    (folder / "terms.json").write_text(json.dumps(whole))
    with pytest.raises(UsageError, match="contains entries that no terms have"):
        SignedTerms.load(folder / "terms.json")


def test_a_stranger_cannot_sign(folder: Path) -> None:
    make_ssh_key(folder / "west")
    with pytest.raises(UsageError, match="belongs to none of the parties of run app"):
        SignedTerms.load(folder / "terms.json").sign(read_private_key(folder / "west"))


def test_another_copy_of_the_app_is_refused(folder: Path) -> None:
    signed(folder)
    before = digest_of_app(folder / "app")
    (folder / "app" / "party.toml").write_text("# the party's own")
    (folder / "app" / "policy.toml").write_text("# the party's own")
    assert digest_of_app(folder / "app") == before
    with (folder / "app" / "table.toml").open("a") as table:
        table.write("# another range\n")
    with pytest.raises(UsageError, match="differs from that of the terms"):
        agreed_by_all(folder / "terms.json", folder / "north", folder / "app")


def test_compiled_files_are_part_of_the_app(folder: Path) -> None:
    before = digest_of_app(folder / "app")
    for name in (f"task{EXTENSION_SUFFIXES[0]}", "more.pyc"):
        (folder / "app" / "learning" / name).write_bytes(b"code")
        assert digest_of_app(folder / "app") != before
        (folder / "app" / "learning" / name).unlink()


def test_an_app_with_a_link_to_a_folder_is_refused(folder: Path) -> None:
    """Python imports what lies behind the link, and another code may lie there when the terms are signed."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "__init__.py").write_text("")
    (folder / "app" / "more").symlink_to(folder / "elsewhere")
    with pytest.raises(UsageError, match="more is a link to a folder"):
        digest_of_app(folder / "app")
    (folder / "app" / "more").unlink()
    (folder / "app" / ".venv").symlink_to(folder / "elsewhere")  # nothing is imported from there
    digest_of_app(folder / "app")


def party_file(folder: Path) -> str:
    (folder / "policy.toml").write_text('epsilon = 3.0\nunit = "record"\n')
    (folder / "party.toml").write_text(
        'superlink = "localhost:1"\nroot_certificates = "ca.crt"\nkey = "north"\napp = "app"\nfolder = "state"\n'
        'policy = "policy.toml"\nterms = "terms.json"\n'
    )
    return str(folder / "party.toml")


@pytest.mark.parametrize("command", ["party", "doctor"])
def test_no_code_runs_that_the_terms_do_not_name(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code that has run could replace the function that compares the digests."""
    signed(folder)
    task = folder / "app" / "learning" / "task.py"
    task.write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n{task.read_text()}")
    forget_app()
    assert run(["federation", command, party_file(folder)]) in (1, 2)
    said = capsys.readouterr()
    assert "differs from that of the terms of run app" in said.out + said.err
    assert not (folder / "ran").exists()


def test_the_digest_of_a_party_is_that_of_its_whole_app(folder: Path) -> None:
    """Another pyproject.toml in a folder of the app does not make that folder the app."""
    (folder / "app" / "learning" / "pyproject.toml").write_text("")
    terms = SignedTerms.load(folder / "terms.json")
    replace(terms, app=digest_of_app(folder / "app" / "learning"), signatures={}).save(folder / "terms.json")
    signed(folder)
    forget_app()
    config = load_party_file(Path(party_file(folder))).node_config
    with pytest.raises(UsageError, match="differs from that of the terms of run app"):
        _agreed(config, load_task(folder / "app"))


def test_what_a_run_would_cost_is_never_rounded_down(folder: Path) -> None:
    agreed = SignedTerms.load(folder / "terms.json").parties[0].agreed
    request = agreed.first_request()
    for delta in (1e-5, 7e-6, 5e-6, 3e-6, 1e-6, 1e-7, 1e-8, 1e-9):
        policy = Policy(epsilon=50.0, unit="record", delta=delta)
        found = priced(request, agreed.method.build(policy.methods), delta)
        assert found is not None
        exact = epsilon_of([replace(found[0].most["record"], count=agreed.plan.rounds)], delta)
        shown = re.search(r"from 0 to ([\d.]+) of 50", would_cost(agreed, policy, folder / "none"))
        assert shown is not None
        assert exact * (1 - 1e-8) <= float(shown[1]) <= exact * 1.001


def test_a_run_that_goes_on_costs_only_its_remaining_rounds(folder: Path) -> None:
    """A budget that the whole run just fits must not look too small after an interruption."""
    agreed = SignedTerms.load(folder / "terms.json").parties[0].agreed
    request, policy = agreed.first_request(), Policy(epsilon=2.0, unit="record")
    found = priced(request, agreed.method.build(policy.methods), policy.delta)
    assert found is not None
    (folder / "state").mkdir()
    account = PartyAccount(folder / "state", policy.relation)
    for step in (1, 2, 2, 3):  # one message was sent twice
        account.pay(request, step, found[0].most)
    account.close()
    with pytest.raises(UsageError, match="10 rounds of which 3 are in the ledger, would be refused") as error:
        would_cost(agreed, policy, folder / "state")
    each, delta = found[0].most["record"], policy.delta
    spent, all_of_them = (epsilon_of([replace(each, count=count)], delta) for count in (4, 11))
    shown = re.search(r"from ([\d.]+) to ([\d.]+), above 2", str(error.value))
    assert shown is not None
    assert [float(one) for one in shown.groups()] == pytest.approx([spent, all_of_them], rel=1e-3)
    assert "are in the ledger: ε per record" in would_cost(agreed, Policy(epsilon=2.2, unit="record"), folder / "state")


def test_a_finished_run_is_priced_as_a_new_one(folder: Path) -> None:
    agreed = SignedTerms.load(folder / "terms.json").parties[0].agreed
    request, policy = agreed.first_request(), Policy(epsilon=3.0, unit="record")
    found = priced(request, agreed.method.build(policy.methods), policy.delta)
    assert found is not None
    (folder / "state").mkdir()
    account = PartyAccount(folder / "state", policy.relation)
    for step in range(1, agreed.plan.rounds):
        account.pay(request, step, found[0].most)
    assert "goes from" in would_cost(agreed, policy, folder / "state")
    account.pay(request, agreed.plan.rounds, found[0].most)
    account.close()
    with pytest.raises(UsageError, match="run app, 10 rounds, would be refused"):
        would_cost(agreed, Policy(epsilon=2.5, unit="record"), folder / "state")


def test_nobody_signs_below_a_wrong_signature(folder: Path) -> None:
    signed(folder, ("north",))
    whole = json.loads((folder / "terms.json").read_text())
    whole["terms"]["settings"]["lr"] = 0.123
    (folder / "terms.json").write_text(json.dumps(whole))
    changed = SignedTerms.load(folder / "terms.json")
    with pytest.raises(UsageError, match=r"signature of north .* is wrong.* compare them with the copy of north"):
        changed.sign(read_private_key(folder / "south"))
    assert changed.sign(read_private_key(folder / "north")).state()["north"] == "signed"


def test_a_party_leaves_only_a_run_that_it_knows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a typing mistake the party would believe that it has left, and go on sending."""
    signed(folder)
    file = party_file(folder)
    assert run(["federation", "leave", file, "ap"]) == 2
    assert capsys.readouterr().err == "error: this party knows no run ap; its ledger, terms and policy name app\n"
    assert run(["federation", "leave", file, "app"]) == 0
    assert [*departures(load_party_file(Path(file)).folder)] == ["app"]


def test_what_the_terms_say_about_records_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["federation", "terms", "show", str(folder / "terms.json")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"records \(public\)\W+north: 200, south: 300, east: 100", text)
    assert re.search(r"clip of a record\W+1\b", text)


def test_the_epsilon_that_is_shown_is_that_of_the_noise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings in a file of terms are its author's words: here they speak of 0.01, and one party has half its σ."""

    def exceeds(epsilon: float, mu: float) -> bool:
        normal = NormalDist()
        above = math.exp(epsilon) * normal.cdf(-epsilon / mu - mu / 2)
        return normal.cdf(-epsilon / mu + mu / 2) - above > 1e-5

    whole = json.loads((folder / "terms.json").read_text())
    whole["terms"]["settings"]["epsilon"] = 0.01
    whole["terms"]["parties"][1]["agreed"]["privacy"]["sigma"] /= 2
    (folder / "terms.json").write_text(json.dumps(whole))
    assert run(["federation", "terms", "show", str(folder / "terms.json")]) == 0
    text = capsys.readouterr().out
    shown = re.search(r"ε of all rounds\W+([\d.]+) at δ = 1e-05", text)
    assert shown is not None
    assert "0.01 " not in text
    mu = next(mu for mu in (k / 1e4 for k in range(1, 10**5)) if exceeds(2.0, mu))  # of the noise that was calibrated
    assert exceeds(float(shown[1]) * 0.99, 2 * mu)
    assert not exceeds(float(shown[1]) * 1.01, 2 * mu)
    for one in whole["terms"]["parties"]:  # whoever shows a file need not make room for any model that it names
        one["agreed"]["parameters"] = 2**28
    (folder / "terms.json").write_text(json.dumps(whole))
    assert run(["federation", "terms", "show", str(folder / "terms.json")]) == 0
    assert "give --party" in capsys.readouterr().out


def test_terms_say_that_their_noise_protects_nobody(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for noise in ("secure", "seeded"):
        whole = json.loads((folder / "terms.json").read_text())
        for one in whole["terms"]["parties"]:
            one["agreed"]["privacy"]["noise"] = noise
        (folder / "terms.json").write_text(json.dumps(whole))
        assert run(["federation", "terms", "show", str(folder / "terms.json")]) == 0
        said[noise] = "protects nobody" in capsys.readouterr().out
    assert said == {"secure": False, "seeded": True}


def test_a_file_of_terms_names_no_epsilon_of_a_secure_sum(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That ε depends on how many parties may collude, of which terms of single messages say nothing."""
    whole = json.loads((folder / "terms.json").read_text())
    for one in whole["terms"]["parties"]:
        one["agreed"]["privacy"] |= {"trust": "secure-sum", "unit": "client", "memory": "clean"}
        one["agreed"]["plan"]["records"] = None
    (folder / "terms.json").write_text(json.dumps(whole))
    assert run(["federation", "terms", "show", str(folder / "terms.json")]) == 2
    found = capsys.readouterr()
    assert "single messages" in found.err
    assert "ε" not in found.out


def test_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terms = str(folder / "terms.json")
    for name in NAMES:
        assert run(["federation", "terms", "verify", terms]) == 1
        assert run(["federation", "terms", "sign", terms, "--key", str(folder / name)]) == 0
    assert run(["federation", "terms", "verify", terms, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["complete"]
    assert run(["federation", "terms", "show", terms, "--party", party_file(folder)]) == 0
    assert "ε per record goes from 0 to 2 of 3" in capsys.readouterr().out
    (folder / "policy.toml").write_text('epsilon = 1.0\nunit = "record"\n')
    assert run(["federation", "terms", "show", terms, "--party", str(folder / "party.toml")]) == 2
    assert "would be refused (budget) before its end" in capsys.readouterr().err
    assert run(["federation", "terms", "new", str(folder / "app"), "--party", "a=b", "--out", terms]) == 2
    assert "terms are not changed" in capsys.readouterr().err


def test_the_number_of_parties_is_that_of_the_settings(folder: Path) -> None:
    keys = {name: folder / f"{name}.pub" for name in NAMES}
    with pytest.raises(UsageError, match="parties = 4, got 3 with --party; name every party"):
        new_terms(folder / "app", keys, {**SETTINGS, "parties": 4})


def test_a_public_key_does_not_sign(folder: Path) -> None:
    with pytest.raises(UsageError, match="is a public key; name the private key"):
        read_private_key(folder / "north.pub")


def test_names_and_keys() -> None:
    assert parse_parties(["a=x.pub", "b=y=z.pub"]) == {"a": Path("x.pub"), "b": Path("y=z.pub")}
    for wrong in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(UsageError, match="each name once"):
            parse_parties(wrong)
