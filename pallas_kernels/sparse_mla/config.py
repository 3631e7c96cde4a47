"""How the portable sparse MLA kernel is tiled, and which tile a device gets."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.sparse_mla.rows import SCALE_BLOCK
from pallas_kernels.target import Target
from pallas_kernels.tuning import tuned


@dataclasses.dataclass(frozen=True)
class PortableConfig:
    """Tile of the portable kernel.

    block_h: heads a program, at least 16 (the matrix unit's rows); heads past H are masked.
    block_k: keys gathered at a time.
    block_d: columns of a key in one load and one matrix product.
    keys_first: keys and output columns, not heads, on the long side of the matrix products; for few heads.
    num_warps, num_stages: of Triton; num_stages - 1 gathers are in flight while one block is computed.
    programs_per_core: how many programs the splits of a small decode batch give every core.
    """

    block_h: int
    block_k: int
    block_d: int
    keys_first: bool = False
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
    """The split count that gives every core `programs_per_core` programs, rounded so that the splits are of equal length."""
    blocks = max(1, pl.cdiv(topk, config.block_k))
    programs = max(1, rows * pl.cdiv(heads, config.block_h))
    wanted = max(1, min(blocks, (target.num_cores or 128) * config.programs_per_core // programs))
    return pl.cdiv(blocks, pl.cdiv(blocks, wanted))


def _proposal(target: Target, heads: int, value_width: int, tail_width: int, q_dtype, kv_dtype) -> PortableConfig | None:
    return PortableConfig(block_h=16, block_k=32, block_d=128, num_warps=4)
