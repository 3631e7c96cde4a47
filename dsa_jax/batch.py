"""One step of many requests as one program: forward pass, sampling, verification of drafts and new drafts.

A step has a number of slots, one request each, of which some decode, some have a chunk of their prompt computed and
some are empty. Its shapes do not follow the traffic: rows that nobody needs are padding, which writes nothing and which
no other row sees. Nothing goes to the host in between.

Speculation (DeepSeek-V3 report, section 2.2; vLLM's and SGLang's rules where the paper is silent). A slot that decodes
has n rows: its last token and n - 1 drafts of what follows. Every row's next token is sampled as if the drafts before
it were right; a draft is right if it is what was sampled in its place, and all tokens up to the first wrong draft, the
sampled one in its place included, are the request's. Since a draw depends on its position only, the text is the one
that decoding token by token gives, at any temperature.

The drafts come from the multi-token prediction layer. Row t of it takes the embedding of token t + 1 and the backbone's
hidden state of t after the final norm, so it runs over the rows of the step itself once their next tokens are known.
Later drafts recycle its own output, after the shared head's norm, at the following positions. With
index_share_for_mtp_iteration they attend to what the first one selected, so not to the drafted tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from dsa_jax.context import Context, LayerCache, Options, PagedDecode, PagedMixed, PagedPrefill
from dsa_jax.model import CausalLM
from dsa_jax.sampling import SamplingRows, sample
from dsa_jax.skeleton import Skeleton


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeRows:
    """The slots that decode.

    tokens: i32[B, n], the last token and the drafts after it.
    seq_lens: i32[B], the length with all n of them; 0 for the other slots.
    drafts: i32[B], how many of the drafts may be accepted, 0 to n - 1.
    """

    tokens: Any
    seq_lens: Any
    drafts: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkRows:
    """The rows of prompts.

    tokens, positions: i32[T].
    next_tokens: i32[T], the token that follows; -1 where this step samples it.
    request: i32[T], the slot; -1 for padding.
    seq_lens: i32[B], the length with this chunk; 0 for the other slots.
    last_rows: i32[B], the row that ends a slot's prompt; -1 where none does.
    """

    tokens: Any
    positions: Any
    next_tokens: Any
    request: Any
    seq_lens: Any
    last_rows: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What one step computes. Either kind of rows may be None, which makes another program.

    block_table: i32[B, P], every slot's pages.
    sampling: the settings of the B slots.
    """

    block_table: Any
    sampling: SamplingRows
    decode: Any  # DecodeRows or None
    chunk: Any  # ChunkRows or None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Caches:
    """Of every backbone layer, and of the multi-token prediction layer where it drafts, else None."""

    backbone: Any  # tuple[LayerCache, ...]
    mtp: Any  # LayerCache or None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Result:
    """What a step gives every slot.

    tokens: i32[B, n], of which the first accepted + 1 are new, if the slot decoded or its prompt ended.
    accepted: i32[B], drafts that were right.
    drafts: i32[B, n - 1], of what follows.
    """

    tokens: Any
    accepted: Any
    drafts: Any


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6), donate_argnums=3)
def run_step(
    skeleton: Skeleton,
    arrays: list[Any],
    batch: Batch,
    caches: Caches,
    next_n: int,
    capacity: int,
    options: Options,
) -> tuple[Result, Caches]:
    """
    skeleton, arrays: the model.
    next_n: n, 1 plus the number of drafts. capacity: at least the sum of chunk.seq_lens.
    options: dense only without rows that decode.
    """
    model = skeleton.fill(arrays)
    step = model.forward(_tokens(batch), _context(batch, next_n, capacity, options), caches.backbone)
    rows, first = _sampled_rows(batch, next_n)
    settings = batch.sampling.repeat(next_n)
    with jax.named_scope("sampling"):
        places = first[:, None] + jnp.arange(next_n, dtype=jnp.int32)[None]
        drawn = sample(model.logits(step.hidden[rows.reshape(-1)]), places.reshape(-1), settings)
    drawn = drawn.reshape(rows.shape)
    accepted = _accepted(batch, drawn)
    if next_n == 1:
        return Result(drawn, accepted, drawn[:, 1:]), Caches(step.caches, caches.mtp)
    following = _following(batch, drawn)
    last = jnp.take_along_axis(rows, accepted[:, None], axis=1)[:, 0]
    # The position of that token; -1 where no text goes on.
    position = jnp.where(_goes_on(batch), first + accepted, -1)
    options = dataclasses.replace(options, dense=False)  # this layer always scores (`plan_prefill`)
    with jax.named_scope("draft"):
        context = _context(batch, next_n, capacity, options)
        hidden, mtp, indices = model.draft(following, step.hidden, context, caches.mtp)
        assert mtp is not None and indices is not None
        drafts, mtp = _draft(model, batch, mtp, hidden[last], indices[last], position, next_n, options)
    return Result(drawn, accepted, drafts), Caches(step.caches, mtp)


