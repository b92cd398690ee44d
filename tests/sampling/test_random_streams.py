"""Philox against its published answers; streams as tables that do not depend on who else asks, or when."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normec.sampling import random_streams
from normec.sampling.random_streams import (
    Key,
    Stream,
    coins_below,
    derive_seed,
    own_numbers,
    philox_in_numpy,
    philox_in_tensors,
    seed_generators,
    seed_in_secret,
)

from ..support import reference

# Random123's kat_vectors for philox4x32 with ten rounds: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORD = st.integers(0, 2**32 - 1)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def run_philox(counter: list[int], key: int) -> list[int]:
    even, odd = philox_in_numpy([np.array([word], np.uint64) for word in counter], key)
    return [int(word[0]) for word in (even[0], odd[0], even[1], odd[1])]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    low, high = words(key)
    assert run_philox(words(counter), low + (high << 32)) == words(answer)
    assert reference.philox(words(counter), low + (high << 32)) == words(answer)


@settings(max_examples=100, deadline=None)
@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.integers(0, 2**64 - 1))
def test_philox_in_tensors_is_philox_in_whole_numbers(counter: tuple[int, ...], key: int) -> None:
    assert run_philox(list(counter), key) == reference.philox(list(counter), key)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    client=st.integers(0, 10**6),
    step=st.sampled_from([0, 1, 77, 2**32 - 1, 2**32, 2**40 + 3]),
    count=st.integers(1, 9),
)
def test_a_stream_is_philox_counted_by_position_client_and_step(seed: int, client: int, step: int, count: int) -> None:
    drawn = Stream(seed, "purpose").uniform(torch.tensor([client]), step, count)
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == [reference.uniforms(seed, "purpose", client, step, count)]


def test_philox_on_the_host_is_philox_in_tensors() -> None:
    """A GPU computes in tensors; the table has more counters than NumPy takes at once."""
    draw = torch.Generator().manual_seed(0)
    counter = tuple(torch.randint(2**32, (101, 100), generator=draw) for _ in range(4))
    counter = (counter[0][:1].expand(101, 100), *counter[1:])
    kept = [word.clone() for word in counter]
    for key in (0, 2**64 - 1, 0x0123456789ABCDEF):
        even, odd = philox_in_numpy([word.numpy().view(np.uint64) for word in counter], key)
        host = [torch.from_numpy(word.astype(np.int64)) for word in (even[0], odd[0], even[1], odd[1])]
        assert all(map(torch.equal, host, philox_in_tensors(counter, key)))
    assert all(map(torch.equal, counter, kept))


def test_uniforms_are_uniform() -> None:
    drawn = Stream(3, "test").uniform(torch.arange(100), 4, 2000).flatten()
    assert 0 <= float(drawn.min()) <= float(drawn.max()) < 1
    counts = torch.histc(drawn, bins=100, min=0, max=1)
    chi = float(((counts - len(drawn) / 100) ** 2 / (len(drawn) / 100)).sum())
    assert abs(chi - 99) < 5 * math.sqrt(2 * 99)
    scaled = (drawn * 2**53).long()
    for bit in range(53):
        share = float((scaled >> bit & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(drawn)), bit


def test_bits_fill_63_bits() -> None:
    bits = Stream(3, "test").bits(torch.arange(50), 4, 1001)
    assert bits.shape == (50, 1001)
    assert int(bits.min()) >= 0
    assert bits.dtype == torch.int64
    for bit in range(63):
        assert abs(float((bits >> bit & 1).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(bits.numel()), bit
    assert len(bits.unique()) == bits.numel()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_clients_steps_purposes_seeds_and_positions_are_independent() -> None:
    clients, count = torch.arange(200), 500
    base = Stream(1, "a").uniform(clients, 7, count)
    others = {
        "step": Stream(1, "a").uniform(clients, 8, count),
        "far step": Stream(1, "a").uniform(clients, 7 + 2**32, count),
        "client": Stream(1, "a").uniform(clients + 1, 7, count),
        "purpose": Stream(1, "b").uniform(clients, 7, count),
        "seed": Stream(2, "a").uniform(clients, 7, count),
        "position": base.roll(1, dims=1),
    }
    for name, other in others.items():
        if name == "client":
            assert torch.equal(other[:-1], base[1:])  # the same client, another row
            other = other.roll(3, dims=1)
        assert abs(correlation(base, other)) < 5 / math.sqrt(base.numel()), name


@settings(max_examples=60, deadline=None)
@given(
    clients=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    step=st.integers(0, 2**40),
    count=st.integers(1, 20),
)
def test_a_row_depends_on_its_client_alone(clients: list[int], step: int, count: int) -> None:
    stream = Stream(9, "rows")
    table = stream.bits(torch.tensor(clients), step, count)
    for row, client in zip(table, clients, strict=True):
        assert torch.equal(stream.bits(torch.tensor([client]), step, count + 5)[0, :count], row)


def test_each_client_may_be_at_a_step_of_its_own() -> None:
    stream, clients, steps = Stream(9, "rows"), torch.tensor([4, 4, 2, 0]), torch.tensor([0, 5, 5, 2**33])
    table = stream.uniform(clients, steps, 7)
    for row, client, step in zip(table, clients.tolist(), steps.tolist(), strict=True):
        assert torch.equal(stream.uniform(torch.tensor([client]), step, 7)[0], row)


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1, 1 / 3, 1e-9, 3e-15, 1e-17, 5e-324])
def test_a_coin_never_falls_more_often_than_its_rate_says(rate: float) -> None:
    """The account counts a round at its rate, so a probability above it would be an ε below the truth."""
    faces = coins_below(rate)
    assert Fraction(faces, 2**53) <= Fraction(rate) < Fraction(faces + 1, 2**53)


@settings(max_examples=30, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 2**63 - 1), st.sampled_from([0, 1, 2**32, 2**63]), st.integers(1, 9)), min_size=2
    )
)
def test_numbers_of_all_clients_are_those_of_a_new_generator(asked: list[tuple[int, int, int]]) -> None:
    """Whatever was drawn before."""
    for seed, step, count in asked:
        fresh = np.random.Philox(key=derive_seed(seed, "x"), counter=[0, step, 0, 0]).random_raw(count)
        assert Stream(seed, "x").of_all(step, count).tolist() == [int(word) >> 1 for word in fresh]


def test_threads_do_not_disturb_each_other() -> None:
    """Each draws as many numbers as keep it busy while the others draw."""
    stream = Stream(3, "x")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda step: stream.of_all(step, 10_000), range(64)))
    assert all(torch.equal(one, stream.of_all(step, 10_000)) for step, one in enumerate(found))


def test_nobody_and_nothing() -> None:
    assert Stream(0, "x").uniform(torch.arange(0), 3, 5).shape == (0, 5)
    assert Stream(0, "x").uniform(torch.arange(2), 3, 0).shape == (2, 0)


def test_a_key_gives_one_uniform_an_entry() -> None:
    stream, clients = Stream(5, "operator"), torch.tensor([2, 9])
    assert torch.equal(Key(stream, 3, clients).uniform(torch.zeros(2, 6)), stream.uniform(clients, 3, 6))


def test_derived_seeds_differ_by_path_and_fit_63_bits() -> None:
    paths = [(s, "model", c, r) for s in range(4) for c in range(20) for r in range(20)]
    seeds = {derive_seed(s, *path) for s, *path in paths}
    assert len(seeds) == len(paths)
    assert min(seeds) >= 0
    assert max(seeds) < 2**63
    assert derive_seed(1, "a", 23) != derive_seed(12, "a", 3)
    assert derive_seed(7, "x") == derive_seed(7, "x")


def test_streams_do_not_touch_torch_s_generator() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    Stream(0, "x").uniform(torch.arange(3), 0, 4)
    assert torch.equal(torch.rand(3), expected)


def test_a_secret_fills_the_whole_state_of_the_generator() -> None:
    """NumPy's Mersenne twister with the same 624 words draws the same numbers."""
    with torch.random.fork_rng(devices=[]):
        seed_in_secret(3, torch.device("cpu"), "model", 0, 1)
        found = torch.rand(2000)
    twister = np.random.MT19937()
    words = np.frombuffer(hashlib.shake_256(b"3/model/0/1").digest(4 * 624), np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    assert torch.equal(found, torch.from_numpy((twister.random_raw(2000) % 2**24 / 2**24).astype(np.float32)))


def test_a_gpu_that_is_not_the_current_one_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be on cuda:1, while cuda:0 is current; its dropout draws from the generator of cuda:1."""
    gpus = [torch.Generator().manual_seed(number) for number in range(2)]
    for name, value in (("device_count", lambda: 2), ("current_device", lambda: 0), ("_lazy_call", _at_once)):
        monkeypatch.setattr(torch.cuda.random, name, value)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    with torch.random.fork_rng(devices=[]):
        seed_generators(5, torch.device("cuda", 1))
    assert [gpu.initial_seed() for gpu in gpus] == [5, 5]


def _at_once(action: Callable[[], None], **_: bool) -> None:
    action()


def test_secrets_whose_seeds_agree_draw_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CPU generator keeps 32 bits of a seed, and anybody can try out so many."""
    monkeypatch.setattr(random_streams, "derive_seed", lambda *_: 7)
    host = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        drawn = []
        for number in range(2):
            seed_generators(7 + 2**32 * number, host)
            drawn.append(torch.rand(8))
            seed_in_secret(number, host)
            drawn.append(torch.rand(8))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[1], drawn[3])


