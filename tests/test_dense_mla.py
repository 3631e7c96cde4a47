"""dense_mla against float64: ragged causal prefills, chunks, ranges; and absorbed against expanded attention."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import implementations
from mla_cases import INT_MAX, INT_MIN, check, normal, run, same_bits

from dsa_jax.mla import dense_mla, sparse_mla
from dsa_jax.mla_xla import DENSE_COLUMNS, DENSE_ROWS

over_implementations = pytest.mark.parametrize("implementation", implementations("dense_mla"))
SCALE = 64**-0.5


def draw(seed, rows, keys, *, heads=3, width=64, v_dim=64, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    shapes = [(rows, heads, width), (keys, heads, width), (keys, heads, v_dim)]
    return tuple(normal(rng, shape, dtype) for shape in shapes)


def causal(lengths):
    """starts and ends of all rows of requests of `lengths` tokens, packed one after the other."""
    first = np.cumsum(lengths) - lengths
    starts = np.repeat(first, lengths).astype(np.int32)
    return starts, np.arange(1, sum(lengths) + 1, dtype=np.int32)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize(
    "lengths",
    [[1], [5], [63, 1, 64], [1, 255, 1], [256], [257, 3], [100, 200, 1, 1, 300]],
    ids=lambda lengths: "+".join(map(str, lengths)),
)
def test_matches_float64(implementation, lengths, dtype):
    q, k, v = draw(0, sum(lengths), sum(lengths), dtype=dtype)
    starts, ends = causal(lengths)
    got = run(dense_mla, implementation, q, k, v, jnp.asarray(starts), jnp.asarray(ends), sm_scale=SCALE)
    check(got, oracle.dense_mla(q, k, v, starts, ends, sm_scale=SCALE), implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(
    ("heads", "width", "v_dim"), [(1, 256, 256), (8, 192, 128), (64, 256, 256), (5, 7, 3)], ids=lambda x: str(x)
)
def test_heads(implementation, heads, width, v_dim):
    q, k, v = draw(1, 33, 80, heads=heads, width=width, v_dim=v_dim)
    starts, ends = np.zeros(33, np.int32), np.arange(48, 81, dtype=np.int32)
    got = run(dense_mla, implementation, q, k, v, jnp.asarray(starts), jnp.asarray(ends), sm_scale=width**-0.5)
    check(got, oracle.dense_mla(q, k, v, starts, ends, sm_scale=width**-0.5), implementation=implementation)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("implementation", ["hopper", "portable"])
@pytest.mark.parametrize(("heads", "width", "v_dim"), [(2, 256, 256), (3, 192, 128), (2, 128, 192)], ids=str)
@pytest.mark.parametrize("lengths", [[2048], [2047, 1, 700], [131, 1000]], ids=str)
def test_long_prompts_on_gpu(implementation, lengths, heads, width, v_dim):
    """Blocks of keys that all rows see whole, and others at requests' ends; and the same bits 20 times."""
    q, k, v = draw(9, sum(lengths), sum(lengths), heads=heads, width=width, v_dim=v_dim)
    starts, ends = causal(lengths)
    args = (q, k, v, jnp.asarray(starts), jnp.asarray(ends))
    got = dense_mla(*args, sm_scale=width**-0.5, implementation=implementation)
    rows = np.r_[0:3, 60:70, 125:135, len(starts) - 3 : len(starts)]
    want = oracle.dense_mla(q[rows], k, v, starts[rows], ends[rows], sm_scale=width**-0.5)
    check([x[rows] for x in got], want, implementation=implementation)
    for _ in range(19):
        same_bits(dense_mla(*args, sm_scale=width**-0.5, implementation=implementation), got)


RANGES = [
    (0, 600), (-5, 3), (INT_MIN, INT_MAX), (599, 600), (599, 900),
    (600, 700), (0, 0), (7, 7), (9, 2), (INT_MAX, INT_MIN), (-9, -3),
    (255, 257), (256, 512), (511, 513), (0, 255), (0, 256), (0, 257), (300, 301),
]  # fmt: skip


@pytest.mark.gpu
@over_implementations
def test_ranges(implementation):
    """Ranges are clipped to the keys; an empty one gives out 0 and lse -inf."""
    q, k, v = draw(2, len(RANGES), 600)
    starts, ends = (np.array(x, np.int32) for x in zip(*RANGES, strict=True))
    args = (q, k, v, jnp.asarray(starts), jnp.asarray(ends))
    got = run(dense_mla, implementation, *args, sm_scale=SCALE)
    check(got, oracle.dense_mla(q, k, v, starts, ends, sm_scale=SCALE), implementation=implementation)
    assert np.isneginf(np.asarray(got[1])[5:11]).all()
    for _ in range(19):
        same_bits(run(dense_mla, implementation, *args, sm_scale=SCALE), got)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(("width", "v_dim"), [(64, 64), (256, 256), (192, 128)], ids=str)
