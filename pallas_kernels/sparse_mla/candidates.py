"""What `bench tune` tries: fields that differ from the heuristic config, where the tiles fit."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.sparse_mla.config import PortableConfig, shared_bytes
from pallas_kernels.target import Target

_TILES = [
    dict(block_h=heads, block_k=keys, num_warps=warps, num_stages=stages)
    for heads, keys, warps, stages in (
        (16, 32, 4, 3),
        (16, 64, 4, 2),
        (16, 64, 4, 3),
        (32, 32, 4, 3),
        (32, 64, 4, 2),
        (32, 64, 8, 2),
        (64, 32, 4, 3),
        (64, 32, 8, 3),
        (64, 64, 8, 2),
    )
]


def candidates(kernel: str, target: Target, config: PortableConfig, call: dict[str, Any]) -> list[dict[str, Any]]:
    """For "sparse_mla.portable". config: the heuristic's; call: what it was asked by."""
    assert kernel == "sparse_mla.portable"
    names = jnp.dtype(call["q"]), jnp.dtype(call["kv"])

    def fits(fields: dict[str, Any]) -> bool:
        tile = dataclasses.replace(config, **fields)
        needed = shared_bytes(target, tile, call["value"], call["tail"], *names)
        return tile != config and fields["block_h"] < 2 * call["heads"] and needed <= target.shared_memory

    return [fields for fields in _TILES if fits(fields)]
