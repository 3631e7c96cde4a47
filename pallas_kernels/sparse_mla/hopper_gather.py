"""The gathering warpgroup of a block: queries, then pair after pair of key blocks as halves of the buffers come free.

The keys of a block may lie in any order.
"""

from collections.abc import Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import (
    BLOCK,
    BUFFER_BYTES,
    HALF_TILES,
    MASKS,
    MATH_THREADS,
    PAIR,
    QUERIES_FULL,
    SCALES,
    TAIL_TILE,
    VALUE_TILES,
    VALUE_WIDTH,
    Memory,
    Place,
    Problem,
    place_of,
)
from pallas_kernels.sparse_mla.rows import SCALE_BLOCK
from pallas_kernels.sparse_mla.wgmma import ROW_BYTES, TILE_BYTES

# Halves (buffer, half) in the order in which the scores want them, which is the order in which they come free. The tail
# tile goes with the second half of its buffer.
_HALVES = ((0, 0), (1, 1), (0, 1), (1, 0))
_SCALES = VALUE_WIDTH // SCALE_BLOCK


def gather(problem: Problem, memory: Memory) -> None:
    """All of the warpgroup's work."""
    place = place_of(problem, memory)
    (_Converting if problem.is_e4m3 else _Copying)(problem, memory, place).stream()


class _Gathering:
    """What both kinds of keys need. Eight lanes copy a row, each 16 bytes of every tile, its chunk `tid % 8`.

    A warp has 16 rows of a tile; its lanes 8a..8a+7 take rows 8n + 2a + s, i = 2n + s in 0..3. Row i holds the key that
    index 16w + 4a + i of the block names, so that a thread's four indices are neighbours.
    """

    def __init__(self, problem: Problem, memory: Memory, place: Place):
        self.problem, self.memory, self.place = problem, memory, place
        thread = simt.thread() - MATH_THREADS
        self.warp, self.lane = thread >> 5, thread & 31
        self.group, self.chunk = (thread >> 3) & 3, thread & 7
        self.rows = [(self.warp << 4) + (self.group << 1) + (8 * n + s) for n in range(2) for s in range(2)]
        self.targets = self.in_rows(self.chunk)
        self.ids = memory.indices.row(place.row, problem.topk)

    def in_rows(self, chunk: Value) -> list[Value]:
        """Where a chunk of each of the four rows lies in a tile."""
        first = (self.warp << 11) + (self.group << 8) + ((chunk ^ (self.group << 1)) << 4)
        # s is bit 0 of a row's place in the swizzle, and so flips that of the chunk.
        return [((first ^ 16) if s else first) + ROW_BYTES * (8 * n + s) for n in range(2) for s in range(2)]

    def copy_queries(self) -> None:
        width = 2 * self.problem.width
        rows = self.memory.q.row(self.place.row * self.problem.heads + self.place.head, width)
        base = self.memory.queries.shared()
        for row, target in zip(self.rows, self.targets, strict=True):
            is_head = (self.place.head + row) < self.problem.heads
            source = rows.row(select(is_head, row, 0), width).past(self.chunk << 4)
            _copy(base + target, source, is_head, range(VALUE_TILES + self.problem.tail_tiles))
        simt.arrive_after_copies(self.memory.words.at(QUERIES_FULL))

    def stream(self) -> None:
        def body(pair, *ids):
            following = self._load_ids(pair + 1)  # in flight for as long as this pair takes
            self.bring(pair, [_Keys(self.problem, ids[4 * buffer : 4 * buffer + 4]) for buffer in range(2)])
            return [pair + 1, *following]

        ids = self._load_ids(as_value(0))
        self.copy_queries()
        simt.while_loop(lambda pair, *_: pair < self.place.pairs, body, [0, *ids])

    def bring(self, pair: Value, keys: "list[_Keys]") -> None:
        """Fills both buffers with a pair of key blocks."""
        raise NotImplementedError

    def _load_ids(self, pair: Value) -> list[Value]:
        """This thread's four indices of either block of a pair, -1 past the limit."""
        first = (self.place.first + pair) * PAIR + (self.warp << 4) + (self.group << 2)
        code = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
        lanes = [first + (BLOCK * block + i) for block in range(2) for i in range(4)]
        return [simt.ptx(code, self.ids.at(x), x, self.place.limit, result=simt.i32()) for x in lanes]

    def write_mask(self, buffer: int, keys: "_Keys") -> None:
        """This warp's words of the mask, one for eight rows: bit 4j tells whether row j of them is a key."""
        bits = [simt.ballot(ok) & 0x01010101 for ok in keys.valid]
        words = [bits[0] | (bits[1] << 4), bits[2] | (bits[3] << 4)]
        with simt.when(self.lane.equals(0)):
            for n, word in enumerate(words):
                self.memory.words[(self.warp << 1) + (MASKS + 8 * buffer + n)] = word

    def copy_tails(self, buffer: int, keys: "_Keys") -> None:
        tail = self.memory.tail.past((self.chunk << 4) + self.problem.tail_start)
        base = self.buffer(buffer) + TAIL_TILE * TILE_BYTES
        for ok, row, target in zip(keys.valid, keys.rows, self.targets, strict=True):
            _copy(base + target, tail.row(row, self.problem.tail_stride), ok, range(1))

    def wait_free(self, pair: Value, buffer: int, half: int) -> None:
        """Until half of a buffer was read in the pair before; at once in the first, before which a phase has ended."""
        simt.wait_phase(self.memory.free(buffer, half), (pair + 1) & 1)

    def tell_full(self, buffer: int, half: int) -> None:
        simt.arrive_after_copies(self.memory.full(buffer, half))
        simt.arrive(self.memory.full(buffer, half))

    def buffer(self, buffer: int) -> Value:
        return self.memory.keys.shared() + BUFFER_BYTES * buffer


