"""Compiling a kernel with the Triton package's own back ends, for NVIDIA and AMD, and what the result needs."""

import tempfile
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget, Language
from triton.compiler.compiler import make_backend

from bench.gate.resources import Resources, amd_resources, cuda_resources
from pallas_kernels.stored import StoredKernel

VERSION = f"Triton {triton.__version__}"


def compile_kernel(kernel: StoredKernel, arch: str) -> Resources:
    """Compiles to a binary. Whatever Triton, LLVM or the assembler have against it is raised as it is."""
    is_amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if is_amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(kernel.ir)
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    options = backend.parse_options(dict(num_warps=kernel.num_warps, num_stages=kernel.num_stages))
    metadata: dict[str, Any] = {"hash": "0", "target": target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    code: Any = module
    made: dict[str, Any] = {}
    for name, stage in stages.items():  # from the first on: Pallas leaves Triton's own simplifications to the compiler
        code = made[name] = stage(code, metadata)
    shared = metadata["shared"]
    if is_amd:
        return amd_resources(made["amdgcn"], shared)
    return cuda_resources(made["ptx"], _ptxas(arch), shared)


def _ptxas(arch: str) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(int(arch.removeprefix("sm_"))).path
