"""Who scores which tile: an equal share of the tiles that matter for every block of a persistent kernel.

Queries come in groups and keys in tiles. A group visits the tiles between its lowest start and its highest end and
leaves the others unseen. Both kinds of tile are numbered through, group after group, and every block gets an equal run
of either numbering. All of it is computed on the device: lengths need not be known to the host.

One program does it, in one launch: as plain jnp it is many small kernels, 31 us on an H200 before the scores of 4096 x
16384 with 32 heads. It numbers the tiles, a few thousand groups at a time, and then finds the ends of every block's
shares in those numbers by one binary search, all blocks and both kinds side by side. Up to some thousand groups it is
not needed: every block then makes its own share (own_share.py).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.indexer_logits.problem import Problem
from pallas_kernels.triton_backend import barrier, launch, load, store

_VISITS, _FILLS = 0, 4  # where a block's two shares begin in its row of `shares`
_ROWS = _COST, _UNSEEN, _VISITED = 0, 1, 2  # of `before`
_NOWHERE = 1 << 30  # the interpreter writes a masked lane's old value back, over what another lane puts there


class Share(NamedTuple):
    """A block's run of tile numbers [begin, end), and the groups [first, stop) that it crosses."""

    begin: Any
    end: Any
    first: Any
    stop: Any

    @property
    def groups(self):
        """How many groups."""
        return self.stop - self.first


class Walk(NamedTuple):
    """The part of a share that lies in one group: steps [begin, end), counted from the share's own beginning.

    offset: tile minus step. gap_at, gap: tiles from gap_at on lie `gap` further.
    """

    begin: Any
    end: Any
    offset: Any
    gap_at: Any
    gap: Any

    def tile(self, step):
        tile = self.offset + step
        return tile if self.gap is None else tile + jnp.where(tile >= self.gap_at, self.gap, 0)


class Schedule(NamedTuple):
    """The schedule as arrays, or as references to them inside a kernel.

    shares: i32 [blocks, 8], a block's share of the visits and of the fills.
    before: i32 [3, groups + 1], what comes before each group: the cost of visits, unseen tiles, visited tiles.
    first: i32 [groups], the first tile that each visits.
    """

    shares: Any
    before: Any
    first: Any

    def visits(self, block) -> Share:
        return self._share(block, _VISITS)

    def fills(self, block) -> Share:
        return self._share(block, _FILLS)

    def visited(self, group, share: Share) -> Walk:
        """The tiles of `share` that `group` visits."""
        before, begin, end = self._steps(group, share, _VISITED)
        return Walk(begin, end, self.first[group] - before, None, None)

    def unseen(self, group, share: Share) -> Walk:
        """The tiles of `share` that no query of `group` sees."""
        before, begin, end = self._steps(group, share, _UNSEEN)
        visited = self.before[_VISITED, group + 1] - self.before[_VISITED, group]
        return Walk(begin, end, -before, self.first[group], visited)

    def _share(self, block, at: int) -> Share:
        return Share(*(self.shares[block, at + i] for i in range(4)))

    def _steps(self, group, share: Share, kind: int):
        before, after = self.before[kind, group] - share.begin, self.before[kind, group + 1] - share.begin
        return before, jnp.maximum(before, 0), jnp.minimum(after, share.end - share.begin)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """queries: of a request; group: queries of a group; the rest as in `schedule`."""

    queries: int
    group: int
    groups: int
    keys: int
    columns: int
    blocks: int
    group_cost: int
    chunk: int

    @property
    def requests(self) -> int:
        return self.groups // pl.cdiv(self.queries, self.group)

    @property
    def tiles(self) -> int:
        """Tiles of a group, visited or not."""
        return pl.cdiv(self.columns, self.keys)


def schedule(
    problem: Problem,
    *,
    group: int,
    keys: int,
    blocks: int,
    group_cost: int = 0,
    chunk: int = 2048,
    interpret: bool = False,
) -> Schedule:
    """The schedule of a problem in groups of `group` queries, over tiles of `keys` keys.

    group_cost: what taking up a group costs, in tiles. Shares are equal in tiles visited plus that.
    chunk: groups numbered at a time, a power of two.
    """
    batch, queries = problem.q.shape[:2]
    groups = batch * pl.cdiv(queries, group)
    chunk = min(pl.next_power_of_2(groups), chunk)
    sizes = _Sizes(queries, group, groups, keys, problem.columns, blocks, group_cost, chunk)
    shapes = ((blocks, 8), (3, groups + 1), (groups,))
    made = launch(
        functools.partial(_kernel, sizes=sizes, has_starts=problem.starts is not None, interpret=interpret),
        tuple(x.reshape(-1) for x in (problem.starts, problem.ends) if x is not None),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        grid=1,
        num_warps=8,
        num_stages=1,
        name="indexer_schedule",
        interpret=interpret,
    )
    return Schedule(*made)


