"""Checkpoints: what is on disk is exactly what the config asks for, or one ValueError names what is not."""

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
from flax import nnx
from jax.sharding import Mesh

from dsa_jax.checkpoint import (
    Checkpoint,
    load_model,
    model_tensors,
    parameter_source,
    save_checkpoint,
    tensor_shapes,
)
from dsa_jax.config import DsaConfig
from dsa_jax.hf_checkpoint import INDEX_FILE, SINGLE_FILE, dequantize_blocks
from dsa_jax.hf_config import BlockQuantization
from dsa_jax.model import CausalLM
from dsa_jax.safetensors_file import read_header, write_file

GOLDEN = Path(__file__).parent / "golden"
GOLDENS = ("tiny_glm5", "tiny_glm52", "tiny_dsv32")
TINY = DsaConfig.tiny()
SHARED_LAYER = TINY.indexer_types.index("shared")
MTP = f"model.layers.{TINY.num_hidden_layers}."


def random_tensors(config, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in tensor_shapes(config).items()}


def write_directory(path, config, tensors):
    """A checkpoint with whatever tensors it is given: `save_checkpoint` would refuse the wrong ones."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    write_file(path / SINGLE_FILE, tensors)
    return path


def assert_same_tensors(got, want):
    assert set(got) == set(want)
    for name, tensor in want.items():
        value = np.asarray(got[name])
        assert value.dtype == tensor.dtype, name
        np.testing.assert_array_equal(value, tensor, err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A sharded checkpoint of the tiny config: its path and its tensors."""
    path, tensors = tmp_path_factory.mktemp("saved") / "tiny", random_tensors(TINY)
    save_checkpoint(path, TINY, tensors, shard_bytes=300_000)
    return path, tensors


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of it, to break."""
    return Path(shutil.copytree(saved[0], tmp_path / "broken"))


@pytest.mark.parametrize(
    ("name", "billions", "indexer_billions"),
    [("glm5", 743.911, 0.731), ("glm5_2", 743.377, 0.197), ("deepseek_v32", 671.878, 0.852)],
)
def test_tensor_shapes_count_the_published_parameters(name, billions, indexer_billions):
    config = dataclasses.replace(getattr(DsaConfig, name)(), num_nextn_predict_layers=0)
    sizes = {tensor: math.prod(shape) / 1e9 for tensor, shape in tensor_shapes(config).items()}
    assert sum(sizes.values()) == pytest.approx(billions, abs=1e-3)
    assert sum(size for tensor, size in sizes.items() if ".indexer." in tensor) == pytest.approx(
        indexer_billions, abs=1e-3
    )


@pytest.mark.parametrize("golden", GOLDENS)
def test_checkpoint_golden(golden):
    """Names, shapes and values are those that safetensors' own reader finds."""
    checkpoint = Checkpoint.open(GOLDEN / golden)
    want = safetensors.numpy.load_file(GOLDEN / golden / SINGLE_FILE)
    assert_same_tensors(checkpoint, want)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in want.values())
    assert checkpoint.names() == tuple(tensor_shapes(checkpoint.config))
    assert not checkpoint["model.norm.weight"].flags.writeable


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [2**30, 100_000, 1], ids=["one file", "shards", "a file a tensor"])
def test_checkpoint_round_trip(tmp_path, dtype, shard_bytes):
    config = DsaConfig.tiny(num_hidden_layers=3, n_routed_experts=4, vocab_size=96)
    tensors = random_tensors(config, dtype)
    save_checkpoint(tmp_path / "saved", config, tensors, shard_bytes=shard_bytes)
    checkpoint = Checkpoint.open(tmp_path / "saved")
    assert checkpoint.config == config
    assert_same_tensors(checkpoint, tensors)
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) == 1 if shard_bytes == 2**30 else len(files) > 5
    assert (tmp_path / "saved" / INDEX_FILE).exists() == (shard_bytes != 2**30)
    if shard_bytes == 100_000:
        assert all(sum(t.nbytes for t in read_header(file).values()) <= shard_bytes for file in files)
    assert [child.name for child in tmp_path.iterdir()] == ["saved"]


