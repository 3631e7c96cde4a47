"""What a compiled kernel takes of a device, read from what the assemblers say."""

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

_CUDA_MATRIX = r"(wgmma\.mma_async\S+|\bmma\.sync\S+)"
_AMD_MATRIX = r"(v_mfma_\S+)"


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    registers: 32-bit ones a thread; on AMD vector and accumulation registers together.
    spills: bytes a thread writes to memory for want of registers; on AMD vector registers times four.
    shared: bytes of shared memory or LDS a block, or None if unknown.
    matrix: the matrix instructions and how many of each the code holds.
    """

    registers: int
    spills: int
    shared: int | None
    matrix: dict[str, int]


def cuda_resources(ptx: str, ptxas: str, shared: int | None) -> Resources:
    """What ptxas makes of a kernel. Raises RuntimeError with its words if it refuses."""
    wanted = re.search(r"^\.target (\w+)", ptx, re.M)
    assert wanted is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={wanted[1]}", str(source), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()[-400:]}")
    return read_ptxas(done.stderr, ptx, shared)


def read_ptxas(report: str, ptx: str, shared: int | None) -> Resources:
    """`ptxas -v`'s report and the PTX it is of."""
    return Resources(
        registers=max(_numbers(r"Used (\d+) registers", report)),
        spills=sum(_numbers(r"stack frame, (\d+) bytes spill stores", report)),  # a warning may say it before
        shared=shared,
        matrix=_count(_CUDA_MATRIX, ptx),
    )


def amd_resources(assembly: str, shared: int) -> Resources:
    return Resources(
        registers=max(_numbers(r"\.vgpr_count:\s+(\d+)", assembly)),
        spills=4 * max(_numbers(r"\.vgpr_spill_count:\s+(\d+)", assembly)),
        shared=shared,
        matrix=_count(_AMD_MATRIX, assembly),
    )


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(pattern, text)]


def _count(pattern: str, text: str) -> dict[str, int]:
    return dict(Counter(found.rstrip(",;") for found in re.findall(pattern, text)))
