"""The math warpgroup of a team of few heads, bf16 keys: scores and weighted values from shared memory.

Of a product's 64 rows a thread holds r = 16 w + l / 4 and r + 8, of every eight columns 2 (l % 4) and the next. Rows
are keys in scores and output columns in the accumulators; columns are heads in both, so a thread's are the same.

While keys come slower than they are used, a block's scores are taken piece by piece as its groups arrive, and all that
is left then is the softmax and the values. When the next block is there already, its scores are started ahead of the
values of this one, so that the softmax runs while the values are on.
"""

import itertools
import math
from collections.abc import Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Value, as_value, select
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import VALUE_TILES, VALUE_WIDTH
from pallas_kernels.sparse_mla.hopper_few_block import (
    FREE,
    FULL,
    QUERIES_FREE,
    QUERIES_FULL,
    FewProblem,
    Memory,
    Place,
    Ring,
)
from pallas_kernels.sparse_mla.hopper_few_warpgroup import Attention, by_heads
from pallas_kernels.sparse_mla.wgmma import TILE_BYTES

_STEPS = 4  # of 16 columns, or keys, in a tile


def attend(problem: FewProblem, memory: Memory) -> None:
    """All that the warpgroup does."""
    _OfBf16(problem, memory, problem.scale_log2).run()


class _OfBf16(Attention):
    def __init__(self, problem: FewProblem, memory: Memory, scale: float):
        super().__init__(problem, memory, scale)
        self.is_leader = select(self.lane.equals(0), 1, 0)
        self.key_tiles, self.query_tiles = wgmma.descriptor(self.keys), wgmma.descriptor(self.queries)

    def item(self, place: Place, round_: Value, ring: Ring, sinks: Sequence[Value]) -> Ring:
        simt.wait_phase(self.memory.words.at(QUERIES_FULL), round_)
        simt.ptx(wgmma.PROXY_FENCE)
        scores = self.first_scores(ring)
        nothing, zero = as_value(-math.inf), as_value(0.0)
        top, total = [nothing] * self.num_heads, [zero] * self.num_heads
        weights, top, total, _, _ = self.softmax(scores, top, total)
        self.store_bf16(as_value(0), weights)
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
            weights, top, total, grew, decay = self.softmax(scores, top, total)
            self.store_bf16((block + 1) & 1, weights)
            acc = self.finish_values(acc, ready, here)
            acc = simt.branch(grew, lambda: by_heads(acc, decay), lambda: acc, acc)
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

        operands = (self.words, self.key_tiles, self.query_tiles, self.mask_address(ring), ring.stage, ring.parity)
        return self.masked_last(wgmma.statement(code, fresh=self.num_scores + 1, operands=operands))

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

        operands = (self.is_leader, ready, self.words, self.key_tiles, self.query_tiles, self.weight_descriptor(parity))
        rings = (self.mask_address(after), here.stage, here.parity, after.stage, after.parity)
        values = wgmma.statement(code, changed=acc, fresh=self.num_scores + 1, operands=(*operands, *rings))
        return values[: self.num_accumulators], self.masked_last(values[self.num_accumulators :])

    def masked_last(self, values: Sequence[Value]) -> list[Value]:
        """Masked scores. values: those, then the word of the mask."""
        return self.masked(values[:-1], values[-1])

    def finish_values(self, acc, ready: Value, here: Ring):
        """Waits for the values where that was left, and gives their groups back."""

        def code(acc, _, operands):
            leader, words, keys, *ring = operands
            return [*self.located("v", words, keys, *ring), *self.free_block(leader)]

        operands = (self.is_leader & ready, self.words, self.key_tiles, here.stage, here.parity)
        return wgmma.statement(code, changed=acc, operands=operands)

    def last_values(self, acc, parity: Value, here: Ring):
        def code(acc, _, operands):
            leader, words, keys, weights, *ring = operands
            return [
                *self.located("v", words, keys, *ring),
                *self.value_block(acc, weights),
                *self.free_block(leader),
            ]

        operands = (self.is_leader, self.words, self.key_tiles, self.weight_descriptor(parity), here.stage, here.parity)
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
        *scores, mask_word = scores
        size, lines = self.problem.query_tile_bytes, []
        for group, tiles in enumerate(self.problem.groups):
            lines += [wgmma.wait_phase(f"bk{group}", 4 * FULL, f"pk{group}"), wgmma.FENCE]
            for step, tile in itertools.product(range(_STEPS), tiles):
                a = (f"dk{group}", TILE_BYTES * (tile - tiles[0]) + 32 * step)
                b = (queries, size * tile + 32 * step)
                lines += wgmma.product(scores, a, b, adds=tile + step > 0)
        return [*lines, wgmma.COMMIT, f"ld.shared.b32 {mask_word}, [{mask}];"]

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

    def store_bf16(self, parity: Value, weights: Sequence[Value]) -> None:
        """The weights into one of their two tiles."""
        packed = [simt.pack_bf16(*weights[i : i + 2]) for i in range(0, len(weights), 2)]
        self.store_weights(self.weights + parity * self.problem.query_tile_bytes, packed)

    def publish_weights(self, after: Ring) -> Value:
        """Lets wgmma see the weights of all warps. Returns, for all, whether the whole next key block is there."""
        simt.ptx(wgmma.PROXY_FENCE)
        last = after.of_group(self.problem, len(self.problem.groups) - 1)
        code = (
            "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; "
            f"bar.red.and.pred p, $3, {simt.THREADS}, p; selp.b32 $0, 1, 0, p; }}"
        )
        barrier = self.words + (last.stage << 3) + 4 * FULL
        return simt.ptx(code, barrier, last.parity, self.barrier, result=simt.i32(), collective=True)

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


def _turned(word: Value) -> Value:
    """The transposed 8x8 matrix of bf16."""
    return simt.ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", word, result=simt.i32(), collective=True)


def _across(word: Value) -> Value:
    """The word of the lane whose number differs in the lowest bit."""
    return simt.ptx("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", word, result=simt.i32(), collective=True)
