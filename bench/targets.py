"""Compile every kernel and config for every GPU architecture, without the GPUs, and write docs/targets.md."""

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gate.judge import complaints
from bench.gate.report import render
from bench.gate.worker import CHECKS, name

_ROOT = Path(__file__).parents[1]
_WORKER = (sys.executable, "-m", "bench.gate.worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", action="append", help="only this architecture (repeatable): sm_90, gfx942, ...")
    parser.add_argument("--check", action="append", choices=CHECKS, help="only this check (repeatable)")
    parser.add_argument("--match", default="", help="only programs whose name holds this: hopper, sparse_mla portable")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds one program may take to compile")
    parser.add_argument("--output", type=Path, default=_ROOT / "docs" / "targets.md", help="the table to write")
    parser.add_argument("--json", type=Path, default=_ROOT / "bench" / "results" / "targets.json", help="its numbers")


def run(args: argparse.Namespace) -> int:
    """0 if all that could be checked holds, 1 if something does not."""
    from bench.gate.cases import ARCHS

    unknown = set(args.arch or ()) - set(ARCHS)
    if unknown:
        raise ValueError(f"--arch must be one of {', '.join(ARCHS)}, got {', '.join(sorted(unknown))}")
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    failed = False
    for arch in args.arch or ARCHS:
        for check in args.check or CHECKS:
            reason = skipped(check, arch)
            if reason:
                print(f"{arch} {check}: skipped, {reason}")
                continue
            programs = check_target(check, arch, args.limit, _tell, match=args.match)
            failed |= any(program["complaints"] for program in programs)
            if args.match:
                programs = _merged(results.get(arch, {}).get(check, {}).get("programs", []), programs)
            results.setdefault(arch, {})[check] = dict(compiler=_compiler(check), programs=programs)
            _write(args, results)
    return int(failed)


def skipped(check: str, arch: str) -> str | None:
    """Why a check does not run here, or None."""
    if check == "wheel":
        return None if importlib.util.find_spec("triton") else "the triton package is not installed"
    if arch.startswith("gfx"):
        return "XLA's ROCm compiler wants a device"
    from bench.gate import xla

    return xla.missing()


def check_target(
    check: str,
    arch: str,
    limit: float,
    tell: Callable[[str], None],
    *,
    match: str = "",
    worker: Sequence[str] = _WORKER,
) -> list[dict[str, Any]]:
    """Compiles all of a target's programs in a process of its own, a new one after each that ends it.

    limit: seconds a program may take.
    tell: called with a line for each.
    Returns the programs as the worker tells of them, with their `kernels`, or a `failure`, and the `complaints`.
    """
    programs: list[dict[str, Any]] = []

    def report(program: dict[str, Any]) -> None:
        programs.append(program)
        verdict = "; ".join(program["complaints"]) or "ok"
        tell(f"{arch} {check} {name(program['op'], program['implementation'], program['calls'])}: {verdict}")

    while not _resume((*worker, check, arch, match), arch, limit, programs, report):
        pass
    return programs


def _resume(
    worker: Sequence[str], arch: str, limit: float, programs: list[dict[str, Any]], report: Callable[[dict], None]
) -> bool:
    """One worker, from the first program that is not in `programs`. Returns whether it came to the end."""
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/errors", "w+") as errors:
        command = [*worker, f"{folder}/kept", str(len(programs))]
        current, begin = None, time.monotonic()
        with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            watch = _Watch(limit, process.kill)
            for line in process.stdout:
                told = json.loads(line)
                if "op" in told:
                    current, begin = told, watch.restart()
                    continue
                assert current is not None, "a program is named before its result"
                report(_judged(arch, current | told, time.monotonic() - begin))
                current = None
            watch.stop()
        if process.returncode == 0:
            return True
        errors.seek(0)
        last = errors.read().strip()[-400:]
    if current is None:  # it never got as far as a program
        raise RuntimeError(f"{' '.join(command)} failed: {last}")
    seconds = time.monotonic() - begin
    failure = f"took more than {limit:.0f} s" if seconds >= limit else f"ended the compiler: {last}"
    report(_judged(arch, current | dict(failure=failure), seconds))
    return False


class _Watch:
    """Calls `kill` when `limit` seconds have gone by since the last `restart`."""

    def __init__(self, limit: float, kill: Callable[[], None]):
        self._limit, self._kill = limit, kill
        self.restart()

    def restart(self) -> float:
        self.stop()
        self._timer = threading.Timer(self._limit, self._kill)
        self._timer.daemon = True
        self._timer.start()
        return time.monotonic()

    def stop(self) -> None:
        if hasattr(self, "_timer"):
            self._timer.cancel()


def _judged(arch: str, program: dict[str, Any], seconds: float) -> dict[str, Any]:
    found = [program["failure"]] if "failure" in program else []
    for kernel in program.get("kernels", []):
        found += [f"{kernel['kernel']}: {what}" for what in complaints(arch, program, kernel)]
    return program | dict(seconds=round(seconds, 1), complaints=found)


def _merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old programs with the new ones in their places or at the end."""
    keyed = {name(p["op"], p["implementation"], p["calls"]) + str(p["config"]): p for p in (*old, *new)}
    return list(keyed.values())


def _tell(line: str) -> None:
    print(line, flush=True)


def _compiler(check: str) -> str:
    import jax

    if check == "xla":
        return f"XLA of jax {jax.__version__}, Python {platform.python_version()}"
    from importlib.metadata import version

    return f"Triton {version('triton')}, kernels lowered by jax {jax.__version__}"


def _write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    args.output.write_text(render(results))
