"""Runs a checkpoint several ways and tells how far apart they are: the specification, the sparse path, the striped
sparse path, and prefill with decode over paged caches.

A row whose best keys around the cut have equal scores but for the last bits may rightly keep other ones when sums are
added up in another order. From there on its hidden state, and that of every row that attends to it, is another one. So
every layer is also run on the specification's own input: there a row must either keep the same keys, or differ by keys
whose scores are equal within `TIE`; and rows that keep the same keys must agree within `HIDDEN`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from dsa_jax import reference
from dsa_jax.checks import require
from dsa_jax.context import Options, Sequences, Stripes
from dsa_jax.generate import Run
from dsa_jax.indexer import indexer_logits
from dsa_jax.layers import DecoderLayer, Rope
from dsa_jax.model import CausalLM

HIDDEN = 2e-5  # largest difference of float32 hidden states and logits, relative to the greatest magnitude among them
TIE = 1e-5  # scores that count as equal, relative to the greatest magnitude in their row
SCORED_ROWS = 64  # rows scored again at a time


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """How one layer of the sparse path compares with the specification.

    name: the layer's number, or "mtp". indexer: "full" or "shared".
    end_to_end: largest difference of the hidden state after it, from the tokens up; None for the MTP layer.
    absolute, relative: largest difference on the specification's input, over rows with the same keys; relative to the
        greatest magnitude.
    rows_differ: rows that keep other keys on the specification's input. near_ties: how many of them by a tie.
    striped_equal: the striped path's indices are the same bits; None where it was not run.
    """

    name: str
    indexer: str
    end_to_end: float | None
    absolute: float
    relative: float
    rows_differ: int
    near_ties: int
    striped_equal: bool | None

    @property
    def ok(self) -> bool:
        return self.relative <= HIDDEN and self.rows_differ == self.near_ties and self.striped_equal is not False


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found.

    num_tokens: tokens of the sequence. num_devices: devices that the striped path used.
    layers: one LayerReport a layer, then the MTP layer's if there is one.
    logits: largest relative difference of the logits from the tokens up.
    same_keys: every layer kept the specification's keys from the tokens up; only then are `logits` judged.
    cached: largest relative difference of the logits of prefill and decode over paged caches from the sparse path's;
        None where it was not run.
    """

    num_tokens: int
    num_devices: int
    layers: tuple[LayerReport, ...]
    logits: float
    same_keys: bool
    cached: float | None

    @property
    def ok(self) -> bool:
        end_to_end = self.logits <= HIDDEN or not self.same_keys
        return all(layer.ok for layer in self.layers) and end_to_end and (self.cached is None or self.cached <= HIDDEN)


def check(
    model: CausalLM,
    tensors: reference.Tensors,
    tokens: Int[np.ndarray, " S"],
    *,
    want: reference.Trace | None = None,
    latent_norm_eps: float | None = None,
    stripes: Stripes | None = None,
    implementation: str | None = None,
    decode_steps: int = 16,
    stage: Callable[[str], None] = lambda name: None,
) -> Report:
    """Compares one sequence along every path.

    model: in float32. tensors: the checkpoint that it was loaded from.
    tokens: more than index_topk of them, or nothing is selected.
    want: what the specification computes from `tokens` as a batch of one; None to compute it here.
    latent_norm_eps: as the model was loaded with. stripes: for the striped path; None leaves it out.
    decode_steps: the last tokens, which are decoded one by one over paged caches after the others were prefilled; 0
        leaves the caches out.
    stage: told what begins.
    Raises ValueError for too few or too many tokens.
    """
    config, length = model.config, len(tokens)
    require(length > config.index_topk, "the number of tokens", length, f"more than index_topk = {config.index_topk}")
    batch = jnp.asarray(tokens, jnp.int32)[None]
    if want is None:
        stage("reference")
        want = reference.forward(tensors, config, batch, latent_norm_eps=latent_norm_eps)
    stage("sparse path")
    path = _run_path(model, batch[0], model.options(implementation=implementation))
    striped = None
    if stripes is not None:
        stage("striped sparse path")
        striped = _run_path(model, batch[0], model.options(implementation=implementation, stripes=stripes))
    stage("layer by layer")
    layers = []
    for number, case in enumerate(_cases(model, want, batch[0])):
        end_to_end = float(jnp.max(jnp.abs(path.layers[number] - case.out)))
        same = None if striped is None else np.array_equal(striped.indices[number], path.indices[number])
        kind = config.indexer_types[number]
        layers.append(LayerReport(str(number), kind, end_to_end, *_compare(model, case, implementation), same))
    if model.mtp is not None:
        case = _mtp_case(model, tensors, batch[0], want, latent_norm_eps)
        layers.append(LayerReport("mtp", "full", None, *_compare(model, case, implementation), None))
    cached = None
    if decode_steps:
        stage("cached prefill and decode")
        cached = _cached_difference(model, tokens, path.logits, decode_steps, implementation)
    return Report(
        num_tokens=length,
        num_devices=1 if stripes is None else stripes.mesh.size,
        layers=tuple(layers),
        logits=relative_difference(path.logits, want.logits[0]),
        same_keys=all(np.array_equal(got, ref[0]) for got, ref in zip(path.indices, want.indices, strict=True)),
        cached=cached,
    )


def relative_difference(got: Array, want: Array) -> float:
    """Largest difference over the greatest magnitude."""
    return float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))


@dataclasses.dataclass(frozen=True)
class _Path:
    """The sparse path from the tokens up: every layer's output [S, hidden] and indices, and the logits [S, vocab]."""

    layers: list[Array]
    indices: list[Array]
    logits: Array


