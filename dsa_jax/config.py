"""The configuration of a DSA model, under Hugging Face's names, checked."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dsa_jax.checks import require
from dsa_jax.hf_config import (
    ARCHITECTURES,
    INTEGERS,
    MAX_INT,
    MAX_LAYERS,
    MAX_TOPK,
    BlockQuantization,
    one_of,
    read_fields,
    require_integer,
    require_number,
    shared_indexer_types,
    write_fields,
)
from dsa_jax.rope import RopeLayout, RopeScaling, softmax_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class DsaConfig:
    """A DSA model's widths, schedule and constants. Hashable, so it can be static under jit.

    mlp_layer_types: "dense" or "sparse" (mixture of experts) for each of num_hidden_layers layers.
    indexer_types: "full" (own indexer) or "shared" (indices of the nearest full layer before) for each layer.
    rope_theta, rope_scaling: rotary base, and yarn's constants or None. Main attention rotates interleaved pairs.
    indexer_rope_layout: pairs the indexer rotates, "interleaved" (x[2i], x[2i+1]) or "half_split" (x[i], x[i+r/2]).
    num_nextn_predict_layers: 1 with a multi-token prediction layer, which is sparse and full, else 0.
    index_share_for_mtp_iteration: later draft steps take the first step's indices.
    quantization: how the checkpoint stores its weights, or None for plain float32 or bfloat16.
    Raises ValueError naming the field, its value and the legal range.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    mlp_layer_types: tuple[str, ...]
    indexer_types: tuple[str, ...]
    indexer_rope_layout: RopeLayout
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    quantization: BlockQuantization | None = None

    def __post_init__(self) -> None:
        require(self.model_type in ARCHITECTURES, "model_type", repr(self.model_type), one_of(ARCHITECTURES))
        for name in INTEGERS:
            require_integer(name, getattr(self, name), 1, MAX_TOPK if name == "index_topk" else MAX_INT)
        require_integer("num_hidden_layers", self.num_hidden_layers, 1, MAX_LAYERS)
        require_integer("num_nextn_predict_layers", self.num_nextn_predict_layers, 0, 1)
        for name in ("norm_topk_prob", "index_share_for_mtp_iteration", "tie_word_embeddings"):
            require(isinstance(getattr(self, name), bool), name, repr(getattr(self, name)), "true or false")
        require_number("routed_scaling_factor", self.routed_scaling_factor, 0.0, 1e6)
        require_number("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)
        require_number("rope_theta", self.rope_theta, 1.0, 1e12)
        for token in self.eos_token_ids:
            require_integer("eos_token_ids", token, 0, self.vocab_size - 1)
        self._check_attention()
        self._check_experts()
        self._check_schedule()

    def _check_attention(self) -> None:
        layouts = ("interleaved", "half_split")
        require(
            self.indexer_rope_layout in layouts, "indexer_rope_layout", repr(self.indexer_rope_layout), one_of(layouts)
        )
        require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "even")
        least = f"at least qk_rope_head_dim = {self.qk_rope_head_dim}"
        require(self.index_head_dim >= self.qk_rope_head_dim, "index_head_dim", self.index_head_dim, least)

    def _check_experts(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        require(experts % groups == 0, "n_group", groups, f"a divisor of n_routed_experts = {experts}")
        require_integer("topk_group", self.topk_group, 1, groups)
        require_integer("num_experts_per_tok", self.num_experts_per_tok, 1, self.topk_group * (experts // groups))
        # A group is ranked by the sum of its two best experts.
        require(groups == 1 or experts // groups >= 2, "n_group", groups, f"1, or at most half of {experts} experts")

    def _check_schedule(self) -> None:
        for name, legal in (("mlp_layer_types", ("dense", "sparse")), ("indexer_types", ("full", "shared"))):
            types = getattr(self, name)
            length = f"num_hidden_layers = {self.num_hidden_layers} long"
            require(len(types) == self.num_hidden_layers, name, f"{len(types)} entries", length)
            for layer, kind in enumerate(types):
                require(kind in legal, f"{name}[{layer}]", repr(kind), one_of(legal))
        legal = "'full': there is no layer before it to share with"
        require(self.indexer_types[0] == "full", "indexer_types[0]", repr(self.indexer_types[0]), legal)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: qk_nope_head_dim + qk_rope_head_dim, the rope part last."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached latent row: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def sm_scale(self) -> float:
        """The softmax scale of the main attention, see `rope.softmax_scale`."""
        return softmax_scale(self.qk_head_dim, self.rope_scaling)

    def cache_bytes_per_token(self, cache_dtype: Literal["bfloat16", "float8_e4m3fn"] = "bfloat16") -> int:
        """Bytes that the caches of all layers hold for a token, the multi-token prediction layer not counted.

        "float8_e4m3fn" keeps one float32 scale for 128 latent values and one for an index key; rope stays bfloat16.
        """
        require(
            cache_dtype in ("bfloat16", "float8_e4m3fn"),
            "cache_dtype",
            repr(cache_dtype),
            "'bfloat16' or 'float8_e4m3fn'",
        )
        if cache_dtype == "bfloat16":
            latent, index_key = 2 * self.latent_dim, 2 * self.index_head_dim
        else:
            latent = self.kv_lora_rank + 4 * -(-self.kv_lora_rank // 128) + 2 * self.qk_rope_head_dim
            index_key = self.index_head_dim + 4
        return self.num_hidden_layers * latent + self.indexer_types.count("full") * index_key

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "DsaConfig":
        """Reads `path`/config.json. Raises ValueError where there is none, or for what `from_dict` refuses."""
        file = Path(path) / "config.json"
        require(file.is_file(), "path", repr(str(path)), "a directory that holds a config.json")
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not JSON: {error}") from error
        require(isinstance(fields, dict), str(file), type(fields).__name__, "a JSON object")
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "DsaConfig":
        """Takes the fields of a Hugging Face config.json, of model_type glm_moe_dsa or deepseek_v32.

        Rotary constants come from `rope_parameters`, or from `rope_theta` and `rope_scaling`. The indexer's schedule is
        indexer_types, else index_topk_pattern, else index_topk_freq with index_skip_topk_offset. The layout of its
        rotary pairs is indexer_rope_interleave where given, else the model type's own: interleaved for GLM, half-split
        for DeepSeek. `head_dim` is not read: published configs carry values that mean nothing here.
        Raises ValueError naming the field, its value and the legal ones, where one is missing or not implemented.
        """
        return cls(**read_fields(fields))

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json that `from_dict` reads back to an equal config; transformers reads it too."""
        return write_fields({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def glm5(cls) -> "DsaConfig":
        """zai-org/GLM-5: 744B parameters, every layer with its own indexer."""
        return cls(
            model_type="glm_moe_dsa",
            vocab_size=154880,
            hidden_size=6144,
            num_hidden_layers=78,
            intermediate_size=12288,
            moe_intermediate_size=2048,
            num_attention_heads=64,
            q_lora_rank=2048,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            index_n_heads=32,
            index_head_dim=128,
            index_topk=2048,
            n_routed_experts=256,
            num_experts_per_tok=8,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            rms_norm_eps=1e-5,
            max_position_embeddings=202752,
            rope_theta=1e6,
            rope_scaling=None,
            mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
            indexer_types=("full",) * 78,
            indexer_rope_layout="interleaved",
            num_nextn_predict_layers=1,
            eos_token_ids=(154820, 154827, 154829),
        )

    @classmethod
    def glm5_1(cls) -> "DsaConfig":
        """zai-org/GLM-5.1: GLM-5's geometry."""
        return cls.glm5()

    @classmethod
    def glm5_2(cls) -> "DsaConfig":
        """zai-org/GLM-5.2: GLM-5 with a million positions, and 21 indexers that 78 layers share."""
        return dataclasses.replace(
            cls.glm5(),
            max_position_embeddings=1048576,
            rope_theta=8e6,
            indexer_types=shared_indexer_types(78, freq=4, offset=3),
            index_share_for_mtp_iteration=True,
        )

    @classmethod
    def glm5_3(cls) -> "DsaConfig":
        """zai-org/GLM-5.3: GLM-5.2's geometry. GLM-5.3-Flash is another architecture, which is not implemented."""
        return cls.glm5_2()

    @classmethod
    def deepseek_v32(cls) -> "DsaConfig":
        """deepseek-ai/DeepSeek-V3.2: 672B parameters, stored as e4m3 in 128 x 128 blocks."""
        return dataclasses.replace(
            cls.glm5(),
            model_type="deepseek_v32",
            vocab_size=129280,
            hidden_size=7168,
            num_hidden_layers=61,
            intermediate_size=18432,
            num_attention_heads=128,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            v_head_dim=128,
            index_n_heads=64,
            n_group=8,
            topk_group=4,
            rms_norm_eps=1e-6,
            max_position_embeddings=163840,
            rope_theta=1e4,
            rope_scaling=RopeScaling(
                factor=40.0,
                original_max_position_embeddings=4096,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
            mlp_layer_types=("dense",) * 3 + ("sparse",) * 58,
            indexer_types=("full",) * 61,
            indexer_rope_layout="half_split",
            eos_token_ids=(1,),
            quantization=BlockQuantization(weight_block_size=(128, 128), scale_fmt="ue8m0"),
        )

    @classmethod
    def tiny(
        cls,
        *,
        vocab_size: int = 256,
        hidden_size: int = 64,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 4,
        q_lora_rank: int = 48,
        kv_lora_rank: int = 128,
        qk_nope_head_dim: int = 16,
        qk_rope_head_dim: int = 8,
        v_head_dim: int = 24,
        index_n_heads: int = 4,
        index_head_dim: int = 32,
        index_topk: int = 16,
        n_routed_experts: int = 8,
        num_experts_per_tok: int = 2,
        num_nextn_predict_layers: int = 1,
    ) -> "DsaConfig":
        """GLM-5.2 in small: shared indexers, one dense layer, a multi-token prediction layer."""
        return dataclasses.replace(
            cls.glm5_2(),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_hidden_layers=num_hidden_layers,
            intermediate_size=2 * hidden_size,
            moe_intermediate_size=hidden_size // 2,
            num_attention_heads=num_attention_heads,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            index_n_heads=index_n_heads,
            index_head_dim=index_head_dim,
            index_topk=index_topk,
            n_routed_experts=n_routed_experts,
            num_experts_per_tok=num_experts_per_tok,
            max_position_embeddings=4096,
            mlp_layer_types=("dense",) + ("sparse",) * (num_hidden_layers - 1),
            indexer_types=shared_indexer_types(num_hidden_layers, freq=2, offset=2),
            num_nextn_predict_layers=num_nextn_predict_layers,
            eos_token_ids=(),
        )
