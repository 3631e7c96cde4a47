"""Results as JSON: what was measured, on what, with which versions, at which commit and when."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

_ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "flax",
    "torch",
    "triton",
    "deep-gemm",
    "sgl-deep-gemm",
    "flash-mla",
    "flashinfer-python",
    "vllm",
    "tilelang",
)


def header(commit: str | None = None) -> dict[str, Any]:
    """The device, the versions of everything installed that matters, the commit and the time.

    commit: to state where the code runs outside its repository; None asks git, and is "unknown" where that fails.
    """
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(path: Path, program: str, rows: list[dict[str, Any]], *, commit: str | None = None, **extra: Any) -> None:
    """Writes {"program", header, extra, "rows"}, one row a line."""
    head = json.dumps({"program": program, **header(commit), **extra}, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A file that `write` wrote. Raises ValueError where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise ValueError(f"{path} must be a file that a bench program wrote, with device and rows")
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """HEAD, with "+" where tracked files have changed."""
    try:
        head, changes = (
            subprocess.run(["git", *command], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + "+" * bool(changes)
