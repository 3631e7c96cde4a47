"""The causal language model, its multi-token prediction head, and where its weights live on a tensor-parallel mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dsa_jax.cache import IndexCache, LatentCache
from dsa_jax.checks import refuse, require
from dsa_jax.config import DsaConfig
from dsa_jax.context import Context, LayerCache, Options, Sequences, Stripes
from dsa_jax.layers import DecoderLayer, Linear, RMSNorm, Rope, initial
from dsa_jax.parallel import TENSOR_AXIS, auto_mesh, expert_axis, split_mesh_of

# Which dimension of a weight is split over TENSOR_AXIS, by the end of its path; experts over `expert_axis`. Everything
# else is replicated: norms, latents, the router, and the indexer, whose rows are split instead (striped_select_topk).
_SPLIT_DIMENSION = {
    "q_b_proj.weight": 0,
    "kv_b_proj.weight": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
    "experts.gate_up_proj": 0,
    "experts.down_proj": 0,
    "lm_head.weight": 0,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What a forward pass leaves.

    hidden: [T, hidden] after the final norm.
    caches: one LayerCache a layer, with this step's keys; None without caches.
    indices: i32[T, index_topk] for every layer: what it attended to, as positions in the request; None where dense.
    layers: [T, hidden] after every layer, if they were asked for.
    """

    hidden: Any
    caches: Any
    indices: Any
    layers: Any


class Embedding(nnx.Module):
    """A table of rows."""

    def __init__(self, rows: int, width: int, *, dtype: Any, rngs: nnx.Rngs | None):
        self.weight = nnx.Param(initial(rngs, (rows, width), dtype))

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T width"]:
        return self.weight[...][tokens]


class Backbone(nnx.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: DsaConfig, *, latent_norm_eps: float, dtype: Any, rngs: nnx.Rngs | None):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            DecoderLayer(
                config,
                has_indexer=indexer == "full",
                sparse_mlp=mlp == "sparse",
                latent_norm_eps=latent_norm_eps,
                dtype=dtype,
                rngs=rngs,
            )
            for indexer, mlp in zip(config.indexer_types, config.mlp_layer_types, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpHead(nnx.Module):
    """Multi-token prediction: from the hidden of token t and the embedding of token t + 1, the logits of t + 2.

    (DeepSeek-V3 report, section 2.2.) Its decoder layer is sparse and has its own indexer and caches.
    """

    def __init__(self, config: DsaConfig, *, latent_norm_eps: float, dtype: Any, rngs: nnx.Rngs | None):
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layer = DecoderLayer(
            config, has_indexer=True, sparse_mlp=True, latent_norm_eps=latent_norm_eps, dtype=dtype, rngs=rngs
        )
        self.shared_head_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self,
        embedded: Float[Array, "T hidden"],
        hidden: Float[Array, "T hidden"],
        context: Context,
        cache: LayerCache | None,
        rope: Rope,
        indices: Int[Array, "T K"] | None = None,
    ) -> tuple[Float[Array, "T hidden"], LayerCache | None, Int[Array, "T K"] | None]:
        """
        embedded: of token t + 1.
        hidden: the backbone's after its final norm, or in later draft steps this head's own result.
        Returns the hidden after the shared head's norm, which gives the logits and feeds the next draft step.
        """
        out, cache, indices = self.layer(self.inputs(embedded, hidden), context, cache, indices, rope)
        return self.shared_head_norm(out), cache, indices

    def inputs(self, embedded: Float[Array, "T hidden"], hidden: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
        """What the decoder layer takes: the embedding comes first."""
        return self.eh_proj(jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))


