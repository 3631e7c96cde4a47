"""A model's parameters from a checkpoint's tensors, and back."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dsa_jax.checks import require
from dsa_jax.config import DsaConfig
from dsa_jax.hf_checkpoint import WEIGHT_DTYPES, Checkpoint, save_checkpoint, tensor_shapes
from dsa_jax.model import CausalLM, parameter_sharding

__all__ = ["Checkpoint", "load_model", "model_tensors", "parameter_source", "save_checkpoint", "tensor_shapes"]

# How the routed experts are stacked: the model's parameter, and an expert's tensors whose rows follow each other in it.
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def parameter_source(path: tuple[Any, ...], config: DsaConfig) -> tuple[str, ...]:
    """The tensors that make up the model's parameter at `path`, in order: their rows, one after another, are its rows.

    A parameter has its tensor's name, ("model", "layers", 3, "self_attn", "o_proj", "weight"), with two exceptions:
    routed experts are stacked, [E, 2 * moe_intermediate_size, hidden] (an expert's gate rows, then its up rows) and
    [E, hidden, moe_intermediate_size]; and layer num_hidden_layers of the checkpoint is the model's `mtp`.
    """
    names = [str(part) for part in path]
    if names[0] == "mtp":
        layer = ["model", "layers", str(config.num_hidden_layers)]
        inner = {"layer": [], "shared_head_norm": ["shared_head", "norm"]}.get(names[1], [names[1]])
        names = layer + inner + names[2:]
    if names[-2] == "experts":
        prefix, parts = ".".join(names[:-1]), _STACKED[names[-1]]
        return tuple(f"{prefix}.{e}.{part}.weight" for e in range(config.n_routed_experts) for part in parts)
    return (".".join(names),)


def load_model(
    path: str | Path, *, dtype: Any = None, latent_norm_eps: float | None = None, mesh: Mesh | None = None
) -> CausalLM:
    """Loads a checkpoint, one parameter at a time, each device reading only what it keeps.

    path: a Hugging Face directory, see `Checkpoint.open`.
    dtype: float32 or bfloat16 for weights and activations; None takes the checkpoint's own. Norms, the
        router and the indexer's weights_proj are float32 in any case.
    latent_norm_eps: epsilon of the two latent norms. None takes config.rms_norm_eps, as serving engines do;
        transformers 5.24 uses 1e-6 whatever the config says.
    mesh: spreads the weights over its axis "tp" by the model's rules; None puts them on the default device.
    Raises ValueError for a checkpoint that does not fit its config, a dtype or mesh that the model does not take.
    """
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    weights = checkpoint.dtype if dtype is None else _weight_dtype(dtype)
    graph, state = nnx.split(CausalLM(config, dtype=weights, latent_norm_eps=latent_norm_eps, rngs=None))
    loaded = [
        (parameter_path, variable.replace(_place(checkpoint, parameter_path, variable.get_value(), mesh)))
        for parameter_path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def _weight_dtype(dtype: Any) -> np.dtype:
    """A dtype, a scalar type or a name, as one of the dtypes that weights may have."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    legal = {known.name: known for known in WEIGHT_DTYPES}
    require(name in legal, "dtype", repr(dtype), "float32, bfloat16 or None")
    return legal[name]


def _place(checkpoint: Checkpoint, path: tuple, parameter: Any, mesh: Mesh | None) -> jax.Array:
    """Reads the parameter, or of a split one the part that each device keeps."""
    names = parameter_source(path, checkpoint.config)
    shape, dtype = parameter.shape, parameter.dtype

    def read(index: Any) -> np.ndarray:
        if len(shape) < 3:  # a copy: a device array must not keep the file mapped
            return np.array(checkpoint[names[0]][index], dtype)
        parts = len(names) // shape[0]
        chosen = range(*index[0].indices(shape[0]))
        experts = [np.concatenate([checkpoint[names[e * parts + i]] for i in range(parts)])[index[1:]] for e in chosen]
        return np.stack(experts).astype(dtype, copy=False)

    if mesh is None:
        return jax.device_put(read((slice(None),) * len(shape)))
    sharding = parameter_sharding(checkpoint.config, mesh, path, shape)
    return jax.make_array_from_callback(shape, sharding, read)


def model_tensors(model: CausalLM) -> Mapping[str, jax.Array]:
    """The model's weights under the checkpoint's names, for `save_checkpoint`. Experts are sliced out when asked."""
    return _ModelTensors(model)


class _ModelTensors(Mapping[str, jax.Array]):
    def __init__(self, model: CausalLM):
        self._parameters: dict[str, tuple[jax.Array, int, int]] = {}
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            names = parameter_source(path, model.config)
            self._parameters |= {name: (variable.get_value(), part, len(names)) for part, name in enumerate(names)}

    def __getitem__(self, name: str) -> jax.Array:
        parameter, part, parts = self._parameters[name]
        if parameter.ndim < 3:
            return parameter
        per_expert = parts // parameter.shape[0]
        rows = parameter.shape[1] // per_expert
        first = part % per_expert * rows
        return parameter[part // per_expert, first : first + rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
