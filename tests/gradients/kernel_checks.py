"""Triton's kernels against plain PyTorch, on a GPU or, with TRITON_INTERPRET=1, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.gradients.kernel_checks [DEVICE [-]]

With "-", the numbers of checks come from the standard input, a byte each, which several processes may share.
The interpreter multiplies no matrices of bfloat16: those checks are for a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from normec import DPSGD, GD, Clip, Clip21, ErrorFeedback, Identity, Method, NormEC, kernels
from normec.gradients.engine import Block
from normec.gradients.loop import LoopEngine
from normec.gradients.precision import products
from normec.gradients.record_clip import RecordClip
from normec.gradients.shared import record_sums
from normec.gradients.shared.engine import SharedEngine
from normec.problems.client_data import ResidentRecords
from normec.training import fused_update as update

from ..support.covering import combined
from ..support.forms import form
from . import image_checks, norm_checks, own_weight_checks, pool_checks, tile_checks
from .cases import BATCH, engines, everything, problem
from .nearness import LAST, framed, near, untouched
from .structures import RECURRENT

# clients, records, channels in and out, kernel, stride, padding, dilation, height, width
SHAPES = [
    (3, 2, 3, 5, (3, 3), 1, 1, 1, 6, 7),
    (2, 3, 17, 20, (3, 3), 2, 1, 1, 9, 8),
    (2, 2, 4, 4, (1, 2), 1, 0, 2, 5, 6),
    (2, 9, 2, 3, (5, 3), (1, 2), (2, 0), 1, 11, 10),  # enough pixels for several spans
    (2, 2, 17, 130, (3, 3), 1, 1, 1, 5, 6),  # enough channels for large blocks
    (1, 1, 1, 1, (1, 1), 1, 0, 1, 1, 1),
]


def check_convolution(device: str) -> None:
    """Weight gradients in float32, exact and with rounded inputs, and on a GPU in bfloat16.

    Rounded inputs may be of any size, different for every client and channel.
    """
    from normec.kernels.weight_gradients import weight_gradients

    for clients, records, ci, co, size, stride, padding, dilation, height, width in SHAPES:
        torch.manual_seed(0)
        layer = nn.Conv2d(ci, co, size, stride, padding, dilation, bias=False, device=device)
        x = torch.randn(clients * records, ci, height, width, device=device)
        g = torch.randn_like(layer(x))
        kinds = [(torch.float32, True, 5e-6), (torch.float32, False, 1e-3), (torch.bfloat16, True, 2e-5)]
        for dtype, exact, close in kinds if device != "cpu" else kinds[:2]:
            a, b, fine = x.to(dtype), g.to(dtype), layer.double()
            if not exact:
                sizes = torch.tensor([1e-15, 1.0, 1e15])[:clients].repeat_interleave(records)
                a, b = a * sizes.to(a)[:, None, None, None], b * sizes.flip(0).to(b)[:, None, None, None] ** 2
                b[:, 0] *= 1e-6  # a channel alone
            grads = [
                torch.autograd.grad(fine(own.double()), fine.weight, slope.double())[0]
                for own, slope in zip(a.chunk(clients), b.chunk(clients), strict=True)
            ]
            layer.float()
            matrix, rows = framed(clients, *layer.weight.shape, device=device)
            geometry = [list(part) for part in (layer.stride, layer.padding, layer.dilation)]
            weight_gradients(
                a.contiguous(memory_format=LAST), b.contiguous(memory_format=LAST), rows, *geometry, exact=exact
            )  # type: ignore[misc]
            for row, grad in zip(rows.unbind(0), grads, strict=True):
                for own, expected in zip(row, grad, strict=True):
                    near(own, expected, close, (dtype, exact, layer))
            untouched(matrix)


METHODS = (
    NormEC(0.5, 0.4),
    NormEC(0.0, 0.4, decay=0.1),
    Clip21(2.0),
    ErrorFeedback(Identity(), beta=0.7, decay=0.5),
    DPSGD(Clip(2.0)),
    GD(),
)


def check_update(device: str) -> None:
    """Against `client_step` in float64: all rows, rows by number, one row; float32 and bfloat16 memories."""
    cases = combined(device, ((37, 1001), (3, 20001)), (1, 2), METHODS, (torch.float32, torch.bfloat16))
    for (count, dim), apart, method, dtype in cases:
        torch.manual_seed(0)
        grads = torch.randn(count, dim, device=device) * torch.logspace(-2, 2, count, device=device)[:, None]
        table = torch.randn(2 * count, dim, device=device)
        clients = torch.arange(count) * apart
        memory, losses = table.to(dtype), grads.new_zeros(count)
        before = memory.double()
        sent = update.apply_fused(form(method), Block.of(clients, grads.clone(), losses), memory, 5)
        rows = clients.to(device)
        messages, after = method.client_step(grads.double(), before[rows])
        what = (method.name, count, dtype)
        if form(method).memory and dtype == torch.bfloat16:  # what the memories took is what is sent
            messages_sum = (memory[rows].double() - (1 - method.decay) * before[rows]).sum(0) / method.beta
        else:
            messages_sum = messages.sum(0)
        near(sent.total, messages_sum, 1e-5 if dtype == torch.float32 else 1e-3, ("sum", *what))
        check_weights(method, clients, grads, before.to(dtype), memory)
        near(sent.lengths, messages.norm(dim=1, keepdim=True), 1e-5, ("lengths", *what))
        others = torch.ones(2 * count, dtype=torch.bool, device=device)
        others[rows] = False
        assert torch.equal(memory[others].double(), before[others]), what
        if form(method).memory:
            near(memory[rows], after, 1e-6 if dtype == torch.float32 else 5e-3, ("memory", *what))
            away = (grads.double() - before[rows]).norm(dim=1, keepdim=True)
            near(sent.distances, away, 1e-5, ("distances", *what))


def check_weights(method: Method, clients: Tensor, grads: Tensor, memory: Tensor, unweighted: Tensor) -> None:
    """The sum is Σ ω_i m_i of what the memories took, and the memories do not depend on the weights."""
    weights, rows, before = torch.linspace(0.1, 3, len(grads)).to(grads), clients.to(grads.device), memory.double()
    block = Block.of(clients, grads.clone(), grads.new_zeros(len(grads)))
    sent = update.apply_fused(form(method), block, memory, 5, weights)
    messages, _ = method.client_step(grads.double(), before[rows])
    if form(method).memory and memory.dtype == torch.bfloat16:
        messages = (memory[rows].double() - (1 - method.decay) * before[rows]) / method.beta
    expected = (weights.double()[:, None] * messages).sum(0)
    near(sent.total, expected, 1e-5 if memory.dtype == torch.float32 else 1e-3, ("weighted sum", method.name))
    assert torch.equal(memory, unweighted), ("weighted memory", method.name)


def check_rounding(device: str) -> None:
    """To one of the two neighbours, right on average, by the seed; what is broken stays so."""
    memory = torch.full((33, 1000), 1.0, dtype=torch.bfloat16, device=device)
    grads = torch.full((33, 1000), 1.0 + 2**-9, device=device)  # a quarter of the way to the next one up
    method, rows = ErrorFeedback(Identity()), torch.arange(33)
    found = []
    for seed in (1, 1, 2):
        held = memory.clone()
        update.apply_fused(form(method), Block.of(rows, grads.clone(), grads.new_zeros(33)), held, seed)
        up = held.float() == 1 + 2**-7
        assert ((held.float() == 1) | up).all()
        assert abs(float(up.double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 33000) ** 0.5
        found.append(up)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0][0], found[0][1])  # rows differ
    for bits in (0x7FFFFFFF, 0x7FC00000, -1):
        broken = torch.full((33, 1000), bits, dtype=torch.int32, device=device).view(torch.float32)
        held = memory.clone()
        update.apply_fused(form(method), Block.of(rows, broken, grads.new_zeros(33)), held, 1)
        assert held.isnan().all()


def check_shared_pass(device: str) -> None:
    """The engine with its kernels in float32 against the loop in float64."""
    for name in ("small", "batch norms", "norms", "convolutions", "partly frozen or unused"):
        of, fine = problem(name, device, torch.float32), problem(name)
        with products("float32"):
            _, shared, _ = engines(of, BATCH)
            found = everything(shared, of, 2)
        expected = everything(engines(fine, BATCH)[0], fine, 2)
        near(found.grads.cpu(), expected.grads, 1e-4, name)
        near(found.losses.cpu(), expected.losses, 1e-5, name)
        for key, rows in expected.buffers.items():
            near(found.buffers[key].cpu(), rows, 1e-5, (name, key))


def check_clipped_records(device: str) -> None:
    """Clipped records with the kernels, with tables of gradients and without, against autograd in float64.

    Half precision, in which a GPU has other kernels, is as near as its rounding allows.
    """
    clip = RecordClip(0.3)
    kinds = [("float32", 1e-4), ("tf32", 1e-3), ("bf16", 0.1)]
    recurrent = [RECURRENT[name] for name in ("lstm, two layers, both ways", "gru, sequence first")]
    for name in ("norms", "convolutions", *(["cnn-gn", *recurrent] if device != "cpu" else [])):
        fine = problem(name, sizes=(3, 2))
        expected = everything(LoopEngine(fine, None, 1, clip, "float32"), fine)
        for precision, close in kinds if device != "cpu" else kinds[:1]:
            of = problem(name, device, torch.float32, sizes=(3, 2))
            assert isinstance(of.records, ResidentRecords)
            for held in (2**24, 300):
                with products(precision), mock.patch.dict(record_sums._HELD, {device: held}):  # type: ignore[arg-type]
                    engine = SharedEngine(of, of.records, None, 1, precision, record_clip=clip)  # type: ignore[arg-type]
                    near(everything(engine, of).grads.cpu(), expected.grads, close, (name, precision, held))
            with products(precision):  # type: ignore[arg-type]
                loop = LoopEngine(of, None, 1, clip, precision)  # type: ignore[arg-type]
                near(everything(loop, of).grads.cpu(), expected.grads, close, (name, precision, loop.name))


def check_long_rows(_: str) -> None:
    """At most 256 squares of a row are added up one after another, however long it is and however many there are."""
    from normec.kernels.update import splits_of

    for clients in (1, 7, 1000, 100_000):
        for numbers in (1, 4096, 10**6, 2**26, 2**26 + 1, 2**28, 2**31):
            splits = splits_of(clients, numbers, 4096)
            assert math.ceil(numbers / splits / 4096) <= 256, (clients, numbers, splits)


CHECKS: tuple[Callable[[str], None], ...] = (
    check_convolution,
    check_update,
    check_long_rows,
    check_rounding,
    check_shared_pass,
    check_clipped_records,
    *image_checks.CHECKS,
    *norm_checks.CHECKS,
    *own_weight_checks.CHECKS,
    *pool_checks.CHECKS,
    *tile_checks.CHECKS,
)


def interpret_faster() -> None:
    """Let Triton's interpreter do without what takes two thirds of its time and finds nothing here.

    It replaces the functions of `triton.language` again at every call of a function within a kernel, not only at a
    launch, and computes every sum and product of 32-bit integers a second time, in 64 bits, as a GPU does not.
    """
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: dict[frozenset[str], object] = {}  # by the modules of the language that the functions see

    def replace_once(function: Any) -> Any:
        modules = frozenset(seen.__name__ for seen in function.__globals__.values() if inspect.ismodule(seen))
        if modules not in replaced:
            replaced[modules] = replace(function)
        return replaced[modules]

    def launch_anew(self: Any, *arguments: Any, **words: Any) -> None:
        replaced.clear()
        launch(self, *arguments, **words)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    share_shapes()


def share_shapes() -> None:
    """Let the interpreter check and describe each shape once, not for every number that a kernel computes."""
    from triton.language import core
    from triton.runtime import interpreter

    make_type, make_tensor, kind_of = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types: dict[tuple[object, ...], tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    kinds: dict[str, Any] = {}

    def type_of_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(part.value if isinstance(part, core.constexpr) else part for part in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def kind(type: Any) -> Any:
        if type.name not in kinds:
            kinds[type.name] = kind_of(type)
        return kinds[type.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = type_of_block, tensor, kind


def main() -> int:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    numbers = iter(lambda: os.read(0, 1), b"") if sys.argv[2:] == ["-"] else (bytes([n]) for n in range(len(CHECKS)))
    failed = 0
    if device == "cpu":
        interpret_faster()
    assert kernels.usable(torch.zeros(1, device=device)), "the kernels would not be used"
    for number in numbers:
        check = CHECKS[ord(number)]
        try:
            check(device)
            print(f"ok {check.__name__}", flush=True)
        except Exception:
            failed = 1
            print(f"failed {check.__name__}: {traceback.format_exc()}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
