"""The math warpgroup of a team of few heads, e4m3 keys: they become f16 in registers, operands of `mma`.

wgmma takes them from registers too, but then keeps a warp from all else for 13 cycles a product of however few columns.
So the products are a warp's own, `mma.m16n8k16`. Each warp has 128 columns of all 64 keys, one tile and one scale of
every key, for both of them:

    S^T[64 keys, heads] += K[64, its 128] Q^T        O^T[its 128, heads] += V^T[its 128, 64 keys] P^T

Scores are sums over the warps, which meet in shared memory where the queries were: those of its columns are in a warp's
registers by then. Of these sums, and of the softmax, a warp has 16 keys, to which it adds their rope columns, in bf16.

As `ldmatrix` gives raw keys, the two words that a thread gets of a chunk's 16 columns are 4 c .. 4 c + 3, c = l % 4, of
either of its rows, and become the columns 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of a product. So the queries' columns are put
in that order, by sixteens, when they come. Transposed, a word has two neighbouring columns of two neighbouring keys,
and its columns become the rows r and r + 8 of a product.

e4m3 numbers are exact in f16, whose products need no scale. The four scales of a key go to its four partial scores,
and to four tiles of weights, one for every 128 output columns. Weights times scales could be too small or too great for
f16. So they are divided by a power of two for each 128 columns, `peaks`, that no scale so far was above by a factor of
more than 16, with which the accumulators are relative to it, as they are to the maximum of the logits. Queries are
brought into f16's range head by head, by powers of two.

Two teams issue an instruction every other cycle, for waiting: so the first values are loaded before the softmax.
"""

import functools
import math
from collections.abc import Callable, Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import BLOCK, VALUE_TILES, VALUE_WIDTH
from pallas_kernels.sparse_mla.hopper_e4m3 import as_f16, convert_queries, load_shared, pack_f16, store_shared
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
_NEVER = 0x00010001  # what no pair of e4m3 numbers becomes: f16 has seven bits more
_AHEAD = 2  # chunks that are loaded ahead


def attend(problem: FewProblem, memory: Memory) -> None:
    """All that the warpgroup does."""
    _OfE4m3(problem, memory, 1.0).run()


