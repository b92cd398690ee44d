"""A model's parameters, group by group, as one flat vector."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError

Groups = Sequence[dict[str, Any]]
Held = tuple[Tensor, Tensor]  # a parameter's memory, and a copy of its values
_wrapped = 0  # models wrapped in DDP or FSDP, and layers of SyncBatchNorm, since this module was imported


def _wrappers() -> tuple[type[nn.Module], ...]:
    """The classes whose models have gradients that are means over all ranks; FSDP only if somebody has imported it."""
    loaded = sys.modules.get("torch.distributed.fsdp")  # its import takes a second
    sharded = getattr(loaded, "FullyShardedDataParallel", None)
    return (DistributedDataParallel,) if sharded is None else (DistributedDataParallel, sharded)


def _with_subclasses(classes: Iterable[type]) -> set[type]:
    """The classes and all classes below them, in a set, where a type is found faster than among its ancestors."""
    return {found for one in classes for found in (one, *_with_subclasses(one.__subclasses__()))}


def _count_wrapped(outer: nn.Module, name: str, inner: nn.Module | None) -> None:  # noqa: ARG001
    global _wrapped
    _wrapped += isinstance(outer, _wrappers()) or isinstance(inner, nn.SyncBatchNorm)


register_module_module_registration_hook(_count_wrapped)


def _all_objects() -> list[Any]:
    """Every object that the garbage collector knows, also those that `gc.freeze` hides from `gc.get_objects`."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()  # what nobody refers to would be frozen with the rest, and stay
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


