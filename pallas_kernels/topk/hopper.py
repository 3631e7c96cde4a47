"""Exact top-k of score rows through Pallas Mosaic GPU, for sm_90: a block takes rows in turn, or a cluster a long row.

`hopper_row` and `hopper_block` are what a block's threads do. Much of it waits, so where rows are many there are four
blocks of one warpgroup on a multiprocessor, or two or three of two where they are long: a block takes 4 * threads *
stages * columns_per_thread + 8 * capacity bytes of shared memory and about 4096 more, 6144 more in a cluster. Where
rows are few a block is alone on its multiprocessor, and takes the room.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels import mosaic_backend, simt
from pallas_kernels.row_chunk import RowChunk
from pallas_kernels.target import Target, target_of
from pallas_kernels.topk import hopper_row
from pallas_kernels.topk.hopper_block import DENSE, MOST_STAGES, Memory, Problem, shared_arrays
from pallas_kernels.tuning import tuned

_MAX_K = 1 << 14


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    columns_per_thread: scores of a chunk a thread owns; an odd multiple of four, so that the threads' 16-byte reads of
        their own columns fall in different banks.
    stages: chunks in shared memory, one of them at work and the others on their way; 1 to 8.
    capacity: candidates kept; a multiple of 4 * threads, at least k + columns_per_thread, and in a cluster's blocks
        together below 65536.
    samples: scores the threshold is guessed from; a multiple of 4 * threads up to the capacity.
    neighbours: how many of them lie side by side: 4 to 32. A line of memory that one of them is in is read twice, so
        many together cost less; but neighbours that are alike tell less.
    parts: blocks that share a row, as a cluster: 1, 2, 4 or 8.
    blocks: how many blocks (or clusters) take the rows in turn; 0 for one a row.
    threads: of a block; 128, 256 or 512.
    """

    columns_per_thread: int = 28
    stages: int = 2
    capacity: int = 3072
    samples: int = 1024
    neighbours: int = 16
    parts: int = 1
    blocks: int = 0
    threads: int = 128


def topk_indices(
    scores: Float32[Array, "M N"],
    k: int,
    starts: Int32[Array, "M"] | None = None,
    ends: Int32[Array, "M"] | None = None,
    *,
    target: Target | str | None = None,
) -> Int32[Array, "M k"]:
    """The columns of the k greatest scores[m, starts[m]:ends[m]], lowest column first among equals; ascending, then -1.

    starts, ends: None, both of them, for whole rows.
    target: the device to compile for; None for the one that runs.
    """
    return solve(scores, k, starts, ends, config_topk_indices(target_of(target), scores, k))


def topk_indices_into(
    out: Int32[Array, "A k"],
    chunk: RowChunk,
    scores: Float32[Array, "M N"],
    k: int,
    starts: Int32[Array, "A"],
    ends: Int32[Array, "A"],
    *,
    target: Target | str | None = None,
) -> Int32[Array, "A k"]:
    """`out` with the top-k of scores in a chunk of its rows, which starts and ends are of too; nothing is copied."""
    return solve(scores, k, starts, ends, config_topk_indices(target_of(target), scores, k), (out, chunk))


def refuse_topk_indices(target: Target, scores, k: int, starts=None, ends=None) -> str | None:
    """Why this kernel cannot run, or None."""
    del starts, ends
    if target.arch != "sm_90":
        return f"Hopper kernels need sm_90, got {target.arch}"
    if scores.dtype != jnp.float32:
        return f"scores must be float32, got {scores.dtype}"
    if scores.shape[1] >= 1 << 30:
        return f"columns are counted in 30 bits, got N = {scores.shape[1]}"
    if k > _MAX_K:
        return f"the candidates of k > {_MAX_K} do not fit in shared memory, got {k}"
    return None


