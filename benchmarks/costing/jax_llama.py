"""JAX Llama: the benchmark's Llama in jax with parameters sharded as in Megatron, the rest by XLA's partitioner (run by
``xla.py``).

    python jax_llama.py LAYOUT LAYERS WIDTH BATCH LENGTH VOCABULARY HEADS INNER

Prints JSON: bytes that a rank receives, collectives by kind and matrix FLOPs of all ranks over those of one device, all read
from the compiled program.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from math import prod
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

COLUMNS, ROWS = ("q", "k", "v", "gate", "up", "embedding", "head"), ("o", "down")
WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2, "s64": 8, "f64": 8}


def make_parameters(layers: int, width: int, vocabulary: int, inner: int) -> dict[str, Any]:
    """Return random parameters by name, with one entry per layer for each weight."""
    shapes = dict.fromkeys("qkvo", (width, width)) | {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    made: dict[str, Any] = {"embedding": (vocabulary, width), "head": (vocabulary, width), "norm": (width,)}
    for layer in range(layers):
        made |= {f"{name}.{layer}": shape for name, shape in shapes.items()}
        made |= {f"norm1.{layer}": (width,), f"norm2.{layer}": (width,)}
    keys = jax.random.split(jax.random.key(0), len(made))
    return {name: jax.random.normal(key, shape) * 0.02 for key, (name, shape) in zip(keys, made.items(), strict=True)}


def apply_rms_norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def apply_rotary_embedding(x: Any) -> Any:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[2])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (jnp.concatenate([f(angles)] * 2, -1) for f in (jnp.cos, jnp.sin))
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def compute_loss(p: dict[str, Any], ids: Any, labels: Any, layers: int, heads: int) -> Any:
    """Return the mean cross-entropy of the Llama's logits for ``labels``."""
    x = p["embedding"][ids]
    batch, length, width = x.shape
    seen = jnp.tril(jnp.ones((length, length), bool))
    for layer in range(layers):
        y = apply_rms_norm(x, p[f"norm1.{layer}"])
        q, k, v = ((y @ p[f"{n}.{layer}"].T).reshape(batch, length, heads, -1).transpose(0, 2, 1, 3) for n in "qkv")
        scores = apply_rotary_embedding(q) @ apply_rotary_embedding(k).swapaxes(-1, -2) / (width // heads) ** 0.5
        mixed = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1) @ v
        x = x + mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ p[f"o.{layer}"].T
        y = apply_rms_norm(x, p[f"norm2.{layer}"])
        x = x + (jax.nn.silu(y @ p[f"gate.{layer}"].T) * (y @ p[f"up.{layer}"].T)) @ p[f"down.{layer}"].T
    logits = apply_rms_norm(x, p["norm"]) @ p["head"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[..., None], -1).mean()


def get_partition_spec(layout: str, name: str, ndim: int) -> PartitionSpec:
    kind = name.partition(".")[0]
    if layout == "dp" or (layout != "fsdp" and kind not in COLUMNS + ROWS):
        return PartitionSpec()
    if layout == "fsdp" or kind in COLUMNS:
        return PartitionSpec("tp" if layout != "fsdp" else "all")
    return PartitionSpec(None, "tp")


# --- what the compiled program moves ---------------------------------------------------------------------------------------
COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
RECEIVED = {  # of what comes out of it, among n
    "all-reduce": lambda size, n: 2 * (n - 1) / n * size,
    "all-gather": lambda size, n: (n - 1) / n * size,
    "reduce-scatter": lambda size, n: (n - 1) * size,
    "all-to-all": lambda size, n: (n - 1) / n * size,
    "collective-permute": lambda size, n: size,
}


def count_collectives(text: str) -> tuple[float, Counter[str]]:
    """Return the bytes that a rank receives and the collectives by kind in the text of a compiled program."""
    nbytes, kinds = 0.0, Counter[str]()
    for line in text.splitlines():
        found = COLLECTIVE.search(line)
        if found is None:
            continue
        results, kind = found.groups()
        size = sum(
            WIDTHS[t] * prod(map(int, filter(None, dims.split(",")))) for t, dims in re.findall(r"(\w+)\[([\d,]*)\]", results)
        )
        nbytes += RECEIVED[kind](size, get_group_size(line))
        kinds[kind] += 1
    return nbytes, kinds


def get_group_size(line: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return len(listed.group(1).split(",")) if listed else int(counted.group(1)) if counted else 4


def main() -> None:
    """Compile a training step for one device and for four, and print the bytes, collectives and FLOPs as JSON."""
    layout, *numbers = sys.argv[1:]
    layers, width, batch, length, vocabulary, heads, inner = map(int, numbers)
    shape = (2, 2) if layout == "tp_dp" else (4,)
    names = ("dp", "tp") if layout == "tp_dp" else ("tp",) if layout == "tp" else ("all",)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
    p = make_parameters(layers, width, vocabulary, inner)
    ids = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    cut = PartitionSpec() if layout == "tp" else PartitionSpec(names[0])
    spots = {name: NamedSharding(mesh, get_partition_spec(layout, name, x.ndim)) for name, x in p.items()}

    def step(p: Any, ids: Any) -> Any:
        return jax.value_and_grad(compute_loss)(p, ids, ids, layers, heads)

    where = (spots, NamedSharding(mesh, cut))
    done = jax.jit(step, in_shardings=where, out_shardings=(NamedSharding(mesh, PartitionSpec()), spots)).lower(p, ids).compile()
    alone = jax.jit(step).lower(p, ids).compile()
    nbytes, kinds = count_collectives(done.as_text())
    flops = count_dot_flops(done.as_text()) * 4 / count_dot_flops(alone.as_text())
    print(json.dumps({"bytes": nbytes, "collectives": kinds, "flops": flops, "parameters": sum(x.nbytes for x in p.values())}))


def count_dot_flops(text: str) -> float:
    """Return the FLOPs of the matrix products in the text of a compiled program."""
    shapes = {
        name: list(map(int, filter(None, dims.split(",")))) for name, dims in re.findall(r"(%[\w.-]+) = \w+\[([\d,]*)\]", text)
    }
    total = 0.0
    for line in text.splitlines():
        found = re.search(r"= \w+\[([\d,]*)\]\S* dot\((?:\w+\[[\d,]*\]\S* )?(%[\w.-]+),.*lhs_contracting_dims=\{([\d,]*)\}", line)
        if found is not None:
            dims, left, over = found.groups()
            result = prod(map(int, filter(None, dims.split(","))))
            total += 2.0 * result * prod(shapes[left][int(d)] for d in over.split(","))
    return total


if __name__ == "__main__":
    main()
