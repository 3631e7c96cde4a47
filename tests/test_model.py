"""The layers and the model, on the ops' path, against transformers' numbers and the specification."""

import golden_data as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from dsa_jax import layers, reference
from dsa_jax.checkpoint import load_model
from dsa_jax.config import DsaConfig
from dsa_jax.context import Sequences, Stripes
from dsa_jax.layers import MoE, Rope
from dsa_jax.model import CausalLM, parameter_sharding, partition_spec

EPS = golden.TRANSFORMERS_LATENT_EPS


@pytest.fixture(scope="module", params=golden.NAMES)
def loaded(request):
    return request.param, load_model(golden.FOLDER / request.param, latent_norm_eps=EPS)


def test_golden_logits_and_every_selection(loaded):
    name, model = loaded
    want, topk = golden.outputs(name), golden.config(name).index_topk
    step = model.run(golden.tokens(name), keep_layers=True)
    np.testing.assert_allclose(
        model.logits(step.hidden).reshape(want["logits"].shape), want["logits"], rtol=0, atol=tolerances.GOLDEN_LOGITS
    )
    for i, indices in enumerate(step.indices):
        chosen = golden.indices_of_mask(want[f"topk_mask_{i}"], topk)
        np.testing.assert_array_equal(np.asarray(indices).reshape(chosen.shape), chosen)
    for i, hidden in enumerate(step.layers[:-1]):
        after = want[f"hidden_{i + 1}"]
        np.testing.assert_allclose(hidden.reshape(after.shape), after, rtol=0, atol=tolerances.GOLDEN_LOGITS)


@pytest.mark.parametrize("name", golden.NAMES)
def test_golden_logits_with_the_configs_own_latent_eps(name):
    model = load_model(golden.FOLDER / name)
    want = golden.outputs(name)["logits_latent_eps_cfg"]
    np.testing.assert_allclose(model(golden.tokens(name)), want, rtol=0, atol=tolerances.GOLDEN_LOGITS)


@pytest.mark.parametrize(("prefix", "zero_first"), [("mtp", False), ("mtp_zero0", True)])
def test_golden_mtp(prefix, zero_first):
    name = "tiny_glm52"
    model, want, tokens = (
        load_model(golden.FOLDER / name, latent_norm_eps=EPS),
        golden.outputs(name),
        golden.tokens(name),
    )
    batch, length = tokens.shape
    hidden = model.run(tokens).hidden.reshape(batch, length, -1)[:, :-1].reshape(batch * (length - 1), -1)
    context = Sequences.of_batch(batch, length - 1, model.options())
    draft = nnx.jit(lambda model, *args: model.draft(*args, zero_first_embedding=zero_first))
    out, _, indices = draft(model, tokens[:, 1:].reshape(-1), hidden, context)
    got = model.logits(out).reshape(batch, length - 1, -1)
    np.testing.assert_allclose(got, want[f"{prefix}_logits"], rtol=0, atol=tolerances.GOLDEN_LOGITS)
    for row, chosen in enumerate(np.asarray(indices).reshape(batch, length - 1, -1).swapaxes(0, 1)):
        theirs = want[f"{prefix}_topk_idx"][:, row]
        for mine, other in zip(chosen, theirs, strict=True):
            assert set(mine[mine >= 0]) == set(other[other <= row])


def test_products_of_bfloat16_are_rounded_once():
    rng = np.random.default_rng(0)
    q, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((33, 8, 192), (8, 192, 512)))
    want = np.einsum("thn,hnr->thr", np.asarray(q, np.float64), np.asarray(w, np.float64))
    off = np.asarray(jax.jit(lambda q, w: layers._einsum("thn,hnr->thr", q, w))(q, w), np.float64) - want
    assert np.sqrt((off**2).mean() / (want**2).mean()) < 2**-9
    assert layers.matmul(q[:, 0], w[0].T).dtype == jnp.bfloat16


def test_a_model_in_bfloat16():
    config, tokens = DsaConfig.tiny(), jnp.arange(40)[None] % 7
    narrow = CausalLM(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    wide = CausalLM(config, rngs=nnx.Rngs(0))
    nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(narrow, nnx.Param)))
    got, want = narrow(tokens), wide(tokens)
    assert got.dtype == jnp.float32 and jnp.abs(got - want).max() < 0.1 * jnp.abs(want).max()


def tiny(**widths) -> DsaConfig:
    return DsaConfig.tiny(**widths)


def random_model(config: DsaConfig, seed: int = 0) -> CausalLM:
    """Random weights, spread enough that every part of a layer matters."""
    model = CausalLM(config, rngs=nnx.Rngs(seed))
    key = jax.random.key(seed)
    for number, (path, param) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        noise = jax.random.normal(jax.random.fold_in(key, number), param[...].shape)
        kind = path[-1]
        param[...] = 1.0 + 0.1 * noise if kind == "weight" and noise.ndim == 1 else 0.1 * noise
    return model


