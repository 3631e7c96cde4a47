"""From prompts to tokens: pages for every request, packed chunked prefill, then decode steps over paged caches.

Every request's pages are set aside before anything is computed, so running out of them is an error that has cost
nothing. Prompts lie one after another on one long tape of rows, which is cut into chunks of equal size: a chunk may end
one prompt and begin the next. At most three programs are compiled whatever the traffic: a scored chunk, a dense chunk,
a decode step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dsa_jax.checks import require
from dsa_jax.config import DsaConfig
from dsa_jax.context import LayerCache, Options, PagedDecode, PagedPrefill, Stripes
from dsa_jax.model import CausalLM
from dsa_jax.plan import plan_prefill

CACHE_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")

Progress = Callable[[str, int, int], None]  # stage ("prefill" or "decode"), rows or tokens done, of how many
Keep = Callable[
    ["Chunk", tuple[Array | None, ...]], None
]  # a prefill step and every layer's indices, None where it was dense


class OutOfPages(ValueError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Hands out page numbers 0..num_pages - 1; each page belongs to one request at a time."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, or OutOfPages with nothing taken."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages are needed and {len(self._free)} of {self.num_pages} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


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
    prefill_chunk: int = 2048,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    implementation: str | None = None,
    stripes: Stripes | None = None,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Continues every prompt and returns the new tokens of each, i32[at most max_new_tokens], the stop token included.

    prompts: 1-D integer arrays of token ids, at least one token each, of any lengths.
    page_size: tokens a cache page holds.
    num_pages: pages of every layer's cache; None takes exactly what the prompts need.
    cache_dtype: "float32", "bfloat16" or "float8_e4m3fn" (e4m3 latents and index keys with scales, bfloat16 rope).
    prefill_chunk: rows of one prefill step.
    temperature: 0 takes the likeliest token; else tokens are drawn at this temperature. A request's draws depend on
        `seed`, its place in `prompts` and the position, not on who shares the batch.
    stop_tokens: token ids that end a request; None takes the model's eos_token_ids.
    stripes: divide prefill selection over a mesh axis; the indices are the same bits.
    progress: called with (stage, done, total) after every step.
    Raises ValueError for a bad argument and OutOfPages (a ValueError) if `num_pages` is too few, before anything is
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
    )
    if not prompts:
        return []
    stop = frozenset(model.config.eos_token_ids if stop_tokens is None else map(int, stop_tokens))
    run = Run(
        model,
        [len(prompt) + max_new_tokens for prompt in prompts],
        page_size=page_size,
        cache_dtype=cache_dtype,
        num_pages=num_pages,
        options=model.options(implementation=implementation, stripes=stripes),
    )
    sample = functools.partial(_sample, seed=seed, temperature=temperature)
    first = sample(
        run.prefill(prompts, prefill_chunk, progress or _silent), positions=np.array([len(p) for p in prompts])
    )
    return _decode(run, prompts, np.asarray(first), max_new_tokens, stop, sample, progress or _silent)


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
) -> list[np.ndarray]:
    """The prompts as int32 arrays if `generate` takes them for a model of this config; raises as it does."""
    for name, value in (("max_new_tokens", max_new_tokens), ("page_size", page_size), ("prefill_chunk", prefill_chunk)):
        require(value >= 1, name, value, "at least 1")
    require(cache_dtype in CACHE_DTYPES, "cache_dtype", repr(cache_dtype), " or ".join(map(repr, CACHE_DTYPES)))
    require(0.0 <= temperature < math.inf, "temperature", temperature, "at least 0 and finite")
    checked = [_checked_prompt(config, index, prompt) for index, prompt in enumerate(prompts)]
    limit = config.max_position_embeddings
    for index, prompt in enumerate(checked):
        length, legal = f"{len(prompt)} + {max_new_tokens}", f"at most max_position_embeddings = {limit}"
        require(len(prompt) + max_new_tokens <= limit, f"prompts[{index}]'s length + max_new_tokens", length, legal)
    needed = sum(-(-(len(prompt) + max_new_tokens) // page_size) for prompt in checked)
    if num_pages is not None and num_pages < needed:
        raise OutOfPages(
            f"num_pages must be at least {needed} for {len(checked)} prompts of {sum(map(len, checked))} tokens, "
            f"{max_new_tokens} new tokens each, in pages of {page_size}, got {num_pages}"
        )
    return checked


class Run:
    """The caches and compiled steps of one batch of requests."""

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
        allocator = PageAllocator(sum(needed) if num_pages is None else num_pages)
        table = np.full((len(needed), max(needed)), -1, np.int32)
        for row, count in enumerate(needed):
            table[row, :count] = allocator.take(count)
        self.options = options
        self.graph, self.state = nnx.split(model)
        mesh = options.stripes.mesh if options.stripes is not None else mesh_of(self.state)
        caches = model.new_caches(allocator.num_pages, page_size, jnp.dtype(cache_dtype))
        self.caches, self.block_table = place((caches, jnp.asarray(table)), mesh)
        self.state = self.state if mesh_of(self.state) is not None else place(self.state, mesh)
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
                self.graph, self.state, tokens, context, self.caches, last_rows, keep is not None
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
        logits, self.caches = _decode_step(self.graph, self.state, tokens, context, self.caches)
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


def _decode(
    run: Run,
    prompts: list[np.ndarray],
    first: np.ndarray,
    max_new_tokens: int,
    stop: frozenset[int],
    sample: Callable[..., Array],
    progress: Progress,
) -> list[np.ndarray]:
    produced = [[int(token)] for token in first]
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    running = np.array([tokens[-1] not in stop for tokens in produced])
    progress("decode", 1, max_new_tokens)
    for count in range(1, max_new_tokens):
        if not running.any():
            break
        lens = np.where(running, lens + 1, lens).astype(np.int32)
        tokens = jnp.asarray([tokens[-1] for tokens in produced], jnp.int32)
        logits = run.decode(tokens, np.where(running, lens, 0).astype(np.int32))
        for row, token in enumerate(np.asarray(sample(logits, positions=lens))):
            if running[row]:
                produced[row].append(int(token))
                running[row] = int(token) not in stop
        progress("decode", count + 1, max_new_tokens)
    return [np.array(tokens, np.int32) for tokens in produced]


def _sample(logits: Float[Array, "B V"], *, positions: np.ndarray, seed: int, temperature: float) -> Int[Array, " B"]:
    """The token at `positions` of every request."""
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1)
    return _draw(logits, jnp.asarray(positions, jnp.int32), jax.random.key(seed), temperature)


@jax.jit
def _draw(logits: Array, positions: Array, key: Array, temperature: Array) -> Array:
    def draw(row: Array, request: Array, position: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, request), position), row)

    return jax.vmap(draw)(logits / temperature, jnp.arange(logits.shape[0]), positions)


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=4)
def _prefill_step(graph, state, tokens, context, caches, last_rows, keep_indices) -> tuple[Array, tuple, tuple]:
    model = nnx.merge(graph, state)
    step = model.forward(tokens, context, caches)
    logits = model.logits(step.hidden[jnp.maximum(last_rows, 0)])
    return logits, step.caches, step.indices if keep_indices else ()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _decode_step(graph, state, tokens, context, caches) -> tuple[Array, tuple[LayerCache, ...]]:
    model = nnx.merge(graph, state)
    step = model.forward(tokens, context, caches)
    return model.logits(step.hidden), step.caches


def place(tree: Any, mesh: Mesh | None) -> Any:
    """The arrays of a tree on every device of `mesh`, or where they are without one."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def mesh_of(state: Any) -> Mesh | None:
    """The mesh that a model's parameters are placed on, if they are."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
            return leaf.sharding.mesh
    return None


def _padded(rows: np.ndarray, pad: int, value: int) -> np.ndarray:
    return np.pad(rows, (0, pad), constant_values=value).astype(np.int32)


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _checked_prompt(config: DsaConfig, index: int, prompt: Any) -> np.ndarray:
    prompt = np.asarray(prompt)
    name, vocab = f"prompts[{index}]", config.vocab_size
    require(
        prompt.ndim == 1 and prompt.size > 0, name, f"shape {list(prompt.shape)}", "a 1-D array of at least one token"
    )
    require(np.issubdtype(prompt.dtype, np.integer), f"{name}'s dtype", prompt.dtype, "an integer type")
    outside = prompt[(prompt < 0) | (prompt >= vocab)]
    require(outside.size == 0, f"{name}'s tokens", outside[:1].tolist(), f"in 0..{vocab - 1}")
    return prompt.astype(np.int32)
