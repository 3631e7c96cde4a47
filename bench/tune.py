"""Measure kernels' configs, and write which of them win to pallas_kernels/tuned/<device>.json.

A config other than the heuristic's gets into the table where it is faster by more than `--gain` on every shape whose
call asks for a config in the same words. It is chosen in one burst of calls and judged in another. Where the
heuristic's stands, the entry says so: its config is empty.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bench import shapes
from bench.case import Case, length
from bench.compiling import compiled
from bench.ops.attention import DenseMla, PagedSparseMla, SparseMla
from bench.ops.experts import GroupedMatmul
from bench.ops.scores import IndexerLogits, PagedIndexerLogits
from bench.ops.topk import Topk
from bench.options import add_lock, turn
from bench.shapes import geometric_mean
from bench.timing import Timing, measure_in_turn
from dsa_jax.cli import PRESETS
from dsa_jax.dispatch import NAMES, op_named
from pallas_kernels import tuning
from pallas_kernels.target import Target, target_of

_K = 1024
# A few shapes a kernel that lie far apart, each cheap to measure.
FEW: dict[str, tuple[Case, ...]] = {
    "topk": tuple(
        Topk(rows=rows, columns=n * _K) for rows, n in ((1, 64), (64, 8), (64, 64), (4096, 8), (4096, 32), (4096, 64))
    ),
    "indexer_logits": (
        *(IndexerLogits(heads=heads, rows=4 * _K, columns=n * _K) for heads in (32, 64) for n in (8, 32)),
        *(IndexerLogits(heads=heads, rows=4 * _K, columns=16 * _K, keys="bf16") for heads in (32, 64)),
    ),
    "paged_indexer_logits": tuple(
        PagedIndexerLogits(heads=heads, batch=batch, length=n * _K)
        for heads in (32, 64)
        for batch, n in ((1, 64), (64, 8), (64, 64))
    ),
    "sparse_mla": tuple(
        SparseMla(heads=heads, keys=32 * _K, rows=_K, cache=cache) for heads in (64, 128) for cache in ("bf16", "e4m3")
    ),
    "paged_sparse_mla": tuple(
        PagedSparseMla(heads=64, batch=batch, cache=cache) for cache in ("bf16", "e4m3") for batch in (1, 64)
    ),
    "dense_mla": tuple(
        DenseMla(heads=heads, rows=2 * _K, qk_dim=qk, v_dim=v) for heads, qk, v in ((64, 256, 256), (128, 192, 128))
    ),
    "grouped_matmul": tuple(
        GroupedMatmul(rows=8 * tokens, inner=inner, outer=outer)
        for hidden, counts in ((6144, (1, 32, _K, 2 * _K, 8 * _K)), (7168, (32, 8 * _K)))
        for tokens in counts
        for inner, outer in ((hidden, 4096), (2048, hidden))
    ),
}
KERNELS = NAMES[:-1]
OPS = tuple(FEW)  # select_topk is made of two of them
_LENGTHS = ("m", "n")  # what an entry holds around; of anything else it holds for the very number
_REACH = 2**0.5  # how far from a measured length its entry is taken to hold
_REPEATS = 5, 15  # of the burst that chooses and of the one that judges


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="*", metavar="OP", help=f"default: {', '.join(OPS)}")
    parser.add_argument(
        "--shapes",
        choices=("few", "model", "anchors", "tiny"),
        default="few",
        help="a few of its own (default), a model's, those that peers were measured on, or tiny ones",
    )
    parser.add_argument("--preset", choices=PRESETS, default="glm5_2", help="a model (default: glm5_2)")
    parser.add_argument("--seq", default="8k,64k", metavar="N,N", help="lengths for the model (default: 8k,64k)")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=N,..", help="a shape of your own")
    parser.add_argument("--implementation", action="append", metavar="NAME", help="hopper, portable (default: both)")
    parser.add_argument("--gain", type=float, default=2.0, metavar="PERCENT", help="worth an entry (default: 2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the device's table in the package")
    add_lock(parser)


def run(args: argparse.Namespace) -> int:
    if unknown := set(args.op) - set(OPS):
        raise ValueError(f"OP must be among {', '.join(OPS)}, got {', '.join(sorted(unknown))}")
    if unknown := set(args.implementation or ()) - set(KERNELS):
        raise ValueError(f"--implementation must be among {', '.join(KERNELS)}, got {', '.join(sorted(unknown))}")
    problems = [problem for op in args.op or OPS for case in _cases(op, args) for problem in _problems(case, args)]
    programs = {key: program for problem in problems for key, program in problem.programs()}
    done = compiled(programs, failed=lambda key, error: print(f"  {key}: {_in_a_line(error)}", flush=True))
    path = args.output or tuning.table_path(target_of().name)
    found: dict[str, list[Finding]] = {}
    with turn(args.lock):
        try:
            for problem in problems:
                for finding in problem.measured(done):
                    found.setdefault(finding.kernel, []).append(finding)
                    print(finding, flush=True)
        finally:  # a config that fails may end all work on the device: what was found before stays
            _write(path, {kernel: entries(findings, args.gain / 100) for kernel, findings in found.items()})
    return 0


def _write(path: Path, kernels: dict[str, list[dict[str, Any]]]) -> None:
    """Puts the entries of some kernels in the place of those that the file has."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(table | kernels), encoding="utf-8")
    print(f"wrote {path}")


