"""The two math warpgroups of a block: scores, softmax and weighted values, in the schedule of `hopper_block`.

Of a warpgroup's 64 rows, which are heads, a thread holds two, r = 16 w + l / 4 and r + 8, of every eight columns two.
"""

import functools
import math
import operator
from collections.abc import Sequence

from jaxlib.mlir.dialects import arith

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import (
    BUFFER_BYTES,
    HALF_TILES,
    HEADS,
    MASKS,
    MATH_THREADS,
    QUERIES_FULL,
    TAIL_TILES,
    TOPS,
    TOTALS,
    VALUE_TILES,
    VALUE_WIDTH,
    WEIGHTS_TILE,
    Memory,
    Problem,
    free_word,
    full_word,
    place_of,
    thread_of_warpgroup,
)
from pallas_kernels.sparse_mla.merge import LOG2E
from pallas_kernels.sparse_mla.wgmma import TILE_BYTES

_ACCUMULATORS = 128  # of a thread: two rows of 256 columns, a quarter of each
_SCORES = 32
_ALL_VALID = 0x11111111  # a word of the mask
_SLACK = 8.0
# Named barriers; the number of the warpgroup that arrives is added, the other one waits. Pallas takes low numbers.
_TOP_READY = 8
_WEIGHTS_READY = 10
_TOTALS_READY = 12


def attend(problem: Problem, memory: Memory, side: int) -> None:
    """All that math warpgroup `side` does."""
    results = _Products(problem, memory, side).stream()
    _Results(problem, memory, side).write(*results)


class _Warpgroup:
    """Warpgroup `side`, which scores buffer `side` and owns that half of the output's columns."""

    def __init__(self, problem: Problem, memory: Memory, side: int):
        self.problem, self.memory, self.side = problem, memory, side
        self.other = 1 - side
        thread = thread_of_warpgroup(anew=True)
        self.lane, self.warp = thread & 31, thread >> 5
        self.row = (self.warp << 4) + (self.lane >> 2)
        self.column = self.lane & 3
        # A row of a tile for stmatrix: lanes in eights give rows 0..7 and 8..15 of one 16-byte chunk and of the next.
        row = (self.warp << 4) + (self.lane & 15)
        self.tile_row = (row << 7) + (((self.lane >> 4) ^ (self.lane & 7)) << 4)

    def store_tile(self, tile: Value, packed: Sequence[Value]) -> None:
        """64 columns of this warpgroup's 64 rows, 16 registers of bf16 pairs, into a tile."""
        address = tile + self.tile_row
        for i in range(4):
            code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
            simt.ptx(code, address ^ (32 * i), *packed[4 * i : 4 * i + 4], collective=True)

    def read(self, array: int, i: int) -> Value:
        """Of 64 floats in Memory.words, the one of this thread's row i."""
        return self.memory.words[self.row + (array + 8 * i)].as_float()

    def write_rows(self, array: int, values: Sequence[Value]) -> None:
        with simt.when(self.column.equals(0)):
            for i, value in enumerate(values):
                self.memory.words[self.row + (array + 8 * i)] = value.bits()


