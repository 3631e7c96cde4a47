"""The exact merge of attention over disjoint key sets, and the sink: what every sparse MLA kernel ends with."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_backend as triton
from pallas_kernels.softmax import LOG2E


def kept_by_sink(lse, sink):
    """The share of the softmax that keys keep, e^lse / (e^lse + e^sink), for every value of either, infinite too."""
    return jnp.where(sink == -jnp.inf, 1.0, 1.0 / (1.0 + jnp.exp2((sink - lse) * LOG2E)))


def merge_splits(outs, lses, sink, out_dtype, *, interpret: bool):
    """Merges S parts, outs f32[S, M, H, V] with lses f32[S, M, H], into out[M, H, V] and lse f32[M, H].

        lse = log sum_s e^lse_s          out = sum_s e^(lse_s - lse) out_s

    A part without keys has lse -inf and a finite out. sink: f32[H], -inf for none, or None.
    """
    splits, rows, heads, v_dim = outs.shape
    lanes = pl.next_power_of_2(splits)
    block = max(16, min(pl.next_power_of_2(v_dim), 4096 // lanes))  # 4096 floats: 32 loads in flight a thread
    blocks = pl.cdiv(v_dim, block)

    def kernel(operands, out_ref, lse_ref):
        outs_ref, lses_ref, *sink_refs = operands
        pair, column_block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
        row, head = lax.div(pair, heads), lax.rem(pair, heads)
        split = jnp.arange(lanes)
        columns = column_block * block + jnp.arange(block)
        parts = triton.load(lses_ref.at[split, row, head], mask=split < splits, other=-jnp.inf)
        top = jnp.max(parts)
        weights = jnp.exp2((parts - jnp.where(top == -jnp.inf, 0.0, top)) * LOG2E)
        total = jnp.sum(weights)
        empty = total == 0.0
        safe_total = jnp.where(empty, 1.0, total)
        lse = jnp.where(empty, -jnp.inf, top + jnp.log2(safe_total) * math.log(2.0))
        factor = (kept_by_sink(lse, sink_refs[0][head]) if sink_refs else 1.0) / safe_total
        mask = (split < splits)[:, None] & (columns < v_dim)[None, :]
        tile = triton.load(outs_ref.at[split[:, None], row, head, columns[None, :]], mask=mask, other=0.0)
        out = jnp.sum(tile * weights[:, None], axis=0) * factor
        triton.store(out_ref.at[row, head, columns], out.astype(out_dtype), mask=columns < v_dim)
        lse_ref[row, head] = lse

    return triton.launch(
        kernel,
        ((outs, lses) if sink is None else (outs, lses, sink),),
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, v_dim), out_dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ),
        grid=rows * heads * blocks,
        num_warps=4,
        num_stages=1,
        name="sparse_mla_merge",
        interpret=interpret,
    )