def text_of(table: dict[str, list[dict[str, Any]]]) -> str:
    """A device's table as JSON, one entry a line."""
    kernels = [
        f' "{kernel}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for kernel, rows in sorted(table.items())
        if rows
    ]
    return "{\n" + ",\n".join(kernels) + "\n}\n"


class Trial(NamedTuple):
    """A config that was measured. fields: what differs from the heuristic; chosen, judged: its time in either burst."""

    fields: dict[str, Any]
    chosen: Timing
    judged: Timing


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a kernel's configs took on one shape. trials: the heuristic's first."""

    kernel: str
    case: str
    call: dict[str, int | str]
    trials: list[Trial]

    def __str__(self) -> str:
        heuristic, *others = self.trials
        least = min(others, key=lambda trial: trial.chosen.us, default=None)
        best = f"; best of {len(others)} others {least.fields} {least.judged.us:.1f} us" if least else ""
        return f"{self.kernel} {self.case}: heuristic {heuristic.judged.us:.1f} us{best}"


def entries(findings: Sequence[Finding], gain: float) -> list[dict[str, Any]]:
    """The table's entries of one kernel, one for every call that was measured, on however many shapes."""
    by_call: dict[str, list[Finding]] = {}
    for finding in findings:
        by_call.setdefault(json.dumps(finding.call), []).append(finding)
    seen = {name: sorted({int(f.call[name]) for f in findings if name in f.call}) for name in _LENGTHS}
    return [
        {
            "where": {name: _wanted(name, value, seen) for name, value in same[0].call.items()},
            **_winner(same, gain),
        }
        for same in by_call.values()
    ]


def _winner(findings: Sequence[Finding], gain: float) -> dict[str, Any]:
    """The config of findings that asked alike; and for each shape the heuristic's time and the best other config's."""
    tried = [{json.dumps(trial.fields): trial for trial in finding.trials} for finding in findings]
    base = [trials[json.dumps({})] for trials in tried]
    common = [fields for fields in tried[0] if fields != json.dumps({}) and all(fields in trials for trials in tried)]

    def ratio(fields: str) -> float:
        return geometric_mean([t[fields].chosen.us / b.chosen.us for t, b in zip(tried, base, strict=True)])

    best = min(common, key=ratio, default=json.dumps({}))
    pairs = [(b.judged, trials[best].judged) for b, trials in zip(base, tried, strict=True)]
    won = all(new.us < old.us * (1 - gain) and new.high_us < old.low_us for old, new in pairs)
    times = {f.case: [round(old.us, 1), round(new.us, 1)] for f, (old, new) in zip(findings, pairs, strict=True)}
    return {"config": json.loads(best) if won else {}, "best_other": json.loads(best), "us": times}


def _wanted(name: str, value: int | str, seen: dict[str, list[int]]) -> str | list[int]:
    if isinstance(value, str):
        return value
    return _range(value, seen[name]) if name in seen else [value, value]


def _range(value: int, measured: list[int]) -> list[int]:
    """[low, high] around a measured value: a factor of sqrt(2) to each side, or less where another value is near."""
    below = [math.sqrt(value * other) for other in measured if other < value]
    above = [math.sqrt(value * other) for other in measured if other > value]
    low = max([value / _REACH, *below])
    high = min([value * _REACH, *above])
    return [math.floor(low) + (low > value / _REACH), math.floor(high)]


def _cases(op: str, args: argparse.Namespace) -> Sequence[Case]:
    if args.shapes == "few" and not args.shape:
        return FEW[op]
    seqs = [length(text) for text in args.seq.split(",")]
    return shapes.cases(op, shapes=args.shapes, preset=args.preset, seqs=seqs, custom=args.shape)


