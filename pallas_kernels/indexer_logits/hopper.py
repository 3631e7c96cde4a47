"""Index scores on Hopper (sm_90) as a Pallas Mosaic GPU kernel.

Grid: one persistent block an SM. A block's work is an equal share of all (query group, 64-key tile) pairs that any
query of the group can see, cut by a prefix sum over the groups, so causal masks and mixed request lengths balance by
themselves (schedule.py). Within a block

    four math warpgroups   take the share's tiles in turn: 64 keys x `columns` (query, head) pairs, wgmma into
                           registers, heads summed there, logits stored straight from registers (warpgroup.py);
    one copy warp          brings key tiles, their scales and the queries into shared memory with TMA;
    three fill warps       write -inf to an equal share of the tiles that no query sees.

Shared memory: `stages` key tiles of 64 * D elements and `query_slots` query tiles of columns * D, at most 130 KiB for
e4m3 and D = 128, 194 KiB for bf16. Registers: 112 a math thread (64 products, 32 weights), 32 a copy or fill thread.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.indexer_logits import warpgroup
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
from pallas_kernels.target import Target, target_of
from pallas_kernels.tuning import tuned

_HEADS = (16, 32, 64, 128)  # what a tile's columns divide by; other counts are padded with heads of weight zero
_COLUMNS = 128
_GROUP_COST = 5  # tiles that one warpgroup could do while it takes up a group: it waits for weights and ranges
_SMS = 132  # of an H100 SXM and an H200, where the device does not say


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut. No choice here changes a bit of the result.

    math_warpgroups: how many share a block's tiles.
    stages: key tiles in shared memory, a multiple of math_warpgroups.
    query_slots: query tiles in shared memory; half of them are ahead of the key tiles.
    doubled_of_four: of every four heads, how many take relu as x + |x| on the fma pipe rather than as a maximum on the
        alu pipe. The weights of those heads are halved, so the result is the same to the last bit.
    """

    math_warpgroups: int = 4
    stages: int = 8
    query_slots: int = 4
    doubled_of_four: int = 2

    def __post_init__(self):
        # A slot of the ring must stay with one warpgroup, or its barrier's phases are awaited out of turn.
        assert self.stages % self.math_warpgroups == 0


def indexer_logits(
    q: Num[Array, "M H D"],
    k: Num[Array, "N D"],
    weights: Float[Array, "M H"],
    starts: Int[Array, " M"],
    ends: Int[Array, " M"],
    *,
    k_scale: Float[Array, " N"] | None = None,
    target: Target | str | None = None,
) -> Float[Array, "M N"]:
    """The logits of M queries over N keys, -inf outside [starts, ends).

    target: the device to compile for, if not this one.
    """
    device = target_of(target)
    config = config_indexer_logits(device, q, k, weights, starts, ends, k_scale=k_scale)
    return solve(ragged_problem(q, k, weights, starts, ends, k_scale), config, num_sms=device.num_cores or _SMS)[0]


def paged_indexer_logits(
    q: Num[Array, "B Q H D"],
    cache: PagedKeys,
    weights: Float[Array, "B Q H"],
    block_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
    *,
    target: Target | str | None = None,
) -> Float[Array, "B Q L"]:
    """The logits of Q queries of B requests over L = P * page columns; query i sees keys < seq_lens - Q + i + 1."""
    device = target_of(target)
    config = config_paged_indexer_logits(device, q, cache, weights, block_table, seq_lens)
    problem = paged_problem(q, cache, weights, block_table, seq_lens)
    return solve(problem, config, num_sms=device.num_cores or _SMS)


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
    return _config("indexer_logits.hopper", target, q)


def config_paged_indexer_logits(target: Target, q: Any, cache: PagedKeys, *args: Any, **options: Any) -> Config:
    """The config this kernel would run with."""
    del cache, args, options
    return _config("paged_indexer_logits.hopper", target, q)