class FlatParameters:
    """The flat vector of trainable parameters, in the order of the groups; each group has its own lr.

    Parameters that are frozen (`requires_grad` is False) at creation are not part of it.
    """

    def __init__(self, groups: Groups) -> None:
        self._all: list[Tensor] = [p for group in groups for p in group["params"]]
        self.parameters: list[Tensor] = [p for p in self._all if p.requires_grad]
        if not self.parameters:
            raise UsageError("there are no parameters to optimise, because none has requires_grad")
        if any(hasattr(p, "device_mesh") for p in self._all):
            raise UsageError(
                "the parameters are distributed over ranks (DTensor, as in FSDP2 or tensor parallelism), and a rank's "
                "clients need whole ones; pass the model itself"
            )
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            raise UsageError(f"all parameters must have one dtype and device, got {sorted(map(str, kinds))}")
        first = self.parameters[0]
        if first.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"parameters must be float32 or float64, got {first.dtype}; use autocast to compute in {first.dtype}"
            )
        self.frozen = [p for p in self._all if not p.requires_grad]
        self.shapes = [list(p.shape) if p.requires_grad else None for p in self._all]  # None: frozen
        self.sizes = [p.numel() for p in self.parameters]
        self.like = first.detach().new_zeros(())
        # How many models and layers `_wrapped` counted at the last check of each kind.
        self._looked_at: dict[str, int] = {}

    @property
    def dimension(self) -> int:
        return sum(self.sizes)

    def values(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters])

    def checksum(self) -> str:
        """Return a checksum of all parameters, including frozen ones."""
        digest = hashlib.sha256()
        for p in self._all:
            digest.update(p.detach().flatten().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def held(self) -> list[Held]:
        """Return the memory and the values of all parameters of the groups, including frozen ones."""
        return [(p.data, p.detach().clone()) for p in self._all]

    def set_back(self, held: Sequence[Held]) -> None:
        """Give the parameters the memory and the values that they had; those that have not changed are not written to.

        First the memory of all, because two may share one by now.
        """
        for p, (memory, _) in zip(self._all, held, strict=True):
            if _place(p) != _place(memory):
                p.data = memory
        for p, (_, values) in zip(self._all, held, strict=True):
            if not _same_bits(p, values):
                p.copy_(values)

    def set(self, values: Tensor) -> None:
        for p, part in zip(self.parameters, values.split(self.sizes), strict=True):
            p.copy_(part.view_as(p))

    def gradient(self) -> Tensor | None:
        """Return the gradient as one vector, zero for unused parameters; None if no parameter has a gradient."""
        if all(p.grad is None for p in self.parameters):
            return None
        for p in self.parameters:
            if p.grad is not None and p.grad.is_sparse:
                raise UsageError("sparse gradients are not supported, because a message is a dense vector")
        return torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters]
        )

    def refuse_averaging(self) -> None:
        """Refuse parameters of a model in DDP or FSDP, whose gradients are means over all ranks.

        Searching all objects takes a while, so it is done once, and again after a model was wrapped.
        """
        if self._looked_at.get("wrappers") == _wrapped:
            return
        own, wrappers, things = {id(p) for p in self.parameters}, _with_subclasses(_wrappers()), _all_objects()
        for thing in [] if wrappers.isdisjoint(map(type, things)) else things:  # a few times faster than the search
            if type(thing) in wrappers and own & {id(p) for p in thing.parameters()}:
                raise UsageError(
                    f"the model is wrapped in {type(thing).__name__}, which averages the gradients of all ranks before "
                    "any message is made; pass the model itself"
                )
        self._looked_at["wrappers"] = _wrapped

    def refuse_shared_statistics(self) -> None:
        """Refuse a model with SyncBatchNorm, which computes with the records of all ranks, and tells them statistics.

        A layer without parameters is recognised by the modules that it is part of.
        """
        if self._looked_at.get("layers") == _wrapped:
            return
        own, kinds, things = {id(p) for p in self.parameters}, _with_subclasses([nn.SyncBatchNorm]), _all_objects()
        if not kinds.isdisjoint(map(type, things)):
            models = [thing for thing in things if issubclass(type(thing), nn.Module)]
            for model in models:
                shared = any(type(layer) in kinds for layer in model.modules())
                if shared and own & {id(p) for p in model.parameters()}:
                    raise UsageError(
                        "the model has SyncBatchNorm, which shares statistics of the clients' records with all ranks, "
                        "without noise; use GroupNorm, or BatchNorm for each rank"
                    )
        self._looked_at["layers"] = _wrapped

    def clear_gradients(self) -> None:
        """Clear the gradients of all parameters, whatever groups they belong to by now."""
        for p in self._all:
            p.grad = None

    def refuse_changes(self, groups: Groups) -> None:
        """Refuse parameters that were frozen, unfrozen, or added to or removed from a group after creation."""
        exchanged = [id(p) for group in groups for p in group["params"]] != [id(p) for p in self._all]
        if exchanged or [id(p) for p in self._all if p.requires_grad] != [id(p) for p in self.parameters]:
            what = "the parameters of the groups were exchanged" if exchanged else "parameters were frozen or unfrozen"
            raise UsageError(
                f"{what} after the optimizer was created, whose memories have a fixed size; create a new optimizer"
            )
        kinds = {(p.dtype, p.device) for p in self.parameters} - {(self.like.dtype, self.like.device)}
        if kinds:
            raise UsageError(
                f"the parameters were {self.like.dtype} on {self.like.device} when the optimizer was created, and are "
                f"{', '.join(f'{dtype} on {device}' for dtype, device in sorted(kinds, key=str))} now; convert the "
                "model before"
            )

    def move(self, direction: Tensor, groups: Groups) -> None:
        """x ← x − lr · direction, group by group."""
        parts = iter(direction.split(self.sizes))
        for group in groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.add_(next(parts).view_as(p), alpha=-group["lr"])

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split ``[..., d]`` into one view per parameter, of shape ``[..., *p.shape]``."""
        parts = rows.split(self.sizes, dim=-1)
        return [part.view(rows.shape[:-1] + p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where and how a tensor lies in memory."""
    where = tensor.data_ptr(), tensor.shape, tensor.stride() if tensor.layout is torch.strided else None
    return (*where, tensor.dtype, tensor.device, tensor.is_inference())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes; False where that cannot be seen."""
    if one.layout is not torch.strided or one.is_quantized:
        return False
    return torch.equal(*(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
