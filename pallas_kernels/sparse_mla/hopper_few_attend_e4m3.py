"""The math warpgroup of a team of few heads, e4m3 keys: they become f16 in registers, wgmma's other source of A.

S^T = K Q^T takes a tile of raw keys, 64 by 128 columns, as `ldmatrix` gives it: the two words that a thread gets of a
chunk's 16 columns are 4 c .. 4 c + 3, c = l % 4, of either of its rows, and become the columns 2 c, 2 c + 1, 2 c + 8,
2 c + 9 of a product. So the queries' columns are put in that order, by sixteens, when they come. O^T = V^T P^T takes
the same tile transposed: a word then has two neighbouring columns of two neighbouring keys, and its columns become the
rows r and r + 8 of a product.

e4m3 numbers are exact in f16, whose products need no scale. The four scales of a key go to its four partial scores,
and to four tiles of weights, one for every 128 output columns. Weights times scales could be too small or too great for
f16. So they are divided by a power of two for each 128 columns, `peaks`, that no scale so far was above by a factor of
more than 16, with which the accumulators are relative to it, as they are to the maximum of the logits. Queries are
brought into f16's range head by head, by powers of two.

Tiles go back when their products have begun: the tail's, whose rope columns are bf16 and no values, amid the scores,
the others amid the values. Loads and conversions of one group of products run beside the group before. Without a second
team the tensor cores would wait for conversions and the softmax for more than half of the time.
"""

import functools
import math
from collections.abc import Callable, Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Value, as_value, select
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import VALUE_TILES, VALUE_WIDTH
from pallas_kernels.sparse_mla.hopper_e4m3 import as_f16, convert_queries, pack_f16
from pallas_kernels.sparse_mla.hopper_few_block import (
    FREE,
    FULL,
    PEAKS,
    QUERIES_FREE,
    QUERIES_FULL,
    UNITS,
    FewProblem,
    Memory,
    Place,
    Ring,
)
from pallas_kernels.sparse_mla.hopper_few_warpgroup import Attention, by_heads
from pallas_kernels.sparse_mla.wgmma import TILE_BYTES

_SCALES = 4
_SLACK = 16.0  # of a scale over its peak
_LEAST, _MOST = 2.0**-100, 2.0**100  # of a peak, whose inverse is a normal number too
_AHEAD_COLUMNS = 16  # at most, where there are registers for a tile loaded ahead, and for A of the first values


def attend(problem: FewProblem, memory: Memory) -> None:
    """All that the warpgroup does."""
    _OfE4m3(problem, memory, 1.0).run()


