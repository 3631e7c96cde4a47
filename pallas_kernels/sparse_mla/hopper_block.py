"""Sparse MLA by one block: 64 heads of one query row over one split of its keys. What `hopper`'s warpgroups share.

The first two warpgroups multiply (`hopper_attend`). The third, of e4m3 keys a fourth too, gathers keys into two buffers
of 64 rows (`hopper_gather`). Of every pair of key blocks warpgroup w scores block w, and of the output it keeps columns
[256 w, 256 w + 256) for all keys in registers, so that the softmax of one block runs while the other warpgroup's
products keep the tensor cores busy. The schedule is the one that FlashMLA's sparse prefill describes:

    warpgroup 0                               warpgroup 1
    S0 = Q K0^T                               S1 = Q K1^T
    m0 = max(m, S0), P0 = 2^(S0 - m0)   m0 ->
    O_0 = O_0 2^(m - m0) + P0 V0              m1 = max(m0, S1), P1 = 2^(S1 - m1)
    P0' = P0 2^(m0 - m1)             P0' -> <- m1, P1
                                              O_1 = O_1 2^(m - m1) + P1 V1
    O_0 = O_0 2^(m0 - m1) + P1 V1             O_1 = O_1 + P0' V0

A V is half of its buffer's columns, [0, 256) for O_0 and [256, 512) for O_1. A half goes back to the gathering
warpgroup as soon as its only reader is through. P0' and P1 lie in tile 8 of their own buffer. In buffer 1 that is the
tail's, which nobody needs once the scores are there; buffer 0, whose next scores come first, has a tile for its tail
outside, which is filled with its first half. The softmax is in base 2.

e4m3 keys become f16 on the way in, times their scales and 2^SHIFT, with which scales from 2^-20 to 1 make nothing that
f16 cannot hold. For other ones the keys of eight rows are less by a power of two, their norm, in all their columns, and
the scores and weights of these keys are multiplied with it. Queries are powers of two times what they were.
"""

import dataclasses

from pallas_kernels import simt
from pallas_kernels.simt import Pointer, Value, as_value
from pallas_kernels.sparse_mla.hopper_arrays import Arrays
from pallas_kernels.sparse_mla.wgmma import TILE_BYTES

HEADS = 64  # rows of a product
BLOCK = 64  # keys of a buffer
PAIR = 2 * BLOCK
VALUE_TILES = 8
WEIGHTS_TILE = VALUE_TILES
TILES = VALUE_TILES + 1
KEY_TILES = 2 * TILES + 1
TAIL_TILES = (2 * TILES, WEIGHTS_TILE)  # of the buffers, in tiles from the beginning of either
VALUE_WIDTH = 64 * VALUE_TILES
HALF_TILES = VALUE_TILES // 2
BUFFER_BYTES = TILES * TILE_BYTES
MATH_THREADS = 2 * simt.THREADS

