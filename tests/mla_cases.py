"""What the tests of latent attention share: inputs, caches with their dequantised rows, comparison with float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tolerances import FLOAT32, LSE, MLA_COSINE, MLA_OUT, cosine_distance

from dsa_jax.cache import LatentCache

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
SCALE = 576**-0.5


def run(function, implementation, *args, **options):
    """Calls the implementation; one that says it cannot run these shapes here is skipped with its reason."""
    try:
        return function(*args, implementation=implementation, **options)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


def normal(rng, shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def choose(rng, rows, lanes, keys):
    """[rows, lanes] int32: distinct keys in random order for each row, -1 anywhere where there are too few."""
    chosen = np.full((rows, lanes), -1, np.int32)
    for row in chosen:
        count = min(lanes, keys)
        row[rng.permutation(lanes)[:count]] = rng.choice(keys, count, replace=False)
    return chosen


def paged_cache(rng, pages, page_size, kind, latent=512, rope=64, scales="ue8m0"):
    """A LatentCache of random content, and its rows dequantised by numpy: float32 [pages, page_size, latent + rope].

    kind: "bf16", "float32" or "e4m3".
    scales: of an e4m3 cache; "ue8m0" are powers of two, with which the keys are exact in bf16, "float32" are any.
    """
    nope = rng.standard_normal((pages, page_size, latent)).astype(np.float32)
    tail = rng.standard_normal((pages, page_size, rope)).astype(np.float32)
    stored = {"bf16": ml_dtypes.bfloat16, "float32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}[kind]
    tail = tail.astype(np.float32 if kind == "float32" else ml_dtypes.bfloat16)
    if kind != "e4m3":
        nope = nope.astype(stored)
        cache = LatentCache(nope=jnp.asarray(nope), scale=None, rope=jnp.asarray(tail))
        return cache, np.concatenate([nope.astype(np.float32), tail.astype(np.float32)], -1)
    blocks = (pages, page_size, -(-latent // 128))
    scale = 2.0 ** rng.integers(-8, -5, blocks) if scales == "ue8m0" else rng.uniform(0.004, 0.016, blocks)
    scale = scale.astype(np.float32)
    nope = np.clip(nope * 64, -448, 448).astype(stored)  # a plain cast turns what e4m3 cannot hold into NaN
    rows = nope.astype(np.float32) * np.repeat(scale, 128, -1)[..., :latent]
    cache = LatentCache(nope=jnp.asarray(nope), scale=jnp.asarray(scale), rope=jnp.asarray(tail))
    return cache, np.concatenate([rows, tail.astype(np.float32)], -1)


def poisoned(cache, kept):
    """The cache with every slot that is not in `kept` full of NaN, scales included; in e4m3 the byte 0x7F."""
    keep = np.zeros(cache.nope.shape[0] * cache.nope.shape[1], bool)
    keep[np.asarray(kept)] = True
    keep = keep.reshape(*cache.nope.shape[:2], 1)

    def poison(array):
        return None if array is None else jnp.asarray(np.where(keep, np.asarray(array), np.array(np.nan, array.dtype)))

    return LatentCache(nope=poison(cache.nope), scale=poison(cache.scale), rope=poison(cache.rope))


def check(got, want, *, implementation="xla", lse_atol=LSE):
    """Compares (out, lse) with the float64 pair at the tolerance of out's dtype.

    Beyond the absolute tolerance, out may be off by the rounding of its own dtype, and lse by that of float32. Kernels
    also round the softmax weights to bf16, an error that grows with the values: MLA_OUT is for values of a tenth, and
    theirs are 1 here.
    """
    (out, lse), (want_out, want_lse) = got, want
    assert np.isfinite(want_out).all() and not np.isnan(want_lse).any()
    assert out.shape == want_out.shape and lse.shape == want_lse.shape and lse.dtype == jnp.float32
    plain = np.asarray(out).astype(np.float64)
    if out.dtype == jnp.bfloat16:
        atol = MLA_OUT if implementation == "xla" else 10 * MLA_OUT
        np.testing.assert_allclose(plain, want_out, rtol=2**-8, atol=atol)
        assert cosine_distance(plain, want_out) < MLA_COSINE
    else:
        np.testing.assert_allclose(plain, want_out, rtol=0, atol=FLOAT32 * max(np.abs(want_out).max(initial=0), 1e-30))
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-6, atol=lse_atol)
    np.testing.assert_array_equal(plain[np.isneginf(want_lse)], 0.0)


def same_bits(got, want):
    """Equal out and lse, to the bit; 0.0 and -0.0 differ."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(_bits(a), _bits(b))


def _bits(array):
    array = np.asarray(array)
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)
