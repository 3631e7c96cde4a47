"""Hugging Face checkpoint directories: config.json, and safetensors files that hold exactly the tensors it asks for.

Weights are float32, bfloat16, or e4m3 with a float32 scale a block (`weight_scale_inv`), which reading multiplies out.
"""

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dsa_jax.checks import refuse, require
from dsa_jax.config import DsaConfig
from dsa_jax.safetensors_file import StoredTensor, map_file, read_header, write_file

Shapes = dict[str, tuple[int, ...]]

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 4 * 2**30
_NAMED_IN_ERRORS = 10
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
WEIGHT_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))


def tensor_shapes(config: DsaConfig) -> Shapes:
    """Name and shape of every tensor that a checkpoint of this config holds, block scales aside.

    Layers that share indices have no indexer. The multi-token prediction layer is layer num_hidden_layers.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i, (indexer, mlp) in enumerate(zip(config.indexer_types, config.mlp_layer_types, strict=True)):
        shapes |= _layer_shapes(config, f"model.layers.{i}.", has_indexer=indexer == "full", sparse=mlp == "sparse")
    if config.num_nextn_predict_layers:
        mtp = f"model.layers.{layers}."
        shapes |= _layer_shapes(config, mtp, has_indexer=True, sparse=True)
        shapes |= {f"{mtp}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{mtp}eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes


def _layer_shapes(config: DsaConfig, prefix: str, *, has_indexer: bool, sparse: bool) -> Shapes:
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = prefix + "self_attn."
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{attention}q_a_proj.weight": (config.q_lora_rank, hidden),
        f"{attention}q_a_layernorm.weight": (config.q_lora_rank,),
        f"{attention}q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
        f"{attention}kv_a_proj_with_mqa.weight": (config.latent_dim, hidden),
        f"{attention}kv_a_layernorm.weight": (config.kv_lora_rank,),
        f"{attention}kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        f"{attention}o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if has_indexer:
        width = config.index_head_dim
        shapes |= {
            f"{attention}indexer.wq_b.weight": (config.index_n_heads * width, config.q_lora_rank),
            f"{attention}indexer.wk.weight": (width, hidden),
            f"{attention}indexer.k_norm.weight": (width,),
            f"{attention}indexer.k_norm.bias": (width,),
            f"{attention}indexer.weights_proj.weight": (config.index_n_heads, hidden),
        }
    if not sparse:
        return shapes | _mlp_shapes(f"{prefix}mlp.", hidden, config.intermediate_size)
    experts, width = config.n_routed_experts, config.moe_intermediate_size
    shapes[f"{prefix}mlp.gate.weight"] = (experts, hidden)
    shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        shapes |= _mlp_shapes(f"{prefix}mlp.experts.{expert}.", hidden, width)
    return shapes | _mlp_shapes(f"{prefix}mlp.shared_experts.", hidden, config.n_shared_experts * width)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


class Checkpoint(Mapping[str, np.ndarray]):
    """An opened checkpoint: a read-only mapping from a tensor's name to its values.

    A value is a view into the memory-mapped file, float32 or bfloat16. A weight stored as e4m3 comes as float32, times
    its scales. Scales, and the copies of embedding and head that a multi-token prediction layer may carry, are no
    entries.
    """

    def __init__(self, config: DsaConfig, stored: Mapping[str, StoredTensor]):
        """Use `Checkpoint.open`."""
        self.config = config
        self._stored = dict(stored)
        self._names = tuple(tensor_shapes(config))
        self._mapped = {tensor.file: map_file(tensor.file) for tensor in self._stored.values()}

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Opens a directory, whose names and shapes must be exactly what its config.json asks for; no tensor is read.

        Raises ValueError naming a file that is missing, cut short or malformed, or every tensor (up to 10 of a sort,
        and their count) that is missing, unexpected, or of another shape.
        """
        path = Path(path)
        config = DsaConfig.from_pretrained(path)
        stored = _stored_tensors(path)
        _check_tensors(path, config, stored)
        return cls(config, stored)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._stored:
            raise KeyError(name)
        tensor = self._read(name)
        if tensor.dtype != _FLOAT8:
            return tensor
        assert self.config.quantization is not None
        return dequantize_blocks(tensor, self._read(_scale_name(name)), self.config.quantization.weight_block_size)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the model's order."""
        return self._names

    @property
    def dtype(self) -> np.dtype:
        """What the embedding is stored in, float32 or bfloat16: the model's own dtype, also where matrices are e4m3."""
        dtype = self._stored["model.embed_tokens.weight"].dtype
        return np.dtype(ml_dtypes.bfloat16) if dtype == _FLOAT8 else dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(tensor.nbytes for tensor in self._stored.values())

    def _read(self, name: str) -> np.ndarray:
        tensor = self._stored[name]
        return tensor.read(self._mapped[tensor.file])


