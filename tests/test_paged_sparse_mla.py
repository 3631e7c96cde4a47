"""paged_sparse_mla against float64: page sizes, tables, cache types, splits of the keys, and merge_attention."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import implementations
from mla_cases import INT_MAX, INT_MIN, SCALE, check, choose, normal, paged_cache, poisoned, run, same_bits
from tolerances import LSE

from dsa_jax.cache import LatentCache, to_slots
from dsa_jax.mla import merge_attention, paged_sparse_mla, sparse_mla
from dsa_jax.mla_xla import GATHER_BYTES

over_implementations = pytest.mark.parametrize("implementation", implementations("paged_sparse_mla"))
PUBLISHED = dict(sm_scale=SCALE, v_dim=512)


class Requests:
    """Requests of seq_lens keys, in pages drawn at random from a cache with some to spare; unused slots are NaN."""

    def __init__(self, seed, seq_lens, *, page_size, kind="bf16", queries=1, heads=8, lanes=40, scales="ue8m0"):
        rng = np.random.default_rng(seed)
        self.seq_lens = np.array(seq_lens, np.int32)
        pages = -(-self.seq_lens // page_size)
        self.cache, rows = paged_cache(rng, int(pages.sum()) + 5, page_size, kind, scales=scales)
        # Past its pages a request's table is stale: page 0, other requests' pages, and numbers of no page at all.
        stale = rng.choice([-1, 0, 1, 2, INT_MAX, INT_MIN, self.cache.nope.shape[0]], (len(seq_lens), max(pages) + 1))
        self.table = stale.astype(np.int32)
        shuffled = iter(rng.permutation(self.cache.nope.shape[0]))
        for request, count in enumerate(pages):
            self.table[request, :count] = [next(shuffled) for _ in range(count)]
        self.indices = np.stack([choose(rng, queries, lanes, int(length)) for length in self.seq_lens])
        q_dtype = jnp.float32 if kind == "float32" else jnp.bfloat16
        self.q = normal(rng, (len(seq_lens), queries, heads, 576), q_dtype)
        self.keys = [rows[self.table[b, :n]].reshape(-1, 576)[:length] for b, n, length in self._sizes(pages)]
        slots = [self.slots_of(b)[:length] for b, _, length in self._sizes(pages)]
        self.cache = poisoned(self.cache, np.concatenate(slots))

    def slots_of(self, request):
        size = self.cache.nope.shape[1]
        return (self.table[request].astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)

    def _sizes(self, pages):
        return zip(range(len(pages)), pages, self.seq_lens, strict=True)

    def args(self):
        return self.q, self.cache, *map(jnp.asarray, (self.indices, self.table, self.seq_lens))

    def want(self, lengths=None, sink=None, **options):
        rows = [
            oracle.sparse_mla(q, keys, indices, lengths=None if lengths is None else lengths[b], sink=sink, **options)
            for b, (q, keys, indices) in enumerate(zip(self.q, self.keys, self.indices, strict=True))
        ]
        return tuple(np.stack(x) for x in zip(*rows, strict=True))


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(
    ("page_size", "kind"),
    [
        *((size, "bf16") for size in (1, 2, 61, 64, 69, 256)),
        *((size, "e4m3") for size in (1, 16, 61, 64, 256)),
        (64, "float32"),
    ],
)
def test_pages(implementation, page_size, kind):
    """Random page order, odd page counts, stale table ends, every unused slot NaN."""
    case = Requests(page_size, [130, 1, 39, 40, 41, 320], page_size=page_size, kind=kind)
    got = run(paged_sparse_mla, implementation, *case.args(), **PUBLISHED)
    check(got, case.want(**PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
def test_pages_float32_scales(implementation):
    """With scales that are no powers of two a kernel may round the key to bf16; plain jnp does not."""
    case = Requests(0, [130, 7, 320], page_size=64, kind="e4m3", scales="float32")
    got = run(paged_sparse_mla, implementation, *case.args(), **PUBLISHED)
    check(got, case.want(**PUBLISHED), lse_atol=LSE if implementation == "xla" else 1e-3, implementation=implementation)


@pytest.mark.gpu
@over_implementations
def test_pages_of_packed_requests(implementation):
    """A request of one page beside one of five; the table is as wide as the longest, and exactly full."""
    case = Requests(1, [16, 80], page_size=16, queries=3)
    case.table = case.table[:, :5]
    got = run(paged_sparse_mla, implementation, *case.args(), **PUBLISHED)
    check(got, case.want(**PUBLISHED), implementation=implementation)
    case.seq_lens = case.seq_lens + np.array([0, 1], np.int32)  # a key more than the table holds
    case.indices[1, :, 0] = 80
    got = run(paged_sparse_mla, implementation, *case.args(), **PUBLISHED)
    check(got, case.want(**PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
def test_pages_around_topk(implementation):
    """Contexts of k-1, k, k+1, 2k and 2k+1 keys for 2048 lanes."""
    case = Requests(2, [2047, 2048, 2049, 4096, 4097], page_size=64, kind="e4m3", heads=4, lanes=2048)
    got = run(paged_sparse_mla, implementation, *case.args(), **PUBLISHED)
    check(got, case.want(**PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
def test_mla_masks_positions(implementation):
    """Positions at or past seq_len, of unmapped pages and of pages that do not exist are as if they were not there."""
    case = Requests(3, [100, 100, 100, 100, 0], page_size=16, queries=2)
    case.indices[0, :, :25] = [100, 101, 111, 112, 2147480000, INT_MAX, -1, -2, INT_MIN] * 2 + [100] * 7
    case.indices[4] = np.arange(40)  # every position of a request without keys
    want = [x.copy() for x in case.want(**PUBLISHED)]
    for request, page in ((1, -1), (2, case.cache.nope.shape[0]), (3, INT_MAX // 16 + 1)):
        case.table[request, 2:4] = page
        kept = case.indices[request].copy()
        kept[(kept >= 32) & (kept < 64)] = -1
        want_out, want_lse = oracle.sparse_mla(case.q[request], case.keys[request], kept, **PUBLISHED)
        want[0][request], want[1][request] = want_out, want_lse
    got = run(paged_sparse_mla, implementation, *case.args(), **PUBLISHED)
    check(got, want, implementation=implementation)
    case.seq_lens[4] = -4
    same_bits(run(paged_sparse_mla, implementation, *case.args(), **PUBLISHED), got)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 7, 16, 32, 64])
def test_splits(implementation, num_splits):
    """Any number of parts gives what the whole gives, with sinks and lengths, for 41 lanes that no split divides."""
    case = Requests(4, [300, 41, 0, 5], page_size=16, queries=2, heads=16, lanes=41)
    case.indices[0, :, :16] = -1  # the first parts of some splits hold no key
    lengths, sink = np.array([[41, 39], [17, 1], [41, 0], [3, 41]], np.int32), np.linspace(-4, 60, 16, dtype=np.float32)
    options = dict(lengths=jnp.asarray(lengths), sink=jnp.asarray(sink), num_splits=num_splits, **PUBLISHED)
    got = run(paged_sparse_mla, implementation, *case.args(), **options)
    check(got, case.want(lengths=lengths, sink=sink, **PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize("num_splits", [1, 2, 4, 8, 16, 32])
def test_repeat(implementation, num_splits):
    case = Requests(5, [300, 70], page_size=16, lanes=64)
    args = case.args()
    launches = [run(paged_sparse_mla, implementation, *args, num_splits=num_splits, **PUBLISHED) for _ in range(20)]
    for launch in launches[1:]:
        same_bits(launch, launches[0])
    check(launches[0], case.want(**PUBLISHED), implementation=implementation)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(("num_splits", "kind"), [(1, "e4m3"), (4, "bf16")])
def test_batch_invariant(implementation, num_splits, kind):
    """With num_splits given, a row alone, and in 2, 7, 32 and 257 rows, has the same bits."""
    seq_lens = np.random.default_rng(6).integers(1, 90, 257)
    case = Requests(6, seq_lens, page_size=16, kind=kind, heads=4, lanes=24)
    q, cache, indices, table, lens = case.args()
    function = functools.partial(run, paged_sparse_mla, implementation, num_splits=num_splits, **PUBLISHED)
    whole = function(q, cache, indices, table, lens)
    for rows in (1, 2, 7, 32):
        for first in (0, 3, 257 - rows):
            part = slice(first, first + rows)
            same_bits(function(q[part], cache, indices[part], table[part], lens[part]), [x[part] for x in whole])


@pytest.mark.gpu
@over_implementations
def test_poison_padded_requests(implementation):
    """One jitted step with all, some and no real requests: real ones keep their bits, padded ones are empty."""
    case = Requests(7, [50, 3, 90, 16], page_size=16)
    q, cache, indices, table, lens = case.args()
    step = jax.jit(functools.partial(run, paged_sparse_mla, implementation, num_splits=2, **PUBLISHED))
    whole = step(q, cache, indices, table, lens)
    for real in (4, 2, 0, 1, 4):
        row = jnp.arange(4) < real
        q_step, table_step = q.at[real:].set(jnp.nan), jnp.where(row[:, None], table, 0)
        out, lse = step(q_step, cache, indices, table_step, jnp.where(row, lens, 0))
        same_bits((out[:real], lse[:real]), (whole[0][:real], whole[1][:real]))
        assert not np.asarray(out[real:]).any() and np.isneginf(np.asarray(lse[real:])).all()


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(
    ("batch", "queries", "lanes", "pages"), [(0, 1, 8, 2), (2, 0, 8, 2), (2, 1, 0, 2), (2, 1, 8, 0)]
)
@pytest.mark.parametrize("num_splits", [None, 3])
def test_empty(implementation, batch, queries, lanes, pages, num_splits):
    cache = LatentCache.zeros(3, 16, 512, 64, dtype="bfloat16")
    q, indices = jnp.ones((batch, queries, 4, 576), jnp.bfloat16), jnp.zeros((batch, queries, lanes), jnp.int32)
    table, lens = jnp.zeros((batch, pages), jnp.int32), jnp.full(batch, 20, jnp.int32)
    step = jax.jit(functools.partial(run, paged_sparse_mla, implementation, num_splits=num_splits, **PUBLISHED))
    out, lse = step(q, cache, indices, table, lens)
    assert out.shape == (batch, queries, 4, 512) and out.dtype == jnp.bfloat16 and not np.asarray(out).any()
    assert lse.shape == (batch, queries, 4) and np.isneginf(np.asarray(lse)).all()


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "float32"])
def test_equals_sparse_mla_on_slots(kind):
    case = Requests(8, [50, 300], page_size=16, kind=kind, queries=3)
    q, cache, indices, table, _ = case.args()
    slots = to_slots(indices.reshape(6, -1), jnp.repeat(jnp.arange(2), 3), table, 16)
    out, lse = sparse_mla(q.reshape(6, 8, 576), cache, slots, implementation="xla", **PUBLISHED)
    got = paged_sparse_mla(*case.args(), implementation="xla", **PUBLISHED)
    same_bits(got, (out.reshape(2, 3, 8, 512), lse.reshape(2, 3, 8)))


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
def test_memory(kind):
    """A decode step over a cache of a million keys takes memory for its tile, not for a second, wider cache."""
    cache = jax.eval_shape(functools.partial(LatentCache.zeros, 1 << 14, 64, 512, 64, dtype=kind))
    # Rows enough for several tiles: XLA would unroll the loop over one.
    q = jax.ShapeDtypeStruct((32, 1, 64, 576), jnp.bfloat16)
    rest = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((32, 1, 2048), (32, 1 << 14), (32,))]
    step = jax.jit(functools.partial(paged_sparse_mla, implementation="xla", **PUBLISHED))
    memory = step.lower(q, cache, *rest).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * GATHER_BYTES


@pytest.mark.needs_gpu
@over_implementations
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_offsets_4gib(implementation, kind):
    """The last pages of a cache of more than 2^32 bytes and numbers."""
    near, rows = paged_cache(np.random.default_rng(9), 3, 64, kind)
    pages = 140_000  # 4.6e9 latent numbers

    def far(array):
        return None if array is None else jnp.zeros((pages, *array.shape[1:]), array.dtype).at[-3:].set(array)

    cache = LatentCache(nope=far(near.nope), scale=far(near.scale), rope=far(near.rope))
    rng = np.random.default_rng(10)
    q, indices = normal(rng, (1, 1, 64, 576)), choose(rng, 1, 128, 190)[None]
    table = jnp.array([[pages - 3, pages - 2, pages - 1]], jnp.int32)
    got = run(paged_sparse_mla, implementation, q, cache, jnp.asarray(indices), table, jnp.array([190]), **PUBLISHED)
    want = oracle.sparse_mla(q[0], rows.reshape(-1, 576), indices[0], **PUBLISHED)
    check([x[0] for x in got], want, implementation=implementation)


@pytest.mark.needs_gpu
@over_implementations
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (3, 2), (64, 1)])
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("page_size", [1, 61, 64, 256])
def test_published_sizes(implementation, heads, batch, queries, kind, page_size):
    seq_lens = np.random.default_rng(11).integers(1, 6000, batch)
    case = Requests(12, seq_lens, page_size=page_size, kind=kind, queries=queries, heads=heads, lanes=2048)
    got = run(paged_sparse_mla, implementation, *case.args(), **PUBLISHED)
    check(got, case.want(**PUBLISHED), implementation=implementation)


BAD = {
    "q rank": (dict(q=jnp.zeros((2, 4, 96))), r"q's shape must be \[B, Q, H, D\]"),
    "cache": (dict(cache=jnp.zeros((9, 96))), "cache must be a LatentCache"),
    "cache width": (dict(q=jnp.zeros((2, 1, 4, 97))), r"cache's width R \+ dr must be q's last axis, 97, got 64 \+ 32"),
    "indices": (dict(indices=jnp.zeros((2, 2, 5), jnp.int32)), r"indices's shape must be \[B, Q, K\] = \[2, 1, any\]"),
    "table": (dict(block_table=jnp.zeros((3, 2), jnp.int32)), r"block_table's shape must be \[B, P\] = \[2, any\]"),
    "table dtype": (dict(block_table=jnp.zeros((2, 2), jnp.int16)), "block_table's dtype must be int32, got int16"),
    "seq_lens": (dict(seq_lens=jnp.zeros(3, jnp.int32)), r"seq_lens's shape must be \[B\] = \[2\], got \[3\]"),
    "lengths": (dict(lengths=jnp.zeros(2, jnp.int32)), r"lengths's shape must be \[B, Q\] = \[2, 1\]"),
    "v_dim": (dict(v_dim=97), "v_dim must be in 1..96, q's last axis, got 97"),
    "num_splits": (dict(num_splits=0), "num_splits must be None or at least 1, got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(as_user, case):
    args = dict(
        q=jnp.zeros((2, 1, 4, 96)),
        cache=LatentCache.zeros(3, 16, 64, 32, dtype="float32"),
        indices=jnp.zeros((2, 1, 5), jnp.int32),
        block_table=jnp.zeros((2, 2), jnp.int32),
        seq_lens=jnp.zeros(2, jnp.int32),
        sm_scale=0.1,
        v_dim=64,
    )
    changed, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        paged_sparse_mla(**(args | changed))


def test_merge_equals_whole():
    """Parts of very different weight, cut anywhere, merge to the whole."""
    rng = np.random.default_rng(13)
    q, kv = normal(rng, (3, 4, 96), jnp.float32), normal(rng, (90, 96), jnp.float32)
    kv = kv.at[60:].multiply(40.0)
    indices = np.tile(np.arange(90, dtype=np.int32), (3, 1))
    options = dict(sm_scale=0.5, v_dim=64)
    parts = [np.where((indices >= a) & (indices < b), indices, -1) for a, b in ((0, 7), (7, 60), (60, 60), (60, 90))]
    outs, lses = zip(*(sparse_mla(q, kv, jnp.asarray(part), **options) for part in parts), strict=True)
    out, lse = merge_attention(jnp.stack(outs), jnp.stack(lses))
    want_out, want_lse = oracle.sparse_mla(q, kv, indices, **options)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(out), want_out, rtol=0, atol=2e-4 * np.abs(want_out).max())


def test_merge_drops_empty_parts():
    outs = jnp.array([[[1.0, 2.0]], [[jnp.nan, jnp.inf]], [[3.0, 6.0]]])
    lses = jnp.array([[0.5], [-jnp.inf], [0.5]])
    out, lse = merge_attention(outs, lses)
    np.testing.assert_allclose(np.asarray(out), [[2.0, 4.0]], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(lse), [0.5 + np.log(2)], rtol=1e-6)


@pytest.mark.parametrize("parts", [0, 1, 4])
def test_merge_of_nothing_is_empty(parts):
    out, lse = merge_attention(jnp.full((parts, 2, 3, 5), jnp.nan, jnp.bfloat16), jnp.full((parts, 2, 3), -jnp.inf))
    assert out.shape == (2, 3, 5) and out.dtype == jnp.bfloat16 and not np.asarray(out).any()
    assert lse.shape == (2, 3) and np.isneginf(np.asarray(lse)).all()


def test_merge_of_one_part_is_that_part():
    rng = np.random.default_rng(14)
    outs, lses = normal(rng, (1, 5, 3, 8)), normal(rng, (1, 5, 3), jnp.float32) * 1e4
    same_bits(merge_attention(outs, lses), (outs[0], lses[0]))


def test_merge_bad_input(as_user):
    with pytest.raises(ValueError, match=r"lses's shape must be \[S, ...\] = \[2, 3\], got \[2, 4\]"):
        merge_attention(jnp.zeros((2, 3, 5)), jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match="lses's dtype must be float32"):
        merge_attention(jnp.zeros((2, 3, 5)), jnp.zeros((2, 3), ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="outs' rank must be at least 2"):
        merge_attention(jnp.zeros(2), jnp.zeros(()))