def test_moe_equals_a_loop_over_experts():
    config = tiny()
    moe = MoE(config, dtype=jnp.float32, rngs=nnx.Rngs(3))
    h = jax.random.normal(jax.random.key(1), (37, config.hidden_size))
    experts, weights = (np.asarray(x) for x in nnx.jit(lambda moe, h: moe.gate(h))(moe, h))
    want = np.array(nnx.jit(lambda moe, h: moe.shared_experts(h))(moe, h), np.float64)
    gate_up, down = np.asarray(moe.experts.gate_up_proj[...]), np.asarray(moe.experts.down_proj[...])
    for row in range(h.shape[0]):
        for expert, weight in zip(experts[row], weights[row], strict=True):
            gate, up = np.split(gate_up[expert] @ np.asarray(h[row]), 2)
            want[row] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(nnx.jit(lambda moe, h: moe(h))(moe, h), want, rtol=0, atol=1e-5)


def test_a_shared_layer_without_indices_raises(as_user):
    config = golden.config("tiny_glm52")
    model = load_model(golden.FOLDER / "tiny_glm52")
    context = Sequences.of_batch(1, 20, model.options())
    h = jnp.ones((20, config.hidden_size))
    with pytest.raises(ValueError, match="indices must be the selection of an earlier layer"):
        model.model.layers[3](h, context, None, None, Rope(config))


def test_absorbed_and_expanded_attention_agree():
    """At most index_topk tokens: selecting everything through the absorbed form equals the dense expanded form."""
    model = load_model(golden.FOLDER / "tiny_dsv32", latent_norm_eps=EPS)
    tokens, length = golden.tokens("tiny_dsv32")[:, :12].reshape(-1), 12
    runs = {}
    for dense in (False, True):
        context = Sequences.of_batch(2, length, model.options(dense=dense))
        runs[dense] = nnx.jit(lambda model, context: model.forward(tokens, context, None).hidden)(model, context)
    np.testing.assert_allclose(runs[True], runs[False], rtol=0, atol=1e-5)


def test_a_sequence_too_long_is_refused(as_user):
    model = load_model(golden.FOLDER / "tiny_glm5")
    with pytest.raises(ValueError, match="at most max_position_embeddings = 256, got 257"):
        model(jnp.zeros((1, 257), jnp.int32))


def make_mesh(axes):
    shape = tuple(axes.values())
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), tuple(axes))


@pytest.mark.parametrize(
    "axes",
    [dict(tp=4), dict(tp=2, ep=4), dict(dp=2, tp=2)],
    ids=lambda axes: "-".join(f"{name}{size}" for name, size in axes.items()),
)
def test_tensor_parallel_logits_and_bits_of_the_selection(axes):
    name, mesh = "tiny_glm52", make_mesh(axes)
    single, split = load_model(golden.FOLDER / name), load_model(golden.FOLDER / name, mesh=mesh)
    want, got = single.run(golden.tokens(name)), split.run(golden.tokens(name), stripes=Stripes(mesh, "tp", min_rows=0))
    np.testing.assert_allclose(got.hidden, want.hidden, rtol=0, atol=1e-5)
    for mine, theirs in zip(got.indices, want.indices, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_sharding_rules():
    attention = ("model", "layers", 0, "self_attn")
    four, both = AbstractMesh((4,), ("tp",)), AbstractMesh((2, 4), ("tp", "ep"))
    assert partition_spec((*attention, "q_b_proj", "weight"), (96, 48), four)[0] == "tp"
    assert partition_spec((*attention, "o_proj", "weight"), (64, 96), four)[1] == "tp"
    assert not any(partition_spec((*attention, "indexer", "wq_b", "weight"), (256, 48), four))
    experts = ("model", "layers", 0, "mlp", "experts", "down_proj")
    assert [partition_spec(experts, (8, 64, 32), mesh)[0] for mesh in (four, both)] == ["tp", "ep"]
    with pytest.raises(ValueError, match="multiple of 4 ranks, got 6"):
        partition_spec(("lm_head", "weight"), (6, 64), four)
    mesh = Mesh(np.array(jax.devices()[:8]), ("tp",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="divisor of num_attention_heads = 4, got 8"):
        parameter_sharding(golden.config("tiny_glm5"), mesh, ("lm_head", "weight"), (256, 64))


def test_random_widths_against_the_specification():
    """Other widths than the golden files', sharing, MTP, groups; 8 * index_topk tokens."""
    from dsa_jax.checkpoint import model_tensors

    config = tiny()
    model = random_model(config)
    tokens = jax.random.randint(jax.random.key(5), (2, 8 * config.index_topk), 0, config.vocab_size)
    want = reference.forward(model_tensors(model), config, tokens)
    got = model.run(tokens, keep_layers=True)
    for mine, theirs in zip(got.indices, want.indices, strict=True):
        same = np.asarray(mine).reshape(theirs.shape) == np.asarray(theirs)
        assert same.all(axis=-1).mean() > 0.99  # a near-tie may fall either way
    scale = float(jnp.abs(want.logits).max())
    np.testing.assert_allclose(
        np.median(np.abs(model.logits(got.hidden).reshape(want.logits.shape) - want.logits)) / scale, 0, atol=1e-6
    )
