"""The noise of a private run comes from a fresh secret unless a seed was given; then it is called a simulation."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Logging, NormEC, Poisson, Privacy, Problem, train
from normec.errors import UsageError
from normec.gradients import loop as loop_engine
from normec.gradients.loop import LoopEngine
from normec.gradients.record_clip import RecordClip
from normec.privacy import SeededNoise
from normec.sampling import random_streams
from normec.sampling.batches import Batches
from normec.sampling.random_streams import derive_seed
from normec.storage.run_folder import stored_secret
from normec.training.options import Options
from normec.training.run import batches_of
from normec.training.train import prepare

from ...support.runs import StopAt
from .test_training import bowls

CLIENTS, METHOD = 6, DPSGD(Clip(1.0))
SUM = Privacy(epsilon=8, trust="secure-sum")


def noisy_sum(seed: int | None) -> tuple[Tensor, Tensor]:
    """What the server saw of one round, and the noise that an outsider computes from the public settings alone."""
    run = train(bowls(CLIENTS), METHOD, lr=0.1, rounds=1, privacy=SUM, seed=seed)
    public = prepare(bowls(CLIENTS), METHOD, Options(lr=0.1, rounds=1, privacy=SUM, seed=seed)).mechanism
    assert public is not None
    sigma = public.release.sum_sigma(public.sigma)
    path = (public.name, "round", 0, "attempt", 0, "sum")
    guess = SeededNoise(seed or 0).draw(run.x.shape, sigma, *path, dtype=run.x.dtype)
    return run.state.estimate * CLIENTS, guess


def clean_sum() -> Tensor:
    return train(bowls(CLIENTS), METHOD, lr=0.1, rounds=1).state.estimate * CLIENTS


def test_an_outsider_who_knows_the_seed_removes_the_noise() -> None:
    seen, guess = noisy_sum(seed=0)
    torch.testing.assert_close(seen - guess, clean_sum())


def test_an_outsider_without_the_secret_does_not() -> None:
    seen, guess = noisy_sum(seed=None)
    assert float((seen - guess - clean_sum()).norm()) > 1.0


def test_without_a_seed_every_private_run_has_other_noise_and_a_plain_run_repeats() -> None:
    private = [
        train(bowls(3), NormEC(0.1, 0.1), lr=0.1, rounds=3, privacy=Privacy(epsilon=8, trust="local")).x
        for _ in range(2)
    ]
    assert not torch.equal(*private)
    plain = [train(bowls(3), NormEC(0.1, 0.1), lr=0.1, rounds=3, participation=Poisson(0.5)).x for _ in range(2)]
    assert torch.equal(*plain)
    seeded = [
        train(bowls(3), NormEC(0.1, 0.1), lr=0.1, rounds=3, seed=5, privacy=Privacy(epsilon=8, trust="local")).x
        for _ in range(2)
    ]
    assert torch.equal(*seeded)


def test_the_coins_of_a_claimed_sampling_are_secret_too() -> None:
    claim = Privacy(sigma=1.0, trust="secure-sum", sampling=0.5)
    rounds = [
        prepare(bowls(64), METHOD, Options(lr=0.1, rounds=1, privacy=claim, seed=seed)).plan for seed in (None, 0)
    ]
    secret, public = (plan.participation.draw(64, 0, plan.privacy_seed) for plan in rounds)
    assert secret is not None
    assert public is not None
    assert secret.tolist() != public.tolist()


SEEDS: list[int] = []


class Masked(nn.Linear):
    """Dropout, and a note of the seed that its mask comes from."""

    def forward(self, input: Tensor) -> Tensor:
        SEEDS.append(torch.initial_seed())
        return super().forward(F.dropout(input, 0.5, self.training))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
def test_masks_of_records_that_coins_draw_are_as_secret_as_the_coins(seed: int | None) -> None:
    """A record's mask is that of its place in the batch: who knows all masks sees whom a record has moved."""
    SEEDS.clear()
    of = Problem(Masked(4, 2), F.cross_entropy, [TensorDataset(torch.rand(20, 4), torch.zeros(20, dtype=torch.int64))])
    privacy = Privacy(epsilon=8, unit="record", record_clip=1.0, trust="central")
    train(of, DPSGD(Clip(1.0)), lr=0.1, rounds=3, batch_rate=0.5, privacy=privacy, seed=seed)
    assert (derive_seed(0, "model", 0, 1) in SEEDS) == (seed is not None)


