"""One row's top-k by one block, or by the blocks of a cluster that share the row: the code of `hopper`.

A block streams its part of the row, [low, high), through shared memory in chunks that bulk copies bring. In a chunk a
thread owns neighbouring columns, which come before those of the next thread. It marks what exceeds a floor in bit
words; one prefix sum over the threads' counts tells where it appends its candidates, so they lie in column order.

The floor comes from a sample of the row, so that a little more than k candidates are to be expected. If they do not
fit, only their k greatest stay, and the floor rises to the least of them. If fewer than k are found, the row is
streamed again, with a corrected floor and then with none. So the result is exact whatever the data; only the time
depends on the guess.

A block may stay for many rows. Before it selects from the candidates of one row it asks for the sample and the first
chunks of the next, which are there when it gets to them.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable, Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, maximum, minimum, select
from pallas_kernels.topk.hopper_block import (
    BINS,
    LAST_BIN,
    REST,
    ROUNDER,
    Block,
    Memory,
    Problem,
    key_of,
    score_of,
)
from pallas_kernels.topk.keys import LOWEST_KEY

# Floors guessed before a row is streamed without one.
_GUESSES = 2
# The greatest distance between scores that a sample's histogram spans, halved.
_WIDEST = struct.unpack("<i", struct.pack("<f", 1e38))[0]
_INFINITY = float("inf")


@dataclasses.dataclass(frozen=True)
class Guess:
    """What a sample tells of a row.

    least: a key that a little more than k scores should reach.
    upper: a score, not below that of `least`, that a little less than k should exceed.
    tied: 1 where many scores may have the key `least`, else 0.
    """

    least: Value
    upper: Value
    tied: Value


def write_topk(problem: Problem, memory: Memory, first: Value, part: Value) -> None:
    """Writes out[first], out[first + problem.blocks] and so on, or this block's part of them."""
    block = Block(problem, memory, part)
    block.begin()

    def attempt(number, start, end, tries, aim, turn, *sample):
        row = Row(block, number, start, end)
        following = number + problem.blocks
        bounds = (start, end) if problem.is_single else _bounds(problem, memory, following)
        guess = row.guess(tries, aim, sample)
        count = row.stream(turn, guess)
        block.fill_up(count)
        counts = block.tell(count, tries & 1)
        reached = simt.total(counts)
        again = (reached < problem.k) & (guess.least > LOWEST_KEY)
        # Half way between k and the capacity, by what was reached this time.
        corrected = aim * ((problem.capacity + problem.k) / 2) / (reached + 1).to_float()
        turn += row.chunks
        tries, start, end, number = (
            select(again, *both) for both in ((tries + 1, 0), (start, bounds[0]), (end, bounds[1]), (number, following))
        )
        coming = Row(block, number, start, end)
        block.empty(block.places.bins)
        simt.barrier()  # all have appended and read the last chunks
        sample = coming.prefetch(tries, turn)
        with simt.when((reached >= problem.k) | (guess.least <= LOWEST_KEY)):
            before = simt.total([select(part > rank, x, 0) for rank, x in enumerate(counts)])
            row.finish(count, before, reached, guess)
        return [number, start, end, tries, select(again, corrected, coming.aim()), turn, *sample]

    row = Row(block, first, *_bounds(problem, memory, first))
    nothing = as_value(0)
    state = [first, row.start, row.end, nothing, row.aim(), nothing, *row.prefetch(nothing, nothing)]
    simt.while_loop(lambda number, *_: number < problem.rows, attempt, state)


def _bounds(problem: Problem, memory: Memory, row: Value) -> tuple[Value, Value]:
    """starts and ends of a row as they are given; past the last row whatever they are."""
    if memory.starts is None or memory.ends is None:
        return as_value(0), as_value(problem.length)
    row = minimum(row, problem.rows - 1)
    return memory.starts[row], memory.ends[row]