def _run_path(model: CausalLM, tokens: Array, options: Options) -> _Path:
    """Layer by layer: layers of one structure share a compiled program, which `CausalLM.run` does not give."""
    context = Sequences.of_batch(1, len(tokens), options)
    x, shared, layers, kept = model.model.embed_tokens(tokens), None, [], []
    for layer, kind in zip(model.model.layers, model.config.indexer_types, strict=True):
        given = None if kind == "full" else shared
        x, shared = _run_layer(*nnx.split(layer), x, context, given, model.config)
        layers.append(x)
        kept.append(shared)
    return _Path(layers, kept, model.logits(model.model.norm(x)))


@dataclasses.dataclass(frozen=True)
class _Case:
    """A layer with the specification's input, output and indices, [S, ...]. `shared`: what a layer before it kept."""

    layer: DecoderLayer
    x: Array
    shared: Array | None
    out: Array
    indices: Array


def _cases(model: CausalLM, want: reference.Trace, tokens: Array) -> list[_Case]:
    cases, x, shared = [], model.model.embed_tokens(tokens), None
    for number, layer in enumerate(model.model.layers):
        out, indices = want.layers[number][0], want.indices[number][0]
        own = model.config.indexer_types[number] == "full"
        cases.append(_Case(layer, x, None if own else shared, out, indices))
        x, shared = out, indices
    return cases


def _mtp_case(
    model: CausalLM, tensors: reference.Tensors, tokens: Array, want: reference.Trace, eps: float | None
) -> _Case:
    assert model.mtp is not None
    """The first token follows the last: as many rows as the other layers have share their compiled program."""
    following = jnp.append(tokens, tokens[:1])
    hidden = jnp.pad(want.hidden, ((0, 0), (0, 1), (0, 0)))  # the last row is not read
    trace = reference.mtp_forward(tensors, model.config, following[None], hidden, latent_norm_eps=eps)
    x = model.mtp.inputs(model.model.embed_tokens(following[1:]), want.hidden[0])
    return _Case(model.mtp.layer, x, None, trace.layers[0][0], trace.indices[0][0])


def _compare(model: CausalLM, case: _Case, implementation: str | None) -> tuple[float, float, int, int]:
    """Largest difference, the same over the greatest magnitude, rows with other keys, those that are near-ties."""
    context = Sequences.of_batch(1, case.x.shape[0], model.options(implementation=implementation))
    out, indices = _run_layer(*nnx.split(case.layer), case.x, context, case.shared, model.config)
    differs = np.any(np.asarray(indices != case.indices), axis=-1)
    rows = np.flatnonzero(differs)
    ties = _count_ties(model, case, np.asarray(indices), rows, implementation) if len(rows) else 0
    off = np.abs(np.asarray(out - case.out))[~differs].max(initial=0.0)
    return float(off), float(off / np.abs(case.out).max()), len(rows), ties


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run_layer(graph, state, x, context, shared, config) -> tuple[Array, Array]:
    out, _, indices = nnx.merge(graph, state)(x, context, None, shared, Rope(config))
    return out, indices


def _count_ties(model: CausalLM, case: _Case, got: np.ndarray, rows: np.ndarray, implementation: str | None) -> int:
    """How many of the differing rows differ by keys whose scores are equal within TIE."""
    want, ties = np.asarray(case.indices), 0
    for start in range(0, len(rows), SCORED_ROWS):
        block = rows[start : start + SCORED_ROWS]
        padded = np.resize(block, SCORED_ROWS)
        scores = _score_rows(*nnx.split(case.layer), case.x, jnp.asarray(padded), model.config, implementation)
        for row, row_scores in zip(block, np.asarray(scores), strict=False):
            ties += _is_tie(row_scores[: row + 1], got[row], want[row])
    return ties


def _is_tie(scores: np.ndarray, got: np.ndarray, want: np.ndarray) -> bool:
    """Whether the two selections of a row are of one size and swap only keys of equal scores."""
    got, want = got[got >= 0], want[want >= 0]
    swapped = np.setxor1d(got, want)
    if len(got) != len(want) or len(swapped) == 0 or swapped.max() >= len(scores):
        return False
    return bool(np.ptp(scores[swapped]) <= TIE * np.abs(scores).max())


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _score_rows(graph, state, x, rows, config, implementation) -> Array:
    """The layer's own scores of some rows, [rows, S]."""
    layer, rope = nnx.merge(graph, state), Rope(config)
    attention, positions = layer.self_attn, jnp.arange(x.shape[0], dtype=jnp.int32)
    h = layer.input_layernorm(x)
    q_latent = attention.q_a_layernorm(attention.q_a_proj(h[rows]))
    q, weights = attention.indexer.queries(h[rows], q_latent, positions[rows], rope)
    keys = attention.indexer.keys(h, positions, rope)
    starts, ends = jnp.zeros_like(rows), rows + 1
    return indexer_logits(q, keys, weights, starts, ends, implementation=implementation)


def _cached_difference(
    model: CausalLM, tokens: np.ndarray, want: Array, decode_steps: int, implementation: str | None
) -> float:
    """Logits after the prompt and after every decoded token, over float32 caches, against `want` of all tokens."""
    prompt = np.asarray(tokens[:-decode_steps], np.int32)
    run = Run(
        model,
        [len(tokens)],
        page_size=64,
        cache_dtype="float32",
        num_pages=None,
        options=model.options(implementation=implementation),
    )
    rows = [run.prefill([prompt], min(2048, len(prompt)), lambda *_: None)]
    for length in range(len(prompt) + 1, len(tokens) + 1):
        rows.append(run.decode(jnp.asarray(tokens[length - 1 : length], jnp.int32), np.array([length], np.int32)))
    return relative_difference(jnp.concatenate(rows), want[len(prompt) - 1 :])