# Places in Memory.words, four bytes each. mbarriers take two words.
QUERIES_FULL = 0
_FULL = 2
_FREE = 10
TOPS_READY = 18  # an mbarrier for the maxima of either math warpgroup
MASKS = 24  # eight words for each buffer, of eight keys each, of a pair of even number, then of one of odd number
TOPS = MASKS + 32  # 64 floats for either math warpgroup
TOTALS = TOPS  # when all keys are done
UNITS = TOPS  # before the first ones: what scores of e4m3 keys are to be multiplied with, for each head
SCALES = TOPS + 2 * HEADS  # of e4m3 keys four floats for each row of a buffer
NORMS = SCALES + 4 * BLOCK  # and as many as words of masks
WORDS = NORMS + 32
SHIFT = 7  # e4m3 keys and so output columns are 2^SHIFT times what they should be
VALID = 0x11111111  # a word of the mask where all are keys
HAS_NO_NORM = 2  # in the mask of e4m3 keys, where the norm is 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is known when the kernel is built.

    rows, heads, topk, num_keys, splits: numbers of query rows, of their heads and indices, of key rows, of splits.
    scale_log2: positive factor from q . k to logits in base 2.
    value_stride, tail_stride: bytes from one key row to the next in either array.
    tail_start: bytes of a tail row before the tail. tail_tiles: 0 or 1.
    is_e4m3: whether the values are e4m3 with a scale for every 128 of them, else bf16.
    page_size: keys of a page where indices are positions in a request; 0 where they are key rows.
    table_width, queries: pages of a request's table and its query rows.
    """

    rows: int
    heads: int
    topk: int
    num_keys: int
    splits: int
    scale_log2: float
    value_stride: int
    tail_stride: int
    tail_start: int
    tail_tiles: int
    is_e4m3: bool
    page_size: int = 0
    table_width: int = 0
    queries: int = 1

    @property
    def head_blocks(self) -> int:
        return -(-self.heads // HEADS)

    @property
    def blocks(self) -> int:
        return self.rows * self.splits * self.head_blocks

    @property
    def pairs_per_split(self) -> int:
        pairs = -(-self.topk // PAIR)
        return -(-pairs // self.splits)

    @property
    def gather_warpgroups(self) -> int:
        """Conversion keeps one warpgroup waiting for its own instructions."""
        return 2 if self.is_e4m3 else 1

    @property
    def width(self) -> int:
        return VALUE_WIDTH + 64 * self.tail_tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Arrays):
    """Where a block works: the arrays, and its shared memory.

    queries: TILES tiles of 64 heads. keys: two buffers of as many tiles of 64 keys, and a tile. words: i32[WORDS].
    """

    queries: Pointer
    keys: Pointer
    words: Pointer

    def full(self, buffer: int, half: int) -> Pointer:
        """The mbarrier that tells that half of a buffer is there."""
        return self.words.at(full_word(buffer, half))

    def free(self, buffer: int, half: int) -> Pointer:
        """The mbarrier that tells that half of a buffer has been read."""
        return self.words.at(free_word(buffer, half))


def of_eights(array: int, pair: Value, buffer: int) -> Value:
    """Where a pair's eight words of a buffer begin in `array`, MASKS or NORMS.

    Two pairs have their own, so that all of a warpgroup has passed a barrier since it read what is written anew.
    """
    return ((pair & 1) << 4) + (array + 8 * buffer)


def full_word(buffer: int, half: int) -> int:
    return _FULL + 2 * (2 * buffer + half)


def free_word(buffer: int, half: int) -> int:
    return _FREE + 2 * (2 * buffer + half)


@dataclasses.dataclass(frozen=True)
class Place:
    """A block's work: its row, split and first head, the pairs of key blocks from `first` on, and lanes < `limit`."""

    row: Value
    split: Value
    head: Value
    first: Value
    pairs: Value
    limit: Value


def place_of(problem: Problem, memory: Memory) -> Place:
    """The place of this block. Blocks of one row are neighbours, so that they find its keys in the L2 cache."""
    block = simt.block()
    rest, head_block = block // problem.head_blocks, block % problem.head_blocks
    row, split = rest // problem.splits, rest % problem.splits
    first = split * problem.pairs_per_split
    limit = simt.minimum(lanes_of(problem, memory, row), (first + problem.pairs_per_split) * PAIR)
    # Of a split without lanes one pair, which is masked.
    pairs = simt.maximum((limit + (PAIR - 1)) // PAIR - first, 1)
    return Place(row, split, head_block * HEADS, first, pairs, limit)


def lanes_of(problem: Problem, arrays: Arrays, row: Value) -> Value:
    """How many of a row's indices count, the first ones."""
    if arrays.lengths is None:
        return as_value(problem.topk)
    return simt.minimum(simt.maximum(arrays.lengths[row], 0), problem.topk)


def positions_of(problem: Problem, arrays: Arrays, request: Value) -> Value:
    """How many positions a request has, where indices are positions."""
    assert arrays.seq_lens is not None
    in_table = min(problem.table_width * problem.page_size, 2**31 - 1)
    return simt.minimum(simt.maximum(arrays.seq_lens[request], 0), in_table)


def prepare(problem: Problem, memory: Memory) -> None:
    """Readies the mbarriers, in every thread of the block."""
    gathering = problem.gather_warpgroups * simt.THREADS
    with simt.when(simt.thread().equals(0)):
        simt.init_barrier(memory.words.at(QUERIES_FULL), gathering)
        for side in range(2):
            # One thread for each eight rows and quarter of a warp tells.
            simt.init_barrier(memory.words.at(TOPS_READY + 2 * side), HEADS // 2)
        for buffer in range(2):
            for half in range(2):
                # A thread arrives once, or for its copies and for its other stores; a reading warp once.
                simt.init_barrier(memory.full(buffer, half), (1 if problem.is_e4m3 else 2) * gathering)
                simt.init_barrier(memory.free(buffer, half), simt.WARPS)
        simt.publish_barriers()
    simt.barrier()


def thread_of_warpgroup(*, anew: bool = False) -> Value:
    return simt.thread(anew=anew) & (simt.THREADS - 1)
