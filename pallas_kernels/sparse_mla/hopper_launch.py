"""What launching either Hopper kernel takes: results, threads, and code for every thread of a warpgroup."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_backend
from pallas_kernels.simt import Pointer
from pallas_kernels.sparse_mla.hopper_arrays import pointers
from pallas_kernels.sparse_mla.hopper_block import VALUE_WIDTH, Problem
from pallas_kernels.sparse_mla.merge import merge_splits

_REGISTERS = 512  # of a multiprocessor, for each thread of a warpgroup
Code = Callable[[dict[str, Pointer]], None]  # of a thread, from the arrays by name


def launch(
    problem: Problem,
    arrays: Mapping[str, Any],
    shared: Mapping[str, Any],
    *,
    name: str,
    prepare: Code,
    roles: Sequence[tuple[int, int | None, Code]],
):
    """out[M, H, 512] and lse f32[M, H] of problem.blocks blocks.

    arrays: those of Arrays that are read, but no None. shared: the arrays in shared memory, plgpu.SMEM.
    prepare: runs in every thread first.
    roles: the number of warpgroups that next run some code, and the registers that a thread of theirs has, more or
    fewer than it begins with, or None for as many.
    """
    single = problem.splits == 1
    shape = (problem.rows, problem.heads) if single else (problem.splits, problem.rows, problem.heads)
    dtype = arrays["q"].dtype
    names = (*arrays, "out", "lse", *shared)
    warpgroups = sum(count for count, _, _ in roles)

    def inlined(code: Code, refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def inner(context, *refs):
            del context
            code(pointers(dict(zip(names, refs, strict=True))))

        inner(*refs)

    def body(*refs):
        warpgroup = lax.axis_index("warpgroup")

        def scoped(*shared_refs):
            every = (*refs, *shared_refs)
            inlined(prepare, every)
            first = 0
            for count, registers, code in roles:
                has_role = (warpgroup >= first) & (warpgroup < first + count)
                run_if(has_role, registers, lambda code=code: inlined(code, every))
                first += count

        pl.run_scoped(scoped, *shared.values(), collective_axes="warpgroup")

    def run_if(condition, registers: int | None, code: Callable[[], None]):
        @pl.when(condition)
        def _():
            if registers is not None:
                average = _REGISTERS // warpgroups // 8 * 8
                plgpu.set_max_registers(registers, action="increase" if registers > average else "decrease")
            code()

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*shape, VALUE_WIDTH), dtype if single else jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(problem.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    out, lse = mosaic_backend.call(kernel, *arrays.values())
    return (out, lse) if single else merge_splits(out, lse, arrays.get("sink"), dtype, interpret=False)
