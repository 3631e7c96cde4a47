"""Compiling with XLA for an NVIDIA GPU that is not there: the pipeline that runs on the device, with XLA's own Triton.

Needs jax 0.11.2 or newer with its CUDA plugin and NVIDIA's ptxas, and no GPU. `prepare` comes before jax is imported.
XLA ends the process on some errors, so whoever calls this does it in a process of its own.
"""

import functools
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from bench.gate.resources import Resources, read_ptxas

_SITE = Path(numpy.__file__).parents[1]
_CUDA = _SITE / "nvidia" / "cu13"
_LEAST = (0, 11, 2)
# What XLA must know of a device: the CUDA C++ Programming Guide's table of compute capabilities, and data sheets.
_DEVICES: Mapping[str, dict[str, Any]] = {
    "sm_80": dict(name="NVIDIA A100-SXM4-80GB", shared=167936, cores=108, threads=2048, l2=40 << 20, memory=80 << 30),
    "sm_90": dict(name="NVIDIA H200", shared=233472, cores=132, threads=2048, l2=50 << 20, memory=141 << 30),
    "sm_120": dict(name="NVIDIA RTX PRO 6000", shared=102400, cores=188, threads=1536, l2=128 << 20, memory=96 << 30),
}
_BANDWIDTH = {"sm_80": 2039, "sm_90": 4800, "sm_120": 1792}  # GB/s
ARCHS = tuple(_DEVICES)


def missing() -> str | None:
    """What this check lacks here, or None."""
    import jax

    if jax.__version_info__ < _LEAST:
        return f"XLA compiles without a device from jax 0.11.2 on, here is {jax.__version__}"
    if not (_SITE / "jax_plugins" / "xla_cuda13").exists():
        return "jax-cuda13-plugin is not installed"
    if not (_CUDA / "bin" / "ptxas").exists():
        return "nvidia-cuda-nvcc, whose ptxas XLA calls, is not installed"
    return None


def prepare(folder: Path) -> None:
    """Sets up this process, before jax is imported. `folder`: where Mosaic leaves what it compiles.

    XLA's own dumps would tell of Triton kernels too, but they hold a log of every compiler pass: a hundred MB a kernel
    and ten times the time.
    """
    os.environ["PATH"] = f"{_CUDA / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={_CUDA / 'nvvm'}"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # no cuDNN is needed to compile
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(_CUDA)
    os.environ["MOSAIC_GPU_DUMP_PTX"] = os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)


@functools.cache
def device(arch: str) -> Any:
    """The absent device as XLA's compiler sees it."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=_target_config(arch)
    )
    return topology.devices[0]


def compile_program(function: Any, arch: str, folder: Path, *shapes: Any) -> dict[str, Resources]:
    """Compiles jit(function) to machine code. Returns what its Mosaic kernels take, by name.

    folder: the one of `prepare`.
    Raises what XLA raises, such as RESOURCE_EXHAUSTED for more shared memory than the device has.
    """
    import jax

    from bench.gate.lowering import lower

    sharding = jax.sharding.SingleDeviceSharding(device(arch))
    placed = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding) for shape in shapes]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lower(function, arch, *placed).compile()
    return dict(map(_mosaic_kernel, folder.glob("*.resources.txt")))


def _mosaic_kernel(path: Path) -> tuple[str, Resources]:
    """The name and resources of a kernel whose shared memory Mosaic wrote to NAME.resources.txt."""
    name = path.name.removesuffix(".resources.txt")
    shared = re.search(r"smem_scratch_bytes=(\d+)", path.read_text())
    assert shared is not None, "Mosaic says how much shared memory it asks for"
    ptx, report = (path.with_name(f"{name}.{kind}").read_text() for kind in ("ptx", "ptxas"))
    return name.rpartition("_")[0], read_ptxas(report, ptx, int(shared[1]))


def _target_config(arch: str) -> str:
    """The text of XLA's GpuTargetConfigProto, as far as its compiler reads it."""
    from pallas_kernels.target import target_of

    known, capability = _DEVICES[arch], int(arch.removeprefix("sm_"))
    minor = f" minor: {capability % 10}" if capability % 10 else ""
    features = "" if capability < 90 else " feature_extension: ACCELERATED_FEATURES"
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {known["threads"]}
          shared_memory_per_block: 49152 shared_memory_per_core: {known["shared"]}
          shared_memory_per_block_optin: {target_of(arch).shared_memory}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          core_count: {known["cores"]} fpus_per_core: 128 clock_rate_ghz: 1.8
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          memory_bandwidth: {_BANDWIDTH[arch]}000000000 device_memory_size: {known["memory"]}
          l2_cache_size: {known["l2"]}
          cuda_compute_capability {{ major: {capability // 10}{minor}{features} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{known["name"]}"
    """
