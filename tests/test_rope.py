"""Rotary embedding against float64 and against what transformers cached (fault kind A's layouts, J's empty batches)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dsa_jax.rope import RopeScaling, apply_rope, attention_factor, rope_frequencies, softmax_scale

GOLDEN = Path(__file__).parent / "golden"
V32_YARN = RopeScaling(
    factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0
)


def rotate64(x, positions, frequencies, layout):
    """The rotation in complex float64, written half-split; the angle is rounded to float32 as in the models."""
    angle = (np.asarray(positions, np.float32)[..., None] * np.asarray(frequencies)).astype(np.float64)
    angle = angle.reshape(angle.shape[:-1] + (1,) * (x.ndim - angle.ndim) + angle.shape[-1:])
    x = np.asarray(x).astype(np.float64)
    half = x.shape[-1] // 2
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if layout == "interleaved" else x[..., :half] + 1j * x[..., half:]
    turned = pairs * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


class TestFrequencies:
    @pytest.mark.parametrize("theta", [1e4, 1e6, 8e6])
    @pytest.mark.parametrize("head_dim", [8, 64])
    def test_plain(self, head_dim, theta):
        want = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        np.testing.assert_array_equal(rope_frequencies(head_dim, theta, None), np.float32(want))

    def test_yarn_keeps_fast_divides_slow_and_mixes_between(self):
        plain, yarn = (np.float64(rope_frequencies(64, 1e4, scaling)) for scaling in (None, V32_YARN))
        # DeepSeek-V3.2: dim(32) = 10.47 and dim(1) = 22.51, so pairs up to 10 stay and pairs from 23 on are divided.
        np.testing.assert_array_equal(yarn[:11], plain[:11])
        np.testing.assert_allclose(yarn[23:], plain[23:] / 40, rtol=1e-7)
        ramp = (np.arange(11, 23) - 10) / 13
        np.testing.assert_allclose(yarn[11:23], plain[11:23] * (1 - ramp) + plain[11:23] / 40 * ramp, rtol=1e-7)

    def test_yarn_without_a_band(self):
        """beta_fast = beta_slow where dim() is whole: the band has width 0 and must not divide by it."""
        steep = RopeScaling(factor=4, original_max_position_embeddings=16, beta_fast=1e6, beta_slow=1e6)
        assert np.isfinite(rope_frequencies(8, 1e4, steep)).all()

    def test_width_zero(self):
        assert rope_frequencies(0, 1e6, None).shape == (0,)


class TestScales:
    def test_softmax_scale(self):
        assert softmax_scale(256, None) == 0.0625  # GLM-5
        assert softmax_scale(192, V32_YARN) == pytest.approx(0.13523378, rel=1e-7)  # DeepSeek-V3.2

    def test_mscale_all_dim_zero_leaves_the_scale(self):
        assert softmax_scale(64, RopeScaling(factor=40, original_max_position_embeddings=4096)) == 0.125

    def test_attention_factor(self):
        assert attention_factor(None) == 1.0
        assert attention_factor(V32_YARN) == 1.0
        gain = 0.1 * np.log(40) + 1
        assert attention_factor(RopeScaling(40, 4096, mscale=1.0, mscale_all_dim=0.0)) == pytest.approx(gain)
        assert attention_factor(RopeScaling(1, 4096, mscale=1.0, mscale_all_dim=0.0)) == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["interleaved", "half_split"])
class TestRotation:
    @pytest.mark.parametrize("theta", [1e4, 8e6])
    def test_against_float64_up_to_a_million(self, layout, theta):
        positions = jnp.asarray([0, 1, 2, 63, 4095, 65535, 131072, 524287, 1048575, 1048576], jnp.int32)
        frequencies = rope_frequencies(64, theta, None)
        x = normal(10, 3, 64)
        got = jax.jit(apply_rope, static_argnames="layout")(x, positions, frequencies, layout=layout)
        np.testing.assert_allclose(got, rotate64(x, positions, frequencies, layout), atol=1e-6, rtol=0)

    def test_heads_and_batches_share_positions(self, layout):
        frequencies = rope_frequencies(8, 1e4, None)
        x = normal(2, 5, 3, 8)
        positions = jnp.asarray([[0, 7, 2, 9, 4], [100, 101, 102, 3, 3]], jnp.int32)
        got = apply_rope(x, positions, frequencies, layout=layout)
        for b in range(2):
            for h in range(3):
                one = apply_rope(x[b, :, h], positions[b], frequencies, layout=layout)
                np.testing.assert_array_equal(got[b, :, h], one)
        one_row = apply_rope(x, positions[:1], frequencies, layout=layout)
        np.testing.assert_array_equal(one_row[1], apply_rope(x[1], positions[0], frequencies, layout=layout))

    def test_dot_products_depend_on_distance_only(self, layout):
        frequencies = rope_frequencies(64, 1e6, None)
        q, k = normal(1, 64, seed=1), normal(1, 64, seed=2)

        def dot(m, n):
            turn = lambda x, p: apply_rope(x, jnp.asarray([p], jnp.int32), frequencies, layout=layout)  # noqa: E731
            return float((turn(q, m) * turn(k, n)).sum())

        assert dot(900, 400) == pytest.approx(dot(500, 0), abs=1e-3)
        assert dot(900, 400) != pytest.approx(dot(900, 401), abs=1e-3)

    def test_bfloat16_is_computed_in_float32(self, layout):
        frequencies = rope_frequencies(64, 1e6, None)
        x, positions = normal(100, 64).astype(jnp.bfloat16), jnp.arange(100, dtype=jnp.int32) * 10007
        got = apply_rope(x, positions, frequencies, layout=layout)
        assert got.dtype == jnp.bfloat16
        wide = apply_rope(x.astype(jnp.float32), positions, frequencies, layout=layout)
        np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))

    def test_factor_scales_the_rotation(self, layout):
        x, positions, frequencies = normal(4, 8), jnp.arange(4, dtype=jnp.int32), rope_frequencies(8, 1e4, None)
        one = apply_rope(x, positions, frequencies, layout=layout)
        np.testing.assert_allclose(
            apply_rope(x, positions, frequencies, layout=layout, factor=1.5), 1.5 * one, rtol=1e-6
        )

    @pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (5, 0), (5, 3, 0)])
    def test_empty(self, layout, shape):
        positions = jnp.zeros(shape[:1], jnp.int32)
        got = apply_rope(jnp.zeros(shape), positions, rope_frequencies(shape[-1], 1e4, None), layout=layout)
        assert got.shape == shape


def test_layouts_differ():
    """One layout is the other on permuted pairs, and on plain ones gives something else: a swap cannot pass."""
    x, positions, frequencies = normal(16, 64), jnp.arange(16, dtype=jnp.int32), rope_frequencies(64, 1e4, None)
    half_split = apply_rope(x, positions, frequencies, layout="half_split")
    shuffled = jnp.stack([x[:, :32], x[:, 32:]], axis=-1).reshape(16, 64)
    np.testing.assert_array_equal(apply_rope(shuffled, positions, frequencies, layout="interleaved"), half_split)
    assert np.abs(apply_rope(x, positions, frequencies, layout="interleaved") - half_split).max() > 0.1


@pytest.mark.parametrize(
    "model, index_layout",
    [("tiny_glm5", "interleaved"), ("tiny_glm52", "interleaved"), ("tiny_dsv32", "half_split")],
)
class TestGolden:
    """What transformers cached in layer 0: k_rope of the main attention (interleaved), and the indexer's key."""

    @pytest.fixture
    def layer(self, model):
        config = json.loads((GOLDEN / model / "config.json").read_text())
        weights = load_file(GOLDEN / model / "model.safetensors")
        prefix = "model.layers.0."
        weights = {name.removeprefix(prefix): w.astype(np.float64) for name, w in weights.items() if prefix in name}
        golden = np.load(GOLDEN / f"{model}.npz")
        hidden = golden["hidden_0"].astype(np.float64)
        hidden = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return config, weights, hidden * weights["input_layernorm.weight"], golden

    @staticmethod
    def rope(config, x, layout):
        fields = config["rope_parameters"]
        names = [field for field in RopeScaling.__dataclass_fields__ if field in fields]
        scaling = RopeScaling(**{name: fields[name] for name in names}) if fields["rope_type"] == "yarn" else None
        frequencies = rope_frequencies(config["qk_rope_head_dim"], fields["rope_theta"], scaling)
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        x = jnp.asarray(x, jnp.float32)
        return apply_rope(x, positions, frequencies, layout=layout, factor=attention_factor(scaling))

    def test_k_rope(self, layer, index_layout):
        config, weights, hidden, golden = layer
        kv = hidden @ weights["self_attn.kv_a_proj_with_mqa.weight"].T
        got = self.rope(config, kv[..., config["kv_lora_rank"] :], "interleaved")
        np.testing.assert_allclose(got, golden["k_rope_0"], atol=5e-6, rtol=0)

    def test_index_key(self, layer, index_layout):
        config, weights, hidden, golden = layer
        k = hidden @ weights["self_attn.indexer.wk.weight"].T
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * weights["self_attn.indexer.k_norm.weight"] + weights["self_attn.indexer.k_norm.bias"]
        dr = config["qk_rope_head_dim"]
        got = np.concatenate([self.rope(config, k[..., :dr], index_layout), k[..., dr:]], axis=-1)
        np.testing.assert_allclose(got, golden["index_k_0"], atol=5e-6, rtol=0)
        other = {"interleaved": "half_split", "half_split": "interleaved"}[index_layout]
        assert np.abs(self.rope(config, k[..., :dr], other) - golden["index_k_0"][..., :dr]).max() > 0.1


