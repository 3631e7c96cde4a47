"""Options that several programs share."""

import argparse
import contextlib
import fcntl
from collections.abc import Generator
from pathlib import Path


def add_results(parser: argparse.ArgumentParser, *, plot: str | None = None) -> None:
    """--json and --commit, and --plot with what it draws."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw {plot}")
    add_commit(parser)


def add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", help="to record where the code runs outside its repository")


def add_lock(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lock", type=Path, metavar="FILE", help="compile freely, but take turns on the device")


@contextlib.contextmanager
def turn(lock: Path | None, *, alone: bool = True) -> Generator[None]:
    """Waits for the device among the programs that were given the same --lock; None waits for nobody.

    alone: to measure. Otherwise beside others that do not measure either: XLA times its own choices on the device.
    """
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
