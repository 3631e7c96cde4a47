"""What narrow caches cost: a prefill over caches of one type against one over caches of another, layer by layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dsa_jax.context import PagedPrefill
from dsa_jax.model import CausalLM, Step
from dsa_jax.skeleton import Skeleton, mesh_of, place

PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class CacheError:
    """One layer, from the tokens up: what earlier layers have added is in it.

    hidden: how far a row's hidden state after it is off, relative to its length (2-norm): the median of all rows. Rows
        that select other keys, or reach other experts, are off by much more.
    kept: share of the wide caches' selected keys that are selected too; None on layers that share another's indices.
    """

    layer: int
    hidden: float
    kept: float | None


def cache_errors(
    model: CausalLM,
    tokens: Int[np.ndarray, " S"],
    cache_dtype: Any,
    *,
    against: Any = "bfloat16",
    implementation: str | None = None,
) -> list[CacheError]:
    """Compares one prompt's prefill, computed in one chunk, over caches of `cache_dtype` and of `against`.

    tokens: more than index_topk of them, or nothing is selected.
    """
    want, got = (_prefill(model, tokens, jnp.dtype(dtype), implementation) for dtype in (against, cache_dtype))
    found = []
    for layer, kind in enumerate(model.config.indexer_types):
        kept = _kept(got.indices[layer], want.indices[layer]) if kind == "full" else None
        found.append(CacheError(layer, _difference(got.layers[layer], want.layers[layer]), kept))
    return found


def _prefill(model: CausalLM, tokens: np.ndarray, dtype: Any, implementation: str | None) -> Step:
    length, pages = len(tokens), -(-len(tokens) // PAGE_SIZE)
    context = PagedPrefill(
        positions=jnp.arange(length, dtype=jnp.int32),
        request=jnp.zeros(length, jnp.int32),
        block_table=jnp.arange(pages, dtype=jnp.int32)[None],
        seq_lens=jnp.full(1, length, jnp.int32),
        total=length,
        options=model.options(implementation=implementation),
    )
    skeleton, arrays = Skeleton.of(model)
    caches = place(model.new_caches(pages, PAGE_SIZE, dtype), mesh_of(arrays))
    return _forward(skeleton, arrays, jnp.asarray(tokens, jnp.int32), context, caches)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _forward(skeleton, arrays, tokens, context, caches) -> Step:
    return skeleton.fill(arrays).forward(tokens, context, caches, True)


def _difference(got: Array, want: Array) -> float:
    wide = want.astype(jnp.float32)
    off, length = (jnp.linalg.norm(x, axis=-1) for x in (got.astype(jnp.float32) - wide, wide))
    return float(jnp.median(off / length))


def _kept(got: Array, want: Array) -> float:
    rows = zip(np.asarray(got), np.asarray(want), strict=True)
    hits = sum(len(np.intersect1d(mine[mine >= 0], theirs[theirs >= 0])) for mine, theirs in rows)
    return hits / int((want >= 0).sum())
