"""Selection over chunks of rows: which rows those are, that each finds its own, and what is copied for them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import implementations
from index_cases import E4M3, Ragged, draw
from jax.sharding import AbstractDevice, AbstractMesh

from dsa_jax import topk
from dsa_jax.indexer import indexer_logits, logits_of_rows
from pallas_kernels.indexer_logits import hopper as hopper_logits
from pallas_kernels.row_chunk import RowChunk
from pallas_kernels.target import target_of
from pallas_kernels.topk import hopper as hopper_topk

# (rows, rows of a chunk)
CUTS = [(43, 8), (43, 42), (43, 17), (40, 8), (16, 1)]


def select(case, k, rows, columns, implementation):
    chunks, names = topk.Chunks(rows, columns), (implementation,) * 3
    return np.asarray(topk._select(*case.args, case.k_scale, topk=k, chunks=chunks, names=names))


@pytest.mark.parametrize(("rows", "size"), CUTS)
def test_chunks_cover_all_rows(rows, size):
    whole = np.arange(rows * 3).reshape(rows, 3)
    chunks = [np.asarray(RowChunk(i, size).of(jnp.asarray(whole))) for i in range(-(-rows // size))]
    assert all(len(chunk) == size for chunk in chunks)
    np.testing.assert_array_equal(np.unique(np.concatenate(chunks), axis=0), whole)
    np.testing.assert_array_equal(chunks[-1][-1], whole[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations("select_topk"))
def test_every_cut_has_the_same_bits(implementation):
    case = draw(0, 43, 300, 32, dtype=E4M3, ranges="random")
    want = select(case, 48, 43, 300, implementation)
    for rows in (8, 9, 42):
        np.testing.assert_array_equal(select(case, 48, rows, 300, implementation), want)


@pytest.mark.needs_gpu
@pytest.mark.parametrize(
    ("rows", "columns", "heads", "dtype"), [(1003, 4099, 64, E4M3), (2051, 20000, 32, jnp.bfloat16)]
)
def test_every_cut_has_the_same_bits_large(rows, columns, heads, dtype):
    case = draw(1, rows, columns, heads, 128, dtype)
    want = select(case, 2048, rows, columns, "hopper")
    for size in (rows - 1, rows // 2 + 3, 264, 130):
        np.testing.assert_array_equal(select(case, 2048, size, columns, "hopper"), want)


@pytest.mark.needs_gpu
@pytest.mark.parametrize(
    ("rows", "size", "columns", "heads"),
    [(43, 17, 301, 32), (45, 19, 301, 24), (130, 129, 1000, 64), (37, 5, 999, 128), (50001, 40000, 70, 64)],
    ids=str,
)
def test_scores_of_a_chunk_do_not_depend_on_other_rows(rows, size, columns, heads):
    """They hold NaN, and ranges far outside. The last case has more groups than a block numbers."""
    case = draw(2, rows, columns, heads, 128, E4M3, ranges="random")
    for number in range(-(-rows // size)):
        chunk = RowChunk(jnp.int32(number), size)
        first = int(chunk.first(rows))
        own = (jnp.arange(rows) >= first) & (jnp.arange(rows) < first + size)
        other = Ragged(
            jnp.where(own[:, None, None], case.q, jnp.nan).astype(E4M3),
            case.k,
            jnp.where(own[:, None], case.weights, jnp.nan),
            jnp.where(own, case.starts, -(10**9)),
            jnp.where(own, case.ends, 10**9),
            case.k_scale,
        )
        want = indexer_logits(*case.rows(slice(first, first + size)).args, k_scale=case.k_scale)
        got = logits_of_rows("hopper", chunk, *other.args, k_scale=case.k_scale, clean_logits=True)
        np.testing.assert_array_equal(np.asarray(got).view(np.int32), np.asarray(want).view(np.int32))


@pytest.mark.needs_gpu
@pytest.mark.parametrize(
    ("rows", "size", "columns", "k"), [(43, 17, 301, 17), (601, 600, 5000, 512), (12, 5, 70001, 2048)]
)
def test_topk_is_written_into_its_rows_alone(rows, size, columns, k):
    """The last case's rows are shared by blocks. A row that sees nothing is -1 throughout."""
    rng = np.random.default_rng(3)
    starts, ends = (jnp.asarray(rng.integers(-5, columns + 6, rows), jnp.int32) for _ in range(2))
    for number in range(-(-rows // size)):
        chunk = RowChunk(jnp.int32(number), size)
        scores = jnp.asarray(rng.standard_normal((size, columns)), jnp.float32)
        out = jax.jit(hopper_topk.topk_indices_into, static_argnums=3)(
            jnp.full((rows, k), -7, jnp.int32), chunk, scores, k, starts, ends
        )
        want = np.full((rows, k), -7, np.int32)
        first = int(chunk.first(rows))
        own = slice(first, first + size)
        want[own] = hopper_topk.topk_indices(scores, k, starts[own], ends[own])
        np.testing.assert_array_equal(np.asarray(out), want)


def abstract_select(heads, rows, columns, size, names):
    shapes = [((rows, heads, 128), E4M3), ((columns, 128), E4M3), ((rows, heads), jnp.float32)]
    shapes += [((rows,), jnp.int32), ((rows,), jnp.int32), ((columns,), jnp.float32)]
    options = dict(topk=2048, chunks=topk.Chunks(size, columns), names=names)
    return lambda *args: topk._select(*args, **options), [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def test_kernels_find_their_rows_in_whole_arrays(monkeypatch):
    """Lowered for a GPU that is not there: two kernels, of which the second writes in place, and nothing sliced."""
    for kernel in (hopper_logits, hopper_topk):
        monkeypatch.setattr(kernel, "target_of", lambda target: target_of(target or "sm_90"))
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    copying = ("dynamic_slice", "dynamic_update_slice")
    for name in ("hopper", "xla"):
        call, shapes = abstract_select(64, 4099, 4096, 512, (name,) * 2)
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
            text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        if name == "xla":
            assert all(word in text for word in copying)
        else:
            assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 2 and "output_operand_alias" in text
            assert not any(word in text for word in copying)


@pytest.mark.needs_gpu
def test_a_loop_over_chunks_is_two_kernels():
    """Beside them it counts, and copies nothing."""
    call, shapes = abstract_select(64, 4099, 4096, 512, ("hopper",) * 2)
    text = jax.jit(call).lower(*shapes).compile().as_text()
    body = re.search(r"while\(.*body=%?([\w.-]+)", text).group(1)
    lines = re.search(rf"^%?{re.escape(body)} .*?\n(.*?)^}}", text, re.DOTALL | re.MULTILINE).group(1).splitlines()
    work = [re.search(r"= .*?\s([\w-]+)\(", line).group(1) for line in lines]
    work = sorted(
        name for name in work if name not in ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")
    )
    assert work == ["custom-call", "custom-call", "fusion"], work