def test_the_secret_stays_in_its_own_file_and_the_run_goes_on_with_it(tmp_path: Path) -> None:
    words: dict[str, Any] = {"lr": 0.1, "rounds": 8, "privacy": SUM}
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    assert train(bowls(CLIENTS), METHOD, **words, out=stopped, callbacks=[StopAt(4)]).stopped == "interrupted"
    kept, secret = stopped / ".noise-secret", stored_secret(stopped)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert secret is not None
    for path in (path for path in stopped.rglob("*") if path.is_file() and path != kept):
        assert kept.read_bytes().strip() not in path.read_bytes()
        assert str(secret).encode() not in path.read_bytes()
    shutil.copytree(stopped, whole)
    ends = [train(bowls(CLIENTS), METHOD, **words, out=folder).x for folder in (stopped, whole)]
    assert torch.equal(*ends)


def test_a_lost_secret_is_refused_in_a_line(tmp_path: Path) -> None:
    words: dict[str, Any] = {"lr": 0.1, "rounds": 8, "privacy": SUM, "out": tmp_path}
    train(bowls(CLIENTS), METHOD, **words, callbacks=[StopAt(4)])
    (tmp_path / ".noise-secret").unlink()
    with pytest.raises(UsageError, match=r"secret of the noise in .* is missing"):
        train(bowls(CLIENTS), METHOD, **words)


def test_a_damaged_secret_is_refused_in_a_line(tmp_path: Path) -> None:
    train(bowls(3), METHOD, lr=0.1, rounds=2, privacy=SUM, out=tmp_path / "run")
    (tmp_path / "run" / ".noise-secret").write_text("not a number")
    with pytest.raises(UsageError, match="cannot continue without its secret"):
        train(bowls(3), METHOD, lr=0.1, rounds=2, privacy=SUM, out=tmp_path / "run")


@pytest.mark.parametrize("noise", [None, "seeded", "secure"])
def test_seeded_noise_is_called_a_simulation_wherever_the_run_speaks(noise: str | None) -> None:
    run = train(bowls(3), METHOD, lr=0.1, rounds=2, privacy=Privacy(epsilon=8, noise=noise, trust="local"))  # type: ignore[arg-type]
    assert run.privacy is not None
    simulated = noise != "secure"
    assert run.privacy.simulation == simulated
    assert ("Simulation" in run.privacy.statement) == simulated
    assert any("simulation" in gap for gap in run.privacy.not_covered) == simulated


def test_what_is_left_of_a_removed_run_is_not_its_secret(tmp_path: Path) -> None:
    """`rm -r run/*` leaves hidden files; noise used again on other data would cancel in the difference."""
    train(bowls(CLIENTS), METHOD, lr=0.1, rounds=2, privacy=SUM, out=tmp_path)
    before = stored_secret(tmp_path)
    for path in tmp_path.iterdir():
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert (tmp_path / ".noise-secret").exists()
    train(bowls(CLIENTS), METHOD, lr=0.1, rounds=2, privacy=SUM, out=tmp_path)
    assert stored_secret(tmp_path) not in (before, None)


@pytest.mark.parametrize("text", ["", "12", "f" * 32, "f" * 31 + "\n", "0" * 32 + "\n"])
def test_another_secret_than_the_run_s_own_is_refused(tmp_path: Path, text: str) -> None:
    words: dict[str, Any] = {"lr": 0.1, "rounds": 8, "privacy": SUM, "out": tmp_path}
    train(bowls(CLIENTS), METHOD, **words, callbacks=[StopAt(4)])
    (tmp_path / ".noise-secret").write_text(text)
    with pytest.raises(UsageError, match="secret"):
        train(bowls(CLIENTS), METHOD, **words)


@pytest.mark.parametrize(
    "watching",
    [
        {"logging": Logging(every=3)},
        {"logging": Logging(evaluate_every=2)},
        {"logging": Logging(every=7, evaluate_every=5)},
    ],
)
def test_what_is_logged_changes_no_bit_of_a_private_run(watching: dict[str, int]) -> None:
    options = {"lr": 0.1, "rounds": 8, "seed": 4, "privacy": Privacy(epsilon=8, trust="local")}
    assert torch.equal(train(bowls(3), METHOD, **options).x, train(bowls(3), METHOD, **options, **watching).x)


