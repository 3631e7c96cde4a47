"""What `bench tune` tries: fields that differ from the heuristic config, where a block's memory fits."""

import dataclasses
from typing import Any

from pallas_kernels.target import Target
from pallas_kernels.topk import hopper, portable


def candidates(kernel: str, target: Target, config: Any, call: dict[str, Any]) -> list[dict[str, Any]]:
    """For "topk.NAME". config: the heuristic's; call: what it was asked by."""
    if kernel == "topk.hopper":
        tried = _hopper(config, call["m"], target.num_cores or 128)
        return [fields for fields in tried if hopper_fits(target, dataclasses.replace(config, **fields))]
    return _portable(config)


def hopper_fits(target: Target, config: hopper.Config) -> bool:
    """Whether a block's shared memory is there, less what the compiler takes."""
    return hopper._shared_bytes(config) + 1024 <= target.shared_memory


def _hopper(config: hopper.Config, rows: int, cores: int) -> list[dict[str, Any]]:
    chunks = [dict(columns_per_thread=count) for count in (12, 20, 28, 36) if count != config.columns_per_thread]
    rings = [dict(stages=count) for count in (1, 2, 3, 4) if count != config.stages]
    sizes = [size for size in (512, 1024, 2048) if size % (4 * config.threads) == 0 and size <= config.capacity]
    samples = [dict(samples=count) for count in sizes if count != config.samples]
    together = [dict(neighbours=count) for count in (8, 16, 32) if count != config.neighbours]
    # More blocks than cores would share a row for nothing, and a cluster counts its candidates in 16 bits.
    most = min(8, cores // rows, ((1 << 16) - 1) // config.capacity)
    parts = [dict(parts=count) for count in (config.parts // 2, 2 * config.parts) if 1 <= count <= most]
    return [*chunks, *rings, *samples, *together, *parts]


def _portable(config: portable.Config) -> list[dict[str, Any]]:
    """Programs take scratch memory, which callers count on: how many scores they keep is not for tuning."""
    tiles = ((1024, 4), (2048, 4), (2048, 8), (4096, 8))
    return [dict(chunk=c, num_warps=w) for c, w in tiles if (c, w) != (config.chunk, config.num_warps)]
