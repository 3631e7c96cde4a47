"""The calls that a model of a given config makes to every op, as shapes: what to ask `explain` about."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsa_jax.cache import IndexCache, LatentCache
from dsa_jax.config import DsaConfig


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `op(*arguments, **options)` with shapes for arrays. stage: when a model makes it."""

    op: str
    stage: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def model_calls(
    config: DsaConfig,
    *,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = jnp.float8_e4m3fn,
    rows: int = 4096,
    context: int = 32768,
    requests: int = 64,
    page_size: int = 64,
) -> list[Call]:
    """Every op at the model's widths.

    dtype: of activations. cache_dtype: of the paged caches. rows: of a prefill step over `context` keys.
    requests: of a decode step, each of up to `context` tokens in pages of `page_size`.
    """
    shapes = _Shapes(config, jnp.dtype(dtype), jnp.dtype(cache_dtype), page_size)
    return _prefill(shapes, rows, context) + _decode(shapes, requests, -(-context // page_size))


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """What prefill and decode share."""

    config: DsaConfig
    dtype: Any
    cache_dtype: Any
    page_size: int

    def index_query(self, *lead: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The index queries and their weights."""
        heads = self.config.index_n_heads
        return _shape(*lead, heads, self.config.index_head_dim, dtype=self.cache_dtype), _float32(*lead, heads)

    def query(self, *lead: int) -> jax.ShapeDtypeStruct:
        """Absorbed queries."""
        return _shape(*lead, self.config.num_attention_heads, self.config.latent_dim, dtype=self.dtype)

    def index_cache(self, pages: int) -> IndexCache:
        make = functools.partial(IndexCache.zeros, pages, self.page_size, self.config.index_head_dim)
        return jax.eval_shape(lambda: make(dtype=self.cache_dtype))

    def latent_cache(self, pages: int) -> LatentCache:
        make = functools.partial(LatentCache.zeros, pages, self.page_size, self.config.kv_lora_rank)
        return jax.eval_shape(lambda: make(self.config.qk_rope_head_dim, dtype=self.cache_dtype))

    @property
    def mla(self) -> dict[str, Any]:
        return dict(sm_scale=self.config.sm_scale, v_dim=self.config.kv_lora_rank)


def _prefill(shapes: _Shapes, rows: int, context: int) -> list[Call]:
    config, topk = shapes.config, shapes.config.index_topk
    keys = _shape(context, config.index_head_dim, dtype=shapes.cache_dtype)
    scale = _float32(context) if shapes.cache_dtype == jnp.float8_e4m3fn else None
    ranges = _int32(rows), _int32(rows)
    index_query, weights = shapes.index_query(rows)
    scored = (index_query, keys, weights, *ranges)
    cache = shapes.latent_cache(-(-context // shapes.page_size))
    # A dense step has at most index_topk keys a request.
    heads, width = config.num_attention_heads, config.qk_head_dim
    dense = [_shape(topk, heads, w, dtype=shapes.dtype) for w in (width, width, config.v_head_dim)]
    return [
        Call("indexer_logits", "prefill", scored, dict(k_scale=scale)),
        Call("topk_indices", "prefill", (_float32(rows, context), topk, *ranges), {}),
        Call("select_topk", "prefill", (*scored, topk), dict(k_scale=scale)),
        Call("sparse_mla", "prefill", (shapes.query(rows), cache, _int32(rows, topk)), shapes.mla),
        Call("dense_mla", "short prefill", (*dense, _int32(topk), _int32(topk)), dict(sm_scale=config.sm_scale)),
    ]


def _decode(shapes: _Shapes, requests: int, pages: int) -> list[Call]:
    topk = shapes.config.index_topk
    table = _int32(requests, pages), _int32(requests)
    query, weights = shapes.index_query(requests, 1)
    scored = (query, shapes.index_cache(requests * pages), weights, *table)
    attended = (shapes.query(requests, 1), shapes.latent_cache(requests * pages), _int32(requests, 1, topk), *table)
    return [
        Call("paged_indexer_logits", "decode", scored, {}),
        Call("paged_select_topk", "decode", (*scored, topk), {}),
        Call("paged_sparse_mla", "decode", attended, shapes.mla),
    ]


def _shape(*lengths: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(lengths, dtype)


def _int32(*lengths: int) -> jax.ShapeDtypeStruct:
    return _shape(*lengths, dtype=jnp.int32)


def _float32(*lengths: int) -> jax.ShapeDtypeStruct:
    return _shape(*lengths, dtype=jnp.float32)
