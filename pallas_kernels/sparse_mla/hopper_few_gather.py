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
_LINES = 32 // _LANES  # rows that a warp copies at once
_ROWS = BLOCK // simt.WARPS  # of a warp


def gather(problem: FewProblem, memory: Memory) -> None:
    """All that the warpgroup does."""
    team = team_of(problem)
    _Gathering(problem, memory.of_team(problem, team), team).run()


class _Gathering:
    """A warp has 16 rows of a block, whose indices its lanes hold. Eight lanes copy a row, each its chunk `lane % 8`.

    The upper lanes hold the indices of the lower ones once more.
    """

    def __init__(self, problem: FewProblem, memory: Memory, team: Value):
        self.problem, self.memory = problem, memory
        self.first_item = first_item(problem, team)
        # Not the low bits of the block's thread number: with those, 8 heads of bf16 keys take 4 % longer.
        thread = simt.thread() - (team + problem.teams) * simt.THREADS
        self.warp, self.lane = thread >> 5, thread & 31
        self.chunk, self.line = self.lane & (_LANES - 1), self.lane >> 3
        self.first_row = self.warp * _ROWS
        self.own_row = self.first_row + (self.lane & (_ROWS - 1))
        # In a tile, of the rows 4 i + line, i even and odd.
        line = (self.first_row + self.line) << 7
        self.targets = [line + ((self.chunk ^ (self.line + _LINES * i)) << 4) for i in range(2)]

    def run(self) -> None:
        """Item by item; the indices of a block are loaded when the one before it is taken up, then their pages."""

        def one_item(item, round_, *state):
            place = place_of(problem, memory, item)
            next_place = place_of(problem, memory, simt.minimum(item + step, problem.items - 1))

            def one_block(block, stage, parity, own, *before):
                is_last = (block + 1).equals(place.count)
                source = Place(*(select(is_last, x, y) for x, y in zip(next_place, place, strict=True)))
                following = self.load_id(source, select(is_last, 0, block + 1))
                pages: list[Value] = []
                ring = Ring(stage, parity)
                before = self.bring(ring, own, before, lambda: pages.extend(self.load_page(source, following)))
                with simt.when(block.equals(0)):  # behind keys, for which there is room earlier
                    self.copy_queries(place, round_)
                ring = ring.after(problem)
                return [block + 1, ring.stage, ring.parity, self.row_of(following, pages), *before]

            _, *state = simt.while_loop(lambda block, *_: block < place.count, one_block, [0, *state])
            return [item + step, round_ ^ 1, *state]

        problem, memory, item = self.problem, self.memory, self.first_item
        step = problem.blocks * problem.teams
        # There may be fewer items than teams.
        source = place_of(problem, memory, simt.minimum(item, problem.items - 1))
        own = self.load_id(source, as_value(0))
        own = self.row_of(own, self.load_page(source, own))
        init = [item, 0, 0, 0, own, 0, 0, 0]
        _, _, _, _, *state = simt.while_loop(lambda item, *_: item < problem.items, one_item, init)
        self.finish(state[1:])

    def bring(self, ring: Ring, own: Value, before: Sequence[Value], meanwhile: Callable[[], None]) -> Sequence[Value]:
        """Begins to bring a key block; zeros for what is no key.

        The groups of the block before are handed over behind those of this one, or earlier when these have no room yet.
        own: the row that this lane's index names.
        before: what this returned of that block.
        meanwhile: called before the last group.
        """
        is_key = own.below(self.problem.num_keys)
        own = select(is_key, own, -1)
        rows = [simt.of_lane(own, self.line + _LINES * i) for i in range(_ROWS // _LINES)]
        exists, last = before[0], len(self.problem.groups) - 1
        for group in range(last + 1):
            place = ring.of_group(self.problem, group)
            is_free = self.is_free(place)
            with simt.when((exists & (is_free ^ 1)).differs(0)):
                self.hand_over(before, group, pending=last)
            self.wait_free(place)
            if group == 0:
                self.write_mask(ring, is_key)
                if self.problem.is_e4m3:
                    self.copy_scales(ring, own)
            if group == last:
                meanwhile()
            self.copy_group(place, group, rows)
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

    def copy_group(self, place: Ring, group: int, rows: Sequence[Value]) -> None:
        """Starts copies of the tiles of a group into its stage."""
        problem, tiles, base = self.problem, self.problem.groups[group], self.stage(place)
        value, count = self.memory.value.past(self.chunk << 4), min(len(tiles), problem.value_tiles - tiles[0])
        bases = [base + x for x in self.targets]
        if count:
            for i, row in enumerate(rows):
                source = value.row(simt.maximum(row, 0), problem.value_stride)
                at = _LINES * ROW_BYTES * i
                _copy(bases[i % 2], source, row >= 0, at=at, start=ROW_BYTES * tiles[0], count=count)
        if count < len(tiles):
            tail = self.memory.tail.past((self.chunk << 4) + problem.tail_start)
            for i, row in enumerate(rows):
                source = tail.row(simt.maximum(row, 0), problem.tail_stride)
                _copy(bases[i % 2], source, row >= 0, at=TILE_BYTES * count + _LINES * ROW_BYTES * i)

    def load_id(self, place: Place, block: Value) -> Value:
        ids = self.memory.indices.row(place.row, self.problem.topk)
        return load_id(ids, lane_of_row(place, block, self.own_row), place.limit)

    def load_page(self, place: Place, position: Value) -> list[Value]:
        """The page of a position, -1 for none. Of rows nothing."""
        if self.memory.table is None:
            return []
        table = self.memory.table.row(place.row // self.problem.queries, self.problem.table_width)
        code = "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
        return [
            simt.ptx(code, table.at(position // self.problem.page_size), position, place.seq_len, result=simt.i32())
        ]

    def row_of(self, index: Value, pages: Sequence[Value]) -> Value:
        """The row of a position on this page, -1 for none."""
        if not pages:
            return index
        size, (page,) = self.problem.page_size, pages
        return select(page.below(self.problem.num_keys // size), page * size + index % size, -1)

    def write_mask(self, ring: Ring, is_key: Value) -> None:
        """This warp's word of a key block's mask."""
        word = simt.ballot(is_key)
        with simt.when(self.lane.equals(0)):
            self.memory.words[(ring.stage << 2) + self.warp + MASKS] = word

    def stage(self, place: Ring) -> Value:
        """The address of a stage."""
        return self.memory.keys.shared() + place.stage * self.problem.stage_bytes

    def wait_free(self, place: Ring) -> None:
        """Until what a stage held the round before was read; at once in the first."""
        simt.wait_phase(self.memory.words.at((place.stage << 1) + FREE), place.parity ^ 1)

    def copy_scales(self, ring: Ring, own: Value) -> None:
        """A lane copies those of the row that its index names."""
        assert self.memory.scale is not None and self.memory.key_scales is not None
        target = self.memory.key_scales.shared() + ring.stage * self.problem.scale_bytes + (self.own_row << 4)
        with simt.when(self.lane < _ROWS):
            _copy(target, self.memory.scale.row(simt.maximum(own, 0), 4), own >= 0)

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
        base, line, step = self.memory.queries.shared(), (self.warp << 2) + self.line, simt.WARPS * _LINES
        for first in range(0, problem.columns, step):
            row = line + first
            is_head = row < problem.heads
            source = heads.row(select(is_head, row, 0), width).past(self.chunk << 4)
            target = base + (row << 7) + ((self.chunk ^ (row & 7)) << 4)
            with simt.when(row < problem.columns):
                _copy(target, source, is_head, count=problem.query_tiles, stride=problem.query_tile_bytes)
        if problem.is_e4m3:  # which threads convert
            simt.ptx("cp.async.wait_all;")
            simt.arrive(self.memory.words.at(QUERIES_FULL))
        else:
            simt.arrive_after_copies(self.memory.words.at(QUERIES_FULL))


def _copy(
    target: Value,
    source: Pointer,
    is_valid: Value,
    *,
    at: int = 0,
    start: int = 0,
    count: int = 1,
    stride: int = TILE_BYTES,
) -> None:
    """Starts copies of 16 bytes each to `count` tiles, `stride` apart, from `start` bytes on, a tile's 128 apart.

    at: bytes from the target on. Zeros where that is not valid.
    """
    copy = "cp.async.cg.shared.global.L2::128B"
    lines = [f"{copy} [$0+{at + stride * i}], [$1+{start + ROW_BYTES * i}], 16, $2;" for i in range(count)]
    simt.ptx("\n".join(lines), target, source, select(is_valid, 16, 0))
