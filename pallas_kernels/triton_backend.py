"""The one door from the portable kernels to Triton: launches, memory, and two operations of Triton's.

What the kernels use of Pallas' Triton lowering is named here and nowhere else, because JAX has deprecated that lowering
(0.11: "will be removed in a future JAX version"). `stored` runs the same kernels without it; docs/portable.md tells the
way there.
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
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.interpreters import mlir
from jax.sharding import ManualAxisType

load = plt.load
store = plt.store
barrier = plt.debug_barrier

_ANY_DEPTH = 1 << 30


def launch(
    kernel: Callable[..., None],
    operands: tuple[Any, ...],
    *,
    out_shape: Any,
    grid: int,
    num_warps: int,
    num_stages: int,
    name: str,
    interpret: bool,
) -> Any:
    """Runs `grid` programs of a kernel that sees every operand and every result whole.

    kernel: called with references to the operands, trees as trees, and then to the results.
    out_shape: the results' shapes, one jax.ShapeDtypeStruct or a tuple.
    num_warps, num_stages: Triton's.
    interpret: on a CPU.

    Inside shard_map(check_vma=True) the operands must vary over no mesh axis (`dsa_jax.varying` sees to that), and the
    results then do not either.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=(grid,),
        in_specs=jax.tree.map(lambda _: whole, operands),
        out_specs=jax.tree.map(lambda _: whole, out_shape),
        out_shape=jax.tree.map(_varying_over_nothing, out_shape),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands)


def _varying_over_nothing(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=ManualAxisType())


def dot_f32(a: jax.Array, b: jax.Array) -> jax.Array:
    """a[M, K] @ b[K, N] in float32. On Hopper fp8 operands are summed with about 14 bits; elsewhere with float32's.

    Pallas lowers a dot with max_num_imprecise_acc = 0, and Triton then widens e4m3 to f16 on sm_90 rather than let
    wgmma's accumulator, which keeps about 14 bits, be used. Here the limit is lifted.
    """
    return _dot_p.bind(a, b)


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0) of a float32 array, NaN where x is: Pallas lowers a maximum so that it swallows NaN."""
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