@functools.partial(jax.jit, static_argnames=("config", "num_sms"))
def solve(problem: Problem, config: Config, *, num_sms: int) -> Float[Array, "B Q L"]:
    """The logits of a problem with a given config, on `num_sms` multiprocessors."""
    if problem.is_empty:
        return nothing(problem)
    problem = _padded(problem)
    batch, queries, heads, dim = problem.q.shape
    tile = Tile(heads=heads, columns=_columns(queries, heads), dim=dim, itemsize=problem.q.dtype.itemsize)
    sizes = dict(group=tile.queries, keys=KEYS, blocks=num_sms, group_cost=_GROUP_COST)
    plan, ranges = schedule(problem, **sizes)
    rows = batch * queries
    q = problem.q.reshape(rows, *tile.query_view)
    weights = problem.weights.reshape(rows, heads)
    # A copy of queries takes up to four rows, one of keys 64: an array must hold as many for it to be cut from.
    q, weights = (_at_least(x, 4) for x in (q, weights))
    k, k_scale = problem.k, problem.k_scale
    if problem.block_table is None:
        k, k_scale = _at_least(k, KEYS), None if k_scale is None else _at_least(k_scale, KEYS)
    optional = [x for x in (k_scale, problem.block_table) if x is not None]
    kernel = _Kernel(
        tile=tile,
        config=config,
        queries=queries,
        groups=pl.cdiv(queries, tile.queries),
        columns=problem.columns,
        page=k.shape[1] if problem.block_table is not None else 0,
        pages=k.shape[0],
        has_scale=k_scale is not None,
    )
    call = plgpu.kernel(
        kernel.body,
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
    logits = call(q, k, weights, ranges, plan.shares, plan.prefix, plan.bounds, *optional)
    return logits.reshape(batch, queries, problem.columns)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The body of the kernel and the static sizes it needs.

    queries: of a request; groups: of a request's queries, tile.queries each; columns: of a row of logits.
    page: tokens of a page, or 0 where the keys lie in one array; pages: how many the cache has.
    """

    tile: Tile
    config: Config
    queries: int
    groups: int
    columns: int
    page: int
    pages: int
    has_scale: bool

    @property
    def tile_pages(self) -> int:
        """Pages that one key tile lies in, 0 without pages."""
        return max(KEYS // self.page, 1) if self.page else 0

    @property
    def tile_copies(self) -> int:
        """Copies that bring one key tile: of each page its 128-byte chunks and its scales."""
        return max(self.tile_pages, 1) * (self.tile.chunks + self.has_scale)

    def body(self, q, k, weights, ranges, shares, prefix, bounds, *rest):
        scale, table, out = self._optional(rest)
        tile, stages, slots = self.tile, self.config.stages, self.config.query_slots
        swizzle = (plgpu.SwizzleTransform(tile.row_bytes),)
        dtype = k.dtype
        plan = Schedule(shares, prefix, bounds)

        def scoped(q_smem, k_smem, scale_smem, q_full, q_free, k_full, k_free):
            warpgroup_index, block = lax.axis_index("warpgroup"), lax.axis_index("block")

            @pl.when(warpgroup_index < self.config.math_warpgroups)
            def _():
                plgpu.set_max_registers(112, action="increase")
                smem = (q_smem, k_smem, scale_smem)
                arrays, barriers = (weights, ranges, table, out), (q_full, q_free, k_full, k_free)
                self._math(plan, plan.visits(block), warpgroup_index, arrays, smem, barriers)

            @pl.when(warpgroup_index == self.config.math_warpgroups)
            def _():
                plgpu.set_max_registers(32, action="decrease")

                @plgpu.warp_map
                def _(warp):
                    @pl.when(warp == 0)
                    def _():
                        copy_keys = self._key_copier(k, scale, table, bounds, k_smem, scale_smem, k_full)
                        self._copy(plan, plan.visits(block), q, q_smem, copy_keys, (q_full, q_free, k_free))

                    @pl.when(warp > 0)
                    def _():
                        self._fill(plan, plan.fills(block), warp - 1, out)

        pl.run_scoped(
            scoped,
            plgpu.SMEM((slots, tile.chunks, tile.groups, *tile.group_shape), dtype, transforms=swizzle),
            plgpu.SMEM((stages, tile.chunks, KEYS, tile.chunk), dtype, transforms=swizzle),
            plgpu.SMEM((stages, KEYS), jnp.float32),
            plgpu.Barrier(num_arrivals=tile.groups * tile.chunks, num_barriers=slots),
            plgpu.Barrier(num_arrivals=self.config.math_warpgroups, num_barriers=slots),
            plgpu.Barrier(num_arrivals=self.tile_copies, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            collective_axes="warpgroup",
        )

    def _optional(self, rest):
        """(scale or None, block table or None, out) from the references after the fixed ones."""
        rest = list(rest)
        scale = rest.pop(0) if self.has_scale else None
        table = rest.pop(0) if self.page else None
        return scale, table, rest.pop()

    def _math(self, plan: Schedule, share: Share, index, arrays, smem, barriers):
        """One math warpgroup: every `math_warpgroups`-th tile of the block's share."""
        weights_ref, ranges_ref, table, out_ref = arrays
        q_smem, k_smem, scale_smem = smem
        q_full, q_free, k_full, k_free = barriers
        sizes = dict(queries=self.queries, columns=self.columns)
        load_weights = warpgroup.load_weights(self.tile, queries=self.queries, halved=self._doubled)
        load_rows = warpgroup.load_rows(self.tile, **sizes)
        multiply = warpgroup.multiply(self.tile)
        load_scales = warpgroup.load_scales()
        options = dict(pages=self.tile_pages, doubled=self._doubled, has_scale=self.has_scale)
        finish = warpgroup.sum_heads_and_store(self.tile, columns=self.columns, **options)
        turns, stages = self.config.math_warpgroups, self.config.stages

        @pl.loop(0, share.count)
        def _(n):
            group = share.first + n
            walk = plan.visited(group, share)
            slot = _turn(n, self.config.query_slots)
            place = self._place(group)
            weights = load_weights(weights_ref, *place)
            rows = load_rows(ranges_ref, out_ref, *place)
            plgpu.barrier_wait(q_full.at[slot])

            @pl.loop(lax.div(walk.begin + turns - 1 - index, turns), lax.div(walk.end + turns - 1 - index, turns))
            def _(turn):
                step = turn * turns + index
                stage, key_tile = _turn(step, stages), walk.tile(step)
                pages = self._pages(table, plan.bounds, group, key_tile)
                mapped = [jnp.where((page >= 0) & (page < self.pages), 1, 0) for page in pages]
                plgpu.barrier_wait(k_full.at[stage])
                scales = [load_scales(scale_smem.at[stage])] if self.has_scale else []
                products = multiply(k_smem.at[stage], q_smem.at[slot])
                finish(products, weights, rows, *scales, *mapped, key_tile * KEYS)
                # Not before the logits are stored: only then are the scales sure to have left shared memory.
                plgpu.barrier_arrive(k_free.at[stage])

            plgpu.barrier_arrive(q_free.at[slot])

    def _copy(self, plan: Schedule, share: Share, q, q_smem, copy_keys, barriers):
        """The copy warp: key tiles as stages come free, queries half the slots ahead of them."""
        q_full, q_free, k_free = barriers
        stages, slots = self.config.stages, self.config.query_slots
        ahead = slots // 2

        def copy_queries(n):
            slot = _turn(n, slots)

            @pl.when(n >= slots)
            def _():
                plgpu.barrier_wait(q_free.at[slot])

            request, first = self._place(share.first + n)
            row = request * self.queries + first
            for chunk in range(self.tile.chunks):
                for group in range(self.tile.groups):
                    source = q.at[self.tile.query_slice(row, group, chunk)]
                    plgpu.copy_gmem_to_smem(source, q_smem.at[slot, chunk, group], q_full.at[slot])

        @pl.loop(0, jnp.minimum(ahead, share.count))
        def _(n):
            copy_queries(n)

        @pl.loop(0, share.count)
        def _(n):
            group = share.first + n
            walk = plan.visited(group, share)

            @pl.loop(walk.begin, walk.end)
            def _(step):
                stage = _turn(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[stage])

                copy_keys(group, walk.tile(step), stage)

            @pl.when(n + ahead < share.count)
            def _():
                copy_queries(n + ahead)

    def _key_copier(self, k, scale, table, bounds, k_smem, scale_smem, k_full):
        """-> f(group, tile, stage): brings the keys and scales of a tile."""

        def copy(source, row, count, into, stage):
            rows = pl.ds(row, count)
            for chunk in range(self.tile.chunks):
                part = pl.ds(chunk * self.tile.chunk, self.tile.chunk)
                target = k_smem.at[stage, chunk, pl.ds(into, count)]
                plgpu.copy_gmem_to_smem(k.at[(*source, rows, part)], target, k_full.at[stage])
            if self.has_scale:
                target = scale_smem.at[stage, pl.ds(into, count)]
                plgpu.copy_gmem_to_smem(scale.at[(*source, rows)], target, k_full.at[stage])

        def copy_tile(group, tile, stage):
            if not self.page:
                copy((), tile * KEYS, KEYS, 0, stage)
                return
            count = min(self.page, KEYS)
            row = lax.rem(tile * KEYS, self.page) if self.page > KEYS else 0
            for i, page in enumerate(self._pages(table, bounds, group, tile)):
                copy((page,), row, count, i * count, stage)  # zeros from a page that the cache does not have

        return copy_tile

    def _pages(self, table, bounds, group, tile):
        """The pages that a tile lies in."""
        if not self.page:
            return []
        request, first = lax.div(group, self.groups), lax.div(tile * KEYS, self.page)
        if self.tile_pages == 1:
            return [table[request, first]]
        last = lax.div(bounds[group, 2] - 1, self.page)  # the table holds nothing past the last visible key
        return [table[request, jnp.minimum(first + i, last)] for i in range(self.tile_pages)]

    def _fill(self, plan: Schedule, share: Share, warp, out):
        """One of three fill warps: every third unseen tile of the block's share of those."""
        fill = warpgroup.fill_tile(self.tile, queries=self.queries, columns=self.columns)

        @pl.loop(0, share.count)
        def _(n):
            group = share.first + n
            walk = plan.unseen(group, share)
            request, first = self._place(group)

            @pl.loop(lax.div(walk.begin + 2 - warp, 3), lax.div(walk.end + 2 - warp, 3))
            def _(turn):
                fill(out, request, first, walk.tile(turn * 3 + warp) * KEYS)

    def _place(self, group):
        """(request, first query) of a group."""
        return lax.div(group, self.groups), lax.rem(group, self.groups) * self.tile.queries

    def _doubled(self, head: int) -> bool:
        return head % 4 < self.config.doubled_of_four


def _turn(number, of: int):
    """number % of, which is one instruction for a power of two."""
    return number & (of - 1) if of & (of - 1) == 0 else lax.rem(number, of)


def _columns(queries: int, heads: int) -> int:
    """Columns of a tile: 128, or fewer where a request has fewer queries."""
    return min(_COLUMNS, heads * pl.next_power_of_2(queries))


def _padded(problem: Problem) -> Problem:
    """The problem with heads of weight zero up to a count that divides a tile's columns."""
    heads = problem.q.shape[2]
    missing = next(count for count in _HEADS if count >= heads) - heads
    if not missing:
        return problem
    q = jnp.pad(problem.q, ((0, 0), (0, 0), (0, missing), (0, 0)))
    weights = jnp.pad(problem.weights, ((0, 0), (0, 0), (0, missing)))
    return dataclasses.replace(problem, q=q, weights=weights)


def _at_least(array, rows: int):
    """The array with zeros after its last row up to `rows` rows."""
    missing = max(rows - array.shape[0], 0)
    return jnp.pad(array, ((0, missing), *((0, 0) for _ in array.shape[1:]))) if missing else array


def _config(kernel: str, target: Target, q: Any) -> Config:
    heads, dim = q.shape[-2:]
    heuristic = Config(query_slots=4 if q.dtype.itemsize == 1 else 2)  # bf16 tiles are twice as large
    return tuned(kernel, target, heuristic, heads=heads, dim=dim, itemsize=q.dtype.itemsize)


def _refuse(target: Target, q: Any) -> str | None:
    if target.arch != "sm_90":
        return f"needs sm_90, got {target.arch}"
    if q.shape[-2] > _HEADS[-1]:
        return f"takes at most {_HEADS[-1]} heads, got {q.shape[-2]}"
    return None
