"""Rows times the matrix of their group: the routed experts of a mixture."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dsa_jax.checks import require, require_dtype, require_shape
from dsa_jax.dispatch import Op


def _ragged_dot(x: Array, weight: Array, group_sizes: Array) -> Array:
    """Through XLA, which on a GPU multiplies every row with every group's matrix and keeps its own."""
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.ragged_dot_general(
        x, weight, group_sizes, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(x.dtype)


GROUPED_MATMUL = Op("grouped_matmul", xla=_ragged_dot, kernels={"portable": "pallas_kernels.grouped_matmul.portable"})


def grouped_matmul(
    x: Float[Array, "N I"],
    weight: Float[Array, "E O I"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "N O"]:
    """x[n] @ weight[e].T for the rows n of every group e, accumulated in float32, in x's dtype.

    x: bf16 or float32, rows sorted by group.
    weight: in x's dtype.
    group_sizes: rows of every group, with a sum of at most N; rows after it come out as anything.
    implementation: "portable" or "xla"; None for the best there is. XLA cannot divide the kernel: where weight is
        sharded, call this inside shard_map.
    Raises ValueError for shapes and dtypes that do not fit, NotImplementedError if the named implementation cannot run.
    """
    require_shape("x", x, (None, None), "[N, I]")
    require_shape("weight", weight, (None, None, x.shape[1]), "[E, O, I]")
    require_shape("group_sizes", group_sizes, (weight.shape[0],), "[E]")
    require_dtype("x", x, jnp.bfloat16, jnp.float32)
    require_dtype("weight", weight, x.dtype)
    require(jnp.issubdtype(group_sizes.dtype, jnp.integer), "group_sizes' dtype", group_sizes.dtype, "an integer type")
    return GROUPED_MATMUL(implementation, x, weight, group_sizes.astype(jnp.int32))
