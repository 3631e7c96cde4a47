"""Measure a kernel's configs, and write those that beat its heuristic to pallas_kernels/tuned/<device>.json."""

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bench import shapes
from bench.case import Case, length
from bench.ops import CASES
from bench.timing import Timing, measure
from dsa_jax.dispatch import op_named
from pallas_kernels import tuning
from pallas_kernels.target import target_of

_OPS = tuple(name for name in CASES if name != "select_topk")  # which is made of two of the others
_REACH = 2**0.5  # how far from a measured length its entry is taken to hold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", choices=_OPS, metavar="OP", help=", ".join(_OPS))
    parser.add_argument("--preset", choices=shapes.PRESETS, default="glm5_2", help="a model (default: glm5_2)")
    parser.add_argument("--seq", default="8k,64k", metavar="N,N", help="lengths for the model (default: 8k,64k)")
    parser.add_argument("--shapes", choices=("model", "anchors", "tiny"), default="model")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=N,..", help="a shape of your own")
    parser.add_argument("--implementation", action="append", metavar="NAME", help="hopper, portable (default: both)")
    parser.add_argument("--gain", type=float, default=3.0, metavar="PERCENT", help="worth an entry (default: 3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the device's table in the package")


def run(args: argparse.Namespace) -> int:
    cases = shapes.cases(
        args.op,
        shapes=args.shapes,
        preset=args.preset,
        seqs=[length(text) for text in args.seq.split(",")],
        custom=args.shape,
    )
    names = args.implementation or [name for name in op_named(cases[0].op).implementations() if name != "xla"]
    found: dict[str, list[Finding]] = {}
    for case in cases:
        inputs = jax.block_until_ready(jax.jit(case.inputs)())
        for name in names:
            for finding in _tune(case, name, inputs, args.gain / 100):
                found.setdefault(finding.kernel, []).append(finding)
                print(finding, flush=True)
    path = args.output or tuning.table_path(target_of().name)
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    table |= {kernel: entries(findings) for kernel, findings in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(table), encoding="utf-8")
    print(f"wrote {path}")
    return 0


def text_of(table: dict[str, list[dict[str, Any]]]) -> str:
    """A device's table as JSON, one entry a line."""
    kernels = [
        f' "{kernel}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for kernel, rows in sorted(table.items())
        if rows
    ]
    return "{\n" + ",\n".join(kernels) + "\n}\n"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The best config of a kernel on one shape. fields: what differs from the heuristic, {} where nothing gains."""

    kernel: str
    case: str
    call: dict[str, int | str]
    fields: dict[str, Any]
    heuristic_us: float
    best_us: float

    def __str__(self) -> str:
        change = f"{self.fields}, {self.best_us:.1f} us" if self.fields else "kept"
        return f"{self.kernel} {self.case}: heuristic {self.heuristic_us:.1f} us; {change}"


def _tune(case: Case, implementation: str, inputs: tuple[Any, ...], gain: float) -> Iterator[Finding]:
    """Nothing where the implementation cannot run, or has no candidates."""
    with tuning.trying({}) as trial:
        try:
            heuristic = _lowered(case, implementation, inputs).compile()
        except NotImplementedError as refusal:
            print(f"{case.name} {implementation}: {refusal}")
            return
    for kernel in trial.calls:
        tried = _programs(case, implementation, inputs, kernel)
        times = [
            (time.us, i)
            for i, (fields, program) in enumerate(tried)
            if (time := _time(case, program, inputs, f"{case.name} {kernel} {fields}"))
        ]
        if not times:
            continue
        best, program = tried[min(times)[1]]
        # Once more, one right after the other: what won among many may have won by chance.
        base, again = _measure(heuristic, inputs), _measure(program, inputs)
        won = again.us < base.us * (1 - gain) and again.high_us < base.low_us
        yield Finding(
            kernel, case.name, trial.calls[kernel], best if won else {}, base.us, again.us if won else base.us
        )


def _programs(
    case: Case, implementation: str, inputs: tuple[Any, ...], kernel: str
) -> list[tuple[dict[str, Any], jax.stages.Compiled]]:
    """The candidates of a kernel and their programs, compiled side by side. One that does not compile is said so."""
    found = []
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        pending = []
        for fields in _candidates(kernel):
            with _said(f"{case.name} {kernel} {fields}"), tuning.trying({kernel: fields}):
                pending.append((fields, pool.submit(_lowered(case, implementation, inputs).compile)))
        for fields, future in pending:
            with _said(f"{case.name} {kernel} {fields}"):
                found.append((fields, future.result()))
    return found


@contextlib.contextmanager
def _said(name: str) -> Iterator[None]:
    """A config can fail in any part of three compilers, and that is an answer: a line, and no error."""
    try:
        yield
    except Exception as error:
        print(f"  {name}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")


def _time(case: Case, program: jax.stages.Compiled, inputs: tuple[Any, ...], name: str) -> Timing | None:
    """None, said in a line, for a program that fails or is wrong."""
    with _said(name):
        wrong = case.error(jax.device_get(jax.jit(case.sample)(program(*inputs), inputs)), ours=True)
        if not wrong:
            return _measure(program, inputs)
        print(f"  {name}: {wrong[:120]}")
    return None


def _lowered(case: Case, implementation: str, inputs: tuple[Any, ...]) -> jax.stages.Lowered:
    return jax.jit(case.call(implementation)).lower(*inputs)


def _measure(program: jax.stages.Compiled, inputs: tuple[Any, ...]) -> Timing:
    jax.block_until_ready(program(*inputs))
    return measure(lambda: program(*inputs))


def _candidates(kernel: str) -> list[dict[str, Any]]:
    """The list beside the kernel, [] where there is none."""
    folder = {"topk": "topk", "paged_indexer_logits": "indexer_logits"}.get(kernel.split(".")[0], kernel.split(".")[0])
    try:
        module = importlib.import_module(f"pallas_kernels.{folder}.candidates")
    except ModuleNotFoundError:
        return []
    return module.CANDIDATES.get(kernel, [])


def entries(findings: list[Finding]) -> list[dict[str, Any]]:
    """The table's entries of one kernel: each holds around the lengths measured, up to halfway to the next."""
    numbers = {name for finding in findings for name, value in finding.call.items() if not isinstance(value, str)}
    seen = {name: sorted({int(finding.call[name]) for finding in findings}) for name in numbers}
    found = []
    for finding in findings:
        if finding.fields:
            where = {
                name: value if isinstance(value, str) else _range(int(value), seen[name])
                for name, value in finding.call.items()
            }
            found.append({"where": where, "config": finding.fields})
    return found


def _range(value: int, measured: list[int]) -> list[int]:
    """[low, high] around a measured value: a factor of sqrt(2) to each side, or less where another value is near."""
    below = [math.sqrt(value * other) for other in measured if other < value]
    above = [math.sqrt(value * other) for other in measured if other > value]
    low = max([value / _REACH, *below])
    high = min([value * _REACH, *above])
    return [math.floor(low) + (low > value / _REACH), math.floor(high)]
