"""Paged caches: fault kinds D (offsets), H (paged addressing), I (padding and reused buffers), J (empty batches)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.cache import (
    MAX_SLOTS,
    IndexCache,
    LatentCache,
    flat,
    gather_index_keys,
    read_latents,
    to_slots,
    write_index_keys,
    write_latents,
)
from dsa_jax.quant import quantize

DTYPES = ["float8_e4m3fn", "bfloat16", "float32"]
PAGE_SIZES = [1, 16, 61, 64, 69, 256]
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

jit_write_keys = jax.jit(write_index_keys, static_argnames="scale_format")
jit_write_latents = jax.jit(write_latents, static_argnames="scale_format")
jit_read = jax.jit(read_latents)
jit_to_slots = jax.jit(to_slots, static_argnums=3)
jit_gather = jax.jit(gather_index_keys, static_argnums=3)
jit_quantize = jax.jit(quantize, static_argnames=("block", "scale_format"))


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def poisoned(cache):
    """The same cache filled with NaN."""
    return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), cache)


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def stored(x, dtype, block):
    """What a cache of `dtype` holds for x, read back in float32."""
    if dtype != "float8_e4m3fn":
        return np.asarray(x.astype(dtype), np.float32)
    values, scale = jit_quantize(x, block=block, scale_format="ue8m0")
    return np.asarray(values, np.float32) * np.repeat(np.asarray(scale), block, axis=-1)[..., : x.shape[-1]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_round_trip(page_size, dtype):
    """Writer and reader agree on every slot, in any order of pages, at page sizes that divide nothing."""
    cache = poisoned(LatentCache.zeros(5, page_size, 256, 8, dtype=dtype))
    slots = int32(np.random.default_rng(page_size).permutation(cache.num_slots))
    ckv, k_rope = normal(cache.num_slots, 256), normal(cache.num_slots, 8, seed=1)
    got = jit_read(jit_write_latents(cache, slots, ckv, k_rope), slots)
    rope_dtype = "float32" if dtype == "float32" else "bfloat16"
    np.testing.assert_array_equal(got[:, :256], stored(ckv, dtype, 128))
    np.testing.assert_array_equal(got[:, 256:], stored(k_rope, rope_dtype, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
class TestWrites:
    SLOTS = (3, -1, 40, INT_MIN, 0, 48, INT_MAX, -48, -7)  # of 48: three are slots

    def test_padding_touches_nothing_else(self, dtype):
        """Slot 0 and the last slot are where a careless -1 or an uninitialised 0 lands."""
        index = poisoned(IndexCache.zeros(3, 16, 32, dtype=dtype))
        latent = poisoned(LatentCache.zeros(3, 16, 256, 8, dtype=dtype))
        slots = int32(self.SLOTS)
        k, ckv, k_rope = normal(9, 32), normal(9, 256), normal(9, 8)
        real = int32([0, 2, 4])
        want_index = jit_write_keys(index, slots[real], k[real])
        want_latent = jit_write_latents(latent, slots[real], ckv[real], k_rope[real])
        assert_same_bits(jit_write_keys(index, slots, k), want_index)
        assert_same_bits(jit_write_latents(latent, slots, ckv, k_rope), want_latent)
        untouched = np.setdiff1d(np.arange(48), [3, 40, 0])
        for cache, before in ((want_index, index), (want_latent, latent)):
            for after, old in zip(flat(cache), flat(before), strict=True):
                if after is not None:
                    assert_same_bits(after[untouched], old[untouched])

    def test_all_padding_leaves_the_cache_alone(self, dtype):
        index = poisoned(IndexCache.zeros(2, 16, 32, dtype=dtype))
        latent = poisoned(LatentCache.zeros(2, 16, 256, 8, dtype=dtype))
        slots = int32([-1] * 6 + [32])
        assert_same_bits(jit_write_keys(index, slots, normal(7, 32)), index)
        assert_same_bits(jit_write_latents(latent, slots, normal(7, 256), normal(7, 8)), latent)

    def test_no_tokens(self, dtype):
        index = poisoned(IndexCache.zeros(2, 16, 32, dtype=dtype))
        latent = poisoned(LatentCache.zeros(2, 16, 256, 8, dtype=dtype))
        assert_same_bits(jit_write_keys(index, int32([]), normal(0, 32)), index)
        assert_same_bits(jit_write_latents(latent, int32([]), normal(0, 256), normal(0, 8)), latent)

    def test_donated_buffers_in_turn(self, dtype):
        """Long, short, empty and padded writes through one donated buffer give what fresh buffers give."""
        donating = jax.jit(write_index_keys, donate_argnums=0)
        reused = IndexCache.zeros(3, 16, 32, dtype=dtype)
        fresh = IndexCache.zeros(3, 16, 32, dtype=dtype)
        for step, slots in enumerate([range(40), [5, 47], [], [-1, 9, -1, 200]]):
            slots, k = int32(list(slots)), normal(len(slots), 32, seed=step)
            reused = donating(reused, slots, k)
            fresh = jit_write_keys(fresh, slots, k)
            assert_same_bits(reused, fresh)

    def test_nan_stays_in_its_slot(self, dtype):
        cache = IndexCache.zeros(2, 16, 32, dtype=dtype)
        k = normal(3, 32).at[1, 5].set(jnp.nan)
        clean = jit_write_keys(cache, int32([4, 6]), k[jnp.asarray([0, 2])])
        got = jit_write_keys(cache, int32([4, 5, 6]), k)
        others = np.setdiff1d(np.arange(32), [5])
        for after, want in zip(flat(got), flat(clean), strict=True):
            if after is not None:
                assert_same_bits(after[others], want[others])
        assert np.isnan(np.asarray(flat(got)[0], np.float32)[5]).any()


@pytest.mark.gpu
class TestQuantisedWrites:
    def test_bytes_are_those_of_quantize(self):
        k, ckv = normal(20, 128), normal(20, 512, seed=1)
        slots = int32(np.arange(20) * 3)
        index = jit_write_keys(IndexCache.zeros(4, 16, 128, dtype="float8_e4m3fn"), slots, k)
        latent = LatentCache.zeros(4, 16, 512, 0, dtype="float8_e4m3fn")
        latent = jit_write_latents(latent, slots, ckv, jnp.zeros((20, 0)))
        values, scale = jit_quantize(k, scale_format="ue8m0")
        assert_same_bits([flat(index)[0][slots], flat(index)[1][slots]], [values, scale[:, 0]])
        values, scale = jit_quantize(ckv, scale_format="ue8m0")
        assert_same_bits([flat(latent)[0][slots], flat(latent)[1][slots]], [values, scale])

    @pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
    def test_scale_format(self, scale_format):
        cache = LatentCache.zeros(1, 16, 256, 8, dtype="float8_e4m3fn")
        cache = jit_write_latents(cache, int32(range(16)), normal(16, 256), normal(16, 8), scale_format=scale_format)
        mantissa, _ = np.frexp(np.asarray(cache.scale))
        assert (mantissa == 0.5).all() == (scale_format == "ue8m0")

    def test_magnitudes_in_one_page(self):
        """Rows of 1e-4, 1 and 1e3 side by side: each keeps its own precision."""
        ckv = normal(48, 512) * jnp.tile(jnp.asarray([1e-4, 1.0, 1e3]), 16)[:, None]
        cache = LatentCache.zeros(1, 48, 512, 0, dtype="float8_e4m3fn")
        got = jit_read(jit_write_latents(cache, int32(range(48)), ckv, jnp.zeros((48, 0))), int32(range(48)))
        error = np.abs(got - ckv).reshape(48, 4, 128).max(-1)
        assert (error <= 2.0**-4 * np.abs(ckv).reshape(48, 4, 128).max(-1)).all()


@pytest.mark.gpu
class TestReads:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rope", [0, 8])
    def test_no_slot_reads_zeros_through_nan(self, dtype, rope):
        cache = poisoned(LatentCache.zeros(2, 16, 256, rope, dtype=dtype))
        cache = jit_write_latents(cache, int32([7, 31]), normal(2, 256), normal(2, rope))
        slots = int32([[7, -1, 32], [INT_MAX, 31, INT_MIN]])
        got = np.asarray(jit_read(cache, slots))
        assert got.shape == (2, 3, 256 + rope)
        real = np.asarray([[True, False, False], [False, True, False]])
        assert not got[~real].any() and np.isfinite(got).all()
        np.testing.assert_array_equal(got[real], jit_read(cache, int32([7, 31])))

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
    def test_nothing_to_read(self, shape):
        cache = LatentCache.zeros(2, 16, 256, 8, dtype="float8_e4m3fn")
        assert jit_read(cache, jnp.zeros(shape, jnp.int32)).shape == (*shape, 264)


@pytest.mark.gpu
class TestToSlots:
    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_against_numpy(self, page_size):
        rng = np.random.default_rng(page_size)
        table = rng.permutation(64)[:21].reshape(3, 7)
        indices = rng.integers(-1, 7 * page_size, (40, 9))
        request = rng.integers(0, 3, 40)
        want = table[request[:, None], np.maximum(indices, 0) // page_size] * page_size + indices % page_size
        want = np.where(indices < 0, -1, want)
        np.testing.assert_array_equal(jit_to_slots(int32(indices), int32(request), int32(table), page_size), want)

    def test_what_has_no_slot(self):
        """Padding indices, padding rows, unmapped pages, positions past the table, requests past it: all -1."""
        table = int32([[5, -1, 3], [INT_MIN, 2, INT_MAX]])
        indices = int32([[0, 4, 8, 12, -1, INT_MIN, INT_MAX], [0, 4, 8, 5, 11, -2, 13], [0] * 7, [1] * 7, [7] * 7])
        got = jit_to_slots(indices, int32([0, 1, -1, 2, INT_MIN]), table, 4)
        want = [[20, -1, 12, -1, -1, -1, -1], [-1, 8, -1, 9, -1, -1, -1], [-1] * 7, [-1] * 7, [-1] * 7]
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("page_size", [*PAGE_SIZES, 2**20, INT_MAX])
    def test_offsets_up_to_the_last_slot(self, page_size):
        """The one product is exact up to the greatest page a cache can have, and refused past it."""
        last = MAX_SLOTS // page_size - 1
        got = jit_to_slots(int32([[page_size - 1, page_size]]), int32([0]), int32([[last, last + 1]]), page_size)
        np.testing.assert_array_equal(got, [[last * page_size + page_size - 1, -1]])

    @pytest.mark.parametrize("rows, requests, pages", [(0, 2, 3), (4, 0, 3), (4, 2, 0), (0, 0, 0)])
    def test_empty(self, rows, requests, pages):
        indices, request = jnp.zeros((rows, 5), jnp.int32), jnp.zeros(rows, jnp.int32)
        got = jit_to_slots(indices, request, jnp.zeros((requests, pages), jnp.int32), 16)
        assert got.shape == (rows, 5) and (np.asarray(got) == -1).all()


@pytest.mark.gpu
class TestGather:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("page_size", [1, 16, 61])
    def test_ragged_requests(self, page_size, dtype):
        """1 and 5 pages, an empty request between, a full last page; all that is not theirs is poisoned."""
        lens = [page_size, 0, 5 * page_size, 2 * page_size - 1 or 1]
        table = np.asarray([[7, -1, -1, -1, -1], [-1] * 5, [3, 0, 9, 5, 1], [4, 2, -1, INT_MAX, -1]])
        positions = [np.arange(n) for n in lens]
        slots = np.concatenate(
            [table[b][at // page_size] * page_size + at % page_size for b, at in enumerate(positions)]
        )
        want = normal(sum(lens), 128)
        cache = poisoned(IndexCache.zeros(10, page_size, 128, dtype=dtype))
        cache = jit_write_keys(cache, int32(slots), want)
        total = len(want) + 13
        k, k_scale, starts = jit_gather(cache, int32(table), int32(lens), total)
        np.testing.assert_array_equal(starts, np.cumsum([0, *lens[:-1]]))
        if dtype == "float8_e4m3fn":
            values, scale = jit_quantize(want, scale_format="ue8m0")
            assert_same_bits([k[: len(want)], k_scale[: len(want)]], [values, scale[:, 0]])
            assert not np.asarray(k_scale[len(want) :]).any()
        else:
            assert k_scale is None
            assert_same_bits(k[: len(want)], want.astype(dtype))
        assert_same_bits(k[len(want) :], jnp.zeros((13, 128), k.dtype))

    def test_known_lengths_out_of_range_raise(self, as_user):
        cache, table = IndexCache.zeros(10, 16, 128, dtype="bfloat16"), int32([[0, 1], [2, 3]])
        gather_index_keys(cache, table, int32([32, 0]), 32)  # the table's full width
        with pytest.raises(ValueError, match=r"seq_lens must be in 0..32.*got \[33\]"):
            gather_index_keys(cache, table, int32([33, 0]), 64)
        with pytest.raises(ValueError, match=r"seq_lens must be in 0..32.*got \[-1\]"):
            gather_index_keys(cache, table, int32([-1, 4]), 64)
        with pytest.raises(ValueError, match="the sum of seq_lens must be at most total = 40, got 41"):
            gather_index_keys(cache, table, int32([32, 9]), 40)

    def test_lengths_under_jit_out_of_range_lose_rows(self):
        cache = poisoned(IndexCache.zeros(4, 16, 128, dtype="bfloat16"))
        cache = jit_write_keys(cache, int32(range(64)), jnp.ones((64, 128)))
        k, _, starts = jit_gather(cache, int32([[0, 1], [2, 3]]), int32([40, 9]), 45)
        np.testing.assert_array_equal(starts, [0, 40])
        np.testing.assert_array_equal(np.asarray(k[:, 0], np.float32), [1] * 32 + [0] * 8 + [1] * 5)

    @pytest.mark.parametrize("requests, pages, total", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
    def test_empty(self, requests, pages, total):
        cache = poisoned(IndexCache.zeros(4, 16, 128, dtype="float8_e4m3fn"))
        table, lens = jnp.zeros((requests, pages), jnp.int32), jnp.zeros(requests, jnp.int32)
        k, k_scale, starts = jit_gather(cache, table, lens, total)
        assert (k.shape, k_scale.shape, starts.shape) == ((total, 128), (total,), (requests,))
        assert not np.asarray(k, np.float32).any() and not np.asarray(k_scale).any()


class TestInPlace:
    """A donated cache is aliased to the result, and nothing of its size is computed but the scatter itself."""

    @staticmethod
    def cache_sized(compiled, num_slots):
        """(opcode, operands' count) of the instructions outside fusions that make an array with every slot in it."""
        entry = re.search(r"^ENTRY.*?^}", compiled.as_text(), re.MULTILINE | re.DOTALL).group()
        found = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", entry)
        sized = [(op, np.prod([int(n) for n in shape.split(",")])) for shape, op in found]
        return [op for op, size in sized if size >= num_slots and op not in ("parameter", "bitcast")]

    # On a CPU XLA widens smaller floats around a scatter, so there only float32 is free of copies.
    @pytest.mark.parametrize("dtype", [pytest.param(d, marks=pytest.mark.needs_gpu) for d in DTYPES[:2]] + ["float32"])
    def test_write(self, dtype):
        pages, page_size = 64, 61
        slots = int32(range(8))
        index = IndexCache.zeros(pages, page_size, 128, dtype=dtype)
        latent = LatentCache.zeros(pages, page_size, 512, 64, dtype=dtype)
        calls = [
            (write_index_keys, index, (slots, jnp.ones((8, 128)))),
            (write_latents, latent, (slots, jnp.ones((8, 512)), jnp.ones((8, 64)))),
        ]
        for write, cache, args in calls:
            compiled = jax.jit(write, donate_argnums=0).lower(cache, *args).compile()
            arrays = len(jax.tree.leaves(cache))
            header = compiled.as_text().splitlines()[0]
            assert len(re.findall(r"(?:may|must)-alias", header)) == arrays
            made = self.cache_sized(compiled, pages * page_size)
            assert len(made) == arrays and set(made) <= {"fusion", "scatter"}, made
            assert compiled.memory_analysis().temp_size_in_bytes < 64 * 1024

    @pytest.mark.gpu
    def test_donation_keeps_the_buffer(self):
        cache = IndexCache.zeros(4, 16, 128, dtype="float32")
        address = cache.k.unsafe_buffer_pointer()
        written = jax.jit(write_index_keys, donate_argnums=0)(cache, int32([3]), jnp.ones((1, 128)))
        assert written.k.unsafe_buffer_pointer() == address
        assert cache.k.is_deleted()


class TestOffsets:
    """No integer product can pass 2^31: the only one is page * page_size, on a page that was checked first."""

    @staticmethod
    def integer_products(jaxpr):
        found = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("mul", "dot_general", "integer_pow"):
                found += [v.aval.shape for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.integer)]
            for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(sub, "jaxpr", sub)
                if hasattr(inner, "eqns"):
                    found += TestOffsets.integer_products(inner)
        return found

    def products(self, function, *args, **static):
        return self.integer_products(jax.make_jaxpr(lambda *a: function(*a, **static))(*args).jaxpr)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_lint(self, dtype):
        shapes = lambda tree: jax.eval_shape(lambda: tree)  # noqa: E731
        index = shapes(IndexCache.zeros(4, 16, 128, dtype=dtype))
        latent = shapes(LatentCache.zeros(4, 16, 512, 64, dtype=dtype))
        i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        assert self.products(write_index_keys, index, i32(6), f32(6, 128)) == []
        assert self.products(write_latents, latent, i32(6), f32(6, 512), f32(6, 64)) == []
        assert self.products(read_latents, latent, i32(6, 3)) == []
        assert self.products(to_slots, i32(6, 3), i32(6), i32(2, 4), page_size=16) == [(6, 3)]
        assert self.products(gather_index_keys, index, i32(2, 4), i32(2), total=30) == [(30, 1)]

    def test_the_lint_sees_products(self):
        assert self.products(lambda x: jax.jit(lambda y: y * 4096)(x), int32([1])) == [(1,)]

    @pytest.mark.needs_gpu
    def test_offsets_4gib(self):
        """Slots on both sides of 2^31 and 2^32 bytes of a 9 GiB array, and the very last one."""
        cache = LatentCache.zeros(278_000, 64, 512, 0, dtype="float8_e4m3fn")
        last = cache.num_slots - 1
        assert last * 512 > 2**33
        slots = int32([0, 2**22 - 1, 2**22, 2**23 - 1, 2**23, last - 64, last, -1, cache.num_slots])
        ckv = normal(9, 512)
        cache = jax.jit(write_latents, donate_argnums=0)(cache, slots, ckv, jnp.zeros((9, 0)))
        got = jit_read(cache, slots)
        np.testing.assert_array_equal(got[:7], stored(ckv, "float8_e4m3fn", 128)[:7])
        assert not np.asarray(got[7:]).any()
        assert int((cache.scale[..., 0] != 0).sum()) == 7