def _kernel(*refs, sizes: _Sizes, has_starts: bool, interpret: bool):
    *inputs, shares, before, first = refs
    starts, ends = inputs if has_starts else (None, *inputs)
    zero = pl.program_id(0)  # the Triton lowering takes no literal as a loop's first value
    number_chunk = functools.partial(_number_chunk, starts, ends, before, first, sizes)
    visits, taken_up = lax.fori_loop(0, pl.cdiv(sizes.groups, sizes.chunk), number_chunk, (zero, zero))
    if not interpret:
        barrier()  # what other threads stored is read from here on
    total = visits + sizes.group_cost * taken_up, sizes.groups * sizes.tiles - visits
    _store_shares(shares, before, total, sizes)


def _number_chunk(starts, ends, before, first, sizes: _Sizes, turn, done):
    """Stores what chunk `turn` of the groups has; done: (tiles visited, groups that visit any) in earlier chunks."""
    number = turn * sizes.chunk + jnp.arange(sizes.chunk, dtype=jnp.int32)
    is_group = number < sizes.groups
    per_request = pl.cdiv(sizes.queries, sizes.group)
    request, earliest = number // per_request, number % per_request * sizes.group
    low, high = jnp.full_like(number, sizes.columns), jnp.zeros_like(number)
    for query in (earliest + i for i in range(sizes.group)):
        is_query = is_group & (query < sizes.queries)
        start, end = _range(starts, ends, request, query, is_query, sizes)
        sees = is_query & (start < end)
        low, high = jnp.where(sees, jnp.minimum(low, start), low), jnp.where(sees, jnp.maximum(high, end), high)
    visited = jnp.maximum((high + sizes.keys - 1) // sizes.keys - low // sizes.keys, 0)
    taken = (visited > 0).astype(jnp.int32)
    visits_after, taken_after = done[0] + jnp.cumsum(visited), done[1] + jnp.cumsum(taken)
    visits_before = visits_after - visited
    at = jnp.where(is_group, number, _NOWHERE)
    store(first.at[at], jnp.minimum(low // sizes.keys, sizes.tiles), mask=is_group)
    cost_before = visits_before + sizes.group_cost * (taken_after - taken)
    for row, value in zip(_ROWS, (cost_before, sizes.tiles * number - visits_before, visits_before), strict=True):
        store(before.at[row, at], value, mask=is_group)
    visits, taken_up = done[0] + jnp.sum(visited), done[1] + jnp.sum(taken)
    # Past the last group; each chunk's end is overwritten by the next one's beginning, which is the same.
    end = jnp.minimum((turn + 1) * sizes.chunk, sizes.groups)
    for row, value in zip(
        _ROWS, (visits + sizes.group_cost * taken_up, sizes.tiles * end - visits, visits), strict=True
    ):
        before[row, end] = value
    return visits, taken_up


def _range(starts, ends, request, query, is_query, sizes: _Sizes):
    """Start and end of a query's row, as in Problem.ranges."""
    row = request * sizes.queries + query
    start = 0 * row if starts is None else jnp.maximum(load(starts.at[row], mask=is_query, other=0), 0)
    if ends.shape[0] == sizes.requests:
        end = load(ends.at[request], mask=is_query, other=0) - sizes.queries + 1 + query
    else:
        end = load(ends.at[row], mask=is_query, other=0)
    return start, jnp.minimum(end, sizes.columns)


def _store_shares(shares, before, total, sizes: _Sizes):
    """Stores every block's shares of both kinds. total: what is shared out of either, cost and unseen tiles."""
    kind = jnp.arange(2, dtype=jnp.int32)[:, None]  # _COST or _UNSEEN
    edge = jnp.arange(pl.next_power_of_2(sizes.blocks + 1), dtype=jnp.int32)[
        None
    ]  # a block's begin, and so the last's end
    kind, edge = kind + 0 * edge, edge + 0 * kind
    of_cost, of_unseen = (_shared_out(x, edge, sizes.blocks) for x in total)
    spent = jnp.where(kind == _COST, of_cost, of_unseen)
    low, high = 0 * edge, 0 * edge + sizes.groups
    for _ in range(sizes.groups.bit_length()):  # for the first group that ends beyond, or `groups` for none
        middle = jnp.minimum((low + high) // 2, sizes.groups - 1)
        beyond = load(before.at[kind, middle + 1]) <= spent
        low, high = jnp.where(beyond & (low < high), middle + 1, low), jnp.where(beyond, high, middle)
    into = jnp.maximum(spent - load(before.at[kind, low]) - jnp.where(kind == _COST, sizes.group_cost, 0), 0)
    tile = load(before.at[jnp.where(kind == _COST, _VISITED, _UNSEEN), low]) + into
    begins, ends = edge < sizes.blocks, (edge > 0) & (edge <= sizes.blocks)
    stop = low + (into > 0).astype(jnp.int32)
    for i, (value, block, mask) in enumerate(
        ((tile, edge, begins), (tile, edge - 1, ends), (low, edge, begins), (stop, edge - 1, ends))
    ):
        store(shares.at[jnp.where(mask, block, _NOWHERE), (_FILLS - _VISITS) * kind + i], value, mask=mask)


def _shared_out(total, edge, blocks: int):
    """How much of a total the blocks before an edge have."""
    edge = jnp.minimum(edge, blocks)
    return edge * (total // blocks) + jnp.minimum(edge, total % blocks)
