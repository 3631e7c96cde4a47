"""One row's top-k by one block of 128 threads, or by the blocks of a cluster that share the row: the code of `hopper`.

A block streams its part of the row, [low, high), through shared memory in chunks that bulk copies bring. In a chunk a
thread owns neighbouring columns, which come before those of the next thread. It marks what exceeds a floor in bit
words; one prefix sum over the threads' counts tells where it appends its candidates, so they lie in column order.

The floor comes from a sample of the row, so that a little more than k candidates are to be expected. If they do not
fit, only their k greatest stay, and the floor rises to the least of them. If fewer than k are found, the row is
streamed again, with a corrected floor and then with none. So the result is exact whatever the data; only the time
depends on the guess.

The k-th greatest candidate is found by histograms of their keys, 512 bins at a time. Blocks of a cluster add up their
histograms, so all learn the same k-th key, and each writes its own columns at the place the others' counts give.
"""

import dataclasses
import functools
from collections.abc import Callable

from pallas_kernels import simt
from pallas_kernels.simt import THREADS, WARPS, Operand, Pointer, Value, as_value, maximum, minimum, select
from pallas_kernels.topk.keys import LOWEST_KEY, NO_KEY, TOP_KEY

_BIN_BITS = 9
_BINS = 1 << _BIN_BITS
# What the threads of a block read and write together: four neighbours each.
GROUP = 4 * THREADS
_UNLIMITED = 1 << 30
# Floors guessed before a row is streamed without one, and a number of tries beyond that.
_GUESSES = 2
_DONE = _GUESSES + 1

# Places in `words`, all multiples of four: the bins, and one for what belongs in none; two sets of the warps' sums, so
# that one may be written while the other is read; the bin that a search found; what a block tells its cluster; the
# warps' greatest keys; the arrivals.
_BINS_AT = 0
_NO_BIN = _BINS_AT + _BINS
_SUMS = _NO_BIN + WARPS
_FOUND = _SUMS + 2 * WARPS
_TOLD = _FOUND + WARPS
_GREATEST = _TOLD + WARPS
_ARRIVALS = _GREATEST + WARPS


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is known when the kernel is built: the arrays' shape, and hopper.Config's fields."""

    rows: int
    length: int
    k: int
    columns_per_thread: int
    stages: int
    capacity: int
    samples: int
    parts: int

    @property
    def chunk(self) -> int:
        return THREADS * self.columns_per_thread

    @property
    def is_dense(self) -> bool:
        """Whether many of a thread's columns are candidates."""
        return self.length < 12 * self.k

    @property
    def words(self) -> int:
        """Length of Memory.words; an arrival takes two."""
        return _ARRIVALS + 2 * self.stages


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where a block works. scores, starts, ends and out are in global memory, the rest is its shared memory.

    chunks: f32[stages * THREADS * columns_per_thread], a ring of chunks of scores.
    keys, columns: i32[capacity], the candidates. They are appended as scores, which `_survey` turns into keys.
    words: i32[Problem.words]; the bins among them are zero between searches.
    """

    scores: Pointer
    starts: Pointer
    ends: Pointer
    out: Pointer
    chunks: Pointer
    keys: Pointer
    columns: Pointer
    words: Pointer

    def arrival(self, stage: Value) -> Pointer:
        """The mbarrier of a stage."""
        return self.words.at(stage * 2 + _ARRIVALS)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What may be among the k greatest.

    count: how many this block holds.
    reached: how many the cluster holds.
    above: how many of those exceed `least`.
    least, top: no candidate's key is less or greater.
    """

    count: Value
    reached: Value
    above: Value
    least: Value
    top: Value


@dataclasses.dataclass(frozen=True)
class Split:
    """The k greatest candidates are those above `key`, and the first `quota` equal to it.

    floor: the key that a later column must exceed to be among the greatest after all.
    """

    key: Value
    quota: Value
    floor: Value


