"""Multi-head latent attention in plain jnp: runs on every device, in bounded memory.

Rows go through tiles of one fixed shape, each fenced by optimization barriers. The compiler then sees the same
computation whatever the batch, so that a row has the same bits alone and in any batch.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dsa_jax.cache import LatentCache, read_latents, to_slots
from dsa_jax.indexer_xla import stay_in_loop

# Gathered keys of one tile of sparse rows, in float32. It bounds the temporary memory; more rows a tile gain nothing.
GATHER_BYTES = 64 << 20
MAX_SPARSE_ROWS = 8
# Tile of dense attention: its logits are [H, DENSE_ROWS, DENSE_COLUMNS] float32, 8 MiB for 128 heads.
DENSE_ROWS = 64
DENSE_COLUMNS = 256


@functools.partial(jax.jit, static_argnames="v_dim")
def sparse_mla(q, kv, indices, *, sm_scale, v_dim, lengths=None, sink=None):
    """See dsa_jax.mla.sparse_mla."""
    slots = _drop_lanes(indices, lengths)
    return _attend(q, kv, slots[:, None], sink, sm_scale=sm_scale, v_dim=v_dim)


@functools.partial(jax.jit, static_argnames=("v_dim", "num_splits"))
def paged_sparse_mla(
    q, cache, indices, block_table, seq_lens, *, sm_scale, v_dim, lengths=None, sink=None, num_splits=None
):
    """See dsa_jax.mla.paged_sparse_mla."""
    batch, queries, heads, width = q.shape
    rows, lanes, splits = batch * queries, indices.shape[-1], num_splits or 1
    positions = jnp.where(indices < seq_lens[:, None, None], indices, -1).reshape(rows, lanes)
    positions = _drop_lanes(positions, None if lengths is None else lengths.reshape(rows))
    request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), queries)
    slots = to_slots(positions, request, block_table, cache.page_size)
    part = -(-lanes // splits)
    slots = jnp.pad(slots, ((0, 0), (0, splits * part - lanes)), constant_values=-1).reshape(rows, splits, part)
    out, lse = _attend(q.reshape(rows, heads, width), cache, slots, sink, sm_scale=sm_scale, v_dim=v_dim)
    return out.reshape(batch, queries, heads, v_dim), lse.reshape(batch, queries, heads)


@jax.jit
def dense_mla(q, k, v, starts, ends, *, sm_scale):
    """See dsa_jax.mla.dense_mla."""
    rows, heads, _ = q.shape
    columns, _, v_dim = v.shape
    if rows == 0 or columns == 0:
        return _no_keys(rows, heads, v_dim, q.dtype)
    kv = tuple(_pad_to_multiple(x, DENSE_COLUMNS, 0) for x in (k, v))
    starts, ends = (jnp.clip(x, 0, columns) for x in (starts, ends))
    tile = functools.partial(_attend_dense_tile, sm_scale=sm_scale)
    return _map_tiles(tile, kv, (q, starts, ends), rows=DENSE_ROWS, fill=0)


def merge(outs, lses):
    """See dsa_jax.mla.merge_attention."""
    top = jnp.max(lses, axis=0, initial=-jnp.inf)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lses - shift[None])
    total = jnp.sum(weights, axis=0)
    # A part without keys has weight 0; selecting keeps whatever its output holds out of the sum.
    parts = jnp.where((weights == 0.0)[..., None], 0.0, outs.astype(jnp.float32) * weights[..., None])
    out = jnp.sum(parts, axis=0) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.astype(outs.dtype), shift + jnp.log(total)


def _attend(q, kv, slots, sink, *, sm_scale, v_dim):
    """Attention of q[M, H, D] over the rows of kv that slots[M, S, K] name, each of the S parts alone, then merged."""
    rows, heads, width = q.shape
    num_keys = kv.num_slots if isinstance(kv, LatentCache) else kv.shape[0]
    if 0 in (*slots.shape, num_keys):
        return _no_keys(rows, heads, v_dim, q.dtype)

    def tile(kv, q, slots):
        valid = (slots >= 0) & (slots < num_keys)
        outs, lses = _attend_tile(q, _gather(kv, slots, valid), valid, sm_scale=sm_scale, v_dim=v_dim)
        out, lse = merge(jnp.moveaxis(outs, 1, 0), jnp.moveaxis(lses, 1, 0))
        return _join_sink(out, lse, sink), lse

    row_bytes = slots.shape[1] * slots.shape[2] * width * 4
    tile_rows = max(1, min(MAX_SPARSE_ROWS, GATHER_BYTES // row_bytes))
    return _map_tiles(tile, kv, (q, slots), rows=tile_rows, fill=-1)


def _attend_tile(q, keys, valid, *, sm_scale, v_dim):
    """Softmax attention of q[T, H, D] over keys[T, S, K, D] where valid[T, S, K]: out[T, S, H, v_dim], lse[T, S, H]."""
    logits = _dot("thd,tskd->tshk", q, keys) * sm_scale
    logits = jnp.where(valid[:, :, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    shift = jnp.where(top == -jnp.inf, 0.0, top)  # -inf - -inf is NaN
    weights = jnp.exp(logits - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = _dot("tshk,tskv->tshv", weights, keys[..., :v_dim])
    return out / jnp.where(total == 0.0, 1.0, total), (shift + jnp.log(total))[..., 0]


def _attend_dense_tile(kv, q, starts, ends, *, sm_scale):
    """Online softmax of q[T, H, D] over k[starts:ends]; visits only the blocks of columns that some row sees."""
    k, v = kv
    rows, heads, _ = q.shape
    seen = ends > starts
    first = jnp.min(jnp.where(seen, starts, k.shape[0])) // DENSE_COLUMNS
    last = (jnp.max(jnp.where(seen, ends, 0)) + DENSE_COLUMNS - 1) // DENSE_COLUMNS

    def step(block, carry):
        top, total, acc = carry
        first_column = block * DENSE_COLUMNS
        keys, values = (lax.dynamic_slice_in_dim(x, first_column, DENSE_COLUMNS) for x in stay_in_loop(block, kv))
        columns = first_column + jnp.arange(DENSE_COLUMNS, dtype=jnp.int32)[None]
        inside = (columns >= starts[:, None]) & (columns < ends[:, None])
        logits = jnp.where(inside[None], _dot("thd,nhd->htn", q, keys) * sm_scale, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        # A block without keys for a row leaves that row's carry as it is, to the bit: the factor is exp(0) = 1.
        factor = jnp.exp(top - shift)
        weights = jnp.exp(logits - shift)
        total = total * factor + jnp.sum(weights, axis=-1, keepdims=True)
        acc = acc * factor + _weigh_values(weights, values, inside)
        return new_top, total, acc

    carry = (
        jnp.full((heads, rows, 1), -jnp.inf),
        jnp.zeros((heads, rows, 1)),
        jnp.zeros((heads, rows, v.shape[-1])),
    )
    top, total, acc = lax.fori_loop(first, last, step, carry)
    out = acc / jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(top == -jnp.inf, 0.0, top) + jnp.log(total)
    return jnp.moveaxis(out, 0, 1), lse[..., 0].T


def _weigh_values(weights, values, inside):
    """weights[H, T, N] @ values[N, H, v], where a value that is not finite reaches only the rows that attend to it.

    In a plain product 0 * NaN would carry it to every row of the tile, other requests' rows included.
    """
    finite = jnp.isfinite(values)
    broken = jnp.any(~finite, axis=-1).astype(jnp.float32)
    reached = _dot("tn,nh->ht", inside.astype(jnp.float32), broken) > 0.0
    out = _dot("htn,nhv->htv", weights, jnp.where(finite, values, 0))
    return jnp.where(reached[..., None], jnp.nan, out)


def _join_sink(out, lse, sink):
    """out * exp(lse) / (exp(lse) + exp(sink)): the sink takes its share of the softmax and adds no value.

    Only the difference sink - lse meets exp, so that no sink overflows into NaN.
    """
    if sink is None:
        return out
    share = 1.0 / (1.0 + jnp.exp(sink[None] - lse))
    return out * jnp.where(lse == -jnp.inf, 0.0, share)[..., None]  # both -inf: their difference is NaN


def _gather(kv, slots, valid):
    """The rows of kv named by slots, zeros where not valid: what an unused row holds must not meet the products."""
    if isinstance(kv, LatentCache):
        return read_latents(kv, jnp.where(valid, slots, -1))
    rows = kv.at[jnp.where(valid, slots, 0)].get(mode="promise_in_bounds")
    return jnp.where(valid[..., None], rows, 0)


def _drop_lanes(indices, lengths):
    """indices[M, K] with -1 in the lanes past lengths[M]."""
    if lengths is None:
        return indices
    lanes = jnp.arange(indices.shape[1], dtype=jnp.int32)[None]
    return jnp.where(lanes < lengths[:, None], indices, -1)


def _dot(equation, a, b):
    """Einsum into float32. bf16 operands multiply as they are; any float32 operand makes it a full float32 product."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _map_tiles(tile, kv, arrays, *, rows, fill):
    """Calls `tile(kv, q, ...)` on tiles of exactly `rows` rows of arrays = (q[M, ...], ...); joins its out and lse.

    The last tile is filled up: q with zeros, integer arrays with `fill`. out gets q's dtype.
    """
    q = arrays[0]
    padded = (_pad_to_multiple(q, rows, 0), *(_pad_to_multiple(x, rows, fill) for x in arrays[1:]))

    def fenced(number):
        shared, whole = stay_in_loop(number, (kv, padded))
        inputs = lax.optimization_barrier([lax.dynamic_slice_in_dim(x, number * rows, rows) for x in whole])
        out, lse = tile(shared, *inputs)
        return lax.optimization_barrier((_to_bits(out.astype(q.dtype)), lse))

    tiles = jnp.arange(padded[0].shape[0] // rows, dtype=jnp.int32)
    out, lse = (x.reshape(-1, *x.shape[2:])[: q.shape[0]] for x in lax.map(fenced, tiles))
    return lax.bitcast_convert_type(out, q.dtype), lse


def _to_bits(x):
    """bf16 as uint16: on a CPU, a loop that writes bf16 rows would widen the whole result in each round."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _pad_to_multiple(x, multiple, fill):
    missing = -x.shape[0] % multiple
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1), constant_values=fill) if missing else x


def _no_keys(rows, heads, v_dim, dtype):
    return jnp.zeros((rows, heads, v_dim), dtype), jnp.full((rows, heads), -jnp.inf, jnp.float32)
