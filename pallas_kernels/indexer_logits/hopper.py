"""Index scores on Hopper (sm_90) as a Pallas Mosaic GPU kernel.

Grid: one persistent block an SM. A block's work is an equal share of all (query group, 64-key tile) pairs that any
query of the group can see, cut by a prefix sum over the groups, so causal masks and mixed request lengths balance by
themselves: own_share.py, or for very many groups schedule.py in a launch before. A group's queries are one, two or four
tiles of `columns` (query, head) pairs each. Within a block

    four math warpgroups   multiply a key tile by one query tile each, wgmma into registers, sum the heads there and
                           store the logits straight from registers (warpgroup.py); where a group has fewer query tiles
                           than there are warpgroups, they take its key tiles in turn;
    one copy warp          brings key tiles with their scales, and queries with their weights and ranges, into shared
                           memory with TMA; it holds a run of 32 pages of the block table, and loads the next one ahead;
    three fill warps       write -inf to an equal share of the tiles that no query sees.

wgmma reads both operands of a warpgroup from shared memory, 24 KiB a tile of D = 128, which takes three quarters of the
time that the product takes; had every warpgroup a key tile of its own, their copies would take the rest of it.

Shared memory: `stages` key tiles of 64 * D elements and `query_slots` groups of query tiles of columns * D; with
D = 128 at most 205 KiB for e4m3 and 219 for bf16, with a schedule of its own. Registers: 112 a math thread (64
products, 32 weights), 32 a copy or fill thread.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import mosaic_backend
from pallas_kernels.indexer_logits import own_share, ring, warpgroup
from pallas_kernels.indexer_logits.own_share import OwnSchedule
from pallas_kernels.indexer_logits.problem import (
    PagedKeys,
    Problem,
    nothing,
    paged_problem,
    ragged_problem,
    refuse_operands,
)
from pallas_kernels.indexer_logits.schedule import Schedule, Share, schedule
from pallas_kernels.indexer_logits.warpgroup import KEYS, Tile
from pallas_kernels.row_chunk import RowChunk
from pallas_kernels.target import Target, target_of
from pallas_kernels.tuning import tuned

_HEADS = (16, 32, 64, 128)  # what a tile's columns divide by; other counts are padded with heads of weight zero
_COLUMNS = 128
_SHARED_MEMORY = 227 * 1024
_REST = 16 * 1024  # of it for scales, weights, ranges and barriers, each rounded up to a kilobyte
_KEPT_BYTES = 32 << 20  # of logits, that stay in the L2 cache for their reader; a larger result would not fit
_LINE = 32  # words: copies fill shared memory by multiples of 128 bytes
_MOST_QUERIES = 16  # of a group, whose ranges a line holds from the multiple of four rows before the first
_GROUP_COST = 5  # query tiles times key tiles that a block could do while it takes up a group and waits for its queries
_SMS = 132  # of an H100 SXM and an H200, where the device does not say


Plan = Schedule | OwnSchedule


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut. No choice here changes a bit of the result.

    math_warpgroups: how many share a block's tiles.
    query_tiles: of a group, 1, 2 or 4 and no more than there are math warpgroups. They share every key tile.
    stages: key tiles in shared memory, a multiple of `turns`.
    query_slots: query groups in shared memory; half of them are ahead of the key tiles.
    doubled_of_four: of every four heads, how many take relu as x + |x| on the fma pipe rather than as a maximum on the
        alu pipe. The weights of those heads are halved, so the result is the same to the last bit.
    """

    math_warpgroups: int = 4
    query_tiles: int = 1
    stages: int = 8
    query_slots: int = 4
    doubled_of_four: int = 2

    @property
    def turns(self) -> int:
        """How many warpgroups take a group's key tiles in turn.

        Every tile of a stage has to be the same one's: a barrier tells a stage's odd rounds from its even ones only, so
        a warpgroup that passes over a round, which is another's, may take the one before for the one it waits for.
        """
        return self.math_warpgroups // self.query_tiles

    @property
    def is_legal(self) -> bool:
        """Whether the turns come out even, and of tiles and queries some are on their way while others are used."""
        is_even = self.math_warpgroups % self.query_tiles == 0 == self.stages % self.turns
        return is_even and min(self.stages, self.query_slots) >= 2


