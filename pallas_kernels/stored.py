"""A Triton kernel kept as text and run through jax.ffi, with neither Pallas nor the Triton package.

A Pallas-Triton call becomes the custom call `__gpu$xla.gpu.triton`, whose attributes hold the kernel in Triton's IR and
how to launch it; XLA compiles it. Here the same call is made with the IR as text. `bench.gate.lowering` takes the text
out of a lowered program.

The text holds the shapes that its kernel was traced with, but not the number of programs: what only the grid depends
on, such as the rows of sparse_mla, is free (`StoredKernel.resized`).
"""

import dataclasses
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

CUSTOM_CALL = "__gpu$xla.gpu.triton"
_COMMENT = "// "


@dataclasses.dataclass(frozen=True)
class StoredKernel:
    """A kernel and its launch.

    name: of the function in the text.
    ir: its module in Triton's IR, as text.
    grid: programs along x, y and z.
    num_warps, num_stages: Triton's.
    results: shape and dtype name of every result.
    """

    name: str
    ir: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    results: tuple[tuple[tuple[int, ...], str], ...]

    def __call__(self, *buffers: jax.Array) -> tuple[jax.Array, ...]:
        """Runs it on the GPU that holds `buffers`: the arrays that the Pallas kernel took, in their order."""
        shapes = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in self.results]
        launch = dict(zip(("grid_x", "grid_y", "grid_z"), map(np.int32, self.grid), strict=True))
        launch |= dict(num_warps=np.int32(self.num_warps), num_stages=np.int32(self.num_stages))
        call = jax.ffi.ffi_call(CUSTOM_CALL, shapes)
        return tuple(call(*buffers, name=self.name, ir=self.ir, debug=False, **launch))

    def resized(self, grid: int, results: Sequence[jax.ShapeDtypeStruct]) -> "StoredKernel":
        """The same text for another number of programs, and so for other results."""
        named = tuple((tuple(result.shape), jnp.dtype(result.dtype).name) for result in results)
        return dataclasses.replace(self, grid=(grid, 1, 1), results=named)

    def text(self) -> str:
        """All of it as a file's text: the launch in a comment, then the IR."""
        launch = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "ir"}
        return f"{_COMMENT}{json.dumps(launch)}\n{self.ir}"

    @classmethod
    def from_text(cls, text: str) -> "StoredKernel":
        """The kernel that `text()` wrote."""
        first, _, body = text.partition("\n")
        launch = json.loads(first.removeprefix(_COMMENT))
        launch["grid"] = tuple(launch["grid"])
        launch["results"] = tuple((tuple(shape), dtype) for shape, dtype in launch["results"])
        return cls(ir=body, **launch)
