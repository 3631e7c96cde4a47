"""docs/targets.md from the numbers of the gate."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bench.gate.judge import SCALAR_KERNELS, SPILLS_ALLOWED
from pallas_kernels.target import target_of

_NAMES = {
    "sm_80": "A100",
    "sm_90": "H100, H200",
    "sm_120": "RTX PRO 6000, RTX 5090",
    "gfx942": "MI300X",
    "gfx950": "MI355X",
}
_INTRODUCTION = """# Targets

Written by `make targets`; do not edit. Every kernel was compiled with every config that dispatch can choose for the
published models (8 to 128 attention heads a device, 32 and 64 index heads, top-k of 512 and 2048, bf16 and e4m3 caches
with pages of 64 tokens, prefill and decode), for devices that were not there. What is checked: that it compiles, that a
block's shared memory fits, that no more than {spills} bytes a thread spill, and that the matrix instruction meant is
there. Nothing here is a measurement of speed: that is in [performance.md](performance.md), for the H200 alone.

- Registers are 32-bit ones a thread, on AMD vector and accumulation registers together; 255 and 512 are all there are.
- Spills are bytes a thread. Shared is what a block takes, of the most it may take.
- Seconds are of the compilation, on two busy cores. "XLA" compiles the whole call as the device would, with
  XLA's own Triton and without the device; where it is empty Triton's back end stands for it alone, as it must on AMD.
- A kernel that a device cannot run is refused by dispatch, with the reason (`dsa-jax explain --device ARCH`).
"""
_HEADER = """
| kernel | calls | config | registers | spills | shared | matrix instruction | s | XLA |
|---|---|---|---|---|---|---|---|---|
"""


def render(results: dict[str, Any]) -> str:
    """The document. results: by architecture and check, what `targets.run` keeps."""
    parts = [_INTRODUCTION.format(spills=SPILLS_ALLOWED)]
    for arch, checks in results.items():
        compilers = "; ".join(check["compiler"] for check in checks.values())
        limit = target_of(arch).shared_memory
        parts.append(f"\n## {arch} ({_NAMES[arch]})\n\n{compilers}. At most {limit} bytes of shared memory a block.\n")
        parts.append(_HEADER + "".join(f"| {' | '.join(row)} |\n" for row in _rows(checks)))
        parts += _complaints(checks)
    return "".join(parts)


def _rows(checks: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row a kernel."""
    programs: dict[tuple, dict[str, dict[str, Any]]] = defaultdict(dict)
    for check, result in checks.items():
        for program in result["programs"]:
            key = (program["op"], program["implementation"], str(program["config"]), tuple(program["calls"]))
            programs[key][check] = program
    for (op, implementation, _, calls), by_check in programs.items():
        config = next(iter(by_check.values()))["config"]
        wheel, xla = by_check.get("wheel", {}), by_check.get("xla", {})
        kernels = [(kernel, wheel) for kernel in wheel.get("kernels", [])]
        kernels += [(kernel, xla) for kernel in xla.get("kernels", [])]
        verdict = "" if not xla else "failed" if "failure" in xla else f"{xla['seconds']:.0f} s"
        for kernel, program in kernels or [(None, next(iter(by_check.values())))]:
            name = kernel["kernel"] if kernel is not None and kernel["kernel"] in SCALAR_KERNELS else ""
            yield (
                f"{op} {implementation}" + (f": {name}" if name else ""),
                _joined(calls),
                ", ".join(f"{field} {value}" for field, value in config.items()),
                *_numbers(kernel),
                f"{program['seconds']:.0f}" if program is wheel else "",
                verdict,
            )


def _numbers(kernel: dict[str, Any] | None) -> tuple[str, ...]:
    if kernel is None:
        return ("", "", "", "")
    shared = "" if kernel["shared"] is None else str(kernel["shared"])
    return str(kernel["registers"]), str(kernel["spills"]), shared, ", ".join(map(_short, kernel["matrix"]))


def _short(instruction: str) -> str:
    """wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 without what they all have."""
    return re.sub(r"\.(mma_async|sync|aligned|row|col)\b", "", instruction).removeprefix("v_")


def _joined(labels: list[str] | tuple[str, ...]) -> str:
    """From "8 heads, bf16" and "16 heads, bf16" makes "8, 16 heads, bf16"."""
    groups: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        first, _, rest = label.partition(" ")
        groups[rest].append(first)
    return "; ".join(f"{', '.join(firsts)} {rest}" for rest, firsts in groups.items())


def _complaints(checks: dict[str, Any]) -> list[str]:
    """What does not hold, as a list under the table."""
    found = [
        f"- **{program['op']} {program['implementation']}** ({_joined(program['calls'])}): {what}\n"
        for result in checks.values()
        for program in result["programs"]
        for what in program["complaints"]
    ]
    return ["\nNot as it should be:\n\n", *found] if found else []