def _tokens(batch: Batch) -> Int[Array, " R"]:
    """The tokens of the step's rows, those that decode first."""
    decode = [] if batch.decode is None else [batch.decode.tokens.reshape(-1)]
    chunk = [] if batch.chunk is None else [batch.chunk.tokens]
    return jnp.concatenate(decode + chunk)


def _context(batch: Batch, next_n: int, capacity: int, options: Options) -> Context:
    """What these rows see."""
    table, decode, prefill = batch.block_table, None, None
    if batch.decode is not None:
        decode = PagedDecode(table, batch.decode.seq_lens, next_n, options)
    if batch.chunk is not None:
        chunk = batch.chunk
        prefill = PagedPrefill(chunk.positions, chunk.request, table, chunk.seq_lens, capacity, options)
    if decode is not None and prefill is not None:
        return PagedMixed(decode, prefill)
    context = prefill if decode is None else decode
    assert context is not None
    return context


def _sampled_rows(batch: Batch, next_n: int) -> tuple[Int[Array, "B n"], Int[Array, " B"]]:
    """The rows that every slot's next tokens are sampled from, and the position of the first of these tokens."""
    slots = batch.block_table.shape[0]
    rows, first = jnp.zeros((slots, next_n), jnp.int32), jnp.zeros(slots, jnp.int32)
    count = 0
    if batch.decode is not None:
        count = slots * next_n
        rows = jnp.arange(count, dtype=jnp.int32).reshape(slots, next_n)
        first = batch.decode.seq_lens - next_n + 1
    if batch.chunk is not None:
        ends = batch.chunk.last_rows >= 0
        rows = jnp.where(ends[:, None], count + batch.chunk.last_rows[:, None], rows)
        first = jnp.where(ends, batch.chunk.seq_lens, first)
    return rows, first


def _accepted(batch: Batch, drawn: Int[Array, "B n"]) -> Int[Array, " B"]:
    """How many drafts from the first on are what was drawn in their places."""
    if batch.decode is None:
        return jnp.zeros_like(drawn[:, 0])
    right = batch.decode.tokens[:, 1:] == drawn[:, :-1]
    right &= jnp.arange(right.shape[1], dtype=jnp.int32)[None] < batch.decode.drafts[:, None]
    right &= (batch.decode.seq_lens > 0)[:, None]
    return jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _goes_on(batch: Batch) -> Array:
    """Which slots get a token in this step."""
    none = jnp.zeros(batch.block_table.shape[0], bool)
    decodes = none if batch.decode is None else batch.decode.seq_lens > 0
    ends = none if batch.chunk is None else batch.chunk.last_rows >= 0
    return decodes | ends


def _following(batch: Batch, drawn: Int[Array, "B n"]) -> Int[Array, " R"]:
    """The token after every row's own. After a wrong draft it means nothing, and no right row sees these rows."""
    parts = [] if batch.decode is None else [drawn.reshape(-1)]
    if batch.chunk is not None:
        chunk = batch.chunk
        sampled = drawn[jnp.maximum(chunk.request, 0), 0]
        parts.append(jnp.where(chunk.next_tokens >= 0, chunk.next_tokens, sampled))
    return jnp.concatenate(parts)


def _draft(
    model: CausalLM,
    batch: Batch,
    mtp: LayerCache,
    hidden: Array,
    indices: Array,
    position: Array,
    next_n: int,
    options: Options,
) -> tuple[Int[Array, "B drafts"], LayerCache]:
    """The drafts of every slot.

    hidden [B, hidden], indices: of the layer's row that took the request's newest token, which is at `position`.
    """
    shares = model.config.index_share_for_mtp_iteration
    options = dataclasses.replace(options, reuse_indices=shares, stripes=None)

    def token_of(hidden: Array, ahead: Any) -> Array:
        return sample(model.logits(hidden), position + ahead, batch.sampling)

    def step(carry: tuple, ahead: Array) -> tuple:
        hidden, mtp = carry
        token = token_of(hidden, ahead)
        # Row t takes token t + 1: this row is at position - 1 + ahead, and is the last of its request.
        context = PagedDecode(batch.block_table, jnp.where(position >= 0, position + ahead, 0), 1, options)
        hidden, mtp, _ = model.draft(token, hidden, context, mtp, indices)
        return (hidden, mtp), token

    ahead = jnp.arange(1, next_n - 1, dtype=jnp.int32)
    (hidden, mtp), tokens = lax.scan(step, (hidden, mtp), ahead)
    return jnp.concatenate([tokens.T, token_of(hidden, next_n - 1)[:, None]], axis=1), mtp
