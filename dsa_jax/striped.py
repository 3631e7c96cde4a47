"""Selection with the rows of a step divided over the ranks of a mesh axis.

Row r belongs to rank (r // stripe) % ranks. Stripes keep a causal prompt's work even: each rank gets early rows, which
see few keys, and late ones. A rank selects its own rows only; since a row's selection does not depend on its batch, the
merged result has the bits that one device computes.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from dsa_jax.checks import refuse, require
from dsa_jax.indexer import check_ragged
from dsa_jax.topk import DEFAULT_MEMORY_BUDGET, require_topk, select_topk

COMBINES = ("max", "all_gather")


def stripe_rows(num_rows: int, num_ranks: int, stripe: int, rank: Any) -> Int32[Array, " R"]:
    """The rows of a rank in ascending order, then -1 up to the number of rows that rank 0 has, the most of any.

    rank: an integer or a traced scalar.
    Raises ValueError for num_rows < 0, and for num_ranks or stripe < 1.
    """
    require(num_rows >= 0, "num_rows", num_rows, "at least 0")
    require(num_ranks >= 1, "num_ranks", num_ranks, "at least 1")
    require(stripe >= 1, "stripe", stripe, "at least 1")
    cycles, rest = divmod(num_rows, stripe * num_ranks)
    own = jnp.arange(cycles * stripe + min(rest, stripe), dtype=jnp.int32)
    rows = (own // stripe) * (stripe * num_ranks) + rank * stripe + own % stripe
    return jnp.where(rows < num_rows, rows, -1).astype(jnp.int32)


def striped_select_topk(
    q: Float[Array, "M H D"],
    k: Float[Array, "N D"],
    weights: Float[Array, "M H"],
    starts: Int[Array, " M"],
    ends: Int[Array, " M"],
    topk: int,
    *,
    axis_name: str,
    stripe: int = 512,
    combine: str = "max",
    k_scale: Float[Array, " N"] | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    implementation: str | None = None,
) -> Int32[Array, "M topk"]:
    """`select_topk`, each rank of a mesh axis selecting its stripes of rows; the same bits on every rank.

    Call it inside shard_map or pmap with inputs that are equal on every rank. One rank, or fewer rows than ranks: every
    rank selects all rows and nothing is sent.

    axis_name: the axis to divide the rows over; other axes of the mesh do not matter.
    stripe: rows in a row that one rank takes.
    combine: "max": every rank fills a buffer of -1 with its rows, and one all-reduce of the maximum joins them.
        "all_gather": the rows alone are sent, half the bytes of a ring all-reduce. shard_map then needs
        check_vma=False: it cannot tell that gathered rows are equal on every rank.
    The rest: as in `select_topk`; memory_budget is each rank's, and does not count the buffers of the exchange,
        4 * M * topk bytes twice.
    Raises ValueError for bad arguments, an axis that is not bound included; NotImplementedError as `select_topk`.
    """
    check_ragged(q, k, weights, starts, ends, k_scale)
    require_topk("topk", topk)
    require(stripe >= 1, "stripe", stripe, "at least 1")
    require(combine in COMBINES, "combine", repr(combine), " or ".join(map(repr, COMBINES)))
    num_ranks, num_rows = _axis_size(axis_name), q.shape[0]
    select = functools.partial(
        select_topk, topk=topk, k_scale=k_scale, memory_budget=memory_budget, implementation=implementation
    )
    if num_ranks == 1 or num_rows < num_ranks:
        return select(q, k, weights, starts, ends)
    rows = stripe_rows(num_rows, num_ranks, stripe, lax.axis_index(axis_name))
    own = (x.at[jnp.maximum(rows, 0)].get(mode="promise_in_bounds") for x in (q, weights, starts, ends))
    q, weights, starts, ends = own
    chosen = select(q, k, weights, starts, jnp.where(rows < 0, starts, ends))  # padding rows see nothing
    if combine == "max":
        return lax.pmax(_place(chosen, rows, num_rows), axis_name)
    return _unstripe(lax.all_gather(chosen, axis_name), num_rows, stripe)


def count_owners(rows: Int[Array, " R"], num_rows: int, *, axis_name: str) -> Int32[Array, " M"]:
    """How many ranks write each row, where this rank writes `rows` (-1 = padding). Call it inside shard_map.

    The maximum of two owners' rows is a mixture of both that no later check can tell from a selection.
    """
    mine = jnp.full_like(rows, 0, shape=(num_rows,), dtype=jnp.int32)
    mine = mine.at[jnp.where(rows < 0, num_rows, rows)].add(1, mode="drop")
    return lax.psum(mine, axis_name)


def check_one_owner(counts: Int[Any, " M"]) -> None:
    """Raises ValueError unless every row has exactly one owner. counts: from `count_owners`, outside jit."""
    counts = np.asarray(counts)
    wrong = np.flatnonzero(counts != 1)
    if len(wrong):
        shown = {int(row): int(counts[row]) for row in wrong[:8]}
        refuse("owners by row", f"{shown} and {len(wrong) - len(shown)} more", "1 for every row")


def _axis_size(axis_name: str) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError:
        refuse("axis_name", repr(axis_name), "an axis of the shard_map or pmap around the call")


def _place(chosen: Array, rows: Array, num_rows: int) -> Array:
    """[num_rows, topk] of -1 with this rank's rows in their places."""
    buffer = jnp.full_like(chosen, -1, shape=(num_rows, chosen.shape[1]))
    # -1 would wrap around to the last row, also under mode="drop".
    return buffer.at[jnp.where(rows < 0, num_rows, rows)].set(chosen, mode="drop")


def _unstripe(gathered: Array, num_rows: int, stripe: int) -> Array:
    """[ranks, R, topk], each rank's rows in its own order, to [num_rows, topk]."""
    row, num_ranks = np.arange(num_rows), gathered.shape[0]
    rank = (row // stripe) % num_ranks
    own = row // (stripe * num_ranks) * stripe + row % stripe
    return gathered.at[rank, own].get(mode="promise_in_bounds")
