"""What the device can do at best, measured in the run that quotes it: the rates that floors are made of."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bench.timing import measure


def rates() -> dict[str, float]:
    """Rates of this device, {} on a CPU, where no floor would mean anything.

    copy: bytes a second, read and written, of a device-to-device copy of 1 GiB.
    bf16, fp8: operations a second of a product of random matrices through XLA; fp8 only where it has a kernel for it.
    """
    if jax.default_backend() == "cpu":
        return {}
    found = {"copy": _rate(_copy, 2 * 2**30, jnp.ones(2**29, jnp.bfloat16))}
    for name, dtype in (("bf16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn)):
        rows, width, columns = 8192, 8192, 8192
        a, b = (_random(seed, shape, dtype) for seed, shape in enumerate(((rows, width), (columns, width))))
        found[name] = _rate(_product, 2 * rows * width * columns, a, b)
    return found


def _rate(function: Callable[..., jax.Array], work: int, *args: jax.Array) -> float:
    """Work a second at the median, `function` having run once before."""
    call = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(call(*args))
    return work / measure(lambda: call(*args)).us * 1e6


def _copy(x: jax.Array) -> jax.Array:
    return jnp.copy(x)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _random(seed: int, shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)
