"""The math warpgroup of a team of few heads, whatever the keys: items, softmax and results.

Of the scores of 64 keys a thread holds rows r = 16 w + l / 4 and r + 8, of every eight columns 2 (l % 4) and the next.
Rows are keys in scores and output columns in the accumulators; columns are heads in both, so a thread's are the same.
"""

import functools
import math
import operator
from collections.abc import Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.softmax import LOG2E
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import VALUE_TILES
from pallas_kernels.sparse_mla.hopper_few_block import (
    HEADS,
    MASKS,
    TOPS,
    TOTALS,
    FewProblem,
    Memory,
    Place,
    Ring,
    first_item,
    mask_bit,
    place_of,
    team_of,
)

_SLACK = 8.0  # as in hopper_attend
_BARRIER = 8  # a named one, of the first team; Pallas takes low numbers


class Attention:
    """What the math warpgroup does of either kind of keys, in every one of its threads.

    scale: a positive factor from scores to logits in base 2.
    """

    def __init__(self, problem: FewProblem, memory: Memory, scale: float):
        self.scale = scale
        self.slack = min(_SLACK / scale, 1e38)  # finite in float32 for the smallest scale too
        team = team_of(problem)
        self.problem, self.memory = problem, memory.of_team(problem, team)
        memory, self.first_item, self.barrier = self.memory, first_item(problem, team), team + _BARRIER
        thread = simt.thread()
        self.lane, self.warp = thread & 31, (thread >> 5) & 3
        self.row, self.column = (self.warp << 4) + (self.lane >> 2), self.lane & 3
        self.words, self.keys, self.queries = (x.shared() for x in (memory.words, memory.keys, memory.queries))
        self.num_scores = problem.columns // 2
        self.num_heads = problem.columns // 4  # of a thread: 8 j + 2 (l % 4) + e, numbered 2 j + e
        self.num_accumulators = VALUE_TILES * self.num_scores
        self.weights = memory.weights.shared()
        # For stmatrix: lanes 8m..8m+7 give the rows, which are heads, of matrix m: keys 8 (m % 2), heads 8 (m / 2).
        head = self.lane & 7
        chunk = ((self.warp << 1) + ((self.lane >> 3) & 1)) ^ head
        self.weight_row = ((self.lane >> 4) << 10) + (head << 7) + (chunk << 4)

    def run(self) -> None:
        sink = self.memory.sink
        sinks: list[Value] = []
        if self.problem.splits == 1 and sink is not None:
            sinks = [_load_if(x < self.problem.heads, sink.at(x), -math.inf) for x in self.head_numbers()]

        def body(item, round_, stage, parity):
            ring = self.item(place_of(self.problem, self.memory, item), round_, Ring(stage, parity), sinks)
            return [item + self.problem.blocks * self.problem.teams, round_ ^ 1, ring.stage, ring.parity]

        simt.while_loop(lambda item, *_: item < self.problem.items, body, [self.first_item, 0, 0, 0])

    def item(self, place: Place, round_: Value, ring: Ring, sinks: Sequence[Value]) -> Ring:
        """Attention over all key blocks of an item. Returns where the next one's begin.

        sinks: of this thread's heads, or none.
        """
        raise NotImplementedError

    def head_numbers(self) -> list[Value]:
        """The heads of this thread."""
        first = self.column << 1
        return [first + (8 * (i // 2) + i % 2) for i in range(self.num_heads)]

    def mask_address(self, ring: Ring) -> Value:
        """Of the word of a block's mask that tells of this warp's rows."""
        return self.words + (((ring.stage << 2) + self.warp + MASKS) << 2)

    def masked(self, scores: Sequence[Value], mask: Value) -> list[Value]:
        """Scores, -inf for what is no key. mask: the word, as a float."""
        bits = [mask_bit(self.row + 8 * i) for i in range(2)]
        valid = [((mask.bits() >> bit) & 1).differs(0) for bit in bits]
        return [select(valid[i // 2 % 2], x, -math.inf) for i, x in enumerate(scores)]

    # Softmax.

    def softmax(self, scores, top, total, also: Value | None = None):
        """The weights, what they are relative to, this thread's sums of them, whether that maximum grew, what by.

        As in hopper_attend they are relative to a maximum that may be too low by _SLACK, so that warps rarely have to
        tell each other theirs.
        also: what in any thread is taken for growth as well.
        """
        highest = [simt.greater(*scores[4 * (i // 2) + i % 2 :: 2][:2]) for i in range(self.num_heads)]
        grew = functools.reduce(operator.or_, (x > y + self.slack for x, y in zip(highest, top, strict=True)))
        grew = self.any(grew if also is None else grew | also)

        def raised():
            tops = self.over_warps(TOPS, highest, simt.greater)
            tops = [select(x > y + self.slack, x, y) for x, y in zip(tops, top, strict=True)]
            decay = [simt.exp2((y - _finite(x)) * self.scale) for x, y in zip(tops, top, strict=True)]
            return [*tops, *decay]

        one = as_value(1.0)
        both = simt.branch(grew, raised, lambda: [*top, *[one] * self.num_heads], [*top, *top])
        top, decay = both[: self.num_heads], both[self.num_heads :]
        shift = [_finite(x) * -self.scale for x in top]
        scale = as_value(self.scale)
        weights = [simt.exp2(simt.fma(x, scale, shift[2 * (i // 4) + i % 2])) for i, x in enumerate(scores)]
        sums = [operator.add(*weights[4 * (i // 2) + i % 2 :: 2][:2]) for i in range(self.num_heads)]
        total = [simt.fma(x, y, z) for x, y, z in zip(total, decay, sums, strict=True)]
        return weights, top, total, grew, decay

    def store_weights(self, tile: Value, packed: Sequence[Value]) -> None:
        """Two words for each eight heads, of the keys of either row, into a tile whose rows are heads."""
        address = tile + self.weight_row
        while packed:
            count = min(4, len(packed))
            names = ",".join(f"${i + 1}" for i in range(count))
            code = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{names}}};"
            simt.ptx(code, address, *packed[:count], collective=True)
            address, packed = address + 16 * wgmma.ROW_BYTES, packed[count:]

    def any(self, condition: Value) -> Value:
        """Whether it holds in any thread of the warpgroup."""
        code = (
            f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; bar.red.or.pred p, $2, {simt.THREADS}, p; selp.b32 $0, 1, 0, p; }}"
        )
        return simt.ptx(code, select(condition, 1, 0), self.barrier, result=simt.i32(), collective=True).differs(0)

    def sync(self) -> None:
        """Waits for the warpgroup, and makes its writes to shared memory visible."""
        simt.ptx(f"bar.sync $0, {simt.THREADS};", self.barrier, collective=True)

    def over_warps(self, array: int, values, combine):
        """Combines each of this thread's heads over all keys of all warps. Uses `array` of the words."""
        for distance in (4, 8, 16):
            values = [combine(x, simt.lane_across(x, distance)) for x in values]
        heads = self.head_numbers()
        with simt.when(self.lane < 4):
            for head, value in zip(heads, values, strict=True):
                self.memory.words[(self.warp * HEADS) + head + array] = value.bits()
        self.sync()
        return [
            functools.reduce(
                combine, [self.memory.words[head + (array + HEADS * warp)].as_float() for warp in range(simt.WARPS)]
            )
            for head in heads
        ]

    # Results.

    def write(self, place: Place, acc, top, total, sinks) -> None:
        """Normalises and writes out and lse."""
        total = self.over_warps(TOTALS, total, operator.add)
        heads, factors = self.head_numbers(), []
        lse_row = self.row_of(self.memory.lse, place, 1)
        writes_lse = self.warp.equals(0) & (self.lane < 4)
        for i, (head, x, y) in enumerate(zip(heads, total, top, strict=True)):
            is_empty = x.equals(0.0)
            safe = select(is_empty, 1.0, x)
            lse = select(is_empty, -math.inf, (y * self.scale + simt.log2(safe)) * math.log(2.0))
            factor = as_value(1.0) / safe
            if sinks:
                factor = factor * _kept_by_sink(lse, sinks[i])
            factors.append(factor)
            with simt.when(writes_lse & (head < self.problem.heads)):
                lse_row[head] = lse
        acc = by_heads(acc, factors)
        if self.problem.splits == 1:
            self.write_bf16(place, acc)
        else:
            self.write_f32(place, acc)

    def write_bf16(self, place: Place, acc) -> None:
        raise NotImplementedError

    def write_f32(self, place: Place, acc) -> None:
        raise NotImplementedError

    def row_of(self, array: Pointer, place: Place, width: int) -> Pointer:
        """The start of this row, of this split, in an array [(splits,) rows, heads, width]."""
        return array.row(place.split * self.problem.rows + place.row, self.problem.heads * width)


def by_heads(registers, factors):
    """The registers of products times a factor a head."""
    per_tile = 2 * len(factors)
    return [x * factors[2 * (i % per_tile // 4) + i % 2] for i, x in enumerate(registers)]


def _kept_by_sink(lse: Value, sink: Value) -> Value:
    """merge.kept_by_sink."""
    share = as_value(1.0) / (simt.exp2((sink - lse) * LOG2E) + 1.0)
    return select(sink.equals(-math.inf), 1.0, share)


def _finite(x: Value) -> Value:
    """0 for the maximum of no key, -inf, with which -inf - -inf would be NaN."""
    return select(x.equals(-math.inf), 0.0, x)


def _load_if(condition: Value, source: Pointer, otherwise: float) -> Value:
    return simt.branch(condition, lambda: [source[0]], lambda: [as_value(otherwise)], [as_value(otherwise)])[0]
