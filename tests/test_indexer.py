"""Indexer scores against float64 and recorded scores: fault kinds A (not the model's score), C, D (memory, offsets),
J (empty), M (rows of several tokens), P and Q (batch, repeats).
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import implementations
from index_cases import E4M3, INT_MAX, INT_MIN, draw, draw_paged, normal, run
from tolerances import FLOAT32, LOGITS_COSINE, cosine_distance

from dsa_jax.cache import IndexCache
from dsa_jax.indexer import indexer_logits, paged_indexer_logits
from dsa_jax.plan import decode_ends

GOLDEN = np.load(Path(__file__).parent / "golden" / "fp8_indexer.npz")

over_implementations = pytest.mark.parametrize("implementation", implementations("indexer_logits"))
over_paged_implementations = pytest.mark.parametrize("implementation", implementations("paged_indexer_logits"))


def score(implementation, case):
    return np.asarray(run(indexer_logits, implementation, *case.args, k_scale=case.k_scale))


def score_paged(implementation, case):
    return np.asarray(run(paged_indexer_logits, implementation, *case.args))


def check(got, case, message=""):
    want = oracle.indexer_logits(*case.args, case.k_scale)
    assert got.dtype == np.float32 and got.shape == want.shape
    assert cosine_distance(got, want) < LOGITS_COSINE, message
    if case.q.dtype != E4M3:  # matrix units keep fewer bits of a sum of fp8 products
        finite = np.isfinite(want)
        off = np.abs(got[finite] - want[finite]).max(initial=0.0)
        assert off <= FLOAT32 * np.abs(want[finite]).max(initial=0.0), message


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("recorded", ["h0_none", "h0_ue8m0", "h1_none", "h1_ue8m0"])
def test_score_golden(implementation, recorded):
    """Scores that others computed from the same fp8 bytes and scales."""
    q, k = (jnp.asarray(GOLDEN[f"{x}8_{recorded}"][0].view(ml_dtypes.float8_e4m3fn)) for x in "qk")
    rows, heads, width = q.shape
    weights = GOLDEN["w_raw"][0] * GOLDEN[f"qs_{recorded}"][0, ..., 0] * (heads * width) ** -0.5
    full = jnp.zeros(rows, jnp.int32), jnp.full(rows, k.shape[0], jnp.int32)
    scale = jnp.asarray(GOLDEN[f"ks_{recorded}"][0, :, 0])
    got = run(indexer_logits, implementation, q, k, jnp.asarray(weights), *full, k_scale=scale)
    assert cosine_distance(got, GOLDEN[f"score_{recorded}"][0]) < LOGITS_COSINE


SHAPES = {  # heads, index width, dtype
    "glm": (32, 128, E4M3),
    "deepseek": (64, 128, E4M3),
    "glm-bf16": (32, 128, jnp.bfloat16),
    "odd-heads-float32": (5, 32, jnp.float32),
    "tiny-float32": (8, 32, jnp.float32),
    "width-64": (16, 64, E4M3),
    "width-32": (8, 32, jnp.bfloat16),
    "one-head": (1, 64, jnp.float32),
}


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_float64(implementation, shape):
    heads, width, dtype = shape
    case = draw(0, 19, 1000, heads, width, dtype, ranges="random")
    check(score(implementation, case), case)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 511), (8, 512), (9, 513), (63, 130)], ids=str)
def test_odd_sizes(implementation, rows, columns):
    case = draw(1, rows, columns, dtype=jnp.bfloat16, ranges="full")
    check(score(implementation, case), case)


@pytest.mark.needs_gpu
@over_implementations
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_float64_large(implementation, shape):
    heads, width, dtype = shape
    case = draw(2, 517, 16411, heads, width, dtype, ranges="random")
    check(score(implementation, case), case)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("dtype", [E4M3, jnp.bfloat16, jnp.float32], ids=["e4m3", "bf16", "float32"])
def test_integers_are_exact(implementation, dtype):
    """Small integers and weights in 64ths: every sum is exact, so every score of every row is, to the bit."""
    rng, rows, columns = np.random.default_rng(3), 21, 1000
    integers = lambda *shape: jnp.asarray(rng.integers(-4, 5, shape).astype(np.float32))  # noqa: E731
    q, k = integers(rows, 32, 128).astype(dtype), integers(columns, 128).astype(dtype)
    weights, scale = integers(rows, 32) / 64, 2.0 ** rng.integers(-3, 4, columns).astype(np.float32)
    full = jnp.zeros(rows, jnp.int32), jnp.full(rows, columns, jnp.int32)
    got = run(indexer_logits, implementation, q, k, weights, *full, k_scale=jnp.asarray(scale))
    np.testing.assert_array_equal(got, oracle.indexer_logits(q, k, weights, *full, scale))


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("heads", [32, 64])
def test_score_scale_order(implementation, heads):
    """Constants in the weights or in the query: powers of two leave the same bits, 64 heads of 128 included."""
    case = draw(4, 8, 300, heads, 128, jnp.bfloat16)
    inside = score(implementation, case)
    case.q, case.weights = (case.q.astype(jnp.float32) / 8).astype(jnp.bfloat16), case.weights * 8
    np.testing.assert_array_equal(score(implementation, case), inside)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("dtype", [E4M3, jnp.float32], ids=["e4m3", "float32"])
def test_poison(implementation, dtype):
    """Keys and scales that no row sees hold NaN; what a row does not see is -inf, and no row notices another's keys."""
    clean = draw(5, 12, 1100, dtype=dtype)
    starts = np.array([100, 100, 150, 600, 600, 700, 0, INT_MAX, 900, 100, INT_MIN, 200], np.int32)
    ends = np.array([100, 101, 400, 800, 700, 701, -1, INT_MIN, 5, 400, 0, 300], np.int32)
    clean.starts, clean.ends = jnp.asarray(starts), jnp.asarray(ends)
    seen = np.zeros(1100, bool)
    for start, end in zip(starts, ends, strict=True):
        seen[max(start, 0) : max(end, 0)] = True
    assert 0 < seen.sum() < 600
    poisoned = clean.rows(slice(None))
    poisoned.k = jnp.where(jnp.asarray(seen)[:, None], clean.k, jnp.asarray(jnp.nan, dtype))
    if clean.k_scale is not None:
        poisoned.k_scale = jnp.where(jnp.asarray(seen), clean.k_scale, jnp.nan)
    got = score(implementation, poisoned)
    np.testing.assert_array_equal(got, score(implementation, clean))
    column = np.arange(1100)[None]
    np.testing.assert_array_equal(got == -np.inf, ~((column >= starts[:, None]) & (column < ends[:, None])))