def dequantize_blocks(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32 weight[i, j] * scale[i // block[0], j // block[1]]; blocks at the far edges may be partial."""
    rows, columns = (np.arange(length) // size for length, size in zip(weight.shape, block, strict=True))
    return weight.astype(np.float32) * scale[rows][:, columns]


def save_checkpoint(
    path: str | Path, config: DsaConfig, tensors: Mapping[str, Any], *, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Writes a Hugging Face directory, whole or not at all: it is filled under another name and renamed last.

    path: absent, or an empty directory.
    tensors: float32 or bfloat16 arrays, with the names and shapes of `tensor_shapes(config)`; each is fetched once.
    shard_bytes: a file is closed before it would pass this size; a larger tensor has a file of its own.
    The written config has no quantization. Raises ValueError for tensors that do not fit the config.
    """
    path = Path(path).absolute()
    require(shard_bytes > 0, "shard_bytes", shard_bytes, "positive")
    free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    require(free, "path", repr(str(path)), "absent or an empty directory")
    shapes = tensor_shapes(config)
    _refuse_misfits("tensors", missing=shapes.keys() - tensors.keys(), unexpected=tensors.keys() - shapes.keys())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    partial.mkdir()
    try:
        _write_shards(partial, shapes, tensors, shard_bytes)
        _write_json(partial / CONFIG_FILE, dataclasses.replace(config, quantization=None).to_dict())
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_shards(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any], shard_bytes: int
) -> None:
    """One file, or numbered files with an index. Holds one shard's tensors at a time."""
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        write_file(path / f"shard-{len(shards)}", pending)
        shards.append(list(pending))
        pending.clear()

    for name, shape in shapes.items():
        tensor = np.asarray(tensors[name])
        require(tensor.shape == shape, f"{name}'s shape", list(tensor.shape), str(list(shape)))
        require(tensor.dtype in WEIGHT_DTYPES, f"{name}'s dtype", tensor.dtype, "float32 or bfloat16")
        if pending and sum(other.nbytes for other in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        os.rename(path / "shard-0", path / SINGLE_FILE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(path / f"shard-{number}", path / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(path / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Where every tensor of the directory lies."""
    if (path / SINGLE_FILE).is_file():
        return read_header(path / SINGLE_FILE)
    index = path / INDEX_FILE
    require(index.is_file(), "path", repr(str(path)), f"a directory that holds {SINGLE_FILE} or {INDEX_FILE}")
    weight_map = _read_weight_map(index)
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        file = path / shard
        require(file.is_file() and file.name == shard, f"{index}'s shard", repr(shard), "a file beside it")
        header = read_header(file)
        _refuse_misfits(str(file), twice=header.keys() & stored.keys())
        stored |= header
    astray = {name for name, shard in weight_map.items() if name in stored and stored[name].file.name != shard}
    _refuse_misfits(str(index), missing=weight_map.keys() - stored.keys(), in_another_shard=astray)
    return stored


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{index} is not JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        refuse(f"{index}'s weight_map", type(weight_map).__name__, "an object of file names")
    return weight_map


def _check_tensors(path: Path, config: DsaConfig, stored: Mapping[str, StoredTensor]) -> None:
    expected = tensor_shapes(config)
    for name in [name for name in expected if name in stored and stored[name].dtype == _FLOAT8]:
        expected[_scale_name(name)] = _scale_shape(config, name, expected[name])
    mtp = f"model.layers.{config.num_hidden_layers}."
    copies = (
        {f"{mtp}embed_tokens.weight", f"{mtp}shared_head.head.weight"} if config.num_nextn_predict_layers else set()
    )
    common = [name for name in expected if name in stored]
    _refuse_misfits(
        str(path),
        missing=expected.keys() - stored.keys(),
        unexpected=stored.keys() - expected.keys() - copies,
        of_another_shape={
            f"{name} {list(stored[name].shape)} in place of {list(expected[name])}"
            for name in common
            if stored[name].shape != expected[name]
        },
        of_another_dtype={
            f"{name} {stored[name].dtype} in place of float32"
            for name in common
            if name.endswith("_scale_inv") and stored[name].dtype != np.float32
        },
    )


def _refuse_misfits(where: str, **misfits: Any) -> None:
    """Raises one ValueError that names the tensors of every sort of misfit, up to 10 of each."""
    sorts = []
    for sort, names in misfits.items():
        if names:
            shown = ", ".join(sorted(names)[:_NAMED_IN_ERRORS]) + (", ..." if len(names) > _NAMED_IN_ERRORS else "")
            sorts.append(f"{len(names)} {sort.replace('_', ' ')}: {shown}")
    if sorts:
        raise ValueError(f"{where} holds the wrong tensors: " + "; ".join(sorts))


def _scale_name(name: str) -> str:
    return name + "_scale_inv"


def _scale_shape(config: DsaConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if config.quantization is None:
        refuse(f"{name}'s dtype", _FLOAT8, "float32 or bfloat16: its config.json has no quantization_config")
    require(len(shape) == 2, f"{name}'s dtype", _FLOAT8, "float32 or bfloat16: only matrices have block scales")
    return tuple(-(-length // size) for length, size in zip(shape, config.quantization.weight_block_size, strict=True))


def _write_json(file: Path, content: Any) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