class _OfE4m3(Attention):
    def __init__(self, problem: FewProblem, memory: Memory, scale: float):
        super().__init__(problem, memory, scale)
        assert self.memory.key_scales is not None
        self.keys, self.key_scales = self.memory.keys.shared(), self.memory.key_scales.shared()
        # For ldmatrix: lanes in eights give rows 0..7 and 8..15 of a chunk, then of the next one; transposed 32 rows.
        row, chunk = (self.warp << 4) + (self.lane & 15), (self.lane >> 4) ^ (self.lane & 7)
        self.score_row = (row << 7) + (chunk << 4)
        self.is_ahead = problem.columns <= _AHEAD_COLUMNS
        self.value_row = (self.lane << 7) + ((self.warp ^ (self.lane & 7)) << 4)

    def item(self, place: Place, round_: Value, ring: Ring, sinks: Sequence[Value]) -> Ring:
        simt.wait_phase(self.memory.words.at(QUERIES_FULL), round_)
        units = self.convert_queries()
        nothing, zero, heads = as_value(-math.inf), as_value(0.0), self.num_heads

        def body(block, stage, parity, *state):
            acc, state = list(state[: self.num_accumulators]), state[self.num_accumulators :]
            top, total, inverses = state[:heads], state[heads : 2 * heads], state[2 * heads :]
            here = Ring(stage, parity)
            scores, scales, begun = self.scores(here, units)
            relative = [x * inverses[i % _SCALES] for i, x in enumerate(scales)]
            exceeds = functools.reduce(simt.greater, map(_magnitude, relative)) > _SLACK
            weights, top, total, grew, decay = self.softmax(scores, top, total, exceeds)

            def rescaled():
                inverses_now = self.inverses_with(scales, inverses)
                by = [new / old for new, old in zip(inverses_now, inverses, strict=True)]
                return [*inverses_now, *self.by_scales(by_heads(acc, decay), by)]

            state = simt.branch(grew, rescaled, lambda: [*inverses, *acc], [*inverses, *acc])
            inverses, acc = state[:_SCALES], state[_SCALES:]
            self.store_f16(weights, [x * inverses[i % _SCALES] for i, x in enumerate(scales)])
            simt.ptx(wgmma.PROXY_FENCE)
            self.sync()
            acc = self.values(acc, here, begun)
            after = here.after(self.problem)
            return [block + 1, after.stage, after.parity, *acc, *top, *total, *inverses]

        sums, tops = [zero] * self.num_accumulators, [nothing] * heads
        inverses = [as_value(1 / _LEAST)] * _SCALES
        init = [0, ring.stage, ring.parity, *sums, *tops, *[zero] * heads, *inverses]
        _, stage, parity, *state = simt.while_loop(lambda block, *_: block < place.count, body, init)
        with simt.when(self.lane.equals(0)):
            simt.arrive(self.memory.words.at(QUERIES_FREE))
        acc, state = state[: self.num_accumulators], state[self.num_accumulators :]
        top, total, inverses = state[:heads], state[heads : 2 * heads], state[2 * heads :]
        acc = self.by_scales(acc, [as_value(1.0) / x for x in inverses])
        self.write(place, acc, top, total, sinks)
        return Ring(stage, parity)

    # Queries.

    def convert_queries(self) -> list[Value]:
        """Returns the units of this thread's heads, which turn their scores into logits in base 2."""
        words, part = self.memory.words, self.lane & 7
        for first in range(0, self.problem.columns, simt.THREADS // 8):
            row = (self.warp << 2) + (self.lane >> 3) + first
            with simt.when(row < self.problem.columns):
                unit = convert_queries(
                    self.memory.queries.shared(),
                    row,
                    part,
                    tile_bytes=self.problem.query_tile_bytes,
                    tail_tiles=self.problem.tail_tiles,
                    interleaved=True,
                )
                with simt.when(part.equals(0)):
                    words[row + UNITS] = (unit * self.problem.scale_log2).bits()
        simt.ptx(wgmma.PROXY_FENCE)
        self.sync()
        return [words[head + UNITS].as_float() for head in self.head_numbers()]

    # Products.

    def scores(self, ring: Ring, units: Sequence[Value]) -> tuple[list[Value], list[Value], list[Value]]:
        """Logits in base 2, -inf for what is no key; the scales of either row; A of the first product of values."""
        tails, size = self.problem.tail_tiles, self.problem.query_tile_bytes

        def code(_, fresh, operands):
            words, keys, row, value_row, queries, mask, scales, stage, parity = operands
            scores, (mask_word, *rest) = fresh[: self.num_scores], fresh[self.num_scores :]
            factors, begun = rest[: 2 * _SCALES], rest[2 * _SCALES :]
            # Of scales in turn.
            partial = [_names("u", self.num_scores * i, self.num_scores) for i in range(2)]
            lines = [
                f".reg .f32 u<{2 * self.num_scores}>; .reg .b16 half<2>;",
                ".reg .b32 barrier, place_of_block, place<4>, raw<32>, turned<8>, a<32>;",
                f"mad.lo.s32 place_of_block, {stage}, {TILE_BYTES}, {keys}; add.s32 place0, place_of_block, {row};",
                *(f"xor.b32 place{i}, place0, {32 * i};" for i in range(1, 4)),
                f"mad.lo.s32 barrier, {stage}, 8, {words};",
            ]

            def load(tile, registers):
                return [
                    f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{','.join(registers[4 * i : 4 * i + 4])}}}, "
                    f"[place{i}+{TILE_BYTES * tile}];"
                    for i in range(4)
                ]

            def add(scale):
                """Partial scores of the columns that share a scale."""
                for i, (score, part) in enumerate(zip(scores, partial[scale % 2], strict=True)):
                    factor = factors[_SCALES * (i // 2 % 2) + scale]
                    if tails or scale:
                        yield f"fma.rn.f32 {score}, {part}, {factor}, {score};"
                    else:
                        yield f"mul.f32 {score}, {part}, {factor};"

            mask_and_scales = [f"ld.shared.b32 {mask_word}, [{mask}];"]
            for i in range(2):
                row_factors = ",".join(factors[_SCALES * i : _SCALES * (i + 1)])
                mask_and_scales.append(f"ld.shared.v4.f32 {{{row_factors}}}, [{scales}+{128 * i}];")

            def arrived(tile):
                return wgmma.wait_phase("barrier", 4 * FULL + 8 * tile, parity)

            def raw(scale):
                return _names("raw", 16 * (scale % 2) * self.is_ahead, 16)

            if tails:
                lines += [arrived(0), *load(0, _names("a", 0, 16)), *mask_and_scales]
            lines += [arrived(tails), *load(tails, raw(0))]
            if tails:
                lines.append(wgmma.FENCE)
                for step in range(4):
                    b = (queries, size * VALUE_TILES + 32 * step)
                    lines += wgmma.product_from_registers(scores, _names("a", 4 * step, 4), b, adds=step > 0)
                lines.append(wgmma.COMMIT)
            else:
                lines += mask_and_scales
            group = tails
            for scale in range(_SCALES):
                wanted = scale + self.is_ahead
                if 0 < wanted < _SCALES:
                    lines += [arrived(tails + wanted), *load(tails + wanted, raw(wanted))]
                for part in range(2):
                    if group > 1:
                        lines.append(wgmma.wait_group(1))
                    if part == 1 and scale > 0:
                        lines += add(scale - 1)
                    first = 16 * (group % 2)
                    for i in range(2):
                        for j in range(2):
                            target = first + 8 * i + 4 * j
                            low, high = raw(scale)[8 * part + 4 * i + 2 * j :][:2]
                            lines += as_f16(low, (f"a{target}", f"a{target + 2}"))
                            lines += as_f16(high, (f"a{target + 1}", f"a{target + 3}"))
                    lines.append(wgmma.FENCE)
                    for step in range(4):
                        a, b = _names("a", first + 4 * step, 4), (queries, size * (2 * scale + part) + 32 * step)
                        adds = part + step > 0
                        lines += wgmma.product_from_registers(partial[scale % 2], a, b, adds=adds, kind="f16")
                    lines.append(wgmma.COMMIT)
                    group += 1
                if tails and scale == 2:  # its products come where those were that scales have been used for
                    lines += _release("barrier", 0)
            if self.is_ahead:  # the first values, while the last products are on
                lines.append(f"add.s32 place0, {value_row}, place_of_block;")
                lines += [*_load_values(0, 0, tails), *_turn_and_convert(0, begun)]
            return [*lines, wgmma.wait_group(0), *add(_SCALES - 1)]

        scales = self.key_scales + ring.stage * self.problem.scale_bytes + (self.row << 4)
        addresses = self.words, self.keys, self.score_row, self.value_row, self.queries, self.mask_address(ring), scales
        operands = (*addresses, ring.stage, ring.parity)
        values = wgmma.statement(code, fresh=self.num_scores + 1 + 2 * _SCALES + 16 * self.is_ahead, operands=operands)
        scores, (mask, *rest) = values[: self.num_scores], values[self.num_scores :]
        scores = [x * units[2 * (i // 4) + i % 2] for i, x in enumerate(scores)]
        return self.masked(scores, mask), rest[: 2 * _SCALES], rest[2 * _SCALES :]

    def values(self, acc: Sequence[Value], ring: Ring, begun: Sequence[Value]) -> list[Value]:
        """acc += V^T P^T. A product's 64 rows are the next 64 columns of the output, two neighbours a thread.

        begun: A of the first product, or nothing.
        """
        tails, size = self.problem.tail_tiles, self.problem.query_tile_bytes

        def code(acc, _, operands):
            words, keys, row, weights, stage, *begun = operands
            lines = [
                ".reg .b32 barrier, place0, place1, raw<16>, turned<8>, a<32>; .reg .b16 half<2>;",
                f"mad.lo.s32 place0, {stage}, {TILE_BYTES}, {keys}; add.s32 place0, place0, {row};",
                "xor.b32 place1, place0, 64;",
                f"mad.lo.s32 barrier, {stage}, 8, {words};",
            ]
            if not begun:
                lines += _load_values(0, 0, tails)
            for tile in range(VALUE_TILES):
                if tile + 1 < VALUE_TILES:
                    lines += _load_values(tile + 1, (tile + 1) % 2, tails)
                if tile > 1:
                    lines.append(wgmma.wait_group(1))
                a = _names("a", 16 * (tile % 2), 16)
                if tile == 0 and begun:
                    a = begun
                else:
                    lines += _turn_and_convert(tile % 2, a)
                lines.append(wgmma.FENCE)
                result = acc[self.num_scores * tile : self.num_scores * (tile + 1)]
                for step in range(4):
                    b = (weights, size * (tile // 2) + 32 * step)
                    lines += wgmma.product_from_registers(result, a[4 * step : 4 * step + 4], b, adds=True, kind="f16")
                lines.append(wgmma.COMMIT)
                if tile % 2:
                    lines += _release("barrier", tails + tile // 2)
            return [*lines, wgmma.wait_group(0)]

        weights = wgmma.descriptor(self.weights)
        operands = (self.words, self.keys, self.value_row, weights, ring.stage, *begun)
        return wgmma.statement(code, changed=acc, operands=operands)

    # Weights.

    def store_f16(self, weights: Sequence[Value], scales: Sequence[Value]) -> None:
        """The weights times each of the four scales of their keys. scales: of either row."""
        for scale in range(_SCALES):
            scaled = [x * scales[_SCALES * (i // 2 % 2) + scale] for i, x in enumerate(weights)]
            packed = [pack_f16(*scaled[i : i + 2]) for i in range(0, len(scaled), 2)]
            self.store_weights(self.weights + scale * self.problem.query_tile_bytes, packed)

    def inverses_with(self, scales: Sequence[Value], inverses: Sequence[Value]) -> list[Value]:
        """What the peaks' inverses are with the scales of a key block."""
        highest = [simt.greater(*map(_magnitude, scales[i::_SCALES])) for i in range(_SCALES)]
        for distance in (4, 8, 16):
            highest = [simt.greater(x, simt.lane_across(x, distance)) for x in highest]
        with simt.when(self.lane.equals(0)):
            for i, x in enumerate(highest):
                self.memory.words[(self.warp << 2) + (PEAKS + i)] = x.bits()
        self.sync()
        found = []
        for i, inverse in enumerate(inverses):
            of_warps = [self.memory.words[PEAKS + _SCALES * warp + i].as_float() for warp in range(simt.WARPS)]
            peak = functools.reduce(simt.greater, of_warps, as_value(_LEAST))
            power = select(peak > _MOST, _MOST, peak).bits() & 0x7F800000
            now = (as_value(254 << 23) - power).as_float()
            found.append(select(now < inverse, now, inverse))
        return found

    def by_scales(self, acc: Sequence[Value], factors: Sequence[Value]) -> list[Value]:
        """Accumulators times a factor for every 128 columns."""
        return [x * factors[i // (2 * self.num_scores)] for i, x in enumerate(acc)]

    # Results.

    def write_bf16(self, place: Place, acc) -> None:
        self.write_pairs(place, acc, 2, lambda low, high: [simt.pack_bf16(low, high)])

    def write_f32(self, place: Place, acc) -> None:
        self.write_pairs(place, acc, 4, lambda low, high: [low, high])

    def write_pairs(self, place: Place, acc, bytes_each: int, packed: Callable[[Value, Value], list[Value]]) -> None:
        """Neighbouring columns, of `bytes_each` bytes, in the words that `packed` makes of them."""
        out = self.row_of(self.memory.out, place, VALUE_WIDTH)
        column = (self.warp << 4) + ((self.lane >> 2) << 1)
        for i, head in enumerate(self.head_numbers()):
            target = out.at((head << 9) + column)
            for tile in range(VALUE_TILES):
                start = self.num_scores * tile + 4 * (i // 2) + i % 2
                words = packed(acc[start], acc[start + 2])
                names = ",".join(f"${j + 2}" for j in range(len(words)))
                kind, names = (".v2.b32", f"{{{names}}}") if len(words) > 1 else (".b32", names)
                store = f"@p st.global{kind} [$0+{64 * bytes_each * tile}], {names};"
                code = f"{{ .reg .pred p; setp.lt.s32 p, $1, {self.problem.heads}; {store} }}"
                simt.ptx(code, target, head, *words)


def _load_values(tile: int, half: int, tails: int) -> list[str]:
    """PTX: 64 columns of all keys as they lie, transposed, to half of the registers raw.

    place0, place1: where a lane's row is in the first tile of a block for even and odd ones.
    """
    at = f"place{tile % 2}+{TILE_BYTES * (tails + tile // 2)}"
    load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    return [
        f"{load} {{{','.join(_names('raw', 8 * half + 4 * i, 4))}}}, [{at}+{TILE_BYTES // 2 * i}];" for i in range(2)
    ]


def _turn_and_convert(half: int, a: Sequence[str]) -> list[str]:
    """PTX: 16 registers of A from what `_load_values` loaded: of words of two columns of two keys pairs of keys."""
    lines = [f"prmt.b32 turned{i}, raw{8 * half + i}, 0, 0x3120;" for i in range(8)]
    return lines + [x for i in range(8) for x in as_f16(f"turned{i}", a[2 * i : 2 * i + 2])]


def _names(kind: str, first: int, count: int) -> list[str]:
    return [f"{kind}{first + i}" for i in range(count)]


def _release(barrier: str, tile: int) -> list[str]:
    """Gives a tile back that this thread has loaded.

    An arrival does not wait for loads that are under way, so it comes after products of what was loaded.
    """
    return [f"mbarrier.arrive.shared::cta.b64 _, [{barrier}+{4 * FREE + 8 * tile}];"]


def _magnitude(x: Value) -> Value:
    return (x.bits() & 0x7FFFFFFF).as_float()
