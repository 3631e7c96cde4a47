"""Lightning-indexer scores in plain jnp: run on every device, in bounded memory.

Every score is computed in a tile of one fixed shape, ROW_TILE rows by COLUMN_TILE keys, fenced by optimization
barriers. The compiler sees the same computation whatever the batch, so that a row has the same bits alone and in any
batch, chunk or page order. No array holds heads x rows x keys beyond one tile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsa_jax.plan import decode_ends

# A tile of 64 heads takes 1 MiB in float32, which stays in a core's cache.
ROW_TILE = 8
COLUMN_TILE = 512

# first column -> keys [COLUMN_TILE, D], their scales [COLUMN_TILE] or None, whether they exist [COLUMN_TILE]
KeyTile = Callable[[Any], tuple[Any, Any, Any]]


@functools.partial(jax.jit, static_argnames="clean_logits")
def indexer_logits(q, k, weights, starts, ends, *, k_scale=None, clean_logits=True):
    """See dsa_jax.indexer.indexer_logits."""
    del clean_logits  # there is no cheaper value than -inf for what no row sees
    starts, ends = (clip_range(x, k.shape[0]) for x in (starts, ends))
    padded = _pad_rows(k, COLUMN_TILE)
    k_scale = None if k_scale is None else _pad_rows(k_scale, COLUMN_TILE)

    def key_tile(first):
        scale = None if k_scale is None else lax.dynamic_slice_in_dim(k_scale, first, COLUMN_TILE)
        return lax.dynamic_slice_in_dim(stay_in_loop(first, padded), first, COLUMN_TILE), scale, None

    return _score(q, weights, starts, ends, k.shape[0], key_tile)


@functools.partial(jax.jit, static_argnames="clean_logits")
def paged_indexer_logits(q, cache, weights, block_table, seq_lens, *, clean_logits=True):
    """See dsa_jax.indexer.paged_indexer_logits."""
    del clean_logits
    batch, queries = q.shape[:2]
    num_pages, page_size, _ = cache.k.shape
    columns = block_table.shape[1] * page_size
    ends = jnp.minimum(decode_ends(seq_lens, queries), columns)

    def score_request(b, out):
        table = block_table[b]

        def key_tile(first):
            position = jnp.minimum(first + jnp.arange(COLUMN_TILE, dtype=jnp.int32), columns - 1)
            page, offset = table[position // page_size], position % page_size
            exists = (page >= 0) & (page < num_pages)
            where = (jnp.where(exists, page, 0), offset)
            scale = None if cache.scale is None else cache.scale.at[where].get(mode="promise_in_bounds")
            k = stay_in_loop(first, cache.k).at[where].get(mode="promise_in_bounds")
            return k, scale, exists

        q_, weights_, ends_ = stay_in_loop(b, q)[b], weights[b], ends[b]
        logits = _score(q_, weights_, jnp.zeros_like(ends_), ends_, columns, key_tile)
        return lax.dynamic_update_slice(out, logits[None], (b, 0, 0))

    out = jnp.full_like(ends, -jnp.inf, shape=(batch, queries, columns), dtype=jnp.float32)
    return lax.fori_loop(0, batch, score_request, out)


def score_tile(q, k, weights):
    """sum_h weights[r, h] * relu(q[r, h] . k[c]) in float32, for q[R, H, D], k[C, D], weights[R, H]: [R, C].

    Products of e4m3 or bf16 numbers are exact in either kind of dot; float32 ones are rounded to float32.
    """
    q, k, weights = lax.optimization_barrier((q, k, weights))
    if q.dtype == jnp.float32:
        dots = _float32_dots(q, k)
    else:  # CPUs multiply bf16 slowly, and some of their libraries round its sums
        dots = lax.platform_dependent(q, k, cpu=_float32_dots, default=_bfloat16_dots)
    return lax.optimization_barrier(jnp.sum(jnp.maximum(dots, 0.0) * weights[:, :, None], axis=1))


def _float32_dots(q, k):
    return _dots(q.astype(jnp.float32), k.astype(jnp.float32))


def _bfloat16_dots(q, k):
    return _dots(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16))


def _dots(q, k):
    """q[r, h] . k[c]: [R, H, C]. HIGHEST: a GPU would otherwise round float32 factors to TF32."""
    return jnp.einsum("rhd,cd->rhc", q, k, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _score(q, weights, starts, ends, columns, key_tile: KeyTile):
    """Logits [M, columns] of rows that see [starts, ends), tile by tile; tiles that no row sees are skipped.

    The last tile of rows or columns ends with the array and so overlaps the one before it, which writes the same bits
    twice.
    """
    rows = q.shape[0]
    q, weights, starts, ends = (_pad_rows(x, ROW_TILE) for x in (q, weights, starts, ends))  # padding sees nothing
    tile_rows, tile_columns = min(ROW_TILE, rows), min(COLUMN_TILE, columns)

    def score_rows(i, out):
        row = jnp.minimum(i * ROW_TILE, rows - tile_rows)
        whole = (stay_in_loop(i, q), weights, starts, ends)
        q_, weights_, starts_, ends_ = (lax.dynamic_slice_in_dim(x, row, ROW_TILE) for x in whole)

        def score_columns(j, out):
            first = jnp.minimum(j * COLUMN_TILE, columns - tile_columns)
            tile = lax.cond(
                jnp.any(_seen(first, first + COLUMN_TILE, starts_, ends_)),
                lambda: _masked_tile(q_, weights_, starts_, ends_, first, key_tile),
                lambda: jnp.full_like(starts_, -jnp.inf, shape=(ROW_TILE, COLUMN_TILE), dtype=jnp.float32),
            )
            return lax.dynamic_update_slice(out, tile[:tile_rows, :tile_columns], (row, first))

        return lax.fori_loop(*_tiles_seen(starts_, ends_, columns), score_columns, out)

    out = jnp.full_like(starts, -jnp.inf, shape=(rows, columns), dtype=jnp.float32)
    return lax.fori_loop(0, -(-rows // ROW_TILE), score_rows, out)


def _masked_tile(q, weights, starts, ends, first, key_tile: KeyTile):
    """score_tile of the keys from `first` on, times their scales; -inf where a row does not see the key."""
    k, scale, exists = key_tile(first)
    logits = score_tile(q, k, weights)
    if scale is not None:
        logits = logits * scale[None]
    column = first + jnp.arange(COLUMN_TILE, dtype=jnp.int32)[None]
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    inside = inside if exists is None else inside & exists[None]
    return jnp.where(inside, logits, -jnp.inf)


def _seen(first, stop, starts, ends):
    """Which rows see some column of [first, stop)."""
    return (ends > starts) & (starts < stop) & (ends > first)


def _tiles_seen(starts, ends, columns):
    """[first, last) of the column tiles that some row sees."""
    some = ends > starts
    first = jnp.min(jnp.where(some, starts, columns)) // COLUMN_TILE
    last = (jnp.max(jnp.where(some, ends, 0)) + COLUMN_TILE - 1) // COLUMN_TILE
    return first, last


def clip_range(bound, columns):
    """Starts or ends within 0..columns, in int32."""
    return jnp.clip(bound, 0, columns).astype(jnp.int32)


def stay_in_loop(counter, x):
    """x, an array or a tree of them, made to depend on a loop's counter.

    XLA's CPU back end widens 8- and 16-bit floats before it takes rows of them, and would widen the whole array ahead
    of the loop.
    """
    return lax.optimization_barrier((counter, x))[1]


def _pad_rows(x, rows):
    """x with zeros up to `rows` rows; as it is where it has them."""
    missing = max(rows - x.shape[0], 0)
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1)) if missing else x
