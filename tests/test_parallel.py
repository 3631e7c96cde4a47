"""A model on a tensor-parallel mesh: paged steps equal one device's, and kernels run on each rank's part."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dsa_jax.config import DsaConfig
from dsa_jax.context import Options, PagedDecode, PagedPrefill, Stripes
from dsa_jax.layers import DecoderLayer, Rope
from dsa_jax.mla import sparse_mla
from dsa_jax.model import CausalLM, new_cache, parameter_sharding, partition_spec
from dsa_jax.parallel import auto_mesh, over_experts, over_heads, over_requests, split_mesh_of

PAGE, LENS = 4, (37, 21, 18, 30)  # tokens of four requests, of which the last are decoded


@functools.cache
def config():
    return dataclasses.replace(
        DsaConfig.tiny(),
        num_hidden_layers=1,
        indexer_types=("full",),
        mlp_layer_types=("sparse",),
        num_nextn_predict_layers=0,
    )


@functools.cache
def parameters():
    graph, state = nnx.split(CausalLM(config(), rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda x: x * 5.0 if x.ndim > 1 else x, state)  # enough for every part of a layer to matter
    return graph, state


def placed(mesh):
    graph, state = parameters()
    if mesh is None:
        return nnx.merge(graph, state)
    split = [
        (path, variable.replace(jax.device_put(variable.get_value(), sharding)))
        for path, variable in nnx.to_flat_state(state)
        for sharding in [parameter_sharding(config(), mesh, path, variable.get_value().shape)]
    ]
    return nnx.merge(graph, nnx.from_flat_state(split))


def steps(mesh):
    """A padded prefill of all tokens but one, and a decode step: hidden rows, indices, and the caches after them."""
    model = placed(mesh)
    options = model.options(stripes=None if mesh is None else Stripes(mesh, "tp", min_rows=0))
    pages = [-(-length // PAGE) for length in LENS]
    table = np.full((len(LENS), max(pages)), -1, np.int32)
    table[np.arange(max(pages)) < np.array(pages)[:, None]] = np.arange(sum(pages))
    prefix = np.array(LENS) - 1
    request = np.repeat([0, 1, 2, 3, -1], [*prefix, 4]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*prefix, 4)]).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, config().vocab_size, len(request)).astype(np.int32)
    chunk = PagedPrefill(positions, request, table, prefix.astype(np.int32), int(prefix.sum()), options)
    last = PagedDecode(table, np.array(LENS, np.int32), 1, options)
    caches = model.new_caches(sum(pages), PAGE, jnp.float32)
    if mesh is not None:
        caches = jax.device_put(caches, NamedSharding(auto_mesh(mesh), PartitionSpec()))
    forward = jax.jit(lambda graph, state, *args: nnx.merge(graph, state).forward(*args), static_argnums=0)
    prefilled = forward(*nnx.split(model), tokens, chunk, caches)
    decoded = forward(*nnx.split(model), tokens[: len(LENS)], last, prefilled.caches)
    real = request >= 0
    return prefilled.hidden[real], [x[real] for x in prefilled.indices], decoded


def test_paged_steps():
    """In decode each rank selects for one of the four requests."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",), axis_types=(AxisType.Explicit,))
    hidden, indices, decoded = steps(mesh)
    want_hidden, want_indices, want_decoded = steps(None)
    np.testing.assert_allclose(hidden, want_hidden, rtol=0, atol=1e-5)
    np.testing.assert_allclose(decoded.hidden, want_decoded.hidden, rtol=0, atol=1e-5)
    for mine, theirs in zip((*indices, *decoded.indices), (*want_indices, *want_decoded.indices), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert (np.asarray(mine) == -1).any() or theirs.shape[0] == len(LENS)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(decoded.caches))


def test_options_know_the_models_mesh():
    assert placed(None).options().mesh is None
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    options = placed(mesh).options()
    assert options.mesh == options.stripes.mesh == auto_mesh(mesh)
    whole = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec()))
    assert split_mesh_of([whole]) is None


