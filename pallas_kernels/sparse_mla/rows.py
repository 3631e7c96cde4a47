"""Key rows as the kernels gather them: an array or a latent cache seen as value columns and tail columns."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

SCALE_BLOCK = 128  # columns of an e4m3 row that share a scale


class KeyRows(NamedTuple):
    """Two views of the same N rows. A cache has its latent part and its rope part; an array is both views at once.

    value: [N, any], whose first columns are keys and, up to v_dim, values.
    tail: [N, any] with the keys' remaining columns, or None if there are none.
    scale: f32[N, ceil(columns / 128)] of an e4m3 value, else None.
    """

    value: Any
    tail: Any
    scale: Any


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A run of a key's columns that one load takes.

    is_value: whether it comes from KeyRows.value, else from KeyRows.tail.
    start, width: the columns of that array.
    q_start: the query's column that meets the first of them.
    size: width, padded to a power of two of at least 16, the least that a matrix unit takes.
    """

    is_value: bool
    start: int
    width: int
    q_start: int
    size: int


def widths(kv: Any, width: int, v_dim: int) -> tuple[int, int]:
    """How many of a key's `width` columns are value columns and how many are tail columns."""
    value = kv.nope.shape[-1] if _is_cache(kv) else v_dim
    return value, width - value


def key_dtype(kv: Any) -> Any:
    """The dtype of the value columns."""
    return kv.nope.dtype if _is_cache(kv) else kv.dtype


def tail_dtype(kv: Any) -> Any:
    """The dtype of the tail columns."""
    return kv.rope.dtype if _is_cache(kv) else kv.dtype


def key_rows(kv: Any, width: int, v_dim: int) -> KeyRows:
    """Views an array [N, width], or a latent cache by its flat slots, as rows. Nothing is copied."""
    if not _is_cache(kv):
        return KeyRows(value=kv, tail=kv if v_dim < width else None, scale=None)
    return KeyRows(
        value=_flat(kv.nope),
        tail=_flat(kv.rope) if kv.rope.shape[-1] else None,
        scale=None if kv.scale is None else _flat(kv.scale),
    )


def column_chunks(kv: Any, width: int, v_dim: int, block_d: int) -> tuple[Chunk, ...]:
    """Cuts a key's columns into chunks of at most `block_d`, value columns first."""
    value_width, tail_width = widths(kv, width, v_dim)
    tail_start = 0 if _is_cache(kv) else v_dim
    cuts = [(True, start, 0, min(block_d, value_width - start)) for start in range(0, value_width, block_d)]
    cuts += [
        (False, tail_start + start, value_width - tail_start, min(block_d, tail_width - start))
        for start in range(0, tail_width, block_d)
    ]
    return tuple(
        Chunk(is_value, start, size, start + shift, max(16, pl.next_power_of_2(size)))
        for is_value, start, shift, size in cuts
    )


@functools.partial(jax.jit, static_argnames=("page_size", "num_pages"))
def position_slots(indices, block_table, seq_lens, *, page_size: int, num_pages: int):
    """Flat cache slots i32[B, Q, K] of positions in each request; -1 for what is not below seq_lens, or on no page."""
    batch, queries, topk = indices.shape
    table_width = block_table.shape[1]
    if table_width == 0:
        return jnp.full_like(indices, -1)
    limit = jnp.minimum(seq_lens, table_width * page_size)[:, None, None]
    inside = (indices >= 0) & (indices < limit)
    position = jnp.where(inside, indices, 0)
    page_of = (position // page_size).reshape(batch, queries * topk)
    page = jnp.take_along_axis(block_table, page_of, axis=1, mode="promise_in_bounds").reshape(indices.shape)
    mapped = inside & (page >= 0) & (page < num_pages)
    return jnp.where(mapped, jnp.where(mapped, page, 0) * page_size + position % page_size, -1)


def _is_cache(kv: Any) -> bool:
    return hasattr(kv, "nope")


def _flat(pages: jax.Array) -> jax.Array:
    return pages.reshape(pages.shape[0] * pages.shape[1], pages.shape[2])
