"""Attention of every row over its own range of keys on Hopper (sm_90), as a Pallas Mosaic GPU kernel.

Grid: a block for each 128 rows of a head, the rows that usually see most first. Two warpgroups take 64 of the rows
each and go through the blocks of keys that any row sees, with an online softmax in registers; a third brings keys and
values with TMA. Taking turns, so that one multiplies while the other is at its softmax, was no faster.

Blocks of keys are cut from key 0 on, and one that a row does not see leaves its sums as they are to the last bit, so a
row does not depend on its neighbours. Blocks that every row of the 128 sees in whole are neither masked nor looked at.
In the others a value that is not finite would reach rows that do not see it, as 0 * NaN: there the third warpgroup
makes it 0, and a row that does see its key takes it with a weight of NaN. So a row that sees one is not finite in that
value's column, or in all.

Shared memory, keys 256 wide: 64 KiB of queries, later the output, and two stages of 64 keys, 32 KiB, with their
values, as much again. Registers: 216 a thread that multiplies, 128 of them sums, and 72 one that copies.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import mosaic_backend
from pallas_kernels.mosaic_backend import load
from pallas_kernels.softmax import LOG2E, positively_scaled
from pallas_kernels.target import Target, target_of

_ROWS = 64  # of a warpgroup
_SIDES = 2  # warpgroups that multiply
_BLOCK_ROWS = _SIDES * _ROWS
_COLUMNS = 64  # of a swizzled tile
_WIDTH = 256  # of keys and of values, at most
_ATTEND_REGISTERS, _COPY_REGISTERS = 216, 72  # a thread; three warpgroups have 504 between them
_SHARED_BYTES = 227 * 1024 - 4096  # but for bounds, flags and barriers
_TRANSFORMS = (plgpu.TilingTransform((8, _COLUMNS)), plgpu.SwizzleTransform(128))
_TILE, _ROW, _COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut: keys of a block, a multiple of 64, and how many blocks are in shared memory."""

    block_keys: int
    stages: int = 2


def dense_mla(
    q: BFloat16[Array, "M H D"],
    k: BFloat16[Array, "N H D"],
    v: BFloat16[Array, "N H V"],
    starts: Int32[Array, " M"],
    ends: Int32[Array, " M"],
    *,
    sm_scale: float,
    target: Target | str | None = None,
) -> tuple[BFloat16[Array, "M H V"], Float32[Array, "M H"]]:
    """out and the natural log-sum-exp of every row over the keys [starts, ends); 0 and -inf where there are none.

    target: the device to compile for; None for the one that runs.
    """
    config = config_dense_mla(target_of(target), q, k, v, starts, ends, sm_scale=sm_scale)
    assert config is not None, "refuse_dense_mla comes first"
    return solve(q, k, v, starts, ends, config, sm_scale=float(sm_scale))


def refuse_dense_mla(target: Target, q: Any, k: Any, v: Any, starts: Any, ends: Any, *, sm_scale: float) -> str | None:
    """Why this kernel cannot run, or None."""
    if target.arch != "sm_90":
        return f"needs sm_90, got {target.arch}"
    if q.dtype != jnp.bfloat16:
        return f"q, k and v must be bfloat16, got {q.dtype}"
    widths = q.shape[-1], v.shape[-1]
    if any(width % _COLUMNS or not 0 < width <= _WIDTH for width in widths):
        return f"heads must be 64, 128, 192 or 256 wide, got {widths[0]} and {widths[1]}"
    if config_dense_mla(target, q, k, v, starts, ends, sm_scale=sm_scale) is None:
        return f"no block of its keys fits beside queries {widths[0]} and values {widths[1]} wide"
    return None


def config_dense_mla(
    target: Target, q: Any, k: Any, v: Any, starts: Any, ends: Any, *, sm_scale: float
) -> Config | None:
    """The config this kernel would run with, None if none fits. Bits must not depend on the number of rows."""
    width, value_width = q.shape[-1], v.shape[-1]
    choices = [Config(64)]
    if value_width <= 128:  # else the scores of 128 keys find no registers beside the sums
        choices = [Config(128), Config(64, stages=3), Config(64)]
    return next((x for x in choices if shared_bytes(x, width, value_width) <= _SHARED_BYTES), None)


