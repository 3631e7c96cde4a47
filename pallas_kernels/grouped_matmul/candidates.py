"""What `bench tune` tries: fields that differ from the heuristic config, where the tiles fit."""

import dataclasses
from typing import Any

from pallas_kernels.grouped_matmul.portable import Config
from pallas_kernels.target import Target

# By how many rows a group has on average: up to 16, up to 64, more.
_TILES = {
    16: [(16, 128, 128, 4, 4), (16, 64, 256, 4, 3), (16, 64, 128, 4, 6), (16, 32, 256, 4, 4), (16, 64, 128, 8, 4)],
    64: [(32, 128, 64, 4, 4), (32, 128, 128, 4, 3), (64, 64, 128, 4, 3), (64, 128, 64, 4, 4), (64, 128, 128, 4, 3)],
    1 << 30: [
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 4, 4),
        (128, 128, 128, 8, 3),
        (64, 256, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (256, 128, 64, 8, 4),
    ],
}
_FIELDS = "block_rows", "block_columns", "block_inner", "num_warps", "num_stages"


def candidates(kernel: str, target: Target, config: Config, call: dict[str, Any]) -> list[dict[str, Any]]:
    """For "grouped_matmul.portable". config: the heuristic's; call: what it was asked by."""
    assert kernel == "grouped_matmul.portable"
    tiles = next(tiles for most, tiles in _TILES.items() if call["m"] <= most * call["groups"])
    tried = [dataclasses.replace(config, **dict(zip(_FIELDS, tile, strict=True))) for tile in tiles]
    return [_different(new, config) for new in tried if new != config and shared_bytes(new) <= target.shared_memory]


def shared_bytes(config: Config) -> int:
    """What Triton takes for the operands in flight."""
    return 2 * config.num_stages * (config.block_rows + config.block_columns) * config.block_inner


def _different(new: Config, config: Config) -> dict[str, Any]:
    return {name: getattr(new, name) for name in _FIELDS if getattr(new, name) != getattr(config, name)}
