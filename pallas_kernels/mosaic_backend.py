"""How a Pallas Mosaic GPU kernel is called."""

from collections.abc import Callable
from typing import Any

from jax import lax


def call(kernel: Callable[..., Any], *operands: Any) -> Any:
    """kernel(*operands), each operand and result in a buffer of its own.

    XLA passes a slice of a larger array by its address, and writes a result right into one, where nothing stands
    between. Mosaic refuses addresses that are no multiple of 256 bytes, as those of rows seldom are.
    """
    return lax.optimization_barrier(kernel(*lax.optimization_barrier(operands)))
