"""Flax nnx modules of one decoder layer. Every module works on packed rows [T, hidden]; a `Context` says what they see.

Parameters carry Hugging Face's names and orientation (`weight[out, in]`), so a checkpoint's table of names is the
model's. With `rngs=None` a module holds the shapes of its weights and no numbers, for a checkpoint to fill.
Letters: T rows, H heads, R kv_lora_rank, n/r/v the nope, rope and value head widths, I index heads, D index head width,
E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from dsa_jax.checks import refuse
from dsa_jax.config import DsaConfig
from dsa_jax.context import Context
from dsa_jax.dispatch import target_of_arrays
from dsa_jax.grouped import grouped_matmul
from dsa_jax.mla import dense_mla
from dsa_jax.parallel import over_experts, over_heads
from dsa_jax.rope import RopeLayout, apply_rope, attention_factor, rope_frequencies

INDEX_K_NORM_EPS = 1e-6  # torch's LayerNorm default is 1e-5; every DSA implementation sets this


class Linear(nnx.Module):
    """y = x @ weight.T, accumulated in float32."""

    def __init__(self, inputs: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs | None):
        self.weight = nnx.Param(initial(rngs, (outputs, inputs), dtype))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return matmul(x, self.weight[...])


class RMSNorm(nnx.Module):
    """weight * x / sqrt(mean(x^2) + eps), in float32, rounded once to x's dtype."""

    def __init__(self, width: int, eps: float):
        self.weight = nnx.Param(jnp.ones(width, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "T W"]) -> Float[Array, "T W"]:
        x32 = x.astype(jnp.float32)
        unit = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (unit * self.weight[...][None]).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, in float32."""

    def __init__(self, width: int, eps: float):
        self.weight = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "T W"]) -> Float[Array, "T W"]:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        unit = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        return (unit * self.weight[...][None] + self.bias[...][None]).astype(x.dtype)


class Rope:
    """The rotary embedding that main queries, main keys and the indexer share; layouts may differ."""

    def __init__(self, config: DsaConfig):
        self.frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
        self.factor = attention_factor(config.rope_scaling)

    def __call__(
        self, x: Float[Array, "T ... r"], positions: Int[Array, " T"], layout: RopeLayout
    ) -> Float[Array, "T ... r"]:
        return apply_rope(x, positions, self.frequencies, layout=layout, factor=self.factor)


class Indexer(nnx.Module):
    """The lightning indexer's projections (DeepSeek-V3.2 technical report, section 2.1).

    score[t, s] = sum_i weights[t, i] * relu(q[t, i] . k[s]), with I^-0.5 and D^-0.5 folded into `weights`.
    """

    def __init__(self, config: DsaConfig, *, dtype: Any, rngs: nnx.Rngs | None):
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.rope_width, self.rope_layout = config.qk_rope_head_dim, config.indexer_rope_layout
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, dtype=dtype, rngs=rngs)
        self.wk = Linear(config.hidden_size, self.width, dtype=dtype, rngs=rngs)
        self.k_norm = LayerNorm(self.width, INDEX_K_NORM_EPS)
        self.weights_proj = Linear(config.hidden_size, self.heads, dtype=jnp.float32, rngs=rngs)

    def queries(
        self, h: Float[Array, "T hidden"], q_latent: Float[Array, "T Q"], positions: Int[Array, " T"], rope: Rope
    ) -> tuple[Float[Array, "T I D"], Float[Array, "T I"]]:
        q = self.wq_b(q_latent).reshape(-1, self.heads, self.width)
        weights = self.weights_proj(h.astype(jnp.float32)) * (self.heads**-0.5 * self.width**-0.5)
        return self._rotate(q, positions, rope), weights

    def keys(self, h: Float[Array, "T hidden"], positions: Int[Array, " T"], rope: Rope) -> Float[Array, "T D"]:
        return self._rotate(self.k_norm(self.wk(h)), positions, rope)

    def _rotate(self, x: Array, positions: Array, rope: Rope) -> Array:
        """The rotary part comes FIRST in the index head."""
        rotated = rope(x[..., : self.rope_width], positions, self.rope_layout)
        return jnp.concatenate([rotated, x[..., self.rope_width :]], axis=-1)


class MlaAttention(nnx.Module):
    """Multi-head latent attention over the keys that the indexer selected.

    The sparse path is absorbed: queries go through W_uk into the latent space, where the cached latents are keys and
    values at once. The dense path expands keys and values per head. Both compute
        softmax_t(sm_scale * (q_nope . W_uk ckv_t + q_rope . k_rope_t)) W_uv ckv_t
    """

    def __init__(
        self, config: DsaConfig, *, has_indexer: bool, latent_norm_eps: float, dtype: Any, rngs: nnx.Rngs | None
    ):
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        self.heads, self.rank = heads, rank
        self.nope, self.value = config.qk_nope_head_dim, config.v_head_dim
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, dtype=dtype, rngs=rngs)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, latent_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim, dtype=dtype, rngs=rngs)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, rank + config.qk_rope_head_dim, dtype=dtype, rngs=rngs)
        self.kv_a_layernorm = RMSNorm(rank, latent_norm_eps)
        self.kv_b_proj = Linear(rank, heads * (self.nope + self.value), dtype=dtype, rngs=rngs)
        self.o_proj = Linear(heads * self.value, config.hidden_size, dtype=dtype, rngs=rngs)
        self.indexer = Indexer(config, dtype=dtype, rngs=rngs) if has_indexer else None

    def __call__(
        self,
        h: Float[Array, "T hidden"],
        context: Context,
        cache: Any,
        indices: Int[Array, "T K"] | None,
        rope: Rope,
    ) -> tuple[Float[Array, "T hidden"], Any, Int[Array, "T K"] | None]:
        """Returns the output, the cache with this step's keys, and the indices that the next layers may share."""
        positions = context.positions
        with jax.named_scope("mla_projections"):
            q_latent = self.q_a_layernorm(self.q_a_proj(h))
            q = self.q_b_proj(q_latent).reshape(h.shape[0], self.heads, -1)
            q_nope, q_rope = q[..., : self.nope], rope(q[..., self.nope :], positions, "interleaved")
            latents = self._latents(h, positions, rope)
        with jax.named_scope("index_projections"):
            index_keys = None if self.indexer is None else self.indexer.keys(h, positions, rope)
        with jax.named_scope("cache"):
            cache: Any = context.write(cache, latents, index_keys)
        if context.options.dense:
            out = self._attend_dense(q_nope, q_rope, *context.visible(cache, latents), context)
            return self._project(out), cache, None
        if self.indexer is not None and index_keys is not None and not context.options.reuse_indices:
            with jax.named_scope("index_projections"):
                index_q, weights = self.indexer.queries(h, q_latent, positions, rope)
            with jax.named_scope("indexer"):
                indices = context.select(cache, index_q, index_keys, weights)
        elif indices is None:
            refuse("indices", None, "the selection of an earlier layer: this layer shares one and has no indexer")
        out = self._attend_sparse(q_nope, q_rope, latents, context, cache, indices)
        return self._project(out), cache, indices

    def _project(self, out: Float[Array, "T Hv"]) -> Float[Array, "T hidden"]:
        with jax.named_scope("o_proj"):
            return self.o_proj(out)

    def _latents(self, h: Array, positions: Array, rope: Rope) -> tuple[Float[Array, "T R"], Float[Array, "T r"]]:
        """The latent after its norm and the one rotary key that all heads share: what is cached."""
        kv = self.kv_a_proj_with_mqa(h)
        return self.kv_a_layernorm(kv[..., : self.rank]), rope(kv[..., self.rank :], positions, "interleaved")

    def _attend_sparse(self, q_nope, q_rope, latents, context, cache, indices) -> Float[Array, "T Hv"]:
        w_uk, w_uv = self._up_projections()
        with jax.named_scope("sparse_mla"):
            absorbed = _einsum("thn,hnr->thr", q_nope, w_uk)
            out = context.attend(cache, jnp.concatenate([absorbed, q_rope], axis=-1), latents, indices)
            return _einsum("thr,hvr->thv", out, w_uv).reshape(out.shape[0], -1)

    def _attend_dense(self, q_nope, q_rope, keys, starts, ends, context) -> Float[Array, "T Hv"]:
        w_uk, w_uv = self._up_projections()
        with jax.named_scope("dense_mla"):
            ckv, k_rope = keys[:, : self.rank], keys[:, self.rank :]
            k_nope = _einsum("tr,hnr->thn", ckv, w_uk)
            k_rope = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:2], k_rope.shape[-1]))
            q, k = jnp.concatenate([q_nope, q_rope], axis=-1), jnp.concatenate([k_nope, k_rope], axis=-1)
            options = context.options

            def attend(*arrays: Array) -> Array:
                return dense_mla(*arrays, sm_scale=options.sm_scale, implementation=options.implementation)[0]

            out = over_heads(attend, options.mesh, split=3)(q, k, _einsum("tr,hvr->thv", ckv, w_uv), starts, ends)
            return out.reshape(out.shape[0], -1)

    def _up_projections(self) -> tuple[Float[Array, "H n R"], Float[Array, "H v R"]]:
        weight = self.kv_b_proj.weight[...].reshape(self.heads, self.nope + self.value, self.rank)
        return weight[:, : self.nope], weight[:, self.nope :]


