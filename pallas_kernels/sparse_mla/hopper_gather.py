"""The gathering warpgroups of a block: queries, then pair after pair of key blocks as halves of the buffers come free.

The keys of a block may lie in any order.
"""

import functools
from collections.abc import Mapping, Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.sparse_mla.hopper_block import (
    BLOCK,
    BUFFER_BYTES,
    HALF_TILES,
    HAS_NO_NORM,
    MASKS,
    MATH_THREADS,
    NORMS,
    PAIR,
    QUERIES_FULL,
    SCALES,
    SHIFT,
    TAIL_TILES,
    VALUE_TILES,
    VALUE_WIDTH,
    Memory,
    Place,
    Problem,
    of_eights,
    place_of,
    positions_of,
)
from pallas_kernels.sparse_mla.hopper_e4m3 import bf16_times, load_shared, pack_f16, store_as_f16, store_shared
from pallas_kernels.sparse_mla.rows import SCALE_BLOCK
from pallas_kernels.sparse_mla.wgmma import ROW_BYTES, TILE_BYTES

# Halves (buffer, half) in the order in which the scores want them, which is the order in which they come free. The tail
# tile goes with the first columns of its buffer.
_HALVES = ((0, 0), (1, 1), (0, 1), (1, 0))
_SCALES = VALUE_WIDTH // SCALE_BLOCK
# Bits of floats between which a scale needs no norm: from 2^-20 to 1.
_LEAST, _ONE = (127 - 20) << 23, 127 << 23
_NORMS = 119  # exponents of norms from the negative of this to this


def gather(problem: Problem, memory: Memory) -> None:
    """All that a gathering warpgroup does."""
    place = place_of(problem, memory)
    (_Converting if problem.is_e4m3 else _Copying)(problem, memory, place).stream()


