"""Calls of functions that keep no books on which mesh axes an array varies over, from inside shard_map, which does.

shard_map(check_vma=True) types every array by the manual axes it varies over. A loop's carry must go in and come out
with one type, and a Pallas kernel's body has none at all. So such a function runs on arrays whose types are set
aside; its results vary over every axis that any argument varies over, which is always safe to say.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
from jax.interpreters import batching, mlir
from jax.sharding import ManualAxisType


def call_untyped(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(*args, **options), where the function communicates over no mesh axis. Outside shard_map just that."""
    leaves = [leaf for leaf in jax.tree.leaves((args, options)) if isinstance(leaf, jax.Array)]
    axes = frozenset().union(*map(_varying_axes, leaves))
    if not axes:
        return function(*args, **options)
    args, options = jax.tree.map(_forget, (args, options))
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(sorted(axes)), to="varying"), function(*args, **options))


def _varying_axes(array: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def _forget(leaf: Any) -> Any:
    return _forget_p.bind(leaf) if isinstance(leaf, jax.Array) and _varying_axes(leaf) else leaf


_forget_p = jax.extend.core.Primitive("forget_varying_axes")
_forget_p.def_impl(lambda x: x)
_forget_p.def_abstract_eval(lambda x: x.update(manual_axis_type=ManualAxisType()))
mlir.register_lowering(_forget_p, lambda context, x: [x])
batching.defvectorized(_forget_p)
