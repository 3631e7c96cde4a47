"""Which config a kernel runs with: a table measured on the device where there is one, else a heuristic.

A kernel's config is a frozen dataclass of its own. `tuned/<device>.json` holds, per kernel, a list of entries

    {"where": {"n": [65537, 2097152], "kv": "bfloat16"}, "config": {"stages": 3}}

An entry fits a call when every number it names lies in its inclusive range and every name (a dtype's, say) is the same;
the first that fits replaces the named fields of the heuristic config. Where the heuristic won, "config" is empty. What
else an entry holds says how it was measured, and is not read. Tables change speed alone, never results.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from pallas_kernels.target import Target

Config = TypeVar("Config")

_FOLDER = pathlib.Path(__file__).parent / "tuned"
_trial: contextvars.ContextVar["Trial | None"] = contextvars.ContextVar("trial", default=None)


def tuned(kernel: str, target: Target, heuristic: Config, **call: int | str) -> Config:
    """The config to run `kernel` with.

    kernel: its name in the tables, e.g. "topk.hopper".
    heuristic: the config where no table entry fits.
    call: what entries choose by: lengths and names, e.g. m=4096, n=65536, kv="bfloat16".
    """
    if (trial := _trial.get()) is not None:
        trial.asked[kernel] = Asked(heuristic, call)
        return _replace(heuristic, trial.fields.get(kernel, {}))
    for entry in table(target.name).get(kernel, []):
        if all(_fits(call[name], wanted) for name, wanted in entry["where"].items()):
            return _replace(heuristic, entry["config"])
    return heuristic


class Asked(NamedTuple):
    """What a kernel asked its config for, and what it would have taken without a table."""

    heuristic: Any
    call: dict[str, int | str]


@dataclasses.dataclass
class Trial:
    """What is being tried: the fields to set, by kernel, and what every kernel asked meanwhile."""

    fields: dict[str, dict[str, Any]]
    asked: dict[str, Asked] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def trying(fields: dict[str, dict[str, Any]]) -> Generator[Trial, None, None]:
    """For measuring: kernels traced inside take their heuristic config with these fields, and look at no table."""
    trial = Trial(fields)
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        _trial.reset(token)


def table_path(device: str) -> pathlib.Path:
    """Where a device's entries are: "NVIDIA H200" is nvidia_h200.json."""
    return _FOLDER / (re.sub(r"[^a-z0-9]+", "_", device.lower()) + ".json")


@functools.cache
def table(device: str) -> dict[str, Any]:
    """The measured entries of a device by kernel name, {} where there are none."""
    path = table_path(device)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _replace(config: Any, fields: dict[str, Any]) -> Any:
    return dataclasses.replace(config, **fields)


def _fits(value: int | str, wanted: str | list[int]) -> bool:
    if isinstance(value, str):
        return value == wanted
    low, high = wanted
    return int(low) <= value <= int(high)
