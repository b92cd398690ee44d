"""Backup and restoration of a party's folder: no restored ledger counts less than what was sent."""

from __future__ import annotations

import math
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm

from normec import Clip21, Privacy, UsageError
from normec.federation.protocol.account import FILE, read_releases
from normec.federation.protocol.backup import back_up, restore
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.wire import Refusal, Reply
from normec.privacy.accounting import Account, Event, mu_for
from normec.privacy.hash_chain import Chain, read_chain

from .faulty_network import DIMENSION, Quadratic
from .hostile import HostileServer, zeros
from .summing_hospitals import OPEN, SummingHospitals


def policy(tmp_path: Path, *, witness: bool = True, **rules: object) -> Policy:
    where = {"witness": str(tmp_path / "witness.head")} if witness else {}
    return Policy.model_validate({"epsilon": 8.0, **where, **rules})


def spend(folder: Path, rules: Policy, messages: int, run: str = "trial") -> HostileServer:
    server = HostileServer(Party(folder, rules, Quadratic(), node="a"), zeros(DIMENSION), run=run)
    for _ in range(messages):
        assert isinstance(server.ask(), Reply)
    return server


def epsilon(folder: Path, rules: Policy, unit: str = "client") -> float:
    return read_releases(folder, rules.witness).epsilon(unit, rules.delta)


def test_a_folder_that_sent_nothing_since_is_restored_whole(tmp_path: Path) -> None:
    rules, folder = policy(tmp_path), tmp_path / "state"
    server = spend(folder, rules, 3)
    before, files = epsilon(folder, rules), sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert back_up(folder, rules, tmp_path / "a.tgz").lines == 4
    shutil.rmtree(folder)
    found = restore(folder, rules, tmp_path / "a.tgz")
    assert (found.lines, found.charged, found.epsilon) == (4, False, before)
    kept = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert set(files) - set(kept) == {".lock"}
    assert isinstance(server.ask(), Reply), "the party goes on from its state"
    assert all(path.stat().st_mode & 0o077 == 0 for path in [folder, *folder.rglob("*")])
    assert (tmp_path / "a.tgz").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["newer messages", "no witness", "witness lost", "witness of another ledger"])
def test_what_may_be_missing_is_refused_or_charged_at_the_budget(tmp_path: Path, kind: str) -> None:
    rules, folder = policy(tmp_path, witness=kind != "no witness"), tmp_path / "state"
    spend(folder, rules, 2)
    back_up(folder, rules, tmp_path / "a.tgz")
    spend(folder, rules, 5, run="later")
    true = epsilon(folder, rules)
    shutil.rmtree(folder)
    if kind == "witness lost":
        (tmp_path / "witness.head").unlink()
    elif kind == "witness of another ledger":
        (tmp_path / "witness.head").write_text('{"lines": 2, "hash": "00"}\n')
    with pytest.raises(UsageError, match=r"with --charge-lost the backup is restored"):
        restore(folder, rules, tmp_path / "a.tgz")
    assert not folder.exists()
    found = restore(folder, rules, tmp_path / "a.tgz", charge_lost=True)
    assert found.charged
    assert true < 8.0 <= found.epsilon < 8.001
    assert epsilon(folder, rules, "record") > epsilon(folder, rules)
    assert not (folder / "runs").exists()
    answer = HostileServer(Party(folder, rules, Quadratic(), node="a"), zeros(DIMENSION)).ask()
    assert isinstance(answer, Refusal)
    assert answer.reason == "budget"
    more = rules.model_copy(update={"epsilon": 20.0})
    assert isinstance(HostileServer(Party(folder, more, Quadratic(), node="a"), zeros(DIMENSION)).ask(), Reply)
    assert epsilon(folder, more) > 8.0


def test_the_charge_covers_the_larger_of_two_budgets(tmp_path: Path) -> None:
    rules, folder = policy(tmp_path), tmp_path / "state"
    spend(folder, rules, 1)
    back_up(folder, rules, tmp_path / "a.tgz")
    spend(folder, rules, 1, run="later")
    shutil.rmtree(folder)
    lower = rules.model_copy(update={"epsilon": 2.0})
    assert restore(folder, lower, tmp_path / "a.tgz", charge_lost=True).epsilon >= 8.0


