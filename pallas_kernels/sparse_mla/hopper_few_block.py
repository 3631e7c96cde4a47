"""Sparse MLA of at most 32 heads by one block: what the warpgroups of `hopper_few` share.

Products have 64 rows, or 16, so here rows are keys, and the heads are the columns, of which they may have any eight:

    S^T[64 keys, heads] = K Q^T        O^T[512, heads] += V^T P^T

A team is a warpgroup that multiplies and one that gathers (`hopper_few_gather`), which goes over rows, or splits of
rows, until there are no more. A block of the grid holds one team or two, which have nothing in common. Between the two
warpgroups is a ring of stages, each with room for a group of tiles, 64 keys by 128 bytes; a key block takes the next
ones, of e4m3 keys one. The ring goes through from one row to the next.

bf16 tiles are read by both products from shared memory, by the second one transposed (`hopper_few_attend`). e4m3 tiles,
of twice as many columns, become f16 in the registers of the warpgroup that multiplies (`hopper_few_attend_e4m3`), once
for either product; only the rope columns, the last tile, are bf16.
"""

import dataclasses
from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value, select
from pallas_kernels.sparse_mla.hopper_arrays import Arrays
from pallas_kernels.sparse_mla.hopper_block import BLOCK, VALUE_TILES, VALUE_WIDTH, Problem, lanes_of, positions_of
from pallas_kernels.sparse_mla.rows import SCALE_BLOCK
from pallas_kernels.sparse_mla.wgmma import ROW_BYTES, TILE_BYTES

HEADS = 32  # at most
_SHARED_BYTES = 232448 - 1024  # of a block, but for what aligning takes
_TEAM_HEADS = 16  # at most, of two teams in a block: more take more registers than half of them

# Places in Memory.words, four bytes each. mbarriers take two words.
_MOST_STAGES = 25
FULL = 0  # an mbarrier for each stage of the ring
FREE = FULL + 2 * _MOST_STAGES
QUERIES_FULL = FREE + 2 * _MOST_STAGES
QUERIES_FREE = QUERIES_FULL + 2
UNITS = QUERIES_FREE + 2  # a float for each head: what its e4m3 scores are multiplied with
TOPS = UNITS + HEADS  # a float for each head and warp
TOTALS = TOPS + simt.WARPS * HEADS
PEAKS = TOTALS + simt.WARPS * HEADS  # a float for each scale of a key and warp
MASKS = PEAKS + 4 * simt.WARPS  # a word for each 16 keys of a block, at its first stage
WORDS = MASKS + simt.WARPS * _MOST_STAGES


