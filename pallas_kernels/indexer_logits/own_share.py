"""The schedule made by every block for itself: no launch comes before, and every block reads all lengths or ranges.

The same shares as schedule.py's, which is for more groups than one warpgroup numbers in a few microseconds. The threads
of one look at the groups in turn, then number them side by side, a run of them each. A share begins and ends in some
group, and the thread that numbers it writes that down.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels.indexer_logits import ptx
from pallas_kernels.indexer_logits.schedule import Share, Walk

MAX_GROUPS = 4096
_THREADS = ptx.WARPGROUP
_VISITS, _FILLS = 0, 4  # where the two shares begin in `shares`: begin, end, first group, stop


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known of a problem without its lengths or ranges.

    requests, queries: of each; group: queries of a group; keys: of a tile; columns: of a row.
    blocks, group_cost: as in schedule.py.
    """

    requests: int
    queries: int
    group: int
    keys: int
    columns: int
    blocks: int
    group_cost: int

    @property
    def request_groups(self) -> int:
        return -(-self.queries // self.group)

    @property
    def groups(self) -> int:
        return self.requests * self.request_groups

    @property
    def tiles(self) -> int:
        return -(-self.columns // self.keys)

    def words(self, *, has_lengths: bool) -> list[int]:
        """How many words of shared memory each reference after `seen` has, that `make` takes."""
        return [8, self.groups + 1, 8, *([] if has_lengths else [self.groups])]


class OwnSchedule(NamedTuple):
    """As schedule.Schedule, for one block, in shared memory.

    shares: i32 [8], the block's shares of visits and fills.
    before: i32 [groups + 1], tiles visited before each group.
    first: i32 [groups], the first tile that each visits, or None where that is 0 for all.
    """

    shares: Any
    before: Any
    first: Any
    sizes: Sizes

    def visits(self, block) -> Share:
        del block
        return Share(*(self.shares[_VISITS + i] for i in range(4)))

    def fills(self, block) -> Share:
        del block
        return Share(*(self.shares[_FILLS + i] for i in range(4)))

    def visited(self, group, share: Share) -> Walk:
        before, after = self.before[group] - share.begin, self.before[group + 1] - share.begin
        offset = self._first(group) - before
        return Walk(jnp.maximum(before, 0), jnp.minimum(after, share.end - share.begin), offset, None, None)

    def unseen(self, group, share: Share) -> Walk:
        visited, after = self.before[group], self.before[group + 1]
        before = group * self.sizes.tiles - visited - share.begin
        end = (group + 1) * self.sizes.tiles - after - share.begin
        walked = jnp.maximum(before, 0), jnp.minimum(end, share.end - share.begin)
        return Walk(*walked, -before, self._first(group), after - visited)

    def _first(self, group):
        return 0 if self.first is None else self.first[group]


def make(sizes: Sizes, *, has_lengths: bool) -> Callable[..., None]:
    """-> f(*seen, shares_ref[8], before_ref[groups + 1], sums_ref[8], first_ref[groups]?, block), for one warpgroup.

    seen: lengths_ref[requests] where has_lengths, else starts_ref[rows] and ends_ref[rows] of a single request.
    The other references lie in shared memory; sums_ref is scratch, and first_ref is there where seen are rows.
    Afterwards the warpgroup may read what it made.
    """
    refs = 1 + 3 if has_lengths else 2 + 4

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType() for _ in range(refs)), ptx.SCALAR))
    def run(_, *args):
        *refs, block = args
        seen, (shares, before, sums, *first) = (refs[:1], refs[1:]) if has_lengths else (refs[:2], refs[2:])
        _write_visits(sizes, seen, before, *first)
        utils.warpgroup_barrier()
        _write_shares(sizes, shares, before, sums, ptx.scalar(block))
        utils.warpgroup_barrier()

    return run


