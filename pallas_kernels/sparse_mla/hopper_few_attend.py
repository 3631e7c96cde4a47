"""The math warpgroup of a block of few heads: scores, softmax and weighted values, for one item after another.

Of a product's 64 rows a thread holds r = 16 w + l / 4 and r + 8, of every eight columns 2 (l % 4) and the next. Rows
are keys in scores and output columns in the accumulators; columns are heads in both, so a thread's are the same.

While keys come slower than they are used, a block's scores are taken piece by piece as its groups arrive, and all that
is left then is the softmax and the values. When the next block is there already, its scores are started ahead of the
values of this one, so that the softmax runs while the values are on.
"""

import functools
import itertools
import math
import operator
from collections.abc import Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import VALUE_TILES, VALUE_WIDTH
from pallas_kernels.sparse_mla.hopper_few_block import (
    FREE,
    FULL,
    HEADS,
    MASKS,
    QUERIES_FREE,
    QUERIES_FULL,
    TOPS,
    TOTALS,
    FewProblem,
    Memory,
    Place,
    Ring,
    mask_bit,
    place_of,
)
from pallas_kernels.sparse_mla.merge import LOG2E
from pallas_kernels.sparse_mla.wgmma import TILE_BYTES

_SLACK = 8.0  # as in hopper_attend
_BARRIER = 8  # a named one; Pallas takes low numbers
_STEPS = 4  # of 16 columns, or keys, in a tile


def attend(problem: FewProblem, memory: Memory) -> None:
    """All that the warpgroup does."""
    _Attention(problem, memory).run()


