"""Reading config.json: every spelling in use, nothing guessed, nothing unknown run as something else."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsa_jax.config import DsaConfig
from dsa_jax.hf_config import BlockQuantization, shared_indexer_types
from dsa_jax.rope import RopeScaling

GOLDEN = Path(__file__).parent / "golden"
PUBLISHED = {
    "glm5": DsaConfig.glm5(),
    "glm5_1": DsaConfig.glm5_1(),
    "glm5_2": DsaConfig.glm5_2(),
    "glm5_3": DsaConfig.glm5_3(),
    "deepseek_v32": DsaConfig.deepseek_v32(),
    "tiny": DsaConfig.tiny(),
}
YARN = {
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def glm(**changes):
    """The fields of a config.json as GLM publishes it: derived schedules, not lists. None deletes a field."""
    fields = DsaConfig.glm5().to_dict()
    fields |= {"first_k_dense_replace": 3, "head_dim": 192, "pad_token_id": 154820, "ep_size": 1, "use_cache": True}
    del fields["mlp_layer_types"], fields["indexer_types"]
    return {name: value for name, value in (fields | changes).items() if value is not None}


def deepseek(**changes):
    """The same as DeepSeek publishes it: rope_theta beside rope_scaling, e4m3 weights."""
    fields = DsaConfig.deepseek_v32().to_dict()
    fields |= {"first_k_dense_replace": 3, "rope_theta": 10000, "rope_scaling": YARN | {"type": "yarn"}}
    for name in ("rope_parameters", "mlp_layer_types", "indexer_types", "indexer_rope_interleave", "rope_interleave"):
        del fields[name]
    return {name: value for name, value in (fields | changes).items() if value is not None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_round_trip(name):
    config = PUBLISHED[name]
    assert DsaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(DsaConfig.from_dict(config.to_dict()))


def test_config_published_spellings():
    assert DsaConfig.from_dict(glm()) == DsaConfig.glm5()
    assert DsaConfig.from_dict(deepseek()) == DsaConfig.deepseek_v32()


@pytest.mark.parametrize(
    ("name", "sm_scale", "latent_dim", "bf16_bytes", "fp8_bytes"),
    [
        ("glm5", 0.0625, 576, 109824, 78 * (656 + 132)),
        ("glm5_2", 0.0625, 576, 95232, 78 * 656 + 21 * 132),
        ("deepseek_v32", 0.13523378, 576, 61 * (1152 + 256), 61 * (656 + 132)),
    ],
)
def test_config_derived_numbers(name, sm_scale, latent_dim, bf16_bytes, fp8_bytes):
    config = PUBLISHED[name]
    assert config.sm_scale == pytest.approx(sm_scale, rel=1e-7)
    assert config.latent_dim == latent_dim
    assert config.cache_bytes_per_token() == bf16_bytes
    assert config.cache_bytes_per_token("float8_e4m3fn") == fp8_bytes


def test_config_glm5_2_schedule():
    """The schedule itself: counts cannot tell it from its neighbours, which have 21 full layers too."""
    full = [0, 1, 2, *range(6, 75, 4)]
    assert [i for i, kind in enumerate(DsaConfig.glm5_2().indexer_types) if kind == "full"] == full
    assert DsaConfig.from_dict(glm(index_topk_freq=4, index_skip_topk_offset=3)).indexer_types == (
        DsaConfig.glm5_2().indexer_types
    )
    assert DsaConfig.glm5_3() == DsaConfig.glm5_2()


@pytest.mark.parametrize(
    ("golden", "layers", "theta", "scaling", "layout", "indexer_types"),
    [
        ("tiny_glm5", 4, 1e6, None, "interleaved", "FFFF"),
        ("tiny_glm52", 8, 8e6, None, "interleaved", "FFFSSSFS"),
        ("tiny_dsv32", 4, 1e4, RopeScaling(8.0, 32, 32.0, 1.0, 1.0, 1.0), "half_split", "FFFF"),
    ],
)
def test_config_golden(golden, layers, theta, scaling, layout, indexer_types):
    config = DsaConfig.from_pretrained(GOLDEN / golden)
    assert (config.num_hidden_layers, config.rope_theta, config.rope_scaling) == (layers, theta, scaling)
    assert config.indexer_rope_layout == layout
    assert "".join(kind[0].upper() for kind in config.indexer_types) == indexer_types
    assert config.mlp_layer_types == ("dense",) + ("sparse",) * (layers - 1)


SHARED = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
FOUR = {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        pytest.param({}, "FFFF", id="nothing"),
        pytest.param({"index_topk_freq": 2}, "FFSF", id="freq, offset 2 by default"),
        pytest.param({"index_topk_freq": 0}, "FFFF", id="freq 0 counts as 1"),
        pytest.param({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFS", id="freq and offset"),
        pytest.param(SHARED | {"index_topk_pattern": "FSSF"}, "FSSF", id="pattern before freq"),
        pytest.param({"index_topk_pattern": ["full", "shared", "full", "full"]}, "FSFF", id="pattern as a list"),
        pytest.param(
            {"index_topk_pattern": "FSSF", "indexer_types": ["full", "full", "shared", "full"]},
            "FFSF",
            id="types before pattern",
        ),
    ],
)
def test_index_share_precedence(fields, want):
    config = DsaConfig.from_dict(glm(**FOUR, **fields))
    assert "".join(kind[0].upper() for kind in config.indexer_types) == want


def test_shared_indexer_types_formula():
    assert shared_indexer_types(9, freq=3, offset=2) == tuple(
        {"F": "full", "S": "shared"}[letter] for letter in "FFSSFSSFS"
    )


@pytest.mark.parametrize(
    ("fields", "dense"),
    [({"first_k_dense_replace": 0}, 0), ({"first_k_dense_replace": 3}, 3), ({"first_k_dense_replace": 99}, 4)],
)
def test_config_first_k_dense(fields, dense):
    assert DsaConfig.from_dict(glm(**FOUR, **fields)).mlp_layer_types == ("dense",) * dense + ("sparse",) * (4 - dense)


def test_config_mlp_layer_types_before_first_k_dense():
    types = ["sparse", "dense", "sparse", "dense"]
    assert DsaConfig.from_dict(glm(**FOUR, mlp_layer_types=types)).mlp_layer_types == tuple(types)


@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        pytest.param(glm(indexer_rope_interleave=True), "interleaved", id="glm, flag true"),
        pytest.param(glm(indexer_rope_interleave=False), "half_split", id="glm, flag false"),
        pytest.param(glm(indexer_rope_interleave=None), "interleaved", id="glm, no flag"),
        pytest.param(deepseek(), "half_split", id="deepseek, no flag"),
        pytest.param(deepseek(indexer_rope_interleave=True), "interleaved", id="deepseek, flag true"),
    ],
)
def test_score_golden_rope_layout_of_the_indexer(fields, layout):
    assert DsaConfig.from_dict(fields).indexer_rope_layout == layout


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_theta": 1e4, "rope_scaling": YARN | {"type": "yarn"}}, id="type"),
        pytest.param({"rope_theta": 1e4, "rope_scaling": YARN | {"rope_type": "yarn"}}, id="rope_type"),
        pytest.param(
            {"rope_theta": 1e4, "rope_scaling": YARN | {"rope_type": "yarn", "type": "yarn"}}, id="both types"
        ),
        pytest.param({"rope_parameters": YARN | {"rope_theta": 10000, "rope_type": "yarn"}}, id="rope_parameters"),
        pytest.param({"rope_theta": 1e4, "rope_parameters": YARN | {"rope_type": "yarn"}}, id="theta outside"),
    ],
)
def test_config_rope_spellings(rope):
    fields = deepseek(rope_theta=None, rope_scaling=None) | rope
    assert DsaConfig.from_dict(fields) == DsaConfig.deepseek_v32()


@pytest.mark.parametrize(
    ("value", "want"), [(None, ()), (7, (7,)), ([154820, 154827], (154820, 154827))], ids=["none", "one", "several"]
)
def test_config_eos(value, want):
    assert DsaConfig.from_dict(glm(eos_token_id=value)).eos_token_ids == want


@pytest.mark.parametrize("kind", ["deepseek_sparse_attention", "indexed_attention"])
def test_config_layer_types(kind):
    assert DsaConfig.from_dict(glm(layer_types=[kind] * 78, head_dim=64)) == DsaConfig.glm5()


def test_config_quantization():
    block = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    assert DsaConfig.from_dict(glm(quantization_config=block)).quantization == BlockQuantization((64, 32))
    assert DsaConfig.from_dict(deepseek()).quantization == BlockQuantization((128, 128), "ue8m0")


UNKNOWN_ARCHITECTURES = [
    {"model_type": "glm5_next"},
    {"model_type": "deepseek_v3"},
    {"model_type": "glm4_moe"},
    {"model_type": "llama"},
    {"model_type": ["glm_moe_dsa"]},
    {"model_type": None},
    {"architectures": ["DeepseekV32ForCausalLM"]},
    {"architectures": ["DeepseekV3ForCausalLM"]},
    {"architectures": ["GlmMoeDsaForCausalLM", "Other"]},
    {"architectures": "GlmMoeDsaForCausalLM"},
]


@pytest.mark.parametrize("fields", UNKNOWN_ARCHITECTURES, ids=str)
def test_backend_table_unknown_architecture_is_refused(fields, as_user):
    """A model whose name is not known never runs as a dense one."""
    with pytest.raises(ValueError, match="must be") as error:
        DsaConfig.from_dict(glm(**fields))
    assert next(iter(fields)) in str(error.value)


REFUSED = [
    ("scoring_func", "softmax"),
    ("topk_method", "greedy"),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("attention_bias", 0),
    ("mlp_bias", True),
    ("moe_layer_freq", 2),
    ("moe_router_dtype", "bfloat16"),
    ("rope_interleave", False),
    ("num_key_value_heads", 8),
    ("layer_types", ["full_attention"] * 78),
    ("layer_types", ["indexed_attention"] * 77),
    ("indexer_types", ["full"] * 77),
    ("indexer_types", ["shared"] + ["full"] * 77),
    ("indexer_types", ["full"] * 77 + ["dense"]),
    ("indexer_types", "FS"),
    ("index_topk_pattern", "F" * 77 + "X"),
    ("index_topk_freq", -1),
    ("index_topk_freq", 2.0),
    ("mlp_layer_types", ["dense"] * 79),
    ("mlp_layer_types", ["moe"] * 78),
    ("first_k_dense_replace", -1),
    ("num_nextn_predict_layers", 2),
    ("index_topk", 0),
    ("index_topk", 4097),
    ("index_topk", 2048.0),
    ("index_topk", "2048"),
    ("index_topk", True),
    ("index_head_dim", 32),
    ("qk_rope_head_dim", 63),
    ("num_hidden_layers", 10**12),
    ("n_group", 3),
    ("topk_group", 2),
    ("num_experts_per_tok", 257),
    ("rms_norm_eps", 0.0),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", "1e-5"),
    ("routed_scaling_factor", float("inf")),
    ("norm_topk_prob", 1),
    ("eos_token_id", -1),
    ("eos_token_id", [154880]),
    ("tie_word_embeddings", "no"),
    ("indexer_rope_interleave", "yes"),
    ("index_share_for_mtp_iteration", 1),
    ("rope_parameters", "default"),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_config_refuses(field, value, as_user):
    with pytest.raises(ValueError, match=f"{field}.*must be .*got"):
        DsaConfig.from_dict(glm(**{field: value}))


@pytest.mark.parametrize(
    ("field", "rope"),
    [
        ("rope_type", {"rope_theta": 1e6}),
        ("rope_type", {"rope_theta": 1e6, "rope_type": "llama3"}),
        ("rope_type", {"rope_theta": 1e6, "rope_type": "default", "type": "yarn"}),
        ("rope_theta", {"rope_type": "default"}),
        ("rope_theta", {"rope_type": "default", "rope_theta": 1.0}),
        ("partial_rotary_factor", {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        ("attention_factor", YARN | {"rope_type": "yarn", "rope_theta": 1e4, "attention_factor": 1.2}),
        ("truncate", YARN | {"rope_type": "yarn", "rope_theta": 1e4, "truncate": False}),
        ("factor", YARN | {"rope_type": "yarn", "rope_theta": 1e4, "factor": None}),
        ("mscale_all_dim", YARN | {"rope_type": "yarn", "rope_theta": 1e4, "mscale_all_dim": None}),
        ("original_max", YARN | {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": None}),
    ],
)
def test_config_refuses_rope(field, rope, as_user):
    with pytest.raises(ValueError, match=f"{field}.*must be"):
        DsaConfig.from_dict(glm(rope_parameters=rope))


def test_config_refuses_two_thetas(as_user):
    with pytest.raises(ValueError, match=r"rope_theta must be rope_parameters's 1000000\.0, got 10000"):
        DsaConfig.from_dict(glm(rope_theta=10000))


@pytest.mark.parametrize(
    ("field", "quantization"),
    [
        ("quant_method", {"weight_block_size": [128, 128]}),
        ("quant_method", {"quant_method": "gptq", "weight_block_size": [128, 128]}),
        ("fmt", {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}),
        ("activation_scheme", {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [1, 1]}),
        ("weight_block_size", {"quant_method": "fp8"}),
        ("weight_block_size", {"quant_method": "fp8", "weight_block_size": [128]}),
        ("weight_block_size", {"quant_method": "fp8", "weight_block_size": [128, 0]}),
        ("scale_fmt", {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "e8m1"}),
        ("quantization_config", "fp8"),
    ],
)
def test_config_refuses_quantization(field, quantization, as_user):
    with pytest.raises(ValueError, match=f"{field}.*must be"):
        DsaConfig.from_dict(glm(quantization_config=quantization))


REQUIRED = [
    field.name
    for field in dataclasses.fields(DsaConfig)
    if field.default is dataclasses.MISSING
    and field.name not in ("rope_theta", "rope_scaling", "indexer_types", "indexer_rope_layout", "mlp_layer_types")
]


@pytest.mark.parametrize("field", [*REQUIRED, "first_k_dense_replace"])
def test_config_missing_field_has_no_default(field, as_user):
    with pytest.raises(ValueError, match=f"{field} must be given"):
        DsaConfig.from_dict(glm(**{field: None}))


def test_config_missing_rope_has_no_default(as_user):
    with pytest.raises(ValueError, match="rope_theta must be given"):
        DsaConfig.from_dict(glm(rope_parameters=None))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"indexer_rope_layout": "neox"}, "indexer_rope_layout"),
        ({"indexer_types": ()}, "indexer_types"),
        ({"model_type": "dense"}, "model_type"),
        ({"n_group": 8, "topk_group": 8}, "n_group"),
        ({"rope_theta": 0.5}, "rope_theta"),
    ],
    ids=str,
)
def test_config_constructor_refuses(changes, field, as_user):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(DsaConfig.tiny(), **changes)


def test_config_from_pretrained_refuses(tmp_path, as_user):
    with pytest.raises(ValueError, match=r"path must be a directory that holds a config\.json"):
        DsaConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"path must be a directory that holds a config\.json"):
        DsaConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="is not JSON"):
        DsaConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        DsaConfig.from_pretrained(tmp_path)


KNOWN = sorted({*glm(), *deepseek(), "indexer_types", "mlp_layer_types", "index_topk_pattern", "index_topk_freq"})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["yarn", "full", "fp8", "F", ""])
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "factor", "rope_theta"]), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=st.sampled_from([glm(), deepseek()]), changes=st.dictionaries(st.sampled_from(KNOWN), VALUES, max_size=3))
def test_config_any_value_is_taken_or_refused(as_user, base, changes):
    """Whatever JSON holds, the result is a config that survives a round trip, or one ValueError."""
    try:
        config = DsaConfig.from_dict(base | changes)
    except ValueError:
        return
    assert DsaConfig.from_dict(config.to_dict()) == config