class Key(NamedTuple):
    """A program: a kernel's config on a case, as JSON; "inputs" and "sample" are the case's own."""

    case: str
    kernel: str
    what: str

    def __str__(self) -> str:
        return " ".join(self)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A kernel on a case. lowered: its programs by the fields that differ from the heuristic, as JSON."""

    case: Case
    kernel: str
    asked: tuning.Asked
    lowered: dict[str, jax.stages.Lowered]

    def programs(self) -> Iterator[tuple[Key, jax.stages.Lowered]]:
        inputs, first = jax.eval_shape(self.case.inputs), next(iter(self.lowered.values()))
        yield Key(self.case.name, self.kernel, "inputs"), jax.jit(self.case.inputs).lower()
        yield Key(self.case.name, self.kernel, "sample"), jax.jit(self.case.sample).lower(first.out_info, inputs)
        for fields, lowered in self.lowered.items():
            yield Key(self.case.name, self.kernel, fields), lowered

    def measured(self, done: dict[Key, jax.stages.Compiled]) -> Iterator[Finding]:
        """Nothing where the heuristic's config is not among what runs and is right."""
        inputs, sample = (done[Key(self.case.name, self.kernel, what)] for what in ("inputs", "sample"))
        arrays = jax.block_until_ready(inputs())
        programs = {
            fields: done[key] for fields in self.lowered if (key := Key(self.case.name, self.kernel, fields)) in done
        }
        right = _Right(self.case, lambda out: jax.device_get(sample(out, arrays)))
        programs = {
            fields: program for fields, program in programs.items() if self._is_right(fields, program, arrays, right)
        }
        if json.dumps({}) not in programs:
            return
        calls = [lambda program=program: program(*arrays) for program in programs.values()]
        bursts = [measure_in_turn(calls, repeats=repeats) for repeats in _REPEATS]
        trials = [Trial(json.loads(fields), *times) for fields, *times in zip(programs, *bursts, strict=True)]
        yield Finding(self.kernel, self.case.name, self.asked.call, trials)

    def _is_right(self, fields: str, program: jax.stages.Compiled, arrays: tuple[Any, ...], right: "_Right") -> bool:
        with _said(f"{self.case.name} {self.kernel} {fields}"):
            if not (wrong := right.complaint(jax.block_until_ready(program(*arrays)))):
                return True
            print(f"  {self.case.name} {self.kernel} {fields}: WRONG: {wrong[:120]}", flush=True)
        return False


class _Right:
    """What is wrong with an output, or None. Outputs whose samples have the same bits are judged once."""

    def __init__(self, case: Case, sample: Callable[[Any], Any]):
        self._case, self._sample = case, sample
        self._known: list[tuple[list[np.ndarray], str | None]] = []

    def complaint(self, out: Any) -> str | None:
        sample = self._sample(out)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(sample)]
        for known, complaint in self._known:
            if all(a.tobytes() == b.tobytes() for a, b in zip(leaves, known, strict=True)):
                return complaint
        complaint = self._case.error(sample, ours=True)
        self._known.append((leaves, complaint))
        return complaint


def _problems(case: Case, args: argparse.Namespace) -> Iterator[_Problem]:
    """The kernels that a case runs and that have candidates; why an implementation cannot run is said."""
    wanted = args.implementation or KERNELS
    for name in (name for name in op_named(case.op).implementations() if name in wanted):
        with tuning.trying({}) as trial:
            try:
                heuristic = _lowered(case, name)
            except NotImplementedError as refusal:
                print(f"{case.name} {name}: {refusal}", flush=True)
                continue
        for kernel, asked in trial.asked.items():
            lowered = {json.dumps({}): heuristic}
            for fields in candidates(kernel, asked, target_of()):
                with _said(f"{case.name} {kernel} {fields}"), tuning.trying({kernel: fields}):
                    lowered[json.dumps(fields)] = _lowered(case, name)
            if len(lowered) > 1:
                yield _Problem(case, kernel, asked, lowered)


def candidates(kernel: str, asked: tuning.Asked, target: Target) -> list[dict[str, Any]]:
    """What the module beside the kernel proposes, [] where there is none."""
    op = kernel.partition(".")[0]
    folder = {"paged_indexer_logits": "indexer_logits"}.get(op, op)
    try:
        module = importlib.import_module(f"pallas_kernels.{folder}.candidates")
    except ModuleNotFoundError:
        return []
    return module.candidates(kernel, target, asked.heuristic, asked.call)


def _lowered(case: Case, implementation: str) -> jax.stages.Lowered:
    return jax.jit(case.call(implementation)).lower(*jax.eval_shape(case.inputs))


@contextlib.contextmanager
def _said(name: str) -> Generator[None]:
    """A config can fail in any part of three compilers, and that is an answer: a line, and no error."""
    try:
        yield
    except Exception as error:
        print(f"  {name}: {_in_a_line(error)}", flush=True)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