class _Attention:
    """The warpgroup, in every one of its threads."""

    def __init__(self, problem: FewProblem, memory: Memory):
        self.problem, self.memory = problem, memory
        thread = simt.thread()
        self.lane, self.warp = thread & 31, (thread >> 5) & 3
        self.row, self.column = (self.warp << 4) + (self.lane >> 2), self.lane & 3
        self.is_leader = select(self.lane.equals(0), 1, 0)
        self.words = memory.words.shared()
        self.keys = wgmma.descriptor(memory.keys.shared())
        self.queries = wgmma.descriptor(memory.queries.shared())
        self.num_scores = problem.columns // 2
        self.num_heads = problem.columns // 4  # of a thread: 8 j + 2 (l % 4) + e, numbered 2 j + e
        self.num_fresh = self.num_scores + 2
        self.is_one_word = problem.gatherers == 1
        self.num_accumulators = VALUE_TILES * self.num_scores
        self.slack = min(_SLACK / problem.scale_log2, 1e38)  # finite in float32 for the smallest scale too
        self.weights = memory.weights.shared()
        # For stmatrix: lanes 8m..8m+7 give the rows, which are heads, of matrix m: keys 8 (m % 2), heads 8 (m / 2).
        head = self.lane & 7
        chunk = ((self.warp << 1) + ((self.lane >> 3) & 1)) ^ head
        self.weight_row = ((self.lane >> 4) << 10) + (head << 7) + (chunk << 4)

    def run(self) -> None:
        sinks = [as_value(-math.inf)] * self.num_heads
        if self.problem.splits == 1:
            sinks = [_load_if(x < self.problem.heads, self.memory.sink.at(x), -math.inf) for x in self.head_numbers()]

        def body(item, round_, stage, parity):
            ring = self.item(place_of(self.problem, self.memory, item), round_, Ring(stage, parity), sinks)
            return [item + self.problem.blocks, round_ ^ 1, ring.stage, ring.parity]

        simt.while_loop(lambda item, *_: item < self.problem.items, body, [simt.block(), 0, 0, 0])

    def item(self, place: Place, round_: Value, ring: Ring, sinks: Sequence[Value]) -> Ring:
        """Attention over all key blocks of an item. Returns where the next one's begin."""
        simt.wait_phase(self.memory.words.at(QUERIES_FULL), round_)
        simt.ptx(wgmma.PROXY_FENCE)
        scores = self.first_scores(ring)
        nothing, zero = as_value(-math.inf), as_value(0.0)
        top, total = [nothing] * self.num_heads, [zero] * self.num_heads
        top, total, _, _ = self.softmax(as_value(0), scores, top, total)
        after = ring.after(self.problem)
        ready = self.publish_weights(after)

        def unpack(state):
            ends = (self.num_accumulators, self.num_heads, self.num_heads, 1, 2, 2)
            parts = []
            for count in ends:
                parts.append(state[:count])
                state = state[count:]
            return parts

        def body(block, *state):
            acc, top, total, (ready,), here, after = unpack(list(state))
            here, after = Ring(*here), Ring(*after)
            acc, scores = self.values_and_scores(acc, block & 1, ready, here, after)
            top, total, grew, decay = self.softmax((block + 1) & 1, scores, top, total)
            acc = self.finish_values(acc, ready, here)
            acc = simt.branch(grew, lambda: _by_heads(acc, decay), lambda: acc, acc)
            then = after.after(self.problem)
            ready = self.publish_weights(then)
            rings = after.stage, after.parity, then.stage, then.parity
            return [block + 1, *acc, *top, *total, ready, *rings]

        acc = [zero] * self.num_accumulators
        state = [as_value(0), *acc, *top, *total, ready, ring.stage, ring.parity, after.stage, after.parity]
        block, *state = simt.while_loop(lambda block, *_: block < place.count - 1, body, state)
        acc, top, total, _, here, after = unpack(list(state))
        acc = self.last_values(acc, block & 1, Ring(*here))
        with simt.when(self.lane.equals(0)):
            simt.arrive(self.memory.words.at(QUERIES_FREE))
        self.write(place, acc, top, total, sinks)
        return Ring(*after)

    def head_numbers(self) -> list[Value]:
        """The heads of this thread."""
        first = self.column << 1
        return [first + (8 * (i // 2) + i % 2) for i in range(self.num_heads)]

    # Products. Registers of PTX for the groups of a key block k or v: dk0.. are descriptors of their first tiles,
    # bk0.. addresses of their mbarriers, less the places FULL and FREE, pk0.. their parities.

    def first_scores(self, ring: Ring) -> list[Value]:
        def code(_, scores, operands):
            words, keys, queries, mask, *ring = operands
            return [
                *self.located("k", words, keys, *ring),
                *self.score_block(scores, queries, mask),
                wgmma.wait_group(0),
            ]

        operands = (self.words, self.keys, self.queries, self.mask_address(ring), ring.stage, ring.parity)
        return self.masked(wgmma.statement(code, fresh=self.num_fresh, operands=operands))

    def values_and_scores(self, acc, parity: Value, ready: Value, here: Ring, after: Ring):
        """acc += V^T P^T of this block, and the next one's scores.

        Where the next block is `ready` the values may be unfinished, and their groups are not given back.
        """

        def code(acc, scores, operands):
            leader, ready, words, keys, queries, weights, mask, *rings = operands
            return [
                ".reg .pred there;",
                f"setp.ne.s32 there, {ready}, 0;",
                *self.located("v", words, keys, *rings[:2]),
                *self.located("k", words, keys, *rings[2:]),
                "@!there bra VALUES;",
                *self.score_block(scores, queries, mask),
                *self.value_block(acc, weights),
                wgmma.wait_group(len(self.problem.groups)),
                "bra DONE;",
                "VALUES:",
                *self.value_block(acc, weights),
                *self.free_block(leader),
                *self.score_block(scores, queries, mask),
                wgmma.wait_group(0),
                "DONE:",
            ]

        operands = (self.is_leader, ready, self.words, self.keys, self.queries, self.weight_descriptor(parity))
        rings = (self.mask_address(after), here.stage, here.parity, after.stage, after.parity)
        values = wgmma.statement(code, changed=acc, fresh=self.num_fresh, operands=(*operands, *rings))
        return values[: self.num_accumulators], self.masked(values[self.num_accumulators :])

    def mask_address(self, ring: Ring) -> Value:
        """Of the words of a block's mask that tell of this thread's rows."""
        word, _ = mask_bit(self.problem, self.row)
        return self.words + (((ring.stage << 3) + word + MASKS) << 2)

    def masked(self, values: Sequence[Value]) -> list[Value]:
        """Scores, -inf for what is no key. values: the scores, then two words of the mask."""
        *scores, first, second = values
        bits = [mask_bit(self.problem, self.row + 8 * i)[1] for i in range(2)]
        valid = [((x.bits() >> bit) & 1).differs(0) for x, bit in zip((first, second), bits, strict=True)]
        return [select(valid[i // 2 % 2], x, -math.inf) for i, x in enumerate(scores)]

    def finish_values(self, acc, ready: Value, here: Ring):
        """Waits for the values where that was left, and gives their groups back."""

        def code(acc, _, operands):
            leader, words, keys, *ring = operands
            return [*self.located("v", words, keys, *ring), *self.free_block(leader)]

        operands = (self.is_leader & ready, self.words, self.keys, here.stage, here.parity)
        return wgmma.statement(code, changed=acc, operands=operands)

    def last_values(self, acc, parity: Value, here: Ring):
        def code(acc, _, operands):
            leader, words, keys, weights, *ring = operands
            return [
                *self.located("v", words, keys, *ring),
                *self.value_block(acc, weights),
                *self.free_block(leader),
            ]

        operands = (self.is_leader, self.words, self.keys, self.weight_descriptor(parity), here.stage, here.parity)
        return wgmma.statement(code, changed=acc, operands=operands)

    def weight_descriptor(self, parity: Value) -> Value:
        return wgmma.descriptor(self.weights) + parity * (self.problem.query_tile_bytes >> 4)

    def located(self, kind: str, words: str, keys: str, stage: str, parity: str) -> list[str]:
        """The registers of a key block's groups."""
        problem = self.problem
        names = ", ".join(f"{x}{kind}<{len(problem.groups)}>" for x in "dbp")
        lines = [f".reg .b32 {names};", "{ .reg .pred wraps; .reg .b32 place;"]
        for group in range(len(problem.groups)):
            lines += [
                f"add.s32 place, {stage}, {group}; setp.ge.s32 wraps, place, {problem.stages};",
                f"@wraps sub.s32 place, place, {problem.stages};",
                f"mad.lo.s32 d{kind}{group}, place, {problem.stage_bytes >> 4}, {keys};",
                f"mad.lo.s32 b{kind}{group}, place, 8, {words};",
                f"selp.b32 p{kind}{group}, 1, 0, wraps; xor.b32 p{kind}{group}, p{kind}{group}, {parity};",
            ]
        return [*lines, "}"]

    def score_block(self, scores, queries: str, mask: str) -> list[str]:
        """Starts the scores of block k, group by group as they arrive, and reads its mask."""
        *scores, first, second = scores
        size, lines = self.problem.query_tile_bytes, []
        for group, tiles in enumerate(self.problem.groups):
            lines += [wgmma.wait_phase(f"bk{group}", 4 * FULL, f"pk{group}"), wgmma.FENCE]
            for step, tile in itertools.product(range(_STEPS), tiles):
                a = (f"dk{group}", TILE_BYTES * (tile - tiles[0]) + 32 * step)
                b = (queries, size * tile + 32 * step)
                lines += wgmma.product(scores, a, b, adds=tile + step > 0)
        if self.is_one_word:
            load = f"ld.shared.b32 {first}, [{mask}]; mov.b32 {second}, {first};"
        else:
            load = f"ld.shared.v2.b32 {{{first}, {second}}}, [{mask}];"
        return [*lines, wgmma.COMMIT, load]

    def value_block(self, acc, weights: str) -> list[str]:
        """Starts the values of block v, in as many wgmma groups as it has groups of tiles."""
        lines = [wgmma.FENCE]
        for group, tiles in enumerate(self.problem.groups):
            for step, tile in itertools.product(range(_STEPS), tiles):
                if tile < VALUE_TILES:
                    result = acc[self.num_scores * tile : self.num_scores * (tile + 1)]
                    a = (f"dv{group}", TILE_BYTES * (tile - tiles[0]) + TILE_BYTES // _STEPS * step)
                    lines += wgmma.product(result, a, (weights, 32 * step), adds=True, a_transposed=True)
            lines.append(wgmma.COMMIT)
        return lines

    def free_block(self, leader: str) -> list[str]:
        """Gives the groups of block v back as their products end."""
        lines, groups = [], len(self.problem.groups)
        for group in range(groups):
            lines += [wgmma.wait_group(groups - 1 - group), wgmma.arrive_if(leader, f"bv{group}", 4 * FREE)]
        return lines

    # Softmax.

    def softmax(self, parity: Value, scores, top, total):
        """What weights are relative to, this thread's sums of them, whether that maximum grew, and what by.

        The weights go to their tile. As in hopper_attend they are relative to a maximum that may be too low by _SLACK,
        so that warps rarely have to tell each other theirs.
        """
        highest = [simt.greater(*scores[4 * (i // 2) + i % 2 :: 2][:2]) for i in range(self.num_heads)]
        grew = functools.reduce(operator.or_, (x > y + self.slack for x, y in zip(highest, top, strict=True)))
        grew = _any(grew)

        def raised():
            tops = self.over_warps(TOPS, highest, simt.greater)
            tops = [select(x > y + self.slack, x, y) for x, y in zip(tops, top, strict=True)]
            decay = [simt.exp2((y - _finite(x)) * self.problem.scale_log2) for x, y in zip(tops, top, strict=True)]
            return [*tops, *decay]

        one = as_value(1.0)
        both = simt.branch(grew, raised, lambda: [*top, *[one] * self.num_heads], [*top, *top])
        top, decay = both[: self.num_heads], both[self.num_heads :]
        shift = [_finite(x) * -self.problem.scale_log2 for x in top]
        scale = as_value(self.problem.scale_log2)
        weights = [simt.exp2(simt.fma(x, scale, shift[2 * (i // 4) + i % 2])) for i, x in enumerate(scores)]
        sums = [operator.add(*weights[4 * (i // 2) + i % 2 :: 2][:2]) for i in range(self.num_heads)]
        total = [simt.fma(x, y, z) for x, y, z in zip(total, decay, sums, strict=True)]
        self.store_weights(parity, [simt.pack_bf16(*weights[i : i + 2]) for i in range(0, len(weights), 2)])
        return top, total, grew, decay

    def store_weights(self, parity: Value, packed: Sequence[Value]) -> None:
        """Two words for each eight heads, of the keys of either row, into a tile whose rows are heads."""
        address = self.weights + self.weight_row + parity * self.problem.query_tile_bytes
        while packed:
            count = min(4, len(packed))
            names = ",".join(f"${i + 1}" for i in range(count))
            code = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{names}}};"
            simt.ptx(code, address, *packed[:count], collective=True)
            address, packed = address + 16 * wgmma.ROW_BYTES, packed[count:]

    def publish_weights(self, after: Ring) -> Value:
        """Lets wgmma see the weights of all warps. Returns, for all, whether the whole next key block is there."""
        simt.ptx(wgmma.PROXY_FENCE)
        last = after.of_group(self.problem, len(self.problem.groups) - 1)
        code = (
            "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; "
            f"bar.red.and.pred p, {_BARRIER}, {simt.THREADS}, p; selp.b32 $0, 1, 0, p; }}"
        )
        barrier = self.words + (last.stage << 3) + 4 * FULL
        return simt.ptx(code, barrier, last.parity, result=simt.i32(), collective=True)

    def over_warps(self, array: int, values, combine):
        """Combines each of this thread's heads over all keys of all warps. Uses `array` of the words."""
        for distance in (4, 8, 16):
            values = [combine(x, simt.lane_across(x, distance)) for x in values]
        heads = self.head_numbers()
        with simt.when(self.lane < 4):
            for head, value in zip(heads, values, strict=True):
                self.memory.words[(self.warp * HEADS) + head + array] = value.bits()
        simt.ptx(f"bar.sync {_BARRIER}, {simt.THREADS};", collective=True)
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
        for head, x, y, sink in zip(heads, total, top, sinks, strict=True):
            is_empty = x.equals(0.0)
            safe = select(is_empty, 1.0, x)
            lse = select(is_empty, -math.inf, (y * self.problem.scale_log2 + simt.log2(safe)) * math.log(2.0))
            factor = as_value(1.0) / safe
            if self.problem.splits == 1:
                factor = factor * _kept_by_sink(lse, sink)
            factors.append(factor)
            with simt.when(writes_lse & (head < self.problem.heads)):
                lse_row[head] = lse
        acc = _by_heads(acc, factors)
        if self.problem.splits == 1:
            self.write_bf16(place, acc)
        else:
            self.write_f32(place, acc)

    def row_of(self, array: Pointer, place: Place, width: int) -> Pointer:
        """The start of this row, of this split, in an array [(splits,) rows, heads, width]."""
        return array.row(place.split * self.problem.rows + place.row, self.problem.heads * width)

    def write_bf16(self, place: Place, acc) -> None:
        """Eight bytes a thread. Turned, its words are columns 2 c and 2 c + 1, c = l % 4, of one head, l / 4."""
        out = self.row_of(self.memory.out, place, VALUE_WIDTH)
        is_odd = (self.column & 1).differs(0)
        # Even c get four columns of the first eight, odd ones of the second.
        column = (self.warp << 4) + ((self.column & 1) << 3) + ((self.column >> 1) << 2)
        for j in range(self.problem.columns // 8):
            head = (self.lane >> 2) + 8 * j
            target = out.past((head << 10) + (column << 1))
            for tile in range(VALUE_TILES):
                start = self.num_scores * tile + 4 * j
                words = [_turned(simt.pack_bf16(*acc[start + 2 * i : start + 2 * i + 2])) for i in range(2)]
                other = _across(select(is_odd, words[0], words[1]))
                pair = select(is_odd, other, words[0]), select(is_odd, words[1], other)
                store = f"@p st.global.v2.b32 [$0+{128 * tile}], {{$1,$2}};"
                code = f"{{ .reg .pred p; setp.lt.s32 p, $3, {self.problem.heads}; {store} }}"
                simt.ptx(code, target, *pair, head)

    def write_f32(self, place: Place, acc) -> None:
        out = self.row_of(self.memory.out, place, VALUE_WIDTH)
        for i, head in enumerate(self.head_numbers()):
            target = out.at((head << 9) + self.row)
            for tile in range(VALUE_TILES):
                for half in range(2):
                    store = f"@p st.global.f32 [$0+{256 * tile + 32 * half}], $1;"
                    code = f"{{ .reg .pred p; setp.lt.s32 p, $2, {self.problem.heads}; {store} }}"
                    value = acc[self.num_scores * tile + 4 * (i // 2) + 2 * half + i % 2]
                    simt.ptx(code, target, value, head)


def _by_heads(registers, factors):
    """The registers of products times a factor a head."""
    per_tile = 2 * len(factors)
    return [x * factors[2 * (i % per_tile // 4) + i % 2] for i, x in enumerate(registers)]


def _any(condition: Value) -> Value:
    """Whether it holds in any thread of the warpgroup."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; "
        f"bar.red.or.pred p, {_BARRIER}, {simt.THREADS}, p; selp.b32 $0, 1, 0, p; }}"
    )
    return simt.ptx(code, select(condition, 1, 0), result=simt.i32(), collective=True).differs(0)


def _turned(word: Value) -> Value:
    """The transposed 8x8 matrix of bf16."""
    return simt.ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", word, result=simt.i32(), collective=True)


def _across(word: Value) -> Value:
    """The word of the lane whose number differs in the lowest bit."""
    return simt.ptx("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", word, result=simt.i32(), collective=True)


def _kept_by_sink(lse: Value, sink: Value) -> Value:
    """merge.kept_by_sink."""
    share = as_value(1.0) / (simt.exp2((sink - lse) * LOG2E) + 1.0)
    return select(sink.equals(-math.inf), 1.0, share)


def _finite(x: Value) -> Value:
    """0 for the maximum of no key, -inf, with which -inf - -inf would be NaN."""
    return select(x.equals(-math.inf), 0.0, x)


def _load_if(condition: Value, source: Pointer, otherwise: float) -> Value:
    return simt.branch(condition, lambda: [source[0]], lambda: [as_value(otherwise)], [as_value(otherwise)])[0]
