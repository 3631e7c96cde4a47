"""8-bit floats: fault kind B (scale rounding, saturation, fn against fnuz, flat scales); byte layouts of kind H."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import tolerances
from scipy.linalg import hadamard as hadamard_matrix

from dsa_jax import quant
from dsa_jax.quant import (
    FP8_MAX,
    dequantize,
    hadamard,
    pack_index_pages,
    pack_latent_rows,
    quantize,
    quantize_index_query,
    round_up_to_power_of_two,
    unpack_index_pages,
    unpack_latent_rows,
)

E4M3 = jnp.float8_e4m3fn
FORMATS = ["float32", "ue8m0"]
GOLDEN = np.load(Path(__file__).parent / "golden" / "fp8_indexer.npz")
jit_quantize = jax.jit(quantize, static_argnames=("block", "scale_format"))
jit_query = jax.jit(quantize_index_query, static_argnames="scale_format")
jit_dequantize = jax.jit(dequantize)
jit_hadamard = jax.jit(hadamard)


def quantize64(x, block, scale_format):
    """The rule in numpy: float64 where nothing is rounded, float32 where the rule rounds."""
    values, scales = [], []
    for start in range(0, x.shape[-1], block):
        part = np.asarray(x[..., start : start + block], np.float32)
        amax = np.maximum(np.abs(part).max(-1, keepdims=True), np.float32(1e-4))
        scale = np.float32(amax * np.float32(1 / 448))
        if scale_format == "ue8m0":
            mantissa, exponent = np.frexp(scale)
            scale = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
        values.append(np.clip(part / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn))
        scales.append(scale)
    return np.concatenate(values, axis=-1), np.concatenate(scales, axis=-1)


def assert_same_bytes(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.gpu
class TestGolden:
    """tests/golden/fp8_indexer.npz, byte for byte. h1 rotates in bfloat16 first; its inputs are bfloat16 numbers."""

    @pytest.mark.parametrize("scale_format", FORMATS)
    @pytest.mark.parametrize("rotated", [0, 1])
    def test_bytes(self, rotated, scale_format):
        name = f"h{rotated}_{'none' if scale_format == 'float32' else scale_format}"
        q, k = (jnp.asarray(GOLDEN[key], jnp.bfloat16) for key in "qk")
        if rotated:
            q, k = jit_hadamard(q), jit_hadamard(k)
        for x, key in ((q, "q"), (k, "k")):
            values, scale = jit_quantize(x, scale_format=scale_format)
            assert_same_bytes(values, GOLDEN[f"{key}8_{name}"])
            np.testing.assert_array_equal(scale, GOLDEN[f"{key}s_{name}"])

    @pytest.mark.parametrize("scale_format", FORMATS)
    @pytest.mark.parametrize("rotated", [0, 1])
    def test_scores(self, rotated, scale_format):
        """The scale folded into the weights gives the scores; w_raw has neither H^-0.5 nor D^-0.5."""
        name = f"h{rotated}_{'none' if scale_format == 'float32' else scale_format}"
        q, k = (jnp.asarray(GOLDEN[key][0], jnp.bfloat16) for key in "qk")
        if rotated:
            q, k = jit_hadamard(q), jit_hadamard(k)
        want = GOLDEN[f"score_{name}"][0]
        (rows, columns), (heads, width) = want.shape, q.shape[1:]
        weights = jnp.asarray(GOLDEN["w_raw"][0]) * jnp.float32((heads * width) ** -0.5)
        q8, folded = jit_query(q, weights, scale_format=scale_format)
        k8, k_scale = jit_quantize(k, scale_format=scale_format)
        got = oracle.indexer_logits(q8, k8, folded, np.zeros(rows), np.full(rows, columns), k_scale[:, 0])
        np.testing.assert_allclose(got, want, atol=tolerances.FLOAT32 * np.abs(want).max(), rtol=0)


@pytest.mark.gpu
class TestPowerOfTwo:
    def test_every_normal_power_and_its_neighbours(self):
        powers = np.ldexp(np.float32(1), np.arange(-126, 128))
        rounded = jax.jit(round_up_to_power_of_two)
        np.testing.assert_array_equal(rounded(jnp.asarray(powers)), powers)
        above = np.nextafter(powers[:-1], np.float32(np.inf))
        np.testing.assert_array_equal(rounded(jnp.asarray(above)), powers[1:])
        below = np.nextafter(powers[1:], np.float32(0))
        np.testing.assert_array_equal(rounded(jnp.asarray(below)), powers[1:])

    def test_nan_and_inf_stay(self):
        got = np.asarray(round_up_to_power_of_two(jnp.asarray([np.nan, np.inf, -np.nan], jnp.float32)))
        assert np.isnan(got[[0, 2]]).all() and got[1] == np.inf


@pytest.mark.gpu
@pytest.mark.parametrize("scale_format", FORMATS)
class TestQuantize:
    @pytest.mark.parametrize("width", [1, 32, 127, 128, 129, 256, 300, 512])
    def test_against_numpy(self, scale_format, width):
        """Widths under, at, over and between whole blocks."""
        x = normal(37, width, seed=width) * np.geomspace(1e-3, 1e3, 37, dtype=np.float32)[:, None]
        values, scale = jit_quantize(jnp.asarray(x), scale_format=scale_format)
        want, want_scale = quantize64(x, 128, scale_format)
        assert values.dtype == E4M3 and scale.dtype == jnp.float32
        assert_same_bytes(values, want)
        np.testing.assert_array_equal(scale, want_scale)

    def test_ties_divide_as_rounded_to_nearest(self, scale_format):
        """bfloat16 inputs whose amax is a multiple of 7 put quotients exactly between two e4m3 numbers."""
        sevenths = np.arange(128, 256, 7, dtype=np.float32)
        x = sevenths[:, None] * np.arange(1, 449, dtype=np.float32)[None, :] / 448
        x = np.concatenate([sevenths[:, None], np.float32(jnp.asarray(x, jnp.bfloat16))], axis=1)
        values, _ = jit_quantize(jnp.asarray(x), block=449, scale_format=scale_format)
        assert_same_bytes(values, quantize64(x, 449, scale_format)[0])

    def test_round_trip_error(self, scale_format):
        """e4m3 keeps 4 significant bits: within 2^-4 of a value, or half the smallest step for the smallest ones."""
        x = normal(200, 128) * np.geomspace(1e-3, 1e4, 200, dtype=np.float32)[:, None]
        values, scale = jit_quantize(jnp.asarray(x), scale_format=scale_format)
        error = np.abs(np.asarray(jit_dequantize(values, scale)) - x)
        assert (error <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * np.asarray(scale)) * (1 + 1e-6)).all()

    def test_each_block_has_its_scale(self, scale_format):
        """Magnitudes 1e-4 to 1e3 in one row: with one flat scale the small blocks would vanish."""
        x = (normal(4, 4, 128) * np.float32([1e-4, 1, 1e3, 1e-2])[:, None]).reshape(4, 512)
        values, scale = jit_quantize(jnp.asarray(x), scale_format=scale_format)
        assert scale.shape == (4, 4)
        error = np.abs(np.asarray(jit_dequantize(values, scale)) - x).reshape(4, 4, 128).max(-1)
        assert (error <= 2.0**-4 * np.abs(x).reshape(4, 4, 128).max(-1)).all()

    def test_zeros_take_the_floor(self, scale_format):
        values, scale = jit_quantize(jnp.zeros((2, 128)), scale_format=scale_format)
        floor = np.float32(1e-4) * np.float32(1 / 448)
        want = floor if scale_format == "float32" else 2.0 ** np.ceil(np.log2(floor))
        np.testing.assert_array_equal(scale, np.full((2, 1), want, np.float32))
        assert_same_bytes(values, np.zeros((2, 128), np.uint8))

    @pytest.mark.parametrize("bound", [448.0, 240.0, 464.0, 1e6, 3.4028235e38], ids=str)
    def test_finite_input_never_gives_nan(self, scale_format, bound):
        x = np.linspace(-bound, bound, 128, dtype=np.float32)[None]
        values, scale = jit_quantize(jnp.asarray(x), scale_format=scale_format)
        assert np.isfinite(np.asarray(values, np.float32)).all() and np.isfinite(scale).all()
        assert np.abs(np.asarray(values, np.float32)).max() <= 448

    def test_infinities_saturate(self, scale_format):
        x = jnp.asarray([[np.inf, -np.inf, 1.0, -3e38]], jnp.float32)
        values, scale = jit_quantize(x, scale_format=scale_format)
        got = np.asarray(values, np.float32)
        assert np.isfinite(got).all() and np.isfinite(scale).all()
        assert got[0, 0] == -got[0, 1] >= 224

    def test_nan_stays_in_its_block(self, scale_format):
        x = normal(3, 256)
        x[1, 200] = np.nan
        values, scale = (np.asarray(y, np.float32) for y in jit_quantize(jnp.asarray(x), scale_format=scale_format))
        nan_blocks = np.zeros((3, 2), bool)
        nan_blocks[1, 1] = True
        np.testing.assert_array_equal(np.isnan(scale), nan_blocks)
        np.testing.assert_array_equal(np.isnan(values), np.repeat(nan_blocks, 128, axis=1))

    def test_bfloat16_equals_float32(self, scale_format):
        x = jnp.asarray(normal(50, 128), jnp.bfloat16)
        narrow, wide = (jit_quantize(y, scale_format=scale_format) for y in (x, x.astype(jnp.float32)))
        assert_same_bytes(narrow[0], wide[0])
        np.testing.assert_array_equal(narrow[1], wide[1])

    def test_a_row_does_not_depend_on_its_batch(self, scale_format):
        x = jnp.asarray(normal(257, 128))
        whole, whole_scale = jit_quantize(x, scale_format=scale_format)
        for rows in (slice(0, 1), slice(3, 10), slice(100, 257)):
            part, part_scale = jit_quantize(x[rows], scale_format=scale_format)
            assert_same_bytes(part, whole[rows])
            np.testing.assert_array_equal(part_scale, whole_scale[rows])

    @pytest.mark.parametrize("lead", [(0,), (2, 0, 3)], ids=str)
    def test_empty(self, scale_format, lead):
        values, scale = jit_quantize(jnp.zeros((*lead, 512)), scale_format=scale_format)
        assert values.shape == (*lead, 512) and scale.shape == (*lead, 4)
        assert jit_dequantize(values, scale).shape == (*lead, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_quotients_are_corrected(ulps):
    """GPUs divide to within 2 ulp: from any such quotient comes the one rounded to nearest."""
    rng = np.random.default_rng(0)
    amax = rng.uniform(1e-4, 50, 10_000).astype(np.float32)
    a = np.float32(jnp.asarray(amax * rng.uniform(-1, 1, 10_000), jnp.bfloat16))
    b = amax * np.float32(1 / 448)
    want = a / b
    near = (want.view(np.int32) + ulps).view(np.float32)
    np.testing.assert_array_equal(jax.jit(quant._nearest_quotient)(*map(jnp.asarray, (a, b, near))), want)


class TestKinds:
    def test_one_maximum_a_kind(self):
        """Each kind's maximum is finite in it, and the next number up in its own format is not reachable by a cast."""
        assert FP8_MAX[jnp.dtype(E4M3)] == 448
        assert FP8_MAX[jnp.dtype(jnp.float8_e4m3fnuz)] == 240
        for kind, largest in FP8_MAX.items():
            assert float(jnp.float32(largest).astype(kind)) == largest
            assert not np.isfinite(float(jnp.float32(largest * 1.25).astype(kind)))

    def test_fn_and_fnuz_do_not_mix(self):
        fn, fnuz, wide = jnp.zeros(1, E4M3), jnp.zeros(1, jnp.float8_e4m3fnuz), jnp.zeros(1)
        quant.require_one_fp8_kind(q=fn, k=fn, weights=wide)
        with pytest.raises(TypeError, match="one kind, got q: float8_e4m3fnuz, k: float8_e4m3fn"):
            quant.require_one_fp8_kind(q=fnuz, k=fn)


