"""The index score kernels below the public functions: their schedule, their decoding, what they lower to, GPU runs."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh
from tolerances import LOGITS_COSINE, cosine_distance

from pallas_kernels.indexer_logits import hopper, own_share, portable
from pallas_kernels.indexer_logits.problem import Problem, paged_problem, ragged_problem
from pallas_kernels.indexer_logits.schedule import schedule
from pallas_kernels.target import target_of

Cache = collections.namedtuple("Cache", "k scale")
E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
KERNELS = {"hopper": hopper, "portable": portable}


def values(rng, shape, dtype=jnp.float32, low=-2.0, high=2.0):
    return jnp.asarray(rng.uniform(low, high, shape), jnp.float32).astype(dtype)


def ragged_case(m, n, heads, dim, dtype, *, scale=True, seed=0):
    """(q, k, weights, starts, ends), k_scale: random ranges, some of them empty or past either end."""
    rng = np.random.default_rng(seed)
    ends = jnp.asarray(rng.integers(0, n + 9, m), jnp.int32)
    starts = jnp.asarray(rng.integers(-9, n // 2 + 1, m), jnp.int32)
    args = values(rng, (m, heads, dim), dtype), values(rng, (n, dim), dtype), values(rng, (m, heads)), starts, ends
    return args, values(rng, (n,), low=0.5) if scale else None


def paged_case(batch, queries, heads, dim, dtype, *, page, pages, seed=0):
    """(q, cache, weights, block_table, seq_lens): mixed lengths; table entries past a request's length are outside."""
    rng = np.random.default_rng(seed)
    seq_lens = rng.integers(0, pages * page + 1, batch)
    seq_lens[0] = pages * page
    table = rng.permutation(batch * pages + 3)[: batch * pages].reshape(batch, pages)
    used = np.arange(pages)[None] * page < seq_lens[:, None]
    table = np.where(used, table, np.where(np.arange(pages) % 2, 10**9, -(10**9))[None])
    cache = Cache(values(rng, (batch * pages + 3, page, dim), dtype), values(rng, (batch * pages + 3, page), low=0.5))
    q, weights = values(rng, (batch, queries, heads, dim), dtype), values(rng, (batch, queries, heads))
    return q, cache, weights, jnp.asarray(table, jnp.int32), jnp.asarray(seq_lens, jnp.int32)


def paged_oracle(q, cache, weights, table, seq_lens):
    page, queries = cache.k.shape[1], q.shape[1]
    k, scale = (np.asarray(x).astype(np.float64) for x in cache)
    rows = []
    for request, length in enumerate(np.asarray(seq_lens)):
        pages = np.where(np.arange(table.shape[1]) * page < length, table[request], 0)
        ends = length - queries + 1 + np.arange(queries)
        keys = k[pages].reshape(-1, q.shape[-1])
        rows.append(oracle.indexer_logits(q[request], keys, weights[request], 0 * ends, ends, scale[pages].reshape(-1)))
    return np.stack(rows)


