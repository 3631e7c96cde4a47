"""Latents of an e4m3 cache widened to bfloat16 ahead of a prefill that takes every one of them many times.

A kernel that gathers e4m3 rows converts a row as often as it is selected. Where a step selects far more rows than the
cache has, one pass over the cache costs less than that, and some temporary memory. With scales that are powers of two
nothing is rounded.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.sparse_mla.rows import SCALE_BLOCK, key_dtype

_MOST_BYTES = 512 << 20  # of widened latents
# Rows gathered for each that is widened. On an H200 64 heads gain 0.07 ns a gathered row, and a widened one costs 0.5.
_LEAST_GATHERED = 8
_LEAST_INDICES = 1 << 20  # of a step, below which one more launch is not worth it


def attended(kv: Any, indices: Int[Array, "M K"]) -> Any:
    """The keys that a kernel should attend to: kv, or where that takes less time, it with its latents in bfloat16."""
    return _widened(kv) if _pays(kv, indices) else kv


def _pays(kv: Any, indices: Int[Array, "M K"]) -> bool:
    if key_dtype(kv) != jnp.float8_e4m3fn:
        return False
    pages, page_size, width = kv.nope.shape
    is_repeated = indices.size >= max(_LEAST_GATHERED * pages * page_size, _LEAST_INDICES)
    return is_repeated and 2 * pages * page_size * width <= _MOST_BYTES


@jax.jit  # one pass, and no array in float32
def _widened(kv: Any) -> Any:
    width = kv.nope.shape[-1]
    scale = jnp.repeat(kv.scale, SCALE_BLOCK, axis=-1)[..., :width]
    nope = (kv.nope.astype(jnp.float32) * scale).astype(jnp.bfloat16)
    return type(kv)(nope=nope, scale=None, rope=kv.rope)
