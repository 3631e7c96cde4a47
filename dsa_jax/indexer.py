"""Lightning-indexer scores: how much each query row wants each key, over a ragged or a paged set of keys.

    logit[m, n] = k_scale[n] * sum_h weights[m, h] * relu(q[m, h] . k[n])

in float32 (DeepSeek-V3.2-Exp, equation 1). `weights` carries every constant factor: the projected head weights, the
scale of an fp8 query, H^-0.5 and D^-0.5. A row's logits have the same bits in any batch.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from dsa_jax import indexer_xla
from dsa_jax.cache import IndexCache
from dsa_jax.checks import require, require_dtype, require_shape
from dsa_jax.dispatch import Op
from dsa_jax.indexer_xla import clip_range, stay_in_loop
from pallas_kernels.row_chunk import RowChunk

# kernels: module path by implementation name, e.g. {"hopper": "pallas_kernels.indexer_logits.hopper"}.
# They get arrays that are not empty, weights in float32, and starts, ends, block tables and seq_lens in int32 as the
# caller gave them, whatever they are.
_KERNELS = {name: f"pallas_kernels.indexer_logits.{name}" for name in ("hopper", "portable")}
INDEXER_LOGITS = Op("indexer_logits", xla=indexer_xla.indexer_logits, kernels=_KERNELS)
PAGED_INDEXER_LOGITS = Op("paged_indexer_logits", xla=indexer_xla.paged_indexer_logits, kernels=_KERNELS)

KEY_DTYPES = (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32)


def indexer_logits(
    q: Float[Array, "M H D"],
    k: Float[Array, "N D"],
    weights: Float[Array, "M H"],
    starts: Int[Array, " M"],
    ends: Int[Array, " M"],
    *,
    k_scale: Float[Array, " N"] | None = None,
    clean_logits: bool = True,
    implementation: str | None = None,
) -> Float32[Array, "M N"]:
    """Scores of every key for every row; -inf outside [starts, ends), whatever k and k_scale hold there.

    q, k: float8_e4m3fn, bfloat16 or float32, both the same.
    weights: float32, with every constant factor.
    starts, ends: the keys a row sees, clipped to 0..N; a row with end <= start sees none.
    k_scale: float32, each key's scale where k is quantised.
    clean_logits: False leaves it open what lies outside [starts, ends), for a reader that looks at the ranges too:
        `topk_indices` does. Half of a causal prompt's scores are then not even written.
    implementation: None for the best there is, or "hopper", "portable" or "xla".
    Raises ValueError for shapes and dtypes that do not fit, NotImplementedError if the named implementation cannot run.
    """
    check_ragged(q, k, weights, starts, ends, k_scale)
    require(isinstance(clean_logits, bool), "clean_logits", repr(clean_logits), "True or False")
    rows, columns = q.shape[0], k.shape[0]
    if rows == 0 or columns == 0:
        return jnp.zeros((rows, columns), jnp.float32)
    starts, ends = int32_ranges(starts, ends, columns)
    return INDEXER_LOGITS(implementation, q, k, weights, starts, ends, k_scale=k_scale, clean_logits=clean_logits)


def paged_indexer_logits(
    q: Float[Array, "B Q H D"],
    cache: IndexCache,
    weights: Float[Array, "B Q H"],
    block_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
    *,
    clean_logits: bool = True,
    implementation: str | None = None,
) -> Float32[Array, "B Q N"]:
    """Scores of each request's last Q tokens for its keys: column n is the key at position n of the request.

    Query i sees the keys before position seq_lens - Q + i + 1 (`dsa_jax.plan.decode_ends`); the rest are -inf.

    q: as cache.k in dtype.
    cache: its scale multiplies the scores where there is one.
    weights: float32, with every constant factor.
    block_table: each request's pages in order. Entries past seq_lens may be anything; keys of a page that the cache
        does not have score -inf.
    seq_lens: keys of each request, its last Q tokens included. Any number: below Q the first queries see nothing, and
        past P * page every key is seen.
    clean_logits: False leaves it open what lies past the keys that a query sees.
    implementation: None for the best there is, or "hopper", "portable" or "xla".
    Raises ValueError for shapes and dtypes that do not fit, NotImplementedError if the named implementation cannot run.
    """
    check_paged(q, cache, weights, block_table, seq_lens)
    require(isinstance(clean_logits, bool), "clean_logits", repr(clean_logits), "True or False")
    shape = (*q.shape[:2], block_table.shape[1] * cache.page_size)
    if 0 in shape:
        return jnp.zeros(shape, jnp.float32)
    table, lens = block_table.astype(jnp.int32), seq_lens.astype(jnp.int32)
    return PAGED_INDEXER_LOGITS(implementation, q, cache, weights, table, lens, clean_logits=clean_logits)


def logits_of_rows(
    name: str,
    chunk: RowChunk,
    q: Float[Array, "A H D"],
    k: Float[Array, "N D"],
    weights: Float[Array, "A H"],
    starts: Int32[Array, " A"],
    ends: Int32[Array, " A"],
    **options: Any,
) -> Float32[Array, "M N"]:
    """INDEXER_LOGITS.run(name, ...) of a chunk's rows, M of A, cut out where the kernel does not find them itself."""

    def run(chunk, q, k, weights, starts, ends, **options):
        q, weights, starts, ends = (rows_of(x, chunk) for x in (q, weights, starts, ends))
        return INDEXER_LOGITS.run(name, q, k, weights, starts, ends, **options)

    if chunk.size == q.shape[0]:
        return run(chunk, q, k, weights, starts, ends, **options)
    return INDEXER_LOGITS.run_form("of_rows", name, run, chunk, q, k, weights, starts, ends, **options)


