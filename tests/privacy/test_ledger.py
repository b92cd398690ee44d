"""The ledger: budget, repeated releases, crashes with real processes, locks, tampering."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from normec.errors import UsageError
from normec.privacy import (
    BudgetSpent,
    Event,
    Facts,
    Head,
    Ledger,
    LedgerDamaged,
    LedgerInUse,
    Privacy,
    Sampling,
    Setting,
    gaussian,
    release,
)
from normec.privacy.hash_chain import Chain, read_chain

from ..support.waiting import LIMIT
from ..support.work import calls

fork = multiprocessing.get_context("fork")
TARGET = Privacy(epsilon=8.0, noise="seeded", trust="local")
SECURE = Privacy(epsilon=8.0, noise="secure", trust="local")
EVENT = Event(10.4)  # 300 of them make ε just under 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def opened(path: Path, privacy: Privacy = TARGET, **more) -> Ledger:
    return Ledger(path, privacy, horizon=300, **more)


def test_running_epsilon_and_what_is_written(path: Path) -> None:
    with opened(path) as ledger:
        for k in range(5):
            receipt = ledger.spend(k, EVENT, 10.4)
            assert receipt.epsilon == pytest.approx(gaussian.epsilon(math.sqrt(k + 1) / 10.4, 1e-5), rel=1e-12)
            on_disk = [json.loads(line) for line in path.read_text().splitlines()]
            assert on_disk[-1]["round"] == k
            assert on_disk[-1]["releases"] == k + 1
        assert on_disk[0]["privacy"]["epsilon"] == 8.0
        assert ledger.exact_epsilon() == pytest.approx(ledger.epsilon)
    with opened(path) as again:
        assert (again.releases, again.epsilon) == (5, receipt.epsilon)


def test_the_release_past_the_budget_is_refused_and_not_written(path: Path) -> None:
    with opened(path) as ledger:
        made = 0
        while gaussian.epsilon(math.sqrt(made + 1) / 3.0, 1e-5) <= 8:
            ledger.spend(made, Event(3.0), 3.0)
            made += 1
        with pytest.raises(BudgetSpent, match="above the budget of 8") as caught:
            ledger.spend(made, Event(3.0), 3.0)
        assert caught.value.round == made
        assert caught.value.epsilon > 8 >= ledger.epsilon
        size = path.stat().st_size
        with pytest.raises(BudgetSpent):
            ledger.reserve(made, Event(3.0, count=7), 3.0)
        assert path.stat().st_size == size
        assert ledger.releases == made
        ledger.spend(made, Event(1e6), 1e6)  # a smaller release still fits


@pytest.mark.parametrize("rounds", [1, 300])
def test_a_calibrated_run_fits_to_the_last_round(path: Path, rounds: int) -> None:
    facts = Facts("NormEC", 1.0, True)
    found = release(facts, TARGET, Setting(clients=10, rounds=rounds))
    sigma = found.sigma(8.0, 1e-5)
    with Ledger(path, TARGET, rounds) as ledger:
        for k in range(rounds):
            ledger.spend(k, found.event(sigma, k), sigma)
        assert ledger.epsilon == pytest.approx(8, rel=1e-6)
        with pytest.raises(BudgetSpent):
            ledger.spend(rounds, found.event(sigma, rounds), sigma)


@pytest.mark.slow
def test_a_sampled_run_fits_to_the_last_round(path: Path) -> None:
    privacy = Privacy(epsilon=2.0, trust="central")
    found = release(Facts("NormEC", 1.0, True), privacy, Setting(clients=100, rounds=40, sampling=Sampling(0.1)))
    sigma = found.sigma(2.0, 1e-5)
    shown = []
    with Ledger(path, privacy, 40) as ledger:
        for k in range(40):
            shown.append(ledger.spend(k, found.event(sigma, k), sigma).epsilon)
        assert shown == sorted(shown)
        assert shown[-1] == pytest.approx(2, rel=1e-6)
        with pytest.raises(BudgetSpent):
            ledger.spend(40, found.event(sigma, 40), sigma)


def test_a_repeated_release_with_its_key_is_the_same_release(path: Path) -> None:
    with opened(path) as ledger:
        first = ledger.spend(0, EVENT, 10.4, key="seed 1")
        again = ledger.spend(0, EVENT, 10.4, key="seed 1")
        assert first.fresh
        assert not again.fresh
        assert again.attempt == first.attempt == 0
        assert ledger.releases == 1
    with opened(path) as resumed:
        assert not resumed.spend(0, EVENT, 10.4, key="seed 1").fresh
        assert resumed.releases == 1
        other = resumed.spend(0, EVENT, 10.4, key="seed 2")
        assert other.fresh
        assert other.attempt == 1
        assert resumed.releases == 2
        with pytest.raises(UsageError, match="sigma"):
            resumed.spend(0, Event(5.0), 5.0, key="seed 2")


def test_a_round_that_counts_again_voids_what_was_paid_from_there_on(path: Path) -> None:
    """The run went another way from round 1: the old rounds 1 and 2 will not come again."""
    with opened(path) as ledger:
        for k in range(3):
            ledger.spend(k, EVENT, 10.4, key="one machine")
        assert ledger.spend(1, EVENT, 10.4, key="another").attempt == 1
    with opened(path) as resumed:
        assert not resumed.spend(0, EVENT, 10.4, key="one machine").fresh
        assert not resumed.spend(1, EVENT, 10.4, key="another").fresh
        assert resumed.spend(2, EVENT, 10.4, key="one machine").attempt == 1
        assert resumed.spend(1, EVENT, 10.4, key="one machine").attempt == 2
        assert resumed.releases == 6


def test_fresh_noise_is_counted_again(path: Path) -> None:
    with opened(path, SECURE) as ledger:
        assert [ledger.spend(0, EVENT, 10.4).attempt for _ in range(3)] == [0, 1, 2]
        assert ledger.releases == 3
        with pytest.raises(UsageError, match="is never the same twice"):
            ledger.spend(0, EVENT, 10.4, key="seed 1")


def test_a_reservation_is_paid_up_front(path: Path) -> None:
    with opened(path) as ledger:
        ledger.reserve(0, Event(10.4, count=100), 10.4, key="run")
        size = path.stat().st_size
        assert all(not ledger.spend(k, EVENT, 10.4, key="run").fresh for k in range(100))
        assert path.stat().st_size == size
        assert ledger.releases == 100
        assert ledger.spend(100, EVENT, 10.4, key="run").fresh
    with opened(path) as resumed:  # killed inside: goes on in it, nothing is paid twice
        assert not resumed.reserve(0, Event(10.4, count=100), 10.4, key="run").fresh
        assert not resumed.spend(57, EVENT, 10.4, key="run").fresh
        assert resumed.releases == 101


def test_a_reservation_of_fresh_noise_is_lost_in_a_crash(path: Path) -> None:
    with opened(path, SECURE) as ledger:
        ledger.reserve(0, Event(10.4, count=10), 10.4)
        assert not ledger.spend(0, EVENT, 10.4).fresh
        assert ledger.spend(0, EVENT, 10.4).fresh  # the same round again is another release
        assert ledger.releases == 11
    with opened(path, SECURE) as resumed:
        assert resumed.spend(1, EVENT, 10.4).fresh
        assert resumed.releases == 12


def _run(ledger_path: Path, pipe: int, key: str | None) -> None:
    """Spend, then release, until killed; a release is a line in the pipe, which blocks the writer when it is full."""
    with Ledger(ledger_path, SECURE if key is None else TARGET, horizon=300) as ledger:
        for k in itertools.count():
            receipt = ledger.spend(k, Event(1e4), 1e4, key=key)
            os.write(pipe, f"{k} {receipt.attempt}\n".encode())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("key", [None, "seed 1"])
def test_sigkill_never_under_counts(tmp_path: Path, key: str | None) -> None:
    path = tmp_path / "ledger.jsonl"
    seen: list[str] = []
    for attempt in range(6):
        reader, writer = os.pipe()
        child = fork.Process(target=_run, args=(path, writer, key))
        child.start()
        os.close(writer)
        with os.fdopen(reader) as releases:
            wanted = len(set(seen)) + 3 * attempt + 1  # a kill comes after at least one new release, each time later
            while len(set(seen)) < wanted:
                line = releases.readline()
                assert line, "the child ended by itself"
                seen.append(line)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            seen += releases.readlines()  # what it released before the kill arrived
        made = set(seen)  # the same (round, attempt) again is the same release
        with opened(path, SECURE if key is None else TARGET) as ledger:
            assert ledger.releases >= len(made)
            if key is None:
                assert ledger.releases <= len(seen) + attempt + 1  # at most one paid for nothing a crash
            else:
                assert ledger.releases <= len(made) + 1


def _hold(path: Path, ready, done) -> None:
    with opened(path):
        ready.set()
        done.wait(LIMIT)


def test_two_processes_cannot_spend_from_one_ledger(path: Path) -> None:
    ready, done = fork.Event(), fork.Event()
    child = fork.Process(target=_hold, args=(path, ready, done))
    child.start()
    assert ready.wait(LIMIT)
    with pytest.raises(LedgerInUse, match="another process"):
        opened(path)
    assert read_chain(path).head.lines == 1  # reading is allowed
    done.set()
    child.join()
    opened(path).close()


def _filled(path: Path, rounds: int = 4) -> Head:
    with opened(path) as ledger:
        for k in range(rounds):
            ledger.spend(k, EVENT, 10.4)
        return ledger.head


def test_a_line_torn_at_any_byte_is_dropped_because_nothing_was_released(path: Path) -> None:
    _filled(path)
    whole, side = path.read_bytes(), path.with_name(path.name + ".head")
    before = side.read_bytes()
    with opened(path) as ledger:
        ledger.spend(4, EVENT, 10.4)
    longer = path.read_bytes()
    for cut in range(len(whole) + 1, len(longer)):
        path.write_bytes(longer[:cut])
        side.write_bytes(before)  # the crash came before the head was moved on
        with opened(path) as ledger:
            assert ledger.releases == 4
        assert path.read_bytes() == whole
    path.write_bytes(longer)  # whole, but the head not moved on: kept
    side.write_bytes(before)
    with opened(path) as ledger:
        assert ledger.releases == 5
    path.write_bytes(whole + b"\0" * 100)  # what some file systems leave after a power cut
    side.write_bytes(before)
    with opened(path) as ledger:
        assert ledger.releases == 4


def test_every_changed_byte_is_noticed(path: Path) -> None:
    _filled(path, 2)
    whole = path.read_bytes()
    for position in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises((LedgerDamaged, UsageError)):
            opened(path)
    path.write_bytes(whole)
    opened(path).close()


def test_cut_exchanged_and_missing_lines_are_noticed(path: Path) -> None:
    _filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (
        lines[:-1],
        lines[:1],
        [],
        lines[:2] + lines[3:],
        lines[:2] + lines[:1:-1],
        [*lines, lines[-1]],
        [*lines[:2], b"\n", *lines[2:]],
    ):
        path.write_bytes(b"".join(kept))
        with pytest.raises(LedgerDamaged):
            opened(path)
    path.write_bytes(b"".join(lines)[:-5])  # counted by the head, so this is a cut, not a torn line
    with pytest.raises(LedgerDamaged):
        opened(path)
    path.write_bytes(b"".join(lines))
    side = path.with_name(path.name + ".head")
    kept_head = side.read_bytes()
    side.unlink()
    with pytest.raises(LedgerDamaged, match="missing"):
        opened(path)
    side.write_bytes(b"{")
    with pytest.raises(LedgerDamaged, match="cannot be read"):
        opened(path)
    side.write_bytes(kept_head)
    path.unlink()
    with pytest.raises(LedgerDamaged, match="knows of 5 lines"):
        opened(path)


def test_a_rollback_of_both_files_needs_the_checkpoint(path: Path, tmp_path: Path) -> None:
    _filled(path, 3)
    old = tmp_path / "old"
    old.mkdir()
    for file in tmp_path.glob("ledger*"):
        shutil.copy(file, old)
    head = _filled(path, 3)
    assert head.lines == 7
    for file in old.iterdir():
        shutil.copy(file, tmp_path)
    with opened(path) as ledger:
        assert ledger.releases == 3  # not seen without help
    with pytest.raises(LedgerDamaged, match="checkpoint knows of 7"):
        opened(path, expect=head)


def test_a_rewritten_ledger_needs_a_secret(path: Path) -> None:
    with opened(path, secret=b"party") as ledger:
        ledger.spend(0, EVENT, 10.4)
        assert ledger.head.lines == 2
    for file in (path, path.with_name(path.name + ".head")):
        file.unlink()
    with Chain(path) as forged:  # consistent, but without the key
        forged.append({"kind": "header", "format": 1, "privacy": TARGET.to_dict()})
    with pytest.raises(LedgerDamaged):
        opened(path, secret=b"party")


def test_another_statement_is_refused(path: Path) -> None:
    _filled(path)
    for other in (replace(TARGET, epsilon=9.0), replace(TARGET, delta=1e-6), replace(TARGET, trust="central")):
        with pytest.raises(UsageError, match="was opened for"):
            opened(path, other)
    opened(path).close()  # the refusal gave the lock back


def test_without_a_target_everything_is_recorded_and_nothing_refused(path: Path) -> None:
    privacy = Privacy(epsilon=8, replay="total-norm", trust="local")
    with opened(path, privacy) as ledger:
        assert ledger.spend(0, Event(0.01), 0.01).epsilon > 1000


def test_after_a_failed_write_nothing_more_is_spent(path: Path, monkeypatch) -> None:
    ledger = opened(path)
    ledger.spend(0, EVENT, 10.4)
    before = path.read_bytes()

    def full(file: int, data: bytes) -> int:
        real_write(file, data[:10])
        raise OSError(28, "No space left on device")

    real_write = os.write
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        ledger.spend(1, EVENT, 10.4)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="open it again"):
        ledger.spend(1, EVENT, 10.4)
    ledger.close()
    assert path.read_bytes() == before
    with opened(path) as again:
        assert again.releases == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: ledger.spend(-1, EVENT, 1.0),
        lambda ledger: ledger.spend(0, EVENT, math.nan),
        lambda ledger: ledger.spend(0, Event(1.0, count=2), 1.0),
        lambda _: Event(math.nan),
        lambda _: Event(1.0, math.nan),
        lambda _: Event(1.0, 1.0, 0),
    ],
)
def test_nonsense_is_refused(path: Path, call) -> None:
    with opened(path) as ledger, pytest.raises(UsageError):
        call(ledger)


def _many_rounds(path: Path, rounds: int) -> None:
    with Ledger(path, TARGET, 42_300) as ledger:
        for first in range(0, rounds, 100):
            ledger.reserve(first, Event(124.0, count=100), 124.0, key="run")
        for k in range(rounds):
            ledger.spend(k, Event(124.0), 124.0, key="run")
        assert ledger.releases == rounds


@pytest.mark.slow
def test_a_round_costs_the_same_however_many_came_before(tmp_path: Path) -> None:
    few = calls(lambda: _many_rounds(tmp_path / "few.jsonl", 1000))
    many = calls(lambda: _many_rounds(tmp_path / "many.jsonl", 8000))
    assert many < 9 * few


def test_killed_twice_between_the_first_line_and_its_head(path: Path) -> None:
    for _ in range(2):  # each time the header reached the disk and its head did not
        with opened(path):
            pass
        path.with_name(path.name + ".head").unlink()
    with opened(path) as ledger:  # whoever opens it writes the head before a second line
        ledger.spend(0, EVENT, 10.4)
        assert read_chain(path).head == ledger.head
    Chain(path).close()
    path.with_name(path.name + ".head").unlink()
    with pytest.raises(LedgerDamaged, match="is missing"):  # with releases in it, a missing head is no accident
        opened(path)


def test_the_head_is_on_the_disk_before_the_second_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with opened(path):
        pass
    path.with_name(path.name + ".head").unlink()
    chain = Chain(path)  # as after the first kill
    with monkeypatch.context() as dying:
        dying.setattr("normec.privacy.hash_chain._save_head", killed)
        with pytest.raises(Killed):
            chain.append({"kind": "release"})
    chain.close()
    assert read_chain(path).head.lines == 2
