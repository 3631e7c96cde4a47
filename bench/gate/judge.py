"""What is wrong with a compiled kernel."""

import re
from typing import Any

from pallas_kernels.target import target_of

# What was fastest on an H200 spills up to 448 bytes in some configs; a tile that does not fit spills kilobytes.
SPILLS_ALLOWED = 512  # bytes a thread

# The instruction that a product of these operands should become. Architectures without e4m3 products take float16:
# what kernels decode e4m3 to is exact in it.
_MATRIX = {
    ("sm_80", "bfloat16"): r"mma\.sync.*bf16",
    ("sm_80", "float8_e4m3fn"): r"mma\.sync.*f16\.f16",
    ("sm_90", "bfloat16"): r"(wgmma|mma\.sync).*bf16",
    ("sm_90", "float8_e4m3fn"): r"wgmma.*e4m3\.e4m3",
    ("sm_120", "bfloat16"): r"mma\.sync.*bf16",
    ("sm_120", "float8_e4m3fn"): r"mma\.sync.*e4m3\.e4m3",
    ("gfx942", "bfloat16"): r"v_mfma.*bf16",
    ("gfx942", "float8_e4m3fn"): r"v_mfma.*_f16",
    ("gfx950", "bfloat16"): r"v_mfma.*bf16",
    ("gfx950", "float8_e4m3fn"): r"v_mfma.*(f8f6f4|fp8)",
}
# Kernels of a program that multiply no matrices.
SCALAR_KERNELS = ("sparse_mla_merge", "indexer_schedule")


def complaints(arch: str, program: dict[str, Any], kernel: dict[str, Any]) -> list[str]:
    """What does not hold of one kernel of a program, as the worker told of both; [] if all does."""
    found = []
    limit = target_of(arch).shared_memory
    if (kernel["shared"] or 0) > limit:
        found.append(f"{kernel['shared']} bytes of shared memory, {limit} are there")
    if kernel["spills"] > SPILLS_ALLOWED:
        found.append(f"spills {kernel['spills']} bytes a thread")
    wanted = wanted_instruction(arch, program["dtype"], kernel["kernel"])
    if wanted and not any(re.search(wanted, name) for name in kernel["matrix"]):
        found.append(f"no instruction like {wanted}, but {', '.join(kernel['matrix']) or 'none'}")
    return found


def wanted_instruction(arch: str, dtype: str, kernel: str) -> str | None:
    """The pattern of the matrix instruction that a kernel on operands of `dtype` must have, None if it needs none."""
    if not dtype or kernel in SCALAR_KERNELS:
        return None
    return _MATRIX[arch, dtype]
