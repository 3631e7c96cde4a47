"""Two operations that Triton has and Pallas' lowering to it does not offer.

`dot_f32`: Pallas lowers a dot with max_num_imprecise_acc = 0, and Triton then widens e4m3 to f16 on sm_90 rather than
let wgmma's accumulator, which keeps about 14 bits, be used. Here the limit is lifted.
`relu`: Pallas lowers a maximum so that it swallows NaN, and a NaN key would score zero.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax._src.lib import triton as _triton
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax._src.pallas.triton import lowering as _lowering
from jax.interpreters import mlir

_ANY_DEPTH = 1 << 30


def dot_f32(a: jax.Array, b: jax.Array) -> jax.Array:
    """a[M, K] @ b[K, N] in float32. On Hopper fp8 operands are summed with about 14 bits; elsewhere with float32's."""
    return _dot_p.bind(a, b)


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0) of a float32 array, NaN where x is."""
    return _relu_p.bind(x)


def _primitive(
    name: str, plain: Callable[..., jax.Array], triton: Callable[..., Any], shape: Callable[..., Any]
) -> Any:
    """A primitive that is `plain` to XLA, so to the interpreter, and `triton` inside a Triton kernel; float32."""
    primitive = jax.extend.core.Primitive(name)
    primitive.def_impl(plain)
    primitive.def_abstract_eval(lambda *args: jax.core.ShapedArray(shape(*args), jnp.dtype("float32")))
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    _lowering.register_lowering(primitive)(triton)
    return primitive


def _zeros(ctx):
    return _lowering._zeros(ir.RankedTensorType.get(list(ctx.avals_out[0].shape), ir.F32Type.get()))


_dot_p = _primitive(
    "indexer_dot_f32",
    plain=lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32),
    triton=lambda ctx, a, b: _triton.dialect.dot(a, b, _zeros(ctx), max_num_imprecise_acc=_ANY_DEPTH),
    shape=lambda a, b: (a.shape[0], b.shape[1]),
)
_relu_p = _primitive(
    "indexer_relu",
    plain=lambda x: jnp.maximum(x, 0.0),
    triton=lambda ctx, x: arith.maximumf(x, _zeros(ctx)),
    shape=lambda x: x.shape,
)
