"""What the pages say, held against the files they were made from, and what they make of broken folders."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import shlex
import statistics
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from normec import DPSGD, Clip, NormEC, Privacy, Problem, Rotation, train
from normec.errors import UsageError
from normec.experiments import compare, resolve
from normec.privacy import gaussian
from normec.privacy.display import shown_epsilon
from normec.report import charts, comparison_page, document, guarantee, page, run_page, runs_page
from normec.report.html import data_block, e
from normec.report.listing import Listing
from normec.report.run_view import being_written, read_run
from normec.settings import load
from normec.storage.history import History

from ..cli.command import normec
from ..support.runs import EndAt
from .conftest import GRID


class Reader(HTMLParser):
    """A page as its text and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.data = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._inside = "data" if ("id", "data") in attributes else tag

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.words.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words).replace("\u2011", "-"))


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def summary(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "summary.json").read_text()))


def test_a_run_leaves_a_page_that_tells_its_result(library: Path) -> None:
    found = read(library / "private" / "report.html")
    facts = json.loads((library / "private" / "summary.json").read_text())
    accuracy = f"{100 * facts['final']['accuracy']:.1f} %"
    assert (
        f"NormEC reached {accuracy} test accuracy after 12 rounds in a simulation of (8, 1e-5)-differential privacy "
        "for each client against a server that sees only sums." in found.text
    )
    for said in ("Protected", "sent noise only", "What is not covered", *facts["privacy"]["not_covered"][1:3]):
        assert said[1:] in found.text
    columns = json.loads(found.data)["series"][0]["columns"]
    history = History(library / "private" / "metrics.jsonl")
    history.reread()
    assert columns["test_loss"][::3] == pytest.approx(history["test_loss"], rel=1e-5)


def test_a_run_without_privacy_says_so(library: Path) -> None:
    text = read(library / "plain" / "report.html").text
    assert "without privacy." in text
    assert "There is no ε to report" in text
    assert "No ledger" not in text


def test_a_diverged_run_says_where_and_whose(library: Path) -> None:
    text = read(library / "diverged" / "report.html").text
    assert "Gradient descent diverged: the loss of clients 0, 1, 2, 3, 4 … is not finite in round 1" in text
    assert "--lr 1e+19" in text


def test_the_same_folder_gives_the_same_bytes(copied: Path) -> None:
    for name in ("private", "comparison", "sweep"):
        first = page.write(copied / name).read_bytes()
        assert page.write(copied / name).read_bytes() == first


def test_pages_are_small_and_carry_the_library_as_it_was_published() -> None:
    script = gzip.decompress(document.plotly_compressed())
    assert script.startswith(b"/**\n* plotly.js (cartesian - minified) v4.1.1")
    published = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"  # of the package on npm
    assert hashlib.sha256(script).hexdigest() == published
    text = document.document("t", e("p", "x"), [], {})
    assert len(text) < 750_000
    assert "http" not in re.sub(r"<script.*?</script>", "", text.replace("http-equiv", ""), flags=re.DOTALL)


def test_data_cannot_leave_its_block() -> None:
    evil = {"</script><script>alert(1)</script>": ["<!--", "]]>", "&amp;", math.nan, math.inf, 1 / 3]}
    block = data_block("data", evil)
    assert block.count("<") == 2
    assert block.count(">") == 2
    held = json.loads(block.split(">", 1)[1].rsplit("<", 1)[0])
    assert held == {"</script><script>alert(1)</script>": ["<!--", "]]>", "&amp;", None, None, 0.333333]}
    assert e("a", "<b>", href='"><script>') == '<a href="&quot;&gt;&lt;script&gt;">&lt;b&gt;</a>'


# Folders that are not what a finished run leaves.


