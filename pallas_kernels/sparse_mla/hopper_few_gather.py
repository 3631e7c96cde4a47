"""The gathering warpgroups of a block of few heads: key block after key block into the ring, as stages come free."""

from collections.abc import Callable, Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Operand, Pointer, Value, as_value, select
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import BLOCK, VALUE_TILES, VALUE_WIDTH
from pallas_kernels.sparse_mla.hopper_e4m3 import load_shared, store_as_bf16
from pallas_kernels.sparse_mla.hopper_few_block import (
    FREE,
    FULL,
    MASKS,
    MATH_WARPGROUPS,
    QUERIES_FREE,
    QUERIES_FULL,
    FewProblem,
    Memory,
    Place,
    Ring,
    lane_of_row,
    load_id,
    place_of,
)
from pallas_kernels.sparse_mla.rows import SCALE_BLOCK
from pallas_kernels.sparse_mla.wgmma import ROW_BYTES, TILE_BYTES

_SCALES = VALUE_WIDTH // SCALE_BLOCK
_LANES = 8  # that copy a row, 16 bytes of every tile each


def gather(problem: FewProblem, memory: Memory) -> None:
    """All that the warpgroups do."""
    (_Converting if problem.is_e4m3 else _Copying)(problem, memory).run()


class _Gathering:
    """What both kinds of keys need.

    Eight lanes copy `per_thread` neighbouring rows of a block, each its chunk `lane % 8`.
    """

    def __init__(self, problem: FewProblem, memory: Memory):
        self.problem, self.memory = problem, memory
        thread = simt.thread() - simt.THREADS * MATH_WARPGROUPS
        self.warp, self.lane = thread >> 5, thread & 31
        self.chunk, self.line = thread & (_LANES - 1), thread >> 3
        self.lines = problem.gathering_threads // _LANES
        self.per_thread = BLOCK // self.lines
        self.rows = [self.line * self.per_thread + i for i in range(self.per_thread)]
        self.targets = [self.in_tile(row, self.chunk) for row in self.rows]

    def in_tile(self, row: Value, chunk: Value) -> Value:
        """Where a chunk of a row lies in a tile."""
        return (row << 7) + ((chunk ^ (row & 7)) << 4)

    def run(self) -> None:
        """Item by item; the indices of a block are loaded when the one before it is taken up, then their pages."""

        def one_item(item, round_, *state):
            place = place_of(problem, memory, item)
            next_place = place_of(problem, memory, simt.minimum(item + problem.blocks, problem.items - 1))

            def one_block(block, stage, parity, *state):
                ids, before = state[: self.per_thread], state[self.per_thread :]
                is_last = (block + 1).equals(place.count)
                source = Place(*(select(is_last, x, y) for x, y in zip(next_place, place, strict=True)))
                following = self.load_ids(source, select(is_last, 0, block + 1))
                pages: list[Value] = []
                ring = Ring(stage, parity)
                before = self.bring(ring, ids, before, lambda: pages.extend(self.load_pages(source, following)))
                with simt.when(block.equals(0)):  # behind keys, for which there is room earlier
                    self.copy_queries(place, round_)
                ring = ring.after(problem)
                return [block + 1, ring.stage, ring.parity, *self.rows_of(following, pages), *before]

            _, *state = simt.while_loop(lambda block, *_: block < place.count, one_block, [0, *state])
            return [item + problem.blocks, round_ ^ 1, *state]

        problem, memory, item = self.problem, self.memory, simt.block()
        source = place_of(problem, memory, item)
        ids = self.load_ids(source, as_value(0))
        ids = self.rows_of(ids, self.load_pages(source, ids))
        init = [item, 0, 0, 0, *ids, *self.nothing_begun()]
        _, _, _, _, *state = simt.while_loop(lambda item, *_: item < problem.items, one_item, init)
        self.finish(state[self.per_thread :])

    def nothing_begun(self) -> list[Operand]:
        """What `bring` would return of no key block."""
        return [0, 0, 0, *[0.0] * (_SCALES * self.per_thread if self.problem.is_e4m3 else 0)]

    def bring(
        self, ring: Ring, ids: Sequence[Value], before: Sequence[Value], meanwhile: Callable[[], None]
    ) -> Sequence[Value]:
        """Begins to bring a key block, whose rows `ids` name; zeros for those that name none.

        The groups of the block before are handed over behind those of this one, or earlier when these have no room yet.
        before: what this returned of that block.
        meanwhile: called before the last group.
        """
        valid, rows = self.named(ids)
        begun = self.begin(valid, rows)
        exists, last = before[0], len(self.problem.groups) - 1
        for group, tiles in enumerate(self.problem.groups):
            place = ring.of_group(self.problem, group)
            is_free = self.is_free(place)
            with simt.when((exists & (is_free ^ 1)).differs(0)):
                self.hand_over(before, group, pending=last)
            self.wait_free(place)
            if group == 0:
                self.write_mask(ring, valid)
            if group == last:
                meanwhile()
            self.copy_values(self.stage(place), group, valid, rows)
            if tiles[-1] == VALUE_TILES:
                self.copy_tails(self.stage(place) + TILE_BYTES * (len(tiles) - 1), valid, rows)
            simt.ptx("cp.async.commit_group;")
            with simt.when((exists & is_free).differs(0)):
                self.hand_over(before, group, pending=last + 1)
        return [as_value(1), ring.stage, ring.parity, *begun]

    def finish(self, before: Sequence[Value]) -> None:
        """Hands the last block over."""
        last = len(self.problem.groups) - 1
        for group in range(last + 1):
            self.hand_over(before, group, pending=last - group)

    def hand_over(self, before: Sequence[Value], group: int, *, pending: int) -> None:
        """Hands a group over, when at most `pending` later ones are still on their way."""
        _, stage, parity, *begun = before
        simt.ptx(f"cp.async.wait_group {pending};")
        place = Ring(stage, parity).of_group(self.problem, group)
        self.complete(self.stage(place), group, begun)
        simt.ptx(wgmma.PROXY_FENCE)
        simt.arrive(self.memory.words.at((place.stage << 1) + FULL))

    def begin(self, valid: Sequence[Value], rows: Sequence[Value]) -> list[Value]:
        """What `complete` will need for a key block, loads on their way."""
        raise NotImplementedError

    def copy_values(self, base: Value, group: int, valid: Sequence[Value], rows: Sequence[Value]) -> None:
        """Starts copies of the value columns of a group into the stage at `base`."""
        raise NotImplementedError

    def complete(self, base: Value, group: int, begun: Sequence[Value]) -> None:
        """Makes bf16 of what was copied."""
        raise NotImplementedError

    def load_ids(self, place: Place, block: Value) -> list[Value]:
        ids = self.memory.indices.row(place.row, self.problem.topk)
        lane = lane_of_row(place, block, self.rows[0])
        return [load_id(ids, lane + i, place.limit) for i in range(self.per_thread)]

    def load_pages(self, place: Place, ids: Sequence[Value]) -> list[Value]:
        """The pages of positions, -1 for none. Of rows nothing."""
        if self.memory.table is None:
            return []
        table = self.memory.table.row(place.row // self.problem.queries, self.problem.table_width)
        code = "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
        pages = [table.at(x // self.problem.page_size) for x in ids]
        return [simt.ptx(code, x, y, place.seq_len, result=simt.i32()) for x, y in zip(pages, ids, strict=True)]

    def rows_of(self, ids: Sequence[Value], pages: Sequence[Value]) -> Sequence[Value]:
        """The rows of positions on these pages, -1 for none."""
        if not pages:
            return ids
        size = self.problem.page_size
        rows = [page * size + x % size for page, x in zip(pages, ids, strict=True)]
        return [select(x.below(self.problem.num_keys // size), row, -1) for x, row in zip(pages, rows, strict=True)]

    def named(self, ids: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Which indices name a key, and the rows that they name, 0 for those that do not."""
        valid = [x.below(self.problem.num_keys) for x in ids]
        return valid, [select(ok, x, 0) for ok, x in zip(valid, ids, strict=True)]

    def write_mask(self, ring: Ring, valid: Sequence[Value]) -> None:
        """This warp's word of a key block's mask."""
        word = simt.total([(simt.ballot(ok) & 0x01010101) << i for i, ok in enumerate(valid)])
        with simt.when(self.lane.equals(0)):
            self.memory.words[(ring.stage << 3) + self.warp + MASKS] = word

    def stage(self, place: Ring) -> Value:
        """The address of a stage."""
        return self.memory.keys.shared() + place.stage * self.problem.stage_bytes

    def copy_tails(self, base: Value, valid: Sequence[Value], rows: Sequence[Value]) -> None:
        """The tails of the rows into the last tile of a key block, whose address is `base`."""
        tail = self.memory.tail.past((self.chunk << 4) + self.problem.tail_start)
        for ok, row, target in zip(valid, rows, self.targets, strict=True):
            _copy(base + target, TILE_BYTES, tail.row(row, self.problem.tail_stride), 0, ok, 1)

    def wait_free(self, place: Ring) -> None:
        """Until what a stage held the round before was read; at once in the first."""
        simt.wait_phase(self.memory.words.at((place.stage << 1) + FREE), place.parity ^ 1)

    def is_free(self, place: Ring) -> Value:
        """1 where `wait_free` would not wait, else 0."""
        code = "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
        barrier = self.memory.words.at((place.stage << 1) + FREE).shared()
        return simt.ptx(code, barrier, place.parity ^ 1, result=simt.i32())

    def copy_queries(self, place: Place, round_: Value) -> None:
        """When the item before is through with its own."""
        problem = self.problem
        simt.wait_phase(self.memory.words.at(QUERIES_FREE), round_ ^ 1)
        width = 2 * problem.width
        heads = self.memory.q.row(place.row * problem.heads, width)
        base = self.memory.queries.shared()
        for first in range(0, problem.columns, self.lines):
            row = self.line + first
            is_head = row < problem.heads
            source = heads.row(select(is_head, row, 0), width).past(self.chunk << 4)
            target = base + self.in_tile(row, self.chunk)
            with simt.when(row < problem.columns):
                _copy(target, problem.query_tile_bytes, source, 0, is_head, problem.tiles)
        simt.arrive_after_copies(self.memory.words.at(QUERIES_FULL))


class _Copying(_Gathering):
    """bf16 rows, which cp.async brings as they are."""

    def begin(self, valid: Sequence[Value], rows: Sequence[Value]) -> list[Value]:
        return []

    def copy_values(self, base: Value, group: int, valid: Sequence[Value], rows: Sequence[Value]) -> None:
        tiles, value = self.problem.groups[group], self.memory.value.past(self.chunk << 4)
        count = min(len(tiles), VALUE_TILES - tiles[0])
        for ok, row, target in zip(valid, rows, self.targets, strict=True):
            source = value.row(row, self.problem.value_stride)
            _copy(base + target, TILE_BYTES, source, ROW_BYTES * tiles[0], ok, count)

    def complete(self, base: Value, group: int, begun: Sequence[Value]) -> None:
        pass


class _Converting(_Gathering):
    """e4m3 rows, which cp.async brings and the thread that copied them turns into bf16 where they lie.

    A lane's 16 bytes are a quarter of a tile's columns; of the eight lanes of a row, four have an even tile and four
    the odd one after it. As bf16 they are two chunks. The bytes are left in that chunk of the two, even or odd, with
    which the eight lanes meet all banks, and the conversion writes this one first.
    """

    def __init__(self, problem: FewProblem, memory: Memory):
        super().__init__(problem, memory)
        self.is_odd = self.chunk >> 2
        chunk = ((self.chunk & 3) << 1) + self.is_odd
        self.halves = [self.in_tile(row, chunk) + self.is_odd * TILE_BYTES for row in self.rows]

    def begin(self, valid: Sequence[Value], rows: Sequence[Value]) -> list[Value]:
        """The scales of the rows."""
        assert self.memory.scale is not None
        sources = [self.memory.scale.row(row, _SCALES) for row in rows]
        return [x for ok, source in zip(valid, sources, strict=True) for x in _load_if(ok, source)]

    def copy_values(self, base: Value, group: int, valid: Sequence[Value], rows: Sequence[Value]) -> None:
        value = self.memory.value.past(self.chunk << 4)
        for ok, row, target in zip(valid, rows, self.halves, strict=True):
            source = value.row(row, self.problem.value_stride)
            _copy(base + target, 2 * TILE_BYTES, source, ROW_BYTES * 2 * group, ok, 2)

    def complete(self, base: Value, group: int, begun: Sequence[Value]) -> None:
        for i, target in enumerate(self.halves):
            target = base + target
            words = [load_shared(target, 2 * TILE_BYTES * j) for j in range(2)]
            for j in range(2):
                scale = begun[_SCALES * i + 2 * group + j]
                store_as_bf16(target, 2 * TILE_BYTES * j, words[j], scale, self.is_odd)


def _copy(target: Value, stride: int, source: Pointer, start: int, is_valid: Value, count: int) -> None:
    """Starts copies of 16 bytes each to `count` tiles, `stride` apart, from `start` bytes on, a tile's 128 apart.

    Zeros where that is not valid.
    """
    copy = "cp.async.cg.shared.global.L2::128B"
    lines = [f"{copy} [$0+{stride * i}], [$1+{start + ROW_BYTES * i}], 16, $2;" for i in range(count)]
    simt.ptx("\n".join(lines), target, source, select(is_valid, 16, 0))


def _load_if(condition: Value, source: Pointer) -> list[Value]:
    """Four neighbouring floats, or zeros: the scales of no key may be NaN."""

    def code(_, words, operands):
        return [
            f".reg .pred p; setp.ne.s32 p, {operands[1]}, 0;",
            *(f"mov.b32 {word}, 0f00000000;" for word in words),
            f"@p ld.global.nc.v4.f32 {{{','.join(words)}}}, [{operands[0]}];",
        ]

    return wgmma.statement(code, fresh=_SCALES, operands=(source, select(condition, 1, 0)))