def drawn() -> list[float]:
    """Numbers of all generators; NumPy draws two Gaussians at once, and none is kept."""
    gaussians = [float(np.random.normal()) for _ in range(2)]
    return [random.random(), float(np.random.random()), *gaussians, float(torch.rand(()))]


@pytest.mark.parametrize("often", [False, True])
def test_code_of_the_user_s_own_gets_numbers_of_its_seed_and_leaves_the_generators_alone(often: bool) -> None:
    def seeded() -> None:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)

    seeded()
    expected = [drawn(), drawn()]
    seeded()
    assert drawn() == expected[0]
    with own_numbers(5, often=often):
        inside = drawn()
        with own_numbers(6, often=often):
            other = drawn()
        after = drawn()
    assert drawn() == expected[1]
    assert other not in (inside, after)
    for again in (False, True):
        with own_numbers(5, often=again):
            assert [drawn(), drawn()] == [inside, after]
    seeded()
    with pytest.raises(ZeroDivisionError), own_numbers(5, often=often):
        1 / (drawn()[0] * 0)
    assert drawn() == expected[0]


def test_a_user_s_own_generator_of_numpy_comes_back() -> None:
    shared, own = np.random.get_bit_generator(), np.random.PCG64(3)
    np.random.set_bit_generator(own)
    try:
        with own_numbers(5, often=True):
            assert np.random.get_bit_generator() is not own
        assert np.random.get_bit_generator() is own
    finally:
        np.random.set_bit_generator(shared)


@pytest.mark.parametrize("function", ["torch.set_rng_state", "random.setstate"])
def test_generators_are_set_back_although_ctrl_c_comes_meanwhile(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    module = {"torch": torch, "random": random}[function.partition(".")[0]]
    name = function.partition(".")[2]
    given, left = getattr(module, name), [1]

    def interrupted(state: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise KeyboardInterrupt
        given(state)

    before = torch.get_rng_state(), random.getstate()
    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt), own_numbers(5):
        drawn()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