def rows_of(x: Array, chunk: RowChunk) -> Array:
    """A chunk of x in a loop over the chunks; x itself if that is all of it."""
    return x if chunk.size == x.shape[0] else chunk.of(stay_in_loop(chunk.number, x))


def int32_ranges(starts: Array, ends: Array, columns: int) -> tuple[Array, Array]:
    """starts and ends in int32: as they are if they are that, else within 0..columns."""
    starts, ends = (x if x.dtype == jnp.int32 else clip_range(x, columns) for x in (starts, ends))
    return starts, ends


def check_ragged(q: Array, k: Array, weights: Array, starts: Array, ends: Array, k_scale: Array | None) -> None:
    """Raises ValueError unless these are arguments of `indexer_logits`."""
    require_shape("q", q, (None, None, None), "[M, H, D]")
    rows, heads, width = q.shape
    require_shape("k", k, (None, width), "[N, D]")
    _check_dtypes(q, k, weights, "k")
    require_shape("weights", weights, (rows, heads), "[M, H]")
    for name, bound in (("starts", starts), ("ends", ends)):
        require_shape(name, bound, (rows,), "[M]")
        _require_integers(name, bound)
    if k_scale is not None:
        require_shape("k_scale", k_scale, (k.shape[0],), "[N]")
        require_dtype("k_scale", k_scale, jnp.float32)


def check_paged(q: Array, cache: IndexCache, weights: Array, block_table: Array, seq_lens: Array) -> None:
    """Raises ValueError unless these are arguments of `paged_indexer_logits`."""
    require_shape("q", q, (None, None, None, None), "[B, Q, H, D]")
    batch, queries, heads, width = q.shape
    require_shape("cache.k", cache.k, (None, None, width), "[pages, page, D]")
    _check_dtypes(q, cache.k, weights, "cache.k")
    require_shape("weights", weights, (batch, queries, heads), "[B, Q, H]")
    require_shape("block_table", block_table, (batch, None), "[B, P]")
    require_shape("seq_lens", seq_lens, (batch,), "[B]")
    _require_integers("block_table", block_table)
    _require_integers("seq_lens", seq_lens)
    if cache.scale is not None:
        require_shape("cache.scale", cache.scale, cache.k.shape[:2], "[pages, page]")
        require_dtype("cache.scale", cache.scale, jnp.float32)


def _check_dtypes(q: Array, k: Array, weights: Array, k_name: str) -> None:
    require_dtype(k_name, k, *KEY_DTYPES)
    require(q.dtype == k.dtype, "q's dtype", q.dtype, f"{k_name}'s, {k.dtype}")
    require_dtype("weights", weights, jnp.float32)
    require(q.shape[-2] >= 1 and q.shape[-1] >= 1, "q's shape", list(q.shape), "at least one head of width 1")


def _require_integers(name: str, array: Array) -> None:
    require(jnp.issubdtype(array.dtype, jnp.integer), f"{name}'s dtype", array.dtype, "an integer type")
