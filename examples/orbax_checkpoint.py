"""Saving a model with Orbax (`pip install orbax-checkpoint`), and restoring it without a second copy in memory."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from dsa_jax import CausalLM, DsaConfig


def save(path: Path, model: CausalLM) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(nnx.state(model)))


def restore(path: Path, config: DsaConfig, **options) -> CausalLM:
    """Into the shapes of an abstract model. Their shardings say where every weight goes: here all to one device."""
    abstract = CausalLM(config, rngs=None, **options)
    shapes = nnx.to_pure_dict(nnx.state(abstract))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(abstract, nnx.State(checkpointer.restore(path, shapes)))
    return abstract


def main() -> None:
    config = DsaConfig.tiny(num_hidden_layers=1)
    model = CausalLM(config, rngs=nnx.Rngs(0))
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model", model)
        restored = restore(Path(folder) / "model", config)
    pairs = zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, restored)), strict=True)
    print("same weights", all(np.array_equal(one, other) for one, other in pairs))


if __name__ == "__main__":
    main()
