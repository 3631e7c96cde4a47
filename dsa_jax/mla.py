"""Multi-head latent attention: over selected keys (prefill and paged decode), and dense for short prefills.

Sparse attention is absorbed: the up-projection of the keys is folded into the query, so that all heads share one key
row [latent | rope] of width D, whose first v_dim numbers are also the value. For a row m with the valid keys S(m),

    logit[h, n] = sm_scale * q[m, h] . kv[n]                                       n in S(m)
    lse[m, h]   = log sum_n exp(logit[h, n])
    out[m, h]   = sum_n exp(logit[h, n]) * kv[n, :v_dim] / (exp(lse[m, h]) + exp(sink[h]))

in float32 (DeepSeek-V2, arXiv 2405.04434, section 2.1.2; sinks: arXiv 2309.17453). Without a sink exp(sink) is 0. The
sink never joins lse. A key named twice counts twice: indices are taken as given.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from dsa_jax import mla_xla
from dsa_jax.cache import MAX_SLOTS, LatentCache
from dsa_jax.checks import require, require_dtype, require_shape
from dsa_jax.dispatch import Op

# kernels: module path by implementation name, e.g. {"hopper": "pallas_kernels.sparse_mla.hopper"}.
_SPARSE = {name: f"pallas_kernels.sparse_mla.{name}" for name in ("hopper", "portable")}
SPARSE_MLA = Op("sparse_mla", xla=mla_xla.sparse_mla, kernels=_SPARSE)
PAGED_SPARSE_MLA = Op("paged_sparse_mla", xla=mla_xla.paged_sparse_mla, kernels=_SPARSE)
_DENSE = {name: f"pallas_kernels.dense_mla.{name}" for name in ("hopper", "portable")}
DENSE_MLA = Op("dense_mla", xla=mla_xla.dense_mla, kernels=_DENSE)


def sparse_mla(
    q: Float[Array, "M H D"],
    kv: Float[Array, "N D"] | LatentCache,
    indices: Int[Array, "M K"],
    *,
    sm_scale: float,
    v_dim: int,
    lengths: Int[Array, " M"] | None = None,
    sink: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "M H V"], Float32[Array, "M H"]]:
    """Absorbed multi-head latent attention of every row over the keys that its indices name.

    q: [M, H, D] bf16 or float32, absorbed queries, latent part first.
    kv: [N, D] bf16 or float32, keys whose first v_dim numbers are the values; or a LatentCache with R + dr = D, whose N
        rows are its flat slots, page * page_size + offset. Of an e4m3 cache a kernel may round the latents to bf16,
        which changes none whose scale is a power of two, and how many rows there are may decide which kernel runs.
    indices: [M, K] int32, rows of kv in any order; -1, any other negative and anything >= N means none.
    sm_scale: softmax scale: (qk_nope_head_dim + qk_rope_head_dim)^-0.5, times yarn's factor where there is one.
    v_dim: width of the values, in 1..D.
    lengths: [M] int32, lanes of indices that count; the lanes past it are ignored. None: all K.
    sink: [H] float32, logit of a key without a value, which joins the denominator of out; -inf has no effect, +inf
        makes out 0.
    implementation: None for the best available, or "hopper", "portable" or "xla".

    Returns out [M, H, v_dim] in q's dtype and lse [M, H] float32, natural logarithm, without the sink. A row without a
    valid key has out 0 and lse -inf. Rows of kv that no valid index names may hold anything, NaN included.
    Raises ValueError for a bad shape, dtype or option, NotImplementedError if a named implementation cannot run.
    """
    rows, heads, _ = _check_queries(q, "[M, H, D]")
    _check_keys("kv", kv, q)
    require_shape("indices", indices, (rows, None), "[M, K]")
    require_dtype("indices", indices, jnp.int32)
    _check_options(q, sm_scale, v_dim)
    _check_optional("lengths", lengths, (rows,), "[M]", jnp.int32)
    _check_optional("sink", sink, (heads,), "[H]", jnp.float32)
    options = dict(sm_scale=float(sm_scale), v_dim=v_dim, lengths=lengths, sink=sink)
    return SPARSE_MLA(implementation, q, kv, indices, **options)


def paged_sparse_mla(
    q: Float[Array, "B Q H D"],
    cache: LatentCache,
    indices: Int[Array, "B Q K"],
    block_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
    *,
    sm_scale: float,
    v_dim: int,
    lengths: Int[Array, "B Q"] | None = None,
    sink: Float[Array, " H"] | None = None,
    num_splits: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q H V"], Float32[Array, "B Q H"]]:
    """Decode: `sparse_mla` where the indices are positions in each row's own request.

    q: [B, Q, H, D] bf16 or float32, Q queries a request.
    cache: LatentCache with R + dr = D.
    indices: [B, Q, K] int32 positions in the request; negative or >= seq_lens means none. The causal bound among the Q
        queries is the selection's, not applied again here.
    block_table: [B, P] int32, the page that holds positions [p * page_size, (p + 1) * page_size) of the request; -1, or
        any number that is no page of the cache, means unmapped: its positions are ignored.
    seq_lens: [B] int32, keys in the cache; what exceeds P * page_size is ignored.
    lengths: [B, Q] int32, lanes that count. None: all K.
    num_splits: cuts K into this many parts that are computed on their own and merged as `merge_attention` does. Given,
        a row has the same bits in every batch; None lets a kernel choose by the batch.
    sm_scale, v_dim, sink, implementation: as in `sparse_mla`.

    Returns out [B, Q, H, v_dim] in q's dtype and lse [B, Q, H] float32; raises as `sparse_mla` does.
    """
    batch, queries, heads, _ = _check_queries(q, "[B, Q, H, D]")
    require(isinstance(cache, LatentCache), "cache", type(cache).__name__, "a LatentCache")
    _check_keys("cache", cache, q)
    require_shape("indices", indices, (batch, queries, None), "[B, Q, K]")
    require_shape("block_table", block_table, (batch, None), "[B, P]")
    require_shape("seq_lens", seq_lens, (batch,), "[B]")
    for name, array in (("indices", indices), ("block_table", block_table), ("seq_lens", seq_lens)):
        require_dtype(name, array, jnp.int32)
    _check_options(q, sm_scale, v_dim)
    _check_optional("lengths", lengths, (batch, queries), "[B, Q]", jnp.int32)
    _check_optional("sink", sink, (heads,), "[H]", jnp.float32)
    require(num_splits is None or num_splits >= 1, "num_splits", num_splits, "None or at least 1")
    options = dict(sm_scale=float(sm_scale), v_dim=v_dim, lengths=lengths, sink=sink, num_splits=num_splits)
    return PAGED_SPARSE_MLA(implementation, q, cache, indices, block_table, seq_lens, **options)


def dense_mla(
    q: Float[Array, "M H D"],
    k: Float[Array, "N H D"],
    v: Float[Array, "N H V"],
    starts: Int[Array, " M"],
    ends: Int[Array, " M"],
    *,
    sm_scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "M H V"], Float32[Array, "M H"]]:
    """Expanded multi-head attention of row m over the keys [starts[m], ends[m]), for prefills too short to select from.

    q: [M, H, D] bf16 or float32, D = qk_nope_head_dim + qk_rope_head_dim.
    k, v: [N, H, D] and [N, H, V] in q's dtype, up-projected keys and values of all requests, one after the other.
    starts, ends: [M] int32, the columns that a row sees, clipped to [0, N]. A causal row at position p of a request
        whose keys begin at column c has start c and end c + p + 1, whichever chunk it belongs to.
    sm_scale, implementation: as in `sparse_mla`.

    Returns out [M, H, V] in q's dtype and lse [M, H] float32; a row with ends <= starts has out 0 and lse -inf. Columns
    that a row does not see may hold anything. Raises as `sparse_mla` does.
    """
    rows, heads, width = _check_queries(q, "[M, H, D]")
    require_shape("k", k, (None, heads, width), "[N, H, D]")
    require_shape("v", v, (k.shape[0], heads, None), "[N, H, V]")
    for name, array in (("k", k), ("v", v)):
        require_dtype(name, array, q.dtype)
    for name, array in (("starts", starts), ("ends", ends)):
        require_shape(name, array, (rows,), "[M]")
        require_dtype(name, array, jnp.int32)
    _check_options(q, sm_scale, v_dim=None)
    return DENSE_MLA(implementation, q, k, v, starts, ends, sm_scale=float(sm_scale))


def merge_attention(
    outs: Float[Array, "S *rows V"], lses: Float32[Array, " S *rows"]
) -> tuple[Float[Array, "*rows V"], Float32[Array, "*rows"]]:
    """Attention over a union of disjoint key sets from the attention over each: exact, whatever the cut.

        lse = log sum_s exp(lses[s])          out = sum_s exp(lses[s] - lse) * outs[s]

    outs: [S, ..., V] the parts' outputs, without a sink.
    lses: [S, ...] float32, natural logarithms; -inf for a part without keys, whose output is not read.

    Returns out [..., V] in outs' dtype and lse [...] float32; where every part is empty, 0 and -inf.
    Raises ValueError if lses does not have outs' shape without its last axis, or is not float32.
    """
    require(outs.ndim >= 2, "outs' rank", outs.ndim, "at least 2, [S, ..., V]")
    require_shape("lses", lses, tuple(outs.shape[:-1]), "[S, ...]")
    require_dtype("lses", lses, jnp.float32)
    return mla_xla.merge(outs, lses)


def _check_queries(q, axes: str) -> tuple[int, ...]:
    require_shape("q", q, (None,) * (axes.count(",") + 1), axes)
    require_dtype("q", q, jnp.bfloat16, jnp.float32)
    require(0 not in q.shape[-2:], "q's shape", list(q.shape), f"{axes} with at least one head and one number a head")
    return tuple(q.shape)


def _check_keys(name: str, kv, q) -> None:
    """The width of the keys is q's, their dtype one that needs no scale, and int32 indices reach the last of them."""
    if isinstance(kv, LatentCache):
        latent, rope = kv.nope.shape[-1], kv.rope.shape[-1]
        legal = f"q's last axis, {q.shape[-1]}"
        require(latent + rope == q.shape[-1], f"{name}'s width R + dr", f"{latent} + {rope}", legal)
    else:
        require_shape(name, kv, (None, q.shape[-1]), "[N, D]")
        require_dtype(name, kv, jnp.bfloat16, jnp.float32)
    count = kv.num_slots if isinstance(kv, LatentCache) else kv.shape[0]
    require(count <= MAX_SLOTS, f"{name}'s number of rows", count, f"at most {MAX_SLOTS}, the greatest int32 index")


def _check_options(q, sm_scale: float, v_dim: int | None) -> None:
    require(math.isfinite(sm_scale), "sm_scale", sm_scale, "a finite number")
    require(v_dim is None or 1 <= v_dim <= q.shape[-1], "v_dim", v_dim, f"in 1..{q.shape[-1]}, q's last axis")


def _check_optional(name: str, array, shape: tuple[int, ...], axes: str, dtype) -> None:
    if array is not None:
        require_shape(name, array, shape, axes)
        require_dtype(name, array, dtype)
