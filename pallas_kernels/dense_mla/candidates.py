"""What `bench tune` tries: fields that differ from the heuristic config, where the tiles fit."""

import dataclasses
from typing import Any

from pallas_kernels.dense_mla.portable import Config, shared_bytes
from pallas_kernels.target import Target

_TILES = [
    dict(block_rows=rows, block_keys=keys, num_warps=warps, num_stages=stages)
    for rows, warps in ((64, 4), (64, 8), (128, 8))
    for keys in (32, 64)
    for stages in (2, 3)
]


def candidates(kernel: str, target: Target, config: Config, call: dict[str, Any]) -> list[dict[str, Any]]:
    """For "dense_mla.portable". config: the heuristic's; call: what it was asked by."""
    assert kernel == "dense_mla.portable"
    tiles = [(fields, dataclasses.replace(config, **fields)) for fields in _TILES]
    return [
        fields
        for fields, tile in tiles
        if tile != config and shared_bytes(target, tile, call["width"], call["value"]) <= target.shared_memory
    ]
