"""Top-k of index scores, and selection: scores and top-k together in bounded memory.

The rule, everywhere: the greater score first, then the lowest column; what was chosen is returned in ascending column
order, -1 last. NaN and -inf are never chosen; 0.0 and -0.0 are equal. So equal scores give equal bits.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int32

from dsa_jax import topk_xla
from dsa_jax.cache import IndexCache
from dsa_jax.checks import refuse, require, require_dtype, require_shape
from dsa_jax.dispatch import Composite, Op
from dsa_jax.indexer import (
    INDEXER_LOGITS,
    PAGED_INDEXER_LOGITS,
    check_paged,
    check_ragged,
    int32_ranges,
    logits_of_rows,
    rows_of,
)
from dsa_jax.indexer_xla import COLUMN_TILE, ROW_TILE, clip_range, stay_in_loop
from dsa_jax.plan import decode_ends
from dsa_jax.varying import call_untyped
from pallas_kernels.row_chunk import RowChunk


def _topk_xla(scores, k, starts=None, ends=None):
    rows, columns = scores.shape
    if starts is None:
        starts = jnp.full_like(scores, 0, shape=(rows,), dtype=jnp.int32)
        ends = starts + columns
    return topk_xla.topk_indices(scores, k, starts, ends)


# kernels: module path by implementation name, e.g. {"hopper": "pallas_kernels.topk.hopper"}.
# They get scores that are not empty, k in 1..4096, and int32 starts and ends, whatever they are, or neither for whole
# rows.
TOPK_INDICES = Op(
    "topk_indices",
    xla=_topk_xla,
    kernels={"hopper": "pallas_kernels.topk.hopper", "portable": "pallas_kernels.topk.portable"},
)

MAX_TOPK = 4096
DEFAULT_MEMORY_BUDGET = 2 << 30  # bytes
# Rows that a chunk should have before columns are cut: enough to fill a device. Cut columns cost more, their candidates
# have to be joined.
LEAST_ROWS = 256


def topk_indices(
    scores: Float[Array, "M N"],
    k: int,
    starts: Int[Array, " M"] | None = None,
    ends: Int[Array, " M"] | None = None,
    *,
    implementation: str | None = None,
) -> Int32[Array, "M k"]:
    """The columns of each row's k greatest scores in [starts, ends), by the module's rule.

    A row holds min(k, scores that may be chosen) columns, then -1. Columns count from the row's beginning, not from
    its start.

    scores: float32, or bfloat16 or float16.
    k: 1..4096, also more than N.
    starts, ends: clipped to 0..N; None for all columns. A row with end <= start is all -1.
    implementation: None for the best there is, or "hopper", "portable" or "xla".
    Raises ValueError for bad arguments, NotImplementedError where the named implementation cannot run.
    """
    require_topk("k", k)
    require_shape("scores", scores, (None, None), "[M, N]")
    require_dtype("scores", scores, jnp.float32, jnp.bfloat16, jnp.float16)
    rows, columns = scores.shape
    for name, bound in (("starts", starts), ("ends", ends)):
        if bound is not None:
            require_shape(name, bound, (rows,), "[M]")
            require(jnp.issubdtype(bound.dtype, jnp.integer), f"{name}'s dtype", bound.dtype, "an integer type")
    if rows == 0 or columns == 0:
        return jnp.full((rows, k), -1, jnp.int32)
    if starts is None and ends is None:
        return TOPK_INDICES(implementation, scores, k)
    starts = jnp.full_like(scores, 0, shape=(rows,), dtype=jnp.int32) if starts is None else starts
    ends = jnp.full_like(scores, columns, shape=(rows,), dtype=jnp.int32) if ends is None else ends
    return TOPK_INDICES(implementation, scores, k, *int32_ranges(starts, ends, columns))


def merge_candidates(
    values: Float[Array, "M C"], columns: Int32[Array, "M C"], k: int, *, implementation: str | None = None
) -> tuple[Float[Array, "M k"], Int32[Array, "M k"]]:
    """The k best of candidates from disjoint sets of columns: what top-k of all the columns together would choose.

    values: scores; anything where there is no candidate.
    columns: each candidate's column, ascending along a row but for -1 = none, which may stand anywhere. Sets of
        candidates are joined by concatenation in the order of their columns.
    k, implementation: as in `topk_indices`.
    Returns (values, columns) of the chosen in ascending column order, then -inf and -1.
    """
    require_shape("columns", columns, values.shape, "[M, C], as values")
    values = jnp.where(columns < 0, -jnp.inf, values)
    position = topk_indices(values, k, implementation=implementation)
    return _take(values, position, -jnp.inf), _take(columns, position, -1)


def select_topk(
    q: Float[Array, "M H D"],
    k: Float[Array, "N D"],
    weights: Float[Array, "M H"],
    starts: Int[Array, " M"],
    ends: Int[Array, " M"],
    topk: int,
    *,
    k_scale: Float[Array, " N"] | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    implementation: str | None = None,
) -> Int32[Array, "M topk"]:
    """topk_indices(indexer_logits(...), topk, starts, ends) in bounded memory: the same bits under every budget.

    Rows and columns go through in chunks, and columns outside every row's range of a chunk of rows are passed over.

    q, k, weights, starts, ends, k_scale: as in `indexer_logits`.
    topk: 1..4096, also more than N.
    memory_budget: bytes of temporary memory, at least what one tile of scores and its top-k take.
    implementation: None for the best of each op, or the one that runs all of them.
    Raises ValueError for bad arguments, NotImplementedError where the named implementation cannot run.
    """
    check_ragged(q, k, weights, starts, ends, k_scale)
    require_topk("topk", topk)
    if q.shape[0] == 0 or k.shape[0] == 0:
        return jnp.full((q.shape[0], topk), -1, jnp.int32)
    chunks, names = SELECT_TOPK.resolve(
        implementation, q, k, weights, starts, ends, topk, k_scale=k_scale, memory_budget=memory_budget
    )
    starts, ends = int32_ranges(starts, ends, k.shape[0])
    options = {"topk": topk, "chunks": chunks, "names": names}
    return call_untyped(_select, q, k, weights, starts, ends, k_scale, **options)


def paged_select_topk(
    q: Float[Array, "B Q H D"],
    cache: IndexCache,
    weights: Float[Array, "B Q H"],
    block_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
    topk: int,
    *,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    implementation: str | None = None,
) -> Int32[Array, "B Q topk"]:
    """Top-k of `paged_indexer_logits` in bounded memory: positions in the request, the same bits under every budget.

    q, cache, weights, block_table, seq_lens: as in `paged_indexer_logits`.
    topk, memory_budget, implementation: as in `select_topk`.
    Raises ValueError for bad arguments, NotImplementedError where the named implementation cannot run.
    """
    check_paged(q, cache, weights, block_table, seq_lens)
    require_topk("topk", topk)
    batch, queries = q.shape[:2]
    if 0 in (batch, queries, block_table.shape[1]):
        return jnp.full((batch, queries, topk), -1, jnp.int32)
    chunks, names = PAGED_SELECT_TOPK.resolve(
        implementation, q, cache, weights, block_table, seq_lens, topk, memory_budget=memory_budget
    )
    table, lens = block_table.astype(jnp.int32), seq_lens.astype(jnp.int32)
    options = {"topk": topk, "chunks": chunks, "names": names}
    return call_untyped(_paged_select, q, cache, weights, table, lens, **options)


def require_topk(name: str, topk: Any) -> None:
    """Raises ValueError unless topk is an integer in 1..4096."""
    legal = isinstance(topk, int) and not isinstance(topk, bool) and 1 <= topk <= MAX_TOPK
    require(legal, name, topk, f"in 1..{MAX_TOPK}")


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a selection is cut up: rows (requests, if paged) and columns that are scored together."""

    rows: int
    columns: int


