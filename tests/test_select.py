"""select_topk and paged_select_topk: the top-k of the scores, whatever the memory budget. Fault kinds C (memory),
E (ties across tiles), K (chunks and prefixes), L (rows that need no scores), M (rows of several tokens), P and Q.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import implementations
from index_cases import E4M3, Ragged, draw, draw_paged, run

from dsa_jax import indexer_xla, topk
from dsa_jax.cache import IndexCache
from dsa_jax.dispatch import explain
from dsa_jax.indexer import indexer_logits, paged_indexer_logits
from dsa_jax.plan import chunk_ranges, visible_indices
from dsa_jax.topk import PAGED_SELECT_TOPK, SELECT_TOPK, paged_select_topk, select_topk

over_implementations = pytest.mark.parametrize("implementation", implementations("select_topk"))
over_paged_implementations = pytest.mark.parametrize("implementation", implementations("paged_select_topk"))


def select(implementation, case, k, **options):
    return np.asarray(run(select_topk, implementation, *case.args, k, k_scale=case.k_scale, **options))


def paged_select(implementation, case, k, **options):
    return np.asarray(run(paged_select_topk, implementation, *case.args, k, **options))


def tied(case):
    """The case with few different keys: long runs of equal scores, and through ReLU many exact zeros."""
    repeat = np.random.default_rng(0).integers(0, 5, case.k.shape[0])
    case.k = case.k[repeat]
    case.k_scale = None if case.k_scale is None else case.k_scale[repeat]
    case.weights = abs(case.weights)
    return case


def least_budget(function, *args, **options):
    with pytest.raises(ValueError, match="memory_budget must be at least") as error:
        function(*args, memory_budget=1, **options)
    return int(re.search(r"at least (\d+)", str(error.value)).group(1))


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("columns", [95, 96, 97, 192, 768], ids=["k-1", "k", "k+1", "2k", "8k"])
def test_is_the_topk_of_the_scores(implementation, columns):
    case = draw(0, 13, columns, ranges="random")
    logits = run(indexer_logits, implementation, *case.args)
    want = oracle.topk_indices(np.asarray(logits), 96, np.asarray(case.starts), np.asarray(case.ends))
    np.testing.assert_array_equal(select(implementation, case, 96), want)


@pytest.mark.needs_gpu
@over_implementations
@pytest.mark.parametrize("dtype", [E4M3, jnp.bfloat16], ids=["e4m3", "bf16"])
def test_is_the_topk_of_the_scores_large(implementation, dtype):
    case = draw(1, 1111, 70001, 32, 128, dtype)
    logits = run(indexer_logits, implementation, *case.args, k_scale=case.k_scale)
    want = oracle.topk_indices(np.asarray(logits), 2048, np.asarray(case.starts), np.asarray(case.ends))
    np.testing.assert_array_equal(select(implementation, case, 2048), want)


@pytest.mark.gpu
@over_implementations
def test_every_budget_has_the_same_bits(implementation):
    """From everything at once to one tile at a time, with ties across every border."""
    k, case = 200, tied(draw(2, 43, 2100, dtype=E4M3, ranges="random"))
    want = select(implementation, case, k)
    logits = run(indexer_logits, implementation, *case.args, k_scale=case.k_scale)
    bounds = np.asarray(case.starts), np.asarray(case.ends)
    np.testing.assert_array_equal(want, oracle.topk_indices(np.asarray(logits), k, *bounds))
    least = least_budget(select_topk, *case.args, k, k_scale=case.k_scale)
    seen = set()
    for budget in (least, least + 60_000):
        chunks, _ = SELECT_TOPK.resolve(None, *case.args, k, k_scale=case.k_scale, memory_budget=budget)
        seen.add((chunks.rows < 43, chunks.columns < 2100))
        np.testing.assert_array_equal(select(implementation, case, k, memory_budget=budget), want)
    assert (True, True) in seen
    with pytest.raises(ValueError, match=f"memory_budget must be at least {least} bytes here, got {least - 1}"):
        select_topk(*case.args, k, k_scale=case.k_scale, memory_budget=least - 1)


def test_a_refused_budget_says_what_would_do():
    """Also where cut columns, whose candidates are joined, would take more than whole ones."""
    case = draw(17, 64, 513, heads=1)
    least = least_budget(select_topk, *case.args, 4096)
    want = select("xla", case, 4096)
    np.testing.assert_array_equal(select("xla", case, 4096, memory_budget=least), want)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        select_topk(*case.args, 4096, memory_budget=least - 1)
    assert least < 2_100_000  # a tile of whole rows


@pytest.mark.gpu
@over_implementations
def test_parts_of_larger_arrays(implementation):
    """Inside a jitted caller, whose slices XLA may hand to a kernel by their address."""
    whole = draw(16, 40, 301, heads=32, dtype=E4M3)

    @jax.jit
    def selected(q, k, weights, starts, ends, scale):
        options = dict(k_scale=scale[1:], implementation=implementation)
        return select_topk(q[3:], k[1:], weights[3:], starts[3:], ends[3:] - 1, 48, **options)

    part = Ragged(whole.q[3:], whole.k[1:], whole.weights[3:], whole.starts[3:], whole.ends[3:] - 1, whole.k_scale[1:])
    got = np.asarray(selected(*whole.args, whole.k_scale))
    np.testing.assert_array_equal(got, select(implementation, part, 48))


@pytest.mark.gpu
@over_implementations
def test_chunk_equiv(implementation):
    """Any split of a prompt, each chunk over the keys so far and a tail of huge garbage, is the prompt in one shot."""
    length, k = 500, 48
    whole = draw(3, length, length)
    want = select(implementation, whole, k)
    tail = jnp.full((130, 32), 1e4)  # what an over-allocated cache may hold
    whole.k = jnp.concatenate([whole.k, tail])
    for start, stop in chunk_ranges(length, 97):
        np.testing.assert_array_equal(select(implementation, whole.rows(slice(start, stop)), k), want[start:stop])


def test_at_most_two_compilations():
    """20 chunks of a long prompt, the last one shorter."""
    prompt = draw(4, 999, 1024, heads=2)
    prompt.ends = jnp.arange(1, 1000, dtype=jnp.int32)
    before = topk._select._cache_size()
    for start, stop in chunk_ranges(999, 50):
        select_topk(*prompt.rows(slice(start, stop)).args, 16, implementation="xla")
    assert topk._select._cache_size() - before == 2


@pytest.mark.gpu
@over_implementations
def test_slices_of_a_batch(implementation):
    """Rows a to b of a tie-heavy batch, selected alone."""
    case = tied(draw(5, 300, 400, dtype=E4M3))
    whole = select(implementation, case, 64)
    for first, size in ((100, 7), (172, 128)):
        got = select(implementation, case.rows(slice(first, first + size)), 64)
        np.testing.assert_array_equal(got, whole[first : first + size])


@pytest.mark.gpu
@over_implementations
def test_repeat(implementation):
    case = tied(draw(6, 9, 700, dtype=E4M3))
    launches = [select(implementation, case, 100) for _ in range(20)]
    assert all(np.array_equal(launches[0], other) for other in launches)


@pytest.mark.gpu
@over_implementations
def test_padding_rows(implementation):
    """Rows that see nothing are all -1 and change no other row, whatever their queries hold."""
    real = draw(7, 5, 300)
    want = select(implementation, real, 32)
    pad = lambda x, value: jnp.concatenate([x, jnp.full((8, *x.shape[1:]), value, x.dtype)])  # noqa: E731
    padded = Ragged(
        pad(real.q, jnp.nan), real.k, pad(real.weights, jnp.nan), pad(real.starts, 0), pad(real.ends, 0), None
    )
    got = select(implementation, padded, 32)
    np.testing.assert_array_equal(got[:5], want)
    assert (got[5:] == -1).all()


@pytest.mark.gpu
@over_implementations
def test_rows_that_need_no_scores(implementation):
    """A row of at most k keys selects all of them: what `visible_indices` says without scoring."""
    case = draw(8, 40, 430)
    case.starts = jnp.arange(0, 400, 10, dtype=jnp.int32)
    case.ends = case.starts + jnp.arange(40, dtype=jnp.int32) - 3
    want = visible_indices(case.starts, case.ends, 36)
    np.testing.assert_array_equal(select(implementation, case, 36), want)


def test_work_follows_the_rows(monkeypatch):
    """Causal rows score about half the tiles; rows of two requests far apart score theirs only."""
    tiles = []
    tile = indexer_xla.score_tile

    def counted(*args):
        jax.debug.callback(lambda: tiles.append(1))
        return tile(*args)

    monkeypatch.setattr(indexer_xla, "score_tile", counted)
    jax.clear_caches()
    rows, columns = 8 * 16, 512 * 16
    causal = draw(9, rows, columns, heads=1)
    causal.ends = (jnp.arange(rows, dtype=jnp.int32) // 8 + 1) * 512
    budget = least_budget(select_topk, *causal.args, 16)
    chunks, _ = SELECT_TOPK.resolve(None, *causal.args, 16, memory_budget=budget)
    assert chunks.rows < rows and chunks.columns < columns
    for options in ({}, {"memory_budget": budget}):
        tiles.clear()
        jax.block_until_ready(select_topk(*causal.args, 16, implementation="xla", **options))
        jax.effects_barrier()
        assert len(tiles) == 16 * 17 // 2
    apart = causal.rows(slice(0, 8))
    apart.starts = jnp.array([0, 8000] * 4, jnp.int32)
    apart.ends = apart.starts + 100
    tiles.clear()
    jax.block_until_ready(select_topk(*apart.args, 16, implementation="xla"))
    jax.effects_barrier()
    assert len(tiles) == 2
    jax.clear_caches()


@pytest.mark.parametrize("budget", [1 << 30, 8 << 20], ids=["1GiB", "8MiB"])
def test_memory(budget):
    """8192 rows of 1M keys, compiled: within the budget, without an array of heads or booleans for them."""
    rows, columns, heads, k = 8192, 1 << 20, 64, 2048
    case = [
        jax.ShapeDtypeStruct(*x)
        for x in (
            ((rows, heads, 128), E4M3),
            ((columns, 128), E4M3),
            ((rows, heads), jnp.float32),
            ((rows,), jnp.int32),
            ((rows,), jnp.int32),
            ((columns,), jnp.float32),
        )
    ]
    selected = jax.jit(lambda *x: select_topk(*x[:5], k, k_scale=x[5], memory_budget=budget, implementation="xla"))
    compiled = selected.lower(*case).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= budget
    shapes = re.findall(r"(\w+)\[([\d,]+)\]", compiled.as_text())
    largest = {}
    for kind, shape in shapes:
        largest[kind] = max(largest.get(kind, 0), np.prod([int(n) for n in shape.split(",")]))
    assert largest["f32"] * 4 <= budget
    assert largest["pred"] <= rows * k


def test_memory_paged():
    """64 requests of 1M tokens, two queries each: within the budget, no copy of the cache."""
    budget = 8 << 20
    cache = jax.eval_shape(lambda: IndexCache.zeros(70000, 64, 128, dtype="float8_e4m3fn"))
    q, weights = jax.ShapeDtypeStruct((64, 2, 32, 128), E4M3), jax.ShapeDtypeStruct((64, 2, 32), jnp.float32)
    table, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 16384), (64,)))
    selected = jax.jit(lambda *x: paged_select_topk(*x, 2048, memory_budget=budget, implementation="xla"))
    compiled = selected.lower(q, cache, weights, table, lens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= budget


@pytest.mark.gpu
@over_paged_implementations
@pytest.mark.parametrize(("dtype", "page", "queries"), [(E4M3, 64, 1), (jnp.float32, 7, 3)], ids=["e4m3", "odd"])
def test_paged(implementation, dtype, page, queries):
    """Positions in the request, for lengths about k and far over it, under every budget."""
    k = 64
    case = draw_paged(10, [63, 64, 65, 2, 0, 1500], queries, dtype=dtype, page=page)
    logits = np.asarray(run(paged_indexer_logits, implementation, *case.args))
    want = np.stack([oracle.topk_indices(rows, k) for rows in logits])
    np.testing.assert_array_equal(paged_select(implementation, case, k), want)
    least = least_budget(paged_select_topk, *case.args, k)
    chunks, _ = PAGED_SELECT_TOPK.resolve(None, *case.args, k, memory_budget=least)
    assert chunks.rows == 1 and chunks.columns < 1500
    np.testing.assert_array_equal(paged_select(implementation, case, k, memory_budget=least), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, jnp.float32], ids=["e4m3", "float32"])
def test_paged_is_ragged(dtype):
    """A decode step selects what prefill selects for the same rows and keys."""
    case = draw_paged(11, [400, 333], 3, dtype=dtype, page=16)
    got = paged_select("xla", case, 50)
    for request in range(2):
        np.testing.assert_array_equal(got[request], select("xla", case.ragged(request), 50))


@pytest.mark.parametrize("k", [1, 40], ids=["k-1", "k-40"])
@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (4, 0), (0, 0)], ids=str)
def test_empty(rows, columns, k):
    case = draw(12, 4, 5).rows(slice(rows))
    got = jax.jit(select_topk, static_argnums=5)(case.q, case.k[:columns], *case.args[2:], k)
    assert got.shape == (rows, k) and got.dtype == jnp.int32 and bool((got == -1).all())


@pytest.mark.parametrize(("batch", "queries", "pages"), [(0, 1, 3), (2, 0, 3), (2, 1, 0)], ids=str)
def test_empty_paged(batch, queries, pages):
    cache = IndexCache.zeros(4, 16, 32, dtype="bfloat16")
    q, weights = jnp.zeros((batch, queries, 8, 32), jnp.bfloat16), jnp.zeros((batch, queries, 8))
    table, lens = jnp.zeros((batch, pages), jnp.int32), jnp.zeros(batch, jnp.int32)
    got = paged_select_topk(q, cache, weights, table, lens, 9)
    assert got.shape == (batch, queries, 9) and got.dtype == jnp.int32 and bool((got == -1).all())


def test_explain():
    """A composite explains its ops on the chunks that it would call them with."""
    case = jax.eval_shape(lambda: draw(13, 512, 100_000, 32, 128, E4M3).args)
    explanation = explain("select_topk", *case, 2048, memory_budget=64 << 20, device="cpu")
    assert [part.op for part in explanation.parts] == ["indexer_logits", "topk_indices", "topk_indices"]
    assert explanation.implementation == "xla" and explanation.config.columns < 100_000
    text = str(explanation)
    assert "select_topk on cpu" in text and "indexer_logits on cpu" in text
    paged = jax.eval_shape(lambda: draw_args_paged())
    explanation = explain("paged_select_topk", *paged, 64, device="sm_90")
    assert [part.op for part in explanation.parts] == ["paged_indexer_logits", "topk_indices"]
    assert {part.target.arch for part in explanation.parts} == {"sm_90"}


def draw_args_paged():
    cache = IndexCache.zeros(4, 16, 32, dtype="float32")
    return jnp.zeros((2, 1, 8, 32)), cache, jnp.zeros((2, 1, 8)), jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, jnp.int32)


ARGUMENTS = draw(14, 2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(topk=0), "topk must be in 1..4096, got 0"),
        (dict(topk=4097), "topk must be in 1..4096, got 4097"),
        (dict(topk=2, memory_budget=0), "memory_budget must be at least .* bytes here, got 0"),
        (dict(topk=2, implementation="fast"), "implementation must be None or one of"),
        (dict(topk=2, k_scale=jnp.ones(3)), "k_scale's shape"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input(as_user, options, message):
    with pytest.raises(ValueError, match=message):
        select_topk(*ARGUMENTS.args, **options)
