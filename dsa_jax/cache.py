"""Paged caches of latents and index keys: typed arrays in pytrees, addressed by slot = page * page_size + offset.

A slot is an int32. Every other number, negative or past the end, is no slot: it is never written and reads as zeros.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from dsa_jax.checks import refuse, require, require_shape
from dsa_jax.quant import BLOCK, E4M3, ScaleFormat, dequantize, quantize

MAX_SLOTS = 2**31 - 1
CACHE_DTYPES = (E4M3, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


class _Paged:
    """What the two caches share: arrays [pages, page, ...], some of them None."""

    @property
    def num_pages(self) -> int:
        return self._arrays()[0].shape[0]

    @property
    def page_size(self) -> int:
        return self._arrays()[0].shape[1]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def bytes_per_token(self) -> int:
        """Index keys of D = 128: 132 in e4m3, 256 in bfloat16. Latents of R = 512 and dr = 64: 656 and 1152."""
        widths = ((math.prod(x.shape[2:]), x.dtype.itemsize) for x in self._arrays() if x is not None)
        return sum(width * itemsize for width, itemsize in widths)

    def _arrays(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexCache(_Paged):
    """The index keys of one layer, after norm and RoPE.

    k: [pages, page, D] float8_e4m3fn, bfloat16 or float32.
    scale: float32 [pages, page], one scale a key, where k is float8_e4m3fn; else None.
    """

    # Not typed as arrays: jax also puts shapes, shardings and bools where the arrays are.
    k: Any
    scale: Any

    @classmethod
    def zeros(cls, num_pages: int, page_size: int, index_head_dim: int, *, dtype: Any) -> "IndexCache":
        """An empty cache of `dtype`, an array type or its name.

        Raises ValueError for sizes below 1, more than 2^31 - 1 slots and other dtypes.
        """
        dtype = _checked_dtype(dtype)
        _check_sizes(num_pages, page_size)
        require(index_head_dim >= 1, "index_head_dim", index_head_dim, "at least 1")
        scale = jnp.zeros((num_pages, page_size), jnp.float32) if dtype == E4M3 else None
        return cls(jnp.zeros((num_pages, page_size, index_head_dim), dtype), scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache(_Paged):
    """The latents of one layer after norm, and the shared key slice after RoPE.

    nope: [pages, page, R] float8_e4m3fn, bfloat16 or float32.
    scale: float32 [pages, page, ceil(R / 128)], one scale a block of 128, where nope is float8_e4m3fn; else None.
    rope: [pages, page, dr] bfloat16, or float32 in a float32 cache; dr may be 0.
    """

    nope: Any
    scale: Any
    rope: Any

    @classmethod
    def zeros(
        cls, num_pages: int, page_size: int, kv_lora_rank: int, qk_rope_head_dim: int, *, dtype: Any
    ) -> "LatentCache":
        """An empty cache of `dtype`, an array type or its name.

        Raises ValueError for sizes below 1 (qk_rope_head_dim: 0), more than 2^31 - 1 slots and other dtypes.
        """
        dtype = _checked_dtype(dtype)
        _check_sizes(num_pages, page_size)
        require(kv_lora_rank >= 1, "kv_lora_rank", kv_lora_rank, "at least 1")
        require(qk_rope_head_dim >= 0, "qk_rope_head_dim", qk_rope_head_dim, "at least 0")
        lead = (num_pages, page_size)
        scale = jnp.zeros((*lead, math.ceil(kv_lora_rank / BLOCK)), jnp.float32) if dtype == E4M3 else None
        rope_dtype = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
        return cls(jnp.zeros((*lead, kv_lora_rank), dtype), scale, jnp.zeros((*lead, qk_rope_head_dim), rope_dtype))


def flat(cache: IndexCache | LatentCache) -> tuple[Any, ...]:
    """The cache's arrays by slot: (k, scale) or (nope, scale, rope), each [num_slots, ...]; scale may be None."""
    return tuple(None if x is None else _by_slot(x) for x in cache._arrays())


def write_index_keys(
    cache: IndexCache, slots: Int[Array, "T"], k: Float[Array, "T D"], *, scale_format: ScaleFormat = "ue8m0"
) -> IndexCache:
    """The cache with k[t] in slots[t], quantised where the cache is e4m3; in place where the cache is donated to jit.

    In place means without a copy on GPUs; a CPU still widens the whole of an 8- or 16-bit array for a moment.

    slots: no slot may be named twice; numbers that are no slot (padding) write nothing.
    k: index keys after norm and RoPE.
    scale_format: the scales of an e4m3 cache, see `quantize`.
    Raises ValueError for shapes that do not fit.
    """
    _check_index_cache(cache)
    require_shape("slots", slots, (None,), "[T]")
    require_shape("k", k, (slots.shape[0], cache.k.shape[2]), "[T, D]")
    if cache.scale is None:
        return IndexCache(_put(cache.k, slots, k), None)
    values, scale = quantize(k, block=k.shape[-1], scale_format=scale_format)
    return IndexCache(_put(cache.k, slots, values), _put(cache.scale, slots, scale[:, 0]))


