"""How a Pallas Mosaic GPU kernel is called, and what its body must write differently from one jax to the next."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def call(kernel: Callable[..., Any], *operands: Any) -> Any:
    """kernel(*operands), each operand and result in a buffer of its own.

    XLA passes a slice of a larger array by its address, and writes a result right into one, where nothing stands
    between. Mosaic refuses addresses that are no multiple of 256 bytes, as those of rows seldom are.
    """
    return lax.optimization_barrier(kernel(*lax.optimization_barrier(operands)))


def call_into(kernel: Callable[..., Any], out: Any, *operands: Any) -> Any:
    """`out` after kernel(*operands, a reference to it), which writes some of it; in place, if no one needs the old."""
    operands, out = lax.optimization_barrier((operands, out))
    ref = jax.new_ref(out)
    inspect.unwrap(kernel)(*operands, ref)  # without its rule for vmap, in which jax 0.10 loses the reference
    return lax.optimization_barrier(jax.freeze(ref))


def load(ref: Any, layout: Any, *, optimized: bool = True) -> Any:
    """What a reference holds, in registers. optimized: whether jax refuses a layout in which that is slow."""
    index = inspect.signature(plgpu.load).parameters.get("idx")  # which jax 0.10 asks for, and 0.12 has no more
    needs_index = index is not None and index.default is inspect.Parameter.empty
    return plgpu.load(ref, *[()] * needs_index, layout=layout, optimized=optimized)
