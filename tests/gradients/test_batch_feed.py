"""Record numbers and augmentation's uniforms, drawn ahead for many rounds: the very ones the loop draws in each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normec.gradients.batch_feed import BatchFeed
from normec.gradients.loop import LoopEngine
from normec.problems.client_data import ResidentRecords
from normec.sampling.batches import Batches
from normec.sampling.random_streams import Stream

from .cases import BATCH, SIZES, problem

SEED = 6


def feed(batch: int | None, sizes: tuple[int, ...] = SIZES) -> tuple[BatchFeed, Batches | None, ResidentRecords]:
    of = problem("augmented pixels", sizes=sizes)
    assert isinstance(of.records, ResidentRecords)
    assert of.sizes is not None
    batches = Batches(of.sizes, batch, SEED) if batch is not None else None
    return BatchFeed(of, of.records, batches, SEED), batches, of.records


def expected(records: ResidentRecords, clients: Tensor, batch: int | None, round: int) -> list[list[int]]:
    """Batch by batch, from a source of its own."""
    if batch is None:
        return [records.rows[client].tolist() for client in clients.tolist()]
    drawn = Batches(records.sizes, batch, SEED).draw(clients, round)
    return [records.rows[client][rows].tolist() for client, rows in zip(clients.tolist(), drawn, strict=True)]


@pytest.mark.parametrize("batch", [BATCH, 2, 9, 40, None])
@pytest.mark.parametrize("block", [1, 12, 1000])
def test_groups_part_the_clients_by_length(batch: int | None, block: int) -> None:
    source, _, _ = feed(batch)
    clients = torch.tensor([0, 1, 3, 4])
    groups = list(source.groups(clients, block, full=False))
    assert torch.cat(groups).sort().values.tolist() == clients.tolist()
    for group in groups:
        lengths = source.lengths(group, full=False)
        assert len(lengths.unique()) == 1
        assert len(group) == 1 or int(lengths.sum()) <= block
        assert group.tolist() == sorted(group.tolist())


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("everyone", [True, False])
@pytest.mark.parametrize("batch", [BATCH, 2, None])
def test_tables_hold_the_loop_s_batches_in_any_order_of_rounds(
    batch: int | None, everyone: bool, as_on_a_gpu: bool
) -> None:
    source, batches, records = feed(batch)
    if as_on_a_gpu and batches is not None:  # which draws in tensors and looks the numbers up itself
        source._owned_there = source._owned
    for round in (0, 1, 7, 8, 9, 30, 3, 300, 301, 0):
        for group in source.groups(torch.arange(5), 12, full=False):
            numbers, _ = source.tables(group, round, everyone=everyone)
            assert numbers.tolist() == expected(records, group, batch, round)


def test_full_tables_hold_every_record_whatever_the_batches_are() -> None:
    source, _, records = feed(BATCH)
    for group in source.groups(torch.arange(5), 1000, full=True):
        numbers, _ = source.tables(group, 2, everyone=True, full=True)
        assert numbers.tolist() == expected(records, group, None, 2)


def test_another_grouping_of_the_same_clients_gets_its_own_tables() -> None:
    """As after running out of memory: the group that begins with client 0 is smaller than it was."""
    source, _, records = feed(BATCH, (9,) * 6)
    for block in (1000, 15, 5):
        for group in source.groups(torch.arange(6), block, full=False):
            numbers, uniforms = source.tables(group, 4, everyone=True)
            assert numbers.tolist() == expected(records, group, BATCH, 4)
            assert uniforms is not None
            assert uniforms.shape[:2] == numbers.shape


@pytest.mark.parametrize("everyone", [True, False])
@pytest.mark.parametrize("batch", [BATCH, None])
def test_uniforms_are_the_loop_s(batch: int | None, everyone: bool) -> None:
    source, batches, _ = feed(batch)
    loop = LoopEngine(problem("augmented pixels"), batches, SEED)
    for round in (0, 5, 11):
        for group in source.groups(torch.arange(5), 1000, full=False):
            _, uniforms = source.tables(group, round, everyone=everyone)
            assert uniforms is not None
            for own, client in zip(uniforms, group.tolist(), strict=True):
                rows = batches.draw(torch.tensor([client]), round)[0] if batches is not None else None
                theirs = loop._uniforms(client, rows, round, torch.device("cpu"))
                assert theirs is not None
                assert torch.equal(own, theirs)
                count = own.numel()
                direct = Stream(SEED, "augment").uniform(torch.tensor([client]), round, count)
                assert torch.equal(own.flatten(), direct[0])


def test_blocks_are_about_equal_and_no_more_than_needed() -> None:
    source, _, _ = feed(BATCH, (9,) * 11)
    for block, lengths in ((4 * BATCH, [4, 4, 3]), (10 * BATCH, [6, 5]), (11 * BATCH, [11]), (1, [1] * 11)):
        assert [len(group) for group in source.groups(torch.arange(11), block, full=False)] == lengths