class TestCacheTypes:
    def test_bytes_per_token(self):
        assert IndexCache.zeros(2, 64, 128, dtype="float8_e4m3fn").bytes_per_token == 132
        assert IndexCache.zeros(2, 64, 128, dtype=jnp.bfloat16).bytes_per_token == 256
        assert LatentCache.zeros(2, 64, 512, 64, dtype="float8_e4m3fn").bytes_per_token == 656
        assert LatentCache.zeros(2, 64, 512, 64, dtype="bfloat16").bytes_per_token == 1152
        assert LatentCache.zeros(2, 64, 512, 64, dtype="float32").bytes_per_token == 2304
        assert LatentCache.zeros(2, 64, 512, 0, dtype="float8_e4m3fn").bytes_per_token == 528

    def test_sizes_and_shapes(self):
        cache = LatentCache.zeros(3, 61, 32, 8, dtype="float8_e4m3fn")  # below 128 there is one block
        assert (cache.num_pages, cache.page_size, cache.num_slots) == (3, 61, 183)
        assert [x.shape for x in flat(cache)] == [(183, 32), (183, 1), (183, 8)]
        assert LatentCache.zeros(3, 61, 300, 8, dtype="float8_e4m3fn").scale.shape == (3, 61, 3)
        assert LatentCache.zeros(3, 61, 32, 8, dtype="bfloat16").scale is None

    def test_pytree(self):
        """Shapes, specs and flags may stand where the arrays do."""
        cache = IndexCache.zeros(3, 16, 128, dtype="float8_e4m3fn")
        assert jax.tree.map(lambda x: x.ndim, cache) == IndexCache(3, 2)
        assert jax.eval_shape(lambda c: c, cache).k.shape == (3, 16, 128)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
        assert paths == [".k", ".scale"]


