"""One process spends from a ledger, a ledger that was set back is refused, and its files are private."""

from __future__ import annotations

import copy
import gc
import json
import math
import multiprocessing
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy import stats

from normec.errors import UsageError
from normec.privacy import Account, BudgetSpent, Event, Ledger, LedgerDamaged, LedgerInUse, Privacy
from normec.privacy.hash_chain import Chain, read_chain
from normec.storage.run_folder import RunStorage
from normec.system.processes import process_identity

from ..support.waiting import LIMIT

SECURE = Privacy(epsilon=8.0, noise="secure", trust="local")
EVENT = Event(3.0)  # 24 of them fit into ε = 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder / "ledger.jsonl"


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder / "witness"


def opened(path: Path, witness: Path | None = None) -> Ledger:
    return Ledger(path, SECURE, horizon=300, witness=witness)


def in_a_fork(action: Callable[[], object]) -> str:
    """What `action` does in a forked child: the text of its error, or "done"."""
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        try:
            action()
            said = "done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(send, said.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


def spend_all(ledger: Ledger) -> int:
    made = 0
    try:
        while True:
            ledger.spend(made, EVENT, 3.0)
            made += 1
    except BudgetSpent:
        return made


def test_a_forked_child_cannot_spend_beside_its_parent(path: Path) -> None:
    with opened(path) as ledger:
        ledger.reserve(100, Event(3.0, count=2), 3.0)
        for action in (
            lambda: ledger.spend(0, EVENT, 3.0),
            lambda: ledger.spend(100, EVENT, 3.0),  # paid for by the parent, for one release
            lambda: ledger.reserve(0, EVENT, 3.0),
        ):
            assert "only the process that opened a ledger may spend from it" in in_a_fork(action)
        assert spend_all(ledger) == 22
    assert len(read_chain(path).lines) == 1 + 1 + 22


def test_a_child_that_closes_its_copy_leaves_the_parent_its_lock(path: Path) -> None:
    with opened(path) as ledger:
        assert in_a_fork(ledger.close) == "done"
        with pytest.raises(LedgerInUse):
            opened(path)
        assert in_a_fork(lambda: opened(path)).startswith("LedgerInUse")
        ledger.spend(0, EVENT, 3.0)
    with opened(path) as again:
        assert again.releases == 1