@pytest.mark.gpu
class TestHadamard:
    @pytest.mark.parametrize("width", [1, 2, 32, 128, 512])
    def test_against_float64(self, width):
        x = normal(5, 3, width)
        want = x.astype(np.float64) @ hadamard_matrix(width) * width**-0.5
        np.testing.assert_allclose(jit_hadamard(jnp.asarray(x)), want, atol=1e-5, rtol=0)

    def test_keeps_dot_products(self):
        q, k = normal(20, 128, seed=1), normal(30, 128, seed=2)
        rotated = np.asarray(jit_hadamard(jnp.asarray(q))) @ np.asarray(jit_hadamard(jnp.asarray(k))).T
        np.testing.assert_allclose(rotated, q @ k.T, atol=2e-5, rtol=0)

    def test_rounds_to_bfloat16_once(self):
        x = jnp.asarray(normal(40, 128), jnp.bfloat16)
        got = jit_hadamard(x)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, jit_hadamard(x.astype(jnp.float32)).astype(jnp.bfloat16))

    def test_empty(self):
        assert jit_hadamard(jnp.zeros((0, 4, 128))).shape == (0, 4, 128)


@pytest.mark.gpu
class TestQuery:
    @pytest.mark.parametrize("scale_format", FORMATS)
    @pytest.mark.parametrize("heads", [32, 64])
    def test_folding_the_scale_loses_nothing(self, heads, scale_format):
        """relu(q8 . k) * (w * scale) is relu((scale * q8) . k) * w, since a scale is positive."""
        q, k = normal(6, heads, 128), normal(50, 128, seed=1)
        weights = normal(6, heads, seed=2) * np.float32((heads * 128) ** -0.5)
        q8, folded = jit_query(jnp.asarray(q), jnp.asarray(weights), scale_format=scale_format)
        assert q8.dtype == E4M3 and folded.dtype == jnp.float32
        rows = (np.zeros(6), np.full(6, 50))
        scale = jit_quantize(jnp.asarray(q), scale_format=scale_format)[1]
        wide = np.asarray(q8, np.float64) * np.asarray(scale, np.float64)
        want = oracle.indexer_logits(wide, k, weights, *rows)
        got = oracle.indexer_logits(q8, k, folded, *rows)
        np.testing.assert_allclose(got, want, atol=tolerances.FLOAT32 * np.abs(want).max(), rtol=0)

    def test_one_scale_a_vector_at_any_width(self):
        q8, folded = jit_query(jnp.ones((2, 3, 256)), jnp.ones((2, 3)))
        assert q8.shape == (2, 3, 256) and folded.shape == (2, 3)


