"""Compiling many programs before any of them is timed."""

import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax

Key = TypeVar("Key")


def compiled(
    programs: Mapping[Key, jax.stages.Lowered], options: dict[str, Any] | None = None
) -> dict[Key, jax.stages.Compiled]:
    """All of them, side by side; says on stderr how long that took. options: of XLA's compiler."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        done = dict(zip(programs, pool.map(lambda program: program.compile(options), programs.values()), strict=True))
    print(f"{len(done)} programs compiled in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return done