def indexer_logits(
    q: Num[Array, "M H D"],
    k: Num[Array, "N D"],
    weights: Float[Array, "M H"],
    starts: Int[Array, " M"],
    ends: Int[Array, " M"],
    *,
    k_scale: Float[Array, " N"] | None = None,
    clean_logits: bool = True,
    target: Target | str | None = None,
) -> Float[Array, "M N"]:
    """The logits of M queries over N keys, -inf outside [starts, ends), or there anything unless clean_logits.

    target: the device to compile for, if not this one.
    """
    device = target_of(target)
    config = config_indexer_logits(device, q, k, weights, starts, ends, k_scale=k_scale)
    problem = ragged_problem(q, k, weights, starts, ends, k_scale)
    return solve(problem, config, clean=clean_logits, num_sms=device.num_cores or _SMS)[0]


def indexer_logits_of_rows(
    chunk: RowChunk,
    q: Num[Array, "A H D"],
    k: Num[Array, "N D"],
    weights: Float[Array, "A H"],
    starts: Int[Array, " A"],
    ends: Int[Array, " A"],
    *,
    k_scale: Float[Array, " N"] | None = None,
    clean_logits: bool = True,
    target: Target | str | None = None,
) -> Float[Array, "M N"]:
    """The logits of a chunk of rows, M of A, of which nothing is copied."""
    device = target_of(target)
    config = config_indexer_logits(device, jax.ShapeDtypeStruct((chunk.size, *q.shape[1:]), q.dtype), k)
    problem = ragged_problem(q, k, weights, starts, ends, k_scale, chunk)
    return solve(problem, config, clean=clean_logits, num_sms=device.num_cores or _SMS)[0]


def paged_indexer_logits(
    q: Num[Array, "B Q H D"],
    cache: PagedKeys,
    weights: Float[Array, "B Q H"],
    block_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
    *,
    clean_logits: bool = True,
    target: Target | str | None = None,
) -> Float[Array, "B Q L"]:
    """The logits of Q queries of B requests over L = P * page columns; query i sees keys < seq_lens - Q + i + 1."""
    device = target_of(target)
    config = config_paged_indexer_logits(device, q, cache, weights, block_table, seq_lens)
    problem = paged_problem(q, cache, weights, block_table, seq_lens)
    return solve(problem, config, clean=clean_logits, num_sms=device.num_cores or _SMS)


def refuse_indexer_logits(target: Target, q: Any, k: Any, *args: Any, **options: Any) -> str | None:
    """Why this kernel cannot run there, or None."""
    del args, options
    return refuse_operands(q, k) or _refuse(target, q)


def refuse_paged_indexer_logits(target: Target, q: Any, cache: PagedKeys, *args: Any, **options: Any) -> str | None:
    """Why this kernel cannot run there, or None."""
    del args, options
    page = cache.k.shape[1]
    if page != 32 and page % KEYS:  # a copy of fewer than 32 scales is not made
        return f"pages must hold 32 or a multiple of {KEYS} tokens, got {page}"
    return refuse_operands(q, cache.k) or _refuse(target, q)


def config_indexer_logits(target: Target, q: Any, k: Any, *args: Any, **options: Any) -> Config:
    """The config this kernel would run with."""
    del k, args, options
    return _config("indexer_logits.hopper", target, q, stages=8)


def config_paged_indexer_logits(target: Target, q: Any, cache: PagedKeys, *args: Any, **options: Any) -> Config:
    """The config this kernel would run with."""
    del cache, args, options
    return _config("paged_indexer_logits.hopper", target, q, stages=12)