def test_a_killed_run_has_a_page(copied: Path) -> None:
    folder = copied / "private"
    (folder / "summary.json").unlink()
    rows = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(rows[:-7])  # cut in the middle of the last line
    text = read(page.write_run(folder)).text
    assert "unfinished" in text
    assert "What is not covered" in text  # from the statement in the checkpoint
    assert "To go on where this one stopped" in text


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "config.toml", "checkpoint/latest.json"])
@pytest.mark.parametrize("damage", [b"", b'{"a": ', b"\xff\xfe\n", b"[1, 2]\n"])
def test_damage_becomes_a_note_and_the_rest_is_shown(name: str, damage: bytes, copied: Path) -> None:
    (copied / "private" / name).write_bytes(damage)
    text = read(page.write_run(copied / "private")).text
    assert "NormEC" in text
    if damage and (name, damage) != ("metrics.jsonl", b'{"a": '):  # that is a line cut short, as by a kill
        assert name.rpartition("/")[2] in text


def test_a_changed_ledger_is_not_believed(copied: Path) -> None:
    ledger = copied / "private" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"count":1', '"count":0', 1))
    with pytest.raises(UsageError, match="is not what was written"):
        page.write_run(copied / "private")


def test_a_run_that_was_started_from_python_has_a_page(tmp_path: Path) -> None:
    problem = Problem.from_functions([lambda x: (x - 1).square().sum(), lambda x: x.square().sum()], torch.zeros(3))
    train(problem, NormEC(alpha=0.1, beta=0.1), lr=0.1, rounds=5, out=tmp_path / "own")
    text = read(page.write(tmp_path / "own")).text
    assert "NormEC" in text
    assert "started from Python" in text


def test_a_run_without_classes_tells_its_test_loss_and_its_own_metrics(tmp_path: Path) -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    parts = [torch.utils.data.TensorDataset(part, part.sum(1, keepdim=True)) for part in inputs.split(10)]
    problem = Problem(
        torch.nn.Linear(3, 1),
        torch.nn.functional.mse_loss,
        parts[1:],
        test=parts[0],
        metrics={"largest_error": lambda outputs, targets: (outputs - targets).abs().max()},
    )
    run = train(problem, DPSGD(Clip(1.0)), lr=0.1, rounds=3, seed=0, privacy=Privacy(epsilon=8), out=tmp_path / "run")
    found = read_run(tmp_path / "run")
    assert f"a test loss of {run.history['test_loss'][-1]:.4g}" in run_page.headline(found)
    facts = {name: value for name, value, _ in run_page.card_facts(found)}
    assert facts["Test loss"] == f"{run.history['test_loss'][-1]:.4g}"
    assert facts["Largest error"] == f"{run.history['largest_error'][-1]:.4g}"
    shown = normec("results", "run", cwd=tmp_path).stdout
    assert f"{run.history['test_loss'][-1]:.3g}" in shown
    assert "largest error" in shown


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, library: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        page.write(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"holds no run, comparison, sweep or verification$"):
        page.write(tmp_path)
    with pytest.raises(UsageError, match="name what is in it: comparison, diagnosed, diverged, plain, private …"):
        page.write(library)
    (tmp_path / "cells").mkdir()
    with pytest.raises(UsageError, match="holds no cell of a sweep yet"):
        page.write(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "cells"]


def test_more_columns_and_a_table_of_clients_are_shown_when_there(copied: Path) -> None:
    folder = copied / "private"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"message_norm": 0.5, "message_norm_max": 0.9, "disagreement": 0.25}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {"columns": ["client", "messages", "last norm"], "rows": [[0, 12, 0.5], [1, 11, 0.75]]}
    (folder / "clients.json").write_text(json.dumps(table))
    found = read(page.write_run(folder))
    charts_drawn = {chart["key"]: chart for chart in json.loads(found.data)["charts"]}
    assert {"message_norm", "disagreement"} <= charts_drawn.keys()
    assert charts_drawn["message_norm"]["references"] == [{"value": 1.0, "name": "bound"}]  # of the normalisation
    assert "last norm 0 12 0.5 1 11 0.75" in found.text