def test_a_child_that_lives_on_does_not_keep_the_lock(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ledger, done = opened(path), context.Event()
    child = context.Process(target=done.wait, args=(LIMIT,))
    child.start()
    ledger.close()
    opened(path).close()
    done.set()
    child.join()


def test_a_ledger_that_nobody_refers_to_releases_its_lock(path: Path) -> None:
    Ledger(path, SECURE, horizon=300)
    gc.collect()
    Ledger(path, SECURE, horizon=300).close()


def test_a_chain_that_outlives_its_module_says_nothing(path: Path) -> None:
    """At the end of a process, names in modules that the collector cannot reach are set to None, last modules first."""
    code = (
        "import gc, sys, types\n"
        "earlier = sys.modules['earlier'] = types.ModuleType('earlier')\n"
        "from normec.privacy import hash_chain\n"
        "earlier.kept = earlier, hash_chain, hash_chain.Chain(sys.argv[1])\n"
        "gc.freeze()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_ledger_cannot_be_copied_or_sent_to_another_process(path: Path) -> None:
    with opened(path) as ledger, Chain(path.with_name("other")) as chain:
        for held in (ledger, chain):
            for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(UsageError, match="one process spends"):
                    attempt(held)
        spawned = multiprocessing.get_context("spawn").Process(target=spend_all, args=(ledger,))
        with pytest.raises(UsageError, match="one process spends"):
            spawned.start()


def test_threads_take_turns(path: Path) -> None:
    with opened(path) as ledger:
        made: list[int] = []
        threads = [threading.Thread(target=lambda: made.append(spend_all(ledger))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(made) == ledger.releases == 24
    lines = read_chain(path).lines[1:]
    assert [line["releases"] for line in lines] == list(range(1, 25))


def test_a_run_folder_belongs_to_the_process_that_opened_it(tmp_path: Path) -> None:
    storage = RunStorage(tmp_path / "run", {})
    storage.open()
    assert "a fork of it" in in_a_fork(lambda: storage.save(1, {}, {}))
    assert in_a_fork(storage.close) == "done"
    with pytest.raises(UsageError, match="another process"):
        RunStorage(tmp_path / "run", {}).open()
    storage.close()
    again = RunStorage(tmp_path / "run", {})
    again.open()
    again.close()


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_file_that_vanishes_under_the_ledger_stops_it(path: Path, what: str) -> None:
    with opened(path) as ledger:
        ledger.spend(0, EVENT, 3.0)
        contents = path.read_bytes()
        path.unlink()
        if what == "replaced":
            path.write_bytes(contents)
        with pytest.raises(LedgerDamaged, match="deleted or replaced"):
            ledger.spend(1, EVENT, 3.0)


def snapshot(path: Path, into: Path) -> None:
    shutil.copytree(path.parent, into)


def restore(path: Path, saved: Path) -> None:
    shutil.rmtree(path.parent)
    shutil.copytree(saved, path.parent)


def fill(path: Path, witness: Path | None, rounds: int) -> None:
    with opened(path, witness) as ledger:
        for k in range(rounds):
            ledger.spend(k, EVENT, 3.0)


def test_a_ledger_restored_with_its_head_is_refused_by_its_witness(path: Path, witness: Path, tmp_path: Path) -> None:
    fill(path, witness, 20)
    snapshot(path, tmp_path / "backup")
    fill(path, witness, 1)
    restore(path, tmp_path / "backup")
    with opened(path) as unwatched:
        assert unwatched.releases == 20  # nothing in the folder can show it
    with pytest.raises(LedgerDamaged, match=r"the witness .* knows of 22 lines, 21 verify"):
        opened(path, witness)


def test_a_deleted_ledger_does_not_begin_anew_beside_its_witness(path: Path, witness: Path) -> None:
    fill(path, witness, 3)
    for file in path.parent.iterdir():
        file.unlink()
    with pytest.raises(LedgerDamaged, match="knows of 4 lines, 0 verify"):
        opened(path, witness)


def test_a_witness_below_the_folder_of_the_ledger_is_refused(path: Path) -> None:
    """A backup of the folder would restore both together."""
    below = path.parent / "checkpoint"
    below.mkdir()
    with pytest.raises(UsageError, match="would be restored with it"):
        opened(path, below / "witness")


def test_another_history_of_the_same_length_is_refused(path: Path, witness: Path) -> None:
    fill(path, witness, 3)
    for file in path.parent.iterdir():
        file.unlink()
    with opened(path) as forged:
        for k in range(3):
            forged.spend(k, Event(50.0), 50.0)
    with pytest.raises(LedgerDamaged, match="witness"):
        opened(path, witness)


@pytest.mark.parametrize("behind", [1, 2])
def test_a_witness_may_lag_by_the_line_of_a_crash_only(path: Path, witness: Path, behind: int) -> None:
    fill(path, witness, 5)
    old = witness.read_bytes()
    fill(path, witness, behind)
    witness.write_bytes(old)
    if behind == 1:
        with opened(path, witness) as ledger:
            assert ledger.releases == 6
        assert json.loads(witness.read_text())["lines"] == 7
    else:
        with pytest.raises(LedgerDamaged, match=r"knows of 6 lines and .* has 8"):
            opened(path, witness)


def test_a_kill_between_the_line_and_its_witness_loses_nothing(
    path: Path, witness: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    fill(path, witness, 2)
    real = os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(target) == witness:
            raise Killed
        real(source, target)

    ledger = opened(path, witness)
    with monkeypatch.context() as dying:
        dying.setattr(os, "replace", killed)
        dying.setattr(Path, "replace", lambda self, target: killed(self, target))
        with pytest.raises(Killed):
            ledger.spend(2, EVENT, 3.0)
    ledger.close()
    with opened(path, witness) as again:
        assert again.releases == 3


def test_a_witness_can_be_begun_for_an_existing_ledger(path: Path, witness: Path) -> None:
    fill(path, None, 4)
    with pytest.raises(LedgerDamaged, match=r"copy .*ledger\.jsonl\.head to the witness"):
        opened(path, witness)
    shutil.copy(path.with_name(path.name + ".head"), witness)
    fill(path, witness, 1)
    assert json.loads(witness.read_text())["lines"] == 6


def test_a_witness_in_a_useless_place_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="would be restored with it"):
        opened(path, path.with_name("witness"))
    (tmp_path / "link").symlink_to(path.parent)
    with pytest.raises(UsageError, match="would be restored with it"):
        opened(path, tmp_path / "link" / "witness")
    with pytest.raises(UsageError, match="does not exist"):
        opened(path, tmp_path / "nowhere" / "witness")


def test_a_head_with_a_negative_count_is_refused(path: Path) -> None:
    fill(path, None, 2)
    head = path.with_name(path.name + ".head")
    head.write_text(json.dumps(json.loads(head.read_text()) | {"lines": -1}))
    with pytest.raises(LedgerDamaged, match="cannot be read"):
        opened(path)


def test_new_files_are_readable_by_their_owner_alone(path: Path, witness: Path) -> None:
    before = os.umask(0)
    try:
        path.with_name(path.name + ".head.new").touch(mode=0o666)  # what a crash may leave
        fill(path, witness, 2)
    finally:
        os.umask(before)
    for file in (path, path.with_name(path.name + ".head"), witness):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(file.name for file in path.parent.iterdir()) == ["ledger.jsonl", "ledger.jsonl.head"]


def test_a_dearer_release_is_not_covered_by_a_cheaper_payment(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", SECURE, 4) as ledger:
        ledger.reserve(0, Event(100.0, count=2), 1.0)
        with pytest.raises(UsageError, match="was paid for with multiplier 100"):
            ledger.spend(0, Event(0.01), 1.0)


def test_dearer_rounds_are_not_covered_by_a_key_that_was_reserved(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", Privacy(epsilon=8, delta=1e-5, noise="seeded"), 4) as ledger:
        ledger.reserve(0, Event(40.0, count=4), 1.0, key="known")
        assert not ledger.reserve(1, Event(40.0, count=2), 1.0, key="known").fresh
        with pytest.raises(UsageError, match="was paid for with multiplier 40"):
            ledger.reserve(0, Event(0.5, count=4), 1.0, key="known")


def test_a_ledger_that_accepted_its_releases_states_no_more_than_its_budget(tmp_path: Path) -> None:
    """Two bounds of the same releases may differ, because their distributions are computed on different intervals."""
    stated = Privacy(epsilon=3.2, delta=1.5871692292759095e-07, sampling=0.9, noise="seeded")
    kinds = [
        Event(15.753069616823721, 0.5, 2),
        Event(1.4721773109926213, 0.004864375098229096, 3000),
        Event(17.297688813276405, 0.00017220665102565843, 3000),
        Event(26.942207605792042, 0.9, 300),
        Event(2.7218095741477613, 0.004896266306946752, 50),
    ]
    with Ledger(tmp_path / "ledger.jsonl", stated, 6352) as ledger:
        for event in kinds:
            ledger.reserve(ledger.releases, event, 1.0)
        assert 3.0724 <= ledger.exact_epsilon() <= stated.budget  # 3.0724 by a convolution of another program


def test_only_attempts_with_a_line_of_their_own_are_paid_for(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", SECURE, 9) as ledger:
        for _ in range(3):
            ledger.spend(0, Event(100.0), 1.0)
        ledger.reserve(0, Event(100.0, count=2), 1.0)  # both rounds take attempt 3
        assert [ledger.has_paid(1, attempt) for attempt in range(5)] == [False, False, False, True, False]


@pytest.mark.parametrize("text", [b'{"lines": Infinity, "hash": ""}', b"[" * 100_000, b'{"lines": 1e400, "hash": ""}'])
def test_a_head_that_no_ledger_writes_is_damage(tmp_path: Path, text: bytes) -> None:
    Ledger(tmp_path / "ledger.jsonl", SECURE, 4).close()
    (tmp_path / "ledger.jsonl.head").write_bytes(text)
    with pytest.raises(LedgerDamaged):
        read_chain(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.jsonl.head"])
def test_a_pipe_in_place_of_a_ledger_is_not_waited_for(tmp_path: Path, name: str) -> None:
    Ledger(tmp_path / "ledger.jsonl", SECURE, 4).close()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(LedgerDamaged, match="not a regular file"):
        read_chain(tmp_path / "ledger.jsonl")


def test_a_fork_with_its_parents_number_is_known_as_a_fork() -> None:
    """In another namespace a child may have its parent's process number."""
    before = process_identity()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(process_identity()[0]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reading, 16)) == before[0] + 1
    assert process_identity() == before


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "changing"])
@pytest.mark.parametrize("repeats", [2, 10])
def test_a_round_that_is_released_again_has_no_fresh_coins(path: Path, repeats: int, key: str | None) -> None:
    """With one coin, all releases of the round hold the unit or none does: one sampled release of the smaller noise."""
    rate, multiplier, delta = 0.01, 0.5, 1e-5
    spread = multiplier / math.sqrt(repeats)
    privacy = Privacy(sigma=1.0, delta=delta, trust="secure-sum", sampling=rate, noise="seeded")
    with Ledger(path, privacy, horizon=20) as ledger:
        for attempt in range(repeats):
            ledger.spend(0, Event(multiplier, rate), 1.0, key and f"{key} {attempt}")
        claimed = ledger.exact_epsilon()

    def lost(epsilon: float) -> float:
        """δ of the pair (1−q)N(0) + qN(1) against N(0): the ratio of the densities rises, and is e^ε at one point."""
        inner = (math.exp(epsilon) - 1 + rate) / rate
        edge = spread**2 * math.log(inner) + 0.5
        tail, shifted = stats.norm.sf(edge / spread), stats.norm.sf((edge - 1) / spread)
        return float((1 - rate - math.exp(epsilon)) * tail + rate * shifted)

    assert lost(claimed) <= delta
    independent = Account(delta, [Event(multiplier, rate, repeats)]).epsilon()
    assert lost(independent) > 2 * delta  # an account with fresh coins would state too little


def test_rounds_that_were_released_before_are_reserved_without_a_gain(path: Path) -> None:
    privacy = Privacy(sigma=1.0, trust="secure-sum", sampling=0.1, noise="seeded")
    with Ledger(path, privacy, horizon=20) as ledger:
        ledger.reserve(0, Event(2.0, 0.1, 4), 1.0, "old")
        ledger.reserve(3, Event(2.0, 0.1, 2), 1.0, "new")
        assert ledger.exact_epsilon() == Account(1e-5, [Event(2.0, 0.1, 4), Event(2.0, 1.0, 2)]).epsilon()
        assert not ledger.spend(4, Event(2.0, 0.1), 1.0, "new").fresh
    with Ledger(path, privacy, horizon=20) as ledger:
        assert not ledger.spend(4, Event(2.0, 0.1), 1.0, "new").fresh