class _Products(_Warpgroup):
    """Goes over all keys of the block's split."""

    def __init__(self, problem: Problem, memory: Memory, side: int):
        super().__init__(problem, memory, side)
        self.is_leader = select(self.lane.equals(0), 1, 0)
        self.barriers = memory.words.shared()
        keys = wgmma.descriptor(memory.keys.shared())
        self.keys = [keys, keys + (BUFFER_BYTES >> 4)]
        self.queries = wgmma.descriptor(memory.queries.shared())
        # The tiles of the own columns, product by product. With four warpgroups a block ptxas allows an instruction no
        # more than 128 registers.
        tiles = [*range(HALF_TILES * side, HALF_TILES * (side + 1))]
        self.value_tiles = [tiles] if problem.gather_warpgroups == 1 else [tiles[:2], tiles[2:]]

    def stream(self) -> tuple[list[Value], list[Value], list[Value]]:
        """The accumulators, and for both rows what the weights are relative to and this thread's sum of them."""
        # Opaque, because code made for very few pairs takes more registers.
        last = simt.ptx("sub.s32 $0, $1, 1;", place_of(self.problem, self.memory).pairs, result=simt.i32())
        zero, nothing = as_value(0.0), as_value(-math.inf)

        def split(state):
            return state[:_ACCUMULATORS], state[128:130], state[130:132], state[132:]

        def body(pair, *state):
            acc, top, total, scores = self._pair(pair, *split(state), is_last=False)
            return [pair + 1, *acc, *top, *total, *scores]

        init = [as_value(0), *[zero] * _ACCUMULATORS, nothing, nothing, zero, zero, *self._first_scores()]
        state = simt.while_loop(lambda pair, *_: pair < last, body, init)
        acc, top, total, _ = self._pair(last, *split(state[1:]), is_last=True)
        return acc, top, total

    def _first_scores(self) -> list[Value]:
        def code(_, scores, operands):
            barriers, keys, queries, parity = operands
            lines = [wgmma.wait_phase(barriers, 4 * QUERIES_FULL, parity)]
            for step in range(2):
                lines += self._score_half(scores, step, barriers, queries, keys, parity)
            return [*lines, wgmma.wait_group(0)]

        operands = (self.barriers, self.keys[self.side], self.queries, 0)
        return wgmma.statement(code, fresh=_SCORES, operands=operands)

    def _score_half(self, scores, step: int, barriers: str, queries: str, keys: str, parity: str) -> list[str]:
        """Waits for half of this warpgroup's buffer and starts its products. The own half comes first."""
        half = self.side if step == 0 else self.other
        tiles = [(tile, tile) for tile in range(HALF_TILES * half, HALF_TILES * (half + 1))]
        if half == 0 and self.problem.tail_tiles:
            tiles.append((VALUE_TILES, TAIL_TILES[self.side]))
        return [
            wgmma.wait_phase(barriers, 4 * full_word(self.side, half), parity),
            wgmma.PROXY_FENCE,
            wgmma.FENCE,
            *wgmma.scores(scores, queries, keys, tiles, fresh=step == 0),
            wgmma.COMMIT,
        ]

    def _pair(self, pair: Value, acc, top, total, scores, *, is_last: bool):
        """One pair of key blocks, and the scores of the next one's."""
        new_top, weights, decay, total = self._softmax(top, total, scores)
        packed = _packed(weights)
        acc = self._add_own(_rescaled_if_needed(acc, decay), packed)
        if self.side == 0:
            _sync(_TOP_READY + 1)
            final = [self.read(TOPS + HEADS, i) for i in range(2)]
            decay = [simt.exp2(new_top[i] - _finite(final[i])) for i in range(2)]
            total = [total[i] * decay[i] for i in range(2)]
            self._share(_packed(_rescaled(weights, decay)))
            acc, new_top = _rescaled_if_needed(self._free_own(acc, packed), decay), final
        else:
            self._share(packed)
            acc = self._free_own(acc, packed)
        _sync(_WEIGHTS_READY + self.other)
        acc, scores = self._add_other(pair, acc, is_last)
        return acc, new_top, total, scores

    def _softmax(self, top, total, scores):
        """What weights are now relative to, told to the other warpgroup; the weights; how older ones decay; the sums.

        Weights are relative to a maximum of the row, or to one that has become too low by less than _SLACK: they reach
        2^8, which costs bf16 and float32 no precision, and most blocks leave the accumulators as they are.
        """
        scores = self._masked(scores)
        highest = [_quad_maximum(_row_of(scores, i)) for i in range(2)]
        before = top
        if self.side == 1:
            _sync(_TOP_READY)
            before = [self.read(TOPS, i) for i in range(2)]
        scale = as_value(self.problem.scale_log2)
        highest = [x * scale for x in highest]
        new_top = [select(highest[i] > before[i] + _SLACK, highest[i], before[i]) for i in range(2)]
        self.write_rows(TOPS + HEADS * self.side, new_top)
        _arrive(_TOP_READY + self.side)
        shift = [Value(arith.negf(_finite(x).ir)) for x in new_top]
        decay = [simt.exp2(top[i] + shift[i]) for i in range(2)]
        weights = [simt.exp2(simt.fma(x, scale, shift[i // 2 % 2])) for i, x in enumerate(scores)]
        total = [simt.fma(total[i], decay[i], simt.total(_row_of(weights, i))) for i in range(2)]
        return new_top, weights, decay, total

    def _masked(self, scores):
        """Scores with -inf for what is no key."""
        words = [x for i in range(2) for x in self.memory.words.load4(MASKS + 8 * self.side + 4 * i)]
        every = functools.reduce(operator.and_, words)

        def masked():
            own = [word >> (self.column << 3) for word in words]
            return [select((own[i // 4] & (1 << 4 * (i % 2))).differs(0), x, -math.inf) for i, x in enumerate(scores)]

        return simt.branch(every.equals(_ALL_VALID), lambda: scores, masked, scores)

    def _add_own(self, acc, packed):
        """Starts acc += P V of the own buffer."""

        def code(acc, _, operands):
            keys, *packed = operands
            products = wgmma.values_from_registers(acc, packed, keys, self.value_tiles)
            return [wgmma.FENCE, *products, wgmma.COMMIT]

        return wgmma.statement(code, changed=acc, operands=(self.keys[self.side], *packed))

    def _free_own(self, acc, packed):
        """Waits for `_add_own`, which read `packed` until now, and gives the own half of the own buffer back."""

        def code(acc, _, operands):
            leader, barriers, *_ = operands
            return [wgmma.wait_group(0), wgmma.arrive_if(leader, barriers, 4 * free_word(self.side, self.side))]

        return wgmma.statement(code, changed=acc, operands=(self.is_leader, self.barriers, *packed))

    def _add_other(self, pair: Value, acc, is_last: bool):
        """acc += P V of the other buffer, whose own half then goes back; meanwhile the scores of the next pair."""

        def code(acc, scores, operands):
            leader, barriers, other_keys, own_keys, queries, parity = operands
            products = wgmma.values_from_memory(acc, other_keys, WEIGHTS_TILE, other_keys, self.value_tiles)
            lines = [wgmma.FENCE, *products, wgmma.COMMIT]
            if is_last:
                return [*lines, wgmma.wait_group(0)]
            free = wgmma.arrive_if("leader", barriers, 4 * free_word(self.other, self.side))
            # While the next keys are not there, the half comes first.
            lines += [
                ".reg .pred there; .reg .b32 leader;",
                f"mov.b32 leader, {leader};",
                f"mbarrier.test_wait.parity.shared::cta.b64 there, "
                f"[{barriers}+{4 * full_word(self.side, self.side)}], {parity};",
                "vote.sync.all.pred there, there, -1;",
                "@there bra SCORE;",
                wgmma.wait_group(0),
                free,
                "mov.b32 leader, 0;",
                "SCORE:",
            ]
            lines += self._score_half(scores, 0, barriers, queries, own_keys, parity)
            lines += [wgmma.wait_group(1), free]
            lines += self._score_half(scores, 1, barriers, queries, own_keys, parity)
            return [*lines, wgmma.wait_group(0)]

        keys = self.keys[self.other], self.keys[self.side]
        operands = (self.is_leader, self.barriers, *keys, self.queries, (pair + 1) & 1)
        values = wgmma.statement(code, changed=acc, fresh=0 if is_last else _SCORES, operands=operands)
        return values[:_ACCUMULATORS], values[_ACCUMULATORS:]

    def _share(self, packed) -> None:
        """P into its tile of the own buffer, for the other warpgroup."""
        tile = self.memory.keys.shared() + (BUFFER_BYTES * self.side + WEIGHTS_TILE * TILE_BYTES)
        self.store_tile(tile, packed)
        simt.ptx(wgmma.PROXY_FENCE)
        _arrive(_WEIGHTS_READY + self.side)


class _Results(_Warpgroup):
    """Normalises and writes this warpgroup's half of the output; warpgroup 0 writes lse."""

    def __init__(self, problem: Problem, memory: Memory, side: int):
        super().__init__(problem, memory, side)
        self.place = place_of(problem, memory)

    def write(self, acc, top, total) -> None:
        total = self._over_all_keys(total)
        heads = [self.place.head + self.row + 8 * i for i in range(2)]
        factors = []
        for i in range(2):
            is_empty = total[i].equals(0.0)
            safe = select(is_empty, 1.0, total[i])
            lse = select(is_empty, -math.inf, (top[i] + simt.log2(safe)) * math.log(2.0))
            factor = as_value(1.0) / safe
            is_head = heads[i] < self.problem.heads
            if self.problem.splits == 1:
                factor = factor * _kept_by_sink(lse, _load_if(is_head, self.memory.sink.at(heads[i]), 0.0))
            factors.append(factor)
            if self.side == 0:
                with simt.when(is_head & self.column.equals(0)):
                    self._row_of(self.memory.lse, 1)[heads[i]] = lse
        acc = _rescaled(acc, factors)
        if self.problem.splits == 1:
            self._write_bf16(acc)
        else:
            self._write_f32(acc, heads)

    def _over_all_keys(self, total):
        """The sums of all threads of a row, in both warpgroups."""
        for distance in (1, 2):
            total = [x + simt.lane_across(x, distance) for x in total]
        self.write_rows(TOTALS + HEADS * self.side, total)
        simt.ptx(f"bar.sync {_TOTALS_READY}, {MATH_THREADS};", collective=True)
        return [self.read(TOTALS, i) + self.read(TOTALS + HEADS, i) for i in range(2)]

    def _row_of(self, array: Pointer, width: int) -> Pointer:
        """The start of this row, of this split, in an array [(splits,) rows, heads, width]."""
        return array.row(self.place.split * self.problem.rows + self.place.row, self.problem.heads * width)

    def _write_bf16(self, acc) -> None:
        """Through the tiles of the queries, whose time is over, so that a warp writes 512 bytes of a head at a time."""
        tiles = self.memory.queries.shared() + HALF_TILES * TILE_BYTES * self.side
        for tile in range(HALF_TILES):
            self.store_tile(tiles + tile * TILE_BYTES, _packed(acc[32 * tile : 32 * tile + 32]))
        simt.warp_barrier()
        first = self.place.head + (self.warp << 4)
        out = self._row_of(self.memory.out, VALUE_WIDTH).row(first, VALUE_WIDTH)
        out = out.past((self.lane << 4) + VALUE_WIDTH * self.side)
        source = tiles + ((self.lane >> 3) * TILE_BYTES) + (self.warp << 11)
        for row in range(16):
            chunk = ((self.lane & 7) ^ (row & 7)) << 4
            load = f"ld.shared.v4.b32 {{a,b,c,d}}, [$0+{128 * row}];"
            store = f"@p st.global.v4.b32 [$1+{2 * VALUE_WIDTH * row}], {{a,b,c,d}};"
            code = f"{{ .reg .pred p; .reg .b32 a, b, c, d; setp.gt.s32 p, $2, {row}; {load} {store} }}"
            simt.ptx(code, source + chunk, out, as_value(self.problem.heads) - first)

    def _write_f32(self, acc, heads) -> None:
        for i in range(2):
            out = self._row_of(self.memory.out, VALUE_WIDTH).row(heads[i], VALUE_WIDTH)
            out = out.at((self.column << 1) + VALUE_WIDTH // 2 * self.side)
            for group in range(32):
                store = f"@p st.global.v2.f32 [$0+{32 * group}], {{$1,$2}};"
                code = f"{{ .reg .pred p; setp.lt.s32 p, $3, {self.problem.heads}; {store} }}"
                simt.ptx(code, out, *acc[4 * group + 2 * i : 4 * group + 2 * i + 2], heads[i])


def _sync(barrier: int) -> None:
    """Waits for the other warpgroup's arrival, and sees what it wrote to shared memory before."""
    simt.ptx(f"bar.sync {barrier}, {MATH_THREADS};", collective=True)


def _arrive(barrier: int) -> None:
    simt.ptx(f"bar.arrive {barrier}, {MATH_THREADS};", collective=True)


def _row_of(registers, i: int):
    """Of the registers of a product those of the thread's row i."""
    return [*registers[2 * i :: 4], *registers[2 * i + 1 :: 4]]


def _rescaled(registers, factors):
    """The registers of a product times a factor a row."""
    return [x * factors[i // 2 % 2] for i, x in enumerate(registers)]


def _rescaled_if_needed(registers, factors):
    """The same without the work where all rows of a warp have factor 1."""
    is_one = factors[0].equals(1.0) & factors[1].equals(1.0)
    return simt.branch(
        simt.ballot(is_one).equals(-1), lambda: registers, lambda: _rescaled(registers, factors), registers
    )


def _packed(registers):
    """The registers of a product as bf16 pairs, in the order that stmatrix and wgmma's A operand take."""
    return [simt.pack_bf16(*registers[i : i + 2]) for i in range(0, len(registers), 2)]


def _kept_by_sink(lse: Value, sink: Value) -> Value:
    """merge.kept_by_sink."""
    share = as_value(1.0) / (simt.exp2((sink - lse) * LOG2E) + 1.0)
    return select(sink.equals(-math.inf), 1.0, share)


def _finite(x: Value) -> Value:
    """0 for the maximum of no key, -inf, with which -inf - -inf would be NaN."""
    return select(x.equals(-math.inf), 0.0, x)


def _quad_maximum(values) -> Value:
    """Over the four lanes of a row."""
    while len(values) > 1:
        values = [simt.greater(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    for distance in (1, 2):
        values = [simt.greater(values[0], simt.lane_across(values[0], distance))]
    return values[0]


def _load_if(condition: Value, source: Pointer, otherwise: float) -> Value:
    return simt.branch(condition, lambda: [source[0]], lambda: [as_value(otherwise)], [as_value(otherwise)])[0]
