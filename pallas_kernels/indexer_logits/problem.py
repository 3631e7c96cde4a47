"""The one problem that ragged prefill and paged decode are, as the kernels see it."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.row_chunk import RowChunk

HEAD_DIMS = (32, 64, 128)
OPERAND_DTYPES = (jnp.float8_e4m3fn, jnp.bfloat16)


@runtime_checkable
class PagedKeys(Protocol):
    """Index keys in pages: k [pages, page, D], and one scale a token, [pages, page], or None."""

    k: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """Queries of B requests against each request's own columns. Ragged prefill is B = 1 without a block table.

    q: [B, Q, H, D], e4m3fn or bf16.
    weights: f32 [B, Q, H].
    starts: i32 [B, Q], or None for zeros.
    ends: i32 [B, Q], or [B] for the ends of each request's last query, the ones before it seeing a key less each. A row
        sees the columns in [starts, ends); what lies outside of [0, columns) counts for nothing.
    k: [N, D], or pages [pages, page, D] where there is a block table.
    k_scale: f32 [N] or [pages, page], or None for ones.
    block_table: i32 [B, P], the page of each run of `page` columns, or None. Entries past the last visible column are
        not read; the keys of a page outside the cache score -inf.
    columns: columns of the logits, N or P * page.
    rows: None, or which of their rows the queries are, where q, weights, starts and ends, [1, A, ...] then, have more.
    """

    q: jax.Array
    weights: jax.Array
    starts: jax.Array | None
    ends: jax.Array
    k: jax.Array
    k_scale: jax.Array | None
    block_table: jax.Array | None
    columns: int = dataclasses.field(metadata=dict(static=True))
    rows: RowChunk | None = None

    @property
    def queries(self) -> int:
        """Q."""
        return self.q.shape[1] if self.rows is None else self.rows.size

    @property
    def is_empty(self) -> bool:
        return 0 in (self.q.shape[0], self.queries, self.columns)

    @property
    def has_lengths(self) -> bool:
        """Whether only the length of each request says what its rows see."""
        return self.starts is None and self.ends.ndim == 1

    @property
    def seen(self) -> tuple[jax.Array, ...]:
        """What says what rows see: the lengths [B], or the starts and ends [B * Q], or of all A rows; as given."""
        if self.has_lengths:
            return (self.ends,)
        starts, ends = self.starts, self.ends
        if starts is None or ends.ndim == 1:
            starts, ends = self.ranges()
        return starts.reshape(-1), ends.reshape(-1)

    def cut_out(self) -> "Problem":
        """The same problem with its own rows alone."""
        if self.rows is None:
            return self
        own = {name: self.rows.of(getattr(self, name), axis=1) for name in ("q", "weights", "starts", "ends")}
        return dataclasses.replace(self, **own, rows=None)

    def ranges(self) -> tuple[Int[Array, "B Q"], Int[Array, "B Q"]]:
        """starts and ends of every row, 0 <= starts and ends <= columns; a row with ends <= starts has no keys."""
        ends = self.ends
        if ends.ndim == 1:
            ends = ends[:, None] - self.queries + 1 + jnp.arange(self.queries, dtype=jnp.int32)[None]
        starts = jnp.zeros_like(ends) if self.starts is None else jnp.maximum(self.starts, 0)
        return starts, jnp.minimum(ends, self.columns)


def ragged_problem(
    q: Num[Array, "M H D"],
    k: Num[Array, "N D"],
    weights: Float[Array, "M H"],
    starts: Int[Array, " M"],
    ends: Int[Array, " M"],
    k_scale: Float[Array, " N"] | None,
    rows: RowChunk | None = None,
) -> Problem:
    """One request whose keys are `k`, and whose queries are all M rows or those of a chunk."""
    columns = k.shape[0]
    return Problem(
        q=q[None],
        weights=weights[None],
        starts=starts.astype(jnp.int32)[None],
        ends=ends.astype(jnp.int32)[None],
        k=k,
        k_scale=k_scale,
        block_table=None,
        columns=columns,
        rows=rows,
    )


def paged_problem(
    q: Num[Array, "B Q H D"],
    cache: PagedKeys,
    weights: Float[Array, "B Q H"],
    block_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
) -> Problem:
    """B requests of Q queries each, their keys in the pages of `cache`. Query i sees keys < seq_lens - Q + i + 1."""
    return Problem(
        q=q,
        weights=weights,
        starts=None,
        ends=seq_lens.astype(jnp.int32),
        k=cache.k,
        k_scale=cache.scale,
        block_table=block_table.astype(jnp.int32),
        columns=block_table.shape[1] * cache.k.shape[1],
    )


def refuse_operands(q: Any, k: Any) -> str | None:
    """Why no kernel takes these operands, or None."""
    if q.dtype != k.dtype or q.dtype not in OPERAND_DTYPES:
        return f"q and k must both be float8_e4m3fn or bfloat16, got {q.dtype} and {k.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        return f"index_head_dim must be one of {HEAD_DIMS}, got {q.shape[-1]}"
    return None


def nothing(problem: Problem) -> Float[Array, "B Q L"]:
    """The logits of a problem without rows or without columns."""
    return jnp.full((problem.q.shape[0], problem.queries, problem.columns), -jnp.inf, jnp.float32)
