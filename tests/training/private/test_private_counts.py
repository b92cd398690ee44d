"""How many records a client holds is private where clients are: nothing public may follow from it unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Privacy, Problem, UsageError, train
from normec.experiments import build
from normec.privacy.mechanism import Mechanism
from normec.settings import make

BATCHES: dict[str, Any] = {"lr": 0.1, "batch_size": 4}


def problem(*sizes: int) -> Problem:
    torch.manual_seed(0)
    data = [TensorDataset(torch.randn(n, 5), torch.randint(0, 3, (n,))) for n in sizes]
    return Problem(nn.Linear(5, 3), F.cross_entropy, data)


def test_epochs_of_batches_are_refused_where_clients_are_protected(tmp_path: Path) -> None:
    """One client with many more records would change rounds and noise of the whole run."""
    with pytest.raises(UsageError, match="give rounds, or declare") as error:
        train(
            problem(8, 8),
            DPSGD(Clip(1.0)),
            epochs=3,
            privacy=Privacy(epsilon=8, trust="local"),
            out=tmp_path / "run",
            **BATCHES,
        )
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_rounds_and_noise_are_the_same_whatever_the_clients_hold() -> None:
    runs = [
        train(problem(*sizes), DPSGD(Clip(1.0)), rounds=5, privacy=Privacy(epsilon=8, trust="local"), **BATCHES)
        for sizes in ((8, 8), (8, 300))
    ]
    assert runs[0].privacy == runs[1].privacy
    assert [row["round"] for row in runs[0].history.rows] == [row["round"] for row in runs[1].history.rows]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("weights", ["equal", [0.4, 0.1, 0.3, 0.15, 0.05]], ids=["equal", "weighted"])
def test_the_same_messages_give_the_same_model_whatever_the_clients_hold(
    weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines take clients in an order that follows from their numbers of records, and sums of floats would show it."""
    sent, found, noisy = dict[tuple[int, int], Tensor](), [], Mechanism.noisy

    def repeated(self: Mechanism, messages: Tensor, clients: Tensor) -> Tensor:
        rows = zip(clients.tolist(), noisy(self, messages, clients), strict=True)
        return torch.stack([sent.setdefault((client, self._paid or 0), row) for client, row in rows])

    monkeypatch.setattr(Mechanism, "noisy", repeated)
    for records in (9, 2):
        torch.manual_seed(0)
        data = [TensorDataset(torch.randn(n, 5), torch.randint(0, 3, (n,))) for n in (1, records, 3, 6, 4)]
        torch.manual_seed(1)
        given = Problem(nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3)), F.cross_entropy, data)
        privacy = Privacy(sigma=1.0, trust="local", noise="secure")
        found.append(train(given, DPSGD(Clip(1.0)), lr=0.1, rounds=3, privacy=privacy, weights=weights, seed=1).x)
    assert torch.equal(*found)


def test_numbers_that_are_declared_public_are_noted() -> None:
    run = train(
        problem(8, 8),
        DPSGD(Clip(1.0)),
        epochs=3,
        privacy=Privacy(epsilon=8, trust="local"),
        public_sizes=True,
        **BATCHES,
    )
    assert run.rounds == 6
    assert run.privacy is not None
    assert any("records of the clients are assumed to be public" in note for note in run.privacy.notes)


def test_where_records_are_protected_their_number_is_public_already() -> None:
    run = train(
        problem(8, 8), DPSGD(Clip(1.0)), epochs=3, privacy=Privacy(epsilon=8, unit="record", trust="local"), **BATCHES
    )
    assert run.rounds == 6
    assert run.privacy is not None
    assert any("how many records a client has" in gap for gap in run.privacy.not_covered)


def test_epochs_of_full_gradients_are_rounds_whatever_the_clients_hold() -> None:
    assert (
        train(problem(8, 30), DPSGD(Clip(1.0)), lr=0.1, epochs=3, privacy=Privacy(epsilon=8, trust="local")).rounds == 3
    )


def test_a_configuration_is_refused_before_any_data_are_read() -> None:
    settings = {"epochs": 2, "batch_size": 4, "data": "no such data"}
    with pytest.raises(UsageError, match="give rounds, or declare"):
        build.training(make(settings))
    assert build.training(make({**settings, "public_sizes": True})).public_sizes
    assert build.training(make({**settings, "private": False})).epochs == 2
    with pytest.raises(UsageError, match="public_sizes is for private runs"):
        build.training(make({"private": False, "public_sizes": True}))


def test_a_declaration_changes_no_run_s_name() -> None:
    assert make({"public_sizes": True}).digest() == make({}).digest()


@pytest.mark.slow
@pytest.mark.parametrize("batches", [{}, {"batch_size": 4}, {"batch_rate": 0.5}])
def test_a_delta_that_is_large_for_all_records_is_noted(batches: dict[str, Any]) -> None:
    """The number is that of the records that the clients hold, however many of them are in a batch."""
    for delta, noted in ((1 / 24, True), (0.9 / 24, False)):
        privacy = Privacy(epsilon=8, delta=delta, unit="record", trust="central")
        run = train(problem(8, 16), DPSGD(Clip(1.0)), lr=0.1, rounds=2, privacy=privacy, **batches)
        assert run.privacy is not None
        assert any("is not below 1/24 records" in note for note in run.privacy.notes) is noted
