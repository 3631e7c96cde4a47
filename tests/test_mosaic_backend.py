"""Mosaic kernels get buffers of their own, and not the address of a slice."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_backend


def test_nothing_is_passed_by_the_address_of_a_slice():
    def caller(x, out):
        return out.at[1:4].set(mosaic_backend.call(lambda part: part + 1, x[3:6]))

    names = [equation.primitive.name for equation in jax.make_jaxpr(caller)(jnp.ones(9), jnp.ones(9)).eqns]
    begin, end = (i for i, name in enumerate(names) if name == "optimization_barrier")
    assert "slice" in names[:begin] and names[begin + 1 : end] == ["add"] and "scatter" in names[end:]


def test_what_a_kernel_does_not_write_stays():
    def kernel(rows, out):
        out[2:4] = rows

    before, rows = jnp.arange(6.0), -jnp.ones(2)
    after = jax.jit(lambda out, rows: mosaic_backend.call_into(kernel, out, rows))(before, rows)
    assert after.tolist() == [0, 1, -1, -1, 4, 5] and before.tolist() == [0, 1, 2, 3, 4, 5]


def test_every_mosaic_kernel_is_called_through_it():
    """What `plgpu.kernel` returns is called by nobody else."""
    made = 0
    for path in Path(mosaic_backend.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kernels = {
            node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "plgpu.kernel"
            and isinstance(node.targets[0], ast.Name)
        }
        assert len(kernels) == ast.unparse(tree).count("plgpu.kernel(")
        calls = [
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        assert not kernels & set(calls), path
        made += len(kernels)
    assert made >= 3
