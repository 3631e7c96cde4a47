"""Draw the plots and write the tables of docs/performance.md from bench/results/."""

import argparse
import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import plots, record
from bench.plots import STAGES

_DOCS = record.RESULTS.parents[1] / "docs"
_BEGIN, _END = "<!-- results: {} -->", "<!-- end of results -->"
_OURS = ("hopper", "portable", "xla")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="DIR", help="default: bench/results")
    parser.add_argument("--docs", type=Path, default=_DOCS, metavar="DIR", help="default: docs")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the tables are not the results'"
    )


def run(args: argparse.Namespace) -> int:
    page = args.docs / "performance.md"
    before = after = page.read_text(encoding="utf-8")
    for file in sorted(args.results.glob("*.json")):
        begin = _BEGIN.format(file.stem)
        if begin not in after:  # other programs' files have pages of their own
            continue
        result = record.read(file)
        body = f"{_source(result)}\n\n{_table_of(result['program'])(result)}"
        if draw := _draw_of(result["program"]):
            body += f"\n\n![{file.stem}](plots/{file.stem}.svg)"
            if not args.check:
                draw(args.docs / "plots" / f"{file.stem}.svg", result)
        after = _put(after, begin, body)
    if args.check:
        print("the tables are the results'" if after == before else "the tables differ: run `python -m bench report`")
        return int(after != before)
    page.write_text(after, encoding="utf-8")
    return 0


def _put(text: str, begin: str, body: str) -> str:
    """text with body between the marks."""
    pattern = re.escape(begin) + r"\n.*?" + re.escape(_END)
    found, count = re.subn(pattern, lambda _: f"{begin}\n{body}\n{_END}", text, count=1, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{begin} must be followed by {_END}, and is not")
    return found


def _source(result: dict[str, Any]) -> str:
    """What was measured on what, in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name in _QUOTED)
    rates = result.get("rates") or {}
    measured = "; ".join(f"{name} {rate / 1e12:.{1 if name == 'copy' else 0}f} T/s" for name, rate in rates.items())
    ending = f" In the same run: {measured}." if measured else ""
    stack = f" {result['stack']}." if "stack" in result else ""
    return f"{result['device']}, commit {result['commit']}, {result['date'][:10]}, {versions}.{stack}{ending}"


_QUOTED = ("jax", "torch", "sgl-deep-gemm", "flash-mla", "flashinfer-python", "vllm")


def _table_of(program: str) -> Callable[[dict[str, Any]], str]:
    """How a program's results are written: as an op's, as layers', or by the program's own `table(result)`."""
    if (module := _module_of(program)) == "op":
        return op_table
    return layer_table if module == "layer" else importlib.import_module(f"bench.{module}").table


def _draw_of(program: str) -> Callable[[Path, dict[str, Any]], None] | None:
    """What draws a program's results into a file, None where a table is all there is."""
    if (module := _module_of(program)) == "op":
        return lambda path, result: plots.draw_bars(path, f"{program} on {result['device']}", result["rows"])
    if module == "layer":
        return lambda path, result: plots.draw_stages(path, f"{result['stack']} on {result['device']}", result["rows"])
    return None


def _module_of(program: str) -> str:
    from bench.__main__ import _MODULES

    return _MODULES.get(program, program)


def op_table(result: dict[str, Any]) -> str:
    """A row a shape: our fastest, how near it is to the floor, and everything else beside it."""
    rows = [row for row in result["rows"] if "us" in row]
    others = list(dict.fromkeys(row["implementation"] for row in rows if row["implementation"] not in _OURS))
    head = ["shape", "ours", "us", "quartiles", "TFLOP/s", "GB/s", "of the floor"]
    body = []
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["implementation"]: row for row in rows if row["case"] == case}
        ours = [found[name] for name in _OURS if name in found]
        if not ours:
            continue
        best = min(ours, key=lambda row: row["us"])
        floor = f"{100 * best['floor_us'] / best['us']:.0f} %" if best.get("floor_us") else ""
        spread = f"{_number(best['low_us'])} to {_number(best['high_us'])}"
        rate = f"{best['tflops']:.0f}" if best["tflops"] >= 1 else ""
        cells = [case, best["implementation"], _number(best["us"]), spread, rate, f"{best['gbytes']:.0f}", floor]
        for name in others:
            cells.append(
                f"{_number(found[name]['us'])} ({found[name]['us'] / best['us']:.2f}x)" if name in found else ""
            )
        body.append(cells)
    return markdown([*head, *others], body)


def layer_table(result: dict[str, Any]) -> str:
    """A row a step: milliseconds, by stage, memory, and the whole model's tokens a second."""
    rows = result["rows"]
    found = {stage for row in rows for stage in row["stages"]}
    stages = [stage for stage in STAGES if stage in found] + sorted(found - set(STAGES))
    head = ["step", "ms", "kernels, ms", *stages, "layers, ms", "temporary, GB", "tokens/s", "by kernels alone"]
    body = [
        [
            row["case"],
            f"{row['us'] / 1e3:.2f}",
            f"{row['busy_us'] / 1e3:.2f}",
            *(f"{row['stages'][stage] / 1e3:.2f}" if stage in row["stages"] else "" for stage in stages),
            " + ".join(f"{us / 1e3:.2f}" for us in row["layers_us"]),
            f"{row['temporary_gb']:.2f}",
            *_rates(row),
        ]
        for row in rows
    ]
    return markdown(head, body)


def _rates(row: dict[str, Any]) -> tuple[str, str]:
    """Tokens a second of the whole model: by the step's time, and if nothing passed between its kernels."""
    rate = row["model_tokens_per_s"]
    return (f"{rate:.0f}", f"{rate * row['us'] / row['busy_us']:.0f}") if rate else ("", "")


def markdown(head: list[str], body: Iterable[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _number(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
