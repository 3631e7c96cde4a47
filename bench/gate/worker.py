"""One check of one target, in a process of its own: `python -m bench.gate.worker CHECK ARCH MATCH FOLDER SKIP`.

CHECK is "wheel" (the Triton package's back ends) or "xla" (XLA without the device). Prints a line of JSON when it takes
up a program, with its number, and one when it is done, with what its kernels take. Only programs whose name holds MATCH
are looked at, and the first SKIP of them are passed over. XLA may end the process: the parent then knows which program
it was.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gate.cases import Case
    from pallas_kernels.target import Target

CHECKS = ("wheel", "xla")


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel with a config, and the calls that dispatch gives it.

    case, implementation, target: the first of them, which is compiled.
    labels: of all of them.
    """

    case: "Case"
    implementation: str
    target: "Target"
    config: Any
    labels: tuple[str, ...] = ()


def programs(arch: str) -> list[Program]:
    """Every kernel and config that dispatch can choose on an architecture. Each is compiled for one call.

    Calls of one config differ in masks and in the bounds of loops, not in what the code takes.
    """
    from bench.gate.cases import runnable

    found: dict[Any, Program] = {}
    for case, implementation, target in runnable(arch):
        config = case.config(implementation, target)
        key = (case.call.op, implementation, str(config), case.variant)
        known = found.get(key, Program(case, implementation, target, config))
        found[key] = dataclasses.replace(known, labels=tuple(dict.fromkeys((*known.labels, case.label))))
    return list(found.values())


def name(op: str, implementation: str, calls: Sequence[str]) -> str:
    """What a program is called: topk_indices hopper (4096 x 4096, k = 512)."""
    return f"{op} {implementation} ({'; '.join(calls)})"


def check_with_triton(program: Program, arch: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Each Triton kernel of a program, compiled by the Triton package."""
    from bench.gate import wheel
    from bench.gate.lowering import lower, triton_kernels

    del folder
    function, shapes = program.case.function(program.implementation, program.target)
    for kernel in triton_kernels(lower(function, arch, *shapes)):
        yield dict(kernel=kernel.name, **dataclasses.asdict(wheel.compile_kernel(kernel, arch)))


def check_with_xla(program: Program, arch: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The whole program compiled by XLA, with what its Mosaic kernels take."""
    from bench.gate import xla

    function, shapes = program.case.function(program.implementation, program.target)
    for name, resources in xla.compile_program(function, arch, folder, *shapes).items():
        yield dict(kernel=name, **dataclasses.asdict(resources))


def main(check: str, arch: str, match: str, folder: Path, skip: int) -> None:
    if check == "xla":
        from bench.gate import xla

        xla.prepare(folder)
    import jax

    jax.config.update("jax_platforms", "cpu")
    run = {"wheel": check_with_triton, "xla": check_with_xla}[check]
    wanted = [p for p in programs(arch) if match in name(p.case.call.op, p.implementation, p.labels)]
    for number, program in enumerate(wanted):
        if number < skip:
            continue
        told = dict(
            number=number,
            op=program.case.call.op,
            implementation=program.implementation,
            config=_fields(program.config),
            calls=program.labels,
            dtype=program.case.dtype,
        )
        _say(told)
        try:
            _say(dict(number=number, kernels=list(run(program, arch, folder))))
        except Exception as error:  # the compilers raise whatever they like; the gate reports it and goes on
            _say(dict(number=number, failure=f"{type(error).__name__}: {str(error).strip()[:400]}"))


def _fields(config: Any) -> dict[str, Any]:
    return {} if config is None else dataclasses.asdict(config)


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
