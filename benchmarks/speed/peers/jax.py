"""JAX with compiled gradients and updates; clients by `vmap`, or one by one for ResNet20 on the CPU (faster there)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..clock import Clock, run_rounds
from ..workloads import ALPHA, BETA, LR, Case, WorkloadData

Params = dict[str, Any]


def run(data: WorkloadData, clock: Clock) -> str:
    case = data.case
    if case.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp

    products = "highest" if case.precision == "float32" else "tensorfloat32"
    jax.config.update("jax_default_matmul_precision", products)
    inputs, targets = jnp.asarray(data.inputs.cpu().numpy()), jnp.asarray(data.targets.cpu().numpy())
    rows = data.rows.numpy()
    objective = partial(loss, case=case, shapes=shapes(data))

    @jax.jit  # type: ignore[untyped-decorator]
    def gradient(x: Any, inputs: Any, targets: Any, batch: Any) -> Any:
        return jax.grad(objective)(x, inputs[batch], targets[batch])

    @jax.jit  # type: ignore[untyped-decorator]
    def together(x: Any, inputs: Any, targets: Any, batches: Any) -> Any:
        return jax.vmap(jax.grad(objective), (None, 0, 0))(x, inputs[batches], targets[batches])

    def one_by_one(x: Any, inputs: Any, targets: Any, batches: Any) -> Any:
        return jnp.stack([gradient(x, inputs, targets, batch) for batch in batches])

    gradients = one_by_one if case.images and case.device == "cpu" else together

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def advance(x: Any, memory: Any, estimate: Any, clients: Any, grads: Any) -> tuple[Any, Any, Any]:
        everyone = case.drawn == case.clients
        difference = grads - (memory if everyone else memory[clients])
        message = difference / (ALPHA + jnp.linalg.norm(difference, axis=1, keepdims=True))
        memory = memory + BETA * message if everyone else memory.at[clients].add(BETA * message)
        estimate = estimate + BETA / case.clients * message.sum(0)
        return x - LR * estimate / jnp.linalg.norm(estimate), memory, estimate

    x = jnp.concatenate([jnp.asarray(p.detach().numpy()).ravel() for p in data.built.model.parameters()])
    state = x, jnp.zeros((case.clients, len(x))), jnp.zeros_like(x)
    random = np.random.default_rng(0)

    def once() -> None:
        nonlocal state
        clients = np.asarray(data.draw())
        picked = random.random((case.drawn, case.spec.records)).argpartition(case.spec.batch, axis=1)
        batches = np.take_along_axis(rows[clients], picked[:, : case.spec.batch], axis=1)
        state = jax.block_until_ready(advance(*state, clients, gradients(state[0], inputs, targets, batches)))

    run_rounds(once, clock)
    return ""


def shapes(data: WorkloadData) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in data.built.model.named_parameters()}


def loss(x: Any, inputs: Any, targets: Any, case: Case, shapes: dict[str, tuple[int, ...]]) -> Any:
    import jax
    import jax.numpy as jnp

    model: dict[str, Callable[[Params, Any], Any]] = {"mlp": _mlp, "logistic": _logistic, "resnet20": _resnet}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
    parts = jnp.split(x, ends)
    outputs = model[case.workload](
        {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}, inputs
    )
    if case.workload == "logistic":
        return (jnp.logaddexp(0.0, outputs) - outputs * targets).mean()
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), targets[:, None], axis=1).mean()


def _mlp(p: Params, inputs: Any) -> Any:
    import jax

    return jax.nn.relu(inputs @ p["1.weight"].T + p["1.bias"]) @ p["3.weight"].T + p["3.bias"]


def _logistic(p: Params, inputs: Any) -> Any:
    return inputs @ p["weight"][0]


def _resnet(p: Params, inputs: Any) -> Any:
    """ResNet20 as in `normec.models`, with batch statistics and without running ones."""
    import jax
    import jax.numpy as jnp

    def conv(value: Any, name: str, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(
            value, p[name + ".weight"], (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    def norm(value: Any, name: str) -> Any:
        mean, variance = value.mean((0, 2, 3), keepdims=True), value.var((0, 2, 3), keepdims=True)
        scaled = (value - mean) * jax.lax.rsqrt(variance + 1e-5)
        return scaled * p[name + ".weight"][:, None, None] + p[name + ".bias"][:, None, None]

    out = jax.nn.relu(norm(conv(inputs, "conv"), "norm"))
    for block in range(9):
        here, stride = f"stages.{block}", 2 if block in (3, 6) else 1
        shortcut = out[:, :, ::stride, ::stride]
        inner = jax.nn.relu(norm(conv(out, f"{here}.conv1", stride), f"{here}.norm1"))
        inner = norm(conv(inner, f"{here}.conv2"), f"{here}.norm2")
        missing = (inner.shape[1] - shortcut.shape[1]) // 2
        out = jax.nn.relu(inner + jnp.pad(shortcut, ((0, 0), (missing, missing), (0, 0), (0, 0))))
    return out.mean((2, 3)) @ p["head.weight"].T + p["head.bias"]