def test_rows_do_not_notice_their_neighbours(implementation, width, v_dim):
    """A row that sees one key leaves no block of keys that all rows see whole; the others have the bits they had."""
    q, k, v = draw(10, 64, 300, heads=1, width=width, v_dim=v_dim)
    starts, ends = np.zeros(64, np.int32), np.full(64, 300, np.int32)
    first = run(dense_mla, implementation, q, k, v, jnp.asarray(starts), jnp.asarray(ends), sm_scale=width**-0.5)
    starts[63] = 299
    again = run(dense_mla, implementation, q, k, v, jnp.asarray(starts), jnp.asarray(ends), sm_scale=width**-0.5)
    same_bits([x[:63] for x in first], [x[:63] for x in again])


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("sm_scale", [-0.125, 0.0])
def test_scales_that_are_not_positive(implementation, sm_scale):
    q, k, v = draw(11, 20, 70)
    starts, ends = np.zeros(20, np.int32), np.arange(30, 50, dtype=np.int32)
    got = run(dense_mla, implementation, q, k, v, jnp.asarray(starts), jnp.asarray(ends), sm_scale=sm_scale)
    check(got, oracle.dense_mla(q, k, v, starts, ends, sm_scale=sm_scale), implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("what", ["keys", "values", "both"])
def test_poison(implementation, what, poison):
    """What a row does not see does not reach it: another request's keys and values, later tokens, padding."""
    lengths = [40, 30, 50]
    q, k, v = draw(3, 120, 400)
    starts, ends = map(jnp.asarray, causal(lengths))
    clean = run(dense_mla, implementation, q, k, v, starts, ends, sm_scale=SCALE)
    bad = jnp.asarray(np.r_[45, 120:400])
    k = k if what == "values" else k.at[bad].set(poison)
    v = v if what == "keys" else v.at[bad].set(poison)
    got = run(dense_mla, implementation, q, k, v, starts, ends, sm_scale=SCALE)
    sees = np.zeros(120, bool)
    sees[45:70] = True
    same_bits([x[~sees] for x in got], [x[~sees] for x in clean])
    assert not np.isfinite(np.asarray(got[0], np.float32)[sees]).any()  # and what it does see is not hidden


@pytest.mark.gpu
@over_implementations
def test_poison_padded_rows(implementation):
    q, k, v = draw(4, 70, 70)
    starts, ends = causal([70])
    step = jax.jit(functools.partial(run, dense_mla, implementation, sm_scale=SCALE))
    whole = step(q, k, v, jnp.asarray(starts), jnp.asarray(ends))
    for real in (70, 3, 0, 70):
        padded = np.where(np.arange(70) < real, ends, 0).astype(np.int32)
        out, lse = step(q.at[real:].set(jnp.nan), k, v, jnp.asarray(starts), jnp.asarray(padded))
        same_bits((out[:real], lse[:real]), (whole[0][:real], whole[1][:real]))
        assert not np.asarray(out[real:]).any() and np.isneginf(np.asarray(lse[real:])).all()


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (4, 0), (0, 0)])
def test_empty(implementation, rows, keys):
    q, k, v = draw(5, rows, keys)
    bounds = jnp.zeros(rows, jnp.int32)
    out, lse = run(dense_mla, implementation, q, k, v, bounds, bounds + 9, sm_scale=SCALE)
    assert out.shape == (rows, 3, 64) and out.dtype == jnp.bfloat16 and not np.asarray(out).any()
    assert lse.shape == (rows, 3) and lse.dtype == jnp.float32 and np.isneginf(np.asarray(lse)).all()


@pytest.mark.parametrize(
    ("cuts", "dtype"), [([300], "bfloat16"), ([1, 64, 257], "bfloat16"), ([100, 107, 299], "float32")], ids=str
)
def test_chunk_equiv(cuts, dtype):
    """A prompt in chunks, each over the keys there are so far, has the bits of the prompt in one shot."""
    q, k, v = draw(6, 301, 301, dtype=dtype)
    starts, ends = map(jnp.asarray, causal([301]))
    whole = dense_mla(q, k, v, starts, ends, sm_scale=SCALE, implementation="xla")
    for first, last in zip([0, *cuts], [*cuts, 301], strict=True):
        rows = slice(first, last)
        chunk = (q[rows], k[:last], v[:last], starts[rows], ends[rows])
        same_bits(dense_mla(*chunk, sm_scale=SCALE, implementation="xla"), [x[rows] for x in whole])