@pytest.mark.gpu
@over_implementations
def test_unclean_scores_are_the_clean_ones_where_a_row_sees(implementation):
    case = draw(21, 19, 1500, dtype=E4M3, ranges="random")
    got = np.asarray(run(indexer_logits, implementation, *case.args, k_scale=case.k_scale, clean_logits=False))
    column, starts, ends = np.arange(1500)[None], np.asarray(case.starts)[:, None], np.asarray(case.ends)[:, None]
    seen = (column >= starts) & (column < ends)
    np.testing.assert_array_equal(got[seen], score(implementation, case)[seen])


@pytest.mark.gpu
@over_paged_implementations
def test_unclean_paged_scores_likewise(implementation):
    """Those of a page that the cache does not have are -inf, since a row sees them."""
    case = draw_paged(22, [700, 33, 0, 64], 2, dtype=E4M3, page=64)
    case.block_table = case.block_table.at[0, 3].set(INT_MAX)
    got = np.asarray(run(paged_indexer_logits, implementation, *case.args, clean_logits=False))
    ends = np.asarray(decode_ends(case.seq_lens, 2))[..., None]
    seen = np.arange(got.shape[2])[None, None] < ends
    want = score_paged(implementation, case)
    np.testing.assert_array_equal(got[seen], want[seen])
    assert (want[0, :, 192:256] == -np.inf).all()


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("dtype", [E4M3, jnp.float32], ids=["e4m3", "float32"])
def test_batch_invariant(implementation, dtype):
    """A row has the same bits alone, among 7 and among 257 rows, at any place."""
    case = draw(6, 257, 700, dtype=dtype, ranges="random")
    whole = score(implementation, case)
    for rows in ([200], [5, 9, 100, 101, 102, 255, 0]):
        np.testing.assert_array_equal(score(implementation, case.rows(np.array(rows))), whole[rows])


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("dtype", [E4M3, jnp.float32], ids=["e4m3", "float32"])
def test_place_of_keys_invariant(implementation, dtype):
    """A request's scores are the same bits wherever its keys lie among others'."""
    case = draw(7, 11, 600, dtype=dtype, ranges="full")
    alone = score(implementation, case)
    pad = lambda x, front, back: jnp.pad(x, ((front, back),) + ((0, 0),) * (x.ndim - 1))  # noqa: E731
    for front, back in ((1, 0), (333, 411)):
        moved = case.rows(slice(None))
        moved.k, moved.starts, moved.ends = pad(case.k, front, back), case.starts + front, case.ends + front
        moved.k_scale = None if case.k_scale is None else pad(case.k_scale, front, back)
        np.testing.assert_array_equal(score(implementation, moved)[:, front : front + 600], alone)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("width", [32, 64, 128])
