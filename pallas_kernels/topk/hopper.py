"""Exact top-k of score rows through Pallas Mosaic GPU, for sm_90: one block a row, or a cluster for few long rows.

A block is one warpgroup; `hopper_row` is what its threads do. Much of it waits, so a block is kept small enough for
four or five on a multiprocessor: 512 * stages * columns_per_thread + 8 * capacity + 2304 bytes of shared memory.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels import simt
from pallas_kernels.target import Target, target_of
from pallas_kernels.topk import hopper_row
from pallas_kernels.tuning import tuned

_MAX_K = 1 << 14


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    columns_per_thread: scores of a chunk a thread owns; an odd multiple of four, so that the threads' 16-byte reads of
        their own columns fall in different banks.
    stages: chunks in shared memory, one of them at work and the others on their way; at least 2.
    capacity: candidates kept; a multiple of 512, at least k + columns_per_thread.
    samples: scores the threshold is guessed from; a multiple of 512 up to the capacity.
    parts: blocks that share a row, as a cluster: 1, 2, 4 or 8.
    """

    columns_per_thread: int = 28
    stages: int = 2
    capacity: int = 3072
    samples: int = 1024
    parts: int = 1


def topk_indices(
    scores: Float32[Array, "M N"],
    k: int,
    starts: Int32[Array, "M"],
    ends: Int32[Array, "M"],
    *,
    target: Target | str | None = None,
) -> Int32[Array, "M k"]:
    """The columns of the k greatest scores[m, starts[m]:ends[m]], lowest column first among equals; ascending, then -1.

    target: the device to compile for; None for the one that runs.
    """
    return solve(scores, k, starts, ends, config_topk_indices(target_of(target), scores, k))


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
    capacity = _capacity(k, columns)
    heuristic = Config(
        columns_per_thread=20 if columns <= 32768 else 28,
        capacity=capacity,
        samples=min(1024 if columns <= 32768 else 2048, capacity),
        parts=_parts(rows, columns, target.num_cores or 132),
    )
    return tuned("topk.hopper", target, heuristic, m=rows, n=columns, k=k)


def _capacity(k: int, columns: int) -> int:
    """Half of k above k: the sample leaves the number of candidates uncertain by a tenth; more for longer rows."""
    spare = k // 2 if columns <= 32768 else k
    return max(-(-(k + spare) // hopper_row.GROUP) * hopper_row.GROUP, 1024)


def _parts(rows: int, columns: int, cores: int) -> int:
    """Blocks a row: as many as there are cores, but each with 16384 columns."""
    parts = 1
    while parts < 8 and 2 * parts * rows <= cores and columns >= 32768 * parts:
        parts *= 2
    return parts


@functools.partial(jax.jit, static_argnames=("k", "config"))
def solve(scores, k: int, starts, ends, config: Config) -> Int32[Array, "M k"]:
    """topk_indices with a given config."""
    rows, columns = scores.shape
    if rows == 0 or columns == 0:
        return jnp.full((rows, k), -1, jnp.int32)
    require_legal(config, k)
    problem = hopper_row.Problem(rows=rows, length=columns, k=k, **dataclasses.asdict(config))
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem),
        out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        cluster=(config.parts,) if config.parts > 1 else (),
        cluster_names=("part",) if config.parts > 1 else (),
        scratch_types=_scratch(problem),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=16,  # none is needed, and 0 is refused
        ),
    )
    return kernel(scores, starts, ends)


def require_legal(config: Config, k: int) -> None:
    """Asserts what the kernel relies on."""
    assert config.columns_per_thread % 8 == 4 and config.stages >= 2 and config.parts in (1, 2, 4, 8), config
    assert config.capacity % hopper_row.GROUP == config.samples % hopper_row.GROUP == 0, config
    assert k + config.columns_per_thread <= config.capacity and config.samples <= config.capacity, config


def _scratch(problem: hopper_row.Problem) -> dict[str, Any]:
    """The shared arrays of hopper_row.Memory."""
    return dict(
        chunks=plgpu.SMEM((problem.stages * problem.chunk,), jnp.float32),
        keys=plgpu.SMEM((problem.capacity,), jnp.int32),
        columns=plgpu.SMEM((problem.capacity,), jnp.int32),
        words=plgpu.SMEM((problem.words,), jnp.int32),
    )


def _kernel(scores_ref, starts_ref, ends_ref, out_ref, *, problem: hopper_row.Problem, **scratch):
    row = lax.axis_index("row")
    part = lax.axis_index("part") if problem.parts > 1 else jnp.int32(0)
    names, refs = zip(*scratch.items(), strict=True)
    ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(scalar, scalar, *[ref] * (4 + len(refs))))
    def run(context, row, part, *refs):
        del context
        row, part = (simt.Value(x.registers.item()) for x in (row, part))
        pointers = dict(zip(("scores", "starts", "ends", "out", *names), map(simt.Pointer.to, refs), strict=True))
        hopper_row.write_topk(problem, hopper_row.Memory(**pointers), row, part)

    run(row, part, scores_ref, starts_ref, ends_ref, out_ref, *refs)
