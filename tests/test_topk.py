"""topk_indices, to the bit: fault kinds E (not the top-k, not reproducible), F (edges), P and Q; joining candidates."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import implementations
from index_cases import INT_MAX, INT_MIN, adversarial_rows, run

from dsa_jax import topk_xla
from dsa_jax.topk import merge_candidates, topk_indices

over_implementations = pytest.mark.parametrize("implementation", implementations("topk_indices"))


def check(implementation, scores, k, starts=None, ends=None):
    bounds = [None if x is None else jnp.asarray(np.asarray(x, np.int32)) for x in (starts, ends)]
    got = np.asarray(run(topk_indices, implementation, jnp.asarray(scores), k, *bounds))
    assert got.dtype == np.int32
    want = oracle.topk_indices(np.asarray(scores, np.float32), k, starts, ends)
    for row in range(len(want)):
        np.testing.assert_array_equal(got[row], want[row], err_msg=f"row {row}")


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(("k", "columns"), [(256, 255), (256, 256), (256, 257), (256, 512), (256, 2048), (2048, 8320)])
def test_topk_adversarial(implementation, k, columns):
    check(implementation, np.stack(list(adversarial_rows(columns).values())), k)


@pytest.mark.gpu
@over_implementations
def test_ties_at_the_border_repeat(implementation):
    """500 equal scores about the k-th place: the lowest columns, the same in 20 launches."""
    rng = np.random.default_rng(1)
    scores = np.concatenate([np.full(500, 1.0), 2 + rng.random(900), rng.random(1600)]).astype(np.float32)
    scores = np.stack([rng.permutation(scores) for _ in range(4)])
    check(implementation, scores, 1000)
    launches = [np.asarray(run(topk_indices, implementation, jnp.asarray(scores), 1000)) for _ in range(20)]
    assert all(np.array_equal(launches[0], other) for other in launches)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("k", [1, 16, 512, 1000, 2051, 4096])
def test_topk_edges_k(implementation, k):
    rows = adversarial_rows(4500, seed=k)
    check(implementation, np.stack([rows[name] for name in ("normal", "relu", "some NaN", "any bits")]), k)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("k", [7, 64])
def test_topk_edges_ranges(implementation, k):
    """Rows of length 0 to k + 1 at several starts, bounds out of the array, inverted ones: columns of the whole row."""
    columns = 400
    bounds = [(start, start + length) for start in (0, 1, 255, 300) for length in (0, 1, k - 1, k, k + 1)]
    bounds += [(-3, 5), (390, 500), (columns, columns), (0, -1), (50, 20), (INT_MIN, INT_MAX), (INT_MAX, INT_MIN)]
    rows = list(adversarial_rows(columns, seed=2).values())
    scores = np.stack([rows[i % 3] for i in range(len(bounds))])
    check(implementation, scores, k, *np.array(bounds).T)


@pytest.mark.gpu
@over_implementations
def test_topk_edges_row_starts(implementation):
    """Long rows that begin late, with greater scores outside of them."""
    starts, ends = np.array([0, 1, 4095, 5000]), np.full(4, 6000)
    scores = np.random.default_rng(3).standard_normal((4, 6100)).astype(np.float32)
    column = np.arange(6100)[None]
    scores[(column < starts[:, None]) | (column >= 6000)] = 1e30
    check(implementation, scores, 512, starts, ends)


@pytest.mark.gpu
@over_implementations
def test_topk_edges_nan(implementation):
    """From none to all of 300 scores; the bit pattern of a NaN must never come out as a column."""
    rng = np.random.default_rng(4)
    scores = rng.standard_normal((12, 300)).astype(np.float32)
    for i, nans in enumerate((0, 1, 63, 64, 299, 300)):
        for row, nan in zip(scores[2 * i : 2 * i + 2], (np.nan, -np.nan), strict=True):
            row[rng.permutation(300)[:nans]] = nan
    check(implementation, scores, 64)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("columns", [1, 33])
def test_topk_edges_narrow(implementation, columns):
    check(implementation, np.random.default_rng(4).standard_normal((3, columns)).astype(np.float32), 40)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "float16"])
def test_narrow_floats(implementation, dtype):
    check(implementation, jnp.asarray(np.random.default_rng(5).standard_normal((5, 700)), dtype), 100)


@pytest.mark.gpu
@over_implementations
def test_batch_invariant(implementation):
    """A row alone, and in batches that cross a group of rows: tie-heavy, so that any tiling of ties would show."""
    k, columns = 128, 1024
    rows = topk_xla.CPU_GROUP // columns + 37
    scores = np.random.default_rng(6).integers(0, 4, (rows, columns)).astype(np.float32)
    whole = np.asarray(run(topk_indices, implementation, jnp.asarray(scores), k))
    np.testing.assert_array_equal(whole[::97], oracle.topk_indices(scores[::97], k))
    for first, size in ((3, 1), (rows - 128, 128)):
        part = run(topk_indices, implementation, jnp.asarray(scores[first : first + size]), k)
        np.testing.assert_array_equal(part, whole[first : first + size])


@pytest.mark.parametrize("columns", [1 << 17, 1 << 20], ids=["128k", "1M"])
def test_long_rows(columns):
    rows = adversarial_rows(columns, seed=7)
    check("xla", np.stack([rows["relu"], rows["one-ulp ramp"]]), 2048)


@pytest.mark.needs_gpu
@over_implementations
@pytest.mark.parametrize("columns", [16384, 65536, 1 << 20], ids=["16k", "64k", "1M"])
def test_long_rows_on_gpu(implementation, columns):
    rows = adversarial_rows(columns, seed=8)
    check(implementation, np.stack(list(rows.values())), 2048)


@pytest.mark.needs_gpu
@over_implementations
def test_offsets_past_2_to_31(implementation):
    """8200 rows of 2^18 columns are 2^31 and more scores; the last rows must be read where they are."""
    rows, columns = 8200, 1 << 18
    scores = jax.random.normal(jax.random.key(0), (rows, columns), jnp.float32)
    got = np.asarray(run(topk_indices, implementation, scores, 256))
    some = np.array([0, 1, 4097, rows - 2, rows - 1])
    np.testing.assert_array_equal(got[some], oracle.topk_indices(np.asarray(scores[some]), 256))


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)], ids=str)
def test_empty(shape):
    got = jax.jit(lambda scores: topk_indices(scores, 3))(jnp.zeros(shape))
    assert got.shape == (shape[0], 3) and got.dtype == jnp.int32
    assert bool((got == -1).all())


def test_x64_changes_nothing():
    scores = np.stack(list(adversarial_rows(300).values()))
    with jax.enable_x64(True):
        check("xla", scores, 64)


@pytest.mark.gpu
@over_implementations
def test_merge_candidates(implementation):
    """Candidates of shards of columns give the top-k of all columns, ties across a border included."""
    k, borders = 96, [0, 90, 500, 1500]
    scores = np.stack(list(adversarial_rows(1500, seed=9).values()))
    values, columns = [], []
    for first, stop in itertools.pairwise(borders):
        shard = jnp.asarray(scores[:, first:stop])
        chosen = run(topk_indices, implementation, shard, k)
        values.append(jnp.take_along_axis(shard, jnp.maximum(chosen, 0), axis=1))  # anything where there is none
        columns.append(jnp.where(chosen < 0, -1, chosen + first))
    both = jnp.concatenate(values, axis=1), jnp.concatenate(columns, axis=1)
    got_values, got = (np.asarray(x) for x in run(merge_candidates, implementation, *both, k))
    want = oracle.topk_indices(scores, k)
    np.testing.assert_array_equal(got, want)
    expected = np.where(want < 0, -np.inf, np.take_along_axis(scores, np.maximum(want, 0), axis=1))
    np.testing.assert_array_equal(got_values, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=0), "k must be in 1..4096, got 0"),
        (dict(k=4097), "k must be in 1..4096, got 4097"),
        (dict(k=True), "k must be in 1..4096, got True"),
        (dict(k=2.0), "k must be in 1..4096, got 2.0"),
        (dict(scores=jnp.zeros(5)), "scores's shape"),
        (dict(scores=jnp.zeros((2, 5), jnp.int32)), "scores's dtype"),
        (dict(starts=jnp.zeros(3, jnp.int32)), "starts's shape"),
        (dict(ends=jnp.zeros(2)), "ends's dtype"),
        (dict(implementation="cuda"), "implementation must be None or one of"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input(as_user, change, message):
    arguments = dict(scores=jnp.zeros((2, 5)), k=2, starts=None, ends=None, implementation=None) | change
    positional = [arguments.pop(name) for name in ("scores", "k", "starts", "ends")]
    with pytest.raises(ValueError, match=message):
        topk_indices(*positional, **arguments)
