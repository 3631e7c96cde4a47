"""Every Python block of the README and of docs/ runs as pasted, in a fresh interpreter at the project's root."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_jax

ROOT = Path(__file__).parent.parent
# What the blocks of a page print, in order.
PRINTED = {
    "README.md": {
        "jit": r"\(64, 8, 64\) \(64, 8\)",
        "striped": r"True",
        "model": r"\(1, 57, 256\)",
        "generate": r"\[array\(\[.*\], dtype=int32\), array\(\[.*\], dtype=int32\)\]",
    },
    "docs/portable.md": {"stored": r"topk_indices \(64, 1, 1\) \(\(64, 2048\), 'int32'\)"},
    "docs/api.md": {"explain": r"hopper hopper is preferred"},
    "docs/porting.md": {"bytes": r"True True"},
    "docs/distributed.md": {"mesh": r"\(1, 40, 256\) \('tp', None\) 2"},
    "docs/serving.md": {"engine": r"96 length True", "speculation": r"True True"},
}


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


BLOCKS = [
    pytest.param(block, printed, id=name)
    for page, prints in PRINTED.items()
    for block, (name, printed) in zip(blocks(page), prints.items(), strict=True)
]


def test_every_page_with_blocks_is_listed():
    pages = {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} | {"README.md"}
    assert {page for page in pages if blocks(page)} == set(PRINTED)


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text("utf-8")
    assert [name for name in dsa_jax.__all__ if not re.search(rf"`{name}\b", text)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("block", "printed"), BLOCKS)
def test_block_runs_as_pasted(block, printed):
    command = [sys.executable, "-W", "error", "-c", block]
    # A user's environment: not the eight devices that this suite asks for. What takes time is compilation.
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(printed, done.stdout.strip()), done.stdout


def test_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    named = re.findall(r"`((?:dsa_jax|pallas_kernels|tests)/[\w/.]*)`", text) + re.findall(r"\]\(([\w/.]+)\)", text)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
