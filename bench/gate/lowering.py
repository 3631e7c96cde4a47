"""Lowering for a GPU that is not there, and the kernels inside a lowered program."""

import contextlib
import warnings
from collections.abc import Generator, Iterator
from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.pallas.triton import lowering as _triton
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.stored import CUSTOM_CALL, StoredKernel

# Names under which jax knows the architectures.
DEVICE_KINDS = {
    "sm_80": "NVIDIA A100",
    "sm_90": "NVIDIA H200",
    "sm_120": "NVIDIA RTX PRO 6000",
    "gfx942": "gfx942",
    "gfx950": "gfx950",
}
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "f8E4M3FN": "float8_e4m3fn"}


@contextlib.contextmanager
def absent(arch: str) -> Generator[None]:
    """Within it jax lowers for `arch`."""
    device = AbstractDevice(device_kind=DEVICE_KINDS[arch], num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
        yield


def lower(function: Any, arch: str, *shapes: Any) -> Any:
    """jit(function) lowered for `arch` at these shapes."""
    platform = "rocm" if arch.startswith("gfx") else "cuda"
    with absent(arch), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Pallas.*Triton.*", category=DeprecationWarning)
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))


def custom_calls(lowered: Any) -> list[str]:
    """The targets of a program's custom calls."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        return [_target(operation) for operation in _operations(module.operation, "stablehlo.custom_call")]


def triton_kernels(lowered: Any) -> list[StoredKernel]:
    """The Triton kernels that a program launches, in order."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        calls = _operations(module.operation, "stablehlo.custom_call")
        return [_stored(call) for call in calls if _target(call) == CUSTOM_CALL]


def _operations(operation: Any, name: str) -> Iterator[Any]:
    if operation.name == name:
        yield operation
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _operations(inner.operation, name)


def _target(call: Any) -> str:
    return ir.StringAttr(call.attributes["call_target_name"]).value


def _stored(call: Any) -> StoredKernel:
    key = "mhlo.backend_config" if "mhlo.backend_config" in call.attributes else "backend_config"
    attributes = {item.name: item.attr for item in ir.DictAttr(call.attributes[key])}

    def number(name: str) -> int:
        return ir.IntegerAttr(attributes[name]).value

    return StoredKernel(
        name=ir.StringAttr(attributes["name"]).value,
        ir=_text(ir.StringAttr(attributes["ir"]).value_bytes),
        grid=(number("grid_x"), number("grid_y"), number("grid_z")),
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
        results=tuple(_shape(ir.RankedTensorType(result.type)) for result in call.results),
    )


def _shape(kind: Any) -> tuple[tuple[int, ...], str]:
    return tuple(kind.shape), _DTYPES[str(kind.element_type)]


def _text(code: bytes) -> str:
    """Triton's IR as text, of bytecode that only this jaxlib and the Triton release inside it read."""
    with _triton._new_ir_context(), ir.Location.unknown():
        return str(ir.Module.parse(code).operation.get_asm(enable_debug_info=False))