def test_repeat(implementation, width):
    case = draw(8, 9, 600, width=width, dtype=E4M3, ranges="random")
    launches = [score(implementation, case) for _ in range(20)]
    assert all(np.array_equal(launches[0], other) for other in launches)


@pytest.mark.gpu
@over_paged_implementations
@pytest.mark.parametrize(
    ("dtype", "page", "queries"),
    [(E4M3, 64, 1), (E4M3, 16, 3), (jnp.bfloat16, 1, 2), (jnp.float32, 32, 1), (jnp.float32, 256, 9), (E4M3, 7, 2)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_paged(implementation, dtype, page, queries):
    """Odd page counts, random page order, NaN past every length: each request as a ragged problem, to float64."""
    case = draw_paged(9, [700, 1, 513, 0, 64], queries, dtype=dtype, page=page)
    got = score_paged(implementation, case)
    for request in range(5):
        check(got[request], case.ragged(request), f"request {request}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, jnp.float32], ids=["e4m3", "float32"])
def test_paged_has_the_bits_of_ragged(dtype):
    case = draw_paged(10, [700, 640, 13], 2, dtype=dtype, page=64)
    got = score_paged("xla", case)
    for request in range(3):
        np.testing.assert_array_equal(got[request], score("xla", case.ragged(request)))


@pytest.mark.gpu
@over_paged_implementations
@pytest.mark.parametrize("queries", [2, 4, 6])
def test_next_n(implementation, queries):
    """The last next_n tokens at once are next_n single tokens, one by one; requests shorter than next_n included."""
    case = draw_paged(11, [33, 2, 100], queries, dtype=E4M3)
    got = score_paged(implementation, case)
    for i in range(queries):
        one = draw_paged(11, [33, 2, 100], queries, dtype=E4M3)
        one.q, one.weights = case.q[:, i : i + 1], case.weights[:, i : i + 1]
        one.seq_lens = case.seq_lens - queries + i + 1
        np.testing.assert_array_equal(got[:, i], score_paged(implementation, one)[:, 0])
    visible = (got > -np.inf).sum(-1)
    np.testing.assert_array_equal(visible, decode_ends(case.seq_lens, queries))


def test_next_n_ends():
    got = decode_ends(jnp.array([2, 0, 7, 4]), 4)
    np.testing.assert_array_equal(got, [[0, 0, 1, 2], [0, 0, 0, 0], [4, 5, 6, 7], [1, 2, 3, 4]])
    assert decode_ends(jnp.zeros(0, jnp.int32), 2).shape == (0, 2)


@pytest.mark.gpu
@over_paged_implementations
def test_paged_full_table(implementation):
    """A length of exactly the table's width, and one more or far more: every key is seen, nothing past the table."""
    case = draw_paged(12, [96, 96, 96], dtype=E4M3, page=32)
    want = score_paged(implementation, case)
    assert np.isfinite(want).all()
    case.seq_lens = jnp.array([96, 97, INT_MAX], jnp.int32)
    np.testing.assert_array_equal(score_paged(implementation, case), want)


@pytest.mark.gpu
@over_paged_implementations
@pytest.mark.parametrize("entry", [-1, INT_MIN, INT_MAX])
def test_paged_unmapped_page(implementation, entry):
    """A page that the cache does not have, within the length, is another request's nowhere: its keys score -inf."""
    case = draw_paged(13, [90, 90], dtype=E4M3, page=32)
    want = score_paged(implementation, case).copy()
    case.block_table = case.block_table.at[0, 1].set(entry)
    want[0, :, 32:64] = -np.inf
    np.testing.assert_array_equal(score_paged(implementation, case), want)


@pytest.mark.gpu
@over_paged_implementations
@pytest.mark.parametrize("batch", [8, 9, 24])
def test_paged_batches(implementation, batch):
    """As many requests as heads, one more, three times as many: no stride is mistaken for another."""
    lens = np.random.default_rng(batch).integers(1, 60, batch).tolist()
    case = draw_paged(14, lens, dtype=jnp.float32)
    got = score_paged(implementation, case)
    for request in range(batch):
        check(got[request], case.ragged(request), f"request {request}")


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)], ids=str)
def test_empty(shape):
    rows, columns = shape
    case = draw(15, max(rows, 1), max(columns, 1)).rows(slice(rows))
    got = jax.jit(indexer_logits)(case.q, case.k[:columns], *case.args[2:])
    assert got.shape == shape and got.dtype == jnp.float32