class _OfE4m3(Attention):
    def __init__(self, problem: FewProblem, memory: Memory, scale: float):
        super().__init__(problem, memory, scale)
        assert self.memory.key_scales is not None
        self.key_scales, self.size = self.memory.key_scales.shared(), problem.query_tile_bytes
        self.eights = problem.columns // 8
        assert 4 * simt.WARPS * BLOCK * problem.columns <= VALUE_TILES * self.size, "partial scores spare the tail"
        eight = self.lane & 7
        # For ldmatrix: lanes in eights give rows 0..7 and 8..15 of a chunk, then of the next one.
        self.score_place = ((self.lane & 15) << 7) + (((self.lane >> 4) ^ eight) << 4)
        self.value_place = (self.lane << 7) + (eight << 4)  # or 32 rows of a chunk
        self.head_place = (eight << 7) + (((self.lane >> 3) ^ eight) << 4)  # or eight rows of four chunks

    # Items.

    def item(self, place: Place, round_: Value, ring: Ring, sinks: Sequence[Value]) -> Ring:
        simt.wait_phase(self.memory.words.at(QUERIES_FULL), round_)
        units = self.convert_queries()
        queries = self.load_queries()
        self.sync()
        nothing, zero, heads = as_value(-math.inf), as_value(0.0), self.num_heads

        def body(block, stage, parity, *state):
            acc, state = list(state[: self.num_accumulators]), state[self.num_accumulators :]
            top, total, inverses = state[:heads], state[heads : 2 * heads], state[2 * heads :]
            here = Ring(stage, parity)
            scores, scales = self.scores(here, queries, units)
            begun = [self.load_values(here, chunk) for chunk in range(_AHEAD)]
            relative = [x * inverses[i % _SCALES] for i, x in enumerate(scales)]
            exceeds = functools.reduce(simt.greater, map(_magnitude, relative)) > _SLACK
            weights, top, total, grew, decay = self.softmax(scores, top, total, exceeds)

            def rescaled():
                now = self.inverses_with(scales, inverses)
                by = self.own(now) / self.own(inverses)
                return [*now, *by_heads(acc, [x * by for x in decay])]

            state = simt.branch(grew, rescaled, lambda: [*inverses, *acc], [*inverses, *acc])
            inverses, acc = state[:_SCALES], state[_SCALES:]
            self.store_f16(weights, [x * inverses[i % _SCALES] for i, x in enumerate(scales)])
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
        inverse = as_value(1.0) / self.own(inverses)
        self.write(place, [x * inverse for x in acc], top, total, sinks)
        return Ring(stage, parity)

    def own(self, values: Sequence[Value]) -> Value:
        """This warp's."""
        found = values[0]
        for i, x in enumerate(values[1:], 1):
            found = select(self.warp.equals(i), x, found)
        return found

    # Queries.

    def convert_queries(self) -> list[Value]:
        """Returns the units of this thread's heads, which turn their scores into logits in base 2."""
        words, part = self.memory.words, self.lane & 7
        for first in range(0, self.problem.columns, simt.THREADS // 8):
            row = (self.warp << 2) + (self.lane >> 3) + first
            with simt.when(row < self.problem.columns):
                unit = convert_queries(
                    self.queries,
                    row,
                    part,
                    tile_bytes=self.size,
                    tail_tiles=self.problem.tail_tiles,
                    interleaved=True,
                )
                with simt.when(part.equals(0)):
                    words[row + UNITS] = (unit * self.problem.scale_log2).bits()
        self.sync()
        return [words[head + UNITS].as_float() for head in self.head_numbers()]

    def load_queries(self) -> list[list[list[Value]]]:
        """B of the products of scores, of this warp's columns: for each 16 columns and eight heads."""
        place = self.queries + self.warp * (2 * self.size) + self.head_place
        return [step for tile in range(2) for step in self.load_heads(place, tile * self.size)]

    def load_heads(self, place: Value, offset: int) -> list[list[list[Value]]]:
        """B of four products: for each step and eight heads of a tile's 128 bytes a row."""
        halves = [[_load(place ^ (64 * i), offset + 1024 * j) for j in range(self.eights)] for i in range(2)]
        return [[x[2 * i : 2 * i + 2] for x in half] for half in halves for i in range(2)]

    # Products.

    def scores(self, ring: Ring, queries, units: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Logits in base 2, -inf for what is no key; the scales of either row."""
        stage = self.keys + ring.stage * self.problem.stage_bytes
        simt.wait_phase(self.memory.words.at((ring.stage << 1) + FULL), ring.parity)
        # Where there are registers for them all the while.
        early = self.mask_and_scales(ring) if self.eights == 1 else None
        scores = self.tail_scores(stage)
        place, count = self.queries + (self.lane << 4), self.num_scores // 4
        own = place + self.warp * (512 * count)
        for i, part in enumerate(self.partial_scores(stage + self.warp * TILE_BYTES, queries)):
            for j in range(count):
                store_shared(own, part[4 * j : 4 * j + 4], 512 * (_SCALES * count * i + j))
        mask, scales = early or self.mask_and_scales(ring)
        self.sync()
        own = place + self.warp * (512 * _SCALES * count)
        for i in range(_SCALES):
            part = [x for j in range(count) for x in load_shared(own, 512 * (count * i + j))]
            factors = [scales[_SCALES * (j // 2 % 2) + i] for j in range(self.num_scores)]
            scores = [simt.fma(x, y, z) for x, y, z in zip(part, factors, scores, strict=True)]
        scores = [x * units[2 * (i // 4) + i % 2] for i, x in enumerate(scores)]
        return self.masked(scores, mask), scales

    def mask_and_scales(self, ring: Ring) -> tuple[Value, list[Value]]:
        """The mask's word of this warp's keys, and the four scales of either row."""
        mask = simt.ptx("ld.shared.f32 $0, [$1];", self.mask_address(ring), result=simt.f32())
        place = self.key_scales + ring.stage * self.problem.scale_bytes + (self.row << 4)
        return mask, [x for i in range(2) for x in load_shared(place, 128 * i)]

    def tail_scores(self, stage: Value) -> list[Value]:
        """Of all rope columns, of this warp's 16 keys."""
        scores = [as_value(0.0)] * self.num_scores
        if self.problem.tail_tiles:
            keys = stage + self.score_place + (self.warp << 11)
            b = self.load_heads(self.queries + self.head_place, VALUE_TILES * self.size)
            for step in range(4):
                a = _load(keys ^ (32 * step), TILE_BYTES * self.problem.value_tiles)
                scores = _products(scores, a, b[step], "bf16")
        return scores

    def partial_scores(self, tile: Value, queries) -> list[list[Value]]:
        """Of this warp's columns, of 16 keys each, without their scales."""
        place = tile + self.score_place

        def load(pair):
            """Keys of 32 columns."""
            return [_load(place ^ (32 * pair), 2048 * i) for i in range(4)]

        sums = [[as_value(0.0)] * self.num_scores for _ in range(4)]
        following = load(0)
        for pair in range(4):
            words, following = following, load(pair + 1) if pair < 3 else []
            for step in range(2):
                for i, of_keys in enumerate(words):
                    (a0, a2), (a1, a3) = map(_as_f16, of_keys[2 * step : 2 * step + 2])
                    sums[i] = _products(sums[i], [a0, a1, a2, a3], queries[2 * pair + step], "f16")
        return sums

    def load_values(self, ring: Ring, chunk: int) -> list[Value]:
        """The next 16 columns of all keys, two words for each 16 keys."""
        place = self.keys + ring.stage * self.problem.stage_bytes + self.warp * TILE_BYTES + self.value_place
        return [x for i in range(2) for x in _load(place ^ (16 * chunk), TILE_BYTES // 2 * i, transposed=True)]

    def values(self, acc: Sequence[Value], ring: Ring, begun: Sequence[list[Value]]) -> list[Value]:
        """acc += V^T P^T. A product's 16 rows are the next 16 columns of the output, two neighbours a thread.

        begun: columns that are loaded, the first ones.
        """
        weights = self.load_heads(self.weights + self.warp * self.size + self.head_place, 0)
        count, loaded, a = self.num_scores, [*begun], []
        sums = [acc[count * i : count * (i + 1)] for i in range(VALUE_TILES)]
        for chunk in range(VALUE_TILES):
            loaded += [self.load_values(ring, chunk + _AHEAD)] if chunk + _AHEAD < VALUE_TILES else []
            words = loaded.pop(0)
            for step in range(4):
                pairs = [_as_f16(_paired(x)) for x in words[2 * step : 2 * step + 2]]
                a = [x for pair in pairs for x in pair]
                sums[chunk] = _products(sums[chunk], a, weights[step], "f16")
        _arrive_behind(a[-1], self.memory.words.at((ring.stage << 1) + FREE))
        return [x for of_chunk in sums for x in of_chunk]

    # Weights.

    def store_f16(self, weights: Sequence[Value], scales: Sequence[Value]) -> None:
        """The weights times each of the four scales of their keys. scales: of either row."""
        for scale in range(_SCALES):
            scaled = [x * scales[_SCALES * (i // 2 % 2) + scale] for i, x in enumerate(weights)]
            packed = [pack_f16(*scaled[i : i + 2]) for i in range(0, len(scaled), 2)]
            self.store_weights(self.weights + scale * self.size, packed)

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

    # Results.

    def write_bf16(self, place: Place, acc) -> None:
        self.write_pairs(place, acc, 2, lambda low, high: [simt.pack_bf16(low, high)])

    def write_f32(self, place: Place, acc) -> None:
        self.write_pairs(place, acc, 4, lambda low, high: [low, high])

    def write_pairs(self, place: Place, acc, bytes_each: int, packed: Callable[[Value, Value], list[Value]]) -> None:
        """Neighbouring columns, of `bytes_each` bytes, in the words that `packed` makes of them."""
        out = self.row_of(self.memory.out, place, VALUE_WIDTH)
        column = (self.warp << 7) + ((self.lane >> 2) << 1)
        for i, head in enumerate(self.head_numbers()):
            target = out.at((head << 9) + column)
            for chunk in range(VALUE_TILES):
                start = self.num_scores * chunk + 4 * (i // 2) + i % 2
                words = packed(acc[start], acc[start + 2])
                names = ",".join(f"${j + 2}" for j in range(len(words)))
                kind, names = (".v2.b32", f"{{{names}}}") if len(words) > 1 else (".b32", names)
                store = f"@p st.global{kind} [$0+{16 * bytes_each * chunk}], {names};"
                code = f"{{ .reg .pred p; setp.lt.s32 p, $1, {self.problem.heads}; {store} }}"
                simt.ptx(code, target, head, *words)


def _load(place: Value, offset: int, *, transposed: bool = False) -> list[Value]:
    """Four matrices of eight rows by 16 bytes in shared memory."""
    kind = ".trans" * transposed

    def code(_, fresh, operands):
        return [f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{{','.join(fresh)}}}, [{operands[0]}+{offset}];"]

    return wgmma.statement(code, fresh=4, operands=(place,))


def _products(sums: Sequence[Value], a: Sequence[Value], b: Sequence[Sequence[Value]], kind: str) -> list[Value]:
    """sums[16, heads] + A B of 16 columns. b: of each eight heads."""

    def code(sums, _, operands):
        lines = []
        for i in range(len(b)):
            parts = sums[4 * i : 4 * i + 4], operands[:4], operands[4 + 2 * i : 6 + 2 * i], sums[4 * i : 4 * i + 4]
            names = [f"{{{','.join(x)}}}" for x in parts]
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {', '.join(names)};")
        return lines

    return wgmma.statement(code, changed=sums, operands=(*a, *(x for of_eight in b for x in of_eight)))


def _as_f16(word: Value) -> list[Value]:
    """Four e4m3 numbers as two pairs of f16."""

    def code(_, fresh, operands):
        return [".reg .b16 half<2>;", *as_f16(operands[0], fresh)]

    return wgmma.statement(code, fresh=2, operands=(word,))


def _paired(word: Value) -> Value:
    """Of two columns of one key and then of another: both keys of a column, and then of the other."""
    return simt.pure("prmt.b32 $0, $1, 0, 0x3120;", word, result=simt.i32())


def _arrive_behind(pair: Value, barrier: Pointer) -> None:
    """Arrives when the loads have come that a pair was made of, the last ones: an arrival does not wait for loads."""
    code = (
        f"{{ .reg .pred never; .reg .b32 at; setp.eq.s32 never, $0, {_NEVER}; selp.b32 at, 4, 0, never; "
        "add.s32 at, at, $1; mbarrier.arrive.shared::cta.b64 _, [at]; }"
    )
    simt.ptx(code, pair.bits(), barrier.shared())


def _magnitude(x: Value) -> Value:
    return (x.bits() & 0x7FFFFFFF).as_float()
