"""From prompts to tokens: `generate`, over an `Engine`, and `Run`, whose caller feeds the tokens and sees the logits.

A run's prompts lie one after another on one long tape of rows, which is cut into chunks of equal size: a chunk may end
one prompt and begin the next. At most three programs are compiled: a scored chunk, a dense chunk, a decode step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsa_jax.checks import require
from dsa_jax.config import DsaConfig
from dsa_jax.context import LayerCache, Options, PagedDecode, PagedPrefill, Stripes
from dsa_jax.engine import Engine, Stats, cache_dtype_of, cached_bytes, require_drafts
from dsa_jax.model import CausalLM
from dsa_jax.pages import OutOfPages, PagePool, pages_within
from dsa_jax.plan import plan_prefill
from dsa_jax.requests import check_length, check_prompt
from dsa_jax.sampling import Sampling
from dsa_jax.skeleton import Skeleton, build, mesh_of, place

Progress = Callable[[str, int, int], None]  # stage ("prefill" or "decode"), rows or tokens done, of how many
Keep = Callable[
    ["Chunk", tuple[Array | None, ...]], None
]  # a prefill step and every layer's indices, None where it was dense


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The rows of one prefill step, padded to the chunk's size.

    tokens, positions, request: i32[T]; request -1 for padding.
    seq_lens: i32[B], the length after this chunk of every request in it; 0 for the others.
    last_rows: i32[B], the row that ends a request's prompt, or -1.
    dense: every request in it skips scoring.
    """

    tokens: np.ndarray
    positions: np.ndarray
    request: np.ndarray
    seq_lens: np.ndarray
    last_rows: np.ndarray
    dense: bool

    @property
    def num_rows(self) -> int:
        return int((self.request >= 0).sum())


def generate(
    model: CausalLM,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    page_size: int = 64,
    cache_dtype: str = "bfloat16",
    num_pages: int | None = None,
    cache_bytes: int | None = None,
    prefill_chunk: int = 2048,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    drafts: int = 0,
    implementation: str | None = None,
    stripes: Stripes | None = None,
    progress: Progress | None = None,
    report: Callable[[Stats], None] | None = None,
) -> list[np.ndarray]:
    """Continues every prompt and returns the new tokens of each, i32[at most max_new_tokens], the stop token included.

    prompts: 1-D integer arrays of token ids, at least one token each, of any lengths.
    page_size: tokens a cache page holds.
    num_pages: pages of every layer's cache, as many as all prompts need together; None takes exactly these.
    cache_bytes: of all caches at most, in place of num_pages; prompts that do not fit wait for others to end.
    cache_dtype: "float32", "bfloat16" or "float8_e4m3fn" (e4m3 latents and index keys with scales, bfloat16 rope).
    prefill_chunk: rows of prompts in one step, at most.
    temperature, top_k, top_p: see `Sampling`. A request's draws depend on `seed`, its place in `prompts` and the
        position, not on who shares the batch.
    stop_tokens: token ids that end a request; None takes the model's eos_token_ids.
    drafts: tokens that the multi-token prediction layer drafts ahead, 0 to 5: the same texts in fewer steps.
    stripes: divide prefill selection over a mesh axis; the indices are the same bits.
    progress: called with (stage, done, total) after every step.
    report: called at the end with the engine's counts, the drafts' acceptance among them.
    Raises ValueError for a bad argument and OutOfPages (a ValueError) if the pages are too few, before anything is
    computed.
    """
    prompts = check_request(
        model.config,
        prompts,
        max_new_tokens=max_new_tokens,
        page_size=page_size,
        cache_dtype=cache_dtype,
        num_pages=num_pages,
        prefill_chunk=prefill_chunk,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        drafts=drafts,
    )
    if not prompts:
        return []
    needed = _pages_needed(prompts, max_new_tokens, page_size)
    total = sum(map(len, prompts))
    if cache_bytes is not None and num_pages is None:  # what the prompts cannot use is not allocated
        within = pages_within(cache_bytes, page_size, cached_bytes(model, cache_dtype, drafts))
        num_pages, cache_bytes = min(needed, within), None
    engine = Engine(
        model,
        max_requests=len(prompts),
        max_len=max(map(len, prompts)) + max_new_tokens,
        page_size=page_size,
        num_pages=(num_pages or needed) if cache_bytes is None else num_pages,
        cache_bytes=cache_bytes,
        cache_dtype=cache_dtype,
        prefill_chunk=min(prefill_chunk, max(16, 1 << (total - 1).bit_length())),
        drafts=drafts,
        dense_prefill=True,
        implementation=implementation,
        stripes=stripes,
    )
    settings = [Sampling(temperature, top_k, top_p, _seed_of(seed, place)) for place in range(len(prompts))]
    ids = [
        engine.add(prompt, max_new_tokens=max_new_tokens, sampling=setting, stop_tokens=stop_tokens)
        for prompt, setting in zip(prompts, settings, strict=True)
    ]
    while engine.busy:
        engine.step()
        if progress is not None:
            progress("prefill", min(total, engine.stats.prefilled + engine.stats.reused), total)
            progress("decode", engine.stats.produced, max_new_tokens * len(prompts))
    if report is not None:
        report(engine.stats)
    return [engine.take(id).tokens for id in ids]