def test_a_restoration_that_cannot_charge_leaves_no_folder(tmp_path: Path) -> None:
    """Without a witness nothing else would notice that the ledger is an old one."""
    rules, folder = policy(tmp_path, witness=False), tmp_path / "state"
    spend(folder, rules, 1)
    back_up(folder, rules, tmp_path / "a.tgz")
    spend(folder, rules, 1, run="later")
    shutil.rmtree(folder)
    unlimited = Policy.model_validate({"allow_without_noise": True})
    with pytest.raises(UsageError, match="no bound on what was spent"):
        restore(folder, unlimited, tmp_path / "a.tgz", charge_lost=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tgz"]


@pytest.mark.parametrize("kind", ["records", "records at the time of the backup", "records now"])
def test_a_budget_for_records_alone_bounds_nothing(tmp_path: Path, kind: str) -> None:
    """Messages on batches that are drawn gain from sampling, and one ε does not say what they add to later ones."""
    both = {"units": ["client", "record"], "witness": str(tmp_path / "witness.head"), "epsilon": 8.0}
    client, record = (Policy.model_validate({**both, "unit": unit}) for unit in ("client", "record"))
    before, now = {
        "records": (record, record),
        "records at the time of the backup": (record, client),
        "records now": (client, record),
    }[kind]
    folder = tmp_path / "state"
    spend(folder, before, 1)
    back_up(folder, before, tmp_path / "a.tgz")
    spend(folder, now, 1, run="later")
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match="no bound on what was spent: the policy limits records alone"):
        restore(folder, now, tmp_path / "a.tgz", charge_lost=True)
    assert not folder.exists()


