"""What `bench tune` tries: fields that differ from the heuristic config, where the tiles fit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.indexer_logits import hopper, portable
from pallas_kernels.target import Target


def candidates(kernel: str, target: Target, config: Any, call: dict[str, Any]) -> list[dict[str, Any]]:
    """For "[paged_]indexer_logits.NAME". config: the heuristic's; call: what it was asked by."""
    if kernel.endswith(".hopper"):
        return [fields for fields in _hopper(config) if hopper_fits(dataclasses.replace(config, **fields), **call)]
    tried = [(fields, dataclasses.replace(config, **fields)) for fields in _PORTABLE]
    return [fields for fields, new in tried if new != config and _portable_fits(target, new, **call)]


def _hopper(config: hopper.Config) -> list[dict[str, Any]]:
    relus = [dict(doubled_of_four=count) for count in (0, 1, 2, 3) if count != config.doubled_of_four]
    rings = [dict(stages=config.stages + more * config.turns) for more in (-1, 1, 2)]
    slots = [dict(query_slots=config.query_slots + more) for more in (-1, 1)]
    return [*relus, *rings, *slots]


def hopper_fits(config: hopper.Config, *, dim: int, itemsize: int, **_: Any) -> bool:
    """Whether the kernel can run it, and its tiles fit in shared memory."""
    rows = config.query_slots * config.query_tiles * hopper._COLUMNS + config.stages * hopper.KEYS
    return config.is_legal and rows * dim * itemsize <= hopper._SHARED_MEMORY - hopper._REST


_PORTABLE = [
    dict(block_keys=64),
    dict(block_keys=64, num_stages=4),
    dict(block_keys=128, num_stages=2),
    dict(block_keys=128, num_stages=4),
    dict(block_keys=256, num_stages=2, num_warps=8),
    dict(num_warps=8),
]


def _portable_fits(target: Target, config: portable.Config, *, heads: int, dim: int, itemsize: int, **_: Any) -> bool:
    dtype = jnp.float8_e4m3fn if itemsize == 1 else jnp.bfloat16
    q = jax.ShapeDtypeStruct((1, heads, dim), dtype)
    return portable.shared_bytes(target, q, config) <= target.shared_memory
