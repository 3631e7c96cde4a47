"""Reading a Hugging Face config.json: every spelling in use, nothing guessed.

A field that changes what the model computes has no default here: where config.json leaves it out, reading fails. Fields
that this library does not know are ignored; a value that it does not implement is refused, by the field's name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsa_jax.checks import refuse, require
from dsa_jax.rope import RopeLayout, RopeScaling

ARCHITECTURES = {"glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}
MAX_TOPK = 4096
MAX_LAYERS = 4096
MAX_INT = 2**31 - 1

# Fields that change the model, of which one value is implemented. A config.json may leave them out.
_ONLY = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleave": True,
}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_SAME_SPELLING = (
    "norm_topk_prob",
    "routed_scaling_factor",
    "rms_norm_eps",
    "num_nextn_predict_layers",
    "index_share_for_mtp_iteration",
    "tie_word_embeddings",
)
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")
INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class BlockQuantization:
    """Weights stored as e4m3 with one float32 scale a block, as `quantization_config` of method "fp8" says.

    weight_block_size: (rows, columns) of a `[out, in]` weight that share one scale.
    scale_fmt: "ue8m0" where activations take powers of two as scales too, else None.
    """

    weight_block_size: tuple[int, int]
    scale_fmt: str | None = None

    def __post_init__(self) -> None:
        legal = "two positive integers"
        require(len(self.weight_block_size) == 2, "weight_block_size", self.weight_block_size, legal)
        require(
            all(_is_integer(n, 1) for n in self.weight_block_size), "weight_block_size", self.weight_block_size, legal
        )
        require(self.scale_fmt in (None, "ue8m0"), "scale_fmt", repr(self.scale_fmt), "'ue8m0' or None")


def read_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `DsaConfig` that a config.json's fields spell. Raises what `DsaConfig.from_dict` says."""
    _require_architecture(fields)
    for name, legal in _ONLY.items():
        value = fields.get(name)
        same = value == legal and isinstance(value, bool) == isinstance(legal, bool)
        require(value is None or same, name, repr(value), repr(legal))
    heads, kv_heads = _given(fields, "num_attention_heads"), fields.get("num_key_value_heads")
    require(kv_heads in (None, heads), "num_key_value_heads", repr(kv_heads), f"num_attention_heads = {heads}")
    num_layers = require_integer("num_hidden_layers", _given(fields, "num_hidden_layers"), 1, MAX_LAYERS)
    _check_layer_types(fields.get("layer_types"), num_layers)
    theta, scaling = _rope(fields)
    return {
        "model_type": fields["model_type"],
        **{name: _integer(fields, name) for name in INTEGERS},
        "num_hidden_layers": num_layers,
        "norm_topk_prob": _boolean(fields, "norm_topk_prob"),
        "routed_scaling_factor": _number(fields, "routed_scaling_factor"),
        "rms_norm_eps": _number(fields, "rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "mlp_layer_types": _mlp_layer_types(fields, num_layers),
        "indexer_types": _indexer_types(fields, num_layers),
        "indexer_rope_layout": _indexer_rope_layout(fields),
        "num_nextn_predict_layers": _integer(fields, "num_nextn_predict_layers", 0),
        "index_share_for_mtp_iteration": _boolean(fields, "index_share_for_mtp_iteration", False),
        "tie_word_embeddings": _boolean(fields, "tie_word_embeddings", False),
        "eos_token_ids": _eos_token_ids(fields.get("eos_token_id")),
        "quantization": _quantization(fields.get("quantization_config")),
    }


def write_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json's fields for the arguments of a `DsaConfig`: `read_fields` turns them back into `values`."""
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    if values["rope_scaling"] is not None:
        rope |= {"rope_type": "yarn", **dataclasses.asdict(values["rope_scaling"])}
    fields = {
        "architectures": [ARCHITECTURES[values["model_type"]]],
        **{name: values[name] for name in ("model_type", "num_hidden_layers", *INTEGERS, *_SAME_SPELLING)},
        "num_key_value_heads": values["num_attention_heads"],
        "rope_parameters": rope,
        "mlp_layer_types": list(values["mlp_layer_types"]),
        "indexer_types": list(values["indexer_types"]),
        "indexer_rope_interleave": values["indexer_rope_layout"] == "interleaved",
        "eos_token_id": list(values["eos_token_ids"]) or None,
        **_ONLY,
    }
    quantization = values["quantization"]
    if quantization is not None:
        fields["quantization_config"] = {
            **_FP8,
            "weight_block_size": list(quantization.weight_block_size),
            "scale_fmt": quantization.scale_fmt,
        }
    return fields


def shared_indexer_types(num_hidden_layers: int, *, freq: int, offset: int) -> tuple[str, ...]:
    """Layer i is "full" where max(i - offset + 1, 0) % max(freq, 1) is 0, else "shared".

    freq, offset: config.json's index_topk_freq and index_skip_topk_offset.
    """
    period = max(freq, 1)
    return tuple("shared" if max(i - offset + 1, 0) % period else "full" for i in range(num_hidden_layers))


def _require_architecture(fields: Mapping[str, Any]) -> None:
    """A name that is not known is refused, never run as some other model."""
    model_type = _given(fields, "model_type")
    require(
        isinstance(model_type, str) and model_type in ARCHITECTURES,
        "model_type",
        repr(model_type),
        one_of(ARCHITECTURES),
    )
    names = fields.get("architectures")
    legal = [ARCHITECTURES[model_type]]
    require(names is None or names == legal, "architectures", repr(names), f"{legal} for model_type {model_type!r}")


def _rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(rope_theta, rope_scaling) from `rope_parameters`, or from `rope_theta` beside `rope_scaling`."""
    parameters, scaling = fields.get("rope_parameters"), fields.get("rope_scaling")
    require(
        parameters is None or scaling in (None, parameters), "rope_scaling", scaling, "absent beside rope_parameters"
    )
    name, rope = ("rope_scaling", scaling) if parameters is None else ("rope_parameters", parameters)
    if rope is None:
        return _number(fields, "rope_theta"), None
    require(isinstance(rope, Mapping), name, repr(rope), "an object")
    theta = _number(fields if rope.get("rope_theta") is None else rope, "rope_theta")
    require(fields.get("rope_theta") in (None, theta), "rope_theta", fields.get("rope_theta"), f"{name}'s {theta}")
    kinds = {str(rope[key]) for key in ("rope_type", "type") if rope.get(key) is not None}
    legal = "'default' or 'yarn', the same under rope_type and type"
    require(kinds in ({"default"}, {"yarn"}), f"{name}'s rope_type", sorted(kinds) or "nothing", legal)
    partial = rope.get("partial_rotary_factor")
    require(partial in (None, 1), f"{name}'s partial_rotary_factor", partial, "1")
    return theta, _yarn(name, rope) if kinds == {"yarn"} else None


def _yarn(name: str, rope: Mapping[str, Any]) -> RopeScaling:
    require(rope.get("truncate") in (None, True), f"{name}'s truncate", rope.get("truncate"), "true")
    require(rope.get("attention_factor") is None, f"{name}'s attention_factor", rope.get("attention_factor"), "absent")
    return RopeScaling(
        factor=_number(rope, "factor"),
        original_max_position_embeddings=_integer(rope, "original_max_position_embeddings"),
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        mscale=_number(rope, "mscale"),
        mscale_all_dim=_number(rope, "mscale_all_dim"),
    )


def _mlp_layer_types(fields: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    types = fields.get("mlp_layer_types")
    if types is not None:
        return _strings("mlp_layer_types", types)
    dense = min(_integer(fields, "first_k_dense_replace", low=0), num_layers)
    return ("dense",) * dense + ("sparse",) * (num_layers - dense)


def _indexer_types(fields: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    types, pattern = fields.get("indexer_types"), fields.get("index_topk_pattern")
    if types is not None:
        return _strings("indexer_types", types)
    if pattern is None:
        freq = _integer(fields, "index_topk_freq", 1, low=0)
        return shared_indexer_types(num_layers, freq=freq, offset=_integer(fields, "index_skip_topk_offset", 2, low=0))
    if not isinstance(pattern, str):
        return _strings("index_topk_pattern", pattern)
    require(set(pattern) <= set("FS"), "index_topk_pattern", repr(pattern), "made of F (full) and S (shared)")
    return tuple({"F": "full", "S": "shared"}[letter] for letter in pattern)


def _indexer_rope_layout(fields: Mapping[str, Any]) -> RopeLayout:
    interleave = _boolean(fields, "indexer_rope_interleave", fields["model_type"] == "glm_moe_dsa")
    return "interleaved" if interleave else "half_split"


def _check_layer_types(types: Any, num_layers: int) -> None:
    if types is None:
        return
    types = _strings("layer_types", types)
    require(len(types) == num_layers, "layer_types", f"{len(types)} entries", f"num_hidden_layers = {num_layers} long")
    for layer, kind in enumerate(types):
        require(kind in _LAYER_TYPES, f"layer_types[{layer}]", repr(kind), one_of(_LAYER_TYPES))


def _eos_token_ids(value: Any) -> tuple[int, ...]:
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(require_integer("eos_token_id", token, 0, MAX_INT) for token in tokens)


def _quantization(value: Any) -> BlockQuantization | None:
    if value is None:
        return None
    require(isinstance(value, Mapping), "quantization_config", repr(value), "an object")
    for name, legal in _FP8.items():
        got = _given(value, name) if name == "quant_method" else value.get(name, legal)
        require(got == legal, f"quantization_config's {name}", repr(got), repr(legal))
    block = _given(value, "weight_block_size")
    require(isinstance(block, list), "weight_block_size", repr(block), "two positive integers")
    return BlockQuantization(weight_block_size=tuple(block), scale_fmt=value.get("scale_fmt"))


def _given(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        refuse(name, "nothing", "given: it has no default")
    return fields[name]


def _integer(fields: Mapping[str, Any], name: str, default: int | None = None, *, low: int = 1) -> int:
    if default is not None and fields.get(name) is None:
        return default
    return require_integer(name, _given(fields, name), 0 if default == 0 else low, MAX_INT)


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    if default is not None and fields.get(name) is None:
        return default
    value = _given(fields, name)
    require(_is_number(value), name, repr(value), "a finite number")
    return float(value)


def _boolean(fields: Mapping[str, Any], name: str, default: bool | None = None) -> bool:
    value = _given(fields, name) if default is None else default if fields.get(name) is None else fields[name]
    require(isinstance(value, bool), name, repr(value), "true or false")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    ok = isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
    require(ok, name, repr(value), "a list of names, one a layer")
    return tuple(value)


def require_integer(name: str, value: Any, low: int, high: int) -> int:
    require(_is_integer(value, low, high), name, repr(value), f"an integer in {low}..{high}")
    return value


def require_number(name: str, value: Any, above: float, below: float) -> None:
    require(_is_number(value) and above < value < below, name, repr(value), f"a number between {above} and {below}")


def _is_integer(value: Any, low: int, high: int = MAX_INT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def one_of(names: Any) -> str:
    return "one of " + ", ".join(map(repr, names))
