"""The Hopper kernel of dense_mla by jax's interpreter of Mosaic GPU, which also looks for races: a process of its own.

Prints, of every case, whether its poison stayed where it was, and the greatest errors of out and lse.
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
        "out": float(np.abs(out - want).max()),
        "lse": float(np.abs(lse - want_lse)[np.isfinite(want_lse)].max()),
        "empty": bool(np.isneginf(lse[5]).all() and not out[5].any()),
        "poison": bool((broken[~sees] == out[~sees]).all() and np.isnan(broken[sees]).all()),
    }


if __name__ == "__main__":
    main()
