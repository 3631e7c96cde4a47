"""A prefill whose lengths only the device knows skips scoring exactly where every row may see all of its keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.cache import IndexCache, LatentCache
from dsa_jax.config import DsaConfig
from dsa_jax.context import LayerCache, Options, PagedDecode, PagedPrefill, Sequences
from dsa_jax.model import CausalLM

TOPK, PAGE, ROWS, HEADS, WIDTH = 8, 4, 24, 2, 16


@jax.jit
def select(context, cache, q, weights):
    return context.select(cache, q, cache.index.k[0, :1], weights)


def case(prefix, chunk, dense):
    """Three requests of chunk rows after prefix keys, then padding to ROWS."""
    prefix, chunk = np.array(prefix), np.array(chunk)
    request = np.repeat(np.arange(3), chunk)
    positions = np.concatenate([p + np.arange(c) for p, c in zip(prefix, chunk, strict=True)])
    pad = ROWS - len(request)
    return PagedPrefill(
        jnp.asarray(np.pad(positions, (0, pad)), jnp.int32),
        jnp.asarray(np.pad(request, (0, pad), constant_values=-1), jnp.int32),
        jnp.arange(24, dtype=jnp.int32).reshape(3, 8),
        jnp.asarray(prefix + chunk, jnp.int32),
        64,
        Options(TOPK, 1.0, dense=dense),
    )


@pytest.mark.parametrize(
    ("prefix", "chunk", "skips"),
    [
        ((0, 0, 0), (8, 7, 1), True),
        ((5, 0, 7), (3, 8, 1), True),
        ((5, 0, 0), (4, 8, 1), False),
        ((0, 0, 0), (9, 8, 7), False),
        ((20, 0, 0), (1, 1, 0), False),
        ((0, 0, 0), (0, 0, 0), True),
    ],
    ids=["short", "prefix-counts", "one-key-too-many", "one-long-request", "long-prefix", "padding-alone"],
)
def test_unknown_lengths(prefix, chunk, skips):
    """The same bits as scoring; and scores that are all NaN, with which scoring selects nothing, show who scored."""
    rng = np.random.default_rng(0)
    q, weights, keys = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((ROWS, HEADS, WIDTH), (ROWS, HEADS), (24, PAGE, WIDTH))
    )
    cache = LayerCache(LatentCache.zeros(24, PAGE, 128, 8, dtype=jnp.float32), IndexCache(keys, None))
    unknown, scored = case(prefix, chunk, None), case(prefix, chunk, False)
    np.testing.assert_array_equal(select(unknown, cache, q, weights), select(scored, cache, q, weights))
    nothing = np.asarray(select(unknown, cache, q, jnp.full_like(weights, jnp.nan)))
    seen = np.where(np.asarray(unknown.request) >= 0, np.asarray(unknown.positions) + 1, 0)
    np.testing.assert_array_equal((nothing >= 0).sum(axis=1), seen if skips else 0)


def test_a_multi_token_prediction_layer_always_scores(as_user):
    """It is told so before anything is computed."""
    model = CausalLM(DsaConfig.tiny(), rngs=None)
    context = Sequences.of_batch(1, 4, model.options(dense=None))
    with pytest.raises(ValueError, match=r"options\.dense must be True or False in this layer, which scores whatever"):
        model.draft(jnp.zeros(4, jnp.int32), jnp.zeros((4, 64)), context)


@pytest.mark.usefixtures("as_user")
def test_decode_does_not_skip():
    """Its own selection does not look at the option, and the expanded form is refused."""
    context = PagedDecode(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), 1, Options(TOPK, 1.0, dense=True))
    with pytest.raises(ValueError, match=r"options\.dense must be False in decode"):
        context.visible(None, None)