def shared_bytes(config: Config, width: int, value_width: int) -> int:
    """Of queries, which make room for an output of their width, of another one, and of keys and values."""
    rows = _BLOCK_ROWS * (width if width == value_width else width + value_width)
    return 2 * (rows + config.stages * config.block_keys * (width + value_width))


@functools.partial(jax.jit, static_argnames=("config", "sm_scale"))
def solve(q, k, v, starts, ends, config: Config, *, sm_scale: float):
    """dense_mla with a given config."""
    (rows, heads, _), (keys, _, value_width) = q.shape, v.shape
    if 0 in (rows, heads, keys):
        return jnp.zeros((rows, heads, value_width), q.dtype), jnp.full((rows, heads), -jnp.inf, jnp.float32)
    q, sm_scale = positively_scaled(q, sm_scale)
    tiles = pl.cdiv(rows, _BLOCK_ROWS)
    starts, ends = _bounds(starts, ends, keys, tiles * _BLOCK_ROWS)
    limits = _limits(starts, ends, config.block_keys)
    kernel = _Kernel(config, heads, tiles, sm_scale * LOG2E)
    run = plgpu.kernel(
        lambda *refs: kernel.body(_Arrays(*refs)),
        out_type=(
            jax.ShapeDtypeStruct((_padded_rows(rows, _ROWS), heads, value_width), q.dtype),
            jax.ShapeDtypeStruct((heads, tiles * _BLOCK_ROWS), jnp.float32),
        ),
        grid=(tiles * heads,),
        grid_names=("block",),
        num_threads=_SIDES + 1,
        thread_name="warpgroup",
        kernel_name="dense_mla_hopper",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    q, k, v = (_padded(x, least) for x, least in ((q, _ROWS), (k, config.block_keys), (v, config.block_keys)))
    out, lse = mosaic_backend.call(run, q, k, v, starts, ends, limits)
    return out[:rows], lse[:, :rows].T


def _bounds(starts, ends, keys: int, rows: int):
    """starts and ends clipped to the keys, both 0 where a row sees none; of `rows` rows, those past the last as it."""
    starts, ends = jnp.maximum(starts, 0), jnp.minimum(ends, keys)
    sees = starts < ends
    return tuple(jnp.pad(jnp.where(sees, x, 0), (0, rows - x.shape[0]), mode="edge") for x in (starts, ends))


def _limits(starts, ends, block_keys: int):
    """i32[blocks, 4], of each block of rows: the first block of keys that one of them sees, the first and the end of
    those that all see whole, and the end.
    """
    starts, ends = (x.reshape(-1, _BLOCK_ROWS) for x in (starts, ends))
    is_empty = starts == ends
    first = jnp.min(jnp.where(is_empty, jnp.iinfo(jnp.int32).max, starts), axis=1) // block_keys
    last = pl.cdiv(jnp.max(ends, axis=1), block_keys)
    first = jnp.minimum(first, last)
    whole = jnp.clip(pl.cdiv(jnp.max(starts, axis=1), block_keys), first, last)
    return jnp.stack([first, whole, jnp.clip(jnp.min(ends, axis=1) // block_keys, whole, last), last], axis=1)


def _padded(array, least: int):
    """The array with zeros after its last row. Copies take eights of rows, and no more than the array has."""
    missing = _padded_rows(array.shape[0], least) - array.shape[0]
    return jnp.pad(array, ((0, missing), (0, 0), (0, 0))) if missing else array


def _padded_rows(rows: int, least: int) -> int:
    return max(pl.cdiv(rows, 8) * 8, least)


class _Arrays(NamedTuple):
    """References to global memory. limits: as `_limits` says; lse: [heads, rows]."""

    q: Any
    k: Any
    v: Any
    starts: Any
    ends: Any
    limits: Any
    out: Any
    lse: Any


class _Memory(NamedTuple):
    """References to shared memory, and barriers.

    queries, out: of either side, out in place of the queries or an array of its own. keys, values: of every stage.
    bounds: starts and ends of a side's rows.
    broken: of every stage, NaN for a key with a value that is not finite, else 0. lse: of either side.
    q_full, k_full, v_full: what was copied is there; k_free, v_free: both sides have used it. Of values that have to be
    looked at, v_raw: they are there, and clean: that is done.
    """

    queries: Any
    out: list[Any]
    keys: Any
    values: Any
    bounds: Any
    broken: Any
    lse: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    v_raw: Any
    clean: Any


class _Sums(NamedTuple):
    """What a side has of its rows so far.

    acc: f32[64, V], weights times values. top: f32[64], the product that weights are relative to. total: their sums.
    """

    acc: Any
    top: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The body of the kernel and the static sizes it needs. scale_log2: from q . k to logits in base 2, positive."""

    config: Config
    heads: int
    tiles: int
    scale_log2: float

    def body(self, given: _Arrays):
        keys, stages = self.config.block_keys, self.config.stages
        width, value_width = given.q.shape[-1], given.v.shape[-1]
        pl.run_scoped(
            lambda *refs: self._scoped(given, _Memory(*refs)),
            plgpu.SMEM((_SIDES, _ROWS, width), jnp.bfloat16, transforms=_TRANSFORMS),
            [plgpu.SMEM((_SIDES, _ROWS, value_width), jnp.bfloat16, transforms=_TRANSFORMS)] * (width != value_width),
            plgpu.SMEM((stages, keys, width), jnp.bfloat16, transforms=_TRANSFORMS),
            plgpu.SMEM((stages, keys, value_width), jnp.bfloat16, transforms=_TRANSFORMS),
            plgpu.SMEM((_SIDES, 2, _ROWS), jnp.int32),
            plgpu.SMEM((stages, keys), jnp.float32),
            plgpu.SMEM((_SIDES, _ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=3, num_barriers=_SIDES),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=_SIDES, num_barriers=stages),
            plgpu.Barrier(num_arrivals=_SIDES, num_barriers=stages),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages),
            collective_axes="warpgroup",
        )

    def _scoped(self, given: _Arrays, memory: _Memory):
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        head, tile = lax.div(block, self.tiles), self.tiles - 1 - lax.rem(block, self.tiles)
        limits = [given.limits[tile, i] for i in range(4)]

        @pl.when(warpgroup < _SIDES)
        def _():
            plgpu.set_max_registers(_ATTEND_REGISTERS, action="increase")
            self._attend(given, memory, warpgroup, head, tile * _BLOCK_ROWS + warpgroup * _ROWS, limits)

        @pl.when(warpgroup == _SIDES)
        def _():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            self._copy(given, memory, head, limits)

    # One of the sides.

    def _attend(self, given: _Arrays, memory: _Memory, side, head, row, limits):
        queries, bounds, full = memory.queries.at[side], memory.bounds.at[side], memory.q_full.at[side]
        rows = pl.ds(row, _ROWS)
        plgpu.copy_gmem_to_smem(given.q.at[rows, head], queries, full)
        plgpu.copy_gmem_to_smem(given.starts.at[rows], bounds.at[0], full)
        plgpu.copy_gmem_to_smem(given.ends.at[rows], bounds.at[1], full)
        plgpu.barrier_wait(full)
        seen = [load(bounds.at[i], _ROW, optimized=False) for i in range(2)]

        def of_rows(value: float):
            return plgpu.layout_cast(jnp.full((_ROWS,), value, jnp.float32), _ROW)

        acc = plgpu.layout_cast(jnp.zeros((_ROWS, given.v.shape[-1]), jnp.float32), _TILE)
        sums = _Sums(acc, of_rows(-jnp.inf), of_rows(0.0))
        first, whole, whole_end, last = limits
        for begin, end, is_whole in ((first, whole, False), (whole, whole_end, True), (whole_end, last, False)):
            step = functools.partial(self._step, memory, queries, seen, first, is_whole)
            sums = lax.fori_loop(begin, end, step, sums)

        is_empty = sums.total == 0.0
        safe = jnp.where(is_empty, 1.0, sums.total)
        memory.lse.at[side][...] = jnp.where(is_empty, -jnp.inf, sums.top * (self.scale_log2 / LOG2E) + jnp.log(safe))
        out = memory.out[0].at[side] if memory.out else queries
        out[...] = (sums.acc * _by_row(1.0 / safe, sums.acc)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, given.out.at[rows, head])
        plgpu.copy_smem_to_gmem(memory.lse.at[side], given.lse.at[head, rows])
        plgpu.wait_smem_to_gmem(0)

    def _step(self, memory: _Memory, queries, seen, first, is_whole: bool, block, sums: _Sums) -> _Sums:
        """The sums with one more block of keys. is_whole: whether every row of either side sees all of it."""
        slot = lax.rem(block - first, self.config.stages)
        plgpu.barrier_wait(memory.k_full.at[slot])

        def scores(acc):
            plgpu.wgmma(acc, queries, memory.keys.at[slot].transpose((1, 0)))
            return acc[...]

        logits = pl.run_scoped(scores, plgpu.ACC((_ROWS, self.config.block_keys), jnp.float32))
        plgpu.barrier_arrive(memory.k_free.at[slot])
        inside = None
        if not is_whole:
            key = block * self.config.block_keys + plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=_TILE)
            inside = (key >= _by_row(seen[0], logits)) & (key < _by_row(seen[1], logits))
            logits = jnp.where(inside, logits, -jnp.inf)
        top = jnp.maximum(sums.top, logits.max(axis=1))
        # While no key was seen the maximum is -inf, and -inf - -inf would be NaN.
        safe_top = jnp.where(top == -jnp.inf, 0.0, top)
        # Scaled where it is subtracted from, in one instruction, whether the block is masked or not: the same bits.
        weights = jnp.exp2(logits * self.scale_log2 - _by_row(safe_top * self.scale_log2, logits))
        decay = jnp.exp2((sums.top - safe_top) * self.scale_log2)
        total = sums.total * decay + weights.sum(axis=1)
        acc = sums.acc * _by_row(decay, sums.acc)
        if is_whole:
            plgpu.barrier_wait(memory.v_full.at[slot])
        else:
            assert inside is not None
            plgpu.barrier_wait(memory.clean.at[slot])
            broken = load(memory.broken.at[slot], _COLUMN, optimized=False)
            weights += jnp.where(inside, lax.broadcast_in_dim(broken, logits.shape, [1]), 0.0)
        acc = _add_product(acc, weights.astype(jnp.bfloat16), memory.values.at[slot])
        plgpu.barrier_arrive(memory.v_free.at[slot])
        return _Sums(acc, top, total)

    # The warpgroup that copies.

    def _copy(self, given: _Arrays, memory: _Memory, head, limits):
        first, whole, whole_end, last = limits

        @pl.loop(first, last)
        def _(block):
            slot = lax.rem(block - first, self.config.stages)
            rows = pl.ds(block * self.config.block_keys, self.config.block_keys)
            is_reused = block - first >= self.config.stages
            is_whole = (block >= whole) & (block < whole_end)
            pl.when(is_reused)(lambda: plgpu.barrier_wait(memory.k_free.at[slot]))
            plgpu.copy_gmem_to_smem(given.k.at[rows, head], memory.keys.at[slot], memory.k_full.at[slot])
            pl.when(is_reused)(lambda: plgpu.barrier_wait(memory.v_free.at[slot]))

            @pl.when(is_whole)
            def _():
                plgpu.copy_gmem_to_smem(given.v.at[rows, head], memory.values.at[slot], memory.v_full.at[slot])

            @pl.when(jnp.logical_not(is_whole))
            def _():
                plgpu.copy_gmem_to_smem(given.v.at[rows, head], memory.values.at[slot], memory.v_raw)
                plgpu.barrier_wait(memory.v_raw)
                self._clean(memory.values.at[slot], memory.broken.at[slot])
                plgpu.commit_smem()
                plgpu.barrier_arrive(memory.clean.at[slot])

    def _clean(self, values, broken):
        """Makes values 0 that are not finite, and tells of their keys. By pieces for which it has registers."""
        for row in range(0, self.config.block_keys, _ROWS):
            rows, found = pl.ds(row, _ROWS), []
            for column in range(0, values.shape[-1], _COLUMNS):
                part = values.at[rows, pl.ds(column, _COLUMNS)]
                value = load(part, _TILE).astype(jnp.float32)
                is_finite = jnp.abs(value) < jnp.inf
                part[...] = jnp.where(is_finite, value, 0.0).astype(jnp.bfloat16)
                found.append(jnp.where(is_finite, 0.0, 1.0).max(axis=1))
            broken.at[rows][...] = jnp.where(functools.reduce(jnp.maximum, found) > 0.0, jnp.nan, 0.0)


def _add_product(acc, a, b):
    """acc + a b."""
    return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.ACC.init(acc))


def _by_row(value, like):
    """A number a row, for every column of `like`."""
    return lax.broadcast_in_dim(value, like.shape, [0])
