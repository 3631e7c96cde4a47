"""sparse_mla against float64, and what a row must not notice: padding, other rows, unused keys, the batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import implementations
from mla_cases import INT_MAX, INT_MIN, SCALE, check, choose, normal, paged_cache, poisoned, run, same_bits

from dsa_jax.cache import LatentCache
from dsa_jax.mla import sparse_mla
from dsa_jax.mla_xla import GATHER_BYTES

over_implementations = pytest.mark.parametrize("implementation", implementations("sparse_mla"))
PUBLISHED = dict(sm_scale=SCALE, v_dim=512)  # latent 512, rope 64


def draw(seed, rows, heads, keys, lanes, *, width=576, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    q, kv = normal(rng, (rows, heads, width), dtype), normal(rng, (keys, width), dtype)
    return q, kv, choose(rng, rows, lanes, keys)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(
    ("keys", "dtype"),
    [*((keys, "bfloat16") for keys in (63, 64, 65, 128, 512)), (65, "float32"), (512, "float32")],
)
def test_matches_float64(implementation, dtype, keys):
    """64 lanes over k-1, k, k+1, 2k and 8k keys."""
    q, kv, indices = draw(0, 5, 16, keys, 64, dtype=dtype)
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **PUBLISHED)
    check(got, oracle.sparse_mla(q, kv, indices, **PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(
    ("width", "v_dim", "lanes"),
    [
        (512, 512, 64),
        (576, 256, 64),
        (256, 192, 100),
        (96, 64, 33),
        (40, 33, 7),
        (576, 576, 130),
        (576, 512, 1),
        (3, 1, 2),
    ],
    ids=str,
)
def test_widths(implementation, width, v_dim, lanes):
    q, kv, indices = draw(1, 3, 16, 8 * lanes, lanes, width=width)
    options = dict(sm_scale=width**-0.5, v_dim=v_dim)
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **options)
    check(got, oracle.sparse_mla(q, kv, indices, **options), implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("heads", [1, 2, 3, 20, 64, 128])
def test_heads(implementation, heads):
    q, kv, indices = draw(heads, 2, heads, 200, 48)
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **PUBLISHED)
    check(got, oracle.sparse_mla(q, kv, indices, **PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_odd_rows(implementation, rows):
    q, kv, indices = draw(rows, rows, 8, 100, 16)
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **PUBLISHED)
    check(got, oracle.sparse_mla(q, kv, indices, **PUBLISHED), implementation=implementation)


MASKS = {
    "first 1": np.s_[:1],
    "first 16": np.s_[:16],
    "first 64": np.s_[:64],
    "first 128": np.s_[:128],
    "first 129": np.s_[:129],
    "middle": np.s_[50:140],
    "last": np.s_[130:],
    "alternating": np.s_[::2],
    "all but one": np.s_[1:],
    "all": np.s_[:],
}


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("where", MASKS)
def test_mla_masks(implementation, where):
    """A lane that names no key is as if it were not there, whatever its number and wherever it stands."""
    keys, invalid = 256, [-1, -7, 256, 257, 2147480000, INT_MAX, INT_MIN]
    q, kv, indices = draw(2, len(invalid) + 1, 8, keys, 192)
    for row, number in enumerate(invalid):
        indices[row, MASKS[where]] = number  # the last row stays whole
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **PUBLISHED)
    check(got, oracle.sparse_mla(q, kv, indices, **PUBLISHED), implementation=implementation)
    if where == "all":
        assert np.isneginf(np.asarray(got[1])[:-1]).all() and np.isfinite(np.asarray(got[1])[-1]).all()


@pytest.mark.gpu
@over_implementations
def test_mla_masks_lengths(implementation):
    """Lanes past a row's length are ignored although they name keys, poisoned ones included."""
    lengths = np.array([0, 1, 5, 64, 65, 130, 500, INT_MAX, -3, INT_MIN], np.int32)
    q, kv, indices = draw(3, len(lengths), 8, 400, 130)
    for row, length in enumerate(lengths):
        indices[row, max(length, 0) :] = 7
        indices[row, : max(length, 0)][indices[row, : max(length, 0)] == 7] = 8
    want = oracle.sparse_mla(q, kv, indices, lengths=lengths, **PUBLISHED)
    kv = kv.at[7].set(jnp.nan)
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), lengths=jnp.asarray(lengths), **PUBLISHED)
    check(got, want, implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("sink", [-np.inf, -1e30, 0.0, 4.0, 50.0, 1e4, 3e38, np.inf])
def test_mla_masks_sink(implementation, sink):
    """Any sink gives finite results; it takes its share of out, and lse does not know of it."""
    q, kv, indices = draw(4, 8, 8, 256, 192)
    indices[1] = -1
    sinks = np.full(8, sink, np.float32)
    args = (q, kv, jnp.asarray(indices))
    plain = run(sparse_mla, implementation, *args, **PUBLISHED)
    got = run(sparse_mla, implementation, *args, sink=jnp.asarray(sinks), **PUBLISHED)
    with np.errstate(over="ignore"):
        check(got, oracle.sparse_mla(q, kv, indices, sink=sinks, **PUBLISHED), implementation=implementation)
    same_bits(got[1:], plain[1:])
    if sink >= 1e4:
        assert not np.asarray(got[0]).any()
    if sink == -np.inf:
        same_bits(got, plain)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_mla_masks_sink_as_great_as_lse(implementation, size):
    """A sink of a row's own lse halves the row, where exp of either number alone would overflow too."""
    q, kv, indices = draw(5, 1, 16, 200, 1, dtype=jnp.bfloat16)
    args, options = (q, kv, jnp.asarray(indices)), dict(sm_scale=SCALE * size, v_dim=512)
    out, lse = run(sparse_mla, implementation, *args, **options)
    assert size == 1.0 or np.abs(np.asarray(lse)).max() > 1000
    halved, _ = run(sparse_mla, implementation, *args, sink=lse[0], **options)
    np.testing.assert_allclose(np.asarray(halved, np.float32), np.asarray(out, np.float32) / 2, rtol=2**-8)


@pytest.mark.gpu
@over_implementations
def test_huge_logits(implementation):
    """Logits of +-1e4, with a greatest one in every row that outweighs the rest: its value comes out."""
    q, kv, indices = draw(6, 8, 8, 256, 192)
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), sm_scale=500.0, v_dim=512)
    want_out, want_lse = oracle.sparse_mla(q, kv, indices, sm_scale=500.0, v_dim=512)
    np.testing.assert_allclose(np.asarray(got[1]), want_lse, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(got[0], np.float64), want_out, rtol=2**-7, atol=2e-2)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison(implementation, poison):
    """Keys that no row selects never reach an output: not the first, not the last, not those between."""
    q, kv, indices = draw(7, 8, 8, 256, 192)
    indices = np.where(indices >= 0, 1 + 2 * (indices % 127), -1).astype(np.int32)  # odd keys, never key 255
    indices[:, ::9], indices[2], indices[3, :70] = -1, -1, 2147480000
    dirty = kv.at[::2].set(poison).at[255].set(poison)
    args = (jnp.asarray(indices),)
    got = run(sparse_mla, implementation, q, dirty, *args, **PUBLISHED)
    same_bits(got, run(sparse_mla, implementation, q, kv, *args, **PUBLISHED))
    check(got, oracle.sparse_mla(q, kv, indices, **PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "float32"])
