"""What a step computes, decided from lengths and the configuration alone: the IndexShare schedule, which requests of a
prefill skip scoring, how a prompt is cut into chunks, and which keys a decoded row sees.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from dsa_jax.checks import refuse, require
from dsa_jax.hf_config import shared_indexer_types

_LETTERS = {"F": "full", "S": "shared"}


@dataclasses.dataclass(frozen=True)
class Carry:
    """What a pipeline stage that starts with a shared layer needs from the stage before, besides the hidden states.

    source_layer: the full layer that computed it.
    axes, dtype: topk_indices as that layer returned them, for the same query rows.
    """

    source_layer: int
    axes: str = "[M, index_topk]"
    dtype: str = "int32"


@dataclasses.dataclass(frozen=True)
class IndexSharePlan:
    """Which layers have an indexer of their own.

    types: "full" or "shared" for each layer. A full layer has indexer weights and an index-key cache and selects; a
        shared layer has neither and takes the indices of the nearest full layer before it.
    Raises ValueError for other words, no layers, or a shared layer 0.
    """

    types: tuple[str, ...]

    def __post_init__(self) -> None:
        require(len(self.types) > 0, "types", self.types, "at least one layer")
        for layer, kind in enumerate(self.types):
            require(kind in _LETTERS.values(), f"types[{layer}]", repr(kind), "'full' or 'shared'")
        require(self.types[0] == "full", "types[0]", repr(self.types[0]), "'full': no layer before it has indices")

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, kind in enumerate(self.types) if kind == "full")

    def source(self, layer: int) -> int:
        """The layer whose indices `layer` attends with: itself if it is full."""
        self._require_layer("layer", layer)
        return max(full for full in self.full_layers if full <= layer)

    def split(self, at: int) -> Carry | None:
        """What must go along when a pipeline stage starts at layer `at`; None where hidden states are enough."""
        self._require_layer("at", at)
        return None if self.types[at] == "full" else Carry(self.source(at))

    def _require_layer(self, name: str, layer: int) -> None:
        require(0 <= layer < len(self.types), name, layer, f"in 0..{len(self.types) - 1}")


def index_share_plan(config: Any) -> IndexSharePlan:
    """The IndexShare schedule of a configuration.

    config: has num_hidden_layers and may have, in order of precedence, as in transformers' GlmMoeDsaConfig:
        indexer_types ("full" or "shared" for each layer); index_topk_pattern (F and S, a string or a list);
        index_topk_freq and index_skip_topk_offset (defaults 1 and 2, see `shared_indexer_types`).
    Raises ValueError for a schedule of another length, unknown words or letters, or a shared layer 0.
    """
    layers = config.num_hidden_layers
    for name in ("indexer_types", "index_topk_pattern"):
        listed = getattr(config, name, None)
        if listed is not None:
            return IndexSharePlan(_kinds(name, listed, layers))
    freq, offset = getattr(config, "index_topk_freq", None), getattr(config, "index_skip_topk_offset", None)
    return IndexSharePlan(
        shared_indexer_types(layers, freq=1 if freq is None else freq, offset=2 if offset is None else offset)
    )


def _kinds(name: str, listed: Sequence[str], layers: int) -> tuple[str, ...]:
    require(len(listed) == layers, name, f"{len(listed)} layers long", f"num_hidden_layers = {layers} long")
    for layer, word in enumerate(listed):
        legal = word in _LETTERS or word in _LETTERS.values()
        require(legal, f"{name}[{layer}]", repr(word), "'full', 'shared', 'F' or 'S'")
    return tuple(_LETTERS.get(word, word) for word in listed)


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Which requests of a prefill step score keys.

    skips: for each request, whether its rows skip scoring and see every key before them. Index keys are written all
        the same: a later step scores them.
    """

    skips: tuple[bool, ...]

    @property
    def scores(self) -> tuple[bool, ...]:
        return tuple(not skip for skip in self.skips)

    @property
    def dense(self) -> bool:
        """Whether no request scores, so that the whole step can take the dense path."""
        return all(self.skips)


def plan_prefill(
    prefix_lens: Any,
    chunk_lens: Any,
    index_topk: int,
    *,
    dense_path: bool = True,
    mtp_layer: bool = False,
    has_decodes: bool = False,
) -> PrefillPlan:
    """Which requests skip scoring: those whose context, prefix and chunk together, is at most index_topk.

    Such a row would select every key it sees. Every request scores where the step does not take the dense path, in an
    MTP layer, in a step that also decodes, and where the lengths are not known when the step is traced.

    prefix_lens: [B] tokens of each request that earlier steps have written.
    chunk_lens: [B] tokens of each request in this step.
    index_topk: keys a row attends to.
    dense_path: whether the step runs dense multi-head attention over expanded keys.
    mtp_layer: whether the layer is the multi-token-prediction layer.
    has_decodes: whether the step also has rows that decode.
    Raises ValueError for negative lengths and for lists of different lengths.
    """
    require(index_topk >= 1, "index_topk", index_topk, "at least 1")
    batch = np.shape(prefix_lens)
    require(len(batch) == 1 and np.shape(chunk_lens) == batch, "chunk_lens' shape", np.shape(chunk_lens), f"{batch}")
    if isinstance(prefix_lens, jax.core.Tracer) or isinstance(chunk_lens, jax.core.Tracer):
        return PrefillPlan((False,) * batch[0])
    prefix, chunk = np.asarray(prefix_lens, np.int64), np.asarray(chunk_lens, np.int64)
    for name, lens in (("prefix_lens", prefix), ("chunk_lens", chunk)):
        require(bool((lens >= 0).all()), name, lens.tolist(), "at least 0")
    may_skip = dense_path and not mtp_layer and not has_decodes
    return PrefillPlan(tuple(may_skip and context <= index_topk for context in (prefix + chunk).tolist()))


def visible_indices(starts: Int[Array, " M"], ends: Int[Array, " M"], topk: int) -> Int32[Array, "M topk"]:
    """What `select_topk` returns for rows with at most topk keys, without scoring: starts, starts + 1, ..., then -1.

    Raises ValueError where topk is not in 1..4096.
    """
    require(1 <= topk <= 4096, "topk", topk, "in 1..4096")
    columns = jnp.maximum(starts, 0).astype(jnp.int32)[:, None] + jnp.arange(topk, dtype=jnp.int32)[None]
    return jnp.where(columns < ends[:, None], columns, -1)


def chunk_ranges(prompt_len: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """[start, stop) of each chunk of a prompt. All but the last have the same length, so there are at most two shapes.

    Raises ValueError for a negative prompt_len or a chunk below 1.
    """
    require(prompt_len >= 0, "prompt_len", prompt_len, "at least 0")
    require(chunk >= 1, "chunk", chunk, "at least 1")
    return tuple((start, min(start + chunk, prompt_len)) for start in range(0, prompt_len, chunk))


def decode_ends(seq_lens: Int[Array, " B"], next_n: int) -> Int32[Array, "B next_n"]:
    """One past the last key that query i of a request's last next_n tokens sees: seq_len - next_n + i + 1, at least 0.

    seq_lens: keys of each request, these tokens' own included.
    next_n: tokens a request decodes in this step: 1, or more with speculation.
    Raises ValueError for next_n < 0.
    """
    if next_n < 0:
        refuse("next_n", next_n, "at least 0")
    query = jnp.arange(next_n, dtype=jnp.int32)
    return jnp.maximum(seq_lens.astype(jnp.int32)[:, None] - next_n + query[None] + 1, 0)