def test_checkpoint_is_what_safetensors_reads(saved):
    path, tensors = saved
    weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    assert set(weight_map) == set(tensors)
    for name in (*list(tensors)[:5], f"{MTP}eh_proj.weight"):
        with safetensors.safe_open(path / weight_map[name], framework="numpy") as file:
            np.testing.assert_array_equal(file.get_tensor(name), tensors[name])


def test_checkpoint_reads_unaligned_data(tmp_path):
    """Nothing obliges a header to end on a multiple of eight bytes."""
    want = {"a": np.arange(5, dtype=np.float32), "b": np.arange(3).astype(ml_dtypes.bfloat16)}
    write_file(tmp_path / "x", want)
    raw = (tmp_path / "x").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    (tmp_path / "x").write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    mapped = np.memmap(tmp_path / "x", np.uint8, mode="r")
    for name, stored in read_header(tmp_path / "x").items():
        np.testing.assert_array_equal(np.array(stored.read(mapped)), want[name])


NAMED = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda t: t.pop(NAMED), rf"1 missing: {NAMED}", id="missing"),
        pytest.param(lambda t: t.update(extra=np.zeros(1, np.float32)), "1 unexpected: extra", id="extra"),
        pytest.param(
            lambda t: t.update({NAMED + "s": t.pop(NAMED)}),
            rf"1 missing: {NAMED}; 1 unexpected: {NAMED}s",
            id="renamed",
        ),
        pytest.param(
            lambda t: t.update({NAMED: t[NAMED].T}),
            rf"1 of another shape: {NAMED} \[96, 64\] in place of \[64, 96\]",
            id="transposed",
        ),
        pytest.param(
            lambda t: [
                t.pop(f"model.layers.1.mlp.experts.{e}.{p}_proj.weight") for e in range(8) for p in ("up", "down")
            ],
            r"16 missing: (model[\w.]+, ){10}\.\.\.",
            id="many",
        ),
    ],
)
def test_checkpoint_names_wrong_tensors(tmp_path, edit, message, as_user):
    tensors = random_tensors(TINY)
    edit(tensors)
    path = write_directory(tmp_path / "wrong", TINY, tensors)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(path)
    with pytest.raises(ValueError, match=message):
        load_model(path)
    if "another" not in message:
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path / "unsaved", TINY, tensors)
        assert not (tmp_path / "unsaved").exists()


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


def test_checkpoint_mtp_copies_are_allowed_and_ignored(tmp_path):
    copies = {
        f"{MTP}embed_tokens.weight": "model.embed_tokens.weight",
        f"{MTP}shared_head.head.weight": "lm_head.weight",
    }
    tensors = random_tensors(TINY)
    path = write_directory(tmp_path / "x", TINY, tensors | {copy: tensors[name] for copy, name in copies.items()})
    assert_same_tensors(Checkpoint.open(path), tensors)


def test_checkpoint_tied_head_is_absent(tmp_path, as_user):
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    assert "lm_head.weight" not in tensor_shapes(config)
    save_checkpoint(tmp_path / "tied", config, random_tensors(config))
    assert load_model(tmp_path / "tied").lm_head is None
    path = write_directory(tmp_path / "untied", config, random_tensors(TINY))
    with pytest.raises(ValueError, match=r"1 unexpected: lm_head\.weight"):
        load_model(path)