class Mlp(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: Any, rngs: nnx.Rngs | None):
        self.gate_proj = Linear(hidden, intermediate, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden, intermediate, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(intermediate, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nnx.Module):
    """Sigmoid router, with a bias for the choice only and a limit on groups (DeepSeek-V3 report, section 2.1.2)."""

    def __init__(self, config: DsaConfig, *, rngs: nnx.Rngs | None):
        self.groups, self.kept_groups = config.n_group, config.topk_group
        self.experts_per_row = config.num_experts_per_tok
        self.normalise, self.scale = config.norm_topk_prob, config.routed_scaling_factor
        self.weight = nnx.Param(initial(rngs, (config.n_routed_experts, config.hidden_size), jnp.float32))
        self.e_score_correction_bias = nnx.Param(jnp.zeros(config.n_routed_experts, jnp.float32))

    def __call__(self, h: Float[Array, "T hidden"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """The experts of each row and their weights, which leave the bias out."""
        scores = jax.nn.sigmoid(matmul(h.astype(jnp.float32), self.weight[...]))
        _, experts = jax.lax.top_k(self._eligible(scores), self.experts_per_row)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return experts, weights * self.scale

    def _eligible(self, scores: Float[Array, "T E"]) -> Float[Array, "T E"]:
        biased = scores + self.e_score_correction_bias[...][None]
        if self.groups == 1:
            return biased
        grouped = biased.reshape(biased.shape[0], self.groups, -1)
        strength = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        _, kept = jax.lax.top_k(strength, self.kept_groups)
        keep = jnp.any(kept[:, :, None] == jnp.arange(self.groups)[None, None], axis=1)
        return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(biased.shape)


class Experts(nnx.Module):
    """The routed experts, stacked: gate rows first in gate_up_proj[E, 2 * intermediate, hidden]."""

    def __init__(self, config: DsaConfig, *, dtype: Any, rngs: nnx.Rngs | None):
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nnx.Param(initial(rngs, (experts, 2 * width, hidden), dtype))
        self.down_proj = nnx.Param(initial(rngs, (experts, hidden, width), dtype))

    def __call__(
        self, h: Float[Array, "T hidden"], experts: Int[Array, "T k"], weights: Float[Array, "T k"], mesh: Any = None
    ) -> Float[Array, "T hidden"]:
        """sum_j weights[t, j] * expert[experts[t, j]](h[t]); on a mesh from each rank's share of the experts."""
        run = over_experts(_routed, mesh)
        return run(h, experts, weights, self.gate_up_proj[...], self.down_proj[...]).astype(h.dtype)


class MoE(nnx.Module):
    """Routed experts plus the shared experts, which take every row with weight 1."""

    def __init__(self, config: DsaConfig, *, dtype: Any, rngs: nnx.Rngs | None):
        self.gate = Router(config, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = Mlp(config.hidden_size, shared, dtype=dtype, rngs=rngs) if shared else None

    def __call__(self, h: Float[Array, "T hidden"], mesh: Any = None) -> Float[Array, "T hidden"]:
        routed = self.experts(h, *self.gate(h), mesh)
        return routed if self.shared_experts is None else routed + self.shared_experts(h)


class DecoderLayer(nnx.Module):
    """x += attention(norm(x)); x += ffn(norm(x))."""

    def __init__(
        self,
        config: DsaConfig,
        *,
        has_indexer: bool,
        sparse_mlp: bool,
        latent_norm_eps: float,
        dtype: Any,
        rngs: nnx.Rngs | None,
    ):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MlaAttention(
            config, has_indexer=has_indexer, latent_norm_eps=latent_norm_eps, dtype=dtype, rngs=rngs
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if sparse_mlp:
            self.mlp = MoE(config, dtype=dtype, rngs=rngs)
        else:
            self.mlp = Mlp(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "T hidden"],
        context: Context,
        cache: Any,
        indices: Int[Array, "T K"] | None,
        rope: Rope,
    ) -> tuple[Float[Array, "T hidden"], Any, Int[Array, "T K"] | None]:
        attended, cache, indices = self.self_attn(self.input_layernorm(x), context, cache, indices, rope)
        x = x + attended
        with jax.named_scope("mlp"):
            h = self.post_attention_layernorm(x)
            x = x + (self.mlp(h, context.options.mesh) if isinstance(self.mlp, MoE) else self.mlp(h))
        return x, cache, indices


def matmul(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """x @ weight.T in x's dtype, accumulated in float32 (float32 operands are not rounded to TF32)."""
    return _einsum("...i,oi->...o", x, weight)


def _einsum(equation: str, x: Array, y: Array) -> Array:
    """In x's dtype, every sum in float32 and rounded once; of a sum that a mesh divides, each device's part.

    On a GPU that is how XLA multiplies bfloat16. Asked for float32 it writes all of that out, transposes it where heads
    are batched, and rounds it in one more pass. A CPU would sum in bfloat16, if it can multiply that at all.
    """
    dtype, y = x.dtype, y.astype(x.dtype)
    if target_of_arrays((x, y)).platform == "cpu":
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision).astype(dtype)


def _routed(
    h: Float[Array, "T hidden"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E J hidden"],
    down: Float[Array, "E hidden I"],
) -> Float32[Array, "T hidden"]:
    """sum_j weights[t, j] * expert[experts[t, j]](h[t]) over the experts in 0..E - 1, others left out.

    One grouped matmul over rows sorted by expert, those of other experts last.
    """
    (rows, per_row), count = experts.shape, down.shape[0]
    own = (experts >= 0) & (experts < count)
    sorted_by = jnp.where(own, experts, count).reshape(-1)
    order = jnp.argsort(sorted_by, stable=True)
    group_sizes = jnp.sum(sorted_by[:, None] == jnp.arange(count)[None], axis=0, dtype=jnp.int32)
    gate, up = jnp.split(_grouped(h[order // per_row], gate_up, group_sizes), 2, axis=-1)
    sorted_out = _grouped(jax.nn.silu(gate) * up, down, group_sizes)
    out = sorted_out[jnp.argsort(order)].reshape(rows, per_row, -1).astype(jnp.float32)
    return jnp.sum(jnp.where(own[:, :, None], out * weights[:, :, None], 0.0), axis=1)  # an unwritten row may be NaN


def _grouped(x: Float[Array, "N I"], weight: Float[Array, "E O I"], group_sizes: Int[Array, " E"]) -> Array:
    """grouped_matmul with the weights in x's dtype."""
    return grouped_matmul(x, weight.astype(x.dtype), group_sizes)


def initial(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: Any) -> Any:
    """A random weight of standard deviation 0.02; without `rngs` its shape alone, to be loaded."""
    if rngs is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    return (0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
