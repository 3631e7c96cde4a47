"""Exact top-k of score rows through Pallas Mosaic GPU, for sm_90: a block takes rows in turn, or a cluster a long row.

A block is one warpgroup; `hopper_row` and `hopper_block` are what its threads do. Much of it waits, so a block is kept
small enough for three or four on a multiprocessor: 512 * stages * columns_per_thread + 8 * capacity + 3072 bytes of
shared memory, 4096 more in a cluster, and at most 128 registers a thread.
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
from pallas_kernels.topk.hopper_block import GROUP, MOST_STAGES, Memory, Problem, shared_arrays
from pallas_kernels.tuning import tuned

_MAX_K = 1 << 14


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    columns_per_thread: scores of a chunk a thread owns; an odd multiple of four, so that the threads' 16-byte reads of
        their own columns fall in different banks.
    stages: chunks in shared memory, one of them at work and the others on their way; 2 to 8.
    capacity: candidates kept; a multiple of 512, at least k + columns_per_thread.
    samples: scores the threshold is guessed from; a multiple of 512 up to the capacity.
    neighbours: how many of them lie side by side: 4 to 32. A line of memory that one of them is in is read twice, so
        many together cost less; but neighbours that are alike tell less.
    parts: blocks that share a row, as a cluster: 1, 2, 4 or 8.
    blocks: how many blocks (or clusters) take the rows in turn; 0 for one a row.
    """

    columns_per_thread: int = 28
    stages: int = 2
    capacity: int = 3072
    samples: int = 1024
    neighbours: int = 16
    parts: int = 1
    blocks: int = 0


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
    capacity, parts = _capacity(k, columns), _parts(rows, columns, cores)
    long = columns > 32768
    heuristic = Config(
        columns_per_thread=28 if columns > 16384 else 20,
        stages=4 if long and rows * parts <= cores else 2,  # alone on its multiprocessor, a block may take more room
        capacity=capacity,
        samples=min(2048 if long else 1024, capacity),
        parts=parts,
    )
    config = tuned("topk.hopper", target, heuristic, m=rows, n=columns, k=k)
    resident = cores * max(min(4, target.shared_memory // (_shared_bytes(config) + 1024)), 1)
    return dataclasses.replace(config, blocks=resident if rows > resident else 0)


def _shared_bytes(config: Config) -> int:
    """About what a block without a cluster takes."""
    return 512 * config.stages * config.columns_per_thread + 8 * config.capacity + 3072


def _capacity(k: int, columns: int) -> int:
    """Half of k above k: the sample leaves the number of candidates uncertain by a tenth; more for longer rows."""
    spare = k // 2 if columns <= 32768 else k
    return max(-(-(k + spare) // GROUP) * GROUP, 1024)


def _parts(rows: int, columns: int, cores: int) -> int:
    """Blocks a row: as many as there are cores, but each with 16384 columns."""
    parts = 1
    while parts < 8 and 2 * parts * rows <= cores and columns >= 32768 * parts:
        parts *= 2
    return parts


@functools.partial(jax.jit, static_argnames=("k", "config"))
def solve(scores, k: int, starts, ends, config: Config, into: tuple[Array, RowChunk] | None = None):
    """topk_indices with a given config, or topk_indices_into an array's chunk."""
    rows, columns = scores.shape
    if rows == 0 or columns == 0:
        assert into is None
        return jnp.full((rows, k), -1, jnp.int32)
    require_legal(config, k)
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
    assert 2 <= config.stages <= MOST_STAGES and config.blocks >= 0, config
    assert config.capacity % GROUP == config.samples % GROUP == 0, config
    assert k + config.columns_per_thread <= config.capacity and config.samples <= config.capacity, config


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