class CausalLM(nnx.Module):
    """A DSA language model. Parameters carry Hugging Face's names; see `dsa_jax.checkpoint` for the exceptions."""

    def __init__(
        self,
        config: DsaConfig,
        *,
        dtype: Any = jnp.float32,
        latent_norm_eps: float | None = None,
        rngs: nnx.Rngs | None,
    ):
        """
        dtype: of the weights and activations; norms, router and indexer weights stay float32.
        latent_norm_eps: epsilon of the two latent norms. None takes config.rms_norm_eps, as serving engines do;
            transformers 5.24 uses 1e-6 whatever the config says.
        rngs: draws random weights; None leaves their shapes, to be loaded.
        """
        eps = config.rms_norm_eps if latent_norm_eps is None else latent_norm_eps
        require(eps > 0, "latent_norm_eps", latent_norm_eps, "positive or None")
        self.config = config
        self.model = Backbone(config, latent_norm_eps=eps, dtype=dtype, rngs=rngs)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        has_mtp = config.num_nextn_predict_layers > 0
        self.mtp = MtpHead(config, latent_norm_eps=eps, dtype=dtype, rngs=rngs) if has_mtp else None

    def __call__(
        self, tokens: Int[Array, "B S"], *, implementation: str | None = None, stripes: Stripes | None = None
    ) -> Float[Array, "B S V"]:
        """float32 logits of whole sequences, compiled once a shape. Raises ValueError for a length over the model's."""
        step = self.run(tokens, implementation=implementation, stripes=stripes)
        return self.logits(step.hidden).reshape(*tokens.shape, -1)

    def run(
        self,
        tokens: Int[Array, "B S"],
        *,
        implementation: str | None = None,
        stripes: Stripes | None = None,
        keep_layers: bool = False,
    ) -> Step:
        """The forward pass over whole sequences, rows flattened [B * S]; `keep_layers` returns every layer's output."""
        batch, length = tokens.shape
        limit = self.config.max_position_embeddings
        require(length <= limit, "tokens' length", length, f"at most max_position_embeddings = {limit}")
        context = Sequences.of_batch(batch, length, self.options(implementation=implementation, stripes=stripes))
        if length <= self.config.index_topk:
            context = dataclasses.replace(context, options=dataclasses.replace(context.options, dense=True))
        graph, state = nnx.split(self)
        return _compiled_forward(graph, state, tokens.reshape(-1), context, None, keep_layers)

    def forward(
        self,
        tokens: Int[Array, " T"],
        context: Context,
        caches: tuple[LayerCache, ...] | None,
        keep_layers: bool = False,
    ) -> Step:
        """One pass over packed rows. Call it under jit, with `caches` donated."""
        rope, x = Rope(self.config), self.model.embed_tokens(tokens)
        indices, shared, new_caches, layers = [], None, [], []
        for number, layer in enumerate(self.model.layers):
            with jax.named_scope(f"layer_{number}"):
                cache = None if caches is None else caches[number]
                x, cache, shared = layer(x, context, cache, shared, rope)
            indices.append(shared)
            new_caches.append(cache)
            layers += [x] if keep_layers else []
        caches = None if caches is None else tuple(new_caches)
        return Step(self.model.norm(x), caches, tuple(indices), tuple(layers))

    def draft(
        self,
        tokens: Int[Array, " T"],
        hidden: Float[Array, "T hidden"],
        context: Context,
        cache: LayerCache | None = None,
        indices: Int[Array, "T K"] | None = None,
        *,
        zero_first_embedding: bool = False,
    ) -> tuple[Float[Array, "T hidden"], LayerCache | None, Int[Array, "T K"] | None]:
        """One multi-token prediction step: row t takes token t + 1 and the hidden of t.

        zero_first_embedding: replace the embedding by zeros where the position is 0, as one serving engine does.
        """
        if self.mtp is None:
            refuse("config.num_nextn_predict_layers", 0, "1: this model has no multi-token prediction layer")
        if context.options.dense is None:
            refuse("options.dense", None, "True or False in this layer, which scores whatever the lengths")
        embedded = self.model.embed_tokens(tokens)
        if zero_first_embedding:
            embedded = jnp.where((context.positions == 0)[:, None], 0, embedded)
        return self.mtp(embedded, hidden, context, cache, Rope(self.config), indices)

    def logits(self, hidden: Float[Array, "T hidden"]) -> Float[Array, "T V"]:
        """float32 logits of hidden rows after the final norm (or after the shared head's norm)."""
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return jnp.einsum(
            "th,vh->tv",
            hidden,
            head[...].astype(hidden.dtype),
            precision=jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    def options(self, **options: Any) -> Options:
        """The model's step options, with what the caller sets.

        A model whose weights are split over a mesh divides its steps over it too, unless the caller says otherwise.
        """
        mesh = split_mesh_of(nnx.state(self, nnx.Param))
        if mesh is not None:
            options.setdefault("mesh", mesh)
            options["stripes"] = options.get("stripes") or Stripes(mesh, TENSOR_AXIS)
        return Options(index_topk=self.config.index_topk, sm_scale=self.config.sm_scale, **options)

    def new_caches(self, num_pages: int, page_size: int, dtype: Any) -> tuple[LayerCache, ...]:
        """Empty caches for every backbone layer. Layers that share indices hold no index keys."""
        return tuple(
            new_cache(self.config, num_pages, page_size, dtype, kind == "full") for kind in self.config.indexer_types
        )


def new_cache(config: DsaConfig, num_pages: int, page_size: int, dtype: Any, has_indexer: bool) -> LayerCache:
    """One layer's empty caches."""
    latent = LatentCache.zeros(num_pages, page_size, config.kv_lora_rank, config.qk_rope_head_dim, dtype=dtype)
    index = IndexCache.zeros(num_pages, page_size, config.index_head_dim, dtype=dtype) if has_indexer else None
    return LayerCache(latent, index)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _compiled_forward(graph, state, tokens, context, caches, keep_layers) -> Step:
    return nnx.merge(graph, state).forward(tokens, context, caches, keep_layers)


def partition_spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Where a parameter is split over the mesh's tensor or expert axis.

    path: the parameter's path in the model, e.g. ("model", "layers", 0, "self_attn", "q_b_proj", "weight").
    Raises ValueError if the split dimension is not divisible by the axis.
    """
    name = ".".join(map(str, path))
    suffix = next((end for end in _SPLIT_DIMENSION if name.endswith(end) and ".indexer." not in name), None)
    if suffix is None:
        return PartitionSpec()
    dimension, axis = _SPLIT_DIMENSION[suffix], expert_axis(mesh) if suffix.startswith("experts.") else TENSOR_AXIS
    ranks = mesh.shape[axis]
    require(
        shape[dimension] % ranks == 0,
        f"{name}'s dimension {dimension}",
        shape[dimension],
        f"a multiple of {ranks} ranks",
    )
    return PartitionSpec(*(axis if number == dimension else None for number in range(len(shape))))


def parameter_sharding(config: DsaConfig, mesh: Mesh, path: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
    """A parameter's sharding on `mesh`, which must have the axis "tp"; heads must divide evenly over it."""
    require(TENSOR_AXIS in mesh.axis_names, "mesh's axes", mesh.axis_names, f"a tuple with {TENSOR_AXIS!r}")
    ranks = mesh.shape[TENSOR_AXIS]
    heads = config.num_attention_heads
    require(heads % ranks == 0, f"mesh's {TENSOR_AXIS!r} axis", ranks, f"a divisor of num_attention_heads = {heads}")
    return NamedSharding(auto_mesh(mesh), partition_spec(path, shape, mesh))