def test_memory():
    """No [H, M, N] array: 4096 rows over 4096 keys and 64 heads would take 4 GiB in float32."""
    shapes = [(4096, 64, 256), (4096, 64, 256), (4096, 64, 256)]
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    bound = jax.ShapeDtypeStruct((4096,), jnp.int32)
    function = jax.jit(functools.partial(dense_mla, sm_scale=1 / 16, implementation="xla"))
    memory = function.lower(q, k, v, bound, bound).compile().memory_analysis()
    tile = 64 * DENSE_ROWS * DENSE_COLUMNS * 4 + 64 * DENSE_COLUMNS * 512 * 4
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes + 4 * tile


def test_skips_blocks_that_no_row_sees():
    """Rows that see 9 of 256 blocks' keys take a fraction of the time of rows that see all."""
    q, k, v = draw(7, DENSE_ROWS, 256 * DENSE_COLUMNS)
    starts = jnp.full(DENSE_ROWS, 100 * DENSE_COLUMNS + 3, jnp.int32)
    step = jax.jit(functools.partial(dense_mla, sm_scale=SCALE, implementation="xla"))

    def seconds(starts, ends):
        jax.block_until_ready(step(q, k, v, starts, ends))
        begin = time.perf_counter()
        jax.block_until_ready(step(q, k, v, starts, ends))
        return time.perf_counter() - begin

    few = min(seconds(starts, starts + 9) for _ in range(3))
    assert few < min(seconds(0 * starts, 0 * starts + len(k)) for _ in range(3)) / 5


def test_absorbed_equals_expanded():
    """Folding W_UK into the query and W_UV behind the output changes nothing: k_h = [W_UK,h c | r], v_h = W_UV,h c."""
    rng = np.random.default_rng(8)
    rows, heads, nope, rope, v_dim, latent = 20, 3, 12, 4, 10, 16
    draw32 = functools.partial(normal, rng, dtype=jnp.float32)
    q_nope, q_rope = draw32((rows, heads, nope)), draw32((rows, heads, rope))
    c, r = draw32((rows, latent)), draw32((rows, rope))
    w_uk, w_uv = draw32((heads, nope, latent)), draw32((heads, v_dim, latent))
    einsum = functools.partial(jnp.einsum, precision="highest")
    keys = jnp.concatenate([einsum("hdr,nr->nhd", w_uk, c), jnp.repeat(r[:, None], heads, 1)], -1)
    starts, ends = causal([rows])
    expanded, lse = dense_mla(
        jnp.concatenate([q_nope, q_rope], -1), keys, einsum("hvr,nr->nhv", w_uv, c), jnp.asarray(starts),
        jnp.asarray(ends), sm_scale=0.25,
    )  # fmt: skip
    absorbed = jnp.concatenate([einsum("mhd,hdr->mhr", q_nope, w_uk), q_rope], -1)
    seen = np.where(np.arange(rows) < ends[:, None], np.arange(rows), -1).astype(np.int32)
    out, lse_absorbed = sparse_mla(
        absorbed, jnp.concatenate([c, r], -1), jnp.asarray(seen), sm_scale=0.25, v_dim=latent
    )
    np.testing.assert_allclose(np.asarray(einsum("mhr,hvr->mhv", out, w_uv)), np.asarray(expanded), atol=2e-5)
    np.testing.assert_allclose(np.asarray(lse_absorbed), np.asarray(lse), atol=2e-5)


BAD = {
    "k": (dict(k=jnp.zeros((9, 4, 23))), r"k's shape must be \[N, H, D\] = \[any, 4, 24\], got \[9, 4, 23\]"),
    "v": (dict(v=jnp.zeros((8, 4, 16))), r"v's shape must be \[N, H, V\] = \[9, 4, any\], got \[8, 4, 16\]"),
    "v dtype": (dict(v=jnp.zeros((9, 4, 16), jnp.bfloat16)), "v's dtype must be float32, got bfloat16"),
    "starts": (dict(starts=jnp.zeros(3, jnp.int32)), r"starts's shape must be \[M\] = \[2\], got \[3\]"),
    "ends dtype": (dict(ends=jnp.zeros(2, jnp.int16)), "ends's dtype must be int32, got int16"),
    "sm_scale": (dict(sm_scale=float("inf")), "sm_scale must be a finite number, got inf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(as_user, case):
    bound = jnp.zeros(2, jnp.int32)
    args = dict(q=jnp.zeros((2, 4, 24)), k=jnp.zeros((9, 4, 24)), v=jnp.zeros((9, 4, 16)), starts=bound, ends=bound)
    changed, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        dense_mla(**(args | dict(sm_scale=SCALE) | changed))