def _write_visits(sizes: Sizes, seen, visits, *first) -> None:
    """Stores how many tiles each group visits, and the first of them."""

    @ptx.loop(-(-sizes.groups // _THREADS))
    def _(turn):
        group = arith.addi(ptx.mul(turn, _THREADS), ptx.thread())
        is_group = ptx.less(group, ptx.i32(sizes.groups))
        low, high = (_of_length if len(seen) == 1 else _of_rows)(sizes, seen, group)
        tile = arith.divui(low, ptx.i32(sizes.keys))
        tiles = arith.divui(arith.addi(high, ptx.i32(sizes.keys - 1)), ptx.i32(sizes.keys))
        ptx.store_shared(visits, group, arith.maxsi(arith.subi(tiles, tile), ptx.i32(0)), is_group)
        for ref in first:
            ptx.store_shared(ref, group, tile, is_group)


def _of_length(sizes: Sizes, seen, group):
    """The lowest start and the highest end in a group; both are 0 where no query sees anything."""
    request = arith.divui(group, ptx.i32(sizes.request_groups))
    length = ptx.load_global(seen[0], ptx.wide(arith.minsi(request, ptx.i32(sizes.requests - 1))))
    in_request = arith.subi(group, ptx.mul(request, sizes.request_groups))
    last = arith.minsi(ptx.mul(arith.addi(in_request, ptx.i32(1)), sizes.group), ptx.i32(sizes.queries))
    end = arith.minsi(arith.addi(length, arith.subi(last, ptx.i32(sizes.queries))), ptx.i32(sizes.columns))
    return ptx.i32(0), arith.maxsi(end, ptx.i32(0))


def _of_rows(sizes: Sizes, seen, group):
    """The lowest start and the highest end in a group; `columns` and 0 where no query sees anything."""
    low, high = ptx.i32(sizes.columns), ptx.i32(0)
    for i in range(sizes.group):
        row = arith.addi(ptx.mul(group, sizes.group), ptx.i32(i))
        at = ptx.wide(arith.minsi(row, ptx.i32(sizes.queries - 1)))
        start, end = (ptx.load_global(ref, at) for ref in seen)
        start, end = arith.maxsi(start, ptx.i32(0)), arith.minsi(end, ptx.i32(sizes.columns))
        sees = ptx.less(start, end)
        low = arith.select(sees, arith.minsi(low, start), low)
        high = arith.select(sees, arith.maxsi(high, end), high)
    return low, high


def _write_shares(sizes: Sizes, shares, before, sums, block) -> None:
    """Numbers the groups: stores this block's shares, and over how many tiles each visits how many come before it."""
    each = -(-sizes.groups // _THREADS) | 1  # groups of a thread; an odd number, so that no two meet in a memory bank
    thread = ptx.thread()
    begin = ptx.mul(thread, each)

    def visits_of(turn):
        group = arith.addi(begin, turn)
        is_group = ptx.less(group, ptx.i32(sizes.groups))
        return group, is_group, ptx.load_shared(before, group, is_group)

    @ptx.loop(each, ptx.i32(0), ptx.i32(0))
    def mine(turn, visited, spent):
        _, _, visits = visits_of(turn)
        return arith.addi(visited, visits), arith.addi(spent, _cost(sizes, visits))

    (visited, visited_total), (spent, spent_total) = _before(sums, *mine)
    unseen_total = arith.subi(ptx.i32(sizes.groups * sizes.tiles), visited_total)
    edges = [_Edge(shares, _VISITS, end, _shared_out(sizes, spent_total, block, end)) for end in (0, 1)]
    edges += [_Edge(shares, _FILLS, end, _shared_out(sizes, unseen_total, block, end)) for end in (0, 1)]
    # What is left for no group to find, and what comes before none.
    is_first = ptx.equal(thread, ptx.i32(0))
    totals = 2 * [(spent_total, visited_total)] + 2 * [(unseen_total, unseen_total)]
    for edge, (total, tiles) in zip(edges, totals, strict=True):
        edge.store(arith.andi(is_first, ptx.at_least(edge.spent, total)), tiles, ptx.i32(sizes.groups))
    ptx.store_shared(before, ptx.i32(sizes.groups), visited_total, is_first)

    @ptx.loop(each, visited, spent)
    def _(turn, visited, spent):
        group, is_group, visits = visits_of(turn)
        cost = _cost(sizes, visits)
        ptx.store_shared(before, group, visited, is_group)
        unseen = arith.subi(ptx.mul(group, sizes.tiles), visited)
        for edge in edges[:2]:
            edge.find(is_group, group, spent, cost, visited, sizes.group_cost)
        for edge in edges[2:]:
            edge.find(is_group, group, unseen, arith.subi(ptx.i32(sizes.tiles), visits), unseen, 0)
        return arith.addi(visited, visits), arith.addi(spent, cost)


@dataclasses.dataclass(frozen=True)
class _Edge:
    """Where a share begins (end = 0) or ends (end = 1): when `spent` of its kind's cost is shared out."""

    shares: Any
    kind: int
    end: int
    spent: Any

    def find(self, is_group, group, before, cost, tiles_before, group_cost: int) -> None:
        """Stores it, if it lies in a group that costs `cost` and begins at `before`."""
        within = arith.subi(self.spent, before)
        is_here = arith.andi(is_group, arith.cmpi(arith.CmpIPredicate.ult, within, cost))
        into = arith.maxsi(arith.subi(within, ptx.i32(group_cost)), ptx.i32(0))
        stop = arith.addi(group, arith.minsi(into, ptx.i32(1)))
        self.store(is_here, arith.addi(tiles_before, into), stop if self.end else group)

    def store(self, condition, tile, group) -> None:
        for i, value in enumerate((tile, group)):
            ptx.store_shared(self.shares, ptx.i32(self.kind + self.end + 2 * i), value, condition)


def _cost(sizes: Sizes, visits):
    is_visited = ptx.less(ptx.i32(0), visits)
    return arith.addi(visits, arith.select(is_visited, ptx.i32(sizes.group_cost), ptx.i32(0)))


def _before(sums, *values):
    """For each value, a number a thread: its sum over the threads before, and over all."""
    thread = ptx.thread()
    lane, warp = arith.andi(thread, ptx.i32(31)), arith.shrui(thread, ptx.i32(5))
    inclusive = list(values)
    for step in (1, 2, 4, 8, 16):
        given = [ptx.shuffle_up(value, step) for value in inclusive]
        has = ptx.at_least(lane, ptx.i32(step))
        inclusive = [
            arith.addi(value, arith.select(has, other, ptx.i32(0)))
            for value, other in zip(inclusive, given, strict=True)
        ]
    for i, value in enumerate(inclusive):
        ptx.store_shared(sums, arith.addi(warp, ptx.i32(4 * i)), value, ptx.equal(lane, ptx.i32(31)))
    utils.warpgroup_barrier()
    found = []
    for i, (value, total) in enumerate(zip(values, inclusive, strict=True)):
        of_warps = [ptx.load_shared(sums, ptx.i32(4 * i + w)) for w in range(4)]
        earlier, all_of_them = ptx.i32(0), ptx.i32(0)
        for w, of_warp in enumerate(of_warps):
            is_after = ptx.less(ptx.i32(w), warp)
            earlier = arith.addi(earlier, arith.select(is_after, of_warp, ptx.i32(0)))
            all_of_them = arith.addi(all_of_them, of_warp)
        found.append((arith.addi(earlier, arith.subi(total, value)), all_of_them))
    return found


def _shared_out(sizes: Sizes, total, block, end: int):
    """How much of a total the blocks before `block` have, with end = 1 those up to it."""
    block = arith.addi(block, ptx.i32(end))
    each, rest = arith.divui(total, ptx.i32(sizes.blocks)), arith.remui(total, ptx.i32(sizes.blocks))
    return arith.addi(arith.muli(block, each), arith.minsi(block, rest))