def bytes_of(x):
    x = np.ascontiguousarray(x)
    return x.view(np.uint8).reshape(*x.shape[:-1], -1)


@pytest.mark.gpu
class TestLatentRows:
    @pytest.mark.parametrize(
        "rank, rope, want_bytes",
        [(512, 64, 656), (512, 0, 528), (32, 8, 52), (300, 6, 324)],
        ids=["flashmla", "no_rope", "tiny", "ragged"],
    )
    def test_layout_and_round_trip(self, rank, rope, want_bytes):
        nope, scale = jit_quantize(jnp.asarray(normal(5, 7, rank)), scale_format="float32")
        k_rope = jnp.asarray(normal(5, 7, rope), jnp.bfloat16)
        rows = jax.jit(pack_latent_rows)(nope, scale, k_rope)
        assert rows.shape == (5, 7, want_bytes) and rows.dtype == jnp.uint8
        parts = [bytes_of(x) for x in (nope, scale)] + ([bytes_of(k_rope)] if rope else [])
        np.testing.assert_array_equal(rows, np.concatenate(parts, axis=-1))
        back = unpack_latent_rows(rows, kv_lora_rank=rank, qk_rope_head_dim=rope)
        assert_same_bytes(back[0], nope)
        np.testing.assert_array_equal(back[1], scale)
        np.testing.assert_array_equal(back[2], k_rope)

    def test_a_wider_record_ends_in_zeros(self):
        nope, scale = jit_quantize(jnp.asarray(normal(5, 512)), scale_format="float32")
        rows = pack_latent_rows(nope, scale, jnp.zeros((5, 0), jnp.bfloat16), row_bytes=656)
        assert rows.shape == (5, 656) and not rows[:, 528:].any()
        back = unpack_latent_rows(rows, kv_lora_rank=512, qk_rope_head_dim=0)
        assert_same_bytes(back[0], nope)