FP8 = IndexCache.zeros(2, 16, 128, dtype="float8_e4m3fn")
BF16 = LatentCache.zeros(2, 16, 512, 64, dtype="bfloat16")
TABLE, LENS = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: IndexCache.zeros(0, 16, 128, dtype="bfloat16"), "num_pages must be at least 1, got 0"),
        (lambda: IndexCache.zeros(2, 0, 128, dtype="bfloat16"), "page_size must be at least 1, got 0"),
        (lambda: IndexCache.zeros(2, 16, 0, dtype="bfloat16"), "index_head_dim must be at least 1, got 0"),
        (
            lambda: IndexCache.zeros(2**27, 16, 1, dtype="bfloat16"),
            "num_pages [*] page_size must be at most 2147483647",
        ),
        (lambda: LatentCache.zeros(2, 16, 0, 8, dtype="bfloat16"), "kv_lora_rank must be at least 1, got 0"),
        (lambda: LatentCache.zeros(2, 16, 8, -1, dtype="bfloat16"), "qk_rope_head_dim must be at least 0, got -1"),
        (lambda: LatentCache.zeros(2, 16, 8, 8, dtype="float8_e4m3fnuz"), "dtype must be float8_e4m3fn or bfloat16"),
        (lambda: LatentCache.zeros(2, 16, 8, 8, dtype="fp8"), "dtype must be float8_e4m3fn or bfloat16"),
        (lambda: write_index_keys(FP8, LENS[:, None], jnp.ones((2, 128))), r"slots's shape must be \[T\]"),
        (lambda: write_index_keys(FP8, LENS, jnp.ones((2, 64))), r"k's shape must be \[T, D\] = \[2, 128\]"),
        (lambda: write_index_keys(FP8, LENS, jnp.ones((2, 128)), scale_format="e8"), "scale_format must be"),
        (lambda: write_index_keys(IndexCache(FP8.k, None), LENS, jnp.ones((2, 128))), "cache.scale must be given"),
        (lambda: write_index_keys(IndexCache(FP8.k, FP8.scale[:1]), LENS, jnp.ones((2, 128))), "cache.scale's shape"),
        (
            lambda: write_index_keys(
                IndexCache(FP8.k.astype(jnp.float8_e4m3fnuz), FP8.scale), LENS, jnp.ones((2, 128))
            ),
            "dtype must be float8_e4m3fn or bfloat16 or float32, got float8_e4m3fnuz",
        ),
        (lambda: write_latents(BF16, LENS, jnp.ones((2, 512)), jnp.ones((2, 32))), "k_rope's shape must be"),
        (lambda: write_latents(BF16, LENS, jnp.ones((3, 512)), jnp.ones((3, 64))), "ckv's shape must be"),
        (lambda: to_slots(TABLE, LENS, TABLE, 0), "page_size must be in 1..2147483647, got 0"),
        (lambda: to_slots(TABLE, LENS[:1], TABLE, 16), r"request's shape must be \[M\] = \[2\]"),
        (lambda: to_slots(TABLE, LENS, LENS, 16), "block_table's shape must be"),
        (lambda: gather_index_keys(FP8, TABLE, LENS[:1], 4), "seq_lens's shape must be"),
        (lambda: gather_index_keys(FP8, TABLE, LENS, -1), "total must be at least 0, got -1"),
    ],
)
def test_bad_input(as_user, call, message):
    with pytest.raises(ValueError, match=message):
        call()
