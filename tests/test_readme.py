"""Every Python block of the README runs as pasted, in a fresh interpreter at the project's root."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
PRINTED = (
    r"\(64, 8, 64\) \(64, 8\)",
    r"True",
    r"\(1, 57, 256\)",
    r"\[array\(\[.*\], dtype=int32\), array\(\[.*\], dtype=int32\)\]",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "printed"), list(zip(BLOCKS, PRINTED, strict=True)), ids=["jit", "striped", "model", "generate"]
)
def test_readme_block_runs_as_pasted(block, printed):
    command = [sys.executable, "-W", "error", "-c", block]
    # A user's environment: not the eight devices that this suite asks for.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(printed, done.stdout.strip()), done.stdout


def test_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    named = re.findall(r"`((?:dsa_jax|pallas_kernels|tests)/[\w/.]*)`", text) + re.findall(r"\]\(([\w/.]+)\)", text)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