@pytest.mark.gpu
class TestIndexPages:
    @pytest.mark.parametrize("page_size, width", [(1, 128), (61, 128), (64, 128), (256, 128), (16, 32)])
    def test_layout_and_round_trip(self, page_size, width):
        k, scale = jit_quantize(jnp.asarray(normal(3, page_size, width)), scale_format="ue8m0")
        scale = scale[..., 0]
        pages = jax.jit(pack_index_pages)(k, scale)
        assert pages.shape == (3, page_size * (width + 4))
        for page in range(3):  # all keys of the page, then all its scales
            want = np.concatenate([bytes_of(k[page]).ravel(), bytes_of(scale[page])])
            np.testing.assert_array_equal(pages[page], want)
        back, back_scale = jax.jit(unpack_index_pages, static_argnames="index_head_dim")(pages, index_head_dim=width)
        assert_same_bytes(back, k)
        np.testing.assert_array_equal(back_scale, scale)

    def test_no_pages(self):
        pages = pack_index_pages(jnp.zeros((0, 64, 128), E4M3), jnp.zeros((0, 64)))
        assert pages.shape == (0, 64 * 132)
        assert unpack_index_pages(pages, index_head_dim=128)[0].shape == (0, 64, 128)


ROW = (jnp.zeros((2, 512), E4M3), jnp.zeros((2, 4)), jnp.zeros((2, 64), jnp.bfloat16))
PAGES = (jnp.zeros((2, 64, 128), E4M3), jnp.zeros((2, 64)))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: quantize(jnp.ones((2, 4)), scale_format="e8m0"),
            "scale_format must be 'float32' or 'ue8m0', got 'e8m0'",
        ),
        (lambda: quantize(jnp.ones((2, 4)), block=0, scale_format="ue8m0"), "block must be at least 1, got 0"),
        (lambda: quantize(jnp.ones((2, 4), E4M3), scale_format="ue8m0"), "x's dtype must be a float of 16 or 32 bits"),
        (lambda: dequantize(ROW[0], ROW[1][:, :3]), r"scale's shape must be \[..., ceil\(D / 128\)\] = \[2, 4\]"),
        (lambda: hadamard(jnp.ones((2, 48))), "x's last axis must be a power of two, got 48"),
        (lambda: quantize_index_query(jnp.ones((2, 3, 4)), jnp.ones((2, 4))), "weights's shape must be"),
        (
            lambda: quantize_index_query(jnp.ones((2, 3, 4)), jnp.ones((2, 3), jnp.bfloat16)),
            "weights's dtype must be float32, got bfloat16",
        ),
        (lambda: pack_latent_rows(ROW[0].astype(jnp.float8_e4m3fnuz), *ROW[1:]), "nope's dtype must be float8_e4m3fn"),
        (lambda: pack_latent_rows(ROW[0], ROW[1][:, :3], ROW[2]), "scale's shape must be"),
        (lambda: pack_latent_rows(ROW[0], ROW[1], ROW[2].astype(jnp.float32)), "rope's dtype must be bfloat16"),
        (lambda: pack_latent_rows(*ROW, row_bytes=640), "row_bytes must be at least 656, got 640"),
        (
            lambda: unpack_latent_rows(jnp.zeros((2, 600), jnp.uint8), kv_lora_rank=512, qk_rope_head_dim=64),
            "rows' last axis must be at least 656 bytes, got 600",
        ),
        (lambda: pack_index_pages(PAGES[0], PAGES[1][:, :63]), "scale's shape must be"),
        (lambda: pack_index_pages(PAGES[0].astype(jnp.float8_e4m3fnuz), PAGES[1]), "k's dtype must be float8_e4m3fn"),
        (
            lambda: unpack_index_pages(jnp.zeros((2, 1000), jnp.uint8), index_head_dim=128),
            "pages' last axis must be a multiple of index_head_dim [+] 4 = 132, got 1000",
        ),
    ],
)
def test_bad_input(as_user, call, message):
    with pytest.raises(ValueError, match=message):
        call()