def write_latents(
    cache: LatentCache,
    slots: Int[Array, "T"],
    ckv: Float[Array, "T R"],
    k_rope: Float[Array, "T dr"],
    *,
    scale_format: ScaleFormat = "ue8m0",
) -> LatentCache:
    """The cache with ckv[t] and k_rope[t] in slots[t]; only ckv is quantised. Otherwise as `write_index_keys`.

    Scales that are powers of two let a kernel dequantise into bfloat16 without rounding; float32 ones do not.
    """
    _check_latent_cache(cache)
    require_shape("slots", slots, (None,), "[T]")
    require_shape("ckv", ckv, (slots.shape[0], cache.nope.shape[2]), "[T, R]")
    require_shape("k_rope", k_rope, (slots.shape[0], cache.rope.shape[2]), "[T, dr]")
    rope = _put(cache.rope, slots, k_rope)
    if cache.scale is None:
        return LatentCache(_put(cache.nope, slots, ckv), None, rope)
    values, scale = quantize(ckv, block=BLOCK, scale_format=scale_format)
    return LatentCache(_put(cache.nope, slots, values), _put(cache.scale, slots, scale), rope)


def read_latents(cache: LatentCache, slots: Int[Array, "*s"]) -> Float32[Array, "*s width"]:
    """[latent | k_rope] of each slot in float32, dequantised: [..., R + dr]. Numbers that are no slot read as zeros."""
    _check_latent_cache(cache)
    nope, scale, rope = _rows(cache, slots)
    nope = nope.astype(jnp.float32) if scale is None else dequantize(nope, scale, block=BLOCK)
    return jnp.concatenate([nope, rope.astype(jnp.float32)], axis=-1)


