"""Shakespeare's plays: the roles, their windows, and the GPT with its adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.privacy import gpt, shakespeare, trial
from benchmarks.privacy.trial import Trial
from normec import Problem, UsageError
from normec.settings import make

pytestmark = pytest.mark.slow  # nothing of the library depends on it

PLAY = """THE PLAY OF TWO ROLES

ACT I.

Scene I. A room.

[Enter both.]

FIRST CLOWN.
Who's there?

Sec.
Nay, answer me:
stand.

[Exit a third.]

He is gone.

HERMIA
I am here, and begin a long line
with another.

ACT II.

A field.

FIRST CLOWN.
Long live the king!
"""


def test_speeches_belong_to_their_roles() -> None:
    assert shakespeare.speeches(PLAY) == {
        "FIRST CLOWN": "Who's there?\nLong live the king!",
        "SEC": "Nay, answer me:\nstand.\nHe is gone.",
        "HERMIA": "I am here, and begin a long line\nwith another.",
    }
    assert shakespeare.roles({"one": PLAY}) == {}  # nobody says enough


def test_an_archive_with_other_content_is_refused() -> None:
    with pytest.raises(UsageError, match="SHA-256"):
        shakespeare.plays_in(b"something else")


def test_windows_are_followed_by_the_next_characters() -> None:
    text = "".join(chr(65 + number % 26) for number in range(200)) + "é" + "a" * 2000
    inputs, targets = shakespeare.windows(text)
    assert inputs.shape == targets.shape == (shakespeare.MOST, shakespeare.WINDOW)
    shown = [shakespeare.ALPHABET[number] if number < len(shakespeare.ALPHABET) else "é" for number in inputs.flatten()]
    assert "".join(shown) == text[: inputs.numel()]
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert len(shakespeare.windows(text, None)[0]) == (len(text) - 1) // shakespeare.WINDOW
    assert len(shakespeare.windows("a" * 81)[0]) == 1
    assert len(shakespeare.windows("a" * 80)[0]) == 0


@pytest.fixture
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with four plays of made-up roles, two in each; models are pretrained for one step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shakespeare, "PRETRAINING", 1)
    monkeypatch.setattr(trial, "_cache", {})
    said = {(f"play{k}", f"ROLE{r}"): f"To be {k} or not {r} to be. " * 40 for k in range(4) for r in range(2)}
    shakespeare.write(said, tmp_path)
    assert shakespeare.read(str(tmp_path)) == said
    return str(tmp_path)


def problem(folder: str, model: str, **settings: object) -> Problem:
    return shakespeare.problem(make({"data": "shakespeare", "data_dir": folder, "model": model, "seed": 0, **settings}))


def test_a_role_is_tested_and_validated_on_its_last_windows(plays: str) -> None:
    found = problem(plays, "gpt", validation=0.25)
    assert found.clients == 8
    assert found.test is not None
    assert found.validation is not None
    parts = [found.records.batch(0, None)[0], found.validation.batch(0, None)[0], found.test.batch(0, None)[0]]
    whole, _ = shakespeare.windows(shakespeare.read(plays)["play0", "ROLE0"])
    train, held, test = len(parts[0]), len(parts[1]) // 8, len(parts[2]) // 8
    assert train + held + test == len(whole)
    assert torch.equal(torch.cat([parts[0], parts[1][:held], parts[2][:test]]), whole)


def test_without_the_texts_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"benchmarks\.privacy\.shakespeare"):
        problem(str(tmp_path), "gpt")


def test_another_number_of_roles_is_refused(plays: str) -> None:
    with pytest.raises(UsageError, match="has 8 roles as clients, got clients = 7"):
        problem(plays, "gpt", clients=7)


@pytest.mark.parametrize(("model", "parameters"), [("gpt", 113_792), ("gpt-lora", 8_192)])
def test_a_private_run_reports_the_accuracy_of_the_next_character(plays: str, model: str, parameters: int) -> None:
    """After one round with a step that is too small to change anything, against the first model, counted by hand."""
    settings = {"data": "shakespeare", "data_dir": plays, "model": model, "method": "dpsgd-norm", "device": "cpu"}
    one = Trial({**settings, "lr": 1e-12, "rounds": 1, "epsilon": 8.0}, 0, 0.0, "next_character", diagnose=True)
    (found,) = trial.measure([one])
    assert found["exact_epsilon"] == pytest.approx(8.0, rel=1e-6)
    assert found["parameters"] == parameters
    first = problem(plays, model)
    assert first.test is not None
    inputs, targets = first.test.batch(0, None)
    guessed = first.outputs(first.x0, inputs).argmax(1).flatten().tolist()
    right = [one == other for one, other in zip(guessed, targets.flatten().tolist(), strict=True)]
    assert found["value"] == pytest.approx(sum(right) / len(right), abs=1e-9)
    assert found.get("start") == (found["value"] if model == "gpt-lora" else None)


def test_a_pretrained_model_is_made_once_from_the_public_plays(plays: str, tmp_path: Path) -> None:
    first = problem(plays, "gpt-lora")
    assert first.clients == 4  # the roles of play1 and play3
    assert shakespeare.public_plays(shakespeare.read(plays)) == {"play0", "play2"}
    (kept,) = (tmp_path / "cache/normec/shakespeare").glob("gpt-*.pt")
    trained = torch.load(kept, weights_only=True)
    plain = gpt.GPT(len(shakespeare.ALPHABET) + 1, shakespeare.WINDOW, 128, 4, 4)
    plain.load_state_dict(trained)
    inputs, _ = first.records.batch(0, None)
    assert torch.allclose(first.outputs(first.x0, inputs), plain(inputs), atol=1e-5)  # adapters are zero at first
    moved = {name: torch.zeros_like(value) for name, value in trained.items()}
    torch.save(moved, kept)  # so that a second training would be noticed
    again = problem(plays, "gpt-lora", seed=1)
    assert float(again.outputs(again.x0, inputs).abs().max()) == 0.0
    assert not torch.equal(first.x0, again.x0)  # the seed decides the adapters


def test_scores_do_not_depend_on_later_characters() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(10, 12, 16, 2, 2).double()
    text = torch.randint(10, (1, 12))
    other = text.clone()
    other[0, 7] = (other[0, 7] + 1) % 10
    one, two = model(text), model(other)
    assert one.shape == (1, 10, 12)
    assert torch.allclose(one[..., :7], two[..., :7], atol=1e-12)
    assert not torch.allclose(one[..., 7:], two[..., 7:], atol=1e-3)


def test_pretraining_lowers_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = torch.arange(9).repeat(200)[: 150 * 8 + 1]
    inputs, targets = text[:-1].view(150, 8), text[1:].view(150, 8)
    model = gpt.GPT(9, 8, 16, 1, 2)
    before = F.cross_entropy(model(inputs), targets).item()
    model = gpt.pretrained(model, inputs, targets, 60, tmp_path)
    assert F.cross_entropy(model(inputs), targets).item() < 0.5 * before


def test_an_adapter_adds_a_map_of_low_rank() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 5).double()
    adapted = gpt.LoRALinear(linear, 2).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    assert torch.equal(adapted(x), linear(x))
    nn.init.normal_(adapted.up.weight)
    dense = linear.weight + adapted.up.weight @ adapted.down.weight
    assert torch.allclose(adapted(x), F.linear(x, dense, linear.bias), atol=1e-12)


def test_only_adapters_are_trained() -> None:
    model = gpt.with_adapters(gpt.GPT(10, 12, 16, 2, 2), 3)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2  # queries and values of two blocks, two matrices each
    assert all("query" in name or "value" in name for name in trained)