RANGES = {
    "causal": lambda rng, m, n: (np.zeros(m, int), np.arange(m) + n - m + 1),
    "random": lambda rng, m, n: (rng.integers(-9, n, m), rng.integers(-9, n + 9, m)),
    "full": lambda rng, m, n: (np.zeros(m, int), np.full(m, n)),
    "empty": lambda rng, m, n: (np.full(m, n), np.zeros(m, int)),
    "one row": lambda rng, m, n: (np.zeros(m, int), np.where(np.arange(m) == m // 2, n, 0)),
}


@pytest.fixture(scope="module")
def jitted_schedule():
    names = ("group", "keys", "blocks", "group_cost", "chunk", "interpret")
    return jax.jit(schedule, static_argnames=names)


def test_schedule_of_pages_is_that_of_their_ranges(jitted_schedule):
    """A request's queries end one key apart, whatever the length; requests may be shorter than their queries."""
    q, lengths = jnp.zeros((9, 3, 1, 32), E4M3), jnp.asarray([0, 1, 2, 3, 64, 65, 699, 700, 999], jnp.int32)
    sizes = dict(group=2, keys=64, blocks=132, interpret=not on_gpu())
    paged = Problem(q, q, None, lengths, q, None, None, 700)
    ragged = Problem(q, q, *paged.ranges(), q, None, None, 700)
    for mine, want in zip(*map(jax.tree.leaves, (jitted_schedule(x, **sizes) for x in (paged, ragged))), strict=True):
        np.testing.assert_array_equal(mine, want)


@pytest.mark.gpu
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("m, n, group, blocks", [(37, 700, 4, 5), (8, 64, 2, 132), (1, 5000, 1, 7)])
@pytest.mark.parametrize("group_cost", [0, 5])
def test_schedule_covers_every_tile_once_in_equal_shares(ranges, m, n, group, blocks, group_cost, jitted_schedule):
    starts, ends = RANGES[ranges](np.random.default_rng(0), m, n)
    as_rows = [jnp.asarray(x, jnp.int32)[None] for x in (starts, ends)]
    q = jnp.zeros((1, m, 1, 32), E4M3)
    problem = Problem(q, q, *as_rows, q, None, None, n)
    sizes = dict(group=group, keys=64, blocks=blocks, group_cost=group_cost, chunk=4)
    plan = jax.tree.map(np.asarray, jitted_schedule(problem, **sizes, interpret=not on_gpu()))
    groups, tiles = -(-m // group), -(-n // 64)
    counts = np.zeros((2, groups, tiles), int)
    for kind, (share_of, walk_of) in enumerate(((plan.visits, plan.visited), (plan.fills, plan.unseen))):
        costs, group_cost = [], group_cost if kind == 0 else 0
        for block in range(blocks):
            share = share_of(block)
            walks = [(group, walk_of(group, share)) for group in range(share.first, share.stop)]
            for number, walk in walks:
                for step in range(walk.begin, walk.end):
                    counts[kind, number, int(walk.tile(step))] += 1
            lengths = [walk.end - walk.begin for _, walk in walks if walk.end > walk.begin]
            costs.append(sum(lengths) + group_cost * len(lengths))
        # A block that goes on with another's group pays for it again.
        assert max(costs) - min(costs) <= 1 + 2 * group_cost
    np.testing.assert_array_equal(counts.sum(0), 1)
    columns = np.arange(tiles * 64)
    seen = (columns >= starts[:, None]) & (columns < np.minimum(ends, n)[:, None])
    seen = np.pad(seen, ((0, groups * group - m), (0, 0))).reshape(groups, group, tiles, 64).any((1, 3))
    assert (counts[0] >= seen).all()


def test_e4m3_decode_is_exact():
    codes = jnp.arange(256, dtype=jnp.uint8)
    want = np.asarray(lax.bitcast_convert_type(codes, E4M3)).astype(np.float32) * 2.0**-8
    np.testing.assert_array_equal(np.asarray(portable._decode_e4m3(codes)).astype(np.float32), want)


@pytest.mark.parametrize("m, n, heads, dim", [(5, 131, 16, 32), (3, 70, 5, 64), (2, 64, 192, 128)])
def test_portable_decoded_equals_native(m, n, heads, dim):
    args, k_scale = ragged_case(m, n, heads, dim, E4M3)
    config = portable.Config(block_keys=32, keys_per_program=64)
    want = oracle.indexer_logits(*args, k_scale)
    for decode_fp8 in (False, True):
        config = dataclasses.replace(config, decode_fp8=decode_fp8)
        got = portable.solve(ragged_problem(*args, k_scale), config, interpret=not on_gpu())[0]
        assert cosine_distance(got, want) < LOGITS_COSINE


@pytest.mark.parametrize("size, refused", [(2**31, False), (2**31 + 128, True), (2**32, True), (2**32 + 128, False)])
def test_offsets_4gib_portable_refuses_what_would_wrap(size, refused):
    shapes = [jax.ShapeDtypeStruct(shape, E4M3) for shape in ((1, 32, 128), (size // 128, 128))]
    assert (portable.refuse_indexer_logits(target_of("sm_90"), *shapes) is not None) == refused


def test_hopper_refuses_with_reason():
    q, k = (jax.ShapeDtypeStruct(shape, E4M3) for shape in ((1, 32, 128), (64, 128)))
    assert hopper.refuse_indexer_logits(target_of("sm_90"), q, k) is None
    assert "sm_90" in hopper.refuse_indexer_logits(target_of("sm_80"), q, k)
    odd_pages = Cache(jax.ShapeDtypeStruct((4, 16, 128), E4M3), None)
    assert "16" in hopper.refuse_paged_indexer_logits(target_of("sm_90"), q, odd_pages)


def lowered(function, arch, *shapes):
    """The StableHLO of `function` compiled for a GPU that is not here."""
    kind = {"sm_90": "NVIDIA H200"}.get(arch, arch)
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind=kind, num_cores=None, platform="gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="older jax lowers for whatever GPU it assumes")
@pytest.mark.parametrize("heads, dim, dtype", [(64, 128, E4M3), (5, 32, E4M3), (128, 128, BF16)])
def test_lowers_for_sm_90(heads, dim, dtype):
    args, k_scale = ragged_case(7, 301, heads, dim, dtype)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*args, k_scale))
    for name, target in (("hopper", "mosaic_gpu"), ("portable", "triton")):
        kernel = KERNELS[name].indexer_logits
        text = lowered(lambda *a, f=kernel: f(*a[:-1], k_scale=a[-1], target="sm_90"), "sm_90", *shapes)
        assert target in text


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="older jax lowers for whatever GPU it assumes")
@pytest.mark.parametrize("groups, launches", [(2, 1), (own_share.MAX_GROUPS, 1), (own_share.MAX_GROUPS + 1, 2)])
@pytest.mark.parametrize("op", ["indexer_logits", "paged_indexer_logits"])
def test_blocks_make_their_schedule_up_to_some_groups(op, groups, launches):
    tiny = (
        paged_case(2, 1, 128, 32, E4M3, page=64, pages=2)
        if op.startswith("paged")
        else ragged_case(2, 64, 128, 32, E4M3)[0]
    )
    arrays, tree = jax.tree.flatten(tiny)
    # One query of 128 heads is a tile, and of prefill four tiles are a group.
    rows = groups if op.startswith("paged") else 4 * groups
    shapes = [jax.ShapeDtypeStruct((rows, *x.shape[1:]) if x.shape[0] == 2 else x.shape, x.dtype) for x in arrays]

    def run(*arrays):
        return getattr(hopper, op)(*jax.tree.unflatten(tree, arrays), target="sm_90")

    text = lowered(run, "sm_90", *shapes)
    assert (text.count("mosaic_gpu_v2"), text.count("xla.gpu.triton")) == (1, launches - 1)


def on_gpu():
    return jax.default_backend() == "gpu"


def runnable(kernel, op, *args, **options):
    reason = getattr(KERNELS[kernel], f"refuse_{op}")(target_of(), *args, **options)
    if reason:
        pytest.skip(reason)
    return getattr(KERNELS[kernel], op)


GPU_SHAPES = [
    (97, 1000, 64, 128, E4M3),
    (130, 4097, 32, 128, E4M3),
    (61, 777, 16, 128, E4M3),
    (33, 555, 128, 64, E4M3),
    (5, 63, 5, 32, E4M3),
    (1, 1, 64, 128, E4M3),
    (97, 1000, 64, 128, BF16),
    (61, 777, 24, 32, BF16),
]


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m, n, heads, dim, dtype", GPU_SHAPES)
def test_ragged_on_gpu(kernel, m, n, heads, dim, dtype):
    for scale in (True, False):
        args, k_scale = ragged_case(m, n, heads, dim, dtype, scale=scale)
        got = jax.jit(runnable(kernel, "indexer_logits", *args))(*args, k_scale=k_scale)
        assert cosine_distance(got, oracle.indexer_logits(*args, k_scale)) < LOGITS_COSINE


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "batch, queries, heads, dim, dtype, page",
    [(b, q, h, d, t, p) for b, q, h, d, t, p in [
        (5, 1, 32, 128, E4M3, 64), (3, 2, 64, 128, E4M3, 64), (4, 3, 32, 128, E4M3, 32), (2, 6, 64, 128, E4M3, 256),
        (3, 4, 16, 64, BF16, 128), (2, 5, 24, 32, E4M3, 64), (3, 1, 64, 128, E4M3, 16),
        (140, 1, 16, 32, E4M3, 64), (1030, 1, 16, 32, E4M3, 64), (300, 3, 64, 32, E4M3, 32),
    ]],
)  # fmt: skip
def test_pages_on_gpu(kernel, batch, queries, heads, dim, dtype, page):
    args = paged_case(batch, queries, heads, dim, dtype, page=page, pages=1024 // page + 1)
    got = jax.jit(runnable(kernel, "paged_indexer_logits", *args))(*args)
    assert cosine_distance(got, paged_oracle(*args)) < LOGITS_COSINE


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_poison_outside_ranges(kernel):
    (q, k, weights, _, _), k_scale = ragged_case(70, 900, 64, 128, E4M3)
    starts, ends = jnp.full(70, 130, jnp.int32), jnp.full(70, 701, jnp.int32)
    run = jax.jit(runnable(kernel, "indexer_logits", q, k))
    want = run(q, k, weights, starts, ends, k_scale=k_scale)
    outside = (jnp.arange(900) < 130) | (jnp.arange(900) >= 701)
    k = jnp.where(outside[:, None], jnp.asarray(jnp.nan, E4M3), k)
    got = run(q, k, weights, starts, ends, k_scale=jnp.where(outside, jnp.nan, k_scale))
    np.testing.assert_array_equal(got, want)
    nan_key = run(q, k.at[200].set(jnp.nan), weights, starts, ends, k_scale=k_scale)
    assert jnp.isnan(nan_key[:, 200]).all() and not jnp.isnan(nan_key[:, 201:]).any()


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_repeat_20_launches_and_batch_invariant(kernel):
    (q, k, weights, starts, ends), k_scale = ragged_case(257, 3001, 32, 128, E4M3)
    run = jax.jit(runnable(kernel, "indexer_logits", q, k))
    want = run(q, k, weights, starts, ends, k_scale=k_scale)
    for _ in range(20):
        np.testing.assert_array_equal(run(q, k, weights, starts, ends, k_scale=k_scale), want)
    for rows in (slice(5, 6), slice(3, 5), slice(1, 8), slice(200, 232)):
        part = run(q[rows], k, weights[rows], starts[rows], ends[rows], k_scale=k_scale)
        np.testing.assert_array_equal(part, want[rows])


@pytest.mark.needs_gpu
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_hopper_20_launches_of_many_groups(heads):
    """Causal, so that blocks go from group to group all the time: a tile may not get the scales of the next group's."""
    (q, k, weights, _, _), k_scale = ragged_case(4096, 4096, heads, 128, E4M3)
    args = q, k, weights, jnp.zeros(4096, jnp.int32), jnp.arange(1, 4097, dtype=jnp.int32), k_scale
    runnable("hopper", "indexer_logits", q, k)
    configs = [hopper.Config(), hopper.config_indexer_logits(target_of(), q, k), hopper.Config(query_tiles=2, stages=4)]
    runs = [
        jax.jit(lambda *args, config=config: hopper.solve.__wrapped__(ragged_problem(*args), config, num_sms=132))
        for config in configs
    ]
    want = runs[0](*args)
    for run in runs:
        for _ in range(20):
            assert jnp.array_equal(run(*args), want)


@pytest.mark.parametrize("config", [hopper.Config(stages=10), hopper.Config(stages=7, query_tiles=2)], ids=str)
def test_hopper_stages_are_always_the_same_warpgroups(config):
    """Others failed on an H200, where a request's tiles went round the ring."""
    args, k_scale = ragged_case(8, 64, 32, 128, E4M3)
    with pytest.raises(AssertionError):
        hopper.solve.__wrapped__(ragged_problem(*args, k_scale), config, num_sms=132)


@pytest.mark.needs_gpu
def test_next_n_hopper_bits_do_not_depend_on_it():
    q, cache, weights, table, _ = paged_case(3, 4, 64, 128, E4M3, page=64, pages=9)
    seq_lens = jnp.full(3, 9 * 64, jnp.int32)
    run = jax.jit(runnable("hopper", "paged_indexer_logits", q, cache, weights, table, seq_lens))
    table = jnp.arange(27, dtype=jnp.int32).reshape(3, 9)
    together = run(q, cache, weights, table, seq_lens)
    for i in range(4):
        alone = run(q[:, i : i + 1], cache, weights[:, i : i + 1], table, seq_lens - 3 + i)
        np.testing.assert_array_equal(together[:, i : i + 1], alone)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("batch, queries", [(1, 1), (5, 3), (200, 2), (1000, 1), (None, 1), (None, 77), (None, 8000)])
def test_hopper_bits_do_not_depend_on_who_makes_the_schedule(batch, queries, monkeypatch):
    if batch is None:
        args, k_scale = ragged_case(queries, 700, 64, 32, E4M3)
        problem = ragged_problem(*args, k_scale)
    else:
        args = paged_case(batch, queries, 64, 32, E4M3, page=64, pages=9, seed=batch)
        problem = paged_problem(*args)
    runnable("hopper", "indexer_logits", problem.q, problem.k)

    def run():
        return jax.jit(lambda problem: hopper.solve.__wrapped__(problem, hopper.Config(), num_sms=132))(problem)

    want = run()
    monkeypatch.setattr(own_share, "MAX_GROUPS", 0)
    np.testing.assert_array_equal(run(), want)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_4gib(kernel):
    rows, columns = 8200, 300_000  # 2.46e9 logits
    rng = np.random.default_rng(0)
    q, k = values(rng, (rows, 16, 32), E4M3), values(rng, (columns, 32), E4M3)
    weights, ends = values(rng, (rows, 16)), jnp.full(rows, columns, jnp.int32)
    run = jax.jit(runnable(kernel, "indexer_logits", q, k))
    logits = run(q, k, weights, 0 * ends, ends)
    for row in (0, 4321, rows - 1):
        want = oracle.indexer_logits(q[row, None], k, weights[row, None], [0], [columns])
        assert cosine_distance(logits[row, None], want) < LOGITS_COSINE
