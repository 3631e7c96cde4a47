"""Selection with the rows of a step divided over the ranks of a mesh axis.

The rows are cut into stripes, and the stripes dealt out in rounds of one a rank: row r belongs to rank
(r // stripe) % ranks. Folded, every second round is dealt in reverse, so that with two rounds each rank has a piece of
the head and its counterpart of the tail. Stripes keep a causal prompt's work even: each rank gets early rows, which see
few keys, and late ones. A rank selects its own rows only; since a row's selection does not depend on its batch, the
merged result has the bits that one device computes.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, UInt16

from dsa_jax.checks import refuse, require
from dsa_jax.indexer import check_ragged
from dsa_jax.topk import DEFAULT_MEMORY_BUDGET, require_topk, select_topk

COMBINES = ("max", "all_gather")


def stripe_rows(num_rows: int, num_ranks: int, stripe: int, rank: Any, *, fold: bool = False) -> Int32[Array, " R"]:
    """The rows of a rank in ascending order, then -1 up to the most that any rank has.

    rank: an integer or a traced scalar.
    fold: deal every second round in reverse.
    Raises ValueError for num_rows < 0, and for num_ranks or stripe < 1.
    """
    require(num_rows >= 0, "num_rows", num_rows, "at least 0")
    require(num_ranks >= 1, "num_ranks", num_ranks, "at least 1")
    require(stripe >= 1, "stripe", stripe, "at least 1")
    rounds, rest = divmod(num_rows, stripe * num_ranks)
    own = jnp.arange(rounds * stripe + min(rest, stripe), dtype=jnp.int32)
    turn = own // stripe
    place = jnp.where(turn % 2 == 1, num_ranks - 1 - rank, rank) if fold else rank
    rows = (turn * num_ranks + place) * stripe + own % stripe
    return jnp.where(rows < num_rows, rows, -1).astype(jnp.int32)


def stripe_owners(num_rows: int, num_ranks: int, stripe: int, *, fold: bool = False) -> Int[np.ndarray, "rounds ranks"]:
    """The rank that owns each stripe, round by round; the last round may have fewer rows than stripes."""
    rounds = -(-num_rows // (stripe * num_ranks))
    owners = np.tile(np.arange(num_ranks), (rounds, 1))
    if fold:
        owners[1::2] = owners[1::2, ::-1]
    return owners


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
    fold: bool = False,
    combine: str = "max",
    min_rows: int = 0,
    k_scale: Float[Array, " N"] | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    implementation: str | None = None,
) -> Int32[Array, "M topk"]:
    """`select_topk`, each rank of a mesh axis selecting its stripes of rows; the same bits on every rank.

    Call it inside shard_map or pmap with inputs that are equal on every rank. One rank, or fewer rows than ranks or
    than min_rows: every rank selects all rows and nothing is sent.

    axis_name: the axis to divide the rows over; other axes of the mesh do not matter.
    stripe: rows in a row that one rank takes.
    fold: deal every second round of stripes in reverse.
    combine: "max": every rank fills a buffer of -1 with its rows, and one all-reduce of the maximum joins them, which
        moves 8 * M * topk bytes through each rank's links (a ring's, all but 1/ranks of it).
        "all_gather": the rows alone are sent, in 2 bytes an index: a quarter of that.
    min_rows: rows below which sending costs more than it saves; `dsa_jax.stripe_cost.pays` tells.
    The rest: as in `select_topk`; memory_budget is each rank's, and does not count the buffers of the exchange,
        4 * M * topk bytes twice.
    Raises ValueError for bad arguments, an axis that is not bound included; NotImplementedError as `select_topk`.
    """
    check_ragged(q, k, weights, starts, ends, k_scale)
    require_topk("topk", topk)
    require(stripe >= 1, "stripe", stripe, "at least 1")
    require(combine in COMBINES, "combine", repr(combine), " or ".join(map(repr, COMBINES)))
    require(min_rows >= 0, "min_rows", min_rows, "at least 0")
    num_ranks, num_rows = _axis_size(axis_name), q.shape[0]
    select = functools.partial(
        select_topk, topk=topk, k_scale=k_scale, memory_budget=memory_budget, implementation=implementation
    )
    if num_ranks == 1 or num_rows < max(num_ranks, min_rows):
        return select(q, k, weights, starts, ends)
    rank = lax.axis_index(axis_name)
    rows = stripe_rows(num_rows, num_ranks, stripe, rank, fold=fold)
    own = (x.at[jnp.maximum(rows, 0)].get(mode="promise_in_bounds") for x in (q, weights, starts, ends))
    q, weights, starts, ends = own
    chosen = select(q, k, weights, starts, jnp.where(rows < 0, starts, ends))  # padding rows see nothing
    owners = stripe_owners(num_rows, num_ranks, stripe, fold=fold)
    if combine == "max":
        return lax.pmax(_place(chosen, owners, rank, num_rows, stripe), axis_name)
    gathered = lax.all_gather(_pack(chosen, k.shape[0]), axis_name, to="invarying")
    return _unpack(_in_order(gathered, owners, num_rows, stripe), topk)


def count_owners(buffer: Int32[Array, "M K"], *, axis_name: str) -> Int32[Array, " M"]:
    """How many ranks wrote to each row of the buffers that a MAX is about to merge. Call it inside shard_map.

    A buffer that was not -1 before its rank's rows were written counts as written to.
    """
    return lax.psum(jnp.any(buffer != -1, axis=1).astype(jnp.int32), axis_name)


def check_one_owner(counts: Int[Any, " M"], sees_keys: Bool[Any, " M"]) -> None:
    """Raises ValueError unless each row that sees keys was written by one rank, and the others by none.

    The maximum of two owners' rows is a mixture of both that no later check can tell from a selection.

    counts: from `count_owners`, outside jit.
    """
    counts, expected = np.asarray(counts), np.asarray(sees_keys).astype(int)
    wrong = np.flatnonzero(counts != expected)
    if len(wrong):
        shown = {int(row): int(counts[row]) for row in wrong[:8]}
        refuse("owners by row", f"{shown} and {len(wrong) - len(shown)} more", "1 for rows that see keys, 0 for others")


def _axis_size(axis_name: str) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError:
        refuse("axis_name", repr(axis_name), "an axis of the shard_map or pmap around the call")


def _stripes(chosen: Array, owners: np.ndarray, stripe: int) -> Array:
    """[..., R, lanes] to [..., rounds, stripe, lanes]; the last round may hold fewer rows and is filled up."""
    rounds = owners.shape[0]
    missing = rounds * stripe - chosen.shape[-2]
    padded = jnp.pad(chosen, [(0, 0)] * (chosen.ndim - 2) + [(0, missing), (0, 0)])
    return padded.reshape(*chosen.shape[:-2], rounds, stripe, chosen.shape[-1])


def _place(chosen: Int32[Array, "R K"], owners: np.ndarray, rank: Any, num_rows: int, stripe: int) -> Array:
    """[num_rows, K] of -1 with this rank's rows in their places."""
    mine = (jnp.asarray(owners, jnp.int32) == rank)[:, :, None, None]
    placed = jnp.where(mine, _stripes(chosen, owners, stripe)[:, None], -1)
    return placed.reshape(-1, chosen.shape[1])[:num_rows]


