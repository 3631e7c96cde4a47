"""Compiling many programs before any of them is timed."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax

Key = TypeVar("Key")


def compiled(
    programs: Mapping[Key, jax.stages.Lowered],
    options: Mapping[Key, dict[str, Any]] | None = None,
    *,
    failed: Callable[[Key, Exception], None] | None = None,
) -> dict[Key, jax.stages.Compiled]:
    """All of them, side by side; says on stderr how long that took.

    options: of XLA's compiler, for those that have some.
    failed: is told of a program that does not compile, which is then left out; None to raise.
    """
    begin, done = time.perf_counter(), {}
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        pending = {key: pool.submit(program.compile, (options or {}).get(key)) for key, program in programs.items()}
        for key, future in pending.items():
            try:
                done[key] = future.result()
            except Exception as error:
                if failed is None:
                    raise
                failed(key, error)
    print(f"{len(done)} programs compiled in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return done