class Row:
    """A block at work on columns [start, end) of a row, of which [low, high) are its part."""

    def __init__(self, block: Block, row: Value, start: Value, end: Value):
        self.block, self.problem, self.memory, self.row = block, block.problem, block.memory, row
        problem = block.problem
        self.start = minimum(maximum(start, 0), problem.length)
        self.end = minimum(maximum(end, self.start), problem.length)
        self.length = self.end - self.start
        self.scores = self.memory.scores.row(row, problem.length)
        share = (self.length + (problem.parts - 1)) >> (problem.parts.bit_length() - 1)
        self.low = minimum(self.start + block.part * share, self.end)
        self.high = minimum(self.low + share, self.end)
        # Bulk copies start on multiples of four scores of the whole array: up to three columns before the part.
        self.origin = self.low - self._misaligned(self.low)
        chunks = (self.high - self.origin + (problem.chunk - 1)) // problem.chunk
        self.chunks = select(self.low < self.high, chunks, 0)

    def aim(self) -> Value:
        """How many scores a first guess should leave.

        Of n scores S are sampled. The r-th of them stands for a rank of n * r / S in the row, give or take a standard
        deviation of sqrt(k * n / S). Aims 3 of them above k, but not past the middle between k and the capacity.
        """
        problem = self.problem
        margin = simt.square_root(self.length.to_float() * (problem.k / problem.samples)) * 3.0
        middle = (problem.capacity - problem.k) / 2
        return select(margin < middle, margin, middle) + float(problem.k)

    # Asking for what will be needed.

    def prefetch(self, tries: Value, turn: Value) -> list[Value]:
        """Asks for the first chunks, and for the sample where there will be a guess. Returns this thread's samples, as
        bits.
        """
        problem = self.problem
        exists = self.row < problem.rows
        with simt.when(exists):
            for stage in range(problem.stages):
                self._start_copy(as_value(stage), turn + stage)
        if self._is_ragged:
            simt.barrier()  # what ordinary loads brought is there
        none = [0] * (problem.samples // problem.threads)
        return simt.branch(exists & self._is_sampled(tries), self._load_sample, lambda: none, none)

    def _is_sampled(self, tries: Value) -> Value:
        return (tries < _GUESSES) & (self.length > self.problem.capacity)

    def _load_sample(self) -> list[Value]:
        """Scores in places evenly spread over the row, some neighbours in each."""
        problem, together = self.problem, self.problem.neighbours // 4
        first = self.start + ((as_value(4) - self._misaligned(self.start)) & 3)
        vectors = (self.end - first) >> 2
        stride = vectors.to_float() * (problem.neighbours / problem.samples)
        found = []
        for i in range(problem.samples // problem.group):
            number = self.block.thread + i * problem.threads
            place = ((number // together).to_float() * stride).to_int() + number % together
            found += [x.bits() for x in self.scores.load4(first + minimum(place, vectors - 1) * 4)]
        return found

    def _start_copy(self, i: Value, turn: Value) -> None:
        """Starts bringing the i-th chunk, the turn-th of this block, if there is one."""
        problem, memory, thread = self.problem, self.memory, self.block.thread

        def place():
            stage, first = turn % problem.stages, self.origin + i * problem.chunk
            return memory.chunks.at(stage * problem.chunk), stage, first, minimum(self.high - first, problem.chunk)

        def leaves_array(first, wanted):
            behind = minimum(as_value(problem.rows - 1) - self.row, 1 if problem.length > 2 else 3)  # rows it may reach
            return first + ((wanted + 3) & ~3) > (behind + 1) * problem.length

        if self._is_ragged:
            # Rounding up would leave the array at its end: ordinary loads bring the last scores there.
            with simt.when((i < self.chunks) & (thread < 3)):
                target, _, first, wanted = place()
                at = (wanted & ~3) + thread
                with simt.when((at < wanted) & leaves_array(first, wanted)):
                    target[at] = self.scores[first + at]
        with simt.when((i < self.chunks) & thread.equals(0)):
            target, stage, first, wanted = place()
            count = (wanted + 3) & ~3
            if self._is_ragged:
                count = select(leaves_array(first, wanted), wanted & ~3, count)
            arrival = self.block.arrival(stage)
            simt.expect_bytes(arrival, count * 4)
            with simt.when(count > 0):
                simt.bulk_copy(target, self.scores.at(first), count * 4, arrival)

    # The guess.

    def guess(self, tries: Value, aim: Value, sample: Sequence[Value]) -> Guess:
        """What the sample tells, or no floor at all."""
        none = [LOWEST_KEY, _INFINITY, 0]
        return Guess(*simt.branch(self._is_sampled(tries), lambda: self._guess(aim, sample), lambda: none, none))

    def _guess(self, aim: Value, sample: Sequence[Value]) -> list[Value]:
        """Guess's fields, for a floor that `aim` scores of the row should reach."""
        block, problem = self.block, self.problem
        scores = [x.as_float() for x in sample]
        valid = [x > -_INFINITY for x in scores]
        real = [select(some, x, float("nan")) for some, x in zip(valid, scores, strict=True)]
        own = (
            functools.reduce(simt.lesser, real, as_value(_INFINITY)),
            functools.reduce(simt.greater, scores, as_value(-_INFINITY)),
        )
        least, top = block.extremes(*(key_of(x.bits()) for x in own))
        # Equal steps between the scores, not between the keys, spread most samples over all bins. Bin j has those up to
        # low + j steps, and so the first the least alone.
        low = score_of(maximum(least, -_WIDEST))
        step = (score_of(minimum(top, _WIDEST)) - low) * (1 / LAST_BIN)
        steps, bins = as_value(1.0) / step, as_value(block.places.bins)
        target = block.rounded(bins)
        for some, x in zip(valid, scores, strict=True):
            place = simt.greater(simt.fma_up(x - low, steps, as_value(ROUNDER)), as_value(ROUNDER))
            place = simt.lesser(place, as_value(ROUNDER + LAST_BIN))
            block.count_rounded(select(some, place, ROUNDER + BINS), target)
        ratio = as_value(float(problem.samples)) / self.length.to_float()
        rank = minimum((aim * ratio).to_int(), problem.samples) + 1
        slack = rank >> 4
        found = block.find(lambda counted: rank, bins)
        enough = found.counted > rank + slack
        # Where the bin holds too many, its keys are looked at.
        edge = low + (found.place - 1).to_float() * step
        is_least = found.place <= 0
        bottom = select(is_least, least, key_of(edge.bits()))
        ceiling = select(found.place >= LAST_BIN, top, key_of((edge + step).bits()))
        crowded = enough & (found.number + found.before - rank > slack) & (found.place > 0) & (ceiling > bottom)

        def put(low, width, shift, bins):
            for some, x in zip(valid, scores, strict=True):
                offset = key_of(x.bits()) - low
                block.count_key(offset, shift, bins, some & offset.below(width + 1))

        state = [select(crowded, 1, 0), bottom, ceiling - bottom, rank - found.before, 0, 0, 0, 0, bins]
        _, key, width, *_ = block.refine(state, put, slack=slack)
        tied = enough & (is_least | width.equals(0))
        key = select(enough, key, LOWEST_KEY)
        # As far above k as the aim is below, up to the edge of what a lane has summed up.
        far = (simt.greater(as_value(2.0 * problem.k) - aim, as_value(0.0)) * ratio).to_int()
        lanes = simt.ones(simt.ballot(found.upto < far))
        upper = low + (as_value(LAST_BIN) - lanes * (BINS // 32)).to_float() * step
        return [key, simt.greater(upper, score_of(key)), select(tied, 1, 0)]

    # Streaming.

    def stream(self, turn: Value, guess: Guess) -> Value:
        """Appends what may be among the k greatest of the row; returns how many that is in this part."""

        def take(i, count, floor):
            return self._take_chunk(i, turn + i, count, floor, guess)

        count, _ = simt.for_loop(self.chunks, take, [0, guess.least - 1])
        return count

    def _take_chunk(self, i: Value, turn: Value, count: Value, floor: Value, guess: Guess) -> list[Value]:
        """Appends the candidates of the i-th chunk, and starts copying one that takes the place of a chunk.

        Takes and returns how many candidates there are and the floor.
        """
        problem, memory, block = self.problem, self.memory, self.block
        stage = turn % problem.stages
        simt.wait_phase(block.arrival(stage), (turn // problem.stages) & 1)
        within = block.thread * problem.columns_per_thread
        mine = memory.chunks.at(stage * problem.chunk + within)
        first = self.origin + i * problem.chunk + within
        scores = self._load(mine)
        words = self._mark(scores, first, floor)
        before, total = block.scan(_ones(words), i & 1)
        if problem.is_dense:  # the scores are in registers
            self._start_copy(i + problem.stages, turn + problem.stages)
        if problem.is_late:
            with simt.when(i > 0):
                self._start_copy(i + (problem.stages - 1), turn + (problem.stages - 1))

        def drop_ties():
            # k candidates reach `least` before a later column that equals it: it is not among the greatest.
            strict = self._mark(scores, first, guess.least)
            kept = [select(count + before >= problem.k, *both) for both in zip(strict, words, strict=True)]
            return [*kept, *block.scan(_ones(kept), REST)]

        crosses = guess.tied.differs(0) & (count < problem.k) & (count + total > problem.k)
        as_before = [*words, before, total]
        *words, before, total = simt.branch(crosses, drop_ties, lambda: as_before, as_before)

        def append(words, slot):
            if problem.is_dense:
                self._append_all(scores, first, words, slot)
            else:
                self._append_marked(mine, first, words, slot)

        def marked_above(floor):
            # Scores of few marks are loaded anew: in registers they would leave room for fewer blocks.
            return self._mark(scores if problem.is_dense else self._load(mine), first, floor)

        def shrink():
            left = self._shrink(append, marked_above, guess.least, [count, floor, before, total, *words])
            simt.barrier()  # all have read the chunk again
            return left

        def append_all():
            append(words, count + before)
            return [count + total, floor]

        count, floor = simt.branch(count + total > problem.capacity, shrink, append_all, [count, floor])
        floor = select(count >= problem.k, maximum(floor, guess.least), floor)
        if not problem.is_late and not problem.is_dense:
            simt.barrier()  # all have read the chunk
            self._start_copy(i + problem.stages, turn + problem.stages)
        return [count, floor]

    def _load(self, mine: Pointer) -> list[Value]:
        return [x for j in range(0, self.problem.columns_per_thread, 4) for x in mine.load4(j)]

    def _mark(self, scores: Sequence[Value], first: Value, floor: Value) -> list[Value]:
        """Bit j of word w is set where the thread's column first + 32 w + j is its part's and exceeds the floor."""
        limit = score_of(floor)
        words = []
        for at in range(0, len(scores), 32):
            word = as_value(0)
            for x in reversed(scores[at : at + 32]):
                word = simt.push_sign(word, (limit - x).bits())  # no sign where x or the difference is NaN
            words.append(word)

        def clip():
            ranges = [(self.low - (first + at), self.high - (first + at)) for at in range(0, len(scores), 32)]
            return [word & _low_bits(high) & ~_low_bits(low) for word, (low, high) in zip(words, ranges, strict=True)]

        inside = (first >= self.low) & (first + len(scores) <= self.high)
        return simt.branch(inside, lambda: words, clip, words)

    def _fitting(self, words: Sequence[Value], slot: Value) -> list[Value]:
        """The marks of this thread, if its candidates fit from `slot` on, else none."""
        fits = slot + _ones(words) <= self.problem.capacity
        return [select(fits, word, 0) for word in words]

    def _append_all(self, scores: Sequence[Value], first: Value, words: Sequence[Value], slot: Value) -> None:
        """Appends the marked columns of this thread from `slot` on, looking at every column: for many marks."""
        address = self.memory.candidates.at(slot).shared()
        for j, score in enumerate(scores):
            address = simt.store_two(
                address, words[j // 32], j % 32, score.bits(), first + j, 4 * self.problem.capacity
            )

    def _append_marked(self, mine: Pointer, first: Value, words: Sequence[Value], slot: Value) -> None:
        """Appends the marked columns of this thread from `slot` on, going from mark to mark, the last first."""
        stop = slot + _ones(words)
        for w in reversed(range(len(words))):

            def step(word, slot, w=w):
                j = simt.highest_bit(word)
                self.memory.candidates[slot - 1] = mine[j + 32 * w].bits()
                self.memory.candidates[slot - 1 + self.problem.capacity] = first + 32 * w + j
                return word ^ (as_value(1) << j), slot - 1

            _, stop = simt.while_loop(lambda word, slot: word.differs(0), step, [words[w], stop])

    def _shrink(self, append: Callable, marked_above: Callable, least: Value, state: list[Value]) -> list[Value]:
        """Makes room: the k greatest candidates stay, and of what does not fit what is still greater joins them.

        append(marks, slot); marked_above(floor): this thread's marks. state: how many candidates there are, the floor,
        the counts before this thread and of all, the marks. Returns the first two anew.
        """
        problem, block = self.problem, self.block

        def again(pending, count, floor, before, total, *words):
            appended = self._fitting(words, count + before)
            append(appended, count + before)
            simt.barrier()
            _, fitted = block.scan(_ones(appended), REST)
            floor = self._keep_greatest(count + fitted, least)
            count = as_value(problem.k)
            still = zip(marked_above(floor), words, appended, strict=True)
            words = [mark & (word ^ put) for mark, word, put in still]
            before, total = block.scan(_ones(words), REST)
            return [select(count + total > problem.capacity, 1, 0), count, floor, before, total, *words]

        state = [as_value(1), *state]
        _, count, floor, before, total, *words = simt.while_loop(lambda pending, *_: pending.differs(0), again, state)
        append(words, count + before)
        return [count + total, floor]

    def _keep_greatest(self, count: Value, least: Value) -> Value:
        """Keeps the k greatest of this block's `count` candidates, in order; returns the new floor."""
        block, candidates = self.block, self.memory.candidates
        block.fill_up(count)
        simt.barrier()
        split = block.search(count, least)
        block.drop_ties(count, split.key, split.quota)
        simt.barrier()
        below = score_of(split.key - 1)

        def take(group, chosen):
            scores, columns = block.load_group(group), block.load_columns(group)
            flags = [x > below for x in scores]
            slot, total = block.scan(simt.total([select(flag, 1, 0) for flag in flags]), group & 1)
            slot += chosen
            for x, column, flag in zip(scores, columns, flags, strict=True):
                with simt.when(flag):
                    candidates[slot] = x.bits()
                    candidates[slot + self.problem.capacity] = column
                slot = select(flag, slot + 1, slot)
            return [chosen + total]

        simt.for_loop(block.groups_of(count), take, [0])
        simt.barrier()
        return split.floor

    # Selecting.

    def finish(self, count: Value, before: Value, reached: Value, guess: Guess) -> None:
        """Writes the columns of the k greatest of the cluster's `reached` candidates, and -1 behind them.

        count: this block's candidates; before: those of the blocks before it.
        """
        problem, block = self.problem, self.block
        floor, before = simt.branch(
            reached > problem.k,
            lambda: block.cut(count, reached, before, guess.least, guess.upper),
            lambda: [-_INFINITY, before],
            [0.0, 0],
        )
        out = self.memory.out.row(self.row, problem.k)
        mine = out.at(before)

        def prepare(group):
            columns = block.load_columns(group)
            return lambda j, number: mine.__setitem__(number, columns[j])

        block.number(count, lambda x: (floor - x).bits(), prepare)

        def blank(slot):
            out[slot] = -1
            return [slot + problem.threads * problem.parts]

        begin = reached + block.part * problem.threads + block.thread
        simt.while_loop(lambda slot: slot < problem.k, blank, [begin])
        block.leave()

    @property
    def _is_ragged(self) -> bool:
        """Whether the whole array's length is no multiple of four."""
        return self.problem.rows * self.problem.length % 4 != 0

    def _misaligned(self, column: Value) -> Value:
        """How many scores lie between `column` and the multiple of four of the whole array before it."""
        return (self.row * (self.problem.length % 4) + column) & 3


def _ones(words: Sequence[Value]) -> Value:
    return simt.total([simt.ones(word) for word in words])


def _low_bits(n: Value) -> Value:
    """A word whose first n bits are set: none for n <= 0, all for n >= 32."""
    return select(n <= 0, 0, as_value(-1) >> (as_value(32) - minimum(maximum(n, 1), 32)))
