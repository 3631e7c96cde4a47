"""Sparse MLA of at most 32 heads by one block: what the warpgroups of `hopper_few` share.

Products have 64 rows, so here the rows are keys, and the heads are the columns, of which a product may have any eight:

    S^T[64 keys, heads] = K Q^T        O^T[512, heads] += V^T P^T, 64 rows at a time

Both read the same tiles of keys from shared memory, the second one transposed. Warpgroup 0 multiplies
(`hopper_few_attend`), the others gather (`hopper_few_gather`). Between them is a ring of stages, each with room for a
group of tiles of 64 keys by 64 columns; a key block takes the next two or three stages. A block of the grid goes over
rows, or splits of rows, until there are no more; the ring goes through from one to the next.
"""

import dataclasses
from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.sparse_mla.hopper_arrays import Arrays
from pallas_kernels.sparse_mla.hopper_block import BLOCK, VALUE_TILES, Problem
from pallas_kernels.sparse_mla.wgmma import ROW_BYTES, TILE_BYTES

HEADS = 32  # at most
MATH_WARPGROUPS = 1
_SHARED_BYTES = 232448  # of a block

# Places in Memory.words, four bytes each. mbarriers take two words.
_MOST_STAGES = 16
FULL = 0  # an mbarrier for each stage of the ring
FREE = FULL + 2 * _MOST_STAGES
QUERIES_FULL = FREE + 2 * _MOST_STAGES
QUERIES_FREE = QUERIES_FULL + 2
TOPS = QUERIES_FREE + 4  # a float for each head and warp
TOTALS = TOPS + simt.WARPS * HEADS
MASKS = TOTALS + simt.WARPS * HEADS  # eight words for a key block, at its first stage
WORDS = MASKS + 8 * _MOST_STAGES


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewProblem(Problem):
    """A Problem of few heads.

    columns: heads of a product, a multiple of 8.
    gatherers: warpgroups that gather.
    cores: multiprocessors, each of which takes one block.
    """

    columns: int
    gatherers: int
    cores: int

    @property
    def blocks(self) -> int:
        return min(self.items, self.cores)

    @property
    def tiles(self) -> int:
        """Of a key block."""
        return VALUE_TILES + self.tail_tiles

    @property
    def groups(self) -> tuple[range, ...]:
        """Tiles of a key block that come and go together: what a stage of the ring holds."""
        ends = (4, self.tiles) if self.is_e4m3 else (3, 6, self.tiles)
        return tuple(range(start, end) for start, end in zip((0, *ends), ends, strict=False))

    @property
    def stage_bytes(self) -> int:
        return TILE_BYTES * max(map(len, self.groups))

    @property
    def stages(self) -> int:
        """As many as there is room for, beside queries, weights and words."""
        others = (self.tiles + 2) * self.query_tile_bytes + 4 * WORDS
        return min(_MOST_STAGES, (_SHARED_BYTES - 1024 - others) // self.stage_bytes)

    @property
    def items(self) -> int:
        return self.rows * self.splits

    @property
    def blocks_of_row(self) -> int:
        return -(-self.topk // BLOCK)

    @property
    def blocks_per_split(self) -> int:
        return -(-self.blocks_of_row // self.splits)

    @property
    def query_tile_bytes(self) -> int:
        return self.columns * ROW_BYTES

    @property
    def gathering_threads(self) -> int:
        return simt.THREADS * self.gatherers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Arrays):
    """Where a block works: the arrays, and its shared memory.

    queries: `tiles` tiles of `columns` heads. keys: the ring, tiles of 64 keys.
    weights: two tiles of `columns` heads by 64 keys. words: i32[WORDS].
    """

    queries: Pointer
    keys: Pointer
    weights: Pointer
    words: Pointer


class Place(NamedTuple):
    """An item: a split of a row, its `count` key blocks from `first` on, lanes < `limit`, positions < `seq_len`."""

    row: Value
    split: Value
    first: Value
    count: Value
    limit: Value
    seq_len: Value


def place_of(problem: FewProblem, memory: Memory, item: Value) -> Place:
    row, split = item // problem.splits, item % problem.splits
    limit = as_value(problem.topk)
    if memory.lengths is not None:
        limit = simt.minimum(simt.maximum(memory.lengths[row], 0), problem.topk)
    first = split * problem.blocks_per_split
    limit = simt.minimum(limit, (first + problem.blocks_per_split) * BLOCK)
    # Of a split without lanes one block, which is masked.
    count = simt.maximum((limit + (BLOCK - 1)) // BLOCK - first, 1)
    seq_len = as_value(0)
    if memory.seq_lens is not None:
        in_table = min(problem.table_width * problem.page_size, 2**31 - 1)
        seq_len = simt.minimum(simt.maximum(memory.seq_lens[row // problem.queries], 0), in_table)
    return Place(row, split, first, count, limit, seq_len)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Where a key block begins: a stage, and the parity of how often the ring was gone through before."""

    stage: Value
    parity: Value

    def of_group(self, problem: FewProblem, group: int) -> "Ring":
        """Where a group of the block lies."""
        stage = self.stage + group
        wraps = stage >= problem.stages
        return Ring(select(wraps, stage - problem.stages, stage), self.parity ^ select(wraps, 1, 0))

    def after(self, problem: FewProblem) -> "Ring":
        """Where the next key block begins."""
        return self.of_group(problem, len(problem.groups))


def lane_of_row(place: Place, block: Value, row: Value) -> Value:
    """The lane of the row's indices that a row of a key block holds."""
    return (place.first + block) * BLOCK + row


def load_id(ids: Pointer, lane: Value, limit: Value) -> Value:
    """An index, -1 past the limit."""
    code = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
    return simt.ptx(code, ids.at(lane), lane, limit, result=simt.i32())


def mask_bit(problem: FewProblem, row: Value) -> tuple[Value, Value]:
    """Which word of a block's mask tells whether a row is a key, and which bit of it.

    A word is of a gathering warp, which has `each` neighbouring rows for each eight lanes: bit 8 j + i of row i of its
    j-th eight lanes.
    """
    each = BLOCK // (problem.gathering_threads // 8)
    rest = row & (4 * each - 1)
    return row // (4 * each), ((rest // each) << 3) + (rest & (each - 1))


def prepare(problem: FewProblem, memory: Memory) -> None:
    """Readies the mbarriers, in every thread of the block."""
    with simt.when(simt.thread().equals(0)):
        for stage in range(problem.stages):
            simt.init_barrier(memory.words.at(FULL + 2 * stage), problem.gathering_threads)
            simt.init_barrier(memory.words.at(FREE + 2 * stage), simt.WARPS)
        simt.init_barrier(memory.words.at(QUERIES_FULL), problem.gathering_threads)
        simt.init_barrier(memory.words.at(QUERIES_FREE), simt.WARPS)
        simt.publish_barriers()
    simt.barrier()
