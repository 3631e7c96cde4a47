"""Check, then time, one op: ours, what anyone would write in jax, and other people's kernels."""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bench import floors, peers, record, shapes
from bench.case import Case, length
from bench.options import add_lock, add_results, turn
from bench.timing import Timing, measure
from dsa_jax.cli import PRESETS
from dsa_jax.dispatch import NAMES, op_named

_WRONG, _SKIPPED = "WRONG", "skipped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, default="glm5_2", help="a model (default: glm5_2)")
    parser.add_argument("--seq", default="8k,64k", metavar="N,N", help="lengths for the model (default: 8k,64k)")
    parser.add_argument(
        "--shapes",
        choices=("model", "anchors", "tiny"),
        help="the model's (default on a GPU), those that peers were measured on, or tiny ones (default on a CPU)",
    )
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME=N,..", help="a shape of your own; may be repeated"
    )
    parser.add_argument(
        "--implementation",
        action="append",
        metavar="NAME",
        help="run these alone: ours, a baseline, a peer; repeatable",
    )
    parser.add_argument("--check", action="store_true", help="check and time nothing")
    parser.add_argument(
        "--peers", action="store_true", help="other people's kernels too, where installed: `pip install .[peers]`"
    )
    parser.add_argument("--no-baselines", action="store_true", help="leave out what is written in plain jax or torch")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="keep the device's rates here, for several programs")
    add_results(parser, plot="the results")
    add_lock(parser)


def run(args: argparse.Namespace) -> int:
    _check_names(args)
    default = "tiny" if jax.default_backend() == "cpu" else "model"
    cases = shapes.cases(
        args.program,
        shapes=args.shapes or default,
        preset=args.preset,
        seqs=[length(text) for text in args.seq.split(",")],
        custom=args.shape,
    )
    with turn(args.lock):
        rates = {} if args.check else _rates(args.rates)
    head = record.header(args.commit)
    print(f"{head['device']}, jax {jax.__version__}, commit {head['commit']}, {head['date']}")
    if rates:
        print(", ".join(f"{name} {rate / 1e12:.2f} {_UNITS[name]}" for name, rate in rates.items()))
    rows = []
    for row in results(args, cases, rates):
        print(line(row), flush=True)
        rows.append(row)
        if args.json:  # every time: a run that is cut off leaves what it has
            record.write(args.json, args.program, rows, commit=args.commit, rates=rates)
    if args.plot:
        from bench.plots import draw_bars

        draw_bars(args.plot, f"{args.program} on {head['device']}", rows)
    return 1 if any(_WRONG in row for row in rows) else 0


def _rates(file: Path | None) -> dict[str, float]:
    """Measured, or read from the file that an earlier program of the same run kept them in."""
    if file is not None and file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    rates = floors.rates()
    if file is not None:
        file.write_text(json.dumps(rates), encoding="utf-8")
    return rates


