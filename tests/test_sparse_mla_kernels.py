"""The sparse MLA kernels below the public functions: tiling, splits, decoding, refusals, lowering, GPU runs."""

import collections

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from mla_cases import check, choose, normal, paged_cache, poisoned, same_bits
from tolerances import LSE, MLA_COSINE, cosine_distance

from pallas_kernels.sparse_mla import hopper, portable, widen
from pallas_kernels.sparse_mla.config import portable_config, shared_bytes, splits_that_fill
from pallas_kernels.sparse_mla.hopper_few_block import FewConfig, FewProblem, shared_words
from pallas_kernels.sparse_mla.merge import kept_by_sink, merge_splits
from pallas_kernels.sparse_mla.rows import column_chunks, position_slots
from pallas_kernels.sparse_mla.widen import attended
from pallas_kernels.target import CPU, target_of

Cache = collections.namedtuple("Cache", "nope scale rope")
Shape = jax.ShapeDtypeStruct
E4M3, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
ARCHS = ("sm_80", "sm_90", "sm_120", "gfx942", "gfx950")
PUBLISHED = dict(sm_scale=576**-0.5, v_dim=512)
DEVICES = {"sm_80": "NVIDIA A100", "sm_90": "NVIDIA H200", "sm_120": "NVIDIA RTX PRO 6000"}


