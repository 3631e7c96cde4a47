"""Sparse MLA of at most 32 heads on Hopper (sm_90): the keys on the long side of the products, heads not padded to 64.

Grid: a block for each multiprocessor, which goes over rows, or splits of rows. `hopper_few_block` tells how it works.
Shared memory: queries (18 KiB for 16 heads), weights (4 KiB), and a ring of as many stages as fit: for bf16 keys eight
of 24 KiB, of which a block of 64 keys takes three. Registers: four a thread for each head, for the output.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_backend
from pallas_kernels.sparse_mla import hopper_few_attend, hopper_few_block, hopper_few_gather
from pallas_kernels.sparse_mla.hopper_arrays import pointers
from pallas_kernels.sparse_mla.hopper_block import VALUE_WIDTH
from pallas_kernels.sparse_mla.hopper_few_block import FewProblem, Memory
from pallas_kernels.sparse_mla.merge import merge_splits
from pallas_kernels.sparse_mla.wgmma import ROW_BYTES

_MATH_REGISTERS, _GATHER_REGISTERS = 240, 128  # of a thread beside two gathering warpgroups; there are 504 of three


def solve(problem: FewProblem, arrays: dict[str, Any]):
    """out[M, H, 512] and lse f32[M, H]. arrays: those of hopper_block.Memory that are read, but no None."""
    single = problem.splits == 1
    shape = (problem.rows, problem.heads) if single else (problem.splits, problem.rows, problem.heads)
    dtype = arrays["q"].dtype
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem, names=(*arrays, "out", "lse")),
        out_type=(
            jax.ShapeDtypeStruct((*shape, VALUE_WIDTH), dtype if single else jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(problem.blocks,),
        grid_names=("block",),
        num_threads=hopper_few_block.MATH_WARPGROUPS + problem.gatherers,
        thread_name="warpgroup",
        kernel_name="sparse_mla_hopper_few",
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    out, lse = mosaic_backend.call(kernel, *arrays.values())
    return (out, lse) if single else merge_splits(out, lse, arrays["sink"], dtype, interpret=False)


def _kernel(*refs, problem: FewProblem, names: tuple[str, ...]):
    warpgroup = lax.axis_index("warpgroup")

    def inlined(function, refs):
        """Calls function(problem, memory) in every thread of a warpgroup."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def inner(context, *refs):
            del context
            named = dict(zip((*names, "queries", "keys", "weights", "words"), refs, strict=True))
            function(problem, Memory(**pointers(named)))

        inner(*refs)

    def scoped(*shared):
        inlined(hopper_few_block.prepare, (*refs, *shared))

        # Of two warpgroups each thread can have all registers that there are.
        shares = problem.gatherers > 1

        @pl.when(warpgroup == 0)
        def _():
            if shares:
                plgpu.set_max_registers(_MATH_REGISTERS, action="increase")
            inlined(hopper_few_attend.attend, (*refs, *shared))

        @pl.when(warpgroup != 0)
        def _():
            if shares:
                plgpu.set_max_registers(_GATHER_REGISTERS, action="decrease")
            inlined(hopper_few_gather.gather, (*refs, *shared))

    pl.run_scoped(
        scoped,
        plgpu.SMEM((problem.tiles * problem.columns, 64), jnp.bfloat16),
        plgpu.SMEM((problem.stages * problem.stage_bytes // ROW_BYTES, 64), jnp.bfloat16),
        plgpu.SMEM((2 * problem.columns, 64), jnp.bfloat16),
        plgpu.SMEM((hopper_few_block.WORDS,), jnp.int32),
        collective_axes="warpgroup",
    )
