"""A matrix product that Triton may do on Hopper's fp8 tensor cores.

Pallas lowers a dot with max_num_imprecise_acc = 0, and Triton then widens e4m3 to f16 on sm_90 rather than let wgmma's
accumulator, which keeps about 14 bits, be used. This primitive lowers the same dot with that limit lifted.
"""

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax._src.lib import triton as _triton_dialect
from jax._src.lib.mlir import ir
from jax._src.pallas.triton import lowering as _lowering
from jax.interpreters import mlir

_ANY_DEPTH = 1 << 30


def dot_f32(a: jax.Array, b: jax.Array) -> jax.Array:
    """a[M, K] @ b[K, N] in float32. On Hopper fp8 operands are summed with about 14 bits; elsewhere with float32's."""
    return _dot_p.bind(a, b)


def _plain_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot(a, b, preferred_element_type=jnp.float32)


def _triton_dot(ctx, a, b):
    zeros = _lowering._zeros(ir.RankedTensorType.get(list(ctx.avals_out[0].shape), ir.F32Type.get()))
    return _triton_dialect.dialect.dot(a, b, zeros, max_num_imprecise_acc=_ANY_DEPTH)


_dot_p = jax.extend.core.Primitive("indexer_dot_f32")
_dot_p.def_impl(_plain_dot)
_dot_p.def_abstract_eval(lambda a, b: jax.core.ShapedArray((a.shape[0], b.shape[1]), jnp.dtype("float32")))
mlir.register_lowering(_dot_p, mlir.lower_fun(_plain_dot, multiple_results=False))
_lowering.register_lowering(_dot_p)(_triton_dot)
