"""Rows sorted by group times the matrix of their group, through Pallas-Triton: sm_80 and newer, gfx942, gfx950.

A program computes block_rows x block_columns outputs of one group. A group's rows are cut into tiles from its own first
row on, so no tile mixes groups; which tile is whose is worked out before, in a few small XLA kernels. There are at most
rows / block_rows + groups tiles, and programs without one end at once. Programs that share a tile's rows are
neighbours, and so are the tiles of a group, so that its matrix comes from memory once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Int, Int32

from pallas_kernels import triton_backend as triton
from pallas_kernels.target import Target, target_of
from pallas_kernels.tuning import tuned


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    block_rows, block_columns: outputs of a program, at least 16 each.
    block_inner: how much of the inner dimension is multiplied at a time.
    num_warps, num_stages: Triton's.
    """

    block_rows: int = 128
    block_columns: int = 128
    block_inner: int = 64
    num_warps: int = 8
    num_stages: int = 4


def grouped_matmul(
    x: BFloat16[Array, "N I"],
    weight: BFloat16[Array, "E O I"],
    group_sizes: Int[Array, " E"],
    *,
    target: Target | str | None = None,
) -> BFloat16[Array, "N O"]:
    """x[n] @ weight[e].T for the rows n of every group e, summed in float32.

    group_sizes: rows of every group, in order; rows past their sum are not written.
    target: the device to compile for; None for the one that runs.
    """
    target = target_of(target)
    config = config_grouped_matmul(target, x, weight, group_sizes)
    return solve(x, weight, group_sizes, config, interpret=target.platform == "cpu")


def refuse_grouped_matmul(target: Target, x: Any, weight: Any, group_sizes: Any) -> str | None:
    """Why this kernel cannot run, or None."""
    del group_sizes
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton kernels need sm_80 or newer, got {target.arch}"
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return f"x and weight must be bfloat16, got {x.dtype} and {weight.dtype}"
    return None


def config_grouped_matmul(target: Target, x: Any, weight: Any, group_sizes: Any) -> Config:
    """The config this kernel would run with: tiles as tall as the groups are on average."""
    del group_sizes
    rows, (groups, columns, inner) = x.shape[0], weight.shape
    average = pl.next_power_of_2(max(rows // groups, 1))
    if average <= 32:  # the weights' bytes bound it: long inner blocks
        heuristic = Config(block_rows=max(16, average), block_columns=64, block_inner=128, num_warps=4, num_stages=4)
    elif target.arch == "sm_90":
        heuristic = Config(block_rows=min(128, average))
    else:
        heuristic = Config(block_rows=min(128, average), block_inner=32, num_stages=3)
    if target.platform == "rocm":
        heuristic = dataclasses.replace(heuristic, block_inner=min(heuristic.block_inner, 64), num_stages=2)
    return tuned("grouped_matmul.portable", target, heuristic, m=rows, groups=groups, n=columns, k=inner)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def solve(x, weight, group_sizes, config: Config, *, interpret: bool) -> BFloat16[Array, "N O"]:
    """grouped_matmul with a given config."""
    rows, (groups, columns, inner) = x.shape[0], weight.shape
    if 0 in (rows, columns, inner):
        return jnp.zeros((rows, columns), x.dtype)
    tiles = rows // config.block_rows + min(groups, rows)
    return triton.launch(
        functools.partial(_kernel, config=config),
        (x, weight, *_tiles(group_sizes, tiles, config.block_rows)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        grid=tiles * pl.cdiv(columns, config.block_columns),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="grouped_matmul",
        interpret=interpret,
    )


def _tiles(group_sizes: Array, tiles: int, block_rows: int) -> tuple[Int32[Array, " T"], ...]:
    """Each tile's group, its first row and one past its last; a tile that is none has no rows."""
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    last_tile = jnp.cumsum((sizes + block_rows - 1) // block_rows)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last_tile, tile, side="right"), sizes.shape[0] - 1).astype(jnp.int32)
    first_tile = jnp.where(group > 0, last_tile[group - 1], 0)
    first = ends[group] - sizes[group] + (tile - first_tile) * block_rows
    last = jnp.where(tile < last_tile[-1], jnp.minimum(first + block_rows, ends[group]), 0)
    return group, first, last


def _kernel(x_ref, weight_ref, group_ref, first_ref, last_ref, out_ref, *, config: Config):
    """One program: a tile of rows times a block of columns."""
    columns, inner = weight_ref.shape[1:]
    blocks = pl.cdiv(columns, config.block_columns)
    tile, block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
    group, first, last = group_ref[tile], first_ref[tile], last_ref[tile]

    @pl.when(first < last)
    def _():
        rows = first + jnp.arange(config.block_rows)
        outputs = block * config.block_columns + jnp.arange(config.block_columns)
        # What lies past the edge repeats the last row or column, and is not stored.
        read_rows, read_outputs = jnp.minimum(rows, last - 1), jnp.minimum(outputs, columns - 1)

        def step(i, total):
            depth = i * config.block_inner + jnp.arange(config.block_inner)
            masking: dict[str, Any] = (
                {} if inner % config.block_inner == 0 else dict(mask=(depth < inner)[None], other=0.0)
            )
            a = triton.load(x_ref.at[read_rows[:, None], depth[None]], **masking)
            b = triton.load(weight_ref.at[group, read_outputs[:, None], depth[None]], **masking)
            return total + triton.dot_f32(a, b.T)

        total = jnp.zeros((config.block_rows, config.block_columns), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(inner, config.block_inner), step, total)
        keep = (rows < last)[:, None] & (outputs < columns)[None]
        # The interpreter writes a masked lane's old value back, over what another tile puts there: send it elsewhere.
        place = jnp.where(rows < last, rows, 1 << 30)
        triton.store(out_ref.at[place[:, None], outputs[None]], total.astype(out_ref.dtype), mask=keep)