def test_checkpoint_files_that_are_not_there(tmp_path, broken, as_user):
    with pytest.raises(ValueError, match=r"path must be a directory that holds a config\.json"):
        Checkpoint.open(tmp_path / "nowhere")
    index = json.loads((broken / INDEX_FILE).read_text())
    shard = index["weight_map"][NAMED]
    (broken / shard).rename(broken / "elsewhere")
    with pytest.raises(ValueError, match=f"shard must be a file beside it, got '{shard}'"):
        Checkpoint.open(broken)
    (broken / INDEX_FILE).unlink()
    with pytest.raises(ValueError, match=r"path must be a directory that holds model\.safetensors or"):
        Checkpoint.open(broken)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index.clear(), "weight_map must be an object of file names"),
        (lambda index: index.update(weight_map=["a"]), "weight_map must be an object of file names"),
        (lambda index: index["weight_map"].update(other=index["weight_map"][NAMED]), "1 missing: other"),
        (lambda index: index["weight_map"].update({NAMED: "../x"}), "shard must be a file beside it"),
        (
            lambda index: index["weight_map"].update({NAMED: index["weight_map"]["model.norm.weight"]}),
            f"1 in another shard: {NAMED}",
        ),
    ],
    ids=["empty", "list", "not in its shard", "path", "another shard"],
)
def test_checkpoint_index_that_is_wrong(broken, edit, message, as_user):
    index = json.loads((broken / INDEX_FILE).read_text())
    edit(index)
    (broken / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(broken)


def test_checkpoint_index_that_is_no_json(broken, as_user):
    (broken / INDEX_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is not JSON"):
        Checkpoint.open(broken)


def test_checkpoint_tensor_in_two_shards(broken, as_user):
    first, second = sorted(broken.glob("*.safetensors"))[:2]
    tensors = {name: np.zeros(stored.shape, stored.dtype) for name, stored in read_header(first).items()}
    write_file(second, tensors)
    with pytest.raises(ValueError, match=rf"{second.name} holds the wrong tensors: \d+ twice: "):
        Checkpoint.open(broken)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1], ids="{} bytes".format)
def test_checkpoint_cut_short(tmp_path, keep, as_user):
    path = write_directory(tmp_path / "cut", TINY, random_tensors(TINY))
    raw = (path / SINGLE_FILE).read_bytes()
    (path / SINGLE_FILE).write_bytes(raw[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors must be .* as its header says, got"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{", "has no safetensors header"),
        ("[]", "header must be a JSON object"),
        ('{"a": 1}', "a in .* must be a JSON object"),
        ('{"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}', "dtype must be one of F32, BF16, F8_E4M3"),
        ('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "shape must be a list of lengths"),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "data_offsets must be two offsets"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "data_offsets must be 8 bytes apart"),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "first byte must be"),
        (
            '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            ' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            "b in .*: first byte must be",
        ),
    ],
)
def test_checkpoint_malformed_header(tmp_path, header, message, as_user):
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(ValueError, match=message):
        read_header(tmp_path / "x")


def test_checkpoint_fuzzed_bytes(tmp_path, as_user):
    """Any byte of the length or the header may flip: a file is read as the format says, or refused."""
    write_file(tmp_path / "x", {"a": np.ones((2, 3), np.float32), "b": np.ones(4, ml_dtypes.bfloat16)})
    raw = (tmp_path / "x").read_bytes()
    rng, refused = np.random.default_rng(0), 0
    for position in range(len(raw) - 32):
        changed = bytearray(raw)
        changed[position] ^= 1 << int(rng.integers(8))
        (tmp_path / "x").write_bytes(changed)
        try:
            read_header(tmp_path / "x")
        except ValueError:
            refused += 1
    assert refused > 100


