"""How the portable sparse MLA kernel is tiled, and which tile a device gets."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.target import Target
from pallas_kernels.tuning import tuned


@dataclasses.dataclass(frozen=True)
class PortableConfig:
    """Tile of the portable kernel.

    block_h: heads a program, at least 16 (the matrix unit's rows); heads past H are masked.
    block_k: keys gathered at a time.
    block_d: columns of a key in one load and one matrix product.
    num_warps, num_stages: of Triton; num_stages - 1 gathers are in flight while one block is computed.
    programs_per_core: how many programs the splits of a small decode batch give every core.
    """

    block_h: int
    block_k: int
    block_d: int
    num_warps: int = 4
    num_stages: int = 2
    programs_per_core: int = 1


def portable_config(
    target: Target, *, heads: int, value_width: int, tail_width: int, q_dtype, kv_dtype
) -> PortableConfig | None:
    """The config for one shape: the proposal, with what was measured on the device. None if no tile fits.

    The number of rows plays no part: a row's bits must not depend on its batch.
    """
    proposal = _proposal(target, heads, value_width, tail_width, jnp.dtype(q_dtype), jnp.dtype(kv_dtype))
    if proposal is None:
        return None
    dtypes = dict(q=jnp.dtype(q_dtype).name, kv=jnp.dtype(kv_dtype).name)
    return tuned("sparse_mla.portable", target, proposal, heads=heads, value=value_width, tail=tail_width, **dtypes)


def splits_that_fill(target: Target, config: PortableConfig, *, rows: int, heads: int, topk: int) -> int:
    """The split count that gives every core `programs_per_core` programs, rounded for splits of equal length."""
    blocks = max(1, pl.cdiv(topk, config.block_k))
    programs = max(1, rows * pl.cdiv(heads, config.block_h))
    wanted = max(1, min(blocks, (target.num_cores or 128) * config.programs_per_core // programs))
    return pl.cdiv(blocks, pl.cdiv(blocks, wanted))


def _proposal(
    target: Target, heads: int, value_width: int, tail_width: int, q_dtype, kv_dtype
) -> PortableConfig | None:
    """The tile that was fastest for 512 + 64 columns on an H200, elsewhere one that does not spill, cut to fit."""
    columns = pl.next_power_of_2(value_width)
    tile = _tile(target, heads, q_dtype, kv_dtype)
    # The float32 accumulators, block_h x columns, live in registers.
    block_h = max(16, min(tile.block_h, 64 * 512 // columns))
    tile = dataclasses.replace(tile, block_h=block_h, block_d=max(16, min(tile.block_d, columns)))
    while target.platform != "cpu" and (
        shared_bytes(target, tile, value_width, tail_width, q_dtype, kv_dtype) > target.shared_memory
    ):
        if tile.block_k > 16:
            tile = dataclasses.replace(tile, block_k=tile.block_k // 2)
        elif tile.block_h > 16:
            tile = dataclasses.replace(tile, block_h=tile.block_h // 2)
        else:
            return None
    return tile


def _tile(target: Target, heads: int, q_dtype, kv_dtype) -> PortableConfig:
    if _operand_bytes(q_dtype, kv_dtype) == 4:  # exact float32 products are no matrix instructions on CUDA
        return PortableConfig(block_h=16, block_k=16, block_d=128)
    scaled = kv_dtype.itemsize == 1
    few = max(16, pl.next_power_of_2(heads))
    if target.arch in ("sm_90", "cpu"):
        if few >= 64 or (scaled and few == 32):  # 64 rows are a warp group's product; 32 of a scaled cache spill
            return PortableConfig(block_h=64, block_k=64, block_d=256 if scaled else 512, num_warps=8, num_stages=3)
        return PortableConfig(block_h=few, block_k=32 if scaled else 64, block_d=512, num_stages=3, programs_per_core=2)
    if scaled or target.arch == "gfx942":
        return PortableConfig(block_h=16, block_k=32, block_d=128 if scaled else 512, programs_per_core=2)
    return PortableConfig(block_h=min(32, few), block_k=32, block_d=512, programs_per_core=2)


def shared_bytes(target: Target, config: PortableConfig, value_width: int, tail_width: int, q_dtype, kv_dtype) -> int:
    """An upper bound of what Triton takes: the gathered keys, on CUDA also those in flight, the queries and P."""
    operand = _operand_bytes(q_dtype, kv_dtype)
    row = operand * (pl.next_power_of_2(value_width) + (pl.next_power_of_2(tail_width) if tail_width else 0))
    keys = config.block_k * row
    if target.platform == "rocm":
        return keys * 9 // 8  # rows are padded against bank conflicts
    queries = config.block_h * (row + operand * config.block_k)
    if kv_dtype.itemsize == 1:  # one tile of operands, and e4m3 rows in flight
        return queries + keys + config.block_k * (2 * value_width + 128) + 2048
    return queries + keys * max(1, config.num_stages - 1) + 2048


def _operand_bytes(q_dtype, kv_dtype) -> int:
    return 4 if jnp.float32 in (q_dtype, kv_dtype) else 2