def check_request(
    config: DsaConfig,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    page_size: int = 64,
    cache_dtype: str = "bfloat16",
    num_pages: int | None = None,
    prefill_chunk: int = 2048,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    drafts: int = 0,
) -> list[np.ndarray]:
    """The prompts as int32 arrays if `generate` takes them for a model of this config; raises as it does."""
    for name, value in (("max_new_tokens", max_new_tokens), ("page_size", page_size), ("prefill_chunk", prefill_chunk)):
        require(value >= 1, name, value, "at least 1")
    cache_dtype_of(cache_dtype)
    require_drafts(config, drafts)
    Sampling(temperature, top_k, top_p)
    checked = [check_prompt(config, f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]
    for index, prompt in enumerate(checked):
        limit = config.max_position_embeddings
        check_length(f"prompts[{index}]", prompt, max_new_tokens, limit, "max_position_embeddings")
    needed = _pages_needed(checked, max_new_tokens, page_size)
    if num_pages is not None and num_pages < needed:
        raise OutOfPages(
            f"num_pages must be at least {needed} for {len(checked)} prompts of {sum(map(len, checked))} tokens, "
            f"{max_new_tokens} new tokens each, in pages of {page_size}, got {num_pages}"
        )
    return checked


def _pages_needed(prompts: Sequence[np.ndarray], max_new_tokens: int, page_size: int) -> int:
    return sum(-(-(len(prompt) + max_new_tokens) // page_size) for prompt in prompts)


def _seed_of(seed: int, place: int) -> int:
    """A seed of its own for every place."""
    return int(np.random.SeedSequence([seed, place]).generate_state(1)[0])


class Run:
    """The caches and compiled steps of one fixed set of sequences."""

    def __init__(
        self,
        model: CausalLM,
        max_lens: Sequence[int],
        *,
        page_size: int,
        cache_dtype: str,
        num_pages: int | None,
        options: Options,
    ):
        """max_lens: the greatest length each request may reach; its pages are taken now, or OutOfPages raised."""
        needed = [-(-length // page_size) for length in max_lens]
        pool = PagePool(sum(needed) if num_pages is None else num_pages, page_size)
        table = np.full((len(needed), max(needed)), -1, np.int32)
        for row, length in enumerate(max_lens):
            lease = pool.lease()
            lease.grow(length)
            table[row, : len(lease.pages)] = lease.pages
        self.options = options
        self._skeleton, arrays = Skeleton.of(model)
        mesh = options.stripes.mesh if options.stripes is not None else mesh_of(arrays)
        self.caches = build(lambda: model.new_caches(pool.num_pages, page_size, jnp.dtype(cache_dtype)), mesh)
        self.block_table = place(jnp.asarray(table), mesh)
        self._arrays = arrays if mesh_of(arrays) is not None else place(arrays, mesh)
        self.index_topk = model.config.index_topk

    def prefill(
        self, prompts: Sequence[np.ndarray], chunk: int, progress: Progress, keep: Keep | None = None
    ) -> Float[Array, "B V"]:
        """Fills the caches and returns the logits after every prompt's last token.

        keep: handed what every step selected.
        """
        logits, done, total = None, 0, sum(map(len, prompts))
        # Only the first request of a chunk can have a prefix: the ragged copy of keys holds at most this many rows.
        capacity = chunk + max(map(len, prompts))
        for step in chunks(prompts, chunk, self.index_topk):
            context = PagedPrefill(
                jnp.asarray(step.positions),
                jnp.asarray(step.request),
                self.block_table,
                jnp.asarray(step.seq_lens),
                capacity,
                dataclasses.replace(self.options, dense=step.dense),
            )
            tokens, last_rows = jnp.asarray(step.tokens), jnp.asarray(step.last_rows)
            new, self.caches, indices = _prefill_step(
                self._skeleton, self._arrays, tokens, context, self.caches, last_rows, keep is not None
            )
            if keep is not None:
                keep(step, indices)
            ended = jnp.asarray(step.last_rows >= 0)[:, None]
            logits = new if logits is None else jnp.where(ended, new, logits)
            done += step.num_rows
            progress("prefill", done, total)
        assert logits is not None
        return logits

    def decode(self, tokens: Int[Array, " B"], seq_lens: np.ndarray) -> Float[Array, "B V"]:
        """One token of every request, whose length with it is in `seq_lens`; 0 for requests that have ended."""
        context = PagedDecode(self.block_table, jnp.asarray(seq_lens), 1, self.options)
        logits, self.caches = _decode_step(self._skeleton, self._arrays, tokens, context, self.caches)
        return logits


def chunks(prompts: Sequence[np.ndarray], size: int, index_topk: int) -> Iterator[Chunk]:
    """Cuts the prompts, laid one after another, into steps of `size` rows."""
    lens = np.array([len(prompt) for prompt in prompts])
    tape = np.concatenate(prompts)
    request = np.repeat(np.arange(len(prompts)), lens)
    positions = np.concatenate([np.arange(length) for length in lens])
    for start in range(0, len(tape), size):
        rows = slice(start, min(start + size, len(tape)))
        pad = size - (rows.stop - rows.start)
        chunk_lens = np.bincount(request[rows], minlength=len(prompts))
        prefix_lens = np.zeros_like(lens)
        prefix_lens[request[rows][0]] = positions[rows][0]
        ends = rows.start + np.flatnonzero(positions[rows] == lens[request[rows]] - 1)
        last_rows = np.full(len(prompts), -1)
        last_rows[request[ends]] = ends - rows.start
        yield Chunk(
            tokens=_padded(tape[rows], pad, 0),
            positions=_padded(positions[rows], pad, 0),
            request=_padded(request[rows], pad, -1),
            seq_lens=np.where(chunk_lens > 0, prefix_lens + chunk_lens, 0).astype(np.int32),
            last_rows=last_rows.astype(np.int32),
            dense=_skips_scoring(prefix_lens, chunk_lens, index_topk),
        )


def _skips_scoring(prefix_lens: np.ndarray, chunk_lens: np.ndarray, index_topk: int) -> bool:
    present = chunk_lens > 0
    return plan_prefill(prefix_lens[present], chunk_lens[present], index_topk).dense


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=4)
def _prefill_step(skeleton, arrays, tokens, context, caches, last_rows, keep_indices) -> tuple[Array, tuple, tuple]:
    model = skeleton.fill(arrays)
    step = model.forward(tokens, context, caches)
    logits = model.logits(step.hidden[jnp.maximum(last_rows, 0)])
    return logits, step.caches, step.indices if keep_indices else ()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _decode_step(skeleton, arrays, tokens, context, caches) -> tuple[Array, tuple[LayerCache, ...]]:
    model = skeleton.fill(arrays)
    step = model.forward(tokens, context, caches)
    return model.logits(step.hidden), step.caches


def _padded(rows: np.ndarray, pad: int, value: int) -> np.ndarray:
    return np.pad(rows, (0, pad), constant_values=value).astype(np.int32)
