"""Compare two result files of a program, shape by shape; fail where the second is slower."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import record
from bench.shapes import geometric_mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument(
        "--threshold",
        type=float,
        default=10.0,
        metavar="PERCENT",
        help="slower by more than this, and outside both spreads, is a regression (default: 10)",
    )
    parser.add_argument("--all", action="store_true", help="hold baselines and peers to it too, not ours alone")


def run(args: argparse.Namespace) -> int:
    if not args.threshold > 0:
        raise ValueError(f"--threshold must be a positive percentage, got {args.threshold}")
    before, after = record.read(args.before), record.read(args.after)
    for field in ("program", "device"):
        if before.get(field) != after.get(field):
            raise ValueError(f"both files must have the same {field}, got {before.get(field)} and {after.get(field)}")
    print(f"{before['program']} on {before['device']}: commit {before['commit']}, then {after['commit']}")
    found = list(compare(before["rows"], after["rows"], threshold=args.threshold / 100, everything=args.all))
    for pair in found:
        print(f"{pair.name:60} {pair.verdict}")
    failed = sum(pair.failed for pair in found)
    mean = geometric_mean([pair.ratio for pair in found if pair.ratio])
    print(f"time after / before: geometric mean {mean:.3f}; {failed} of {len(found)} fail at {args.threshold:g} %")
    return 1 if failed else 0


class Pair(NamedTuple):
    """A row of the first file and what became of it. ratio: time after over time before, None where there is none."""

    name: str
    verdict: str
    failed: bool
    ratio: float | None


def compare(
    before: list[dict[str, Any]], after: list[dict[str, Any]], *, threshold: float, everything: bool
) -> Iterator[Pair]:
    """Every row of `before` that has a time; a row that lost its time has failed.

    threshold: a fraction. A row fails where its median grew by more and the quartiles of both runs lie apart.
    everything: also rows that are not ours.
    """
    later = {_key(row): row for row in after}
    for row in before:
        if "us" not in row or not (everything or row.get("kind", "ours") == "ours"):
            continue
        name, found = " ".join(_key(row)), later.get(_key(row), {"skipped": "not in the second file"})
        if "us" not in found:
            yield Pair(name, f"no time: {found.get('WRONG') or found.get('skipped')}", True, None)
            continue
        ratio = found["us"] / row["us"]
        apart = found.get("low_us", found["us"]) > row.get("high_us", row["us"])
        failed = ratio > 1 + threshold and apart
        verdict = f"{row['us']:10.1f} us {found['us']:10.1f} us  {ratio:6.3f}{'  SLOWER' * failed}"
        yield Pair(name, verdict, failed, ratio)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["op"], row["case"], row["implementation"]
