"""The specification: the whole model in plain jnp float32, dense and masked, straight from a checkpoint's tensors.

It shares no code with the layers or the ops. Every layer scores every key, keeps the selected ones by a mask, and
attends through expanded keys and values. Rows are processed in blocks: a [rows, S] array is the largest there is.
Letters: B batch, S tokens, H heads, I index heads, D index head width, R kv_lora_rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsa_jax.config import DsaConfig
from dsa_jax.rope import RopeLayout, apply_rope, attention_factor, rope_frequencies

Tensors = Mapping[str, Any]  # numpy or jax arrays
_DECODER_PARTS = ("input_layernorm.", "self_attn.", "post_attention_layernorm.", "mlp.")


@dataclasses.dataclass(frozen=True)
class Trace:
    """What the specification computes for a batch.

    logits: f32[B, S, vocab]. hidden: f32[B, S, hidden] after the final norm.
    layers: f32[B, S, hidden] after every layer. indices: i32[B, S, index_topk] of every layer, ascending, -1 last.
    """

    logits: Array
    hidden: Array
    layers: tuple[Array, ...]
    indices: tuple[Array, ...]


def forward(
    tensors: Tensors,
    config: DsaConfig,
    tokens: Int[Array, "B S"],
    *,
    latent_norm_eps: float | None = None,
    row_block: int = 256,
) -> Trace:
    """Logits and every layer's output and selection.

    tensors: a checkpoint's tensors by Hugging Face name, e.g. `dsa_jax.checkpoint.Checkpoint`.
    latent_norm_eps: epsilon of the two latent norms; None takes config.rms_norm_eps.
    row_block: query rows that are scored at a time.
    """
    eps = config.rms_norm_eps if latent_norm_eps is None else latent_norm_eps
    x = _float32(tensors["model.embed_tokens.weight"])[tokens]
    layers, indices, shared = [], [], None
    for i in range(config.num_hidden_layers):
        x, shared = _layer(_part(tensors, f"model.layers.{i}."), x, shared, config, eps, row_block)
        layers.append(x)
        indices.append(shared)
    hidden = _rms_norm(x, tensors["model.norm.weight"], config.rms_norm_eps)
    return Trace(_linear(hidden, _head(tensors, config)), hidden, tuple(layers), tuple(indices))


def mtp_forward(
    tensors: Tensors,
    config: DsaConfig,
    tokens: Int[Array, "B S"],
    hidden: Float[Array, "B S hidden"],
    *,
    latent_norm_eps: float | None = None,
    zero_first_embedding: bool = False,
    row_block: int = 256,
) -> Trace:
    """The multi-token prediction layer: row t takes token t + 1 and the hidden of t (after the final norm), t = 0..S-2.

    The trace's `hidden` is after the shared head's norm; later draft steps take it as their `hidden`.
    """
    eps = config.rms_norm_eps if latent_norm_eps is None else latent_norm_eps
    layer = _part(tensors, f"model.layers.{config.num_hidden_layers}.")
    embedded = _float32(tensors["model.embed_tokens.weight"])[tokens[:, 1:]]
    if zero_first_embedding:
        embedded = embedded.at[:, 0].set(0.0)
    joined = jnp.concatenate(
        [
            _rms_norm(embedded, layer["enorm.weight"], config.rms_norm_eps),
            _rms_norm(hidden[:, :-1], layer["hnorm.weight"], config.rms_norm_eps),
        ],
        axis=-1,
    )
    decoder = {name: tensor for name, tensor in layer.items() if name.startswith(_DECODER_PARTS)}
    x, indices = _layer(decoder, _linear(joined, layer["eh_proj.weight"]), None, config, eps, row_block)
    out = _rms_norm(x, layer["shared_head.norm.weight"], config.rms_norm_eps)
    return Trace(_linear(out, _head(tensors, config)), out, (x,), (indices,))


@functools.partial(jax.jit, static_argnames=("config", "eps", "row_block"))
def _layer(
    w: dict, x: Array, shared: Array | None, config: DsaConfig, eps: float, row_block: int
) -> tuple[Array, Array]:
    """One decoder layer; returns its output and the indices it attended to."""
    h = _rms_norm(x, w["input_layernorm.weight"], config.rms_norm_eps)
    attended, indices = _attention(_part(w, "self_attn."), h, shared, config, eps, row_block)
    x = x + attended
    h = _rms_norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
    mlp = _part(w, "mlp.")
    return x + (_moe(mlp, h, config) if "gate.weight" in mlp else _mlp(mlp, h)), indices


def _attention(
    w: dict, h: Float[Array, "B S hidden"], shared: Array | None, config: DsaConfig, eps: float, row_block: int
) -> tuple[Array, Array]:
    batch, length, _ = h.shape
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    q_latent = _rms_norm(_linear(h, w["q_a_proj.weight"]), w["q_a_layernorm.weight"], eps)
    q = _linear(q_latent, w["q_b_proj.weight"]).reshape(batch, length, heads, -1)
    q = jnp.concatenate([q[..., :nope], _rope(q[..., nope:], config, "interleaved")], axis=-1)
    kv = _linear(h, w["kv_a_proj_with_mqa.weight"])
    expanded = _linear(_rms_norm(kv[..., :rank], w["kv_a_layernorm.weight"], eps), w["kv_b_proj.weight"])
    expanded = expanded.reshape(batch, length, heads, -1)
    k_rope = jnp.broadcast_to(
        _rope(kv[:, :, None, rank:], config, "interleaved"), (batch, length, heads, kv.shape[-1] - rank)
    )
    k, v = jnp.concatenate([expanded[..., :nope], k_rope], axis=-1), expanded[..., nope:]
    indices = shared
    if "indexer.wq_b.weight" in w:
        indices = _select(_part(w, "indexer."), h, q_latent, config, row_block)
    assert indices is not None, "the first layer has an indexer"

    def attend(q_rows: Array, chosen: Array) -> Array:
        logits = _einsum("bshd,bthd->bhst", q_rows, k) * config.sm_scale
        weights = jax.nn.softmax(jnp.where(_mask(chosen, length)[:, None], logits, -jnp.inf), axis=-1)
        return _einsum("bhst,bthv->bshv", weights, v)

    out = _by_rows(attend, (q, indices), row_block)
    return _linear(out.reshape(batch, length, -1), w["o_proj.weight"]), indices


def _select(w: dict, h: Array, q_latent: Array, config: DsaConfig, row_block: int) -> Int[Array, "B S K"]:
    """The index_topk best-scored visible keys of every row, lowest column first among equals."""
    batch, length, _ = h.shape
    heads, width, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    q = _linear(q_latent, w["wq_b.weight"]).reshape(batch, length, heads, width)
    k = _layer_norm(_linear(h, w["wk.weight"]), w["k_norm.weight"], w["k_norm.bias"])[:, :, None]
    q, k = (
        jnp.concatenate([_rope(x[..., :rope], config, config.indexer_rope_layout), x[..., rope:]], axis=-1)
        for x in (q, k)
    )
    weights = _linear(h, w["weights_proj.weight"]) * heads**-0.5
    columns = jnp.arange(length)

    def choose(q_rows: Array, weight_rows: Array, row: Array) -> Array:
        def add_head(total: Array, head: tuple[Array, Array]) -> tuple[Array, None]:
            q_head, weight = head
            dot = _einsum("bsd,btd->bst", q_head, k[:, :, 0]) * width**-0.5
            return total + weight[..., None] * jax.nn.relu(dot), None

        per_head = jnp.moveaxis(q_rows, 2, 0), jnp.moveaxis(weight_rows, 2, 0)
        scores, _ = jax.lax.scan(add_head, jnp.zeros((*row.shape, length)), per_head)
        return _top_columns(jnp.where(columns[None, None] <= row[..., None], scores, -jnp.inf), config.index_topk)

    rows = jnp.broadcast_to(columns[None], (batch, length))
    return _by_rows(choose, (q, weights, rows), row_block)


def _top_columns(scores: Float[Array, "B s T"], k: int) -> Int[Array, "B s K"]:
    """Columns of the k greatest entries above -inf, the lowest column first among equals, ascending, padded with -1."""
    length = scores.shape[-1]
    scores = scores + 0.0  # -0.0 ties with 0.0
    least = jax.lax.top_k(scores, min(k, length))[0][..., -1:]
    above, equal = scores > least, (scores == least) & (scores > -jnp.inf)
    room = min(k, length) - jnp.sum(above, axis=-1, keepdims=True)
    chosen = above | (equal & (jnp.cumsum(equal, axis=-1) <= room))
    columns = jnp.where(chosen, jnp.arange(length)[None, None], length)
    ascending = -jax.lax.top_k(-columns, min(k, length))[0]
    ascending = jnp.where(ascending == length, -1, ascending).astype(jnp.int32)
    return jnp.pad(ascending, ((0, 0), (0, 0), (0, max(k - length, 0))), constant_values=-1)


def _mask(indices: Int[Array, "B s K"], length: int) -> Bool[Array, "B s T"]:
    """True at the columns that `indices` names."""
    slots = jnp.where(indices < 0, length, indices)
    rows = jnp.zeros((*indices.shape[:2], length + 1), bool)
    return jnp.put_along_axis(rows, slots, True, axis=-1, inplace=False)[..., :length]


def _moe(w: dict, h: Array, config: DsaConfig) -> Array:
    scores = jax.nn.sigmoid(_linear(h, w["gate.weight"]))
    biased = scores + w["gate.e_score_correction_bias"][None, None]
    if config.n_group > 1:
        grouped = biased.reshape(*biased.shape[:-1], config.n_group, -1)
        strength = jnp.sum(jnp.sort(grouped, axis=-1)[..., -2:], axis=-1)
        weakest_kept = jnp.sort(strength, axis=-1)[..., -config.topk_group, None]
        biased = jnp.where((strength >= weakest_kept)[..., None], grouped, -jnp.inf).reshape(biased.shape)
    _, chosen = jax.lax.top_k(biased, config.num_experts_per_tok)
    picked = jnp.sum(jax.nn.one_hot(chosen, biased.shape[-1]), axis=-2)
    weights = scores * picked
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    gate, up, down = (
        jnp.stack([w[f"experts.{expert}.{part}.weight"] for expert in range(config.n_routed_experts)])
        for part in ("gate_proj", "up_proj", "down_proj")
    )
    inner = jax.nn.silu(_einsum("bsi,emi->bsem", h, gate)) * _einsum("bsi,emi->bsem", h, up)
    routed = _einsum("bsem,eom->bso", inner * weights[..., None], down)
    return _mlp(_part(w, "shared_experts."), h) + config.routed_scaling_factor * routed


def _mlp(w: dict, h: Array) -> Array:
    gate, up = _linear(h, w["gate_proj.weight"]), _linear(h, w["up_proj.weight"])
    return _linear(jax.nn.silu(gate) * up, w["down_proj.weight"])


def _rope(x: Float[Array, "B S N r"], config: DsaConfig, layout: RopeLayout) -> Array:
    frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
    factor = attention_factor(config.rope_scaling)
    positions = jnp.arange(x.shape[1])
    return jax.vmap(lambda rows: apply_rope(rows, positions, frequencies, layout=layout, factor=factor))(x)


def _rms_norm(x: Array, weight: Any, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * _float32(weight)[None, None]


def _layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    unit = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6)
    return unit * weight[None, None] + bias[None, None]


def _linear(x: Array, weight: Any) -> Array:
    return _einsum("...i,oi->...o", x, _float32(weight))


def _einsum(equation: str, *operands: Array) -> Array:
    return jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST)


def _by_rows(function: Callable[..., Array], arrays: tuple[Array, ...], block: int) -> Array:
    """function over blocks of the second axis of every array; the last block is padded with the first rows."""
    length = arrays[0].shape[1]
    block = min(block, length)
    blocks = -(-length // block)
    rows = jnp.arange(blocks * block).reshape(blocks, block) % length
    out = jax.lax.map(lambda chosen: function(*(array[:, chosen] for array in arrays)), rows)
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], blocks * block, *out.shape[3:])[:, :length]


def _head(tensors: Tensors, config: DsaConfig) -> Any:
    return tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]


def _part(tensors: Tensors, prefix: str) -> dict[str, Array]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): _float32(tensors[name]) for name in tensors if name.startswith(prefix)}


def _float32(x: Any) -> Array:
    return jnp.asarray(x, jnp.float32)