_UNITS = {"copy": "TB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}


def _check_names(args: argparse.Namespace) -> None:
    """Raises ValueError for an --implementation that no case of the program can have."""
    legal = {*NAMES, *peers.known(), *_BASELINES}
    for name in args.implementation or ():
        if name not in legal:
            raise ValueError(f"--implementation must be one of {', '.join(sorted(legal))}, got {name!r}")


_BASELINES = ("einsum", "einsum + lax.top_k", "jax.nn cudnn", "jax.nn xla", "lax.top_k", "torch.topk")


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to check and time on a case.

    call: runs it once; or why it cannot run.
    sample: the case's, of (out, inputs).
    result: what `call` returned, as the case checks it.
    flush: of the L2 cache on its stream, or None for jax's.
    """

    name: str
    kind: str
    call: Callable[[], Any] | str
    sample: Callable[[Any, Any], Any]
    result: Callable[[Any], Any] = lambda out: out
    wait: Callable[[Any], Any] = jax.block_until_ready
    flush: Callable[[], Any] | None = None


def results(args: argparse.Namespace, cases: tuple[Case, ...], rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """One row for every contender on every case; one that is wrong gets no time."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        prepared = list(pool.map(lambda case: Prepared(case, args), cases))
    with turn(args.lock):
        for case in prepared:
            yield from case.rows(args, rates)


class Program(NamedTuple):
    """A compiled implementation of a case's inputs, and the compiled sample of (its output, the inputs)."""

    run: jax.stages.Compiled
    sample: jax.stages.Compiled


class Prepared:
    """A case with its inputs' program and our kernels compiled, which needs nothing of the device."""

    def __init__(self, case: Case, args: argparse.Namespace):
        self.case = case
        self._inputs = jax.jit(case.inputs).lower().compile()
        self._shapes = jax.eval_shape(case.inputs)
        self._sample = jax.jit(case.sample)
        self._ours: dict[str, Program | Callable[..., Any] | str] = {}
        self._wanted = args.implementation
        # On a CPU kernels are interpreted: that shows that they are right, and no speed.
        every = op_named(case.op).implementations() if jax.default_backend() != "cpu" else ("xla",)
        for name in every if self._wanted is None else [name for name in NAMES if name in self._wanted]:
            function = case.call(name)
            self._ours[name] = function if name == "xla" else self._compiled(function)
        others = () if args.no_baselines else tuple((peer, "baseline") for peer in peers.baselines(case))
        others += tuple((peer, "peer") for peer in peers.peers(case)) if args.peers else ()
        self._others = [(peer, kind) for peer, kind in others if self._wants(peer.name)]
        for peer, _ in self._others:
            with contextlib.suppress(peers.Unavailable):
                peer.load()

    def rows(self, args: argparse.Namespace, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
        """Runs, checks and times every contender; the inputs are gone afterwards."""
        case, inputs = self.case, jax.block_until_ready(self._inputs())
        for contender in self._contenders(args, inputs):
            row = {"op": case.op, "case": case.name, "shape": dataclasses.asdict(case)}
            row |= {"implementation": contender.name, "kind": contender.kind}
            if isinstance(contender.call, str):
                yield {**row, _SKIPPED: contender.call}
                continue
            out = contender.result(contender.wait(contender.call()))
            sample = jax.device_get(contender.sample(out, inputs))
            del out
            wrong = case.error(sample, ours=contender.kind == "ours")
            if wrong:
                yield {**row, _WRONG: wrong}
            elif args.check:
                yield {**row, "checked": True}
            else:
                timing = measure(contender.call, wait=contender.wait, flush=contender.flush)
                yield {**row, **_rated(case, timing, rates)}

    def _contenders(self, args: argparse.Namespace, inputs: tuple[Any, ...]) -> Iterator[Contender]:
        """What runs the case: ours, then what anyone would write, then peers."""
        functions = {name: ("ours", function) for name, function in self._ours.items()}
        if not args.no_baselines:
            functions |= {name: ("baseline", run) for name, run in self.case.baselines().items() if self._wants(name)}
        for name, (kind, function) in functions.items():
            if callable(function):
                function = self._compiled(function)  # in turn: XLA times its own choices on the device
            if isinstance(function, str):
                yield Contender(name, kind, function, self._sample)
            else:
                yield Contender(name, kind, functools.partial(function.run, *inputs), function.sample)
        for peer, kind in self._others:
            try:
                launch = peer.launch(self.case, inputs)
            except peers.Unavailable as reason:
                yield Contender(peer.name, kind, str(reason), self._sample)
            else:
                yield Contender(peer.name, kind, launch.call, self._sample, launch.result, peers.wait, peers.flush_l2)

    def _wants(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted

    def _compiled(self, function: Callable[..., Any]) -> "Program | str":
        """The function and the sample of its output compiled for the case's inputs, or why it cannot run."""
        try:
            program = jax.jit(function).lower(*self._shapes).compile()
        except NotImplementedError as error:
            return str(error)
        return Program(program, self._sample.lower(program.out_info, self._shapes).compile())


def _rated(case: Case, timing: Timing, rates: dict[str, float]) -> dict[str, Any]:
    floor = case.floor_us(rates)
    return {
        **{name: round(getattr(timing, name), 2) for name in ("us", "low_us", "high_us")},
        "repeats": timing.repeats,
        "clock": timing.clock,
        "tflops": round(case.flops / timing.us / 1e6, 1),
        "gbytes": round(case.bytes / timing.us / 1e3, 1),
        "floor_us": floor and round(floor, 2),
    }


def line(row: dict[str, Any]) -> str:
    """A row as one line of the table."""
    start = f"{row['case']:32} {row['implementation']:22}"
    if _SKIPPED in row:
        return f"{start} skipped: {row[_SKIPPED]}"
    if _WRONG in row:
        return f"{start} WRONG, not timed: {row[_WRONG]}"
    if "us" not in row:
        return f"{start} right"
    spread = f"[{row['low_us']:.1f} {row['high_us']:.1f}]"
    floor = f"{100 * row['floor_us'] / row['us']:5.0f} % of floor" if row["floor_us"] else f"({row['clock']} clock)"
    return f"{start} {row['us']:10.1f} us {spread:20} {row['tflops']:7.1f} TFLOP/s {row['gbytes']:7.0f} GB/s {floor}"
