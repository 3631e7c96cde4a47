"""A Flax model of one's own whose dense attention is replaced by DeepSeek Sparse Attention.

`Block` is an ordinary pre-norm transformer block. What changes against `nnx.MultiHeadAttention` are three lines: the
attention module, the context that says what each row sees, and rows packed [batch * length, hidden].
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax import DsaConfig
from dsa_jax.context import Options, Sequences
from dsa_jax.layers import MlaAttention, Rope

# Only the widths of attention and indexer matter here.
CONFIG = DsaConfig.tiny(hidden_size=64, index_topk=16)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        width = CONFIG.hidden_size
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = MlaAttention(CONFIG, has_indexer=True, latent_norm_eps=1e-6, dtype=jnp.float32, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, context):
        attended, _, _ = self.attention(self.attention_norm(x), context, None, None, Rope(CONFIG))
        x = x + attended
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    def __init__(self, vocab: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, CONFIG.hidden_size, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(layers))

    def __call__(self, tokens):
        options = Options(index_topk=CONFIG.index_topk, sm_scale=CONFIG.sm_scale)
        batch, length = tokens.shape
        context = Sequences.of_batch(batch, length, options)  # whole sequences, causal, no cache
        x = self.embed(tokens.reshape(-1))
        for block in self.blocks:
            x = block(x, context)
        return self.embed.attend(x).reshape(*tokens.shape, -1)


def main() -> None:
    model = Model(vocab=100, layers=1, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 50), 0, 100)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    logits = forward(model, tokens)
    print("logits", logits.shape)
    # A row attends to at most index_topk earlier ones, so it does not change with what comes after it.
    other = forward(model, tokens.at[:, 40:].set(0))
    print("causal", bool(jnp.array_equal(logits[:, :40], other[:, :40])))
    print("keys a row keeps", CONFIG.index_topk)


if __name__ == "__main__":
    main()