def _in_order(gathered: Array, owners: np.ndarray, num_rows: int, stripe: int) -> Array:
    """[ranks, R, lanes], each rank's rows in its own order, to [num_rows, lanes]."""
    blocks = _stripes(gathered, owners, stripe)  # [ranks, rounds, stripe, lanes]
    rounds = np.arange(owners.shape[0])[:, None]
    return blocks.at[owners, rounds].get(mode="promise_in_bounds").reshape(-1, gathered.shape[-1])[:num_rows]


_SEGMENT_BITS = 16  # columns are sent as their last 16 bits
_NONE = (1 << _SEGMENT_BITS) - 1  # -1 as such, where no column looks like it


def packed_lanes(topk: int, num_columns: int) -> int:
    """How many 2-byte lanes a row is sent in: one an index, and over 65535 columns a count for each 65536."""
    return topk if num_columns <= _NONE else topk + -(-num_columns >> _SEGMENT_BITS)


def _pack(chosen: Int32[Array, "R K"], num_columns: int) -> UInt16[Array, "R lanes"]:
    """Ascending columns, -1 last, in two bytes each: K last halves, then how many lie in each run of 65536 columns.

    Up to 65535 columns need no counts.
    """
    segments = jnp.arange(packed_lanes(0, num_columns), dtype=jnp.int32)
    counts = jnp.sum((chosen >> _SEGMENT_BITS)[:, None, :] == segments[None, :, None], axis=2)  # -1 is in no segment
    return jnp.concatenate([chosen & 0xFFFF, counts], axis=1).astype(jnp.uint16)


def _unpack(packed: UInt16[Array, "M lanes"], topk: int) -> Int32[Array, "M K"]:
    """What `_pack` was given."""
    low, counts = packed[:, :topk].astype(jnp.int32), packed[:, topk:].astype(jnp.int32)
    if counts.shape[1] == 0:
        return jnp.where(low == _NONE, -1, low)
    ends = jnp.cumsum(counts, axis=1)  # [M, segments], the lane where each segment's columns end
    lane = jnp.arange(topk, dtype=jnp.int32)
    segment = jnp.sum(ends[:, None, :] <= lane[None, :, None], axis=2, dtype=jnp.int32)
    return jnp.where(lane[None] < ends[:, -1:], (segment << _SEGMENT_BITS) | low, -1)
