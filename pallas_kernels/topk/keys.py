"""Scores as integers of the same order, for searching a threshold by halving."""

import jax.numpy as jnp
from jax import lax

# 32-bit keys. Of the scores that may be chosen the least is -3.4e38 and the greatest inf.
LOWEST_KEY = -0x7F7FFFFF
TOP_KEY = 0x7F800000
# Below every key of a score: what a NaN has, and what stands for no score.
NO_KEY = -0x80000000


def keys_of(scores):
    """int32 of the order of float32 `scores`: the bits of a positive one, minus the bits of a negative one's magnitude.

    -0.0 and 0.0 have the same key, -inf the one below LOWEST_KEY, NaN has NO_KEY.
    """
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    keys = jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return jnp.where(scores == scores, keys, NO_KEY)