def test_whether_a_run_is_training_is_seen_without_its_lock(tmp_path: Path) -> None:
    lock = (tmp_path / ".lock").open("wb")
    assert not being_written(tmp_path)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert being_written(tmp_path)
    sent = tmp_path / "sent"  # a folder of somebody else, whose ledger would go unverified while it trains
    sent.mkdir()
    (sent / ".lock").symlink_to(tmp_path / ".lock")
    assert not being_written(sent)
    lock.close()
    assert not being_written(tmp_path)


def test_a_time_in_the_future_is_not_that_of_a_run_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not list locks, the time of the last row decides, and an archive may name any time."""
    read_text = Path.read_text

    def without_locks(path: Path, *how: Any, **named: Any) -> str:
        if path == Path("/proc/locks"):
            raise FileNotFoundError(path)
        return read_text(path, *how, **named)

    monkeypatch.setattr(Path, "read_text", without_locks)
    for name in (".lock", "metrics.jsonl"):
        (tmp_path / name).touch()
    assert being_written(tmp_path)
    os.utime(tmp_path / "metrics.jsonl", (4e9, 4e9))
    assert not being_written(tmp_path)


# Privacy in words.


def test_what_an_observer_can_recognise_agrees_with_an_attack() -> None:
    """The best test between N(0, 1) and N(1/z, 1), seen `count` times, tried out."""
    z, count, alarms = 5.0, 40, 0.05
    lines = [{"kind": "release", "multiplier": z, "count": count // 2, "rate": 1.0}] * 2
    chance = np.random.default_rng(0)
    absent = chance.standard_normal((100_000, count)).sum(1)
    present = (chance.standard_normal((100_000, count)) + 1 / z).sum(1)
    caught = (present > np.quantile(absent, 1 - alarms)).mean()
    assert guarantee.recognised(lines, alarms) == pytest.approx(caught, abs=0.006)
    assert guarantee.recognised([{**lines[0], "rate": 0.5}], alarms) is None
    assert guarantee.recognised([], alarms) is None


def test_messages_beyond_the_ledger_count_like_the_one_with_the_least_noise() -> None:
    """The noise grows by round, and clients take turns, so that the last line charges nothing."""
    release = {"kind": "release", "count": 1, "rate": 1.0}
    lines = [{**release, "multiplier": 2.0, "charged": 1}, {**release, "multiplier": 4.0, "charged": 0}]
    found = guarantee.recognised(guarantee.with_beyond(lines, 3), 0.1)
    assert found == pytest.approx(norm.cdf(norm.ppf(0.1) + math.sqrt(4) / 2.0))
    assert guarantee.with_beyond(lines, 0) == lines
    assert guarantee.with_beyond([{"kind": "header"}], 3) == [{"kind": "header"}]


def test_an_epsilon_that_protects_nobody_is_called_that(tmp_path: Path) -> None:
    bowl = Problem.from_functions([lambda x: (x**2).sum()] * 2, torch.zeros(3))
    privacy = Privacy(sigma=0.01, trust="local", noise="exact")
    train(bowl, DPSGD(Clip(1.0)), lr=0.1, rounds=2, privacy=privacy, out=tmp_path)
    said = Reader((tmp_path / "report.html").read_text()).text
    assert "ε is too large to protect anybody" in said


def test_the_list_of_runs_rounds_epsilon_up(tmp_path: Path) -> None:
    bowls = Problem.from_functions([lambda x: (x**2).sum()] * 2, torch.zeros(3))
    train(bowls, DPSGD(Clip(1.0)), lr=0.1, rounds=3, seed=0, privacy=Privacy(sigma=2.5), out=tmp_path / "run")
    (entry,) = Listing(tmp_path).changes(None)["changed"]
    spent = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]["epsilon"]
    assert float(f"{spent:.4g}") < spent  # so rounding to the nearest number would understate it
    assert spent <= float(entry["shown_epsilon"]) < 1.001 * spent


def test_shared_settings_are_written_as_toml_that_reads_the_same() -> None:
    settings = {"data": 'a\n"b"\\c', "lr": 1e-7, "top": math.inf, "rounds": 3, "private": False, "model": None}
    assert tomllib.loads(runs_page.toml(settings)) == {k: v for k, v in settings.items() if v is not None}


def test_the_plain_words_are_within_the_guarantee(library: Path) -> None:
    view = read_run(library / "private")
    lines, fault = guarantee.ledger_lines(view)
    assert fault is None
    for alarms in (1e-4, 0.01, 0.1):
        caught = guarantee.recognised(lines, alarms)
        assert caught is not None
        assert alarms < caught <= math.exp(8) * alarms + 1e-5


@pytest.mark.parametrize(("groups", "stops"), [(1, False), (4, False), (1, True)])
def test_the_plain_words_are_those_of_the_stated_epsilon(groups: int, stops: bool, tmp_path: Path) -> None:
    """An observer of one client that takes its turns; and a rule that stopped early might have stopped later."""
    bowls = Problem.from_functions([lambda x, c=c: ((x - c) ** 2).sum() for c in range(8)], torch.zeros(3))
    privacy = Privacy(epsilon=5, trust="secure-sum")  # e^5 is 148.4
    how = {"participation": Rotation(groups), "callbacks": [EndAt(4)] if stops else []}
    run = train(bowls, DPSGD(Clip(1.0)), lr=0.1, rounds=20, seed=0, privacy=privacy, out=tmp_path, **how)
    assert run.privacy is not None
    page = (tmp_path / "report.html").read_text()
    if stops:
        assert "is right about at most" not in page
        assert "by a factor of at most 149, " in page
        return
    mu = gaussian.mu_for(run.privacy.epsilon, run.privacy.delta)
    lines = guarantee.ledger_lines(read_run(tmp_path))[0]
    assert guarantee.recognised(lines, 0.1) == pytest.approx(norm.cdf(norm.ppf(0.1) + mu), rel=1e-6)
    assert "is right about at most" in page
    assert ("5 of them charged" in page) == (groups == 4)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(7.999999999999986, "8"), (8.00000000000001, "8"), (1.23401, "1.235"), (0.031249, "0.03125"), (1234.1, "1235")],
)
def test_epsilon_is_never_said_to_be_smaller(value: float, shown: str) -> None:
    assert shown_epsilon(value) == shown
    assert float(shown_epsilon(value)) >= value * (1 - 1e-12)


# Several runs.


def test_results_come_before_the_settings_of_the_methods(library: Path) -> None:
    text = comparison_page.render(library / "comparison")
    heads = re.findall(r"<th\b[^>]*>(?:<[^>]*>)*([^<]+)", text[text.index('aria-label="Results"') :])
    assert heads.index("test accuracy") < heads.index("lr")


def test_a_comparison_can_be_run_again_from_its_page(library: Path, tmp_path: Path) -> None:
    """The command and the settings on the page ask for the very runs that are in the folder."""
    text = comparison_page.render(library / "comparison")
    blocks = [Reader(block).text for block in re.findall(r'<section id="rerun">.*?</section>', text, re.DOTALL)]
    code = re.findall(r"<code>(.*?)</code>", re.findall(r'<section id="rerun">.*', text, re.DOTALL)[0], re.DOTALL)
    shared, command = (Reader(one).words for one in code)
    assert "shared.toml" in blocks[0]
    (tmp_path / "shared.toml").write_text("".join(shared))
    arguments = shlex.split("".join(command).replace("\u2011", "-"))
    assert arguments[:2] == ["normec", "compare"]
    labels = arguments[2 : arguments.index("--config")]
    sizes = [float(size) for size in arguments[arguments.index("--lr") + 1].split(",")]
    settings = load(tmp_path / "shared.toml").model_dump(exclude_unset=True)
    cells = [cell for entry in compare.candidates(labels, settings, sizes) for cell in entry.cells]
    asked = {resolve.resolved(cell).digest() for cell in cells}
    held = {load(path).digest() for path in (library / "comparison").glob("*/config.toml")}
    assert asked == held
    assert len(held) == 5


def test_a_sweep_counts_as_one_does_by_hand(library: Path) -> None:
    found = read(library / "sweep" / "report.html")
    cells = json.loads(found.data)["sweep"]["cells"]
    assert len(cells) == 5
    best = (0.0, "")
    for beta in GRID["beta"]:
        for lr in GRID["lr"]:
            runs = [summary(library / f"sweep/cells/beta-{beta}-lr-{lr}-seed-{seed}") for seed in (0, 1)]
            for column in ("accuracy", "loss", "validation_accuracy"):
                values = [run["final"][column] for run in runs]  # type: ignore[index]
                (cell,) = (one for one in cells if (one["settings"].get("beta"), one["settings"]["lr"]) == (beta, lr))
                expected = [statistics.mean(values), statistics.stdev(values)]
                assert cell["values"][column] == pytest.approx(expected, rel=1e-4)
            best = max(best, (statistics.mean(values), f"beta {beta:g}, private true, lr {lr:g}"))
    assert f"{best[1]} did best by validation accuracy (" in found.text
    (broken,) = (one for one in cells if one["status"] == "diverged")
    assert broken["values"] == {}


def test_a_seed_that_broke_takes_the_mean_with_it(copied: Path) -> None:
    folder = copied / "sweep/cells/beta-0.1-lr-0.5-seed-1"
    facts = summary(folder) | {"status": "diverged", "error": "the loss is not finite in round 7"}
    (folder / "summary.json").write_text(json.dumps(facts))
    found = read(page.write(copied / "sweep"))
    (cell,) = (one for one in json.loads(found.data)["sweep"]["cells"] if one["status"] == "mixed")
    assert cell["values"] == {}
    assert "the loss is not finite in round 7" in found.text


@pytest.mark.slow
def test_the_command_writes_pages(copied: Path) -> None:
    one = normec("report", "private", cwd=copied)
    assert one.stdout.startswith("page: private/report.html (0.7 MB)")
    several = normec("report", "private", "plain", "comparison/normec-lr-0.5", "--out", "many.html", cwd=copied)
    assert several.returncode == 0, several.stderr
    found = read(copied / "many.html")
    assert "Of 3 runs" in found.text
    assert "different data" not in found.text
    assert 'href="comparison/normec-lr-0.5/report.html"' in (copied / "many.html").read_text()
    wrong = normec("report", "private", "sweep", cwd=copied)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert wrong.stderr.count("\n") == 1


def test_runs_on_different_data_are_not_ranked_without_a_word(copied: Path) -> None:
    settings = copied / "plain" / "config.toml"
    settings.write_text(re.sub(r'"?data"? = "digits"', '"data" = "wards"', settings.read_text()))
    page.write_many([copied / "private", copied / "plain"], copied / "both.html")
    assert "The runs have different data (digits, wards)" in read(copied / "both.html").text


def test_thinning_keeps_the_ends_and_what_was_evaluated() -> None:
    rows = [{"round": k, "loss": 1.0} | ({"accuracy": 0.5} if k % 50 == 0 else {}) for k in range(20_001)]
    few = charts.thinned(rows, 1000)
    assert len(few) <= 1003
    assert (few[0]["round"], few[-1]["round"]) == (0, 20_000)
    assert sum("accuracy" in row for row in few) >= 200
    assert charts.thinned(rows[:900], 1000) == rows[:900]


def test_a_folder_is_shown_as_one_would_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page.shown_path(tmp_path / "runs" / "x") == "runs/x"
    assert run_page.shown_path(Path("/elsewhere/x")) == "/elsewhere/x"
