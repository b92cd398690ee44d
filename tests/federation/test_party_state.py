"""The file of a party's state: what is written is what is read, and damage is noticed."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from normec.errors import UsageError
from normec.federation.protocol import party_state
from normec.federation.protocol.party_state import PartyState, Pending
from normec.privacy.hash_chain import Head


def made() -> PartyState:
    memory, fixed = torch.linspace(-1, 1, 12).reshape(1, 12), torch.ones(1, 3, dtype=torch.float64)
    message = torch.arange(12.0)
    pending = Pending(3, "terms", "", message, message, {"memory": memory + 1, "fixed": fixed}, None)
    client = {"memory": memory, "fixed": fixed}
    return PartyState("token", client, 2, 3, "digest", Head(4, "ab"), pending=pending)


def same(one: PartyState, other: PartyState) -> bool:
    def flat(state: PartyState) -> dict[str, torch.Tensor]:
        assert state.pending is not None
        tables = {f"client.{name}": rows for name, rows in (state.client or {}).items()}
        tables |= {f"draft.{name}": rows for name, rows in state.pending.draft.items()}
        return tables | {"sent": state.pending.sent, "taken": state.pending.taken}

    def facts(state: PartyState) -> tuple[object, ...]:
        known = state.pending
        assert known is not None
        alone = dataclasses.replace(state, client=None, pending=None)
        return alone, known.round, known.terms, known.digest, known.loss, known.released

    ours, theirs = flat(one), flat(other)
    equal = all(rows.dtype == theirs[name].dtype and torch.equal(rows, theirs[name]) for name, rows in ours.items())
    return ours.keys() == theirs.keys() and equal and facts(one) == facts(other)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path, state = tmp_path / "a.safetensors", made()
    saved = party_state.save(path, state)
    loaded = party_state.load(path)
    assert loaded is not None
    assert same(saved, state)
    assert same(saved, loaded)


def test_a_state_that_was_saved_has_tensors_of_its_own(tmp_path: Path) -> None:
    """An engine may use its buffers again."""
    state = made()
    assert state.pending is not None
    saved = party_state.save(tmp_path / "a.safetensors", state)
    state.pending.sent.zero_()
    assert saved.pending is not None
    assert torch.equal(saved.pending.sent, torch.arange(12.0))
    assert saved.pending.taken is saved.pending.sent


def rewrite(path: Path, change: bool = False, version: int = 4) -> None:
    """Write a state as earlier versions did, with the checksum of SHA-256; with `change`, one number differs."""
    with safe_open(str(path), framework="pt") as file:
        text = file.metadata()["state"].replace('"format": 4', f'"format": {version}')
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"/{name}/{tensors[name].dtype}/".encode() + tensors[name].numpy().tobytes())
    if change:
        tensors["sent"][0] += 1
    save_file(tensors, path, {"state": text, "sha256": digest.hexdigest()})


def test_states_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    saved = party_state.save(path, made())
    rewrite(path)
    loaded = party_state.load(path)
    assert loaded is not None
    assert same(saved, loaded)
    rewrite(path, change=True)
    with pytest.raises(UsageError, match="checksum"):
        party_state.load(path)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    party_state.save(path, made())
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(UsageError, match="checksum"):
        party_state.load(path)


def test_a_file_that_is_written_again_has_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    assert party_state.identity(path) is None
    party_state.save(path, made())
    first = party_state.identity(path)
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    assert party_state.identity(path) != first


def test_a_state_that_cannot_be_read_says_why_once(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for change, version, reason in (
        (True, 4, "is damaged: its checksum differs"),
        (False, 3, "has format 3, this version of normec reads 4; use the one that wrote it"),
    ):
        party_state.save(path, made())
        rewrite(path, change, version)
        with pytest.raises(UsageError) as error:
            party_state.load(path)
        assert str(error.value) == f"{path} {reason}"