@pytest.mark.parametrize(("batch", "queries", "pages"), [(0, 1, 3), (2, 0, 3), (2, 1, 0)], ids=str)
def test_empty_paged(batch, queries, pages):
    cache = IndexCache.zeros(4, 16, 32, dtype="bfloat16")
    q, weights = jnp.zeros((batch, queries, 8, 32), jnp.bfloat16), jnp.zeros((batch, queries, 8))
    table, lens = jnp.zeros((batch, pages), jnp.int32), jnp.zeros(batch, jnp.int32)
    got = jax.jit(paged_indexer_logits)(q, cache, weights, table, lens)
    assert got.shape == (batch, queries, pages * 16) and got.dtype == jnp.float32


def test_memory_of_scores():
    """N = 131072 and 64 heads: next to the logits only a tile, no copy of the keys, and no [H, M, N] or bool [M, N]."""
    case = jax.eval_shape(lambda: draw(16, 16, 131072, 64, 128, E4M3).args)
    compiled = jax.jit(indexer_logits).lower(*case).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 << 20
    text = compiled.as_text()
    assert "f32[16,131072]" in text
    assert not re.search(r"pred\[16,131072", text)
    assert max(np.prod([int(n) for n in s.split(",")]) for s in re.findall(r"f32\[([\d,]+)\]", text)) <= 16 * 131072


