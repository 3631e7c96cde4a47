"""The schedule made by every block for itself: no launch comes before, and every block reads all lengths or ranges.

The same shares as schedule.py's, which is for more groups than one warpgroup numbers in a few microseconds. The threads
of one look at the groups in turn, then number them side by side, a run of them each. A share begins and ends in some
group, and the thread that numbers it writes that down.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import simt
from pallas_kernels.indexer_logits.schedule import Share, Walk
from pallas_kernels.simt import THREADS, WARPS, Pointer, Value, as_value, maximum, minimum, select

MAX_GROUPS = 4096
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


class Made(NamedTuple):
    """Where `write` leaves the schedule: as in OwnSchedule. sums: i32 [8], scratch."""

    shares: Pointer
    before: Pointer
    sums: Pointer
    first: Pointer | None = None


def make(sizes: Sizes, *, has_lengths: bool) -> Callable[..., None]:
    """-> f(*seen, shares_ref[8], before_ref[groups + 1], sums_ref[8], first_ref[groups]?, block), for one warpgroup.

    seen: lengths_ref[requests] where has_lengths, else starts_ref[rows] and ends_ref[rows] of a single request.
    The other references lie in shared memory; first_ref is there where seen are rows.
    Afterwards the warpgroup may read what it made.
    """
    seen, refs = (1, 1 + 3) if has_lengths else (2, 2 + 4)

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType() for _ in range(refs)), simt.SCALAR))
    def run(_, *args):
        pointers = [Pointer.to(ref) for ref in args[:refs]]
        write(sizes, pointers[:seen], Made(*pointers[seen:]), simt.scalar(args[refs]))

    return run


def write(sizes: Sizes, seen: Sequence[Pointer], made: Made, block: Value) -> None:
    """What the threads of the warpgroup do. seen: as in `make`."""
    thread = simt.thread() & (THREADS - 1)
    _write_visits(sizes, seen, made, thread)
    simt.warpgroup_barrier()
    _write_shares(sizes, made, thread, block)
    simt.warpgroup_barrier()


def _write_visits(sizes: Sizes, seen: Sequence[Pointer], made: Made, thread: Value) -> None:
    """Stores how many tiles each group visits, and the first of them."""

    def of_group(turn):
        group = turn * THREADS + thread
        low, high = (_of_length if len(seen) == 1 else _of_rows)(sizes, seen, group)
        tile = low // sizes.keys
        made.before[group] = maximum((high + (sizes.keys - 1)) // sizes.keys - tile, 0)
        if made.first is not None:
            made.first[group] = tile

    simt.for_loop((as_value(sizes.groups + THREADS - 1) - thread) // THREADS, of_group)


def _of_length(sizes: Sizes, seen: Sequence[Pointer], group: Value) -> tuple[Value, Value]:
    """The lowest start and the highest end in a group; both are 0 where no query sees anything."""
    request = group // sizes.request_groups
    in_request = group - request * sizes.request_groups
    last = minimum((in_request + 1) * sizes.group, sizes.queries)
    end = minimum(seen[0][request] + (last - sizes.queries), sizes.columns)
    return as_value(0), maximum(end, 0)


def _of_rows(sizes: Sizes, seen: Sequence[Pointer], group: Value) -> tuple[Value, Value]:
    """The lowest start and the highest end in a group; `columns` and 0 where no query sees anything."""
    low, high = as_value(sizes.columns), as_value(0)
    for i in range(sizes.group):
        row = minimum(group * sizes.group + i, sizes.queries - 1)
        start, end = maximum(seen[0][row], 0), minimum(seen[1][row], sizes.columns)
        low = select(start < end, minimum(low, start), low)
        high = select(start < end, maximum(high, end), high)
    return low, high


def _write_shares(sizes: Sizes, made: Made, thread: Value, block: Value) -> None:
    """Numbers the groups: stores this block's shares, and over how many tiles each visits how many come before it."""
    each = -(-sizes.groups // THREADS) | 1  # groups of a thread; an odd number, so that no two meet in a memory bank
    begin = thread * each
    mine = minimum(maximum(as_value(sizes.groups) - begin, 0), each)

    def add(i, visited, spent):
        visits = made.before[begin + i]
        return visited + visits, spent + _cost(sizes, visits)

    (visited, visited_total), (spent, spent_total) = _before(made.sums, thread, simt.for_loop(mine, add, [0, 0]))
    unseen_total = as_value(sizes.groups * sizes.tiles) - visited_total
    edges = [_Edge(made.shares, _VISITS, end, _shared_out(sizes, spent_total, block, end)) for end in (0, 1)]
    edges += [_Edge(made.shares, _FILLS, end, _shared_out(sizes, unseen_total, block, end)) for end in (0, 1)]
    # What is left for no group to find, and what comes before none.
    is_first = thread.equals(0)
    totals = 2 * [(spent_total, visited_total)] + 2 * [(unseen_total, unseen_total)]
    for edge, (total, tiles) in zip(edges, totals, strict=True):
        edge.store(is_first & (edge.spent >= total), tiles, as_value(sizes.groups))
    with simt.when(is_first):
        made.before[sizes.groups] = visited_total

    def number(i, visited, spent):
        group = begin + i
        visits = made.before[group]
        cost = _cost(sizes, visits)
        made.before[group] = visited
        unseen = group * sizes.tiles - visited
        for edge in edges[:2]:
            edge.find(group, spent, cost, visited, sizes.group_cost)
        for edge in edges[2:]:
            edge.find(group, unseen, as_value(sizes.tiles) - visits, unseen, 0)
        return visited + visits, spent + cost

    simt.for_loop(mine, number, [visited, spent])


@dataclasses.dataclass(frozen=True)
class _Edge:
    """Where a share begins (end = 0) or ends (end = 1): when `spent` of its kind's cost is shared out."""

    shares: Pointer
    kind: int
    end: int
    spent: Value

    def find(self, group: Value, before: Value, cost: Value, tiles_before: Value, group_cost: int) -> None:
        """Stores it, if it lies in a group that costs `cost` and begins at `before`."""
        within = self.spent - before
        into = maximum(within - group_cost, 0)
        stop = group + minimum(into, 1)
        self.store(within.below(cost), tiles_before + into, stop if self.end else group)

    def store(self, condition: Value, tile: Value, group: Value) -> None:
        with simt.when(condition):
            for i, value in enumerate((tile, group)):
                self.shares[self.kind + self.end + 2 * i] = value


def _cost(sizes: Sizes, visits: Value) -> Value:
    return visits + select(visits > 0, sizes.group_cost, 0)


def _before(sums: Pointer, thread: Value, values: Sequence[Value]) -> list[tuple[Value, Value]]:
    """For each value, a number a thread: its sum over the threads before, and over all."""
    lane, warp = thread & 31, thread >> 5
    inclusive = list(values)
    for step in (1, 2, 4, 8, 16):
        inclusive = [simt.add_from_below(value, step) for value in inclusive]
    with simt.when(lane.equals(31)):
        for i, value in enumerate(inclusive):
            sums[warp + WARPS * i] = value
    simt.warpgroup_barrier()
    found = []
    for i, (value, up_to) in enumerate(zip(values, inclusive, strict=True)):
        of_warps = [sums[WARPS * i + w] for w in range(WARPS)]
        earlier = simt.total([select(warp > w, x, 0) for w, x in enumerate(of_warps)])
        found.append((earlier + up_to - value, simt.total(of_warps)))
    return found


def _shared_out(sizes: Sizes, total: Value, block: Value, end: int) -> Value:
    """How much of a total the blocks before `block` have, with end = 1 those up to it."""
    block = block + end
    return block * (total // sizes.blocks) + minimum(block, total % sizes.blocks)