def write_topk(problem: Problem, memory: Memory, row: Value, part: Value) -> None:
    """Writes out[row], or this block's part of it."""
    thread = simt.thread()
    start = minimum(maximum(memory.starts[row], 0), problem.length)
    end = minimum(maximum(memory.ends[row], start), problem.length)
    memory.words.store4(thread * 4 + _BINS_AT, [0] * 4)
    with simt.when(thread.equals(0)):
        for stage in range(problem.stages):
            simt.init_barrier(memory.arrival(as_value(stage)))
        simt.publish_barriers()
    simt.barrier()
    block = _Block(problem, memory, thread, row, part, start, end)
    candidates = block.gather()
    block.write(candidates, block.split(candidates))


class _Block:
    """A block at work on columns [start, end) of a row, of which [low, high) are its part."""

    def __init__(
        self, problem: Problem, memory: Memory, thread: Value, row: Value, part: Value, start: Value, end: Value
    ):
        self.problem, self.memory, self.thread = problem, memory, thread
        self.warp = thread >> 5
        self.row, self.part = row, part
        self.start, self.end = start, end
        self.scores = memory.scores.row(row, problem.length)
        share = (end - start + (problem.parts - 1)) >> (problem.parts.bit_length() - 1)
        self.low = minimum(start + part * share, end)
        self.high = minimum(self.low + share, end)
        # Bulk copies start on multiples of four scores of the whole array: up to three columns before the part.
        self.origin = self.low - self._misaligned(self.low)
        chunks = (self.high - self.origin + (problem.chunk - 1)) // problem.chunk
        self.chunks = select(self.low < self.high, chunks, 0)

    # Streaming.

    def gather(self) -> Candidates:
        """Collects what may be among the k greatest of the row."""
        problem = self.problem
        length = (self.end - self.start).to_float()
        # Of n scores S are sampled. The r-th of them stands for a rank of n * r / S in the row, give or take a standard
        # deviation of sqrt(k * n / S). Aims 3 of them above k, but not past the middle between k and the capacity.
        margin = simt.square_root(length * (problem.k / problem.samples)) * 3.0
        middle = (problem.capacity - problem.k) / 2
        aim = select(margin < middle, margin, middle) + float(problem.k)

        def attempt(tries, aim, streamed, *_):
            for stage in range(problem.stages):
                self._start_copy(as_value(stage), streamed + stage)
            sampled = (tries < _GUESSES) & (self.end - self.start > problem.capacity)
            [least] = simt.branch(sampled, lambda: self._guess(aim), lambda: [LOWEST_KEY], [0])

            def take(i, count, floor):
                return self._take_chunk(i, streamed + i, count, floor, least)

            count, _ = simt.for_loop(self.chunks, take, [0, least - 1])
            told = self._exchange(count, *self._survey(count, least))
            reached, above, tops = (list(values) for values in zip(*told, strict=True))
            candidates = [count, simt.total(reached), simt.total(above), least, functools.reduce(maximum, tops)]
            again = (simt.total(reached) < problem.k) & (least > LOWEST_KEY)
            corrected = aim * (problem.k + middle) / (simt.total(reached) + 1).to_float()
            return [select(again, tries + 1, _DONE), corrected, streamed + self.chunks, *candidates]

        state = [0, aim, 0, 0, 0, 0, 0, 0]
        _, _, _, *found = simt.while_loop(lambda tries, *_: tries < _DONE, attempt, state)
        return Candidates(*found)

    def _start_copy(self, i: Value, turn: Value) -> None:
        """Starts bringing the i-th chunk, the turn-th of this block, if there is one."""
        problem, memory = self.problem, self.memory
        stage = turn % problem.stages
        first = self.origin + i * problem.chunk
        wanted = minimum(self.high - first, problem.chunk)
        count = (wanted + 3) & ~3
        target, arrival = memory.chunks.at(stage * problem.chunk), memory.arrival(stage)
        if problem.rows * problem.length % 4:
            # Rounding up would leave the array in its last row: ordinary loads bring the last scores there.
            last = self.row.equals(problem.rows - 1) & (first + count > problem.length)
            count = select(last, wanted & ~3, count)
            with simt.when((i < self.chunks) & (self.thread < wanted - count)):
                target[count + self.thread] = self.scores[first + count + self.thread]
        with simt.when((i < self.chunks) & self.thread.equals(0)):
            simt.expect_bytes(arrival, count * 4)
            with simt.when(count > 0):
                simt.bulk_copy(target, self.scores.at(first), count * 4, arrival)

    def _take_chunk(self, i: Value, turn: Value, count: Value, floor: Value, least: Value) -> list[Value]:
        """Appends the candidates of the i-th chunk, and starts copying the chunk that takes its place.

        Takes and returns how many candidates there are and the floor. `least`: no candidate is below.
        """
        problem, memory = self.problem, self.memory
        stage = turn % problem.stages
        simt.wait_phase(memory.arrival(stage), (turn // problem.stages) & 1)
        mine = memory.chunks.at(stage * problem.chunk + self.thread * problem.columns_per_thread)
        first = self.origin + i * problem.chunk + self.thread * problem.columns_per_thread
        scores = [x for j in range(0, problem.columns_per_thread, 4) for x in mine.load4(j)]

        def append(pending, count, floor, *words):
            marked = simt.total([simt.ones(word) for word in words])
            before, total = self._scan(marked, 0)
            stop = count + before + marked
            fits = stop <= problem.capacity
            words_now = [select(fits, word, 0) for word in words]
            if problem.is_dense:
                self._append_all(scores, first, words_now, count + before)
            else:
                self._append_marked(mine, first, words_now, stop)
            simt.barrier()

            def shrink():
                _, fitted = self._scan(select(fits, marked, 0), 0)
                floor = self._keep_greatest(count + fitted, least)
                again = [select(fits, 0, word) for word in self._mark(scores, first, floor)]
                return [1, problem.k, floor, *again]

            state = [pending, count, floor, *words]
            overflow = count + total > problem.capacity
            return simt.branch(overflow, shrink, lambda: [0, count + total, floor, *words], state)

        state = [as_value(1), count, floor, *self._mark(scores, first, floor)]
        _, count, floor, *_ = simt.while_loop(lambda pending, *_: pending.differs(0), append, state)
        self._start_copy(i + problem.stages, turn + problem.stages)
        return [count, floor]

    def _mark(self, scores: list[Value], first: Value, floor: Value) -> list[Value]:
        """Bit j of word w is set where the thread's column first + 32 w + j is its part's and exceeds the floor."""
        limit = _score_of(floor)
        words = []
        for at in range(0, len(scores), 32):
            word = as_value(0)
            for x in reversed(scores[at : at + 32]):
                word = simt.push_sign(word, (limit - x).bits())  # no sign where x or the difference is NaN
            inside = _low_bits(self.high - (first + at)) & ~_low_bits(self.low - (first + at))
            words.append(word & inside)
        return words

    def _append_all(self, scores: list[Value], first: Value, words: list[Value], slot: Value) -> None:
        """Appends the marked columns of this thread from `slot` on, looking at every column: for many marks."""
        offset = slot << 2  # counting bytes, an address costs no instruction
        for j, score in enumerate(scores):
            marked = (words[j // 32] & (1 << j % 32)).differs(0)
            with simt.when(marked):
                self.memory.keys.past(offset)[0] = score.bits()
                self.memory.columns.past(offset)[0] = first + j
            offset = select(marked, offset + 4, offset)

    def _append_marked(self, mine: Pointer, first: Value, words: list[Value], stop: Value) -> None:
        """Appends the marked columns of this thread, the last of them before `stop`, going from mark to mark."""
        for w in reversed(range(len(words))):

            def step(word, slot, w=w):
                j = simt.highest_bit(word)
                self.memory.keys[slot - 1] = mine[j + 32 * w].bits()
                self.memory.columns[slot - 1] = first + 32 * w + j
                return word ^ (as_value(1) << j), slot - 1

            _, stop = simt.while_loop(lambda word, slot: word.differs(0), step, [words[w], stop])

    def _guess(self, aim: Value) -> list[Value]:
        """A key that about `aim` scores of the row should reach, from a sample evenly spread over it."""
        problem, memory = self.problem, self.memory
        first = self.start + ((as_value(4) - self._misaligned(self.start)) & 3)
        vectors = (self.end - first) >> 2
        stride = vectors.to_float() * (4 / problem.samples)
        valid = as_value(0)
        for i in range(problem.samples // GROUP):
            sample = self.thread + i * THREADS
            at = first + minimum((sample.to_float() * stride).to_int(), vectors - 1) * 4
            keys = [select(x.equals(x), _key_of(x.bits()), NO_KEY) for x in self.scores.load4(at)]
            memory.keys.store4(sample * 4, keys)
            valid += simt.total([select(key >= LOWEST_KEY, 1, 0) for key in keys])
        _, valid = self._scan(valid, 1)
        length = (self.end - self.start).to_float()
        rank = minimum((aim * float(problem.samples) / length).to_int(), problem.samples) + 1
        slack = rank >> 4

        def search():
            low, top = as_value(LOWEST_KEY), as_value(TOP_KEY)
            return [self._search(as_value(problem.samples), low, top, rank, slack=slack).key]

        return simt.branch(valid > rank + slack, search, lambda: [LOWEST_KEY], [0])

    # Selecting.

    def split(self, candidates: Candidates) -> Split:
        """Which candidates are the row's k greatest."""
        return self._split(candidates, together=self.problem.parts > 1)

    def write(self, candidates: Candidates, split: Split) -> None:
        """Writes the columns of the chosen candidates, and -1 behind them."""
        problem, count = self.problem, candidates.count
        out = self.memory.out.row(self.row, problem.k)
        before = after = as_value(0)
        if problem.parts > 1:
            before, ties_before, after = self._chosen_around(*self._tally(count, split.key), split.quota)
            split = dataclasses.replace(split, quota=maximum(split.quota - ties_before, 0))

        def emit(slot, key, column):
            out[before + slot] = column

        def blank(slot):
            out[slot] = -1
            return [slot + THREADS * problem.parts]

        chosen = before + self._compact(count, split, emit) + after
        simt.while_loop(lambda slot: slot < problem.k, blank, [chosen + self.part * THREADS + self.thread])
        if problem.parts > 1:
            simt.cluster_barrier()  # the others may still read this block's memory

    def _keep_greatest(self, count: Value, least: Value) -> Value:
        """Keeps the k greatest of this block's `count` candidates, in order; returns the new floor."""
        memory = self.memory
        above, top = self._survey(count, least)
        split = self._split(Candidates(count, count, above, least, top))

        def emit(slot, key, column):
            memory.keys[slot] = _score_of(key).bits()
            memory.columns[slot] = column

        self._compact(count, split, emit)
        simt.barrier()
        return split.floor

    def _split(self, candidates: Candidates, *, together: bool = False) -> Split:
        """The split of this block's candidates, or of the whole cluster's."""
        k = as_value(self.problem.k)

        def search():
            least, top = candidates.least, candidates.top
            split = self._search(candidates.count, least, top, k, together=together)
            return [split.key, split.quota, split.floor]

        def at_least():
            # All of them, or the k-th greatest is one of many that tie at the sampled key.
            least = candidates.least
            return [least, select(candidates.reached > k, k - candidates.above, _UNLIMITED), least]

        searched = (candidates.reached > k) & (candidates.above >= k)
        return Split(*simt.branch(searched, search, at_least, [0, 0, 0]))

    def _search(
        self, count: Value, low: Value, top: Value, rank: Value, *, slack: Operand = 0, together: bool = False
    ) -> Split:
        """The key that the `rank` greatest of the first `count` keys reach: the k-th greatest for rank = k.

        Histograms of ever finer bins: of each only the bin that holds the rank is looked into further. Ends with a
        single key, or with a bin whose least key exactly `rank` keys reach, or up to `slack` more.
        Keys below `low` are left out; none is above `top`; at least `rank` are left. `together`: over the cluster.
        """
        words = self.memory.words
        width = top - low
        shift = maximum(as_value(32 - _BIN_BITS) - simt.leading_zeros(width), 0)

        def refine(pending, low, limit, shift, rank, *_):
            def put(group):
                for key in self._load_group(group):
                    offset = key - low
                    words.at(select(offset.below(limit), (offset >> shift) + _BINS_AT, _NO_BIN)).increment()

            simt.for_loop(_groups(count), put)
            # This thread's bins, greatest first, and how many keys are in bins of greater keys.
            held = self._take_bins(together)
            before, _ = self._scan(simt.total(held), 0)
            for j, number in enumerate(held):
                with simt.when((before < rank) & (rank <= before + number)):
                    words.store4(_FOUND, [as_value(_BINS - 1 - j) - self.thread * 4, before, number, 0])
                before += number
            simt.barrier()
            place, before, number, _ = words.load4(_FOUND)
            low += place << shift
            rank -= before
            single = shift.equals(0)
            return [
                select(single | (number - rank <= slack), 0, 1),
                low,
                as_value(1) << shift,
                maximum(shift - _BIN_BITS, 0),
                rank,
                select(number <= rank, _UNLIMITED, rank),
                select(single, low, low - 1),
            ]

        state = [1, low, width + 1, shift, rank, 0, 0]
        _, key, _, _, _, quota, floor = simt.while_loop(lambda pending, *_: pending.differs(0), refine, state)
        return Split(key, quota, floor)

    def _take_bins(self, together: bool) -> list[Value]:
        """This thread's four bins, last first, summed over the cluster if `together`; leaves them empty."""
        bins = self.memory.words.at(as_value(_BINS_AT + _BINS - 4) - self.thread * 4)
        if together:
            simt.cluster_barrier()
            peers = [bins.peer(rank) for rank in range(self.problem.parts)]
            held = [simt.total([simt.load_peer(peer, 4 * i) for peer in peers]) for i in range(4)]
            simt.cluster_barrier()  # all have read them
        else:
            simt.barrier()
            held = bins.load4(0)
        bins.store4(0, [0] * 4)
        return held[::-1]

    def _compact(self, count: Value, split: Split, emit: Callable) -> Value:
        """emit(slot, key, column) for the candidates that the split chooses, in order; returns how many they are.

        No slot is greater than the candidate's own, and a group is read before it is written: may write in place.
        """
        with simt.when(split.quota < _UNLIMITED):
            self._drop_ties(count, split)

        def take(group, chosen):
            keys = self._load_group(group)
            columns = self.memory.columns.load4((group * THREADS + self.thread) * 4)
            flags = [key >= split.key for key in keys]
            ones = [select(flag, 1, 0) for flag in flags]
            slot, total = self._scan(simt.total(ones), group & 1)
            slot += chosen
            for key, column, flag, one in zip(keys, columns, flags, ones, strict=True):
                with simt.when(flag):
                    emit(slot, key, column)
                slot += one
            return [chosen + total]

        [chosen] = simt.for_loop(_groups(count), take, [0])
        return chosen

    def _drop_ties(self, count: Value, split: Split) -> None:
        """Makes all but the first `quota` of the keys equal to the split's keys of no score."""

        def drop(group, met):
            keys = self._load_group(group)
            ties = [select(key.equals(split.key), 1, 0) for key in keys]
            rank, total = self._scan(simt.total(ties), group & 1)
            rank += met
            for j, tie in enumerate(ties):
                with simt.when(tie.differs(0) & (rank >= split.quota)):
                    self.memory.keys[(group * THREADS + self.thread) * 4 + j] = NO_KEY
                rank += tie
            return [met + total]

        simt.for_loop(_groups(count), drop, [0])
        simt.barrier()

    def _tally(self, count: Value, key: Value) -> tuple[Value, Value]:
        """How many of the block's candidates are above the key, and how many equal it."""

        def add(group, packed):
            weights = [select(x > key, 1, select(x.equals(key), 1 << 16, 0)) for x in self._load_group(group)]
            return [packed + simt.total(weights)]

        [packed] = simt.for_loop(_groups(count), add, [0])
        _, total = self._scan(packed, 0)
        return total & 0xFFFF, total >> 16

    def _survey(self, count: Value, least: Value) -> tuple[Value, Value]:
        """Turns the scores of the first `count` candidates into keys, and pads them to whole groups.

        Returns how many keys exceed `least`, and the greatest.
        """
        keys, words = self.memory.keys, self.memory.words

        def turn(group, above, top):
            at = (group * THREADS + self.thread) * 4
            mine = [_key_of(x) for x in keys.load4(at)]
            mine = [select(count > at + j, key, NO_KEY) for j, key in enumerate(mine)]
            keys.store4(at, mine)
            above += simt.total([select(key > least, 1, 0) for key in mine])
            return above, functools.reduce(maximum, mine, top)

        above, top = simt.for_loop(_groups(count), turn, [0, NO_KEY])
        words[self.warp + _GREATEST] = simt.warp_maximum(top)
        _, above = self._scan(above, 1)
        return above, functools.reduce(maximum, words.load4(_GREATEST))

    def _load_group(self, group: Value) -> list[Value]:
        """This thread's four keys of a group."""
        return self.memory.keys.load4((group * THREADS + self.thread) * 4)

    def _scan(self, x: Value, turn: Value | int) -> tuple[Value, Value]:
        """The sum of x over the threads before this one, and over all.

        turn: 0 or 1; scans with no other barrier between them must take turns.
        """
        words = self.memory.words.at(as_value(turn) * WARPS + _SUMS)
        upto = x
        for distance in (1, 2, 4, 8, 16):
            upto = simt.add_from_below(upto, distance)
        with simt.when((self.thread & 31).equals(31)):
            words[self.warp] = upto
        simt.barrier()
        sums = words.load4(0)
        before = upto - x
        for w in range(WARPS - 1):
            before += select(self.warp > w, sums[w], 0)
        return before, simt.total(sums)

    # The cluster.

    def _chosen_around(self, above: Value, equal: Value, quota: Value) -> tuple[Value, Value, Value]:
        """How many are chosen in the blocks before this one, how many there tie; how many are chosen after it."""
        told = self._exchange(above, equal)
        all_above, all_equal = (simt.total(list(counts)) for counts in zip(*told, strict=True))
        above_before = simt.total([select(self.part > rank, x, 0) for rank, (x, _) in enumerate(told)])
        equal_before = simt.total([select(self.part > rank, x, 0) for rank, (_, x) in enumerate(told)])
        before = above_before + minimum(equal_before, quota)
        upto = above_before + above + minimum(equal_before + equal, quota)
        return before, equal_before, all_above + minimum(all_equal, quota) - upto

    def _exchange(self, *mine: Value) -> list[tuple[Value, ...]]:
        """The values of every block of the cluster."""
        if self.problem.parts == 1:
            return [mine]
        words = self.memory.words.at(_TOLD)
        simt.cluster_barrier()  # all have read what was told before
        with simt.when(self.thread.equals(0)):
            for i, value in enumerate(mine):
                words[i] = value
        simt.cluster_barrier()
        peers = [words.peer(rank) for rank in range(self.problem.parts)]
        return [tuple(simt.load_peer(peer, 4 * i) for i in range(len(mine))) for peer in peers]

    def _misaligned(self, column: Value) -> Value:
        """How many scores lie between `column` and the multiple of four of the whole array before it."""
        return (self.row * (self.problem.length % 4) + column) & 3


def _groups(count: Value) -> Value:
    return (count + (GROUP - 1)) >> (GROUP.bit_length() - 1)


def _low_bits(n: Value) -> Value:
    """A word whose first n bits are set: none for n <= 0, all for n >= 32."""
    return select(n <= 0, 0, as_value(-1) >> (as_value(32) - minimum(maximum(n, 1), 32)))


def _key_of(bits: Value) -> Value:
    """keys.keys_of for one score that is no NaN, given as its bits."""
    return select(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _score_of(key: Value) -> Value:
    """The score that has this key."""
    return select(key < 0, (-key) | -0x80000000, key).as_float()