def to_slots(
    indices: Int[Array, "M K"], request: Int[Array, "M"], block_table: Int[Array, "B P"], page_size: int
) -> Int32[Array, "M K"]:
    """Positions in a request to cache slots: block_table[request, index // page_size] * page_size + index % page_size.

    indices: positions; -1 = none.
    request: each row's request; -1 marks a padding row.
    block_table: each request's pages in order; -1 = not mapped.
    Returns -1 wherever there is no index, no request or no page, or the slot would pass 2^31 - 1.
    Raises ValueError for page_size < 1 and shapes that do not fit.
    """
    require(1 <= page_size <= MAX_SLOTS, "page_size", page_size, f"in 1..{MAX_SLOTS}")
    require_shape("indices", indices, (None, None), "[M, K]")
    require_shape("request", request, (indices.shape[0],), "[M]")
    require_shape("block_table", block_table, (None, None), "[B, P]")
    size = jnp.int32(page_size)
    position = jnp.maximum(indices.astype(jnp.int32), 0)
    page = _take(block_table, request[:, None], jax.lax.div(position, size), fill=-1).astype(jnp.int32)
    # A page past the last that a cache can have would wrap the product around.
    exists = (indices >= 0) & (page >= 0) & (page < MAX_SLOTS // page_size)
    return jnp.where(exists, jnp.where(exists, page, 0) * size + jax.lax.rem(position, size), -1)


def gather_index_keys(
    cache: IndexCache, block_table: Int[Array, "B P"], seq_lens: Int[Array, "B"], total: int
) -> tuple[Float[Array, "total D"], Float32[Array, "total"] | None, Int32[Array, "B"]]:
    """The index keys of all requests, one after the other: request b has rows starts[b] to starts[b] + seq_lens[b].

    block_table: each request's pages in order; -1 = not mapped.
    seq_lens: keys of each request, 0 to P * page_size, with a sum up to `total`.
    total: rows of the result, static.
    Returns (k, k_scale, starts); k_scale is None where the cache is not e4m3. Rows past the sum and rows without a page
    are zeros with a zero scale. Raises ValueError for shapes that do not fit and, where their values are known, for
    lengths out of range; under jit such lengths lose the rows that do not fit.
    """
    _check_index_cache(cache)
    require(total >= 0, "total", total, "at least 0")
    require_shape("block_table", block_table, (None, None), "[B, P]")
    require_shape("seq_lens", seq_lens, (block_table.shape[0],), "[B]")
    _check_lengths(seq_lens, block_table.shape[1] * cache.page_size, total)
    request, position, starts = ragged_rows(seq_lens, total)
    slots = to_slots(position[:, None], request, block_table, cache.page_size)[:, 0]
    return *_rows(cache, slots), starts


def ragged_rows(
    seq_lens: Int[Array, "B"], total: int
) -> tuple[Int32[Array, "total"], Int32[Array, "total"], Int32[Array, "B"]]:
    """Which key each of `total` rows holds when the keys of all requests lie one after the other.

    seq_lens: keys of each request; a negative length counts as 0.
    Returns each row's request, -1 past the last key, its position in that request, and where each request starts.
    """
    lengths = jnp.maximum(seq_lens.astype(jnp.int32), 0)
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    row = jnp.arange(total, dtype=jnp.int32)
    request = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    position = row - _take(starts, request)
    return jnp.where(request < lengths.shape[0], request, -1), position, starts


def _put(paged: Array, slots: Array, rows: Array) -> Array:
    """paged[pages, page, ...] with rows[t] in slots[t].

    Numbers that are no slot become distinct negative ones, which the scatter drops. Without the promise that indices
    are distinct, XLA writes each 8- or 16-bit element with a compare-and-swap loop on GPUs.
    """
    merged = _by_slot(paged)
    slots = slots.astype(jnp.int32)
    exists = (slots >= 0) & (slots < merged.shape[0])
    slots = jnp.where(exists, slots, -1 - jnp.arange(slots.shape[0], dtype=jnp.int32))
    put = merged.at[slots].set(rows.astype(paged.dtype), mode="drop", wrap_negative_indices=False, unique_indices=True)
    return put.reshape(paged.shape)


def _by_slot(paged: Array) -> Array:
    return paged.reshape(paged.shape[0] * paged.shape[1], *paged.shape[2:])


def _rows(cache: IndexCache | LatentCache, slots: Array) -> tuple[Any, ...]:
    """Each array's rows at `slots`, zeros where the number is no slot."""
    return tuple(None if x is None else _take(x, slots) for x in flat(cache))


def _take(x: Array, *index: Array, fill: int = 0) -> Array:
    """x[index], `fill` where the index is out of range. Plain jnp indexing wraps -1 to the last row."""
    if 0 in x.shape[: len(index)]:  # jax refuses to gather from nothing
        return jnp.full(jnp.broadcast_shapes(*(i.shape for i in index)) + x.shape[len(index) :], fill, x.dtype)
    return x.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def _checked_dtype(dtype: Any) -> np.dtype:
    legal = " or ".join(str(legal) for legal in CACHE_DTYPES)
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        refuse("dtype", repr(dtype), legal)
    require(known in CACHE_DTYPES, "dtype", known, legal)
    return known


def _check_sizes(num_pages: int, page_size: int) -> None:
    require(num_pages >= 1, "num_pages", num_pages, "at least 1")
    require(page_size >= 1, "page_size", page_size, "at least 1")
    num_slots = num_pages * page_size
    require(num_slots <= MAX_SLOTS, "num_pages * page_size", num_slots, f"at most {MAX_SLOTS}: slots are int32")


def _check_index_cache(cache: IndexCache) -> None:
    require_shape("cache.k", cache.k, (None, None, None), "[pages, page, D]")
    _checked_dtype(cache.k.dtype)
    _check_scale(cache.k, cache.scale, cache.k.shape[:2], "[pages, page]")


def _check_latent_cache(cache: LatentCache) -> None:
    require_shape("cache.nope", cache.nope, (None, None, None), "[pages, page, R]")
    _checked_dtype(cache.nope.dtype)
    require_shape("cache.rope", cache.rope, (*cache.nope.shape[:2], None), "[pages, page, dr]")
    blocks = (*cache.nope.shape[:2], math.ceil(cache.nope.shape[2] / BLOCK))
    _check_scale(cache.nope, cache.scale, blocks, f"[pages, page, ceil(R / {BLOCK})]")


def _check_scale(values: Array, scale: Array | None, shape: tuple[int, ...], axes: str) -> None:
    _check_sizes(*values.shape[:2])
    needed = values.dtype == E4M3
    require((scale is not None) == needed, "cache.scale", scale, "given for a float8_e4m3fn cache and None for others")
    if scale is not None:
        require_shape("cache.scale", scale, shape, axes)


def _check_lengths(seq_lens: Array, capacity: int, total: int) -> None:
    if isinstance(seq_lens, jax.core.Tracer):
        return
    lengths = np.asarray(seq_lens).astype(np.int64)
    bad = lengths[(lengths < 0) | (lengths > capacity)]
    require(bad.size == 0, "seq_lens", bad.tolist(), f"in 0..{capacity}, the block table's width times the page size")
    require(int(lengths.sum()) <= total, "the sum of seq_lens", int(lengths.sum()), f"at most total = {total}")
