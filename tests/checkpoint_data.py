"""Checkpoints to test with: the tiny config, filled with random numbers or block-scaled e4m3."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from dsa_jax.config import DsaConfig
from dsa_jax.hf_checkpoint import SINGLE_FILE, save_checkpoint, tensor_shapes
from dsa_jax.safetensors_file import write_file

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


def save_tiny(path):
    """A sharded checkpoint of the tiny config: its path and its tensors."""
    tensors = random_tensors(TINY)
    save_checkpoint(path, TINY, tensors, shard_bytes=300_000)
    return path, tensors
