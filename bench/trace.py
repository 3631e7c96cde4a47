"""A timeline of what ran on the device, for https://ui.perfetto.dev or chrome://tracing: a row a stage."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.timing import Kernel


class Placed(NamedTuple):
    """A kernel's run and where in the model it belongs. layer: None where unknown. place: its name stack."""

    kernel: Kernel
    stage: str
    layer: int | None
    place: str


def write(path: Path, steps: Mapping[str, Sequence[Placed]]) -> None:
    """Every step becomes a process, every stage one of its threads; a step's time begins at 0."""
    events = [event for number, (name, runs) in enumerate(steps.items()) for event in _events(number, name, runs)]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _events(number: int, name: str, runs: Sequence[Placed]) -> list[dict[str, object]]:
    """In the Trace Event Format, whose times are microseconds."""
    stages = list(dict.fromkeys(run.stage for run in runs))
    found: list[dict[str, object]] = [_named("process_name", number, 0, name)]
    found += [_named("thread_name", number, thread, stage) for thread, stage in enumerate(stages)]
    begin = min((run.kernel.begin_ns for run in runs), default=0.0)
    for kernel, stage, layer, place in runs:
        found.append(
            {
                "ph": "X",
                "pid": number,
                "tid": stages.index(stage),
                "name": kernel.name[:80],
                "cat": stage,
                "ts": round((kernel.begin_ns - begin) / 1e3, 3),
                "dur": round((kernel.end_ns - kernel.begin_ns) / 1e3, 3),
                "args": {"layer": layer, "instruction": kernel.hlo, "place": place},
            }
        )
    return found


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
