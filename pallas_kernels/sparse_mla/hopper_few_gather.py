"""The gathering warpgroup of a team of few heads: key block after key block into the ring, as stages come free."""

from collections.abc import Callable, Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import BLOCK
from pallas_kernels.sparse_mla.hopper_few_block import (
    FREE,
    FULL,
    MASKS,
    QUERIES_FREE,
    QUERIES_FULL,
    FewProblem,
    Memory,
    Place,
    Ring,
    first_item,
    lane_of_row,
    load_id,
    place_of,
    team_of,
)
from pallas_kernels.sparse_mla.wgmma import ROW_BYTES, TILE_BYTES

_LANES = 8  # that copy a row, 16 bytes of every tile each
_LINES = simt.THREADS // _LANES


def gather(problem: FewProblem, memory: Memory) -> None:
    """All that the warpgroup does."""
    team = team_of(problem)
    _Gathering(problem, memory.of_team(problem, team), team).run()


class _Gathering:
    """Eight lanes copy `per_thread` neighbouring rows of a block, each its chunk `lane % 8`."""

    per_thread = BLOCK // _LINES

    def __init__(self, problem: FewProblem, memory: Memory, team: Value):
        self.problem, self.memory = problem, memory
        self.first_item = first_item(problem, team)
        # Not the low bits of the block's thread number: with those, 8 heads of bf16 keys take 4 % longer.
        thread = simt.thread() - (team + problem.teams) * simt.THREADS
        self.warp, self.lane = thread >> 5, thread & 31
        self.chunk, self.line = thread & (_LANES - 1), thread >> 3
        self.rows = [self.line * self.per_thread + i for i in range(self.per_thread)]
        self.targets = [self.in_tile(row, self.chunk) for row in self.rows]

    def in_tile(self, row: Value, chunk: Value) -> Value:
        """Where a chunk of a row lies in a tile."""
        return (row << 7) + ((chunk ^ (row & 7)) << 4)

    def run(self) -> None:
        """Item by item; the indices of a block are loaded when the one before it is taken up, then their pages."""

        def one_item(item, round_, *state):
            place = place_of(problem, memory, item)
            next_place = place_of(problem, memory, simt.minimum(item + step, problem.items - 1))

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
            return [item + step, round_ ^ 1, *state]

        problem, memory, item = self.problem, self.memory, self.first_item
        step = problem.blocks * problem.teams
        # There may be fewer items than teams.
        source = place_of(problem, memory, simt.minimum(item, problem.items - 1))
        ids = self.load_ids(source, as_value(0))
        ids = self.rows_of(ids, self.load_pages(source, ids))
        init = [item, 0, 0, 0, *ids, 0, 0, 0]
        _, _, _, _, *state = simt.while_loop(lambda item, *_: item < problem.items, one_item, init)
        self.finish(state[self.per_thread :])

    def bring(
        self, ring: Ring, ids: Sequence[Value], before: Sequence[Value], meanwhile: Callable[[], None]
    ) -> Sequence[Value]:
        """Begins to bring a key block, whose rows `ids` name; zeros for those that name none.

        The groups of the block before are handed over behind those of this one, or earlier when these have no room yet.
        before: what this returned of that block.
        meanwhile: called before the last group.
        """
        valid, rows = self.named(ids)
        exists, last = before[0], len(self.problem.groups) - 1
        for group in range(last + 1):
            place = ring.of_group(self.problem, group)
            is_free = self.is_free(place)
            with simt.when((exists & (is_free ^ 1)).differs(0)):
                self.hand_over(before, group, pending=last)
            self.wait_free(place)
            if group == 0:
                self.write_mask(ring, valid)
                if self.problem.is_e4m3:
                    self.copy_scales(ring, valid, rows)
            if group == last:
                meanwhile()
            self.copy_group(place, group, valid, rows)
            simt.ptx("cp.async.commit_group;")
            with simt.when((exists & is_free).differs(0)):
                self.hand_over(before, group, pending=last + 1)
        return [as_value(1), ring.stage, ring.parity]

    def finish(self, before: Sequence[Value]) -> None:
        """Hands the last block over."""
        last = len(self.problem.groups) - 1
        for group in range(last + 1):
            self.hand_over(before, group, pending=last - group)

    def hand_over(self, before: Sequence[Value], group: int, *, pending: int) -> None:
        """Hands a group over, when at most `pending` later ones are still on their way."""
        _, stage, parity = before
        simt.ptx(f"cp.async.wait_group {pending};")
        place = Ring(stage, parity).of_group(self.problem, group)
        if not self.problem.is_e4m3:  # those the math warpgroup loads itself
            simt.ptx(wgmma.PROXY_FENCE)
        simt.arrive(self.memory.words.at((place.stage << 1) + FULL))

    def copy_group(self, place: Ring, group: int, valid: Sequence[Value], rows: Sequence[Value]) -> None:
        """Starts copies of the tiles of a group into its stage."""
        problem, tiles, base = self.problem, self.problem.groups[group], self.stage(place)
        value, count = self.memory.value.past(self.chunk << 4), min(len(tiles), problem.value_tiles - tiles[0])
        for ok, row, target in zip(valid, rows, self.targets, strict=True):
            if count:
                source = value.row(row, problem.value_stride)
                _copy(base + target, TILE_BYTES, source, ROW_BYTES * tiles[0], ok, count)
        if count < len(tiles):
            tail = self.memory.tail.past((self.chunk << 4) + problem.tail_start)
            for ok, row, target in zip(valid, rows, self.targets, strict=True):
                _copy(base + target + TILE_BYTES * count, TILE_BYTES, tail.row(row, problem.tail_stride), 0, ok, 1)

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
            self.memory.words[(ring.stage << 2) + self.warp + MASKS] = word

    def stage(self, place: Ring) -> Value:
        """The address of a stage."""
        return self.memory.keys.shared() + place.stage * self.problem.stage_bytes

    def wait_free(self, place: Ring) -> None:
        """Until what a stage held the round before was read; at once in the first."""
        simt.wait_phase(self.memory.words.at((place.stage << 1) + FREE), place.parity ^ 1)

    def copy_scales(self, ring: Ring, valid: Sequence[Value], rows: Sequence[Value]) -> None:
        """Lane i of the first ones of a row those of its i-th row."""
        assert self.memory.scale is not None and self.memory.key_scales is not None
        base = self.memory.key_scales.shared() + ring.stage * self.problem.scale_bytes
        ok, row = valid[0], rows[0]
        for i in range(1, self.per_thread):
            is_own = self.chunk.equals(i)
            ok, row = select(is_own, select(valid[i], 1, 0), select(ok, 1, 0)).differs(0), select(is_own, rows[i], row)
        with simt.when(self.chunk < self.per_thread):
            _copy(base + ((self.rows[0] + self.chunk) << 4), 0, self.memory.scale.row(row, 4), 0, ok, 1)

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
        for first in range(0, problem.columns, _LINES):
            row = self.line + first
            is_head = row < problem.heads
            source = heads.row(select(is_head, row, 0), width).past(self.chunk << 4)
            target = base + self.in_tile(row, self.chunk)
            with simt.when(row < problem.columns):
                _copy(target, problem.query_tile_bytes, source, 0, is_head, problem.query_tiles)
        if problem.is_e4m3:  # which threads convert
            simt.ptx("cp.async.wait_all;")
            simt.arrive(self.memory.words.at(QUERIES_FULL))
        else:
            simt.arrive_after_copies(self.memory.words.at(QUERIES_FULL))


def _copy(target: Value, stride: int, source: Pointer, start: int, is_valid: Value, count: int) -> None:
    """Starts copies of 16 bytes each to `count` tiles, `stride` apart, from `start` bytes on, a tile's 128 apart.

    Zeros where that is not valid.
    """
    copy = "cp.async.cg.shared.global.L2::128B"
    lines = [f"{copy} [$0+{stride * i}], [$1+{start + ROW_BYTES * i}], 16, $2;" for i in range(count)]
    simt.ptx("\n".join(lines), target, source, select(is_valid, 16, 0))
