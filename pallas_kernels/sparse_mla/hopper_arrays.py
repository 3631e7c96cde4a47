"""The arrays in global memory that both Hopper kernels read and write."""

import dataclasses
from typing import Any

from jax._src.lib.mlir import ir
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.simt import Pointer

_IN_BYTES = ("q", "value", "tail")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    """Where they lie.

    q: bf16[rows, heads, width], in bytes. value, tail: key rows, in bytes; without a tail that is value again.
    indices: i32[rows, topk]. scale: f32[num_keys, 4] or None. lengths: i32[rows] or None. sink: f32[heads] or None.
    table: i32[requests, table_width] and seq_lens: i32[requests], where indices are positions, else None.
    out: bf16[rows, heads, 512], or f32[splits, rows, heads, 512] where there are several splits.
    lse: f32[rows, heads] or f32[splits, rows, heads].
    """

    q: Pointer
    value: Pointer
    tail: Pointer
    indices: Pointer
    out: Pointer
    lse: Pointer
    scale: Pointer | None = None
    lengths: Pointer | None = None
    sink: Pointer | None = None
    table: Pointer | None = None
    seq_lens: Pointer | None = None


def pointers(refs: dict[str, Any]) -> dict[str, Pointer]:
    """Of references by name. Queries and key rows are addressed in bytes."""
    byte = ir.IntegerType.get_signless(8)
    in_bytes = {name: Pointer(utils.memref_ptr(refs[name]), byte) for name in _IN_BYTES if name in refs}
    others = {name: Pointer.to(ref) for name, ref in refs.items() if name not in in_bytes}
    return {"tail": in_bytes["value"]} | in_bytes | others
