"""The Hopper kernel of dense_mla below the public function: what it goes through, what it takes, and that it lowers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.gate import lowering
from pallas_kernels.dense_mla import hopper
from pallas_kernels.dense_mla.hopper import Config
from pallas_kernels.target import target_of

Shape = jax.ShapeDtypeStruct
SM_90 = target_of("sm_90")
TOO_WIDE = [(192, 256), (256, 192)]
WIDTHS = [(w, v) for w in (64, 128, 192, 256) for v in (64, 128, 192, 256) if (w, v) not in TOO_WIDE]


def shapes(rows, keys, width, value_width, *, heads=2, dtype=jnp.bfloat16):
    lengths = (rows, heads, width), (keys, heads, width), (keys, heads, value_width)
    return *(Shape(x, dtype) for x in lengths), *(Shape((rows,), jnp.int32),) * 2


@pytest.mark.parametrize("block_keys", [64, 128])
@pytest.mark.parametrize("kind", ["causal", "any", "some empty", "all empty"])
def test_limits(kind, block_keys):
    """Every block of keys that a row of the 128 sees is gone through, and the whole ones are those that all see."""
    rng = np.random.default_rng(0)
    rows, keys = 700, 650
    starts, ends = rng.integers(-50, 700, (2, rows)).astype(np.int32)
    if kind == "causal":
        first = np.array([0, 130, 300])[np.searchsorted([130, 300], np.arange(rows), side="right")]
        starts, ends = first.astype(np.int32), np.arange(1, rows + 1, dtype=np.int32)
    if kind == "any":
        starts, ends = np.sort([starts, ends], axis=0)
    if kind == "all empty":
        ends = starts
    lower, upper = map(np.asarray, hopper._bounds(jnp.asarray(starts), jnp.asarray(ends), keys, 768))
    limits = np.asarray(hopper._limits(jnp.asarray(lower), jnp.asarray(upper), block_keys))
    column = np.arange(keys)
    sees = (column >= starts[:, None]) & (column < ends[:, None])
    np.testing.assert_array_equal((column >= lower[:rows, None]) & (column < upper[:rows, None]), sees)
    sees = np.concatenate([sees, np.repeat(sees[-1:], 768 - rows, axis=0)])
    for tile, (begin, whole, whole_end, end) in enumerate(limits):
        block = sees[128 * tile : 128 * (tile + 1)]
        parts = [block[:, i : i + block_keys] for i in range(0, keys, block_keys)]
        assert 0 <= begin <= whole <= whole_end <= end <= len(parts)
        seen = [i for i, part in enumerate(parts) if part.any()]
        assert set(seen) <= set(range(begin, end))
        assert set(range(whole, whole_end)) <= {i for i, part in enumerate(parts) if part.all()}
        if kind == "causal":  # nothing is gone through or masked that need not be
            assert seen == list(range(begin, end))
            assert list(range(whole, whole_end)) == [
                i for i, part in enumerate(parts) if part.all() and part.shape[1] == block_keys
            ]


@pytest.mark.parametrize(("width", "value_width"), WIDTHS)
def test_config_fits(width, value_width):
    config = hopper.config_dense_mla(SM_90, *shapes(9, 9, width, value_width), sm_scale=1.0)
    assert config == hopper.config_dense_mla(SM_90, *shapes(9000, 9, width, value_width), sm_scale=1.0)
    assert hopper.shared_bytes(config, width, value_width) <= SM_90.shared_memory - 4096
    assert config.block_keys % 64 == 0 and config.stages >= 2


def test_config_of_published_models():
    assert hopper.config_dense_mla(SM_90, *shapes(9, 9, 256, 256), sm_scale=1.0) == Config(64)
    assert hopper.config_dense_mla(SM_90, *shapes(9, 9, 192, 128), sm_scale=1.0) == Config(64, stages=3)


@pytest.mark.parametrize(
    ("arch", "widths", "dtype", "reason"),
    [
        ("sm_90", (256, 256), jnp.bfloat16, None),
        ("sm_80", (256, 256), jnp.bfloat16, "needs sm_90, got sm_80"),
        ("sm_90", (256, 256), jnp.float32, "must be bfloat16, got float32"),
        ("sm_90", (24, 16), jnp.bfloat16, "64, 128, 192 or 256 wide, got 24 and 16"),
        ("sm_90", (320, 64), jnp.bfloat16, "got 320 and 64"),
        *(("sm_90", widths, jnp.bfloat16, "no block of its keys fits") for widths in TOO_WIDE),
    ],
)
def test_refuses_with_the_reason(arch, widths, dtype, reason):
    refusal = hopper.refuse_dense_mla(target_of(arch), *shapes(9, 9, *widths, dtype=dtype), sm_scale=1.0)
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="older jax lowers for whatever GPU it assumes")
@pytest.mark.parametrize("widths", [(256, 256), (192, 128), (64, 256)], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(300, 301), (3, 5)])
def test_lowers(rows, keys, widths):
    def attend(*args):
        return hopper.dense_mla(*args, sm_scale=0.1, target="sm_90")

    lowered = lowering.lower(attend, "sm_90", *shapes(rows, keys, *widths))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax interprets wgmma from 0.12 on")
@pytest.mark.timeout(300)
def test_interpreted():
    """Against float64, with poison, and free of races. Three warpgroups wait for each other: it takes more threads."""
    folder = Path(__file__).parent
    environment = os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{folder.parent}:{folder}"}
    worker = [sys.executable, str(folder / "interpret_worker.py")]
    done = subprocess.run(worker, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for result in json.loads(done.stdout.splitlines()[-1]):
        assert result["out"] < 1e-2 and result["lse"] < 1e-5, result
        assert result["empty"] and result["poison"] and result["neighbours"], result
