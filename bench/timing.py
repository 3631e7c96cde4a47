"""How a function on the GPU is timed."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_L2_BYTES = 256 * 2**20  # more than any L2, so that writing as much leaves nothing of the inputs in it


def seconds_per_call(
    function: Callable[..., jax.Array], *args: Any, calls: int = 8, rounds: int = 3, flush: bool = False
) -> float:
    """Device seconds of one `function(*args)`: the best of `rounds` bursts of `calls` launches, one after another.

    The burst is one jitted program, so the host's dispatch is paid once. `flush` overwrites the L2 cache before every
    launch and takes the time of that off again.
    """
    bursts = [_burst(function, calls, flush)] + ([_burst(None, calls, flush)] if flush else [])
    times = []
    for burst in bursts:
        jax.block_until_ready(burst(*args))
        times.append(min(_wall(burst, args) for _ in range(rounds)) / calls)
    return times[0] - sum(times[1:])


def _burst(function: Callable[..., jax.Array] | None, calls: int, flush: bool) -> Callable[..., Any]:
    """`calls` launches, each with an argument that depends on what the one before wrote, so that none can be shared."""

    def run(*args):
        chained = min(range(len(args)), key=lambda i: args[i].size)

        def call(i, total):
            if flush:
                scratch = jnp.full(_L2_BYTES // 4, total + i)
                total = lax.optimization_barrier((total, scratch))[0] + scratch[0]
            if function is None:
                return total
            never = (total == 0.123).astype(args[chained].dtype)
            out = function(*args[:chained], args[chained] + never, *args[chained + 1 :])
            return total + out[(0,) * out.ndim]

        return lax.fori_loop(0, calls, call, jnp.float32(0))

    return jax.jit(run)


def _wall(burst: Callable[..., Any], args: tuple) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(burst(*args))
    return time.perf_counter() - begin