def test_poison_latent_cache(implementation, kind):
    """Flat slots of a LatentCache; every slot that is not named is NaN."""
    rng = np.random.default_rng(8)
    cache, rows = paged_cache(rng, 9, 16, kind)
    indices = choose(rng, 5, 40, 60) + 30
    indices[:, ::7], indices[1], indices[2, :20], indices[3, 5:] = -1, -1, 9 * 16, 2147480000
    used = indices[(indices >= 0) & (indices < 144)]
    q = normal(rng, (5, 16, 576), jnp.float32 if kind == "float32" else jnp.bfloat16)
    got = run(sparse_mla, implementation, q, poisoned(cache, used), jnp.asarray(indices), **PUBLISHED)
    check(got, oracle.sparse_mla(q, rows.reshape(144, 576), indices, **PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
def test_poison_in_another_row(implementation):
    """A row's NaN, in its query or its own keys, stays in that row; a row without keys is 0 whatever its query is."""
    q, kv, indices = draw(9, 8, 8, 256, 192)
    indices[4], indices[indices == 50] = -1, 51
    clean = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **PUBLISHED)
    indices[6, 3] = 50
    dirty = (q.at[2].set(jnp.nan).at[4].set(jnp.nan), kv.at[50].set(jnp.nan), jnp.asarray(indices))
    got = run(sparse_mla, implementation, *dirty, **PUBLISHED)
    others = np.array([0, 1, 3, 5, 7])
    same_bits([x[others] for x in got], [x[others] for x in clean])
    assert np.isnan(np.asarray(got[0], np.float32)[[2, 6]]).all()
    same_bits([x[4] for x in got], [x[4] for x in clean])


@pytest.mark.gpu
@over_implementations
def test_poison_padded_rows(implementation):
    """The same jitted call with more, fewer and no real rows: real rows keep their bits, padded ones are empty."""
    q, kv, indices = draw(10, 12, 8, 100, 24)
    function = jax.jit(functools.partial(run, sparse_mla, implementation, **PUBLISHED))
    whole = function(q, kv, jnp.asarray(indices))
    for real in (12, 5, 0, 1, 12):
        padded = np.where(np.arange(12)[:, None] < real, indices, -1)
        out, lse = function(q.at[real:].set(jnp.nan), kv, jnp.asarray(padded))
        same_bits((out[:real], lse[:real]), (whole[0][:real], whole[1][:real]))
        assert not np.asarray(out[real:]).any() and np.isneginf(np.asarray(lse[real:])).all()


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(("rows", "keys", "lanes"), [(0, 50, 8), (3, 50, 0), (3, 0, 8), (0, 0, 0)])
def test_empty(implementation, rows, keys, lanes):
    q, kv, indices = (
        jnp.ones((rows, 4, 576), jnp.bfloat16),
        jnp.ones((keys, 576), jnp.bfloat16),
        jnp.zeros((rows, lanes), int),
    )
    out, lse = jax.jit(functools.partial(run, sparse_mla, implementation, **PUBLISHED))(q, kv, indices)
    assert out.shape == (rows, 4, 512) and out.dtype == jnp.bfloat16 and not np.asarray(out).any()
    assert lse.shape == (rows, 4) and lse.dtype == jnp.float32 and np.isneginf(np.asarray(lse)).all()


@pytest.mark.gpu
@over_implementations
def test_duplicates_count_twice(implementation):
    q, kv, _ = draw(11, 2, 8, 50, 4)
    indices = np.array([[3, 9, 3, 3], [7, 7, 7, 7]], np.int32)
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **PUBLISHED)
    check(got, oracle.sparse_mla(q, kv, indices, **PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
def test_sm_scale_has_no_default(implementation):
    q, kv, indices = draw(12, 8, 8, 256, 192)
    with pytest.raises(TypeError, match="sm_scale"):
        sparse_mla(q, kv, jnp.asarray(indices), v_dim=512, implementation=implementation)
    for scale in (0.0, SCALE, 2 * SCALE):
        got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), sm_scale=scale, v_dim=512)
        check(got, oracle.sparse_mla(q, kv, indices, sm_scale=scale, v_dim=512), implementation=implementation)


