"""Sparse MLA of at most 32 heads on Hopper (sm_90): the keys on the long side of the products, heads not padded to 64.

Grid: a block for each multiprocessor, which goes over rows, or splits of rows. `hopper_few_block` tells how it works.
Shared memory, 16 heads: queries (18 KiB), weights (4 KiB, of e4m3 keys 8), and a ring of as many stages as fit: for
bf16 keys eight of 24 KiB, of which a block of 64 keys takes three; for e4m3 keys of 41 KiB, a block each, two for
either of two teams, or four for one. Registers: four a thread for each head, for the output.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import (
    hopper_few_attend,
    hopper_few_attend_e4m3,
    hopper_few_block,
    hopper_few_gather,
)
from pallas_kernels.sparse_mla.hopper_few_block import FewProblem, Memory, shared_words
from pallas_kernels.sparse_mla.hopper_launch import launch

# Of a thread that multiplies and one that gathers, where there are two teams, by columns.
_TEAM_REGISTERS = {8: (192, 64), 16: (216, 40)}


def solve(problem: FewProblem, arrays: dict[str, Any]):
    """out[M, H, 512] and lse f32[M, H]. arrays: those of Memory that are read, but no None."""
    attend = (hopper_few_attend_e4m3 if problem.is_e4m3 else hopper_few_attend).attend
    # Of two warpgroups each thread can have all registers that there are.
    math, gather = _TEAM_REGISTERS[problem.columns] if problem.teams > 1 else (None, None)
    return launch(
        problem,
        arrays,
        {name: _shared(name, problem.teams * words) for name, words in shared_words(problem).items()},
        name="sparse_mla_hopper_few",
        prepare=lambda refs: hopper_few_block.prepare(problem, Memory(**refs)),
        roles=[
            (problem.teams, math, lambda refs: attend(problem, Memory(**refs))),
            (problem.teams, gather, lambda refs: hopper_few_gather.gather(problem, Memory(**refs))),
        ],
    )


def _shared(name: str, words: int):
    """Tiles need their alignment, which comes with rows of 128 bytes."""
    kinds = dict(words=jnp.int32, key_scales=jnp.float32)
    return plgpu.SMEM((words,), kinds[name]) if name in kinds else plgpu.SMEM((words // 32, 64), jnp.bfloat16)