X, POSITIONS, FREQUENCIES = jnp.zeros((4, 8)), jnp.zeros(4, jnp.int32), jnp.ones(4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rope_frequencies(7, 1e4, None), "head_dim must be even and at least 0, got 7"),
        (lambda: rope_frequencies(8, 1.0, None), "theta must be greater than 1, got 1.0"),
        (lambda: RopeScaling(factor=0.0, original_max_position_embeddings=4), "factor must be greater than 0, got 0.0"),
        (lambda: RopeScaling(4, 0), "original_max_position_embeddings must be greater than 0, got 0"),
        (lambda: RopeScaling(4, 16, beta_fast=1, beta_slow=2), "beta_fast must be at least beta_slow = 2, got 1"),
        (lambda: softmax_scale(0, None), "qk_head_dim must be greater than 0, got 0"),
        (lambda: apply_rope(X, POSITIONS, FREQUENCIES, layout="neox"), "layout must be 'interleaved' or 'half_split'"),
        (lambda: apply_rope(X[:, :6], POSITIONS, FREQUENCIES, layout="half_split"), r"x's shape must be \[..., 8\]"),
        (lambda: apply_rope(X, POSITIONS[:3], FREQUENCIES, layout="half_split"), "positions' shape must be"),
        (lambda: apply_rope(X, POSITIONS[:, None], FREQUENCIES, layout="half_split"), "positions' shape must be"),
    ],
)
def test_bad_input(as_user, call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_layout_has_no_default():
    with pytest.raises(TypeError, match="layout"):
        apply_rope(X, POSITIONS, FREQUENCIES)
