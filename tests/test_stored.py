"""The way off Pallas-Triton: one door to it, and the same kernels run from text."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mla_cases import choose, normal

import pallas_kernels
from bench.gate import lowering
from pallas_kernels.sparse_mla import portable as mla
from pallas_kernels.sparse_mla.rows import key_rows
from pallas_kernels.stored import CUSTOM_CALL, StoredKernel
from pallas_kernels.target import target_of
from pallas_kernels.topk import portable as topk

BF16, F32 = jnp.bfloat16, jnp.float32
Shape = jax.ShapeDtypeStruct
HEADS, KEYS, TOPK, V_DIM, WIDTH = 20, 3000, 300, 512, 576
MLA = dict(sm_scale=WIDTH**-0.5, v_dim=V_DIM)


def stored_sparse_mla(rows):
    """The kernel traced at 4 rows, written, read again and set to `rows`."""
    shapes = Shape((4, HEADS, WIDTH), BF16), Shape((KEYS, WIDTH), BF16), Shape((4, TOPK), jnp.int32)
    lowered = lowering.lower(lambda *args: mla.run(target_of("sm_90"), *args, **MLA), "sm_90", *shapes)
    (kernel,) = lowering.triton_kernels(lowered)
    read = StoredKernel.from_text(kernel.text())
    assert read == kernel
    blocks = kernel.grid[0] // 4
    return read.resized(rows * blocks, (Shape((rows, HEADS, V_DIM), BF16), Shape((rows, HEADS), F32)))


def sparse_mla_buffers(q, kv, indices):
    """The arrays in the order in which the kernel takes them."""
    sink = jnp.full(HEADS, -jnp.inf, F32)
    return jax.tree.leaves((q, key_rows(kv, WIDTH, V_DIM), indices, sink))


def test_only_one_module_knows_the_triton_lowering():
    folder = Path(pallas_kernels.__file__).parent
    named = re.compile(r"pallas(\.| import )triton|_src\.pallas\.triton|plt\.")
    assert [path.name for path in folder.rglob("*.py") if named.search(path.read_text())] == ["triton_backend.py"]


def test_text_makes_the_same_call():
    """On a CPU: the stored kernel lowers through jax.ffi, to the call that Pallas makes."""
    kernel = stored_sparse_mla(rows=7)
    shapes = Shape((7, HEADS, WIDTH), BF16), Shape((KEYS, WIDTH), BF16), Shape((7, TOPK), jnp.int32)
    lowered = lowering.lower(lambda *args: kernel(*sparse_mla_buffers(*args)), "sm_90", *shapes)
    (again,) = lowering.triton_kernels(lowered)
    assert lowering.custom_calls(lowered) == [CUSTOM_CALL]
    assert again == kernel and kernel.grid == (7, 1, 1)


@pytest.mark.needs_gpu
def test_text_has_the_bits_of_pallas_sparse_mla():
    rng = np.random.default_rng(0)
    rows = 257
    q, kv, indices = (
        normal(rng, (rows, HEADS, WIDTH), BF16),
        normal(rng, (KEYS, WIDTH), BF16),
        choose(rng, rows, TOPK, KEYS),
    )
    indices[3], indices[5, 100:] = -1, -1
    indices = jnp.asarray(indices)
    want = mla.sparse_mla(q, kv, indices, target="sm_90", **MLA)
    kernel = stored_sparse_mla(rows)
    got = jax.jit(lambda *args: kernel(*sparse_mla_buffers(*args)))(q, kv, indices)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
    assert np.isneginf(np.asarray(got[1][3])).all() and np.isfinite(np.asarray(got[1][4])).all()


@pytest.mark.needs_gpu
def test_text_has_the_bits_of_pallas_topk():
    rows, columns, k = 300, 20001, 512
    scores = jnp.maximum(jax.random.normal(jax.random.key(0), (rows, columns), F32) - 1.5, 0)
    bounds = jnp.zeros(rows, jnp.int32), jnp.arange(rows, dtype=jnp.int32) * 66
    function = jax.jit(lambda *args: topk.topk_indices(args[0], k, *args[1:], target="sm_90"))
    (kernel,) = lowering.triton_kernels(lowering.lower(function, "sm_90", scores, *bounds))
    got = jax.jit(StoredKernel.from_text(kernel.text()))(scores, *bounds)
    np.testing.assert_array_equal(got[0], function(scores, *bounds))