@functools.partial(jax.jit, static_argnames=("topk", "chunks", "names"))
def _select(q, k, weights, starts, ends, k_scale, *, topk, chunks, names):
    def select_rows(out, chunk):
        if chunks.columns == k.shape[0]:
            options = {"k_scale": k_scale, "clean_logits": False}
            logits = logits_of_rows(names[0], chunk, q, k, weights, starts, ends, **options)
            return _topk_into(names[1], out, chunk, logits, topk, starts, ends)
        q_, w_, starts_, ends_ = (rows_of(x, chunk) for x in (q, weights, starts, ends))

        def score(first, starts, ends):
            k_ = _columns(k, first, chunks.columns)
            scale = None if k_scale is None else _columns(k_scale, first, chunks.columns)
            return INDEXER_LOGITS.run(names[0], q_, k_, w_, starts, ends, k_scale=scale, clean_logits=False)

        return _put(out, chunk, _select_columns(score, starts_, ends_, k.shape[0], topk, chunks.columns, names))

    return _in_row_chunks(select_rows, _unfilled(q.shape[0], topk), chunks.rows)


@functools.partial(jax.jit, static_argnames=("topk", "chunks", "names"))
def _paged_select(q, cache, weights, block_table, seq_lens, *, topk, chunks, names):
    queries, page_size = q.shape[1], cache.page_size
    columns = block_table.shape[1] * page_size

    def select_requests(out, chunk):
        q_, w_, table, lens = (rows_of(x, chunk) for x in (q, weights, block_table, seq_lens))
        ends = jnp.minimum(decode_ends(lens, queries).reshape(-1), columns)

        def score(first, starts, ends):
            pages = lax.dynamic_slice_in_dim(table, first // page_size, chunks.columns // page_size, axis=1)
            logits = PAGED_INDEXER_LOGITS.run(names[0], q_, cache, w_, pages, lens - first, clean_logits=False)
            return logits.reshape(-1, chunks.columns)

        chosen = _select_columns(score, jnp.zeros_like(ends), ends, columns, topk, chunks.columns, names)
        return _put(out, chunk, chosen.reshape(chunks.rows, queries, topk))

    return _in_row_chunks(select_requests, _unfilled(*q.shape[:2], topk), chunks.rows)


def _in_row_chunks(select_rows: Callable, out: Array, size: int) -> Array:
    """`out` filled by select_rows(out, chunk of `size` rows) -> out, chunk by chunk."""
    if size == out.shape[0]:
        return select_rows(out, RowChunk(0, size))
    return lax.fori_loop(0, -(-out.shape[0] // size), lambda i, out: select_rows(out, RowChunk(i, size)), out)


def _unfilled(*shape: int) -> Array:
    """An int32 array with anything in it, whole on every device of the mesh that there may be."""
    is_on_mesh = not jax.sharding.get_abstract_mesh().empty
    return lax.empty(shape, jnp.int32, out_sharding=PartitionSpec(*[None] * len(shape)) if is_on_mesh else None)


def _topk_into(name: str, out: Array, chunk: RowChunk, scores: Array, topk: int, starts: Array, ends: Array) -> Array:
    """`out` with the top-k of scores in a chunk of its rows: put there, where the kernel does not do it itself.

    starts, ends: of all rows of `out`.
    """

    def put(out, chunk, scores, topk, starts, ends):
        starts, ends = (rows_of(x, chunk) for x in (starts, ends))
        return _put(out, chunk, TOPK_INDICES.run(name, scores, topk, starts, ends))

    if chunk.size == out.shape[0]:
        return put(out, chunk, scores, topk, starts, ends)
    return TOPK_INDICES.run_form("into", name, put, out, chunk, scores, topk, starts, ends)


def _put(out: Array, chunk: RowChunk, rows: Array) -> Array:
    """`out` with a chunk of its rows replaced; the new ones alone if they are all."""
    if chunk.size == out.shape[0]:
        return rows
    return lax.dynamic_update_slice_in_dim(out, rows, chunk.first(out.shape[0]), axis=0)


def _columns(x: Array, first: Array, size: int) -> Array:
    """x[first : first + size] in a loop over chunks of columns; the first axis of `x` is theirs."""
    return lax.dynamic_slice_in_dim(stay_in_loop(first, x), first, size)


def _select_columns(
    score: Callable, starts: Array, ends: Array, columns: int, topk: int, size: int, names: tuple[str, ...]
) -> Array:
    """Top-k of score(first column, starts, ends) -> [M, size] over all columns, where score's ranges count from there.

    The last chunk of columns ends with the array: its range leaves out what the chunk before it has scored.

    names: what runs for the scores, for the top-k of a chunk and, where there are several, for joining two.
    """
    if size == columns:
        return TOPK_INDICES.run(names[1], score(0, starts, ends), topk, starts, ends)

    def step(i, best):
        first = jnp.minimum(i * size, columns - size)
        starts_, ends_ = (clip_range(x, size) for x in (jnp.maximum(starts, i * size) - first, ends - first))
        logits = score(first, starts_, ends_)
        chosen = TOPK_INDICES.run(names[1], logits, topk, starts_, ends_)
        values = jnp.concatenate([best[0], _take(logits, chosen, -jnp.inf)], axis=1)
        found = jnp.concatenate([best[1], jnp.where(chosen < 0, -1, chosen + first)], axis=1)
        return merge_candidates(values, found, topk, implementation=names[2])

    starts, ends = (clip_range(x, columns) for x in (starts, ends))
    some = ends > starts
    first = jnp.min(jnp.where(some, starts, columns)) // size
    last = (jnp.max(jnp.where(some, ends, 0)) + size - 1) // size
    shape = (starts.shape[0], topk)
    none = jnp.full_like(starts, -jnp.inf, shape=shape, dtype=jnp.float32), jnp.full_like(starts, -1, shape=shape)
    return lax.fori_loop(first, last, step, none)[1]


def _take(x: Array, index: Array, fill: Any) -> Array:
    """x[m, index[m, j]], `fill` where the index is -1."""
    taken = jnp.take_along_axis(x, jnp.maximum(index, 0), axis=1, mode="promise_in_bounds")
    return jnp.where(index < 0, fill, taken)


def _ragged_parts(q, k, weights, starts, ends, topk, *, k_scale=None, memory_budget=DEFAULT_MEMORY_BUDGET):
    """How select_topk is cut up, and the ops it calls."""
    rows, heads, width = q.shape
    columns, itemsize = k.shape[0], k.dtype.itemsize
    sizes = {
        "topk": topk,
        "all_columns": columns,
        "heads": heads,
        "row_bytes": heads * (width * itemsize + 4),
        "key_bytes": width * itemsize + 4,
    }

    chunks = _fit_chunks(
        functools.partial(selection_bytes, **sizes),
        memory_budget,
        rows,
        min(ROW_TILE, rows),
        columns,
        min(COLUMN_TILE, columns),
    )
    bound = _shape(jnp.int32, chunks.rows)
    score = (
        _shape(q.dtype, chunks.rows, heads, width),
        _shape(k.dtype, chunks.columns, width),
        _shape(jnp.float32, chunks.rows, heads),
        bound,
        bound,
    )
    scale = None if k_scale is None else _shape(jnp.float32, chunks.columns)
    return chunks, ((INDEXER_LOGITS, score, {"k_scale": scale}), *_top_parts(chunks.rows, chunks, columns, topk))


def _paged_parts(q, cache, weights, block_table, seq_lens, topk, *, memory_budget=DEFAULT_MEMORY_BUDGET):
    """How paged_select_topk is cut up, and the ops it calls. Its rows are whole requests, its columns whole pages."""
    batch, queries, heads, width = q.shape
    columns, itemsize = block_table.shape[1] * cache.page_size, q.dtype.itemsize
    sizes = {
        "topk": topk,
        "all_columns": columns,
        "heads": heads,
        "row_bytes": heads * (width * itemsize + 4),
        "key_bytes": 0,
    }

    chunks = _fit_chunks(
        lambda requests, columns: selection_bytes(requests * queries, columns, **sizes) + 4 * queries * columns,
        memory_budget,
        batch,
        1,
        columns,
        min(math.ceil(COLUMN_TILE / cache.page_size) * cache.page_size, columns),
    )
    score = (
        _shape(q.dtype, chunks.rows, queries, heads, width),
        jax.tree.map(lambda x: _shape(x.dtype, *x.shape), cache),
        _shape(jnp.float32, chunks.rows, queries, heads),
        _shape(jnp.int32, chunks.rows, chunks.columns // cache.page_size),
        _shape(jnp.int32, chunks.rows),
    )
    return chunks, ((PAGED_INDEXER_LOGITS, score, {}), *_top_parts(chunks.rows * queries, chunks, columns, topk))


def _top_parts(rows: int, chunks: Chunks, columns: int, topk: int) -> tuple:
    """The top-k of a chunk, and where there are several the one that joins two."""
    widths = (chunks.columns,) if chunks.columns == columns else (chunks.columns, 2 * topk)
    bound = _shape(jnp.int32, rows)
    return tuple((TOPK_INDICES, (_shape(jnp.float32, rows, width), topk, bound, bound), {}) for width in widths)


def _shape(dtype: Any, *lengths: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(lengths, dtype)


def _fit_chunks(
    temporary: Callable[[int, int], int], memory_budget: int, rows: int, row_unit: int, columns: int, column_unit: int
) -> Chunks:
    """All columns if LEAST_ROWS rows of them stay within the budget, else as many as do; and then the most rows.

    temporary: bytes that a chunk of so many rows and columns takes.
    row_unit, column_unit: what a chunk holds a whole number of.
    """
    width, wanted = columns, max(min(rows, LEAST_ROWS), row_unit)
    while temporary(wanted, width) > memory_budget and width > column_unit:
        width = _even(columns, width // 2, column_unit)
    if temporary(row_unit, width) > memory_budget:  # joining candidates may take more than it spares
        width = min(columns, width, key=lambda columns: temporary(row_unit, columns))
    least = temporary(row_unit, width)
    if least > memory_budget:
        refuse("memory_budget", memory_budget, f"at least {least} bytes here")
    fitting = bisect.bisect_right(range(1, rows + 1), memory_budget, key=lambda count: temporary(count, width))
    return Chunks(_even(rows, fitting, row_unit), width)


def _even(total: int, limit: int, unit: int) -> int:
    """The length of equal chunks of `total`, whole units, at most max(limit, unit); `total` itself if that fits."""
    if total <= limit:
        return total
    most = max(limit // unit, 1)
    return math.ceil(math.ceil(total / unit) / math.ceil(total / (most * unit))) * unit


SELECT_TOPK = Composite("select_topk", ops=(INDEXER_LOGITS, TOPK_INDICES), parts=_ragged_parts)
PAGED_SELECT_TOPK = Composite("paged_select_topk", ops=(PAGED_INDEXER_LOGITS, TOPK_INDICES), parts=_paged_parts)


def selection_bytes(
    rows: int, columns: int, *, topk: int, all_columns: int, heads: int, row_bytes: int, key_bytes: int
) -> int:
    """Temporary memory, at most, of selecting for `rows` rows over chunks of `columns` of all columns.

    row_bytes, key_bytes: of a row's queries and weights, and of a key with its scale, which are copied by chunk.
    """
    logits = 4 * rows * columns
    top, candidates = max(topk_xla.temporary_bytes(rows, columns, topk), _scratch_bytes(rows, topk)), 4 * rows * topk
    if columns < all_columns:
        top, candidates = max(top, topk_xla.temporary_bytes(rows, 2 * topk, topk)), 40 * rows * topk
    tile = 3 * 4 * ROW_TILE * heads * COLUMN_TILE
    return logits + top + candidates + tile + 2 * (rows * row_bytes + columns * key_bytes)


def _scratch_bytes(rows: int, topk: int) -> int:
    """What the portable kernel keeps candidates in: a key and a column each, for twice k rounded up to a power of two,
    in at most 1024 programs."""
    return 16 * min(rows, 1024) * max(1 << (topk - 1).bit_length(), 512)
