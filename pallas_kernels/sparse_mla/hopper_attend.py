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
from pallas_kernels.softmax import LOG2E
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import (
    BUFFER_BYTES,
    HALF_TILES,
    HAS_NO_NORM,
    HEADS,
    MASKS,
    MATH_THREADS,
    NORMS,
    QUERIES_FULL,
    SHIFT,
    TAIL_TILES,
    TOPS,
    TOPS_READY,
    TOTALS,
    UNITS,
    VALID,
    VALUE_TILES,
    VALUE_WIDTH,
    WEIGHTS_TILE,
    Memory,
    Problem,
    free_word,
    full_word,
    of_eights,
    place_of,
    thread_of_warpgroup,
)
from pallas_kernels.sparse_mla.hopper_e4m3 import convert_queries, pack_f16
from pallas_kernels.sparse_mla.wgmma import TILE_BYTES

_ACCUMULATORS = 128  # of a thread: two rows of 256 columns, a quarter of each
_SCORES = 32
_SLACK = 8.0
# Named barriers; Pallas takes low numbers. To two of them the number of a warpgroup is added: of the one that arrives,
# where the other one waits, and of the one whose own it is.
_WEIGHTS_READY = 8
_TOTALS_READY = 10
_KEYS_READY = 11


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
        self.kind, self.pack = ("f16", pack_f16) if problem.is_e4m3 else ("bf16", simt.pack_bf16)
        # From scores to logits in base 2, for both rows.
        self.scale = self._units() if problem.is_e4m3 else [as_value(problem.scale_log2)] * 2

    def _units(self) -> list[Value]:
        """Of scores of e4m3 keys, for which it converts the queries; each math warpgroup half of the heads."""
        simt.wait_phase(self.memory.words.at(QUERIES_FULL), as_value(0))
        for i in range(2):
            row, part = (self.warp << 2) + (self.lane >> 3) + (32 * self.side + 16 * i), self.lane & 7
            unit = convert_queries(
                self.memory.queries.shared(),
                row,
                part,
                tile_bytes=TILE_BYTES,
                tail_tiles=self.problem.tail_tiles,
                shift=SHIFT,
            )
            with simt.when(part.equals(0)):
                self.memory.words[row + UNITS] = (unit * self.problem.scale_log2).bits()
        simt.ptx(wgmma.PROXY_FENCE)
        _sync(_TOTALS_READY)
        units = [self.read(UNITS, i) for i in range(2)]
        _sync(_TOTALS_READY)  # others come in their place
        return units

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
        tails = [(VALUE_TILES, TAIL_TILES[self.side])] if half == 0 and self.problem.tail_tiles else []
        return [
            wgmma.wait_phase(barriers, 4 * full_word(self.side, half), parity),
            wgmma.PROXY_FENCE,
            wgmma.FENCE,
            *wgmma.scores(scores, queries, keys, tiles, fresh=step == 0, kind=self.kind),
            *wgmma.scores(scores, queries, keys, tails, fresh=False),
            wgmma.COMMIT,
        ]

    def _pair(self, pair: Value, acc, top, total, scores, *, is_last: bool):
        """One pair of key blocks, and the scores of the next one's."""
        new_top, weights, decay, total = self._softmax(pair, top, total, scores)
        packed = _packed(weights, self.pack)
        acc = self._add_own(_rescaled_if_needed(acc, decay), packed)
        if self.side == 0:
            final = self._tops_of_other(pair)
            decay = [simt.exp2(new_top[i] - _finite(final[i])) for i in range(2)]
            total = [total[i] * decay[i] for i in range(2)]
            self._share(_packed(_rescaled(weights, decay), self.pack))
            acc, new_top = _rescaled_if_needed(self._free_own(acc, packed), decay), final
        else:
            self._share(packed)
            acc = self._free_own(acc, packed)
        _sync(_WEIGHTS_READY + self.other)
        acc, scores = self._add_other(pair, acc, is_last)
        return acc, new_top, total, scores

    def _tops_of_other(self, pair: Value) -> list[Value]:
        simt.wait_phase(self.memory.words.at(TOPS_READY + 2 * self.other), pair & 1)
        return [self.read(TOPS + HEADS * self.other, i) for i in range(2)]

    def _softmax(self, pair: Value, top, total, scores):
        """What weights are now relative to, told to the other warpgroup; the weights; how older ones decay; the sums.

        Weights are relative to a maximum of the row, or to one that has become too low by less than _SLACK: they reach
        2^8, which costs bf16 and float32 no precision, and most blocks leave the accumulators as they are.
        """
        scores, is_plain = self._masked(pair, scores)
        highest = self._highest(pair, scores, is_plain)
        before = self._tops_of_other(pair) if self.side == 1 else top
        new_top = [select(highest[i] > before[i] + _SLACK, highest[i], before[i]) for i in range(2)]
        self.write_rows(TOPS + HEADS * self.side, new_top)
        with simt.when(self.column.equals(0)):
            simt.arrive(self.memory.words.at(TOPS_READY + 2 * self.side))
        shift = [Value(arith.negf(_finite(x).ir)) for x in new_top]
        decay = [simt.exp2(top[i] + shift[i]) for i in range(2)]
        weights = [simt.exp2(simt.fma(x, self.scale[i // 2 % 2], shift[i // 2 % 2])) for i, x in enumerate(scores)]
        total = [simt.fma(total[i], decay[i], simt.total(_row_of(weights, i))) for i in range(2)]
        if self.problem.is_e4m3:
            weights = simt.branch(is_plain, lambda: weights, lambda: self._times_norms(pair, weights), weights)
        return new_top, weights, decay, total

    def _masked(self, pair: Value, scores):
        """Scores with -inf for what is no key, and whether nothing was to be done."""
        words = self._of_eights(MASKS, pair)
        every = functools.reduce(operator.and_, words)

        def masked():
            own = [word >> (self.column << 3) for word in words]
            found = self._times_norms(pair, scores) if self.problem.is_e4m3 else scores
            return [select((own[i // 4] & (1 << 4 * (i % 2))).differs(0), x, -math.inf) for i, x in enumerate(found)]

        is_plain = every.equals(VALID + (HAS_NO_NORM if self.problem.is_e4m3 else 0))
        return simt.branch(is_plain, lambda: scores, masked, scores), is_plain

    def _highest(self, pair: Value, scores, is_plain: Value):
        """What weights of all keys may be relative to, in both rows: a logit, of a key with a norm times that."""

        def plain():
            return [_quad_maximum(_row_of(scores, i)) * self.scale[i] for i in range(2)]

        def with_norms():
            more = [simt.log2(x.as_float()) for x in self._of_eights(NORMS, pair)]
            logits = [simt.fma(x, self.scale[i // 2 % 2], more[i // 4]) for i, x in enumerate(scores)]
            return [_quad_maximum(_row_of(logits, i)) for i in range(2)]

        return simt.branch(is_plain, plain, with_norms, scores[:2]) if self.problem.is_e4m3 else plain()

    def _of_eights(self, array: int, pair: Value) -> list[Value]:
        """The words that tell of the own buffer's keys, eight each."""
        first = of_eights(array, pair, self.side)
        return [x for i in range(2) for x in self.memory.words.load4(first + 4 * i)]

    def _times_norms(self, pair: Value, registers):
        """The registers of scores, or of their weights, times the norms of their keys."""
        norms = [x.as_float() for x in self._of_eights(NORMS, pair)]
        return [x * norms[i // 4] for i, x in enumerate(registers)]

    def _add_own(self, acc, packed):
        """Starts acc += P V of the own buffer."""

        def code(acc, _, operands):
            keys, *packed = operands
            products = wgmma.values_from_registers(acc, packed, keys, self.value_tiles, kind=self.kind)
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
            tiles = self.value_tiles
            products = wgmma.values_from_memory(acc, other_keys, WEIGHTS_TILE, other_keys, tiles, kind=self.kind)
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
                f"bar.red.and.pred there, {_KEYS_READY + self.side}, {simt.THREADS}, there;",
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
            factor = as_value(2.0**-SHIFT if self.problem.is_e4m3 else 1.0) / safe
            is_head = heads[i] < self.problem.heads
            if self.problem.splits == 1 and self.memory.sink is not None:
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
            self.store_tile(tiles + tile * TILE_BYTES, _packed(acc[32 * tile : 32 * tile + 32], simt.pack_bf16))
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


def _packed(registers, pack):
    """The registers of a product as pairs, in the order that stmatrix and wgmma's A operand take."""
    return [pack(*registers[i : i + 2]) for i in range(0, len(registers), 2)]


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
