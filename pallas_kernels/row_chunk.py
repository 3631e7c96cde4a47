"""Rows of larger arrays, chunk by chunk: for kernels that find theirs themselves, so that nobody copies them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowChunk:
    """`size` rows of arrays that have as many or more: chunk `number`, the last of which ends with the array.

    number: i32 [].
    """

    number: Any
    size: int = dataclasses.field(metadata=dict(static=True))

    def first(self, rows: int) -> Any:
        """The first row of an array's chunk. Of the last one it may lie in the chunk before."""
        return jnp.minimum(self.number * self.size, rows - self.size)

    def of(self, array: jax.Array, axis: int = 0) -> jax.Array:
        """The chunk of an array, cut out."""
        return lax.dynamic_slice_in_dim(array, self.first(array.shape[axis]), self.size, axis)

    def operand(self) -> jax.Array:
        """The number as a kernel gets it, i32 [1]."""
        return jnp.asarray(self.number, jnp.int32).reshape(1)
