"""Live transformers against ours, at widths that no stored checkpoint has and at contexts well above index_topk."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import GOLDEN_LOGITS

from dsa_jax import reference
from dsa_jax.checkpoint import Checkpoint, load_model, save_checkpoint, tensor_shapes
from dsa_jax.config import DsaConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

HF_LATENT_NORM_EPS = 1e-6
CLEAR_GAP = 1e-5  # between the last score that is selected and the first that is not


@dataclasses.dataclass(frozen=True)
class Case:
    """A transformers config by its changes to WIDTHS, and how many sequences of which length go through it."""

    name: str
    architecture: str
    changes: dict
    batch: int = 2
    length: int = 90
    seed: int = 0


WIDTHS = {
    "vocab_size": 131,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "index_n_heads": 14,  # with few heads relu leaves many exact zeros, and transformers breaks ties as it likes
    "index_head_dim": 40,
    "index_topk": 11,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 288,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 6.0,
    "original_max_position_embeddings": 48,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CASES = [
    Case("glm", "GlmMoeDsa", {"index_topk": 33}, length=271),
    Case(
        "glm_index_share",
        "GlmMoeDsa",
        {"num_hidden_layers": 6, "index_topk_freq": 3, "index_skip_topk_offset": 2, "first_k_dense_replace": 2},
        seed=1,
    ),
    Case(
        "glm_index_share_pattern_tied",
        "GlmMoeDsa",
        {"num_hidden_layers": 4, "index_topk_pattern": "FSFS", "tie_word_embeddings": True},
        seed=1,
    ),
    Case(
        "glm_yarn_groups_no_norm",
        "GlmMoeDsa",
        {"rope_parameters": YARN, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
        seed=2,
    ),
    Case("deepseek_yarn_groups", "DeepseekV32", {"rope_parameters": YARN, "n_group": 3, "topk_group": 2}, seed=3),
    Case(
        "deepseek_mscale_wide_index",
        "DeepseekV32",
        {
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
            "index_n_heads": 16,
            "index_head_dim": 64,
            "index_topk": 5,
        },
    ),
    Case("deepseek_one_head", "DeepseekV32", {"num_attention_heads": 1, "num_key_value_heads": 1}, batch=1, seed=3),
]


def random_weight(name, shape, rng):
    """Weights that keep activations near 1, so that every term of a layer matters to its result.

    The two latents are small before their norms: that is where an epsilon shows.
    """
    if name.endswith("bias"):
        return 0.1 * rng.normal(size=shape)
    if len(shape) == 1:
        return 1.0 + 0.2 * rng.normal(size=shape)
    gain = 0.05 if "q_a_proj" in name else 0.3 if "kv_a_proj" in name else 1.0
    return gain * rng.normal(size=shape) * shape[-1] ** -0.5


def random_tokens(seed, vocab_size, batch, length):
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, (batch, length)), jnp.int32)


def transformers_model(case):
    config = getattr(transformers, f"{case.architecture}Config")(**(WIDTHS | case.changes), attn_implementation="eager")
    model = getattr(transformers, f"{case.architecture}ForCausalLM")(config).float().eval()
    rng = np.random.default_rng(case.seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.copy_(torch.from_numpy(random_weight(name, tuple(tensor.shape), rng)))
    return model


def run_transformers(model, tokens, monkeypatch):
    """Logits, the selection of every layer as a mask [B, S, S], and the least gap at the edge of any selection."""
    batch, length = tokens.shape
    selected, gaps, topk = [], [], torch.Tensor.topk

    def recording_topk(scores, k, *args, **kwargs):
        if tuple(scores.shape) == (batch, length, length):
            edge = topk(scores, k + 1).values[:, k:]  # rows with more than k visible keys
            gaps.append(float((edge[..., k - 1] - edge[..., k]).min()))
        return topk(scores, k, *args, **kwargs)

    def record_selection(module, args, output):
        indices = output[2] if isinstance(output, tuple) else output
        mask = torch.zeros(batch, length, length, dtype=torch.bool)
        selected.append(mask.scatter_(-1, indices.long(), True).tril().numpy())

    # GLM's attention returns what it selected or was handed; DeepSeek's does not, but its indexer does.
    glm = model.config.model_type == "glm_moe_dsa"
    attentions = [layer.self_attn for layer in model.model.layers]
    hooks = [(a if glm else a.indexer).register_forward_hook(record_selection) for a in attentions]
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", recording_topk)
        logits = model(torch.tensor(np.asarray(tokens)).long(), use_cache=False).logits.numpy()
    for hook in hooks:
        hook.remove()
    return logits, selected, min(gaps)


def as_mask(indices, batch, length):
    """Positions, -1 for none, in any leading shape: the mask [B, S, S] of what each row selected."""
    indices = np.asarray(indices).reshape(batch, length, -1)
    mask = np.zeros((batch, length, length + 1), bool)  # the last column takes the -1s
    np.put_along_axis(mask, np.where(indices < 0, length, indices), True, axis=-1)
    return mask[..., :length]


def assert_close_logits(got, want):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=GOLDEN_LOGITS * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_oracle_logits_and_selections(case, tmp_path, monkeypatch):
    theirs = transformers_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = random_tokens(case.seed, WIDTHS["vocab_size"], case.batch, case.length)
    want, selected, gap = run_transformers(theirs, tokens, monkeypatch)
    assert gap > CLEAR_GAP, f"seed {case.seed} has a near tie: take another"

    model = load_model(tmp_path / "theirs", latent_norm_eps=HF_LATENT_NORM_EPS)
    assert_close_logits(model(tokens), want)
    assert case.length > 8 * model.config.index_topk
    steps = model.run(tokens).indices
    for layer, mask in enumerate(selected):
        assert mask.sum(-1).tolist() == [[min(t + 1, model.config.index_topk) for t in range(case.length)]] * case.batch
        np.testing.assert_array_equal(as_mask(steps[layer], *tokens.shape), mask, err_msg=f"layer {layer}")


def test_oracle_sees_the_latent_norm_epsilon(tmp_path, monkeypatch):
    """The two epsilons are told apart at this tolerance, so the comparison above does check which one is used."""
    case = CASES[1]
    theirs = transformers_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = random_tokens(1, WIDTHS["vocab_size"], 1, 40)
    want, _, _ = run_transformers(theirs, tokens, monkeypatch)
    checkpoint = Checkpoint.open(tmp_path / "theirs")
    config = checkpoint.config
    assert config.rms_norm_eps == 1e-5
    same = reference.forward(checkpoint, config, tokens, latent_norm_eps=HF_LATENT_NORM_EPS)
    assert_close_logits(same.logits, want)
    with pytest.raises(AssertionError):
        assert_close_logits(reference.forward(checkpoint, config, tokens).logits, want)


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32"])
def test_oracle_loads_what_we_save(model_type, tmp_path):
    """transformers finds every tensor it wants in our directory, and none it does not know."""
    config = DsaConfig.tiny(num_nextn_predict_layers=0, num_hidden_layers=4, index_n_heads=14)
    config = dataclasses.replace(config, model_type=model_type)
    if model_type == "deepseek_v32":  # transformers shares no indices there
        config = dataclasses.replace(
            config,
            indexer_types=("full",) * config.num_hidden_layers,
            indexer_rope_layout="half_split",
            rope_scaling=DsaConfig.deepseek_v32().rope_scaling,
        )
    rng = np.random.default_rng(0)
    tensors = {
        name: random_weight(name, shape, rng).astype(np.float32) for name, shape in tensor_shapes(config).items()
    }
    save_checkpoint(tmp_path / "ours", config, tensors, shard_bytes=200_000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = random_tokens(0, config.vocab_size, 2, 40)
    with torch.no_grad():
        want = model(torch.tensor(np.asarray(tokens)).long(), use_cache=False).logits.numpy()
    assert_close_logits(reference.forward(tensors, config, tokens, latent_norm_eps=HF_LATENT_NORM_EPS).logits, want)
