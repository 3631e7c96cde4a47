"""Sparse MLA on Hopper (sm_90) as a Pallas Mosaic GPU kernel, for latents of 512 columns with 64 or no rope columns.

e4m3 rows become f16 on the way in, times their scales, which is exact for scales that are powers of two; or where a
prefill takes each many times, bf16 before the kernel (`widen`), which is so too.

Grid: one block for each query row, 64 of its heads and split of its keys; neighbours share a row. Tile: 64 heads x 64
keys, two buffers of keys. Shared memory: 72 KiB of queries, twice 72 KiB of keys, 8 KiB more for one buffer's rope
columns, 1.8 KiB of barriers, statistics and scales: 226 KiB of 227, so one block a multiprocessor. Registers: 216 a
thread of the two math warpgroups (128 accumulators, 32 scores, 32 weights, 16 packed ones), 72 a gathering thread; for
e4m3 200, and 56 of the threads that gather and convert, which are twice as many.
Two buffers and no third because a third would take the queries' room, and wgmma's other source of them, registers, is
full of accumulators. Fewer than 64 heads take as long as 64. `hopper_block` tells how a block works.

At most 32 heads, of e4m3 keys 24, have a kernel of their own, `hopper_few`.

With more than one split, each leaves its float32 output and its log-sum-exp for `merge.merge_splits`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.softmax import LOG2E, positively_scaled
from pallas_kernels.sparse_mla import hopper_attend, hopper_block, hopper_few, hopper_gather
from pallas_kernels.sparse_mla.hopper_block import (
    BLOCK,
    HEADS,
    KEY_TILES,
    PAIR,
    TILES,
    VALUE_WIDTH,
    Memory,
    Problem,
)
from pallas_kernels.sparse_mla.hopper_few_block import HEADS as FEW_HEADS
from pallas_kernels.sparse_mla.hopper_few_block import FewConfig, FewProblem
from pallas_kernels.sparse_mla.hopper_launch import launch
from pallas_kernels.sparse_mla.rows import KeyRows, key_dtype, key_rows, tail_dtype, widths
from pallas_kernels.sparse_mla.widen import attended
from pallas_kernels.target import Target, target_of

_SMS = 132  # of an H100 SXM and an H200, where the device does not say
_FEW_E4M3_HEADS = 24  # that the kernel for few heads takes of e4m3 keys, at most: of 32 the other is faster
_GATHERED_E4M3_HEADS = 16  # for which a prefill from e4m3 keys is faster than one from widened ones, at most


@dataclasses.dataclass(frozen=True)
class Config:
    """How the registers of a multiprocessor are shared out, a thread; three warpgroups have 504 between them, four 512.

    No choice here changes a bit of the result.
    """

    math_registers: int
    gather_registers: int


class _Operands(NamedTuple):
    """The arrays of a launch. Those from lengths on may be None."""

    q: Any  # bf16[M, H, 512 + 64 or 512]
    keys: KeyRows
    indices: Any  # i32[M, K]
    lengths: Any  # i32[M]
    sink: Any  # f32[H]
    table: Any  # i32[B, P]
    seq_lens: Any  # i32[B]


def sparse_mla(
    q: Float[Array, "M H D"],
    kv: Any,
    indices: Int[Array, "M K"],
    *,
    sm_scale: float,
    v_dim: int,
    lengths: Int[Array, " M"] | None = None,
    sink: Float[Array, " H"] | None = None,
    target: Target | str | None = None,
) -> tuple[Float[Array, "M H V"], Float32[Array, "M H"]]:
    """Attention of every query row to the key rows its indices name, in bits that no other row has a part in.

    kv: an array [N, D], or a latent cache by its flat slots. Indices of no row, and lanes past lengths, are none.
        How many rows there are may decide in which dtype e4m3 latents are multiplied (`widen`).
    sink: joins the denominator of out only.
    target: the device to compile for, if not this one.
    """
    kv = _attended(q, kv, indices)
    return run(q, kv, indices, sm_scale=sm_scale, v_dim=v_dim, lengths=lengths, sink=sink, target=target)


def paged_sparse_mla(
    q: Float[Array, "B Q H D"],
    cache: Any,
    indices: Int[Array, "B Q K"],
    block_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
    *,
    sm_scale: float,
    v_dim: int,
    lengths: Int[Array, "B Q"] | None = None,
    sink: Float[Array, " H"] | None = None,
    num_splits: int | None = None,
    target: Target | str | None = None,
) -> tuple[Float[Array, "B Q H V"], Float32[Array, "B Q H"]]:
    """Decode: `sparse_mla` where the indices are positions in each row's own request.

    Positions that are not below seq_lens, or on no page of the cache, are none.
    num_splits: blocks that share a row's indices. None: as many as fill the device, so that bits depend on the batch.
    """
    batch, queries, heads, width = q.shape
    rows, topk = batch * queries, indices.shape[-1]
    if num_splits is None:
        device = target_of(target)
        unit = _split_unit(_config(device, heads, cache))
        num_splits = splits_that_fill(device.num_cores or _SMS, rows=rows, heads=heads, topk=topk, unit=unit)
    out, lse = run(
        q.reshape(rows, heads, width),
        cache,
        indices.reshape(rows, topk),
        block_table=block_table,
        seq_lens=seq_lens,
        sm_scale=sm_scale,
        v_dim=v_dim,
        lengths=None if lengths is None else lengths.reshape(rows),
        sink=sink,
        num_splits=num_splits,
        target=target,
    )
    return out.reshape(batch, queries, heads, v_dim), lse.reshape(batch, queries, heads)


def refuse_sparse_mla(target: Target, q, kv, indices, *, sm_scale, v_dim, lengths=None, sink=None) -> str | None:
    """Why sparse_mla cannot run on `target`, or None."""
    if target.arch != "sm_90":
        return f"needs sm_90, got {target.arch}"
    if q.dtype != jnp.bfloat16:
        return f"its queries are bfloat16, not {q.dtype}"
    if key_dtype(kv) not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return f"its keys are bfloat16 or float8_e4m3fn, not {key_dtype(kv)}"
    value_width, tail_width = widths(kv, q.shape[-1], v_dim)
    if (value_width, v_dim) != (VALUE_WIDTH, VALUE_WIDTH) or tail_width not in (0, 64):
        return f"its keys are 512 + 64 or 512 columns with 512 of values, not {value_width} + {tail_width} with {v_dim}"
    if tail_width and tail_dtype(kv) != jnp.bfloat16:
        return f"its rope columns are bfloat16, not {tail_dtype(kv)}"
    return None


def refuse_paged_sparse_mla(
    target: Target,
    q,
    cache,
    indices,
    block_table,
    seq_lens,
    *,
    sm_scale,
    v_dim,
    lengths=None,
    sink=None,
    num_splits=None,
) -> str | None:
    """Why paged_sparse_mla cannot run on `target`, or None."""
    return refuse_sparse_mla(target, q, cache, indices, sm_scale=sm_scale, v_dim=v_dim)


def config_sparse_mla(
    target: Target, q, kv, indices, *, sm_scale, v_dim, lengths=None, sink=None
) -> Config | FewConfig:
    """The config that sparse_mla runs with."""
    return _config(target, q.shape[-2], jax.eval_shape(_attended, q, kv, indices))


def config_paged_sparse_mla(
    target: Target,
    q,
    cache,
    indices,
    block_table,
    seq_lens,
    *,
    sm_scale,
    v_dim,
    lengths=None,
    sink=None,
    num_splits=None,
) -> Config | FewConfig:
    """The config that paged_sparse_mla runs with."""
    return _config(target, q.shape[-2], cache)


def splits_that_fill(num_cores: int, *, rows: int, heads: int, topk: int, unit: int) -> int:
    """The split count that gives every core a block, rounded for splits of equal length in units of so many keys."""
    units = max(1, pl.cdiv(topk, unit))
    wanted = max(1, min(units, num_cores // max(1, rows * pl.cdiv(heads, HEADS))))
    return pl.cdiv(units, pl.cdiv(units, wanted))


def run(
    q,
    kv,
    indices,
    *,
    sm_scale: float,
    v_dim: int,
    block_table=None,
    seq_lens=None,
    lengths=None,
    sink=None,
    num_splits: int = 1,
    config: Config | FewConfig | None = None,
    target: Target | str | None = None,
):
    """sparse_mla for a given split count and config: for tuning, and for compiling without the device.

    block_table, seq_lens: given where the indices are positions in requests.
    """
    rows, heads, width = q.shape
    topk = indices.shape[1]
    keys = key_rows(kv, width, v_dim)
    num_keys = keys.value.shape[0]
    requests, table_width = (rows, 1) if block_table is None else block_table.shape
    if 0 in (rows, heads, topk, num_keys, table_width):
        return jnp.zeros((rows, heads, v_dim), q.dtype), jnp.full((rows, heads), -jnp.inf, jnp.float32)
    q, sm_scale = positively_scaled(q, float(sm_scale))
    config = config or _config(target_of(target), heads, kv)
    problem = Problem(
        rows=rows,
        heads=heads,
        topk=topk,
        num_keys=num_keys,
        splits=max(1, min(num_splits, pl.cdiv(topk, _split_unit(config)))),
        scale_log2=sm_scale * LOG2E,
        value_stride=keys.value.dtype.itemsize * keys.value.shape[1],
        tail_stride=0 if keys.tail is None else 2 * keys.tail.shape[1],
        tail_start=2 * v_dim if keys.tail is kv else 0,
        tail_tiles=0 if keys.tail is None else 1,
        is_e4m3=keys.scale is not None,
        page_size=0 if block_table is None else kv.nope.shape[1],
        table_width=table_width,
        queries=rows // requests,
    )
    operands = _Operands(q, keys, indices, lengths, sink, block_table, seq_lens)
    if isinstance(config, FewConfig):
        return _solve_few(FewProblem(**vars(problem) | vars(config)), operands)
    return _solve(problem, config, operands)


def _config(target: Target, heads: int, kv) -> Config | FewConfig:
    """Rows of e4m3 are converted in registers; copies take none."""
    is_e4m3 = key_dtype(kv) == jnp.float8_e4m3fn
    if heads <= (_FEW_E4M3_HEADS if is_e4m3 else FEW_HEADS):
        return FewConfig(8 * pl.cdiv(heads, 8), target.num_cores or _SMS)
    return Config(200, 56) if is_e4m3 else Config(216, 72)


def _split_unit(config: Config | FewConfig) -> int:
    """What splits hold a whole number of: keys."""
    return BLOCK if isinstance(config, FewConfig) else PAIR


def _attended(q, kv, indices):
    """kv, or it widened where that takes less time than to gather e4m3 keys."""
    return kv if q.shape[-2] <= _GATHERED_E4M3_HEADS else attended(kv, indices)


@functools.partial(jax.jit, static_argnames=("problem",))
def _solve_few(problem: FewProblem, operands: _Operands):
    """out[M, H, 512] and lse f32[M, H]."""
    return hopper_few.solve(problem, _named(operands))


def _named(operands: _Operands) -> dict[str, Any]:
    """Those that are there, by their names in Memory."""
    named = dict(operands.keys._asdict(), **operands._asdict())
    del named["keys"]
    return {name: array for name, array in named.items() if array is not None}


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _solve(problem: Problem, config: Config, operands: _Operands):
    """out[M, H, 512] and lse f32[M, H]."""
    shared = dict(
        queries=plgpu.SMEM((TILES * 64, 64), jnp.bfloat16),
        keys=plgpu.SMEM((KEY_TILES * 64, 64), jnp.bfloat16),
        words=plgpu.SMEM((hopper_block.WORDS,), jnp.int32),
    )

    def attend(side):
        return 1, config.math_registers, lambda refs: hopper_attend.attend(problem, Memory(**refs), side)

    def gather(refs):
        hopper_gather.gather(problem, Memory(**refs))

    return launch(
        problem,
        _named(operands),
        shared,
        name="sparse_mla_hopper",
        prepare=lambda refs: hopper_block.prepare(problem, Memory(**refs)),
        roles=[attend(0), attend(1), (problem.gather_warpgroups, config.gather_registers, gather)],
    )