class _Gathering:
    """What both kinds of keys need. Eight lanes copy a row, each 16 bytes of every tile, its chunk `tid % 8`.

    A warp has 8 or 16 rows of a tile; its lanes 8a..8a+7 take rows 8n + 2a + s. These hold the keys that neighbouring
    indices of the block name.
    """

    def __init__(self, problem: Problem, memory: Memory, place: Place):
        self.problem, self.memory, self.place = problem, memory, place
        self.eights = 2 // problem.gather_warpgroups  # of rows, a warp's
        self.each = 2 * self.eights
        self.ids = memory.indices.row(place.row, problem.topk)
        if problem.page_size:
            assert memory.table is not None
            request = place.row // problem.queries
            self.table = memory.table.row(request, problem.table_width)
            self.seq_len = positions_of(problem, memory, request)

    def lane(self) -> "_Lane":
        """Read anew, so that nothing of it takes registers meanwhile."""
        return _Lane(self.eights)

    def copy_queries(self) -> None:
        width = 2 * self.problem.width
        rows = self.memory.q.row(self.place.row * self.problem.heads + self.place.head, width)
        base = self.memory.queries.shared()
        lane = self.lane()
        for row, target in zip(lane.rows, lane.places(lane.chunk), strict=True):
            is_head = (self.place.head + row) < self.problem.heads
            source = rows.row(select(is_head, row, 0), width).past(lane.chunk << 4)
            _copy(base + target, source, is_head, _lines(range(VALUE_TILES + self.problem.tail_tiles)))
        simt.arrive_after_copies(self.memory.words.at(QUERIES_FULL))

    def stream(self) -> None:
        def body(pair, *ids):
            keys = [_Keys(self.problem, ids[self.each * buffer : self.each * (buffer + 1)]) for buffer in range(2)]
            return [pair + 1, *self.bring(pair, keys)]

        ids = self.load_ids(as_value(0))
        self.copy_queries()
        ids = self.rows_of(ids, self.load_pages(ids))
        simt.while_loop(lambda pair, *_: pair < self.place.pairs, body, [0, *ids])

    def bring(self, pair: Value, keys: "list[_Keys]") -> list[Value]:
        """Fills both buffers with a pair of key blocks. Returns the indices of the next pair."""
        raise NotImplementedError

    def load_ids(self, pair: Value) -> list[Value]:
        """This thread's indices of either block of a pair, -1 past the limit."""
        lane = self.lane()
        first = (self.place.first + pair) * PAIR + lane.warp_row + lane.group * self.each
        code = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
        lanes = [first + (BLOCK * block + i) for block in range(2) for i in range(self.each)]
        return [simt.ptx(code, self.ids.at(x), x, self.place.limit, result=simt.i32()) for x in lanes]

    def load_pages(self, ids: Sequence[Value]) -> list[Value]:
        """The pages of positions, -1 for none; of rows nothing."""
        if not self.problem.page_size:
            return []
        code = "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
        pages = [self.table.at(x // self.problem.page_size) for x in ids]
        return [simt.ptx(code, page, x, self.seq_len, result=simt.i32()) for page, x in zip(pages, ids, strict=True)]

    def rows_of(self, ids: list[Value], pages: list[Value]) -> list[Value]:
        """The rows that indices name, -1 for none."""
        size = self.problem.page_size
        if not size:
            return ids
        is_page = [page.below(self.problem.num_keys // size) for page in pages]
        rows = [page * size + x % size for page, x in zip(pages, ids, strict=True)]
        return [select(ok, row, -1) for ok, row in zip(is_page, rows, strict=True)]

    def write_mask(self, pair: Value, buffer: int, keys: "_Keys") -> None:
        """This warp's words of the mask, one for eight rows: bit 4j tells whether row j of them is a key."""
        bits = [simt.ballot(ok) & 0x01010101 for ok in keys.valid]
        words = [bits[2 * n] | (bits[2 * n + 1] << 4) for n in range(self.eights)]
        lane = self.lane()
        with simt.when((lane.thread & 31).equals(0)):
            for n, word in enumerate(words):
                self.memory.words[lane.warp * self.eights + of_eights(MASKS, pair, buffer) + n] = word

    def copy_tails(self, buffer: int, keys: "_Keys") -> None:
        lane = self.lane()
        tail = self.memory.tail.past((lane.chunk << 4) + self.problem.tail_start)
        base = self.buffer(buffer) + TAIL_TILES[buffer] * TILE_BYTES
        for ok, row, target in zip(keys.valid, keys.rows, lane.places(lane.chunk), strict=True):
            _copy(base + target, tail.row(row, self.problem.tail_stride), ok, {0: 0})

    def wait_free(self, pair: Value, buffer: int, half: int) -> None:
        """Until half of a buffer was read in the pair before; at once in the first, before which a phase has ended."""
        simt.wait_phase(self.memory.free(buffer, half), (pair + 1) & 1)

    def buffer(self, buffer: int) -> Value:
        return self.memory.keys.shared() + BUFFER_BYTES * buffer


class _Lane:
    """What a thread does in a block of keys."""

    def __init__(self, eights: int):
        self.eights = eights
        self.thread = simt.thread(anew=True) - MATH_THREADS
        self.warp, self.group, self.chunk = self.thread >> 5, (self.thread >> 3) & 3, self.thread & 7
        self.warp_row = self.warp * (8 * eights)
        self.rows = [self.warp_row + (self.group << 1) + (8 * n + s) for n in range(eights) for s in range(2)]

    def places(self, chunk: Value) -> list[Value]:
        """Where a chunk of each of its rows lies in a tile."""
        first = self.warp_row * ROW_BYTES + (self.group << 8) + ((chunk ^ (self.group << 1)) << 4)
        # s is bit 0 of a row's place in the swizzle, and so flips that of the chunk.
        return [((first ^ 16) if s else first) + ROW_BYTES * (8 * n + s) for n in range(self.eights) for s in range(2)]

    @property
    def is_odd(self) -> Value:
        """Whether its e4m3 numbers are of the odd tiles."""
        return self.chunk >> 2

    def pair_places(self) -> list[Value]:
        """Where the chunks lie that its 16 e4m3 numbers of each row become: the one it writes first of either two."""
        return [x + self.is_odd * TILE_BYTES for x in self.places(((self.chunk & 3) << 1) + self.is_odd)]


class _Keys:
    """Which of some indices name a key, and the rows they name, 0 for those that do not."""

    def __init__(self, problem: Problem, ids: Sequence[Value]):
        self.valid = [x.below(problem.num_keys) for x in ids]
        self.rows = [select(ok, x, 0) for ok, x in zip(self.valid, ids, strict=True)]


class _Copying(_Gathering):
    """bf16 rows, which cp.async brings as they are."""

    def bring(self, pair: Value, keys: list[_Keys]) -> list[Value]:
        following = self.load_ids(pair + 1)  # in flight for as long as half of this pair takes, and their pages as well
        pages: list[Value] = []
        lane = self.lane()
        value = self.memory.value.past(lane.chunk << 4)
        places = lane.places(lane.chunk)
        for buffer, half in _HALVES:
            self.wait_free(pair, buffer, half)
            if buffer == half:
                self.write_mask(pair, buffer, keys[buffer])
            elif buffer == 0:
                pages = self.load_pages(following)
            if half == 0 and self.problem.tail_tiles:
                self.copy_tails(buffer, keys[buffer])
            tiles = _lines(range(HALF_TILES * half, HALF_TILES * (half + 1)))
            for ok, row, target in zip(keys[buffer].valid, keys[buffer].rows, places, strict=True):
                _copy(self.buffer(buffer) + target, value.row(row, self.problem.value_stride), ok, tiles)
            simt.arrive_after_copies(self.memory.full(buffer, half))
            simt.arrive(self.memory.full(buffer, half))
        return self.rows_of(following, pages)


class _Converting(_Gathering):
    """e4m3 rows, which cp.async brings and the warp that copied them turns into f16.

    Of either buffer the half that comes free first, the near one, has room for the bytes of both: its tile 2j for the
    near half's columns 128 j .. 128 j + 127, tile 2j + 1 for the far half's. When they are there, the far half's go to
    registers, the near one's become f16 in tiles 2j and 2j + 1, and the others when their half is free. So all of a
    pair is on its way before its scores are wanted.

    A row's 128 bytes lie together, because cp.async is slow at pieces of 16 bytes without neighbours. A lane's 16
    numbers become two chunks. Four of a row's eight lanes fill tile 2j and four tile 2j + 1, these the odd chunk first,
    with which all eight meet all banks.
    """

    def bring(self, pair: Value, keys: list[_Keys]) -> list[Value]:
        tails = self.problem.tail_tiles
        self._fetch(pair, 0, keys[0])
        self._fetch(pair, 1, keys[1])
        following = self.load_ids(pair + 1)
        scales = self._take_scales(pending=1)
        self._copy_scales(keys[1])
        _commit()
        self._convert(pair, 0, *scales)
        if tails:
            self.wait_free(pair, 1, 0)
            self.copy_tails(1, keys[1])
            _commit()
        pages = self.load_pages(following)
        self._convert(pair, 1, *self._take_scales(pending=tails))
        rows = self.rows_of(following, pages)
        self._prefetch(_Keys(self.problem, rows))
        return rows

    def _prefetch(self, keys: _Keys) -> None:
        """Asks for the next pair's rows in the L2 cache: a lane for a line of each value, or for one of the tails."""
        chunk = self.lane().chunk
        is_line, value = chunk < VALUE_WIDTH // ROW_BYTES, self.memory.value.past(chunk << 7)
        has_tail, tail_row = as_value(0), as_value(0)
        for i, (ok, row) in enumerate(zip(keys.valid, keys.rows, strict=True)):
            _prefetch(value.row(row, self.problem.value_stride), ok & is_line)
            is_own = chunk.equals(i)
            has_tail, tail_row = select(is_own, select(ok, 1, 0), has_tail), select(is_own, row, tail_row)
        if self.problem.tail_tiles:
            tail = self.memory.tail.past(as_value(self.problem.tail_start))
            _prefetch(tail.row(tail_row, self.problem.tail_stride), has_tail.differs(0))

    def _fetch(self, pair: Value, buffer: int, keys: _Keys) -> None:
        """Starts copying a buffer's rows when the near half is free."""
        self.wait_free(pair, buffer, buffer)
        self.write_mask(pair, buffer, keys)
        if buffer == 0:
            if self.problem.tail_tiles:
                self.copy_tails(buffer, keys)
            self._copy_scales(keys)
        base, lane = self._near(buffer), self.lane()
        value = self.memory.value.past(lane.chunk << 4)
        columns = [_SCALES // 2 * half + j for j in range(2) for half in (buffer, 1 - buffer)]
        for ok, row, place in zip(keys.valid, keys.rows, lane.places(lane.chunk), strict=True):
            source = value.row(row, self.problem.value_stride)
            _copy(base + place, source, ok, {tile: SCALE_BLOCK * i for tile, i in enumerate(columns)})
        _commit()

    def _copy_scales(self, keys: _Keys) -> None:
        """Starts copying the scales of a buffer's rows, when those of the buffer before have been taken."""
        assert self.memory.scale is not None
        simt.warp_barrier()
        lane = self.lane()
        with simt.when(lane.chunk.equals(0)):
            for place, ok, row in zip(self._scales(lane), keys.valid, keys.rows, strict=True):
                _copy(place, self.memory.scale.row(row, _SCALES), ok, {0: 0})

    def _take_scales(self, *, pending: int) -> tuple[list[list[Value]], Value]:
        """What each row's numbers are multiplied with, two pairs of f16, and the exponent of their norm.

        When at most `pending` later groups of copies are on their way.
        """
        simt.ptx(f"cp.async.wait_group {pending};")
        simt.warp_barrier()  # another lane copied them
        scales = [load_shared(place, 0) for place in self._scales(self.lane())]
        highest = functools.reduce(simt.maximum, (x.bits() & 0x7FFFFFFF for row in scales for x in row))
        highest = simt.warp_maximum(highest)
        is_plain = highest.equals(0) | (highest - _LEAST).below(_ONE - _LEAST)
        norm = select(is_plain, 0, simt.maximum(simt.minimum((highest >> 23) - 126, _NORMS), -_NORMS))
        factor = ((as_value(127 + SHIFT) - norm) << 23).as_float()
        scales = [[x * factor for x in row] for row in scales]
        return [[pack_f16(*row[:2]), pack_f16(*row[2:])] for row in scales], norm

    def _scales(self, lane: _Lane) -> list[Value]:
        """Where the scales of its rows lie."""
        return [self.memory.words.at((row << 2) + SCALES).shared() for row in lane.rows]

    def _convert(self, pair: Value, buffer: int, scales: list[list[Value]], norm: Value) -> None:
        """Converts a buffer, whose bytes are there."""
        near, far = buffer, 1 - buffer
        lane = self.lane()
        sources = [self._near(buffer) + place for place in lane.places(lane.chunk)]
        kept = [[load_shared(source, TILE_BYTES * (2 * j + 1)) for source in sources] for j in range(2)]
        for j in range(2):
            words = [load_shared(source, TILE_BYTES * 2 * j) for source in sources]
            simt.warp_barrier()  # other lanes' numbers come where these were
            self._store(buffer, near, j, words, scales)
        self._write_norm(pair, buffer, norm)
        if near == 0:
            self._divide_tails(buffer, norm)
        simt.arrive(self.memory.full(buffer, near))
        self.wait_free(pair, buffer, far)
        for j in range(2):
            self._store(buffer, far, j, kept[j], scales)
        if far == 0 and self.problem.tail_tiles:
            simt.ptx("cp.async.wait_group 0;")
            self._divide_tails(buffer, norm)
        simt.arrive(self.memory.full(buffer, far))

    def _write_norm(self, pair: Value, buffer: int, norm: Value) -> None:
        """And in the mask whether it is 1."""
        lane, words = self.lane(), self.memory.words
        with simt.when((lane.thread & 31).equals(0)):
            words[lane.warp + of_eights(NORMS, pair, buffer)] = (norm + 127) << 23
            mask = words.at(lane.warp + of_eights(MASKS, pair, buffer)).shared()
            simt.ptx("red.shared.or.b32 [$0], $1;", mask, select(norm.equals(0), HAS_NO_NORM, 0))

    def _divide_tails(self, buffer: int, norm: Value) -> None:
        """Divides the tails of this thread's rows, each thread what it copied, by their norm if that is not 1."""
        if self.problem.tail_tiles:
            with simt.when(norm.differs(0)):
                lane, factor = self.lane(), ((as_value(127) - norm) << 23).as_float()
                for place in lane.places(lane.chunk):
                    address = self.buffer(buffer) + TAIL_TILES[buffer] * TILE_BYTES + place
                    words = [x.bits() for x in load_shared(address, 0)]
                    store_shared(address, [bf16_times(x, factor) for x in words])

    def _store(self, buffer: int, half: int, j: int, words: list[list[Value]], scales: list[list[Value]]) -> None:
        """16 numbers of each row, which share scale j of a half, as f16."""
        base, lane = self.buffer(buffer), self.lane()
        offset = TILE_BYTES * (HALF_TILES * half + 2 * j)
        for i, place in enumerate(lane.pair_places()):
            store_as_f16(base + place, offset, words[i], (scales[i][half], j), lane.is_odd)

    def _near(self, buffer: int) -> Value:
        """Where the half begins that comes free first."""
        return self.buffer(buffer) + TILE_BYTES * HALF_TILES * buffer


def _lines(tiles: range) -> dict[int, int]:
    """For `_copy`, where a row of each tile is a line of the source."""
    return {tile: ROW_BYTES * tile for tile in tiles}


def _copy(target: Value, source: Pointer, is_valid: Value, tiles: Mapping[int, int]) -> None:
    """Starts copies of 16 bytes, or of zeros, into the same place of tiles. tiles: the byte offset of each source."""
    copy = "cp.async.cg.shared.global.L2::128B"
    lines = [f"{copy} [$0+{TILE_BYTES * tile}], [$1+{offset}], 16, $2;" for tile, offset in tiles.items()]
    simt.ptx("\n".join(lines), target, source, select(is_valid, 16, 0))


def _prefetch(source: Pointer, is_wanted: Value) -> None:
    code = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p prefetch.global.L2 [$0]; }"
    simt.ptx(code, source, select(is_wanted, 1, 0))


def _commit() -> None:
    simt.ptx("cp.async.commit_group;")
