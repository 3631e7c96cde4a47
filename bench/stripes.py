"""The striped split: predicted work, bytes and speed-up for many lengths and ranks; --measure times each rank's share.

Without --measure nothing is run: `dsa_jax.stripe_cost` predicts. With it one GPU does the work of every rank in turn,
without the exchange, for stripes, folded stripes and the contiguous split, beside the unsplit run; the times go to a
JSON file, and the rates that fit them are printed.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from bench.compiling import compiled
from bench.options import add_commit
from bench.report import markdown
from dsa_jax import stripe_cost
from dsa_jax.striped import stripe_rows
from dsa_jax.topk import select_topk

LENGTHS = tuple(1 << power for power in range(13, 21))  # 8K to 1M tokens
RANKS = (2, 4, 8, 16, 32, 64)
MEASURED = (8192, 51200, 131072)
INDEXER = stripe_cost.Indexer()
# stripe, whether folded; None stands for what stripe_cost.best_stripe says, 0 for one run a rank.
LAYOUTS = {
    "contiguous": (0, False),
    "512": (512, False),
    "1024": (1024, False),
    "512 folded": (512, True),
    "best": (None, True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", metavar="M", help="prompt lengths (default: 8K to 1M)")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="default: 2 to 64; with --measure: 8")
    parser.add_argument("--combine", choices=("max", "all_gather"), default="all_gather", help="default: all_gather")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw imbalance and speed-up to this PNG")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="time each rank's share here, and write this JSON")
    add_commit(parser)


def run(args: argparse.Namespace) -> int:
    for name, values in (("--lengths", args.lengths or ()), ("--ranks", args.ranks or ())):
        for value in values:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
    if args.measure:
        rows = []
        for measured in measure(tuple(args.lengths or MEASURED), (args.ranks or [8])[0]):
            rows += measured
            record.write(args.measure, "stripes", rows, commit=args.commit, indexer=vars(INDEXER))
        print(stripe_cost.fit_rates(fit_cases(rows), INDEXER))
        return 0
    lengths, ranks = tuple(args.lengths or LENGTHS), tuple(args.ranks or RANKS)
    print_predictions(lengths, ranks, args.combine)
    if args.plot:
        print(f"wrote {draw(args.plot, lengths, ranks, args.combine)}")
    return 0


def layout(name: str, rows: int, ranks: int) -> dict[str, Any]:
    """stripe and fold of a layout."""
    stripe, fold = LAYOUTS[name]
    if stripe == 0:
        return dict(stripe=-(-rows // ranks), fold=fold)
    return dict(stripe=stripe_cost.best_stripe(rows, ranks) if stripe is None else stripe, fold=fold)


def prediction(name: str, rows: int, ranks: int, combine: Any) -> stripe_cost.Prediction:
    """Of a causal prompt of `rows` tokens."""
    visible = stripe_cost.causal(rows, rows)
    return stripe_cost.predict(visible, rows, ranks, combine=combine, indexer=INDEXER, **layout(name, rows, ranks))


def print_predictions(lengths: tuple[int, ...], ranks: tuple[int, ...], combine: str) -> None:
    from rich.console import Console
    from rich.table import Table

    indexer = f"{INDEXER.heads} heads of {INDEXER.dim}, top-{INDEXER.topk}, {INDEXER.keys} keys"
    table = Table(title=f"one causal prompt, {indexer}, {combine}; most / mean pairs of a rank, and speed-up")
    for heading in ("tokens", "ranks", "sent, MB", "exchange, us", "all rows, us"):
        table.add_column(heading, justify="right")
    for name in LAYOUTS:
        table.add_column(f"{name}", justify="right")
    for rows in lengths:
        for count in ranks:
            cases = [prediction(name, rows, count, combine) for name in LAYOUTS]
            cells = [f"{case.imbalance:.2f}  {case.speed_up:5.2f}x" for case in cases]
            shared = (
                f"{cases[0].exchanged / 1e6:.1f}",
                f"{1e6 * cases[0].exchange:.0f}",
                f"{1e6 * cases[0].replicated:.0f}",
            )
            table.add_row(str(rows), str(count), *shared, *cells)
    Console(width=160).print(table)


def draw(file: Path, lengths: tuple[int, ...], ranks: tuple[int, ...], combine: str) -> Path:
    """Speed-up against length for every number of ranks, in stripes and in one run a rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    colours = pyplot.get_cmap("viridis")(np.linspace(0, 0.9, len(ranks)))
    for count, colour in zip(ranks, colours, strict=True):
        for name, style in (("best", "-"), ("contiguous", ":")):
            cases = [prediction(name, rows, count, combine) for rows in lengths]
            label = f"{count} ranks" if name == "best" else None
            left.plot(lengths, [case.imbalance for case in cases], style, color=colour, label=label)
            right.plot(lengths, [case.speed_up for case in cases], style, color=colour, label=label)
    left.set_ylabel("most pairs of a rank / mean")
    right.set_ylabel("speed-up of selection, exchange included")
    right.set_yscale("log", base=2)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{rows // 1024}K" for rows in lengths])
        axes.set_xlabel("tokens of the prompt")
        axes.grid(alpha=0.3)
    right.legend(title="folded stripes; dotted: one run a rank", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file


def measure(lengths: tuple[int, ...], ranks: int) -> Iterator[list[dict[str, Any]]]:
    """For every length one row a layout and rank, and one for the unsplit run: rows, pairs and microseconds."""
    shares = {length: shares_of(length, ranks) for length in lengths}
    lowered = {
        (length, len(own)): jax.jit(own_selection).lower(
            jax.eval_shape(functools.partial(prompt, length)), jax.ShapeDtypeStruct(own.shape, own.dtype)
        )
        for length in lengths
        for own in shares[length].values()
    }
    programs = compiled(lowered)
    for length in lengths:
        inputs, rows = prompt(length), []
        for (name, rank), own in shares[length].items():
            us = round(1e6 * burst(programs[length, len(own)], inputs, jnp.asarray(own)), 1)
            entry = dict(op="select_topk", case=f"{length} {name} rank {rank}", implementation="best", us=us)
            pairs = int((own[own >= 0] + 1).astype(np.int64).sum())
            rows.append(entry | dict(length=length, layout=name, rank=rank, rows=int((own >= 0).sum()), pairs=pairs))
        print_measured(rows, ranks)
        yield rows


def shares_of(length: int, ranks: int) -> dict[tuple[str, int], np.ndarray]:
    """The rows of each (layout, rank), and of nobody's: ("unsplit", 0)."""
    shares = {("unsplit", 0): np.arange(length, dtype=np.int32)}
    for name in LAYOUTS:
        for rank in range(ranks):
            shares[name, rank] = np.asarray(stripe_rows(length, ranks, rank=rank, **layout(name, length, ranks)))
    return shares


def print_measured(rows: list[dict[str, Any]], ranks: int) -> None:
    for length in sorted({row["length"] for row in rows}):
        times = {
            n: [r["us"] for r in rows if r["length"] == length and r["layout"] == n] for n in ("unsplit", *LAYOUTS)
        }
        print(f"{length} tokens, unsplit {times['unsplit'][0]:.0f} us, {ranks} ranks in turn:")
        for name in LAYOUTS:
            us = np.array(times[name])
            print(
                f"  {name:12} most {us.max():8.0f} us, mean {us.mean():8.0f} us, most / mean "
                f"{us.max() / us.mean():.3f}, unsplit / most {times['unsplit'][0] / us.max():.2f}",
                flush=True,
            )


def table(result: dict[str, Any]) -> str:
    """A row a length and layout: the slowest rank's time against the mean and against the unsplit run."""
    body = []
    for length in dict.fromkeys(row["length"] for row in result["rows"]):
        own = [row for row in result["rows"] if row["length"] == length]
        (unsplit,) = [row["us"] for row in own if row["layout"] == "unsplit"]
        for name in dict.fromkeys(row["layout"] for row in own if row["layout"] != "unsplit"):
            times = [row["us"] for row in own if row["layout"] == name]
            most, mean = max(times), sum(times) / len(times)
            numbers = f"{unsplit / 1e3:.2f}", f"{most / 1e3:.3f}", f"{mean / 1e3:.3f}"
            label = {"contiguous": "one run a rank", "best": "folded, an even number of rounds"}.get(name, name)
            body.append([f"{length:,}", label, *numbers, f"{most / mean:.3f}", f"{unsplit / most:.2f}x"])
    return markdown(["tokens", "stripes", "unsplit, ms", "most, ms", "mean, ms", "most / mean", "unsplit / most"], body)


def fit_cases(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(rows=r["rows"], pairs=r["pairs"], seconds=r["us"] / 1e6) for r in rows]


def prompt(length: int, starts: np.ndarray | None = None) -> tuple[jax.Array, ...]:
    """Arguments of select_topk for a prompt, or for packed requests whose rows begin at `starts`: e4m3 with scales."""

    @jax.jit
    def make() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(length), 3)
        q = jax.random.normal(keys[0], (length, INDEXER.heads, INDEXER.dim), jnp.bfloat16).astype(jnp.float8_e4m3fn)
        k = jax.random.normal(keys[1], (length, INDEXER.dim)).astype(jnp.float8_e4m3fn)
        weights = jax.random.normal(keys[2], (length, INDEXER.heads))
        return q, k, weights, jnp.linspace(0.5, 2.0, length)

    q, k, weights, k_scale = make()
    first = np.zeros(length, np.int32) if starts is None else starts.astype(np.int32)
    return q, k, weights, jnp.asarray(first), jnp.arange(1, length + 1, dtype=jnp.int32), k_scale


def own_selection(inputs: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
    """What a rank that has `rows` selects before the exchange."""
    q, k, weights, starts, ends, k_scale = inputs
    own = [x.at[jnp.maximum(rows, 0)].get(mode="promise_in_bounds") for x in (q, weights, starts, ends)]
    ends = jnp.where(rows < 0, 0, own[3])
    return select_topk(own[0], k, own[1], own[2], ends, INDEXER.topk, k_scale=k_scale)


def burst(program: Callable, *arguments: Any, count: int = 0, repeats: int = 3) -> float:
    """Seconds of a call: the best of `repeats` bursts, each of `count` calls, by default for about 20 ms."""

    in_turn = jax.default_backend() == "cpu"  # where calls in flight take the threads that a collective waits for

    def once(count: int) -> float:
        out, begin = None, time.perf_counter()
        for _ in range(count):
            out = program(*arguments)
            if in_turn:
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / count

    jax.block_until_ready(program(*arguments))
    count = count or max(2, min(50, round(0.02 / once(1))))
    return min(once(count) for _ in range(repeats))
