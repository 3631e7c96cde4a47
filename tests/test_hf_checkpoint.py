"""Checkpoint directories: what is on disk is exactly what the config asks for, or one ValueError names what is not."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from checkpoint_data import (
    GOLDEN,
    GOLDENS,
    MTP,
    TINY,
    assert_same_tensors,
    fp8_checkpoint,
    random_tensors,
    save_tiny,
    write_directory,
)

from dsa_jax.config import DsaConfig
from dsa_jax.hf_checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, dequantize_blocks, save_checkpoint, tensor_shapes
from dsa_jax.hf_config import BlockQuantization
from dsa_jax.safetensors_file import read_header, write_file


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("saved") / "tiny")


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
    if "another" not in message:
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path / "unsaved", TINY, tensors)
        assert not (tmp_path / "unsaved").exists()


def test_checkpoint_mtp_copies_are_allowed_and_ignored(tmp_path):
    copies = {
        f"{MTP}embed_tokens.weight": "model.embed_tokens.weight",
        f"{MTP}shared_head.head.weight": "lm_head.weight",
    }
    tensors = random_tensors(TINY)
    path = write_directory(tmp_path / "x", TINY, tensors | {copy: tensors[name] for copy, name in copies.items()})
    assert_same_tensors(Checkpoint.open(path), tensors)


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
