"""A tensor-parallel mesh: whose axes these are, and ops on a rank's part of them.

XLA divides the matrix products of a model whose weights are sharded. It cannot divide a kernel, so ops run inside
shard_map: attention over each rank's heads, routed experts over each rank's experts, selection over rows or requests.
A model's mesh may have more axes, over which everything here is replicated.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

TENSOR_AXIS = "tp"
EXPERT_AXIS = "ep"  # of the routed experts alone, where the mesh has it; else they are divided over TENSOR_AXIS


def expert_axis(mesh: Mesh | AbstractMesh) -> str:
    """The axis that routed experts are divided over."""
    return EXPERT_AXIS if EXPERT_AXIS in mesh.axis_names else TENSOR_AXIS


def auto_mesh(mesh: Any) -> Any:
    """The same devices with Auto axes: the model leaves the sharding of its activations to XLA."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == auto:
        return mesh
    return mesh.update(axis_types=auto) if isinstance(mesh, AbstractMesh) else Mesh(mesh.devices, mesh.axis_names, auto)


def split_mesh_of(tree: Any) -> Mesh | None:
    """The mesh over whose tensor or expert axis an array of the tree is divided, or None."""
    for leaf in jax.tree.leaves(tree):
        sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            axes = jax.tree.leaves(tuple(sharding.spec))
            if TENSOR_AXIS in axes or EXPERT_AXIS in axes:
                return sharding.mesh
    return None


def on_ranks(function: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """shard_map over every axis of the mesh; the function itself where there is no mesh."""
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=auto_mesh(mesh), in_specs=in_specs, out_specs=out_specs)


def over_heads(function: Callable[..., Array], mesh: Any, *, split: int = 1, axis: int = 1) -> Callable[..., Array]:
    """The function on each rank's heads: heads are `axis` of its first `split` arguments and of its result.

    Their number must be a multiple of the ranks. Other arguments are whole on every rank, trees included.
    """
    if mesh is None:
        return function
    heads, whole = PartitionSpec(*(None,) * axis, TENSOR_AXIS), PartitionSpec()

    def run(*args: Any) -> Array:
        specs = (heads,) * split + (whole,) * (len(args) - split)
        return on_ranks(function, mesh, specs, heads)(*args)

    return run


def over_requests(function: Callable[..., Array], mesh: Any, *, split: int) -> Callable[..., Array]:
    """The function on each rank's requests, gathered again: requests are axis 0 of its last `split` arguments.

    Every rank takes all of them where their number is no multiple of the ranks, and nothing is sent then.
    """
    if mesh is None:
        return function
    whole, ranks = PartitionSpec(), mesh.shape[TENSOR_AXIS]

    def run(*args: Any) -> Array:
        if args[-1].shape[0] % ranks:
            return on_ranks(function, mesh, whole, whole)(*args)
        specs = (whole,) * (len(args) - split) + (PartitionSpec(TENSOR_AXIS),) * split
        gather = functools.partial(lax.all_gather, axis_name=TENSOR_AXIS, tiled=True, to="invarying")
        return on_ranks(lambda *own: gather(function(*own)), mesh, specs, whole)(*args)

    return run


def over_experts(function: Callable[..., Array], mesh: Any) -> Callable[..., Array]:
    """function(h, experts, weights, *matrices), the sum over a row's experts, from each rank's share of the matrices.

    h: [T, hidden]. experts, weights: [T, k]. matrices: [E, ...], divided over `expert_axis`.
    On a rank the experts are numbered from its first one; another rank's is a number outside 0..E / ranks - 1, whose
    share of the sum is left out. The ranks' results, in float32, are added up.
    """
    if mesh is None:
        return function
    axis, whole = expert_axis(mesh), PartitionSpec()

    def own_share(h: Array, experts: Array, weights: Array, *matrices: Array) -> Array:
        first = lax.axis_index(axis) * matrices[0].shape[0]
        return lax.psum(function(h, experts - first, weights, *matrices), axis)

    def run(h: Array, experts: Array, weights: Array, *matrices: Array) -> Array:
        specs = (whole,) * 3 + (PartitionSpec(axis),) * len(matrices)
        return on_ranks(own_share, mesh, specs, whole)(h, experts, weights, *matrices)

    return run
