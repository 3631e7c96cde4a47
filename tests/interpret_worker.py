"""The Hopper kernel of dense_mla by jax's interpreter of Mosaic GPU, which also looks for races: a process of its own.

Prints, of every case, whether its poison stayed where it was and its rows know nothing of each other, and the greatest
errors of out and lse.
"""

import functools
import json

import jax.numpy as jnp
import numpy as np
import oracle
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense_mla import hopper

# Requests' lengths, and the widths of keys and values.
CASES = [([300], 64, 64), ([257, 3, 100], 192, 128), ([130, 150], 256, 256)]


def main() -> None:
    plgpu.kernel = functools.partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams(detect_races=True))
    hopper._add_product = add_product
    print(json.dumps([result(*case) for case in CASES]))


def add_product(acc, a, b):
    """The interpreter has no products of registers. These plain reads need a fence, which a product's do not."""
    total = acc + jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32), precision="highest")
    plgpu.commit_smem()
    return total


def result(lengths: list[int], width: int, value_width: int) -> dict:
    rng, rows, keys = np.random.default_rng(0), sum(lengths), sum(lengths) + 70
    shapes = (rows, 1, width), (keys, 1, width), (keys, 1, value_width)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    first = np.cumsum(lengths) - lengths
    starts, ends = np.repeat(first, lengths).astype(np.int32), np.arange(1, rows + 1, dtype=np.int32)
    ends[5] = starts[5]

    def run(v):
        bounds = jnp.asarray(starts), jnp.asarray(ends)
        out, lse = hopper.dense_mla(q, k, v, *bounds, sm_scale=width**-0.5, target="sm_90")
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)

    out, lse = run(v)
    want, want_lse = oracle.dense_mla(q, k, v, starts, ends, sm_scale=width**-0.5)
    key = 20  # of the first request, and all that no one sees
    broken = run(v.at[np.r_[key, rows:keys]].set(jnp.nan))[0]
    sees = (starts <= key) & (key < ends)
    return {
        "neighbours": is_independent(width, value_width),
        "out": float(np.abs(out - want).max()),
        "lse": float(np.abs(lse - want_lse)[np.isfinite(want_lse)].max()),
        "empty": bool(np.isneginf(lse[5]).all() and not out[5].any()),
        "poison": bool((broken[~sees] == out[~sees]).all() and np.isnan(broken[sees]).all()),
    }


def is_independent(width: int, value_width: int) -> bool:
    """Whether rows keep their bits when one of them sees so little that no block of keys is whole."""
    rng, ends = np.random.default_rng(1), jnp.full(64, 300, jnp.int32)
    shapes = (64, 1, width), (300, 1, width), (300, 1, value_width)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    starts = jnp.zeros(64, jnp.int32), jnp.zeros(64, jnp.int32).at[63].set(299)
    runs = [hopper.dense_mla(q, k, v, x, ends, sm_scale=width**-0.5, target="sm_90") for x in starts]
    return all((np.asarray(a[:63]) == np.asarray(b[:63])).all() for a, b in zip(*runs, strict=True))


if __name__ == "__main__":
    main()
