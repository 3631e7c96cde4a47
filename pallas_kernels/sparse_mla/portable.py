"""Sparse MLA in Pallas through Triton, for sm_80 and newer, gfx942 and gfx950; interpreted on a CPU.

One program handles one query row, one tile of heads and one split of that row's selected keys. It gathers `block_k`
keys at a time into a tile that serves both products, logits = q K^T and out = P V, with an online softmax in between:

    m' = max(m, logits);  P = 2^(logits - m');  l' = l 2^(m - m') + sum P;  acc' = acc 2^(m - m') + P V

A key's columns are cut into power-of-two chunks (`rows.column_chunks`): 512 + 64 is a value chunk of 512 and a tail
chunk of 64, so nothing is padded to 1024. An e4m3 tile is multiplied by its scales in float32 and rounded to the
queries' dtype, which is exact for scales that are powers of two.

With more than one split, each leaves its float32 output and its log-sum-exp for `merge.merge_splits`.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import triton_backend as triton
from pallas_kernels.softmax import LOG2E
from pallas_kernels.sparse_mla.config import PortableConfig, portable_config, splits_that_fill
from pallas_kernels.sparse_mla.merge import kept_by_sink, merge_splits
from pallas_kernels.sparse_mla.rows import (
    SCALE_BLOCK,
    Chunk,
    KeyRows,
    column_chunks,
    key_dtype,
    key_rows,
    position_slots,
    widths,
)
from pallas_kernels.sparse_mla.widen import attended
from pallas_kernels.target import Target, target_of

_ROCM_ARCHS = ("gfx942", "gfx950")


class _Operands(NamedTuple):
    """The arrays of a launch. lengths may be None."""

    q: Any  # [M, H, Dqk]
    keys: KeyRows
    indices: Any  # i32[M, K]
    lengths: Any  # i32[M]
    sink: Any  # f32[H]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a program of the attention kernel knows when it is compiled."""

    config: PortableConfig
    chunks: tuple[Chunk, ...]
    heads: int
    topk: int
    num_keys: int
    v_dim: int
    num_splits: int
    scale_log2: float  # sm_scale * log2(e): logits in base 2
    dtype: Any  # of the matrix products' operands
    decode_bits: bool  # e4m3 by integer shifts, where the device has no conversion

    @property
    def head_blocks(self) -> int:
        return pl.cdiv(self.heads, self.config.block_h)

    @property
    def blocks_per_split(self) -> int:
        return pl.cdiv(pl.cdiv(self.topk, self.config.block_k), self.num_splits)

    @property
    def value_chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.is_value and chunk.start < self.v_dim)


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
    target: the device, where it is not the default one.
    """
    kv = _attended(q, kv, indices)
    return run(target_of(target), q, kv, indices, sm_scale=sm_scale, v_dim=v_dim, lengths=lengths, sink=sink)


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
    num_splits: programs that share a row's indices. None: as many as fill the device, so that bits depend on the batch.
    """
    batch, queries, heads, width = q.shape
    rows, topk = batch * queries, indices.shape[-1]
    num_pages, page_size, _ = cache.nope.shape
    slots = position_slots(indices, block_table, seq_lens, page_size=page_size, num_pages=num_pages)
    out, lse = run(
        target_of(target),
        q.reshape(rows, heads, width),
        cache,
        slots.reshape(rows, topk),
        sm_scale=sm_scale,
        v_dim=v_dim,
        lengths=None if lengths is None else lengths.reshape(rows),
        sink=sink,
        num_splits=num_splits,
    )
    return out.reshape(batch, queries, heads, v_dim), lse.reshape(batch, queries, heads)


def refuse_sparse_mla(target: Target, q, kv, indices, *, sm_scale, v_dim, lengths=None, sink=None) -> str | None:
    """Why sparse_mla cannot run on `target`, or None."""
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"it needs sm_80 or newer, not {target.arch}"
    if target.platform == "rocm" and target.arch not in _ROCM_ARCHS:
        return f"it is built for {' and '.join(_ROCM_ARCHS)}, not {target.arch}"
    value_width, _ = widths(kv, q.shape[-1], v_dim)
    if v_dim > value_width:
        return f"v_dim {v_dim} is past the latent part of the cache, {value_width} wide"
    value = kv.nope if hasattr(kv, "nope") else kv
    if value.dtype.itemsize == 1 and value.dtype != jnp.float8_e4m3fn:
        return f"its 8-bit caches are float8_e4m3fn, not {value.dtype}"
    if value.dtype.itemsize == 1 and 2**31 < value.size <= 2**32:
        return "Pallas addresses an 8-bit array of 2 to 4 GiB with 32-bit offsets, which wrap"
    if _config(target, q, kv, v_dim) is None:
        return f"no tile of its keys fits {target.shared_memory} bytes of shared memory"
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
) -> PortableConfig | None:
    """The config that sparse_mla runs with."""
    return _config(target, q, jax.eval_shape(_attended, q, kv, indices), v_dim)


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
) -> PortableConfig | None:
    """The config that paged_sparse_mla runs with."""
    return _config(target, q, cache, v_dim)


