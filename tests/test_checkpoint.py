"""From a checkpoint to the model and back: every tensor in its place, indexers exactly where the schedule has them."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from checkpoint_data import (
    GOLDEN,
    GOLDENS,
    MTP,
    SHARED_LAYER,
    TINY,
    assert_same_tensors,
    fp8_checkpoint,
    random_tensors,
    save_tiny,
    write_directory,
)
from flax import nnx
from jax.sharding import Mesh

from dsa_jax.checkpoint import load_model, model_tensors, parameter_source
from dsa_jax.config import DsaConfig
from dsa_jax.hf_checkpoint import SINGLE_FILE, Checkpoint, save_checkpoint, tensor_shapes
from dsa_jax.hf_config import BlockQuantization
from dsa_jax.model import CausalLM


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("saved") / "tiny")


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of it, to break."""
    return Path(shutil.copytree(saved[0], tmp_path / "broken"))


INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


def test_plan_extra_indexer_weights_on_a_shared_layer_are_refused(tmp_path, as_user):
    tensors = random_tensors(TINY)
    for name in INDEXER:
        full, shared = (f"model.layers.{i}.self_attn.indexer.{name}" for i in (0, SHARED_LAYER))
        assert shared not in tensors
        tensors[shared] = tensors[full]
    path = write_directory(tmp_path / "extra", TINY, tensors)
    with pytest.raises(ValueError, match=rf"5 unexpected: model\.layers\.{SHARED_LAYER}\.self_attn\.indexer\.k_norm"):
        load_model(path)


@pytest.mark.parametrize("layer", [0, TINY.num_hidden_layers], ids=["full layer", "mtp layer"])
def test_plan_missing_indexer_weights_are_refused(tmp_path, layer, as_user):
    tensors = random_tensors(TINY)
    for name in INDEXER:
        del tensors[f"model.layers.{layer}.self_attn.indexer.{name}"]
    path = write_directory(tmp_path / "missing", TINY, tensors)
    with pytest.raises(ValueError, match=rf"5 missing: model\.layers\.{layer}\.self_attn\.indexer\.k_norm"):
        load_model(path)


def test_plan_another_schedule_does_not_load(saved, broken, as_user):
    """Two schedules with as many full layers: counts agree, names do not."""
    types = list(TINY.indexer_types)
    full = max(i for i, kind in enumerate(types) if kind == "full")
    types[full], types[SHARED_LAYER] = "shared", "full"
    other = dataclasses.replace(TINY, indexer_types=tuple(types))
    (broken / "config.json").write_text(json.dumps(other.to_dict()))
    with pytest.raises(ValueError, match=r"5 missing: .*; 5 unexpected: "):
        load_model(broken)


def test_backend_table_unknown_architecture_does_not_load(broken, as_user):
    fields = TINY.to_dict() | {"model_type": "glm5_next", "architectures": ["Glm5NextForCausalLM"]}
    (broken / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="model_type must be one of 'glm_moe_dsa', 'deepseek_v32', got 'glm5_next'"):
        load_model(broken)


def test_checkpoint_tied_head_is_absent(tmp_path, as_user):
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    assert "lm_head.weight" not in tensor_shapes(config)
    save_checkpoint(tmp_path / "tied", config, random_tensors(config))
    assert load_model(tmp_path / "tied").lm_head is None
    path = write_directory(tmp_path / "untied", config, random_tensors(TINY))
    with pytest.raises(ValueError, match=r"1 unexpected: lm_head\.weight"):
        load_model(path)


@pytest.mark.parametrize("block", [(128, 128), (16, 40)], ids=str)
def test_quant_checkpoint_blocks_are_multiplied_out(tmp_path, block):
    config = dataclasses.replace(TINY, quantization=BlockQuantization(block))
    path, exact = fp8_checkpoint(tmp_path / "fp8", config)
    checkpoint = Checkpoint.open(path)
    assert set(checkpoint) == set(exact)
    for name, want in exact.items():
        np.testing.assert_array_equal(checkpoint[name].astype(np.float64), want.astype(np.float64), err_msg=name)
    model = load_model(path)
    assert model.model.embed_tokens.weight.dtype == jnp.bfloat16
    # Scales are powers of two here, so that bfloat16 holds the product exactly.
    got = np.asarray(model.model.layers[1].mlp.experts.down_proj[3], np.float64)
    np.testing.assert_array_equal(got, exact["model.layers.1.mlp.experts.3.down_proj.weight"])