def fp8_checkpoint(path, config):
    """As published: the layers' matrices in e4m3 with block scales, the rest bfloat16. Returns the exact values."""
    rng = np.random.default_rng(1)
    rows, columns = config.quantization.weight_block_size
    tensors, exact = {}, {}
    kept = ("embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj", "norm")
    for name, tensor in random_tensors(config, ml_dtypes.bfloat16).items():
        if any(part in name for part in kept):
            tensors[name] = exact[name] = tensor
            continue
        height, width = tensor.shape
        scale = 2.0 ** rng.integers(-8, 3, (-(-height // rows), -(-width // columns))).astype(np.float32)
        stored = rng.normal(size=tensor.shape).astype(ml_dtypes.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = stored, scale
        exact[name] = stored.astype(np.float32) * np.kron(scale, np.ones((rows, columns)))[:height, :width]
    return write_directory(path, config, tensors), exact


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


def test_quant_dequantize_partial_blocks():
    weight = np.ones((5, 7), ml_dtypes.float8_e4m3fn)
    scale = np.arange(6, dtype=np.float32).reshape(2, 3)
    want = np.repeat(np.repeat(scale, 3, axis=0), 3, axis=1)[:5, :7]
    np.testing.assert_array_equal(dequantize_blocks(weight, scale, (3, 3)), want)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda t, n: t.pop(n + "_scale_inv"), "1 missing: {}_scale_inv", id="no scale"),
        pytest.param(
            lambda t, n: t.update({n: t[n].astype(np.float32)}), "1 unexpected: {}_scale_inv", id="scale of a float32"
        ),
        pytest.param(
            lambda t, n: t.update({n + "_scale_inv": np.ones((9, 9), np.float32)}),
            r"1 of another shape: {}_scale_inv \[9, 9\] in place of",
            id="shape",
        ),
        pytest.param(
            lambda t, n: t.update({n + "_scale_inv": t[n + "_scale_inv"].astype(ml_dtypes.bfloat16)}),
            "1 of another dtype: {}_scale_inv bfloat16 in place of float32",
            id="dtype",
        ),
        pytest.param(
            lambda t, n: t.update({"model.norm.weight": t["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn)}),
            r"model\.norm\.weight's dtype must be float32 or bfloat16: only matrices",
            id="e4m3 norm",
        ),
    ],
)
def test_quant_checkpoint_wrong_scales(tmp_path, edit, message, as_user):
    config = dataclasses.replace(TINY, quantization=BlockQuantization((128, 128)))
    path, _ = fp8_checkpoint(tmp_path / "fp8", config)
    mapped = np.fromfile(path / SINGLE_FILE, np.uint8)
    tensors = {name: stored.read(mapped) for name, stored in read_header(path / SINGLE_FILE).items()}
    edit(tensors, NAMED)
    write_file(path / SINGLE_FILE, tensors)
    with pytest.raises(ValueError, match=message.format(NAMED)):
        Checkpoint.open(path)


def test_quant_checkpoint_e4m3_without_quantization_config(tmp_path, as_user):
    path, _ = fp8_checkpoint(tmp_path / "fp8", dataclasses.replace(TINY, quantization=BlockQuantization((128, 128))))
    (path / "config.json").write_text(json.dumps(TINY.to_dict()))
    with pytest.raises(ValueError, match=r"dtype must be .*: its config\.json has no quantization_config"):
        Checkpoint.open(path)


def test_save_checkpoint_leaves_nothing_half_written(tmp_path, as_user):
    tensors = random_tensors(TINY)
    tensors[f"{MTP}enorm.weight"] = np.zeros(3, np.float32)  # among the last to be written
    with pytest.raises(ValueError, match=r"enorm\.weight's shape must be \[64\], got \[3\]"):
        save_checkpoint(tmp_path / "new", TINY, tensors, shard_bytes=100_000)
    assert list(tmp_path.iterdir()) == []


def test_save_checkpoint_refuses(tmp_path, saved, as_user):
    tensors = random_tensors(TINY)
    with pytest.raises(ValueError, match="path must be absent or an empty directory"):
        save_checkpoint(saved[0], TINY, tensors)
    with pytest.raises(ValueError, match="shard_bytes must be positive, got 0"):
        save_checkpoint(tmp_path / "x", TINY, tensors, shard_bytes=0)
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, got float64"):
        save_checkpoint(tmp_path / "x", TINY, {name: t.astype(np.float64) for name, t in tensors.items()})
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", TINY, tensors)
    assert len(Checkpoint.open(tmp_path / "empty")) == len(tensors)


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
