"""A decode step as a file: `jax.export` of one step over paged caches, loaded and run without the model's code.

Parameters and caches go in as lists of arrays, so the file needs no Python classes to be read. The step is compiled for
one batch size, number of pages and table width. `export(..., platforms=...)` may name others than this machine's.
Needs `pip install flatbuffers`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from dsa_jax import CausalLM, DsaConfig
from dsa_jax.context import PagedDecode


def flat_step(model: CausalLM, num_pages: int, page_size: int, cache_dtype):
    """step(parameters, caches, tokens[B], block_table[B, P], seq_lens[B]) -> logits, caches; and its first two."""
    structure, state = nnx.split(model)
    parameters, parameters_tree = jax.tree.flatten(state)
    caches, caches_tree = jax.tree.flatten(model.new_caches(num_pages, page_size, cache_dtype))
    options = model.options()

    def step(parameters, caches, tokens, block_table, seq_lens):
        whole = nnx.merge(structure, jax.tree.unflatten(parameters_tree, parameters))
        context = PagedDecode(block_table, seq_lens, 1, options)
        done = whole.forward(tokens, context, jax.tree.unflatten(caches_tree, caches))
        return whole.logits(done.hidden), jax.tree.leaves(done.caches)

    return step, parameters, caches


def main() -> None:
    model = CausalLM(DsaConfig.tiny(num_hidden_layers=1), rngs=nnx.Rngs(0))
    step, parameters, caches = flat_step(model, num_pages=8, page_size=16, cache_dtype=jnp.float32)
    jitted = jax.jit(step, donate_argnums=1)
    table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    arguments = (parameters, caches, jnp.array([5, 9], jnp.int32), table, jnp.array([1, 1], jnp.int32))
    blob = export.export(jitted)(*arguments).serialize()
    print("bytes", len(blob))

    call = jax.jit(export.deserialize(bytearray(blob)).call)
    logits, written = call(*arguments)
    want, _ = jitted(*arguments)
    print("same as the model", bool(jnp.allclose(logits, want, atol=1e-5)))
    logits, _ = call(parameters, written, logits.argmax(-1).astype(jnp.int32), table, jnp.array([2, 2], jnp.int32))
    print("next tokens", logits.argmax(-1).shape)


if __name__ == "__main__":
    main()
