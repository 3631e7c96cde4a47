"""Sparse MLA in Pallas through Triton, for sm_80 and newer, gfx942 and gfx950; interpreted on a CPU.

One program handles one query row, one tile of heads and one split of that row's selected keys. It gathers `block_k` keys at a
time into a tile that serves both products, logits = q K^T and out = P V, with an online softmax between them:

    m' = max(m, logits);  P = 2^(logits - m');  l' = l 2^(m - m') + sum P;  acc' = acc 2^(m - m') + P V

A key's columns are cut into power-of-two chunks (`rows.column_chunks`): 512 + 64 is a value chunk of 512 and a tail chunk of 64, so
nothing is padded to 1024. An e4m3 tile is multiplied by its scales in float32 and rounded to the queries' dtype, which is exact
for scales that are powers of two.

With more than one split, each leaves its float32 output and its log-sum-exp, and a second kernel merges them exactly.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sparse_mla.config import PortableConfig, portable_config, splits_that_fill
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
from pallas_kernels.target import Target, target_of

LOG2E = math.log2(math.e)
_ROCM_ARCHS = ("gfx942", "gfx950")
_HIGHEST = lax.Precision.HIGHEST


class _Operands(NamedTuple):
    """The arrays of a launch. A field is None where the call has no such operand."""

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


def sparse_mla(q, kv, indices, *, sm_scale, v_dim, lengths=None, sink=None):
    """Attention of q[M, H, Dqk] to the rows of kv that indices[M, K] names: out[M, H, v_dim] and natural-log lse f32[M, H].

    kv: an array [N, Dqk], or a latent cache whose flat slots the indices are. Any other index, and lanes past lengths[M], do not
    count. sink[H] joins the denominator of out only. A row's result never depends on the other rows.
    """
    return run(target_of(), q, kv, indices, sm_scale=sm_scale, v_dim=v_dim, lengths=lengths, sink=sink, num_splits=1)


def paged_sparse_mla(
    q, cache, indices, block_table, seq_lens, *, sm_scale, v_dim, lengths=None, sink=None, num_splits=None
):
    """Decode: attention of q[B, Q, H, Dqk] to positions indices[B, Q, K] of each request: out[B, Q, H, v_dim], lse[B, Q, H].

    Positions that are not below seq_lens, or on no page of the cache, do not count. num_splits cuts each row's indices into that
    many programs; None takes as many as fill the device, a given number makes a row's result independent of the batch.
    """
    batch, queries, heads, width = q.shape
    topk = indices.shape[-1]
    rows = batch * queries
    target = target_of()
    if num_splits is None:
        num_splits = splits_that_fill(target, _config(target, q, cache, v_dim), rows=rows, heads=heads, topk=topk)
    num_pages, page_size, _ = cache.nope.shape
    slots = position_slots(indices, block_table, seq_lens, page_size=page_size, num_pages=num_pages)
    out, lse = run(
        target,
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
    target: Target, q, cache, indices, block_table, seq_lens, *, sm_scale, v_dim, lengths=None, sink=None, num_splits=None
) -> str | None:
    """Why paged_sparse_mla cannot run on `target`, or None."""
    return refuse_sparse_mla(target, q, cache, indices, sm_scale=sm_scale, v_dim=v_dim)


def config_sparse_mla(
    target: Target, q, kv, indices, *, sm_scale, v_dim, lengths=None, sink=None
) -> PortableConfig | None:
    """The config that sparse_mla runs with."""
    return _config(target, q, kv, v_dim)


def config_paged_sparse_mla(
    target: Target, q, cache, indices, block_table, seq_lens, *, sm_scale, v_dim, lengths=None, sink=None, num_splits=None
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
    num_splits: int = 1,
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
    operands = _Operands(q, keys, indices, lengths, None if plan.num_splits > 1 else sink)
    interpret = target.platform == "cpu"
    out, lse = _attend(plan, operands, q.dtype if plan.num_splits == 1 else jnp.float32, interpret=interpret)
    if plan.num_splits == 1:
        return out[0], lse[0]
    return _merge(out, lse, sink, q.dtype, interpret=interpret)


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


def _attend(plan: _Plan, operands: _Operands, out_dtype, *, interpret: bool):
    """out[splits, M, H, v_dim], normalised within each split, and natural-log lse f32[splits, M, H]."""
    rows = operands.q.shape[0]

    def kernel(operands, out_ref, lse_ref):
        _attend_kernel(plan, operands, out_ref, lse_ref)

    return pl.pallas_call(
        kernel,
        grid=(rows * plan.num_splits * plan.head_blocks,),
        out_shape=(
            jax.ShapeDtypeStruct((plan.num_splits, rows, plan.heads, plan.v_dim), out_dtype),
            jax.ShapeDtypeStruct((plan.num_splits, rows, plan.heads), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=plan.config.num_warps, num_stages=plan.config.num_stages),
        interpret=interpret,
        name="sparse_mla",
    )(operands)


def _attend_kernel(plan: _Plan, operands: _Operands, out_ref, lse_ref):
    config = plan.config
    # Programs of one row are neighbours, so that tiles of heads find each other's keys in the L2 cache.
    rest, head_block = lax.div(pl.program_id(0), plan.head_blocks), lax.rem(pl.program_id(0), plan.head_blocks)
    row, split = lax.div(rest, plan.num_splits), lax.rem(rest, plan.num_splits)
    heads = head_block * config.block_h + jnp.arange(config.block_h)
    head_mask = heads < plan.heads
    length = plan.topk if operands.lengths is None else jnp.clip(operands.lengths[row], 0, plan.topk)
    first = split * plan.blocks_per_split
    last = jnp.minimum(first + plan.blocks_per_split, lax.div(length + config.block_k - 1, config.block_k))
    queries = [_load_queries(plan, operands.q, row, heads, head_mask, chunk) for chunk in plan.chunks]

    # Axis 0 of a tile holds keys, and so columns of the output, when keys come first; else heads.
    key_axis = 0 if config.keys_first else 1
    per_head = lambda x: jnp.expand_dims(x, key_axis)  # noqa: E731
    per_key = lambda x: jnp.expand_dims(x, 1 - key_axis)  # noqa: E731

    def block(i, carry):
        top, total, accs = carry
        lanes = i * config.block_k + jnp.arange(config.block_k)
        ids = plt.load(operands.indices.at[row, lanes], mask=lanes < length, other=-1)
        valid = (ids >= 0) & (ids < plan.num_keys)
        ids = jnp.where(valid, ids, 0)
        tiles = [_gather(plan, operands.keys, ids, valid, chunk) for chunk in plan.chunks]

        logits = functools.reduce(
            jnp.add,
            (
                _dot(*((tile, query) if config.keys_first else (query, tile)), contract=(1, 1))
                for query, tile in zip(queries, tiles, strict=True)
            ),
        )
        logits = jnp.where(per_key(valid), logits * plan.scale_log2, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=key_axis))
        # While no key was valid the maximum is -inf, and -inf - -inf would be NaN.
        safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2(logits - per_head(safe_top))
        decay = jnp.exp2(top - safe_top)
        total = total * decay + jnp.sum(p, axis=key_axis)
        p = p.astype(plan.dtype)
        accs = tuple(
            acc * per_head(decay)
            + (_dot(tile, p, contract=(0, 0)) if config.keys_first else _dot(p, tile, contract=(1, 0)))
            for acc, tile in zip(accs, tiles, strict=False)
        )
        return new_top, total, accs

    def zeros(chunk):
        return jnp.zeros((chunk.size, config.block_h) if config.keys_first else (config.block_h, chunk.size), jnp.float32)

    top = jnp.full((config.block_h,), -jnp.inf, jnp.float32)
    total = jnp.zeros((config.block_h,), jnp.float32)
    top, total, accs = lax.fori_loop(first, last, block, (top, total, tuple(map(zeros, plan.value_chunks))))

    empty = total == 0.0
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(jnp.where(empty, 1.0, total))) * math.log(2.0))
    plt.store(lse_ref.at[split, row, heads], lse, mask=head_mask)
    factor = 1.0 / jnp.where(empty, 1.0, total)
    if operands.sink is not None:
        factor = factor * _kept_by_sink(lse, plt.load(operands.sink.at[heads], mask=head_mask, other=0.0))
    for chunk, acc in zip(plan.value_chunks, accs, strict=True):
        out = acc * per_head(factor)
        columns = chunk.start + jnp.arange(chunk.size)
        plt.store(
            out_ref.at[split, row, heads[:, None], columns[None, :]],
            (out.T if config.keys_first else out).astype(out_ref.dtype),
            mask=head_mask[:, None] & (columns < plan.v_dim)[None, :],
        )


def _load_queries(plan: _Plan, q_ref, row, heads, head_mask, chunk: Chunk):
    """[block_h, chunk.size] of one query row."""
    columns = jnp.arange(chunk.size)
    mask = head_mask[:, None] & (columns < chunk.width)[None, :]
    query = plt.load(q_ref.at[row, heads[:, None], chunk.q_start + columns[None, :]], mask=mask, other=0.0)
    return query.astype(plan.dtype)


def _gather(plan: _Plan, keys: KeyRows, ids, valid, chunk: Chunk):
    """[block_k, chunk.size] of the key rows `ids`. What is not valid is read as 0, so that NaN in unused slots goes nowhere."""
    ref = keys.value if chunk.is_value else keys.tail
    columns = jnp.arange(chunk.size)
    mask = jnp.broadcast_to(valid[:, None], (ids.shape[0], chunk.size))
    if chunk.width < chunk.size:
        mask = mask & (columns < chunk.width)[None, :]
    tile = plt.load(ref.at[ids[:, None], chunk.start + columns[None, :]], mask=mask, other=0.0)
    if keys.scale is None or not chunk.is_value:
        return tile.astype(plan.dtype)
    tile = _decode_e4m3(tile) if plan.decode_bits else tile.astype(jnp.float32)
    return _keep_layout((tile * _gather_scales(keys.scale, ids, valid, chunk)).astype(plan.dtype))


def _gather_scales(scale_ref, ids, valid, chunk: Chunk):
    """f32[block_k, chunk.size]: the scale of every element of a chunk."""
    groups = pl.cdiv(chunk.size, SCALE_BLOCK)
    group = chunk.start // SCALE_BLOCK + jnp.arange(groups)
    mask = valid[:, None] & (group < scale_ref.shape[1])[None, :]
    scales = plt.load(scale_ref.at[ids[:, None], group[None, :]], mask=mask, other=0.0)
    each = chunk.size // groups
    return jnp.broadcast_to(scales[:, :, None], (ids.shape[0], groups, each)).reshape(ids.shape[0], chunk.size)


def _decode_e4m3(tile):
    """float32 of an e4m3fn tile by its bits: with sign and 7 bits moved up, they are a float16 of 2^-8 the value, exactly."""
    bits = lax.bitcast_convert_type(tile, jnp.uint8).astype(jnp.uint16)
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return half.astype(jnp.float32) * 256.0


def _keep_layout(tile):
    """The tile, unpaired and paired again. Triton moves a change of layout before element-wise work, here before the conversion
    of e4m3, and then reads V from shared memory byte by byte; it does not move one over a split.
    """
    rows, columns = tile.shape
    even, odd = (half.reshape(rows, columns // 2) for half in lax.split(tile.reshape(rows, columns // 2, 2), (1, 1), axis=2))
    return jnp.stack([even, odd], axis=2).reshape(rows, columns)


def _dot(a, b, *, contract: tuple[int, int]):
    precision = _HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _kept_by_sink(lse, sink):
    """The share of the softmax that the keys keep: e^lse / (e^lse + e^sink), for every value of either, infinite ones too."""
    return jnp.where(sink == -jnp.inf, 1.0, 1.0 / (1.0 + jnp.exp2((sink - lse) * LOG2E)))


def _merge(outs, lses, sink, out_dtype, *, interpret: bool):
    """Merges outs f32[S, M, H, V], each normalised over its own keys, with lses f32[S, M, H] into out[M, H, V], lse[M, H].

    lse = log sum_s e^lse_s;  out = sum_s e^(lse_s - lse) out_s
    """
    splits, rows, heads, v_dim = outs.shape
    lanes = pl.next_power_of_2(splits)
    block = max(16, min(pl.next_power_of_2(v_dim), 4096 // lanes))  # 4096 floats: 32 loads in flight a thread
    blocks = pl.cdiv(v_dim, block)

    def kernel(operands, out_ref, lse_ref):
        outs_ref, lses_ref, sink_ref = operands
        pair, column_block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
        row, head = lax.div(pair, heads), lax.rem(pair, heads)
        split = jnp.arange(lanes)
        columns = column_block * block + jnp.arange(block)
        parts = plt.load(lses_ref.at[split, row, head], mask=split < splits, other=-jnp.inf)
        top = jnp.max(parts)
        weights = jnp.exp2((parts - jnp.where(top == -jnp.inf, 0.0, top)) * LOG2E)
        total = jnp.sum(weights)
        empty = total == 0.0
        safe_total = jnp.where(empty, 1.0, total)
        lse = jnp.where(empty, -jnp.inf, top + jnp.log2(safe_total) * math.log(2.0))
        factor = 1.0 / safe_total
        if sink_ref is not None:
            factor = factor * _kept_by_sink(lse, sink_ref[head])
        mask = (split < splits)[:, None] & (columns < v_dim)[None, :]
        tile = plt.load(outs_ref.at[split[:, None], row, head, columns[None, :]], mask=mask, other=0.0)
        out = jnp.sum(tile * weights[:, None], axis=0) * factor
        plt.store(out_ref.at[row, head, columns], out.astype(out_dtype), mask=columns < v_dim)
        lse_ref[row, head] = lse

    return pl.pallas_call(
        kernel,
        grid=(rows * heads * blocks,),
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, v_dim), out_dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sparse_mla_merge",
    )((outs, lses, sink))
