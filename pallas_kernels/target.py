"""What a device can do: its architecture, its shared memory, and the fp8 kind its matrix unit takes."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Target:
    """A device as kernels see it.

    name: the device's own name, e.g. "NVIDIA H200", "gfx942" or "cpu".
    platform: "cuda", "rocm" or "cpu".
    arch: "sm_90", "gfx942", ... or "cpu".
    shared_memory: bytes of shared memory (LDS on AMD) one block may take; 0 on a CPU.
    num_cores: streaming multiprocessors or compute units; 0 where unknown.
    native_fp8: the 8-bit float the matrix unit multiplies: "e4m3fn", "e4m3fnuz", or None.
    """

    name: str
    platform: str
    arch: str
    shared_memory: int
    num_cores: int
    native_fp8: str | None

    @property
    def compute_capability(self) -> int:
        """90 for sm_90; 0 for anything but CUDA."""
        return int(self.arch.removeprefix("sm_")) if self.platform == "cuda" else 0


CPU = Target(name="cpu", platform="cpu", arch="cpu", shared_memory=0, num_cores=0, native_fp8=None)

# Shared memory a block may take: the CUDA C++ Programming Guide's table of compute capabilities, less the 1 KiB the
# driver keeps; the CDNA3 and CDNA4 ISA guides for LDS.
_SHARED_MEMORY = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}
_NATIVE_FP8 = {"sm_89": "e4m3fn", "sm_90": "e4m3fn", "sm_100": "e4m3fn", "sm_120": "e4m3fn"} | {
    "gfx942": "e4m3fnuz",
    "gfx950": "e4m3fn",
}
# Names that an abstract device carries in place of a compute capability.
_NAMED_ARCH = {
    "NVIDIA A100": "sm_80",
    "NVIDIA H100": "sm_90",
    "NVIDIA H200": "sm_90",
    "NVIDIA RTX PRO 6000": "sm_120",
}


def target_of(device: Any = None) -> Target:
    """The target of a jax device, an abstract device, an architecture's name ("sm_90"), or, for None, of this process.

    That is the device that the context's mesh names (`jax.sharding.use_abstract_mesh`, to compile for one that is not
    here), else the default device.
    """
    if isinstance(device, Target):
        return device
    if device is None:
        device = _default_device()
    if isinstance(device, str):
        return CPU if device == "cpu" else _gpu(name=device, arch=device, num_cores=0)
    kind = device.device_kind
    if getattr(device, "platform", None) == "cpu":
        return CPU
    return _gpu(name=kind, arch=_arch(device), num_cores=getattr(device, "core_count", 0) or 0)


def _default_device() -> Any:
    device = getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
    named = jax.sharding.get_abstract_mesh().abstract_device
    # Of a device that is here the context's mesh knows less than the device itself.
    absent = named is not None and named.device_kind != getattr(device, "device_kind", device)
    return named if absent else device


def _arch(device: Any) -> str:
    capability = getattr(device, "compute_capability", None)
    if capability is None:  # an abstract device has only its name
        return _NAMED_ARCH.get(device.device_kind, device.device_kind)
    if capability.startswith("gfx"):
        return capability.split(":")[0]  # "gfx942:sramecc+:xnack-"
    return "sm_" + capability.replace(".", "")


def _gpu(*, name: str, arch: str, num_cores: int) -> Target:
    return Target(
        name=name,
        platform="rocm" if arch.startswith("gfx") else "cuda",
        arch=arch,
        shared_memory=_SHARED_MEMORY.get(arch, 48 * 1024),
        num_cores=num_cores,
        native_fp8=_NATIVE_FP8.get(arch),
    )
