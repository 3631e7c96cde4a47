"""What the threads of a block do together to select from candidates, and the blocks of a cluster with each other.

Candidates lie in column order. A thread has four neighbours in every group of four times the threads. The k-th greatest
is found by histograms, 512 bins at a time: the first of equal steps of the scores between the floor and a score that
fewer than k should exceed. Few candidates are then left in the bin that holds the k-th; a warp ranks them one by one.
Where they are many, histograms of their keys go on. The blocks of a cluster add up theirs, so all learn the same k-th
score, and how many of the chosen lie in the blocks before.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import simt
from pallas_kernels.simt import Operand, Pointer, Value, as_value, maximum, minimum, select
from pallas_kernels.topk.keys import TOP_KEY

BINS = 512
LAST_BIN = BINS - 1
_BIN_BITS = BINS.bit_length() - 1
_PER_LANE = BINS // 32
# Words of a set of bins: one more, for what is in none, up to a multiple of four.
_SET = BINS + 4
# A float whose last bit counts ones: a sum with it, below twice of it, is rounded to an integer, in its last bits.
ROUNDER = float(1 << 23)
_ROUNDER_BITS = 0x4B000000
UNLIMITED = 1 << 30
_NAN = 0x7FFFFFFF
# As many candidates a warp ranks one by one.
_FEW = 32
# A candidate's number in its block; above that the block's.
_NUMBER_BITS = 20
MOST_STAGES = 8
# Rows of fewer columns than this many times k are dense.
DENSE = 12
# Groups that are counted at once: a thread's marks in them fill a word, and two or three of its counts share a word.
_BATCH = 8
# Sets of sums: 0 and 1 are the chunks', in turn; then one for the rest.
REST = 2


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
    threads: int = 128

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def group(self) -> int:
        """What the threads of a block read and write together: four neighbours each."""
        return 4 * self.threads

    @property
    def count_bits(self) -> int:
        """For numbers up to a group's."""
        return self.group.bit_length()

    @property
    def per_word(self) -> int:
        return 32 // self.count_bits

    @property
    def counts_set(self) -> int:
        return self.warps * -(-_BATCH // self.per_word)

    @functools.cached_property
    def places(self) -> "Places":
        return Places(self)

    @property
    def chunk(self) -> int:
        return self.threads * self.columns_per_thread

    @property
    def is_dense(self) -> bool:
        """Whether many of a thread's columns are candidates."""
        return self.length < DENSE * self.k

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
        return self.places.shared_bins + (2 * _SET + BINS if self.parts > 1 else 0)


class Places:
    """Places in `words`, all multiples of four: the bins; sets of the warps' sums; what a block tells its cluster; the
    warps' extremes; four sets of the warps' counts by group; the arrivals; the candidates of a bin, their scores and
    then their numbers, and how many; and for a cluster two sets of bins that it reads, and their sums.
    """

    def __init__(self, problem: Problem):
        warps = problem.warps
        self.bins = 0
        self.sums = _SET
        self.told = self.sums + 3 * warps
        self.extremes = self.told + 4
        self.counts = self.extremes + 2 * warps
        self.arrivals = self.counts + 4 * problem.counts_set
        self.few = self.arrivals + 2 * MOST_STAGES
        self.few_count = self.few + 2 * _FEW
        self.shared_bins = self.few_count + 4
        self.cluster_bins = self.shared_bins + 2 * _SET


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where a block works. scores, out, starts and ends are in global memory, the rest is its shared memory.

    starts, ends: None where every row is [0, length).
    chunks: f32[stages * threads * columns_per_thread], a ring of chunks of scores.
    candidates: i32[2 * capacity], the bits of the candidates' scores, and then their columns.
    words: i32[Problem.words].
    """

    scores: Pointer
    out: Pointer
    chunks: Pointer
    candidates: Pointer
    words: Pointer
    starts: Pointer | None = None
    ends: Pointer | None = None


def shared_arrays(problem: Problem) -> dict[str, tuple[int, Any]]:
    """Length and dtype of the shared arrays of Memory."""
    return {
        "chunks": (problem.stages * problem.chunk, jnp.float32),
        "candidates": (2 * problem.capacity, jnp.int32),
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
    """The bin that holds a rank: its place, how many are in greater bins, and in it, and in all bins. Where these are
    less than the rank, the others mean nothing. rank: from the top.

    above, equal, counted_before: of the blocks before this one how many are in greater bins, in it, and in all.
    upto: of this lane of the warp, how many are in its 16 bins and all greater ones; the first lane has the greatest.
    """

    rank: Value
    place: Value
    before: Value
    number: Value
    counted: Value
    above: Value
    equal: Value
    counted_before: Value
    upto: Value


class Block:
    """The threads of a block, of which this is one."""

    def __init__(self, problem: Problem, memory: Memory, part: Value):
        self.problem, self.memory, self.part = problem, memory, part
        self.thread = simt.thread()
        self.warp = self.thread >> 5
        self.places = problem.places

    def arrival(self, stage: Value) -> Pointer:
        """The mbarrier of a stage."""
        return self.memory.words.at(stage * 2 + self.places.arrivals)

    def begin(self) -> None:
        """Readies the bins and the barriers."""
        self.empty(self.places.bins)
        self._empty_shared_bins()
        with simt.when(self.thread.equals(0)):
            self.memory.words[self.places.few_count] = 0
            for stage in range(self.problem.stages):
                simt.init_barrier(self.arrival(as_value(stage)))
            simt.publish_barriers()
        simt.barrier()

    # Sums.

    def scan(self, x: Value, area: Value | int) -> tuple[Value, Value]:
        """The sum of x over the threads before this one, and over all.

        area: a set of sums; between two scans with one set there must be a barrier besides their own.
        """
        [(before, total)] = self._scan_all([x], as_value(area) * self.problem.warps + self.places.sums)
        return before, total

    def _scan_all(self, values: Sequence[Value], at: Value | int) -> list[tuple[Value, Value]]:
        """`scan` of several values at once. at: where in `words` the warps' sums go."""
        words, upto, warps = self.memory.words.at(at), list(values), self.problem.warps
        for distance in (1, 2, 4, 8, 16):
            upto = [simt.add_from_below(x, distance) for x in upto]
        with simt.when((self.thread & 31).equals(31)):
            for i, x in enumerate(upto):
                words[self.warp + warps * i] = x
        simt.barrier()
        scanned = []
        for i, (x, own) in enumerate(zip(upto, values, strict=True)):
            sums = [x for w in range(0, warps, 4) for x in words.load4(warps * i + w)]
            before = x - own
            for w in range(warps - 1):
                before += select(self.warp > w, sums[w], 0)
            scanned.append((before, simt.total(sums)))
        return scanned

    def extremes(self, low: Value, high: Value) -> tuple[Value, Value]:
        """The least `low` and the greatest `high` of all threads."""
        words, warps = self.memory.words.at(self.places.extremes), self.problem.warps
        words[self.warp] = simt.warp_maximum(-low)
        words[self.warp + warps] = simt.warp_maximum(high)
        simt.barrier()
        lows, highs = ([x for w in range(0, warps, 4) for x in words.load4(at + w)] for at in (0, warps))
        return -functools.reduce(maximum, lows), functools.reduce(maximum, highs)

    def tell(self, mine: Value, area: Value) -> list[Value]:
        """The value of every block of the cluster.

        area: 0 or 1; between two calls with one area there must be a barrier of the cluster besides their own.
        """
        if self.problem.parts == 1:
            return [mine]
        words = self.memory.words.at(area + self.places.told)
        with simt.when(self.thread.equals(0)):
            words[0] = mine
        simt.cluster_barrier()
        return [simt.load_peer(words.peer(rank)) for rank in range(self.problem.parts)]

    def leave(self) -> None:
        """Waits until no other block reads this one's memory."""
        if self.problem.parts > 1:
            simt.cluster_barrier()
            self._empty_shared_bins()

    def empty(self, *sets: Value | int) -> None:
        """Empties sets of bins."""
        with self._for_bins():
            for first in sets:
                self.memory.words.store4(self.thread * 4 + first, [0] * 4)

    def _for_bins(self):
        """The threads that have four bins each."""
        return simt.when(self.thread < BINS // 4) if self.problem.threads > BINS // 4 else contextlib.nullcontext()

    def _empty_shared_bins(self) -> None:
        if self.problem.parts > 1:
            self.empty(self.places.shared_bins, self.places.shared_bins + _SET)

    # Candidates.

    def at(self, group: Value) -> Value:
        """The first of this thread's four places in a group."""
        return (group * self.problem.threads + self.thread) * 4

    def load_group(self, group: Value) -> list[Value]:
        """This thread's four scores of a group."""
        return [x.as_float() for x in self.memory.candidates.load4(self.at(group))]

    def load_columns(self, group: Value) -> list[Value]:
        """This thread's four columns of a group."""
        return self.memory.candidates.load4(self.at(group) + self.problem.capacity)

    def fill_up(self, count: Value) -> None:
        """Fills the last group of `count` candidates up with NaN."""
        stop = self.groups_of(count) * self.problem.group
        for i in range(4):
            slot = count + self.thread + i * self.problem.threads
            with simt.when(slot < stop):
                self.memory.candidates[slot] = _NAN

    def number(self, count: Value, choose: Callable, prepare: Callable, *, area: int = 0) -> None:
        """act(j, number) for each of the first `count` candidates whose choose(score) is negative, numbered in order.

        act is prepare(group), and the candidate the j-th of this thread's four of the group.
        area: 0 or 2, so that one call may follow another.
        """
        groups = self.groups_of(count)
        size = max(min(_BATCH, self.problem.capacity // self.problem.group) // self.problem.parts, 2)

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
        """Four bits, set for those of this thread's scores of the group that are chosen; 0 past the last group."""

        def mark():
            word = as_value(0)
            for x in reversed(self.load_group(group)):
                word = simt.push_sign(word, choose(x))
            return [word]

        [marks] = simt.branch(groups > group, mark, lambda: [0], [0])
        return marks

    def _scan_counts(self, counts: Sequence[Value], area: Value) -> list[tuple[Value, Value]]:
        """`scan` of several counts up to four at once."""
        bits, each = self.problem.count_bits, self.problem.per_word
        packed = [
            simt.total([x << (bits * i) for i, x in enumerate(counts[at : at + each])])
            for at in range(0, len(counts), each)
        ]
        scanned = self._scan_all(packed, area * self.problem.counts_set + self.places.counts)
        places = [(scanned[i // each], bits * (i % each)) for i in range(len(counts))]
        mask = (1 << bits) - 1
        return [((before >> shift) & mask, (total >> shift) & mask) for (before, total), shift in places]

    def drop_ties(self, count: Value, key: Value, quota: Value) -> None:
        """Makes all but the first `quota` of the first `count` scores that have this key NaN."""
        score = score_of(key)

        def prepare(group):
            mine = self.memory.candidates.at(self.at(group))

            def drop(j, rank):
                with simt.when(rank >= quota):
                    mine[j] = _NAN

            return drop

        with simt.when(quota < UNLIMITED // 2):
            self.number(count, lambda x: select(x.equals(score), -1, 0), prepare, area=2)

    # Searches.

    def cut(self, count: Value, reached: Value, before: Value, least: Value, upper: Value) -> list[Value]:
        """Splits the cluster's `reached` candidates, more than k. Returns a score below the least of the k greatest and
        not below any other, and how many of the chosen are in the blocks before this one. Makes scores NaN that are
        equal to the k-th but beyond it.

        count: this block's candidates; before: those of the blocks before it. least: a key that none is below. upper: a
        score not below its, that fewer than k should exceed.
        """
        problem, together = self.problem, self.problem.parts > 1
        bins = as_value(self.places.shared_bins if together else self.places.bins)
        low = score_of(least)
        scale = simt.lesser(as_value(float(LAST_BIN)) / (upper - low), as_value(1e30))

        def place(x):
            return simt.fma(x - low, scale, as_value(ROUNDER))

        target = self.rounded(bins)

        def put(group):
            for x in self.load_group(group):
                self.count_rounded(simt.lesser(place(x), as_value(ROUNDER + BINS)), target)

        simt.for_loop(self.groups_of(count), put)
        found = self.find(lambda counted: counted - (reached - problem.k), bins, together=together)

        def rank_few():
            score, chosen = self._rank_few(count, found, place, together)
            unbinned = before - found.counted_before
            return [score, unbinned + found.above + chosen]

        def search():
            split = self.search(count, least, together=together)
            if not together:
                simt.barrier()
                self.empty(self.places.bins)
            self.drop_ties(count, split.key, maximum(split.quota - split.equal, 0))
            return [score_of(split.key - 1), split.above + minimum(split.equal, split.quota)]

        easy = (found.rank > 0) & (found.number <= _FEW)
        return simt.branch(easy, rank_few, search, [0.0, 0])

    def _rank_few(self, count: Value, found: Found, place: Callable, together: bool) -> tuple[Value, Value]:
        """`cut` where few are in the bin found: the score, and how many of the bin are chosen in the blocks before."""
        words, few = self.memory.words, self.places.few
        wanted = as_value(ROUNDER) + found.place.to_float()

        def collect(group):
            scores = self.load_group(group)
            inside = [place(x).equals(wanted) for x in scores]
            with simt.when(inside[0] | inside[1] | inside[2] | inside[3]):
                for j, (x, flag) in enumerate(zip(scores, inside, strict=True)):
                    with simt.when(flag):
                        at = words.at(words.at(self.places.few_count).take() + found.equal + few)
                        number = self.at(group) + j | (self.part << _NUMBER_BITS)
                        if together:
                            for peer in map(at.peer, range(self.problem.parts)):
                                simt.store_peer(peer, x.bits())
                                simt.store_peer(peer, number, 4 * _FEW)
                        else:
                            at[0], at[_FEW] = x.bits(), number

        simt.for_loop(self.groups_of(count), collect)
        lane = self.thread & 31
        if together:
            simt.cluster_barrier()
        else:
            simt.barrier()
            self.empty(self.places.bins)
        with simt.when(self.thread.equals(0)):
            words[self.places.few_count] = 0
        score, number = words[lane + few].as_float(), words[lane + (few + _FEW)]
        source = number >> _NUMBER_BITS

        def meet(i, rank):
            other, other_number = simt.of_lane(score.bits(), i).as_float(), simt.of_lane(number, i)
            ahead = (other > score) | (other.equals(score) & (other_number < number))
            return [rank + select(ahead, 1, 0)]

        keep = found.rank - found.before
        [rank] = simt.for_loop(found.number, meet, [0])
        exists = lane < found.number
        kept = exists & (rank < keep)
        last = simt.ones(simt.ballot(exists & (rank.equals(keep - 1))) - 1)
        least = simt.of_lane(score.bits(), last).as_float()
        dropped = exists & (rank >= keep) & score.equals(least)
        with simt.when(simt.ballot(dropped).differs(0)):
            with simt.when(dropped & source.equals(self.part) & (self.thread < 32)):
                self.memory.candidates[number & ((1 << _NUMBER_BITS) - 1)] = _NAN
            simt.barrier()
        chosen = simt.ones(simt.ballot(kept & (source < self.part))) if together else as_value(0)
        return score_of(key_of(least.bits()) - 1), chosen

    def search(self, count: Value, low: Value, *, together: bool = False) -> Split:
        """The split of the first `count` candidates, or of the whole cluster's: there are at least k, none below `low`.

        Of each histogram only the bin that holds the k-th is looked into further. Ends with a single key, or with a bin
        whose least key exactly k candidates reach. Leaves the bins full.
        """

        def put(low, width, shift, bins):
            def put_group(group):
                offsets = [key_of(x.bits()) - low for x in self.load_group(group)]
                for offset in offsets:
                    self.count_key(offset, shift, bins, offset.below(width + 1))

            simt.for_loop(self.groups_of(count), put_group)

        bins = as_value(self.places.shared_bins + _SET if together else self.places.bins)
        state = [1, low, as_value(TOP_KEY) - low, self.problem.k, 0, 0, 0, 0, bins]
        _, key, _, _, quota, floor, above, equal, _ = self.refine(state, put, together=together)
        return Split(key, quota, floor, above, equal)

    def refine(self, state: Sequence[Operand], put: Callable, *, slack: Operand = 0, together: bool = False):
        """Goes on until a state is settled. put(low, width, shift, bins) counts the keys from low to low + width."""

        def step(pending, low, width, rank, quota, floor, above, equal, bins):
            if not together:
                simt.barrier()
                self.empty(bins)
                simt.barrier()
            shift = shift_of(width)
            put(low, width, shift, bins)
            found = self.find(lambda counted: rank, bins, together=together)
            return self.settle(low, width, shift, found, bins, slack=slack, above=above, together=together)

        return simt.while_loop(lambda pending, *_: pending.differs(0), step, state)

    def settle(
        self,
        low: Value,
        width: Value,
        shift: Value,
        found: Found,
        bins: Value,
        *,
        slack: Operand = 0,
        above: Operand = 0,
        together: bool = False,
    ) -> list[Operand]:
        """The state that a bin leaves: [whether to look into it, its least key, how far its keys reach above that, the
        rank within it, Split's quota, floor, above and equal, the bins to use next].

        low, width, shift: what was counted, as by `count_key`. slack: how many more keys than the rank may remain.
        above: Split's, in the bins before.
        """
        place, rank = found.place, found.rank - found.before
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
            self._other_bins(bins) if together else bins,
        ]

    def count_key(self, offset: Value, shift: Value, bins: Value, condition: Value) -> None:
        """Where the condition holds, counts a key `offset` above the first. Bin 0 holds that alone, bin j the next
        2**shift, the last the rest.
        """
        place = (offset + ((as_value(1) << shift) - 1)) >> shift
        place = select(place.below(LAST_BIN), place, LAST_BIN)
        simt.increment(self.memory.words.at(bins).at(select(condition, place, BINS)).shared())

    def rounded(self, bins: Value) -> Value:
        """For `count_rounded`."""
        return simt.opaque(self.memory.words.at(bins).shared() - (_ROUNDER_BITS << 2))

    def count_rounded(self, place: Value, target: Value) -> None:
        """Counts in a bin whose place was added to ROUNDER; in that past the last what is in none."""
        simt.increment(target + (place.bits() << 2))

    def find(self, rank_of: Callable, bins: Value, *, together: bool = False) -> Found:
        """The bin that holds the rank rank_of(how many are counted), from the top. All have counted by then.

        Every warp looks on its own. together: adds up the bins of the cluster.
        """
        if together:
            bins = self._add_up(bins)
        else:
            simt.barrier()
        number_of, before_of = ((lambda x: x >> 16), (lambda x: x & 0xFFFF)) if together else (lambda x: x, lambda x: 0)
        words, lane = self.memory.words.at(bins), self.thread & 31
        mine = words.at((as_value(31) - lane) * _PER_LANE)
        own = simt.total([x for i in range(4) for x in mine.load4((((lane >> 1) + i) & 3) << 2)])  # in any order
        upto = self._scan_lanes(own, 5)
        counted = simt.of_lane(upto, as_value(31))
        rank = rank_of(number_of(counted))
        holder = minimum(simt.ones(simt.ballot(number_of(upto) < rank)), 31)
        before = simt.of_lane(upto - own, holder)
        last = (as_value(31) - holder) * _PER_LANE + (_PER_LANE - 1)
        held = words[last - (lane & (_PER_LANE - 1))]
        reach = self._scan_lanes(held, 4) + before
        nth = simt.ones(simt.ballot(number_of(reach) < rank) & ((1 << _PER_LANE) - 1))
        number, before = simt.of_lane(held, nth), simt.of_lane(reach - held, nth)
        return Found(
            rank,
            last - nth,
            number_of(before),
            number_of(number),
            number_of(counted),
            as_value(before_of(before)),
            as_value(before_of(number)),
            as_value(before_of(counted)),
            upto,
        )

    def _scan_lanes(self, x: Value, steps: int) -> Value:
        for i in range(steps):
            x = simt.add_from_below(x, 1 << i)
        return x

    def _add_up(self, bins: Value) -> Value:
        """Where the sums of the cluster's bins are: in the high half of the words that of all blocks, in the low half
        that of those before this.

        Empties the block's set that was read the time before: not until the barrier have all the others read it.
        """
        simt.cluster_barrier()
        with self._for_bins():
            at = self.thread * 4
            held = zip(
                *(simt.load_peer4(self.memory.words.at(bins + at).peer(rank)) for rank in range(self.problem.parts)),
                strict=True,
            )
            sums = [
                (simt.total(some) << 16) | simt.total([select(self.part > i, x, 0) for i, x in enumerate(some)])
                for some in held
            ]
            self.memory.words.store4(at + self.places.cluster_bins, sums)
            self.memory.words.store4(at + self._other_bins(bins), [0] * 4)
        simt.barrier()
        return as_value(self.places.cluster_bins)

    def _other_bins(self, bins: Value) -> Value:
        """Of a cluster's two sets of bins the other."""
        first = self.places.shared_bins
        return select(bins.equals(first), first + _SET, first)

    def groups_of(self, count: Value) -> Value:
        return (count + (self.problem.group - 1)) >> (self.problem.group.bit_length() - 1)


def shift_of(width: Value) -> Value:
    """How wide bins must be, as a power of two, for offsets up to `width`, read as unsigned."""
    return maximum(as_value(32 - _BIN_BITS) - simt.leading_zeros(width), 0)


def key_of(bits: Value) -> Value:
    """keys.keys_of for one score that is no NaN, given as its bits."""
    return select(bits < 0, -(bits & 0x7FFFFFFF), bits)


def score_of(key: Value) -> Value:
    """The score that has this key."""
    return select(key < 0, (-key) | -0x80000000, key).as_float()