def test_interpreted_kernel_on_each_ranks_heads():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    rng = np.random.default_rng(0)
    q, kv = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 4, 48), (50, 48)))
    indices = jnp.asarray(rng.integers(-1, 50, (3, 16)), jnp.int32)

    def attend(q, kv, indices):
        return sparse_mla(q, kv, indices, sm_scale=0.1, v_dim=32, implementation="portable")[0]

    np.testing.assert_array_equal(jax.jit(over_heads(attend, mesh))(q, kv, indices), attend(q, kv, indices))


def test_divided_ops():
    """Requests and experts: what a rank sees, that the result is whole, and what cannot be divided."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    seen = []

    def add(table, rows):
        seen.append(rows.shape[0])
        return table + rows

    for count, share in ((8, 2), (6, 6)):
        rows = jnp.arange(count, dtype=jnp.float32)[:, None]
        np.testing.assert_array_equal(
            jax.jit(over_requests(add, mesh, split=1))(jnp.ones((1, 3)), rows), jnp.ones((1, 3)) + rows
        )
        assert seen[-1] == share

    def share(h, experts, weights, matrices):
        own = (experts >= 0) & (experts < matrices.shape[0])
        chosen = matrices[jnp.clip(experts, 0, matrices.shape[0] - 1)]
        return jnp.sum(jnp.where(own[..., None], weights[..., None] * chosen * h[:, None], 0), axis=1)

    rng = np.random.default_rng(1)
    h, weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 3), (5, 2)))
    experts, matrices = jnp.asarray(rng.integers(0, 8, (5, 2))), jnp.asarray(rng.standard_normal((8, 3)), jnp.float32)
    want = share(h, experts, weights, matrices)
    np.testing.assert_allclose(over_experts(share, mesh)(h, experts, weights, matrices), want, rtol=0, atol=1e-6)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="older jax lowers for whatever GPU it assumes")
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_layer_lowers_for_eight_gpus(step):
    """GLM-5's widths: eight heads a rank in attention, a rank's own rows in selection."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((8,), ("tp",), axis_types=(AxisType.Auto,), abstract_device=device)
    glm = DsaConfig.glm5()
    whole = NamedSharding(mesh, PartitionSpec())
    options = Options(glm.index_topk, glm.sm_scale, stripes=Stripes(mesh, "tp", min_rows=0), mesh=mesh)
    rows, requests, pages = {"prefill": (8192, 1, 128), "decode": (16, 16, 2048)}[step]
    layer = DecoderLayer(glm, has_indexer=True, sparse_mlp=True, latent_norm_eps=1e-5, dtype=jnp.bfloat16, rngs=None)
    graph, state = nnx.split(layer)
    state = nnx.from_flat_state(
        (path, variable.replace(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))))
        for path, variable in nnx.to_flat_state(state)
        for x in [jax.ShapeDtypeStruct(variable.get_value().shape, variable.get_value().dtype)]
        for spec in [partition_spec(path, x.shape, mesh)]
    )

    def shape(dtype, *lengths):
        return jax.ShapeDtypeStruct(lengths, dtype, sharding=whole)

    integers = functools.partial(shape, jnp.int32)
    cache = jax.eval_shape(lambda: new_cache(glm, pages, 64, jnp.bfloat16, True))
    cache = jax.tree.map(lambda x: shape(x.dtype, *x.shape), cache)
    table, lens = integers(requests, pages // requests), integers(requests)
    if step == "prefill":
        context = PagedPrefill(integers(rows), integers(rows), table, lens, rows, options)
    else:
        context = PagedDecode(table, lens, 1, options)

    def run(state, h, context, cache):
        return nnx.merge(graph, state)(h, context, cache, None, Rope(glm))

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(run).trace(state, shape(jnp.bfloat16, rows, glm.hidden_size), context, cache)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call" in line and ("triton" in line or "mosaic" in line)]
    operands = [re.findall(r"\(tensor.*", line)[-1] for line in calls]
    assert any(line.endswith(f"-> tensor<{rows // 8}x2048xi32>") for line in operands), operands
    assert any(re.search(rf"tensor<{rows}x(1x)?8x(576|512)xbf16>", line) for line in operands), operands
    assert not any(re.search(r"x64x(576|512)xbf16>", line) for line in operands), operands