def run(
    target: Target,
    q,
    kv,
    indices,
    *,
    sm_scale: float,
    v_dim: int,
    lengths=None,
    sink=None,
    num_splits: int | None = 1,
    config: PortableConfig | None = None,
):
    """sparse_mla for a given target, split count and config: for tuning, and for compiling without the device."""
    rows, heads, width = q.shape
    topk = indices.shape[1]
    keys = key_rows(kv, width, v_dim)
    num_keys = keys.value.shape[0]
    if 0 in (rows, heads, topk, num_keys):
        return jnp.zeros((rows, heads, v_dim), q.dtype), jnp.full((rows, heads), -jnp.inf, jnp.float32)
    config = config or _config(target, q, kv, v_dim)
    assert config is not None, "refuse_sparse_mla comes first"
    if num_splits is None:
        num_splits = splits_that_fill(target, config, rows=rows, heads=heads, topk=topk)
    plan = _Plan(
        config=config,
        chunks=column_chunks(kv, width, v_dim, config.block_d),
        heads=heads,
        topk=topk,
        num_keys=num_keys,
        v_dim=v_dim,
        num_splits=max(1, min(num_splits, pl.cdiv(topk, config.block_k))),
        scale_log2=float(sm_scale) * LOG2E,
        dtype=q.dtype if keys.scale is not None else jnp.promote_types(q.dtype, keys.value.dtype),
        decode_bits=target.platform != "cpu" and target.native_fp8 != "e4m3fn",
    )
    if sink is None:  # one kernel with and without a sink, so that lse has the same bits
        sink = jnp.full((heads,), -jnp.inf, jnp.float32)
    return _solve(plan, _Operands(q, keys, indices, lengths, sink), interpret=target.platform == "cpu")


def _attended(q, kv, indices):
    """kv, or it widened, whose latents are what the kernel would round them to for queries in bfloat16."""
    return attended(kv, indices) if q.dtype == jnp.bfloat16 else kv