def config_topk_indices(target: Target, scores, k: int, starts=None, ends=None) -> Config:
    """The config this kernel would run with."""
    del starts, ends
    rows, columns = scores.shape
    cores = target.num_cores or 132
    long = columns > 32768
    capacity = _capacity(k, long)
    parts = _parts(rows, columns, cores, capacity)
    heuristic = Config(
        columns_per_thread=28 if columns > 16384 and capacity <= 16384 else 20,
        capacity=capacity,
        samples=min(2048 if long else 1024, capacity),
        parts=parts,
        threads=256 if long and capacity <= 8192 else 128,
    )
    if rows * parts <= cores and capacity <= 8192:
        heuristic = dataclasses.replace(heuristic, **_alone(-(-columns // parts), columns < DENSE * k))
    config = tuned("topk.hopper", target, heuristic, m=rows, n=columns, k=k)
    resident = cores * max(min(4, target.shared_memory // (_shared_bytes(config) + 1024)), 1)
    return dataclasses.replace(config, blocks=resident if rows > resident else 0)


def _capacity(k: int, long: bool) -> int:
    """Half of k above k: the sample leaves the number of candidates uncertain by a tenth; more for longer rows."""
    spare = k if long and k <= 8192 else k // 2
    return -(-(k + max(spare, 512)) // 1024) * 1024


def _parts(rows: int, columns: int, cores: int, capacity: int) -> int:
    """Blocks a row: as many as there are cores, but each with 16384 columns."""
    parts = 1
    while parts < 8 and 2 * parts * rows <= cores and columns >= 32768 * parts and 2 * parts * capacity < 1 << 16:
        parts *= 2
    return parts


def _alone(columns: int, is_dense: bool) -> dict[str, int]:
    """Config's fields for a block alone on its multiprocessor, with so many columns: one chunk, where it fits."""
    threads, most = 256, 36 if is_dense else 68
    each = -(-(columns + 3) // threads)  # a chunk begins up to three columns before them
    each += (4 - each) % 8
    if each <= most:
        return dict(threads=threads, columns_per_thread=each, stages=1)
    return dict(threads=threads, columns_per_thread=28, stages=3)


def _shared_bytes(config: Config) -> int:
    """Of a block."""
    problem = Problem(rows=1, length=1, k=1, **dataclasses.asdict(config))
    return sum(4 * length for length, _ in shared_arrays(problem).values())


@functools.partial(jax.jit, static_argnames=("k", "config"))
def solve(scores, k: int, starts, ends, config: Config, into: tuple[Array, RowChunk] | None = None):
    """topk_indices with a given config, or topk_indices_into an array's chunk."""
    rows, columns = scores.shape
    if rows == 0 or columns == 0:
        assert into is None
        return jnp.full((rows, k), -1, jnp.int32)
    require_legal(config, k)
    # The last scores of an array that no copy can end with come by ordinary stores, a chunk's barrier before their use.
    is_one_chunk = config.parts * (config.threads * config.columns_per_thread - 3) >= columns
    assert config.stages > 1 or is_one_chunk or rows * columns % 4 == 0, config
    operands = {"scores": scores}
    if starts is not None and ends is not None:
        operands |= {"starts": starts, "ends": ends}
    if into is not None:
        operands["chunk"] = into[1].operand()
    blocks = min(config.blocks or rows, rows)
    cut = dataclasses.asdict(dataclasses.replace(config, blocks=blocks))
    problem = Problem(rows=rows, length=columns, k=k, **cut)
    all_rows = rows if into is None else into[0].shape[0]
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem, operands=tuple(operands), all_rows=all_rows),
        kernel_name="topk_hopper",
        out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32) if into is None else (),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(config.parts,) if config.parts > 1 else (),
        cluster_names=("part",) if config.parts > 1 else (),
        num_threads=config.threads // simt.THREADS if config.threads > simt.THREADS else None,
        thread_name="warpgroup" if config.threads > simt.THREADS else None,
        scratch_types={name: plgpu.SMEM((length,), dtype) for name, (length, dtype) in shared_arrays(problem).items()},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=16,  # none is needed, and 0 is refused
        ),
    )
    if into is None:
        return mosaic_backend.call(kernel, *operands.values())
    return mosaic_backend.call_into(kernel, into[0], *operands.values())


def require_legal(config: Config, k: int) -> None:
    """Asserts what the kernel relies on."""
    assert config.columns_per_thread % 8 == 4 and config.parts in (1, 2, 4, 8), config
    assert config.neighbours in (4, 8, 16, 32), config
    assert 1 <= config.stages <= MOST_STAGES and config.blocks >= 0 and config.threads in (128, 256, 512), config
    assert config.capacity % (4 * config.threads) == config.samples % (4 * config.threads) == 0, config
    assert k + config.columns_per_thread <= config.capacity and config.samples <= config.capacity, config
    assert config.parts == 1 or config.parts * config.capacity < 1 << 16, config


def _kernel(*refs, problem: Problem, operands: tuple[str, ...], all_rows: int, **scratch):
    given = dict(zip((*operands, "out"), refs, strict=True))
    chunk = given.pop("chunk", None)
    first = jnp.int32(0) if chunk is None else RowChunk(chunk[0], problem.rows).first(all_rows)
    block = lax.axis_index("block")
    part = lax.axis_index("part") if problem.parts > 1 else jnp.int32(0)
    given |= scratch
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(*[scalar] * 3, *[plgpu.RefType()] * len(given)))
    def run(context, first, block, part, *refs):
        del context
        first, block, part = (simt.Value(x.registers.item()) for x in (first, block, part))
        pointers = dict(zip(given, map(simt.Pointer.to, refs), strict=True))
        if chunk is not None:
            own = {name: pointers[name].at(first) for name in ("starts", "ends")}
            pointers |= own | {"out": pointers["out"].row(first, problem.k)}
        hopper_row.write_topk(problem, Memory(**pointers), block, part)

    run(first, block, part, *given.values())
