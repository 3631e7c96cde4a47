"""A model as a static argument and a list of arrays: what a jitted step takes, cheaply, many times a second."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dsa_jax.model import CausalLM


class Skeleton:
    """A model without its arrays, hashed once.

    jit hashes static arguments and flattens the others at every call. For a GraphDef and the State that belongs to it
    that is Python's work, most of a millisecond a layer.
    """

    def __init__(self, graph: nnx.GraphDef, tree: Any):
        self._key = graph, tree
        self._hash = hash(self._key)

    @classmethod
    def of(cls, model: CausalLM) -> tuple["Skeleton", list[Array]]:
        """The model's structure, and its arrays in their order."""
        graph, state = nnx.split(model)
        arrays, tree = jax.tree.flatten(state)
        return cls(graph, tree), arrays

    def fill(self, arrays: list[Any]) -> CausalLM:
        """The model with these arrays."""
        graph, tree = self._key
        return nnx.merge(graph, jax.tree.unflatten(tree, arrays))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Skeleton) and self._key == other._key)


def place(tree: Any, mesh: Any) -> Any:
    """The arrays of a tree on every device of `mesh`, or where they are without one."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def build(make: Callable[[], Any], mesh: Any) -> Any:
    """What `make` returns, its arrays made on every device of `mesh` at once: no device ever holds two copies."""
    return make() if mesh is None else jax.jit(make, out_shardings=NamedSharding(mesh, PartitionSpec()))()


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays are placed on, if they are."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
            return leaf.sharding.mesh
    return None