def cache_shapes(dtype, *, pages=512, page=64, latent=512, rope=64):
    scale = Shape((pages, page, -(-latent // 128)), F32) if dtype == E4M3 else None
    return Cache(Shape((pages, page, latent), dtype), scale, Shape((pages, page, rope), BF16))


def call_shapes(heads, dtype, *, rows=8, topk=2048, q_dtype=BF16):
    return Shape((rows, heads, 576), q_dtype), cache_shapes(dtype), Shape((rows, topk), jnp.int32)


@pytest.mark.parametrize("block_d", [16, 128, 512])
@pytest.mark.parametrize(
    ("latent", "rope", "v_dim"), [(512, 64, 512), (512, 0, 512), (300, 64, 300), (64, 5, 40), (1, 1, 1)]
)
@pytest.mark.parametrize("as_cache", [True, False], ids=["cache", "array"])
def test_chunks_cover_every_column_once(latent, rope, v_dim, block_d, as_cache):
    width = latent + rope
    kv = cache_shapes(BF16, latent=latent, rope=rope) if as_cache else Shape((9, width), BF16)
    chunks = column_chunks(kv, width, v_dim, block_d)
    assert sorted(x for c in chunks for x in range(c.q_start, c.q_start + c.width)) == list(range(width))
    values = [c for c in chunks if c.is_value]
    assert chunks[: len(values)] == tuple(values)
    assert sum(c.width for c in values) == (latent if as_cache else v_dim)
    for chunk in chunks:
        assert chunk.size >= max(16, chunk.width) and chunk.size & (chunk.size - 1) == 0
        part = (kv.nope if chunk.is_value else kv.rope) if as_cache else kv
        assert chunk.start + chunk.width <= part.shape[-1]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, F32])
@pytest.mark.parametrize("widths", [(512, 64), (512, 0), (1024, 64), (40, 7)], ids=str)
def test_tiles_fit_every_target(arch, kv_dtype, widths):
    target = target_of(arch)
    for heads in (1, 8, 16, 20, 32, 64, 128):
        q_dtype = F32 if kv_dtype == F32 else BF16
        shape = dict(value_width=widths[0], tail_width=widths[1], q_dtype=q_dtype, kv_dtype=kv_dtype)
        config = portable_config(target, heads=heads, **shape)
        if config is None:  # rows of 1088 in e4m3 or float32 are too wide for 64 or 99 KiB
            assert widths[0] == 1024 and kv_dtype != BF16 and arch in ("sm_120", "gfx942")
            continue
        dtypes = jnp.dtype(q_dtype), jnp.dtype(kv_dtype)
        assert shared_bytes(target, config, *widths, *dtypes) <= target.shared_memory
        assert config.block_h >= 16 and config.block_k >= 16
        assert heads > 16 or config.block_h == 16  # few heads cost what they cost


@pytest.mark.parametrize("rows", [1, 7, 16, 128, 512, 5000])
@pytest.mark.parametrize("topk", [1, 63, 2048, 4096])
def test_splits_fill_the_device(rows, topk):
    target = target_of("sm_90")
    for heads in (8, 64, 128):
        config = portable_config(target, heads=heads, value_width=512, tail_width=64, q_dtype=BF16, kv_dtype=E4M3)
        splits = splits_that_fill(target, config, rows=rows, heads=heads, topk=topk)
        blocks = -(-topk // config.block_k)
        per_split = -(-blocks // splits)
        programs = rows * -(-heads // config.block_h)
        assert 1 <= splits <= blocks and (splits - 1) * per_split < blocks  # no split is empty
        assert splits == 1 or splits * programs <= 128 * config.programs_per_core
        assert programs > 1 or splits >= min(blocks, 32)


def test_e4m3_bits_are_exact():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    numbers = codes[np.isfinite(codes.astype(np.float32))]
    assert len(numbers) == 254
    decoded = portable._decode_e4m3(jnp.asarray(numbers))
    np.testing.assert_array_equal(np.asarray(decoded), numbers.astype(np.float32))


@pytest.mark.parametrize("splits", [2, 3, 32])
def test_merge_of_splits(splits):
    """Parts without keys, a row without any, and a sink of every kind."""
    rng = np.random.default_rng(splits)
    outs, lses = (
        rng.standard_normal((splits, 3, 4, 24), np.float32),
        9 * rng.standard_normal((splits, 3, 4), np.float32),
    )
    lses[0, 0], lses[:, 1] = -np.inf, -np.inf
    outs[np.isneginf(lses)] = 0.0
    sink = np.array([0.5, -np.inf, np.inf, 3e38], np.float32)
    out, lse = merge_splits(jnp.asarray(outs), jnp.asarray(lses), jnp.asarray(sink), F32, interpret=True)
    lses, sink = lses.astype(np.float64), sink.astype(np.float64)
    with np.errstate(over="ignore", divide="ignore"):
        total = np.exp(lses).sum(0)
        want_lse = np.log(total)
        safe_total = np.where(total > 0, total, 1.0)
        weights = np.exp(lses) / safe_total
        kept = 1.0 / (1.0 + np.exp(sink - np.log(safe_total)))
    want = np.einsum("smh,smhv->mhv", weights, outs) * kept[..., None]
    np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-6, atol=1e-5)


def test_sink_share_is_finite_for_all_values():
    lse = jnp.array([-jnp.inf, -1e30, 0.0, 80.0])[:, None]
    sink = jnp.array([-jnp.inf, -1e30, 0.0, 1e4, 3e38, jnp.inf])[None]
    share = np.asarray(kept_by_sink(lse, sink))
    assert np.isfinite(share).all() and (share >= 0).all() and (share <= 1).all()
    assert (share[:, 0] == 1).all() and (share[:, -1] == 0).all() and share[2, 2] == 0.5


@pytest.mark.parametrize("num_splits", [1, 2, 5, 32])
def test_split_counts_agree(num_splits):
    rng = np.random.default_rng(3)
    q, kv, indices = normal(rng, (3, 5, 40), F32), normal(rng, (400, 40), F32), choose(rng, 3, 150, 400)
    indices[1], indices[2, :100] = -1, -1
    options = dict(sm_scale=0.2, v_dim=24)
    config = portable.PortableConfig(block_h=16, block_k=16, block_d=16)
    got = portable.run(CPU, q, kv, jnp.asarray(indices), num_splits=num_splits, config=config, **options)
    check(got, oracle.sparse_mla(q, kv, indices, **options), implementation="portable")


REFUSALS = {
    "old device": ("sm_75", 16, cache_shapes(BF16), 512, "needs sm_80"),
    "other AMD": ("gfx90a", 16, cache_shapes(BF16), 512, "gfx942 and gfx950"),
    "fnuz": ("gfx942", 16, cache_shapes(jnp.float8_e4m3fnuz), 512, "float8_e4m3fn, not"),
    "values past the latent": ("sm_90", 16, cache_shapes(BF16), 576, "v_dim 576 is past the latent part"),
    "offsets of 2 to 4 GiB": ("sm_90", 16, cache_shapes(E4M3, pages=100_000), 512, "32-bit offsets"),
    "too wide": ("gfx942", 16, Shape((9, 576 * 16), BF16), 512, "no tile of its keys fits 65536 bytes"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_with_the_reason(case):
    arch, heads, kv, v_dim, reason = REFUSALS[case]
    width = kv.shape[-1] if isinstance(kv, Shape) else 576
    q, indices = Shape((4, heads, width), BF16), Shape((4, 64), jnp.int32)
    assert reason in portable.refuse_sparse_mla(target_of(arch), q, kv, indices, sm_scale=1.0, v_dim=v_dim)
    assert portable.refuse_sparse_mla(target_of("sm_90"), *call_shapes(16, E4M3), **PUBLISHED) is None


def lowered(arch, function, *shapes):
    """The StableHLO of `function` for a GPU that is not here."""
    kind, platform = DEVICES.get(arch, arch), "rocm" if arch.startswith("gfx") else "cuda"
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind=kind, num_cores=None, platform="gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="older jax lowers for whatever GPU it assumes")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, F32])
def test_lowers_for_every_target(arch, kv_dtype):
    q_dtype = F32 if kv_dtype == F32 else BF16
    for splits in (1, 4):
        text = lowered(
            arch,
            lambda *args, splits=splits: portable.run(target_of(arch), *args, num_splits=splits, **PUBLISHED),
            *call_shapes(20, kv_dtype, q_dtype=q_dtype),
        )
        assert text.count("custom_call @__gpu$xla.gpu.triton") == (1 if splits == 1 else 2)


def with_rope(shapes, dtype):
    q, cache, indices = shapes
    return q, cache._replace(rope=Shape(cache.rope.shape, dtype)), indices


HOPPER_REFUSALS = {
    "other device": ("sm_80", call_shapes(64, BF16), 512, "needs sm_90, got sm_80"),
    "float32 queries": ("sm_90", call_shapes(64, BF16, q_dtype=F32), 512, "queries are bfloat16, not float32"),
    "float32 keys": ("sm_90", call_shapes(64, F32), 512, "bfloat16 or float8_e4m3fn, not float32"),
    "narrow values": ("sm_90", call_shapes(64, BF16), 256, "not 512 + 64 with 256"),
    "float32 rope": ("sm_90", with_rope(call_shapes(64, E4M3), F32), 512, "rope columns are bfloat16, not float32"),
    "fits": ("sm_90", call_shapes(64, BF16), 512, None),
    "fits e4m3": ("sm_90", call_shapes(64, E4M3), 512, None),
}


@pytest.mark.parametrize("case", HOPPER_REFUSALS)
def test_hopper_refuses_with_the_reason(case):
    arch, shapes, v_dim, reason = HOPPER_REFUSALS[case]
    refusal = hopper.refuse_sparse_mla(target_of(arch), *shapes, sm_scale=1.0, v_dim=v_dim)
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_hopper_pads_few_heads_to_eights(kv_dtype):
    most = 32 if kv_dtype == BF16 else 24
    for heads, columns in ((1, 8), (8, 8), (12, 16), (20, 24), (32, 32)):
        if heads <= most:
            config = hopper.config_sparse_mla(target_of("sm_90"), *call_shapes(heads, kv_dtype), **PUBLISHED)
            assert config == FewConfig(columns, 132)
    more = hopper.config_sparse_mla(target_of("sm_90"), *call_shapes(most + 1, kv_dtype), **PUBLISHED)
    assert isinstance(more, hopper.Config)


@pytest.mark.parametrize("is_e4m3", [False, True])
@pytest.mark.parametrize("tail_tiles", [0, 1])
@pytest.mark.parametrize("rows", [1, 4096])
def test_hopper_ring_holds_two_key_blocks(rows, tail_tiles, is_e4m3):
    """One that is multiplied, and one on its way."""
    for columns in (8, 16, 24, 32):
        problem = FewProblem(
            rows=rows,
            heads=columns,
            topk=2048,
            num_keys=4096,
            splits=1,
            scale_log2=1.0,
            value_stride=512,
            tail_stride=128,
            tail_start=0,
            tail_tiles=tail_tiles,
            is_e4m3=is_e4m3,
            columns=columns,
            cores=132,
        )
        tiles = sorted(tile for group in problem.groups for tile in group)
        assert tiles == list(range((4 if is_e4m3 else 8) + tail_tiles))
        assert problem.stages >= 2 * len(problem.groups)
        assert 4 * problem.teams * sum(shared_words(problem).values()) <= 232448 - 1024


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="older jax lowers for whatever GPU it assumes")
@pytest.mark.parametrize(("heads", "rows"), [(8, 8), (20, 8), (32, 8), (65, 8), (8, 300), (16, 300)])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_hopper_lowers(kv_dtype, heads, rows):
    """With lengths and without, in one split and in several, on rows and on positions, for more rows than blocks."""
    q, cache, indices = call_shapes(heads, kv_dtype, rows=rows, topk=130)

    def attend(q, cache, indices, lengths, block_table, seq_lens):
        whole = hopper.run(q, cache, indices, **PUBLISHED)
        pages = dict(block_table=block_table, seq_lens=seq_lens)
        return whole, hopper.run(q, cache, indices, lengths=lengths, num_splits=2, **pages, **PUBLISHED)

    requests = Shape((4, 16), jnp.int32), Shape((4,), jnp.int32)
    text = lowered("sm_90", attend, q, cache, indices, Shape(indices.shape[:1], jnp.int32), *requests)
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    "rows, heads, splits",
    [(1, 64, 16), (16, 64, 8), (64, 64, 2), (128, 64, 1), (1, 128, 16), (1, 16, 32), (16, 16, 8), (128, 8, 1)],
)
def test_hopper_splits_fill_the_device(rows, heads, splits):
    unit = 64 if heads <= 16 else 128
    assert hopper.splits_that_fill(132, rows=rows, heads=heads, topk=2048, unit=unit) == splits


@pytest.mark.parametrize(
    ("rows", "pages", "dtype", "is_widened"),
    [
        (512, 64, E4M3, True),
        (511, 64, E4M3, False),  # not worth a launch
        (4096, 8192, E4M3, True),
        (4096, 8193, E4M3, False),  # too much memory
        (512, 2049, E4M3, False),  # more keys than an eighth of the indices
        (512, 64, BF16, False),
    ],
)
def test_caches_are_widened_for_many_rows(rows, pages, dtype, is_widened):
    q, cache = Shape((rows, 64, 576), BF16), cache_shapes(dtype, pages=pages)
    indices = Shape((rows, 2048), jnp.int32)
    kv = jax.eval_shape(attended, cache, indices)
    assert (kv != cache) == is_widened
    assert kv.nope == (Shape(cache.nope.shape, BF16) if is_widened else cache.nope)
    target = target_of("sm_90")
    for kernel in (hopper, portable):
        config = kernel.config_sparse_mla(target, q, cache, indices, **PUBLISHED)
        assert config == kernel.config_sparse_mla(target, q, kv, indices, **PUBLISHED)
    few = hopper.config_sparse_mla(target, Shape((rows, 16, 576), BF16), cache, indices, **PUBLISHED)
    assert few == FewConfig(16, 132)


@pytest.mark.parametrize("scales", ["ue8m0", "float32"])
def test_widened_keys(scales, monkeypatch):
    """What the portable kernel makes of e4m3 keys, made before; NaN in what nobody selects stays there."""
    monkeypatch.setattr(widen, "_LEAST_INDICES", 0)
    rng = np.random.default_rng(7)
    cache, rows = paged_cache(rng, 8, 4, "e4m3", scales=scales)
    indices = choose(rng, 9, 30, 30)
    q, cache = normal(rng, (9, 20, 576)), poisoned(cache, np.arange(30))
    wide = attended(cache, jnp.asarray(indices))
    assert wide.nope.dtype == BF16 and wide.scale is None
    got = portable.sparse_mla(q, cache, jnp.asarray(indices), **PUBLISHED)
    want = oracle.sparse_mla(q, rows.reshape(-1, 576), indices, **PUBLISHED)
    check(got, want, implementation="portable", lse_atol=LSE if scales == "ue8m0" else 2e-3)
    same_bits(got, portable.sparse_mla(q, wide, jnp.asarray(indices), **PUBLISHED))
    if scales == "ue8m0":
        read = np.asarray(wide.nope, np.float32).reshape(-1, 512)[:30]
        np.testing.assert_array_equal(read, rows.reshape(-1, 576)[:30, :512])


@pytest.mark.needs_gpu
@pytest.mark.parametrize("heads", [8, 20, 32, 64, 100])
@pytest.mark.parametrize("scales", ["ue8m0", "float32"])
@pytest.mark.parametrize("kernel", [hopper, portable], ids=["hopper", "portable"])
def test_prefill_from_e4m3_on_gpu(kernel, scales, heads):
    """Enough rows for the cache to be widened: they agree with float64, and every launch has the same bits."""
    rng = np.random.default_rng(8)
    keys, rows, lanes = 1280, 1024, 1024
    cache, dequantised = paged_cache(rng, keys // 64, 64, "e4m3", scales=scales)
    cache = poisoned(cache, np.arange(keys - 30))
    indices = choose(rng, rows, lanes, keys - 30)
    indices[5] = -1
    indices[6, 3:] = -1
    q, taken = normal(rng, (rows, heads, 576)), np.array([0, 5, 6, 511, 1023])
    first = kernel.sparse_mla(q, cache, jnp.asarray(indices), **PUBLISHED)
    want = oracle.sparse_mla(q[taken], dequantised.reshape(-1, 576), indices[taken], **PUBLISHED)
    check([x[taken] for x in first], want, implementation="kernel", lse_atol=LSE if scales == "ue8m0" else 2e-3)
    for _ in range(19):
        same_bits(first, kernel.sparse_mla(q, cache, jnp.asarray(indices), **PUBLISHED))


HOPPER_CASES = {
    "8 heads": dict(heads=8),
    "20 heads": dict(heads=20),
    "32 heads, splits": dict(heads=32, splits=3),
    "more rows than blocks": dict(heads=16, rows=300, topk=130),
    "24 heads, more rows than blocks": dict(heads=24, rows=140, topk=200),
    "12 heads, more rows than blocks": dict(heads=12, rows=270, topk=300),
    "no rope": dict(heads=16, rope=0),
    "no rope, more rows than blocks": dict(heads=8, rows=300, topk=200, rope=0),
    "no rope, positions, splits": dict(heads=24, rows=4, queries=2, splits=3, rope=0),
    "positions, more splits than blocks": dict(heads=8, rows=80, queries=4, splits=2),
    "one key": dict(heads=16, topk=1),
    "positions": dict(heads=16, rows=6, queries=2),
    "positions, splits": dict(heads=8, rows=4, queries=4, splits=4),
    "64 heads, positions": dict(heads=64, rows=6, queries=2, topk=2048),
    "100 heads, positions, splits": dict(heads=100, rows=4, queries=4, splits=2),
}


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("case", HOPPER_CASES)
def test_hopper_on_gpu(case, kind):
    """Holes, lengths, a sink, pages of nobody, NaN in what is not named; 20 launches with the same bits."""
    shape = dict(rows=5, topk=300, splits=1, queries=0, rope=64) | HOPPER_CASES[case]
    rows, heads, topk, width, keys = shape["rows"], shape["heads"], shape["topk"], 512 + shape["rope"], 2048
    rng = np.random.default_rng(11)
    q, indices, sink = normal(rng, (rows, heads, width)), choose(rng, rows, topk, keys), normal(rng, (heads,), F32)
    indices[rng.random(indices.shape) < 0.1], indices[0, topk // 2 :] = -1, keys + 7
    lengths = rng.integers(0, topk + 1, rows).astype(np.int32)
    lengths[:2] = topk, 0
    cache, plain = paged_cache(rng, keys // 64, 64, kind, rope=shape["rope"])
    options, pages, slots = dict(sm_scale=width**-0.5, v_dim=512), {}, indices
    if shape["queries"]:
        requests = rows // shape["queries"]
        table = np.stack([rng.permutation(keys // 64) for _ in range(requests)]).astype(np.int32)
        table[:, 3], table[:, 5] = -1, keys
        pages = dict(block_table=jnp.asarray(table), seq_lens=jnp.full(requests, keys - 100, jnp.int32))
        by_request = indices.reshape(requests, shape["queries"], topk)
        slots = position_slots(by_request, *pages.values(), page_size=64, num_pages=keys // 64)
        slots = np.asarray(slots).reshape(rows, topk)
    named = [row[:count] for row, count in zip(slots, lengths, strict=True)]
    cache = poisoned(cache, np.unique([x for row in named for x in row if 0 <= x < keys]))

    def launch():
        return hopper.run(
            q,
            cache,
            jnp.asarray(indices),
            lengths=jnp.asarray(lengths),
            num_splits=shape["splits"],
            sink=sink,
            **pages,
            **options,
        )

    got = launch()
    want = oracle.sparse_mla(q, plain.reshape(keys, -1), slots, lengths=lengths, sink=sink, **options)
    check(got, want, implementation="hopper")
    for _ in range(19):
        same_bits(launch(), got)


# Factors of an e4m3 cache's scales, [keys, 4].
SCALES = {
    "any": lambda rng, keys: np.ones((keys, 4)),
    "tiny": lambda rng, keys: np.full((keys, 4), 2.0**-40),
    "great": lambda rng, keys: np.full((keys, 4), 2.0**20),
    "far apart": lambda rng, keys: 2.0 ** rng.integers(-24, 1, (keys, 4)),
    "few great keys": lambda rng, keys: np.where(rng.random((keys, 1)) < 0.05, 2.0**14, np.ones(4)),
    "growing": lambda rng, keys: 2.0 ** np.linspace(-30, 10, keys)[:, None] * np.ones(4),
    "zeros between": lambda rng, keys: 1.0 * (rng.random((keys, 4)) < 0.7),
}


@pytest.mark.needs_gpu
@pytest.mark.parametrize(("heads", "count"), [(8, 3), (16, 3), (32, 3), (64, 3), (8, 270), (16, 270)])
@pytest.mark.parametrize("scales", SCALES)
def test_hopper_scales_of_any_size_on_gpu(scales, heads, count):
    """f16 holds less than scales may be: whatever they are, the result is as good, relative to the greatest key."""
    rng = np.random.default_rng(12)
    keys = 640
    factors = SCALES[scales](rng, keys)
    size = factors.max()
    cache, rows = paged_cache(rng, keys // 64, 64, "e4m3", scales="float32")
    scale = (np.asarray(cache.scale).reshape(keys, 4) * factors).astype(np.float32)
    rope = (np.asarray(cache.rope, np.float32) * size).astype(ml_dtypes.bfloat16)
    latent = np.asarray(cache.nope, np.float32).reshape(keys, 512) * np.repeat(scale, 128, -1)
    rows = np.concatenate([latent, rope.reshape(keys, 64).astype(np.float32)], -1)
    cache = Cache(cache.nope, jnp.asarray(scale.reshape(-1, 64, 4)), jnp.asarray(rope))
    q = (normal(rng, (count, heads, 576), F32) / size).astype(BF16)
    indices = choose(rng, count, 300, keys)
    indices[0, ::7] = -1
    out, lse = hopper.run(q, cache, jnp.asarray(indices), **PUBLISHED)
    want_out, want_lse = oracle.sparse_mla(q, rows, indices, **PUBLISHED)
    assert cosine_distance(out, want_out) < MLA_COSINE
    np.testing.assert_allclose(np.asarray(out, np.float64) / size, want_out / size, rtol=2**-8, atol=1e-2)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-6, atol=2e-3)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kind", ["bf16", "float32"])
def test_many_rows_on_gpu(kind):
    """More rows than a grid's second axis may have, and 20 launches with the same bits."""
    rng = np.random.default_rng(5)
    dtype = BF16 if kind == "bf16" else F32
    q, kv, indices = normal(rng, (70_000, 8, 40), dtype), normal(rng, (300, 40), dtype), choose(rng, 70_000, 20, 300)
    options = dict(sm_scale=0.2, v_dim=24)
    first = portable.sparse_mla(q, kv, jnp.asarray(indices), **options)
    rows = np.array([0, 1, 65_535, 65_536, 69_999])
    check([x[rows] for x in first], oracle.sparse_mla(q[rows], kv, indices[rows], **options), implementation="portable")
    for _ in range(19):
        again = portable.sparse_mla(q, kv, jnp.asarray(indices), **options)
        assert all((x.view(jnp.uint8) == y.view(jnp.uint8)).all() for x, y in zip(first, again, strict=True))
