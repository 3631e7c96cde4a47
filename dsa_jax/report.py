"""What the commands print: tables of checks, explanations and the demo."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsa_jax.cache_error import CacheError
from dsa_jax.calls import Call
from dsa_jax.demo import Demo
from dsa_jax.dispatch import Explanation
from dsa_jax.verify import HIDDEN, TIE, Report

WIDTH = 120  # where standard output is no terminal


def console() -> Console:
    out = Console()
    return out if out.is_terminal else Console(width=WIDTH)


def print_check(report: Report, out: Console | None = None) -> None:
    """A row a layer, then the verdict."""
    out = out or console()
    stripes = f", striped over {report.num_devices} devices" if report.num_devices > 1 else ""
    table = Table(title=f"{report.num_tokens} tokens, float32{stripes}")
    for column in ("layer", "indexer"):
        table.add_column(column)
    striped = any(layer.striped_equal is not None for layer in report.layers)
    for column in (
        "end to end:\nlargest difference",
        "same input:\nlargest difference",
        "relative",
        "rows that keep\nother keys",
        "of these\nnear-ties",
        *(["striped =\nnot striped"] if striped else []),
    ):
        table.add_column(column, justify="right")
    for layer in report.layers:
        end_to_end = "-" if layer.end_to_end is None else f"{layer.end_to_end:.1e}"
        numbers = f"{layer.absolute:.1e}", f"{layer.relative:.1e}", str(layer.rows_differ), str(layer.near_ties)
        same = [{None: "-", True: "same bits", False: "DIFFERS"}[layer.striped_equal]] if striped else []
        style = None if layer.ok else "bold red"
        table.add_row(layer.name, layer.indexer, end_to_end, *numbers, *same, style=style)
    out.print(table)
    judged = "" if report.same_keys else " (near-ties took other keys, so it is not judged)"
    out.print(f"logits, largest relative difference from the reference: {report.logits:.1e}{judged}")
    if report.cached is not None:
        out.print(f"prefill and decode over paged caches against the whole sequence: {report.cached:.1e}")
    out.print(f"tolerances, relative to the greatest magnitude: {HIDDEN:.0e}; a near-tie: {TIE:.0e}")
    out.print("[green]in tolerance[/]" if report.ok else "[bold red]OUT OF TOLERANCE[/]")


def print_cache_errors(errors: Sequence[CacheError], title: str, out: Console | None = None) -> None:
    """A row a layer."""
    out, table = out or console(), Table()
    for column in ("layer", "hidden state's\nmedian error", "same keys\nselected"):
        table.add_column(column, justify="right")
    for error in errors:
        kept = "-" if error.kept is None else f"{100 * error.kept:.1f} %"
        table.add_row(str(error.layer), f"{error.hidden:.1e}", kept)
    out.print(title)
    out.print(table)


def print_explanations(title: str, rows: Sequence[tuple[Call, Explanation]], out: Console | None = None) -> None:
    """A row an op: what runs, and why the others do not."""
    out = out or console()
    target = rows[0][1].target
    table = Table(title=f"{title} on {target.name} ({target.arch})", show_lines=True)
    for column in ("op", "stage", "runs", "why not the others"):
        table.add_column(column, overflow="fold")
    for call, explanation in rows:
        config = "" if explanation.config is None else f"\n{explanation.config}"
        reasons = "\n".join(f"{name}: {reason}" for name, reason in explanation.refusals.items())
        if explanation.parts:
            reasons = "made of " + ", ".join(f"{part.op} ({part.implementation})" for part in explanation.parts)
        table.add_row(call.op, call.stage, escape(f"{explanation.implementation}{config}"), escape(reasons))
    out.print(table)


def print_demo(demo: Demo, out: Console | None = None) -> None:
    """The demo's report."""
    out = out or console()
    whole, beginning = demo.num_tokens
    out.print(f"prefilled {whole} and {beginning} tokens of {demo.text} on {demo.num_devices} virtual CPU devices")
    out.print(f"generated, from random weights: {demo.produced!r}", markup=False, highlight=False)
    print_check(demo.check, out)
    judged = "" if demo.same_rows == demo.rows else " (not judged: a near-tie took other keys)"
    out.print(
        f"chunked, striped and cached: {demo.same_rows} of {demo.rows} selections are the reference's, bit for bit;\n"
        f"decoded logits, largest relative difference from it: {demo.decoded:.1e}{judged}"
    )
    out.print("what ran: " + ", ".join(f"{e.op}: {e.implementation}" for e in demo.explanations))
    sizes = ", ".join(f"{size} B in {dtype}" for dtype, size in demo.bytes_per_token.items())
    out.print(f"cache a token, all layers: {sizes}")
    table = Table(title="seconds, compilation included")
    table.add_column("stage")
    table.add_column("s", justify="right")
    for stage, seconds in demo.seconds.items():
        table.add_row(stage, f"{seconds:.1f}")
    table.add_row("all", f"{sum(demo.seconds.values()):.1f}", style="bold")
    out.print(table)
    out.print(f"wrote {demo.picture}")
