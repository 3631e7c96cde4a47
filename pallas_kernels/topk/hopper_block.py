"""What the 128 threads of a block do together to select from candidates, and the blocks of a cluster with each other.

Candidates lie in column order. A thread has four neighbours in every group of 512. The k-th greatest is found by
histograms of their keys, 512 bins at a time; the blocks of a cluster add up theirs, so all learn the same k-th key, and
how many of the chosen lie in the blocks before.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import simt
from pallas_kernels.simt import THREADS, WARPS, Operand, Pointer, Value, as_value, maximum, minimum, select
from pallas_kernels.topk.keys import NO_KEY, TOP_KEY

BIN_BITS = 9
BINS = 1 << BIN_BITS
LAST_BIN = BINS - 1
# What the threads of a block read and write together: four neighbours each.
GROUP = 4 * THREADS
UNLIMITED = 1 << 30
MOST_STAGES = 8
# Groups that are counted at once: a thread's marks in them fill a word, and three of its counts share a word.
_BATCH = 8
_PER_WORD = 3
_COUNT_BITS = 10

# Places in `words`, all multiples of four: the bins; sets of the warps' sums; the bin that was found; what a block
# tells its cluster; the warps' extremes; four sets of the warps' counts by group; the arrivals; two sets of bins that
# a cluster reads.
_BINS_AT = 0
_SUMS = _BINS_AT + BINS
_FOUND = _SUMS + 5 * WARPS
_TOLD = _FOUND + 2 * WARPS
_EXTREMES = _TOLD + WARPS
_COUNTS = _EXTREMES + 2 * WARPS
_COUNTS_SET = WARPS * -(-_BATCH // _PER_WORD)
_ARRIVALS = _COUNTS + 4 * _COUNTS_SET
_SHARED_BINS = _ARRIVALS + 2 * MOST_STAGES
# Sets of sums: 0 and 1 are the chunks', in turn; then two for searches, and one for the rest.
_SEARCH, REST = 2, 4


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is known when the kernel is built: the arrays' shape, and hopper.Config's fields.

    blocks: how many blocks (or clusters) there are.
    """

    rows: int
    length: int
    k: int
    columns_per_thread: int
    stages: int
    capacity: int
    samples: int
    neighbours: int
    parts: int
    blocks: int

    @property
    def chunk(self) -> int:
        return THREADS * self.columns_per_thread

    @property
    def is_dense(self) -> bool:
        """Whether many of a thread's columns are candidates."""
        return self.length < 12 * self.k

    @property
    def is_late(self) -> bool:
        """Whether a chunk's place is filled when the chunk after it is counted, and not when its own is appended."""
        return not self.is_dense and self.stages > 2

    @property
    def is_single(self) -> bool:
        """Whether a block has no second row."""
        return self.blocks >= self.rows

    @property
    def words(self) -> int:
        """Length of Memory.words."""
        return _SHARED_BINS + (2 * BINS if self.parts > 1 else 0)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where a block works. scores, out, starts and ends are in global memory, the rest is its shared memory.

    starts, ends: None where every row is [0, length).
    chunks: f32[stages * THREADS * columns_per_thread], a ring of chunks of scores.
    keys, columns: i32[capacity], the candidates. They are appended as scores; what selects turns them into keys.
    words: i32[Problem.words].
    """

    scores: Pointer
    out: Pointer
    chunks: Pointer
    keys: Pointer
    columns: Pointer
    words: Pointer
    starts: Pointer | None = None
    ends: Pointer | None = None

    def arrival(self, stage: Value) -> Pointer:
        """The mbarrier of a stage."""
        return self.words.at(stage * 2 + _ARRIVALS)


def shared_arrays(problem: Problem) -> dict[str, tuple[int, Any]]:
    """Length and dtype of the shared arrays of Memory."""
    return {
        "chunks": (problem.stages * problem.chunk, jnp.float32),
        "keys": (problem.capacity, jnp.int32),
        "columns": (problem.capacity, jnp.int32),
        "words": (problem.words, jnp.int32),
    }


@dataclasses.dataclass(frozen=True)
class Split:
    """The k greatest candidates are those above `key`, and the first `quota` equal to it.

    floor: the key that a later column must exceed to be among the greatest after all.
    above, equal: candidates in the cluster's blocks before this one that are above, and that are equal.
    """

    key: Value
    quota: Value
    floor: Value
    above: Value
    equal: Value


@dataclasses.dataclass(frozen=True)
class Found:
    """The bin that holds a rank: its place, how many keys are in greater bins, and in it; of the blocks before this one
    how many are in greater bins, and in it. counted: in all bins; where that is less than the rank, the others mean
    nothing.
    """

    place: Value
    before: Value
    number: Value
    counted: Value
    above: Value
    equal: Value


class Block:
    """The threads of a block, of which this is one."""

    def __init__(self, problem: Problem, memory: Memory, part: Value):
        self.problem, self.memory, self.part = problem, memory, part
        self.thread = simt.thread()
        self.warp = self.thread >> 5
        self.own_bins = as_value(_BINS_AT)

    def begin(self) -> None:
        """Readies the bins and the barriers."""
        self.memory.words.store4(self.thread * 4 + _BINS_AT, [0] * 4)
        self._empty_shared_bins()
        with simt.when(self.thread.equals(0)):
            for stage in range(self.problem.stages):
                simt.init_barrier(self.memory.arrival(as_value(stage)))
            simt.publish_barriers()
        simt.barrier()

    # Sums.

    def scan(self, x: Value, area: Value | int) -> tuple[Value, Value]:
        """The sum of x over the threads before this one, and over all.

        area: a set of sums; between two scans with one set there must be a barrier besides their own.
        """
        [(before, total)] = self._scan_all([x], as_value(area) * WARPS + _SUMS)
        return before, total

    def _scan_all(self, values: Sequence[Value], at: Value | int) -> list[tuple[Value, Value]]:
        """`scan` of several values at once. at: where in `words` the warps' sums go."""
        words, upto = self.memory.words.at(at), list(values)
        for distance in (1, 2, 4, 8, 16):
            upto = [simt.add_from_below(x, distance) for x in upto]
        with simt.when((self.thread & 31).equals(31)):
            for i, x in enumerate(upto):
                words[self.warp + WARPS * i] = x
        simt.barrier()
        scanned = []
        for i, (x, own) in enumerate(zip(upto, values, strict=True)):
            sums, before = words.load4(WARPS * i), x - own
            for w in range(WARPS - 1):
                before += select(self.warp > w, sums[w], 0)
            scanned.append((before, simt.total(sums)))
        return scanned

    def extremes(self, low: Value, high: Value) -> tuple[Value, Value]:
        """The least `low` and the greatest `high` of all threads."""
        words = self.memory.words.at(_EXTREMES)
        words[self.warp] = simt.warp_maximum(-low)
        words[self.warp + WARPS] = simt.warp_maximum(high)
        simt.barrier()
        return -functools.reduce(maximum, words.load4(0)), functools.reduce(maximum, words.load4(WARPS))

    def tell(self, mine: Value, area: Value) -> list[Value]:
        """The value of every block of the cluster.

        area: 0 or 1; between two calls with one area there must be a barrier of the cluster besides their own.
        """
        if self.problem.parts == 1:
            return [mine]
        words = self.memory.words.at(area + _TOLD)
        with simt.when(self.thread.equals(0)):
            words[0] = mine
        simt.cluster_barrier()
        return [simt.load_peer(words.peer(rank)) for rank in range(self.problem.parts)]

    def leave(self) -> None:
        """Waits until no other block reads this one's memory."""
        if self.problem.parts > 1:
            simt.cluster_barrier()
            self._empty_shared_bins()

    # Candidates.

    def at(self, group: Value) -> Value:
        """The first of this thread's four places in a group."""
        return (group * THREADS + self.thread) * 4

    def load_group(self, group: Value) -> list[Value]:
        """This thread's four keys of a group."""
        return self.memory.keys.load4(self.at(group))

    def turn_all(self, count: Value) -> None:
        """Turns the first `count` scores into keys, and fills their last group up with keys of no score."""
        simt.for_loop(groups_of(count), lambda group: self._turn_group(group, count) and None)

    def _turn_group(self, group: Value, count: Value) -> list[Value]:
        at = self.at(group)
        keys = [select(count > at + j, key_of(x), NO_KEY) for j, x in enumerate(self.load_group(group))]
        self.memory.keys.store4(at, keys)
        return keys

    def number(self, count: Value, choose: Callable, prepare: Callable, *, area: int = 0) -> None:
        """act(j, number) for each of the first `count` candidates whose key choose(key) takes, numbered in order.

        act is prepare(group), and the candidate the j-th of this thread's four of the group.
        area: 0 or 2, so that one call may follow another.
        """
        groups = groups_of(count)
        size = max(min(_BATCH, self.problem.capacity // GROUP) // self.problem.parts, 2)

        def batch(b, chosen):
            marks = as_value(0)
            for g in range(size):
                marks |= self._marks(groups, b * size + g, choose) << (4 * g)
            counts = [simt.ones(marks & (15 << 4 * g)) for g in range(size)]
            for g, (before, total) in enumerate(self._scan_counts(counts, (b & 1) + area)):
                with simt.when(groups > b * size + g):
                    number, act = chosen + before, prepare(b * size + g)
                    for j in range(4):
                        marked = (marks & (1 << (4 * g + j))).differs(0)
                        with simt.when(marked):
                            act(j, number)
                        number = select(marked, number + 1, number)
                chosen += total
            return [chosen]

        simt.for_loop((groups + (size - 1)) // size, batch, [0])

    def _marks(self, groups: Value, group: Value, choose: Callable) -> Value:
        """Four bits, set for those of this thread's keys of the group that are chosen; 0 past the last group."""

        def mark():
            return [simt.total([select(choose(key), 1 << j, 0) for j, key in enumerate(self.load_group(group))])]

        [marks] = simt.branch(groups > group, mark, lambda: [0], [0])
        return marks

    def _scan_counts(self, counts: Sequence[Value], area: Value) -> list[tuple[Value, Value]]:
        """`scan` of several counts up to four at once."""
        packed = [
            simt.total([x << (_COUNT_BITS * i) for i, x in enumerate(counts[at : at + _PER_WORD])])
            for at in range(0, len(counts), _PER_WORD)
        ]
        scanned = self._scan_all(packed, area * _COUNTS_SET + _COUNTS)
        places = [(scanned[i // _PER_WORD], _COUNT_BITS * (i % _PER_WORD)) for i in range(len(counts))]
        mask = (1 << _COUNT_BITS) - 1
        return [((before >> shift) & mask, (total >> shift) & mask) for (before, total), shift in places]

    def drop_ties(self, count: Value, key: Value, quota: Value) -> None:
        """Makes all but the first `quota` of the first `count` keys equal to `key` keys of no score."""

        def prepare(group):
            mine = self.memory.keys.at(self.at(group))

            def drop(j, rank):
                with simt.when(rank >= quota):
                    mine[j] = NO_KEY

            return drop

        with simt.when(quota < UNLIMITED // 2):
            self.number(count, lambda x: x.equals(key), prepare, area=2)

    # Searches.

    def search(self, count: Value, low: Value, top: Value, *, together: bool = False) -> Split:
        """The split of the first `count` candidates, or of the whole cluster's: there are at least k, none below `low`.

        Of each histogram only the bin that holds the k-th is looked into further. Ends with a single key, or with a bin
        whose least key exactly k candidates reach. Few are above `top`. Turns the scores into keys on its way.
        """
        width = select(top > low, top - low, 0)
        shift = shift_of(width)
        rank, bins = as_value(self.problem.k), as_value(_SHARED_BINS) if together else self.own_bins

        def put_first(group):
            for j, key in enumerate(self._turn_group(group, count)):
                with simt.when(count > self.at(group) + j):
                    self.count_key(key - low, shift, bins)

        def put(low, width, shift, bins):
            def put_group(group):
                offsets = [key - low for key in self.load_group(group)]
                inside = [offset.below(width + 1) for offset in offsets]
                with simt.when(inside[0] | inside[1] | inside[2] | inside[3]):  # of the second histogram on few are
                    for offset, flag in zip(offsets, inside, strict=True):
                        with simt.when(flag):
                            self.count_key(offset, shift, bins)

            simt.for_loop(groups_of(count), put_group)

        simt.for_loop(groups_of(count), put_first)
        state = self.settle(low, as_value(TOP_KEY) - low, shift, rank, self.find(rank, bins), bins)
        _, key, _, _, quota, floor, above, equal, _ = self.refine(state, put)
        return Split(key, quota, floor, above, equal)

    def refine(self, state: Sequence[Operand], put: Callable, *, slack: Operand = 0) -> list[Value]:
        """Goes on until a state is settled. put(low, width, shift, bins) counts the keys from low to low + width."""

        def step(pending, low, width, rank, quota, floor, above, equal, bins):
            shift = shift_of(width)
            put(low, width, shift, bins)
            return self.settle(low, width, shift, rank, self.find(rank, bins), bins, slack=slack, above=above)

        return simt.while_loop(lambda pending, *_: pending.differs(0), step, state)

    def settle(
        self,
        low: Value,
        width: Value,
        shift: Value,
        rank: Value,
        found: Found,
        bins: Value,
        *,
        slack: Operand = 0,
        above: Operand = 0,
    ) -> list[Operand]:
        """The state that a bin leaves: [whether to look into it, its least key, how far its keys reach above that, the
        rank within it, Split's quota, floor, above and equal, the bins to use next].

        low, width, shift: what was counted, as by `count_key`. slack: how many more keys than the rank may remain.
        above: Split's, in the bins before.
        """
        place, rank = found.place, rank - found.before
        start = select(place > 0, ((place - 1) << shift) + 1, 0)
        stop = select(place >= LAST_BIN, width, minimum(place, LAST_BIN - 1) << shift)
        single = (place <= 0) | stop.below(start + 1)
        few = (found.number - rank <= slack) | (found.counted < rank)
        key = low + start
        return [
            select(single | few, 0, 1),
            key,
            select(single, 0, stop - start),
            rank,
            select(found.number <= rank, UNLIMITED, rank),
            select(single, key, key - 1),
            found.above + above,
            found.equal,
            _other_bins(bins) if self.problem.parts > 1 else self.own_bins,
        ]

    def count_key(self, offset: Value, shift: Value, bins: Value) -> None:
        """Counts a key `offset` above the first. Bin 0 holds that alone, bin j the next 2**shift, the last the rest."""
        place = (offset + ((as_value(1) << shift) - 1)) >> shift
        self.count_in(select(place.below(LAST_BIN), place, LAST_BIN), bins)

    def count_in(self, place: Value, bins: Value) -> None:
        self.memory.words.at(bins).at(place).increment()

    def find(self, rank: Value, bins: Value) -> Found:
        """The bin that holds the rank, from the top. Leaves empty the bins to use next."""
        words = self.memory.words.at(_FOUND)
        held = self._take_bins(bins)
        scanned = self._scan_all([simt.total(list(some)) for some in zip(*held, strict=True)], _SEARCH * WARPS + _SUMS)
        befores = [before for before, _ in scanned]
        for j, numbers in enumerate(held):
            with simt.when((befores[0] < rank) & (rank <= befores[0] + numbers[0])):
                words.store4(0, [as_value(LAST_BIN - j) - self.thread * 4, befores[0], numbers[0], 0])
                if len(numbers) > 1:
                    words.store4(WARPS, [befores[1], numbers[1], 0, 0])
            befores = [before + number for before, number in zip(befores, numbers, strict=True)]
        simt.barrier()
        place, before, number, _ = words.load4(0)
        above, equal = words.load4(WARPS)[:2] if self.problem.parts > 1 else (as_value(0), as_value(0))
        return Found(place, before, number, scanned[0][1], above, equal)

    def _take_bins(self, bins: Value) -> list[tuple[Value, ...]]:
        """This thread's four bins, last first. Of a cluster's bins the sum over its blocks, and over those before this.

        Empties the block's own bins, but of the cluster's those that were read the time before: not until the barrier
        have all the others read them.
        """
        mine = self.memory.words.at(as_value(BINS - 4) - self.thread * 4)

        def own():
            simt.barrier()
            held = mine.at(bins).load4(0)
            mine.at(bins).store4(0, [0] * 4)
            return held

        def shared():
            simt.cluster_barrier()
            peers = [mine.at(bins).peer(rank) for rank in range(self.problem.parts)]
            held = [[simt.load_peer(peer, 4 * i) for peer in peers] for i in range(4)]
            mine.at(_other_bins(bins)).store4(0, [0] * 4)
            before = [simt.total([select(self.part > rank, x, 0) for rank, x in enumerate(some)]) for some in held]
            return [*map(simt.total, held), *before]

        if self.problem.parts == 1:
            return [(x,) for x in reversed(own())]
        held = simt.branch(bins.equals(self.own_bins), lambda: [*own(), *[0] * 4], shared, [0] * 8)
        return [(total, before) for total, before in zip(held[3::-1], held[7:3:-1], strict=True)]

    def _empty_shared_bins(self) -> None:
        if self.problem.parts > 1:
            for first in (_SHARED_BINS, _SHARED_BINS + BINS):
                self.memory.words.store4(self.thread * 4 + first, [0] * 4)


def _other_bins(bins: Value) -> Value:
    """Of a cluster's two sets of bins the other; a block has but one of its own."""
    other = select(bins.equals(_SHARED_BINS), _SHARED_BINS + BINS, _SHARED_BINS)
    return select(bins.equals(_BINS_AT), _BINS_AT, other)


def groups_of(count: Value) -> Value:
    return (count + (GROUP - 1)) >> (GROUP.bit_length() - 1)


def shift_of(width: Value) -> Value:
    """How wide bins must be, as a power of two, for offsets up to `width`, read as unsigned."""
    return maximum(as_value(32 - BIN_BITS) - simt.leading_zeros(width), 0)


def key_of(bits: Value) -> Value:
    """keys.keys_of for one score that is no NaN, given as its bits."""
    return select(bits < 0, -(bits & 0x7FFFFFFF), bits)


def score_of(key: Value) -> Value:
    """The score that has this key."""
    return select(key < 0, (-key) | -0x80000000, key).as_float()