def parameters(model):
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.mark.parametrize("name", ["tiny", "glm5_2", "deepseek_v32"])
def test_parameter_source_covers_every_tensor_once(name):
    """The model's parameters and the checkpoint's tensors are the same numbers: names once each, rows add up."""
    config = getattr(DsaConfig, name)()
    kept = {
        "num_hidden_layers": 5,
        "indexer_types": config.indexer_types[:5],
        "mlp_layer_types": config.mlp_layer_types[:5],
    }
    config = dataclasses.replace(config, **kept)
    abstract = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))
    shapes, seen = tensor_shapes(config), []
    for path, parameter in parameters(abstract).items():
        names = parameter_source(path, config)
        seen += names
        assert math.prod(parameter.shape) == sum(math.prod(shapes[name]) for name in names), path
        if len(names) == 1:
            assert parameter.shape == shapes[names[0]], path
    assert len(seen) == len(set(seen))
    assert set(seen) == set(shapes)


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("model.layers.1.self_attn.indexer.k_norm.bias", ["model.layers.1.self_attn.indexer.k_norm.bias"]),
        ("lm_head.weight", ["lm_head.weight"]),
        ("mtp.shared_head_norm.weight", ["model.layers.5.shared_head.norm.weight"]),
        ("mtp.eh_proj.weight", ["model.layers.5.eh_proj.weight"]),
        ("mtp.layer.mlp.gate.weight", ["model.layers.5.mlp.gate.weight"]),
        ("mtp.layer.mlp.experts.down_proj", [f"model.layers.5.mlp.experts.{e}.down_proj.weight" for e in range(8)]),
        (
            "model.layers.2.mlp.experts.gate_up_proj",
            [f"model.layers.2.mlp.experts.{e}.{part}_proj.weight" for e in range(8) for part in ("gate", "up")],
        ),
    ],
)
def test_parameter_source(path, want):
    assert parameter_source(tuple(path.split(".")), TINY) == tuple(want)


def test_load_model_puts_every_tensor_in_its_place(saved):
    path, tensors = saved
    model = load_model(path)
    assert_same_tensors(model_tensors(model), tensors)
    experts = model.model.layers[1].mlp.experts
    for part, rows in (("gate", slice(0, 32)), ("up", slice(32, 64))):
        want = tensors[f"model.layers.1.mlp.experts.3.{part}_proj.weight"]
        np.testing.assert_array_equal(np.asarray(experts.gate_up_proj)[3, rows], want)
    np.testing.assert_array_equal(np.asarray(model.mtp.enorm.weight), tensors[f"{MTP}enorm.weight"])


def test_load_model_outlives_its_files(tmp_path):
    """Parameters are copies: they do not keep a file mapped that may go."""
    tensors = random_tensors(TINY)
    path = write_directory(tmp_path / "x", TINY, tensors)
    model = load_model(path)
    (path / SINGLE_FILE).write_bytes(bytes((path / SINGLE_FILE).stat().st_size))
    assert_same_tensors(model_tensors(model), tensors)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)], ids=lambda d: type(d).__name__
)
def test_load_model_dtype(saved, dtype):
    """Weights are rounded once; norms, router and the indexer's weights_proj stay float32."""
    path, tensors = saved
    for name, got in model_tensors(load_model(path, dtype=dtype)).items():
        float32 = "norm" in name or ".mlp.gate." in name or "weights_proj" in name
        want = tensors[name] if float32 else tensors[name].astype(ml_dtypes.bfloat16)
        assert got.dtype == want.dtype, name
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", jnp.float64, 3])
def test_load_model_refuses_dtype(saved, dtype, as_user):
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or None"):
        load_model(saved[0], dtype=dtype)


def test_load_model_bfloat16_checkpoint_stays_bfloat16(tmp_path):
    save_checkpoint(tmp_path / "x", TINY, random_tensors(TINY, ml_dtypes.bfloat16))
    model = load_model(tmp_path / "x")
    assert model.model.layers[0].self_attn.o_proj.weight.dtype == jnp.bfloat16
    assert model.model.norm.weight.dtype == jnp.float32


@pytest.mark.parametrize("eps", [None, 1e-6])
def test_load_model_latent_norm_eps(saved, eps):
    """Serving engines take the config's epsilon, transformers 5.24 takes 1e-6; other norms always take the config's."""
    attention = load_model(saved[0], latent_norm_eps=eps).model.layers[0].self_attn
    want = TINY.rms_norm_eps if eps is None else eps
    assert attention.q_a_layernorm.eps == attention.kv_a_layernorm.eps == want


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tp_rows_load_model_on_a_mesh(saved, ranks):
    """Each device holds its part, and the parts are the whole."""
    path, tensors = saved
    model = load_model(path, mesh=Mesh(np.array(jax.devices()[:ranks]), ("tp",)))
    assert_same_tensors(model_tensors(model), tensors)
    layer = model.model.layers[1]
    split = {"q_b_proj": layer.self_attn.q_b_proj.weight, "experts": layer.mlp.experts.gate_up_proj}
    for name, parameter in split.items():
        shards = parameter.get_value().addressable_shards
        assert {shard.data.shape[0] for shard in shards} == {parameter.shape[0] // ranks}, name
    assert layer.self_attn.indexer.wq_b.weight.get_value().sharding.is_fully_replicated


def test_tp_rows_load_model_refuses_a_mesh(saved, as_user):
    devices = np.array(jax.devices()[:3])
    with pytest.raises(ValueError, match="mesh's axes must be a tuple with 'tp'"):
        load_model(saved[0], mesh=Mesh(devices, ("model",)))
    with pytest.raises(ValueError, match="divisor of num_attention_heads = 4"):
        load_model(saved[0], mesh=Mesh(devices, ("tp",)))


@pytest.mark.parametrize("golden", GOLDENS)
def test_load_model_golden(golden, tmp_path):
    """Load, save, load: the same tensors, under the same names."""
    model = load_model(GOLDEN / golden)
    save_checkpoint(tmp_path / "again", model.config, model_tensors(model))
    assert_same_tensors(Checkpoint.open(tmp_path / "again"), safetensors.numpy.load_file(GOLDEN / golden / SINGLE_FILE))