def test_masks_of_dropout_are_as_secret_as_the_noise() -> None:
    """They follow the order of the records, so that known masks would show which record was left out."""
    loop = prepare(bowls(CLIENTS), METHOD, Options(lr=0.1, rounds=1, privacy=SUM))
    assert loop.plan.secret is not None
    assert loop.plan.model_seed == loop.plan.secret
    assert prepare(bowls(CLIENTS), METHOD, Options(lr=0.1, rounds=1, seed=4)).plan.model_seed == 4


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", [None, 0])
def test_masks_of_clipped_records_are_secret_where_the_noise_is_real(seed: int | None, tmp_path: Path) -> None:
    """With known masks, leaving out one of 40 records moves the sum by five times the clip that is accounted for."""
    records = TensorDataset(torch.rand(20, 4), torch.zeros(20, dtype=torch.int64))
    privacy = Privacy(epsilon=8, unit="record", record_clip=1.0, trust="central", noise="secure")
    of = Problem(Masked(4, 2), F.cross_entropy, [records])

    def seeds(out: Path | None) -> set[int]:
        """The seeds of the masks; the run stops after four of six rounds, and goes on if there is a folder."""
        SEEDS.clear()
        how: dict[str, Any] = {"lr": 0.1, "rounds": 6, "seed": seed, "out": out, "callbacks": [StopAt(4)]}
        train(of, DPSGD(Clip(1.0)), privacy=privacy, **how)
        return set(SEEDS)

    def known(secret: int) -> list[int]:
        """The seeds of all rounds but the first, in which the clients are also compared with known masks."""
        return [derive_seed(secret, "model", 0, round) for round in range(1, 6)]

    assert seeds(None).isdisjoint(known(0))
    first = seeds(tmp_path / "run")
    secret = int((tmp_path / "run" / ".noise-secret").read_text(), 16)
    assert first.issuperset(known(secret)[:3])
    assert first.isdisjoint(known(0))
    assert seeds(tmp_path / "run").issuperset(known(secret)[3:]), "the run goes on with its secret"
    clients = Privacy(epsilon=8, trust="central", noise="secure")
    assert prepare(bowls(CLIENTS), METHOD, Options(lr=0.1, rounds=1, seed=4, privacy=clients)).plan.model_seed == 4


def test_masks_of_clipped_records_have_all_bits_of_their_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CPU generator keeps 32 bits of a seed, so the masks of a seed can be tried out."""
    records = TensorDataset(torch.rand(20, 4), torch.arange(20) % 2)
    of = Problem(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)), F.cross_entropy, [records])

    def same_masks(noise: Any) -> bool:
        """Whether two rounds have the same masks if their seeds are the same."""
        privacy = Privacy(epsilon=8, unit="record", trust="central", noise=noise)
        engine = prepare(of, DPSGD(Clip(1.0)), Options(lr=0.1, rounds=2, privacy=privacy)).engine
        with torch.random.fork_rng(devices=[]), monkeypatch.context() as patch:
            for module in (loop_engine, random_streams):
                patch.setattr(module, "derive_seed", lambda *_: 7)
            return torch.equal(*(block.grads for k in range(2) for block in engine.blocks(of.x0, {}, k)))

    assert not same_masks("secure")
    of.model[0].p = 0.0
    assert same_masks("secure"), "nothing but the masks differs"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
def test_the_order_of_clipped_records_is_secret_where_the_noise_is_real(seed: int | None, tmp_path: Path) -> None:
    """With a known order, taking one of 40 records out moves a batch of 8 by four times the clip that is counted."""
    records = TensorDataset(torch.rand(40, 4), torch.arange(40) % 2)
    of = Problem(nn.Linear(4, 2), F.cross_entropy, [records])
    privacy = Privacy(epsilon=8, unit="record", trust="central", noise="secure")
    how: dict[str, Any] = {"lr": 0.1, "rounds": 5, "batch_size": 8, "seed": seed}

    def gradients(engine: Any) -> list[Tensor]:
        return [block.grads for k in range(5) for block in engine.blocks(of.x0, {}, k)]

    def of_order(key: int) -> list[Tensor]:
        return gradients(LoopEngine(of, Batches(of.sizes, 8, key), 0, RecordClip("auto")))

    train(of, DPSGD(Clip(1.0)), privacy=privacy, out=tmp_path / "run", **how)
    secret = int((tmp_path / "run" / ".noise-secret").read_text(), 16)
    again = prepare(of, DPSGD(Clip(1.0)), Options(privacy=privacy, out=tmp_path / "run", **how))
    torch.testing.assert_close(gradients(again.engine), of_order(secret))
    other = prepare(of, DPSGD(Clip(1.0)), Options(privacy=privacy, **how))
    for mine, known, theirs in zip(gradients(other.engine), of_order(0), of_order(secret), strict=True):
        assert not torch.allclose(mine, known)
        assert not torch.allclose(mine, theirs)
    clients = Privacy(epsilon=8, trust="central", noise="secure")
    plain = prepare(of, DPSGD(Clip(1.0)), Options(privacy=clients, **how))
    assert torch.equal(
        batches_of(of, plain.plan).draw(torch.arange(1), 3)[0], Batches(of.sizes, 8, 0).draw(torch.arange(1), 3)[0]
    )