@dataclasses.dataclass(frozen=True)
class FewConfig:
    """Of the kernel for few heads. No choice here changes a bit of the result.

    columns: heads of a product, a multiple of 8.
    cores: multiprocessors, each of which takes one block.
    """

    columns: int
    cores: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewProblem(Problem, FewConfig):
    """A Problem of few heads, with its config."""

    @property
    def teams(self) -> int:
        """Of a block. One leaves a multiprocessor idle while it waits for what it converts."""
        return 2 if self.is_e4m3 and self.columns <= _TEAM_HEADS and self.items > self.cores else 1

    @property
    def blocks(self) -> int:
        return min(-(-self.items // self.teams), self.cores)

    @property
    def value_tiles(self) -> int:
        """Of a key block."""
        return VALUE_TILES // 2 if self.is_e4m3 else VALUE_TILES

    @property
    def groups(self) -> tuple[range, ...]:
        """Tiles of a key block that come and go together: what a stage of the ring holds. The tail is the last tile."""
        tiles = self.value_tiles + self.tail_tiles
        if self.is_e4m3:
            return (range(tiles),)
        ends = (3, 6, tiles)
        return tuple(range(start, end) for start, end in zip((0, *ends), ends, strict=False))

    @property
    def stage_bytes(self) -> int:
        return TILE_BYTES * max(map(len, self.groups))

    @property
    def scale_bytes(self) -> int:
        """Of a stage: four floats a key."""
        return 16 * BLOCK if self.is_e4m3 else 0

    @property
    def stages(self) -> int:
        """As many as there is room for, beside queries, weights and words."""
        others = (self.query_tiles + self.weight_tiles) * self.query_tile_bytes + 4 * WORDS
        room = _SHARED_BYTES // self.teams - others
        return min(_MOST_STAGES, room // (self.stage_bytes + self.scale_bytes))

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
    def query_tiles(self) -> int:
        return VALUE_TILES + self.tail_tiles

    @property
    def weight_tiles(self) -> int:
        """One for each scale of an e4m3 key; else two, which take turns."""
        return VALUE_WIDTH // SCALE_BLOCK if self.is_e4m3 else 2

    @property
    def query_tile_bytes(self) -> int:
        return self.columns * ROW_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Arrays):
    """Where a team works: the arrays, and its shared memory.

    queries: `query_tiles` tiles of `columns` heads; of e4m3 keys partial scores come to lie where those of values do.
    keys: the ring, tiles of 64 keys.
    weights: `weight_tiles` tiles of `columns` heads by 64 keys. words: i32[WORDS].
    key_scales: f32[64, 4] of a key block, of e4m3 keys, a stage.
    """

    queries: Pointer
    keys: Pointer
    weights: Pointer
    words: Pointer
    key_scales: Pointer | None = None

    def of_team(self, problem: FewProblem, team: Value) -> "Memory":
        """This is the first team's."""
        if problem.teams == 1:
            return self
        sizes = {name: count * 4 for name, count in shared_words(problem).items()}
        return dataclasses.replace(self, **{name: getattr(self, name).past(team * sizes[name]) for name in sizes})


class Place(NamedTuple):
    """An item: a split of a row, its `count` key blocks from `first` on, lanes < `limit`, positions < `seq_len`."""

    row: Value
    split: Value
    first: Value
    count: Value
    limit: Value
    seq_len: Value


def shared_words(problem: FewProblem) -> dict[str, int]:
    """How much of each array in shared memory a team takes, in words of four bytes."""
    sizes = dict(
        queries=problem.query_tiles * problem.query_tile_bytes // 4,
        keys=problem.stages * problem.stage_bytes // 4,
        weights=problem.weight_tiles * problem.query_tile_bytes // 4,
        words=WORDS,
    )
    return sizes | (dict(key_scales=problem.stages * problem.scale_bytes // 4) if problem.is_e4m3 else {})


def team_of(problem: FewProblem) -> Value:
    """This thread's team: the first warpgroups multiply, one for each team, and the others gather."""
    if problem.teams == 1:
        return as_value(0)
    # Of a shuffle's result the compiler knows that it is the same in a warp.
    return simt.of_lane((simt.thread() >> 7) & 1, as_value(0))


def first_item(problem: FewProblem, team: Value) -> Value:
    return simt.block() * problem.teams + team


def place_of(problem: FewProblem, memory: Memory, item: Value) -> Place:
    row, split = item // problem.splits, item % problem.splits
    first = split * problem.blocks_per_split
    limit = simt.minimum(lanes_of(problem, memory, row), (first + problem.blocks_per_split) * BLOCK)
    # Of a split without lanes one block, which is masked.
    count = simt.maximum((limit + (BLOCK - 1)) // BLOCK - first, 1)
    seq_len = positions_of(problem, memory, row // problem.queries) if problem.page_size else as_value(0)
    return Place(row, split, first, count, limit, seq_len)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Where a key block begins: a stage, and the parity of how often the ring was gone through before."""

    stage: Value
    parity: Value

    def of_group(self, problem: FewProblem, group: int) -> "Ring":
        """Where a group of the block lies, or the first one of the block after it."""
        stage, groups = self.stage + group, len(problem.groups)
        if group < groups and problem.stages % groups == 0:
            return Ring(stage, self.parity)
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


def mask_bit(row: Value) -> Value:
    """Which bit of its word of a block's mask, one for each 16 rows, tells whether a row is a key."""
    return row & 15


def prepare(problem: FewProblem, memory: Memory) -> None:
    """Readies the mbarriers, in every thread of the block."""
    with simt.when(simt.thread() < problem.teams):
        words = memory.of_team(problem, simt.thread()).words
        for stage in range(problem.stages):
            simt.init_barrier(words.at(FULL + 2 * stage), simt.THREADS)
            # Of e4m3 keys, which they load, all threads tell that they have them.
            simt.init_barrier(words.at(FREE + 2 * stage), simt.THREADS if problem.is_e4m3 else simt.WARPS)
        simt.init_barrier(words.at(QUERIES_FULL), simt.THREADS)
        simt.init_barrier(words.at(QUERIES_FREE), simt.WARPS)
        simt.publish_barriers()
    simt.barrier()