def test_memory_of_paged_scores():
    """64 requests of 128k tokens: no copy of the cache, nor of one request's keys."""
    cache = jax.eval_shape(lambda: IndexCache.zeros(20000, 64, 128, dtype="float8_e4m3fn"))
    q, weights = jax.ShapeDtypeStruct((64, 1, 32, 128), E4M3), jax.ShapeDtypeStruct((64, 1, 32), jnp.float32)
    table, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 2048), (64,)))
    compiled = jax.jit(paged_indexer_logits).lower(q, cache, weights, table, lens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 << 20


@pytest.mark.needs_gpu
@over_implementations
def test_offsets_past_2_to_31(implementation):
    """8192 x 300000 scores, 9.8 GB: the last rows and columns are where they belong."""
    case = draw(17, 8192, 300000, 8, 32, E4M3, ranges="full")
    got = run(indexer_logits, implementation, *case.args, k_scale=case.k_scale)
    rows = np.array([0, 7157, 7158, 7159, 8191])
    check(np.asarray(got[rows]), case.rows(rows))


@pytest.mark.needs_gpu
@over_paged_implementations
def test_offsets_4gib(implementation):
    """A cache of 4.4 GB: a page at its far end scores as the same page at its beginning."""
    pages, rng = 536000, np.random.default_rng(18)
    cache, page = IndexCache.zeros(pages, 64, 128, dtype="float8_e4m3fn"), normal(rng, (64, 128), E4M3)
    scale = jnp.asarray(rng.uniform(0.01, 1.0, 64).astype(np.float32))
    put = jax.jit(
        lambda c, i: IndexCache(c.k.at[i].set(page), c.scale.at[i].set(scale)), donate_argnums=0, static_argnums=1
    )
    q, weights, lens = normal(rng, (1, 2, 32, 128), E4M3), normal(rng, (1, 2, 32)), jnp.array([64], jnp.int32)
    results = []
    for where in (0, pages - 1):
        cache = put(cache, where)
        table = jnp.array([[where]], jnp.int32)
        results.append(np.asarray(run(paged_indexer_logits, implementation, q, cache, weights, table, lens)))
    np.testing.assert_array_equal(results[1], results[0])
    assert np.abs(results[0][0, 1]).min() > 0


RAGGED = dict(zip(("q", "k", "weights", "starts", "ends"), draw(19, 2, 5).args, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weights=RAGGED["weights"].astype(jnp.bfloat16)), "weights's dtype must be float32, got bfloat16"),
        (dict(k=RAGGED["k"].astype(jnp.bfloat16)), "q's dtype must be k's, bfloat16, got float32"),
        (dict(k=RAGGED["k"].astype(jnp.float8_e4m3fnuz)), "k's dtype must be float8_e4m3fn or bfloat16 or float32"),
        (dict(k=RAGGED["k"][:, :16]), r"k's shape must be \[N, D\] = \[any, 32\], got \[5, 16\]"),
        (dict(q=RAGGED["q"][0]), "q's shape"),
        (dict(weights=RAGGED["weights"][:, :4]), "weights's shape"),
        (dict(starts=RAGGED["starts"][:1]), "starts's shape"),
        (dict(ends=RAGGED["ends"].astype(jnp.float32)), "ends's dtype must be an integer type"),
        (dict(k_scale=jnp.ones(4)), r"k_scale's shape must be \[N\] = \[5\], got \[4\]"),
        (dict(k_scale=jnp.ones(5, jnp.bfloat16)), "k_scale's dtype"),
        (dict(implementation="triton"), "implementation must be None or one of 'hopper', 'portable', 'xla'"),
        (dict(clean_logits=None), "clean_logits must be True or False, got None"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input(as_user, change, message):
    arguments = RAGGED | change
    positional = [arguments.pop(name) for name in ("q", "k", "weights", "starts", "ends")]
    with pytest.raises(ValueError, match=message):
        indexer_logits(*positional, **arguments)


PAGED = dict(zip(("q", "cache", "weights", "block_table", "seq_lens"), draw_paged(20, [5, 9]).args, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=PAGED["q"][:, 0]), "q's shape"),
        (dict(q=PAGED["q"][..., :16]), "cache.k's shape"),
        (dict(q=PAGED["q"].astype(jnp.bfloat16)), "q's dtype must be cache.k's"),
        (dict(weights=PAGED["weights"].astype(jnp.bfloat16)), "weights's dtype"),
        (dict(block_table=PAGED["block_table"][:1]), "block_table's shape"),
        (dict(block_table=PAGED["block_table"] * 1.0), "block_table's dtype"),
        (dict(seq_lens=PAGED["seq_lens"][:1]), "seq_lens's shape"),
        (dict(cache=IndexCache(PAGED["cache"].k, jnp.ones((1, 1)))), "cache.scale's shape"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_paged_input(as_user, change, message):
    with pytest.raises(ValueError, match=message):
        paged_indexer_logits(*(PAGED | change).values())