def _config(target: Target, q, kv, v_dim: int) -> PortableConfig | None:
    value_width, tail_width = widths(kv, q.shape[-1], v_dim)
    return portable_config(
        target,
        heads=q.shape[-2],
        value_width=value_width,
        tail_width=tail_width,
        q_dtype=q.dtype,
        kv_dtype=key_dtype(kv),
    )


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def _solve(plan: _Plan, operands: _Operands, *, interpret: bool):
    """out[M, H, v_dim] and lse f32[M, H]."""
    rows, heads, _ = operands.q.shape
    single = plan.num_splits == 1
    shape = (rows, heads) if single else (plan.num_splits, rows, heads)

    def kernel(operands, out_ref, lse_ref):
        _attend(plan, operands, out_ref, lse_ref)

    out, lse = triton.launch(
        kernel,
        (operands,),
        out_shape=(
            jax.ShapeDtypeStruct((*shape, plan.v_dim), operands.q.dtype if single else jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=rows * plan.num_splits * plan.head_blocks,
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        name="sparse_mla",
        interpret=interpret,
    )
    return (out, lse) if single else merge_splits(out, lse, operands.sink, operands.q.dtype, interpret=interpret)


def _attend(plan: _Plan, operands: _Operands, out_ref, lse_ref):
    """One program: writes its heads of one row, normalised over the keys of its split."""
    config = plan.config
    # Programs of one row are neighbours, so that tiles of heads find each other's keys in the L2 cache.
    rest, head_block = lax.div(pl.program_id(0), plan.head_blocks), lax.rem(pl.program_id(0), plan.head_blocks)
    row, split = lax.div(rest, plan.num_splits), lax.rem(rest, plan.num_splits)
    place = (row,) if plan.num_splits == 1 else (split, row)
    heads = head_block * config.block_h + jnp.arange(config.block_h)
    head_mask = heads < plan.heads
    length = plan.topk if operands.lengths is None else jnp.clip(operands.lengths[row], 0, plan.topk)
    first = split * plan.blocks_per_split
    last = jnp.minimum(first + plan.blocks_per_split, lax.div(length + config.block_k - 1, config.block_k))
    queries = [_load_queries(plan, operands.q, row, heads, head_mask, chunk) for chunk in plan.chunks]

    def block(i, carry):
        top, total, accs = carry
        lanes = i * config.block_k + jnp.arange(config.block_k)
        ids = triton.load(operands.indices.at[row, lanes], mask=lanes < length, other=-1)
        valid = (ids >= 0) & (ids < plan.num_keys)
        ids = jnp.where(valid, ids, 0)
        tiles = [_gather(plan, operands.keys, ids, valid, chunk) for chunk in plan.chunks]

        parts = [_dot(query, tile.T) for query, tile in zip(queries, tiles, strict=True)]
        logits = jnp.where(valid[None, :], functools.reduce(jnp.add, parts) * plan.scale_log2, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        # While no key was valid the maximum is -inf, and -inf - -inf would be NaN.
        safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2(logits - safe_top[:, None])
        decay = jnp.exp2(top - safe_top)
        total = total * decay + jnp.sum(p, axis=1)
        p = p.astype(plan.dtype)
        values = tiles[: len(accs)]
        accs = tuple(acc * decay[:, None] + _dot(p, tile) for acc, tile in zip(accs, values, strict=True))
        return new_top, total, accs

    top = jnp.full((config.block_h,), -jnp.inf, jnp.float32)
    total = jnp.zeros((config.block_h,), jnp.float32)
    accs = tuple(jnp.zeros((config.block_h, chunk.size), jnp.float32) for chunk in plan.value_chunks)
    top, total, accs = lax.fori_loop(first, last, block, (top, total, accs))

    empty = total == 0.0
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(jnp.where(empty, 1.0, total))) * math.log(2.0))
    triton.store(lse_ref.at[*place, heads], lse, mask=head_mask)
    factor = 1.0 / jnp.where(empty, 1.0, total)
    if plan.num_splits == 1:
        factor = factor * kept_by_sink(lse, triton.load(operands.sink.at[heads], mask=head_mask, other=0.0))
    for chunk, acc in zip(plan.value_chunks, accs, strict=True):
        columns = chunk.start + jnp.arange(chunk.size)
        triton.store(
            out_ref.at[*place, heads[:, None], columns[None, :]],
            (acc * factor[:, None]).astype(out_ref.dtype),
            mask=head_mask[:, None] & (columns < plan.v_dim)[None, :],
        )


def _load_queries(plan: _Plan, q_ref, row, heads, head_mask, chunk: Chunk):
    """[block_h, chunk.size] of one query row."""
    columns = jnp.arange(chunk.size)
    mask = head_mask[:, None] & (columns < chunk.width)[None, :]
    query = triton.load(q_ref.at[row, heads[:, None], chunk.q_start + columns[None, :]], mask=mask, other=0.0)
    return query.astype(plan.dtype)


def _gather(plan: _Plan, keys: KeyRows, ids, valid, chunk: Chunk):
    """[block_k, chunk.size] of the key rows `ids`. What is not valid reads as 0: NaN in unused slots goes nowhere."""
    ref = keys.value if chunk.is_value else keys.tail
    columns = jnp.arange(chunk.size)
    mask = jnp.broadcast_to(valid[:, None], (ids.shape[0], chunk.size))
    if chunk.width < chunk.size:
        mask = mask & (columns < chunk.width)[None, :]
    tile = triton.load(ref.at[ids[:, None], chunk.start + columns[None, :]], mask=mask, other=0.0)
    if keys.scale is None or not chunk.is_value:
        return tile.astype(plan.dtype)
    tile = _decode_e4m3(tile) if plan.decode_bits else tile.astype(jnp.float32)
    return (tile * _gather_scales(keys.scale, ids, valid, chunk)).astype(plan.dtype)


def _gather_scales(scale_ref, ids, valid, chunk: Chunk):
    """f32[block_k, chunk.size]: the scale of every element of a chunk."""
    groups = pl.cdiv(chunk.size, SCALE_BLOCK)
    group = chunk.start // SCALE_BLOCK + jnp.arange(groups)
    mask = valid[:, None] & (group < scale_ref.shape[1])[None, :]
    scales = triton.load(scale_ref.at[ids[:, None], group[None, :]], mask=mask, other=0.0)
    each = chunk.size // groups
    return jnp.broadcast_to(scales[:, :, None], (ids.shape[0], groups, each)).reshape(ids.shape[0], chunk.size)


def _decode_e4m3(tile):
    """float32 of an e4m3fn tile: its sign and its other bits, moved up, are those of a float16 of 2^-8 the value."""
    bits = lax.bitcast_convert_type(tile, jnp.uint8).astype(jnp.uint16)
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return half.astype(jnp.float32) * 256.0


def _dot(a, b):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