@pytest.mark.gpu
@over_implementations
def test_repeat(implementation):
    q, kv, indices = draw(13, 8, 8, 256, 192)
    launches = [run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **PUBLISHED) for _ in range(20)]
    for launch in launches[1:]:
        same_bits(launch, launches[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_invariant(dtype):
    """A row alone, and in 2, 7, 32 and 257 rows, has the same bits."""
    q, kv, indices = draw(14, 257, 4, 200, 37, width=96, dtype=dtype)
    indices, sink = jnp.asarray(indices), jnp.linspace(-2.0, 2.0, 4)
    function = functools.partial(sparse_mla, sm_scale=0.1, v_dim=64, sink=sink, implementation="xla")
    whole = function(q, kv, indices)
    for rows in (1, 2, 7, 32):
        for first in (0, 3, 257 - rows):
            part = slice(first, first + rows)
            same_bits(function(q[part], kv, indices[part]), [x[part] for x in whole])


def test_memory():
    """Beside the output, memory for a tile: 8192 rows of 2048 keys at once would gather 18 GiB, a wide cache is 2.3."""
    q = jax.ShapeDtypeStruct((8192, 64, 576), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1 << 20, 576), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((8192, 2048), jnp.int32)
    function = jax.jit(functools.partial(sparse_mla, implementation="xla", **PUBLISHED))
    memory = function.lower(q, kv, indices).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes + 2 * GATHER_BYTES


def test_offsets_4gib():
    """Keys past 2^32 bytes and 2^31 numbers from the start of the array. Pages that nothing touches cost no memory."""
    keys, width = 4_500_000, 576
    raw = np.zeros(keys * width * 2 + 64, np.uint8)
    raw = raw[-raw.ctypes.data % 64 :][: keys * width * 2].view(jnp.bfloat16).reshape(keys, width)
    far = np.array([[0, 1, 3_728_269, 3_728_270, 3_728_271, keys - 2, keys - 1, keys]], np.int32)
    rng = np.random.default_rng(15)
    raw[far[0, :-1]] = rng.standard_normal((7, width)).astype(np.float32)
    kv, q = jax.device_put(raw, may_alias=True), normal(rng, (1, 4, width))
    assert kv.nbytes > 2**32 and kv.size > 2**31
    got = sparse_mla(q, kv, jnp.asarray(far), implementation="xla", **PUBLISHED)
    check(got, oracle.sparse_mla(q, raw[far[0, :-1]], np.arange(7, dtype=np.int32)[None], **PUBLISHED))


@pytest.mark.needs_gpu
@over_implementations
def test_offsets_4gib_on_gpu(implementation):
    keys = 4_500_000
    far = np.array([[0, 1, 3_728_269, 3_728_270, 3_728_271, keys - 2, keys - 1, keys] * 8], np.int32)
    rng = np.random.default_rng(16)
    used = normal(rng, (7, 576))
    kv = jnp.full((keys, 576), jnp.nan, jnp.bfloat16).at[far[0, :7]].set(used)
    q = normal(rng, (1, 64, 576))
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(far), **PUBLISHED)
    near = np.array([[0, 1, 2, 3, 4, 5, 6, -1] * 8], np.int32)
    check(got, oracle.sparse_mla(q, used, near, **PUBLISHED), implementation=implementation)


@pytest.mark.needs_gpu
@over_implementations
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("rows", [1, 62, 213])
@pytest.mark.parametrize(
    ("keys", "lanes"),
    [
        (95, 128),
        (128, 128),
        (592, 128),
        (1840, 256),
        (1521, 512),
        (2049, 2048),
        (8192, 2048),
        (32768, 2048),
        (20000, 1088),
    ],
)
def test_published_sizes(implementation, heads, rows, keys, lanes):
    q, kv, indices = draw(17, rows, heads, keys, lanes)
    indices[:, -1] = 2147480000
    kv = kv / 10
    got = run(sparse_mla, implementation, q, kv, jnp.asarray(indices), **PUBLISHED)
    picked = np.unique([0, rows // 2, rows - 1])
    want = oracle.sparse_mla(q[picked], kv, indices[picked], **PUBLISHED)
    check([x[picked] for x in got], want, implementation=implementation)
    check(
        got,
        _as_float64(sparse_mla(q, kv, jnp.asarray(indices), implementation="xla", **PUBLISHED)),
        implementation=implementation,
    )


def _as_float64(pair):
    return tuple(np.asarray(x).astype(np.float64) for x in pair)


BAD = {
    "q rank": (dict(q=jnp.zeros((2, 96))), r"q's shape must be \[M, H, D\]"),
    "q dtype": (dict(q=jnp.zeros((2, 4, 96), jnp.float16)), "q's dtype must be bfloat16 or float32, got float16"),
    "no heads": (dict(q=jnp.zeros((2, 0, 96))), "at least one head"),
    "kv width": (dict(kv=jnp.zeros((9, 95))), r"kv's shape must be \[N, D\] = \[any, 96\], got \[9, 95\]"),
    "kv dtype": (
        dict(kv=jnp.zeros((9, 96), jnp.float8_e4m3fn)),
        "kv's dtype must be bfloat16 or float32, got float8_e4m3fn",
    ),
    "cache width": (
        dict(kv=LatentCache(nope=jnp.zeros((2, 4, 64)), scale=None, rope=jnp.zeros((2, 4, 16)))),
        r"kv's width R \+ dr must be q's last axis, 96, got 64 \+ 16",
    ),
    "indices rows": (dict(indices=jnp.zeros((3, 5), jnp.int32)), r"indices's shape must be \[M, K\] = \[2, any\]"),
    "indices dtype": (dict(indices=jnp.zeros((2, 5), jnp.uint32)), "indices's dtype must be int32, got uint32"),
    "v_dim 0": (dict(v_dim=0), "v_dim must be in 1..96, q's last axis, got 0"),
    "v_dim 97": (dict(v_dim=97), "v_dim must be in 1..96, q's last axis, got 97"),
    "sm_scale": (dict(sm_scale=float("nan")), "sm_scale must be a finite number, got nan"),
    "lengths": (dict(lengths=jnp.zeros(3, jnp.int32)), r"lengths's shape must be \[M\] = \[2\], got \[3\]"),
    "sink shape": (dict(sink=jnp.zeros(5)), r"sink's shape must be \[H\] = \[4\], got \[5\]"),
    "sink dtype": (dict(sink=jnp.zeros(4, jnp.bfloat16)), "sink's dtype must be float32, got bfloat16"),
    "implementation": (dict(implementation="cuda"), "implementation must be None or one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(as_user, case):
    args = dict(
        q=jnp.zeros((2, 4, 96)), kv=jnp.zeros((9, 96)), indices=jnp.zeros((2, 5), jnp.int32), v_dim=64, sm_scale=0.1
    )
    changed, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        sparse_mla(**(args | changed))


def test_offsets_too_many_slots():
    """More slots than int32 can count are refused before anything runs."""
    cache = LatentCache(
        nope=jax.ShapeDtypeStruct((1 << 25, 64, 64), jnp.bfloat16),
        scale=None,
        rope=jax.ShapeDtypeStruct((1 << 25, 64, 32), jnp.bfloat16),
    )
    q, indices = jax.ShapeDtypeStruct((2, 4, 96), jnp.bfloat16), jax.ShapeDtypeStruct((2, 5), jnp.int32)
    with pytest.raises(ValueError, match="number of rows must be at most 2147483647"):
        jax.eval_shape(functools.partial(sparse_mla, sm_scale=0.1, v_dim=64), q, cache, indices)