@functools.partial(jax.jit, static_argnames=("config", "clean", "num_sms"))
def solve(problem: Problem, config: Config, *, clean: bool = True, num_sms: int) -> Float[Array, "B Q L"]:
    """The logits of a problem with a given config, on `num_sms` multiprocessors.

    clean: -inf where no row sees a key, or else anything.
    """
    if problem.is_empty:
        return nothing(problem)
    problem = _padded(problem)
    (batch, all_queries, heads, dim), queries = problem.q.shape, problem.queries
    tile = Tile(heads=heads, columns=_columns(queries, heads), dim=dim, itemsize=problem.q.dtype.itemsize)
    group, group_cost = config.query_tiles * tile.queries, -(-_GROUP_COST // config.query_tiles)
    assert config.is_legal and group <= _MOST_QUERIES, config
    sizes = own_share.Sizes(batch, queries, group, KEYS, problem.columns, num_sms, group_cost)
    kernel = _Kernel(
        tile=tile,
        config=config,
        sizes=sizes,
        page=problem.k.shape[1] if problem.block_table is not None else 0,
        pages=problem.k.shape[0],
        has_scale=problem.k_scale is not None,
        has_lengths=problem.has_lengths,
        is_own=False,
        clean=clean,
        all_queries=all_queries,
        is_kept=4 * batch * queries * problem.columns <= _KEPT_BYTES,
    )
    if problem.has_lengths or batch == 1:
        kernel = kernel.with_own_schedule()
    rows = batch * queries
    paged = problem.block_table is not None
    # What a copy is cut from must hold as much: up to four rows of queries, a tile of keys.
    operands, structure = jax.tree.flatten(
        _Operands(
            q=_at_least(problem.q.reshape(-1, *tile.query_view), 4 // tile.lanes),
            weights=_at_least(problem.weights.reshape(-1), kernel.weight_words),
            chunk=None if problem.rows is None else problem.rows.operand(),
            k=problem.k if paged else _at_least(problem.k, KEYS),
            scale=problem.k_scale if paged or problem.k_scale is None else _at_least(problem.k_scale, KEYS),
            table=problem.block_table,
            seen=problem.seen if problem.has_lengths else tuple(_at_least(x, _LINE) for x in problem.seen),
            schedule=None if kernel.is_own else kernel.schedule(problem),
        )
    )
    run = plgpu.kernel(
        lambda *refs: kernel.body(structure.unflatten(refs[:-1]), refs[-1]),
        out_type=jax.ShapeDtypeStruct((rows, problem.columns), jnp.float32),
        grid=(num_sms,),
        grid_names=("block",),
        num_threads=config.math_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="indexer_logits_hopper",
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )
    return mosaic_backend.call(run, *operands).reshape(batch, queries, problem.columns)


class _Operands(NamedTuple):
    """Arrays outside of the kernel, references inside; some are missing.

    q: [rows, *Tile.query_view]; weights: f32 [rows * heads]; k, scale, table: as in Problem.
    seen: i32, the length of each request, or starts and ends of the rows.
    chunk: i32 [1], the number of the chunk of rows, where q, weights and seen have more.
    schedule: where it is made before.
    """

    q: Any
    weights: Any
    k: Any
    scale: Any
    table: Any
    seen: tuple[Any, ...]
    chunk: Any
    schedule: Schedule | None


class _Memory(NamedTuple):
    """References to shared memory.

    q, weights, ranges: of every query slot; k, scale: of every stage.
    made: the block's own schedule: shares, before, scratch, first; empty without one.
    q_full, q_free, k_full, k_free: barriers (ring.py). ready: Pallas' barrier, after which they and `made` are there.
    """

    q: Any
    weights: Any
    ranges: Any
    k: Any
    scale: Any
    made: list[Any]
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    ready: Any


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The body of the kernel and the static sizes it needs.

    page: tokens of a page, or 0 where the keys lie in one array; pages: how many the cache has.
    has_lengths: whether requests have lengths, or rows have starts and ends.
    is_own: whether every block makes its schedule itself.
    clean: whether to write -inf where no row sees a key.
    all_queries: how many there are in the arrays; more than sizes.queries where those are a chunk of them.
    is_kept: whether the logits are few enough to stay in the L2 cache for their reader.
    """

    tile: Tile
    config: Config
    sizes: own_share.Sizes
    page: int
    pages: int
    has_scale: bool
    has_lengths: bool
    is_own: bool
    clean: bool
    all_queries: int
    is_kept: bool

    def first_query(self, given: _Operands):
        """The first query in the arrays that is the problem's."""
        return 0 if given.chunk is None else RowChunk(given.chunk[0], self.sizes.queries).first(self.all_queries)

    def schedule(self, problem: Problem) -> Schedule:
        """The schedule, made before."""
        of = self.sizes
        return schedule(problem.cut_out(), group=of.group, keys=of.keys, blocks=of.blocks, group_cost=of.group_cost)

    def with_own_schedule(self) -> "_Kernel":
        """The kernel whose blocks make the schedule themselves, where that is quick and fits beside the tiles."""
        tiles = self.config.query_slots * self.config.query_tiles * self.tile.columns + self.config.stages * KEYS
        needed = tiles * self.tile.dim * self.tile.itemsize + 4 * sum(self.sizes.words(has_lengths=self.has_lengths))
        is_own = self.sizes.groups <= own_share.MAX_GROUPS and needed <= _SHARED_MEMORY - _REST
        return dataclasses.replace(self, is_own=is_own)

    @property
    def weight_words(self) -> int:
        """Words that a copy of a tile's weights brings."""
        return max(self.tile.columns, _LINE)

    @property
    def tile_pages(self) -> int:
        """Pages that one key tile lies in, 0 without pages."""
        return max(KEYS // self.page, 1) if self.page else 0

    def body(self, given: _Operands, out):
        tile, stages = self.tile, self.config.stages
        slots, parts = self.config.query_slots, self.config.query_tiles
        swizzle = (plgpu.SwizzleTransform(tile.row_bytes),)
        dtype = given.k.dtype
        made = self.sizes.words(has_lengths=self.has_lengths) if self.is_own else []
        pl.run_scoped(
            lambda *refs: self._scoped(given, out, _Memory(*refs)),
            plgpu.SMEM((slots, parts, tile.chunks, tile.quads, *tile.quad_shape), dtype, transforms=swizzle),
            plgpu.SMEM((slots, parts, self.weight_words), jnp.float32),
            plgpu.SMEM((1 if self.has_lengths else slots, 2, _LINE), jnp.int32),
            plgpu.SMEM((stages, tile.chunks, KEYS, tile.chunk), dtype, transforms=swizzle),
            plgpu.SMEM((stages, KEYS), jnp.float32),
            [plgpu.SMEM((words,), jnp.int32) for words in made],
            *(ring.barriers(count) for count in (slots, slots, stages, stages)),
            plgpu.Barrier(),
            collective_axes="warpgroup",
        )

    def _scoped(self, given: _Operands, out, memory: _Memory):
        warpgroup_index, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        math, stages, slots = self.config.math_warpgroups, self.config.stages, self.config.query_slots
        plan = self._plan(given, memory)

        @pl.when(warpgroup_index < math)
        def _():
            plgpu.set_max_registers(112, action="increase")
            plgpu.barrier_wait(memory.ready)
            self._math(plan, plan.visits(block), warpgroup_index, given, out, memory)

        @pl.when(warpgroup_index == math)
        def _():
            warps = 4  # of a warpgroup
            readers = warps * self.config.query_tiles
            start = ring.start((slots, 1), (slots, warps * math), (stages, 1), (stages, readers))
            start(memory.q_full, memory.q_free, memory.k_full, memory.k_free)
            if self.is_own:
                own_share.make(self.sizes, has_lengths=self.has_lengths)(*self._own(given), *memory.made, block)
            plgpu.barrier_arrive(memory.ready)
            plgpu.set_max_registers(32, action="decrease")

            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    self._copy(plan, plan.visits(block), given, memory)

                if self.clean:

                    @pl.when(warp > 0)
                    def _():
                        self._fill(plan, plan.fills(block), warp - 1, out)

    def _plan(self, given: _Operands, memory: _Memory) -> Plan:
        if given.schedule is not None:
            return given.schedule
        shares, before, _, *first = memory.made
        return OwnSchedule(shares, before, first[0] if first else None, self.sizes)

    def _own(self, given: _Operands):
        """given.seen of the problem's own queries."""
        if given.chunk is None:
            return given.seen
        return [x.at[pl.ds(self.first_query(given), self.sizes.queries)] for x in given.seen]

    def _length(self, given: _Operands, group):
        """The length of the group's request."""
        return given.seen[0][lax.div(group, self.sizes.request_groups)]

    def _math(self, plan: Plan, share: Share, index, given: _Operands, out, memory: _Memory):
        """One math warpgroup: one of a group's query tiles, and of the share's key tiles those it has its turn at."""
        load_weights = warpgroup.load_weights(self.tile, halved=self._doubled)
        sizes = dict(queries=self.sizes.queries, columns=self.sizes.columns)
        load_rows = warpgroup.load_rows(self.tile, has_lengths=self.has_lengths, **sizes)
        multiply = warpgroup.multiply(self.tile)
        load_scales = warpgroup.load_scales(self.tile)
        options = dict(pages=self.tile_pages, doubled=self._doubled, has_scale=self.has_scale)
        finish = warpgroup.sum_heads_and_store(self.tile, columns=self.sizes.columns, is_kept=self.is_kept, **options)
        parts, stages, turns = self.config.query_tiles, self.config.stages, self.config.turns
        part, index = _turn(index, parts)
        before = self.first_query(given)

        @pl.loop(0, share.groups)
        def _(n):
            group = share.first + n
            walk = plan.visited(group, share)
            slot, round_ = _turn(n, self.config.query_slots)
            place = self._place(group)
            if self.has_lengths:
                seen = self._length(given, group)
            else:  # copied from a multiple of four rows on
                seen = memory.ranges.at[slot, :, pl.ds(self._row(*place, before) & 3, _LINE - 3)]
            begin, end = (lax.div(x + turns - 1 - index, turns) for x in (walk.begin, walk.end))
            ring.wait(memory.q_full, slot, round_)

            @pl.when(begin < end)  # a group of few tiles has none for some
            def _():
                weights = load_weights(memory.weights.at[slot, part])
                rows = load_rows(seen, out, *place, part * self.tile.queries)

                @pl.loop(begin, end)
                def _(turn):
                    step = turn * turns + index
                    (stage, round_), key_tile = _turn(step, stages), walk.tile(step)
                    mapped = self._mapped(given, group, key_tile)
                    ring.wait(memory.k_full, stage, round_)
                    scales = [load_scales(memory.scale.at[stage])] if self.has_scale else []
                    products = multiply(memory.k.at[stage], memory.q.at[slot, part])
                    finish(products, weights, rows, *scales, *mapped, key_tile * KEYS)
                    ring.arrive(memory.k_free, stage)  # only now: the scales are used up

            ring.arrive(memory.q_free, slot)

    def _copy(self, plan: Plan, share: Share, given: _Operands, memory: _Memory):
        """The copy warp: key tiles as stages come free, queries half the slots ahead of them."""
        stages, slots = self.config.stages, self.config.query_slots
        ahead = slots // 2
        copy_queries, copy_keys = self._query_copier(given, memory), self._key_copier(given, memory)
        table = given.table
        hold = warpgroup.hold_pages(table.shape if self.page else (1, 1))

        def queries(n):
            slot, round_ = _turn(n, slots)
            ring.wait(memory.q_free, slot, round_ - 1)
            copy_queries(*self._place(share.first + n), slot)

        def keys(step, tile, pages):
            stage, round_ = _turn(step, stages)
            ring.wait(memory.k_free, stage, round_ - 1)
            copy_keys(tile, pages, stage)

        @pl.loop(0, jnp.minimum(ahead, share.groups))
        def _(n):
            queries(n)

        def run_of_pages(group, walk, run, is_last, held):
            """The tiles in one run of 32 pages. Returns the run after it, of the next group behind the last one."""
            next_group = jnp.where(is_last, group + 1, group)
            after = hold(table, lax.div(next_group, self.sizes.request_groups), jnp.where(is_last, 0, run + 1))
            begin, end = (x * self.run_tiles - walk.offset for x in (run, run + 1))

            @pl.loop(jnp.maximum(walk.begin, begin), jnp.minimum(walk.end, end))
            def _(step):
                tile = walk.tile(step)
                entries = self._entries(given, group, tile)
                keys(step, tile, [warpgroup.held_page(held, entry) for entry in entries])

            return after

        def tiles(n, held):
            group = share.first + n
            walk = plan.visited(group, share)
            if self.page:
                first = lax.div(walk.tile(walk.begin), self.run_tiles)
                last = jnp.maximum(lax.div(walk.tile(walk.end - 1), self.run_tiles), first)

                def run_of(run, held):
                    return run_of_pages(group, walk, run, run == last, held)

                held = lax.fori_loop(first, last + 1, run_of, held)
            else:

                @pl.loop(walk.begin, walk.end)
                def _(step):
                    keys(step, walk.tile(step), [])

            @pl.when(n + ahead < share.groups)
            def _():
                queries(n + ahead)

            return held

        held = jnp.int32(0)
        if self.page:
            first = jnp.minimum(share.first, self.sizes.groups - 1)  # of a share of nothing it is beyond
            walk = plan.visited(first, share)
            held = hold(
                table, lax.div(first, self.sizes.request_groups), lax.div(walk.tile(walk.begin), self.run_tiles)
            )
        lax.fori_loop(0, share.groups, tiles, held)

    def _query_copier(self, given: _Operands, memory: _Memory):
        """-> f(request, first query, slot): brings the queries of a group, their weights and their ranges."""
        tile, full = self.tile, memory.q_full
        ranges = () if self.has_lengths else given.seen
        before = self.first_query(given)
        of_part = tile.columns * tile.dim * tile.itemsize + 4 * self.weight_words
        expect = ring.expect(self.config.query_tiles * of_part + 4 * len(ranges) * _LINE)
        # In shared memory [pairs, queries, lanes, 2, chunk], in the array queries, lanes, pairs, 2, chunk.
        pairs, queries, lanes, two, width = tile.quad_shape
        copy_quad = ring.copy((queries, lanes, pairs, two, width), swizzle=tile.row_bytes, order=(2, 0, 1, 3, 4))
        copy_weights, copy_ranges = ring.copy((self.weight_words,)), ring.copy((_LINE,))

        def copy(request, first, slot):
            row = self._row(request, first, before)
            expect(full, slot)
            for part in range(self.config.query_tiles):
                at = row + part * tile.queries
                for chunk in range(tile.chunks):
                    for quad in range(tile.quads):
                        begins = (at + quad * queries, 0, 0, 0, chunk * tile.chunk)
                        copy_quad(given.q, memory.q.at[slot, part, chunk, quad], full, slot, *map(jnp.int32, begins))
                copy_weights(given.weights, memory.weights.at[slot, part], full, slot, at * tile.heads)
            for side, array in enumerate(ranges):
                copy_ranges(array, memory.ranges.at[slot, side], full, slot, row & ~3)  # begins at 16 bytes

        return copy

    def _key_copier(self, given: _Operands, memory: _Memory):
        """-> f(tile, pages, stage): brings the keys and scales of a tile, which lies in `pages` if there are any."""
        tile, full = self.tile, memory.k_full
        count = min(self.page, KEYS) or KEYS
        page_axis = (None,) if self.page else ()
        expect = ring.expect(KEYS * (tile.dim * tile.itemsize + 4 * self.has_scale))
        # Keys of a page are read again by the next group only; an array's by all.
        is_read_once = self.page > 0 and self.sizes.request_groups == 1
        shape = (*page_axis, count, tile.chunk)
        copy_chunk = ring.copy(shape, swizzle=tile.row_bytes, is_read_once=is_read_once)
        copy_scale = ring.copy((*page_axis, count))

        def copy(source, row, into, stage):
            for chunk in range(tile.chunks):
                target = memory.k.at[stage, chunk, pl.ds(into, count)]
                copy_chunk(given.k, target, full, stage, *source, row, jnp.int32(chunk * tile.chunk))
            if self.has_scale:
                copy_scale(given.scale, memory.scale.at[stage, pl.ds(into, count)], full, stage, *source, row)

        def copy_tile(key_tile, pages, stage):
            expect(full, stage)
            if not self.page:
                copy((), key_tile * KEYS, 0, stage)
                return
            row = lax.rem(key_tile * KEYS, self.page) if self.page > KEYS else jnp.int32(0)
            for i, page in enumerate(pages):
                copy((page,), row, i * count, stage)  # zeros from a page that the cache does not have

        return copy_tile

    @property
    def run_tiles(self) -> int:
        """Key tiles in 32 pages, which the copy warp holds at a time."""
        return 32 * self.page // KEYS

    def _entries(self, given: _Operands, group, tile):
        """Which entries of its request's block table a tile lies in."""
        if not self.page:
            return []
        first = lax.div(tile * KEYS, self.page)
        if self.tile_pages == 1:
            return [first]
        # The table holds nothing past the last key that any query of the request sees.
        last = lax.div(jnp.minimum(self._length(given, group), self.sizes.columns) - 1, self.page)
        return [jnp.minimum(first + i, last) for i in range(self.tile_pages)]

    def _mapped(self, given: _Operands, group, tile):
        """For each page of a tile whether the cache has it, 1 or 0."""
        request = lax.div(group, self.sizes.request_groups)
        pages = [given.table[request, entry] for entry in self._entries(given, group, tile)]
        return [jnp.where((page >= 0) & (page < self.pages), 1, 0) for page in pages]

    def _fill(self, plan: Plan, share: Share, warp, out):
        """One of three fill warps: every third unseen tile of the block's share of those."""
        fill = warpgroup.fill_tile(self.sizes.group, queries=self.sizes.queries, columns=self.sizes.columns)

        @pl.loop(0, share.groups)
        def _(n):
            group = share.first + n
            walk = plan.unseen(group, share)
            request, first = self._place(group)

            @pl.loop(lax.div(walk.begin + 2 - warp, 3), lax.div(walk.end + 2 - warp, 3))
            def _(turn):
                fill(out, request, first, walk.tile(turn * 3 + warp) * KEYS)

    def _place(self, group):
        """(request, first query) of a group."""
        return lax.div(group, self.sizes.request_groups), lax.rem(group, self.sizes.request_groups) * self.sizes.group

    def _row(self, request, first, before):
        """The row of a query in the arrays. before: what `first_query` says."""
        return request * self.sizes.queries + before + first

    def _doubled(self, head: int) -> bool:
        return head % 4 < self.config.doubled_of_four


def _turn(number, of: int):
    """(number % of, number // of), one instruction each for a power of two; number is not negative."""
    if of & (of - 1) == 0:
        return number & (of - 1), number >> (of.bit_length() - 1)
    return lax.rem(number, of), lax.div(number, of)


def _columns(queries: int, heads: int) -> int:
    """Columns of a tile: 128, or fewer where a request has fewer queries."""
    return min(_COLUMNS, heads * pl.next_power_of_2(queries))


def _padded(problem: Problem) -> Problem:
    """The problem with heads of weight zero up to a count that divides a tile's columns."""
    heads = problem.q.shape[2]
    missing = next(count for count in _HEADS if count >= heads) - heads
    if not missing:
        return problem
    problem = problem.cut_out()
    q = jnp.pad(problem.q, ((0, 0), (0, 0), (0, missing), (0, 0)))
    weights = jnp.pad(problem.weights, ((0, 0), (0, 0), (0, missing)))
    return dataclasses.replace(problem, q=q, weights=weights)


def _at_least(array, rows: int):
    """The array with zeros after its last row up to `rows` rows."""
    missing = max(rows - array.shape[0], 0)
    return jnp.pad(array, ((0, missing), *((0, 0) for _ in array.shape[1:]))) if missing else array


def _config(kernel: str, target: Target, q: Any, stages: int) -> Config:
    """stages: of an e4m3 kernel without query tiles side by side. With all of them, one stage is work for every one."""
    queries, heads, dim = q.shape[-3:]
    parts = _side_by_side(queries, heads)
    if q.dtype.itemsize == 1:
        heuristic = {
            1: Config(stages=stages),
            2: Config(query_slots=3),
            4: Config(query_slots=2, stages=4, doubled_of_four=1),
        }[parts]
    else:  # tiles are twice as large
        parts = min(parts, 2)
        heuristic = Config(query_slots=2, stages=8 // parts, doubled_of_four=0)
    heuristic = dataclasses.replace(heuristic, query_tiles=parts)
    call = dict(heads=heads, dim=dim, itemsize=q.dtype.itemsize, query_tiles=parts)
    return tuned(kernel, target, heuristic, **call)


def _side_by_side(queries: int, heads: int) -> int:
    """Query tiles of a group: as many as there may be, if no more than an eighth of all is then added for nothing."""
    of_tile = _COLUMNS // next(count for count in _HEADS if count >= heads)
    tiles = pl.cdiv(queries, of_tile)
    fits = (parts for parts in (4, 2, 1) if parts * of_tile <= _MOST_QUERIES)
    return next(parts for parts in fits if 8 * pl.cdiv(tiles, parts) * parts <= 9 * tiles)


def _refuse(target: Target, q: Any) -> str | None:
    if target.arch != "sm_90":
        return f"needs sm_90, got {target.arch}"
    if q.shape[-2] > _HEADS[-1]:
        return f"takes at most {_HEADS[-1]} heads, got {q.shape[-2]}"
    return None
