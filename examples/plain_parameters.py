"""Without Flax: the parameters as a plain dict of arrays, and the forward pass as a function of it.

The dict is what optimisers, checkpoint libraries and your own sharding code take. Its names are Hugging Face's.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax import CausalLM, DsaConfig
from dsa_jax.context import Sequences


def split(model: CausalLM):
    """The parameters as nested dicts of arrays, and forward(parameters, tokens[B, S]) -> logits[B, S, V]."""
    structure, state = nnx.split(model)
    options = model.options()

    def forward(parameters, tokens):
        filled = jax.tree.map(lambda x: x, state)  # a copy of the containers, not of the arrays
        nnx.replace_by_pure_dict(filled, parameters)
        whole = nnx.merge(structure, filled)
        batch, length = tokens.shape
        step = whole.forward(tokens.reshape(-1), Sequences.of_batch(batch, length, options), None)
        return whole.logits(step.hidden).reshape(batch, length, -1)

    return nnx.to_pure_dict(state), forward


def main() -> None:
    model = CausalLM(DsaConfig.tiny(num_hidden_layers=1), rngs=nnx.Rngs(0))
    parameters, forward = split(model)
    print("an example", parameters["model"]["layers"][0]["self_attn"]["q_a_proj"]["weight"].shape)
    tokens = jax.random.randint(jax.random.key(0), (1, 40), 0, 256)
    forward = jax.jit(forward)
    logits = forward(parameters, tokens)
    print("same as the model", bool(jnp.allclose(logits, model(tokens), atol=1e-5)))
    halved = jax.tree.map(lambda x: x / 2, parameters)  # any function of a tree
    print("other parameters, other logits", not bool(jnp.allclose(logits, forward(halved, tokens), atol=1e-3)))


if __name__ == "__main__":
    main()