class _Keys:
    """Which of some indices name a key, and the rows they name, 0 for those that do not."""

    def __init__(self, problem: Problem, ids: Sequence[Value]):
        self.valid = [x.below(problem.num_keys) for x in ids]
        self.rows = [select(ok, x, 0) for ok, x in zip(self.valid, ids, strict=True)]


class _Copying(_Gathering):
    """bf16 rows, which cp.async brings as they are."""

    def bring(self, pair: Value, keys: list[_Keys]) -> None:
        value = self.memory.value.past(self.chunk << 4)
        for buffer, half in _HALVES:
            self.wait_free(pair, buffer, half)
            if buffer == half:
                self.write_mask(buffer, keys[buffer])
            elif self.problem.tail_tiles:
                self.copy_tails(buffer, keys[buffer])
            tiles = range(HALF_TILES * half, HALF_TILES * (half + 1))
            for ok, row, target in zip(keys[buffer].valid, keys[buffer].rows, self.targets, strict=True):
                _copy(self.buffer(buffer) + target, value.row(row, self.problem.value_stride), ok, tiles)
            self.tell_full(buffer, half)


class _Converting(_Gathering):
    """e4m3 rows, which cp.async brings and the thread that copied them turns into bf16 where they lie.

    A lane's 16 bytes are a quarter of a tile's columns; of the eight lanes of a row, four have an even tile and four
    the odd one after it. As bf16 they are two chunks. The bytes are left in that chunk of the two, even or odd, with
    which the eight lanes meet all banks, and the conversion writes this one first.
    """

    def __init__(self, problem: Problem, memory: Memory, place: Place):
        super().__init__(problem, memory, place)
        self.is_odd = self.chunk >> 2
        chunk = ((self.chunk & 3) << 1) + self.is_odd
        self.halves = [target + self.is_odd * TILE_BYTES for target in self.in_rows(chunk)]
        self.value = memory.value.past(self.chunk << 4)

    def bring(self, pair: Value, keys: list[_Keys]) -> None:
        for step, (buffer, half) in enumerate(_HALVES):
            self._copy_half(pair, buffer, half, keys[buffer])
            if step:  # this half is on its way meanwhile
                self._convert_half(*_HALVES[step - 1], pending=1)
        self._convert_half(*_HALVES[-1], pending=0)

    def _copy_half(self, pair: Value, buffer: int, half: int, keys: _Keys) -> None:
        """Starts copying half of the rows, and their scales, when the half is free."""
        assert self.memory.scale is not None
        self.wait_free(pair, buffer, half)
        if buffer == half:
            self.write_mask(buffer, keys)
        elif self.problem.tail_tiles:
            self.copy_tails(buffer, keys)
        tiles = (HALF_TILES * half, HALF_TILES * half + 2)
        for i, (ok, row, target) in enumerate(zip(keys.valid, keys.rows, self.halves, strict=True)):
            _copy(self.buffer(buffer) + target, self.value.row(row, self.problem.value_stride), ok, tiles, step=64)
            with simt.when(self.chunk.equals(0)):
                source = self.memory.scale.row(row, _SCALES).at(_SCALES // 2 * half)
                copy = f"cp.async.ca.shared.global [$0], [$1], {2 * _SCALES}, $2;"
                simt.ptx(copy, self._scales(buffer, half, i), source, select(ok, 2 * _SCALES, 0))
        simt.ptx("cp.async.commit_group;")

    def _convert_half(self, buffer: int, half: int, *, pending: int) -> None:
        """Converts what was copied, when at most `pending` later halves are still on their way."""
        simt.ptx(f"cp.async.wait_group {pending};")
        simt.warp_barrier()  # for the scales, which another lane copied
        for i, target in enumerate(self.halves):
            scales = _load_shared(self._scales(buffer, half, i), 0, 2)
            target = self.buffer(buffer) + target
            offsets = [TILE_BYTES * (HALF_TILES * half + 2 * j) for j in range(2)]
            words = [_load_shared(target, offset, 4) for offset in offsets]
            for j, offset in enumerate(offsets):
                _store_as_bf16(target, offset, words[j], scales[j], self.is_odd)
        self.tell_full(buffer, half)

    def _scales(self, buffer: int, half: int, i: int) -> Value:
        """Where the two scales of half of row i lie."""
        return self.memory.words.at((self.rows[i] << 1) + (SCALES + 2 * BLOCK * (2 * buffer + half))).shared()


def _copy(target: Value, source: Pointer, is_valid: Value, tiles, *, step: int = ROW_BYTES) -> None:
    """Starts copies of 16 bytes, `step` apart in a row, into the same place of each tile, or of zeros."""
    copy = "cp.async.cg.shared.global.L2::128B"
    lines = [f"{copy} [$0+{TILE_BYTES * tile}], [$1+{step * tile}], 16, $2;" for tile in tiles]
    simt.ptx("\n".join(lines), target, source, select(is_valid, 16, 0))


def _load_shared(address: Value, offset: int, count: int) -> list[Value]:
    """`count` neighbouring words, `offset` bytes further, as floats."""

    def code(_, words, operands):
        return [f"ld.shared.v{count}.b32 {{{','.join(words)}}}, [{operands[0]}+{offset}];"]

    return wgmma.statement(code, fresh=count, operands=(address,))


def _store_as_bf16(target: Value, offset: int, words, scale: Value, is_odd: Value) -> None:
    """16 e4m3 numbers times a scale to two chunks, `target` and the other one 16 bytes away, `offset` bytes further.

    is_odd: 1 where the target is the second of the two.
    """

    def code(_, __, operands):
        first, second, scale, odd, *words = operands
        lines = [
            ".reg .pred odd; .reg .b16 half<2>, number<2>; .reg .b32 word<4>, both, pair<8>; .reg .f32 x<2>;",
            f"setp.ne.s32 odd, {odd}, 0;",
            *(f"selp.b32 word{i}, {words[i ^ 2]}, {words[i]}, odd;" for i in range(4)),
        ]
        for i in range(4):
            lines.append(f"mov.b32 {{half0, half1}}, word{i};")
            for j in range(2):
                lines.append(f"cvt.rn.f16x2.e4m3x2 both, half{j}; mov.b32 {{number0, number1}}, both;")
                lines += [f"cvt.f32.f16 x{k}, number{k}; mul.f32 x{k}, x{k}, {scale};" for k in range(2)]
                lines.append(f"cvt.rn.bf16x2.f32 pair{2 * i + j}, x1, x0;")
        for i, address in enumerate((first, second)):
            pairs = ", ".join(f"pair{4 * i + k}" for k in range(4))
            lines.append(f"st.shared.v4.b32 [{address}+{offset}], {{{pairs}}};")
        return lines

    wgmma.statement(code, operands=(target, target ^ 16, scale, is_odd, *words))