def test_one_epsilon_of_drawn_batches_does_not_bound_what_they_add() -> None:
    """The reason for the refusal, in closed form.

    A release that shows a record with probability q < δ has ε = 0 at δ. A Gaussian with ε = 0 at δ takes its place, and
    a later release is added: its ε then belongs to a δ that is almost twice as large.
    """
    delta, q, later = 1e-5, 8e-6, 0.5
    charged = 2 * norm.ppf((1 + delta) / 2)
    epsilon = Account(delta, [Event(1 / charged), Event(1 / later)]).epsilon()
    edge = epsilon / later + later / 2  # the later release is above it with the largest gain
    seen, missed = norm.sf(edge - later), norm.sf(edge)
    assert math.isclose(seen - math.exp(epsilon) * missed, delta, rel_tol=1e-3)
    shown, by_chance = q * norm.sf(50 - 100), norm.sf(50)  # noise of a hundredth of the record's share
    either = seen + shown - seen * shown
    assert either - math.exp(epsilon) * (missed + by_chance) > 1.7 * delta


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("relation", ["zero-out", "replace"])
@pytest.mark.parametrize("delta", [1e-3, 1e-7])
def test_the_charge_covers_what_was_lost_at_every_delta_and_with_later_messages(
    tmp_path: Path, delta: float, relation: str
) -> None:
    """The budget was spent at a δ of its own, and then δ is changed in the policy."""
    rules, folder = policy(tmp_path, delta=delta, relation=relation), tmp_path / "state"
    stated: Any = {"sigma": 2.5, "noise": "secure", "memory": "noisy", "relation": relation, "trust": "local"}
    server = HostileServer(Party(folder, rules, Quadratic(), node="a"), zeros(DIMENSION), privacy=Privacy(**stated))
    server.sigma = 2.5
    assert isinstance(server.ask(), Reply)
    back_up(folder, rules, tmp_path / "a.tgz")
    while isinstance(server.ask(), Reply):
        pass
    lines = read_releases(folder, rules.witness)
    true = {unit: lines.account(unit, 0.5).mu_unamplified for unit in ("client", "record")}
    shutil.rmtree(folder)
    now = rules.model_copy(update={"delta": 1e-5})
    restore(folder, now, tmp_path / "a.tgz", charge_lost=True)
    charged = read_releases(folder, now.witness)
    for unit, mu in true.items():
        assert charged.account(unit, 0.5).mu_unamplified >= mu
    assert charged.account("client", 0.5).mu_unamplified < 1.001 * mu_for(8.0, max(delta, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("since", [0, 1])
def test_a_restored_party_of_a_secure_sum_has_its_memory(tmp_path: Path, since: int) -> None:
    """A memory that begins anew would leave the old one in the server's estimate for good."""
    private = Privacy(epsilon=50.0, trust="secure-sum", noise="secure", honest=2)
    ended = []
    for restored in (False, True):
        home = tmp_path / str(restored)
        run = SummingHospitals(home, Clip21(1.0), 5, private, policy=OPEN.model_copy(update={"epsilon": 100.0}))
        rules, party, archive = run.policies["b"], run.home("b"), home / "a.tgz"
        run.round()
        run.round()
        back_up(party, rules, archive)
        for _ in range(since):
            run.round()
        run.parties["b"].close()
        if restored:
            shutil.rmtree(party)
            assert restore(party, rules, archive, charge_lost=True).charged
            run.policies["b"] = rules.model_copy(update={"epsilon": 1000.0, "accept_loss": True})
        run.restart("b")
        ended.append(run.run())
        run.close()
    assert torch.equal(*ended)


def test_a_backup_in_the_middle_of_a_secure_sum_has_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The party writes a line to the record of the sum before each file that the backup takes.

    A half-written file that was there a moment ago is in place by then.
    """
    rules, folder = policy(tmp_path), tmp_path / "state"
    spend(folder, rules, 1)
    record = folder / "sums" / "trial~0123456789abcdef" / "secure-sum.jsonl"
    record.parent.mkdir(parents=True)
    taken, half = tarfile.TarFile.add, record.with_name("secure-sum.jsonl.head.new")
    with Chain(record) as chain:
        chain.append({"event": "begun"})

        def add(self: tarfile.TarFile, name: Path, *args: Any, **options: Any) -> None:
            chain.append({"event": "keys", "attempt": len(read_chain(record).lines)})
            half.touch()
            if name == half:
                half.unlink()
            taken(self, name, *args, **options)

        monkeypatch.setattr(tarfile.TarFile, "add", add)
        back_up(folder, rules, tmp_path / "a.tgz")
    written = read_chain(record).lines
    shutil.rmtree(folder)
    assert not restore(folder, rules, tmp_path / "a.tgz").charged
    kept = read_chain(record).lines
    assert 1 < len(kept) <= len(written)
    assert kept == written[: len(kept)]


def test_a_ledger_is_never_replaced(tmp_path: Path) -> None:
    rules, folder = policy(tmp_path), tmp_path / "state"
    spend(folder, rules, 1)
    back_up(folder, rules, tmp_path / "a.tgz")
    with pytest.raises(UsageError, match=r"state is not empty, and a ledger is never replaced"):
        restore(folder, rules, tmp_path / "a.tgz", charge_lost=True)
    with pytest.raises(UsageError, match=r"a\.tgz exists"):
        back_up(folder, rules, tmp_path / "a.tgz")
    with pytest.raises(UsageError, match="holds no ledger"):
        back_up(tmp_path / "nowhere", rules, tmp_path / "b.tgz")


@pytest.mark.parametrize("damage", ["not an archive", "another archive", "ledger cut", "ledger changed"])
def test_a_damaged_backup_is_refused(tmp_path: Path, damage: str) -> None:
    rules, folder, archive = policy(tmp_path), tmp_path / "state", tmp_path / "a.tgz"
    spend(folder, rules, 3)
    back_up(folder, rules, archive)
    shutil.rmtree(folder)
    if damage == "not an archive":
        archive.write_bytes(b"nothing")
    else:
        shutil.unpack_archive(archive, tmp_path / "inside", filter="data")
        ledger = tmp_path / "inside" / "folder" / FILE
        text = ledger.read_text()
        if damage == "another archive":
            (tmp_path / "inside" / "backup.json").unlink()
        elif damage == "ledger cut":
            ledger.write_text("".join(text.splitlines(keepends=True)[:-1]))
        else:
            ledger.write_text(text.replace('"count":1', '"count":0', 1))
        archive.unlink()
        with tarfile.open(archive, "w:gz") as whole:
            whole.add(tmp_path / "inside", ".")
    with pytest.raises(UsageError, match=r"damaged|cannot be unpacked|no backup"):
        restore(folder, rules, archive, charge_lost=True)
    assert not folder.exists()
