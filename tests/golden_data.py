"""The tiny checkpoints and what transformers 5.24 computes from them, in float32 on a CPU."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dsa_jax.config import DsaConfig

FOLDER = Path(__file__).parent / "golden"
NAMES = ("tiny_glm5", "tiny_glm52", "tiny_dsv32")
TRANSFORMERS_LATENT_EPS = 1e-6  # transformers 5.24 gives the latent norms this, whatever the config says


@functools.cache
def outputs(name: str) -> dict[str, np.ndarray]:
    """Everything recorded for a checkpoint, by key; see the keys for their layer."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


@functools.cache
def config(name: str) -> DsaConfig:
    return DsaConfig.from_pretrained(FOLDER / name)


@functools.cache
def tensors(name: str) -> dict[str, np.ndarray]:
    return load_file(FOLDER / name / "model.safetensors")


def tokens(name: str) -> jax.Array:
    return jnp.asarray(outputs(name)["input_ids"])


def indices_of_mask(mask: np.ndarray, width: int) -> np.ndarray:
    """Ascending columns of a boolean [..., S] mask, padded with -1 to `width`."""
    columns = np.where(mask, np.arange(mask.shape[-1]), mask.shape[-1])
    ascending = np.sort(columns, axis=-1)[..., :width]
    return np.where(ascending == mask.shape[-1], -1, ascending).astype(np.int32)
